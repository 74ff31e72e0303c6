"""Keeps strangers from using up a listening process: which have connected by TCP, which were let in, and which must go.

ZeroMQ has no way to end one connection of a socket. But the descriptors of all connections belong to this process, and
the socket's monitor tells them: so a connection that has not shown that it holds the run's key is ended here, when too
many of them stand, or when it takes too long. Ranks connect again by themselves.
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

from lightning_omni.errors import ConfigurationError
from lightning_omni.server.addresses import is_private
from lightning_omni.server.frames import LARGEST_CONTROL_FRAME, LARGEST_DATA_FRAME, configure
from lightning_omni.server.keys import HANDSHAKE_TIME, RunKeys
from lightning_omni.server.rate_limits import Gate, RefusalLog

_log = logging.getLogger(__name__)

MOST_STRANGERS = {LARGEST_CONTROL_FRAME: 256, LARGEST_DATA_FRAME: 64}
"""Connections of one listening socket that have not been let in, by the largest frame that it takes.

What strangers can make a process hold is, for each of its listening sockets, at most

    MOST_STRANGERS x (largest frame + CONNECTION_MEMORY),

which is 256 x (64 kB + 64 kB) = 32 MB for the control socket and 64 x (516 kB + 64 kB) = 37 MB for the data socket and
for a leader's own: 70 MB in all for a server, whatever is sent, for however long and however often.
"""
CONNECTION_MEMORY = 64 << 10
"""Bytes that ZeroMQ itself needs for one connection: its buffers, pipes and state."""
ADMISSION_TIME = HANDSHAKE_TIME / 1000 + 2.0
"""Seconds in which a connection must have been let in."""
STRANGERS_MAY_SEND = 64 << 10
"""Bytes that a connection may send in the clear before it is let in; where the system counts them (Linux)."""
BACKLOG = 1024
"""Connections that may wait for the system to hand them over."""
_ENCRYPTED_WORD = 260
"""Bytes that a CURVE server sends without having seen the key: greeting (64), WELCOME (170) and an ERROR (12).

After the key was shown READY follows, of 67 bytes; so a process that has been sent more holds the key.
"""
_TRAFFIC = struct.Struct("=QQ")
_TRAFFIC_AT = 120
"""Where Linux's ``tcp_info`` holds the bytes that were acknowledged by the other side and received from it."""
_REFUSAL = "the key does not match the server's; both sides must be given the same key, and the same encryption="
_FAILURES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it ended before it had shown a key, as a check of the port does",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): f"{_REFUSAL}; what it sent is no handshake with this key",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): f"{_REFUSAL}; its own key is another",
}
_FAST, _SLOW = 0.02, 0.5
"""Seconds between two polls of connections that were not let in: at what they have sent, and at their time. Shut gates
are polled as often as the former."""


class ConnectionGuard:
    """Makes the listening sockets of one ZeroMQ context, and watches those of TCP in a thread of its own.

    Args:
        context: of the sockets.
        keys: of the run.

    Attributes:
        ended: connections of strangers that were ended here.
        refused: connections that did not come through the handshake, and in the clear those that were ended here.
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
        """A socket that listens there, watched from before it is bound; in a private directory there is no need.

        Args:
            endpoint: what to bind.
            largest_frame: bytes of a frame that may come.
            most_unread: messages of a connection that may wait to be read.

        Raises:
            ConfigurationError: this machine cannot encrypt.
            zmq.ZMQError: nothing can listen there. Either way the guard is closed.
        """
        listening: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        configure(listening, largest_frame)
        listening.setsockopt(zmq.BACKLOG, BACKLOG)
        listening.setsockopt(zmq.IPV6, int("[" in endpoint))
        # Answers are at most one for each question, so they may queue; what comes in must not.
        listening.setsockopt(zmq.SNDHWM, 0)
        listening.setsockopt(zmq.RCVHWM, most_unread)
        try:
            self._keys.prepare(listening, endpoint, "server")
            if not is_private(endpoint):
                if not self._listeners:  # with it all connections of the context are asked for their keys
                    self._zap.bind("inproc://zeromq.zap.01")
                self._listeners.append(_Listener(self._context, listening, MOST_STRANGERS[largest_frame]))
            listening.bind(endpoint)
        except (zmq.ZMQError, ConfigurationError):
            self.close()
            listening.close(0)
            raise
        return listening

    def start(self) -> None:
        """From now on; all sockets are bound."""
        if self._listeners:
            self._thread.start()

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Nothing is ended meanwhile, so that a connection that is being let in is not."""
        with self._lock:
            self._read_events()
            yield

    def let_in(self, descriptor: int) -> None:
        """The connection with this descriptor is an admitted rank's: it is watched no more."""
        with self._lock:
            self._read_events()
            for listener in self._listeners:
                listener.let_in(descriptor)

    def close(self) -> None:
        """Ends the watch, before the sockets are closed."""
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
        # The descriptors, not the sockets: these are read under the lock only, from two threads.
        poller = select.poll()
        for wire in (self._zap, *(listener.monitor for listener in self._listeners)):
            poller.register(wire.getsockopt(zmq.FD), select.POLLIN)
        poller.register(self._awake, select.POLLIN)
        while not self._closing.is_set():
            # First this, then the wait: a descriptor wakes only a thread that has found its socket empty before.
            with self._lock:
                self._authenticate()
                self._read_events()
                for listener in self._listeners:
                    self._end_excess(listener)
                    if listener.gate is not None:  # too many connections are left waiting for a while
                        listener.gate.poll(time.monotonic())
            poller.poll(self._patience())

    def _patience(self) -> float | None:
        """Milliseconds until strangers must be polled again; None if there are none."""
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
            for failed in listener.read_events():
                self.refused += 1
                self._refusals.write(f"refused a connection{failed.origin}", failed.reason)

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
            self.refused += self._keys.encryption == "off"  # with encryption, it is a handshake that fails now
            self._refusals.write("ended a connection that had not shown that it holds the key", str(name[0]))
        listener.forget(descriptor)


class _Refused(NamedTuple):
    """A connection that did not come through the handshake."""

    reason: str
    origin: str = ""


class _Stranger(NamedTuple):
    """A connection that was not let in."""

    wire: socket.socket
    since: float
    origin: str
    """Where it comes from, as it stands in the log; nothing if it is gone already."""


class _Listener:
    """One listening socket, and the connections to it that were not let in, by descriptor and oldest first.

    Each has a descriptor of our own, so that it cannot become another's meanwhile, and the time since when it stands.
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

    def read_events(self) -> list[_Refused]:
        """Brings the list up to date; returns the handshakes that failed.

        ZeroMQ says why one has failed, and in the next event which connection that was, which ends then.
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
                        failed.append(_Refused(self._failing, origin))
                        self._failing = ""
                    self.forget(value)
                elif event == zmq.EVENT_LISTENING:
                    self.gate = Gate(value, time.monotonic())
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # its connection is told why before it ends
                    failed.append(_Refused(_FAILURES[event]))
                else:
                    self._failing = _FAILURES[event]
        return failed

    def let_in(self, descriptor: int) -> None:
        """This connection is a rank's."""
        if descriptor in self.strangers and self.gate is not None:
            self.gate.was_let_in()
        self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        """This connection is watched no more."""
        if descriptor in self.strangers:
            self.strangers.pop(descriptor).wire.close()

    def close(self) -> None:
        """Watches nothing any more."""
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
        try:
            own = os.dup(descriptor)
        except OSError:  # it has gone already
            return
        try:
            wire = socket.socket(fileno=own)
        except OSError:  # and the descriptor is another file's now
            os.close(own)
            return
        try:
            origin = f" from {wire.getpeername()[0]}"
        except OSError:
            origin = ""
        self.strangers[descriptor] = _Stranger(wire, time.monotonic(), origin)


def _abort(wire: socket.socket) -> None:
    """Ends a connection that ZeroMQ reads from, at once.

    After a shutdown Linux goes on to take in whatever comes, and ZeroMQ to read it, so a stranger that never stops
    sending would stay. There, connecting a socket to no address resets it, and throws away what has come.
    """
    if sys.platform == "linux":
        nowhere = bytes(16)  # an address of the family AF_UNSPEC, which is 0
        if ctypes.CDLL(None, use_errno=True).connect(wire.fileno(), nowhere, len(nowhere)) == 0:
            return
    wire.shutdown(socket.SHUT_RDWR)


def _traffic(wire: socket.socket) -> tuple[int, int]:
    """Bytes that the other side has acknowledged, and that came from it; zeros where the system does not count."""
    if sys.platform != "linux":
        return 0, 0
    try:
        info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TRAFFIC_AT + _TRAFFIC.size)
        acknowledged, received = _TRAFFIC.unpack_from(info, _TRAFFIC_AT)
    except (OSError, struct.error):
        return 0, 0
    return int(acknowledged), int(received)
