"""Trains four groups with two aggregators before the server, one of which dies."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lightning_omni import OmniOptimizer, World
from lightning_omni.cli.serve import serve
from lightning_omni.optimizer.options import WorldOptions
from lightning_omni.protocol.requests import ByAggregator

RANKS = 4
FOLDER = Path(os.environ["OMNI_TEST_FOLDER"])


def train(method: str, server: str, wire: Any = "fp32", steps: int = 12, dies: int = 0) -> dict[str, Any]:
    model, batches = new_model(), torch.Generator().manual_seed(int(os.environ["RANK"]))
    options = WorldOptions(groups=RANKS, method=method, server=server, wire=wire)
    world = World(RANKS, options=options)
    world.broadcast_initial(model)
    stepped = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), world)
    by_aggregator = []
    with world.training():
        for step in range(steps):
            if dies and step == steps // 2 and world.rank == 0:
                os.kill(dies, signal.SIGKILL)
            stepped.zero_grad()
            loss = loss_of(model, batches)
            loss.backward()
            stepped.step()
            requests = world.channel._requests
            assert requests is not None
            data = requests.coordinator
            by_aggregator.append(isinstance(data, ByAggregator) and data._aggregator is not None)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"weights": flat.tolist(), "by_aggregator": by_aggregator, "loss": loss.item()}


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))


def loss_of(model: torch.nn.Module, batches: torch.Generator) -> torch.Tensor:
    x = torch.randn(32, 40, generator=batches)
    return (model(x) - x[:, :3]).square().mean()


def synchronous(steps: int = 12) -> list[float]:
    """The weights of one process that takes the batches of all ranks at once."""
    model, batches = new_model(), [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, each) / RANKS for each in batches).backward()  # type: ignore[union-attr]
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def served(**options: Any) -> tuple[int, str]:
    """Starts ``lightning-omni serve``. Returns its process and its address."""
    ours, theirs = os.pipe()
    if (process := os.fork()) == 0:
        os.dup2(theirs, 2)
        end(lambda: serve(port=0, key_file=FOLDER / "key", **options))
    os.close(theirs)
    for line in os.fdopen(ours):  # one that has another above it says first that it waits for that
        if found := re.search(r" on (tcp://127\.0\.0\.1:\d+), key from", line):
            return process, found.group(1)
    raise AssertionError("the server has ended")


def end(does: Callable[[], Any]) -> NoReturn:
    """Does it, and ends this process without what the one that it was forked from would do in the end."""
    code = 1
    try:
        code = does() or 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def train_all(rank: int, cases: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    os.environ["RANK"] = str(rank)
    results = {"cases": [train(**case) for case in cases], "synchronous": synchronous()}
    (FOLDER / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    root, address = served()
    aggregators = [served(upstream=address)[0] for _ in range(2)]
    os.environ["LIGHTNING_OMNI_KEY"] = (FOLDER / "key").read_text().strip()
    cases: list[dict[str, Any]] = [
        {"method": "softsync:n=1,modulation=average", "server": address, "wire": {"push": "int8", "pull": "bf16"}},
        {"method": "hardsync", "server": address, "dies": aggregators[0]},
    ]
    ranks = []
    for rank in range(1, RANKS):
        if (process := os.fork()) == 0:
            end(lambda rank=rank: train_all(rank, cases))
        ranks.append(process)
    train_all(0, cases)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    os.kill(root, signal.SIGTERM)  # the aggregator that lives ends with it
    codes += [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in (root, aggregators[1])]
    sys.stdout.flush()
    os._exit(max(codes, key=abs))


if __name__ == "__main__":
    main()
