"""The fitted hardware model: against what can be said beforehand, and against the simulator."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import example, given, settings
from hypothesis import strategies as st
from predictions import known_profile
from simulated_measurements import measurements_of
from torch import nn
from torch.utils.data import TensorDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator import Cluster, Computation, Jitter, Limits, Link, Workload, simulate
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace
from lightning_omni.tuning.model.cost_model import ExchangePattern
from lightning_omni.tuning.model.forecast import TrainingPlan
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.model.profile import Prediction, Profile
from lightning_omni.tuning.model.queueing import residence, slowest

pytest.importorskip("scipy")
Times = Callable[[np.random.Generator, tuple[int, int]], np.ndarray[Any, Any]]


def together(own: Any, samples: Any = 8.0, allreduce: float = 0.0, **rest: Any) -> Measured:
    """One group whose members worked that long, shape (ranks, steps)."""
    own = np.asarray(own, np.float64)
    steps = own.max(axis=0) + allreduce
    counts = np.broadcast_to(samples, own.shape)
    return Measured(tuple(range(len(own))), counts.tolist(), own.tolist(), steps, **rest)


def seconds(prediction: Prediction) -> float:
    return prediction.seconds_per_update.value


# --- What can be said beforehand --------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    parts=st.lists(st.floats(0, 0.1), min_size=6, max_size=6),
    groups=st.sampled_from([2, 3, 4, 6, 12]),
    batch=st.integers(1, 8),
    period=st.integers(1, 4),
    servers=st.sampled_from([1, 1, 4]),
    per_node=st.booleans(),
)
def test_known_costs_give_the_largest_of_the_serial_parts_and_the_groups_share(
    parts: list[float], groups: int, batch: int, period: int, servers: int, per_node: bool
) -> None:
    sample, overhead, bytes_, hop, delay, serve = parts
    profile = known_profile(
        12,
        batch,
        per_sample=1e-3 + sample,
        overhead=overhead,
        allreduce=bytes_,
        hop=hop,
        exchange=delay + serve,
        serve=serve,
        nbytes=1000,
        servers=servers,
        per_node=per_node,
    )
    if servers > 1:  # each has a share, and they agree
        delay, serve = 2 * delay, serve / 4
    size = 12 // groups
    step = overhead + batch * (1e-3 + sample) + 2 * (size - 1) * (bytes_ / size + hop) + (delay + serve) / period
    found = profile.predict(groups, exchanging=ExchangePattern(period))
    assert seconds(found) == pytest.approx(max(serve / period, step / groups))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.floats(0.0, 0.1), st.floats(1e-3, 0.1), st.integers(1, 4))
def test_what_groups_wait_for_a_link_is_between_nothing_and_all_of_the_others(
    groups: int, serve: float, link: float, period: int
) -> None:
    profile = known_profile(groups, 1, per_sample=0.1, exchange=serve + 2 * link, serve=serve, link=link, nbytes=8)
    found = seconds(profile.predict(groups, exchanging=ExchangePattern(period))) * groups
    assert found >= max(0.1 + (serve + 2 * link) / period, groups * max(serve, link) / period) * (1 - 1e-9)
    assert found <= 0.1 + groups * (serve + 2 * link) / period


@settings(max_examples=15, deadline=None)
@given(
    overhead=st.floats(0, 0.1),
    per_sample=st.floats(1e-4, 1e-2),
    batch=st.integers(1, 64),
    sizes=st.lists(st.integers(1, 64), min_size=3, max_size=9).filter(lambda sizes: len(set(sizes)) > 1),
)
def test_overhead_and_time_per_sample_are_found(
    overhead: float, per_sample: float, batch: int, sizes: list[int]
) -> None:
    samples = np.tile(sizes, (2, 1))
    profile = Profile.fit([together(overhead + samples * per_sample, samples)], draws=2)
    assert seconds(profile.scaled(batch_size=batch).predict(1)) == pytest.approx(
        overhead + batch * per_sample, rel=1e-6
    )
    assert profile.batch_size == pytest.approx(np.mean(sizes))


def test_with_one_size_of_batch_all_time_is_of_samples() -> None:
    profile = Profile.fit([together(np.full((2, 5), 0.1))])
    assert seconds(profile.scaled(batch_size=16).predict(1)) == pytest.approx(0.2)


def test_the_slowest_of_k_exponential_times_is_a_harmonic_number() -> None:
    own = np.random.default_rng(0).standard_exponential((8, 2000))
    profile = Profile.fit([together(own)], draws=4)
    for groups in (1, 2, 4, 8):
        size = 8 // groups
        harmonic = sum(1 / member for member in range(1, size + 1))
        assert seconds(profile.predict(groups)) == pytest.approx(harmonic / groups, rel=0.03)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4), st.data())
def test_the_mean_of_the_slowest_is_exact(rows: list[list[int]], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 2), min_size=len(rows), max_size=len(rows)))
    values = np.sort(np.array(rows, np.float64), axis=1)
    mean, variance = slowest(values[None], np.array(counts))
    members = [row for row, count in zip(values, counts, strict=True) for _ in range(count)]
    largest = np.max(np.stack(np.meshgrid(*members, indexing="ij")), axis=0)
    assert mean[0] == pytest.approx(largest.mean(), abs=1e-9)
    assert variance[0] == pytest.approx(largest.var(), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(0, 99), st.floats(0.2, 1.5), st.floats(0.0, 0.1))
def test_steps_that_are_long_for_all_ranks_at_once_are_no_reason_for_more_groups(
    ranks: int, seed: int, common: float, own: float
) -> None:
    random = np.random.default_rng(seed)
    steps = random.lognormal(0.0, common, 40) * random.lognormal(0.0, own, (ranks, 40))
    profile = Profile.fit([together(steps)])
    one, all_ = (profile.samples_per_second(groups) for groups in (1, ranks))
    assert one == pytest.approx(8 * ranks / steps.max(axis=0).mean(), rel=0.1)
    alone = 8 * (1 / steps.mean(axis=1)).sum()
    assert all_ == pytest.approx(alone, rel=0.02), "their means are what they were"


def test_of_what_is_common_to_all_ranks_and_what_is_not_each_counts() -> None:
    random = np.random.default_rng(0)
    steps = random.gamma(4.0, 0.25, 60) * random.gamma(8.0, 0.125, (4, 60))
    profile = Profile.fit([together(steps)])
    assert profile.samples_per_second(1) == pytest.approx(32 / steps.max(axis=0).mean(), rel=0.05)
    pairs = [steps[:2].max(axis=0).mean(), steps[2:].max(axis=0).mean()]
    assert profile.samples_per_second(2) == pytest.approx(sum(16 / pair for pair in pairs), rel=0.05)


def test_of_two_classes_like_is_put_with_like_where_that_is_faster() -> None:
    own = np.outer([0.1, 0.4, 0.1, 0.4], np.ones(5))
    profile = Profile.fit([together(own)])
    prediction = profile.predict(2)
    assert prediction.topology == Topology(((0, 2), (1, 3)))
    assert seconds(prediction) == pytest.approx(1 / (1 / 0.1 + 1 / 0.4))
    assert prediction.samples_per_second.value == pytest.approx(16 / seconds(prediction))
    mixed = TrainingPlan(profile.model, profile.batch_size, False, profile.model.known(ExchangePattern()))
    assert mixed.outcome(Topology.even(4, 2)).seconds_per_update == pytest.approx(0.2)


def test_ranks_of_nearly_one_speed_stay_in_order() -> None:
    own = np.outer([0.104, 0.1, 0.102, 0.1], np.ones(5))
    assert Profile.fit([together(own)]).predict(2).topology == Topology.even(4, 2)


def test_in_proportion_to_their_speeds_the_members_of_a_group_are_done_at_once() -> None:
    profile = Profile.fit([together(np.outer([0.1, 0.1, 0.2, 0.4], np.ones(5)), samples=100)])
    assert seconds(profile.predict(1)) == pytest.approx(0.4)
    assert seconds(profile.predict(1, rebalance=True)) == pytest.approx(400 / sum(profile.speeds), rel=0.02)


def test_an_allreduce_is_never_negative() -> None:
    measured = replace(together(np.full((2, 5), 0.1)), steps=(0.09,) * 5)
    assert seconds(Profile.fit([measured]).predict(1)) == pytest.approx(0.1)


def test_one_group_has_no_server() -> None:
    prediction = known_profile(4, 1, per_sample=0.1, exchange=0.3, serve=0.2).predict(1)
    assert seconds(prediction) == pytest.approx(0.1)
    assert [prediction.parts[name] for name in ("exchange", "serve", "link")] == [0, 0, 0]


def test_an_exchange_every_few_steps_is_a_part_of_each_step() -> None:
    profile = known_profile(2, 1, per_sample=0.1, exchange=0.04)
    assert seconds(profile.predict(2)) == pytest.approx(0.14 / 2, rel=1e-3)
    assert seconds(profile.predict(2, exchanging=ExchangePattern(4))) == pytest.approx(0.11 / 2, rel=1e-3)


# --- What is shared ---------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    think=st.lists(st.floats(0.01, 10), min_size=2, max_size=12),
    scatter=st.floats(0, 1),
    service=st.floats(1e-3, 2),
)
def test_groups_are_no_faster_than_what_they_share_and_no_slower_than_one_after_the_other(
    think: list[float], scatter: float, service: float
) -> None:
    times = np.array([think])
    spent = residence(times, (scatter * times) ** 2, np.array([service]))
    assert service * (1 - 1e-9) <= spent[0] <= len(think) * service * (1 + 1e-9)
    assert (1 / (times + spent)).sum() * service <= 1 + 2e-2  # what is left of it, the outcome cuts off


@pytest.mark.parametrize(
    ("groups", "load", "cv"),
    covering(
        (groups, load, cv)
        for groups, load, cv in product((2, 8), (0.2, 0.5, 0.8, 1.0, 1.3, 2.0), (0.0, 0.1, 0.3, 1.0))
        if groups > load  # or they would have nothing else to do
    ),
)
def test_a_queue_is_as_long_as_a_simulated_one(groups: int, load: float, cv: float) -> None:
    think = groups / load - 1
    random = np.random.default_rng(0)
    sigma = math.sqrt(math.log1p(cv**2))
    steps = think * np.exp(sigma * random.standard_normal((groups, 2500)) - sigma**2 / 2)
    free, due, made, over = 0.0, steps[:, 0].copy(), np.ones(groups, int), []
    while made.max() < 2500:
        first = int(due.argmin())
        free = max(free, due[first]) + 1
        over.append(free)
        due[first] = free + steps[first, made[first]]
        made[first] += 1
    tail = over[len(over) // 5 :]
    truth = (tail[-1] - tail[0]) / (len(tail) - 1)
    one = np.full((1, groups), think)
    cycle = think + residence(one, (cv * one) ** 2, np.ones(1))[0]
    assert cycle / groups == pytest.approx(truth, rel=0.07)


@settings(max_examples=3, deadline=None)
@example(serve=0.05, link=0.0, scatter=0.5, period=1, seed=86)
@example(serve=0.1, link=0.0, scatter=0.375, period=2, seed=11)
@given(
    serve=st.floats(0, 0.1),
    link=st.floats(0, 0.1),
    scatter=st.floats(0, 0.5),
    period=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_no_grouping_is_faster_than_a_serial_part_or_any_part_of_it(
    serve: float, link: float, scatter: float, period: int, seed: int
) -> None:
    own = 0.1 * np.exp(scatter * np.random.default_rng(seed).standard_normal((6, 12)))
    measured = together(own, allreduce=0.01, serve=serve, nbytes=1000)
    profile = Profile.fit([measured], draws=20)
    if link:
        profile = profile.scaled(bandwidth=1000 / link)
    found = [profile.predict(groups, exchanging=ExchangePattern(period)) for groups in range(1, 7)]
    for prediction in found:
        parts = prediction.parts
        assert seconds(prediction) >= max(parts["serve"], parts["link"]) * (1 - 1e-6)
        assert seconds(prediction) >= max(parts.values()) * 0.9  # the slowest member's bad luck is corrected for
        estimate = prediction.seconds_per_update
        assert estimate.low <= estimate.value <= estimate.high


def test_what_saturates_is_the_bottleneck_and_more_groups_do_not_help() -> None:
    profile = known_profile(8, 1, per_sample=0.1, exchange=0.06, serve=0.06)
    assert [profile.predict(groups).bottleneck for groups in (1, 2, 3, 8)] == ["compute", "compute", "server", "server"]
    assert seconds(profile.predict(2)) == pytest.approx(0.08)
    for groups in (3, 4, 8):
        assert seconds(profile.predict(groups)) == pytest.approx(0.06)


# --- Intervals --------------------------------------------------------------------------------------------------------


def lognormal(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    return np.exp(0.3 * random.standard_normal(shape) - 0.045)


def exponential(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    return random.standard_exponential(shape)


@pytest.mark.parametrize("times", [lognormal, exponential])
def test_intervals_hold_the_truth_about_as_often_as_they_say(times: Times) -> None:
    many = times(np.random.default_rng(1), (200_000, 8))
    truth = {1: many.max(axis=1).mean(), 2: many[:, :4].max(axis=1).mean() / 2, 8: many.mean() / 8}
    held = []
    for seed in range(16):
        random = np.random.default_rng(seed)
        profile = Profile.fit([together(times(random, (8, 30)))], draws=50)
        for groups, known in truth.items():
            estimate = profile.predict(groups).seconds_per_update
            held.append(estimate.low <= known <= estimate.high)
            assert estimate.value == pytest.approx(known, rel=0.2)
    assert 0.62 < np.mean(held) < 0.95


def test_a_seed_gives_the_same_interval() -> None:
    own = lognormal(np.random.default_rng(0), (4, 20))
    profile = Profile.fit([together(own)])
    assert Profile.fit([together(own)]).predict(2) == profile.predict(2)
    assert Profile.fit([together(own)], seed=1).predict(2) != profile.predict(2)


# --- Clusters that were not measured ----------------------------------------------------------------------------------


def test_a_scaled_cluster_repeats_its_devices_and_has_the_network_that_is_asked_for() -> None:
    own = np.outer([0.1, 0.2], np.ones(9))
    profile = Profile.fit([together(own, allreduce=0.01, serve=0.002, nbytes=10**6)])
    large = profile.scaled(ranks=6, bandwidth=1e8, latency=0.003)
    assert large.ranks == 6
    assert large.speeds == pytest.approx((80, 40) * 3)
    ring = 2 * 5 * (1e6 / 6 / 1e8 + 0.003)
    assert seconds(large.predict(1)) == pytest.approx(0.2 + ring)
    away = 2 * (0.003 + 0.01) + 0.002
    assert seconds(large.predict(6, exchanging=ExchangePattern(100))) == pytest.approx(
        1 / (3 / (0.1 + away / 100) + 3 / (0.2 + away / 100)), rel=0.01
    )
    assert large.predict(6).parts["link"] == pytest.approx(0.01)
    small = ExchangePattern(1, 10**5, 10**5)
    assert large.predict(6, exchanging=small).parts["link"] == pytest.approx(0.001)
    assert seconds(profile.scaled(bandwidth=math.inf, latency=0).predict(2)) < seconds(profile.predict(2))


def test_a_thousand_ranks_take_less_than_a_second() -> None:
    random = np.random.default_rng(0)
    own = lognormal(random, (8, 40)) * np.array([1, 1, 1, 2, 2, 2, 4, 4])[:, None]
    began = time.process_time()
    profile = Profile.fit([together(own, allreduce=0.1, serve=0.01, nbytes=1000)] * 3)
    fitted = time.process_time()
    assert fitted - began < 3
    large = profile.scaled(ranks=1024)
    for groups in (1, 3, 512, 1024):
        began = time.process_time()
        large.predict(groups, rebalance=True)
        assert time.process_time() - began < 1.5  # on a busy machine


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ranks": (0, 0)}, "ranks="),
        ({"ranks": ()}, "ranks="),
        ({"samples": ((8, 8),)}, "samples: rows of [2]; pass one for each rank, 2, of 2 steps"),
        ({"own": ((0.1, 0.1), (0.1,))}, "own: rows of [2, 1]"),
        ({"own": ((0.1, 0.1), (0.1, -1))}, "own: pass numbers above 0"),
        ({"samples": ((0, 8), (8, 8))}, "samples: pass numbers above 0"),
        ({"steps": (), "own": ((), ())}, "steps: none; measure at least one"),
        ({"steps": (0.1, math.nan)}, "steps: pass numbers above 0"),
        ({"serve": -1.0}, "serve=-1.0"),
        ({"nbytes": -1}, "nbytes=-1"),
        ({"servers": 0}, "servers=0"),
    ],
)
def test_what_cannot_have_been_measured_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        replace(together(np.full((2, 2), 0.1)), **changed)


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda profile: Profile.fit([]), "measured="),
        (lambda profile: Profile.fit([*profile.measured, together(np.ones((3, 3)))]), "measured: of ranks"),
        (lambda profile: Profile.fit(profile.measured, draws=1), "draws=1"),
        (lambda profile: profile.predict(0), "groups=0: pass 1 to 2"),
        (lambda profile: profile.predict(3), "groups=3"),
        (lambda profile: profile.predict(True), "groups=True"),
        (lambda profile: profile.scaled(batch_size=0), "batch_size=0"),
        (lambda profile: profile.scaled(ranks=0), "ranks=0"),
        (lambda profile: profile.scaled(bandwidth=0), "bandwidth=0"),
        (lambda profile: profile.scaled(bandwidth=1e9), "bandwidth=.*Measured"),
        (lambda profile: profile.scaled(latency=-1), "latency=-1"),
        (lambda profile: profile.scaled(servers=0), "servers=0"),
        (lambda profile: profile.scaled(per_node=True), "per_node=True: pass servers="),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(ask: Callable[[Profile], Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ask(Profile.fit([together(np.full((2, 4), 0.1))]))


# --- The simulator ----------------------------------------------------------------------------------------------------

MS = 1e-3
NBYTES = 8
DATA = TensorDataset(torch.zeros(20_000, 2), torch.zeros(20_000, 1))
CLUSTERS = {
    "equal": Cluster.even(8, MS, link=Link(latency=MS), update_seconds=MS / 2),
    "straggler": Cluster.with_straggler(8, 4.0, MS, link=Link(latency=MS), update_seconds=MS / 2),
    "exponential": Cluster.even(8, MS, jitter=Jitter("exponential"), link=Link(latency=MS), update_seconds=MS / 3),
    "lognormal": Cluster.even(8, MS, 2 * MS, Jitter("lognormal", 0.3), update_seconds=0.8 * MS),
    "slow network": Cluster.even(
        8,
        MS,
        jitter=Jitter("lognormal", 0.1),
        link=Link(latency=6 * MS),
        server=Link(NBYTES / MS),
        group_link=Link(NBYTES / MS, 6 * MS),
    ),
    "saturated server": Cluster.even(
        8, MS, jitter=Jitter("lognormal", 0.2), update_seconds=4 * MS, link=Link(latency=MS)
    ),
    "saturated link": Cluster.even(
        8,
        MS,
        jitter=Jitter("gamma", 0.5),
        update_seconds=MS,
        server=Link(NBYTES / (3 * MS)),
        group_link=Link(NBYTES / (3 * MS)),
    ),
    "speeds 1:2:4": Cluster.of_speeds(
        [1, 1, 1, 2, 2, 2, 4, 4], MS, jitter=Jitter("gamma", 0.2), link=Link(latency=MS / 2), update_seconds=MS / 3
    ),
}


def run(name: str, topology: int | Topology, updates: int, seed: int, **options: Any) -> Trace:
    torch.manual_seed(0)
    return simulate(
        options.pop("method", "async_sgd"),
        topology,
        CLUSTERS[name],
        Workload(
            options.pop("model", None) or nn.Linear(2, 1, bias=False),
            DATA,
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        ),
        batch_size=8,
        limits=Limits(updates=updates),
        seed=seed,
        **options,
    )


@cache
def fitted(name: str) -> Profile:
    """To twenty batches of each rank, in one group."""
    return Profile.fit([measurements_of(run(name, 1, 20, seed=1))])


def pace(trace: Trace) -> float:
    """Mean seconds between two pushes, but for the start."""
    times = np.sort(trace.rows["time"])
    times = times[len(times) // 5 :]
    return float((times[-1] - times[0]) / (len(times) - 1))


@cache
def errors_of(name: str) -> list[float]:
    found = []
    for groups, rebalance in ((2, False), (4, False), (8, False), (1, True)):
        prediction = fitted(name).predict(groups, rebalance=rebalance)
        truth = truth_of(name, prediction.topology, rebalance)
        found.append(abs(seconds(prediction) / truth - 1))
    return found


@cache
def truth_of(name: str, topology: Topology, rebalance: bool) -> float:
    updates = 40 * len(topology.alive)
    return pace(run(name, topology, updates, seed=3, computation=Computation(rebalance="auto" if rebalance else "off")))


@pytest.mark.parametrize("name", CLUSTERS)
def test_groupings_that_were_not_measured_are_predicted_to_fifteen_per_cent(name: str) -> None:
    assert max(errors_of(name)) < 0.15


def test_over_all_clusters_half_of_the_errors_are_below_five_per_cent() -> None:
    assert np.median([error for name in CLUSTERS for error in errors_of(name)]) < 0.05


def test_what_is_busy_is_told_apart() -> None:
    assert fitted("saturated server").predict(8).bottleneck == "server"
    assert fitted("saturated link").predict(8).bottleneck == "link"
    assert fitted("slow network").predict(8).bottleneck == "exchange"
    assert fitted("straggler").predict(1).bottleneck == "compute"


def test_local_steps_between_exchanges_are_counted() -> None:
    """Elastic averaging pushes every third step."""
    method = "elastic_averaging:period=3"
    for groups in (2, 4):
        trace = run("slow network", groups, 40 * groups, seed=3, method=method)
        found = fitted("slow network").predict(groups, exchanging=ExchangePattern(3))
        assert seconds(found) * 3 == pytest.approx(pace(trace), rel=0.07)


def test_a_trace_keeps_its_times_in_a_file_and_old_files_load(tmp_path: Path) -> None:
    trace = run("lognormal", 1, 20, seed=0)
    trace.save(tmp_path / "trace.npz")
    assert measurements_of(Trace.load(tmp_path / "trace.npz")) == measurements_of(trace)
    replace(trace, work={}, steps={}).save(tmp_path / "old.npz")
    old = Trace.load(tmp_path / "old.npz")
    assert (dict(old.work), dict(old.steps)) == ({}, {})


def test_the_steps_of_a_group_fill_its_time_but_for_synchronization() -> None:
    trace = run("speeds 1:2:4", 4, 60, seed=0)
    steps, work = trace.steps, trace.work
    for group in range(4):
        mine = steps["group"] == group
        assert steps["seconds"][mine].sum() == pytest.approx(steps["time"][mine].max())
    assert (steps["exchange"] < steps["seconds"]).all()
    assert len(work["rank"]) == 2 * len(steps["group"])
    assert (work["samples"] == 8).all()


# --- Several servers --------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Weights that four servers can hold 64 numbers each of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 128, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs).mean(1, keepdim=True)
        return outputs


WIDE = 2 * 128 * 4
NETWORKS: dict[str, dict[str, Any]] = {
    "server": {"link": Link(latency=MS / 4), "update_seconds": 4 * MS},
    "links": {
        "link": Link(WIDE / (2 * MS), MS),
        "server": Link(WIDE / (2 * MS)),
        "group_link": Link(WIDE / (2 * MS), MS),
        "update_seconds": MS / 4,
    },
}
SERVERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"servers": 2}, {"servers": 2}),
    ({"servers": 4}, {"servers": 4}),
    ({"servers": "per-node", "nodes": 4}, {"servers": 4, "per_node": True}),
]


@pytest.mark.parametrize("name", NETWORKS)
def test_other_numbers_of_servers_are_predicted_to_fifteen_per_cent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(groups: int, updates: int, seed: int, **servers: Any) -> Trace:
        cluster = Cluster.even(8, MS, jitter=Jitter("lognormal", 0.2), **NETWORKS[name], **servers)
        monkeypatch.setitem(CLUSTERS, "servers", cluster)
        return run("servers", groups, updates, seed, model=Wide(), computation=Computation(batched=False))

    profile = Profile.fit([measurements_of(trained(1, 40, seed=2))], draws=2)
    for truly, scaled in SERVERS:
        trace = trained(8, 120, seed=3, **truly)
        assert seconds(profile.scaled(**scaled).predict(8)) == pytest.approx(pace(trace), rel=0.15)
    # And the other way round.
    measured = measurements_of(trained(1, 40, seed=2, **truly))
    assert (measured.servers, measured.per_node) == (4, True)
    several = Profile.fit([replace(measured, servers=1, per_node=False), measured], draws=2)
    assert several.model.servers == 4, "as it is now"
    assert seconds(several.predict(8)) == pytest.approx(pace(trace), rel=0.05)
    assert seconds(several.scaled(servers=1).predict(8)) == pytest.approx(seconds(profile.predict(8)), rel=0.05)
