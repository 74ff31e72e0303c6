"""When `OmniTuner` takes a run for diverged: by its mean loss, and by pushes that are not applied."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_omni.group.core import GroupCore
from lightning_omni.methods import AsyncSGD, Replica
from lightning_omni.runtime.state.checkpoint import RollbackPoint
from lightning_omni.tuning.callback.losses import DivergenceGuard
from lightning_omni.tuning.search.constants import NON_FINITE_TOLERATED

ZERO = torch.zeros(())


def watch(threshold: float = 1.0) -> DivergenceGuard:
    return DivergenceGuard(threshold)


def follow(made: DivergenceGuard, losses: list[float], is_guarded: bool, applied: bool | None) -> list[float]:
    for loss in losses:
        made.batch_done(torch.tensor(loss), is_guarded, applied)
    return made.mean(ZERO).tolist()


def test_one_loss_that_is_no_number_is_the_servers_business() -> None:
    made = watch()
    follow(made, [0.5], True, True)
    follow(made, [math.nan], True, False)
    mean = follow(made, [0.5, 0.5], True, True)
    assert mean == pytest.approx([0.5, 1.0])
    assert not made.is_worse(*mean)


def test_a_loss_may_be_a_vector_of_one_number() -> None:
    made = watch()
    made.batch_done(torch.tensor([0.5]), True, True)
    assert made.mean(ZERO).tolist() == [0.5, 1.0]


def test_the_first_loss_may_be_no_number_as_any_other() -> None:
    made = watch()
    follow(made, [math.nan], True, False)
    assert not made.is_worse(*follow(made, [0.5, 0.5], True, True))


def test_in_one_group_it_is_the_end() -> None:
    made = watch()
    assert made.is_worse(*follow(made, [0.5, math.nan, 0.5], False, None))


def test_a_rank_that_has_trained_nothing_yet_does_not_count() -> None:
    made = watch()
    assert not made.is_worse(*made.mean(ZERO).tolist()), "nor has a run diverged that none has trained"
    total, ranks = (one + other for one, other in zip(follow(watch(), [0.5], True, True), made.mean(ZERO), strict=True))
    assert not made.is_worse(total, ranks)
    assert made.is_worse(4 * total, ranks)


@pytest.mark.parametrize(("applied", "has_given_up"), [(False, True), (None, False), (True, False)])
def test_pushes_count_and_not_batches(applied: Any, has_given_up: bool) -> None:
    made = watch()
    mean = follow(made, [0.5] * NON_FINITE_TOLERATED, True, applied)
    assert made.has_given_up == has_given_up == made.is_worse(*mean)


def test_losses_that_are_no_numbers_any_more_are_the_end_although_pushes_in_between_are_applied() -> None:
    made = watch()
    follow(made, [0.5], True, True)
    for number in range(NON_FINITE_TOLERATED):
        mean = follow(made, [math.nan], True, number % 2 == 0)
        assert made.is_worse(*mean) == (number == NON_FINITE_TOLERATED - 1)
    assert not made.has_given_up
    assert not made.is_worse(*follow(made, [0.5], True, True)), "it has learnt to go on"


def test_between_refusals_batches_that_push_nothing_change_nothing() -> None:
    made = watch()
    for _ in range(NON_FINITE_TOLERATED):
        assert not made.has_given_up
        follow(made, [0.5] * 3, True, None)
        follow(made, [0.5], True, False)
    assert made.has_given_up
    follow(made, [0.5], True, True)
    assert not made.has_given_up


def test_a_loss_that_rises_above_the_bound_is_worse() -> None:
    made = watch(threshold=1.0)
    assert not made.is_worse(*follow(made, [0.9] * 5, True, True))
    assert made.is_worse(*follow(made, [2.0] * 50, True, True))


def test_everything_comes_back_as_it_was_but_hyperparameters() -> None:
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    core = GroupCore(AsyncSGD())
    core.attach(Replica(list(module.parameters()), optimizer))
    core.load_sender_state(0, {"residual": [torch.ones(1, 2), None]})
    step()
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    averages = [*average.parameters(), *average.buffers()]
    kept = RollbackPoint.of(module, [optimizer], core, averages)
    before, averaged = ([each.detach().clone() for each in tensors] for tensors in (module.parameters(), averages))
    momentum = [optimizer.state[each]["momentum_buffer"].clone() for each in module.parameters()]
    optimizer.param_groups[0]["lr"] = 0.05
    step()
    core.sender_state(0)["residual"][0].zero_()
    for _ in range(2):  # more than once, if need be
        average.update_parameters(module)
        kept.restore(core)
        assert all(map(torch.equal, before, module.parameters()))
        assert all(map(torch.equal, averaged, averages)), "and how many it is of"
        assert all(
            map(torch.equal, momentum, [optimizer.state[each]["momentum_buffer"] for each in module.parameters()])
        )
        assert torch.equal(core.sender_state(0)["residual"][0], torch.ones(1, 2))
        core.load_sender_state(0, {})
        step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    later = [each.detach().clone() for each in module.parameters()]
    kept.keep_weights()
    step()
    kept.restore(core)
    assert all(map(torch.equal, later, module.parameters()))
