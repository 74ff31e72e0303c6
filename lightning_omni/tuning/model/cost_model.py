"""The fitted or known costs from which `Profile` predicts, with resampled draws for the intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model.cluster_change import ClusterChange
from lightning_omni.tuning.model.costs import Costs
from lightning_omni.tuning.model.exchanging import ExchangePattern
from lightning_omni.tuning.model.placement import Placement

Array = np.ndarray[Any, Any]
Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class CostModel:
    """The costs of training on a cluster. Arrays have a first axis of draws; draw 0 is the fit to the measurements.

    Attributes:
        devices: for each rank, the index of its measured device and the factor by which it is slower.
        overhead: seconds of a step that do not depend on its samples, shape (draws, devices).
        per_sample: seconds of a sample, shape (draws, devices).
        jitter: quantiles of the factor by which steps scatter, ascending, shape (draws, devices, quantiles).
        ring: seconds of the gradient's bytes on a member's link, shape (draws,); 2 (k - 1) / k of it count.
        hop: seconds of one of the 2 (k - 1) messages of an all-reduce, shape (draws,).
        between: seconds of a step outside computation and communication (a slow loader, callbacks), shape (draws,).
        delay: seconds of an exchange that depend neither on its bytes nor on shared resources, shape (draws,).
        own_per_byte: seconds of a byte on a group's own link, shape (draws,); it crosses the server's at the same time.
        serve: seconds of the server for a push, shape (draws,).
        link_per_byte: seconds of a byte on the server's link, shape (draws,).
        head_per_sample: seconds at a merged head per sample of a group's batch.
        servers: number of servers, each with a partition of the parameters. The costs of an exchange are those of one
            server.
        per_node: whether each node runs one server.
        hand_ring: seconds of the whole fp32 gradient on a link over which a leader forwards an answer, shape (draws,).
        hand_hop: seconds of such a message that do not depend on its bytes, shape (draws,).
        hands_on: whether a group's leader forwards answers to the other members. ``delay`` does not include it.
        placement: nodes of the ranks, and costs of messages within a node.
        node_ring: ``ring`` of a group on one node; None if it is not known to differ.
        node_hop: ``hop`` of such a group.
        forecast: the same costs with a forecast exchange; None if it was measured, or cannot be forecast.
    """

    devices: Mapping[int, tuple[int, float]]
    overhead: Array
    per_sample: Array
    jitter: Array
    ring: Array
    hop: Array
    between: Array
    delay: Array
    own_per_byte: Array
    serve: Array
    link_per_byte: Array
    hand_ring: Array
    hand_hop: Array
    head_per_sample: float
    period: int
    nbytes: int
    knows_overhead: bool
    knows_exchange: bool
    servers: int = 1
    per_node: bool = False
    hands_on: bool = False
    placement: Placement = field(default_factory=Placement)
    node_ring: float | None = None
    node_hop: float = 0.0
    forecast: CostModel | None = None

    @classmethod
    def of(cls, costs: Costs, ranks: int) -> CostModel:
        """Return the model of known costs: one device, no jitter, two equal draws."""
        ones = np.ones(2)
        return cls(
            devices=dict.fromkeys(range(ranks), (0, 1.0)),
            overhead=costs.overhead * ones[:, None],
            per_sample=costs.per_sample * ones[:, None],
            jitter=np.ones((2, 1, 1)),
            ring=costs.allreduce * ones,
            hop=costs.allreduce_latency * ones,
            between=0 * ones,
            delay=max(0.0, costs.exchange - costs.serve - 2 * costs.link) * ones,
            own_per_byte=costs.link / max(costs.nbytes, 1) * ones,
            serve=costs.serve * ones,
            link_per_byte=costs.link / max(costs.nbytes, 1) * ones,
            hand_ring=costs.allreduce * ones,
            hand_hop=costs.allreduce_latency * ones,
            head_per_sample=costs.head_per_sample,
            period=costs.period,
            nbytes=costs.nbytes,
            knows_overhead=True,
            knows_exchange=True,
            servers=costs.servers,
            per_node=costs.per_node,
        )

    @property
    def away(self) -> float:
        return part_away(self.servers, self.per_node)

    def all_reduce(self, sizes: Array, together: Array) -> Array:
        """Return the seconds of an all-reduce in each group, shape (draws, groups).

        Args:
            sizes: number of members of each group, shape (groups,).
            together: whether all members of each group are on one node, shape (groups,).
        """
        ring, hop = self.ring[:, None], self.hop[:, None]
        if self.node_ring is not None:
            ring, hop = np.where(together, self.node_ring, ring), np.where(together, self.node_hop, hop)
        return np.asarray(2 * (sizes - 1) * (ring / sizes + hop))

    def averaging(self, share: float, messages: int = 1) -> CostModel:
        """Return the costs if only ``share`` of a gradient's bytes travels, in ``messages`` all-reduces."""
        return replace(
            self,
            ring=share * self.ring,
            hop=messages * self.hop,
            node_ring=None if self.node_ring is None else share * self.node_ring,
            node_hop=messages * self.node_hop,
        )

    def known(self, exchanging: ExchangePattern) -> ExchangePattern:
        """Return the pattern with measured values in place of None."""
        for name in ("push", "pull"):
            if getattr(exchanging, name) is not None:
                self.check_nbytes(f"{name}={getattr(exchanging, name)}: what an exchange had was")
        period = self.period if exchanging.period is None else exchanging.period
        push, pull = (self.nbytes if nbytes is None else nbytes for nbytes in (exchanging.push, exchanging.pull))
        return replace(exchanging, period=period, push=push, pull=pull)

    def check_nbytes(self, asked: str) -> None:
        """Raise a `ConfigurationError` that begins with ``asked`` if the bytes of an exchange are unknown."""
        if not self.nbytes:
            raise ConfigurationError(f"{asked} not measured; fit with Measured(nbytes=...)")

    def speeds(self, samples: float) -> dict[int, float]:
        """Return the samples per second of each rank in steps of ``samples`` samples."""
        seconds = self.overhead[0] + samples * self.per_sample[0]
        return {rank: float(samples / seconds[device] / slower) for rank, (device, slower) in self.devices.items()}

    def changed(self, change: ClusterChange) -> CostModel:
        """Return the costs on a changed cluster. They do not depend on the batch size."""
        model, alike = self, np.ones_like(self.delay)
        if model.forecast is not None:
            model = replace(model, forecast=model.forecast.changed(change))
        if change.servers is not None:
            placement = replace(model.placement, server=None) if change.per_node else model.placement
            model = replace(model, servers=change.servers, per_node=change.per_node, placement=placement)
        if change.ranks is not None:
            known = list(model.devices.values())
            devices = {rank: known[rank % len(known)] for rank in range(change.ranks)}
            model = replace(model, devices=devices, placement=model.placement.repeated(change.ranks))
        if change.bandwidth is not None:
            per_byte = alike / change.bandwidth
            ring = model.nbytes * per_byte
            model = replace(model, ring=ring, hand_ring=ring, own_per_byte=per_byte, link_per_byte=per_byte)
            model = replace(model, knows_exchange=True)
        if change.latency is not None:
            hop = alike * change.latency
            model = replace(model, hop=hop, hand_hop=hop, delay=2 * hop, knows_exchange=True)
        if change.slowest is not None:
            last = max(model.devices)
            device, slower = model.devices[last]
            model = replace(model, devices={**model.devices, last: (device, slower * change.slowest)})
        return model


def first_draw(drawn: Drawn) -> Drawn:
    """Return a copy whose arrays hold only the first draw."""
    cut: dict[str, Any] = {name: each[:1] for name, each in vars(drawn).items() if isinstance(each, np.ndarray)}
    return cast(Drawn, replace(cast(Any, drawn), **cut))


def part_away(servers: int, per_node: bool) -> float:
    """Return the fraction of an exchange's bytes that crosses links."""
    return (servers - 1) / servers if per_node and servers > 1 else 1.0


def messages_of(servers: int) -> int:
    """Return the number of round trips in an exchange."""
    return 1 if servers == 1 else 2
