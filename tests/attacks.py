"""What a process can do that reaches a server's ports and holds no key. Each kind of attack is a function of this file.

    python tests/attacks.py KIND HOST:PORT [HOST:PORT ...] [--core 1] [--count 1000]

Goes on until it is killed, and prints a line after each round. Most
kinds try both ways in: as a peer without encryption, which a server with CURVE turns away before the first message,
and as one with CURVE that has no key, which can say whatever it likes in the place of a handshake.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Address = tuple[str, int]
Item = TypeVar("Item")

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a ZMTP frame."""
PATIENCE = 0.2
"""Seconds for which a send or a connect may block; the server may have better things to do than to read."""
ROUND = 0.1
"""Seconds of a round, about: what is not done by then waits for the next one, which begins where this one ended."""
MEGABYTE = 1_000_000
MECHANISMS = (b"NULL", b"CURVE")
"""The two ways in: without encryption, and with one that needs a key."""
ESCAPES = "\n\r\x1b[2J\x1b[31mWARNING lightning_omni: rank 0 was admitted from elsewhere\x1b]0;title\x07\u2028"
"""Text that would forge lines, clear the screen and rename the window, if a log or a terminal took it as it is."""


# --- ZMTP by hand ----------------------------------------------------------------------------------------------------


def greeting(mechanism: bytes = b"NULL") -> bytes:
    """The 64 bytes with which a ZMTP 3.1 connection begins."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def head(nbytes: int, flags: int = 0) -> bytes:
    """The head of a frame of that many bytes, all of which may follow or not."""
    if nbytes < 256:
        return bytes((flags, nbytes))
    return bytes((flags | LONG,)) + struct.pack(">Q", nbytes)


def frame(body: bytes, flags: int = 0) -> bytes:
    """A whole frame."""
    return head(len(body), flags) + body


READY = frame(b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + bytes(4), COMMAND)


def text(value: str) -> bytes:
    """A string as MessagePack."""
    raw = value.encode()
    return (b"\xdb" + struct.pack(">I", len(raw))) + raw


def hello(run: str = "a run", rank: int = 0, version: int = 3) -> bytes:
    """A Hello, as any reader of the source can write it."""
    fields = {"type": "Hello", "run": run, "fingerprint": "f" * 64}
    body = b"".join(text(name) + text(value) for name, value in fields.items())
    numbers = {"version": version, "rank": rank, "world_size": 1, "tensors": 1, "numbers": 1}
    body += b"".join(text(name) + struct.pack(">BH", 0xCD, value) for name, value in numbers.items())
    return b"\x89" + body + text("nonce") + b"\xc4\x20" + os.urandom(32)


def connect(address: Address) -> socket.socket:
    """A TCP connection, with nothing said yet."""
    return socket.create_connection(address, timeout=PATIENCE)


def stranger(address: Address, mechanism: bytes = b"NULL") -> socket.socket:
    """A connection as far as it gets without a key: past the handshake if the server knows no encryption."""
    wire = connect(address)
    try:
        wire.sendall(greeting(mechanism) + (READY if mechanism == b"NULL" else b""))
        if mechanism == b"NULL":
            _read(wire, len(greeting()))
            _read(wire, _read(wire, 2)[1])  # its READY, before which nothing else is taken
    except OSError:
        wire.close()
        raise
    return wire


def say(address: Address, *said: bytes, mechanism: bytes = b"NULL", wait: bool = True) -> None:
    """Says that as a stranger, and waits until the other side has hung up or has had a moment to read it."""
    with contextlib.suppress(OSError), stranger(address, mechanism) as wire:
        wire.sendall(b"".join(said))
        wire.shutdown(socket.SHUT_WR)
        while wait and wire.recv(1 << 16):
            pass


def replay(address: Address, heard: bytes) -> bytes:
    """Says, frame by frame and no faster than it is answered, what another connection has said; returns the answers."""
    answers, position = b"", len(greeting())
    with contextlib.suppress(OSError), connect(address) as wire:
        wire.sendall(heard[:position])
        for number in itertools.count():
            if position >= len(heard):
                break
            width = 8 if heard[position] & LONG else 1
            start = position + 1 + width
            end = start + int.from_bytes(heard[position + 1 : start], "big")
            wire.sendall(heard[position:end])
            position = end
            # The first ones are handshakes, which wait for their answers.
            if select.select([wire], [], [], 0.1 if number < 8 else 0.0)[0]:
                if not (answer := wire.recv(1 << 20)):
                    break
                answers += answer
        wire.settimeout(0.2)
        while answer := wire.recv(1 << 20):
            answers += answer
    return answers


def close(held: Sequence[socket.socket]) -> None:
    """Closes all."""
    for wire in held:
        wire.close()


def _read(wire: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        if not (more := wire.recv(nbytes - len(data))):
            raise ConnectionResetError
        data += more
    return data


def in_time(items: Iterable[Item]) -> Iterator[Item]:
    """Items until a round's time is up."""
    until = time.monotonic() + ROUND
    for item in items:
        yield item
        if time.monotonic() > until:
            return


# --- The kinds: generators, one item a round --------------------------------------------------------------------------


def fat_hellos(addresses: Sequence[Address]) -> Iterator[None]:
    """24 Hellos with 50 MB in one field, each on a connection of its own that stays."""
    fat = hello(run="x" * (50 * MEGABYTE))
    while True:
        held = []
        ways = ((b"NULL", 0, b""), (b"CURVE", COMMAND, b"\x05HELLO"))
        for _, (mechanism, flags, start) in in_time(itertools.product(range(24), ways)):
            with contextlib.suppress(OSError):
                held.append(stranger(addresses[0], mechanism))
                held[-1].sendall(head(len(start) + len(fat), flags) + start)
                held[-1].sendall(fat)
        yield None
        close(held)


def endless_message(addresses: Sequence[Address]) -> Iterator[None]:
    """One message of ever more frames, 256 MB of them: a limit on a frame's size is none on the message's."""
    part = frame(bytes(32_000), MORE) * 8
    while True:
        held = []
        for address, mechanism in itertools.product(addresses, MECHANISMS):
            with contextlib.suppress(OSError):
                held.append(stranger(address, mechanism))
                for _ in in_time(range(1_000)):
                    held[-1].sendall(part)
        yield None
        close(held)


def unfinished_frames(addresses: Sequence[Address]) -> Iterator[None]:
    """Frames that lack their last byte: of 60 MB, and of what a limit may still allow."""
    most = memoryview(bytes(60 * MEGABYTE))
    ways = itertools.cycle(itertools.product(addresses, MECHANISMS, (500_000, 60 * MEGABYTE, 1_000_000, 64_000)))
    while True:
        held: list[socket.socket] = []
        for _ in in_time(range(400)):
            address, mechanism, size = next(ways)
            with contextlib.suppress(OSError):
                held.append(stranger(address, mechanism))
                held[-1].sendall(head(size, 0 if mechanism == b"NULL" else COMMAND))
                held[-1].sendall(most[: size - 1])
        yield None
        close(held)


def many_hellos(addresses: Sequence[Address]) -> Iterator[None]:
    """Hello after Hello: 5,000 from one connection, and one from each of 1,000 that stay."""
    many = b"".join(frame(hello(rank=rank)) for rank in range(5_000))
    while True:
        held: list[socket.socket] = []
        say(addresses[0], many)
        for number, mechanism in in_time(itertools.product(range(500), MECHANISMS)):
            with contextlib.suppress(OSError):
                held.append(stranger(addresses[0], mechanism))
                held[-1].sendall(frame(hello(rank=number), 0 if mechanism == b"NULL" else COMMAND))
        yield None
        close(held)


def idle_connections(addresses: Sequence[Address], count: int = 1000) -> Iterator[None]:
    """Connections that stay, each at another point of the greeting and the handshake. Those that are cut come again."""
    openings = (b"", greeting()[:20], greeting(b"CURVE"), greeting() + READY)
    source = itertools.cycle(itertools.product(addresses, openings))
    held: dict[int, socket.socket] = {}
    poll = select.poll()
    while True:
        for _ in in_time(range(count - len(held))):
            address, opening = next(source)
            try:
                wire = connect(address)
                wire.sendall(opening)
            except OSError:
                break  # the server is slow to take more: those that it has go on
            held[wire.fileno()] = wire
            poll.register(wire, select.POLLIN | select.POLLHUP)
        yield None
        for number, _ in poll.poll(50):
            try:
                over = not held[number].recv(1 << 16)
            except OSError:
                over = True
            if over:
                poll.unregister(number)
                held.pop(number).close()


def churn(addresses: Sequence[Address]) -> Iterator[None]:
    """Connections as fast as they can be made, and no longer than it takes to make the next ones."""
    openings = itertools.cycle((b"", greeting(), greeting(b"CURVE") + frame(b"\x05HELLO" + bytes(194), COMMAND)))
    while True:
        for _ in in_time(range(50)):
            held = []
            for address in addresses:
                with contextlib.suppress(OSError):
                    held.append(connect(address))
                    held[-1].sendall(next(openings))
            close(held)
        yield None


def forged_logs(addresses: Sequence[Address]) -> Iterator[None]:
    """10 MB of names and types, full of line ends and escape codes, each on a connection of its own."""
    kind = text(ESCAPES * 500)
    said = b"\x81" + text("type") + kind
    while True:
        for number in in_time(range(10 * MEGABYTE // len(said))):
            say(addresses[number % len(addresses)], frame(said), wait=number % 16 == 15)
            if number % 8 == 0:
                # What a log might tell of a failed handshake: the mechanism's name, a command's name.
                say(addresses[0], mechanism=ESCAPES.encode()[:20])
                say(addresses[0], frame(b"\x40" + ESCAPES.encode()[:64], COMMAND), mechanism=b"CURVE")
        yield None


def garbage(addresses: Sequence[Address]) -> Iterator[None]:
    """Greetings of other protocols, of older ones, halves of greetings, and noise."""
    source = random.Random(0)
    openings = (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"\x01\x00" + frame(hello()),  # ZMTP 1.0, which has no security
        b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00" + frame(hello()),  # ZMTP 2.0
        greeting(b"PLAIN") + frame(b"\x05HELLO\x01a\x01b", COMMAND),
        greeting(b"CURVE") + frame(b"\x05HELLO" + bytes(194), COMMAND),
        greeting(b"CURVE") + frame(b"\x08INITIATE" + bytes(500), COMMAND),
        greeting()[:-1] + b"\x01",
        b"\xff" * 64,
    )
    while True:
        for address, opening in in_time(itertools.product(addresses, openings)):
            with contextlib.suppress(OSError), connect(address) as wire:
                wire.sendall(opening + source.randbytes(source.randrange(3000)))
        yield None


def spin(addresses: Sequence[Address]) -> Iterator[None]:
    """No attack: it only takes the time of its core, and is what an attacker is compared with."""
    while True:
        sum(range(1_000_000))
        yield None


def every_kind(addresses: Sequence[Address]) -> Iterator[None]:
    """All of them alternately, from one process."""
    kinds = [KINDS[name](addresses) for name in STRANGERS]
    while True:
        for kind in kinds:
            next(kind)
        yield None


Kind = Callable[[Sequence[Address]], Iterator[None]]
KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        fat_hellos,
        endless_message,
        unfinished_frames,
        many_hellos,
        idle_connections,
        churn,
        forged_logs,
        garbage,
        every_kind,
        spin,
    )
}
STRANGERS = tuple(name for name in KINDS if name not in ("every_kind", "spin"))


def parse(address: str) -> Address:
    """``host:port`` or ``tcp://host:port``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def main() -> None:
    """Attacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("addresses", nargs="+", type=parse)
    parser.add_argument("--core", type=int, help="take this core, and no other")
    parser.add_argument("--count", type=int, help="connections that idle_connections holds")
    options = parser.parse_args()
    if options.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {options.core})
    if options.count is not None:
        rounds = idle_connections(options.addresses, options.count)
    else:
        rounds = KINDS[options.kind](options.addresses)
    for number, _ in enumerate(rounds, start=1):
        sys.stdout.write(f"{options.kind} round {number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
