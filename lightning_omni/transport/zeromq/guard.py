"""Limits on strangers: connections that have not shown the run's key, their rate, and the log lines about them.

ZeroMQ cannot end a single connection of a socket, but the socket's monitor reports their descriptors. So the guard
itself ends connections that have not shown the key, when too many of them are open or one takes too long. Ranks
reconnect by themselves.

A stranger can reopen an ended connection at once. So a listening socket accepts connections at a limited rate, and the
kernel leaves others unanswered, which the other side retries. Connections of ranks with the key do not count.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from lightning_omni.errors import ConfigurationError, quoted
from lightning_omni.transport.zeromq.addresses import is_private
from lightning_omni.transport.zeromq.frames import LARGEST_CONTROL_FRAME, LARGEST_DATA_FRAME, configure
from lightning_omni.transport.zeromq.keys import HANDSHAKE_TIME, RunKeys

_log = logging.getLogger(__name__)

MOST_STRANGERS = {LARGEST_CONTROL_FRAME: 256, LARGEST_DATA_FRAME: 64}
"""The most connections of one listening socket that have not been admitted, by the largest frame that it accepts.

With encryption, strangers can make a process hold for each of its listening sockets at most

    MOST_STRANGERS x (largest frame + CONNECTION_MEMORY),

which is 256 x (64 kB + 64 kB) = 32 MB for the control socket, and 64 x (516 kB + 64 kB) = 37 MB for the data socket and
for a leader's own: 70 MB in all for a server.
"""
CONNECTION_MEMORY = 64 << 10
"""Bytes that ZeroMQ itself needs for one connection: its buffers, pipes and state."""
ADMISSION_TIME = HANDSHAKE_TIME / 1000 + 2.0
"""Seconds within which a connection must be admitted or, with encryption, have shown the key."""
STRANGERS_MAY_SEND = 64 << 10
"""Bytes that a connection may send in the clear before it is admitted, where the system counts them (Linux)."""
BACKLOG = 1024
"""Connections that may wait in the system to be accepted."""
_ENCRYPTED_WORD = 260
"""An upper bound of the bytes that a CURVE server sends to a client that has not shown the key.

These are the greeting (64), WELCOME (170) and an ERROR (12). After the key, READY follows with 67 bytes; so a client
that was sent more holds the key.
"""
_TRAFFIC = struct.Struct("=QQ")
_TRAFFIC_AT = 120
"""Offset in Linux's ``tcp_info`` of the counts of acknowledged and received bytes."""
_REFUSAL = "the key does not match the server's; both sides must be given the same key, and the same encryption="
_FAILURES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it ended before it had shown a key, as a check of the port does",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): f"{_REFUSAL}; what it sent is no handshake with this key",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): f"{_REFUSAL}; its own key is another",
}
_FAST, _SLOW = 0.02, 0.5
"""Seconds between two polls of unadmitted connections: in the clear or while a gate is closed, and encrypted."""


class ConnectionGuard:
    """The listening sockets of one ZeroMQ context; a thread watches those of TCP.

    Attributes:
        ended: number of unadmitted connections that the guard has ended.
        refused: number of connections that failed the handshake; without encryption, also those that the guard ended.
    """

    def __init__(self, context: zmq.Context[Any], keys: RunKeys) -> None:
        self._context, self._keys = context, keys
        self._listeners: list[_Listener] = []
        self._lock = threading.RLock()
        self._refusals = RefusalLog(_log)
        self.ended = self.refused = 0
        self._closing = threading.Event()
        self._awake, self._wake = os.pipe()
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._thread = threading.Thread(target=self._run, name="omni-guard", daemon=True)

    def listen(self, endpoint: str, largest_frame: int, most_unread: int = 1000) -> zmq.Socket[bytes]:
        """Return a listening socket that is watched from before it is bound, except in a private directory.

        It accepts frames of at most ``largest_frame`` bytes, and queues ``most_unread`` messages of a connection.

        Raises:
            ConfigurationError: this machine cannot encrypt; the guard is closed.
            zmq.ZMQError: the endpoint cannot be bound; likewise.
        """
        listening: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        configure(listening, largest_frame)
        listening.setsockopt(zmq.BACKLOG, BACKLOG)
        listening.setsockopt(zmq.IPV6, int("[" in endpoint))
        # Each request has at most one answer, so answers may queue; received messages must not.
        listening.setsockopt(zmq.SNDHWM, 0)
        listening.setsockopt(zmq.RCVHWM, most_unread)
        try:
            self._keys.prepare(listening, endpoint, "server")
            if not is_private(endpoint):
                if not self._listeners:  # once bound, ZeroMQ checks the keys of all connections in the context
                    self._zap.bind("inproc://zeromq.zap.01")
                self._listeners.append(_Listener(self._context, listening, MOST_STRANGERS[largest_frame]))
            listening.bind(endpoint)
        except (zmq.ZMQError, ConfigurationError):
            self.close()
            listening.close(0)
            raise
        return listening

    def start(self) -> None:
        if self._listeners:
            self._thread.start()

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        with self._lock:
            self._read_events()
            yield

    def let_in(self, descriptor: int) -> None:
        """Stop watching an admitted connection, by its descriptor."""
        with self._lock:
            self._read_events()
            for listener in self._listeners:
                listener.let_in(descriptor)

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        os.write(self._wake, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        for listener in self._listeners:
            listener.close()
        self._zap.close(0)
        os.close(self._awake)
        os.close(self._wake)
        self._refusals.close()

    # --- The thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Descriptors instead of sockets: two threads use the sockets, under the lock only.
        poller = select.poll()
        for wire in (self._zap, *(listener.monitor for listener in self._listeners)):
            poller.register(wire.getsockopt(zmq.FD), select.POLLIN)
        poller.register(self._awake, select.POLLIN)
        while not self._closing.is_set():
            # Read before waiting: a descriptor wakes only a thread that has found its socket empty.
            with self._lock:
                self._authenticate()
                self._read_events()
                for listener in self._listeners:
                    self._end_excess(listener)
                    if listener.gate is not None:  # a closed gate leaves connections unanswered for a while
                        listener.gate.poll(time.monotonic())
            poller.poll(self._patience())

    def _patience(self) -> float | None:
        """Return the milliseconds until the next poll of unadmitted connections; None without any."""
        with self._lock:
            is_shut = any(listener.gate is not None and listener.gate.is_shut for listener in self._listeners)
            if not is_shut and not any(listener.strangers for listener in self._listeners):
                return None
            return 1000 * (_SLOW if self._keys.encryption == "curve" and not is_shut else _FAST)

    def _authenticate(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._zap.send_multipart(self._keys.answer_authentication(self._zap.recv_multipart(zmq.NOBLOCK)))

    def _read_events(self) -> None:
        for listener in self._listeners:
            for reason, origin in listener.read_events():
                self.refused += 1
                self._refusals.write(f"refused a connection{origin}", reason)

    def _end_excess(self, listener: _Listener) -> None:
        now, excess = time.monotonic(), len(listener.strangers) - listener.most
        for descriptor, (wire, since, _) in list(listener.strangers.items()):
            acknowledged, received = _traffic(wire)
            late = now - since > ADMISSION_TIME
            if self._keys.encryption == "curve":
                talks_too_much = False
                if (late or excess > 0) and acknowledged > _ENCRYPTED_WORD:
                    listener.forget(descriptor)  # it holds the key
                    excess -= 1
                    continue
            else:
                talks_too_much = received > STRANGERS_MAY_SEND
            if late or excess > 0 or talks_too_much:
                self._end(listener, descriptor, wire)
                excess -= 1
            elif self._keys.encryption == "curve":
                break  # the others are younger

    def _end(self, listener: _Listener, descriptor: int, wire: socket.socket) -> None:
        with contextlib.suppress(OSError):
            name = wire.getpeername()
            _abort(wire)
            self.ended += 1
            self.refused += self._keys.encryption == "off"  # with encryption, its handshake fails and is counted
            self._refusals.write("ended a connection that had not shown that it holds the key", str(name[0]))
        listener.forget(descriptor)


class _Stranger(NamedTuple):
    wire: socket.socket
    since: float
    origin: str
    """The log's text for the address of the connection; empty if it was gone already."""


class _Listener:
    """One listening socket with its unadmitted connections, by descriptor, oldest first.

    Each has a duplicate of its descriptor, whose number no other connection can get meanwhile.
    """

    def __init__(self, context: zmq.Context[Any], listening: zmq.Socket[bytes], most: int) -> None:
        self.most = most
        self.gate: Gate | None = None
        self.strangers: dict[int, _Stranger] = {}
        self._failing = ""
        self._listening = listening
        endpoint = f"inproc://omni-monitor-{id(listening)}"
        failures = (
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        listening.monitor(endpoint, zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | failures)
        self.monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # the thread that serves all connections must not wait for this one
        self.monitor.connect(endpoint)

    def read_events(self) -> list[tuple[str, str]]:
        """Update the connections from the socket's monitor; return reason and origin of each failed handshake.

        ZeroMQ reports why a handshake failed, and in the next event the connection.
        """
        failed = []
        with contextlib.suppress(zmq.Again):
            while True:
                head, _ = self.monitor.recv_multipart(zmq.NOBLOCK)
                event, value = struct.unpack("=hi", head)
                if event == zmq.EVENT_ACCEPTED:
                    self._add(value)
                elif event == zmq.EVENT_DISCONNECTED:
                    if self._failing:
                        origin = self.strangers[value].origin if value in self.strangers else ""
                        failed.append((self._failing, origin))
                        self._failing = ""
                    self.forget(value)
                elif event == zmq.EVENT_LISTENING:
                    self.gate = Gate(value, time.monotonic())
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # ZeroMQ sends the client the reason before the end
                    failed.append((_FAILURES[event], ""))
                else:
                    self._failing = _FAILURES[event]
        return failed

    def let_in(self, descriptor: int) -> None:
        if descriptor in self.strangers and self.gate is not None:
            self.gate.was_let_in()
        self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        if descriptor in self.strangers:
            self.strangers.pop(descriptor).wire.close()

    def close(self) -> None:
        for descriptor in list(self.strangers):
            self.forget(descriptor)
        if self.gate is not None:
            self.gate.close()
        self._listening.disable_monitor()
        self.monitor.close(0)

    def _add(self, descriptor: int) -> None:
        self.forget(descriptor)
        if self.gate is not None:
            self.gate.came()
        with contextlib.suppress(OSError):  # it is gone already
            wire = _duplicate(descriptor)
            origin = ""
            with contextlib.suppress(OSError):
                origin = f" from {wire.getpeername()[0]}"
            self.strangers[descriptor] = _Stranger(wire, time.monotonic(), origin)


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket with a descriptor of its own; an address of either family fits into this one.

    Raises:
        OSError: the descriptor belongs to no socket any more.
    """
    own = os.dup(descriptor)
    try:
        return socket.socket(socket.AF_INET6, socket.SOCK_STREAM, fileno=own)
    except OSError:
        os.close(own)
        raise


def _abort(wire: socket.socket) -> None:
    """End a connection at once.

    After a shutdown, Linux continues to receive and ZeroMQ to read. Connecting a socket to no address resets the
    connection and discards the received bytes.
    """
    if sys.platform == "linux":
        nowhere = bytes(16)  # an address of the family AF_UNSPEC, which is 0
        if ctypes.CDLL(None, use_errno=True).connect(wire.fileno(), nowhere, len(nowhere)) == 0:
            return
    wire.shutdown(socket.SHUT_RDWR)


def received_by(descriptor: int) -> int:
    """Return the bytes that a connection has received, by its descriptor; 0 if that is not known."""
    try:
        with _duplicate(descriptor) as wire:
            return _traffic(wire)[1]
    except OSError:  # it has ended
        return 0


def _traffic(wire: socket.socket) -> tuple[int, int]:
    """Return the bytes that the other side has acknowledged, and those received; zeros except on Linux."""
    if sys.platform != "linux":
        return 0, 0
    try:
        info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TRAFFIC_AT + _TRAFFIC.size)
        acknowledged, received = _TRAFFIC.unpack_from(info, _TRAFFIC_AT)
    except (OSError, struct.error):
        return 0, 0
    return int(acknowledged), int(received)


RATE = 150.0
"""Sustained connections of strangers per second that a listening socket accepts."""
BURST = 300.0
"""Connections that it accepts at once after a quiet time."""
REOPEN = 8.0
"""Connections that a closed gate must have accrued before it opens again."""
LINES, SECONDS = 10, 60.0
"""The most log lines in a number of seconds; the next line reports how many were left out."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""Options of Linux's ``setsockopt``, which Python does not name."""
_FILTER = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of a TCP header that holds its flags
        (0x45, 0, 1, 0x02),  # is SYN among them?
        (0x06, 0, 0, 0),  # then drop the packet
        (0x06, 0, 0, 0xFFFFFFFF),
    )
)
"""A kernel filter (classic BPF) that drops new connections and leaves established ones alone."""


class Gate:
    """A gate on a listening TCP socket; without Linux's socket filters it is always open."""

    def __init__(self, descriptor: int, now: float) -> None:
        self._wire = _duplicate(descriptor)
        self._left, self._since = BURST, now
        self.is_shut = False

    def came(self) -> None:
        self._left -= 1.0

    def was_let_in(self) -> None:
        self._left = min(BURST, self._left + 1.0)

    def poll(self, now: float) -> None:
        self._left = min(BURST, self._left + RATE * (now - self._since))
        self._since = now
        if not self.is_shut and self._left < 0.0:
            self._filter(shut=True)
        elif self.is_shut and self._left >= REOPEN:
            self._filter(shut=False)

    def close(self) -> None:
        if self.is_shut:
            self._filter(shut=False)
        self._wire.close()

    def _filter(self, shut: bool) -> None:
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            if shut:
                program = ctypes.create_string_buffer(_FILTER, len(_FILTER))
                count = len(_FILTER) // 8
                self._wire.setsockopt(
                    socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", count, ctypes.addressof(program))
                )
            else:
                self._wire.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            self.is_shut = shut


class RefusalLog:
    """A rate-limited log of refusals, for use from any thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._began = -SECONDS
        self._said = self._left_out = 0

    def write(self, what: str, about: str) -> None:
        """Write one line; ``about`` may hold text from outside."""
        with self._lock:
            now = time.monotonic()
            if now - self._began >= SECONDS:
                self._tell_left_out()
                self._began, self._said = now, 0
            if self._said < LINES:
                self._said += 1
                self._log.warning("%s: %s", what, quoted(about))
            else:
                self._left_out += 1

    def close(self) -> None:
        with self._lock:
            self._tell_left_out()

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._log.warning("%d more lines like these were left out", self._left_out)
            self._left_out = 0
