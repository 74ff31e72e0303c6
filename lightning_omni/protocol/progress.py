"""How far a run is, in samples; steps follow from them.

Groups differ in speed, and each counts its own steps. What they have in common is the samples that all of them have
trained. One step of DDP trains a reference batch, so that many samples are one step of the run, whichever group trained
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceBatch:
    """What one step of DDP trains, with all ranks in one group.

    Attributes:
        ranks: number of ranks that the run began with.
        batch_size: samples in one rank's batch.
        window: batches whose gradients are accumulated for one step.

    Example:
        >>> ReferenceBatch(ranks=4, batch_size=8, window=2).samples
        64
    """

    ranks: int
    batch_size: int
    window: int = 1

    @property
    def samples(self) -> int:
        """Samples in one step of all ranks."""
        return self.window * self.batch

    @property
    def batch(self) -> int:
        """Samples in one batch of all ranks, of which a step may have several."""
        return self.ranks * self.batch_size


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        reference: the reference batch.
        batches: batches that each rank trains in an epoch of DDP.
        epochs: epochs that are over.
        samples: samples of the epoch under way that are trained, by all groups.
        past: steps that DDP would have taken in the epochs that are over, which may have had other batches; None if
            they were like this one.

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

    @property
    def samples_an_epoch(self) -> int:
        """Samples in an epoch, if the last batches of DDP are whole."""
        return self.batches * self.reference.batch

    @property
    def steps_an_epoch(self) -> int:
        """Optimizer steps in an epoch of DDP."""
        return -(-self.batches // self.reference.window)

    @property
    def past_batches(self) -> int:
        """Batches that each rank of DDP would have trained in the epochs that are over.

        Steps that accumulate batches do not tell their number exactly: then epochs count as if they were like this one.
        """
        if self.past is None or self.reference.window > 1:
            return self.epochs * self.batches
        return self.past

    @property
    def steps(self) -> int:
        """Optimizer steps that DDP would have taken."""
        return self.steps_before(self.epochs) + min(self.steps_an_epoch, self.samples // self.reference.samples)

    def steps_before(self, epoch: int) -> int:
        """Steps of DDP in all epochs before this one, if those from here on are like the one under way."""
        past = self.epochs * self.steps_an_epoch if self.past is None else self.past
        return past + (epoch - self.epochs) * self.steps_an_epoch

    def scheduled(self, frequency: int, steps: int) -> int:
        """How often DDP steps, in so many optimizer steps of a run, a schedule that is due every so many batches.

        Lightning counts batches from the start of each epoch, and skips those at which nothing is stepped.

        Args:
            frequency: batches from one time to the next.
            steps: of the optimizer; all epochs are taken to be like the one under way.

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
        """Of so many steps of a run, those that are left when an epoch begins."""
        return max(0, steps - self.steps_before(epoch))

    def budget(self, total: int, epoch: int, steps: int = -1) -> int:
        """Samples that are trained in an epoch.

        Args:
            total: samples that there are.
            epoch: number of the epoch.
            steps: steps of DDP after which the run ends, or -1.
        """
        whole = min(total, self.samples_an_epoch)
        return whole if steps == -1 else min(whole, self.steps_left(steps, epoch) * self.reference.samples)
