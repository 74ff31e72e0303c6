"""When a run under way is said to have become faster or slower: by training alone, and by more than noise."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from lightning_omni.tuning.callback.speed import RunThroughput, Speed, SpeedHistory, TimedBatches

BATCH = 8


def epoch_of(seconds: np.ndarray) -> Speed:
    """An epoch of one rank whose batches take so long."""
    moments = iter([0.0, *itertools.accumulate(seconds)])
    counted = RunThroughput(clock=lambda: float(next(moments)))
    counted.interrupt()
    for _ in range(len(seconds) + 1):  # the first is not timed
        counted.batch_done(BATCH)
    taken = counted.take()
    assert taken.timed == BATCH * len(seconds)
    return Speed(taken.timed, taken.seconds, taken.error)


def test_the_error_is_the_standard_error_of_the_mean() -> None:
    seconds = np.random.default_rng(0).exponential(0.1, 500)
    assert epoch_of(seconds).error == pytest.approx(seconds.std(ddof=1) / np.sqrt(500) / seconds.mean())


def test_ranks_and_epochs_add_up() -> None:
    first, second = np.random.default_rng(1).exponential(0.1, (2, 300))
    both, whole = epoch_of(first) + epoch_of(second), epoch_of(np.concatenate([first, second]))
    assert (both.samples, both.seconds) == pytest.approx((whole.samples, whole.seconds))
    assert both.error == pytest.approx(whole.error, rel=0.05)
    assert TimedBatches(8, 1.0, 1, 1.0) + TimedBatches() == TimedBatches(8, 1.0, 1, 1.0)


def seem_changed(epochs: Iterable[Speed]) -> bool:
    """Whether a run of these looks at any of their ends as if it had become faster or slower."""
    history = SpeedHistory()
    return any(history.add(epoch) for epoch in epochs)


def test_of_one_batch_the_error_is_not_known() -> None:
    assert np.isinf(epoch_of(np.array([0.1])).error)


def test_of_a_rank_whose_batches_were_not_timed_the_rate_is_not_known() -> None:
    assert np.isinf(TimedBatches().variance)
    assert np.isinf(TimedBatches(BATCH, 0.1, 1, 0.01).variance)
    assert TimedBatches(2 * BATCH, 1.0, 2, 0.5).variance == pytest.approx(0.0)


@pytest.mark.parametrize("batches", [8, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (16, 64))])
def test_random_step_times_are_seldom_taken_for_another_speed_in_a_whole_run(batches: int) -> None:
    random = np.random.default_rng(batches)
    runs, epochs = 20, 60
    wrong = sum(seem_changed(epoch_of(random.exponential(0.1, batches)) for _ in range(epochs)) for _ in range(runs))
    assert wrong <= 0.1 * runs


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_steps_that_take_another_time_are_noticed_whether_they_are_random_or_not(factor: float) -> None:
    random = np.random.default_rng(3)
    for before, now in (
        (np.full(32, 0.1), np.full(32, 0.1 * factor)),
        (random.exponential(0.1, 200), random.exponential(0.1 * factor, 200)),
    ):
        assert seem_changed([epoch_of(before), epoch_of(now)])


def test_a_change_that_one_epoch_does_not_show_is_noticed_in_some_of_them() -> None:
    random = np.random.default_rng(4)
    before = [epoch_of(random.exponential(0.1, 24)) for _ in range(20)]
    after = [epoch_of(random.exponential(0.15, 24)) for _ in range(16)]
    assert not seem_changed([*before, after[0]])
    assert seem_changed([*before, *after])


def test_a_change_by_less_than_matters_is_not_one() -> None:
    assert not seem_changed(epoch_of(np.full(32, seconds)) for seconds in (0.1, 0.1, 0.118, 0.118, 0.118))


def test_a_validation_does_not_make_a_run_slower() -> None:
    moments = iter([0.0, 1.0, 2.0, 50.0, 51.0, 52.0])
    counted = RunThroughput(clock=lambda: next(moments))
    counted.interrupt()
    for _ in range(3):
        counted.batch_done(BATCH)
    counted.interrupt()
    for _ in range(3):
        counted.batch_done(BATCH)
    taken = counted.take()
    assert (taken.timed, taken.seconds) == (4 * BATCH, 4.0)
