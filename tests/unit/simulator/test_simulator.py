"""The simulator: its clockwork against what can be said beforehand, its gradients against plain torch, its replays."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lightning_omni import Compression
from lightning_omni.errors import ConfigurationError, ProtocolError, StepFailed, UnsupportedError
from lightning_omni.methods import (
    METHODS,
    AsyncDiLoCo,
    AsyncSGD,
    DiLoCo,
    Downpour,
    Gossip,
    LocalSGD,
    Method,
    SoftSync,
    method_named,
)
from lightning_omni.server.event_log import Event, RecordFile, read_record
from lightning_omni.simulator import (
    Cluster,
    Computation,
    Device,
    Evaluation,
    Failure,
    Jitter,
    Limits,
    Link,
    Slowdown,
    StopSimulation,
    Workload,
    replay,
    simulate,
    trace_of,
)
from lightning_omni.simulator.engine import Engine, Priority, Timeline
from lightning_omni.simulator.workbench import Samples
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace
from lightning_omni.wire.formats import BF16
from lightning_omni.wire.formats.base import register
from lightning_omni.wire.layout import Layout

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(240, 6, generator=GENERATOR)
LABELS = (INPUTS @ torch.randn(6, 3, generator=GENERATOR)).argmax(1)
DATA = TensorDataset(INPUTS, LABELS)
RANDOM_TIMES = Jitter("exponential")


def new_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def accuracy(model: nn.Module) -> dict[str, float]:
    return {
        "accuracy": float((model(INPUTS).argmax(1) == LABELS).float().mean()),
        "loss": float(loss(model, (INPUTS, LABELS))),
    }


def run(
    method: str | Method = "async_sgd", groups: int | Topology = 4, cluster: Cluster | None = None, **options: Any
) -> Trace:
    options = {"batch_size": 4, "limits": Limits(updates=30), **options}
    if cluster is None:
        size = groups if isinstance(groups, int) else len(groups.ranks)
        cluster = Cluster.even(size, jitter=RANDOM_TIMES)
    given: dict[str, Any] = {"data": DATA, "loss": loss, "optimizer": sgd, "evaluate": None}
    given = {name: options.pop(name, value) for name, value in given.items()}
    workload = Workload(options.pop("model", None) or new_model(), **given)
    return simulate(method, groups, cluster, workload, **options)


@pytest.mark.parametrize("groups", [1, 2])
def test_parts_by_speed_take_the_time_of_all_speeds_together_and_change_nothing_else(groups: int) -> None:
    """With overhead 0 a batch of b samples on speeds s takes b / sum(s) of a second on a device of speed 1."""
    cluster = Cluster.of_speeds([1, 2, 4] * groups, seconds_per_sample=1e-3)
    even, apart = (
        run(
            "hardsync",
            Topology.even(3 * groups, groups),
            cluster,
            batch_size=28,
            limits=Limits(updates=5),
            computation=Computation(rebalance=how),
        )
        for how in ("off", "auto")
    )
    assert even.seconds_per_update == pytest.approx(28e-3)
    assert apart.seconds_per_update == pytest.approx(12e-3)
    for name, weight in even.weights.items():
        assert np.array_equal(weight, apart.weights[name])


def test_a_slowdown_is_followed_by_the_parts() -> None:
    events = (Slowdown(rank=0, start=0.0, stop=1e9, factor=3.0),)
    cluster = Cluster.even(2, 1e-3, events=events)
    trace = run(
        "hardsync", 1, cluster, batch_size=8, limits=Limits(updates=4), computation=Computation(rebalance="auto")
    )
    assert trace.seconds_per_update == pytest.approx(12e-3)  # 4 and 12 samples


def test_parts_by_speed_and_members_apart_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match=r"rebalance=.auto.*members_apart=True"):
        run(cluster=Cluster.even(4), computation=Computation(rebalance="auto", members_apart=True))


# --- A merged head ----------------------------------------------------------------------------------------------------


class Tailed(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(x))
        return outputs


def tailed(groups: int, cluster: Cluster, **options: Any) -> tuple[Trace, list[Event]]:
    torch.manual_seed(0)
    events: list[Event] = []
    method = options.pop("method", "async_sgd")
    return run(method, groups, cluster, model=Tailed(), merged="head", record=events.append, **options), events


def test_a_merged_head_is_never_stale_and_is_stepped_with_every_batch() -> None:
    trace, events = tailed(4, Cluster.even(8, jitter=RANDOM_TIMES), limits=Limits(epochs=1))
    head = trace_of(events, optimizer=1)
    assert head.columns()["staleness"].tolist() == [0] * head.updates
    assert head.columns()["samples"].sum() == len(DATA)
    assert {name.split(".")[0] for name in trace.weights} == {"body", "head"}
    assert head.updates == trace.updates
    assert trace.mean_staleness > 1


def test_what_goes_into_the_head_and_comes_out_takes_its_time_on_the_link() -> None:
    """For each of 4 samples 8 numbers go in and 3 come out, and so do as many gradients; then the body is pushed."""
    link = Link(bandwidth=1000.0)
    trace, _ = tailed(2, Cluster.even(2, 1e-9, link=link), batch_size=4, limits=Limits(updates=1))
    assert trace.seconds == pytest.approx((2 * (8 + 3) * 4 * 4 + body_nbytes()) / 1000.0, rel=1e-3)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@torch.no_grad()
def final_loss(trace: Trace | None) -> float:
    """Of all data; without a run, of the weights that it would begin with."""
    torch.manual_seed(0)
    model = Tailed()
    if trace is not None:
        model.load_state_dict({name: torch.tensor(weight) for name, weight in trace.weights.items()})
    return float(loss(model, DATA[:]))


def body_nbytes() -> int:
    return Layout.of(dict(Tailed().body.named_parameters())).nbytes


def test_a_group_that_dies_on_its_way_to_the_head_holds_no_other_up() -> None:
    events = (Failure(rank=3, time=0.0101),)
    trace, _ = tailed(4, Cluster.even(4, 1e-3, head_seconds_per_sample=1e-3, events=events), limits=Limits(epochs=1))
    assert trace.ended == "max_epochs"
    assert set(trace.rows["group"][-6:].tolist()) <= {0, 1, 2}
    assert sum(trace.rows["samples"]) >= len(DATA)


def test_a_merged_submodule_may_be_in_front_of_all_other_weights() -> None:
    """No gradient of these needs its backward pass, and it would be the first group's for ever."""
    trace = run(groups=2, model=Tailed(), merged="body", limits=Limits(updates=10))
    assert trace.updates == 10
    assert final_loss(trace) < final_loss(None)


def test_a_submodule_that_is_not_used_or_used_twice_cannot_be_merged() -> None:
    with pytest.raises(ConfigurationError, match="the model has no such submodule"):
        run(groups=2, model=Tailed(), merged="tail")
    twice: Any = lambda model, batch: (model(batch[0]) + model(batch[0])).mean()  # noqa: E731
    with pytest.raises(ConfigurationError, match="uses the submodule 2 times"):
        run(groups=2, model=Tailed(), merged="head", loss=twice)


def assert_same_arrays(one: Trace, other: Trace) -> None:
    for part in ("rows", "evaluated", "weights"):
        mine, theirs = getattr(one, part), getattr(other, part)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            assert mine[name].tobytes() == theirs[name].tobytes(), (part, name)


# --- One seed, one trace -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "batched"),
    covering(product(("async_sgd", "softsync", "push_gossip", AsyncDiLoCo(period=4)), (True, False))),
)
def test_one_seed_gives_one_trace_to_the_bit(method: str | Method, batched: bool) -> None:
    options: dict[str, Any] = {
        "computation": Computation(batched=batched),
        "evaluate": accuracy,
        "evaluation": Evaluation(every=10),
        "limits": Limits(updates=20, epochs=2),
    }
    torch.manual_seed(1)
    first = run(method, 10, **options)
    torch.manual_seed(2)
    assert_same_arrays(first, run(method, 10, **options))
    assert not np.array_equal(first.rows["time"], run(method, 10, seed=1, **options).rows["time"])


def test_a_saved_trace_loads_to_the_bit(tmp_path: Path) -> None:
    failure = Failure(rank=np.int64(2), time=np.float64(0.1))  # type: ignore[arg-type]
    trace = run(evaluate=accuracy, evaluation=Evaluation(every=10), cluster=replace(Cluster.even(4), events=(failure,)))
    trace.save(tmp_path / "trace.npz")
    again = Trace.load(tmp_path / "trace.npz")
    assert_same_arrays(trace, again)
    assert (again.updates, again.seconds, again.ended) == (trace.updates, trace.seconds, trace.ended)
    assert again.meta["method"] == {"name": "async_sgd", "staleness_aware": False, "bound": None}


def test_a_model_with_dropout_is_deterministic_and_leaves_the_callers_rng_state_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = run(model=model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_same_arrays(first, run(model=model))


# --- Staleness -----------------------------------------------------------------------------------------------------

SPEEDS = {
    "equal": Cluster.even(8, jitter=RANDOM_TIMES),
    "unequal": Cluster.of_speeds([1, 1, 1, 2, 2, 3, 5, 8], jitter=Jitter("lognormal", 0.3)),
    "straggler": Cluster.with_straggler(8, 10.0, jitter=Jitter("gamma", 0.5)),
}


@pytest.mark.parametrize(
    ("speeds", "method"), covering(product(SPEEDS, (AsyncSGD(), SoftSync(n=4), SoftSync(n=1)))), ids=str
)
def test_mean_staleness_is_groups_less_one_over_gradients_in_an_update(speeds: str, method: Method) -> None:
    per_update = 8 // method.n if isinstance(method, SoftSync) else 1
    trace = run(method, 8, SPEEDS[speeds], limits=Limits(updates=240 // per_update), data=many(8000))
    assert trace.mean_staleness == pytest.approx(7 / per_update, rel=0.05)


def many(count: int) -> TensorDataset:
    """So many samples that nothing comes to the end of an epoch."""
    index = torch.arange(count) % len(INPUTS)
    return TensorDataset(INPUTS[index], LABELS[index])


def test_hardsync_is_never_stale_and_goes_at_the_pace_of_the_slowest() -> None:
    trace = run("hardsync", 3, Cluster.of_speeds([1, 2, 4], seconds_per_sample=0.01), limits=Limits(updates=10))
    assert trace.staleness_histogram().tolist() == [30]
    assert trace.seconds == pytest.approx(10 * 4 * 0.01)
    assert trace.rows["write"].tolist() == [update for update in range(1, 11) for _ in range(3)]


def test_a_fast_group_makes_its_updates_whatever_the_slow_one_does() -> None:
    trace = run(
        "async_sgd",
        2,
        Cluster.of_speeds([1, 4], seconds_per_sample=0.01),
        limits=Limits(seconds=0.401),
        data=many(2000),
    )
    assert Counter(trace.rows["group"].tolist()) == {0: 10, 1: 40}


# --- Failures and slowdowns ----------------------------------------------------------------------------------------


def test_a_failure_costs_its_group_only_and_every_sample_is_used() -> None:
    events: list[Event] = []
    cluster = Cluster.even(6, jitter=RANDOM_TIMES, events=(Failure(rank=5, time=0.05),))
    trace = run("async_sgd", 3, cluster, limits=Limits(epochs=1), record=events.append)
    assert trace.ended == "max_epochs"
    assert trace.rows["time"][trace.rows["group"] == 2].max(initial=0) <= 0.05 < trace.seconds
    trained = [span for event in events for span in event.spans]
    assert sorted(place for start, stop in trained for place in range(start, stop)) == list(range(len(DATA)))


@pytest.mark.parametrize(
    "method", ["async_sgd", "hardsync", "softsync", "elastic_averaging:period=2", "local_sgd:period=3", "push_gossip"]
)
def test_an_epoch_begins_for_all_groups_together_however_slow_the_links_are(method: str) -> None:
    slow = Link(bandwidth=1e5, latency=0.01)
    events: list[Event] = []
    trace = run(
        method, 8, Cluster.even(8, jitter=RANDOM_TIMES, link=slow), limits=Limits(epochs=2), record=events.append
    )
    assert trace.ended == "max_epochs"
    trained = [(event.epoch, span) for event in events for span in event.spans]
    places = [(epoch, place) for epoch, (start, stop) in trained for place in range(start, stop)]
    assert sorted(places) == [(epoch, place) for epoch in range(2) for place in range(len(DATA))]


@pytest.mark.parametrize("method", ["diloco:period=3", "elastic_averaging:period=3", "softsync"])
def test_one_group_is_plain_synchronous_training_whatever_the_method(method: str) -> None:
    one, plain = (run(name, Topology(((0, 1),)), Cluster.even(2)) for name in (method, "hardsync"))
    assert all((one.weights[name] == plain.weights[name]).all() for name in plain.weights)


@pytest.mark.parametrize("method", ["hardsync", "local_sgd", "stale_synchronous", "push_gossip", "pull_gossip"])
def test_no_group_waits_for_the_dead(method: str) -> None:
    cluster = Cluster.even(4, jitter=RANDOM_TIMES, events=(Failure(2, 0.03), Failure(3, 0.1)))
    assert run(method, 4, cluster, limits=Limits(epochs=2)).ended == "max_epochs"


def test_the_failure_of_the_first_group_ends_the_run_with_the_reason() -> None:
    trace = run("async_sgd", 2, Cluster.even(2, events=(Failure(0, 0.05),)))
    assert trace.ended.startswith("lost: rank 0 failed at 0.05 s")
    assert 0 < trace.updates < 30


@pytest.mark.parametrize(
    ("method", "merge"),
    [("hardsync", "merge"), ("decoupled_diloco:period=2,fragments=1,quorum=1,grace=0.001", "expire")],
)
def test_a_step_that_fails_where_groups_wait_ends_the_run_with_the_reason(
    method: str, merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise StepFailed("this optimizer cannot step")

    monkeypatch.setattr(method_named(method).side, merge, fails)
    with pytest.raises(ProtocolError, match="this optimizer cannot step"):
        run(method, 2)


COMES_BACK = (
    Failure(4, 0.05, until=0.12),
    Failure(3, 0.2, until=0.2),
    Slowdown(1, 0.1, 0.3, 4.0),
    Failure(4, 0.3, 0.4),
)


@pytest.mark.parametrize(
    ("method", "epochs"),
    covering(
        product(
            (
                "async_sgd",
                "hardsync",
                "stale_synchronous",
                "elastic_averaging:period=2",
                "diloco:period=3",
            ),
            (1, 3),
        )
    ),
)
def test_a_group_that_comes_back_takes_part_again_and_every_sample_is_used(method: str, epochs: int) -> None:
    topology, events = Topology(((0, 1), (2,), (3, 4))), list[Event]()
    cluster = Cluster.even(5, 2e-3, jitter=RANDOM_TIMES, link=Link(latency=1e-4), events=COMES_BACK)
    trace = run(
        method,
        topology,
        cluster,
        limits=Limits(epochs=epochs),
        computation=Computation(members_apart=True),
        record=events.append,
    )
    assert trace.ended == "max_epochs"
    trained = {(event.epoch, place) for event in events for span in event.spans for place in range(*span)}
    assert trained == {(epoch, place) for epoch in range(epochs) for place in range(len(DATA))}
    rows, joins = trace.rows, [event for event in events if event.kind == "join"]
    assert [event.group for event in joins] == list(range(3, 3 + len(joins)))
    assert len(joins) >= 1
    if epochs != 1:
        assert len(joins) == 3
        assert {0, 1, 2, 3, 4} <= set(rows["group"].tolist())
    for died, number in ((0.05, 2), (0.2, 3)):
        assert rows["time"][rows["group"] == number].max(initial=0) <= died
    assert 0 < trace.goodput < 1
    again = replayed(events)
    assert all((weight.numpy() == trace.weights[name]).all() for name, weight in again.weights.items())


def test_goodput_is_the_part_of_all_device_time_in_which_gradients_were_computed_that_were_pushed() -> None:
    even, whole = Cluster.even(4, 1e-3), {"limits": Limits(epochs=1), "data": many(160)}
    assert run("async_sgd", 4, even, **whole).goodput == pytest.approx(1.0)
    straggler = Cluster.of_speeds([1, 1, 1, 1 / 4], 1e-3)
    # The fast ones compute for a quarter of the time that the slow one takes, and wait for the rest.
    assert run("hardsync", 4, straggler, **whole).goodput == pytest.approx((1 + 3 / 4) / 4, rel=0.01)
    assert run("async_sgd", 4, straggler, limits=Limits(epochs=1), data=many(640)).goodput > 0.95
    # Of a link that takes as long as a batch, half the time is waited for.
    linked = Cluster.even(4, 1e-3, link=Link(latency=2e-3))
    assert run("async_sgd", 4, linked, **whole).goodput == pytest.approx(0.5, abs=0.02)
    # One of the devices is dead from the start, one dies between two pushes, which are 16 ms apart.
    dead = Cluster.even(4, 1e-3, events=(Failure(3, 0.0), Failure(2, 0.108)))
    lost = run("diloco:period=4", 4, dead, limits=Limits(seconds=0.209), data=many(6400))
    assert lost.goodput == pytest.approx((2 * 0.208 + 0.096) / (4 * 0.209))


def test_a_group_that_comes_back_when_the_others_are_done_ends_the_run_with_them() -> None:
    cluster = Cluster.even(3, 1e-3, events=(Failure(2, 0.01, until=0.1185), Failure(1, 0.01)))
    trace = run("async_sgd", 3, cluster, limits=Limits(epochs=1), data=many(120))
    assert (trace.ended, trace.rows["samples"].sum()) == ("max_epochs", 120)


# --- Ties -------------------------------------------------------------------------------------------------------------

STEP = 2.0**-8
"""Seconds of a batch of four on a device of speed 1, in `tied`: sums of it are exact."""


def tied(speeds: list[float], *events: Failure) -> Cluster:
    """Devices whose gradients are there at the same moments; links take no time."""
    return Cluster.of_speeds(speeds, seconds_per_sample=STEP / 4, events=events)


def who_pushes(trace: Trace) -> list[tuple[float, int]]:
    """Time, in steps of a device of speed 1, and group of every push."""
    return list(zip((trace.rows["time"] / STEP).tolist(), trace.rows["group"].tolist(), strict=True))


def test_groups_that_begin_at_one_moment_push_in_the_order_of_their_numbers() -> None:
    trace = run("async_sgd", 3, tied([1, 1, 1]), limits=Limits(updates=6))
    assert who_pushes(trace) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert trace.rows["staleness"].tolist() == [0, 1, 2, 2, 2, 2]


def test_of_two_pushes_that_arrive_at_one_moment_the_one_that_was_caused_first_is_merged_first() -> None:
    trace = run("async_sgd", 2, tied([1, 0.5]), limits=Limits(updates=6))
    assert who_pushes(trace) == [(1, 0), (2, 1), (2, 0), (3, 0), (4, 1), (4, 0)], "group 1 began at 0 and 2"
    trace = run("async_sgd", 2, tied([0.5, 1]), limits=Limits(updates=6))
    assert who_pushes(trace) == [(1, 1), (2, 0), (2, 1), (3, 1), (4, 0), (4, 1)]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_dies_at_the_moment_of_its_push_has_not_pushed(rank: int) -> None:
    trace = run("async_sgd", 3, tied([1, 1, 1], Failure(rank, 2 * STEP)), limits=Limits(epochs=1))
    living = [group for group in range(3) if group != rank]
    at_two = [group for time, group in who_pushes(trace) if time == 2]
    assert (1, rank) in who_pushes(trace)
    assert at_two == living
    assert rank not in [group for time, group in who_pushes(trace) if time > 1]


def test_a_run_that_ends_in_time_ends_after_all_that_is_due_at_that_moment() -> None:
    trace = run("async_sgd", 2, tied([1, 1]), limits=Limits(seconds=2 * STEP))
    assert who_pushes(trace) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert trace.ended == "max_seconds"


def test_failures_come_first_whenever_they_were_put_down() -> None:
    engine, seen = Engine(), list[str]()

    def event(time: float, name: str) -> Timeline:
        yield time
        seen.append(name)

    for time, name, priority in (
        (2.0, "second", Priority.EVENT),
        (1.0, "first", Priority.EVENT),
        (2.0, "third", Priority.EVENT),
        (2.0, "dies", Priority.FAILURE),
        (2.0, "dies, too", Priority.FAILURE),
    ):
        engine.start(event(time, name), priority)
    while engine.events:
        engine.step()
    assert seen == ["first", "dies", "dies, too", "second", "third"]


def test_a_slowdown_slows_for_as_long_as_it_lasts() -> None:
    cluster = Cluster.even(2, 0.01, events=(Slowdown(1, start=0.39, stop=0.79, factor=4),))
    times = run("async_sgd", 2, cluster, limits=Limits(seconds=1.201), data=many(2000)).rows
    mine = times["time"][times["group"] == 1]
    assert np.allclose(np.diff(mine[mine <= 0.401]), 0.04)
    assert np.allclose(np.diff(mine[(mine >= 0.399) & (mine <= 0.8)]), 0.16)
    assert np.allclose(np.diff(mine[mine > 0.9]), 0.04)


# --- Links ---------------------------------------------------------------------------------------------------------

LAYOUT = Layout.of({name: value.detach() for name, value in new_model().named_parameters()})
NBYTES = LAYOUT.nbytes


def test_a_saturated_server_takes_one_service_per_update() -> None:
    trace = run(
        "async_sgd", 16, Cluster.even(16, 1e-3, jitter=RANDOM_TIMES, update_seconds=0.02), limits=Limits(updates=60)
    )
    assert trace.seconds_per_update == pytest.approx(0.02, rel=0.02)


def test_the_two_directions_of_a_card_are_busy_in_turns() -> None:
    cluster = Cluster.even(16, 1e-3, jitter=RANDOM_TIMES, server=Link(bandwidth=NBYTES / 0.02))
    trace = run("async_sgd", 16, cluster, limits=Limits(updates=260), data=many(2000))
    # At random, n groups at two links that take them equally long keep each busy for n / (n + 1) of the time; these
    # started together, and still wait a little longer for each other.
    assert 17 / 16 < np.diff(trace.rows["time"][60:]).mean() / 0.02 < 1.25


def test_one_group_alone_takes_compute_and_both_ways_per_update() -> None:
    link, server = Link(bandwidth=NBYTES / 0.01, latency=0.001), Link(bandwidth=NBYTES / 0.005, latency=0.002)
    # The second group computes for ever.
    cluster = Cluster((Device(0.01), Device(1e9)), link=link, server=server, update_seconds=0.003)
    trace = run("async_sgd", 2, cluster, limits=Limits(updates=10))
    # What it sends crosses both at once, at the pace of the slower one.
    assert trace.seconds_per_update == pytest.approx(0.04 + 2 * (0.010 + 0.001 + 0.002) + 0.003)


def test_a_group_takes_the_slowest_members_time_and_a_ring_all_reduce() -> None:
    cluster = Cluster.of_speeds([1, 2, 1, 2], 0.01, group_link=Link(bandwidth=NBYTES / 0.1, latency=0.001))
    trace = run("async_sgd", 1, cluster, limits=Limits(updates=5), data=many(1000))
    assert trace.seconds / 5 == pytest.approx(0.04 + 2 * 3 / 4 * 0.1 + 2 * 3 * 0.001)


@register
class Loose(BF16, frozen=True, kw_only=True, tag="loose"):
    """Says of its bytes only how many there are at most."""

    def sizes(self, layout: Layout) -> tuple[int, int]:
        return 0, BF16.sizes(self, layout)[1]


TREE = Link(bandwidth=NBYTES / 0.1, latency=0.001)
"""A link inside groups. Among three members a message is passed on twice."""
EMPTY, WEIGHTS = 0.002, 0.202
CODED: Any = {"compression": Compression(push="int8", pull="bf16")}
IN_BF16 = 2 * TREE.seconds(BF16().sizes(LAYOUT)[1])
HALVES = {2 * TREE.seconds(LAYOUT.fragment(number, of=2).nbytes) for number in range(2)}


@pytest.mark.parametrize(
    ("method", "options", "waits"),
    [
        ("async_sgd", {}, {WEIGHTS}),
        ("async_sgd", CODED, {IN_BF16}),
        ("async_sgd", {"compression": Compression(push="fp32", pull=Loose())}, {WEIGHTS}),
        ("async_sgd", {"overlap": True}, {0.0, WEIGHTS}),
        ("downpour:n_push=1,n_fetch=2", {}, {EMPTY, WEIGHTS}),
        ("downpour:n_push=4,n_fetch=2", CODED, {0.0, IN_BF16, WEIGHTS}),
        ("elastic_averaging:period=2", {"compression": "int8"}, {0.0, WEIGHTS}),
        ("diloco:period=2,fragments=2", {}, HALVES),
        ("diloco:period=4,fragments=2,delay=1", {}, {0.0, *HALVES}),
        (Gossip(), {"compression": "bf16"}, {0.0, EMPTY + WEIGHTS}),
        (Gossip(kind="push"), {}, {EMPTY, EMPTY + WEIGHTS}),
    ],
    ids=[
        "weights",
        "in fewer bytes",
        "in bytes that nobody knows",
        "not beside the computation",
        "no weights",
        "fetched",
        "now and then",
        "fragments",
        "fragments that come late",
        "read of peers",
        "sent by peers",
    ],
)
def test_a_group_waits_until_its_leader_has_passed_on_what_it_heard(
    method: str | Method, options: dict[str, Any], waits: set[float]
) -> None:
    cluster = Cluster.even(6, 0.01, group_link=TREE)
    trace = run(method, Topology.even(6, 2), cluster, limits=Limits(updates=8), data=many(1000), **options)
    steps = trace.steps
    assert set(steps["exchange"].round(9)) == {round(seconds, 9) for seconds in waits}
    assert steps["seconds"] - steps["exchange"] == pytest.approx(0.04 + 2 * 2 / 3 * 0.1 + 2 * 2 * 0.001)


def test_each_time_that_a_message_is_passed_on_twice_as_many_members_have_it() -> None:
    assert [round(Link(1e3, 0.5).broadcast_seconds(500, k)) for k in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_weights_are_the_groups_own_when_all_members_have_them() -> None:
    trace = run("async_sgd", Topology.even(6, 2), Cluster.even(6, 0.01, group_link=TREE), limits=Limits(updates=6))
    pushed = trace.rows["time"][trace.rows["group"] == 0]
    assert np.diff(pushed) == pytest.approx(0.04 + 2 * 2 / 3 * 0.1 + 2 * 2 * 0.001 + WEIGHTS)


def test_where_no_member_waits_for_a_leader_the_links_of_groups_change_nothing() -> None:
    cluster = Cluster.even(4, jitter=RANDOM_TIMES, link=Link(1e6, 1e-4))
    plain, slow = (run("async_sgd", 4, replace(cluster, group_link=link)) for link in (Link(), TREE))
    assert all(np.array_equal(plain.rows[name], slow.rows[name]) for name in plain.rows)
    one = run("async_sgd", 1, replace(cluster, group_link=TREE), limits=Limits(updates=5))
    assert not one.steps["exchange"].any(), "nobody was asked anything"


def test_with_one_group_no_server_is_in_the_path() -> None:
    network: dict[str, Any] = {"link": Link(1.0), "server": Link(1.0), "update_seconds": 100.0}
    assert run("async_sgd", 1, Cluster.even(1, 0.01, **network), limits=Limits(updates=5)).seconds == pytest.approx(0.2)


def test_a_peers_weights_take_their_time() -> None:
    alone = run(Gossip(), 2, Cluster.even(2, 0.01), limits=Limits(updates=8))
    apart = run(Gossip(), 2, Cluster.even(2, 0.01, link=Link(latency=0.5)), limits=Limits(updates=8))
    assert alone.seconds == pytest.approx(0.16)
    assert apart.seconds > 1.0


@pytest.mark.parametrize("kind", ["normal", "lognormal", "exponential", "gamma"])
def test_the_mean_of_jitter_is_one(kind: Any) -> None:
    factors = Jitter(kind, cv=1.0 if kind == "exponential" else 0.3).factors(np.random.default_rng(0), 40_000)
    assert factors.mean() == pytest.approx(1, abs=0.02)
    assert factors.std() == pytest.approx(1 if kind == "exponential" else 0.3, rel=0.05)
    assert factors.min() > 0


# --- Gradients and weights -----------------------------------------------------------------------------------------


def plain_training(make: Any, updates: int) -> list[Tensor]:
    """Sequential training in plain torch, on the same batches."""
    model, samples = new_model(), Samples(DATA, seed=0)
    optimizer = make(model.parameters())
    for step in range(updates):
        epoch, start = divmod(4 * step, len(DATA))
        optimizer.zero_grad()
        loss(model, samples.batch(samples.at(epoch, range(start, start + 4)))).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("method", "make"),
    covering(product(("async_sgd", "hardsync", LocalSGD(period=1), Downpour(n_push=1, send="updates")), (sgd, adamw))),
)
def test_one_group_is_plain_sequential_training_bit_for_bit(method: str | Method, make: Any) -> None:
    trace = run(method, 1, limits=Limits(updates=66), optimizer=make)  # into the second epoch
    expected = plain_training(make, 66)
    if isinstance(method, Downpour):  # it pushes x' - x, and x + (x' - x) is rounded
        assert all(np.allclose(w, e, atol=1e-5) for w, e in zip(trace.weights.values(), expected, strict=True))
    else:
        assert all(np.array_equal(w, e) for w, e in zip(trace.weights.values(), expected, strict=True))


def convolutions() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("method", "kind"), covering(product(("async_sgd", "elastic_averaging", "push_gossip"), ("linear", "convolutions")))
)
def test_batched_gradients_are_those_computed_one_by_one(method: str, kind: str) -> None:
    options: dict[str, Any] = {
        "model": new_model() if kind == "linear" else convolutions(),
        "limits": Limits(updates=30, epochs=5),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.02),
    }
    together, alone = (
        run(method, 12, computation=Computation(batched=True), **options),
        run(method, 12, computation=Computation(batched=False), **options),
    )
    assert np.allclose(together.rows["loss"], alone.rows["loss"], atol=1e-5)
    assert not np.array_equal(together.rows["loss"], alone.rows["loss"]), "nothing was batched"
    assert all(np.allclose(together.weights[name], alone.weights[name], atol=1e-5) for name in alone.weights)


def test_what_cannot_be_batched_is_computed_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    together, alone = (
        run(groups=12, model=model, computation=Computation(batched=True)),
        run(groups=12, model=model, computation=Computation(batched=False)),
    )
    assert_same_arrays(together, alone)


def test_a_loss_that_draws_random_numbers_is_computed_for_one_group_at_a_time() -> None:
    def noisy(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, (nn.functional.dropout(batch[0], 0.5), batch[1]))

    traces = [run(groups=12, loss=noisy, computation=Computation(batched=batched)) for batched in ("auto", False)]
    assert_same_arrays(*traces)


def test_a_parameter_that_takes_no_part_stays_even_where_weights_decay() -> None:
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = new_model(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    model = Partial()
    trace = run(
        groups=12,
        model=model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        computation=Computation(batched=True),
    )
    assert np.array_equal(trace.weights["unused.weight"], model.unused.weight.detach())
    assert not np.array_equal(trace.weights["used.0.weight"], model.get_parameter("used.0.weight").detach())


def test_any_map_style_dataset_trains_like_its_tensors() -> None:
    class Items(Dataset[tuple[Tensor, Tensor]]):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return INPUTS[index], LABELS[index]

        def __len__(self) -> int:
            return len(INPUTS)

    assert_same_arrays(run(data=Items()), run())


@pytest.mark.parametrize("method", ["async_sgd", "hardsync", "softsync"])
def test_groups_share_the_snapshots_of_the_weights_that_they_read(method: str) -> None:
    trace = run(method, 16, limits=Limits(updates=20 if method == "async_sgd" else 4), data=many(2000))
    assert trace.meta["most_snapshots"] <= (2 if method == "hardsync" else 18)


def test_the_callers_model_and_optimizer_are_left_alone() -> None:
    model = new_model().eval()
    before = copy.deepcopy(model.state_dict())
    run(model=model, evaluate=accuracy, evaluation=Evaluation(every=10))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# --- What is evaluated ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Gossip(), LocalSGD(period=7)])
def test_the_evaluated_model_is_the_exact_mean_of_all_groups(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_omni.simulator import run as room

    seen: list[room.Simulation] = []
    start = room.Simulation.run

    def noted(self: room.Simulation, *rest: Any, **more: Any) -> Any:
        seen.append(self)
        return start(self, *rest, **more)

    monkeypatch.setattr(room.Simulation, "run", noted)
    trace = run(method, 3, limits=Limits(epochs=1))
    own = [group.replica.weights() for group in seen[0].groups.values()]
    assert not torch.equal(own[0][0], own[1][0])
    for name, column in zip(trace.weights, zip(*own, strict=True), strict=True):
        total = column[0] + column[1] + column[2]
        assert np.array_equal(trace.weights[name], total * (1 / 3))


def test_evaluations_come_when_they_are_due_and_at_the_end() -> None:
    trace = run(evaluate=accuracy, evaluation=Evaluation(every=12))
    assert trace.evaluations()["update"].tolist() == [12, 24, 30]
    timed = run(
        evaluate=accuracy, evaluation=Evaluation(every_seconds=0.02), limits=Limits(updates=math.inf, seconds=0.05)
    )
    assert timed.evaluations()["time"].tolist() == [0.02, 0.04, 0.05]
    own = run("local_sgd:period=50", 3, evaluate=accuracy, evaluation=Evaluation(every=1), limits=Limits(seconds=0.6))
    assert own.evaluations()["time"][-1] == own.seconds, "groups have stepped since the last mean"


def test_an_update_upon_a_question_or_a_death_is_evaluated_when_it_is_made() -> None:
    events: list[Event] = []
    how: dict[str, Any] = {"batch_size": 11, "evaluate": accuracy, "evaluation": Evaluation(every=1)}
    slow = Cluster.with_straggler(3, events=(Failure(2, 0.4),))
    trace = run("local_sgd:period=4", 3, slow, limits=Limits(updates=8), record=events.append, **how)
    made: dict[int, Event] = {}
    for event in events:
        made.setdefault(event.clock, event)
    assert trace.evaluations()["time"].tolist() == [made[update].time for update in range(1, 9)]
    assert {made[update].kind for update in range(1, 9)} == {"push", "rest", "retire"}


def test_a_model_in_bfloat16_is_traced() -> None:
    trace = run(model=new_model().bfloat16(), loss=in_bfloat16, limits=Limits(updates=3))
    assert {each.dtype for each in trace.weights.values()} == {np.dtype(np.float32)}


def in_bfloat16(model: Any, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def test_a_run_ends_with_the_evaluation_that_reaches_the_target() -> None:
    trace = run(
        evaluate=accuracy, evaluation=Evaluation(every=10, target=("accuracy", 0.8)), limits=Limits(updates=2000)
    )
    numbers = trace.evaluations()
    assert trace.ended == "target"
    assert numbers["accuracy"][-1] >= 0.8 > numbers["accuracy"][:-1].max(initial=0)
    assert trace.updates_to("accuracy", 0.8) == trace.updates
    assert trace.time_to("accuracy", 0.8) == trace.seconds
    assert math.isnan(trace.time_to("loss", 0.0))
    assert trace.time_to("loss", 10.0) == numbers["time"][0]


def test_a_run_that_diverges_ends_and_says_so() -> None:
    trace = run(optimizer=lambda p: torch.optim.SGD(p, lr=1e30), limits=Limits(updates=1000))
    assert trace.ended.startswith("diverged: 10 pushes of group")
    assert trace.meta["refused"] >= 10


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str) -> None:
    chosen = DiLoCo(period=5) if method == "diloco" else METHODS[method]()
    trace = run(chosen, 4, limits=Limits(epochs=4), evaluate=accuracy)
    assert trace.ended == "max_epochs"
    assert trace.evaluations()["accuracy"][-1] > 0.6
    assert np.all(np.diff(trace.rows["time"]) >= 0)
    assert np.all(trace.rows["staleness"] >= 0)


# --- Replay --------------------------------------------------------------------------------------------------------

RECORDED: dict[str, Method] = {name: kind() for name, kind in METHODS.items() if name != "gossip"} | {
    "diloco": DiLoCo(period=3),
    "async_diloco": AsyncDiLoCo(period=3),
    "stale_synchronous": AsyncSGD(bound=1),
    "downpour, apart": Downpour(n_push=2, n_fetch=3),
    "downpour, updates": Downpour(n_push=3, n_fetch=3, send="updates", warm_start=2),
    "post-local": LocalSGD(period=3, warmup_steps=5),
}


def replayed(events: Any) -> Any:
    samples = Samples(DATA, seed=0)
    return replay(events, new_model(), loss, lambda epoch, place: samples.batch(samples.at(epoch, place)), sgd)


@pytest.mark.parametrize("method", RECORDED.values(), ids=RECORDED.keys())
def test_a_recorded_run_replays_bit_for_bit(method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_omni.simulator import run as room

    seen: list[room.Simulation] = []
    start = room.Simulation.run

    def noted(self: room.Simulation, *rest: Any, **more: Any) -> Any:
        seen.append(self)
        return start(self, *rest, **more)

    monkeypatch.setattr(room.Simulation, "run", noted)
    record = RecordFile(tmp_path / "record")
    topology = Topology(((0, 1), (2,), (3, 4)))
    cluster = Cluster.even(5, jitter=RANDOM_TIMES, link=Link(latency=0.001), events=(Failure(4, 0.1),))
    run(method, topology, cluster, limits=Limits(epochs=2), computation=Computation(members_apart=True), record=record)
    record.close()
    result = replayed(read_record(tmp_path / "record"))
    expected = seen[0].server.served.master
    assert result.clock == expected.clock > 0
    for mine, theirs in zip(result.weights.values(), expected.weights(), strict=True):
        assert torch.equal(mine, theirs)
    assert set(result.groups) == {0, 1}
    if method.steps_at == "worker":
        for number, weights in result.groups.items():
            own = seen[0].groups[number].replica.weights()
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, own, strict=True))


def test_a_record_gives_the_trace_that_was_simulated_but_for_losses() -> None:
    events: list[Event] = []
    trace = run("softsync", 4, limits=Limits(epochs=2), record=events.append)
    again = trace_of(events)
    for name in ("group", "read", "write", "staleness", "samples", "epoch", "steps", "time"):
        assert np.array_equal(again.rows[name], trace.rows[name]), name
    assert (again.updates, again.meta["method"]) == (trace.updates, trace.meta["method"])


def test_groups_that_are_formed_anew_are_traced_without_batches_of_others() -> None:
    batch = Event(kind="train", time=1.0, clock=3, group=0, spans=((0, 8),))
    form = Event(kind="form", time=2.0, clock=3, groups=((0, 1),))
    trace = trace_of([batch, form, Event(kind="push", time=3.0, clock=4, group=0, read_at=3, spans=((8, 12),))])
    assert (trace.rows["samples"].tolist(), trace.rows["steps"].tolist()) == ([4], [1])


def test_a_record_that_contradicts_the_method_is_refused() -> None:
    events: list[Event] = []
    run("async_sgd", 4, limits=Limits(updates=20), record=events.append)
    pushes = [index for index, event in enumerate(events) if event.kind == "push"]
    with pytest.raises(ProtocolError, match="the record says"):
        replayed(events[: pushes[5]] + events[pushes[6] :])
    with pytest.raises(ConfigurationError, match="does not begin"):
        replayed(events[1:])
    with pytest.raises(ConfigurationError, match="empty"):
        replayed([])


# --- Errors, progress, pictures ------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"method": "no_such"}, "method='no_such' is not known"),
    ({"method": SoftSync(n=9)}, "n=9"),
    ({"groups": 9, "cluster": Cluster.even(4)}, "groups=9"),
    ({"groups": Topology(((0,), (1,))), "cluster": Cluster.even(4)}, "2 ranks, but the cluster 4 devices"),
    ({"groups": "2", "cluster": Cluster.even(4)}, "topology='2'"),
    ({"cluster": 4}, "cluster=4"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"limits": 5}, "limits=5: pass Limits"),
    ({"limits": lambda: Limits(updates=0)}, "Limits(updates=0): pass a whole number"),
    ({"limits": Limits}, "Limits(): when is the run to end"),
    ({"limits": lambda: Limits(seconds=math.nan)}, "Limits(seconds=nan)"),
    ({"evaluation": Evaluation(every=5)}, "evaluate=None"),
    ({"evaluation": lambda: Evaluation(target=("accuracy", 0.5))}, "pass every="),
    ({"evaluate": accuracy, "evaluation": Evaluation(every=1, target=("recall", 0.5))}, "target='recall'"),
    ({"computation": lambda: Computation(batched="yes")}, "Computation(batched='yes')"),  # type: ignore[arg-type]
    ({"progress": 3}, "progress=3"),
    ({"data": []}, "data: pass a map-style dataset"),
    ({"method": None}, "method=None: pass a name"),
    ({"seed": -1}, "seed=-1: pass a whole number"),
    ({"limits": lambda: Limits(epochs=1.5)}, "Limits(epochs=1.5): pass a whole number"),
    ({"evaluation": lambda: Evaluation(every=0.5)}, "Evaluation(every=0.5): pass a whole number"),  # type: ignore[arg-type]
    (
        {"evaluation": lambda: Evaluation(every=1, target="accuracy=0.5")},  # type: ignore[arg-type]
        "Evaluation(target='accuracy=0.5'): pass a metric",
    ),
    (
        {"evaluation": lambda: Evaluation(every=1, target=("accuracy", math.nan))},
        "Evaluation(target=nan): pass a metric",
    ),
    (
        {"evaluate": lambda model: 0.5, "evaluation": Evaluation(every=1)},
        "evaluate: it returns 0.5; let it return a number for each",
    ),
    ({"model": new_model().requires_grad_(False)}, "model: none of its parameters has requires_grad=True"),
    ({"loss": lambda model, batch: 0.5}, "loss: it returns 0.5; let it return the mean loss"),
    ({"loss": lambda model, batch: model(batch[0])}, "loss: it returns a tensor of shape"),
    ({"optimizer": torch.optim.SGD(new_model().parameters(), lr=1)}, "pass a function of parameters"),
    ({"optimizer": lambda p: None}, "optimizer=None: pass a function that returns"),
    ({"optimizer": lambda p: torch.optim.SGD(new_model().parameters(), lr=1)}, "optimizer: it must be made from"),
]


@pytest.mark.parametrize(("options", "says"), WRONG, ids=[says for _, says in WRONG])
def test_a_wrong_argument_is_named(options: dict[str, Any], says: str) -> None:
    values = ("limits", "evaluation", "computation")
    with pytest.raises(ConfigurationError) as caught:
        run(**{name: value() if name in values and callable(value) else value for name, value in options.items()})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Device(0.0), "seconds_per_sample=0 and overhead=0"),
        (lambda: Device(-1.0), "seconds_per_sample=-1"),
        (lambda: Jitter("uniform"), "kind='uniform'"),  # type: ignore[arg-type]
        (lambda: Jitter("normal", -1), "cv=-1"),
        (lambda: Jitter("gamma"), r'by how much\? .*Jitter\("gamma", cv=0.2\)'),
        (lambda: Jitter("exponential", 0.3), 'cv=0.3: it is always 1; .*kind="gamma"'),
        (lambda: Jitter("none", 0.3), "cv=0.3: nothing scatters"),
        (lambda: Jitter("normal", "0.3"), "cv='0.3': pass"),  # type: ignore[arg-type]
        (lambda: Cluster.even("4"), "size='4'"),  # type: ignore[arg-type]
        (lambda: Cluster.even(2, link=1e9), "link=1000000000.0: pass a Link"),
        (lambda: Cluster.even(2, events=[1.0]), "events=1.0"),
        (lambda: Cluster((1.0, 2.0)), "devices=1.0"),  # type: ignore[arg-type]
        (lambda: Link(0), "bandwidth=0"),
        (lambda: Link(latency=-1), "latency=-1"),
        (lambda: Cluster(()), "at least one device"),
        (lambda: Cluster.even(2, events=(Failure(2, 0.0),)), "no rank 2"),
        (lambda: Cluster.of_speeds([1, 0]), "speeds"),
        (lambda: Failure(0, 2.0, until=1.0), r"until=1\.0.*time=2 or later"),
        (lambda: Failure(0, 2.0, until=math.inf), "until=inf"),
        (lambda: Slowdown(0, 2, 1, 3), "start=2, stop=1"),
        (lambda: Slowdown(0, 1, 2, 0), "factor=0"),
    ],
)
def test_an_impossible_cluster_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_a_sparse_gradient_is_refused_with_the_remedy() -> None:
    embedding = nn.Sequential(nn.Embedding(3, 8, sparse=True), nn.Linear(8, 3))
    with pytest.raises(UnsupportedError, match="build the embedding with sparse=False"):
        run(model=embedding, data=TensorDataset(LABELS, LABELS))


def test_progress_goes_from_little_to_one() -> None:
    seen: list[float] = []
    run(progress=lambda done, text: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_an_interrupted_run_with_a_progress_bar_returns_what_it_has() -> None:
    def interrupting(model: Any, batch: Any) -> Tensor:
        interrupting.left -= 1  # type: ignore[attr-defined]
        if interrupting.left < 0:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return loss(model, batch)

    interrupting.left = 10  # type: ignore[attr-defined]
    trace = run(loss=interrupting, progress=True, computation=Computation(batched=False))
    assert (trace.ended, trace.updates) == ("interrupted", 10)
    interrupting.left = 10  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        run(loss=interrupting, computation=Computation(batched=False))


def test_a_run_that_is_stopped_or_interrupted_at_its_end_is_traced_as_what_it_is() -> None:
    def stops(done: float, text: str) -> None:
        if done == 1:
            raise StopSimulation

    def interrupts(model: nn.Module) -> dict[str, float]:
        raise KeyboardInterrupt

    assert run(progress=stops).ended == "max_updates"
    trace = run(progress=True, evaluate=interrupts)
    assert (trace.ended, trace.updates) == ("interrupted", 30)


def test_a_cluster_with_a_straggler_has_a_whole_number_of_devices_above_zero() -> None:
    for size in (0, 2.5):
        with pytest.raises(ConfigurationError, match=rf"size={size}: pass the number of devices, 1 or more"):
            Cluster.with_straggler(size)  # type: ignore[arg-type]


@pytest.mark.exhaustive  # the same as test_cli_simulate does with simulate, of which it is the picture
def test_a_trace_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(evaluate=accuracy, evaluation=Evaluation(every=20)).plot(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello")
    run().save(tmp_path / "damaged")
    (tmp_path / "damaged").write_bytes((tmp_path / "damaged").read_bytes()[:1000])
    np.save(tmp_path / "array.npy", np.zeros(3))
    for path in ("other", "missing", "damaged", "array.npy"):
        with pytest.raises(ConfigurationError, match="not a trace"):
            Trace.load(tmp_path / path)
    with pytest.raises(ConfigurationError, match="metric='recall'"):
        run(evaluate=accuracy).time_to("recall", 1)


def test_a_short_batch_of_several_members_is_dealt_in_pairs_and_replayed_so() -> None:
    data, events = TensorDataset(INPUTS[:7], LABELS[:7]), list[Event]()
    options: dict[str, Any] = {"data": data, "batch_size": 2, "limits": Limits(epochs=1), "record": events.append}
    trace = run("async_sgd", Topology(((0, 1), (2, 3))), computation=Computation(members_apart=True), **options)
    assert trace.work["samples"].tolist() == [2, 2, 2, 2], "two of three samples are trained by both members"
    samples = Samples(data, seed=0)
    again = replay(events, new_model(), loss, lambda *where: samples.batch(samples.at(*where)), sgd)
    for name, weight in again.weights.items():
        assert np.array_equal(weight.numpy(), trace.weights[name])
