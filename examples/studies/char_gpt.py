"""Train a small GPT in two groups of two ranks that shard it, with DiLoCo between them; and in four ranks with FSDP2.

    python examples/studies/char_gpt.py                # both, about a quarter of an hour on two cores
    python examples/studies/char_gpt.py --seeds 3      # three times, with means and standard deviations
    python examples/studies/char_gpt.py --quick        # one minute, and not trained to the end
    python examples/studies/char_gpt.py --period 60    # fewer exchanges

The text is Python's help on its own language, which every Python has. Both ways take the same steps over the same
tokens, with AdamW, each with the learning rate that suits it best. Plain FSDP2 is Lightning's ModelParallelStrategy
over all four ranks. In the groups each rank has half of the model, and exchanges that half once every ``--period``
steps. A group's batches are half as large as those of all four ranks, so its gradients are noisier: it is behind early
in training, and catches up as the learning rate falls. Compare the two at the end of a schedule.

The table has the loss on held-out text, the megabytes between the first two ranks and the last two, and the largest
number of bytes of tensors on any rank. The megabytes of plain FSDP2 are a lower bound for any algorithm, counted in one
step: an all-gather of n bytes brings to each half the n / 2 that it lacks, and a reduce-scatter n / 2 of the other's
sums. The megabytes of the groups are all traffic between ranks and parameter servers in the run. The bytes of tensors
are measured in four further steps with one exchange: weights, gradients, optimizer state, activations and messages.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from comparison import console, new_figure, save_figure, show_table
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightning_omni as omni
from lightning_omni.palette import METHODS, ONE_GROUP

RANKS, GROUPS = 4, 2
WARMUP = 50
"""Steps in which the learning rate rises."""
HELD_OUT = 0.1
"""The last part of the text, which is not trained on."""


# --- Text ------------------------------------------------------------------------------------------------------------


class Topics(LightningDataModule):
    """Python's help on its language, in windows of characters; the same but one further are what is to be predicted.

    Args:
        batch_size: windows of one rank and step.
        context: characters of a window.
        steps: of an epoch; the text has room for some more, or windows overlap.
    """

    def __init__(self, batch_size: int, context: int, steps: int) -> None:
        super().__init__()
        self.batch_size, self.context, self.windows = batch_size, context, steps * batch_size * RANKS
        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.characters)}
        self.text = torch.tensor([numbers[character] for character in text])

    @override
    def setup(self, stage: str) -> None:
        cut = int(len(self.text) * (1 - HELD_OUT))
        last = cut - self.context - 1
        starts = torch.linspace(0, last, self.windows).long()
        self.train_set = self._windows(self.text[:cut], starts)
        held = self.text[cut:]
        self.validation_set = self._windows(held, torch.arange(0, len(held) - self.context - 1, 2 * self.context))

    def _windows(self, text: Tensor, starts: Tensor) -> TensorDataset:
        windows = text[starts[:, None] + torch.arange(self.context + 1)]
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation_set, 4 * self.batch_size)


# --- Model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what was before, and two dense layers; each adds to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.attention, self.mixed = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attention(self.norm(x)).chunk(3, dim=-1)
        )
        heard = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(heard.transpose(1, 2).flatten(2))
        added: Tensor = self.dense(x)
        return x + added


class GPT(nn.Module):
    """A decoder-only transformer over characters; its logits are (windows x characters of a window, characters)."""

    def __init__(self, characters: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).flatten(0, 1))  # FSDP2 advises against returning views
        return logits


class CharGPT(LightningModule):
    """Predicts the next character. It is sharded as for ModelParallelStrategy, whatever strategy trains it.

    Args:
        model: of characters.
        lr: the largest learning rate.
        steps: over which it rises and falls to a tenth.
    """

    def __init__(self, model: GPT, lr: float, steps: int) -> None:
        super().__init__()
        self.model, self.lr, self.steps = model, lr, steps

    @override
    def configure_model(self) -> None:
        if isinstance(self.model.head.weight, DTensor):
            return
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, following = batch
        return cross_entropy(self.model(text), following.flatten())

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, prog_bar=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        schedule = {"scheduler": LambdaLR(optimizer, partial(cosine, steps=self.steps)), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}  # type: ignore[return-value]


def cosine(step: int, steps: int) -> float:
    """Up in the first steps, and then down to a tenth."""
    part = min(1.0, step / steps)
    return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * part))


# --- What is counted -------------------------------------------------------------------------------------------------


class Between(TorchDispatchMode):
    """Counts the bytes that collectives over all ranks must bring from one half of them to the other, and back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "c10d::_allgather_base_":
            self.nbytes += args[0].nbytes  # what is gathered: each half lacks half of it
        elif name == "c10d::_reduce_scatter_base_":
            self.nbytes += args[1].nbytes  # what is added up: each half owes the other its sum of half of it
        return func(*args, **(kwargs or {}))


class CountsOneStep(Callback):
    """Counts what collectives carry in the second step."""

    def __init__(self) -> None:
        self.between = Between()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            self.between.__enter__()  # type: ignore[no-untyped-call]

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            self.between.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class Curve(Callback):
    """Loss on what was held out, after so many steps."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.points.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


# --- Training --------------------------------------------------------------------------------------------------------


def train(
    way: str, arguments: argparse.Namespace, steps: int, period: int, seed: int = 0, validates: bool = True
) -> dict[str, Any]:
    """Trains in one way, on all ranks, and says what it took."""
    seed_everything(seed, verbose=False)
    epochs = arguments.epochs if validates else 1
    data = Topics(arguments.batch_size, arguments.context, steps // epochs)
    model = GPT(len(data.characters), arguments.context, arguments.width, arguments.depth, arguments.heads)
    strategy: Any = (
        ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
        if way == "fsdp"
        else omni.OmniStrategy(
            groups=GROUPS,
            model_parallel="fsdp",
            method=f"diloco:period={period},outer_lr={arguments.outer_lr},outer_momentum={arguments.outer_momentum}",
            data="static",
        )
    )
    counter, curve = CountsOneStep(), Curve()
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        limit_val_batches=None if validates else 0,
        callbacks=[curve, counter] if way == "fsdp" else [curve],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=validates,
    )
    began = time.perf_counter()
    trainer.fit(CharGPT(model, arguments.plain_lr if way == "fsdp" else arguments.lr, steps), data)
    taken = trainer.global_step
    moved = counter.between.nbytes / RANKS if way == "fsdp" else strategy.report().bytes_per_step
    between = float(strategy.reduce(torch.tensor(moved * taken, dtype=torch.float64), reduce_op="sum"))
    return {
        "curve": curve.points,
        "steps": taken,
        "between": between,
        "seconds": time.perf_counter() - began,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def peak(way: str, arguments: argparse.Namespace) -> float:
    """The most bytes of tensors that any rank has, from before the model is made to the end of four steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(way, arguments, steps=4, period=2, validates=False)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    largest = max(each["args"]["Total Allocated"] for each in events if each.get("name") == "[memory]")
    every = torch.zeros(RANKS, dtype=torch.float64)
    every[torch.distributed.get_rank()] = largest
    torch.distributed.all_reduce(every)
    return float(every.max())


# --- The command -----------------------------------------------------------------------------------------------------

NAMES = {"fsdp": "FSDP2, 4 shards", "omni": "2 groups of 2 shards, DiLoCo"}
COLOURS = {"fsdp": ONE_GROUP, "omni": METHODS["diloco"]}


def main() -> None:
    """Trains in both ways; rank 0 shows what came of it."""
    arguments = parse_arguments()
    tell("Peak memory, in four steps of both ways")
    peaks = {way: peak(way, arguments) for way in NAMES}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in NAMES}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for way, runs in found.items():
            tell(f"{NAMES[way]}: {arguments.steps} steps, seed {seed}")
            runs.append(train(way, arguments, arguments.steps, arguments.period, seed))
    if torch.distributed.get_rank() == 0:
        show(found, peaks, arguments)


@rank_zero_only
def tell(what: str) -> None:
    """Prints on the first rank what comes next."""
    console.rule(what)


def show(found: dict[str, list[dict[str, Any]]], peaks: dict[str, float], arguments: argparse.Namespace) -> None:
    """A table and a picture."""
    losses = {way: [run["curve"][-1][1] for run in runs] for way, runs in found.items()}
    plain = found["fsdp"][0]
    rows = []
    for way, (first, *_) in found.items():
        more = [100 * (loss / base - 1) for loss, base in zip(losses[way], losses["fsdp"], strict=True)]
        rows.append(
            (
                NAMES[way],
                spread(losses[way], ".4f"),
                "" if way == "fsdp" else spread(more, "+.2f") + " %",
                f"{first['between'] / 1e6:,.1f}",
                f"1/{plain['between'] / first['between']:.1f}",
                f"{peaks[way] / 1e6:.2f}",
                f"{statistics.mean(run['seconds'] for run in found[way]):.0f}",
            )
        )
    columns = ("way", "val. loss", "against FSDP2", "MB between", "of FSDP2's", "peak MB a rank", "s")
    tokens = arguments.batch_size * arguments.context * RANKS
    weights = plain["parameters"]
    title = f"{weights:,} weights, {arguments.steps} steps of {tokens:,} characters, an exchange every"
    seeds = f"; mean and standard deviation of {arguments.seeds} seeds" if arguments.seeds > 1 else ""
    show_table(f"{title} {arguments.period}{seeds}", columns, rows)
    figure, [[left, right]] = new_figure(1, 2)
    for way, runs in found.items():
        for number, run in enumerate(runs):
            steps, points = zip(*run["curve"], strict=True)
            style = {"color": COLOURS[way], "marker": "o", "markersize": 3}
            seen = [step * tokens / 1e6 for step in steps]
            left.plot(seen, points, label="" if number else NAMES[way], **style)
            right.plot([run["between"] * step / steps[-1] / 1e6 for step in steps], points, **style)
    left.set(xlabel="million characters", ylabel="loss on text that was held out")
    right.set(xlabel="megabytes between the halves", ylabel="loss on text that was held out", xscale="log")
    left.legend()
    save_figure(figure, f"A GPT of {weights:,} weights on Python's own help", arguments.out)


def spread(values: Sequence[float], as_: str) -> str:
    """The mean, and of several values their standard deviation."""
    more = f" ± {format(statistics.stdev(values), as_.lstrip('+'))}" if len(values) > 1 else ""
    return format(statistics.mean(values), as_) + more


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT in groups that hold it together, and with FSDP2.")
    add = parser.add_argument
    add("--quick", action="store_true", help="a minute: 60 steps, not trained to the end")
    add("--epochs", type=int, default=8, help="after each of which what was held out is evaluated")
    add(
        "--steps", type=int, default=1920, help="of every rank, a multiple of epochs times period for the last exchange"
    )
    add("--period", type=int, default=30, help="steps between two exchanges")
    add("--outer-lr", type=float, default=0.7, help="DiLoCo's, at the servers")
    add("--outer-momentum", type=float, default=0.5, help="likewise")
    add("--batch-size", type=int, default=8, help="windows of each rank and step")
    add("--context", type=int, default=64, help="characters of a window")
    add("--width", type=int, default=64)
    add("--depth", type=int, default=4, help="blocks")
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=1.4e-2, help="AdamW's largest learning rate in the groups")
    add("--plain-lr", type=float, default=2e-2, help="likewise, with plain FSDP2")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of the samples")
    add("--seeds", type=int, default=1, help="this many runs of each way, with the seeds from --seed on")
    add("--out", type=Path, default=Path("char_gpt.png"), help="the picture")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.epochs = 60, 2
    return arguments


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
