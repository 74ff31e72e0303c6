"""The differences between the measured cluster and the cluster to predict."""

from __future__ import annotations

import math

import msgspec

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError


class ClusterChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A set of differences from the measured cluster; None keeps a measured value.

    The fields are the arguments of `Profile.scaled`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    ranks: int | None = None
    bandwidth: float | None = None
    latency: float | None = None
    slowest: float | None = None
    servers: int | None = None
    per_node: bool = False
    batch_size: float | None = None

    def __post_init__(self) -> None:
        if self.servers is not None:
            check_whole("servers", self.servers, "a whole number, 1 or more", low=1)
        if self.per_node and self.servers is None:
            raise ConfigurationError("per_node=True: pass servers=, the number of nodes, as well")
        if self.ranks is not None:
            check_whole("ranks", self.ranks, "a whole number, 1 or more", low=1)
        if self.bandwidth is not None:
            check_number("bandwidth", self.bandwidth, "a positive number", above=0)
        if self.latency is not None:
            check_number("latency", self.latency, "a positive number", low=0, below=math.inf)
        if self.slowest is not None:
            check_number("slowest", self.slowest, "a positive number", above=0, below=math.inf)
        if self.batch_size is not None:
            size = self.batch_size
            check_number("batch_size", size, "samples per rank and step, above 0", above=0, below=math.inf)
