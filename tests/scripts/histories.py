"""Many fits in one script, whose ranks come late and have process groups of their own, each other ones.

Run by hand::

    OMP_NUM_THREADS=1 python tests/scripts/histories.py '{"fits": [2, 4, 3, 1, 2], "times": 10, "delay": 0.5}'
"""

from __future__ import annotations

import gc
import os
import random
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import OPTIONS, Net, digest, loaders, omni, pl, report, trainer
from devices import own_device

RANK = int(os.environ.get("LOCAL_RANK", 0))
DEVICES = 4
FITS = OPTIONS["fits"] * OPTIONS.get("times", 1)


def remake(own: list[Any], rng: random.Random) -> None:
    """A user's own groups: some ranks have many, some have ended some."""
    while own and rng.random() < 0.5:
        dist.destroy_process_group(own.pop(rng.randrange(len(own))))
    own += [dist.new_group([RANK]) for _ in range(rng.randrange(3))]


def start_over(port: int) -> None:
    """Ends torch.distributed; the next fit begins it again."""
    gc.collect()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)  # of rank 0's old one, another process may be the new owner


def main() -> None:
    rng = random.Random(f"rank {RANK}")  # another for each rank
    own: list[Any] = []
    seen = []
    for number, groups in enumerate(FITS):
        pl.seed_everything(number, verbose=False)
        time.sleep(rng.random() * OPTIONS["delay"])
        module = Net(norm=False)
        limit = timedelta(seconds=OPTIONS.get("timeout", 60))
        strategy = omni.OmniStrategy(groups=groups, data="static", timeout=limit)
        fit = trainer(strategy, DEVICES, max_steps=2)
        fit.fit(module, loaders(64)[0])
        total = torch.ones((), device=own_device())
        dist.all_reduce(total)
        assert total == DEVICES, "the default process group is that of all ranks again"
        seen.append(digest(module))
        if number == OPTIONS.get("destroy_after"):
            own.clear()
            del strategy, fit, module
            start_over(OPTIONS["port"])
        elif number < len(FITS) - 1:  # rank 0 may end after the last one, and the store with it
            remake(own, rng)
    report(RANK, {"weights": seen, "process_groups": len(dist.distributed_c10d._world.pg_names) - len(own)})


if __name__ == "__main__":
    main()
