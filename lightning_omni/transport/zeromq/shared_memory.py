"""Payloads that are not sent: a leader shares memory with a server on its machine, and messages hold ranges in it.

A segment is a memfd: it has no name, and disappears with the last process that holds it. Its descriptor is sent to a
socket in the run's private directory, with a proof that the sender owns an admitted data connection. Messages on that
connection, and their answers, may then have a second frame, `MemoryRanges`, instead of a payload. Linux only.

Rule 1: the server copies a push out of the leader's memory before it reads it, and copies an answer into it. Neither
side waits for the other to release memory.
Rule 2: a connection may share a few times the size of all servers' parameters, and loses all of it when its rank is
lost.
Rule 3: a process maps no memory that the creator could shorten, because access to removed pages would end it by SIGBUS.
Rule 4: another process may change its segment at any time. So contents are copied, and the copy is checked.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import socket
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage, Refused
from lightning_omni.server.service import Peer
from lightning_omni.wire.handshake import is_equal, mac_of

_log = logging.getLogger(__name__)

MOST_TIMES = 4
"""The most memory that a connection may share, as a multiple of the size of all servers' parameters."""
SLACK = 1 << 20
"""Bytes that it may share beyond that."""
MOST_SEGMENTS = 256
"""The most segments of one connection."""
_LARGEST = 16 << 10
"""The most bytes of a message about memory."""

Anything = TypeVar("Anything")


class MemoryRange(msgspec.Struct, frozen=True, array_like=True):
    segment: int
    start: int
    nbytes: int


class MemoryRanges(msgspec.Struct, frozen=True, array_like=True):
    """The ranges of a message's own payload (None if it follows, or there is none) and of its answer's."""

    payload: MemoryRange | None = None
    answer: MemoryRange | None = None


NO_RANGES = MemoryRanges()


class Share(msgspec.Struct, frozen=True, array_like=True):
    """The message that is sent with a descriptor.

    ``segment`` numbers are ascending on a connection; ``mac`` is by `lightning_omni.wire.handshake.mac_of`.
    """

    rank: int
    segment: int
    nbytes: int
    released: tuple[int, ...] = ()
    mac: bytes = b""

    def proof(self, secret: bytes, side: str) -> bytes:
        return mac_of(secret, "share", side, (self.rank, self.segment, self.nbytes, self.released))


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a `Share`: a MAC, or the reason for a refusal."""

    mac: bytes = b""
    refused: str = ""


encode_record = msgspec.msgpack.encode


def decode_record(data: Any, kind: type[Anything]) -> Anything:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessage(f"not a {kind.__name__}: {error}") from error


# --- The leader's side -----------------------------------------------------------------------------------------------


class Sharing:
    """The memory that a data connection shares with its server, to which a segment is passed on first use.

    ``path`` is that of the server's socket; "" shares nothing. ``timeout`` is in seconds.
    """

    def __init__(self, path: str, rank: int, secret: bytes, timeout: float) -> None:
        self._path, self._rank, self._secret, self._timeout = path, rank, secret, timeout
        self._numbers: dict[int, int] = {}  # the server's number of each local segment
        self._count = 0

    def range_of(self, tensor: Tensor | None) -> MemoryRange | None:
        """Return a tensor's range for the server; None if it cannot be shared."""
        if not self._path or tensor is None or not tensor.numel() or (found := find_segment(tensor)) is None:
            return None
        segment, start = found
        if segment.number not in self._numbers:
            try:
                self._hand_over(segment)
            except (OSError, MalformedMessage, Refused) as error:
                self._path = ""
                _log.warning("memory cannot be shared with the server, tensors are sent through sockets: %s", error)
                return None
        return MemoryRange(self._numbers[segment.number], start, tensor.numel())

    def _hand_over(self, segment: Segment) -> None:
        released = [here for here in self._numbers if not is_segment_in_use(here)]
        self._count += 1
        share = Share(
            self._rank, self._count, segment.nbytes, tuple(self._numbers.pop(here) for here in released[:MOST_SEGMENTS])
        )
        share = msgspec.structs.replace(share, mac=share.proof(self._secret, "rank"))
        # If the server dies, the kernel closes the end that was sent to it.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
            for each in (ours, wire):
                each.settimeout(self._timeout)
            wire.connect(self._path)
            socket.send_fds(wire, [encode_record(share)], [segment.descriptor, theirs.fileno()])
            theirs.close()
            answer = decode_record(ours.recv(_LARGEST), Shared)
        if answer.refused:
            raise Refused("memory", answer.refused)
        if not is_equal(answer.mac, share.proof(self._secret, "server")):
            raise Refused("key", "the process that answers does not hold the secret of this connection; it is not ours")
        self._numbers[segment.number] = share.segment


# --- The server's side -----------------------------------------------------------------------------------------------


class SharedMemory:
    """The memory that leaders share with this server, by connection.

    ``find`` returns a rank's data connection and secret, ``held`` the bytes of all servers' parameters.
    """

    def __init__(self, find: Callable[[int], tuple[Peer, bytes] | None], held: Callable[[], int]) -> None:
        self._find, self._held = find, held
        self._segments: dict[Peer, dict[int, Tensor]] = {}
        self._last: dict[Peer, int] = {}

    def take(self, share: Share, descriptor: int) -> Shared:
        """Map a segment that a process passes to the server, after unmapping those that its rank released.

        Raises:
            Refused: the proof is wrong, the segment's number is not higher than the last one, the connection would
                share too much, or the memory is not safe to map.
        """
        peer, secret = self._find(share.rank) or (b"", b"")
        if not peer or not is_equal(share.mac, share.proof(secret, "rank")):
            raise Refused("stranger", "this proof opens nothing")
        if share.segment <= self._last.get(peer, 0):
            raise Refused("late", f"segment {share.segment} was handed over before")
        mapped = self._segments.setdefault(peer, {})
        for number in share.released:
            mapped.pop(number, None)
        most, total = MOST_TIMES * self._held() + SLACK, sum(tensor.numel() for tensor in mapped.values())
        if len(mapped) >= MOST_SEGMENTS or total + share.nbytes > most:
            raise Refused("memory", f"{total + share.nbytes} bytes in {len(mapped) + 1} segments; {most} may be shared")
        mapped[share.segment] = open_segment(descriptor, share.nbytes)
        self._last[peer] = share.segment
        return Shared(mac=share.proof(secret, "server"))

    def at(self, peer: Peer, memory: MemoryRange) -> Tensor:
        """Return the bytes of a range. They may change at any time."""
        segment = self._segments.get(peer, {}).get(memory.segment)
        if segment is None or not 0 <= memory.start <= memory.start + memory.nbytes <= segment.numel():
            raise MalformedMessage(f"there are no {memory.nbytes} bytes at {memory.start} of segment {memory.segment}")
        return segment[memory.start : memory.start + memory.nbytes]

    @property
    def nbytes(self) -> int:
        return sum(segment.numel() for mapped in self._segments.values() for segment in mapped.values())

    def keep(self, peers: set[Peer]) -> None:
        for peer in self._segments.keys() - peers:
            del self._segments[peer]
            self._last.pop(peer, None)


class SegmentSocket:
    """A datagram socket in a private directory that receives descriptors. Call `serve` when it is readable."""

    def __init__(self, path: str, memory: SharedMemory) -> None:
        self._memory = memory
        with ExitStack() as stack:
            self._wire = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            self._wire.setblocking(False)
            self._wire.bind(path)
            stack.pop_all()

    def fileno(self) -> int:
        return self._wire.fileno()

    def serve(self) -> None:
        """Map the next segment, if one has come, and answer over the socket that came with it."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._wire, _LARGEST, 2, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except BlockingIOError:
            return
        try:
            if len(descriptors) == 2 and not flags & socket.MSG_CTRUNC:
                memory, reply = descriptors
                with suppress(OSError):  # the other end is gone
                    os.set_blocking(reply, False)
                    os.write(reply, encode_record(self._answer(data, memory)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _answer(self, data: bytes, descriptor: int) -> Shared:
        try:
            return self._memory.take(decode_record(data, Share), descriptor)
        except (MalformedMessage, Refused) as error:
            return Shared(refused=str(error))

    def close(self) -> None:
        self._wire.close()


if sys.platform == "linux":
    import fcntl

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Segment:
    """A segment that this process has created; ``number`` is unique in it, ``address`` that of its first byte."""

    number: int
    descriptor: int
    address: int
    nbytes: int


_made: dict[int, Segment] = {}
"""The segments whose memory this process still uses, by number."""


def can_share_memory() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def shared_zeros(nbytes: int) -> Tensor:
    """Return zeros, uint8, ``(nbytes,)``, in a segment of their own, which lives as long as the tensor."""
    if sys.platform != "linux":
        raise OSError("only Linux has memfd_create")
    descriptor = os.memfd_create("lightning-omni", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Allocates the pages, so that a memory limit fails here and not at the first access.
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(descriptor, max(nbytes, 1), flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(descriptor)
        raise
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
    segment = Segment(next(_NUMBERS), descriptor, tensor.data_ptr(), nbytes)
    _made[segment.number] = segment
    weakref.finalize(memory, _forget, segment).atexit = False
    return tensor


def find_segment(tensor: Tensor) -> tuple[Segment, int] | None:
    start = tensor.data_ptr()
    for segment in list(_made.values()):
        if segment.address <= start and start + tensor.numel() <= segment.address + segment.nbytes:
            return segment, start - segment.address
    return None


def is_segment_in_use(number: int) -> bool:
    return number in _made


def open_segment(descriptor: int, nbytes: int) -> Tensor:
    """Map another process's segment: uint8, ``(nbytes,)``. The caller keeps the descriptor."""
    if sys.platform != "linux":
        raise Refused("memory", "only Linux has memory that is safe to share")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # only a memfd has seals
        if not seals & fcntl.F_SEAL_SHRINK:
            raise Refused("memory", "this memory is not sealed against shrinking")
        if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:  # huge pages may run out on access
            raise Refused("memory", "this memory is made of huge pages")
        if not 0 < nbytes <= os.fstat(descriptor).st_size:
            raise Refused("memory", f"this memory has {os.fstat(descriptor).st_size} bytes, {nbytes} were announced")
        return torch.frombuffer(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise Refused("memory", f"this memory cannot be mapped: {error}") from error


def _forget(segment: Segment) -> None:
    _made.pop(segment.number, None)
    with suppress(OSError):
        os.close(segment.descriptor)
