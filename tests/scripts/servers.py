"""Trains two groups with one server and with several that hold a partition each, without Lightning."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import spares
import torch
import torch.distributed as dist
from devices import BACKEND, own_device
from values import values_in

from lightning_omni import OmniOptimizer, World
from lightning_omni.errors import OmniError
from lightning_omni.runtime.options import WorldOptions

RANKS = 2
FOLDER = Path(os.environ["OMNI_TEST_FOLDER"])
OPTIONS: dict[str, Any] = json.loads(sys.argv[1])
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def train(
    method: str = "hardsync",
    servers: Any = 1,
    compression: Any = "fp32",
    optimizer: str = "sgd",
    steps: int = 6,
    regroups: bool = False,
    kills: str = "",
    poisons: bool = False,
    freezes: bool = False,
) -> dict[str, Any]:
    torch.manual_seed(0)
    device = own_device(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3)).to(device)
    options = WorldOptions(
        groups=RANKS, method=method, **values_in({"server": {"count": servers}, "compression": compression})
    )
    nodes = [1] * RANKS if servers == "per-node" else [RANKS]
    world = World(RANKS, device, options, ranks_per_node=nodes)
    world.wrapper.broadcast_initial(model)
    stepped = OmniOptimizer(OPTIMIZERS[optimizer](model.parameters()), world)
    torch.manual_seed(1 + world.rank)
    losses, shares, refused = [], 0, 0
    with world.training():
        for step in range(steps):
            if kills and step == 2:
                kill(kills, world)
            if regroups and step in (2, 4):
                world.regroup(1 if step == 2 else RANKS)
            for parameter in model[2].parameters() if freezes and step in (2, 4) else ():
                parameter.requires_grad_(step == 4)
            x = torch.randn(32, 40).to(device)
            stepped.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
            if len(world.members) > 1:  # the module is not wrapped
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= len(world.members)
            if poisons and step == 5 and world.rank == 1:
                list(model.parameters())[-1].grad[0] = torch.nan
            stepped.step()
            refused += not world.core.last_answer.applied
            losses.append(loss.item())
        if world.control is not None:
            shares, snapshot = world.control.servers, world.exchange.store.snapshot() if world.is_recorder else None
    state = snapshot.parts[0]["state"] if snapshot is not None else {}
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "first": losses[0],
        "last": losses[-1],
        "weights": hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest(),
        "finite": bool(flat.isfinite().all()),
        "servers": shares,
        "refused": refused,
        "clock": snapshot.cut.clocks[0] if snapshot is not None else 0,
        "shapes": {place: {name: list(each.shape) for name, each in of.items()} for place, of in state.items()},
    }


def kill(which: str, world: World) -> None:
    """A server that holds a partition ends, or a rank."""
    for number, process in world.server.processes.items() if which == "server" else ():
        if number:
            os.kill(process.pid, signal.SIGKILL)
    if which == "rank" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    other = os.fork()
    rank = int(other == 0)
    spares.prepare(ranks=0, servers=(7, 2)[rank])
    dist.init_process_group(BACKEND, rank=rank, world_size=RANKS)
    results = []
    for case in OPTIONS["cases"]:
        began = time.monotonic()
        try:
            results.append(train(**case))
        except (OmniError, RuntimeError) as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
        results[-1]["seconds"] = time.monotonic() - began
        (FOLDER / f"rank{rank}.json").write_text(json.dumps(results))
        if "error" in results[-1] or case.get("kills"):
            break
    else:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other and not OPTIONS.get("kills") else 0)


if __name__ == "__main__":
    main()
