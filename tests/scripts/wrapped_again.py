"""A loop of three groups, of which one is lost, whose other ranks regroup and wrap their module again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import spares
import torch
import torch.distributed as dist
from devices import BACKEND, own_device

from lightning_omni import OmniOptimizer, World

RANKS = 3
FOLDER = Path(os.environ["OMNI_TEST_FOLDER"])


def train(rank: int) -> list[float]:
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
                os._exit(9)
        world.regroup(2, net)
        model = world.wrap(net)
        step()
    return [weight.item() for weight in net.weight.flatten()]


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    rank, children = 0, list[int]()
    for number in range(1, RANKS):
        if (child := os.fork()) == 0:
            rank, children = number, []
            break
        children.append(child)
    spares.prepare(ranks=0, servers=int(rank == 0))
    dist.init_process_group(BACKEND, rank=rank, world_size=RANKS)
    (FOLDER / f"rank{rank}.json").write_text(json.dumps(train(rank)))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.stdout.flush()
    os._exit(int(bool(codes) and codes != [0, 9]))


if __name__ == "__main__":
    main()
