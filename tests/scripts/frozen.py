"""Trains models with a frozen layer, or one that is frozen in mid-run, in plain loops of three groups."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked
import torch
import torch.distributed as dist
from devices import BACKEND, own_device
from torch import Tensor, nn
from values import values_in

from lightning_omni import OmniOptimizer, World
from lightning_omni.runtime import names_of
from lightning_omni.runtime.options import WorldOptions

RANKS, EPOCHS, STEPS = 3, 3, 8
LOOPS: list[dict[str, Any]] = json.loads(sys.argv[1])["loops"] if len(sys.argv) > 1 else []


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def train(method: str, freeze_at: int, regroups: bool = False, **options: Any) -> dict[str, Any]:
    """The steps, counted over all epochs, with which the frozen layer changed; of the evaluated model the epochs."""
    device = own_device(dist.get_rank())
    world = World(RANKS, device, WorldOptions(groups=RANKS, method=method, **values_in(options)))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 20), nn.Linear(20, 20), nn.Linear(20, 1)).to(device)
    body, model = net[1], world.wrap(net)
    body.requires_grad_(freeze_at > 0)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.01, weight_decay=0.1), world, names_of(net))
    torch.manual_seed(1 + world.rank)
    trained, evaluated = ([[each.detach().clone() for each in body.parameters()]] for _ in range(2))
    for epoch in range(EPOCHS):
        with world.training():
            if regroups and epoch == 2:
                world.regroup(RANKS)
            for step in range(STEPS):
                if epoch * STEPS + step == freeze_at:
                    body.requires_grad_(False)
                optimizer.zero_grad()
                model(torch.randn(8, 4).to(device)).square().mean().backward()
                optimizer.step()
                trained.append([each.detach().clone() for each in body.parameters()])
        evaluated.append([each.detach().clone() for each in body.parameters()])
    return {
        "trained": [number for number, pair in enumerate(pairwise(trained)) if not same(*pair)],
        "evaluated": [number for number, pair in enumerate(pairwise(evaluated)) if not same(*pair)],
        "ends_as_evaluated": same(trained[-1], evaluated[-1]),
    }


def train_all(rank: int) -> None:
    dist.init_process_group(BACKEND, rank=rank, world_size=RANKS)
    everyone = dist.group.WORLD
    results = [train(**loop) for loop in LOOPS]
    Path(os.environ["OMNI_TEST_FOLDER"], f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier(group=everyone)
    dist.destroy_process_group()


if __name__ == "__main__":
    forked.run(RANKS, 4 * len(LOOPS), train_all)  # groups are formed twice, with up to two servers
