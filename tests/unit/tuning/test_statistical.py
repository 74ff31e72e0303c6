"""Updates to a target from loss curves, against known decays."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchmetrics.aggregation import RunningMean

from lightning_omni.errors import ConfigurationError
from lightning_omni.trace import Trace
from lightning_omni.tuning.model.convergence import (
    DecayFit,
    Diverged,
    Estimate,
    LossCurve,
    fit_decay,
    level,
)

Law = Callable[[np.ndarray], np.ndarray]
FEW = settings(max_examples=8, deadline=None)


def exponential(t: np.ndarray) -> np.ndarray:
    return 0.5 + 2 * np.exp(-t / 40)


def power(t: np.ndarray) -> np.ndarray:
    return 0.2 + 2 / (1 + t / 20)


def slow(t: np.ndarray) -> np.ndarray:
    return 1 + 1.5 / np.sqrt(1 + t / 5)


def noisy(law: Law, points: int = 200, noise: float = 0.05, seed: int = 0, every: float = 1.0) -> LossCurve:
    moments = every * np.arange(1, points + 1)
    return LossCurve(moments, law(moments) + noise * np.random.default_rng(seed).normal(size=points))


def curve_of(moments: Any, losses: Any) -> LossCurve:
    """Of sequences of any kind."""
    return LossCurve(moments, losses)


def fit(curve: LossCurve, **arguments: float) -> DecayFit:
    fitted = fit_decay(curve, **arguments)  # type: ignore[arg-type]
    assert isinstance(fitted, DecayFit)
    return fitted


def loss_at(fitted: DecayFit, moment: float) -> float:
    """The fitted curve, without noise."""
    if fitted.family == "exponential":
        return fitted.floor + fitted.drop * math.exp(-moment / fitted.tau)
    return fitted.floor + fitted.drop * float((1 + moment / fitted.tau) ** -fitted.power)


# --- Curves ----------------------------------------------------------------------------------------------------------


@FEW
@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(1, 15))
def test_smoothed_losses_are_those_of_the_metric_that_users_log(losses: list[float], window: int) -> None:
    metric, logged = RunningMean(window=window), []
    for loss in losses:
        metric.update(loss)
        logged.append(float(metric.compute()))
    smooth = curve_of(np.arange(len(losses)), losses).smoothed(window)
    assert smooth.losses == pytest.approx(logged, rel=1e-5, abs=1e-5)


def test_a_smoothed_line_lies_on_the_line() -> None:
    smooth = LossCurve(np.arange(50), 100.0 - np.arange(50)).smoothed(9)
    assert smooth.losses == pytest.approx(100.0 - smooth.moments)


def test_a_level_is_the_mean_of_its_window_and_its_error_is_honest() -> None:
    curves = [noisy(lambda t: 1 - t / 400, points=200, noise=0.1, seed=seed) for seed in range(200)]
    means, errors = np.array([level(curve.moments[-40:], curve.losses[-40:]) for curve in curves]).T
    assert means.mean() == pytest.approx(1 - 180.5 / 400, abs=4 * 0.1 / math.sqrt(40 * 200))
    assert np.mean(errors) == pytest.approx(means.std(), rel=0.25)


def test_neighbours_that_go_together_count_as_fewer_points() -> None:
    random = np.random.default_rng(0)
    steps = np.zeros((300, 200))
    for t in range(1, 200):
        steps[:, t] = 0.7 * steps[:, t - 1] + random.normal(size=300)
    means, errors = np.array([level(np.arange(160, 200), row[160:]) for row in steps]).T
    assert np.mean(errors) == pytest.approx(means.std(), rel=0.35)


def test_a_curve_is_read_off_a_trace() -> None:
    rows = {"write": np.array([1, 1, 2, 3]), "loss": np.array([4.0, 2.0, 2.0, 1.0])}
    trace = Trace(rows=rows, evaluated={"update": np.array([1, 3]), "loss": np.array([3.0, 1.0])})
    assert LossCurve.of(trace).losses.tolist() == [3.0, 2.0, 1.0]
    assert LossCurve.of(trace, "loss").moments.tolist() == [1.0, 3.0]
    with pytest.raises(ConfigurationError, match="evaluated for"):
        LossCurve.of(trace, "accuracy")


# --- Decays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("law", "targets"),
    [(exponential, (1.0, 0.7, 0.53)), (power, (0.8, 0.5, 0.35)), (slow, (1.5, 1.3, 1.2))],
)
def test_the_80_percent_interval_covers_the_truth_about_as_often(law: Law, targets: tuple[float, ...]) -> None:
    """Targets inside and beyond the data."""
    times = np.linspace(0, 1000, 100_001)
    truths = [float(times[np.argmax(law(times) <= target)]) for target in targets]
    covered = np.zeros(len(targets))
    for seed in range(20):
        fitted = fit(noisy(law, points=150, noise=0.05, seed=seed), draws=200, seed=seed)
        reached = [fitted.updates_to(target) for target in targets]
        covered += [estimate.low <= truth <= estimate.high for estimate, truth in zip(reached, truths, strict=True)]
    assert max(truths) > 150
    assert (covered >= 0.6 * 20).all(), covered
    assert covered.mean() <= 0.95 * 20, covered


def test_the_interval_allows_for_noise_that_goes_on_for_a_while() -> None:
    covered = 0
    for seed in range(20):
        random, noise = np.random.default_rng(seed), np.zeros(200)
        for t in range(1, 200):
            noise[t] = 0.8 * noise[t - 1] + 0.03 * random.normal()
        curve = LossCurve(np.arange(1, 201), power(np.arange(1, 201)) + noise)
        reached = fit(curve, lowest=-math.inf, draws=200).updates_to(0.5)
        covered += reached.low <= 20 * (2 / 0.3 - 1) <= reached.high
    assert 0.6 * 20 <= covered <= 0.95 * 20


def test_a_start_that_is_no_decay_is_left_out_and_targets_in_it_are_read_off() -> None:
    """Training that starts slowly: a sigmoid whose tail is an exponential, with noise that falls with the loss."""
    moments = np.arange(1, 351)
    losses = 0.1 + 2.2 / (1 + np.exp((moments - 150) / 40))
    for seed in range(8):
        noise = 0.1 * losses * np.random.default_rng(seed).normal(size=350)
        fitted = fit(LossCurve(moments, losses + noise), draws=100)
        assert len(fitted.skipped)
        for target, within in ((2.0, 30), (0.5, 7), (0.15, 10)):
            truth = 150 + 40 * math.log(2.2 / (target - 0.1) - 1)
            assert fitted.updates_to(target).value == pytest.approx(truth, abs=within)


@given(st.lists(st.floats(0, 1e9), min_size=8, max_size=60), st.floats(0, 1e9))
@example([162507340.0, 565999585.0, 20.0, 13287012.0, 0.0, 0.0, 0.0, 0.0], 2.1300272834346146e-74)
@settings(max_examples=25, deadline=None)
def test_any_curve_has_a_verdict(losses: list[float], target: float) -> None:
    verdict = fit_decay(curve_of(np.arange(len(losses)), losses), draws=30)
    reached = verdict.updates_to(target)
    assert 0 <= reached.low <= reached.value <= reached.high
    assert 0 <= reached.probability <= 1
    assert not math.isnan(reached.value)


@pytest.mark.parametrize(("law", "family"), [(exponential, "exponential"), (power, "power"), (slow, "power")])
def test_the_family_and_the_parameters_of_a_clean_decay_are_found(law: Law, family: str) -> None:
    fitted = fit(noisy(law, noise=0.001))
    assert fitted.family == family
    made: dict[Law, tuple[float, float, int, float]] = {
        exponential: (0.5, 2, 40, math.inf),
        power: (0.2, 2, 20, 1),
        slow: (1, 1.5, 5, 0.5),
    }
    floor, drop, tau, exponent = made[law]
    assert (fitted.floor, fitted.drop) == pytest.approx((floor, drop), rel=0.05)
    assert (fitted.tau, fitted.power) == pytest.approx((tau, exponent), rel=0.15)
    assert fitted.noise == pytest.approx(0.001, rel=0.2)
    assert loss_at(fitted, 100.0) == pytest.approx(float(law(np.array(100.0))), rel=0.01)


@FEW
@given(st.floats(1e-3, 1e4), st.floats(1e-3, 1e3), st.integers(0, 5))
def test_units_do_not_matter(per_update: float, per_loss: float, seed: int) -> None:
    curve = noisy(power, seed=seed)
    scaled = LossCurve(per_update * curve.moments, per_loss * curve.losses)
    for target in (0.8, 0.4):
        one, other = fit(curve, draws=50).updates_to(target), fit(scaled, draws=50).updates_to(per_loss * target)
        for name in ("low", "value", "high"):
            assert getattr(other, name) == pytest.approx(per_update * getattr(one, name), rel=1e-3)


@FEW
@given(st.integers(0, 1000), st.lists(st.floats(0.0, 3.0), min_size=2, max_size=6), st.floats(0.1, 0.9))
def test_lower_targets_take_longer_and_wider_intervals_hold_narrower_ones(
    seed: int, targets: list[float], level: float
) -> None:
    fitted = fit(noisy(slow, seed=seed, points=60, noise=0.1), draws=100)
    reached = [fitted.updates_to(target) for target in sorted(targets, reverse=True)]
    for one, other in pairwise(reached):
        assert one.low <= other.low
        assert one.value <= other.value
        assert one.high <= other.high
        assert one.probability >= other.probability
    for target in targets:
        inner, outer = fitted.updates_to(target, level), fitted.updates_to(target, (1 + level) / 2)
        assert outer.low <= inner.low <= inner.value <= inner.high <= outer.high


def test_a_target_below_the_floor_is_never_reached_and_one_above_the_start_is_there_already() -> None:
    fitted = fit(noisy(exponential))
    assert str(fitted.updates_to(0.3)) == "never reached"
    assert fitted.updates_to(0.3).probability == 0.0
    assert fitted.updates_to(3.0) == Estimate(0.0, 0.0, 0.0)


def test_where_the_floor_is_not_known_the_interval_is_open() -> None:
    reached = fit(noisy(exponential, points=60)).updates_to(0.51)
    assert reached.high == math.inf
    assert reached.low < 40 * math.log(2 / 0.01) < math.inf
    assert 0 < reached.probability < 1


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_plateau_promises_nothing_below_it(noise: float) -> None:
    fitted = fit(noisy(lambda t: np.ones_like(t), noise=noise))
    assert fitted.updates_to(0.5).value == math.inf
    assert loss_at(fitted, 200.0) == pytest.approx(1.0, abs=0.03)


def test_a_few_spikes_and_a_loss_that_is_not_finite_do_not_matter() -> None:
    clean = noisy(power, seed=3)
    losses = clean.losses.copy()
    losses[[20, 70, 71, 150]] = [50.0, 900.0, math.nan, math.inf]
    spoilt = fit(LossCurve(clean.moments, losses))
    assert spoilt.updates_to(0.5).value == pytest.approx(fit(clean).updates_to(0.5).value, rel=0.05)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([*np.linspace(3, 1, 90), *[math.nan] * 10], "10 of 100 losses are not finite, the first at 91"),
        ([*np.linspace(3, 1, 50), *[math.inf, 1.0] * 25], "25 of 100 .* the first at 51"),
        ([math.nan] * 100, "100 of 100"),
        (np.exp(np.linspace(0, 5, 100)), "rose from"),
    ],
)
def test_divergence_is_a_verdict(losses: list[float], reason: str) -> None:
    verdict = fit_decay(curve_of(np.arange(1, 101), losses))
    assert isinstance(verdict, Diverged)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(verdict.reason)
    assert str(verdict.updates_to(0.1)) == "never reached"


def test_a_seed_in_the_same_draws_out() -> None:
    curve = noisy(power)
    assert np.array_equal(fit(curve, seed=1).draws, fit(curve, seed=1).draws)
    assert not np.array_equal(fit(curve, seed=1).draws, fit(curve, seed=2).draws)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: fit_decay(curve_of(range(1, 8), np.ones(7))), "7 points.*train for longer"),
        (lambda: fit_decay(curve_of(range(1, 9), -np.ones(8))), "pass a bound below all, or -math.inf"),
        (lambda: curve_of([1, 2], [1.0]), "one loss per moment"),
        (lambda: curve_of([2, 1], [1.0, 1.0]), "rising"),
        (lambda: curve_of([1, 2], [1.0, 1.0]).smoothed(0), "window=0"),
        (lambda: fit(noisy(power)).updates_to(1.0, level=1.0), "level=1.0"),
    ],
)
def test_errors_name_the_remedy(call: Callable[[], object], remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        call()


def test_losses_below_zero_need_no_bound() -> None:
    curve = noisy(lambda t: power(t) - 5, seed=1)
    assert fit(curve, lowest=-math.inf).updates_to(0.8 - 5).value == pytest.approx(
        fit(noisy(power, seed=1), lowest=-math.inf).updates_to(0.8).value, rel=1e-6
    )
