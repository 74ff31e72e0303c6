"""The settings of ``simulate`` as objects: a cluster, a workload, and the end of a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_omni.cli.simulate_settings import (
    Death,
    Devices,
    Machines,
    NetworkSettings,
    Scatter,
    ServerDeath,
    SimulationSettings,
    SlowTime,
)
from lightning_omni.cli.units import check_above_zero, flag, rate_of, seconds_of, time_of
from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator import (
    Cluster,
    Computation,
    Device,
    Evaluation,
    Failure,
    Jitter,
    Limits,
    Link,
    ServerRestart,
    Slowdown,
    Workload,
    workload_named,
)
from lightning_omni.wire.compression import Compression

_EVALUATIONS = 50
"""Approximate number of evaluations in a run by default."""
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
    "servers",
    "nodes",
)
"""Settings that a whole cluster replaces."""
_POSITIVE = ("devices", "straggler", "batch_size", "epochs", "updates", "evaluate_every", "threads")
_POSITIVE_TIMES = ("seconds", "evaluate_every_seconds")


@dataclass(frozen=True)
class Task:
    """The settings as objects, checked.

    Args:
        cluster: simulated machines.
        workload: model and data.
        target: name and value of the metric that ends a run, or None.
        rates: learning rates that the user named; empty for the workload's own.
        momentum: momentum that the user named; None for the workload's own.
        options: other keyword arguments of `lightning_omni.simulator.simulate`.
    """

    cluster: Cluster
    workload: Workload
    target: tuple[str, float] | None
    rates: tuple[float, ...]
    momentum: float | None
    options: dict[str, Any]

    @classmethod
    def of(cls, settings: SimulationSettings) -> Task:
        """Convert settings.

        Raises:
            ConfigurationError: a setting is wrong; the message names it.
        """
        check_above_zero({name: getattr(settings, name) for name in _POSITIVE})
        if settings.seed < 0:
            raise ConfigurationError(f"--seed {settings.seed}: pass a whole number from 0 up")
        given = {name: getattr(settings, name) for name in _POSITIVE_TIMES}
        times: dict[str, Any] = {name: time_of(flag(name), each) for name, each in given.items() if each is not None}
        settings = replace(settings, **times)
        cluster = cluster_of(settings)
        workload = workload_named(settings.workload, settings.seed)
        rates, target = rates_of(settings), target_of(settings.target, workload)
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
        """Return the learning rate of the workload's own optimizer; None if it has none, or 0."""
        optimizer = self.workload.optimizer(copy.deepcopy(self.workload.model).parameters())
        rate = optimizer.param_groups[0].get("lr")
        return float(rate) if rate else None

    def optimizer(self, rate: float | None) -> Callable[[Any], Optimizer]:
        """Return a function that creates the workload's optimizer with the user's momentum and this learning rate.

        ``rate`` applies to all parameter groups; None keeps the workload's own.
        """
        given = {name: value for name, value in (("lr", rate), ("momentum", self.momentum)) if value is not None}

        def make(parameters: Any) -> Optimizer:
            optimizer = self.workload.optimizer(parameters)
            for name, value in given.items():
                if name not in optimizer.defaults:
                    raise ConfigurationError(f"{flag(name)}: {type(optimizer).__name__} has none; leave it out")
                for group in optimizer.param_groups:
                    group[name] = value
                optimizer.defaults[name] = value
            return optimizer

        return make


# --- The cluster ------------------------------------------------------------------------------------------------------


def cluster_of(settings: SimulationSettings) -> Cluster:
    """Return the cluster of the simple settings, or the whole one that replaces it."""
    if settings.cluster is not None:
        changed = [name for name in _OF_CLUSTER if getattr(settings, name) != getattr(SimulationSettings, name)]
        if changed:
            flags = ", ".join(flag(name) for name in changed)
            raise ConfigurationError(f"cluster describes the whole cluster; move {flags} into it, or leave it out")
        return _whole(settings.cluster)
    link = _link("--", NetworkSettings(settings.bandwidth, settings.latency))
    card = settings.server_bandwidth
    return Cluster.with_straggler(
        settings.devices,
        settings.straggler,
        seconds_of("--seconds-per-sample", settings.seconds_per_sample),
        seconds_of("--overhead", settings.overhead),
        jitter_of("--jitter", settings.jitter),
        link=link,
        server=Link(link.bandwidth if card is None else rate_of("--server-bandwidth", card)),
        group_link=link,
        update_seconds=seconds_of("--update-seconds", settings.update_seconds),
        head_seconds_per_sample=seconds_of("--head-seconds-per-sample", settings.head_seconds_per_sample),
        servers=settings.servers,
        nodes=settings.nodes,
    )


def _whole(machines: Machines) -> Cluster:
    kinds = [(kind.count, _device(f"cluster.devices[{place}]", kind)) for place, kind in enumerate(machines.devices)]
    link, server, group_link = (
        _link(f"cluster.{name}.", getattr(machines, name)) for name in ("link", "server", "group_link")
    )
    return Cluster(
        tuple(device for count, device in kinds for _ in range(count)),
        link,
        server,
        group_link,
        seconds_of("cluster.update_seconds", machines.update_seconds),
        seconds_of("cluster.head_seconds_per_sample", machines.head_seconds_per_sample),
        tuple(_event(f"cluster.events[{place}]", event) for place, event in enumerate(machines.events)),
        machines.servers,  # type: ignore[arg-type]  # checked there
        machines.nodes,
        seconds_of("cluster.save_every", machines.save_every),
    )


def _device(name: str, kind: Devices) -> Device:
    return Device(
        seconds_of(f"{name}.seconds_per_sample", kind.seconds_per_sample),
        seconds_of(f"{name}.overhead", kind.overhead),
        jitter_of(f"{name}.jitter", kind.jitter),
    )


def _link(place: str, network: NetworkSettings) -> Link:
    return Link(rate_of(f"{place}bandwidth", network.bandwidth), seconds_of(f"{place}latency", network.latency))


def _event(name: str, event: Death | SlowTime | ServerDeath) -> Failure | Slowdown | ServerRestart:
    if isinstance(event, ServerDeath):
        return ServerRestart(seconds_of(f"{name}.time", event.time), seconds_of(f"{name}.until", event.until))
    if isinstance(event, Death):
        until = None if event.until is None else seconds_of(f"{name}.until", event.until)
        return Failure(event.rank, seconds_of(f"{name}.time", event.time), until)
    start, stop = (seconds_of(f"{name}.{end}", getattr(event, end)) for end in ("start", "stop"))
    return Slowdown(event.rank, start, stop, event.factor)


def jitter_of(name: str, given: str | Scatter) -> Jitter:
    """Return the scatter of times from a text such as ``"lognormal:0.2"``, or from its parts.

    Errors begin with ``name``, the option as the user wrote it.
    """
    if isinstance(given, Scatter):
        cv = math.nan if given.cv is None else given.cv
        return Jitter(given.kind, cv)  # type: ignore[arg-type]  # checked there
    kind, _, by = given.partition(":")
    if kind in ("normal", "lognormal", "gamma") and not by:
        raise ConfigurationError(f"{name} {given}: by how much? pass {kind}:0.2 for a fifth of the mean")
    try:
        return Jitter(kind, float(by or math.nan))  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigurationError(
            f"{name} {given}: pass none, exponential, or normal, lognormal or gamma as in lognormal:0.2"
        ) from error


# --- The run ----------------------------------------------------------------------------------------------------------


def epochs_of(settings: SimulationSettings) -> int | None:
    """Return the epochs after which a run ends, if nothing else ends it before."""
    if settings.epochs is None and settings.updates is None and settings.seconds is None:
        return _DEFAULT_EPOCHS
    return settings.epochs


def limits_of(settings: SimulationSettings) -> Limits:
    """Return the limits of a run."""
    given: dict[str, Any] = {"updates": settings.updates, "epochs": epochs_of(settings), "seconds": settings.seconds}
    return Limits(**{name: value for name, value in given.items() if value is not None})


def compression_of(settings: SimulationSettings) -> Compression:
    """Return the formats in which tensors are sent.

    Raises:
        ConfigurationError: a format is unknown, or is set for another direction than push and pull.
    """
    wire = {"push": settings.compression} if isinstance(settings.compression, str) else settings.compression
    if set(wire) - {"push", "pull"}:
        raise ConfigurationError(f'--compression {wire}: pass int8 or the like, or {{"push": "int8", "pull": "bf16"}}')
    return Compression(**wire, all_reduce=settings.all_reduce)


def periods_of(settings: SimulationSettings, cluster: Cluster, workload: Workload) -> dict[str, Any]:
    """Return the time or the updates between evaluations: the user's, or those of about 50 evaluations."""
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
    """Return the user's learning rates, each once, and check them and the momentum."""
    if settings.lr == []:
        raise ConfigurationError("--lr []: pass at least one learning rate")
    rates = settings.lr if isinstance(settings.lr, list) else [] if settings.lr is None else [settings.lr]
    for name, given in (*(("lr", rate) for rate in rates), ("momentum", settings.momentum)):
        if given is not None and not 0 <= given < math.inf:
            raise ConfigurationError(f"{flag(name)} {given}: pass a number, 0 or more")
    return tuple(dict.fromkeys(rates))


def target_of(text: str | None, workload: Workload) -> tuple[str, float] | None:
    """Return name and value of the metric that ends a run."""
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
