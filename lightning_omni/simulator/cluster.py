"""The machines of a simulated run: compute times of devices, delays of links, and failures.

Times are seconds of virtual time, sizes bytes. All classes are frozen values, which YAML can hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lightning_omni.checks import check_choice, check_kind, check_number, check_whole, keep_plain
from lightning_omni.errors import ConfigurationError

_SLOWEST_NORMAL = 0.05
"""The smallest normal factor, so that every batch takes time."""


@dataclass(frozen=True)
class Jitter:
    """A random factor of a device's times, with mean 1.

    Args:
        kind: distribution of the factor; ``"exponential"`` makes the whole time exponential.
        cv: standard deviation over mean, 0 or more, for ``"normal"``, ``"lognormal"`` and ``"gamma"``; the
            exponential's is always 1. A normal factor is cut off at 0.05, so its mean is 1 for a ``cv`` of up to about
            0.4.

    Raises:
        ConfigurationError: the kind is unknown, or ``cv`` does not fit it.

    Example:
        >>> Jitter("lognormal", cv=0.5).factors(np.random.default_rng(0), 2).round(3)
        array([0.949, 0.84 ])
    """

    kind: Literal["none", "normal", "lognormal", "exponential", "gamma"] = "none"
    cv: float = math.nan

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("none", "normal", "lognormal", "exponential", "gamma"))
        if isinstance(self.cv, float) and math.isnan(self.cv):
            self._without_cv()
        if self.kind == "none" and self.cv != 0:
            raise ConfigurationError(
                f'kind="none" and cv={self.cv!r}: nothing scatters; leave cv out, or pass another kind'
            )
        if self.kind == "exponential" and self.cv not in (0, 1):
            raise ConfigurationError(
                f'kind="exponential" and cv={self.cv!r}: it is always 1; leave cv out, or pass kind="gamma"'
            )
        check_number("cv", self.cv, "the standard deviation over the mean, 0 or more", 0, below=math.inf)

    def _without_cv(self) -> None:
        if self.kind not in ("none", "exponential"):
            raise ConfigurationError(
                f'kind="{self.kind}": by how much? pass the standard deviation over the mean, as in'
                f' Jitter("{self.kind}", cv=0.2)'
            )
        object.__setattr__(self, "cv", 0.0)

    def factors(self, random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """Draw ``count`` factors: float64, ``(count,)``."""
        if self.kind == "exponential":
            return random.standard_exponential(count)
        if self.kind == "none" or self.cv == 0:
            return np.ones(count)
        if self.kind == "normal":
            return np.maximum(_SLOWEST_NORMAL, 1 + self.cv * random.standard_normal(count))
        if self.kind == "gamma":
            return random.standard_gamma(1 / self.cv**2, count) * self.cv**2
        sigma = math.sqrt(math.log1p(self.cv**2))
        return np.exp(sigma * random.standard_normal(count) - sigma**2 / 2)


@dataclass(frozen=True)
class Device:
    """A rank's compute speed: a batch of b samples takes ``(overhead + b * seconds_per_sample) * jitter``.

    Args:
        seconds_per_sample: seconds of forward and backward pass for one sample.
        overhead: additional seconds of every batch.

    Raises:
        ConfigurationError: a time is negative or infinite, or both are 0.

    Example:
        >>> Device(0.001, overhead=0.01).seconds(32)
        0.042
    """

    seconds_per_sample: float
    overhead: float = 0.0
    jitter: Jitter = field(default_factory=Jitter)

    def __post_init__(self) -> None:
        for name in ("seconds_per_sample", "overhead"):
            _check_time(name, getattr(self, name))
        if not self.seconds_per_sample + self.overhead:
            raise ConfigurationError(
                "seconds_per_sample=0 and overhead=0: time would never pass; pass one of them above 0"
            )

    def seconds(self, samples: int) -> float:
        """Return the expected time of a batch, in seconds."""
        return self.overhead + samples * self.seconds_per_sample


@dataclass(frozen=True)
class Link:
    """A network link.

    Args:
        bandwidth: in bytes per second, above 0.
        latency: in seconds.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> Link(bandwidth=1e9, latency=1e-4).seconds(10**6)
        0.0011
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth, "bytes per second, above 0", above=0)
        _check_time("latency", self.latency)

    def seconds(self, nbytes: float) -> float:
        """Return the time of a message, in seconds."""
        return self.latency + nbytes / self.bandwidth

    def ring_seconds(self, nbytes: int, members: int) -> float:
        """Return the time of a ring all-reduce among ``members``, in seconds."""
        rounds = 2 * (members - 1)
        return rounds * (nbytes / members / self.bandwidth + self.latency)

    def broadcast_seconds(self, nbytes: int, members: int) -> float:
        """Return the time of a tree broadcast from one of ``members`` to all others, in seconds."""
        rounds = (members - 1).bit_length()  # each round doubles the members that have it
        return rounds * self.seconds(nbytes)


@dataclass(frozen=True)
class Failure:
    """The death of a rank, and of its group with it; the run ends with the group of rank 0 or the last one.

    Args:
        time: time of the death, in seconds.
        until: time at which the whole group returns, in seconds, as one that joins; None for never.

    Raises:
        ConfigurationError: a time is negative or infinite, or the return precedes the death.

    Example:
        >>> Failure(rank=3, time=10.0, until=25.0).until
        25.0
    """

    rank: int
    time: float
    until: float | None = None

    def __post_init__(self) -> None:
        _check_time("time", self.time)
        if self.until is not None:
            wanted = f"seconds, time={self.time:g} or later, or None"
            check_number("until", self.until, wanted, self.time, below=math.inf)


@dataclass(frozen=True)
class Slowdown:
    """A period in which a rank is slower, in every batch that it begins then.

    Args:
        start: beginning of the period, in seconds.
        stop: end of the period, in seconds.
        factor: factor of its times, above 0.
    """

    rank: int
    start: float
    stop: float
    factor: float

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ConfigurationError(f"start={self.start}, stop={self.stop}: pass 0 <= start <= stop, in seconds")
        check_number("factor", self.factor, "a number above 0; 2 takes twice as long", above=0, below=math.inf)


@dataclass(frozen=True)
class Cluster:
    """Devices, the network between them, and the events of a run.

    Args:
        devices: one for each rank.
        link: the link from each group to the server, shared by an exchange with several servers, and from group to
            group.
        server: each server's network card, with its bandwidth in each direction, which all transfers share.
        group_link: the link between the members of a group, for ring all-reduces and broadcasts of answers.
        update_seconds: time of the server for one push, in seconds, one push at a time. A server that holds a partition
            of the weights takes that part of it.
        head_seconds_per_sample: time of a merged head for one sample, forward and backward, in seconds, one group at a
            time.
        events: failures and slowdowns of ranks.
        servers: number of parameter servers, each of which holds a partition of the parameters; ``"per-node"``: one on
            each node, and a group's exchange with that of its own node crosses no link.
        nodes: number of nodes over which the devices are spread evenly, in the order of ranks, for
            ``servers="per-node"``; None for one device a node.

    Raises:
        ConfigurationError: an argument is wrong, such as an event of no rank of the cluster, or devices that cannot be
            spread evenly over the nodes.

    Example:
        >>> Cluster.of_speeds([1, 2], seconds_per_sample=0.01).devices[1].seconds_per_sample
        0.005
    """

    devices: tuple[Device, ...]
    link: Link = field(default_factory=Link)
    server: Link = field(default_factory=Link)
    group_link: Link = field(default_factory=Link)
    update_seconds: float = 0.0
    head_seconds_per_sample: float = 0.0
    events: tuple[Failure | Slowdown, ...] = ()
    servers: int | Literal["per-node"] = 1
    nodes: int | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        if not self.devices:
            raise ConfigurationError("devices=(): a cluster needs at least one device")
        self._check_servers()
        for name in ("update_seconds", "head_seconds_per_sample"):
            _check_time(name, getattr(self, name))
        for name in ("devices", "events"):  # YAML has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for device in self.devices:
            check_kind("devices", device, Device, "a Device for each rank")
        for event in self.events:
            check_kind("events", event, (Failure, Slowdown), "Failure and Slowdown only")
        for name in ("link", "server", "group_link"):
            check_kind(name, getattr(self, name), Link, "a Link such as Link(bandwidth=1e9, latency=1e-4)")
        for event in self.events:
            if not 0 <= event.rank < len(self.devices):
                raise ConfigurationError(
                    f"events: there is no rank {event.rank}; ranks are 0 to {len(self.devices) - 1}"
                )

    def _check_servers(self) -> None:
        if self.servers != "per-node":
            check_whole("servers", self.servers, 'a number of servers, 1 or more, or "per-node"', 1)
        if self.nodes is not None:
            if self.servers != "per-node":
                raise ConfigurationError(f'nodes={self.nodes}: it is for servers="per-node"; pass both, or neither')
            count = len(self.devices)
            check_whole("nodes", self.nodes, f"a number of nodes, 1 to {count}, or None", 1, count)
            if count % self.nodes:
                raise ConfigurationError(
                    f"nodes={self.nodes}: {count} devices cannot be spread over them evenly; pass a divisor of {count}"
                )

    @classmethod
    def even(
        cls,
        size: int,
        seconds_per_sample: float = 1e-3,
        overhead: float = 0.0,
        jitter: Jitter | None = None,
        **network: Any,
    ) -> Cluster:
        """Make a cluster of ``size`` equal devices; ``network`` are other arguments of the cluster."""
        check_whole("size", size, "the number of devices, 1 or more", 1)
        return cls.of_speeds([1.0] * size, seconds_per_sample, overhead, jitter, **network)

    @classmethod
    def of_speeds(
        cls,
        speeds: Sequence[float],
        seconds_per_sample: float = 1e-3,
        overhead: float = 0.0,
        jitter: Jitter | None = None,
        **network: Any,
    ) -> Cluster:
        """Make a cluster of devices of different speeds; ``network`` are other arguments of the cluster.

        ``seconds_per_sample`` and ``overhead`` are times at speed 1; a device of speed 2 takes half of them.
        """
        for speed in speeds:
            if not 0 < speed < math.inf:
                raise ConfigurationError(f"speeds={list(speeds)}: pass numbers above 0")
        scatter = jitter or Jitter()
        return cls(tuple(Device(seconds_per_sample / s, overhead / s, scatter) for s in speeds), **network)

    @classmethod
    def with_straggler(
        cls,
        size: int,
        factor: float = 4.0,
        seconds_per_sample: float = 1e-3,
        overhead: float = 0.0,
        jitter: Jitter | None = None,
        **network: Any,
    ) -> Cluster:
        """Make a cluster of equal devices except for the last, whose times are multiplied by ``factor``."""
        check_whole("size", size, "the number of devices, 1 or more", 1)
        check_number("factor", factor, "a number above 0; 4 takes four times as long", above=0, below=math.inf)
        return cls.of_speeds([1.0] * (size - 1) + [1 / factor], seconds_per_sample, overhead, jitter, **network)

    def slowness(self, rank: int, time: float) -> float:
        """Return the factor by which slowdowns lengthen a batch that the rank begins at ``time``."""
        return math.prod(event.factor for event in self._slowdowns.get(rank, ()) if event.start <= time < event.stop)

    @cached_property
    def _slowdowns(self) -> dict[int, list[Slowdown]]:
        found: dict[int, list[Slowdown]] = {}
        for event in self.events:
            if isinstance(event, Slowdown):
                found.setdefault(event.rank, []).append(event)
        return found

    @property
    def server_count(self) -> int:
        """Return the number of parameter servers."""
        return (self.nodes or len(self.devices)) if self.servers == "per-node" else self.servers

    def node_of(self, rank: int) -> int:
        """Return the node of a rank's device."""
        return rank * (self.nodes or len(self.devices)) // len(self.devices)

    def summary(self) -> dict[str, Any]:
        """Return the cluster in plain values, with counts of equal devices."""
        plain = {**asdict(replace(self, devices=self.devices[:1], nodes=None, events=())), "nodes": self.nodes}
        plain["events"] = [{"kind": type(event).__name__, **_given(asdict(event))} for event in self.events]
        plain["devices"] = [{"count": count, **asdict(device)} for device, count in Counter(self.devices).items()]
        if self.server_count == 1:  # both are for several servers
            del plain["servers"], plain["nodes"]
        return plain


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_time(name: str, seconds: float) -> None:
    check_number(name, seconds, "seconds, 0 or more", 0, below=math.inf)
