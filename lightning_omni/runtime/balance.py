"""Ranks of different speed in one group: the compute time of each, and its part of the group's batch.

A rank's compute time runs from the end of its last batch (loading data and hooks count) to the end of this one, or in
groups that exchange to the last gradient. Waits for the group or the server do not count: while DDP broadcasts buffers,
from the last gradient to the end of the backward pass, in exchanges, and in collectives of the strategy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from torch.nn import Module

from lightning_omni.errors import ConfigurationError
from lightning_omni.runtime.leased_loader import RankLeases
from lightning_omni.runtime.model.tensor_sync import gathered
from lightning_omni.runtime.timing import Clock, HostClock, clock_of, wait_for
from lightning_omni.runtime.world import World
from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.steps import Balancer, Throughput

FIRST = 1 + c.SPLIT_WARM_UP + c.SPLIT_FEWEST
"""Batches before the members of a group exchange speeds for the first time (an epoch's first batch is not measured)."""
EVERY = 5
"""Batches between later exchanges, once all members' speeds are known."""


class Balance:
    """The measurement of this rank's speed, and its group's agreement on each rank's part of the batch.

    With ``only_measures``, the split is left to other code, which reads ``measured``.

    Attributes:
        measured: samples and compute seconds of each measured batch so far, if it ``only_measures``.
        loading: seconds of waiting for the data loader so far, a part of the compute time.
        squares: squared norms of this rank's gradient and of the group's mean in the last batch, times the square of
            the loss scale, if it ``only_measures`` and gradients are not accumulated.
    """

    def __init__(
        self,
        rebalance: Literal["off", "auto"],
        info: Callable[[str], None],
        only_measures: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.is_on = rebalance == "auto"
        self.measured: list[tuple[int, float]] = []
        self.loading = 0.0
        self.squares = torch.zeros(2)
        self._only_measures = only_measures
        self._info = info
        self._world: World | None = None
        self._leases: Callable[[], RankLeases | None] = lambda: None
        self._samples = 0
        self._module: Module | None = None
        self._clock = clock
        self._own = OwnTime(clock or HostClock())
        self._hooks: dict[object, Any] = {}
        self._throughput = Throughput()
        self._balancer = Balancer()
        self._until_agreement = FIRST
        self._exchanged = self._elsewhere = 0.0
        self._reduced = self._until_gradient = self._asked = 0.0

    @property
    def speed(self) -> float:
        return self._throughput.speed

    # --- The run -----------------------------------------------------------------------------------------------------

    def begin(self, world: World, module: Module, leases: Callable[[], RankLeases | None], samples: int = 0) -> None:
        """Start measuring, with ``rebalance="auto"``.

        ``leases`` returns this rank's leases, or None. Batches of other data have ``samples`` each; 0 measures none.
        """
        self._samples = samples
        if not self.is_on:
            return
        if leases() is None and not samples:
            self._info(
                'OmniStrategy: rebalance="auto" does nothing in this run: the training data has a sampler of its own,'
                " is iterable, or comes from several loaders, so every rank's part of a batch is fixed"
            )
            return
        self._world, self._module, self._leases = world, module, leases
        self._own = OwnTime(self._clock or clock_of(world.device))
        self._throughput = Throughput()
        self.regrouped()
        self._until_agreement = FIRST
        self._watch()
        if self._only_measures:
            self._own.start()

    def end(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._world = self._module = None

    def regrouped(self) -> None:
        self._balancer, self._until_agreement = Balancer(), c.SPLIT_FEWEST
        self._own.skip()

    def begin_epoch(self) -> None:
        self._own.skip()
        self._watch()

    # --- A batch -----------------------------------------------------------------------------------------------------

    def begin_fetch(self) -> None:
        self._asked = time.perf_counter()

    def end_fetch(self) -> None:
        self.loading += time.perf_counter() - self._asked

    def begin_batch(self) -> None:
        if self._world is not None:
            self.squares = torch.zeros(2, device=self._world.device)
            self._exchanged, self._elsewhere = self._world.exchange.traffic.seconds, 0.0
            self._reduced = self._until_gradient = self._world.reduction.seconds

    def begin_forward(self) -> None:
        """Pause between the calls of DDP and of the module in it: the group may broadcast buffers."""
        if self._world is not None and len(self._world.members) > 1:  # alone, there is no broadcast
            self._own.pause()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        is_running = self._world is not None and self._own.is_running
        if is_running:
            self._own.pause()
        try:
            yield
        finally:
            if is_running:
                self._own.work()

    def backward_done(self) -> None:
        """Exclude the wait for the group after a backward pass; measure the mean gradient if it ``only_measures``."""
        if self._world is not None and self._own.pause_since_gradient():
            self._own.work()
            exchanged = self._world.exchange.traffic.seconds - self._exchanged
            self._elsewhere = exchanged + self._until_gradient - self._reduced
            if self._only_measures and self._module is not None:
                means = [each.grad for each in self._module.parameters() if each.grad is not None]
                self.squares[1] = sum(map(squared_length, means))

    def end_batch(self) -> None:
        leases = self._leases()
        if self._world is None or (leases is None and not self._samples):
            return
        if not self._world.executor.exchanges:  # the optimizer waits for no other rank
            if self._only_measures:
                wait_for(self._world.device)  # the batch's time must be known now
            self._own.pause()
        trained = self._samples if leases is None else leases.samples
        for samples, seconds in self._own.finish(trained, self._elsewhere):
            self._throughput.note(samples, seconds)
            if self._only_measures:
                self.measured.append((samples, seconds))
        self._until_agreement -= 1
        if self._until_agreement <= 0 and not self._only_measures and leases is not None:
            is_known = len(self._world.members) == 1 or self._agree(self._world, leases)
            self._until_agreement = EVERY if is_known else c.SPLIT_FEWEST
        self._own.start()

    def after_validation(self) -> None:
        if self._world is not None:
            self._own.start()

    def metrics(self) -> dict[str, float]:
        leases = self._leases()
        if self._world is None or leases is None or leases.current is None:
            return {}
        return {"omni/share": leases.samples / (leases.current.stop - leases.current.start)}

    # --- How ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._module is None:
            return
        if self._module not in self._hooks:
            self._hooks[self._module] = self._module.register_forward_pre_hook(lambda *_: self._own.work())
        for parameter in self._module.parameters():
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(self._gradient)

    def _gradient(self, gradient: Tensor) -> None:
        if self._only_measures:
            self.squares[0] += squared_length(gradient)
        self._own.gradient()
        if self._world is not None:
            self._until_gradient = self._world.reduction.seconds

    def _agree(self, world: World, leases: RankLeases) -> bool:
        """Agree in the group on the split of batches that no loader has taken; return whether all speeds are known."""
        gathered = gather(world, (self.speed, self._throughput.variance, leases.handed))
        speeds, variances, handed = zip(*gathered, strict=True)
        if (split := self._balancer.decide(leases.split, speeds, variances)) is not None:
            leases.set_batch_shares(split.shares, from_number=int(max(handed)))
            self._info(
                f"OmniStrategy: group {world.group} rebalanced: {' : '.join(map(str, split.shares))} of"
                f" {sum(split.shares)} samples; up to {split.gain:.0%} faster"
            )
        return all(speeds)

    def speeds_of_all(self, world: World) -> dict[int, float]:
        """Return the samples per second of every live rank. All of them call it.

        Raises:
            ConfigurationError: speeds are not measured, or not for long enough.
        """
        if not self.is_on:
            raise ConfigurationError(
                'by_speed=True: the speeds of ranks are measured with rebalance="auto" only; pass that to OmniStrategy,'
                " or leave by_speed= out"
            )
        # In millionths, plus one: a slot that stays 0 belongs to a lost rank, even if this rank has not learned of it.
        slots = [0] * world.size
        slots[world.rank] = 1 + round(self.speed * 1e6)
        speeds = {rank: (speed - 1) / 1e6 for rank, speed in enumerate(world.all_reduce_max(slots)) if speed}
        if not all(speeds.values()):
            unknown = ", ".join(str(rank) for rank, speed in speeds.items() if not speed)
            raise ConfigurationError(
                f"by_speed=True: the speed of rank {unknown} is not known yet; call regroup() later, after {FIRST}"
                " batches or more"
            )
        return speeds


def squared_length(gradient: Tensor) -> Tensor:
    values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    length: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return length.square()


def gather(world: World, numbers: Sequence[float]) -> list[list[float]]:
    """Return every member's numbers, in rank order. All members call it."""
    mine = torch.tensor(list(numbers), dtype=torch.float64)
    return [row.tolist() for row in gathered(mine.to(world.device), world.compute_group)]


def gather_values(world: World, value: Any, kind: Any) -> list[Any]:
    """Return every member's value, of type ``kind``; see `gather`."""
    mine = msgspec.msgpack.encode(value)
    lengths = [int(length) for [length] in gather(world, [len(mine)])]
    padded = torch.frombuffer(bytearray(mine.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    rows = gathered(padded.to(world.device), world.compute_group)
    texts = [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]
    return [msgspec.msgpack.decode(text, type=kind) for text in texts]


# --- Time ------------------------------------------------------------------------------------------------------------


class OwnTime:
    """A timer of this rank's computation, without waits for others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._intervals: list[tuple[Any, Any]] = []
        self._since: Any = None
        self._gradient: Any = None
        self._is_whole = self._was_backward = False
        self._unread: deque[tuple[int, float, list[tuple[Any, Any]]]] = deque()

    def start(self) -> None:
        self._intervals, self._since, self._gradient = [], None, None
        self._is_whole, self._was_backward = True, False
        self.work()

    def skip(self) -> None:
        self._is_whole = False

    @property
    def is_running(self) -> bool:
        return self._since is not None

    def work(self) -> None:
        if self._since is None:
            self._since = self._clock.mark()

    def pause(self) -> None:
        self._pause_from(self._clock.mark())

    def gradient(self) -> None:
        self._gradient = self._clock.mark(instead_of=self._gradient)

    def pause_since_gradient(self) -> bool:
        if self._gradient is None:
            return False
        self._pause_from(self._gradient)
        self._was_backward = True
        return True

    def _pause_from(self, moment: Any) -> None:
        if self._since is not None:
            self._intervals.append((self._since, moment))
        self._since = self._gradient = None

    def finish(self, samples: int, elsewhere: float = 0.0) -> list[tuple[int, float]]:
        """Finish a batch; return samples and seconds of each batch whose time is known now.

        Time after the last pause does not count, nor does a batch without gradients, or with a `skip` since `start`.
        ``elsewhere`` are seconds of waiting to subtract.
        """
        if self._is_whole and self._was_backward:
            self._unread.append((samples, elsewhere, self._intervals))
        self._intervals, self._since = [], None
        known = []
        while self._unread:
            samples, elsewhere, intervals = self._unread[0]
            seconds = [self._clock.seconds(*interval) for interval in intervals]
            if None in seconds:
                break
            known.append((samples, sum(filter(None, seconds)) - elsewhere))
            self._unread.popleft()
        return known
