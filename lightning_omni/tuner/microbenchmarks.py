"""What messages and arithmetic take that a run may need, timed by themselves while no rank trains.

Rule: all ranks of the group ask for the same in the same order, and hear the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_omni.optimizer.balance import gather
from lightning_omni.optimizer.reduction import seconds_of_arithmetic
from lightning_omni.optimizer.serve_time import seconds_of_push
from lightning_omni.optimizer.timing import wait_for
from lightning_omni.performance.placement import sites_of
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


class Sites(NamedTuple):
    """Where ranks are that reach each other over no slow link, and what messages between these take.

    Attributes:
        of: the node, or the site, of each member; none if all are on one node.
        round_trip: seconds until a message of hardly any bytes is answered at one of them; 0 if unknown.
        per_byte: seconds of each byte of such a message, one way; 0 if unknown.
    """

    of: tuple[int, ...]
    round_trip: float = 0.0
    per_byte: float = 0.0


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
    def nodes(self) -> Sites:
        """The nodes, and what messages take within the first that has two ranks."""
        places = dict[int, list[int]]()
        nodes = self._world.server.nodes_of(self._world.members)
        for place, node in enumerate(nodes):
            places.setdefault(node, []).append(place)
        pair = next((each[:2] for each in places.values() if len(each) > 1), None)
        return Sites(nodes) if pair is None else Sites(nodes, *self._timed(*pair))

    @cached_property
    def sites(self) -> Sites:
        """Nodes that are joined by links much faster than those to others, and what messages take within the slowest.

        The nodes, where all links are alike, or where it is not links that an all-reduce takes long for: small times
        differ by chance. Two nodes have one link, so that there is nothing to compare it with.
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

    def _seconds_of_all_reduce(self, count: int) -> float:
        """Of so many numbers, as rank 0 sees it."""
        numbers = torch.zeros(count, device=self._world.device)
        found = self._shortest(partial(dist.all_reduce, numbers, group=self._world.compute_group))
        return gather(self._world, [found])[0][0]

    def _timed(self, first: int, second: int) -> tuple[float, float]:
        """Between two members: seconds of a short message and its answer, and of each byte one way."""

        def there(count: int) -> float:
            return self._seconds_between([(first, second)], count)[0]

        return 2 * there(1), seconds_per_byte(there, self.nbytes)

    def _seconds_of_links(self, pairs: Sequence[tuple[int, int]], count: int) -> list[float]:
        """Of so many numbers from each member to the next; those that have no end in common are timed together."""
        seconds = [0.0] * len(pairs)
        for start in range(2):
            seconds[start::2] = self._seconds_between(pairs[start::2], count)
        return seconds

    def _seconds_between(self, pairs: Sequence[tuple[int, int]], count: int) -> list[float]:
        """Seconds of so many numbers from the first to the second member of each pair, there and back halved.

        Args:
            pairs: members by their places, each in one pair at most; all pairs send at once.
            count: of numbers.
        """
        numbers, group = torch.zeros(count, device=self._world.device), self._world.compute_group
        own, found = self._world.members.index(self._world.rank), 0.0
        for first, second in pairs:

            def there_and_back(other: int = second) -> None:
                dist.send(numbers, group=group, group_dst=other)
                dist.recv(numbers, group=group, group_src=other)

            def back_and_there(other: int = first) -> None:
                dist.recv(numbers, group=group, group_src=other)
                dist.send(numbers, group=group, group_dst=other)

            if own in (first, second):
                found = self._shortest(there_and_back if own == first else back_and_there)
        seconds = gather(self._world, [found])
        return [seconds[first][0] / 2 for first, _ in pairs]

    def _shortest(self, send: Callable[[], object]) -> float:
        """Seconds of the shortest of a few messages of one kind."""
        found = []
        for _ in range(c.MESSAGES):
            wait_for(self._world.device)
            began = time.perf_counter()
            send()
            wait_for(self._world.device)
            found.append(time.perf_counter() - began)
        return min(found)


__all__ = ["Microbenchmarks", "seconds_per_byte"]
