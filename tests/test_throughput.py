"""When a run under way is said to have become faster or slower: by training alone, and by more than noise."""

from __future__ import annotations

import itertools
from functools import reduce
from operator import add

import numpy as np
import pytest

from lightning_omni.tuner.throughput import RunThroughput, Speed, Trained

BATCH = 8


def epoch_of(seconds: np.ndarray) -> Speed:
    """An epoch of one rank whose batches take so long."""
    moments = iter([0.0, *itertools.accumulate(seconds)])
    counted = RunThroughput(clock=lambda: float(next(moments)))
    counted.go()
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
    assert Trained(8, 8, 1.0, 1, 1.0) + Trained(8, 0, 0.0, 0, 0.0) == Trained(16, 8, 1.0, 1, 1.0)


def test_too_few_batches_say_nothing() -> None:
    fast, slow = epoch_of(np.array([0.1])), epoch_of(np.full(20, 0.5))
    assert not slow.differs_from(fast, 0.2)


@pytest.mark.parametrize("batches", [16, 64, 256])
def test_random_step_times_alone_are_seldom_taken_for_another_speed(batches: int) -> None:
    random = np.random.default_rng(batches)
    runs = 200
    epochs = [[epoch_of(random.exponential(0.1, batches)) for _ in range(6)] for _ in range(runs)]
    wrong = sum(row[-1].differs_from(reduce(add, row[:-1]), 0.2) for row in epochs)
    assert wrong <= 0.1 * runs


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_steps_that_take_another_time_are_noticed_whether_they_are_random_or_not(factor: float) -> None:
    random = np.random.default_rng(3)
    for before, now in (
        (np.full(32, 0.1), np.full(32, 0.1 * factor)),
        (random.exponential(0.1, 200), random.exponential(0.1 * factor, 200)),
    ):
        assert epoch_of(now).differs_from(epoch_of(before), 0.2)


def test_a_validation_does_not_make_a_run_slower() -> None:
    moments = iter([0.0, 1.0, 2.0, 50.0, 51.0, 52.0])
    counted = RunThroughput(clock=lambda: next(moments))
    counted.go()
    for _ in range(3):
        counted.batch_done(BATCH)
    counted.pause()
    counted.go()
    for _ in range(3):
        counted.batch_done(BATCH)
    taken = counted.take()
    assert (taken.samples, taken.timed, taken.seconds) == (6 * BATCH, 4 * BATCH, 4.0)
