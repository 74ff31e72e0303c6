"""The steps of a simulated run as measurements for the hardware model, as `OmniTuner` takes them from a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from core import Measured

from lightning_omni.trace import Trace


def measurements_of(trace: Trace) -> Measured:
    """Of a run without a merged head, in which each group made two steps or more."""
    groups = {number: tuple(members) for number, members in enumerate(trace.meta["groups"]) if members}
    ranks = sorted(rank for members in groups.values() for rank in members)
    samples, own = (_columns(trace.work, "rank", ranks, name) for name in ("samples", "seconds"))
    steps, exchanges = (_columns(trace.steps, "group", [*groups], name) for name in ("seconds", "exchange"))
    pushed = list(trace.weights.values())
    link = trace.meta["cluster"]["link"]["latency"] + trace.meta["cluster"]["server"]["latency"]
    return Measured(
        tuple(groups.values()),
        samples,
        own,
        steps,
        exchanges,
        nbytes=sum(weight.nbytes for weight in pushed),
        shapes=tuple(weight.shape for weight in pushed),
        round_trip=2 * float(link),
        **(_of_exchanges(trace) if len(groups) > 1 else _of_one_group(trace, len(ranks))),
    )


def _of_one_group(trace: Trace, ranks: int) -> dict[str, Any]:
    bandwidth = float(trace.meta["cluster"]["group_link"]["bandwidth"])
    return {"serve": _serve_time(trace), "reduce_per_byte": 2 * (ranks - 1) / ranks / bandwidth, "hands_on": True}


def _serve_time(trace: Trace) -> float:
    return float(trace.meta["cluster"]["update_seconds"])


def _of_exchanges(trace: Trace) -> dict[str, Any]:
    cluster, steps = trace.meta["cluster"], trace.rows["steps"]
    per_node = cluster.get("servers") == "per-node"
    devices = sum(kind["count"] for kind in cluster["devices"])
    servers = (cluster["nodes"] or devices) if per_node else cluster.get("servers", 1)
    return {
        "serve": _serve_time(trace) / servers,
        "hands_on": True,
        "period": max(1, round(float(steps.mean()))) if len(steps) else 1,
        "servers": servers,
        "per_node": per_node,
    }


def _columns(
    table: Mapping[str, np.ndarray[Any, Any]], key: str, keys: Sequence[int], name: str
) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(table[name][table[key] == one].tolist()) for one in keys)
