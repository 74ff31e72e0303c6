"""The run that a report is about: its searches, its measurements, and how it spent its time."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from lightning_omni.serialization import Serializable
from lightning_omni.tuning.report.texts import duration
from lightning_omni.tuning.search import Search


@dataclass(frozen=True)
class Round:
    """One search of a fit: the first, or a retuning.

    Args:
        search: the search.
        epoch: number of the epoch in which it began.
        seconds_run: seconds of training before it.
        measured_after: samples per second of all ranks with the choice, by groups, without validations, searches and
            the first batch after them.
    """

    search: Search
    epoch: int
    seconds_run: float
    measured_after: dict[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "search": self.search.to_dict(),
            "epoch": self.epoch,
            "seconds_run": self.seconds_run,
            "measured_after": {str(groups): rate for groups, rate in self.measured_after.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Round:
        measured = {int(groups): float(rate) for groups, rate in plain["measured_after"].items()}
        return cls(Search.from_dict(plain["search"]), plain["epoch"], plain["seconds_run"], measured)


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


@dataclass(frozen=True)
class Written(Serializable):
    """When and where a report was written.

    Args:
        date: date and time, in UTC, as text.
        version: version of lightning-omni.
        hosts: names of the hosts of the ranks, as far as known.
    """

    date: str
    version: str
    hosts: tuple[str, ...] = ()

    @classmethod
    def now(cls, hosts: tuple[str, ...] = ()) -> Written:
        """Return the present, on these hosts; by default on this one."""
        from lightning_omni import __version__

        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return cls(date, __version__, hosts or (socket.gethostname(),))

    @property
    def sentence(self) -> str:
        """Return a sentence for the foot of a page or picture."""
        shown = [*self.hosts[:_MOST_HOSTS], *(["…"] if len(self.hosts) > _MOST_HOSTS else [])]
        return f"{self.date}, lightning-omni {self.version}, on {', '.join(shown)}"


_MOST_HOSTS = 8
