"""Aggregators in virtual time: what they cost, what they save, and that the training is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_simulated_servers import DATA, NBYTES, loss, new_model, sgd

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import SoftSync
from lightning_omni.simulator import Cluster, Failure, Jitter, Link, replay, simulate
from lightning_omni.simulator.workbench import Samples
from lightning_omni.trace import Trace

SECOND = Link(bandwidth=NBYTES)
"""The weights take a second."""


def run(method: Any, groups: int, cluster: Cluster, **options: Any) -> Trace:
    options = {"optimizer": sgd, "loss": loss, "batch_size": 4, "batched": False, "max_updates": 12, **options}
    return simulate(method, groups, cluster, new_model(), DATA, **options)


@pytest.mark.parametrize(
    "method", ["hardsync", "local_sgd:period=2", "diloco:period=2", "local_sgd:period=4,fragments=2"]
)
def test_what_groups_train_is_what_they_train_without_aggregators(method: str) -> None:
    alone, tree = (
        run(method, 4, Cluster.even(4, link=Link(1e6), server=Link(1e5), aggregators=count)) for count in (0, 2)
    )
    assert tree.updates == alone.updates
    for name, weights in alone.weights.items():
        assert np.allclose(weights, tree.weights[name], atol=1e-6)


def test_a_sum_costs_the_servers_card_and_its_updates_what_one_push_does() -> None:
    base = Cluster.even(4, seconds_per_sample=0.25, server=SECOND, update_seconds=10.0)
    alone = run("hardsync", 4, base, max_updates=1)
    # A second to compute, four pushes of a second that share the card, and ten for each of them.
    assert alone.seconds == pytest.approx(1 + 4 + 4 * 10)
    tree = run("hardsync", 4, Cluster.even(4, 0.25, server=SECOND, update_seconds=10.0, aggregators=2), max_updates=1)
    # Two pushes share the card of each aggregator, then the sums of both that of the server.
    assert tree.seconds == pytest.approx(1 + 2 + 2 + 2 * 10)


def test_answers_leave_the_server_once_for_all_groups_of_an_aggregator() -> None:
    def second_update(aggregators: int) -> float:
        cluster = Cluster.even(8, seconds_per_sample=0.25, server=SECOND, aggregators=aggregators)
        return float(run("hardsync", 8, cluster, max_updates=2).seconds)

    # Without: eight pushes, eight answers, all of which are there when the last one is; and eight pushes again.
    assert second_update(0) == pytest.approx(1 + 8 + 8 + 1 + 8)
    # With two: four pushes at each and two sums; two answers, then four from each; and pushes and sums again.
    assert second_update(2) == pytest.approx(1 + 4 + 2 + 2 + 4 + 1 + 4 + 2)


def test_without_a_barrier_no_group_waits_for_a_slower_one_and_a_busy_link_adds_up() -> None:
    soft = SoftSync(n=1, modulation="average")
    slow = Cluster.with_straggler(4, factor=50.0, seconds_per_sample=0.25, aggregators=1)
    assert run(soft, 4, slow, max_updates=6).seconds < 20
    alone, tree = (run(soft, 8, Cluster.even(8, 0.025, update_seconds=1.0, aggregators=count)) for count in (0, 1))
    assert tree.seconds < alone.seconds / 3


def test_groups_that_die_or_are_idle_are_not_waited_for_and_runs_are_replayed() -> None:
    for method in ("hardsync", "local_sgd:period=2", SoftSync(n=1, modulation="average")):
        events: list[Any] = []
        cluster = Cluster.even(
            6, jitter=Jitter("gamma", 0.5), link=Link(1e6, 1e-3), aggregators=2, events=(Failure(4, 0.05),)
        )
        trace = run(method, 6, cluster, max_updates=None, max_epochs=1, record=events.append)
        assert trace.ended == "max_epochs"
        assert sum(trace.rows["samples"]) >= len(DATA) - 24  # what the dead group had under way is trained again
        if method == "local_sgd:period=2":  # its weights are the mean of the groups' own
            continue
        samples = Samples(DATA, seed=0)
        again = replay(events, new_model(), loss, lambda *where, of=samples: of.batch(of.at(*where)), sgd)
        assert np.array_equal(again.weights["weight"].numpy(), trace.weights["weight"])


def test_same_seed_same_trace_bitwise_and_lossy_pushes_travel_on_as_a_whole_sum() -> None:
    cluster = Cluster.even(8, jitter=Jitter("gamma", 0.5), link=Link(1e5, 1e-3), server=Link(1e5), aggregators=2)
    one, other = (run("hardsync", 8, cluster, wire="int8") for _ in range(2))
    assert np.array_equal(one.rows["time"], other.rows["time"])
    assert run("hardsync", 8, cluster).seconds > one.seconds
    assert torch.equal(*(torch.tensor(each.weights["weight"]) for each in (one, other)))


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"aggregators=2 with method=AsyncSGD.*leave aggregators= out"):
        run("async_sgd", 4, Cluster.even(4, aggregators=2))
    assert run("async_sgd", 1, Cluster.even(4, aggregators=2)).updates == 12
    with pytest.raises(ConfigurationError, match="aggregators=2 with servers=3"):
        Cluster.even(4, servers=3, aggregators=2)
    with pytest.raises(ConfigurationError, match="aggregators=-1"):
        Cluster.even(4, aggregators=-1)
    assert Cluster.even(4, aggregators=1).words.endswith("1 aggregator")
    assert "aggregators" not in Cluster.even(4).summary()
