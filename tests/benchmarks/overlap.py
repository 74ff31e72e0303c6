"""How much of an exchange is hidden behind the next step: two real groups over ZeroMQ, with an emulated step.

    OMP_NUM_THREADS=1 python tests/benchmarks/overlap.py [--megabytes 20] [--steps 30] [--rounds 5]
    OMP_NUM_THREADS=1 python tests/benchmarks/overlap.py --ways link --mbit 400 --megabytes 4    # Linux, as root

A step makes a gradient and, for the rest of its time, sleeps, so that the processor is free as it is beside an
accelerator. In each round it is measured how long the groups take for a step without any exchange; how long an exchange
(push, a step of SGD with momentum at the server, pull) makes one that does not sleep; and then, sleeping for 1.2 times
the latter, how much longer a step takes with an exchange, without and with ``overlap=True``. Told are the medians over
the rounds, and the part of the exchange that is hidden, with quartiles. Wanted are 80 %. What cannot be hidden are a
group's own copies: of the gradient into memory from which it is sent, and of the weights into the model; told is what
they take, too. In shared memory, where little else is to be done, they are a good part of the exchange. With
``link`` the groups and a standalone server are on hosts of their own (network namespaces), whose links are as fast as
``--mbit`` says: there an exchange is waiting, and not work that shares two cores with all others.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "studies"))

from emulated_network import Hosts, Network
from runs import free_port

from lightning_omni import OmniOptimizer, Server, World
from lightning_omni.runtime import WorldOptions
from lightning_omni.transport.zeromq import ZeroMQ

GROUPS, LONGER, WANTED = 2, 1.2, 0.8
LINK, PORT = "link", 29500
TRANSPORTS = {"shared memory": ZeroMQ(), "sockets": ZeroMQ(shared_memory=False), LINK: ZeroMQ()}
SERVE = "from lightning_omni.cli import main; raise SystemExit(main())"


class Group:
    """One group of one rank, which exchanges so many numbers with a server of its own, or with that at an address."""

    def __init__(self, numbers: int, steps: int, transport: ZeroMQ, server: str | None) -> None:
        self.numbers, self.steps, self.transport, self.server = numbers, steps, transport, server

    def step(self, exchanges: bool = True, overlap: bool = False, seconds: float = 0.0) -> float:
        """Median time of a step that sleeps for so many seconds; that of the slowest group, on all of them."""
        options = WorldOptions(
            groups=GROUPS, overlap=overlap, server=Server(transport=self.transport, address=self.server)
        )
        world = World(options=options)
        weight = nn.Parameter(torch.zeros(self.numbers))
        world.wrapper.broadcast_initial(nn.ParameterList([weight]))
        optimizer = OmniOptimizer(torch.optim.SGD([weight], lr=1e-3, momentum=0.9), world)
        took = []
        with world.training():
            for _ in range(self.steps):
                began = time.perf_counter()
                time.sleep(seconds)
                weight.grad = torch.ones_like(weight)
                if exchanges:
                    optimizer.step()
                took.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(took[3:]))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def copies(self) -> float:
        """Median time of what each exchange copies in the group itself."""
        one, other = torch.zeros(self.numbers), torch.zeros(self.numbers)
        took = []
        for _ in range(self.steps):
            began = time.perf_counter()
            other.copy_(one)
            one.copy_(other)
            took.append(time.perf_counter() - began)
        return statistics.median(took)


def measure(
    rank: int, address: str, port: int, way: str, numbers: int, steps: int, rounds: int, server: str | None = None
) -> None:
    """One rank. Rank 0 prints."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=GROUPS)
    group = Group(numbers, steps, TRANSPORTS[way], server)
    found = []
    for _ in range(rounds):
        exchange = group.step() - group.step(exchanges=False)
        sleep = LONGER * exchange
        alone, apart = group.step(exchanges=False, seconds=sleep), group.step(seconds=sleep)
        beside = group.step(overlap=True, seconds=sleep)
        hidden, kept = (apart - beside) / (apart - alone), group.copies() / (apart - alone)
        found.append((exchange * 1e3, alone * 1e3, apart * 1e3, beside * 1e3, hidden, kept))
    if rank == 0:
        exchange, alone, apart, beside, hidden, kept = map(statistics.median, zip(*found, strict=True))
        low, _, high = statistics.quantiles([each[4] for each in found], n=4)
        print(f"{way}, {numbers * 4e-6:g} MB, {GROUPS} groups, {rounds} rounds: exchange {exchange:.1f} ms", end="; ")
        print(f"step {alone:.1f} ms, and with it {apart:.1f}, overlapping {beside:.1f}", end=": ")
        print(f"{hidden:.0%} hidden ({low:.0%} to {high:.0%}), {WANTED:.0%} are wanted; own copies are {kept:.0%}")
    dist.destroy_process_group()


def measure_on_hosts(arguments: argparse.Namespace) -> None:
    """Two groups and a server on hosts of their own."""
    command = [sys.executable, __file__, "--ways", LINK, "--megabytes", str(arguments.megabytes)]
    command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    environment = {"LIGHTNING_OMNI_KEY": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    with Hosts(Network(sites=(GROUPS + 1,), host_mbit=arguments.mbit)) as hosts:
        own = hosts.addresses[GROUPS]
        serve = [sys.executable, "-c", SERVE, "serve", "--host", own, "--port", "5555"]
        server = hosts.start(GROUPS, serve, environment, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        line = server.stderr.readline()
        assert "parameter server on" in line, line
        address = ["--address", hosts.addresses[0], "--server", f"tcp://{own}:5555"]
        ranks = [hosts.start(rank, [*command, "--rank", str(rank), *address], environment) for rank in range(GROUPS)]
        for rank in ranks:
            assert rank.wait() == 0


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=400.0, help="of each host's link, in each direction")
    parser.add_argument("--ways", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS)[:-1])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    numbers = int(arguments.megabytes * 1e6 / 4)
    if arguments.rank is not None:
        sizes = numbers, arguments.steps, arguments.rounds
        measure(arguments.rank, arguments.address, PORT, LINK, *sizes, server=arguments.server)
        return
    for way in arguments.ways:
        if way == LINK:
            measure_on_hosts(arguments)
            continue
        given = "127.0.0.1", free_port(), way, numbers, arguments.steps, arguments.rounds
        ranks = [mp.get_context("spawn").Process(target=measure, args=(rank, *given)) for rank in range(GROUPS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
