"""One server against one on each node, and torch's PostLocalSGD: four hosts with links of 100 Mbit, a model of 10 MB.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/servers.py --mbit 100 --rounds 3

Hosts are network namespaces on this machine (Linux; root, or a system that allows user namespaces). Each is one group
of one rank, which makes local steps of SGD and averages the weights every eighth. Printed are, of the timed steps:
bytes that the busiest link carried in its busier direction, seconds of the slowest group's exchange, and seconds of a
step. What torch sends is not encrypted; ``--encryption off`` compares like with like.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "studies"))

from emulated_network import Hosts, Network, with_own_network  # noqa: E402

HOSTS, PORT = 4, 29_610
WAYS = ("one", "per-node", "post_local_sgd")


def worker(way: str, address: str, encryption: str, rank: int, period: int, exchanges: int, width: int) -> None:
    """One rank: trains, and prints what it measured as JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    from lightning_omni import OmniOptimizer, Server, World
    from lightning_omni.runtime.options import WorldOptions

    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = address
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=HOSTS, timeout=timedelta(minutes=5)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(5)))
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(rank))
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds, spent, links = [], [], []

    def train(step: Any, exchanged: Any) -> None:
        for number in range(period * (exchanges + 1)):
            if number % period == 0:
                seconds.append(time.monotonic())
                spent.append(exchanged())
                links.append(link_bytes())
            model.zero_grad()
            model(x).square().mean().backward()
            step()
        seconds.append(time.monotonic())
        spent.append(exchanged())
        links.append(link_bytes())

    if way == "post_local_sgd":
        averager = PeriodicModelAverager(period=period, warmup_steps=0)
        waited = 0.0

        def step() -> None:
            nonlocal waited
            plain.step()
            began = time.monotonic()
            averager.average_parameters(model.parameters())
            waited += time.monotonic() - began

        averager.step = 1  # it averages where the step that follows is a multiple of the period
        train(step, lambda: waited)
    else:
        options = WorldOptions(
            groups=HOSTS,
            method=f"local_sgd:period={period}",
            server=Server(count=1 if way == "one" else "per-node", encryption=encryption),  # type: ignore[arg-type]
        )
        world = World(HOSTS, options=options, ranks_per_node=[1] * HOSTS)
        world.wrapper.broadcast_initial(model)
        optimizer = OmniOptimizer(plain, world)
        with world.training():
            train(optimizer.step, lambda: world.exchange.traffic.seconds)
    measured = {
        "step": (seconds[-1] - seconds[1]) / (period * exchanges),
        "exchange": (spent[-1] - spent[1]) / exchanges,
        "bytes": [(after - before) / exchanges for before, after in zip(links[1], links[-1], strict=True)],
    }
    print(json.dumps(measured), flush=True)
    dist.barrier()
    os._exit(0)


def link_bytes() -> tuple[int, int]:
    """Bytes that this host's link has received and sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    fields = line.partition(":")[2].split()
    return int(fields[0]), int(fields[8])


def measure(way: str, hosts: Hosts, arguments: argparse.Namespace) -> dict[str, float]:
    """One run of one way: of all hosts the busiest and the slowest."""
    sizes = [str(size) for size in (arguments.period, arguments.exchanges, arguments.width)]
    processes = [
        hosts.start(
            rank,
            [sys.executable, __file__, "--worker", way, hosts.addresses[0], arguments.encryption, str(rank), *sizes],
            {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(HOSTS)
    ]
    found = []
    for process in processes:
        output, _ = process.communicate(timeout=300)
        found.append(json.loads(output.strip().splitlines()[-1]))
    return {
        "step": max(each["step"] for each in found),
        "exchange": max(each["exchange"] for each in found),
        "bytes": max(max(each["bytes"]) for each in found),
    }


def main() -> None:
    """Runs every way in turn, and prints medians and ratios."""
    if sys.argv[1:2] == ["--worker"]:
        way, address, encryption, *numbers = sys.argv[2:]
        return worker(way, address, encryption, *map(int, numbers))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--encryption", choices=("curve", "off"), default="curve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--period", type=int, default=8)
    parser.add_argument("--exchanges", type=int, default=3)
    parser.add_argument("--width", type=int, default=708, help="of five square layers; 708 is 10 MB of float32")
    arguments = parser.parse_args()
    with_own_network()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with Hosts(Network(sites=(HOSTS,), host_mbit=arguments.mbit)) as hosts:
        for _ in range(arguments.rounds):
            for way in WAYS:
                runs[way].append(measure(way, hosts, arguments))
                print(way, {name: round(value, 4) for name, value in runs[way][-1].items()}, flush=True)
    middle = {
        way: {name: statistics.median(run[name] for run in each) for name in each[0]} for way, each in runs.items()
    }
    one, several, torchs = (middle[way] for way in WAYS)
    print(f"\n{'':16}{'bytes an exchange':>20}{'exchange, s':>14}{'step, s':>10}")
    for way in WAYS:
        each = middle[way]
        print(f"{way:16}{each['bytes'] / 1e6:>17.2f} MB{each['exchange']:>14.3f}{each['step']:>10.4f}")
    print(f"\nbytes over the busiest link, per-node / one    {several['bytes'] / one['bytes']:.3f}")
    print(f"slowest exchange, one / per-node               {one['exchange'] / several['exchange']:.2f}")
    print(f"seconds of a step, per-node / PostLocalSGD     {several['step'] / torchs['step']:.3f}")


if __name__ == "__main__":
    main()
