"""What a rank holds, and what its group exchanges, where members hold the model together and where each has it whole.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py               # two groups of two ranks, AdamW
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --groups 1
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --equal 50            # and what either has learned
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --equal 50 --shards 3
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/inside.py --equal 50 --tensor   # groups of 1 x 2 ranks

Peak bytes are those of all tensors that are allocated on the CPU from before the model is made until training ends, as
torch's profiler counts them: weights, gradients, optimizer state, what is gathered and what travels, and activations,
which are few here.

With ``--equal`` two groups take so many steps with every method, one after the other, so that pushes come in the same
order (where a method has them wait for each other, that is order enough); told is the largest difference between the
weights of groups whose members hold the model together, and those of groups whose members have it whole. They do so by
tensor parallelism with ``--tensor``, and train on the same samples in batches twice as large.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
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


def train(inside: str, options: argparse.Namespace) -> None:
    """One rank's training, and what it took."""
    folder = Path(os.environ["OMNI_FOLDER"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        module = Deep(options.blocks, options.width)
        loader = DataLoader(TensorDataset(torch.randn(4 * options.steps * 4, options.width)), batch_size=4)
        strategy = OmniStrategy(groups=options.groups, inside=inside, method=options.method, data="static")  # type: ignore[arg-type]
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=4,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
    rank = trainer.global_rank
    trace = folder / f"trace{rank}.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    peak = max(each["args"]["Total Allocated"] for each in events if each.get("name") == "[memory]")
    weights = 4 * options.blocks * options.width * (options.width + 1)
    report = {"peak": peak, "weights": weights, "moved": strategy.report().bytes_per_step}
    (folder / f"rank{rank}.json").write_text(json.dumps(report))


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
    parser.add_argument("--shards", type=int, default=2, help="members of each group, with --equal")
    parser.add_argument("--tensor", action="store_true", help="tensor parallelism in groups of two, with --equal")
    parser.add_argument("--inside", default="")
    options = parser.parse_args()
    if options.equal:
        compare(options)
        return
    options.method = options.method or "local_sgd:period=1"
    if options.inside:
        train(options.inside, options)
        return
    found: dict[str, list[dict[str, float]]] = {}
    for inside in ("ddp", "fsdp"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, *sys.argv[1:], "--inside", inside]
            subprocess.run(command, env={**os.environ, "OMNI_FOLDER": folder}, check=True, timeout=300)
            found[inside] = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(4)]
    largest = {inside: max(each["peak"] for each in ranks) for inside, ranks in found.items()}
    size = 4 // options.groups
    moved = {inside: sum(each["moved"] for each in ranks[:size]) for inside, ranks in found.items()}
    weights = found["ddp"][0]["weights"]
    print(
        f"weights {weights / 1e6:.1f} MB, {options.blocks} blocks, {options.groups} groups of {size}, {options.method}"
    )
    for inside in found:
        print(f"{inside:5} peak {largest[inside] / 1e6:7.1f} MB a rank, {moved[inside] / 1e6:6.2f} MB a group and step")
    print(f"ratio {largest['fsdp'] / largest['ddp']:.3f} of the peak", end="")
    print(f", {moved['fsdp'] / moved['ddp']:.4f} of the bytes" if moved["ddp"] else "")


if __name__ == "__main__":
    main()
