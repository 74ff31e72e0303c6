"""The tasks and clusters that the tuner is developed on and judged by. The lists are fixed, and so is the split.

    OMP_NUM_THREADS=1 python tests/benchmarks/tasks.py                     # the lists, and what was recorded
    OMP_NUM_THREADS=1 python tests/benchmarks/tasks.py --record [NAME ...] # target and user's setting, measured

Tasks of `DEVELOPING` may set constants, and the prior of the search (`prior.py`) is learnt from them. Those of
`JUDGING` set no constant, enter no prior and are no reason to change anything that is general: what is claimed of the
tuner is measured with them, once there is nothing more to change. A task changes sides never; one that is added later
may only be added to `DEVELOPING`. The prior uses step times alone (`PRIOR_CLUSTERS`); the tuner is judged on every
cluster of `CLUSTERS`, each with every task of `JUDGING`.

A task is trained by `RANKS` ranks of `batch_size` samples each. Its user's own setting is the best synchronous one of a
small grid (five or more rates, a factor of √3 apart, for a momentum or β1 of 0.9; for SGD then a momentum of 0 and of
0.6 with steps of the same size): the one with the lowest held-out loss after `updates` synchronous updates, two orders
of the data averaged. The loss that it has by then is the target, so that the synchronous run takes about that many
updates to it. Grid, setting and target are recorded
in `tasks.json`. Nothing is downloaded: images are Fashion-MNIST where Debian's ``dataset-fashion-mnist`` is installed,
and scikit-learn's digits otherwise (the target is another one then, and has to be recorded again); text are the
docstrings of Python's standard library, which differ a little from one Python to another.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from lightning_omni.methods import Barrier, Method, method_named
from lightning_omni.simulator import Cluster, Computation, Evaluation, Jitter, Limits, Link, Workload, simulate
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "tasks.json"
RANKS = 8
EVERY = 4
"""Batches of all ranks between two evaluations, at least."""
SMOOTHED = 5
"""Evaluations of one batch in four over which the held-out loss is averaged: a single lucky one is not the target."""
SECONDS = 1.0
"""For which a device of speed 1 computes a batch."""
MOST_EPOCHS = 1000
STEPS = (-2, -1, 0, 1, 2)
"""Of the grid: factors of √3 from the task's rate."""

Loss = Callable[[Any, Any], Tensor]


# --- Tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """What is trained, on what.

    Args:
        model: with the weights at which training starts.
        data: to train on.
        held_out: tensors of the samples whose loss says how far training is.
        loss: the mean loss of a batch.
    """

    model: nn.Module
    data: TensorDataset
    held_out: tuple[Tensor, ...]
    loss: Loss

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        return sum(weight.nbytes for weight in self.model.parameters())


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        samples: to the target, interpolated between evaluations; infinite if the run ended before.
        seconds: virtual time to the target, likewise.
        trained: samples that were trained altogether.
        trace: of the run.
    """

    samples: float
    seconds: float
    trained: float
    trace: Trace


@dataclass(frozen=True, eq=False)
class Task:
    """A model, its data, and how a user trains it.

    Args:
        name: of the task.
        make: the model and its data.
        batch_size: samples of one rank in a batch.
        optimizer: of the user; AdamW has the weight decay that it has by default.
        lr: the middle of the grid, for SGD at a momentum of 0.9.
        warmup: batches of all ranks in which the rate rises linearly from nothing.
        updates: that the synchronous run is to take, about.
    """

    name: str
    make: Callable[[], Subject]
    batch_size: int = 8
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    warmup: int = 0
    updates: int = 250

    @cached_property
    def subject(self) -> Subject:
        """Model and data."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make()

    @property
    def is_adaptive(self) -> bool:
        """Whether the optimizer divides by the size of gradients."""
        return self.optimizer == "adamw"

    @property
    def batch(self) -> int:
        """Samples in a batch of all ranks."""
        return RANKS * self.batch_size

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """What `record` has found: the user's momentum and lr, and the target.

        Raises:
            KeyError: nothing is recorded of the task.
        """
        found: dict[str, Any] = json.loads(RECORDED.read_text())[self.name]
        return found

    @property
    def momentum(self) -> float:
        """The user's own; of AdamW, β1."""
        return float(self.recorded["momentum"])

    @property
    def own_lr(self) -> float:
        """The user's own, of one group."""
        return float(self.recorded["lr"])

    @property
    def target(self) -> float:
        """Held-out loss."""
        return float(self.recorded["target"])

    def train(
        self,
        cluster: Cluster,
        method: str | Method = "async_sgd",
        groups: int | Topology = 1,
        *,
        momentum: float | None = None,
        lr: float | None = None,
        most: float = math.inf,
        until: float | None = None,
        **options: Any,
    ) -> Outcome:
        """One run in the simulator, from the start to the target.

        Args:
            cluster: the machine.
            method: what is exchanged.
            groups: how many, or which.
            momentum: of the optimizer (β1 of AdamW); None for the user's own.
            lr: of the optimizer; None for the user's own.
            most: batches of all ranks after which the run ends in any case.
            until: held-out loss at which the run ends; None for the target.
            options: further ones of `Task.simulate` and `lightning_omni.simulator.simulate`: ``seed`` and the like.
        """
        run = Run(self, self.momentum if momentum is None else momentum, self.own_lr if lr is None else lr)
        target = self.target if until is None else until
        ends_at = ("smooth_loss", target) if math.isfinite(target) else None
        trace = self.simulate(run, cluster, method, groups, target=ends_at, most=most, **options)
        evaluated = trace.evaluated
        at = crossing(evaluated["smooth_loss"], target, run.smoothed)
        samples, seconds = (at_evaluation(evaluated[name], at) for name in ("samples", "time"))
        return Outcome(samples, seconds, float(evaluated["samples"][-1]), trace)

    def simulate(
        self,
        run: Run,
        cluster: Cluster,
        method: str | Method,
        groups: int | Topology,
        *,
        target: tuple[str, float] | None,
        most: float = math.inf,
        every: int = EVERY,
        seconds: float = math.inf,
        rebalance: Literal["off", "auto"] = "off",
        **options: Any,
    ) -> Trace:
        """A run with its own model, loss and optimizers, evaluated ``every`` batches; `train` says the rest."""
        chosen = method_named(method) if isinstance(method, str) else method
        topology = Topology.even(RANKS, groups) if isinstance(groups, int) else groups
        ticks = ticks_of(chosen, len(topology.alive))
        period = max(1, round(every * ticks))
        run.every = period / ticks
        return simulate(
            chosen,
            topology,
            cluster,
            Workload(run.model, self.subject.data, loss=run.loss, evaluate=run.evaluate, optimizer=run.optimizer),
            batch_size=self.batch_size,
            evaluation=Evaluation(every=period, target=target),
            limits=Limits(
                updates=math.inf if math.isinf(most) else max(1, round(most * ticks)),
                epochs=MOST_EPOCHS if math.isinf(most) else math.inf,
                seconds=seconds,
            ),
            computation=Computation(rebalance, run.batched),
            **options,
        )


def crossing(losses: Any, target: float, smoothed: int) -> float:
    """At which evaluation smoothed losses go through the target, half of what they are smoothed over before.

    Args:
        losses: of each evaluation; infinite where too few have been for a mean.
        target: to be reached.
        smoothed: evaluations in a mean.

    Returns:
        A place between evaluations, -1 for the start of the run; infinite if they never do.
    """
    below = np.flatnonzero(np.asarray(losses) <= target)
    if not len(below):
        return math.inf
    place = int(below[0])
    before = losses[place - 1] if place else math.inf
    share = (before - target) / (before - losses[place]) if math.isfinite(before) else 1.0
    return place - (smoothed - 1) / 2 - (1 - float(share))


def at_evaluation(column: Any, place: float) -> float:
    """What a column of evaluations has at such a place; infinite for one that is never."""
    if math.isinf(place):
        return math.inf
    return float(np.interp(place, np.arange(-1, len(column)), [0.0, *column]))


def ticks_of(method: Method, groups: int) -> float:
    """Updates of the server while all ranks together train a batch, of a method with groups of equal speed."""
    if groups == 1:
        return 1.0
    meets = method.side is not None and issubclass(method.side, Barrier)
    return (1 if meets else groups) / method.push_period


class Run:
    """One run of a task: its optimizers, whose rate may have to rise, and its losses.

    Args:
        task: what is trained.
        momentum: of the optimizer.
        lr: of the optimizer.

    Attributes:
        model: with the weights at which training starts.
        every: batches of all ranks between two evaluations.
    """

    every: float = EVERY

    def __init__(self, task: Task, momentum: float, lr: float) -> None:
        self.task, self.model = task, task.subject.model
        self._momentum, self._lr = momentum, lr
        self._made: list[torch.optim.Optimizer] = []
        self._samples = 0
        self._losses: list[float] = []

    @property
    def batched(self) -> Any:
        """As in `simulate`: a loss that counts samples is computed for one group at a time."""
        return False if self.task.warmup else "auto"

    @property
    def smoothed(self) -> int:
        """Evaluations that are averaged: those of `SMOOTHED` times `EVERY` batches, as far as there are so many."""
        return max(1, round(SMOOTHED * EVERY / self.every))

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        """The user's optimizer."""
        if self.task.is_adaptive:
            return torch.optim.AdamW(parameters, lr=self._lr, betas=(self._momentum, 0.999))
        return torch.optim.SGD(parameters, lr=self._lr, momentum=self._momentum)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        made = self.make(parameters)
        self._made.append(made)
        self._warm_up()
        return made

    def loss(self, model: Any, batch: Any) -> Tensor:
        if self.task.warmup:
            self._samples += len(batch[0])
            self._warm_up()
        return self.task.subject.loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self._losses.append(float(self.task.subject.loss(model, self.task.subject.held_out)))
        last = self._losses[-self.smoothed :]
        is_enough = len(last) == self.smoothed
        return {"held_out": self._losses[-1], "smooth_loss": sum(last) / len(last) if is_enough else math.inf}

    def _warm_up(self) -> None:
        """Rates rise with the samples that all groups have trained."""
        if self.task.warmup:
            part = min(1.0, self._samples / (self.task.warmup * self.task.batch))
            for optimizer in self._made:
                optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * part


# --- What is trained: to develop on -----------------------------------------------------------------------------------


def powerlaw() -> Subject:
    """Inputs some of which vary far more than others, as features of real data do; a noisy teacher's labels."""
    generator = torch.Generator().manual_seed(0)
    width = 64
    deviations = torch.arange(1, width + 1).float() ** -0.7
    inputs = 3 * deviations * torch.randn(10_000, width, generator=generator)
    teacher = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 10))
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (1.0 if weight.dim() > 1 else 0.1))
        noise = 0.3 * torch.randn(len(inputs), 10, generator=generator)
        labels = (3 * teacher(inputs / deviations.sqrt() / 3) + noise).argmax(1)
    torch.manual_seed(1)  # the teacher has drawn from it
    model = perceptron(width, 64, 64, 10)
    held_out = inputs[8000:9000], labels[8000:9000]
    return Subject(model, TensorDataset(inputs[:8000], labels[:8000]), held_out, classification)


def fashion() -> Subject:
    """Fashion-MNIST, 14 x 14, and a perceptron with 64 hidden units; enlarged digits if it is not installed."""
    fashion_data = _fashion_data()
    if (directory := fashion_data.find_directory()) is None:
        (images, labels), (held_out, truth), _ = fashion_data.load_digits()
    else:
        found, known = fashion_data.load_pair(directory, "train")
        images, labels, held_out, truth = found[:20_000], known[:20_000], found[50_000:51_500], known[50_000:51_500]
    inputs, held_out = (avg_pool2d(each, 2).flatten(1) for each in (images, held_out))
    return Subject(
        perceptron(196, 64, 10), TensorDataset(inputs, labels), (held_out[:1500], truth[:1500]), classification
    )


def digits() -> Subject:
    """scikit-learn's digits, 8 x 8, and a small convolutional network."""
    from sklearn.datasets import load_digits

    inputs, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, labels = inputs.float()[order].reshape(-1, 1, 8, 8) / 16, labels[order]
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    return Subject(model, TensorDataset(inputs[400:], labels[400:]), (inputs[:400], labels[:400]), classification)


class Mean(nn.Module):
    """Of the embeddings of a document's words: with `torch.nn.Embedding` before it, an embedding bag."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(-2)


def words() -> Subject:
    """Documents of 16 words out of 2,000, most of them rare; the words' meanings, added up, make one of 5 topics.

    The mean of embeddings, with dense gradients.
    """
    random = np.random.default_rng(3)
    inputs = torch.as_tensor(zipf(random, 2000, (12_000, 16), 0.9))
    meaning = random.standard_normal((2000, 5))
    scores = meaning[inputs.numpy()].sum(1) + random.standard_normal((12_000, 5))
    labels = torch.as_tensor(scores.argmax(1))
    model = nn.Sequential(nn.Embedding(2000, 16), Mean(), nn.Linear(16, 5))
    return Subject(model, TensorDataset(inputs[1000:], labels[1000:]), (inputs[:1000], labels[:1000]), classification)


def fraud() -> Subject:
    """Rows of a table, 16 columns of different scale, one row in twenty of which belongs to the class that matters."""
    random = torch.Generator().manual_seed(4)
    inputs = torch.randn(16_000, 16, generator=random) * torch.logspace(-0.5, 0.5, 16)
    first, second = (
        inputs[:, ::2] @ torch.randn(8, generator=random),
        inputs[:, 1::2] @ torch.randn(8, generator=random),
    )
    score = first * second + 2 * torch.sin(first) + torch.randn(len(inputs), generator=random)
    labels = (score > score.quantile(0.95)).long()
    model = perceptron(16, 48, 48, 2)
    return Subject(model, TensorDataset(inputs[3000:], labels[3000:]), (inputs[:3000], labels[:3000]), classification)


def characters() -> Subject:
    """Docstrings of the standard library, and a perceptron that says the next character after twelve (Bengio 2003)."""
    text = documentation(("argparse", "datetime", "decimal", "inspect", "random", "statistics", "turtle"))
    windows = text[: 60_000 + 12].unfold(0, 13, 1)
    model = nn.Sequential(
        nn.Embedding(SYMBOLS, 10), nn.Flatten(), nn.Linear(120, 64), nn.Tanh(), nn.Linear(64, SYMBOLS)
    )
    held_out = windows[50_000::8]
    return Subject(
        model,
        TensorDataset(windows[:50_000, :-1], windows[:50_000, -1]),
        (held_out[:, :-1], held_out[:, -1]),
        classification,
    )


def friedman() -> Subject:
    """Friedman's first function of five of ten inputs, with noise (Friedman 1991), and a perceptron: a regression."""
    from sklearn.datasets import make_friedman1

    inputs, targets = make_friedman1(14_000, noise=1.0, random_state=0)
    inputs = torch.as_tensor(inputs - 0.5, dtype=torch.float32)
    targets = torch.as_tensor((targets - targets.mean()) / targets.std(), dtype=torch.float32)
    model = nn.Sequential(
        nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1), nn.Flatten(-2)
    )  # fmt: skip
    return Subject(model, TensorDataset(inputs[2000:], targets[2000:]), (inputs[:2000], targets[:2000]), regression)


def teacher() -> Subject:
    """Labels of a random network with one hidden layer, and a narrow one with five to learn them."""
    random = torch.Generator().manual_seed(7)
    inputs = torch.randn(14_000, 12, generator=random)
    hidden = torch.tanh(inputs @ torch.randn(12, 24, generator=random) / 3)
    labels = (hidden @ torch.randn(24, 6, generator=random)).argmax(1)
    layers: list[nn.Module] = [nn.Linear(12, 32), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Linear(32, 32), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(32, 6))
    return Subject(model, TensorDataset(inputs[2000:], labels[2000:]), (inputs[:2000], labels[:2000]), classification)


def autoencoder() -> Subject:
    """scikit-learn's digits, 8 x 8, through a bottleneck of twelve numbers."""
    from sklearn.datasets import load_digits

    images = torch.as_tensor(load_digits().data).float() / 16
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    model = nn.Sequential(
        nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 12), nn.Tanh(), nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 64)
    )
    return Subject(model, TensorDataset(images[400:], images[400:]), (images[:400], images[:400]), regression)


class Factors(nn.Module):
    """Matrix factorization: what a user thinks of an item is the product of their embeddings, and a bias of each."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width + 1), nn.Embedding(items, width + 1)
        for each in (self.users, self.items):
            nn.init.normal_(each.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        user, item = self.users(ids[..., 0]), self.items(ids[..., 1])
        scores: Tensor = (user[..., 1:] * item[..., 1:]).sum(-1) + user[..., 0] + item[..., 0]
        return scores


def ratings() -> Subject:
    """What 300 users think of 200 items, a few of which most of them know, with noise; and their factors."""
    random = np.random.default_rng(8)
    ids = np.stack([random.integers(0, 300, 30_000), zipf(random, 200, (30_000,), 0.7)], -1)
    users, items = random.standard_normal((300, 4)), random.standard_normal((200, 4))
    scores = (users[ids[:, 0]] * items[ids[:, 1]]).sum(1) / 2 + 0.3 * random.standard_normal(len(ids))
    inputs, targets = torch.as_tensor(ids), torch.as_tensor(scores, dtype=torch.float32)
    model = Factors(300, 200, 6)
    return Subject(model, TensorDataset(inputs[2000:], targets[2000:]), (inputs[:2000], targets[:2000]), regression)


class Attention(nn.Module):
    """A sequence of symbols, attention with one head, and a perceptron over what the last place has found."""

    def __init__(self, symbols: int, length: int, width: int, classes: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, width), nn.Parameter(0.1 * torch.randn(length, width))
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48), nn.GELU(), nn.Linear(48, classes))

    def forward(self, text: Tensor) -> Tensor:
        found = self.symbols(text) + self.places
        scores = self.query(found) @ self.key(found).transpose(-1, -2) / found.shape[-1] ** 0.5
        outputs: Tensor = self.last((found + scores.softmax(-1) @ self.value(found)).mean(-2))
        return outputs


def majority() -> Subject:
    """Which of six symbols is the most frequent one in fourteen places, those at the end counting twice."""
    random = torch.Generator().manual_seed(9)
    text = torch.randint(6, (14_000, 14), generator=random)
    counts = nn.functional.one_hot(text, 6).float()
    counts[:, 10:] *= 2
    labels = (counts.sum(1) + 0.5 * torch.rand(len(text), 6, generator=random)).argmax(1)
    model = Attention(6, 14, 24, 6)
    return Subject(model, TensorDataset(text[2000:], labels[2000:]), (text[:2000], labels[:2000]), classification)


# --- What is trained: to judge by -------------------------------------------------------------------------------------


def lenet() -> Subject:
    """LeNet with 0.43 M weights, and Fashion-MNIST."""
    images, labels = clothes()
    model = nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip
    return Subject(model, TensorDataset(images[1000:], labels[1000:]), (images[:1000], labels[:1000]), classification)


class Residual(nn.Module):
    """x + f(x), with batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs + self.inside(inputs))


def residual() -> Subject:
    """Fashion-MNIST, 14 x 14, and a residual network of four blocks."""
    images, labels = clothes()
    images = avg_pool2d(images, 2)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), Residual(12), Residual(12),
        nn.Conv2d(12, 24, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(24), nn.ReLU(), Residual(24),
        Residual(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip
    return Subject(model, TensorDataset(images[1000:], labels[1000:]), (images[:1000], labels[:1000]), classification)


class Transformer(nn.Module):
    """A decoder: says the next character at every place."""

    def __init__(self, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, SYMBOLS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.layers(self.symbols(text) + self.places, mask=self.mask, is_causal=True))
        return outputs


def transformer() -> Subject:
    """Docstrings of the standard library, and a transformer of two layers, 32 characters long and 48 wide."""
    text = documentation(("collections/__init__", "difflib", "email/message", "logging/__init__", "optparse", "typing"))
    text = torch.cat([text, documentation(("socket", "subprocess", "threading", "unittest/mock", "urllib/request"))])
    windows = text[: len(text) - len(text) % 33].reshape(-1, 33)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    inputs, targets = windows[:, :-1], windows[:, 1:]
    return Subject(
        Transformer(32, 48, 2),
        TensorDataset(inputs[200:], targets[200:]),
        (inputs[:200], targets[:200]),
        lambda model, batch: cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    )


def churn() -> Subject:
    """Rows of a table with four classes, of 80, 14, 5 and 1 per cent, that a tree of thresholds makes."""
    random = np.random.default_rng(5)
    inputs = random.standard_gamma(2.0, (16_000, 24)) * np.logspace(-0.4, 0.4, 24)
    rank = np.argsort(np.argsort(inputs, axis=0), axis=0) / len(inputs)
    splits = random.integers(0, 24, (12, 3))
    leaves = np.prod(rank[:, splits] > random.uniform(0.2, 0.7, (12, 3)), axis=2) * random.exponential(1.0, 12)
    score = leaves.sum(1) + 0.15 * random.standard_normal(len(inputs))
    labels = torch.as_tensor(np.searchsorted(np.quantile(score, [0.8, 0.94, 0.99]), score))
    features = torch.as_tensor((inputs - inputs.mean(0)) / inputs.std(), dtype=torch.float32)
    model = perceptron(24, 64, 32, 4)
    return Subject(
        model, TensorDataset(features[3000:], labels[3000:]), (features[:3000], labels[:3000]), classification
    )


class ClickThrough(nn.Module):
    """Embeddings of several fields, and a perceptron over all of them."""

    def __init__(self, fields: int, size: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for _ in range(fields))
        self.head = perceptron(fields * width, 32, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found = [embedding(column) for embedding, column in zip(self.embeddings, ids.unbind(-1), strict=True)]
        outputs: Tensor = self.head(torch.cat(found, -1))
        return outputs


def clicks() -> Subject:
    """Six fields of 400 values, most of them rare, each with a weight; pairs of them matter, too."""
    random = np.random.default_rng(6)
    ids = zipf(random, 400, (24_000, 6), 1.0)
    own, pairs = random.standard_normal((6, 400)), random.standard_normal((6, 400, 4))
    features = pairs[np.arange(6), ids]
    score = own[np.arange(6), ids].sum(1) + 0.3 * (features.sum(1) ** 2 - (features**2).sum(1)).sum(1)
    labels = torch.as_tensor(score + random.standard_normal(len(ids)) > np.quantile(score, 0.75)).long()
    inputs = torch.as_tensor(ids)
    return Subject(
        ClickThrough(6, 400, 8),
        TensorDataset(inputs[2000:], labels[2000:]),
        (inputs[:2000], labels[:2000]),
        classification,
    )


def mixture() -> Subject:
    """Overlapping normal distributions, some directions of which are far noisier than others; a linear model."""
    random = torch.Generator().manual_seed(1)
    centres = 0.8 * torch.randn(10, 24, generator=random)
    labels = torch.randint(10, (8000,), generator=random)
    inputs = centres[labels] + torch.randn(8000, 24, generator=random) * torch.linspace(0.3, 2, 24)
    model = nn.Linear(24, 10)
    return Subject(model, TensorDataset(inputs[1000:], labels[1000:]), (inputs[:1000], labels[:1000]), classification)


# --- What they are made of --------------------------------------------------------------------------------------------

SYMBOLS = 64


def classification(model: Any, batch: Any) -> Tensor:
    """Mean cross entropy of a batch of inputs and labels."""
    return cross_entropy(model(batch[0]), batch[1])


def regression(model: Any, batch: Any) -> Tensor:
    """Mean squared error of a batch of inputs and targets."""
    return mse_loss(model(batch[0]), batch[1])


def perceptron(*widths: int) -> nn.Module:
    """Linear layers with rectifiers between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def zipf(random: np.random.Generator, size: int, shape: tuple[int, ...], power: float) -> Any:
    """Numbers below ``size``, the i-th with a probability that falls like i to the minus ``power``: int64."""
    weights = np.arange(1, size + 1) ** -power
    return random.choice(size, shape, p=weights / weights.sum())


def clothes() -> tuple[Tensor, Tensor]:
    """Images of Fashion-MNIST, (samples, 1, 28, 28) in [0, 1], and labels; enlarged digits if it is not installed."""
    fashion_data = _fashion_data()
    directory = fashion_data.find_directory()
    if directory is None:
        (images, labels), _, _ = fashion_data.load_digits()
    else:
        images, labels = fashion_data.load_pair(directory, "train")
    return images[:20_000], labels[:20_000]


def _fashion_data() -> Any:
    """The module of the examples that reads images."""
    sys.path.insert(0, str(HERE.parents[1] / "examples"))
    import fashion_data

    return fashion_data


def documentation(modules: tuple[str, ...]) -> Tensor:
    """Docstrings of modules of the standard library, one after the other, as numbers below `SYMBOLS`: int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    whole = "\n".join(text for name in modules for text in _docstrings(folder / f"{name}.py")).lower()
    alphabet = "\n abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"()[]{}<>=+-*/_`@#%|"
    places = {symbol: place for place, symbol in enumerate(alphabet[: SYMBOLS - 1])}
    return torch.tensor([places.get(symbol, SYMBOLS - 1) for symbol in whole])


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield text


DEVELOPING: dict[str, Task] = {
    task.name: task
    for task in (
        Task("powerlaw", powerlaw, lr=0.03),
        Task("fashion", fashion, lr=0.1),
        Task("digits", digits, lr=0.1),
        Task("words", words, lr=1.0),
        Task("fraud", fraud, batch_size=16, optimizer="adamw", lr=0.01),
        Task("characters", characters, batch_size=16, optimizer="adamw", lr=0.01, warmup=30),
        Task("friedman", friedman, lr=0.05),
        Task("teacher", teacher, batch_size=16, lr=0.05),
        Task("autoencoder", autoencoder, optimizer="adamw", lr=0.005),
        Task("ratings", ratings, batch_size=16, optimizer="adamw", lr=0.03),
        Task("majority", majority, batch_size=16, optimizer="adamw", lr=0.005, warmup=20),
        # The same once more with the other optimizer: what suits AdamW should not be read off other data than SGD's.
        Task("powerlaw_adamw", powerlaw, optimizer="adamw", lr=0.01),
        Task("fashion_adamw", fashion, optimizer="adamw", lr=0.005),
        Task("digits_adamw", digits, optimizer="adamw", lr=0.01),
        Task("words_adamw", words, optimizer="adamw", lr=0.03),
        Task("friedman_adamw", friedman, optimizer="adamw", lr=0.01),
        Task("teacher_adamw", teacher, batch_size=16, optimizer="adamw", lr=0.01),
        Task("fraud_sgd", fraud, batch_size=16, lr=0.05),
        Task("characters_sgd", characters, batch_size=16, lr=0.3, warmup=30),
        Task("autoencoder_sgd", autoencoder, lr=0.3),
        Task("ratings_sgd", ratings, batch_size=16, lr=1.0),
    )
}
"""Tasks to develop on, by name."""
JUDGING: dict[str, Task] = {
    task.name: task
    for task in (
        Task("lenet", lenet, lr=0.03),
        Task("residual", residual, lr=0.1),
        Task("transformer", transformer, batch_size=4, optimizer="adamw", lr=0.006, warmup=40),
        Task("churn", churn, batch_size=16, lr=0.05),
        Task("clicks", clicks, batch_size=16, optimizer="adamw", lr=0.01),
        Task("mixture", mixture, lr=0.06),
    )
}
"""Tasks to judge by, by name: they set no constant and enter no prior."""
TASKS = {**DEVELOPING, **JUDGING}


# --- Clusters ---------------------------------------------------------------------------------------------------------


def _network(nbytes: int, megabits: float, latency: float = 1e-4) -> dict[str, Any]:
    """Links on which weights take as long as LeNet's, 1.72 MB, at so many Mbit/s, if its batch takes 0.1 s.

    Tasks have weights of very different size, and a link is slow or fast by comparison with a batch only.
    """
    link = Link(nbytes / 1.72e6 * megabits * 1e6 / 8 * 0.1 / SECONDS, latency * SECONDS / 0.1)
    return {"group_link": link, "link": link, "server": link}


def _fast(nbytes: int, **further: Any) -> dict[str, Any]:
    return {**_network(nbytes, 10_000), **further}


_LITTLE = Jitter("lognormal", cv=0.1)
_EXPONENTIAL = Jitter("exponential")
CLUSTERS: dict[str, Callable[[int, float], Cluster]] = {
    "equal": lambda nbytes, each: Cluster.even(RANKS, each, jitter=_LITTLE, **_fast(nbytes)),
    "one slow": lambda nbytes, each: Cluster.with_straggler(RANKS, 4.0, each, jitter=_LITTLE, **_fast(nbytes)),
    "exponential": lambda nbytes, each: Cluster.even(RANKS, each, jitter=_EXPONENTIAL, **_fast(nbytes)),
    "lognormal": lambda nbytes, each: Cluster.even(RANKS, each, jitter=Jitter("lognormal", cv=0.5), **_fast(nbytes)),
    "speeds 1:2:4": lambda nbytes, each: Cluster.of_speeds(
        [1, 1, 2, 2, 2, 4, 4, 4], each, jitter=_LITTLE, **_fast(nbytes)
    ),
    "two generations": lambda nbytes, each: Cluster.of_speeds(
        [1] * 4 + [2] * 4, each, jitter=Jitter("gamma", 0.3), **_fast(nbytes)
    ),
    "100 Mbit": lambda nbytes, each: Cluster.even(RANKS, each, jitter=_LITTLE, **_network(nbytes, 100)),
    "one slow, 100 Mbit": lambda nbytes, each: Cluster.with_straggler(
        RANKS, 4.0, each, jitter=_LITTLE, **_network(nbytes, 100)
    ),
    "exponential, 1 Gbit": lambda nbytes, each: Cluster.even(
        RANKS, each, jitter=_EXPONENTIAL, **_network(nbytes, 1000)
    ),
    "saturated server": lambda nbytes, each: Cluster.even(
        RANKS, each, jitter=_EXPONENTIAL, **_fast(nbytes, update_seconds=0.4 * SECONDS)
    ),
    "wide area": lambda nbytes, each: Cluster.even(
        RANKS, each, jitter=Jitter("lognormal", cv=0.2), **_network(nbytes, 300, latency=0.03)
    ),
}
"""Clusters by name, for weights of so many bytes and samples that take a device of speed 1 so many seconds."""
PRIOR_CLUSTERS = {
    "nearly equal": Cluster.even(RANKS, jitter=_LITTLE),
    "exponential": Cluster.even(RANKS, jitter=_EXPONENTIAL),
}
"""Step times with which the prior is learnt: links take no time there."""


def cluster_of(name: str, task: Task) -> Cluster:
    """The cluster of that name for a task: a batch takes a device of speed 1 one second.

    Raises:
        KeyError: there is none.
    """
    return CLUSTERS[name](task.subject.nbytes, SECONDS / task.batch_size)


# --- What users would have set ---------------------------------------------------------------------------------------


def loss_after(
    task: Task, updates: int, momentum: float | None = None, lr: float | None = None, seed: int = 0
) -> float:
    """The smoothed held-out loss of a synchronous run after so many updates."""
    most = updates + EVERY * SMOOTHED // 2
    run = task.train(PRIOR_CLUSTERS["nearly equal"], momentum=momentum, lr=lr, seed=seed, most=most, until=-math.inf)
    return float(run.trace.evaluated["smooth_loss"][-1])


class Grid:
    """Held-out losses of synchronous runs of a task, each measured once.

    Args:
        task: what is trained.
        seeds: orders of the data, whose losses are averaged.
    """

    def __init__(self, task: Task, seeds: int = 2) -> None:
        self.task, self.seeds = task, seeds
        self.losses: dict[tuple[float, float], float] = {}

    def loss(self, momentum: float, step: int) -> float:
        """After `Task.updates` updates, where ``step`` counts factors of √3 from the task's rate; infinite if lost."""
        rate = self.task.lr * 3 ** (step / 2) * (1.0 if self.task.is_adaptive else (1 - momentum) / 0.1)
        setting = momentum, float(f"{rate:.3g}")
        if setting not in self.losses:
            losses = (loss_after(self.task, self.task.updates, *setting, seed=seed) for seed in range(self.seeds))
            found = sum(losses) / self.seeds
            self.losses[setting] = found if math.isfinite(found) else math.inf
        return self.losses[setting]

    def search(self) -> tuple[float, float]:
        """The best rate for a momentum of 0.9, then the best momentum with steps of that size."""
        steps = list(STEPS)
        while True:
            best = min(steps, key=lambda step: self.loss(0.9, step))
            if best not in (steps[0], steps[-1]):
                break
            steps = [best - 1, *steps] if best == steps[0] else [*steps, best + 1]
        for momentum in () if self.task.is_adaptive else (0.0, 0.6):
            self.loss(momentum, best)
        return min(self.losses, key=lambda setting: self.losses[setting])


def record(task: Task) -> dict[str, Any]:
    """The synchronous grid of a task: held-out loss of every setting, the best one, and its loss as the target."""
    grid = Grid(task)
    momentum, lr = best = grid.search()
    settings = [
        {"momentum": momentum, "lr": lr, "held_out": round(loss, 4) if math.isfinite(loss) else None}
        for (momentum, lr), loss in grid.losses.items()
    ]
    target = float(f"{grid.losses[best]:.4g}")
    return {"momentum": momentum, "lr": lr, "target": target, "seeds": grid.seeds, "grid": settings}


def main() -> None:
    """Prints the lists, or records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="*", metavar="NAME", help="tasks to record; all if none is named")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.record is not None:
        for name in given.record or TASKS:
            began = time.perf_counter()
            found = record(TASKS[name])
            known = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
            known = {each: {**known, name: found}[each] for each in TASKS if each in {**known, name: found}}
            RECORDED.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{name}: recorded in {time.perf_counter() - began:.0f} s", flush=True)
    known = json.loads(RECORDED.read_text())
    for title, tasks in (("to develop on", DEVELOPING), ("to judge by", JUDGING)):
        print(title)
        for task in tasks.values():
            own = (
                f"momentum {task.momentum}, lr {task.own_lr}, target {task.target}"
                if task.name in known
                else "not recorded"
            )
            print(f"  {task.name:12} {task.optimizer:6} batch {RANKS} x {task.batch_size:2}  {own}")
    print("clusters:", ", ".join(CLUSTERS))


if __name__ == "__main__":
    main()
