"""Trains two groups over a transport that the package does not know, without Lightning."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked
import torch
import torch.distributed as dist
from devices import BACKEND, own_device
from stream import Stream

from lightning_omni import OmniOptimizer, Server, World
from lightning_omni.runtime.options import WorldOptions

RANKS, STEPS = 2, 12
METHODS = ("async_sgd", "hardsync", "gossip")


def train(method: str) -> dict[str, object]:
    torch.manual_seed(0)
    device = own_device(dist.get_rank())
    model = torch.nn.Linear(4, 1).to(device)
    world = World(2, device, WorldOptions(groups=2, method=method, server=Server(transport=Stream())))
    world.wrapper.broadcast_initial(model)
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
    target = torch.linspace(-1, 1, 4).to(device)
    torch.manual_seed(world.rank)
    losses = []
    with world.training():
        address = world.server_address
        for _ in range(STEPS):
            x = torch.randn(32, 4).to(device)
            optimizer.zero_grad()
            loss = ((model(x).squeeze(1) - x @ target) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        moved = world.exchange.traffic.moved
    weights = [parameter.tolist() for parameter in model.parameters()]
    return {"address": address, "first": losses[0], "last": losses[-1], "weights": weights, "moved": moved}


def train_all(rank: int) -> None:
    dist.init_process_group(BACKEND, rank=rank, world_size=RANKS)
    result = {method: train(method) for method in METHODS}
    Path(os.environ["OMNI_TEST_FOLDER"], f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    forked.run(RANKS, len(METHODS), train_all)
