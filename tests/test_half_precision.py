"""The server steps weights of every precision, and the ranks of a group scale their losses alike."""

from __future__ import annotations

import copy

import pytest
import torch
from core import Master, describe, rebuild
from runs import run
from torch.nn import Parameter
from torch.optim import Optimizer

REGROUPS = 4
"""Before which batch of its third fit the groups of ``scripts/loss_scale.py`` become one."""


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


def test_ranks_of_a_group_have_one_loss_scale_whatever_groups_they_were_in() -> None:
    first, second = (results for _, results in sorted(run("loss_scale.py", timeout=200).results.items()))
    apart, together, becoming = zip(first["scales"], second["scales"], strict=True)
    assert apart[0][-1] != apart[1][-1], "only one group has met an infinite loss"
    assert together[0] == together[1]
    assert together[0][0][0] == min(scales[-1][0] for scales in apart)
    assert becoming[0][REGROUPS - 1] != becoming[1][REGROUPS - 1]
    assert becoming[0][REGROUPS:] == becoming[1][REGROUPS:]
    assert becoming[0][REGROUPS] == [min(scales[REGROUPS - 1][0] for scales in becoming), 1]
    assert first["digests"] == second["digests"]
