"""The formats in which a run is exposed over HTTP: metrics for Prometheus, and the status as JSON.

Every number was measured or counted by the server, or reported by a rank with its heartbeat. Unknown values are left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from lightning_omni.errors import ConfigurationError
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import EpochPlan

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX = "lightning_omni_"
STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the buckets of the staleness histogram, in updates."""
OPEN_METRICS = "application/openmetrics-text"
MISSING = "--http needs prometheus_client; install it with: pip install 'lightning-omni[metrics]'"


def check_installed() -> None:
    """Raise `ConfigurationError` unless prometheus_client is installed, which `metrics_text` needs."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(MISSING) from error


def status_json(overview: m.Overview, age: float, updated: float) -> bytes:
    """Return an overview as JSON, with two additional fields.

    Args:
        overview: overview of the run.
        age: ``snapshot_age``: seconds since the overview was taken.
        updated: ``time``: when the overview was taken, in seconds since 1970.
    """
    plain = msgspec.to_builtins(overview)
    return msgspec.json.encode({**plain, "snapshot_age": age, "time": updated}) + b"\n"


def format_of(accept: str) -> str:
    """Return the format in which a reader gets the metrics, as the argument ``accept`` of `metrics_text`.

    Args:
        accept: formats that the reader accepts, as in HTTP. The header is not trusted and may name any version.
    """
    return OPEN_METRICS if OPEN_METRICS in accept else ""


def metrics_text(overview: m.Overview, taken: float, accept: str = "", is_of_run: bool = True) -> tuple[bytes, str]:
    """Return an overview in the format that Prometheus reads, and its content type.

    Args:
        overview: overview of the run.
        taken: when the overview was taken, in seconds since 1970.
        accept: formats that the reader accepts, as in HTTP; OpenMetrics is returned if it is among them.
        is_of_run: whether to include the run's metrics; otherwise only those of the server.
    """
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    class Collector:
        def collect(self) -> Iterator[Metric]:
            yield from families(overview, taken) if is_of_run else _of_server(overview)

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)  # this process's memory, files and processor time; empty except on Linux
    registry.register(Collector())
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


def families(overview: m.Overview, taken: float) -> Iterator[Metric]:
    """Yield the metrics of a run.

    Args:
        overview: overview of the run.
        taken: when the overview was taken, in seconds since 1970.
    """
    yield from _of_run(overview, taken)
    if overview.plan is not None:
        yield from _of_epoch(overview.plan, overview.trained)
    yield from _of_server(overview)
    yield _staleness(overview.status.staleness)
    yield from _of_groups(overview.groups)


def _of_run(overview: m.Overview, taken: float) -> Iterator[Metric]:
    status = overview.status
    active = bool(overview.run and overview.live and not overview.over)
    yield _gauge("run_active", "Whether ranks of a run are there, and it can go on.", active)
    if overview.run:
        labels = {
            "run": overview.run,
            "method": str((overview.method or {}).get("name", "")),
            "wire_format": str((overview.wire_format or {}).get("name", "")),
        }
        yield _labelled("run", "The run, as labels.", "info", [(labels, 1.0)])
        yield _gauge("run_start_time_seconds", "When the first rank was admitted, since 1970.", taken - overview.age)
    yield _gauge("ranks_announced", "Ranks that the run was announced with.", overview.announced)
    yield _gauge("ranks_live", "Ranks that take part.", len(overview.live))
    yield _gauge("ranks_missing", "Ranks that were announced and have not come yet.", len(overview.missing))
    yield _counter("ranks_lost", "Ranks lost.", len(status.lost))
    yield _gauge("groups", "Compute groups that take part.", len(overview.groups))
    yield _counter("updates", "Updates of the master weights.", status.clock)
    yield _counter("pushes_refused", "Pushes refused because their gradients were not finite.", status.refused)
    if status.total_momentum is not None:
        yield _gauge("total_momentum_ratio", "Explicit and implicit momentum, sensed lately.", status.total_momentum)


def _of_epoch(plan: EpochPlan, trained: int) -> Iterator[Metric]:
    yield _gauge("epoch", "Number of the epoch, from 0.", plan.epoch)
    yield _gauge("epoch_samples", "Samples to train in this epoch.", plan.budget)
    yield _gauge("epoch_samples_trained", "Of these, trained so far.", trained)


def _of_server(overview: m.Overview) -> Iterator[Metric]:
    status = overview.status
    yield _counter("server_pushes", "Pushes that the server has handled.", overview.pushes)
    yield _counter("server_push_seconds", "The server's own time for pushes.", overview.serve_time)
    yield _counter("server_strangers_refused", "Refused: malformed, or without the key.", status.strangers)
    if status.head_time:
        yield _gauge("head_access_seconds", "One exclusive access to the merged head, lately.", status.head_time)


def _staleness(counts: tuple[int, ...]) -> Metric:
    from prometheus_client.metrics_core import HistogramMetricFamily

    buckets = [(f"{end}.0", float(sum(counts[: end + 1]))) for end in STALENESS_BUCKETS]
    return HistogramMetricFamily(
        f"{PREFIX}staleness_updates",
        "Staleness of the gradients that were applied, in updates.",
        buckets=[*buckets, ("+Inf", float(sum(counts)))],
        sum_value=float(sum(staleness * count for staleness, count in enumerate(counts))),
    )


_OF_GROUPS: tuple[tuple[str, str, str, Callable[[m.GroupOverview], float | None]], ...] = (
    ("group_ranks", "Ranks of a group.", "gauge", lambda group: len(group.status.ranks)),
    ("group_alive_seconds", "Since the last of its ranks was admitted.", "gauge", lambda group: group.age),
    ("group_silent_seconds", "Since its most silent rank was heard.", "gauge", lambda group: group.silence),
    ("group_pushes_applied", "Since groups were formed.", "counter", lambda group: group.status.updates),
    ("group_samples", "Trained since groups were formed, if leased.", "counter", lambda group: group.samples),
)
_TIMED: tuple[tuple[str, str, Callable[[m.GroupStatus], float]], ...] = (
    ("group_step_seconds", "A step, lately, on average over its ranks.", lambda status: status.step_time),
    ("group_forward_seconds", "Of a step, to the end of the forward pass.", lambda status: status.compute_time),
    ("group_exchange_seconds", "Of a step, in the exchange.", lambda status: status.exchange_time),
    ("group_slowest_forward_seconds", "Of its slowest rank, the same.", lambda status: status.slowest_time),
    ("group_slowest_rank", "Which rank that is.", lambda status: status.slowest_rank),
)
"""Metrics that exist once a group's ranks have timed a step."""


def _of_groups(groups: tuple[m.GroupOverview, ...]) -> Iterator[Metric]:
    infos = [
        ({"group": each.status.name, "hosts": ",".join(each.hosts), "incarnation": str(each.status.incarnation)}, 1.0)
        for each in groups
    ]
    yield _labelled("group", "A group's addresses and incarnation, as labels.", "info", infos)
    for name, documentation, kind, value_of in _OF_GROUPS:
        yield _labelled(name, documentation, kind, _by_name(groups, value_of))
    timed = [group for group in groups if group.status.step_time]
    for name, documentation, time_of in _TIMED:
        values = [({"group": group.status.name}, float(time_of(group.status))) for group in timed]
        yield _labelled(name, documentation, "gauge", values)
    pushed = [group for group in groups if group.status.updates]
    means = _by_name(pushed, lambda group: group.status.staleness_mean)
    yield _labelled("group_staleness_mean_updates", "Of its gradients, on average.", "gauge", means)


def _by_name(
    groups: Iterable[m.GroupOverview], value_of: Callable[[m.GroupOverview], float | None]
) -> list[tuple[dict[str, str], float]]:
    values = ((group.status.name, value_of(group)) for group in groups)
    return [({"group": name}, float(value)) for name, value in values if value is not None]


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return _labelled(name, documentation, "gauge", [({}, float(value))])


def _counter(name: str, documentation: str, value: float) -> Metric:
    return _labelled(name, documentation, "counter", [({}, float(value))])


def _labelled(name: str, documentation: str, kind: str, values: Iterable[tuple[dict[str, str], float]]) -> Metric:
    from prometheus_client.metrics_core import Metric

    family = Metric(PREFIX + name, documentation, kind)
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    for labels, value in values:
        family.add_sample(PREFIX + name + suffix, labels, value)
    return family
