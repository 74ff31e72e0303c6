"""A hundred thousand wrong frames: each gets a counted refusal or a legal answer, and none harms a run.

They go through the same code as what arrives at a socket, without the socket. The seed is fixed: a frame that is found
here is found again.
"""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import torch
import zmq
from test_server_core import Link, control_peer, data_peer, gradient, push_of, trained_link

from lightning_omni.server.core import ServerCore
from lightning_omni.server.router import types_on
from lightning_omni.server.service import Out
from lightning_omni.transport.zeromq.server import ZeroMQServer
from lightning_omni.wire import messages as m

STRANGE, ADMITTED = 60_000, 40_000
"""Frames of strangers, and of admitted ranks."""
EXAMPLES = 2_000
"""Valid messages for each channel, of which the wrong ones are made."""
CONTROL_KINDS: tuple[type[m.Message], ...] = types_on(m.CONTROL)
DATA_KINDS: tuple[type[m.Message], ...] = types_on(m.DATA)
EDGES = (0, 1, -1, 2, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
TEXTS = ("", "float32", "validate", "a run", "torch.optim:SGD", "x\n\x1b[2J", "\0", "\u2028", "é" * 100)
MARK = b""
"""The first of the two frames of a chunk."""


# --- Valid messages of every type -------------------------------------------------------------------------------------


class Examples:
    """Messages of any type, and what becomes of them.

    Args:
        source: of all that is random here.
    """

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._values: dict[Any, Callable[[], Any]] = {
            int: lambda: source.choice(EDGES) if source.random() < 0.4 else source.randrange(-2, 8),
            float: lambda: source.choice((0.0, 1.0, -1.0, 1e300, float("nan"), float("inf"), source.random())),
            bool: lambda: source.random() < 0.5,
            bytes: lambda: source.randbytes(source.choice((0, 1, 32, 40))),
            str: lambda: source.choice(TEXTS),
            Any: lambda: self._plain(2),
        }

        self._encoded = {
            kinds: [m.encode(self._value(source.choice(kinds))) for _ in range(EXAMPLES)]
            for kinds in (CONTROL_KINDS, DATA_KINDS)
        }

    def encoded(self, kinds: tuple[type[m.Message], ...]) -> bytes:
        """A message of one of these types, with any fields."""
        return self._source.choice(self._encoded[kinds])

    def mutated(self, encoded: bytes) -> bytes:
        """Bytes that are wrong in one way or another, or by chance still right."""
        return self._source.choice(_MUTATIONS)(self._source, encoded)

    def _value(self, hint: Any) -> Any:
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            hints = get_type_hints(hint)
            return hint(**{name: self._value(hints[name]) for name in hint.__struct_fields__})
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is tuple and arguments[-1] is ...:
            return tuple(self._value(arguments[0]) for _ in range(self._source.randrange(4)))
        if origin is tuple:
            return tuple(map(self._value, arguments))
        if origin in (Union, UnionType):
            return self._value(self._source.choice(arguments))
        if hint is type(None):
            return None
        if hint is msgspec.UnsetType:
            return msgspec.UNSET
        if origin is Literal:
            return self._source.choice(arguments)
        if origin is dict:
            names = ("lr", "momentum", "name", "params", self._source.choice(TEXTS))
            return {name: self._plain(2) for name in self._source.sample(names, self._source.randrange(4))}
        return self._values[hint]()

    def _plain(self, depth: int) -> Any:
        kind = self._source.choice((int, float, bool, str, bytes, None, list, dict))
        if kind is None or (depth == 0 and kind in (list, dict)):
            return None
        if kind is list:
            return [self._plain(depth - 1) for _ in range(self._source.randrange(3))]
        if kind is dict:
            return {self._source.choice(TEXTS): self._plain(depth - 1) for _ in range(self._source.randrange(3))}
        return self._values[kind]()


def flip(source: random.Random, encoded: bytes) -> bytes:
    wrong = bytearray(encoded)
    for _ in range(source.randrange(1, 4)):
        wrong[source.randrange(len(wrong))] = source.randrange(256)
    return bytes(wrong)


def truncate(source: random.Random, encoded: bytes) -> bytes:
    return encoded[: source.randrange(len(encoded))]


def extend(source: random.Random, encoded: bytes) -> bytes:
    return encoded + source.randbytes(source.randrange(1, 20))


def insert(source: random.Random, encoded: bytes) -> bytes:
    at = source.randrange(len(encoded))
    return (
        encoded[:at]
        + source.choice((b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 3000, b"\xc1"))
        + (encoded[at:])
    )


def swap_a_field(source: random.Random, encoded: bytes) -> bytes:
    fields = msgspec.msgpack.decode(encoded)
    name = source.choice(list(fields))
    fields[name] = source.choice((None, [], {}, -1, 2**64 - 1, 1e308, "", b"", [[]] * 50, "Hello", "x" * 1000))
    if source.random() < 0.2:
        del fields[name]
    return msgspec.msgpack.encode(fields)


def noise(source: random.Random, encoded: bytes) -> bytes:
    return source.randbytes(source.randrange(300))


def keep(source: random.Random, encoded: bytes) -> bytes:
    return encoded


_MUTATIONS = (flip, flip, truncate, extend, insert, swap_a_field, swap_a_field, noise, keep)


def frames_of(source: random.Random, examples: Examples, channel: m.Channel) -> list[bytes]:
    """The frames of one message on a channel: mostly as many as there should be."""
    kinds = CONTROL_KINDS if channel == m.CONTROL else DATA_KINDS
    first = examples.mutated(examples.encoded(kinds))
    drawn = source.random()
    if drawn < 0.7:
        return [first]
    if drawn < 0.8:
        return [first, source.randbytes(source.randrange(100))]
    if drawn < 0.9:
        return [MARK, source.randbytes(source.randrange(100))]
    return [source.randbytes(source.randrange(20)) for _ in range(source.randrange(6))]


# --- In memory --------------------------------------------------------------------------------------------------------


class Fuzzed:
    """A server whose sockets are not used: frames are handed to what its sockets would hand them to."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.core: ServerCore = link.core
        self.server = ZeroMQServer(link.core)

    def close(self) -> None:
        self.server.close()

    def take(self, channel: m.Channel, peer: bytes, frames: list[bytes]) -> list[Out]:
        """What the server has to say to a message."""
        return self.server.take(channel, peer, [zmq.Frame(part) for part in frames])


def is_refused(out: list[Out]) -> bool:
    return len(out) == 1 and isinstance(out[0].message, m.RefusedMessage)


def peak() -> float:
    """Megabytes that this process has held at its most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6


@pytest.fixture
def fuzzed() -> Iterator[Fuzzed]:
    with closing(Fuzzed(trained_link((0,), (1,), (2,)))) as fuzzed:
        yield fuzzed


def test_frames_of_strangers_are_refused_and_counted_beside_an_unharmed_run(fuzzed: Fuzzed) -> None:
    source = random.Random(1)
    examples, core, link = Examples(source), fuzzed.core, fuzzed.link
    twin = trained_link((0,), (1,), (2,))  # the same run, without strangers
    before, answered = peak(), 0
    for number in range(STRANGE):
        channel = source.choice((m.CONTROL, m.DATA))
        peer = b"stranger %d" % source.randrange(number + 1) if source.random() < 0.5 else b"stranger"
        counted, said = core.strangers, fuzzed.take(channel, peer, frames_of(source, examples, channel))
        assert [(out.peer, out.channel) for out in said] == [(peer, channel)], "in silence, or told to another peer"
        if core.strangers == counted:  # the answer to Hello or Attach
            challenges = (m.Challenge, m.AttachChallenge)
            message = said[0].message
            assert isinstance(message, challenges) or (
                isinstance(message, m.RefusedMessage) and message.code == "version"
            )
            answered += 1
        else:
            assert core.strangers == counted + 1
            assert is_refused(said)
        if number % 500 == 0:
            step = number // 500
            one, other = (
                each.data(step % 3, *push_of(gradient(step), read_at=each.core.store.clock)) for each in (link, twin)
            )
            assert one[1] == other[1]
            assert (one[0].clock, one[0].applied) == (step + 1, True)
    assert core.strangers > STRANGE * 0.7
    assert answered > 100, "no stranger got as far as a challenge"
    assert core.roster.over == ""
    assert core.roster.lost == {}
    assert peak() - before < 64
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(link.weights(), twin.weights(), strict=True))


def test_frames_of_admitted_ranks_are_answered_or_refused_and_end_no_server() -> None:
    source = random.Random(2)
    examples, before, ends, refused = Examples(source), peak(), 0, 0
    fuzzed = Fuzzed(trained_link((0,), (1,), (2,)))
    for _ in range(ADMITTED):
        channel, rank = source.choice((m.CONTROL, m.DATA)), source.randrange(3)
        peer = control_peer(rank) if channel == m.CONTROL else data_peer(rank)
        said = fuzzed.take(channel, peer, frames_of(source, examples, channel))
        refused += is_refused(said)
        assert all(isinstance(out.message, m.Message) for out in said)
        if fuzzed.core.roster.over or len(fuzzed.core.roster.gone | fuzzed.core.roster.lost.keys()) > 1:
            ends += 1  # it has said goodbye, or that another one was lost, as ranks may
            fuzzed.close()
            fuzzed = Fuzzed(trained_link((0,), (1,), (2,)))
    fuzzed.close()
    assert refused > ADMITTED / 2
    assert ends > 10
    assert peak() - before < 256
