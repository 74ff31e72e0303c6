"""The fitted costs from which `Profile` predicts, with resampled draws for the intervals."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lightning_omni.checks import check_number, check_whole
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method, method_named
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.wire.compression import Compression
from lightning_omni.wire.formats.base import WireFormat
from lightning_omni.wire.layout import Layout, TensorSpec

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Placement:
    """The nodes of the ranks. If it is empty, each rank is on a node of its own, and the server on none of these.

    Args:
        of: node or site of each rank: see `sites_of`.
        server: node of all servers; None if they are on none or on each of these nodes, or unknown.
        per_byte: as `Measured.node_per_byte`; None if unknown.
        round_trip: as `Measured.node_round_trip`.
        copy_per_byte: as in `Measured`.

    Example:
        >>> placement = Placement({0: 0, 1: 0, 2: 1, 3: 1}, server=0)
        >>> placement.are_together([2, 3]), placement.are_together([1, 2]), placement.are_here([(0, 2), (1, 3), (2, 0)])
        (True, False, [True, True, False])
    """

    of: Mapping[int, int] = field(default_factory=dict)
    server: int | None = None
    per_byte: float | None = None
    round_trip: float = 0.0
    copy_per_byte: float = 0.0

    @classmethod
    def measured(cls, measured: Sequence[Measured]) -> Placement:
        """Return the placement in the last segment that has nodes, with the least measured costs within nodes."""
        known = [each for each in measured if each.nodes]
        if not known:
            return cls()
        of = dict(zip(known[-1].ranks, known[-1].nodes, strict=True))
        timed = [each for each in known if each.node_per_byte]
        per_byte = min((each.node_per_byte for each in timed), default=None)
        round_trip = min((each.node_round_trip for each in timed), default=0.0)
        server = None if known[-1].per_node else known[-1].server_node
        return cls(of, server, per_byte, round_trip, max(each.copy_per_byte for each in known))

    def are_together(self, members: Sequence[int]) -> bool:
        return bool(self.of) and len({self.of[rank] for rank in members}) == 1

    def are_here(self, groups: Sequence[Sequence[int]]) -> list[bool]:
        return [self.server is not None and self.of[members[0]] == self.server for members in groups]

    def handed_on(self, groups: Sequence[Sequence[int]], over: Array, nbytes: float) -> Array:
        """Return the seconds in which each group's leader forwards a message to its members, shape (draws, groups).

        ``over`` are the seconds of a message that crosses links, shape (draws,).
        """
        depths = np.array([(len(members) - 1).bit_length() for members in groups])
        message = over[:, None]
        if self.per_byte is not None:
            within = self.round_trip / 2 + self.per_byte * nbytes
            message = np.where([self.are_together(members) for members in groups], within, message)
        return np.asarray(depths * message)

    def repeated(self, ranks: int) -> Placement:
        if not self.of:
            return self
        known, more = list(self.of.values()), 1 + max(self.of.values())
        return replace(self, of={r: known[r % len(known)] + more * (r // len(known)) for r in range(ranks)})


def sites_of(nodes: Sequence[int], seconds: Sequence[float], apart: float) -> tuple[tuple[int, ...], list[int]]:
    """Join consecutive nodes into sites, within which links are much faster than between sites.

    Args:
        nodes: node of each rank, in ascending order of ranks.
        seconds: seconds of one message from each node to the next; at least one.
        apart: ratio to the time over the fastest link above which a link leads to another site.

    Returns:
        The site of each rank, from 0, and the indices of the links inside a site. If all links are alike, the nodes,
        and no link.

    Example:
        >>> sites_of((0, 0, 1, 2, 3), [0.001, 0.008, 0.001], apart=3.0)
        ((0, 0, 0, 1, 1), [0, 2])
        >>> sites_of((0, 0, 1, 2), [0.008, 0.009], apart=3.0)
        ((0, 0, 1, 2), [])
    """
    longest = apart * min(seconds)
    starts = [number for number, each in enumerate(seconds, 1) if each > longest]
    if not starts:
        return tuple(nodes), []
    numbers = {node: number for number, node in enumerate(sorted(set(nodes)))}
    inside = [number for number, each in enumerate(seconds) if each <= longest]
    return tuple(bisect(starts, numbers[node]) for node in nodes), inside


@dataclass(frozen=True)
class ExchangePattern:
    """The properties of a method, a wire format and an overlap that `Profile.predict` needs.

    Args:
        period: local steps between two exchanges.
        push: bytes of an exchange to the server; None for the measured number.
        pull: bytes of its answer, likewise.
        barrier: whether each exchange waits for those of all groups.
        delay: steps that a group makes before it waits for the answer.
        peers: whether groups exchange with one another instead of with a server.
        dynamic: whether slow groups make fewer local steps.

    Example:
        A group sends one of four fragments every twelve steps, and waits for the answer after two more:

        >>> ExchangePattern.of("diloco:period=48,fragments=4,delay=2", nbytes=4_000_000)
        ExchangePattern(period=12, push=1000000, pull=1000000, barrier=True, delay=2, peers=False, dynamic=False)
    """

    period: int = 1
    push: int | None = None
    pull: int | None = None
    barrier: bool = False
    delay: int = 0
    peers: bool = False
    dynamic: bool = False

    @classmethod
    def of(
        cls,
        method: str | Method,
        compression: str | WireFormat | Compression = "fp32",
        overlap: bool = False,
        nbytes: int | Layout = 0,
    ) -> ExchangePattern:
        """Return the pattern of a method.

        ``nbytes`` are those of the weights as float32, or their layout. With 0, bytes are as measured, in any format.
        The other arguments are those of `OmniStrategy`.

        Raises:
            ConfigurationError: the method or the wire format does not exist, or they do not work together.

        Example:
            >>> ExchangePattern.of("elastic_averaging:period=8", compression="bf16", nbytes=4_000_000)
            ExchangePattern(period=8, push=2000000, pull=4000000, barrier=False, delay=0, peers=False, dynamic=False)
            >>> ExchangePattern.of("async_sgd", compression=Compression("int8", "bf16"), overlap=True, nbytes=4_096)
            ExchangePattern(period=1, push=1056, pull=2048, barrier=False, delay=1, peers=False, dynamic=False)
        """
        method = method_named(method) if isinstance(method, str) else method
        formats = Compression.of(compression)
        refuse_pairs(method, {**formats.features, "overlap": "overlap=True"} if overlap else formats.features)
        wire = formats.wire_format
        delay = getattr(method, "delay", int(overlap))
        if method.talks_to_peers:
            return cls._between_peers(method, wire, nbytes)
        # If pushes and pulls have different periods, each exchange carries its share of both.
        period = min(method.push_period, method.pull_period)
        push, pull = (
            round(_mean_bytes(each, nbytes, method.fragments) * period / every) if nbytes else None
            for each, every in ((wire.pushes, method.push_period), (wire.answers, method.pull_period))
        )
        dynamic = method.has_barrier and getattr(method, "dynamic_steps", False)
        return cls(period, push, pull, method.has_barrier, period if delay is None else delay, dynamic=dynamic)

    @classmethod
    def _between_peers(cls, method: Method, wire: WireFormat, nbytes: int | Layout) -> ExchangePattern:
        """Return the pattern between peers: a group waits for its reads, but not for its writes."""
        read = round(_mean_bytes(wire.pushes, nbytes, 1)) if nbytes else None
        is_waited_for = getattr(method, "kind", "pull") == "pull"
        return cls(method.push_period, 0, read if is_waited_for else 0, delay=0 if is_waited_for else 1, peers=True)


def _mean_bytes(wire_format: WireFormat, nbytes: int | Layout, fragments: int) -> float:
    whole = Layout((TensorSpec("weights", (-(-nbytes // 4),), "float32"),)) if isinstance(nbytes, int) else nbytes
    parts = [whole.fragment(number, fragments) for number in range(fragments)] if fragments > 1 else [whole]
    return sum(wire_format.sizes(part)[1] for part in parts) / fragments


@dataclass(frozen=True)
class CostModel:
    """The costs of training on a cluster. Arrays have a first axis of draws; draw 0 is the fit to the measurements.

    ``overhead`` and ``per_sample`` have shape (draws, devices), ``jitter`` (draws, devices, quantiles), all others
    (draws,).

    Attributes:
        devices: for each rank, the index of its measured device.
        overhead: seconds of a step that do not depend on its samples.
        per_sample: seconds of a sample.
        jitter: quantiles of the factor by which steps scatter, ascending.
        ring: seconds of the gradient's bytes on a member's link; 2 (k - 1) / k of it count.
        hop: seconds of one of the 2 (k - 1) messages of an all-reduce.
        between: seconds of a step outside computation and communication.
        delay: seconds of an exchange that depend neither on its bytes nor on shared resources.
        own_per_byte: seconds of a byte on a group's own link; it crosses the server's at the same time.
        serve: seconds of the server for a push.
        link_per_byte: seconds of a byte on the server's link.
        hand_ring: seconds of the whole fp32 gradient on a link over which a leader forwards an answer.
        hand_hop: seconds of such a message that do not depend on its bytes.
        servers: number of servers; costs of an exchange are those of one.
        hands_on: as in `Measured`; ``delay`` does not include it.
        node_ring: ``ring`` of a group on one node, if it is known to differ.
        node_hop: ``hop`` of such a group.
    """

    devices: Mapping[int, int]
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
    nbytes: int
    servers: int = 1
    per_node: bool = False
    hands_on: bool = False
    placement: Placement = field(default_factory=Placement)
    node_ring: float | None = None
    node_hop: float = 0.0

    @property
    def away(self) -> float:
        """Return the part of an exchange that crosses links."""
        return (self.servers - 1) / self.servers if self.per_node and self.servers > 1 else 1.0

    @cached_property
    def likely(self) -> CostModel:
        cut: dict[str, Any] = {name: each[:1] for name, each in vars(self).items() if isinstance(each, np.ndarray)}
        return replace(self, **cut)

    def all_reduce(self, sizes: Array, together: Array) -> Array:
        """Return the seconds of an all-reduce in each group, shape (draws, groups).

        ``sizes`` are numbers of members, and ``together`` tells whether these are on one node, both of shape (groups,).
        """
        ring, hop = self.ring[:, None], self.hop[:, None]
        if self.node_ring is not None:
            ring, hop = np.where(together, self.node_ring, ring), np.where(together, self.node_hop, hop)
        return np.asarray(2 * (sizes - 1) * (ring / sizes + hop))

    def averaging(self, share: float, messages: int = 1) -> CostModel:
        return replace(
            self,
            ring=share * self.ring,
            hop=messages * self.hop,
            node_ring=None if self.node_ring is None else share * self.node_ring,
            node_hop=messages * self.node_hop,
        )

    def known(self, exchanging: ExchangePattern) -> ExchangePattern:
        push, pull = (self.nbytes if nbytes is None else nbytes for nbytes in (exchanging.push, exchanging.pull))
        return replace(exchanging, push=push, pull=pull)

    def speeds(self, samples: float) -> dict[int, float]:
        seconds = self.overhead[0] + samples * self.per_sample[0]
        return {rank: float(samples / seconds[device]) for rank, device in self.devices.items()}

    def changed(
        self,
        ranks: int | None = None,
        bandwidth: float | None = None,
        latency: float | None = None,
        servers: int | None = None,
        per_node: bool = False,
    ) -> CostModel:
        """Return the costs on a changed cluster; the arguments are those of `Profile.scaled`."""
        model, alike = self, np.ones_like(self.delay)
        if per_node and servers is None:
            raise ConfigurationError("per_node=True: pass servers=, the number of nodes, as well")
        if servers is not None:
            check_whole("servers", servers, "a whole number, 1 or more", low=1)
            placement = replace(model.placement, server=None) if per_node else model.placement
            model = replace(model, servers=servers, per_node=per_node, placement=placement)
        if ranks is not None:
            check_whole("ranks", ranks, "a whole number, 1 or more", low=1)
            known = list(model.devices.values())
            devices = {rank: known[rank % len(known)] for rank in range(ranks)}
            model = replace(model, devices=devices, placement=model.placement.repeated(ranks))
        if bandwidth is not None:
            check_number("bandwidth", bandwidth, "a positive number", above=0)
            if not self.nbytes:
                raise ConfigurationError(
                    f"bandwidth={bandwidth}: bytes of an exchange were not measured; fit with Measured(nbytes=...)"
                )
            per_byte = alike / bandwidth
            ring = model.nbytes * per_byte
            own = per_byte + model.own_per_byte - model.link_per_byte  # copies between a device and its host stay
            model = replace(model, ring=ring, hand_ring=ring, own_per_byte=own, link_per_byte=per_byte)
        if latency is not None:
            check_number("latency", latency, "a number, 0 or more", low=0, below=math.inf)
            hop = alike * latency
            model = replace(model, hop=hop, hand_hop=hop, delay=2 * hop)
        return model
