"""Time to a target: probes against known decays, efficiencies of theory and probes, and choices by their product."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lightning_omni.errors import ConfigurationError
from lightning_omni.performance.constants import FAILED
from lightning_omni.performance.forecast import (
    Forecast,
    SampleEfficiency,
    Scaling,
    Setting,
    Theory,
    TrialResult,
    log_costs,
    samples_to,
)
from lightning_omni.performance.statistical import Estimate

Law = Callable[[np.ndarray], np.ndarray]
FEW = settings(max_examples=30, deadline=None)
START = Setting(1, 0.9, 0.1)
PLAIN = Setting(1, 0.0, 0.1)
SGD, ADAM = Scaling(), Scaling(is_adaptive=True)
LAWS: dict[str, Law] = {
    "exponential": lambda t: 0.5 + 2 * np.exp(-t / 150),
    "power": lambda t: 0.2 + 2 / (1 + t / 60),
    "slow": lambda t: 1 + 1.5 / np.sqrt(1 + t / 30),
}

setting_of = st.builds(
    Setting,
    st.sampled_from([1, 2, 4, 8, 16]),
    st.floats(0, 0.95),
    st.floats(1e-4, 1.0),
    st.booleans(),
    st.integers(1, 4),
)


def probe(law: Law, setting: Setting = PLAIN, batches: int = 32, size: float = 10.0, noise: float = 0.0) -> TrialResult:
    """Losses are of batches before they were learnt from."""
    ends = size * np.arange(1, batches + 1)
    losses = law(ends - size) + noise * np.random.default_rng(0).normal(size=batches)
    return TrialResult(setting, tuple(ends.tolist()), tuple(losses.tolist()))


def slowed(law: Law, factor: float) -> Law:
    return lambda t: law(t / factor)


def costs_of(*tried: TrialResult) -> list[float]:
    return [cost for cost, _ in log_costs(tried)]


def diverged(setting: Setting = PLAIN) -> TrialResult:
    return TrialResult(setting, (10.0, 20.0, 30.0), (1.0, 2.0, math.nan))


# --- Settings --------------------------------------------------------------------------------------------------------


@FEW
@given(setting_of)
def test_plain_settings_are_the_settings(setting: Setting) -> None:
    assert Setting.from_dict(json.loads(json.dumps(setting.to_dict()))) == setting


@FEW
@given(setting_of, st.floats(1e-3, 10.0), st.booleans())
def test_the_rate_of_a_step_has_that_step(setting: Setting, step: float, adaptive: bool) -> None:
    scaling = Scaling(is_adaptive=adaptive)
    lr = scaling.lr(setting.groups, setting.momentum, step)
    assert scaling.step(Setting(setting.groups, setting.momentum, lr)) == pytest.approx(step, rel=1e-6)


@FEW
@given(st.floats(0, 0.95), st.integers(1, 16), st.floats(0.01, 1.0))
def test_of_equal_steps_samples_move_weights_alike(momentum: float, groups: int, step: float) -> None:
    # A group has a g-th of the batch, so a sample weighs g times as much; a gradient acts 1 / (1 - m) times.
    lr = SGD.lr(groups, momentum, step)
    assert lr * groups / (1 - momentum) == pytest.approx(step)
    assert ADAM.lr(groups, momentum, step) == ADAM.lr(groups, 0.0, step) == pytest.approx(step / math.sqrt(groups))


# --- Intervals -------------------------------------------------------------------------------------------------------

batches_of = st.lists(st.tuples(st.floats(0.1, 50), st.floats(-5, 5)), min_size=1, max_size=20)


@FEW
@given(batches_of, st.integers(1, 12))
def test_blocks_keep_the_sum_of_all_losses(batches: list[tuple[float, float]], count: int) -> None:
    sizes, losses = np.array(batches).T
    tried = TrialResult(START, tuple(np.cumsum(sizes).tolist()), tuple(losses.tolist()))
    blocks = tried.blocks(tried.end, count)
    assert blocks.shape == (count,)
    assert blocks.mean() * tried.end == pytest.approx(float(sizes @ losses), rel=1e-9, abs=1e-9)


@FEW
@given(batches_of, st.integers(1, 6), st.floats(0.05, 1.0))
def test_two_blocks_are_together_one_of_twice_the_length(
    batches: list[tuple[float, float]], count: int, part: float
) -> None:
    sizes, losses = np.array(batches).T
    tried = TrialResult(START, tuple(np.cumsum(sizes).tolist()), tuple(losses.tolist()))
    fine, coarse = tried.blocks(part * tried.end, 2 * count), tried.blocks(part * tried.end, count)
    assert fine.reshape(count, 2).mean(axis=1) == pytest.approx(coarse, abs=1e-6)


@FEW
@given(st.floats(-5, 5), st.integers(1, 30), st.floats(0.1, 1.0))
def test_a_loss_that_stays_is_that_of_every_block(loss: float, batches: int, part: float) -> None:
    tried = probe(lambda t: np.full_like(t, loss), batches=batches)
    assert tried.blocks(part * tried.end) == pytest.approx(loss, abs=1e-9)


def test_plain_probes_are_the_probes_even_if_they_diverged() -> None:
    for tried in (probe(LAWS["power"]), TrialResult(START, (), (), 3.0, "died")):
        assert TrialResult.from_dict(json.loads(json.dumps(tried.to_dict()))) == tried
    again = TrialResult.from_dict(json.loads(json.dumps(diverged().to_dict())))
    assert again.has_failed
    assert repr(again) == repr(diverged())


# --- Costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@FEW
@example(factor=math.nextafter(1, 2), batches=52)
@given(factor=st.floats(1, 3), batches=st.integers(14, 60))
def test_a_curve_that_is_slower_by_a_factor_costs_that_factor(law: Law, factor: float, batches: int) -> None:
    best, cost = costs_of(probe(law, batches=batches), probe(slowed(law, factor), batches=batches))
    assert min(best, cost) == 0.0  # at a factor of 1, rounding decides
    assert math.exp(cost - best) == pytest.approx(factor, rel=0.15)


@FEW
@given(
    st.lists(
        st.tuples(st.integers(2, 20), st.sampled_from([0.0, 0.6]), st.booleans()),
        min_size=1,
        unique_by=lambda each: each[0],
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_of_probes_does_not_count(kinds: list[tuple[int, float, bool]], random: Random) -> None:
    tried = [
        diverged() if broken else probe(slowed(LAWS["power"], quarters / 4), Setting(1, momentum, 0.1))
        for quarters, momentum, broken in kinds
    ]
    order = list(range(len(tried)))
    random.shuffle(order)
    costs = log_costs(tried)
    assert log_costs([tried[i] for i in order]) == [costs[i] for i in order]


@FEW
@given(st.floats(0.01, 100), st.floats(-50, 50), st.lists(st.floats(1, 4), min_size=2, max_size=4))
def test_units_of_loss_and_of_samples_do_not_count(scale: float, shift: float, factors: list[float]) -> None:
    laws = [slowed(LAWS["power"], factor) for factor in factors]
    plain = costs_of(*(probe(law) for law in laws))

    def elsewhere(law: Law) -> Law:
        return lambda t: scale * law(t / 7) + shift

    changed = costs_of(*(probe(elsewhere(law), size=70.0) for law in laws))
    assert changed == pytest.approx(plain, abs=1e-5)


@FEW
@given(st.lists(st.floats(1, 8), min_size=2, max_size=5, unique=True))
def test_slower_curves_cost_more(factors: list[float]) -> None:
    assume(all(abs(math.log(a / b)) > 0.02 for i, a in enumerate(factors) for b in factors[:i]))
    costs = costs_of(*(probe(slowed(LAWS["exponential"], factor)) for factor in factors))
    assert min(costs) == 0.0
    assert np.argsort(costs).tolist() == np.argsort(factors).tolist()


@pytest.mark.parametrize("problem", ["rank 3 was lost", ""])
def test_what_diverged_costs_infinitely_much_and_no_other_anything(problem: str) -> None:
    law = LAWS["power"]
    sound = [probe(law), probe(slowed(law, 2))]
    broken = TrialResult(START, sound[0].samples[:5], sound[0].losses[:5], 0.0, problem) if problem else diverged()
    worse = probe(lambda t: 3 + t / 100)  # finite, but it only ever got worse
    assert costs_of(*sound, broken, worse) == [*costs_of(*sound), math.inf, math.inf]
    assert costs_of(broken, broken) == [math.inf, math.inf]
    assert log_costs([]) == []


def test_probes_are_compared_where_the_shortest_ends() -> None:
    law = LAWS["power"]
    short, longer = probe(slowed(law, 2), batches=20), probe(law, batches=50)
    cut = probe(law, batches=20)
    assert log_costs([short, longer]) == log_costs([short, cut])


def test_batches_of_other_sizes_are_compared_on_the_same_samples() -> None:
    law = LAWS["exponential"]
    small, large = probe(law, size=5.0, batches=80), probe(slowed(law, 2), size=20.0, batches=20)
    assert math.exp(costs_of(small, large)[1]) == pytest.approx(2.0, rel=0.2)


def test_noise_is_told_as_an_error() -> None:
    law = LAWS["exponential"]
    errors = [log_costs([probe(law), probe(slowed(law, 1.5), noise=noise)])[1][1] for noise in (0.0, 0.02, 0.2)]
    assert errors == sorted(errors)
    assert errors[-1] > 2 * errors[0]


def test_where_none_learns_nothing_is_known() -> None:
    flat = probe(lambda t: np.ones_like(t))
    assert all(cost == 0.0 and error >= 0.5 for cost, error in log_costs([flat, flat]))


def heavy_ball(momentum: float, lr: float, updates: int) -> TrialResult:
    """On a quadratic bowl of condition number 30, without noise."""
    curvature = np.geomspace(1 / 30, 1, 12)
    place, velocity, losses = np.ones(12), np.zeros(12), []
    for _ in range(updates):
        losses.append(0.5 * float(curvature @ place**2))
        velocity = momentum * velocity + curvature * place
        place = place - lr * velocity
    return TrialResult(Setting(1, momentum, lr), tuple(10.0 * np.arange(1, updates + 1)), tuple(losses))


@pytest.mark.parametrize("updates", [16, 40])
@pytest.mark.parametrize("momentum", [0.3, 0.6, 0.8, 0.9])
def test_the_beginning_of_momentum_is_not_counted_against_it(momentum: float, updates: int) -> None:
    for lr in (0.05, 0.2, 0.4):
        plain, heavy = heavy_ball(0.0, lr, updates), heavy_ball(momentum, (1 - momentum) * lr, updates)
        assert 0.7 < math.exp(costs_of(plain, heavy)[1]) < 1.45
        as_if_without = TrialResult(plain.setting, heavy.samples, heavy.losses)
        assert costs_of(plain, heavy)[1] <= costs_of(plain, as_if_without)[1]


# --- Theory ----------------------------------------------------------------------------------------------------------


@FEW
@given(st.sampled_from([1, 2, 4, 8]), st.floats(0, 0.95), st.floats(1e-3, 1.0), st.integers(1, 32), st.booleans())
def test_theory_keeps_the_step_and_explicit_and_implicit_momentum_together(
    started: int, momentum: float, lr: float, groups: int, adaptive: bool
) -> None:
    theory = Theory(Setting(started, momentum, lr), Scaling(is_adaptive=adaptive))
    proposed = theory.setting(groups)
    assert theory.scaling.step(proposed) == pytest.approx(theory.step, rel=1e-3)
    own = theory.setting(started)
    assert (own.momentum, own.lr) == pytest.approx((momentum, lr), rel=1e-3, abs=1e-5)
    if adaptive:
        assert proposed.momentum == momentum
    elif 0 < proposed.momentum < momentum:
        assert 1 - (1 - proposed.momentum) / groups == pytest.approx(theory.total_momentum, abs=1e-5)
    elif proposed.momentum < momentum:
        assert 1 - 1 / groups >= theory.total_momentum - 1e-5  # implicit momentum alone is more


@FEW
@given(st.integers(1, 16), st.floats(0.1, 10), st.floats(-0.5, 0.5))
def test_theory_expects_least_of_what_it_proposes_and_more_of_staler_settings(
    groups: int, factor: float, momentum: float
) -> None:
    theory = Theory(START, SGD)
    proposed = theory.setting(groups)
    least = theory(proposed)
    assert theory(START) == pytest.approx(0.0, abs=1e-6)
    assert theory(theory.setting(groups, factor=factor)) >= least - 1e-9
    other = min(max(proposed.momentum + momentum, 0.0), 0.95)
    assert theory(Setting(groups, other, SGD.lr(groups, other, theory.step))) >= least - 1e-9
    assert theory(theory.setting(groups + 1)) > least
    assert theory(theory.setting(groups, period=3)) > least or groups == 1  # one group exchanges with none


def test_from_what_a_search_has_chosen_theory_finds_back_to_the_users_momentum() -> None:
    chosen = Theory(START, SGD).setting(4)
    assert Theory(chosen, SGD).momentum(1) == chosen.momentum < START.momentum
    back = Theory(chosen, SGD, most=START.momentum).setting(1)
    assert (back.momentum, back.lr) == pytest.approx((START.momentum, START.lr))


# --- Sample efficiency ------------------------------------------------------------------------------------------------

THEORY = Theory(START, SGD)
FAR = Setting(64, 0.0, 5.0, period=16)


def test_without_probes_pace_is_theory() -> None:
    efficiency = SampleEfficiency(THEORY)
    for setting in (START, THEORY.setting(8), FAR):
        mean, error = efficiency(setting)
        assert mean == THEORY(setting)
        assert error == efficiency(START)[1] > 0.1


def test_the_ratio_of_a_setting_to_itself_is_known_and_that_to_its_neighbours_better_than_to_others() -> None:
    tried = [THEORY.setting(1), THEORY.setting(8)]
    for efficiency in (SampleEfficiency(THEORY), SampleEfficiency(THEORY, tried, [0.0, 0.3], [0.0, 0.0])):
        assert efficiency.deviation(FAR, FAR) == 0.0
        near, far = efficiency.deviation(START, THEORY.setting(2)), efficiency.deviation(START, FAR)
        assert 0 < near < far == pytest.approx(efficiency.deviation(FAR, START))
        assert far <= math.hypot(efficiency(START)[1], efficiency(FAR)[1]) + 1e-9  # that of what is independent


@FEW
@given(st.lists(st.floats(-1, 1), min_size=3, max_size=3), st.floats(-3, 3))
def test_pace_goes_through_the_probes_and_back_to_theory(off: list[float], constant: float) -> None:
    tried = [THEORY.setting(1), THEORY.setting(8), THEORY.setting(8, factor=0.1)]
    costs = [THEORY(setting) + each + constant for setting, each in zip(tried, off, strict=True)]
    efficiency = SampleEfficiency(THEORY, tried, costs, [0.0] * 3, noise=0.02)
    at = [efficiency(setting) for setting in tried]
    for (mean, error), cost in zip(at, costs, strict=True):
        assert mean - efficiency.offset == pytest.approx(cost, abs=0.05)
        assert error < 0.15
    mean, error = efficiency(FAR)
    assert mean == pytest.approx(THEORY(FAR), abs=0.02)
    assert error > 3 * max(error for _, error in at)


@FEW
@given(st.floats(-5, 5))
def test_a_constant_in_all_costs_says_nothing(constant: float) -> None:
    tried = [THEORY.setting(1), THEORY.setting(4), THEORY.setting(16)]
    costs = np.array([0.0, 0.4, 0.3])
    one, other = SampleEfficiency(THEORY, tried, list(costs)), SampleEfficiency(THEORY, tried, list(costs + constant))
    for setting in (*tried, THEORY.setting(2), FAR):
        assert other(setting) == pytest.approx(one(setting), abs=1e-6)


@FEW
@given(st.floats(1.0, 30.0), st.floats(1.0, 30.0))
def test_deviations_grow_with_the_distance_to_the_probes(near: float, far: float) -> None:
    assume(near < far)
    efficiency = SampleEfficiency(THEORY, [START], [0.0], [0.0])
    for power in (1, -1):
        at, beyond = (THEORY.setting(1, factor=factor**power) for factor in (near, far))
        assert efficiency(at)[1] <= efficiency(beyond)[1] + 1e-9


def test_probes_with_large_errors_say_less() -> None:
    tried, costs = [THEORY.setting(1), THEORY.setting(8)], [0.0, 1.5]
    sure, unsure = (SampleEfficiency(THEORY, tried, costs, [error] * 2) for error in (0.0, 0.8))
    expected = THEORY(tried[1]) - THEORY(tried[0])
    gaps = [efficiency(tried[1])[0] - efficiency(tried[0])[0] for efficiency in (sure, unsure)]
    assert abs(gaps[0] - 1.5) < abs(gaps[1] - 1.5)
    assert abs(gaps[1] - expected) < abs(gaps[0] - expected)
    assert unsure(START)[1] > sure(START)[1]


def test_what_diverged_counts_as_some_times_as_slow_as_the_slowest() -> None:
    law = LAWS["power"]
    large = THEORY.setting(1, factor=8.0)
    tried = [probe(law, START), probe(slowed(law, 2), THEORY.setting(4)), diverged(large)]
    efficiency = SampleEfficiency.of(THEORY, tried)
    costs = costs_of(*tried)
    assert efficiency.costs == [*costs[:2], pytest.approx(max(costs[:2]) + math.log(FAILED))]
    assert efficiency(large)[0] > efficiency(START)[0]
    assert all(math.isfinite(each) for each in efficiency(FAR))
    assert all(math.isfinite(each) for each in SampleEfficiency.of(THEORY, [diverged(), diverged(large)])(START))


# --- Forecast --------------------------------------------------------------------------------------------------------


def speed(setting: Setting) -> float:
    return 100.0 * math.sqrt(setting.groups) * (1.2 if setting.rebalance else 1.0)


def forecast(samples: Estimate | None = None, level: float = 0.8) -> Forecast:
    tried = [THEORY.setting(1), THEORY.setting(8)]
    return Forecast(SampleEfficiency(THEORY, tried, [0.0, 0.3], [0.05, 0.05]), speed, samples, tried, level)


@FEW
@given(st.lists(setting_of, min_size=1, max_size=8))
def test_the_best_has_the_smallest_product_of_samples_and_seconds_per_sample(candidates: Sequence[Setting]) -> None:
    found = forecast()
    best = found.of(min(candidates, key=found.log_seconds))
    products = [math.exp(found.efficiency(each)[0]) / speed(each) for each in candidates]
    assert math.exp(found.efficiency(best.setting)[0]) / speed(best.setting) == pytest.approx(min(products))
    assert best.seconds.value == pytest.approx(min(found.of(each).seconds.value for each in candidates))


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, math.nan])
def test_a_level_is_a_probability(level: float) -> None:
    with pytest.raises(ConfigurationError, match="level="):
        forecast(level=level)


@FEW
@given(setting_of)
def test_seconds_are_samples_by_speed(setting: Setting) -> None:
    estimate = forecast(Estimate(1000.0, 800.0, 1500.0, 0.9)).of(setting)
    assert estimate.samples_per_second == speed(setting)
    for ours, samples in zip(
        (estimate.seconds.low, estimate.seconds.value, estimate.seconds.high),
        (estimate.samples.low, estimate.samples.value, estimate.samples.high),
        strict=True,
    ):
        assert ours == pytest.approx(samples / speed(setting))
    assert estimate.seconds.low <= estimate.seconds.value <= estimate.seconds.high
    assert estimate.seconds.probability == 0.9


def test_samples_of_the_best_probe_are_those_to_the_target() -> None:
    estimate = forecast(Estimate(1000.0, 900.0, 1100.0)).of(THEORY.setting(1))
    assert estimate.samples.value == pytest.approx(1000.0, rel=0.05)
    assert estimate.is_measured
    assert not forecast().of(THEORY.setting(2)).is_measured


def width(estimate: Estimate) -> float:
    return math.log(estimate.high / estimate.low)


def test_intervals_widen_away_from_probes_and_with_their_probability() -> None:
    places = [THEORY.setting(1), THEORY.setting(1, factor=3.0), THEORY.setting(1, factor=10.0), FAR]
    widths = [width(forecast().of(setting).seconds) for setting in places]
    assert widths == sorted(widths)
    assert widths[-1] > widths[0]
    levels = [width(forecast(level=level).of(START).seconds) for level in (0.5, 0.8, 0.95)]
    assert levels == sorted(levels)
    # Two standard deviations either way hold 95.45 %.
    assert width(forecast(level=0.9545).of(FAR).samples) == pytest.approx(4 * forecast().efficiency(FAR)[1], rel=1e-3)


def test_systems_are_what_they_would_have_set() -> None:
    systems = forecast().of_systems(ranks=8, saturating=4)
    by_word = {name.split(" ")[0].strip(","): estimate.setting for name, estimate in systems.items()}
    assert by_word["DDP"] == START
    assert by_word["proportional"] == Setting(1, 0.9, 0.1, rebalance=True)
    assert by_word["Downpour"] == Setting(8, 0.9, 0.1)
    assert by_word["Rudra"] == Setting(8, 0.9, by_word["Rudra"].lr)
    assert by_word["Rudra"].lr == pytest.approx(0.1 / 7)
    assert by_word["Omnivore"] == THEORY.setting(4)
    assert all(estimate.seconds.value > 0 for estimate in systems.values())
    faster = systems["proportional batches"].seconds.value / systems["DDP, Horovod (synchronous)"].seconds.value
    assert faster == pytest.approx(1 / 1.2)  # the gradient is the same


# --- Samples to a loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "target", "truth"), [("exponential", 0.8, 284.6), ("power", 0.4, 540.0)])
def test_samples_to_a_loss_are_those_of_the_best_curve(name: str, target: float, truth: float) -> None:
    law = LAWS[name]
    tried = [probe(slowed(law, 3), noise=0.01), probe(law, noise=0.01), diverged()]
    found = samples_to(target, tried)
    assert found is not None
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(truth, rel=0.25)


def test_of_what_never_comes_there_or_is_too_short_nothing_is_said() -> None:
    assert samples_to(0.1, []) is None
    assert samples_to(0.1, [diverged()]) is None
    assert samples_to(0.1, [probe(LAWS["power"], batches=5)]) is None
    assert samples_to(-5.0, [probe(LAWS["exponential"], batches=60, noise=0.01)]) is None
