"""Time to a target: settings, the first batches, tuned momentum, and forecasts by the product of both efficiencies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import found, observed, search

from lightning_omni.tuning.model.forecast import Estimate
from lightning_omni.tuning.model.measurements import TrainedBatches
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.report.summary import SearchSummary

Law = Callable[[np.ndarray], np.ndarray]
FEW = settings(max_examples=30, deadline=None)
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
    return TrainedBatches(tuple(ends.tolist()), tuple(losses.tolist()))


LOST = TrainedBatches((10.0, 20.0, 30.0), ())


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
    found = TrainedBatches(tuple(np.cumsum(sizes).tolist()), tuple(losses.tolist()))
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
    for batches in (trained(LAWS["power"]), TrainedBatches((), ())):
        assert TrainedBatches.from_dict(json.loads(json.dumps(batches.to_dict()))) == batches
    again = TrainedBatches.from_dict(json.loads(json.dumps(LOST.to_dict())))
    assert not again.is_finite
    assert repr(again) == repr(LOST)


# --- Forecast --------------------------------------------------------------------------------------------------------


def test_the_best_has_the_smallest_product_of_samples_and_seconds_per_sample() -> None:
    made = search(observed(allreduce=1.0))
    best = min(made.candidates, key=made.log_time)
    products = [math.exp(made.theory(each)) / made.throughput(each) for each in made.candidates]
    assert math.exp(made.theory(best)) / made.throughput(best) == pytest.approx(min(products))


def test_intervals_hold_eight_in_ten() -> None:
    summary, setting = SearchSummary(found()), found().choice().setting
    assert width(summary.samples(setting)) == pytest.approx(2 * 1.2816 * found().theory.error(setting), rel=1e-3)


def width(estimate: Estimate) -> float:
    return math.log(estimate.high / estimate.low)


def test_the_samples_of_a_setting_are_known_whatever_its_batches_are_split_by() -> None:
    made = found()
    plain = replace(made.choice().setting, rebalance=False)
    split, more = replace(plain, rebalance=True), replace(plain, momentum=0.5 * plain.momentum)
    rates = [made.prediction(each).samples_per_second for each in (plain, split)]
    known = math.hypot(*(width(each) for each in rates))
    assert width(made.speed_up(split, plain)) == pytest.approx(known)
    assert width(made.speed_up(more, plain)) > known
