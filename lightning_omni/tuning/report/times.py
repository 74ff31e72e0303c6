"""`RunTimes`: how a tuned run spent its time. All reports take these numbers from here."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_omni.serialization import Serializable
from lightning_omni.tuning.report.digest import duration


@dataclass(frozen=True)
class RunTimes(Serializable):
    """Seconds of a run, from just before its first batch on; rank 0's clock.

    Args:
        training: seconds that belong to no search: batches, validations, checkpoints.
        tuning: seconds in which searches stopped the training: deciding, and forming groups.
        reached: all seconds, and those of them for tuning, at the end of the validation that first reached the target;
            None before.

    Example:
        >>> times = RunTimes(training=90.0, tuning=6.0, reached=(45.0, 5.0))
        >>> times.to_target, times.sentence
        (45.0, 'the target was reached after 45 s, 5 s of them for tuning')
    """

    training: float
    tuning: float
    reached: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        return self.training + self.tuning

    @property
    def to_target(self) -> float | None:
        """Return all seconds until the target was reached; None if it was not."""
        return self.reached[0] if self.reached is not None else None

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics for loggers."""
        found = {"omni/tuner/seconds": self.tuning}
        return found if self.to_target is None else {**found, "omni/tuner/target_seconds": self.to_target}

    @property
    def sentence(self) -> str:
        """Return a sentence for users."""
        if self.reached is None or self.to_target is None:
            return (
                f"{duration(self.training)} of training, {duration(self.tuning)} of tuning; the target was not reached"
            )
        tuning = duration(self.reached[1])
        return f"the target was reached after {duration(self.to_target)}, {tuning} of them for tuning"
