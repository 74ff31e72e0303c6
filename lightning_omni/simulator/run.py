"""A run in virtual time with real gradients, made of the server's and the methods' own objects."""

from __future__ import annotations

from numbers import Integral

import torch

from lightning_omni.checks import check_kind
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import HardSync, Method, checked, method_named
from lightning_omni.server.event_log import Recorder
from lightning_omni.simulator.cluster import Cluster, Failure
from lightning_omni.simulator.settings import (
    Batches,
    Computation,
    Evaluation,
    Formation,
    Limits,
    Progress,
    progress_of,
)
from lightning_omni.simulator.simulation import Simulation
from lightning_omni.simulator.workload import Workload
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace
from lightning_omni.wire.compression import Compression
from lightning_omni.wire.formats import WireFormat


def simulate(
    method: str | Method,
    topology: int | Topology,
    cluster: Cluster,
    workload: Workload,
    *,
    limits: Limits,
    batch_size: int = 32,
    seed: int = 0,
    evaluation: Evaluation | None = None,
    merged: str | None = None,
    compression: str | WireFormat | Compression = "fp32",
    overlap: bool = False,
    computation: Computation | None = None,
    record: Recorder | None = None,
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
        workload: the model, which is copied and not changed; a map-style dataset (the tensors of a ``TensorDataset``
            are indexed directly, other data are collated); the loss; a torch optimizer, which runs at the server or at
            the workers, as the method requires; and the metrics of a model in evaluation mode, which is the one that
            the method would validate.
        limits: the limits of the run.
        batch_size: samples in one device's batch; a group of k devices trains on k times as many.
        seed: seed of data order, jitter and random operations of the model; the same seed gives bitwise the same trace.
        evaluation: the times of evaluations besides the one at the run's end, and a target.
        merged: name of a submodule that stays at the server, as with ``OmniStrategy(merged=...)``. A group's batch
            arrives there after a third of the group's time (its forward pass); the access lasts for the time of the
            head and for the travel of its outputs and their gradients.
        compression: the formats in which tensors are sent, as with ``OmniStrategy(compression=...)``. Links take the
            time of the encoded bytes; the members' unsent residuals are stored as their mean.
        overlap: exchanges travel while groups compute their next gradient, as with ``OmniStrategy(overlap=True)``; for
            async_sgd.
        computation: how devices compute gradients; None for the defaults.
        record: receives every event at the server, as from `lightning_omni.server.ServerCore`.
        progress: True shows a progress bar; or a function, called with the fraction done and a text. With either,
            Ctrl-C returns the trace so far (``ended == "interrupted"``) instead of raising KeyboardInterrupt; so does a
            function that raises `lightning_omni.simulator.StopSimulation` (``ended == "stopped"``).

    Returns:
        The trace. Its ``ended`` is the reason for the end of the run; its ``weights`` are those of the model last
        evaluated.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        >>> import torch
        >>> workload = Workload(
        ...     torch.nn.Linear(2, 1),
        ...     torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1)),
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        ... )
        >>> trace = simulate("async_sgd", 4, Cluster.even(4), workload, batch_size=4, limits=Limits(updates=20))
        >>> trace.updates, trace.ended
        (20, 'max_updates')
    """
    check_kind("workload", workload, Workload, "a Workload, as Workload(model, data, loss)")
    check_kind("limits", limits, Limits, "Limits, as Limits(updates=1000)")
    check_kind("evaluation", evaluation, (Evaluation, type(None)), "an Evaluation, as Evaluation(every=100), or None")
    evaluation = evaluation or Evaluation()
    if workload.evaluate is None and evaluation != Evaluation():
        raise ConfigurationError("Workload(evaluate=None): pass a function that evaluates a model, or no evaluation=")
    batches = Batches(batch_size, seed, computation or Computation())
    check_kind("cluster", cluster, Cluster, "a Cluster, as Cluster.even(4)")
    check_kind("topology", topology, (Integral, Topology), "a number of groups, or a Topology")
    if not isinstance(topology, Topology):
        topology = Topology.even(len(cluster.devices), topology)
    _check_together(topology, cluster, batches.computation, merged)
    given = 'a name such as "hardsync", or a value such as DiLoCo(period=50)'
    check_kind("method", method, (str, Method), given)
    chosen = method_named(method) if isinstance(method, str) else checked(method)
    chosen.check(len(topology.alive))
    formats = Compression.of(compression)
    refuse_pairs(chosen, _features(cluster, batches.computation, formats, merged, overlap))
    check_restarts(cluster, topology, chosen, merged, record)
    formation = Formation(chosen, topology, merged, formats, overlap)
    if topology.is_synchronous:
        # With any method, one group is plain synchronous training.
        formation = Formation(HardSync(), topology, compression=Compression(all_reduce=formats.all_reduce))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        run = Simulation(workload, cluster, formation, batches, limits, evaluation, record)
        with progress_of(progress) as shown:
            return run.run(shown, returns_if_interrupted=progress is not False)


def _features(
    cluster: Cluster,
    computation: Computation,
    formats: Compression,
    merged: str | None,
    overlap: bool,
) -> dict[str, str]:
    """Return the features of `lightning_omni.combinations` that a run uses, each as the caller wrote it."""
    rejoins = any(isinstance(event, Failure) and event.until is not None for event in cluster.events)
    used = {
        "merged": (merged is not None, f"merged={merged!r}"),
        "overlap": (overlap, "overlap=True"),
        "servers": (cluster.servers != 1, f"Cluster(servers={cluster.servers!r})"),
        "joining": (rejoins, "Failure(until=...)"),
        "rebalance": (computation.rebalance == "auto", 'Computation(rebalance="auto")'),
    }
    return {**{name: given for name, (is_used, given) in used.items() if is_used}, **formats.features}


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


def _check_together(topology: Topology, cluster: Cluster, computation: Computation, merged: str | None) -> None:
    if topology.ranks != tuple(range(len(cluster.devices))):
        raise ConfigurationError(
            f"topology: it has {len(topology.ranks)} ranks, but the cluster {len(cluster.devices)} devices;"
            " every device belongs to one group"
        )
    if merged is not None and computation.members_apart:
        raise ConfigurationError(
            f"merged={merged!r} and Computation(members_apart=True): a group's rows go through the head together; drop"
            " one of them"
        )
