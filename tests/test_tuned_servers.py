"""The tuner and several servers: it forecasts with those that there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core import DEFAULT_METHODS, Search
from runs import run_nodes
from test_choices import equal, search, seen

SPACE = {"rebalance": False, "all_reduce": "fp32", "compression": "fp32"}


def with_servers(allreduce: float, servers: int) -> Search:
    known = seen(equal(), allreduce=allreduce)
    return search(replace(known, measured=replace(known.measured, servers=servers, per_node=servers > 1)))


def test_a_server_on_each_node_makes_averages_as_cheap_as_a_ring_and_so_they_are_made_more_often() -> None:
    one, several = with_servers(0.5, 1), with_servers(0.5, 4)
    averaging = replace(one.spec.start, groups=4, method="local_sgd", period=8)
    assert several.throughput(averaging) > 1.3 * one.throughput(averaging)
    assert several.prediction(replace(averaging, groups=1)) == one.prediction(replace(averaging, groups=1))
    assert several.choice().setting.period <= one.choice().setting.period
    assert several.throughput(several.choice().setting) >= one.throughput(one.choice().setting)


@pytest.mark.slow
@pytest.mark.processes
def test_nodes_whose_links_hold_groups_up_train_in_groups_with_a_server_each() -> None:
    slow: dict[str, Any] = {
        "emulated": True,  # how long steps take is no matter of this machine
        "devices": 1,
        "tail": 2048,
        "seconds": {str(rank): 8e-3 for rank in range(4)},
        "exponential": 1,
        "per_byte": 4e-7,
        "data": {"samples": 1024},
        "trainer": {"max_epochs": 2, "num_nodes": 4, "num_sanity_val_steps": 0},
        "tuner": {
            "retune_every": None,
            "space": {**SPACE, "method": DEFAULT_METHODS[-1], "period": [4, 8]},
        },
    }
    fits = [slow, {**slow, "strategy": {"server": "per-node"}}]
    ended = run_nodes("omni_tuner.py", {"fits": fits}, nodes=4)
    first, *others = (each.results[0][1] for each in ended)
    assert first["chosen"] == 4
    assert first["updates"] > 0
    assert all(first["weights"] == other["weights"] for other in others)
