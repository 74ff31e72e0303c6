"""What a step costs the device: copies and waits for each, memory, and times as the device's own clock has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from runs import run

from lightning_omni.tuning.model.measurements import Measured

BUSY = 30
"""Milliseconds for which the device is busy with each batch."""
ATTEMPTS = 3
"""How often times are measured, until they agree: another process may delay this one between two looks at a clock."""
CHUNK = 1 << 20
"""Bytes of device memory through which an exchange copies here; 64 times as many elsewhere."""
INT8, BF16 = 0.26, 0.5
"""Bytes of a format as a part of float32's."""
FSDP = {"model_parallel": "fsdp"}


class Cost(NamedTuple):
    """The most that an exchange costs in a step, beyond what the step costs with one group.

    Attributes:
        up: bytes that are copied to the host, as a multiple of what the rank exchanges.
        ups: the number of these copies.
        down: bytes that are copied from the host, likewise.
        downs: the number of these copies.
        waits: how often the host waits for the device.
    """

    up: float
    ups: int
    down: float
    downs: int
    waits: int


LEADER, MEMBER = Cost(1.01, 2, 1.01, 2, 4), Cost(0.0005, 1, 0.0, 0, 1)
ALONE = LEADER._replace(ups=1, downs=0, waits=2)
"""A leader without other members, with which to agree on signals before a batch."""
COSTS: dict[tuple[str, int], Cost] = {
    ("groups of one", 0): ALONE,
    ("groups of one, int8", 0): ALONE._replace(up=INT8 + 0.01),
    ("groups of one, int8 and bf16", 0): ALONE._replace(up=INT8 + 0.01, down=BF16 + 0.01),
    ("groups of one, overlapped", 0): ALONE,
    ("groups of one, rates on the device", 0): ALONE._replace(ups=ALONE.ups + 1, waits=ALONE.waits + 1),
    ("gossip", 0): LEADER,
    ("groups of two", 0): LEADER,
    ("groups of two", 1): MEMBER,
    ("groups of two, int8 and bf16", 0): LEADER._replace(up=INT8 + 0.01, down=BF16 + 0.01),
    ("groups of two, int8 and bf16", 1): MEMBER,
    ("sharded groups of two", 0): LEADER,
    ("sharded groups of two", 1): LEADER._replace(ups=3),
}
"""By run and rank. The model has 60 parameters and 7.5 MB, of which a member of a sharded group has its part."""
MODELS = {
    "groups of two": 1,
    "sharded groups of two": 1,
    "groups of two, bf16 answers": 1,
    "groups of two, int8 and bf16": 3,
    "groups of two, bf16 and int8": 3,
    "groups of two, topk": 3,
    "sharded groups of two, int8 and bf16": 3,
}
"""By run, the weights as they were loaded, and with lossy pushes the residuals before and after a push."""
PLAIN = {name: "sharded" for name in MODELS if name.startswith("sharded")}
"""The run with one group that a run is compared with, if it is not the one of whole models."""


def groups(count: int, **options: Any) -> dict[str, Any]:
    return {"strategy": {"groups": count, **options}}


@pytest.fixture(scope="module")
def costs() -> dict[str, dict[int, Any]]:
    """Results by run and rank: of two ranks, and of four in groups of two, whose leaders are ranks 0 and 2."""
    both_ways = {"compression": {"push": "int8", "pull": "bf16"}}
    two = {
        "ddp": {"strategy": "ddp"},
        "one group": groups(1),
        "sharded": groups(1, **FSDP),
        "groups of one": groups(2),
        "groups of one, int8": groups(2, compression="int8"),
        "groups of one, int8 and bf16": groups(2, **both_ways),
        "groups of one, overlapped": groups(2, overlap=True),
        "groups of one, rates on the device": groups(2) | {"model": {"rates": True}},
        "gossip": groups(2, method="gossip"),
        "merged": groups(2) | {"merges": True, "max_epochs": 2},
    }
    four = {
        "groups of two": groups(2),
        "groups of two, int8 and bf16": groups(2, **both_ways),
        "sharded groups of two": groups(2, **FSDP),
    }
    results = [
        run("device_costs.py", {"devices": devices, "fits": fits}, timeout=200).results
        for devices, fits in ((2, two), (4, four))
    ]
    return {name: {rank: of[name] for rank, of in every.items()} for every in results for name in every[0]}


@pytest.mark.parametrize(("name", "rank"), COSTS)
def test_an_exchange_costs_one_copy_each_way_and_members_none(
    costs: dict[str, dict[int, Any]], name: str, rank: int
) -> None:
    found, plain = costs[name][rank], costs[PLAIN.get(name, "one group")][0]
    more = {what: count - plain["counts"][what] for what, count in found["counts"].items()}
    nbytes = found["nbytes"]
    cost = Cost(more["d2h"] / nbytes, more["d2h_calls"], more["h2d"] / nbytes, more["h2d_calls"], more["waited"])
    assert all(each <= most for each, most in zip(cost, COSTS[name, rank], strict=True)), cost


@pytest.fixture(scope="module")
def peaks(costs: dict[str, dict[int, Any]]) -> dict[str, dict[int, Any]]:
    """Results by run and rank, of four ranks and with small chunks; of two where they are one sharded group."""

    def lossy(push: str, pull: str, **options: Any) -> dict[str, Any]:
        return groups(2, compression={"push": push, "pull": pull}, **options)

    fits = {
        "one group": groups(1),
        "groups of two": groups(2),
        "sharded groups of two": groups(2, **FSDP),
        "groups of two, bf16 answers": lossy("fp32", "bf16"),
        "groups of two, int8 and bf16": lossy("int8", "bf16"),
        "groups of two, bf16 and int8": lossy("bf16", "int8"),
        "groups of two, topk": groups(2, compression="topk"),
        "sharded groups of two, int8 and bf16": lossy("int8", "bf16", **FSDP),
    }
    results = run("device_costs.py", {"devices": 4, "fits": fits, "chunk": CHUNK}, timeout=200).results
    return {name: {rank: of[name] for rank, of in results.items()} for name in fits} | {"sharded": costs["sharded"]}


@pytest.mark.parametrize("name", MODELS)
def test_an_exchange_takes_memory_for_one_model_and_two_chunks(peaks: dict[str, dict[int, Any]], name: str) -> None:
    plain = peaks[PLAIN.get(name, "one group")][0]["counts"]["peak"]
    for found in peaks[name].values():
        assert found["counts"]["peak"] - plain <= 1.02 * MODELS[name] * found["nbytes"] + 2 * CHUNK


@pytest.mark.parametrize("name", [name for name in MODELS if name not in PLAIN])
def test_each_chunk_of_an_exchange_is_one_copy_each_way(peaks: dict[str, dict[int, Any]], name: str) -> None:
    plain = peaks["one group"][0]["counts"]
    for found in peaks[name].values():
        more = {what: count - plain[what] for what, count in found["counts"].items()}
        chunks = -(-found["nbytes"] // CHUNK)
        assert max(more["d2h_calls"], more["h2d_calls"]) <= 10 + chunks
        assert max(more["d2h"], more["h2d"]) <= 1.02 * found["nbytes"]


def test_one_group_that_were_several_takes_no_memory_for_exchanges(costs: dict[str, dict[int, Any]]) -> None:
    plain, merged = (costs[name][0]["counts"]["peak"] for name in ("one group", "merged"))
    assert merged <= plain + 0.02 * costs["merged"][0]["nbytes"]


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


def test_the_tuner_times_copies_and_the_way_between_hosts() -> None:
    fit: dict[str, Any] = {
        "devices": 2,
        "data": {"samples": 4096},
        "trainer": {"max_epochs": 1, "num_sanity_val_steps": 0},
        "tuner": {"retune_every": None},
        "dump": True,
    }
    dumped = run("omni_tuner.py", {"fits": [fit]}, timeout=100).results[0][0]["dump"]
    measured = [Measured.from_dict(each["measured"]) for each in dumped]
    assert measured
    assert all(0 < each.copy_per_byte < 1e-7 and 0 < each.host_per_byte < 1e-6 for each in measured)
    assert all(0 < each.round_trip < 1 for each in measured)


def is_close(times: dict[str, float]) -> bool:
    """Return whether a measured time is within a twentieth or 0.2 ms of the true one."""
    return abs(times["measured"] - times["true"]) <= max(0.05 * times["true"], 2e-4)
