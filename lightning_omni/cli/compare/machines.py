"""Machines that a user describes: the measurements that a run in one group would make on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.model.profile import Profile

DESCRIBED_STEPS = 64
"""Steps that stand for a description of machines."""
SERVE_PER_BYTE = 5e-10
"""Assumed seconds of a described server's update for each byte of the weights."""
BACKWARD, BUCKET = 0.67, 25e6
"""Assumed part of a described step that is the backward pass, in which DDP hides its all-reduce but for the last
bucket; and the bytes of that bucket."""


@dataclass(frozen=True)
class DescribedMachines:
    """A description of machines and of a training step.

    Args:
        speeds: speed of each rank, relative to that of a rank that takes ``step``.
        step: seconds of forward and backward pass of a rank's batch.
        batch_size: samples of a rank's batch.
        nbytes: bytes of the weights, as float32.
        bandwidth: bytes per second of the links.
        latency: seconds of one message.
        sites: number of sites, among which the ranks are divided in order; ``bandwidth`` and ``latency`` hold inside.
        site_bandwidth: bytes per second between sites; None if there is one site.
        site_latency: seconds of one message between sites.
        scatter: coefficient of variation of a rank's step times.
        serve_per_byte: seconds of a server's update for each byte of the weights.
        backward: part of a step that is the backward pass, in which DDP hides its all-reduce but for the last bucket.

    Raises:
        ConfigurationError: a number is out of range.
    """

    speeds: tuple[float, ...]
    step: float
    batch_size: int
    nbytes: int
    bandwidth: float
    latency: float = 0.0
    sites: int = 1
    site_bandwidth: float | None = None
    site_latency: float = 0.0
    scatter: float = 0.05
    serve_per_byte: float = SERVE_PER_BYTE
    backward: float = BACKWARD

    def __post_init__(self) -> None:
        for speed in self.speeds:
            check_number("speeds", speed, "relative speeds, above 0", above=0, below=math.inf)
        if len(self.speeds) < 2:
            raise ConfigurationError(f"speeds={self.speeds}: pass the speeds of two devices or more")
        if len(self.speeds) % self.sites:
            raise ConfigurationError(
                f"sites={self.sites}: {len(self.speeds)} devices cannot be divided evenly; pass a divisor"
            )

    @property
    def measured(self) -> Measured:
        """Return the measurements that a run in one group on these machines would make, from a fixed seed."""
        ranks = len(self.speeds)
        random = np.random.default_rng(0)
        jitter = random.lognormal(0.0, math.sqrt(math.log1p(self.scatter**2)), (ranks, DESCRIBED_STEPS))
        own = self.step / np.array(self.speeds)[:, None] * jitter / jitter.mean(axis=1, keepdims=True)
        between = self.site_bandwidth if self.sites > 1 and self.site_bandwidth else self.bandwidth
        latency = self.site_latency if self.sites > 1 else self.latency
        all_reduce = 2 * (ranks - 1) * (self.nbytes / ranks / between + latency)
        exposed = max(all_reduce * min(1.0, BUCKET / self.nbytes), all_reduce - self.backward * self.step)
        several: dict[str, Any] = {}
        if self.sites > 1:
            nodes = tuple(np.repeat(np.arange(self.sites), ranks // self.sites).tolist())
            several = {"nodes": nodes, "server_node": 0, "node_per_byte": 1 / self.bandwidth}
            several["node_round_trip"] = 2 * self.latency
        return Measured(
            groups=(tuple(range(ranks)),),
            samples=((float(self.batch_size),) * DESCRIBED_STEPS,) * ranks,
            own=tuple(map(tuple, own.tolist())),
            steps=(tuple((own.max(axis=0) + exposed).tolist()),),
            exchanges=((0.0,) * DESCRIBED_STEPS,),
            serve=self.serve_per_byte * self.nbytes,
            nbytes=self.nbytes,
            round_trip=2 * latency,
            reduce_per_byte=2 * (ranks - 1) / ranks / between,
            hands_on=True,
            shapes=((-(-self.nbytes // 4),),),
            **several,
        )

    def profile(self) -> Profile:
        """Return the hardware model of these machines."""
        return Profile.fit([self.measured])


__all__ = ["DescribedMachines"]
