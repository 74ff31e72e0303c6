"""What a rank holds, and what its group exchanges, where members hold the model together and where each has it whole.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py               # two groups of two ranks, AdamW
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --groups 1 --shards 4
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --shards 4            # two groups of four ranks
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --sockets             # bytes on the wire (Linux)
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --equal 50            # and what either has learned
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --equal 50 --shards 3
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --equal 50 --tensor   # groups of 1 x 2 ranks

Peak bytes are those of all tensors that are allocated on the CPU from before the model is made until training ends, as
torch's profiler counts them: weights, gradients, optimizer state, what is gathered and what travels, and activations,
which are few here. A mesh of d x t ranks splits every second layer by columns, and those between by rows; a row of
tensor-parallel ranks has batches t times as large, so that a group trains on as many samples in every way.

With ``--sockets`` the servers are standalone ones on the loopback device, so that nothing goes through shared memory,
and told are also all bytes that the ranks of a group and the servers send each other by TCP, as Linux counts them for
each connection: tensors, messages, heartbeats, and what encryption adds. Peaks are then those with such servers.

With ``--equal`` two groups take so many steps with every method, one after the other, so that pushes come in the same
order (where a method has them wait for each other, that is order enough); told is the largest difference between the
weights of groups whose members hold the model together, and those of groups whose members have it whole. They do so by
tensor parallelism with ``--tensor``, and train on the same samples in batches twice as large.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import run

from lightning_omni.strategy.pytorch_lightning import OmniStrategy

TURNS: dict[str, bool] = {
    "async_sgd": True,
    "staleness_aware": True,
    "hardsync": False,
    "softsync:n=1": True,
    "softsync:n=2": True,
    "delay_compensated": True,
    "downpour:n_push=3,n_fetch=3": True,
    "elastic_averaging:period=3": True,
    "local_sgd:period=5": False,
    "diloco:period=5": False,
    "async_diloco:period=5,dynamic_steps=False": True,
    "decoupled_diloco:period=5,fragments=1": True,
}
"""Methods, and whether their groups need turns: those of the others wait for each other."""


class Deep(pl.LightningModule):
    """Blocks of one size, and next to no activations."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Meshed(Deep):
    """Tensor-parallel in pairs of layers, and sharded among the data-parallel ranks."""

    def configure_model(self) -> None:
        if isinstance(self.net[0].weight, DTensor):
            return
        assert self.device_mesh is not None  # ModelParallelStrategy has made it
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        ways = (ColwiseParallel(), RowwiseParallel())
        parallelize_module(self.net, tensor, {str(place): ways[place % 2] for place in range(len(self.net))})
        for layer in self.net:
            fully_shard(layer, mesh=data)
        fully_shard(self.net, mesh=data)


class Sockets(pl.Callback):
    """Bytes on this rank's connections to the servers, from the end of the first batch to that of the last."""

    def __init__(self, pid: int) -> None:
        self.ports, self.before, self.after = listening(pid), 0, 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after = exchanged_with(self.ports)
        if batch_idx == 0:
            self.before = self.after


def listening(pid: int) -> set[int]:
    """The TCP ports that a process, or one that it has started, listens at."""
    sockets = set()
    for process in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(entry))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def exchanged_with(ports: set[int]) -> int:
    """Bytes that this process has sent to these ports and that were acknowledged, and those that came from there."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as wire:
            if wire.family == socket.AF_INET and wire.getpeername()[1] in ports:
                info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += sum(struct.unpack_from("=QQ", info, 120))  # bytes_acked and bytes_received
    return total


def sharding(inside: str) -> Any:
    """What a strategy is told."""
    if "x" in inside:
        rows, columns = map(int, inside.split("x"))
        return pl.strategies.ModelParallelStrategy(rows, columns)
    return None if inside == "ddp" else inside


def train(inside: str, options: argparse.Namespace) -> None:
    """One rank's training, and what it took."""
    folder, devices = Path(os.environ["OMNI_FOLDER"]), options.groups * options.shards
    rows = int(inside.split("x")[1]) if "x" in inside else 1
    sockets = Sockets(int(os.environ["OMNI_SERVERS"])) if "OMNI_SERVERS" in os.environ else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        module = (Meshed if rows > 1 else Deep)(options.blocks, options.width)
        samples = torch.randn(4 * options.steps * devices, options.width)
        strategy = OmniStrategy(
            groups=options.groups,
            model_parallel=sharding(inside),
            method=options.method,
            data="static",
            server=None if sockets is None else os.environ["OMNI_ADDRESS"],
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            max_epochs=1,
            callbacks=sockets,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(samples), batch_size=4 * rows))
    assert trainer.global_step == options.steps, trainer.global_step
    rank = trainer.global_rank
    trace = folder / f"trace{rank}.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    peak = max(each["args"]["Total Allocated"] for each in events if each.get("name") == "[memory]")
    report = {"peak": peak, "moved": strategy.report().bytes_per_step, "sockets": 0.0}
    if sockets is not None:
        report["sockets"] = (sockets.after - sockets.before) / (options.steps - 1)
    (folder / f"rank{rank}.json").write_text(json.dumps(report))


@contextlib.contextmanager
def servers(count: int, folder: str) -> Iterator[dict[str, str]]:
    """Standalone servers, and the variables by which ranks find them."""
    key = Path(folder, "key")
    program = [str(Path(sys.executable).with_name("lightning-omni")), "serve", "--once", "--port", "0"]
    command = [*program, "--servers", str(count), "--key-file", str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        address = next(word.strip(",") for word in process.stdout.readline().split() if word.startswith("tcp://"))
        try:
            found = {"OMNI_ADDRESS": address, "OMNI_SERVERS": str(process.pid)}
            yield {**found, "LIGHTNING_OMNI_KEY": key.read_text().strip()}
        finally:
            process.terminate()


def measure(inside: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """What each rank of a run reports."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        told = {"OMNI_FOLDER": folder}
        if options.sockets:
            told |= stack.enter_context(servers(1 if inside == "ddp" else options.shards, folder))
        command = [sys.executable, __file__, *sys.argv[1:], "--inside", inside]
        subprocess.run(command, env={**os.environ, **told}, check=True, timeout=600)
        ranks = range(options.groups * options.shards)
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in ranks]


def show(options: argparse.Namespace) -> None:
    """Prints what each way of holding the model takes."""
    size = options.shards
    meshes = [f"{size // tensor} x {tensor}" for tensor in range(2, size + 1) if size % tensor == 0]
    found = {inside: measure(inside, options) for inside in ("ddp", "fsdp", *meshes)}
    weights = 4 * options.blocks * options.width * (options.width + 1)
    print(
        f"weights {weights / 1e6:.1f} MB, {options.blocks} blocks, {options.groups} groups of {size}, {options.method}"
    )
    largest = {inside: max(each["peak"] for each in ranks) for inside, ranks in found.items()}
    for inside, ranks in found.items():
        moved, sockets = (sum(each[what] for each in ranks[:size]) for what in ("moved", "sockets"))
        line = f"{inside:5} peak {largest[inside] / 1e6:7.2f} MB a rank ({largest[inside] / largest['ddp']:.2f})"
        line += f", {moved / 1e6:6.3f} MB of tensors a group and step"
        print(line + (f", {sockets / 1e6:6.3f} MB by TCP" if options.sockets else ""))


def compare(options: argparse.Namespace) -> None:
    """Prints how far apart two ways of holding the model end, for each method."""
    devices = 2 * options.shards
    together = "1 x 2" if options.tensor else "fsdp"
    more = {"kind": "Parallel", "insides": ["ddp", together]} if options.tensor else {}
    rows = [
        {"method": method, "optimizer": "AdamW", "turns": turns, "extra": {"gradient_clip_val": 0.3}, **more}
        for method, turns in TURNS.items()
        if options.method in ("", method)
    ]
    samples = 4 * devices * options.equal // 2  # of each of two epochs
    told = {"what": ["across"], "across": rows, "devices": devices, "samples": samples}
    found = run("inside.py", told, timeout=3600).results[0]["across"]
    print(f"two groups of {options.shards}, {together}, {options.equal} steps of each, AdamW, clipping by norm")
    for row, each in zip(rows, found.values(), strict=True):
        ddp, ours = each["ddp"], each[together]
        assert ddp["steps"] == ours["steps"] == options.equal, row
        assert ddp["updates"] == ours["updates"], row
        assert ours["copies"], row
        one, other = (
            torch.cat(
                [torch.tensor(way["weights"][name], dtype=torch.float64) for name in ddp["weights"] if name != "seen"]
            )
            for way in (ddp, ours)
        )
        apart, largest = float((one - other).abs().max()), float(one.abs().max())
        print(f"{row['method']:40} {apart:.1e} apart, weights up to {largest:.2f}, {ddp['updates']} updates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--method", default="", help="local_sgd:period=1, or with --equal all")
    parser.add_argument("--equal", type=int, default=0, metavar="STEPS")
    parser.add_argument("--shards", type=int, default=2, help="members of each group")
    parser.add_argument("--tensor", action="store_true", help="tensor parallelism in groups of two, with --equal")
    parser.add_argument("--sockets", action="store_true", help="standalone servers, and the bytes of connections")
    parser.add_argument("--inside", default="", help="for the ranks that this script starts")
    options = parser.parse_args()
    if options.equal:
        compare(options)
        return
    options.method = options.method or "local_sgd:period=1"
    if options.inside:
        train(options.inside, options)
    else:
        show(options)


if __name__ == "__main__":
    main()
