"""The steps of a simulated run as measurements for the hardware model, as `OmniTuner` takes them from a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from core import Measured

from lightning_omni.trace import Trace


def measurements_of(trace: Trace) -> Measured:
    """Return the measurements of a simulated run in one group."""
    (ranks,) = (tuple(members) for members in trace.meta["groups"] if members)
    samples, own = (_columns(trace.work, "rank", ranks, name) for name in ("samples", "seconds"))
    cluster, pushed = trace.meta["cluster"], list(trace.weights.values())
    per_node = cluster.get("servers") == "per-node"
    devices = sum(kind["count"] for kind in cluster["devices"])
    return Measured(
        ranks,
        samples,
        own,
        tuple(trace.steps["seconds"].tolist()),
        serve=float(cluster["update_seconds"]),
        nbytes=sum(weight.nbytes for weight in pushed),
        servers=(cluster["nodes"] or devices) if per_node else cluster.get("servers", 1),
        per_node=per_node,
        round_trip=2 * float(cluster["link"]["latency"] + cluster["server"]["latency"]),
        reduce_per_byte=2 * (len(ranks) - 1) / len(ranks) / float(cluster["group_link"]["bandwidth"]),
        hands_on=True,
        shapes=tuple(weight.shape for weight in pushed),
    )


def _columns(
    table: Mapping[str, np.ndarray[Any, Any]], key: str, keys: Sequence[int], name: str
) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(table[name][table[key] == one].tolist()) for one in keys)
