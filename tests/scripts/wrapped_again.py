"""A loop of three groups, of which one is lost, whose other ranks regroup and wrap their module again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forked
import torch
import torch.distributed as dist
from devices import BACKEND, own_device

from lightning_omni import OmniOptimizer, World

RANKS = 3
FOLDER = Path(os.environ["OMNI_TEST_FOLDER"])


def train(rank: int) -> None:
    dist.init_process_group(BACKEND, rank=rank, world_size=RANKS)
    world = World(RANKS, own_device(rank))
    net = torch.nn.Linear(4, 1).to(own_device(rank))
    model = world.wrap(net)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), world)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4).to(own_device(rank))).square().mean().backward()
        optimizer.step()

    with world.training():
        while not world.lost:
            step()
            if rank == RANKS - 1:
                sys.stdout.flush()
                os._exit(0)
        world.regroup(2, net)
        model = world.wrap(net)
        step()
    (FOLDER / f"rank{rank}.json").write_text(json.dumps(net.weight.tolist()))


if __name__ == "__main__":
    forked.run(RANKS, 1, train)
