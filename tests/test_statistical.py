"""Updates to a target from loss curves, and momentum from staleness: against known decays and the papers' laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.aggregation import RunningMean

from lightning_omni.errors import ConfigurationError
from lightning_omni.performance.momentum import (
    Form,
    MomentumSensor,
    best_momentum,
    explicit_momentum,
    implicit_momentum,
    rate,
)
from lightning_omni.performance.statistical import (
    DecayFit,
    Diverged,
    Estimate,
    LossCurve,
    Penalty,
    fit_decay,
    rank_at_equal_updates,
    se_penalty,
)
from lightning_omni.trace import Trace

Law = Callable[[np.ndarray], np.ndarray]
FEW = settings(max_examples=15, deadline=None)


def exponential(t: np.ndarray) -> np.ndarray:
    return 0.5 + 2 * np.exp(-t / 40)


def power(t: np.ndarray) -> np.ndarray:
    return 0.2 + 2 / (1 + t / 20)


def slow(t: np.ndarray) -> np.ndarray:
    return 1 + 1.5 / np.sqrt(1 + t / 5)


def noisy(law: Law, points: int = 200, noise: float = 0.05, seed: int = 0, every: float = 1.0) -> LossCurve:
    moments = every * np.arange(1, points + 1)
    return LossCurve(moments, law(moments) + noise * np.random.default_rng(seed).normal(size=points))


def fit(curve: LossCurve, **arguments: float) -> DecayFit:
    fitted = fit_decay(curve, **arguments)  # type: ignore[arg-type]
    assert isinstance(fitted, DecayFit)
    return fitted


# --- Curves ----------------------------------------------------------------------------------------------------------


@FEW
@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(1, 15))
def test_smoothed_losses_are_those_of_the_metric_that_users_log(losses: list[float], window: int) -> None:
    metric, logged = RunningMean(window=window), []
    for loss in losses:
        metric.update(loss)
        logged.append(float(metric.compute()))
    smooth = LossCurve(np.arange(len(losses)), losses).smoothed(window)
    assert smooth.losses == pytest.approx(logged, rel=1e-5, abs=1e-5)


def test_a_smoothed_line_lies_on_the_line() -> None:
    smooth = LossCurve(np.arange(50), 100.0 - np.arange(50)).smoothed(9)
    assert smooth.losses == pytest.approx(100.0 - smooth.moments)


def test_a_level_is_the_mean_of_its_window_and_its_error_is_honest() -> None:
    levels = [noisy(lambda t: 1 - t / 400, points=200, noise=0.1, seed=seed).level() for seed in range(200)]
    means = np.array([level.mean for level in levels])
    assert {level.points for level in levels} == {40}
    assert means.mean() == pytest.approx(1 - 180.5 / 400, abs=4 * 0.1 / math.sqrt(40 * 200))
    assert np.mean([level.error for level in levels]) == pytest.approx(means.std(), rel=0.25)


def test_neighbours_that_go_together_count_as_fewer_points() -> None:
    random = np.random.default_rng(0)
    steps = np.zeros((300, 200))
    for t in range(1, 200):
        steps[:, t] = 0.7 * steps[:, t - 1] + random.normal(size=300)
    levels = [LossCurve(np.arange(1, 201), row).level() for row in steps]
    means = np.array([level.mean for level in levels])
    assert np.mean([level.error for level in levels]) == pytest.approx(means.std(), rel=0.35)


def test_probes_are_ranked_where_the_shortest_ends_and_the_diverged_come_last() -> None:
    curves = {
        "broken": LossCurve(np.arange(1, 21), [*np.ones(19), math.nan]),
        "slow but long": noisy(slow, points=400, noise=0.0),
        "fast": noisy(exponential, points=100, noise=0.0),
    }
    (first, best), (second, _), (last, worst) = rank_at_equal_updates(curves)
    assert (first, second, last) == ("fast", "slow but long", "broken")
    assert best == curves["fast"].level()
    assert worst.mean == math.inf
    assert best.beats(worst)
    assert not worst.beats(worst)


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
    for seed in range(80):
        fitted = fit(noisy(law, points=150, noise=0.05, seed=seed), draws=400, seed=seed)
        reached = [fitted.updates_to(target) for target in targets]
        covered += [estimate.low <= truth <= estimate.high for estimate, truth in zip(reached, truths, strict=True)]
    assert max(truths) > 150
    assert (covered >= 0.6 * 80).all(), covered
    assert covered.mean() <= 0.95 * 80, covered


def test_the_interval_allows_for_noise_that_goes_on_for_a_while() -> None:
    covered = 0
    for seed in range(40):
        random, noise = np.random.default_rng(seed), np.zeros(200)
        for t in range(1, 200):
            noise[t] = 0.8 * noise[t - 1] + 0.03 * random.normal()
        curve = LossCurve(np.arange(1, 201), power(np.arange(1, 201)) + noise)
        reached = fit(curve, lowest=-math.inf, draws=400).updates_to(0.5)
        covered += reached.low <= 20 * (2 / 0.3 - 1) <= reached.high
    assert 0.6 * 40 <= covered <= 0.95 * 40


def test_a_start_that_is_no_decay_is_left_out_and_targets_in_it_are_read_off() -> None:
    """Training that starts slowly: a sigmoid whose tail is an exponential, with noise that falls with the loss."""
    moments = np.arange(1, 351)
    losses = 0.1 + 2.2 / (1 + np.exp((moments - 150) / 40))
    for seed in range(20):
        noise = 0.1 * losses * np.random.default_rng(seed).normal(size=350)
        fitted = fit(LossCurve(moments, losses + noise), draws=400)
        assert len(fitted.skipped)
        for target, within in ((2.0, 30), (0.5, 7), (0.15, 10)):
            truth = 150 + 40 * math.log(2.2 / (target - 0.1) - 1)
            assert fitted.updates_to(target).value == pytest.approx(truth, abs=within)


@given(st.lists(st.floats(0, 1e9), min_size=8, max_size=60), st.floats(0, 1e9))
@example([162507340.0, 565999585.0, 20.0, 13287012.0, 0.0, 0.0, 0.0, 0.0], 2.1300272834346146e-74)
@settings(max_examples=60, deadline=None)
def test_any_curve_has_a_verdict(losses: list[float], target: float) -> None:
    verdict = fit_decay(LossCurve(np.arange(len(losses)), losses), draws=100)
    reached = verdict.updates_to(target)
    assert 0 <= reached.low <= reached.value <= reached.high
    assert 0 <= reached.probability <= 1
    assert not math.isnan(verdict.loss_at(1e6).value)


@pytest.mark.parametrize(("law", "family"), [(exponential, "exponential"), (power, "power"), (slow, "power")])
def test_the_family_and_the_parameters_of_a_clean_decay_are_found(law: Law, family: str) -> None:
    fitted = fit(noisy(law, noise=0.001))
    assert fitted.family == family
    floor, drop, tau, exponent = {exponential: (0.5, 2, 40, math.inf), power: (0.2, 2, 20, 1), slow: (1, 1.5, 5, 0.5)}[
        law
    ]
    assert (fitted.floor, fitted.drop) == pytest.approx((floor, drop), rel=0.05)
    assert (fitted.tau, fitted.power) == pytest.approx((tau, exponent), rel=0.15)
    assert fitted.noise == pytest.approx(0.001, rel=0.2)
    assert fitted.loss_at(100.0).value == pytest.approx(float(law(np.array(100.0))), rel=0.01)


@FEW
@given(st.floats(1e-3, 1e4), st.floats(1e-3, 1e3), st.integers(0, 5))
def test_units_do_not_matter(per_update: float, per_loss: float, seed: int) -> None:
    curve = noisy(power, seed=seed)
    scaled = LossCurve(per_update * curve.moments, per_loss * curve.losses)
    for target in (0.8, 0.4):
        one, other = fit(curve, draws=200).updates_to(target), fit(scaled, draws=200).updates_to(per_loss * target)
        for name in ("low", "value", "high"):
            assert getattr(other, name) == pytest.approx(per_update * getattr(one, name), rel=1e-3)


@FEW
@given(st.integers(0, 1000), st.lists(st.floats(0.0, 3.0), min_size=2, max_size=6), st.floats(0.1, 0.9))
def test_lower_targets_take_longer_and_wider_intervals_hold_narrower_ones(
    seed: int, targets: list[float], level: float
) -> None:
    fitted = fit(noisy(slow, seed=seed, points=60, noise=0.1), draws=200)
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
    assert fitted.loss_at(200.0).value == pytest.approx(1.0, abs=0.03)


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
    verdict = fit_decay(LossCurve(np.arange(1, 101), losses))
    assert isinstance(verdict, Diverged)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(verdict.reason)
    assert str(verdict.updates_to(0.1)) == str(verdict.loss_at(1e6)) == "never reached"


def test_a_seed_in_the_same_draws_out() -> None:
    curve = noisy(power)
    assert np.array_equal(fit(curve, seed=1).draws, fit(curve, seed=1).draws)
    assert not np.array_equal(fit(curve, seed=1).draws, fit(curve, seed=2).draws)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: fit_decay(LossCurve(range(1, 8), np.ones(7))), "7 points.*lengthen the probe"),
        (lambda: fit_decay(LossCurve(range(1, 9), -np.ones(8))), "pass a bound below all, or -math.inf"),
        (lambda: LossCurve([1, 2], [1.0]), "one loss per moment"),
        (lambda: LossCurve([2, 1], [1.0, 1.0]), "rising"),
        (lambda: LossCurve([1, 2], [1.0, 1.0]).level(), "widen share="),
        (lambda: LossCurve([1, 2], [1.0, 1.0]).level(share=0), "share=0"),
        (lambda: LossCurve([1, 2], [1.0, 1.0]).smoothed(0), "window=0"),
        (lambda: fit(noisy(power)).updates_to(1.0, level=1.0), "level=1.0"),
        (lambda: rank_at_equal_updates({}), "nothing to rank"),
        (lambda: Penalty({2: Estimate(1, 1, 1)}), "the penalty of 1 group"),
        (lambda: Penalty({1: Estimate(1, 1, 1)})(0), "groups=0"),
        (lambda: implicit_momentum([]), "at least one push"),
        (lambda: implicit_momentum([1, -1]), "at least one push"),
        (lambda: explicit_momentum(1.0, [1]), "total=1.0"),
        (lambda: best_momentum(1.0, 10), "implicit=1.0"),
        (lambda: best_momentum(0.0, 0.5), "condition_number=0.5"),
        (lambda: best_momentum(0.0, 5, lowest=-1.0), "lowest=-1.0"),
        (lambda: MomentumSensor(coordinates=0), "coordinates=0"),
        (lambda: MomentumSensor(form="other"), "form='other'"),  # type: ignore[arg-type]
        (lambda: MomentumSensor().update([torch.ones(2)], [torch.ones(3)], lr=0.1), "equal shapes"),
        (lambda: MomentumSensor().update([torch.ones(2)], [torch.ones(2)], lr=0.0), "positive learning rate"),
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


# --- Penalty ---------------------------------------------------------------------------------------------------------


def test_the_penalty_is_the_ratio_of_updates_and_its_interval_covers_it() -> None:
    covered = 0
    for seed in range(30):
        fits = {
            groups: fit_decay(noisy(lambda t, g=groups: exponential(t / g), seed=10 * seed + groups), draws=400)
            for groups in (1, 2)
        }
        penalty = se_penalty(fits, target=0.8)
        covered += penalty(2).low <= 2.0 <= penalty(2).high
        assert penalty(1) == Estimate(1.0, 1.0, 1.0)
    assert covered >= 0.6 * 30


@FEW
@given(st.lists(st.floats(0.5, 20.0), min_size=3, max_size=3), st.integers(1, 40))
def test_between_two_measurements_the_penalty_stays_between_them(figures: list[float], groups: int) -> None:
    knots = dict(zip((1, 3, 8, 20), (1.0, *figures), strict=True))
    penalty = Penalty({known: Estimate(figure, figure, figure) for known, figure in knots.items()})
    value = penalty(groups).value
    around = [knots[max(g for g in knots if g <= groups)], knots[min((g for g in knots if g >= groups), default=20)]]
    if groups <= 20:
        assert min(around) * (1 - 1e-9) <= value <= max(around) * (1 + 1e-9)
    else:
        assert value == pytest.approx(figures[-1] * groups / 20)


def test_what_diverged_is_infinitely_worse_and_so_is_more_of_it() -> None:
    fits = {1: fit_decay(noisy(exponential)), 4: Diverged(10.0, "a test")}
    penalty = se_penalty(fits, target=1.0)
    assert penalty(4).value == penalty(5).low == math.inf
    assert penalty(4).probability == 0.0
    assert 1 < penalty(2).value < math.inf
    fits[8] = fits[1]
    assert se_penalty(fits, target=1.0)(6).value == math.inf


@pytest.mark.parametrize("target", [0.1, 5.0])
def test_a_target_that_one_group_does_not_train_to_has_no_penalty(target: float) -> None:
    with pytest.raises(ConfigurationError, match=r"one group takes .* pass a target between"):
        se_penalty({1: fit_decay(noisy(exponential))}, target)
    with pytest.raises(ConfigurationError, match="has to be one of 1 group"):
        se_penalty({2: fit_decay(noisy(exponential))}, target)


# --- Staleness -------------------------------------------------------------------------------------------------------


def arrivals(groups: int, random: np.random.Generator, jitter: float | None = None) -> Iterator[tuple[int, int]]:
    """Clock of the read and clock before the write, update by update; exponential times unless a jitter is given."""

    def duration() -> float:
        return random.exponential() if jitter is None else 1 + jitter * random.normal()

    due, read, clock = [duration() for _ in range(groups)], [0] * groups, 0
    while True:
        group = int(np.argmin(due))
        yield read[group], clock
        clock += 1
        read[group] = clock
        due[group] += duration()


def staleness_of(groups: int, jitter: float | None = None, updates: int = 20_000) -> np.ndarray:
    pushes = arrivals(groups, np.random.default_rng(groups), jitter)
    return np.bincount([clock - read for (read, clock), _ in zip(pushes, range(updates), strict=False)])


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_exponential_work_gives_the_momentum_of_theorem_5(groups: int) -> None:
    implicit = implicit_momentum(staleness_of(groups))
    assert implicit.momentum == pytest.approx(1 - 1 / groups, abs=0.02)
    assert implicit.deviation == pytest.approx(math.sqrt(groups * (groups - 1)), rel=0.06)
    assert implicit.spread == pytest.approx(1, abs=0.06)
    assert implicit.distance < 0.03
    assert implicit.holds


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_workers_of_equal_speed_have_a_delay_and_not_a_momentum(groups: int) -> None:
    implicit = implicit_momentum(staleness_of(groups, jitter=0.06))
    assert implicit.mean == pytest.approx(groups - 1, abs=0.02)
    assert implicit.spread < 0.25
    assert implicit.distance > 0.3
    assert not implicit.holds
    assert "does not hold" in implicit.statement
    assert "does not hold" in explicit_momentum(0.9, staleness_of(groups, jitter=0.06)).statement


def test_no_staleness_no_momentum() -> None:
    implicit = implicit_momentum([7, 0, 0])
    assert (implicit.momentum, implicit.mean, implicit.distance) == (0, 0, 0)
    assert implicit.holds
    assert explicit_momentum(0.9, [7]).momentum == pytest.approx(0.9)
    assert not implicit_momentum([990, *[0] * 99, 10]).holds  # a few pushes a hundred updates late


@FEW
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(sum), st.integers(2, 50), st.floats(0, 0.99))
def test_momentum_depends_on_shares_only_and_later_pushes_bring_more(
    counts: list[int], times: int, total: float
) -> None:
    one, more = implicit_momentum(counts), implicit_momentum([times * count for count in counts])
    later = implicit_momentum([0, *counts])
    assert (more.momentum, more.distance) == pytest.approx((one.momentum, one.distance))
    assert 0 <= one.momentum < later.momentum < 1
    assert 0 <= one.distance <= 1
    advice, less = explicit_momentum(total, counts), explicit_momentum(total, [0, *counts])
    assert 0 <= less.momentum <= advice.momentum <= total
    assert advice.exceeded == (one.momentum > total)
    if not advice.exceeded:
        assert (1 - advice.momentum) * (1 - one.momentum) == pytest.approx(1 - total)
        assert advice.momentum >= advice.first_order - 1e-12


def test_asynchrony_that_exceeds_the_target_is_said() -> None:
    advice = explicit_momentum(0.5, staleness_of(8))
    assert (advice.momentum, advice.exceeded) == (0.0, True)
    assert advice.first_order == pytest.approx(0.5 - 7 / 8, abs=0.02)
    assert "exceeds the wanted total" in advice.statement


# --- Theory on a quadratic -------------------------------------------------------------------------------------------


def expected_errors(m: float, staleness: np.ndarray, lr: float, curvature: float, updates: int) -> np.ndarray:
    """Expected weight under a known distribution of staleness (Theorem 2), update by update."""
    weights, velocity = [1.0], 0.0
    for _ in range(updates):
        past = np.array([weights[max(len(weights) - 1 - late, 0)] for late in range(len(staleness))])
        velocity = m * velocity - lr * curvature * float(staleness @ past)
        weights.append(weights[-1] + velocity)
    return np.array(weights)


@pytest.mark.parametrize(("m", "u"), [(0.0, 0.0), (0.6, 0.0), (0.0, 0.5), (0.3, 0.5), (0.2, 0.75), (-0.3, 0.75)])
@pytest.mark.parametrize("curvature", [0.1, 1.0])
def test_the_rate_is_that_of_the_expected_weights(m: float, u: float, curvature: float) -> None:
    geometric = (1 - u) * u ** np.arange(200 if u else 1)
    errors = np.abs(expected_errors(m, geometric, 0.3, curvature, 160))
    # Complex roots swing: compare the largest of a window with that of one 80 updates later.
    measured = (errors[120:160].max() / errors[40:80].max()) ** (1 / 80)
    assert measured == pytest.approx(rate(m, u, 0.3, curvature), abs=0.01)


@FEW
@given(st.floats(0, 0.95), st.floats(0, 0.95), st.floats(0.01, 4))
def test_the_rate_of_either_momentum_alone_is_heavy_ball(m: float, u: float, curvature: float) -> None:
    """Theorem 7 with one momentum 0: implicit momentum is explicit momentum with a step of 1 - u."""
    for momentum, implicit, step in ((m, 0.0, 1.0), (0.0, u, 1 - u)):
        total = momentum + implicit
        roots = np.roots([1, -(1 + total - step * curvature), total])
        assert rate(momentum, implicit, 1.0, curvature) == pytest.approx(np.abs(roots).max(), abs=1e-6)
    assert rate(m, u, 1.0, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize("condition_number", [2.0, 20.0, 100.0, 1000.0])
def test_without_asynchrony_the_best_momentum_is_polyaks(condition_number: float) -> None:
    root = math.sqrt(condition_number)
    best = best_momentum(0.0, condition_number)
    assert best.momentum == pytest.approx(((root - 1) / (root + 1)) ** 2, abs=0.01)
    assert best.rate == pytest.approx((root - 1) / (root + 1), abs=0.005)
    assert best.lr == pytest.approx((2 / (1 + 1 / root)) ** 2, rel=0.02)


@pytest.mark.parametrize(
    ("condition_number", "updates", "momenta"),
    [
        (20.0, (2.2, 2.8, 6.4, 12.6, 22.2), (0.40, -0.18, -0.28, -0.31, -0.32)),
        (100.0, (5.0, 11.0, 6.8, 14.4, 28.7), (0.67, 0.13, -0.28, -0.32, -0.32)),
    ],
)
def test_more_groups_want_less_momentum_and_then_less_than_none(
    condition_number: float, updates: tuple[float, ...], momenta: tuple[float, ...]
) -> None:
    """Updates per e-fold at 1, 2, 4, 8, 16 groups, from a search on a finer grid."""
    best = [best_momentum(1 - 1 / groups, condition_number, lowest=-0.99) for groups in (1, 2, 4, 8, 16)]
    assert [-1 / math.log(each.rate) for each in best] == pytest.approx(updates, rel=0.02, abs=0.06)
    assert [each.momentum for each in best] == pytest.approx(momenta, abs=0.02)
    bounded = [best_momentum(1 - 1 / groups, condition_number) for groups in (1, 2, 4, 8, 16)]
    for free, kept in zip(best, bounded, strict=True):
        assert kept.rate >= free.rate - 1e-3
        assert kept.momentum == pytest.approx(max(0.0, free.momentum), abs=0.02)


@FEW
@given(st.sampled_from([0.0, 0.5, 0.75, 0.9]), st.sampled_from([20.0, 100.0]), st.integers(0, 1000))
def test_no_other_setting_is_faster_than_the_best(u: float, condition_number: float, seed: int) -> None:
    best, random = best_momentum(u, condition_number, lowest=-0.99), np.random.default_rng(seed)
    for m, lr in zip(random.uniform(-0.99, 0.99, 100), best.lr * np.exp(random.normal(size=100)), strict=True):
        cubics = [
            [1, -(1 + m + u - lr * (1 - u) * curvature), m + u + m * u, -m * u]
            for curvature in (1 / condition_number, 1)
        ]
        assert max(np.abs(np.roots(cubic)).max() for cubic in cubics) >= best.rate - 1e-3


def test_the_best_rate_is_no_worse_anywhere_between_the_extreme_curvatures() -> None:
    for implicit in (0.0, 0.5, 0.75):
        best = best_momentum(implicit, 100.0)
        rates = rate(best.momentum, implicit, best.lr, np.geomspace(0.01, 1.0, 200))
        assert np.max(rates) == pytest.approx(best.rate, abs=1e-6)


# --- Sensed during training ------------------------------------------------------------------------------------------


def sense(
    groups: int, m: float, noise: float = 0.0, form: Form = "cascade", updates: int = 500, seed: int = 0
) -> tuple[MomentumSensor, list[Tensor]]:
    """Trains a quadratic of 300 weights with several asynchronous groups, sensed on a part of them."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    curvature = torch.logspace(-1, 0, 300, dtype=torch.float64)
    weights = [torch.randn(300, generator=generator, dtype=torch.float64)]
    velocity, sensor, readings = torch.zeros(300, dtype=torch.float64), MomentumSensor(200, form=form), []
    for read, clock in arrivals(groups, random):
        if clock == updates:
            return sensor, readings
        gradient = curvature * weights[read] + noise * torch.randn(300, generator=generator, dtype=torch.float64)
        velocity = m * velocity + gradient
        weights.append(weights[-1] - 0.1 * velocity)
        now = weights[-1]
        sensor.update([now[:100], now[100:]], [gradient[:100], gradient[100:]], 0.1, m, clock - read)
        readings.append(sensor.compute())
    raise AssertionError


@pytest.mark.parametrize("form", ["cascade", "published"])
@pytest.mark.parametrize("m", [0.0, 0.5, 0.9])
def test_a_synchronous_run_reads_its_momentum_through_any_noise(m: float, form: Form) -> None:
    for noise in (0.0, 1.0):
        sensor, _ = sense(1, m, noise, form, updates=200)
        assert float(sensor.compute()) == pytest.approx(m, abs=1e-3)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_asynchronous_groups_read_as_momentum(groups: int) -> None:
    """1 - 1/g without explicit momentum, and (1 - total) = (1 - m) / g with it."""
    for m in (0.0, 0.5):
        _, readings = sense(groups, m)
        read = float(torch.stack(readings[150:]).median())
        assert read > m + 0.1
        assert read == pytest.approx(1 - (1 - m) / groups, abs=0.06)


def test_the_sensor_reads_the_total_that_the_explicit_momentum_was_chosen_for() -> None:
    advice = explicit_momentum(0.9, staleness_of(4))
    assert advice.momentum == pytest.approx(0.6, abs=0.02)
    _, readings = sense(4, advice.momentum)
    assert float(torch.stack(readings[150:]).median()) == pytest.approx(0.9, abs=0.06)


def test_the_published_form_misses_most_of_what_asynchrony_adds() -> None:
    """Why it is not the default: the gradient acts with a part of the learning rate only."""
    _, published = sense(4, 0.0, form="published")
    _, cascade = sense(4, 0.0)
    assert 0 < float(torch.stack(published[150:]).median()) < 0.4
    assert float(torch.stack(cascade[150:]).median()) == pytest.approx(0.75, abs=0.06)


def test_noise_pulls_an_asynchronous_reading_towards_the_middle_but_not_below_the_explicit_momentum() -> None:
    _, readings = sense(4, 0.5, noise=1.0)
    assert 0.6 < float(torch.stack(readings[150:]).median()) < 0.875


def test_a_sensor_goes_on_from_its_state() -> None:
    torch.manual_seed(0)
    steps = [(torch.randn(6, 5), torch.randn(6, 5), late % 3) for late in range(20)]
    whole, first, second = MomentumSensor(7), MomentumSensor(7), MomentumSensor(7, seed=1)
    for sensor, part in ((whole, steps), (first, steps[:12])):
        for weights, gradient, late in part:
            sensor.update([weights], [gradient], 0.1, 0.3, late)
    second.load_state_dict(first.state_dict())
    for weights, gradient, late in steps[12:]:
        second.update([weights], [gradient], 0.1, 0.3, late)
    assert torch.equal(second.compute(), whole.compute())
    assert sum(state.numel() for state in whole.state_dict().values()) == 7 * (64 + 3) + 3 * 7 + 1


def test_weights_that_stand_still_or_break_do_not_spoil_the_reading() -> None:
    sensor, x, v = MomentumSensor(memory=5), torch.tensor([1.0, -2.0, 3.0, 0.0]), torch.zeros(4)
    x, v = x.double(), v.double()
    for step in range(20):
        gradient = 0.5 * x
        v = 0.4 * v + gradient
        x = x - 0.1 * v
        shown = gradient.clone()
        shown[0] = math.nan if step == 10 else shown[0]
        sensor.update([x], [shown], lr=0.1, momentum=0.4)
    assert float(sensor.compute()) == pytest.approx(0.4, abs=1e-6)
    still = MomentumSensor()
    for _ in range(4):
        still.update([torch.ones(3)], [torch.zeros(3)], lr=0.1)
    assert math.isnan(float(still.compute()))
    still.update([torch.ones(3)], [torch.zeros(3)], lr=0.1, staleness=1000)  # passed over
    with pytest.raises(ConfigurationError, match="reset first"):
        still.update([torch.ones(2)], [torch.zeros(2)], lr=0.1)
    still.reset()
    still.update([torch.ones(2)], [torch.zeros(2)], lr=0.1)
