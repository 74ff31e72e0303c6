"""Push + pull + update of a model: over ipc, over loopback TCP, and over TCP with CURVE, against raw TCP, in one run.

    python tests/benchmarks/transport.py [--megabytes 100 0.1] [--repeats 31]

For each size: medians, and the median over repeats of each way's time over that of plain TCP in the same repeat, with
the quartiles. The ways take turns, so that a busy moment of the machine hits all of them. Promised are at most 1 for
ipc, and at most 2 times the floor for the largest size: raw TCP both ways plus one fused step.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_omni.methods import AsyncSGD
from lightning_omni.methods.master import describe, hyperparameters_of
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import pack
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.transport import from_wire, to_wire
from lightning_omni.server import ServerProcess, ZeroMQ
from lightning_omni.server.keys import new_key
from lightning_omni.server.process import ServerSettings

Once = Callable[[], None]
PLAIN = "TCP"
WAYS: dict[str, dict[str, Any]] = {
    "shared memory": {"host": ""},
    "ipc": {"host": "", "transport": to_wire(ZeroMQ(shared_memory=False))},
    PLAIN: {"host": "127.0.0.1", "transport": to_wire(ZeroMQ(encryption="off"))},
    "TCP with CURVE": {"host": "127.0.0.1"},
}
"""Settings of the server for each way."""
UNTIMED = 3
"""First exchanges, in which memory is found."""


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


@contextmanager
def exchange(nbytes: int, **way: Any) -> Iterator[Once]:
    """Push + update + pull through a real server process, from gradients to weights."""
    weight = torch.nn.Parameter(torch.zeros(nbytes // 4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    layout = Layout.of({"weight": weight.detach()})
    key = new_key()
    process = ServerProcess(
        ServerSettings(
            key=key.hex(), port=0, heartbeat_timeout=30.0, join_timeout=60.0, threads=1, allow_optimizers=(), **way
        )
    )
    transport = from_wire(way.get("transport", to_wire(ZeroMQ())))
    control = transport.join(process.address(), key, secrets.token_hex(8), 0, 1, layout)
    data = control.attach()
    control.request(m.Form(generation=0, groups=((0,),), method=m.method_to_wire(AsyncSGD())), m.Formed)
    part = {"optimizer": describe(optimizer, {weight: "weight"}), "weights": {"weight": weight.detach()}, "clock": 0}
    packed, buffer = pack({"parts": [part]})
    data.exchange(m.Seed(packed=packed, nbytes=buffer.numel()), m.Seeded, buffer)
    weight.grad = torch.ones_like(weight)
    out, into = control.empty(layout.nbytes), control.empty(layout.nbytes)
    clock = pushes = 0

    def once() -> None:
        nonlocal clock, pushes
        pushes += 1
        assert weight.grad is not None
        layout.views(out)[0].copy_(weight.grad)
        push = m.PushMessage(
            optimizer=0,
            read_at=clock,
            present=(True,),
            hyperparameters=tuple(hyperparameters_of(optimizer)),
            epoch=-1,
            trained=0,
            nbytes=layout.nbytes,
            incarnation=1,
            sequence=pushes,
        )
        answer, payload = data.exchange(push, m.Weights, out, into)
        with torch.no_grad():
            weight.copy_(layout.views(payload)[0])
        clock = answer.clock

    try:
        yield once
    finally:
        data.close()
        control.close("")
        process.stop()


def measure(nbytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, repeat by repeat."""
    with ExitStack() as stack:
        ways = {"raw TCP there and back": stack.enter_context(raw_tcp(nbytes)), "fused step": fused_step(nbytes)}
        for name, way in WAYS.items():
            ways[name] = stack.enter_context(exchange(nbytes, **way))
        times: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for repeat in range(repeats + UNTIMED):
            names = names[1:] + names[:1]  # no transport always comes after the same one
            for name in names:
                began = time.perf_counter()
                ways[name]()
                if repeat >= UNTIMED:
                    times[name].append(time.perf_counter() - began)
    return times


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100.0, 0.1])
    parser.add_argument("--repeats", type=int, default=31)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for megabytes in arguments.megabytes:
        nbytes = int(megabytes * 1_000_000) // 4 * 4
        # The smaller the model, the more often: each exchange of a small one is at the mercy of the scheduler.
        repeats = arguments.repeats if megabytes > 10 else 20 * arguments.repeats
        times = measure(nbytes, repeats)
        medians = {name: statistics.median(each) for name, each in times.items()}
        print(f"{megabytes:g} MB, {repeats} repeats")
        for name, middle in medians.items():
            line = f"  {name:24}{middle * 1e3:9.2f} ms"
            if name in WAYS and name != PLAIN:
                pairs = [one / other for one, other in zip(times[name], times[PLAIN], strict=True)]
                low, half, high = statistics.quantiles(pairs, n=4)
                line += f"   {half:.2f} of {PLAIN}, quartiles {low:.2f} and {high:.2f}"
            print(line)
        floor = medians["raw TCP there and back"] + medians["fused step"]
        print(f"  {PLAIN} over its floor {medians[PLAIN] / floor:.2f}")


if __name__ == "__main__":
    main()
