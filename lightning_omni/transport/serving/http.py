"""HTTP for a server: metrics for Prometheus, status as JSON, and probes.

Rule 1: the HTTP server's own threads answer from the last snapshot, and never access the server's state.
Rule 2: requests are bounded in time and size, and open connections in number. No request changes anything; every
process that can connect can read, without a key.
Rule 3: metrics of unknown value are left out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_omni.errors import ConfigurationError
from lightning_omni.server.core import ServerCore
from lightning_omni.wire import messages as m

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


EVERY = 1.0
"""Seconds between two snapshots."""
STALLED = 60.0
"""Seconds without a snapshot after which the loop does not count as alive: it publishes none during an update."""
READY = 10.0
"""Seconds without a snapshot after which it does not count as ready for ranks."""
MOST_CONNECTIONS = 16
"""The most open connections; a further one is closed at once."""
REQUEST_TIME = 5.0
"""Seconds for which a connection may be open."""
_POLL = 0.25
_TEXT = "text/plain; charset=utf-8"
_rendering = threading.Lock()
_PATHS = b"there are /metrics, /status, /healthz and /readyz\n"


@dataclass(frozen=True, eq=False)
class TimedOverview:
    """A snapshot of a run: ``at`` on the monotonic clock, ``taken`` in seconds since 1970.

    Attributes:
        missing: number of servers that have not joined the coordinating one.
        is_of_run: whether this server coordinates: others do not have the run's status.
    """

    overview: m.Overview
    at: float
    taken: float
    missing: int = 0
    is_of_run: bool = True


class StatusServer:
    """An HTTP server for a run's status. Port 0 takes a free one."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        check_installed()
        try:
            self._server = _StatusHTTPServer(host, port)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"--http {port}: cannot listen on {host}:{port}: {error}; pass another port (0 takes a free one) or the"
                " address of this machine as --http-host"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        self._due = 0.0
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL,), name="omni-http", daemon=True)
        self._thread.start()

    def poll(self, core: ServerCore) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + EVERY
            self.publish(core.status_service.overview(), core.replication.missing, core.replication.number == 0)

    def publish(self, overview: m.Overview, missing: int = 0, is_of_run: bool = True) -> None:
        self._server.snapshot = TimedOverview(overview, time.monotonic(), time.time(), missing, is_of_run)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _StatusHTTPServer(ThreadingHTTPServer):
    """An HTTP server that closes connections that are too many or too old."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        self.snapshot: TimedOverview | None = None
        self._lock = threading.RLock()
        self._standing: dict[socket.socket, float] = {}
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would ask the name service for this machine's name
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._standing) >= MOST_CONNECTIONS:
                self.shutdown_request(request)
                return
            self._standing[request] = time.monotonic() + REQUEST_TIME
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        with self._lock:
            self._standing.pop(request, None)
        super().close_request(request)

    def service_actions(self) -> None:
        with self._lock:
            for request, until in self._standing.items():
                if time.monotonic() > until:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no errors, such as those of disconnected readers."""


class _Handler(BaseHTTPRequestHandler):
    server: _StatusHTTPServer
    server_version, sys_version = "lightning-omni", ""
    timeout = REQUEST_TIME

    def do_GET(self) -> None:
        code, kind, body = self._answer()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because strangers could fill the log."""

    def _answer(self) -> tuple[HTTPStatus, str, bytes]:
        snapshot, path = self.server.snapshot, self.path.partition("?")[0]
        if path not in ("/metrics", "/status", "/healthz", "/readyz"):
            return HTTPStatus.NOT_FOUND, _TEXT, _PATHS
        if snapshot is None:
            code = HTTPStatus.OK if path == "/healthz" else HTTPStatus.SERVICE_UNAVAILABLE  # it may be loading a state
            return _sentence(code, "the server has not begun to serve")
        age = time.monotonic() - snapshot.at
        if path == "/metrics":
            with _rendering:  # concurrent requests wait for the result
                body, kind = _metrics(snapshot, format_of(self.headers.get("Accept", "")))
            return HTTPStatus.OK, kind, body
        if path == "/status" and not snapshot.is_of_run:
            return _sentence(HTTPStatus.NOT_FOUND, "the run's status is at the server that coordinates, server 0")
        if path == "/status":
            return HTTPStatus.OK, "application/json", status_json(snapshot.overview, age, snapshot.taken)
        if age > (STALLED if path == "/healthz" else READY):
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, f"the server's loop was not heard for {age:.0f} s")
        if path == "/readyz" and snapshot.missing:
            waits = (
                f"{snapshot.missing} of the servers that are to hold a partition of the parameters have not come yet"
            )
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, waits)
        if path == "/readyz" and snapshot.overview.over:
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, f"the run is over: {snapshot.overview.over}")
        return _sentence(HTTPStatus.OK, "ok")


@lru_cache(maxsize=4)
def _metrics(snapshot: TimedOverview, accept: str) -> tuple[bytes, str]:
    return metrics_text(snapshot.overview, snapshot.taken, accept, snapshot.is_of_run)


def _sentence(code: HTTPStatus, sentence: str) -> tuple[HTTPStatus, str, bytes]:
    return code, _TEXT, f"{sentence}\n".encode()


PREFIX = "lightning_omni_"
STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the buckets of the staleness histogram, in updates."""
OPEN_METRICS = "application/openmetrics-text"
MISSING = "--http needs prometheus_client; install it with: pip install 'lightning-omni[metrics]'"


def check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(MISSING) from error


def status_json(overview: m.Overview, age: float, updated: float) -> bytes:
    plain = msgspec.to_builtins(overview)
    return msgspec.json.encode({**plain, "snapshot_age": age, "time": updated}) + b"\n"


def format_of(accept: str) -> str:
    """Return `OPEN_METRICS` if the header ``accept`` names it, else ""."""
    return OPEN_METRICS if OPEN_METRICS in accept else ""


def metrics_text(overview: m.Overview, taken: float, accept: str = "", is_of_run: bool = True) -> tuple[bytes, str]:
    """Return an overview in the format that Prometheus reads, and its content type.

    It is OpenMetrics if ``accept`` has it. ``taken`` is in seconds since 1970. Unless ``is_of_run``, only the server's
    own metrics are included.
    """
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    class Collector:
        def collect(self) -> Iterator[Metric]:
            return families(overview, taken) if is_of_run else _families(_OF_SERVER, [({}, overview)])

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)  # this process's memory, files and processor time; empty except on Linux
    registry.register(Collector())
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


_Rows = tuple[tuple[str, str, str, Callable[[Any], float | None]], ...]
"""Name, documentation, kind and value of metrics; None for an unknown value."""
_OF_RUN: _Rows = (
    (
        "run_active",
        "Whether ranks of a run are there, and it can go on.",
        "gauge",
        lambda seen: bool(seen.run and seen.live and not seen.over),
    ),
    ("ranks_announced", "Ranks that the run was announced with.", "gauge", lambda seen: seen.announced),
    ("ranks_live", "Ranks that take part.", "gauge", lambda seen: len(seen.live)),
    ("ranks_missing", "Ranks that were announced and have not come yet.", "gauge", lambda seen: len(seen.missing)),
    ("ranks_lost", "Ranks lost.", "counter", lambda seen: len(seen.status.lost)),
    ("groups", "Compute groups that take part.", "gauge", lambda seen: len(seen.groups)),
    ("updates", "Updates of the master weights.", "counter", lambda seen: seen.status.clock),
    (
        "pushes_refused",
        "Pushes refused because they were not finite, or declined by the method.",
        "counter",
        lambda seen: seen.status.refused,
    ),
    ("epoch", "Number of the epoch, from 0.", "gauge", lambda seen: seen.plan and seen.plan.epoch),
    ("epoch_samples", "Samples to train in this epoch.", "gauge", lambda seen: seen.plan and seen.plan.budget),
    ("epoch_samples_trained", "Of these, trained so far.", "gauge", lambda seen: seen.plan and seen.trained),
)
_OF_SERVER: _Rows = (
    ("server_pushes", "Pushes that the server has handled.", "counter", lambda seen: seen.pushes),
    ("server_push_seconds", "The server's own time for pushes.", "counter", lambda seen: seen.serve_time),
    (
        "server_strangers_refused",
        "Refused: malformed, or without the key.",
        "counter",
        lambda seen: seen.status.strangers,
    ),
    (
        "head_access_seconds",
        "One exclusive access to the merged head, lately.",
        "gauge",
        lambda seen: seen.status.head_time or None,
    ),
)
_OF_GROUPS: _Rows = (
    ("group_ranks", "Ranks of a group.", "gauge", lambda group: len(group.status.ranks)),
    ("group_alive_seconds", "Since the last of its ranks was admitted.", "gauge", lambda group: group.age),
    ("group_silent_seconds", "Since its most silent rank was heard.", "gauge", lambda group: group.silence),
    ("group_pushes_applied", "Since groups were formed.", "counter", lambda group: group.status.updates),
    ("group_samples", "Trained since groups were formed, if leased.", "counter", lambda group: group.samples),
    (
        "group_staleness_mean_updates",
        "Of its gradients, on average.",
        "gauge",
        lambda group: group.status.staleness_mean if group.status.updates else None,
    ),
)
_TIMED: _Rows = (
    ("group_step_seconds", "A step, lately, on average over its ranks.", "gauge", lambda group: group.status.step_time),
    (
        "group_forward_seconds",
        "Of a step, to the end of the forward pass.",
        "gauge",
        lambda group: group.status.compute_time,
    ),
    ("group_exchange_seconds", "Of a step, in the exchange.", "gauge", lambda group: group.status.exchange_time),
    (
        "group_slowest_forward_seconds",
        "Of its slowest rank, the same.",
        "gauge",
        lambda group: group.status.slowest_time,
    ),
    ("group_slowest_rank", "Which rank that is.", "gauge", lambda group: group.status.slowest_rank),
)
"""Metrics that exist once a group's ranks have timed a step."""


def families(overview: m.Overview, taken: float) -> Iterator[Metric]:
    if overview.run:
        labels = {
            "run": overview.run,
            "method": str((overview.method or {}).get("name", "")),
            "wire_format": str((overview.wire_format or {}).get("name", "")),
        }
        yield _labelled("run", "The run, as labels.", "info", [(labels, 1.0)])
        began = taken - overview.age
        yield _labelled(
            "run_start_time_seconds", "When the first rank was admitted, since 1970.", "gauge", [({}, began)]
        )
    yield from _families((*_OF_RUN, *_OF_SERVER), [({}, overview)])
    yield _staleness(overview.status.staleness)
    named = [({"group": each.status.name}, each) for each in overview.groups]
    infos = [
        ({**name, "hosts": ",".join(each.hosts), "incarnation": str(each.status.incarnation)}, 1.0)
        for name, each in named
    ]
    yield _labelled("group", "A group's addresses and incarnation, as labels.", "info", infos)
    yield from _families(_OF_GROUPS, named)
    yield from _families(_TIMED, [(name, each) for name, each in named if each.status.step_time])


def _families(rows: _Rows, subjects: Sequence[tuple[dict[str, str], Any]]) -> Iterator[Metric]:
    for name, documentation, kind, value_of in rows:
        values = [(labels, value) for labels, each in subjects if (value := value_of(each)) is not None]
        if values:
            yield _labelled(name, documentation, kind, values)


def _staleness(counts: tuple[int, ...]) -> Metric:
    from prometheus_client.metrics_core import HistogramMetricFamily

    buckets = [(f"{end}.0", float(sum(counts[: end + 1]))) for end in STALENESS_BUCKETS]
    return HistogramMetricFamily(
        f"{PREFIX}staleness_updates",
        "Staleness of the gradients that were applied, in updates.",
        buckets=[*buckets, ("+Inf", float(sum(counts)))],
        sum_value=float(sum(staleness * count for staleness, count in enumerate(counts))),
    )


def _labelled(name: str, documentation: str, kind: str, values: Iterable[tuple[dict[str, str], float]]) -> Metric:
    from prometheus_client.metrics_core import Metric

    family = Metric(PREFIX + name, documentation, kind)
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    for labels, value in values:
        family.add_sample(PREFIX + name + suffix, labels, float(value))
    return family
