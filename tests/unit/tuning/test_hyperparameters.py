"""`Hyperparameters`: a scaled schedule is that schedule times a factor, whatever makes it; probes leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.callback.hyperparameters import Hyperparameters

FEW = settings(max_examples=15, deadline=None)
LR = 0.1
Make = Callable[[Optimizer], Any]


def module() -> Any:  # parts of a module have no types of their own
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def optimizer_of(kind: Any = SGD, rates: tuple[float, ...] = (LR,), **options: Any) -> Optimizer:
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip(module(), rates, strict=False)]
    made: Optimizer = kind(groups, **options)
    return made


def rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def steps(optimizer: Optimizer, scheduler: Any, count: int, begin: int = 0) -> Iterator[list[float]]:
    """The rates of each step; a plateau is told that nothing gets better after the third."""
    for step in range(begin, begin + count):
        yield rates_of(optimizer)
        optimizer.step()
        if isinstance(scheduler, s.ReduceLROnPlateau):
            scheduler.step(max(1.0, 3.0 - step))
        elif scheduler is not None:
            scheduler.step()


SCHEDULES: dict[str, Make] = {
    "none": lambda o: None,
    "warm-up": lambda o: s.LambdaLR(o, lambda step: min(1.0, (step + 1) / 8)),
    "lambda by group": lambda o: s.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "multiplicative": lambda o: s.MultiplicativeLR(o, lambda step: 0.95),
    "steps": lambda o: s.StepLR(o, 4, 0.3),
    "milestones": lambda o: s.MultiStepLR(o, [3, 9], 0.2),
    "exponential": lambda o: s.ExponentialLR(o, 0.9),
    "constant": lambda o: s.ConstantLR(o, 0.3, 6),
    "linear": lambda o: s.LinearLR(o, 0.1, 1.0, 7),
    "polynomial": lambda o: s.PolynomialLR(o, 15, 2.0),
    "cosine": lambda o: s.CosineAnnealingLR(o, 9, eta_min=0.01),
    "warm restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3, 2, eta_min=0.003),
    "one cycle": lambda o: s.OneCycleLR(o, [0.3, 0.6], total_steps=40),
    "one cycle, three phases": lambda o: s.OneCycleLR(o, 0.3, total_steps=40, three_phase=True, cycle_momentum=False),
    "cyclic": lambda o: s.CyclicLR(o, 0.01, 0.2, step_size_up=4, cycle_momentum=False),
    "triangular": lambda o: s.CyclicLR(o, [0.01, 0.02], [0.2, 0.1], 3, mode="exp_range", gamma=0.9),
    "sequential": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, 1.0, 5), s.CosineAnnealingLR(o, 10, eta_min=0.01)], [5]
    ),
    "one in another": lambda o: s.ChainedScheduler(
        [s.SequentialLR(o, [s.ConstantLR(o, 0.5, 3), s.ExponentialLR(o, 0.9)], [4]), s.StepLR(o, 3, 0.5)]
    ),
    "chained": lambda o: s.ChainedScheduler([s.LinearLR(o, 0.2, 1.0, 6), s.ExponentialLR(o, 0.95)]),
    "plateau": lambda o: s.ReduceLROnPlateau(o, factor=0.3, patience=1, min_lr=0.002, eps=1e-3),
    "plateau by group": lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=[0.01, 0.0]),
    "averaged weights": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=8),
}


# --- For good --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@FEW
@given(begun=st.integers(0, 12), factor=st.floats(0.03, 30))
def test_scaling_makes_all_that_follows_so_many_times_what_it_would_have_been(
    name: str, begun: int, factor: float
) -> None:
    made = []
    for _ in range(2):
        optimizer = optimizer_of(rates=(LR, 0.04), momentum=0.9)
        made.append((optimizer, SCHEDULES[name](optimizer)))
        for _ in steps(*made[-1], begun):
            pass
    (plain, plain_schedule), (scaled, schedule) = made
    Hyperparameters(scaled, [schedule] if schedule is not None else []).scale(factor)
    pairs = zip(steps(plain, plain_schedule, 20, begun), steps(scaled, schedule, 20, begun), strict=True)
    for expected, found in pairs:
        assert found == pytest.approx([factor * rate for rate in expected], rel=1e-9, abs=1e-15)
    if schedule is not None:
        assert schedule.get_last_lr() == pytest.approx(rates_of(scaled))
        assert [group.get("momentum") for group in scaled.param_groups] == [
            group.get("momentum") for group in plain.param_groups
        ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_highest_rate_is_that_of_the_schedules_peak(name: str) -> None:
    optimizer = optimizer_of(rates=(LR, 0.04), momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    hyperparameters = Hyperparameters(optimizer, [schedule] if schedule is not None else [])
    begins_at, highest = optimizer.param_groups[0]["lr"], hyperparameters.lr
    assert begins_at == rates_of(optimizer)[0]
    seen = max(rates[0] for rates in steps(optimizer, schedule, 40))
    assert seen <= highest * (1 + 1e-9)
    # Where one schedule falls before another has risen, neither comes to its peak.
    assert name in ("chained", "one in another", "triangular") or seen >= 0.85 * highest


@given(digits=st.integers(1, 99_999), power=st.integers(-9, -1), factor=st.floats(0.03, 30))
def test_a_rate_that_a_user_has_written_is_that_once_more_when_scaling_is_taken_back(
    digits: int, power: int, factor: float
) -> None:
    lr = float(f"{digits}e{power}")
    optimizer = optimizer_of(rates=(lr, LR))
    schedule = s.StepLR(optimizer, 5)
    hyperparameters = Hyperparameters(optimizer, [schedule])
    hyperparameters.scale(factor)
    hyperparameters.scale(1 / factor)
    assert rates_of(optimizer) == schedule.base_lrs == [lr, LR]


def test_a_schedule_that_is_passed_twice_is_scaled_once() -> None:
    optimizer = optimizer_of()
    inner = s.ExponentialLR(optimizer, 0.5)
    outer = s.ChainedScheduler([inner])
    Hyperparameters(optimizer, [inner, outer]).scale(3.0)
    assert inner.base_lrs == outer._schedulers[0].base_lrs == [pytest.approx(3 * LR)]


class Stages(s.LRScheduler):
    """As public code has it: schedules one after the other, each with its own rates, held under a name of its own."""

    def __init__(self, held: Any, optimizer: Optimizer) -> None:
        self.stages, self.last_epoch = held, 0
        self.optimizer = optimizer

    def step(self, *_: Any) -> None:
        self.last_epoch += 1
        self.stages[0 if self.last_epoch < 3 else 1].step()


@pytest.mark.parametrize("held", [list, tuple, np.array])
def test_schedules_that_another_holds_under_any_name_are_scaled(held: Callable[[Any], Any]) -> None:
    rates = []
    for factor in (1.0, 3.0):
        optimizer = optimizer_of()
        inner = [s.LambdaLR(optimizer, lambda count: 1.0 / (1 + count)) for _ in range(2)]
        schedule = Stages(held(inner), optimizer)
        optimizer.step()
        schedule.step()
        Hyperparameters(optimizer, [schedule]).scale(factor)
        for _ in range(4):
            schedule.step()
        rates.append(rates_of(optimizer))
    assert rates[1] == [pytest.approx(3 * rate) for rate in rates[0]]


def test_scaling_by_one_changes_nothing() -> None:
    optimizer = optimizer_of(rates=(LR, 0.04))
    schedule = s.CosineAnnealingLR(optimizer, 9, eta_min=0.01)
    was = optimizer.state_dict(), schedule.state_dict()
    Hyperparameters(optimizer, [schedule]).scale(1.0)
    assert (optimizer.state_dict(), schedule.state_dict()) == was


@pytest.mark.parametrize("shared", [True, False])
def test_a_rate_that_is_a_tensor_stays_one_and_is_scaled_once(shared: bool) -> None:
    first, second, _ = module()
    rate = torch.tensor(LR)
    groups = [{"params": each.parameters(), "lr": rate if shared else rate.clone()} for each in (first, second)]
    optimizer = AdamW(groups, lr=rate)
    hyperparameters = Hyperparameters(optimizer)
    hyperparameters.scale(3.0)
    assert rates_of(optimizer) == pytest.approx([3 * LR, 3 * LR])
    assert optimizer.param_groups[0]["lr"] is groups[0]["lr"]


# --- Schedules of classes that are not torch's -----------------------------------------------------------------------


class WarmupRestarts(s.LRScheduler):
    """As cosine-annealing-warmup has it: the rate rises from ``base_lrs`` to a peak of its own."""

    def __init__(self, optimizer: Optimizer, warmup: int = 5000) -> None:
        self.max_lr, self.warmup = LR, warmup
        super().__init__(optimizer)
        self.base_lrs = [0.001 for _ in optimizer.param_groups]

    def get_lr(self) -> list[float]:  # type: ignore[override]
        progress = min(1.0, self.last_epoch / self.warmup)
        return [low + (self.max_lr - low) * progress for low in self.base_lrs]  # type: ignore[misc]


class Polynomial(s.LRScheduler):
    """A closed form, of a peak or of ``base_lrs``, that has an end."""

    def __init__(self, optimizer: Optimizer, peak: float | None, total: int = 50) -> None:
        self.peak, self.total = peak, total
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        if self.last_epoch > self.total:
            raise ValueError("this schedule is over")
        return [(self.peak or rate) * (1 - self.last_epoch / self.total) for rate in self.base_lrs]  # type: ignore[misc]


class LinearCosine(s.LRScheduler):
    """As lightning-bolts has it: a recursion, with a warm-up from a tiny rate, which is no rate of torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.warmup_start_lr, self.eta_min = 1e-6, 0.001
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        rates = rates_of(self.optimizer)
        if self.last_epoch == 0:
            return [self.warmup_start_lr for _ in rates]
        if self.last_epoch <= 10:
            ups = [(base - self.warmup_start_lr) / 10 for base in self.base_lrs]
            return [rate + up for rate, up in zip(rates, ups, strict=True)]  # type: ignore[misc]
        return [(rate - self.eta_min) * 0.99 + self.eta_min for rate in rates]


class OfTimm:
    """A schedule that is no `LRScheduler`, and is stepped to an epoch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.base_values = optimizer, rates_of(optimizer)

    def step(self, epoch: int) -> None:
        for group, value in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = value * 0.9**epoch


FOREIGN: dict[str, tuple[Make, str]] = {
    "a peak after a warm-up": (WarmupRestarts, "WarmupRestarts does not follow"),
    "a peak": (lambda o: Polynomial(o, LR), "Polynomial does not follow"),
    "a peak inside one of torch's": (
        lambda o: s.ChainedScheduler([s.StepLR(o, 5), Polynomial(o, LR)]),
        "Polynomial does not follow",
    ),
    "an epoch": (OfTimm, "OfTimm cannot be stepped.*epoch"),
    "base_lrs": (lambda o: Polynomial(o, None), ""),
    "a recursion": (LinearCosine, ""),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_schedule_that_keeps_a_rate_of_its_own_is_refused_before_it_is_scaled(name: str) -> None:
    make, message = FOREIGN[name]
    optimizer = optimizer_of(rates=(LR, 0.04), momentum=0.9)
    schedule = make(optimizer)
    were = rates_of(optimizer), {name: each for name, each in vars(schedule).items() if name != "optimizer"}
    were = copy.deepcopy(were)
    hyperparameters = Hyperparameters(optimizer, [schedule])
    with pytest.raises(ConfigurationError, match=f"{message}.*base_lrs") if message else nullcontext():
        hyperparameters.check_schedules()
    rates, state = were
    assert rates_of(optimizer) == rates, "the rehearsal leaves no trace"
    assert all(vars(schedule)[name] == each for name, each in state.items() if name != "_schedulers")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_of_torch_are_followed(name: str) -> None:
    optimizer = optimizer_of(rates=(LR, 0.04), momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    if schedule is not None:  # a class of the user's own that changes nothing, so that it is tried out
        schedule.__class__ = type("Own", (type(schedule),), {"__module__": __name__})
    Hyperparameters(optimizer, [schedule] if schedule is not None else []).check_schedules()


# --- Momentum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), [(Adam, {"betas": (0.8, 0.99)}), (AdamW, {"betas": (0.8, 0.95)})])
def test_momentum_of_adam_is_its_first_beta(kind: Any, options: dict[str, Any]) -> None:
    optimizer = optimizer_of(kind, (LR, 0.04), **options)
    hyperparameters = Hyperparameters(optimizer)
    assert (hyperparameters.has_momentum, hyperparameters.is_momentum_free, hyperparameters.momentum) == (1, 1, 0.8)
    assert hyperparameters.scaling.is_adaptive
    hyperparameters.set_momentum(0.3)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.3, options["betas"][1])] * 2


def test_a_beta_that_is_a_tensor_stays_one() -> None:
    betas = torch.tensor(0.75), torch.tensor(0.5)
    net = module()
    optimizer = Adam([{"params": part.parameters()} for part in net], lr=torch.tensor(LR), betas=betas, capturable=True)
    hyperparameters = Hyperparameters(optimizer)
    hyperparameters.set_momentum(0.25)
    assert [[float(each) for each in group["betas"]] for group in optimizer.param_groups] == [[0.25, 0.5]] * 3
    assert all(isinstance(each, torch.Tensor) for group in optimizer.param_groups for each in group["betas"])


def test_momentum_of_sgd_is_set_in_all_groups() -> None:
    optimizer = optimizer_of(SGD, (LR, 0.04), momentum=0.9)
    hyperparameters = Hyperparameters(optimizer)
    assert not hyperparameters.scaling.is_adaptive
    hyperparameters.set_momentum(0.0)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert hyperparameters.has_momentum


def test_momentum_that_stays_as_it_is_stays_different_in_groups() -> None:
    first, second, _ = module()
    optimizer = SGD([{"params": first.parameters(), "momentum": 0.9}, {"params": second.parameters()}], lr=LR)
    Hyperparameters(optimizer).set_momentum(0.9)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0]


def test_an_optimizer_without_momentum_has_none_to_choose() -> None:
    optimizer = optimizer_of(Adagrad)
    hyperparameters = Hyperparameters(optimizer)
    assert (hyperparameters.has_momentum, hyperparameters.is_momentum_free, hyperparameters.momentum) == (0, 0, 0.0)
    hyperparameters.set_momentum(0.7)
    assert "momentum" not in optimizer.param_groups[0]


@pytest.mark.parametrize("make", [SCHEDULES["one cycle"], SCHEDULES["triangular"]])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_momentum_that_a_schedule_moves_is_not_free(kind: Any, make: Make) -> None:
    optimizer = optimizer_of(kind, (LR, 0.04), **({"momentum": 0.9} if kind is SGD else {}))
    hyperparameters = Hyperparameters(optimizer, [make(optimizer)])
    was = hyperparameters.momentum
    assert hyperparameters.has_momentum
    assert not hyperparameters.is_momentum_free
    hyperparameters.set_momentum(0.123)
    assert hyperparameters.momentum == was


def test_momentum_is_free_if_the_schedule_moves_rates_only_even_inside_another() -> None:
    optimizer = optimizer_of(SGD, (LR, 0.04), momentum=0.9)
    cyclic = s.CyclicLR(optimizer, 0.01, 0.2, cycle_momentum=False)
    assert Hyperparameters(optimizer, [cyclic]).is_momentum_free
    moving = s.ChainedScheduler([s.CyclicLR(optimizer, 0.01, 0.2, cycle_momentum=True)])
    assert not Hyperparameters(optimizer, [moving]).is_momentum_free


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [None, 0.0])
def test_without_a_rate_there_is_nothing_to_search_about(lr: float | None) -> None:
    optimizer = optimizer_of()
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ConfigurationError, match="lr="):
        Hyperparameters(optimizer)
