"""What a user sees while the run runs: step times, staleness, who is slow."""

from __future__ import annotations

import time

from lightning_omni.metrics import Staleness
from lightning_omni.optimizer import World
from lightning_omni.performance.step_timer import StepTimer
from lightning_omni.protocol.messages import Status

SMOOTHING = 0.9
"""Weight of the past in the running means."""
STRAGGLES = 1.5
"""A rank is called a straggler if it works that many times as long as the rest of its group."""
NOTICEABLE = 0.005
"""Seconds by which it must be slower, at least."""


class Stopwatch:
    """Running means of this rank's times, in seconds, and the bytes that it moved."""

    def __init__(self) -> None:
        self._timer, self._began = StepTimer(), 0.0
        self._compute = 0.0
        self._exchanged = self._exchanged_before = 0.0
        self._moved = self._moved_before = self._batches = 0
        self._means: tuple[float, float, float] | None = None

    def begin(self, exchanged: float, moved: int) -> None:
        """A batch begins.

        Args:
            exchanged: seconds spent in exchanges so far, in the whole run.
            moved: bytes exchanged so far.
        """
        self._began = time.perf_counter()
        self._timer.start()
        self._compute = 0.0
        self._exchanged_before, self._moved_before = exchanged, moved

    def forward_done(self, exchanged: float) -> None:
        """The rank's forward pass is done; from here on it may have to wait for its group.

        Args:
            exchanged: as in `begin`; exclusive access to a merged head is none of this rank's compute time.
        """
        if not self._compute:
            self._compute = time.perf_counter() - self._began - (exchanged - self._exchanged_before)

    def end(self, exchanged: float, moved: int) -> None:
        """A batch has ended; the arguments are those of `begin`."""
        self._moved += moved - self._moved_before
        self._batches += 1
        sample = (self._compute, self._timer.done() or 0.0, exchanged - self._exchanged)
        self._exchanged = exchanged
        old = self._means or sample
        self._means = tuple(SMOOTHING * was + (1 - SMOOTHING) * new for was, new in zip(old, sample, strict=True))  # type: ignore[assignment]

    @property
    def means(self) -> tuple[float, float, float]:
        """Compute time (to the end of the forward pass), whole step, exchange with the server."""
        return self._means or (0.0, 0.0, 0.0)

    @property
    def bytes_per_step(self) -> float:
        """Bytes of tensors that this rank exchanged with the server for each batch."""
        return self._moved / max(1, self._batches)


def live_metrics(status: Status | None, staleness: Staleness, stopwatch: Stopwatch) -> dict[str, float]:
    """What is logged while training."""
    _, step, exchange = stopwatch.means
    values = {
        "omni/step_time": step,
        "omni/exchange_share": exchange / step if step else 0.0,
        "omni/bytes_per_step": stopwatch.bytes_per_step,
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
    if status.total_momentum is not None:
        values["omni/total_momentum"] = status.total_momentum
    for group in status.groups:
        values[f"omni/group_{group.group}/step_time"] = group.step_time
        values[f"omni/group_{group.group}/staleness_mean"] = group.staleness_mean
        values[f"omni/group_{group.group}/slowest_rank"] = float(group.slowest_rank)
        values[f"omni/group_{group.group}/slowest_time"] = group.slowest_time
    return values


def straggler_sentence(status: Status, can_rebalance: bool = False) -> str:
    """Names the rank that holds its group up most, if one does.

    Args:
        status: what the server says of all groups.
        can_rebalance: whether the batch could be split by speed, and is not.
    """
    worst, sentence = STRAGGLES, ""
    for group in status.groups:
        others = len(group.ranks) - 1
        if not others:
            continue
        rest = (group.compute_time * len(group.ranks) - group.slowest_time) / others
        if group.slowest_time - rest > NOTICEABLE and rest > 0 and group.slowest_time / rest > worst:
            worst = group.slowest_time / rest
            sentence = (
                f"rank {group.slowest_rank} holds group {group.group} up: {group.slowest_time * 1e3:.0f} ms to the end"
                f" of its forward pass, against {rest * 1e3:.0f} ms on the others"
            )
    if sentence and can_rebalance:
        sentence += '; rebalance="auto" splits the batch in proportion to the speeds'
    return sentence


def gathering_sentence(world: World) -> str:
    """What a gather over ranks sees in the training step, and what to do if that is too little."""
    return (
        f"OmniStrategy: all_gather in a training step sees the {len(world.members)} rank(s) of its compute group, not"
        f" all {len(world.topology.ranks)}: a contrastive loss over the gathered batch, say, is not that of DDP."
        " If it needs more ranks, use fewer groups, down to groups=1; in validation it sees all ranks"
    )
