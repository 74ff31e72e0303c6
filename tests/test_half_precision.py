"""The server steps weights of every precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.methods.master import Master, describe, rebuild


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_servers_optimizer_steps_as_the_users_does_in_every_precision(
    kind: type[Optimizer], dtype: torch.dtype
) -> None:
    mine, theirs = (Parameter(torch.linspace(-1, 1, 24, dtype=dtype)) for _ in range(2))
    user = kind([mine], lr=0.125)  # type: ignore[call-arg]
    described = copy.deepcopy(describe(user, {mine: "weight"}))  # as after a journey
    master = Master({"weight": theirs}, rebuild(described, {"weight": theirs}))
    for step in range(3):
        mine.grad = torch.full_like(mine, 0.5 - step)
        master.update([mine.grad.clone()], [{"lr": 0.125}])
        user.step()
    assert not torch.equal(theirs, torch.linspace(-1, 1, 24, dtype=dtype))
    torch.testing.assert_close(theirs.detach(), mine.detach())
