"""The first batches of a run, timed while they train: what hardware efficiency is forecast from, at no cost.

They are the run's own: nothing of them is taken back. All ranks are one group then, so a step takes as long for one as
for all, and what of it is not a rank's own computation is the all-reduce.

Rule: ranks decide after the same batches, counted in optimizer steps, so that all come to the collectives of `seen`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_omni.optimizer.balance import Balance, gather, gather_values
from lightning_omni.optimizer.reduction import seconds_of_arithmetic
from lightning_omni.optimizer.serve_time import seconds_of_push
from lightning_omni.performance.forecast import TrialResult
from lightning_omni.performance.measured import HeadMeasured, Measured
from lightning_omni.performance.step_timer import StepTimer
from lightning_omni.protocol.all_reduce import all_reduce_of
from lightning_omni.search import Observation, SearchSpec
from lightning_omni.search import constants as c
from lightning_omni.strategy.declared import loader_of
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.tuner.observed_heads import ObservedHead
from lightning_omni.tuner.probing import batch_size_of
from lightning_omni.tuner.step import say_nothing

DECISION_STEPS = tuple(c.FIRST_DECISION << number for number in range(c.DECISIONS))
MESSAGES = 5
"""Messages of which the shortest counts: one may have waited for a rank that was late."""
MESSAGE_BYTES = 1 << 16, 1 << 18, 1 << 20
"""Of messages that take longer for what is in them. The last kind takes much longer than an empty one on fast links
and is a small part of a large gradient; on slow links smaller ones do."""
CLEARLY_LONGER = 10.0
"""Times as long as an empty message is much longer."""


@dataclass(frozen=True)
class TimedStep:
    """One optimizer step of one rank.

    Attributes:
        samples: this rank's.
        own: seconds of its own computation, with the optimizer's step and all that is not waiting for others.
        seconds: from the end of the last step to the end of this one.
        loss: mean over its samples, before the step.
    """

    samples: int
    own: float
    seconds: float
    loss: float


def seconds_per_byte(timed: Callable[[int], float], nbytes: int) -> float:
    """What each byte adds to a message, by two that differ in their bytes alone.

    Neither is empty, if a gradient is large enough for two: many links let the first bytes of a message pass at once,
    and a small one does not show what a large one takes.

    Args:
        timed: seconds of a message of so many numbers of four bytes each.
        nbytes: of a gradient, which no message is larger than.
    """
    short = seconds = timed(1)
    count, per_byte = 1, 0.0
    for size in MESSAGE_BYTES:
        more = max(2, min(nbytes, size) // 4)
        if more <= count:
            break
        longer = timed(more)
        per_byte = max(longer - seconds, 1e-9) / (4 * (more - count))
        if count > 1 and longer > CLEARLY_LONGER * short:
            break
        count, seconds = more, longer
    return per_byte


def bytes_take_long(seconds: float, step: float) -> bool:
    """Whether it may pay to send a gradient otherwise, whose bytes take so many seconds of a step."""
    return seconds > (c.GAIN - 1) * step


class FirstBatches:
    """Times a run's first steps on every rank of one group.

    Args:
        strategy: of the run, whose groups stand and whose first batch has not begun.
        spec: what is searched, from the setting that the run trains with.
        heads: submodules that several groups may have merged.
        before: steps of the same group with other batches, whose messages need not be timed once more.
        is_asked: whether the user has named them; others are timed only where a gradient's bytes take long, and where
            a sample uses each weight once.
    """

    def __init__(
        self,
        strategy: OmniStrategyHooks,
        spec: SearchSpec,
        heads: Sequence[str] = (),
        before: FirstBatches | None = None,
        is_asked: bool = True,
    ) -> None:
        self.spec = spec
        self._averaging: dict[str, float] = before._averaging if before else {}
        self._reduce_per_byte: float = before._reduce_per_byte if before else 0.0
        self._serve: float = before._serve if before else 0.0
        self._within_node: tuple[float, float] | None = before._within_node if before else None
        self._strategy, self._world = strategy, strategy.joined
        self._balance = Balance("auto", say_nothing, only_measures=True)
        self._kept = strategy.balance
        self._timer = StepTimer()
        self._steps: list[TimedStep] = []
        self._losses: list[Tensor] = []
        self._count = self._measured = 0
        self._tail = 0.0
        self._since: float | None = None
        self._moments: Iterator[int] = iter(DECISION_STEPS[1:] if before else DECISION_STEPS)
        self._next = next(self._moments)
        self._heads: dict[str, HeadMeasured] = before._heads if before else {}
        self._is_asked = is_asked
        batch = batch_size_of(loader_of(strategy.fitted.trainer))
        self._observed = {
            name: ObservedHead(strategy.fitted.get_submodule(name), batch) for name in heads if before is None
        }
        strategy.balance = self._balance
        self._balance.begin(self._world, strategy.fitted, lambda: strategy.epochs.leases)

    def backward_done(self) -> None:
        """A backward pass is done: what comes until the end of the batch is this rank's own."""
        self._wait_for_device()
        self._since = time.perf_counter()

    def batch_done(self, loss: Tensor | None, steps: bool) -> None:
        """A batch is done.

        Args:
            loss: of the batch; None if there is none.
            steps: whether the optimizer has stepped.
        """
        self._wait_for_device()
        if self._since is not None:
            self._tail += time.perf_counter() - self._since
            self._since = None
        if loss is not None:
            self._losses.append(loss.detach())
        if not steps:
            return
        seconds, batches = self._timer.done(), self._balance.measured[self._measured :]
        mean = float(torch.stack(self._losses).mean()) if self._losses else math.nan
        if seconds is not None and len(batches) == len(self._losses) > 0:
            own = sum(seconds for _, seconds in batches) + self._tail
            self._steps.append(TimedStep(sum(samples for samples, _ in batches), own, seconds, mean))
        self._measured, self._tail, self._losses = len(self._balance.measured), 0.0, []
        self._count += 1

    def interrupted(self) -> None:
        """Something else than training comes: the next step is not timed."""
        self._timer.interrupt()

    @property
    def is_due(self) -> bool:
        """Whether it is to be decided by what was seen; the same on all ranks."""
        return self._count >= self._next

    @property
    def is_early(self) -> bool:
        """Whether what was `seen` last is too little for anything but proportional batches."""
        return self._next <= DECISION_STEPS[1]

    @property
    def is_last(self) -> bool:
        """Whether what was `seen` last is what is decided by in any case."""
        return self._next > DECISION_STEPS[-1]

    def seen(self) -> Observation | None:
        """What all ranks have seen so far, the same on all; None if it is too little. All call it."""
        self._next = next(self._moments, DECISION_STEPS[-1] + 1)
        round_trip = self._round_trip()
        if not self._averaging:
            self._averaging = self._seconds_of_averaging()
        if not self._reduce_per_byte:
            self._reduce_per_byte = self._seconds_per_byte()
        if not self._serve:
            self._serve = self._seconds_of_push()
        if self._within_node is None:
            self._within_node = self._seconds_within_node()
        rows: list[list[TimedStep]] = gather_values(self._world, self._steps, list[TimedStep])
        count = min(map(len, rows))
        if count < 2:
            return None
        rows = [row[-count:] for row in rows]
        seconds = [max(row[step].seconds for row in rows) for step in range(count)]
        samples = [sum(row[step].samples for row in rows) for step in range(count)]
        if self._observed:
            self._heads = self._measured_heads(sum(seconds) / count)
        losses = [math.fsum(row[step].loss for row in rows) / len(rows) for step in range(count)]
        ends = [float(sum(samples[: step + 1])) for step in range(count)]
        measured = Measured(
            groups=(self._world.members,),
            samples=tuple(tuple(each.samples for each in row) for row in rows),
            own=tuple(tuple(max(each.own, 1e-9) for each in row) for row in rows),
            steps=(tuple(seconds),),
            exchanges=((0.0,) * count,),
            serve=self._serve,
            round_trip=round_trip,
            reduce_per_byte=self._reduce_per_byte,
            hands_on=True,
            shapes=self._shapes,
            averaging=dict(self._averaging),
            heads=self._heads,
            nbytes=self._nbytes,
            servers=self._world.server.count,
            per_node=self._world.server.per_node,
            nodes=self._world.server.nodes_of(self._world.members),
            server_node=self._world.server.node,
            node_round_trip=self._within_node[0],
            node_per_byte=self._within_node[1],
        )
        return Observation(TrialResult(self.spec.start, tuple(ends), tuple(losses), gathers=False), measured)

    def _round_trip(self) -> float:
        """Seconds of a message of hardly any bytes to another rank and back: the shortest of a few, on rank 0.

        An all-gather of one number hands as many messages on, one after the other, as there are other ranks.
        """
        return 2 * self._shortest(lambda: gather(self._world, [0.0])) / max(1, len(self._world.members) - 1)

    def _seconds_per_byte(self) -> float:
        """What each byte adds to an all-reduce, as rank 0 sees it."""
        return seconds_per_byte(self._seconds_of_all_reduce, self._nbytes)

    def _seconds_of_all_reduce(self, count: int) -> float:
        """Of so many numbers, as rank 0 sees it: all ranks hear the same."""
        numbers = torch.zeros(count, device=self._world.device)
        found = self._shortest(partial(dist.all_reduce, numbers, group=self._world.compute_group))
        return gather(self._world, [found])[0][0]

    def _seconds_within_node(self) -> tuple[float, float]:
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
        return 2 * there(1), seconds_per_byte(there, self._nbytes)

    def _seconds_between(self, first: int, second: int, count: int) -> float:
        """Seconds of so many numbers from one member to another, there and back halved: all ranks hear the same."""
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
        for _ in range(MESSAGES):
            self._wait_for_device()
            began = time.perf_counter()
            send()
            self._wait_for_device()
            found.append(time.perf_counter() - began)
        return min(found)

    @property
    def _nbytes(self) -> int:
        # Of merged heads, too: one group averages their gradients.
        return sum(part.replica.layout.nbytes for part in self._world.parts)

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        layouts = [part.replica.layout for part in self._world.parts]
        return tuple(tuple(spec.shape) for layout in layouts for spec in layout.specs)

    def _seconds_of_push(self) -> float:
        """What a push will take a server, which is where rank 0 is."""
        is_there = self._world.rank == self._world.members[0]
        own = sum(map(seconds_of_push, self._strategy.real_optimizers)) if is_there else 0.0
        return gather(self._world, [own])[0][0]

    def _seconds_of_averaging(self) -> dict[str, float]:
        """By format, what the slowest rank computes to average its gradients so."""
        shapes, device, formats = self._shapes, self._world.device, self.spec.space.all_reduce
        own = [seconds_of_arithmetic(all_reduce_of(each), shapes, device) for each in formats]
        rows = gather(self._world, own) if own else []
        return dict(zip(formats, map(max, zip(*rows, strict=True)), strict=True))

    def _measured_heads(self, step: float) -> dict[str, HeadMeasured]:
        """What merging each submodule would take, as rank 0 sees it: the server computes beside it.

        Args:
            step: seconds of one.
        """
        self._unobserve()
        found: dict[str, HeadMeasured] = {}
        may_gain = self._is_asked or bytes_take_long(self._reduce_per_byte * self._nbytes, step)
        if may_gain and self._world.rank == self._world.members[0]:
            for name, head in self._observed.items():
                if (measured := head.measured(self._count, is_flat=not self._is_asked)) is not None:
                    found[name] = measured
        self._observed = {}
        told: list[dict[str, HeadMeasured]] = gather_values(self._world, found, dict[str, HeadMeasured])
        return told[0]

    def _unobserve(self) -> None:
        for each in self._observed.values():
            each.close()

    def close(self) -> None:
        """The run's own balance takes its place again."""
        self._unobserve()
        self._balance.end()
        if self._strategy.balance is self._balance:
            self._strategy.balance = self._kept
            self._kept.after_validation()  # what has been since it was put away is no batch of its own

    def _wait_for_device(self) -> None:
        """The host runs ahead of an accelerator; while steps are timed, it does not."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
