"""What a step costs the device: copies and waits for each, and times as the device's own clock has them."""

from __future__ import annotations

from typing import Any

import pytest
from runs import run

BUSY = 30
"""Milliseconds for which the device is busy with each batch."""
ATTEMPTS = 3
"""How often times are measured, until they agree: another process may delay this one between two looks at a clock."""
COSTS: dict[tuple[str, int], tuple[float, int, float, int, float]] = {
    ("groups of one", 0): (2.0, 121, 1.0, 62, 125),
    ("groups of one, int8", 0): (1.26, 62, 1.0, 62, 66),
    ("gossip", 0): (1.0, 61, 1.0, 62, 125),
    ("groups of two", 0): (3.0, 122, 2.0, 63, 130),
    ("groups of two", 1): (1.0, 2, 2.0, 63, 9),
}
"""By run and rank, what a step costs at most: copies to the host, as a multiple of the model and as a number, copies
from the host likewise, and how often the host waits for the device. The model has 60 parameters and 7.5 MB; a batch and
signals are in the numbers."""


def groups(count: int, **options: Any) -> dict[str, Any]:
    return {"strategy": {"groups": count, **options}}


@pytest.fixture(scope="module")
def costs() -> dict[str, dict[int, Any]]:
    """Results by run and rank: of two ranks, and of four in groups of two, whose leaders are ranks 0 and 2."""
    fits = {
        "ddp": {"strategy": "ddp"},
        "one group": groups(1),
        "groups of one": groups(2),
        "groups of one, int8": groups(2, compression="int8"),
        "gossip": groups(2, method="gossip"),
    }
    two = run("device_costs.py", {"devices": 2, "fits": fits}, timeout=200).results
    four = run("device_costs.py", {"devices": 4, "fits": {"groups of two": groups(2)}}, timeout=200).results
    return {name: {rank: of[name] for rank, of in every.items()} for every in (two, four) for name in every[0]}


@pytest.mark.parametrize(("name", "rank"), COSTS)
def test_a_step_costs_no_more_copies_and_waits_than_were_recorded(
    costs: dict[str, dict[int, Any]], name: str, rank: int
) -> None:
    found = costs[name][rank]
    counts, models = found["counts"], found["models"]
    step = models["d2h"], counts["d2h_calls"], models["h2d"], counts["h2d_calls"], counts["waited"]
    assert all(cost <= most * 1.01 for cost, most in zip(step, COSTS[name, rank], strict=True)), step


def test_one_group_copies_waits_and_allocates_as_ddp_does(costs: dict[str, dict[int, Any]]) -> None:
    for rank in (0, 1):
        mine, ddp = (costs[name][rank] for name in ("one group", "ddp"))
        assert mine["weights"] == ddp["weights"]
        assert all(mine["counts"][what] <= count for what, count in ddp["counts"].items()), (mine, ddp)


@pytest.mark.parametrize("method", ["elastic_averaging:period=1", "local_sgd:period=2"])
def test_times_of_steps_and_exchanges_are_those_of_the_devices_clock(method: str) -> None:
    fit = groups(2, method=method) | {"model": {"layers": 3, "width": 16, "busy": BUSY}}
    off: list[str] = []
    for _ in range(ATTEMPTS):
        ranks = run("device_costs.py", {"devices": 2, "fits": {"busy": fit}}, timeout=100).results
        off = [
            f"rank {rank}: {what} takes {1e3 * times['true']:.2f} ms, and is measured as {1e3 * times['measured']:.2f}"
            for rank, of in ranks.items()
            for what in ("step", "exchange")
            if not is_close(times := of["busy"][what])
        ]
        if not off:
            return
    raise AssertionError("\n".join(off))


def is_close(times: dict[str, float]) -> bool:
    """Return whether a measured time is within a twentieth or 0.2 ms of the true one."""
    return abs(times["measured"] - times["true"]) <= max(0.05 * times["true"], 2e-4)
