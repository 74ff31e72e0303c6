"""The settings of ``simulate`` as objects: a cluster, a workload, and the end of a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_omni.cli.simulate_settings import SimulationSettings
from lightning_omni.cli.units import check_above_zero, check_momentum, flag, rate_of, seconds_of, time_of
from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator import (
    Cluster,
    Computation,
    Evaluation,
    Jitter,
    Limits,
    Link,
    Workload,
    workload_named,
)
from lightning_omni.wire.compression import Compression

_EVALUATIONS = 50
"""Approximate number of evaluations in a run by default."""
_DEFAULT_EPOCHS = 10
_POSITIVE = ("devices", "straggler", "batch_size", "epochs", "updates", "evaluate_every", "threads")
_POSITIVE_TIMES = ("seconds", "evaluate_every_seconds")


@dataclass(frozen=True)
class Task:
    """The settings as objects, checked.

    Args:
        rates: the user's learning rates; empty for the workload's own, as None for ``momentum``.
        options: other arguments of `lightning_omni.simulator.simulate`.
    """

    cluster: Cluster
    workload: Workload
    target: tuple[str, float] | None
    rates: tuple[float, ...]
    momentum: float | None
    options: dict[str, Any]

    @classmethod
    def of(cls, settings: SimulationSettings) -> Task:
        """Convert settings; raise `ConfigurationError` that names a wrong one."""
        check_above_zero({name: getattr(settings, name) for name in _POSITIVE})
        if settings.seed < 0:
            raise ConfigurationError(f"--seed {settings.seed}: pass a whole number from 0 up")
        given = {name: getattr(settings, name) for name in _POSITIVE_TIMES}
        times: dict[str, Any] = {name: time_of(flag(name), each) for name, each in given.items() if each is not None}
        settings = replace(settings, **times)
        cluster = cluster_of(settings)
        workload = workload_named(settings.workload, settings.seed)
        rates, target = rates_of(settings), target_of(settings.target, workload)
        for name in ("evaluate_every", "evaluate_every_seconds"):
            if getattr(settings, name) is not None and not workload.evaluate:
                raise ConfigurationError(
                    f"{flag(name)}: the workload evaluates nothing; give it evaluate=, or leave it out"
                )
        options = {
            "batch_size": settings.batch_size,
            "computation": Computation(rebalance=settings.rebalance),
            "merged": settings.merged,
            "compression": compression_of(settings),
            "overlap": settings.overlap,
            "limits": limits_of(settings),
            "seed": settings.seed,
            "evaluation": (
                Evaluation(**periods_of(settings, cluster, workload), target=target) if workload.evaluate else None
            ),
        }
        task = cls(cluster, workload, target, rates, settings.momentum, options)
        task.optimizer(rates[0] if rates else None)(copy.deepcopy(workload.model).parameters())  # may raise an error
        return task

    @property
    def own_rate(self) -> float | None:
        optimizer = self.workload.optimizer(copy.deepcopy(self.workload.model).parameters())
        rate = optimizer.param_groups[0].get("lr")
        return float(rate) if rate else None

    def optimizer(self, rate: float | None) -> Callable[[Any], Optimizer]:
        given = {name: value for name, value in (("lr", rate), ("momentum", self.momentum)) if value is not None}

        def make(parameters: Any) -> Optimizer:
            optimizer = self.workload.optimizer(parameters)
            for name, value in given.items():
                if name not in optimizer.defaults:
                    raise ConfigurationError(f"{flag(name)}: {type(optimizer).__name__} has none; leave it out")
                first = optimizer.param_groups[0].get(name)
                for group in optimizer.param_groups:  # the ratios between learning rates stay
                    group[name] = value * (group[name] / first) if name == "lr" and first else value
                optimizer.defaults[name] = value
            return optimizer

        return make


# --- The cluster ------------------------------------------------------------------------------------------------------


def cluster_of(settings: SimulationSettings) -> Cluster:
    link = Link(rate_of("--bandwidth", settings.bandwidth), seconds_of("--latency", settings.latency))
    card, head = settings.server_bandwidth, seconds_of("--head-seconds-per-sample", settings.head_seconds_per_sample)
    if head and settings.merged is None:
        raise ConfigurationError(
            f"--head-seconds-per-sample {settings.head_seconds_per_sample}: it is of a merged head, and there is none;"
            " pass --merged, too"
        )
    return Cluster.with_straggler(
        settings.devices,
        settings.straggler,
        seconds_of("--seconds-per-sample", settings.seconds_per_sample),
        seconds_of("--overhead", settings.overhead),
        jitter_of(settings.jitter),
        link=link,
        server=Link(link.bandwidth if card is None else rate_of("--server-bandwidth", card)),
        group_link=link,
        update_seconds=seconds_of("--update-seconds", settings.update_seconds),
        head_seconds_per_sample=head,
        servers=settings.servers,
        nodes=settings.nodes,
    )


def jitter_of(given: str) -> Jitter:
    kind, _, by = given.partition(":")
    if kind in ("normal", "lognormal", "gamma") and not by:
        raise ConfigurationError(f"--jitter {given}: by how much? pass {kind}:0.2 for a fifth of the mean")
    try:
        return Jitter(kind, float(by or math.nan))  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigurationError(
            f"--jitter {given}: pass none, exponential, or normal, lognormal or gamma as in lognormal:0.2"
        ) from error


# --- The run ----------------------------------------------------------------------------------------------------------


def epochs_of(settings: SimulationSettings) -> int | None:
    if settings.epochs is None and settings.updates is None and settings.seconds is None:
        return _DEFAULT_EPOCHS
    return settings.epochs


def limits_of(settings: SimulationSettings) -> Limits:
    given: dict[str, Any] = {"updates": settings.updates, "epochs": epochs_of(settings), "seconds": settings.seconds}
    return Limits(**{name: value for name, value in given.items() if value is not None})


def compression_of(settings: SimulationSettings) -> Compression:
    wire = {"push": settings.compression} if isinstance(settings.compression, str) else settings.compression
    if set(wire) - {"push", "pull"}:
        raise ConfigurationError(f'--compression {wire}: pass int8 or the like, or {{"push": "int8", "pull": "bf16"}}')
    return Compression(**wire, all_reduce=settings.all_reduce)


def periods_of(settings: SimulationSettings, cluster: Cluster, workload: Workload) -> dict[str, Any]:
    """Return the time or updates between evaluations: the user's, or for about 50 evaluations."""
    if settings.evaluate_every is not None or settings.evaluate_every_seconds is not None:
        return {"every": settings.evaluate_every, "every_seconds": settings.evaluate_every_seconds}
    if settings.seconds is not None:
        return {"every_seconds": float(settings.seconds) / _EVALUATIONS}
    if settings.updates is not None:
        return {"every": max(1, settings.updates // _EVALUATIONS)}
    size = max(1, settings.batch_size)
    there_and_back = 2 * cluster.link.seconds(workload.nbytes)
    rate = sum(size / (device.seconds(size) + there_and_back) for device in cluster.devices)
    return {"every_seconds": len(workload.data) * (epochs_of(settings) or 1) / rate / _EVALUATIONS}


def rates_of(settings: SimulationSettings) -> tuple[float, ...]:
    if settings.lr == []:
        raise ConfigurationError("--lr []: pass at least one learning rate")
    rates = settings.lr if isinstance(settings.lr, list) else [] if settings.lr is None else [settings.lr]
    for rate in rates:
        if not 0 <= rate < math.inf:
            raise ConfigurationError(f"--lr {rate}: pass a number, 0 or more")
    check_momentum(settings.momentum)
    return tuple(dict.fromkeys(rates))


def target_of(text: str | None, workload: Workload) -> tuple[str, float] | None:
    if text is None:
        return None
    name, _, value = text.partition("=")
    try:
        target = (name.strip(), float(value))
    except ValueError:
        target = (name, math.nan)
    if not math.isfinite(target[1]):
        raise ConfigurationError(f"--target {text}: pass a metric and its value, as in accuracy=0.9")
    if workload.evaluate is None:
        raise ConfigurationError(f"--target {text}: the workload evaluates nothing; give it evaluate=")
    with torch.no_grad():
        metrics = workload.evaluate(copy.deepcopy(workload.model).eval())
    if target[0] not in metrics:
        raise ConfigurationError(f"--target {text}: the workload evaluates {', '.join(metrics)}; pass one of these")
    return target
