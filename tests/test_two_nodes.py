"""Two nodes that share nothing but a cable: two network namespaces, a pair of virtual interfaces, torchrun in each."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Process

SCRIPT = Path(__file__).parent / "scripts" / "regression.py"
LINK = "veth0"
ADDRESSES = ("10.213.0.1", "10.213.0.2")
PORT = 29500
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": LINK, "LOGLEVEL": "INFO"}
START = 150.0
"""Seconds for two torchruns with two workers each to import what they need and to train, on a busy machine."""
SOON, HEARTBEAT = 60.0, 120.0
"""Seconds in which the end must be known everywhere; heartbeats alone would take longer."""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout


def why_impossible() -> str:
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and the command ip (iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"omni-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "exec", name, "true")
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)
    return ""


WHY_NOT = why_impossible()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.network,
]


class Nodes:
    """Two namespaces, joined by one link; what runs in them is this test's alone."""

    def __init__(self) -> None:
        self.names = [f"omni-{os.getpid()}-{node}" for node in range(2)]
        self.runs: list[Process] = []

    def build(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.names[0], "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", self.names[1])
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/30", "dev", LINK)
            ip("-n", name, "link", "set", LINK, "up")

    def start(self, *script: str) -> list[Process]:
        for node, name in enumerate(self.names):
            command = [sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"]
            command += [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", str(SCRIPT), "--nodes=2"]
            command += [f"--heartbeat-timeout={HEARTBEAT}", *script]
            self.runs.append(Process(command, {**ENVIRONMENT, "OMNI_TEST_NETWORK": name}))
        return self.runs

    def pids(self, node: int) -> list[int]:
        return [int(word) for word in ip("netns", "pids", self.names[node]).split()]

    def remove(self) -> None:
        for node, name in enumerate(self.names):
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in self.pids(node):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)
        for run in self.runs:
            run.kill()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        nodes.build()
        yield nodes
    finally:
        nodes.remove()


def test_each_node_is_a_group_and_all_ranks_end_with_the_same_weights(nodes: Nodes) -> None:
    runs = nodes.start("--epochs=2")
    assert [run.end(timeout=START) for run in runs] == [0, 0], "".join(run.output for run in runs)

    results = {**runs[0].results, **runs[1].results}
    assert sorted(results) == [0, 1, 2, 3]
    assert all(result["groups"] == [[0, 1], [2, 3]] for result in results.values())
    assert {result["server"].rpartition(":")[0] for result in results.values()} == {f"tcp://{ADDRESSES[0]}"}
    assert len({result["weights"] for result in results.values()}) == 1
    assert results[0]["updates"] > 0
    assert results[0]["error"] < 0.5
    assert nodes.pids(0) == nodes.pids(1) == []


def test_a_worker_killed_on_the_other_node_costs_that_node_only(nodes: Nodes) -> None:
    first, second = nodes.start("--epochs=4", "--pace=0.05")
    victim = second.expect(r"rank 3 trains, pid (\d+)", timeout=START)
    first.expect("rank 0 trains", timeout=START)
    os.kill(int(victim[1]), signal.SIGKILL)

    assert second.end(timeout=SOON) != 0
    assert nodes.pids(1) == []
    first.expect(r"rank [23] .*; its group is evicted, 2 ranks are lost, the others go on", timeout=SOON)
    # Its torchrun now waits five minutes for the other one, whatever becomes of the training: that is torchrun's way.
    first.expect(r"Local worker group finished .*SUCCEEDED", timeout=START)
    assert nodes.pids(0) == [first.pid]
    assert sorted(first.results) == [0, 1]
    assert first.results[0]["lost"] == [2, 3]
    assert first.results[0]["weights"] == first.results[1]["weights"]
    assert first.results[0]["error"] < 0.5


def test_a_worker_killed_beside_rank_0_ends_the_run_on_both_nodes(nodes: Nodes) -> None:
    runs = nodes.start("--epochs=1000", "--pace=0.05")
    victim = runs[0].expect(r"rank 1 trains, pid (\d+)", timeout=START)
    runs[1].expect("rank 2 trains", timeout=START)
    os.kill(int(victim[1]), signal.SIGKILL)

    assert all(run.end(timeout=SOON) != 0 for run in runs)
    assert re.search(r"the run is over: rank [01] .*; the run cannot go on without it", runs[1].output), runs[1].output
    assert nodes.pids(0) == nodes.pids(1) == []
