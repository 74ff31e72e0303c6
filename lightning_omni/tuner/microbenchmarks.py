"""What messages and arithmetic take that a run may need, timed by themselves while no rank trains.

Rule: all ranks of the group ask for the same in the same order, and hear the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial

import torch
import torch.distributed as dist

from lightning_omni.optimizer.balance import gather
from lightning_omni.optimizer.reduction import seconds_of_arithmetic
from lightning_omni.optimizer.serve_time import seconds_of_push
from lightning_omni.protocol.all_reduce import all_reduce_of
from lightning_omni.search import constants as c
from lightning_omni.strategy.hooks import OmniStrategyHooks

MESSAGE_BYTES = 1 << 16, 1 << 18, 1 << 20
"""Of messages that take longer for what is in them. The last kind takes much longer than an empty one on fast links
and is a small part of a large gradient; on slow links smaller ones do."""


def seconds_per_byte(timed: Callable[[int], float], nbytes: int) -> float:
    """What each byte adds to a message, by two that differ in their bytes alone.

    Neither is empty, if a gradient is large enough for two: many links let the first bytes of a message pass at once,
    and a small one does not show what a large one takes. Of a gradient that is smaller than all of these messages the
    smallest tells it: two that hardly differ in their bytes differ by chance alone.

    Args:
        timed: seconds of a message of so many numbers of four bytes each.
        nbytes: of a gradient, which no message but the smallest is larger than.
    """
    short = seconds = timed(1)
    count, per_byte = 1, 0.0
    for size in MESSAGE_BYTES:
        more = max(MESSAGE_BYTES[0], min(nbytes, size)) // 4
        if more <= count:
            break
        longer = timed(more)
        per_byte = max(longer - seconds, 1e-9) / (4 * (more - count))
        if count > 1 and longer > c.CLEARLY_LONGER * short:
            break
        count, seconds = more, longer
    return per_byte


class Microbenchmarks:
    """Times each of these once, when it is asked for first.

    Args:
        strategy: of a run whose ranks are one group.
    """

    def __init__(self, strategy: OmniStrategyHooks) -> None:
        self._strategy, self._world = strategy, strategy.world
        self._averaging: dict[str, float] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of a gradient, with that of merged heads: one group averages theirs, too."""
        return sum(part.replica.layout.nbytes for part in self._world.parts)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the parameters."""
        layouts = [part.replica.layout for part in self._world.parts]
        return tuple(tuple(spec.shape) for layout in layouts for spec in layout.specs)

    @cached_property
    def round_trip(self) -> float:
        """Seconds of a message of hardly any bytes to another rank and back: the shortest of a few.

        An all-gather of one number hands as many messages on, one after the other, as there are other ranks.
        """
        own = self._shortest(lambda: gather(self._world, [0.0]))
        return 2 * gather(self._world, [own])[0][0] / max(1, len(self._world.members) - 1)

    @cached_property
    def reduce_per_byte(self) -> float:
        """Seconds that each byte adds to an all-reduce, as rank 0 sees it."""
        return seconds_per_byte(self._seconds_of_all_reduce, self.nbytes)

    @cached_property
    def within_node(self) -> tuple[float, float]:
        """What a message of hardly any bytes takes to a rank on the same node and back, and each byte one way.

        Zeros if no link is between any two nodes, or none has two ranks. The first node that has is timed.
        """
        places = dict[int, list[int]]()
        for place, node in enumerate(self._world.server.nodes_of(self._world.members)):
            places.setdefault(node, []).append(place)
        pair = next((each[:2] for each in places.values() if len(each) > 1), None)
        if pair is None:
            return 0.0, 0.0
        first, second = pair
        there = partial(self._seconds_between, first, second)
        return 2 * there(1), seconds_per_byte(there, self.nbytes)

    @cached_property
    def push(self) -> float:
        """Seconds that a push will take a server, which is where rank 0 is."""
        is_there = self._world.rank == self._world.members[0]
        own = sum(map(seconds_of_push, self._strategy.real_optimizers)) if is_there else 0.0
        return gather(self._world, [own])[0][0]

    @property
    def averaging(self) -> dict[str, float]:
        """By format, what the slowest rank computes to average its gradients so; of those that were timed."""
        return dict(self._averaging)

    def time_averaging(self, formats: tuple[str, ...]) -> None:
        """Times what ranks compute to average gradients so, of those of which that is not known.

        Args:
            formats: as `all_reduce_of` takes them.
        """
        wanted = [each for each in formats if each not in self._averaging]
        if not wanted:
            return
        shapes, device = self.shapes, self._world.device
        rows = gather(self._world, [seconds_of_arithmetic(all_reduce_of(each), shapes, device) for each in wanted])
        self._averaging.update(zip(wanted, map(max, zip(*rows, strict=True)), strict=True))

    def wait_for_device(self) -> None:
        """The host runs ahead of an accelerator; while something is timed, it does not."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _seconds_of_all_reduce(self, count: int) -> float:
        """Of so many numbers, as rank 0 sees it."""
        numbers = torch.zeros(count, device=self._world.device)
        found = self._shortest(partial(dist.all_reduce, numbers, group=self._world.compute_group))
        return gather(self._world, [found])[0][0]

    def _seconds_between(self, first: int, second: int, count: int) -> float:
        """Seconds of so many numbers from one member to another, there and back halved."""
        numbers, group = torch.zeros(count, device=self._world.device), self._world.compute_group

        def there_and_back() -> None:
            dist.send(numbers, group=group, group_dst=second)
            dist.recv(numbers, group=group, group_src=second)

        def back_and_there() -> None:
            dist.recv(numbers, group=group, group_src=first)
            dist.send(numbers, group=group, group_dst=first)

        own, found = self._world.members.index(self._world.rank), 0.0
        if own in (first, second):
            found = self._shortest(there_and_back if own == first else back_and_there)
        return gather(self._world, [found])[first][0] / 2

    def _shortest(self, send: Callable[[], object]) -> float:
        """Seconds of the shortest of a few messages of one kind."""
        found = []
        for _ in range(c.MESSAGES):
            self.wait_for_device()
            began = time.perf_counter()
            send()
            self.wait_for_device()
            found.append(time.perf_counter() - began)
        return min(found)


__all__ = ["Microbenchmarks", "seconds_per_byte"]
