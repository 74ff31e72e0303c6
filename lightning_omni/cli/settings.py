"""The settings that ``simulate`` and ``compare`` share, and what becomes of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator import Cluster, Device, Failure, Jitter, Link, Slowdown, Workload, workload_named

_EVALUATIONS = 50
"""About that many in a run, unless the user says how often."""
_DEFAULT_EPOCHS = 10
_OF_CLUSTER = (
    "devices",
    "seconds_per_sample",
    "overhead",
    "jitter",
    "straggler",
    "bandwidth",
    "latency",
    "server_bandwidth",
    "update_seconds",
    "head_seconds_per_sample",
)
"""The settings whose place a whole cluster takes."""
_POSITIVE = (
    "devices",
    "straggler",
    "batch_size",
    "epochs",
    "updates",
    "seconds",
    "evaluate_every",
    "evaluate_every_seconds",
    "threads",
)


@dataclass(frozen=True)
class Devices:
    """Some equal devices: a batch of b samples takes ``(overhead + b * seconds_per_sample) * jitter``.

    Args:
        count: How many.
        seconds_per_sample: Of forward and backward, in seconds.
        overhead: Of every batch, in seconds.
        jitter: How these times scatter.
    """

    count: int = 1
    seconds_per_sample: float = 1e-3
    overhead: float = 0.0
    jitter: Jitter = field(default_factory=Jitter)


@dataclass(frozen=True)
class Machines:
    """A whole cluster.

    Args:
        devices: One entry for each kind, in the order of ranks.
        link: From each group to the server, and from group to group.
        server: The server's network card, which all transfers share.
        group_link: Between neighbours in a group's ring all-reduce.
        update_seconds: Time that the server takes for one push, in seconds.
        head_seconds_per_sample: Time that a merged head takes for one sample, in seconds.
        events: Ranks that die (rank, time), or are slow for a while (rank, start, stop, factor).
    """

    devices: tuple[Devices, ...]
    link: Link = field(default_factory=Link)
    server: Link = field(default_factory=Link)
    group_link: Link = field(default_factory=Link)
    update_seconds: float = 0.0
    head_seconds_per_sample: float = 0.0
    events: tuple[Failure | Slowdown, ...] = ()

    def cluster(self) -> Cluster:
        """The cluster that is described."""
        devices = [
            Device(kind.seconds_per_sample, kind.overhead, kind.jitter)
            for kind in self.devices
            for _ in range(kind.count)
        ]
        return Cluster(
            tuple(devices),
            self.link,
            self.server,
            self.group_link,
            self.update_seconds,
            self.head_seconds_per_sample,
            tuple(self.events),
        )


@dataclass(frozen=True)
class Settings:
    """What is trained on which cluster, for how long, and where the results go.

    Args:
        groups: Compute groups, into which the devices are split evenly. None makes every device a group of its own.
        devices: Devices in the cluster.
        seconds_per_sample: Seconds of forward and backward for one sample.
        overhead: Seconds that every batch takes besides.
        jitter: How the devices' times scatter: none, exponential, or normal, lognormal or gamma with their standard
            deviation over their mean, as in lognormal:0.2.
        straggler: The last device takes so many times as long as the others.
        bandwidth: Of all links, to the server as inside groups, in bytes per second.
        latency: Of all links, in seconds.
        server_bandwidth: Of the server's network card, which all groups share, in bytes per second. None for that of
            the links.
        update_seconds: Seconds that the server takes for one push.
        head_seconds_per_sample: Seconds that a merged head takes for one sample, one group at a time.
        cluster: A whole cluster with different devices, links and failures (best in YAML), instead of these settings.
        workload: What is trained: synthetic, or file.py:function or package.module:function that returns a
            lightning_omni.simulator.Workload.
        batch_size: Samples in one device's batch.
        rebalance: auto gives the devices of a group parts of its batch in proportion to their speeds; off, equal parts.
        merged: Name of a submodule that stays at the server.
        lr: Learning rate, or several as in [0.03, 0.1]: then each method is shown with the one that suits it best, the
            target reached soonest or else the lowest last loss. None for the workload's.
        momentum: Momentum. None for the workload's.
        epochs: Passes over the data after which a run ends; 10 if nothing else ends it.
        updates: Updates after which a run ends.
        seconds: Virtual seconds after which a run ends.
        target: A figure that ends a run when it is reached, as in accuracy=0.9.
        evaluate_every: Updates between two evaluations. Without a period there are about 50 evaluations.
        evaluate_every_seconds: Virtual seconds between two evaluations.
        seed: Of weights, data order and jitter. The same seed gives the same trace.
        threads: Threads for the arithmetic. Small models are fastest with one.
        out: Folder for pictures and traces; or the picture's file (.png, .svg or .pdf), with the traces beside it.
        picture: Draw a picture.
    """

    groups: int | None = None
    devices: int = 8
    seconds_per_sample: float = 1e-3
    overhead: float = 0.0
    jitter: str = "lognormal:0.2"
    straggler: float = 1.0
    bandwidth: float = math.inf
    latency: float = 0.0
    server_bandwidth: float | None = None
    update_seconds: float = 0.0
    head_seconds_per_sample: float = 0.0
    cluster: Machines | None = None
    workload: str = "synthetic"
    batch_size: int = 32
    rebalance: Literal["off", "auto"] = "off"
    merged: str | None = None
    lr: float | list[float] | None = None
    momentum: float | None = None
    epochs: int | None = None
    updates: int | None = None
    seconds: float | None = None
    target: str | None = None
    evaluate_every: int | None = None
    evaluate_every_seconds: float | None = None
    seed: int = 0
    threads: int = 1
    out: Path = Path("simulated")
    picture: bool = True


@dataclass(frozen=True)
class Task:
    """The settings as objects, checked.

    Args:
        cluster: the simulated machines.
        workload: what is trained on them.
        target: name and value of the figure that ends a run, or None.
        optimizers: makes the workload's optimizer with each of the learning rates to try; None for its own.
        options: the rest of what `lightning_omni.simulator.simulate` takes by keyword.
    """

    cluster: Cluster
    workload: Workload
    target: tuple[str, float] | None
    optimizers: dict[float | None, Callable[[Any], Optimizer]]
    options: dict[str, Any]

    @classmethod
    def of(cls, settings: Settings) -> Task:
        """What the settings describe.

        Raises:
            ConfigurationError: a setting is wrong; the message names it.
        """
        for name in _POSITIVE:
            value = getattr(settings, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigurationError(f"{_flag(name)} {value}: pass a number above 0")
        cluster = cluster_of(settings)
        workload = workload_named(settings.workload, settings.seed)
        options = {
            "batch_size": settings.batch_size,
            "rebalance": settings.rebalance,
            "merged": settings.merged,
            "evaluate": workload.evaluate,
            "max_updates": settings.updates,
            "max_epochs": epochs_of(settings),
            "max_seconds": settings.seconds,
            "seed": settings.seed,
            **(periods_of(settings, cluster, workload) if workload.evaluate is not None else {}),
        }
        rates = settings.lr if isinstance(settings.lr, list) else [settings.lr]
        if not rates:
            raise ConfigurationError("--lr []: pass at least one learning rate")
        optimizers = {lr: optimizer_of(workload, {"lr": lr, "momentum": settings.momentum}) for lr in rates}
        return cls(cluster, workload, target_of(settings.target, workload), optimizers, options)


def cluster_of(settings: Settings) -> Cluster:
    """The cluster of the simple settings, or the whole one that was given instead."""
    if settings.cluster is not None:
        plain = {each.name: each.default for each in fields(Settings)}
        changed = [name for name in _OF_CLUSTER if getattr(settings, name) != plain[name]]
        if changed:
            flags = ", ".join(_flag(name) for name in changed)
            raise ConfigurationError(f"cluster describes the whole cluster; move {flags} into it, or leave it out")
        return settings.cluster.cluster()
    link = Link(settings.bandwidth, settings.latency)
    card = settings.bandwidth if settings.server_bandwidth is None else settings.server_bandwidth
    return Cluster.with_straggler(
        settings.devices,
        settings.straggler,
        settings.seconds_per_sample,
        settings.overhead,
        jitter_of(settings.jitter),
        link=link,
        server=Link(card),
        group_link=link,
        update_seconds=settings.update_seconds,
        head_seconds_per_sample=settings.head_seconds_per_sample,
    )


def jitter_of(text: str) -> Jitter:
    """How times scatter, from a text such as ``"lognormal:0.2"``."""
    kind, _, cv = text.partition(":")
    if kind in ("normal", "lognormal", "gamma") and not cv:
        raise ConfigurationError(f"--jitter {text}: by how much? pass {kind}:0.2 for a fifth of the mean")
    try:
        return Jitter(kind, float(cv) if cv else 0.0)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigurationError(
            f"--jitter {text}: pass none, exponential, or normal, lognormal or gamma as in lognormal:0.2"
        ) from error


def optimizer_of(workload: Workload, changes: dict[str, float | None]) -> Callable[[Any], Optimizer]:
    """The workload's optimizer with other hyperparameters than its own."""
    given = {name: value for name, value in changes.items() if value is not None}
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise ConfigurationError(f"{_flag(name)} {value}: pass a number, 0 or more")

    def make(parameters: Any) -> Optimizer:
        optimizer = workload.optimizer(parameters)
        for name, value in given.items():
            if name not in optimizer.defaults:
                raise ConfigurationError(f"{_flag(name)}: {type(optimizer).__name__} has none; leave it out")
            for group in optimizer.param_groups:
                group[name] = value
            optimizer.defaults[name] = value
        return optimizer

    return make


def epochs_of(settings: Settings) -> int | None:
    """Epochs after which a run ends, if nothing else ends it before."""
    if settings.epochs is None and settings.updates is None and settings.seconds is None:
        return _DEFAULT_EPOCHS
    return settings.epochs


def periods_of(settings: Settings, cluster: Cluster, workload: Workload) -> dict[str, float | None]:
    """How often a run is evaluated: as the user says, or about 50 times."""
    if settings.evaluate_every is not None or settings.evaluate_every_seconds is not None:
        return {
            "evaluate_every": settings.evaluate_every,
            "evaluate_every_seconds": settings.evaluate_every_seconds,
        }
    if settings.seconds is not None:
        return {"evaluate_every_seconds": settings.seconds / _EVALUATIONS}
    if settings.updates is not None:
        return {"evaluate_every": max(1, settings.updates // _EVALUATIONS)}
    size = max(1, settings.batch_size)
    there_and_back = 2 * cluster.link.seconds(workload.nbytes)
    pace = sum(size / (device.seconds(size) + there_and_back) for device in cluster.devices)
    return {"evaluate_every_seconds": len(workload.data) * (epochs_of(settings) or 1) / pace / _EVALUATIONS}


def target_of(text: str | None, workload: Workload) -> tuple[str, float] | None:
    """Name and value of the figure that ends a run."""
    if text is None:
        return None
    name, _, value = text.partition("=")
    try:
        target = (name.strip(), float(value))
    except ValueError as error:
        raise ConfigurationError(f"--target {text}: pass a figure and its value, as in accuracy=0.9") from error
    if workload.evaluate is None:
        raise ConfigurationError(f"--target {text}: the workload evaluates nothing; give it evaluate=")
    with torch.no_grad():
        figures = workload.evaluate(copy.deepcopy(workload.model).eval())
    if target[0] not in figures:
        raise ConfigurationError(f"--target {text}: the workload evaluates {', '.join(figures)}; pass one of these")
    return target


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
