"""Groups of two ranks, whose leaders hand on what the server answers. What crosses the group's links is counted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked
import torch
import torch.distributed as dist
from devices import BACKEND, own_device
from values import values_in

from lightning_omni import OmniOptimizer, World
from lightning_omni.runtime.options import WorldOptions

TOLD = json.loads(sys.argv[1])
RANKS, STEPS = 4, 4


def train(rank: int) -> dict[str, object]:
    dist.init_process_group(BACKEND, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    device = own_device(rank)
    model = torch.nn.Sequential(torch.nn.Linear(31, 33), torch.nn.Linear(33, 3)).to(device)  # parts of odd sizes
    options = WorldOptions(
        groups=2,
        method=TOLD["method"],
        **values_in({"compression": TOLD["wire"], "server": {"count": TOLD["servers"]}}),
    )
    world = World(2, device, options)
    world.wrapper.broadcast_initial(model)
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
    sent, broadcast = 0, dist.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return broadcast(tensor, *args, **kwargs)

    dist.broadcast = counted
    with world.training():
        before = sent
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * world.group + step)
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.grad = gradient.to(device)
            optimizer.step()
        handed, weights = sent - before, [parameter.tolist() for parameter in model.parameters()]
    result = {"handed": handed, "weights": weights, "nbytes": sum(each.nbytes for each in model.parameters())}
    Path(os.environ["OMNI_TEST_FOLDER"], f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    forked.run(RANKS, TOLD["servers"], train)
