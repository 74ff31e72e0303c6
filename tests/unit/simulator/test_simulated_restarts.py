"""The simulator's server dies and is started again: what is trained, what is lost, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator import (
    Cluster,
    Computation,
    Evaluation,
    Failure,
    Jitter,
    Limits,
    Link,
    ServerRestart,
    Slowdown,
    Workload,
    simulate,
)
from lightning_omni.simulator.gradients import Assignment, Gradients
from lightning_omni.trace import Trace

SAMPLES = 960
DATA = TensorDataset(torch.arange(SAMPLES))
BATCH = 8
STEP = BATCH * 1e-3
"""Seconds of a batch."""
SAVE_EVERY = 0.035


class Counts(nn.Module):
    """A number for each sample. Trained with rate 1 by `loss`, it says how often the sample went into the weights."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(samples))


def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
    total: Tensor = -model.counts[batch[0]].sum()
    return total


def run(method: str, groups: int, *events: Failure | Slowdown | ServerRestart, **options: Any) -> Trace:
    names = ("jitter", "link", "servers")
    network: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    network = {"save_every": SAVE_EVERY, **network, "events": events}
    options = {"limits": Limits(epochs=1), "batch_size": BATCH, "computation": Computation(batched=False), **options}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    cluster = Cluster.even(options.pop("devices", groups), 1e-3, **network)
    workload = Workload(Counts(), DATA, loss=loss, optimizer=optimizer, evaluate=options.pop("evaluate", None))
    return simulate(method, groups, cluster, workload, **options)


@contextmanager
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, int]]]:
    """How often each position of each epoch was computed."""
    counts, compute = Counter[tuple[int, int]](), Gradients.compute

    def watched(gradients: Gradients, assignment: Assignment) -> Any:
        counts.update((assignment.place[0], position) for part in assignment.parts for position in part)
        return compute(gradients, assignment)

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "compute", watched)
        yield counts


@cache
def undisturbed_run(method: str) -> Trace:
    """Of four groups."""
    return run(method, 4)


TWO_DEATHS = ServerRestart(0.09, 0.1), ServerRestart(0.41, 0.43)


@pytest.mark.parametrize(
    ("method", "overlap"),
    [
        ("async_sgd", False),
        ("async_sgd", True),
        ("hardsync", False),
        ("stale_synchronous:bound=1", True),
        ("softsync:n=2", False),
        ("delay_compensated", False),
        ("downpour:n_push=3,n_fetch=2", False),
        ("local_sgd:period=3", False),
        ("elastic_averaging:period=2", False),
        ("diloco:period=3", False),
        ("async_diloco:period=3", False),
        ("ringmaster_asgd:max_staleness=1", False),
        ("decoupled_diloco:period=4,fragments=2,delay=1", False),
    ],
)
def test_every_sample_of_every_epoch_is_trained_though_the_server_dies_in_each(
    method: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven = {"jitter": Jitter("exponential"), "link": Link(latency=1e-3)}
    with computed(monkeypatch) as counts:
        trace = run(method, 4, *TWO_DEATHS, limits=Limits(epochs=2), overlap=overlap, **uneven)
    assert trace.ended == "max_epochs"
    assert set(counts) == {(epoch, position) for epoch in range(2) for position in range(SAMPLES)}
    assert counts.total() > 2 * SAMPLES
    assert 0 < trace.goodput < 1


@pytest.mark.parametrize(
    ("death", "overlap"), covering(product((0.0, 0.003, 0.0351, 0.07, 0.1, 0.199, 0.26), (False, True)))
)
def test_every_sample_is_in_the_weights_and_only_batches_under_way_are_twice(death: float, overlap: bool) -> None:
    uneven = {"jitter": Jitter("gamma", 0.5), "link": Link(latency=2e-3)}
    counts = run("async_sgd", 4, ServerRestart(death, death + 0.01), overlap=overlap, **uneven).weights["counts"]
    assert counts.min() == 1
    assert counts.sum() - SAMPLES <= 4 * BATCH


@pytest.mark.parametrize("overlap", [False, True])
def test_useful_are_the_seconds_of_each_sample_once_whenever_the_server_dies(overlap: bool, is_all: bool) -> None:
    deaths = (0.0, 0.0021, 0.0091, 0.0351, 0.0701, 0.1, 0.199, 0.26)
    for death in deaths if is_all else deaths[overlap::2]:
        trace = run("async_sgd", 4, ServerRestart(death, death + 0.01), overlap=overlap, link=Link(latency=2e-3))
        assert trace.goodput * 4 * trace.seconds == pytest.approx(SAMPLES * 1e-3)


def test_the_weights_go_back_to_the_last_save_when_the_server_dies() -> None:
    trace = run(
        "async_sgd",
        2,
        ServerRestart(0.09, 0.1),
        evaluate=lambda model: {"x": 0.0},
        evaluation=Evaluation(every_seconds=0.003),
    )
    times, updates = trace.evaluated["time"], trace.evaluated["update"]
    of = {round(1e3 * time): int(count) for time, count in zip(times, updates, strict=True)}
    assert of[69] == of[90 + 3] == of[99] == 2 * 8  # a push of each group every 8 ms
    assert of[87] == 2 * 10
    assert trace.updates == 2 * 60


def test_goodput_counts_what_is_trained_again_as_not_useful() -> None:
    # Saved after 35 and 70 ms; the batches that ended after 72, 80 and 88 ms are trained again, those that end after
    # 96 ms wait until 100 ms.
    trace = run("async_sgd", 2, ServerRestart(0.09, 0.1))
    assert trace.seconds == pytest.approx((60 + 3) * STEP + 0.004)
    assert trace.goodput == pytest.approx(60 * STEP / trace.seconds)
    assert trace.rows["samples"].sum() == SAMPLES + 2 * 3 * BATCH


@pytest.mark.parametrize("method", ["downpour:n_push=4,n_fetch=4", "local_sgd:period=4", "elastic_averaging:period=4"])
def test_goodput_counts_no_sample_twice_where_groups_push_every_few_batches(method: str) -> None:
    trace = run(method, 2, ServerRestart(0.09, 0.1))
    useful = trace.goodput * 2 * trace.seconds
    unpushed = 2 * 3 * STEP  # at most, at the end of the run
    lost = 2 * 4 * STEP if method.startswith("downpour") else 0.0  # a push's batches that were trained before the save
    assert SAMPLES * 1e-3 - unpushed - lost - 1e-9 <= useful <= SAMPLES * 1e-3 + 1e-9


@pytest.mark.parametrize(
    ("death", "method"),
    covering(product((0.02, 0.069, 0.07, 0.0701, 0.104, 0.2, 0.3), ("async_sgd", "hardsync", "local_sgd:period=2"))),
)
def test_a_death_costs_at_most_the_time_since_the_save_the_downtime_and_a_batch(death: float, method: str) -> None:
    downtime = 0.013
    undisturbed, restarted = undisturbed_run(method), run(method, 4, ServerRestart(death, death + downtime))
    assert 0 <= restarted.seconds - undisturbed.seconds <= SAVE_EVERY + downtime + STEP + 1e-9


def test_groups_that_wait_for_the_end_of_the_epoch_are_told_once_that_there_is_more() -> None:
    slow = Slowdown(3, 0.2, 1.0, 20.0)  # the others wait from 0.24 s on for a batch that takes until 0.36 s
    undisturbed, restarted = run("async_sgd", 4, slow), run("async_sgd", 4, slow, ServerRestart(0.275, 0.28))
    assert undisturbed.rows["time"][undisturbed.rows["group"] < 3].max() < 0.27
    rows = restarted.rows
    for group in range(4):
        own = rows["time"][rows["group"] == group]
        assert np.diff(own).min() >= STEP - 1e-9
        assert group == 3 or own.max() > 0.28
    assert restarted.weights["counts"].min() == 1


def test_saving_the_state_changes_nothing_and_neither_does_a_death_after_the_end() -> None:
    uneven = {"jitter": Jitter("exponential"), "link": Link(latency=1e-3), "limits": Limits(epochs=2)}
    plain, saved = run("async_sgd", 4, **uneven), run("async_sgd", 4, ServerRestart(1e6, 1e6 + 1), **uneven)
    for name, column in plain.rows.items():
        assert np.array_equal(column, saved.rows[name], equal_nan=True)
    assert np.array_equal(plain.weights["counts"], saved.weights["counts"])
    assert (plain.seconds, plain.goodput) == (saved.seconds, saved.goodput)
    assert "save_every" not in plain.meta["cluster"]
    assert saved.meta["cluster"]["save_every"] == SAVE_EVERY
    assert saved.meta["cluster"]["events"] == [{"kind": "ServerRestart", "time": 1e6, "until": 1e6 + 1}]


WITH_DEATHS = (
    Failure(3, 0.05, until=0.095),  # it comes back while the server is away
    ServerRestart(0.09, 0.12),
    Failure(2, 0.1, until=0.11),  # it dies and comes back meanwhile
    Slowdown(1, 0.0, 0.2, 2.0),
    ServerRestart(0.2, 0.21),
    Failure(1, 0.205),
)


@pytest.mark.parametrize("method", ["async_sgd", "hardsync", "diloco:period=3"])
def test_groups_die_and_come_back_while_the_server_is_away(method: str) -> None:
    uneven = {"jitter": Jitter("exponential"), "link": Link(latency=1e-3), "limits": Limits(epochs=2)}
    first, second = run(method, 4, *WITH_DEATHS, **uneven), run(method, 4, *WITH_DEATHS, **uneven)
    assert first.ended == "max_epochs"
    assert {4, 5} <= set(first.rows["group"].tolist())
    assert first.rows["time"][first.rows["group"] == 1].max() <= 0.205
    assert first.rows["samples"].sum() >= 2 * SAMPLES
    if method == "async_sgd":
        assert first.weights["counts"].min() >= 2
    assert np.array_equal(first.weights["counts"], second.weights["counts"])
    assert first.seconds == second.seconds


def test_the_first_group_that_dies_while_the_server_is_away_ends_the_run_when_that_is_back() -> None:
    trace = run("async_sgd", 2, ServerRestart(0.05, 0.1), Failure(0, 0.06))
    assert trace.ended.startswith("lost: rank 0 failed at 0.06 s")
    assert trace.seconds == 0.1


def test_one_group_has_no_server_that_could_die() -> None:
    alone, again = run("async_sgd", 1), run("async_sgd", 1, ServerRestart(0.1, 0.2))
    assert alone.seconds == again.seconds
    assert alone.goodput == again.goodput == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "pull_gossip"}, r"ServerRestart with method=Gossip"),
        ({"merged": "counts"}, r"merged='counts' with a ServerRestart"),
        ({"record": print}, r"record=.*with a ServerRestart"),
        ({"servers": 2}, r"ServerRestart with servers=2"),
    ],
)
def test_what_cannot_go_on_with_another_server_is_refused_by_its_name(options: dict[str, Any], says: str) -> None:
    method = options.pop("method", "async_sgd")
    with pytest.raises(ConfigurationError, match=says):
        run(method, 2, ServerRestart(0.1, 0.2), **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ServerRestart(2.0, until=2.0), r"until=2\.0.*later than time=2"),
        (lambda: ServerRestart(-1.0, until=2.0), r"time=-1\.0"),
        (
            lambda: Cluster.even(2, events=(ServerRestart(2.0, 4.0), ServerRestart(1.0, 2.0))),
            r"dies at time=2, and is not back before until=2",
        ),
        (lambda: Cluster.even(2, save_every=0.0), r"save_every=0\.0"),
    ],
)
def test_impossible_times_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()
