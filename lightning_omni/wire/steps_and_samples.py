"""Progress of a run in samples, from which steps are derived.

Groups count their own steps, but share the count of trained samples: one step of the run is a reference batch, the
samples of one step of DDP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceBatch:
    """The samples of one step of DDP, with all ranks of the run's start in one group.

    ``window`` is the number of batches accumulated for one step.

    Example:
        >>> ReferenceBatch(ranks=4, batch_size=8, window=2).samples
        64
    """

    ranks: int
    batch_size: int
    window: int = 1

    @property
    def samples(self) -> int:
        return self.window * self.batch

    @property
    def batch(self) -> int:
        return self.ranks * self.batch_size


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        batches: batches of each rank in an epoch of DDP.
        epochs: number of finished epochs.
        samples: samples of the current epoch trained by all groups.
        past: steps of DDP in the finished epochs; None if these were like the current one.
        past_batches: batches of each rank of DDP in these; None as for ``past``.

    Example:
        >>> progress = Progress(ReferenceBatch(4, 8), batches=10, epochs=2, samples=100)
        >>> progress.steps  # 100 samples are three whole steps
        23
    """

    reference: ReferenceBatch
    batches: int
    epochs: int = 0
    samples: int = 0
    past: int | None = None
    past_batches: int | None = None

    @property
    def samples_an_epoch(self) -> int:
        """Return the samples in an epoch, as if DDP's last batches were whole."""
        return self.batches * self.reference.batch

    @property
    def steps_an_epoch(self) -> int:
        return -(-self.batches // self.reference.window)

    @property
    def steps(self) -> int:
        return self.steps_before(self.epochs) + min(self.steps_an_epoch, self.samples // self.reference.samples)

    def steps_before(self, epoch: int) -> int:
        """Return the steps of DDP before an epoch, as if later epochs were like the current one."""
        past = self.epochs * self.steps_an_epoch if self.past is None else self.past
        return past + (epoch - self.epochs) * self.steps_an_epoch

    def batches_before(self, epoch: int) -> int:
        """Return the batches of each rank of DDP before an epoch, which steps do not determine."""
        past = self.epochs * self.batches if self.past_batches is None else self.past_batches
        return past + (epoch - self.epochs) * self.batches

    def scheduled(self, frequency: int, steps: int) -> int:
        """Return how often DDP steps a schedule within a number of optimizer steps of the epoch.

        Lightning counts batches from the start of each epoch, and steps no schedule at a batch without an optimizer
        step.

        Args:
            frequency: batches between two steps of the schedule.
            steps: optimizer steps since the start of the epoch; negative ones lead back into the last epoch, as if it
                were like this one.

        Example:
            >>> progress = Progress(ReferenceBatch(4, 8), batches=10)
            >>> progress.scheduled(4, 10), progress.scheduled(4, 16)  # at batches 4 and 8 of each epoch
            (2, 3)
        """
        if frequency == 1:
            return steps
        window, (epochs, rest) = self.reference.window, divmod(steps, self.steps_an_epoch)
        every = math.lcm(frequency, window)
        is_last_due = self.batches % frequency == 0 and self.batches % window != 0
        return epochs * (self.batches // every + is_last_due) + rest * window // every

    def steps_left(self, steps: int, epoch: int) -> int:
        return max(0, steps - self.steps_before(epoch))

    def budget(self, total: int, epoch: int, steps: int = -1) -> int:
        """Return the samples of ``total`` to train in an epoch, if DDP makes ``steps`` in the run (-1: no limit)."""
        whole = min(total, self.samples_an_epoch)
        return whole if steps == -1 else min(whole, self.steps_left(steps, epoch) * self.reference.samples)
