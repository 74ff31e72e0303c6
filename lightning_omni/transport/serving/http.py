"""HTTP for a server: metrics, status and probes, read-only, from a snapshot that the server's loop publishes.

Rule 1: the HTTP server never accesses the server's state. Its own threads answer requests from the last snapshot.
Rule 2: requests are bounded in time and size, and open connections in number. No request changes anything; every
process that can connect can read, without a key.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from lightning_omni.errors import ConfigurationError
from lightning_omni.server import ServerCore
from lightning_omni.transport.serving import exposition
from lightning_omni.wire import messages as m

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
        overview: the published overview.
        missing: number of servers that are to hold a partition of the parameters and have not joined yet.
        is_of_run: whether this server has the run's status; if not, the coordinating server has it.
    """

    overview: m.Overview
    at: float
    taken: float
    missing: int = 0
    is_of_run: bool = True


class StatusServer:
    """An HTTP server for a run's status.

    Args:
        host: address to listen on.
        port: port; 0 takes a free one.

    Attributes:
        url: its URL.

    Raises:
        ConfigurationError: it cannot listen there, or prometheus_client is not installed.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        exposition.check_installed()
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
        """Publish a snapshot if one is due; the server's loop may call this at any rate."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + EVERY
            self.publish(core.overview(), core.missing_servers, core.is_coordinator)

    def publish(self, overview: m.Overview, missing: int = 0, is_of_run: bool = True) -> None:
        """Answer later requests from this overview; see `TimedOverview`."""
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
        """Ignore readers that have disconnected."""


class _Handler(BaseHTTPRequestHandler):
    """A handler that answers one request and closes the connection."""

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
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "the server has not begun to serve")
        age = time.monotonic() - snapshot.at
        if path == "/metrics":
            with _rendering:  # concurrent requests wait for the result
                body, kind = _metrics(snapshot, exposition.format_of(self.headers.get("Accept", "")))
            return HTTPStatus.OK, kind, body
        if path == "/status" and not snapshot.is_of_run:
            return _sentence(HTTPStatus.NOT_FOUND, "the run's status is at the server that coordinates, server 0")
        if path == "/status":
            return HTTPStatus.OK, "application/json", exposition.status_json(snapshot.overview, age, snapshot.taken)
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
    """Render the metrics once per snapshot and format, for any number of requests."""
    return exposition.metrics_text(snapshot.overview, snapshot.taken, accept, snapshot.is_of_run)


def _sentence(code: HTTPStatus, sentence: str) -> tuple[HTTPStatus, str, bytes]:
    return code, _TEXT, f"{sentence}\n".encode()
