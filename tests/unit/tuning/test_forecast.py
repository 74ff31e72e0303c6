"""Time to a target: probes against known decays, efficiencies of theory and probes, and choices by their product."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_omni.tuning.model.convergence import Estimate
from lightning_omni.tuning.model.forecast import Forecast, Scaling, Setting, Theory, TrainedBatches

Law = Callable[[np.ndarray], np.ndarray]
FEW = settings(max_examples=30, deadline=None)
START = Setting(1, 0.9, 0.1)
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


def trained(law: Law, batches: int = 32, size: float = 10.0, noise: float = 0.0) -> TrainedBatches:
    """Losses are of batches before they were learnt from."""
    ends = size * np.arange(1, batches + 1)
    losses = law(ends - size) + noise * np.random.default_rng(0).normal(size=batches)
    return TrainedBatches(START, tuple(ends.tolist()), tuple(losses.tolist()))


LOST = TrainedBatches(START, (10.0, 20.0, 30.0), (1.0, 2.0, math.nan))


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


# --- The first batches ------------------------------------------------------------------------------------------------

batches_of = st.lists(st.tuples(st.floats(0.1, 50), st.floats(-5, 5)), min_size=1, max_size=20)


@FEW
@given(batches_of, st.integers(1, 12))
def test_blocks_keep_the_sum_of_all_losses(batches: list[tuple[float, float]], count: int) -> None:
    sizes, losses = np.array(batches).T
    found = TrainedBatches(START, tuple(np.cumsum(sizes).tolist()), tuple(losses.tolist()))
    blocks = found.blocks(count)
    assert blocks.shape == (count,)
    assert blocks.mean() * found.end == pytest.approx(float(sizes @ losses), rel=1e-9, abs=1e-9)


@FEW
@given(st.floats(-5, 5), st.integers(1, 30))
def test_a_loss_that_stays_is_that_of_every_block_and_scatters_in_no_way(loss: float, batches: int) -> None:
    found = trained(lambda t: np.full_like(t, loss), batches=batches)
    assert found.blocks() == pytest.approx(loss, abs=1e-9)
    assert found.level == pytest.approx(loss, abs=1e-9)
    assert found.scatter == pytest.approx(0, abs=1e-9)


def test_plain_batches_are_the_batches_even_if_their_losses_are_no_numbers() -> None:
    for found in (trained(LAWS["power"]), TrainedBatches(START, (), ())):
        assert TrainedBatches.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    again = TrainedBatches.from_dict(json.loads(json.dumps(LOST.to_dict())))
    assert not again.is_finite
    assert repr(again) == repr(LOST)


# --- Theory -----------------------------------------------------------------------------------------------------------


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
    assert theory(replace(proposed, lr=factor * proposed.lr)) >= least - 1e-9
    other = min(max(proposed.momentum + momentum, 0.0), 0.95)
    assert theory(Setting(groups, other, SGD.lr(groups, other, theory.step))) >= least - 1e-9
    assert theory(theory.setting(groups + 1)) > least
    assert theory(replace(proposed, period=3)) > least or groups == 1  # one group exchanges with none


def test_theory_never_proposes_more_momentum_than_it_starts_from() -> None:
    chosen = Theory(START, SGD).setting(4)
    assert Theory(chosen, SGD).momentum(1) == chosen.momentum < START.momentum


THEORY = Theory(START, SGD)


# --- Forecast --------------------------------------------------------------------------------------------------------


def speed(setting: Setting) -> float:
    return 100.0 * math.sqrt(setting.groups) * (1.2 if setting.rebalance else 1.0)


def forecast(samples: Estimate | None = None) -> Forecast:
    return Forecast(THEORY, speed, samples)


@FEW
@given(st.lists(setting_of, min_size=1, max_size=8))
def test_the_best_has_the_smallest_product_of_samples_and_seconds_per_sample(candidates: Sequence[Setting]) -> None:
    found = forecast()
    best = found.of(min(candidates, key=found.log_seconds))
    products = [math.exp(found.theory(each)) / speed(each) for each in candidates]
    assert math.exp(found.theory(best.setting)) / speed(best.setting) == pytest.approx(min(products))
    assert best.seconds.value == pytest.approx(min(found.of(each).seconds.value for each in candidates))


@FEW
@given(setting_of)
def test_seconds_are_samples_by_speed(setting: Setting) -> None:
    estimate = forecast(Estimate(1000.0, 800.0, 1500.0)).of(setting)
    assert estimate.samples_per_second == speed(setting)
    for ours, samples in zip(
        (estimate.seconds.low, estimate.seconds.value, estimate.seconds.high),
        (estimate.samples.low, estimate.samples.value, estimate.samples.high),
        strict=True,
    ):
        assert ours == pytest.approx(samples / speed(setting))
    assert estimate.seconds.low <= estimate.seconds.value <= estimate.seconds.high


def test_samples_of_the_setting_that_theory_starts_from_are_those_to_the_target() -> None:
    estimate = forecast(Estimate(1000.0, 900.0, 1100.0)).of(START)
    assert estimate.samples.value == pytest.approx(1000.0)


def width(estimate: Estimate) -> float:
    return math.log(estimate.high / estimate.low)


def test_intervals_hold_eight_in_ten() -> None:
    assert width(forecast().of(START).samples) == pytest.approx(2 * 1.2816 * THEORY.error(START), rel=1e-3)


def test_the_ratio_of_a_setting_to_itself_is_known_whatever_its_batches_are_split_by() -> None:
    found, other = forecast(), THEORY.setting(4)
    assert found.deviation(other, other) == found.deviation(other, replace(other, rebalance=True)) == 0
    assert found.deviation(START, other) == math.hypot(THEORY.error(START), THEORY.error(other))


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
