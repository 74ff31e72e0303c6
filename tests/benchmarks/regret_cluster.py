"""What `regret.py` trains, and on what: two small models, eight machines that do not exist, and runs that are kept."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.utils.data import TensorDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.performance.forecast import Setting, TrialResult
from lightning_omni.performance.measured import Measured
from lightning_omni.performance.profile import Profile
from lightning_omni.protocol.leases import apportion
from lightning_omni.simulator import Cluster, Jitter, Link, simulate
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

RANKS = 8
BATCH = 8
"""Samples of one rank in a batch."""
EVERY = 10
"""Batches of all ranks between two evaluations."""
SMOOTHED = 5
"""Evaluations over which the held-out loss is averaged: a single lucky one is not the target."""
REPEATED = 30
"""Batches of all ranks that come once more before a probe of a run under way: they fill the momentum buffer."""
SECONDS = 1.0
"""For which a device of speed 1 computes a batch."""


# --- What is trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its data, and when it is good enough.

    Args:
        name: for the table.
        model: with the weights at which training starts.
        data: to train on.
        held_out: inputs and labels.
        target: held-out loss.
        horizon: batches of all ranks that a user would plan for, about twice what the best setting needs.
        lr: about the best learning rate of one group with a momentum of 0.9.
    """

    name: str
    model: nn.Module
    data: TensorDataset
    held_out: tuple[Tensor, Tensor]
    target: float
    horizon: int
    lr: float

    @cached_property
    def nbytes(self) -> int:
        """Of all weights."""
        return sum(weight.nbytes for weight in self.model.parameters())


def powerlaw() -> Workload:
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
    data, held_out = TensorDataset(inputs[:8000], labels[:8000]), (inputs[8000:], labels[8000:])
    return Workload("powerlaw", network(width, 64, 64, 10), data, held_out, target=1.17, horizon=1200, lr=0.03)


def fashion() -> Workload:
    """Fashion-MNIST, 14 x 14; scikit-learn's digits if it is not there."""
    import fashion_data

    if (directory := fashion_data.find_directory()) is None:
        print("Fashion-MNIST is not installed: scikit-learn's digits stand in, and numbers will differ")
        (images, labels), held_out, _ = fashion_data.load_digits()
        return _of_images("digits", images, labels, held_out, target=0.08, horizon=900, lr=0.1)
    images, labels = fashion_data.load_pair(directory, "train")
    held_out = images[50_000:53_000], labels[50_000:53_000]
    return _of_images("fashion", images[:20_000], labels[:20_000], held_out, target=0.5, horizon=1400, lr=0.1)


def _of_images(name: str, images: Tensor, labels: Tensor, held_out: tuple[Tensor, Tensor], **plan: Any) -> Workload:
    small, small_held_out = (avg_pool2d(each, 2).flatten(1) for each in (images, held_out[0]))
    data = TensorDataset(small, labels)
    return Workload(name, network(196, 64, 10), data, (small_held_out, held_out[1]), **plan)


WORKLOADS = {"powerlaw": powerlaw, "fashion": fashion}


def network(*widths: int) -> nn.Module:
    """A perceptron, always with the same weights."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


class HeldOut:
    """The held-out loss of one run, and its mean over the last few evaluations."""

    def __init__(self, workload: Workload) -> None:
        self.inputs, self.labels = workload.held_out
        self.losses: list[float] = []

    def __call__(self, model: nn.Module) -> dict[str, float]:
        self.losses.append(float(cross_entropy(model(self.inputs), self.labels)))
        last = self.losses[-SMOOTHED:]
        return {"smooth_loss": sum(last) / SMOOTHED if len(last) == SMOOTHED else math.inf}


# --- On what ---------------------------------------------------------------------------------------------------------


def _network(nbytes: int, allreduce: float, exchange: float) -> dict[str, Any]:
    """Links with which an all-reduce of all ranks and an exchange of all weights take so many batches' time."""
    whole = 2 * (RANKS - 1) / RANKS
    return {
        "group_link": Link(nbytes * whole / (allreduce * SECONDS)),
        "link": Link(2 * nbytes / (exchange * SECONDS)),
    }


def cluster_of(name: str, nbytes: int) -> Cluster:
    """The cluster of that name, for weights of so many bytes.

    Raises:
        KeyError: there is none.
    """
    each = SECONDS / BATCH
    fast = _network(nbytes, 0.03, 0.03)
    little = Jitter("lognormal", cv=0.1)
    makers = {
        "even": lambda: Cluster.even(RANKS, each, jitter=little, **fast),
        "straggler": lambda: Cluster.with_straggler(RANKS, 4.0, each, jitter=little, **fast),
        "exponential": lambda: Cluster.even(RANKS, each, jitter=Jitter("exponential"), **fast),
        "slow network": lambda: Cluster.even(RANKS, each, jitter=little, **_network(nbytes, 1.0, 1.0)),
        "saturated": lambda: Cluster.even(
            RANKS, each, jitter=Jitter("exponential"), update_seconds=0.4 * SECONDS, **fast
        ),
        "mixed": lambda: Cluster.of_speeds([1, 1, 1, 2, 2, 2, 4, 4], each, jitter=Jitter("lognormal", cv=0.2), **fast),
        "lognormal": lambda: Cluster.even(
            RANKS, each, jitter=Jitter("lognormal", cv=0.3), **_network(nbytes, 0.4, 0.3)
        ),
        "two generations": lambda: Cluster.of_speeds([1] * 4 + [2] * 4, each, jitter=little, **fast),
        "gamma": lambda: Cluster.even(RANKS, each, jitter=Jitter("gamma", 0.5), **_network(nbytes, 0.3, 0.2)),
        "slow ring": lambda: Cluster.even(
            RANKS, each, jitter=little, update_seconds=0.1 * SECONDS, **_network(nbytes, 0.8, 0.1)
        ),
    }
    return makers[name]()


CLUSTERS = ("even", "straggler", "exponential", "slow network", "saturated", "mixed", "lognormal")
FURTHER = ("two generations", "gamma", "slow ring")
"""Clusters that no constant was set on."""


class Cache:
    """Outcomes of runs in a JSON file: runs of one setting are asked for again and again.

    Args:
        path: of the file, or None to forget everything.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.known = path, {}
        if path is not None and path.is_file():
            self.known = json.loads(path.read_text())

    def save(self) -> None:
        """Writes the file."""
        if self.path is not None:
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.known))
            part.replace(self.path)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Where training has come to.

    Args:
        model: with its weights.
        history: how it came there; the empty string for the very start.
        before: the same `REPEATED` batches earlier, None for the very start.
        setting: with which it came there.
    """

    model: nn.Module
    history: str = ""
    before: nn.Module | None = None
    setting: Setting | None = None


@dataclass(eq=False)
class Machine:
    """A workload on a cluster: probes, and runs to the target.

    Args:
        workload: what is trained.
        name: of the cluster.
        cache: where runs are kept.
    """

    workload: Workload
    name: str
    cache: Cache = field(default_factory=lambda: Cache(None))

    def __post_init__(self) -> None:
        self.cluster = cluster_of(self.name, self.workload.nbytes)
        self.start = Snapshot(self.workload.model)

    @property
    def speeds(self) -> list[float]:
        """Batches per second of each rank."""
        return [1 / device.seconds(BATCH) for device in self.cluster.devices]

    @cached_property
    def profile(self) -> Profile:
        """The hardware model of far longer measurements than any search makes."""
        traces = [self._simulate(self.start, Setting(g, 0.0, 0.01), None, max_updates=100 * g) for g in (1, RANKS)]
        return Profile.fit([Measured.of(trace) for trace in traces])

    def throughput(self, setting: Setting) -> float:
        """Samples per second, by that model."""
        return self.profile.predict(setting.groups, rebalance=setting.rebalance).samples_per_second.value

    def topology(self, setting: Setting, profile: Profile | None = None) -> Topology:
        """The groups, by speed where that is faster by a profile (of the cluster itself if there is no other)."""
        return (profile or self.profile).predict(setting.groups, rebalance=setting.rebalance).topology

    @cached_property
    def _step_seconds(self) -> dict[bool, float]:
        """Mean seconds of a batch of all ranks as one group, with proportional batches and without."""
        found = {}
        for rebalance in (False, True):
            parts = apportion(RANKS * BATCH, self.speeds if rebalance else [1.0] * RANKS)
            random = np.random.default_rng(0)
            seconds = [
                device.seconds(part) * device.jitter.factors(random, 20_000)
                for device, part in zip(self.cluster.devices, parts, strict=True)
            ]
            ring = self.cluster.group_link.ring_seconds(self.workload.nbytes, RANKS)
            found[rebalance] = float(np.max(seconds, axis=0).mean()) + ring
        return found

    # --- Runs --------------------------------------------------------------------------------------------------------

    def _simulate(
        self, snapshot: Snapshot, setting: Setting, topology: Topology | None, *, seed: int = 0, **options: Any
    ) -> Trace:
        options.setdefault(
            "optimizer", lambda parameters: torch.optim.SGD(parameters, lr=setting.lr, momentum=setting.momentum)
        )
        return simulate(
            "async_sgd",
            topology or Topology.even(RANKS, setting.groups),
            self.cluster,
            snapshot.model,
            self.workload.data,
            loss=loss,
            batch_size=BATCH,
            rebalance="auto" if setting.rebalance else "off",
            seed=seed,
            **options,
        )

    def probe(
        self, snapshot: Snapshot, setting: Setting, samples: int, seed: int, profile: Profile | None
    ) -> tuple[TrialResult, Measured | None]:
        """Trains on so many samples, of all groups together, and rolls back.

        Args:
            snapshot: where to begin.
            setting: to train with.
            samples: to train on.
            seed: of the samples' order; the same for all probes that are to be compared.
            profile: what is known of the cluster, which says who is in which group.
        """
        topology = None if profile is None else self.topology(setting, profile)
        updates = samples * setting.groups // (BATCH * RANKS)
        trace, skipped, began = self._probed(snapshot, setting, topology, seed, updates)
        try:
            measured = Measured.of(trace)
        except ConfigurationError:  # a slow rank did not make its two steps
            measured = None
        ended = tuple(np.cumsum(trace.rows["samples"][skipped:]).tolist())
        problem = trace.ended if trace.ended.startswith("diverged") else ""
        losses = tuple(trace.rows["loss"][skipped:].tolist())
        return TrialResult(setting, ended, losses, trace.seconds - began, problem), measured

    def _probed(
        self, snapshot: Snapshot, setting: Setting, topology: Topology | None, seed: int, updates: int
    ) -> tuple[Trace, int, float]:
        """The trace, and how many updates and seconds of it came before the probe.

        A fork of a real run has the optimizer's state, a simulation begins without. So a run under way is repeated for
        a while, and then goes on at the probe's learning rate.
        """
        was = snapshot.setting
        if snapshot.before is None or was is None or (was.groups, was.momentum) != (setting.groups, setting.momentum):
            return self._simulate(snapshot, setting, topology, seed=seed, max_updates=updates), 0, 0.0
        skipped, made = REPEATED * setting.groups, []

        def make(parameters: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.SGD(parameters, lr=was.lr, momentum=was.momentum))
            return made[-1]

        def switch(model: nn.Module) -> dict[str, float]:
            for optimizer in made:
                optimizer.param_groups[0]["lr"] = setting.lr
            return {"switched": 1.0}

        options = {"optimizer": make, "evaluate": switch, "evaluate_every": skipped, "max_updates": skipped + updates}
        trace = self._simulate(Snapshot(snapshot.before), setting, topology, seed=seed, **options)
        return trace, skipped, float(trace.evaluated["time"][0])

    def train(self, snapshot: Snapshot, setting: Setting, batches: int, seed: int) -> tuple[Snapshot, float]:
        """Trains for so many batches of all ranks; where that leads to, and the seconds."""
        topology = self.topology(setting)
        models = []
        for count in (batches - REPEATED, batches):  # the longer run begins as the shorter one
            trace = self._simulate(snapshot, setting, topology, seed=seed, max_updates=count * setting.groups)
            models.append(network(*_widths(snapshot.model)))
            models[-1].load_state_dict({name: torch.as_tensor(weight) for name, weight in trace.weights.items()})
        history = f"{snapshot.history}/{self.name}:{setting}:{batches}:{seed}"
        return Snapshot(models[1], history, models[0], setting), trace.seconds

    def seconds_to_target(
        self, setting: Setting, seed: int, cap: float = math.inf, snapshot: Snapshot | None = None
    ) -> float:
        """Seconds with one setting from a snapshot to the target; infinite if that takes longer than ``cap``."""
        where = snapshot or self.start
        # One group trains the same whatever the cluster, only faster or slower.
        unit = self._step_seconds[setting.rebalance] if setting.groups == 1 else 1.0
        place = "synchronous" if setting.groups == 1 else f"{self.name}|{self.topology(setting).groups}"
        split = setting.rebalance and setting.groups > 1
        key = f"{self.workload.name}|{where.history}|{place}|{split}|{setting.momentum:.4g}|{setting.lr:.4g}|{seed}"
        known: Mapping[str, Any] | None = self.cache.known.get(key)
        if known is None or (known["reached"] is None and known["cap"] < 0.999 * min(cap / unit, self._longest)):
            known = self.cache.known[key] = self._run(where, setting, seed, min(cap / unit, self._longest))
        return math.inf if known["reached"] is None or known["reached"] * unit > cap else known["reached"] * unit

    @property
    def _longest(self) -> float:
        """No run is worth more: seconds of five horizons of the slowest rank."""
        return 5 * self.workload.horizon / min(self.speeds)

    def _run(self, snapshot: Snapshot, setting: Setting, seed: int, cap: float) -> dict[str, Any]:
        alone = setting.groups == 1
        limit = {"max_updates": max(1, math.floor(cap))} if alone else {"max_seconds": cap}
        trace = self._simulate(
            snapshot,
            setting,
            self.topology(setting),
            seed=seed,
            evaluate=HeldOut(self.workload),
            evaluate_every=EVERY * setting.groups,
            target=("smooth_loss", self.workload.target),
            **limit,
        )
        reached = float(trace.updates if alone else trace.seconds)
        return {"reached": reached if trace.ended == "target" else None, "cap": cap}


def _widths(model: nn.Module) -> list[int]:
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return [layers[0].in_features, *(layer.out_features for layer in layers)]
