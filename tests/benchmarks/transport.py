"""Push + step + pull of a model: through shared memory, by socket, over TCP, with CURVE, each against its floor.

    python tests/benchmarks/transport.py [--megabytes 100 1] [--repeats 31] [--groups 4] [--ways "shared memory" TCP]

Printed are medians, and the median over repeats of each way's time over that of its floor in the same repeat, with the
quartiles. The ways take turns, so that a busy moment of the machine hits all of them. An exchange begins with the
gradient where backward left it and ends with the weights in the model. The floors:

- on one machine, one fused SGD step with momentum and the copies that must be: of the gradient into shared memory, from
  there into the server's own (or it could change once it was checked), of the weights into shared memory (or they would
  change while they are read), and from there into the model. Promised: at most 1.3 times that, for one group and, of
  several groups at once, for each.
- over TCP, the same bytes there and back over a raw loopback socket, and one step. Promised: 1.25 times, in the clear.
- of a model of a megabyte or less, the round trip of a push of nothing, which is answered with nothing, on the same
  connection. Promised: 3 times. Beside it stands what a message of nothing takes over two such sockets and no more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import zmq

from lightning_omni.methods import AsyncSGD
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of
from lightning_omni.transport.registry import from_wire, to_wire
from lightning_omni.transport.serving import ServerProcess
from lightning_omni.transport.serving.process import ServerSettings
from lightning_omni.transport.zeromq import ZeroMQ, shared_memory
from lightning_omni.transport.zeromq.keys import new_key
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack
from lightning_omni.wire.layout import Layout

Once = Callable[[], None]
PLAIN = "TCP"
WAYS: dict[str, dict[str, Any]] = {
    "shared memory": {"host": ""},
    "ipc": {"host": "", "transport": to_wire(ZeroMQ(shared_memory=False))},
    PLAIN: {"host": "127.0.0.1", "transport": to_wire(ZeroMQ(encryption="off"))},
    "TCP with CURVE": {"host": "127.0.0.1"},
}
"""Settings of the server for each way."""
COPIES, RAW_TCP, STEP, SOCKETS = "copies", "raw TCP there and back", "fused step", "nothing, over two sockets"
FLOORS: Mapping[str, Sequence[str]] = dict.fromkeys(WAYS, (RAW_TCP, STEP)) | {"shared memory": (COPIES, STEP)}
UNTIMED = 3
"""First exchanges, in which memory is found."""
SMALL = 2_000_000
"""Bytes up to which a model is compared with an empty message."""


# --- Floors ----------------------------------------------------------------------------------------------------------


@contextmanager
def raw_tcp(nbytes: int) -> Iterator[Once]:
    """``nbytes`` there and ``nbytes`` back over a loopback socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def receive(peer: socket.socket, into: bytearray) -> bool:
        view, got = memoryview(into), 0
        while got < nbytes:
            more = peer.recv_into(view[got:])
            if more == 0:
                return False
            got += more
        return True

    def echo() -> None:
        peer, _ = listener.accept()
        buffer = bytearray(nbytes)
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while receive(peer, buffer):
                peer.sendall(buffer)

    thread = threading.Thread(target=echo)
    thread.start()
    there, back = bytearray(nbytes), bytearray(nbytes)
    with listener, socket.create_connection(listener.getsockname()) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def once() -> None:
            wire.sendall(there)
            receive(wire, back)

        yield once
    thread.join()


def fused_step(nbytes: int) -> Once:
    """One fused SGD step with momentum."""
    weight = torch.nn.Parameter(torch.zeros(nbytes // 4))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)

    def once() -> None:
        optimizer.step()

    return once


def copies(nbytes: int) -> Once:
    """The gradient into shared memory and out of it again, the weights likewise."""
    gradient, own, master, weights = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(4))
    push, answer = (shared_memory.shared_zeros(nbytes) for _ in range(2))

    def once() -> None:
        push.copy_(gradient)
        own.copy_(push)
        answer.copy_(master)
        weights.copy_(answer)

    return once


def _echo(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as wire:
        wire.bind(address)
        while len((frames := wire.recv_multipart())[-1]) == 0:
            wire.send_multipart(frames)


@contextmanager
def empty_message() -> Iterator[Once]:
    """A message of nothing to another process and back, over the sockets that the data connection has."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        process = multiprocessing.get_context("spawn").Process(target=_echo, args=(f"ipc://{folder}/echo",))
        process.start()
        with context.socket(zmq.DEALER) as wire:
            wire.connect(f"ipc://{folder}/echo")

            def once() -> None:
                wire.send(b"")
                wire.recv()

            once()
            yield once
            wire.send(b"end")
            process.join()


# --- Exchanges -------------------------------------------------------------------------------------------------------


def join(
    address: str, key: bytes, run: str, rank: int, groups: int, transport: dict[str, Any], nbytes: int, all_in: Once
) -> tuple[Once, Once, Once]:
    """Joins as a group of one rank. Returns one exchange, from gradient to weights; one of nothing; and the end."""
    weight = torch.nn.Parameter(torch.zeros(nbytes // 4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    layout = Layout.of({"weight": weight.detach()})
    control = from_wire(transport).join(address, key, run, rank, groups, layout)
    data = control.attach()
    all_in()
    if rank == 0:
        form = m.FormGroups(generation=0, groups=tuple((each,) for each in range(groups)), method=to_wire(AsyncSGD()))
        control.request(form, m.GroupsFormed)
        described = describe(optimizer, {weight: "weight"})
        part = {"optimizer": described, "weights": {"weight": weight.detach()}, "clock": 0}
        packed, buffer = pack({"parts": [part]})
        data.exchange(m.UploadWeights(packed=packed, nbytes=buffer.numel()), m.WeightsUploaded, buffer)
    all_in()
    weight.grad = torch.ones_like(weight)
    out, into = control.empty(layout.nbytes), control.empty(layout.nbytes)
    clock = pushes = 0

    def push(there: bool) -> m.PushMessage:
        nonlocal pushes
        pushes += 1
        return m.PushMessage(
            optimizer=0,
            read_at=clock,
            present=(there,),
            hyperparameters=tuple(hyperparameters_of(optimizer)),
            epoch=-1,
            trained=0,
            nbytes=layout.nbytes if there else 0,
            pull=there,
            incarnation=1,
            sequence=pushes,
        )

    def once() -> None:
        nonlocal clock
        assert weight.grad is not None
        layout.views(out)[0].copy_(weight.grad)
        answer, payload = data.exchange(push(there=True), m.Weights, out, into)
        with torch.no_grad():
            weight.copy_(layout.views(payload)[0])
        clock = answer.clock

    def nothing() -> None:
        nonlocal clock
        clock = data.exchange(push(there=False), m.Weights)[0].clock

    def end() -> None:
        data.close()
        control.close("")

    return once, nothing, end


@contextmanager
def serve(nbytes: int, **way: Any) -> Iterator[tuple[Any, ...]]:
    """A real server process, and what `join` wants to know of it."""
    key = new_key()
    process = ServerProcess(
        ServerSettings(
            key=key.hex(), port=0, heartbeat_timeout=30.0, join_timeout=60.0, threads=1, allow_optimizers=(), **way
        )
    )
    try:
        yield process.address(), key, secrets.token_hex(8), way.get("transport", to_wire(ZeroMQ())), nbytes
    finally:
        process.stop()


@contextmanager
def exchange(nbytes: int, **way: Any) -> Iterator[tuple[Once, Once]]:
    """Push + update + pull of one group; and the same of nothing."""
    with serve(nbytes, **way) as (address, key, run, transport, _):
        once, nothing, end = join(address, key, run, 0, 1, transport, nbytes, lambda: None)
        yield once, nothing
        end()


def _group(address: str, key: bytes, run: str, transport: dict[str, Any], nbytes: int, rank: int, meet: Any) -> None:
    torch.set_num_threads(1)
    once, _, end = join(address, key, run, rank, meet.parties - 1, transport, nbytes, meet.wait)
    with suppress(threading.BrokenBarrierError):
        while True:
            meet.wait()
            once()
            meet.wait()
    end()


@contextmanager
def exchanges(nbytes: int, groups: int, **way: Any) -> Iterator[Once]:
    """The same of several groups at once, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    meet = spawn.Barrier(groups + 1)
    with serve(nbytes, **way) as known:
        processes = [spawn.Process(target=_group, args=(*known, rank, meet)) for rank in range(groups)]
        for process in processes:
            process.start()
        meet.wait()
        meet.wait()

        def once() -> None:
            meet.wait()
            meet.wait()

        yield once
        meet.abort()
        for process in processes:
            process.join()


# --- Measured --------------------------------------------------------------------------------------------------------


def measure(nbytes: int, repeats: int, chosen: Sequence[str], groups: int) -> dict[str, list[float]]:
    """Seconds of each way, repeat by repeat."""
    with ExitStack() as stack:
        ways: dict[str, Once] = {STEP: fused_step(nbytes)}
        if nbytes <= SMALL:
            ways[SOCKETS] = stack.enter_context(empty_message())
        for name in chosen:
            if COPIES in FLOORS[name]:
                ways[COPIES] = copies(nbytes)
            else:
                ways.setdefault(RAW_TCP, stack.enter_context(raw_tcp(nbytes)))
            ways[name], nothing = stack.enter_context(exchange(nbytes, **WAYS[name]))
            if nbytes <= SMALL:
                ways[_nothing(name)] = nothing
        if groups > 1 and chosen:
            ways[_several(groups, chosen[0])] = stack.enter_context(exchanges(nbytes, groups, **WAYS[chosen[0]]))
        times: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for repeat in range(repeats + UNTIMED):
            names = names[1:] + names[:1]  # none always comes after the same one
            for name in names:
                began = time.perf_counter()
                ways[name]()
                if repeat >= UNTIMED:
                    times[name].append(time.perf_counter() - began)
    return times


def _nothing(way: str) -> str:
    return f"nothing, {way}"


def _several(groups: int, way: str) -> str:
    return f"{groups} groups, {way}"


def tell(name: str, times: dict[str, list[float]], floor: Sequence[str], factor: int = 1) -> str:
    """A way's time over that of its floor."""
    below = [factor * sum(each) for each in zip(*(times[part] for part in floor), strict=True)]
    low, half, high = statistics.quantiles([one / other for one, other in zip(times[name], below, strict=True)], n=4)
    times_ = f"{factor} x (" if factor > 1 else ""
    return f"{half:.2f} of {times_}{' + '.join(floor)}{')' if times_ else ''}, quartiles {low:.2f} and {high:.2f}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100.0, 1.0])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for megabytes in arguments.megabytes:
        nbytes = int(megabytes * 1_000_000) // 4 * 4
        # The smaller the model, the more often: each exchange of a small one is at the mercy of the scheduler.
        repeats = arguments.repeats if megabytes > 10 else 20 * arguments.repeats
        times = measure(nbytes, repeats, arguments.ways, arguments.groups)
        print(f"{megabytes:g} MB, {repeats} repeats")
        for name, each in times.items():
            told = []
            if name in WAYS:
                told.append(tell(name, times, FLOORS[name]))
                told += [tell(name, times, [PLAIN])] if PLAIN in times and name != PLAIN else []
                if _nothing(name) in times:
                    told += [tell(name, times, [_nothing(name)]), tell(name, times, [SOCKETS])]
            elif name == _several(arguments.groups, arguments.ways[0]):
                told.append(tell(name, times, FLOORS[arguments.ways[0]], arguments.groups))
            print(f"  {name:30}{statistics.median(each) * 1e3:9.2f} ms   {'; '.join(told)}".rstrip())


if __name__ == "__main__":
    main()
