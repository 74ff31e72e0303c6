"""The numbers of a run for users: metrics, progress bar, warnings, and a report."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_omni.checks import counted
from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.methods import Method, text_of, with_period
from lightning_omni.run_report import RunReport, Staleness
from lightning_omni.runtime import World
from lightning_omni.runtime.timing import Clock, HostClock
from lightning_omni.wire.messages import AskStatus, Status

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

SMOOTHING = 0.9
"""Weight of the past in the running means."""


@dataclass
class _TimedBatch:
    """A batch whose times are read when the device has completed it."""

    since: Any
    """The timestamp at which the rank began to work on it: the end of the batch before it, unless interrupted."""
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """Start and end of each wait for other ranks, up to the end of the forward pass."""
    forward: Any = None
    until: Any = None
    in_forward: float = 0.0
    """Seconds of exchanges in the forward pass, for exclusive access to a merged head."""
    exchange: float = 0.0
    """Seconds of exchanges since the end of the batch before it."""


class StepTimes:
    """The running means of this rank's times, in seconds, and the bytes that it exchanged.

    Timestamps are the device's. Time between two batches belongs to the second one.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or HostClock()
        self._batch: _TimedBatch | None = None
        self._unread: deque[_TimedBatch] = deque()
        self._exchanged = self._exchanged_before = 0.0
        self._moved = self._moved_before = self._batches = 0
        self._means: tuple[float, float, float] | None = None

    def begin(self, exchanged: float, moved: int) -> None:
        if self._batch is None:  # the first batch, or the first after an interruption
            self._batch, self._exchanged = _TimedBatch(self.clock.mark()), exchanged
        self._exchanged_before, self._moved_before = exchanged, moved

    def interrupt(self) -> None:
        self._batch = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        batch = self._batch
        if batch is None or batch.forward is not None:
            yield
            return
        began = self.clock.mark()
        yield
        batch.waits.append((began, self.clock.mark()))

    def forward_done(self, exchanged: float) -> None:
        """Note the end of the forward pass, after which this rank may wait for its group."""
        batch = self._batch
        if batch is not None and batch.forward is None:
            batch.forward, batch.in_forward = self.clock.mark(), exchanged - self._exchanged_before

    def end(self, exchanged: float, moved: int) -> None:
        self._moved += moved - self._moved_before
        self._batches += 1
        now, batch = self.clock.mark(), self._batch
        if batch is not None:
            batch.until, batch.exchange = now, exchanged - self._exchanged
            self._unread.append(batch)
        self._exchanged, self._batch = exchanged, _TimedBatch(now)
        self._read()

    def _read(self) -> None:
        while self._unread:
            batch, seconds = self._unread[0], self.clock.seconds
            step = seconds(batch.since, batch.until)
            if step is None:
                return
            compute = 0.0
            if batch.forward is not None:
                waited = sum(seconds(*each) or 0.0 for each in batch.waits)
                compute = max(0.0, (seconds(batch.since, batch.forward) or 0.0) - waited - batch.in_forward)
            new = (compute, step, batch.exchange)
            old = self._means or new
            self._means = tuple(SMOOTHING * was + (1 - SMOOTHING) * now for was, now in zip(old, new, strict=True))  # type: ignore[assignment]
            self._unread.popleft()

    @property
    def means(self) -> tuple[float, float, float]:
        """Return seconds of compute (from loading to the end of the forward pass), whole step, and server exchange."""
        return self._means or (0.0, 0.0, 0.0)

    @property
    def bytes_per_step(self) -> float:
        return self._moved / max(1, self._batches)


def live_metrics(status: Status | None, staleness: Staleness, step_times: StepTimes) -> dict[str, float]:
    _, step, exchange = step_times.means
    values = {
        "omni/step_time": step,
        "omni/exchange_share": exchange / step if step else 0.0,
        "omni/bytes_per_step": step_times.bytes_per_step,
        "omni/staleness_mean": float(staleness.total / max(1.0, float(staleness.count))),
        "omni/staleness_max": float(staleness.largest),
    }
    if status is None:
        return values
    values |= {
        "omni/updates_per_s": status.updates_per_second,
        "omni/groups_alive": float(len(status.groups)),
        "omni/refused": float(status.refused),
    }
    if status.head_time:
        values["omni/head_time"] = status.head_time
    if status.serve_time:
        values["omni/serve_time"] = status.serve_time
    for group in status.groups:
        values[f"omni/group_{group.group}/step_time"] = group.step_time
        values[f"omni/group_{group.group}/staleness_mean"] = group.staleness_mean
        values[f"omni/group_{group.group}/slowest_rank"] = float(group.slowest_rank)
        values[f"omni/group_{group.group}/slowest_time"] = group.slowest_time
    return values


def gathering_sentence(world: World) -> str:
    return (
        f"OmniStrategy: all_gather in a training step sees the {len(world.members)} rank(s) of its compute group, not"
        f" all {len(world.topology.ranks)}: a contrastive loss over the gathered batch, say, is not that of DDP, and a"
        " rank's place in it is torch.distributed.get_rank(), not self.global_rank."
        " If it needs more ranks, use fewer groups, down to groups=1; in validation it sees all ranks"
    )


_NO_STATUS = Status(sent=0, clock=0, updates_per_second=0, refused=0, strangers=0, groups=(), staleness=(), lost=())
"""The status of a run without a server, or whose server has sent none."""


class Reporting:
    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._status: Status | None = None
        self._has_gathered = False

    def is_first_gather(self) -> bool:
        before, self._has_gathered = self._has_gathered, True
        return not before

    def keep(self, world: World) -> None:
        if world.control is not None:
            self._status = world.control.status

    def ask(self, world: World) -> None:
        if world.control is None:
            return
        try:
            self._status = world.control.request(AskStatus(), Status, timeout=5.0)
        except OmniError:
            self.keep(world)

    def report(self, world: World, bytes_per_step: float) -> RunReport:
        status = (world.control.status if world.control else None) or self._status or _NO_STATUS
        clock = status.clock
        if not world.executor.exchanges and status is not _NO_STATUS:  # the status is of earlier groups, or a tuner's
            clock = sum(part.replica.clock for part in world.parts if part.head is None)
            status = status if clock else _NO_STATUS
        staleness = status.staleness
        # Where groups join on their own, the topology has only this rank's group.
        groups = [group.ranks for group in status.groups] or world.topology.groups
        return RunReport(
            updates=world.steps + clock,
            staleness_mean=sum(t * count for t, count in enumerate(staleness)) / max(1, sum(staleness)),
            staleness_max=max(0, len(staleness) - 1),
            groups=len(world.topology.alive) if status is _NO_STATUS else len(status.groups),
            group_size=max(map(len, groups)),
            refused=status.refused,
            ranks_lost=status.lost,
            bytes_per_step=bytes_per_step,
            head_time=status.head_time,
            serve_time=status.serve_time,
        )

    @staticmethod
    def warning_before(world: World, steps: int | None) -> str:
        method, fragments = world.method, world.method.fragments
        due = [method.steps_to_push(part.replica) for part in world.parts if part.head is None]
        every = method.push_period * (fragments - 1)  # from the first fragment to the last
        if not steps or not due or not world.executor.exchanges or world.registration is not None:
            return ""
        if steps >= max(due) + every:
            return ""
        sent = max(0, 1 + (steps - min(due)) // method.push_period)
        what = "nothing" if not sent else f"{sent} of {fragments} fragments"
        if method.evaluated == "mean":
            end = "each group would train a model of its own, and the mean of these would be evaluated"
        else:
            end = f"{'the model' if not sent else 'the others'} would end with the weights that this fit begins with"
        return (
            f"each group makes about {counted(steps, 'step')} in this fit, and with method={text_of(method)!r} it"
            f" exchanges {what} in them: all of its weights have been exchanged after {max(due) + every} steps."
            f" {end[0].upper()}{end[1:]}. {_remedy(method, steps)}"
        )

    def warning(self, world: World) -> str:
        method, status = world.method, self._status
        if status is None or status.clock or not world.steps_at_worker or method.evaluated == "mean":
            return ""
        return (
            f"no group has exchanged anything with {method!r}, because its period is longer than the run: the model"
            " still has its initial weights"
        )


def _remedy(method: Method, steps: int) -> str:
    shorter = max(1, steps // 4 // method.fragments) * method.fragments  # allows several exchanges
    try:
        instead = text_of(with_period(method, shorter))
    except ConfigurationError:  # another setting excludes it
        instead = ""
    if instead in ("", text_of(method)):
        return "Pass settings with which it exchanges more often, or train for longer"
    return f'Pass a shorter period, method="{instead}" say, or train for longer'


def show_batches(trainer: Trainer, expected: int | None) -> None:
    """Show the estimated number of batches in the user's progress bar as its total."""
    bar: Any = trainer.progress_bar_callback  # the base class does not declare it
    if expected is None or bar is None or not trainer.is_global_zero or getattr(bar, "is_disabled", False):
        return
    # The user's own bar may lack this attribute, and Lightning's bars lack it before their first batch.
    with contextlib.suppress(AttributeError, TypeError, AssertionError, IndexError):
        bar.train_progress_bar.total = expected
