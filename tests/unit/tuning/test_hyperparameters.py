"""`Hyperparameters`: the peak of a schedule, whatever makes it, momentum, and rates that are scaled in steps alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.model.server_optimizer import scaled_rates
from lightning_omni.tuning.callback.hyperparameters import Hyperparameters

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


def steps(optimizer: Optimizer, scheduler: Any, count: int) -> Iterator[list[float]]:
    """The rates of each step; a plateau is told that nothing gets better after the third."""
    for step in range(count):
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


# --- Rates in steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_it_is_beside_steps_with_other_rates(name: str) -> None:
    made = [optimizer_of(rates=(LR, 0.04), momentum=0.9) for _ in range(2)]
    (plain, scaled), schedules = made, [SCHEDULES[name](optimizer) for optimizer in made]
    for expected, found in zip(*(steps(*each, 20) for each in zip(made, schedules, strict=True)), strict=True):
        assert found == expected
        with scaled_rates(scaled, 0.3):
            assert rates_of(scaled) == [0.3 * rate for rate in expected]
        assert rates_of(scaled) == rates_of(plain)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_is_a_tensor_stays_one_and_is_scaled_once(shape: tuple[int, ...], shared: bool) -> None:
    first, second, _ = module()
    rate = torch.full(shape, LR)
    groups = [{"params": each.parameters(), "lr": rate if shared else rate.clone()} for each in (first, second)]
    optimizer = AdamW(groups, lr=rate)
    with scaled_rates(optimizer, 3.0):
        assert rates_of(optimizer) == pytest.approx([3 * LR, 3 * LR])
    assert rates_of(optimizer) == [rate.item()] * 2
    assert optimizer.param_groups[0]["lr"] is groups[0]["lr"]


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
    moving = s.CyclicLR(optimizer, 0.01, 0.2, cycle_momentum=True)
    assert not Hyperparameters(optimizer, [s.ChainedScheduler([moving])]).is_momentum_free
    wrapper = SimpleNamespace(after_scheduler=moving, optimizer=optimizer)  # of another library
    assert not Hyperparameters(optimizer, [wrapper]).is_momentum_free


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [None, 0.0])
def test_without_a_rate_there_is_nothing_to_search_about(lr: float | None) -> None:
    optimizer = optimizer_of()
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ConfigurationError, match="lr="):
        Hyperparameters(optimizer)
