"""One simulated compute group: its place in the data, its half of the method, and its devices' times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightning_omni.methods import Method
from lightning_omni.methods.contract import Inbox
from lightning_omni.methods.replica import Replica
from lightning_omni.methods.totals import Total
from lightning_omni.protocol import Batch
from lightning_omni.protocol.group import GroupCore
from lightning_omni.protocol.leases import apportion, positions
from lightning_omni.protocol.lessee import Lessee
from lightning_omni.protocol.wire_format import RAW, WireFormat
from lightning_omni.simulator.cluster import Cluster
from lightning_omni.simulator.desk import GENERATION
from lightning_omni.simulator.workbench import Result

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


class Group:
    """One compute group.

    Args:
        number: of the group.
        ranks: of its members; the first leads.
        replica: its weights.
        method: the method.
        clocks: of its members.
        is_balanced: whether its members get parts of a batch in proportion to their speeds.
        wire_format: how its pushes are put into bytes.

    Attributes:
        core: its state machine, which drives its half of the method.
        alive: False once a member has died.
        is_done: whether it has come to the end of the last epoch.
        data: what it has drawn and trained of the epoch.
        steps: local steps since the last push.
        published: what peers may read.
        result: the gradient that its turn at a merged head has given, until the backward pass is over.
    """

    def __init__(
        self,
        number: int,
        ranks: tuple[int, ...],
        replica: Replica,
        method: Method,
        clocks: list[Clockwork],
        is_balanced: bool = False,
        wire_format: WireFormat = RAW,
    ) -> None:
        self._is_balanced = is_balanced and len(ranks) > 1
        self.number, self.ranks, self.leader = number, ranks, ranks[0]
        self.replica, self._clocks = replica, clocks
        self.core = GroupCore(method, wire_format)
        self.core.attach(replica)
        self.data = self.core.data = Lessee(members=len(ranks), generation=GENERATION)
        self.alive, self.is_done = True, False
        self.begin_epoch(0)
        self.published: list[Tensor] | None = None
        self.result: Result | None = None
        self._inbox = Total()
        self.start_afresh()

    def begin_epoch(self, epoch: int) -> None:
        """A new epoch: batches are counted anew."""
        self.data.restart(epoch)

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.data.epoch

    @property
    def batch(self) -> Batch | None:
        """The batch that is being trained."""
        return self.data.current

    def positions(self, batch: Batch, now: float) -> list[range]:
        """Each member's positions of a group batch that begins now."""
        members, shares = len(self.ranks), self._shares(batch, now)
        return [positions(batch, member, members, shares) for member in range(members)]

    def _shares(self, batch: Batch, now: float) -> tuple[int, ...]:
        if not self._is_balanced:
            return ()
        size = batch.stop - batch.start
        each = max(1, size // len(self.ranks))
        return apportion(size, [clock.speed(each, now) for clock in self._clocks])

    def work(self, batch: Batch, now: float) -> list[tuple[int, int, float]]:
        """Each member's rank, its samples of a batch that begins now, and its seconds for them."""
        clocks, parts = self._clocks, self.positions(batch, now)
        return [
            (rank, len(part), clock.seconds(len(part), now))
            for rank, clock, part in zip(self.ranks, clocks, parts, strict=True)
        ]

    def start_afresh(self) -> None:
        """A push went out: what was trained since counts for the next."""
        self.steps = self.samples = 0
        self.losses = 0.0

    def count(self, samples: int, loss: float) -> None:
        """A gradient is there."""
        self.steps += 1
        self.samples += samples
        self.losses += loss

    def take_in(self, tensors: Sequence[Tensor]) -> None:
        """A peer's weights arrive."""
        self._inbox.add(tensors)

    def empty_inbox(self) -> Inbox:
        """What peers have sent."""
        count = self._inbox.count
        total = self._inbox.take()
        return Inbox([tensor for tensor in total if tensor is not None] if count else None, count)
