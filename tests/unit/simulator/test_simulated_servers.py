"""Several servers that hold a partition each, in virtual time: what they cost, and that they act as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from predictions import NUMBERS, RANKS, Way, cluster_of, rate_of, simulated
from simulated_measurements import measurements_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni import Compression
from lightning_omni.errors import ConfigurationError
from lightning_omni.server.event_log import Event
from lightning_omni.simulator import (
    Cluster,
    Computation,
    Device,
    Failure,
    Jitter,
    Limits,
    Link,
    Workload,
    replay,
    simulate,
)
from lightning_omni.simulator.engine import Engine, Timeline
from lightning_omni.simulator.network import Exchanges
from lightning_omni.simulator.workbench import Samples
from lightning_omni.trace import Trace
from lightning_omni.tuning.model.cost_model import ExchangePattern
from lightning_omni.tuning.model.profile import Profile

GENERATOR = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(960, 32, generator=GENERATOR), torch.randn(960, 8, generator=GENERATOR))
NBYTES = 32 * 8 * 4
"""Of a model that four servers hold 64 numbers each of."""


def new_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(32, 8, bias=False)


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def run(method: str, groups: int, cluster: Cluster, **options: Any) -> Trace:
    options = {
        "batch_size": 4,
        "computation": Computation(batched=False),
        "limits": Limits(updates=120),
        **options,
    }
    workload = Workload(
        options.pop("model", None) or new_model(),
        DATA,
        options.pop("loss", loss),
        options.pop("evaluate", None),
        options.pop("optimizer", sgd),
    )
    return simulate(method, groups, cluster, workload, **options)


# --- They act as one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["async_sgd", "hardsync", "elastic_averaging:period=2"])
def test_where_links_cost_nothing_several_servers_are_bitwise_one(method: str) -> None:
    one, *others = (
        run(
            method, 3, limits=Limits(updates=12), cluster=Cluster.even(3, jitter=Jitter("exponential"), servers=servers)
        )
        for servers in (1, 2, 4, "per-node")
    )
    for several in others:
        assert all(np.array_equal(one.rows[name], several.rows[name]) for name in one.rows)
        assert np.array_equal(one.weights["weight"], several.weights["weight"])


@pytest.mark.parametrize(
    ("method", "wire"),
    [
        ("async_sgd", "fp32"),
        ("async_sgd", Compression(push="topk:0.1", pull="bf16")),
        ("elastic_averaging:period=2", Compression(push="int8:block=48", pull="int8:block=48")),
        ("diloco:period=2,fragments=2", "fp32"),
        ("diloco:period=4,fragments=2,delay=1", Compression(push="topk:0.1", pull="bf16")),
        ("decoupled_diloco:period=2,fragments=2", Compression(push="int8:block=48", pull="int8:block=48")),
    ],
    ids=str,
)
def test_a_run_with_several_servers_is_replayed_bitwise_in_any_format(method: str, wire: Any) -> None:
    events: list[Event] = []
    network: dict[str, Any] = {"link": Link(1e5, 1e-3), "server": Link(1e5), "update_seconds": 1e-3}
    cluster = Cluster.even(3, jitter=Jitter("exponential"), servers=3, **network)
    trace = run(method, 3, cluster, compression=wire, record=events.append, limits=Limits(updates=24))
    samples = Samples(DATA, seed=0)
    again = replay(events, new_model(), loss, lambda *where: samples.batch(samples.at(*where)), sgd)
    assert again.clock == trace.updates
    assert np.array_equal(again.weights["weight"].numpy(), trace.weights["weight"])


def test_the_hardware_model_predicts_fragments_with_several_servers() -> None:
    cluster = replace(cluster_of("nearly equal", "slow"), servers=2)
    measured = measurements_of(simulated(Way("async_sgd", 40), "fp32", 1, cluster, 1))
    way = Way("diloco:period=16,fragments=4", 40)
    predicted = Profile.fit([measured]).predict(RANKS, exchanging=ExchangePattern.of(way.method, nbytes=NUMBERS * 4))
    rate = rate_of(simulated(way, "fp32", RANKS, cluster, 1))
    assert predicted.samples_per_second.value == pytest.approx(rate, rel=0.05)


def test_the_record_of_several_servers_is_replayed_as_that_of_one() -> None:
    events: list[Event] = []
    trace = run(
        "async_sgd", 3, Cluster.even(3, jitter=Jitter("exponential")), record=events.append, limits=Limits(updates=20)
    )
    events[0] = msgspec.structs.replace(events[0], servers=4)
    samples = Samples(DATA, seed=0)
    again = replay(events, new_model(), loss, lambda *where: samples.batch(samples.at(*where)), sgd)
    assert np.array_equal(again.weights["weight"].numpy(), trace.weights["weight"])
    events[0] = msgspec.structs.replace(events[0], wire_format={"name": "bf16"})
    with pytest.raises(ConfigurationError, match=r"each of 4 servers .*only runs in \"fp32\" and without fragments="):
        replay(events, new_model(), loss, lambda *where: samples.batch(samples.at(*where)), sgd)


# --- What they cost --------------------------------------------------------------------------------------------------


def alone(**network: Any) -> float:
    """Seconds of an update of one group, whose 4 samples take 40 ms; a second one computes for ever."""
    devices = (Device(0.01), Device(1e9))
    return run("async_sgd", 2, Cluster(devices, **network), limits=Limits(updates=5)).seconds_per_update


def test_an_exchange_ends_with_its_last_share_and_all_servers_agree_before_they_apply_it() -> None:
    link, card = Link(NBYTES / 0.01, 0.001), Link(NBYTES / 0.008, 0.002)
    network: dict[str, Any] = {"link": link, "server": card, "update_seconds": 0.004}
    one = 0.04 + 2 * (0.001 + 0.002 + 0.01) + 0.004
    assert alone(**network) == pytest.approx(one)
    # The link carries all shares, and each card a quarter meanwhile; and there is a message each way between servers.
    several = 0.04 + 2 * (0.001 + 0.002 + 0.01) + 0.001 + 2 * 0.003
    assert alone(servers=4, **network) == pytest.approx(several)


def test_the_share_on_a_groups_own_node_crosses_no_link() -> None:
    network: dict[str, Any] = {"link": Link(NBYTES / 0.01), "server": Link(NBYTES / 0.008), "update_seconds": 0.004}
    assert alone(servers="per-node", nodes=2, **network) == pytest.approx(0.04 + 2 * 0.005 + 0.002)
    assert alone(servers="per-node", nodes=1, **network) == pytest.approx(0.04 + 0.004)


def test_saturated_servers_take_a_share_of_the_time_for_each_update() -> None:
    for servers in (2, 4):
        cluster = Cluster.even(16, 1e-3, jitter=Jitter("exponential"), servers=servers, update_seconds=0.02)
        assert run("async_sgd", 16, cluster, limits=Limits(updates=80)).seconds_per_update == pytest.approx(
            0.02 / servers, rel=0.04
        )


class Coupled(torch.optim.SGD):
    """No optimizer that is known to treat each number by itself."""


def test_whole_parameters_are_as_slow_as_the_largest() -> None:
    model = nn.Sequential(nn.Linear(32, 24, bias=False), nn.Linear(24, 8, bias=False))  # 768 and 192 numbers
    cluster = Cluster.even(8, 1e-3, servers=2, update_seconds=0.02)
    trace = run(
        "async_sgd", 8, cluster, model=model, optimizer=lambda own: Coupled(own, lr=0.01), limits=Limits(updates=60)
    )
    assert trace.seconds_per_update == pytest.approx(0.02 * 768 / 960, rel=0.04)


shares_of = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)
seconds_of = st.sampled_from([0.0, 0.5, 2.0])


@given(shares_of, st.booleans(), seconds_of, seconds_of, st.sampled_from([1.0, 8.0]), st.sampled_from([1.0, 8.0]))
@settings(max_examples=20, deadline=None)
def test_no_share_is_faster_than_its_way_and_all_are_no_slower_than_one_server_that_holds_everything(
    shares: list[int], at_home: bool, latency: float, update: float, link: float, card: float
) -> None:
    nbytes, held = 24, [share / sum(shares) for share in shares]

    def took(servers: Any, parts: list[float]) -> tuple[float, float]:
        cluster = Cluster.even(
            len(parts), link=Link(link, latency), server=Link(card), update_seconds=update, servers=servers
        )
        engine = Engine()
        exchanges = Exchanges(engine, cluster, parts)
        exchanges.nodes[0] = 0
        moments = []

        def exchange() -> Timeline:
            yield from exchanges.push(0, nbytes)
            moments.append(engine.now)
            yield from exchanges.answer(0, nbytes)
            moments.append(engine.now)

        engine.start(exchange())
        while engine.events:
            engine.step()
        pushed, answered = moments
        return pushed, answered - pushed

    push, answer = took("per-node" if at_home else len(shares), held)
    away = nbytes * (1 - held[0] if at_home else 1)
    largest = nbytes * max((held[1:] or [0.0]) if at_home else held)
    is_near = at_home and len(held) == 1
    delay = 0.0 if is_near else latency
    assert push >= delay + max(away / link, largest / card) + update * max(held) - 1e-9
    assert answer >= (0.0 if at_home and not away and len(held) == 1 else max(away / link, largest / card)) - 1e-9
    one_push, one_answer = took(1, [1.0])
    agreement = 2 * latency if len(shares) > 1 else 0.0
    assert push <= one_push + agreement + 1e-9
    assert answer <= one_answer + 1e-9


@pytest.mark.parametrize("servers", [3, "per-node"])
def test_a_group_that_dies_and_comes_back_is_on_the_node_where_it_was(servers: Any) -> None:
    network: dict[str, Any] = {"link": Link(1e5, 1e-3), "update_seconds": 1e-3}
    events = (Failure(2, 0.05, until=0.2),)
    failed, whole = (
        run("async_sgd", 3, Cluster.even(3, 1e-3, servers=servers, events=each, **network), limits=Limits(updates=60))
        for each in (events, ())
    )
    # Its node holds less than others do, so a group elsewhere would take another time.
    again, before = (
        np.median(np.diff(trace.rows["time"][trace.rows["group"] == group]))
        for trace, group in ((failed, 3), (whole, 2))
    )
    assert again == pytest.approx(before)


# --- What cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"servers": 0}, "servers=0"),
        ({"servers": "all"}, "servers='all'"),
        ({"servers": "per-node", "nodes": 3}, "nodes=3: 4 devices"),
        ({"servers": "per-node", "nodes": 5}, "nodes=5"),
        ({"nodes": 2}, 'nodes=2: it is for servers="per-node"'),
    ],
)
def test_servers_that_cannot_be_are_refused_by_name(cluster: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Cluster.even(4, **cluster)


def test_a_cluster_says_its_servers_and_where_they_are() -> None:
    several = Cluster.even(4, servers="per-node", nodes=2)
    assert (several.summary()["servers"], several.summary()["nodes"]) == ("per-node", 2)
    assert [several.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert "servers" not in Cluster.even(4).summary()
