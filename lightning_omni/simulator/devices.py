"""How long the devices of a simulated group take for its batches, and what part of a batch each of them gets."""

from __future__ import annotations

import numpy as np

from lightning_omni.protocol import Batch
from lightning_omni.protocol.leases import apportion, positions
from lightning_omni.simulator.cluster import Cluster

_DRAWN_AT_ONCE = 64


class Clockwork:
    """How long one rank's batches take.

    Args:
        cluster: the devices.
        rank: number of the rank.
        seed: of the jitter, together with the rank.
    """

    def __init__(self, cluster: Cluster, rank: int, seed: int) -> None:
        self._cluster, self._rank, self._device = cluster, rank, cluster.devices[rank]
        self._random = np.random.default_rng((seed, rank))
        self._factors: list[float] = []

    def seconds(self, samples: int, now: float) -> float:
        """Time of the next batch if it begins now, in seconds."""
        if not self._factors:
            self._factors = self._device.jitter.factors(self._random, _DRAWN_AT_ONCE).tolist()
        time = self._device.seconds(samples) * self._factors.pop()
        return time * self._cluster.slowness(self._rank, now) if self._cluster.events else time

    def speed(self, samples: int, now: float) -> float:
        """Samples per second that are to be expected of a batch of so many that begins now."""
        return samples / (self._device.seconds(samples) * self._cluster.slowness(self._rank, now))


class Members:
    """The devices of one group.

    Args:
        cluster: the devices and links.
        ranks: of the group.
        seed: of the jitter.
        is_balanced: whether they get parts of a batch in proportion to their speeds.
    """

    def __init__(self, cluster: Cluster, ranks: tuple[int, ...], seed: int, is_balanced: bool) -> None:
        self._ranks, self._link = ranks, cluster.group_link
        self._clocks = [Clockwork(cluster, rank, seed) for rank in ranks]
        self._is_balanced = is_balanced and len(ranks) > 1

    def positions(self, batch: Batch, now: float) -> list[range]:
        """Each member's positions of a batch that begins now."""
        members, shares = len(self._ranks), self._shares(batch, now)
        return [positions(batch, member, members, shares) for member in range(members)]

    def work(self, batch: Batch, now: float) -> list[tuple[int, int, float]]:
        """Each member's rank, its samples of a batch that begins now, and its seconds for them."""
        return [
            (rank, len(part), clock.seconds(len(part), now))
            for rank, clock, part in zip(self._ranks, self._clocks, self.positions(batch, now), strict=True)
        ]

    def reduce_seconds(self, nbytes: int) -> float:
        """Time of an all-reduce of their gradients."""
        return self._link.ring_seconds(nbytes, len(self._ranks))

    def _shares(self, batch: Batch, now: float) -> tuple[int, ...]:
        if not self._is_balanced:
            return ()
        size = batch.stop - batch.start
        each = max(1, size // len(self._ranks))
        return apportion(size, [clock.speed(each, now) for clock in self._clocks])
