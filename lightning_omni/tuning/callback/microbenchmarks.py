"""Timings of messages and arithmetic, made while no rank trains.

Rule: all ranks of the group request the same timings in the same order, and receive the same results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_omni.runtime._private import store_of
from lightning_omni.runtime.balance import gather
from lightning_omni.runtime.model.reduction import seconds_of_arithmetic, seconds_of_push
from lightning_omni.runtime.timing import wait_for
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.tuning.model.cost_model import sites_of
from lightning_omni.tuning.search import constants as c
from lightning_omni.wire.all_reduce import all_reduce_of

MESSAGE_BYTES = 1 << 16, 1 << 18, 1 << 20
"""Sizes of timed messages, in bytes. One that takes much longer than an empty message is the last, except the first in
`seconds_per_byte`."""


def seconds_per_byte(timed: Callable[[int], float], nbytes: int) -> float:
    """Return the seconds that each byte adds to a message, by two messages that differ in their bytes alone.

    Neither is nearly empty, because many links send first bytes at once, unless ``nbytes``, those of a gradient, are
    under twice the least of `MESSAGE_BYTES`. ``timed`` returns the seconds of a message with a number of four-byte
    values.
    """
    short = seconds = timed(1)
    count, per_byte = 1, 0.0
    for size in MESSAGE_BYTES:
        more = max(MESSAGE_BYTES[0], min(nbytes, size)) // 4
        if more < 2 * count:  # a few bytes take less time than messages vary by
            break
        longer = timed(more)
        per_byte = max(longer - seconds, 1e-9) / (4 * (more - count))
        if count > 1 and longer > c.CLEARLY_LONGER * short:
            break
        count, seconds = more, longer
    return per_byte


class Sites(NamedTuple):
    """The nodes or sites of the members, and the times of messages inside one of them.

    The fields are `Measured.nodes`, `Measured.node_round_trip` and `Measured.node_per_byte`.
    """

    of: tuple[int, ...]
    round_trip: float = 0.0
    per_byte: float = 0.0


class Microbenchmarks:
    """Timings that are made once each, at their first request, in a run whose ranks are one group.

    Attributes:
        averaging: by format, seconds that the slowest rank computes to average gradients.
    """

    def __init__(self, strategy: OmniStrategyHooks) -> None:
        self._strategy, self._world = strategy, strategy.world
        self.averaging: dict[str, float] = {}

    @property
    def nbytes(self) -> int:
        return sum(part.replica.layout.nbytes for part in self._world.parts)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        layouts = [part.replica.layout for part in self._world.parts]
        return tuple(tuple(spec.shape) for layout in layouts for spec in layout.specs)

    @cached_property
    def round_trip(self) -> float:
        """Return the seconds of a nearly empty message to another rank and back: the shortest of a few."""
        if self._has_device:
            return 2 * self._seconds_between_hosts(1)
        # An all-gather of one number sends as many messages, one after the other, as there are other ranks.
        own = self._shortest(lambda: gather(self._world, [0.0]))
        return 2 * gather(self._world, [own])[0][0] / max(1, len(self._world.members) - 1)

    @cached_property
    def reduce_per_byte(self) -> float:
        return seconds_per_byte(self._seconds_of_all_reduce, self.nbytes)

    @property
    def _has_device(self) -> bool:
        return self._world.device.type != "cpu"

    @cached_property
    def copy_per_byte(self) -> float:
        if not self._has_device:
            return 0.0
        return gather(self._world, [seconds_per_byte(self._seconds_of_copy, self.nbytes)])[0][0]

    @cached_property
    def host_per_byte(self) -> float:
        return seconds_per_byte(self._seconds_between_hosts, self.nbytes) if self._has_device else 0.0

    @cached_property
    def nodes(self) -> Sites:
        nodes = self._world.server.nodes_of(self._world.members)
        places = [[place for place, each in enumerate(nodes) if each == node] for node in dict.fromkeys(nodes)]
        pair = next((each[:2] for each in places if len(each) > 1), None)
        return Sites(nodes) if pair is None else Sites(nodes, *self._timed(*pair))

    @cached_property
    def sites(self) -> Sites:
        """Return the sites, nodes joined by fast links, and the times of messages over the slowest link within one.

        The nodes are returned if there are fewer than three, if all links are alike, or if links are not the cause of a
        slow all-reduce.
        """
        nodes = self._world.server.nodes_of(self._world.members)
        firsts = [nodes.index(node) for node in sorted(set(nodes))]
        if len(firsts) < 3:
            return self.nodes
        pairs = list(pairwise(firsts))
        empty = max(self._seconds_of_links(pairs, 1))
        for size in MESSAGE_BYTES:
            seconds = self._seconds_of_links(pairs, size // 4)
            if max(seconds) > c.CLEARLY_LONGER * empty:
                break
        of, inside = sites_of(nodes, seconds, c.OTHER_LINK)
        if not inside or c.CLEARLY_LONGER * max(seconds) < self.reduce_per_byte * size:
            return self.nodes
        return Sites(of, *self._timed(*pairs[max(inside, key=seconds.__getitem__)]))

    @cached_property
    def push(self) -> float:
        """Return the seconds that a push will take a server, if that is as fast as rank 0's machine."""
        timed = self._strategy.parts.grouping.real_optimizers if self._world.rank == self._world.members[0] else []
        return gather(self._world, [float(sum(map(seconds_of_push, timed)))])[0][0]

    def time_averaging(self, formats: tuple[str, ...]) -> None:
        """Time the arithmetic of those all-reduce formats that were not timed yet.

        Of PowerSGD only the largest rank is timed.
        """
        wanted = {each: all_reduce_of(each) for each in formats if each not in self.averaging}
        if not wanted:
            return
        costliest = {type(each): each for each in sorted(wanted.values(), key=lambda each: getattr(each, "rank", 0))}
        shapes, device = self.shapes, self._world.device
        rows = gather(self._world, [seconds_of_arithmetic(each, shapes, device) for each in costliest.values()])
        slowest = dict(zip(costliest, map(max, zip(*rows, strict=True)), strict=True))
        self.averaging.update({name: slowest[type(each)] for name, each in wanted.items()})

    def _seconds_of_all_reduce(self, count: int) -> float:
        numbers = torch.zeros(count, device=self._world.device)
        found = self._shortest(partial(dist.all_reduce, numbers, group=self._world.compute_group))
        return gather(self._world, [found])[0][0]

    def _seconds_of_copy(self, count: int) -> float:
        numbers, memory = torch.zeros(count, device=self._world.device), torch.zeros(count)
        return (self._shortest(lambda: memory.copy_(numbers)) + self._shortest(lambda: numbers.copy_(memory))) / 2

    def _seconds_between_hosts(self, count: int) -> float:
        """Return the seconds of ``count`` elements from the last member to torch's store, on the first one's host."""
        found = 0.0
        if self._world.rank == self._world.members[-1]:
            store, key, numbers = store_of(self._world.process_groups.original), "omni-message", bytes(4 * count)

            def there_and_back() -> None:
                store.set(key, numbers)
                store.get(key)

            found = self._shortest(there_and_back) / 2
            store.set(key, b"")
        return gather(self._world, [found])[-1][0]

    def _timed(self, first: int, second: int) -> tuple[float, float]:
        def there(count: int) -> float:
            return self._seconds_between([(first, second)], count)[0]

        return 2 * there(1), seconds_per_byte(there, self.nbytes)

    def _seconds_of_links(self, pairs: Sequence[tuple[int, int]], count: int) -> list[float]:
        """Return the seconds of ``count`` elements over each link; links without a common end are timed together."""
        seconds = [0.0] * len(pairs)
        for start in range(2):
            seconds[start::2] = self._seconds_between(pairs[start::2], count)
        return seconds

    def _seconds_between(self, pairs: Sequence[tuple[int, int]], count: int) -> list[float]:
        """Return half of a round trip of ``count`` elements between the members of each pair, in seconds.

        All pairs send at once; each member is in one pair at most.
        """
        numbers, group = torch.zeros(count, device=self._world.device), self._world.compute_group
        own, found = self._world.members.index(self._world.rank), 0.0
        for first, second in pairs:
            if own in (first, second):
                other = second if own == first else first
                there = partial(dist.send, numbers, group=group, group_dst=other)
                back = partial(dist.recv, numbers, group=group, group_src=other)
                found = self._shortest(*((there, back) if own == first else (back, there)))
        seconds = gather(self._world, [found])
        return [seconds[first][0] / 2 for first, _ in pairs]

    def _shortest(self, *calls: Callable[[], object]) -> float:
        found = []
        for _ in range(c.MESSAGES):
            wait_for(self._world.device)
            began = time.perf_counter()
            for call in calls:
                call()
            wait_for(self._world.device)
            found.append(time.perf_counter() - began)
        return min(found)


__all__ = ["Microbenchmarks", "seconds_per_byte"]
