"""Push + pull + update of a model over TCP against its floor, raw TCP both ways plus one fused step, in one run.

    python tests/benchmarks/transport.py [--megabytes 100] [--repeats 15]

Prints medians, and the ratio of the medians; the promise is a ratio of at most 2.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time

import torch

from lightning_omni.methods import AsyncSGD
from lightning_omni.methods.master import describe, hyperparameters_of
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import pack
from lightning_omni.protocol.layout import Layout
from lightning_omni.server import ControlConnection, DataConnection, ServerProcess
from lightning_omni.server.keys import new_key
from lightning_omni.server.process import Settings


def raw_tcp(nbytes: int, repeats: int) -> list[float]:
    """Seconds for ``nbytes`` there and ``nbytes`` back over a loopback socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        peer, _ = listener.accept()
        buffer = bytearray(nbytes)
        with peer:
            for _ in range(repeats):
                receive(peer, buffer)
                peer.sendall(buffer)

    def receive(peer: socket.socket, into: bytearray) -> None:
        view, got = memoryview(into), 0
        while got < nbytes:
            got += peer.recv_into(view[got:])

    thread = threading.Thread(target=echo)
    thread.start()
    times = []
    with socket.create_connection(listener.getsockname()) as wire:
        there, back = bytearray(nbytes), bytearray(nbytes)
        for _ in range(repeats):
            began = time.perf_counter()
            wire.sendall(there)
            receive(wire, back)
            times.append(time.perf_counter() - began)
    thread.join()
    listener.close()
    return times


def fused_step(nbytes: int, repeats: int) -> list[float]:
    """Seconds for one fused SGD step with momentum."""
    weight = torch.nn.Parameter(torch.zeros(nbytes // 4))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return times


def exchange(nbytes: int, repeats: int) -> list[float]:
    """Seconds for push + update + pull through a real server process, from gradients to weights."""
    numbers = nbytes // 4
    weight = torch.nn.Parameter(torch.zeros(numbers))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    layout = Layout.of({"weight": weight.detach()})
    key = new_key()
    settings = Settings(key.hex(), "127.0.0.1", 0, 30.0, 60.0, 1, ())
    process = ServerProcess(settings)
    control = ControlConnection(process.address(), key, "bench", 0, 1, layout)
    data = DataConnection(control.session, control.check)
    control.request(m.Form(generation=0, groups=((0,),), method=m.method_to_wire(AsyncSGD())), m.Formed)
    part = {"optimizer": describe(optimizer, {weight: "weight"}), "weights": {"weight": weight.detach()}, "clock": 0}
    packed, buffer = pack({"parts": [part]})
    data.exchange(m.Seed(packed=packed, nbytes=buffer.numel()), m.Seeded, buffer)
    weight.grad = torch.ones_like(weight)
    out, into = layout.empty(), layout.empty()
    clock, times = 0, []
    for _ in range(repeats):
        began = time.perf_counter()
        layout.views(out)[0].copy_(weight.grad)
        push = m.PushMessage(
            optimizer=0,
            read_at=clock,
            present=(True,),
            hyperparameters=tuple(hyperparameters_of(optimizer)),
            epoch=-1,
            trained=0,
            nbytes=layout.nbytes,
        )
        answer, payload = data.exchange(push, m.Weights, out, into)
        with torch.no_grad():
            weight.copy_(layout.views(payload)[0])
        clock = answer.clock
        times.append(time.perf_counter() - began)
    data.close()
    control.close("")
    process.stop()
    return times


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nbytes = arguments.megabytes * 1_000_000
    ours, tcp, step = [], [], []
    for _ in range(3):  # interleaved, so that a busy moment of the machine hits all three
        tcp += raw_tcp(nbytes, arguments.repeats)[2:]
        step += fused_step(nbytes, arguments.repeats)[2:]
        ours += exchange(nbytes, arguments.repeats)[2:]
    floor = statistics.median(tcp) + statistics.median(step)
    mine = statistics.median(ours)
    print(f"raw TCP there and back {statistics.median(tcp) * 1e3:.1f} ms")
    print(f"fused step             {statistics.median(step) * 1e3:.1f} ms")
    print(f"push + update + pull   {mine * 1e3:.1f} ms")
    print(f"ratio {mine / floor:.2f} (at most 2 is promised)")


if __name__ == "__main__":
    main()
