"""Trains with a wire format that keeps a residual, through groups of all kinds, without Lightning and without data.

Gradients depend on group and step alone, so that the weights say what has come to the server.
"""

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
from topk import TopK
from torch import Tensor

from lightning_omni import OmniOptimizer, World
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.runtime.state.checkpoint import RunCheckpoint
from lightning_omni.strategy.checkpoints import Checkpoints
from lightning_omni.strategy.loops.driver import EpochDriver

WIRE = json.loads(sys.argv[1])["wire"] if len(sys.argv) > 1 else ""
RANKS, LR, STEPS = 4, 0.1, 6
PHASES = (4, 2, 1, 2)
"""Numbers of groups, one after the other."""
NAN_AT = (0, 1, 3)
"""Phase, group and step of a gradient that is not finite."""


def gradients(phase: int, group: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * phase + 100 * group + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 5), (5,))]


def train(rank: int) -> dict[str, object]:
    dist.init_process_group(BACKEND, rank=rank, world_size=RANKS)
    device = own_device(rank)
    model = torch.nn.Linear(5, 6, dtype=torch.float64, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    own = list(model.parameters())
    own[1].data = torch.zeros(5, dtype=torch.float64, device=device)
    world = World(PHASES[0], device, WorldOptions(groups=PHASES[0], compression=WIRE or TopK(fraction=0.2)))
    world.wrapper.broadcast_initial(model)
    optimizer = OmniOptimizer(torch.optim.SGD(own, lr=LR), world)
    given = [torch.zeros_like(parameter) for parameter in own]
    gathered = False
    with world.training():
        for phase, groups in enumerate(PHASES):
            if phase == len(PHASES) - 1:
                optimizer.param_groups[0]["params"].reverse()  # while one group trains, which keeps residuals
            if phase:
                world.regroup(groups)
            for step in range(STEPS):
                gradient = [each.to(device) for each in gradients(phase, world.group, step)]
                if (phase, world.group, step) == NAN_AT:
                    gradient[0][2, 3] = torch.nan
                elif world.is_leader:
                    torch._foreach_add_(given, gradient)
                for parameter, each in zip(own, gradient, strict=True):
                    parameter.grad = each
                optimizer.step()
            if phase == 1:
                save_inside_an_epoch(world, model)
                gathered = gather_group_state(world)
        residual = world.core.sender_state(0).get("residual", [])[::-1]  # in the optimizer's order
    result = {
        "weights": [parameter.tolist() for parameter in own],
        "given": [each.tolist() for each in given],
        "residual": [each.tolist() for each in residual],
        "gathered": gathered,
        "moved": world.exchange.traffic.moved,
        "shared": world.exchange.traffic.shared,
    }
    Path(os.environ["OMNI_TEST_FOLDER"], f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    return result


def save_inside_an_epoch(world: World, model: torch.nn.Module) -> None:
    """What a checkpoint then lacks is said once."""
    said: list[str] = []
    checkpoints = Checkpoints(said.append)
    for _ in range(2):
        checkpoints.collect(world, model, model.state_dict)
        checkpoint: dict[str, Any] = {"optimizer_states": []}
        checkpoints.complete(world, checkpoint, EpochDriver("dynamic", said.append, said.append))
        if world.is_recorder:
            assert checkpoint["omni"]["group"] == {}
            assert checkpoint["omni"]["run"]["cut"]["clocks"][0] > 0
    assert len(said) == 1
    assert (
        f"what they have not pushed yet in the wire format {type(world.core.wire_format).__name__} is not in it"
        in said[0]
    )


def gather_group_state(world: World) -> bool:
    """At a synchronization point; whether what a checkpoint would hold is what the leader has, and is restored."""
    world.enter_world()
    world.states.gather_group_state()
    same = True
    if world.rank == 0:
        groups = world.exchange.store.snapshot().groups
        world.states.resume(RunCheckpoint(groups=3, states=groups))  # of other groups: it says so, and takes nothing
        world.states.forget_saved()
        saved = groups[world.group][0]
        before = world.core.sender_state(0)["residual"]
        world.core.load_sender_state(0, {})
        world.residuals.resume(0, saved)
        after = world.core.sender_state(0)["residual"]
        same = all(map(torch.equal, before, after)) and any(bool(each.any()) for each in after)
    world.barrier()
    world.enter_compute()
    return same


if __name__ == "__main__":
    forked.run(RANKS, 1, train)
