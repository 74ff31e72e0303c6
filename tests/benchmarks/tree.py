"""An aggregator at a site whose groups push over one link: bytes over that link, and seconds of an exchange.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/tree.py --mbit 100 --hosts 4 --rounds 3

Hosts are network namespaces on this machine (Linux; root, or a system that allows user namespaces). The parameter
server is alone at one site; at the other each host is one group of one rank, and all of them share the site's link.
Once they push to the server themselves, and once to ``lightning-omni serve --upstream`` on the first of them. Printed
are bytes over the site's link in its busier direction for each timed exchange, with the weights that all groups read
from the server in the end, and seconds of the slowest group's exchange; medians over the rounds. Pushes are float32,
and encrypted.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from emulated_network import Hosts, Network, with_own_network  # noqa: E402

SERVER, FIRST, PORT = 0, 1, 5555
"""Hosts, by number: that of the server, and the first of the other site; and the servers' port."""
RENDEZVOUS = 29_620
WAYS = ("directly", "by an aggregator")


def worker(method: str, rank: int, ranks: int, exchanges: int, width: int, server: str, rendezvous: str) -> None:
    """One group: pushes again and again, and prints how long that took."""
    import torch
    import torch.distributed as dist

    from lightning_omni import OmniOptimizer, World
    from lightning_omni.optimizer.options import WorldOptions

    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = rendezvous
    where = f"tcp://{rendezvous}:{RENDEZVOUS}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(5)))
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(rank))
    world = World(ranks, options=WorldOptions(groups=ranks, method=method, server=server), ranks_per_node=[1] * ranks)
    world.broadcast_initial(model)
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), world)
    with world.training():
        for _ in range(1 + exchanges):
            model.zero_grad()
            model(x).square().mean().backward()
            before = world.channel.traffic.seconds
            optimizer.step()
            print(json.dumps(world.channel.traffic.seconds - before), flush=True)
    dist.barrier()
    os._exit(0)


def serve(hosts: Hosts, host: int, key: str, *options: str) -> subprocess.Popen[str]:
    """Starts a server, or an aggregator, and waits until it listens."""
    command = [sys.executable, "-m", "lightning_omni", "serve", "--host", hosts.addresses[host], "--port", str(PORT)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LIGHTNING_OMNI_KEY": key}
    process = hosts.start(host, [*command, *options], environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    if " on tcp://" not in line:
        raise RuntimeError(f"no server: {line}{process.stderr.read()}")
    return process


def start_worker(
    hosts: Hosts, rank: int, server: str, key: str, arguments: argparse.Namespace
) -> subprocess.Popen[str]:
    """Starts one group."""
    numbers = [str(number) for number in (rank, arguments.hosts, arguments.exchanges, arguments.width)]
    return hosts.start(
        FIRST + rank,
        [sys.executable, __file__, "--worker", arguments.method, *numbers, server, hosts.addresses[FIRST]],
        {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1", "LIGHTNING_OMNI_KEY": key},
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(way: str, hosts: Hosts, arguments: argparse.Namespace) -> dict[str, float]:
    """One run of one way."""
    key, server = secrets.token_hex(32), f"tcp://{hosts.addresses[SERVER]}:{PORT}"
    served = [serve(hosts, SERVER, key)]
    if way == WAYS[1]:
        served.append(serve(hosts, FIRST, key, "--upstream", server))
    exchanges = arguments.exchanges
    try:
        processes = [start_worker(hosts, rank, server, key, arguments) for rank in range(arguments.hosts)]
        leader = processes[0].stdout
        assert leader is not None
        first = leader.readline()  # the first exchange, which is not counted, is over
        before, began = hosts.site_traffic(1), time.monotonic()
        found = [process.communicate(timeout=300)[0] for process in processes]
        after, seconds = hosts.site_traffic(1), time.monotonic() - began
    finally:
        for process in served:
            process.terminate()
            process.wait(30)
    if any(process.returncode for process in processes) or not first:
        raise RuntimeError(f"a group has failed: {[process.returncode for process in processes]}")
    times = [[json.loads(line) for line in each.strip().splitlines()][-exchanges:] for each in found]
    sent, received = after.sent - before.sent, after.received - before.received
    return {
        "exchange": max(statistics.fmean(each) for each in times),
        "bytes": max(sent, received) / exchanges,
        "whole": seconds / exchanges,
    }


def main() -> None:
    """Runs both ways in turn, and prints medians and ratios."""
    if sys.argv[1:2] == ["--worker"]:
        method, rank, ranks, exchanges, width, server, rendezvous = sys.argv[2:]
        return worker(method, int(rank), int(ranks), int(exchanges), int(width), server, rendezvous)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of the site's link")
    parser.add_argument("--hosts", type=int, default=4, help="at the site")
    parser.add_argument("--method", default="hardsync")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exchanges", type=int, default=12)
    parser.add_argument("--width", type=int, default=500, help="of five square layers; 500 is 5 MB of float32")
    arguments = parser.parse_args()
    with_own_network()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with Hosts(Network(sites=(1, arguments.hosts), site_mbit=arguments.mbit)) as hosts:
        for _ in range(arguments.rounds):
            for way in WAYS:
                runs[way].append(measure(way, hosts, arguments))
                print(way, {name: round(value, 4) for name, value in runs[way][-1].items()}, flush=True)
    directly, tree = (
        {name: statistics.median(run[name] for run in runs[way]) for name in runs[way][0]} for way in WAYS
    )
    print(f"\nbytes over the site's link, by an aggregator / directly   {tree['bytes'] / directly['bytes']:.3f}")
    print(f"slowest exchange, directly / by an aggregator             {directly['exchange'] / tree['exchange']:.2f}")


if __name__ == "__main__":
    main()
