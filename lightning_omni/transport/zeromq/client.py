"""A rank's two connections to the server: control (with a thread that keeps it alive) and data."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from lightning_omni.checks import counted
from lightning_omni.errors import INTERRUPTED, ConnectionLost, MalformedMessage, OmniError, Refused, quoted
from lightning_omni.transport.connections import REQUEST_TIMEOUT, Answer, Control, Data, answer_of, refused_return
from lightning_omni.transport.zeromq.addresses import (
    beside,
    check_address,
    data_address,
    is_private,
    memory_path,
    remove_if_abandoned,
)
from lightning_omni.transport.zeromq.dialing import Dialed, SuspendAwareClock, attach, dial
from lightning_omni.transport.zeromq.frames import (
    CHUNK_MARK,
    LARGEST_ANSWER_FRAME,
    LARGEST_DATA_FRAME,
    PROBE,
    Assembly,
    chunks,
    message_frames,
)
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.transport.zeromq.peers import PeerWires
from lightning_omni.transport.zeromq.shared_memory import (
    MemoryRange,
    MemoryRanges,
    Sharing,
    can_share_memory,
    decode_record,
    shared_zeros,
)
from lightning_omni.wire import handshake
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, WireFormat
from lightning_omni.wire.handshake import NONCE_BYTES, hello_of
from lightning_omni.wire.layout import Layout

_log = logging.getLogger(__name__)

LAST_WORDS = 50
"""Milliseconds for which an ended connection is still read for messages sent before its end."""
HEARTBEAT = 0.5
"""Seconds between two heartbeats."""
CONNECT_TIME = 60.0
"""Seconds within which a data connection must be established."""
GRACE = 60.0
"""Seconds between a broken data connection and the report that the server is gone, at most: it may be busy."""
TOLD_WHY = 5.0
"""Seconds to wait for the reason of a server that ends, if it still answers on a data connection."""
_BROKEN = "the data connection broke, and what was under way on it is lost: the other side has ended it, or the network"
LONGEST_REASON = 4000
"""The most characters of a reason that are sent."""
_PAUSE = 0.02
"""Seconds between two checks of a rank that waits for a server to continue."""
_SLICE = 200
"""Milliseconds between two checks whether waiting is still of use."""


class ControlConnection(Control):
    """A rank's control connection, which a second thread keeps alive.

    Args:
        address: the server's control socket.
        key: as for `lightning_omni.transport.Transport.join`, and so are the others.
        connect_timeout: seconds to wait for admission.
        on_end: called from the second thread when this rank must stop.
        encryption: as in `ZeroMQ`, and as the server's.
        shared_memory: as in `ZeroMQ`.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        run: str,
        rank: int,
        world_size: int,
        layout: Layout,
        connect_timeout: float = 15.0,
        on_end: Callable[[OmniError], None] | None = None,
        encryption: str = "curve",
        shared_memory: bool = True,
        silence: float = 0.0,
    ) -> None:
        check_address(address)
        super().__init__(address, rank, on_end)
        self._silence = silence
        self.keys = RunKeys(key, encryption)
        self._posted: deque[m.Message] = deque()
        self._context = zmq.Context()
        inbox = f"inproc://{id(self)}"
        self._inside, self._outside = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for wire in (self._inside, self._outside):
            wire.setsockopt(zmq.LINGER, 0)
        self._inside.bind(inbox)
        self._outside.connect(inbox)
        self._closing = False
        self._thread: threading.Thread | None = None
        self._dialed: Dialed | None = None
        self._unanswered: list[bytes] | None = None  # the request that awaits its answer
        self._owed = 0  # answers to earlier requests, which exceptions ended, that may still come, also after others
        try:
            self._join = partial(self._dial, key, run, world_size, layout)
            self._dialed, welcome = self._join(connect_timeout)
        except BaseException:
            self.close()
            raise
        self._wire, self._monitor = self._dialed.wire, self._dialed.monitor
        self.heartbeat_timeout, self.servers = welcome.heartbeat_timeout, welcome.servers
        self.reconnect_timeout = welcome.reconnect_timeout
        self.data_address = data_address(address, welcome.data_port)
        shares = shared_memory and is_private(address) and can_share_memory()
        self.session = Session(self.data_address, rank, self._secret, self.keys, memory_path(address) if shares else "")
        if shared_memory and not shares:
            _log.info("tensors are sent through sockets: shared memory needs Linux, and no server on a TCP port")
        self._memory = self.session.memory
        self._thread = threading.Thread(target=self._keep_alive, name="omni-control", daemon=True)
        self._thread.start()

    # --- Requests, from the rank's own thread ------------------------------------------------------------------------

    def request_payload(
        self, message: m.Message, expect: type[Answer], payload: bytes = b"", timeout: float = REQUEST_TIMEOUT
    ) -> tuple[Answer, list[bytes]]:
        self.check()
        data = m.encode(message)
        if max(len(data), len(payload)) > m.LARGEST_INLINE:
            raise MalformedMessage(
                f"a {type(message).__name__} of {len(data)} bytes with {len(payload)} bytes of payload is too large for"
                f" the control channel, which takes {m.LARGEST_INLINE}; bring it over the data channel"
            )
        owed, self._owed = self._owed, self._owed + 1
        self._outside.send_multipart([data, payload] if payload else [data])
        clock = SuspendAwareClock()
        deadline = clock() + timeout
        while True:
            if self._outside.poll(_SLICE):
                head, *parts = self._outside.recv_multipart()
                answer = m.decode(head, at="rank", channel=m.CONTROL)
                if owed and not _may_answer(message, answer, expect):
                    owed, self._owed = owed - 1, self._owed - 1
                    continue
                self._owed = owed
                return answer_of(answer, expect), parts
            self.check()
            if clock() > deadline:
                raise ConnectionLost(
                    f"no answer to {type(message).__name__} within {timeout:.0f} s: some rank is stuck; raise timeout="
                    " if its work really takes that long"
                )

    def wait_for_end(self, seconds: float) -> OmniError | None:
        deadline = time.monotonic() + seconds
        while self._ended is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._ended

    def post(self, message: m.Message) -> None:
        self._posted.append(message)

    def attach(self, timeout: float = 300.0, address: str = "") -> DataConnection:
        session = self.session
        if address:
            session = dataclasses.replace(session, address=beside(address, self.address), memory="")
        return DataConnection(session, partial(self.check_same_server, self.server_epoch), timeout)

    def wait_for_server(self) -> None:
        while self.is_server_gone:
            self.check()
            time.sleep(_PAUSE)
        self.check()

    def empty(self, nbytes: int) -> Tensor:
        if self.session.memory:
            try:
                return shared_zeros(nbytes)
            except OSError as error:
                self.session = dataclasses.replace(self.session, memory="")
                _log.warning("no shared memory is available, tensors are sent through sockets: %s", error)
        return super().empty(nbytes)

    def listen(
        self,
        layouts: Sequence[Layout],
        is_lost: Callable[[int], bool],
        everywhere: bool,
        wire_format: WireFormat = RAW,
    ) -> PeerWires:
        return PeerWires(self.address, self.rank, layouts, self.keys, is_lost, self.check, everywhere, wire_format)

    def close(self, reason: str | None = None) -> None:
        if self._closing:
            return
        if reason is not None and self._ended is None and self._thread is not None:
            with contextlib.suppress(OmniError):
                self.request(
                    m.Goodbye(reason=reason[:LONGEST_REASON], finished=self.has_finished), m.Acknowledged, timeout=5.0
                )
        self._closing = True
        if self._thread is not None:
            self._outside.send(b"")
            self._thread.join(timeout=5.0)
        if self._dialed is not None:
            self._dialed.close()
        for wire in (self._inside, self._outside):
            wire.close(0)
        self._context.term()
        remove_if_abandoned(self.address)

    # --- Admission ---------------------------------------------------------------------------------------------------

    def _dial(
        self, key: bytes, run: str, world_size: int, layout: Layout, timeout: float, returns: bool = False
    ) -> tuple[Dialed, m.Welcome]:
        def shake_hands(request: handshake.Request) -> m.Welcome:
            hello = hello_of(run, self.rank, world_size, layout, secrets.token_bytes(NONCE_BYTES), returns)
            welcome, self._secret = handshake.join(request, key, hello, self.address)
            return welcome

        return dial(
            lambda: Dialed(
                self.address,
                self.keys,
                LARGEST_ANSWER_FRAME,
                m.CONTROL,
                silence=self._silence,
                context=self._context,
            ),
            shake_hands,
            self.keys,
            self.address,
            f"no parameter server answers at {self.address}; check server=, that `lightning-omni serve` runs there"
            " with a --host that this machine can reach, and that no firewall is in between",
            timeout,
            self._check_open,
        )

    def _check_open(self) -> None:
        if self._closing:
            raise ConnectionLost("this connection was closed")

    # --- The connection's thread -------------------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        while not self._closing:
            gone = self._serve()
            if gone is None:
                continue
            if self._ended is None and self.reconnect_timeout and self._return():
                continue
            self.end(gone)
            return

    def _return(self) -> bool:
        """Dial until another server continues in place of the lost one; return whether one does."""
        self.is_server_gone = True
        if self.records:
            text = "the parameter server at %s is gone; it is looked for over %.0f s"
            _log.warning(text, self.address, self.reconnect_timeout)
        assert self._dialed is not None
        self._dialed.close()
        try:
            self._dialed, welcome = self._join(self.reconnect_timeout, returns=True)
        except (OmniError, zmq.ZMQError) as error:
            if isinstance(error, Refused):
                self.end(refused_return(error))
            return False
        self._wire, self._monitor = self._dialed.wire, self._dialed.monitor
        address = data_address(self.address, welcome.data_port)
        self.session = Session(address, self.rank, self._secret, self.keys, self._memory)
        self.reconnected(welcome)
        if self._unanswered is not None:
            self._send(self._unanswered)
        return True

    def _serve(self) -> ConnectionLost | None:
        """Keep the connection alive until it is closed; return the error once the server is gone."""
        poller = zmq.Poller()
        for wire in (self._inside, self._wire, self._monitor):
            poller.register(wire, zmq.POLLIN)
        clock = SuspendAwareClock()
        last_seen = beat = clock()
        while not self._closing:
            ready = dict(poller.poll(int(max(0.0, beat - clock()) * 1000) + 1))
            now = clock()
            if self._monitor in ready:  # first: the socket may have reconnected, and is not admitted then
                recv_monitor_message(self._monitor)
                while self._wire.poll(LAST_WORDS):  # the server's last message may still be queued and hold the reason
                    self._receive_control()
                return ConnectionLost(f"the parameter server at {self.address} is gone; the run cannot go on")
            if self._inside in ready:
                frames = self._inside.recv_multipart()
                if frames[0]:
                    self._unanswered = frames
                    self._send(frames)
            if self._wire in ready:
                last_seen = now
                self._receive_control()
            if now - last_seen > self.heartbeat_timeout:
                return ConnectionLost(f"the parameter server at {self.address} was silent for {now - last_seen:.0f} s")
            while self._posted:
                self._send([m.encode(self._posted.popleft())])
            if now >= beat:
                self._send([m.encode(self.heartbeat(now))])
                beat = now + HEARTBEAT
        return None

    def _send(self, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.Again):  # the connection has ended, which the monitor reports
            self._wire.send_multipart(frames, zmq.NOBLOCK)

    def _receive_control(self) -> None:
        frames = self._wire.recv_multipart()
        if frames[0] == PROBE:
            return
        try:
            message = m.decode(frames[0], at="rank", channel=m.CONTROL)
        except MalformedMessage as error:
            self.end(error)
            return
        if self.handle(message):
            self._unanswered = None
            self._inside.send_multipart(frames)
        elif isinstance(message, m.Notice) and not message.over and self.rank not in message.lost:
            _log.warning(eviction_sentence(message))

    def end(self, error: OmniError) -> None:
        if not self._closing:
            super().end(error)


def eviction_sentence(notice: m.Notice) -> str:
    """Return the sentence about an evicted group for the logs.

    Example:
        >>> eviction_sentence(m.Notice(lost=(2, 3), reason="rank 3 failed: ValueError"))
        'rank 3 failed: ValueError; its group is evicted, 2 ranks are lost, the others go on'
        >>> eviction_sentence(m.Notice(lost=(1,), reason=f"rank 1 {INTERRUPTED}"))
        'rank 1 was interrupted (Ctrl-C); its group is evicted, 1 rank is lost, the others go on, unless they were, too'
    """
    lost = f"{counted(len(notice.lost), 'rank')} {'is' if len(notice.lost) == 1 else 'are'} lost"
    # A terminal interrupts all ranks; this is only the first one that reached the server.
    but = ", unless they were, too" if INTERRUPTED in notice.reason else ""
    return f"{quoted(notice.reason)}; its group is evicted, {lost}, the others go on{but}"


@dataclass(frozen=True)
class Session:
    """The values that open the data connection of an admitted rank.

    ``secret`` is never sent; ``memory`` is the path of the socket that passes memory to the server, "" for none.
    """

    address: str
    rank: int
    secret: bytes
    keys: RunKeys
    memory: str = ""


def _may_answer(message: m.Message, answer: m.Message, expect: type[m.Message]) -> bool:
    asked = getattr(message, "number", None)
    is_other = asked is not None and getattr(answer, "number", asked) != asked
    return isinstance(answer, (expect, m.RefusedMessage)) and not is_other


class DataConnection(Data):
    """A rank's data connection; ``timeout`` is in seconds, for any one piece of an answer.

    ``check`` is as in `Dialed.ask`.
    """

    def __init__(self, session: Session, check: Callable[[], None], timeout: float = 300.0) -> None:
        self._check, self._timeout = check, timeout
        self._dialed, _ = dial(
            lambda: Dialed(session.address, session.keys, LARGEST_DATA_FRAME, m.DATA),
            attach(session.secret, session.rank),
            session.keys,
            session.address,
            f"the parameter server's data socket at {session.address} does not answer; check that no firewall is in"
            " between",
            min(timeout, CONNECT_TIME),
            check,
        )
        self._wire = self._dialed.wire
        self._sharing = Sharing(session.memory, session.rank, session.secret, min(timeout, CONNECT_TIME))
        self._offered: set[MemoryRange] = set()
        self._awaited: tuple[MemoryRange, Tensor] | None = None
        self._arriving: Assembly | None = None
        self._besides: list[Any] = []  # frames beside the answer's own

    def send(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        room = self._sharing.range_of(into)
        if room in self._offered:  # the answer missing so far may still be written there; this one travels by socket
            room = None
        places = MemoryRanges(self._sharing.range_of(payload), room)
        self._awaited = None
        if room is not None and into is not None:
            self._offered.add(room)
            self._awaited = room, into
        try:  # the queue has no limit: sending blocks only without a connection
            for frames in message_frames(message, places):
                self._wire.send_multipart(frames, zmq.NOBLOCK)
            for chunk in chunks(payload) if payload is not None and places.payload is None else ():
                self._wire.send_multipart([CHUNK_MARK, chunk], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._check()
            raise ConnectionLost("the connection to the parameter server's data socket has ended") from None
        if payload is not None:
            self.moved += payload.numel()
            self.shared += payload.numel() if places.payload is not None else 0

    def receive(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor]:
        arriving = self._arriving  # an exception has interrupted its arrival
        if arriving is None:
            head, *self._besides = self._receive()
            answer = m.decode(head.buffer, at="rank", channel=m.DATA)
            if isinstance(answer, m.LargeMessage):
                arriving = self._arriving = Assembly(answer, torch.empty(answer.nbytes, dtype=torch.uint8))
        elif not isinstance(arriving.message, m.LargeMessage):
            return answer_of(arriving.message, expect), self._complete(arriving)
        if arriving is not None:
            answer = m.decode(self._complete(arriving).numpy().data, at="rank", channel=m.DATA)
        memory, room = self._awaited or (None, None)
        if memory is not None:
            self._offered.discard(memory)
        if isinstance(answer, m.RefusedMessage) and self._has_broken:  # ZeroMQ has reconnected, without admission
            while True:  # an ending server sends the reason on the control connection
                self._receive(TOLD_WHY)
        answer = answer_of(answer, expect)
        nbytes = getattr(answer, "nbytes", 0)
        self.moved += nbytes
        if self._besides:
            there = decode_record(self._besides[0].buffer, MemoryRanges)
            if there != MemoryRanges(answer=memory) or room is None or room.numel() < nbytes:
                raise MalformedMessage("the answer lies where there was no room for it")
            self.shared += nbytes
            return answer, room[:nbytes]
        if into is None or into.numel() < nbytes:
            into = torch.empty(nbytes, dtype=torch.uint8)
        return answer, self._assemble(answer, into[:nbytes])

    def close(self) -> None:
        self._dialed.close()

    def _assemble(self, message: m.Message, buffer: Tensor) -> Tensor:
        self._arriving = Assembly(message, buffer)
        return self._complete(self._arriving)

    def _complete(self, assembly: Assembly) -> Tensor:
        while not assembly.is_complete:
            assembly.add(self._receive()[-1].buffer)
        self._arriving = None
        return assembly.buffer

    @property
    def _has_broken(self) -> bool:
        return bool(self._dialed.monitor.poll(0))

    def _receive(self, longest: float = math.inf) -> list[Any]:
        """Wait for a message; if the connection has broken, for `GRACE` or ``longest`` at most."""
        clock = SuspendAwareClock()
        deadline, broke = clock() + self._timeout, math.inf
        while not self._wire.poll(_SLICE):
            self._check()
            if self._has_broken:
                broke = min(broke, clock())
            if clock() >= broke + min(GRACE, longest):
                raise ConnectionLost(_BROKEN)
            if clock() > deadline:
                raise ConnectionLost(
                    f"the parameter server sent no tensors for {self._timeout:.0f} s; if the method has groups wait for"
                    " each other, perhaps one of them needs longer than that: raise timeout="
                )
        return self._wire.recv_multipart(copy=False)
