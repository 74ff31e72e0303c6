"""When `OmniTuner` takes a training loss for flat, and when the user's own setting has lowered it further."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_omni.tuning.callback.losses import TrainingLosses, TrialOutcome, is_falling, lowers_more
from lightning_omni.tuning.search import constants as c

LOSSES = st.floats(0.01, 10.0)


def test_a_loss_that_halves_each_epoch_is_not_flat_and_one_that_stays_is() -> None:
    assert not TrainingLosses(2.3, [2.3 * 0.5**epoch for epoch in range(6)][:3]).is_flat
    assert TrainingLosses(2.3, [0.5, 0.5, 0.5]).is_flat


def test_a_loss_near_zero_that_falls_by_a_half_is_not_flat_however_much_was_learnt() -> None:
    assert not TrainingLosses(2.3, [0.08, 0.02, 0.01]).is_flat
    assert TrainingLosses(2.3, [0.08, 0.0201, 0.02]).is_flat


def test_where_no_gradient_is_stale_a_loss_is_flat_only_if_it_does_not_fall_at_all() -> None:
    falling, level = [0.5, 0.5, 0.499], [0.5, 0.5, 0.5]
    assert TrainingLosses(2.3, falling).is_flat
    assert not TrainingLosses(2.3, falling, is_stale=False).is_flat
    assert TrainingLosses(2.3, level, is_stale=False).is_flat
    rounded = [0.9, 0.89999998, 0.89999995]  # the same loss, in single precision
    assert TrainingLosses(2.3, rounded, is_stale=False).is_flat


def test_few_epochs_say_nothing() -> None:
    for count in range(c.FEWEST_WINDOWS):
        assert not TrainingLosses(2.3, [0.5] * count).is_flat


@given(st.lists(LOSSES, max_size=30))
def test_without_a_loss_of_the_start_nothing_is_flat(losses: list[float]) -> None:
    assert not TrainingLosses(math.nan, losses).is_flat


@given(LOSSES, st.lists(LOSSES, min_size=3, max_size=30), st.floats(0.1, 100.0))
def test_it_makes_no_difference_in_what_unit_a_loss_is(first: float, losses: list[float], unit: float) -> None:
    plain, scaled = TrainingLosses(first, losses), TrainingLosses(unit * first, [unit * loss for loss in losses])
    assert scaled.gained == pytest.approx(unit * plain.gained, abs=1e-6 * unit)
    limits = c.FLAT * abs(first - plain.now), c.CLEAR_CHANGE * plain.now
    if all(abs(plain.gained - limit) > 1e-6 for limit in limits):
        assert scaled.is_flat == plain.is_flat


@given(st.integers(3, 200), st.floats(0.2, 2.0))
def test_a_power_law_is_flat_once_its_gain_is_a_small_part_of_what_was_learnt(count: int, power: float) -> None:
    # It falls by always the same part of itself: near the limit for that, rounding to whole epochs decides.
    assume(abs(c.LONGER**power - 1 - c.CLEAR_CHANGE) > 0.05)
    curve = TrainingLosses(2.0, [epoch**-power for epoch in range(1, count + 1)])
    longer = TrainingLosses(2.0, [epoch**-power for epoch in range(1, 4 * count + 1)])
    # Windows are whole epochs: after 6 the last is compared with the 4th, which were 1.5 times fewer and not 1.6.
    assert longer.gained <= 1.03 * curve.gained + 1e-9
    assert not curve.is_flat or longer.is_flat


def test_a_trial_is_better_only_if_it_lowers_the_loss_by_more_than_was_gained_of_late() -> None:
    curve = TrainingLosses(2.0, [1.0, 0.82, 0.80])
    assert curve.gained == pytest.approx(0.02)
    assert lowers_more([0.77, 0.77, 0.77], curve)
    assert not lowers_more([0.79, 0.79, 0.79], curve)


def test_a_trial_whose_losses_scatter_by_more_than_it_has_gained_is_not_better() -> None:
    curve = TrainingLosses(2.0, [1.0, 0.82, 0.80])
    assert lowers_more([0.70, 0.80], curve) is False
    assert lowers_more([0.74, 0.76], curve)


def test_a_trial_that_changes_nothing_is_not_better() -> None:
    flat = TrainingLosses(0.9, [0.9, 0.9, 0.9])
    assert flat.is_flat
    assert not lowers_more([0.9 - 1e-8] * 5, flat)


def test_where_the_loss_rises_a_trial_need_only_lower_it() -> None:
    rising = TrainingLosses(2.0, [0.5, 0.6, 0.7])
    assert rising.is_flat
    assert lowers_more([0.69, 0.69], rising)


def test_of_a_trial_the_last_part_counts() -> None:
    curve = TrainingLosses(2.0, [1.0, 0.82, 0.80])
    raised_at_first = [0.9] * 30
    assert TrialOutcome.of([*raised_at_first, *[0.7] * 20], curve) is TrialOutcome.BETTER
    assert TrialOutcome.of([*raised_at_first, *[0.79] * 20], curve) is TrialOutcome.NEITHER
    assert TrialOutcome.of([*raised_at_first, *[0.81] * 20], curve) is TrialOutcome.WORSE


@pytest.mark.parametrize("losses", [[], [math.nan] * 10])
def test_a_trial_without_a_loss_is_worse(losses: list[float]) -> None:
    assert TrialOutcome.of(losses, TrainingLosses(2.0, [1.0, 0.82, 0.80])) is TrialOutcome.WORSE
    assert not is_falling(losses)


def test_a_loss_that_larger_steps_have_raised_is_seen_to_fall_again() -> None:
    course = [0.018, 0.026, 0.033, 0.040, 0.038, 0.036, 0.034, 0.032, 0.029, 0.027, 0.026, 0.025]
    assert not is_falling(course[:4])
    assert is_falling(course)


def test_scatter_is_not_taken_for_a_fall() -> None:
    random = np.random.default_rng(0)
    found = [is_falling(random.normal(1.0, 0.2, 40).tolist()) for _ in range(500)]
    assert statistics.fmean(found) < 0.25


def test_each_trial_that_was_no_better_puts_the_next_one_off_for_longer() -> None:
    curve = TrainingLosses(2.3, [0.5] * 10)
    due = []
    for _ in range(4):
        curve.trial_begins()
        due.append(curve.next_trial / len(curve.windows))
        curve.windows *= 2
    assert due == pytest.approx([c.LONGER, c.LONGER**2, c.LONGER**3, c.LONGER**4])
