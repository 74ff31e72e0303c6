"""A run in virtual time with real gradients, made of the server's and the methods' own objects."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

import torch
from torch import nn

from lightning_omni.checks import check_kind
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import HardSync, Method, checked, method_named
from lightning_omni.methods.overlap import check_overlap
from lightning_omni.server.event_log import Recorder
from lightning_omni.simulator.cluster import Cluster
from lightning_omni.simulator.settings import Batches, EvaluationSchedule, Formation, Progress, RunLimits, progress_of
from lightning_omni.simulator.simulation import Simulation
from lightning_omni.simulator.workload import Evaluate, Loss, MakeOptimizer, Workload
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace
from lightning_omni.wire.all_reduce import AllReduce, all_reduce_of
from lightning_omni.wire.formats import Wire, wire_of


def simulate(
    method: str | Method,
    topology: int | Topology,
    cluster: Cluster,
    model: nn.Module,
    data: Any,
    *,
    optimizer: MakeOptimizer,
    loss: Loss,
    batch_size: int = 32,
    rebalance: Literal["off", "auto"] = "off",
    merged: str | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    evaluate_every_seconds: float | None = None,
    max_updates: int | None = None,
    max_epochs: int | None = None,
    max_seconds: float | None = None,
    target: tuple[str, float] | None = None,
    seed: int = 0,
    batched: bool | Literal["auto"] = "auto",
    members_apart: bool = False,
    record: Recorder | None = None,
    wire: Wire = "fp32",
    overlap: bool = False,
    all_reduce: str | AllReduce = "fp32",
    progress: bool | Progress = False,
) -> Trace:
    """Train a model on a simulated cluster, in virtual time with real gradients.

    Devices, links and the server's queues determine the time; nothing waits in real time. Server, leases, epochs and
    both halves of the method are the objects of a real run. A push travels over the group's link, queues at the
    server's network card, then for the server itself; it arrives when it is served, and the order of arrivals
    determines staleness. The answer travels back the same way. Control messages and evaluations take no time. One group
    trains synchronously with any method, and its exchanges take no time, as in a real run.

    Args:
        method: a name, or a method.
        topology: the ranks of each group; or a number of groups, split evenly.
        cluster: the devices and links.
        model: the model; it is copied and not changed.
        data: a map-style dataset. The tensors of a ``TensorDataset`` are indexed directly, other data are collated.
        optimizer: makes a torch optimizer from parameters; it runs at the server or at the workers, as the method
            requires.
        loss: the mean loss of a batch, from the model and the batch (a tuple of tensors for a ``TensorDataset``).
        batch_size: samples in one device's batch; a group of k devices trains on k times as many.
        rebalance: ``"auto"`` divides a group's batch over its members in proportion to their mean speeds, which are
            known from the start and follow slowdowns at once.
        merged: name of a submodule that stays at the server, as with ``OmniStrategy(merged=...)``. A group's batch
            arrives there after a third of the group's time (its forward pass); the access lasts for the time of the
            head and for the travel of its outputs and their gradients.
        evaluate: returns the metrics, by name, of a model in evaluation mode. The model is the one that the method
            would validate.
        evaluate_every: updates between two evaluations; the run is always evaluated at its end.
        evaluate_every_seconds: seconds of virtual time between two evaluations.
        max_updates: updates after which the run ends. An update is a tick of the server's clock or, where groups
            exchange only with one another (gossip), one local step of one group.
        max_epochs: passes over the data after which the run ends.
        max_seconds: virtual time at which the run ends, in seconds.
        target: name and value of a metric; the run ends with the evaluation that reaches it (from above if the name
            contains "loss" or "error").
        seed: seed of data order, jitter and random operations of the model; the same seed gives bitwise the same trace.
        batched: compute gradients of several groups at a time with ``torch.func.vmap``; ``"auto"`` where that is faster
            and cannot change the outcome beyond rounding (no buffers, no dropout, few weights and samples).
        members_apart: compute each member's gradient separately and average them as DDP does; for bit-equality with a
            real run of groups of several ranks.
        record: receives every event at the server, as from `lightning_omni.server.ServerCore`.
        wire: wire format of pushes, by name or as a value: see docs/reference/wire-formats.md. Links take the
            time of the encoded bytes.
        overlap: exchanges travel while groups compute their next gradient, as with ``OmniStrategy(overlap=True)``; for
            methods whose optimizer steps at the server.
        all_reduce: how the members of a group average their gradients, as with ``OmniStrategy(all_reduce=...)``. Their
            link takes the time of these bytes; the members' unsent residuals are stored as their mean.
        progress: True shows a progress bar; or a function, called with the fraction done and a text. With either,
            Ctrl-C returns the trace so far (``ended == "interrupted"``) instead of raising KeyboardInterrupt; so does a
            function that raises `lightning_omni.simulator.StopSimulation` (``ended == "stopped"``).

    Returns:
        The trace. Its ``ended`` is the reason for the end of the run; its ``weights`` are those of the model last
        evaluated.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
        >>> trace = simulate(
        ...     "async_sgd", 4, Cluster.even(4), nn.Linear(2, 1), data,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     batch_size=4, max_updates=20,
        ... )
        >>> trace.updates, trace.ended
        (20, 'max_updates')
    """
    limits = RunLimits.of(max_updates, max_epochs, max_seconds)
    schedule = EvaluationSchedule(evaluate_every, evaluate_every_seconds, target)
    if evaluate is None and schedule != EvaluationSchedule():
        raise ConfigurationError("evaluate=None: pass a function that evaluates a model, or neither period nor target")
    batches = Batches(batch_size, rebalance == "auto", batched, members_apart, seed)
    check_kind("cluster", cluster, Cluster, "a Cluster, as Cluster.even(4)")
    check_kind("topology", topology, (Integral, Topology), "a number of groups, or a Topology")
    if not isinstance(topology, Topology):
        topology = Topology.even(len(cluster.devices), topology)
    _check_together(topology, cluster, batches, rebalance, merged)
    given = 'a name such as "hardsync", or a value such as DiLoCo(period=50)'
    check_kind("method", method, (str, Method), given)
    chosen = method_named(method) if isinstance(method, str) else checked(method)
    chosen.check(len(topology.alive))
    wire_format = wire_of(wire)
    wire_format.check(chosen)
    if overlap:
        check_overlap(chosen)
    check_restarts(cluster, topology, chosen, merged, record)
    formation = Formation(chosen, topology, merged, wire_format, overlap, all_reduce_of(all_reduce))
    if topology.is_synchronous:
        # With any method, one group is plain synchronous training.
        formation = Formation(HardSync(), topology, all_reduce=formation.all_reduce)
    workload = Workload(model, data, loss, evaluate, optimizer)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        run = Simulation(workload, cluster, formation, batches, limits, schedule, record)
        with progress_of(progress) as shown:
            return run.run(shown, returns_if_interrupted=progress is not False)


def check_restarts(
    cluster: Cluster, topology: Topology, method: Method, merged: str | None = None, record: Recorder | None = None
) -> None:
    """Raise `ConfigurationError` if the server restarts, but the run cannot continue from a save."""
    if not cluster.restarts or topology.is_synchronous:
        return
    if method.talks_to_peers or method.resyncs:
        raise ConfigurationError(
            f"events: a ServerRestart with method={method!r}, for which it is not simulated: take another method, or"
            " leave the event out"
        )
    for name, given in (("merged", merged), ("record", record)):
        if given is not None:
            raise ConfigurationError(
                f"{name}={given!r} with a ServerRestart among events: a server's state is not saved then, and the run"
                " would end; leave either out"
            )


def _check_together(topology: Topology, cluster: Cluster, batches: Batches, rebalance: str, merged: str | None) -> None:
    if topology.ranks != tuple(range(len(cluster.devices))):
        raise ConfigurationError(
            f"topology: it has {len(topology.ranks)} ranks, but the cluster {len(cluster.devices)} devices;"
            " every device belongs to one group"
        )
    if rebalance not in ("off", "auto") or (rebalance == "auto" and batches.members_apart):
        raise ConfigurationError(
            f'rebalance={rebalance!r}: pass "off" or "auto", and "off" with members_apart=True, which takes the mean of'
            " equal parts"
        )
    if merged is not None and batches.members_apart:
        raise ConfigurationError(
            f"merged={merged!r} and members_apart=True: a group's rows go through the head together; drop one of them"
        )
