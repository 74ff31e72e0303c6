"""Schedulers at another moment than their own: what a checkpoint has of them where its weights are older or newer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import OneCycleLR

from lightning_omni.strategy.loops import paced_schedulers
from lightning_omni.strategy.loops.paced_schedulers import count_of

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "several steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5], 0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=20),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, 3),
    "one after another": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)],
        [4],
    ),
    "at once": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def alike(mine: Any, theirs: Any) -> bool:
    """Whether two trees are the same, and tensors in them bitwise."""
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, Mapping):
        return mine.keys() == theirs.keys() and all(alike(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    return bool(mine == theirs)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_of_torch_is_taken_to_where_it_would_have_been_stepped_to(name: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.4, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    scheduler.step()
    state, groups = deepcopy((scheduler.state_dict(), optimizer.state_dict()["param_groups"]))
    then = paced_schedulers.advanced(scheduler, state, groups, count=9)
    for _ in range(8):
        scheduler.step()
    assert then is not None
    assert alike(then.state, scheduler.state_dict())
    assert [each["lr"] for each in then.groups] == [each["lr"] for each in optimizer.param_groups]
    assert paced_schedulers.count_in(then.state) == 9


@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_of_functions_that_are_at_hand_is_taken_further_and_stays_as_it_is() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    warm_up = lr_scheduler.LambdaLR(optimizer, lambda count: (1 + count) / 8)
    later = lr_scheduler.MultiplicativeLR(optimizer, lambda count: 0.5)
    own = lr_scheduler.SequentialLR(optimizer, [warm_up, later], [4])
    optimizer.step()
    own.step()
    before = deepcopy((optimizer.param_groups[0]["lr"], count_of(own), count_of(warm_up), count_of(later)))
    then = paced_schedulers.advanced(own, own.state_dict(), optimizer.state_dict()["param_groups"], 9)
    assert (optimizer.param_groups[0]["lr"], count_of(own), count_of(warm_up), count_of(later)) == before
    for _ in range(8):
        own.step()
    assert then is not None
    assert then.groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert paced_schedulers.count_in(then.state) == 9


def scheduled(name: str) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer that has taken a step, and one of the schedulers above, or of functions."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4, momentum=0.9)
    optimizer.step()
    if name == "functions":
        warm_up = lr_scheduler.LambdaLR(optimizer, partial(operator.mul, 0.125))
        later = lr_scheduler.MultiplicativeLR(optimizer, lambda count: 0.5)
        return optimizer, lr_scheduler.SequentialLR(optimizer, [warm_up, later], [5])
    return optimizer, SCHEDULERS[name](optimizer)


def stepped(scheduler: Any, times: int) -> None:
    for _ in range(times):
        scheduler.step()


def checkpoint_with(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    return {"lr_schedulers": [scheduler.state_dict()], "optimizer_states": [optimizer.state_dict()]}


@pytest.mark.parametrize("name", [*SCHEDULERS, "functions"])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_weights_that_are_older_than_the_schedule_has_the_schedule_of_their_moment(name: str) -> None:
    optimizer, scheduler = scheduled(name)
    stepped(scheduler, 3)
    earlier = {scheduler: paced_schedulers.standing(scheduler)}
    stepped(scheduler, 3)
    expected = deepcopy(checkpoint_with(optimizer, scheduler))
    stepped(scheduler, 3)
    now = deepcopy(checkpoint_with(optimizer, scheduler))
    for _ in range(2):
        saved = checkpoint_with(optimizer, scheduler)
        assert paced_schedulers.caught_up(saved, [scheduler], [optimizer], [(9, 6)], earlier) == [(6, 6)]
        assert alike(saved["lr_schedulers"][0], expected["lr_schedulers"][0])
        assert alike(saved["optimizer_states"], expected["optimizer_states"])
        assert alike(checkpoint_with(optimizer, scheduler), now), "the scheduler itself goes on from where it is"


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_stays_in_a_checkpoint_where_it_is_if_it_cannot_be_known_where_it_was() -> None:
    optimizer, scheduler = scheduled("cosine")
    stepped(scheduler, 3)
    earlier = {scheduler: paced_schedulers.standing(scheduler)}
    stepped(scheduler, 6)

    def is_left(before: Mapping[Any, Any], schedulers: list[Any], target: int = 6) -> bool:
        saved, counts = checkpoint_with(optimizer, scheduler), [(9, target)] * len(schedulers)
        saved["lr_schedulers"] *= len(schedulers)
        found = paced_schedulers.caught_up(saved, schedulers, [optimizer], counts, before)
        own = checkpoint_with(optimizer, scheduler)["optimizer_states"]
        return found == counts and alike(saved["optimizer_states"], own)

    assert not is_left(earlier, [scheduler])
    assert is_left({}, [scheduler]), "nothing is known of it"
    assert is_left(earlier, [scheduler], target=2), "it is known from a later moment only"
    assert is_left(earlier, [scheduler] * 2), "another schedule sets the same rate"
    optimizer.param_groups[0]["lr"] *= 0.5
    assert is_left(earlier, [scheduler]), "a user has set the rate since"


@pytest.mark.filterwarnings("ignore")
def test_a_rate_that_is_a_tensor_is_not_changed_by_a_scheduler_that_is_taken_further() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.4), foreach=False)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    groups = optimizer.state_dict()["param_groups"]
    then = paced_schedulers.advanced(scheduler, scheduler.state_dict(), groups, 4)
    assert then is not None
    assert then.groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.4)


@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_that_is_not_torchs_is_taken_nowhere() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)

    class Mine(lr_scheduler.StepLR):
        pass

    own = Mine(optimizer, 3)
    assert paced_schedulers.described(own) == ["", []]
    assert paced_schedulers.advanced(own, own.state_dict(), optimizer.param_groups, 9) is None
