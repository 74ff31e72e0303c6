"""Settings of a simulated run, as values: groups, batches, evaluations, limits, and progress reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning_omni.checks import check_number, check_whole, keep_plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method
from lightning_omni.topology import Topology
from lightning_omni.wire.all_reduce import EXACT, AllReduce
from lightning_omni.wire.formats.base import RAW, WireFormat

Progress = Callable[[float, str], None]
"""A function of the fraction done, 0 to 1, and a text."""


@dataclass(frozen=True)
class Formation:
    """The groups of a run, and how they exchange.

    Args:
        method: the method.
        topology: the ranks of each group.
        merged: name of the submodule that stays at the server.
        wire_format: encoding of pushes as bytes.
        overlap: whether exchanges travel while groups compute.
        all_reduce: how gradients are averaged inside a group.
    """

    method: Method
    topology: Topology
    merged: str | None = None
    wire_format: WireFormat = RAW
    overlap: bool = False
    all_reduce: AllReduce = EXACT


@dataclass(frozen=True)
class Batches:
    """The settings of a run's batches and gradients; see `simulate`.

    Args:
        size: samples in one device's batch.
        is_balanced: whether a group's devices get parts in proportion to their speeds.
        batched: whether gradients of several groups are computed at a time.
        members_apart: whether each member's gradient is computed separately.
        seed: seed of all random numbers.

    Raises:
        ConfigurationError: the size is not above 0, or the seed is no whole number.
    """

    size: int
    is_balanced: bool
    batched: bool | Literal["auto"]
    members_apart: bool
    seed: int

    def __post_init__(self) -> None:
        keep_plain(self)
        check_whole("batch_size", self.size, "the samples in one device's batch, 1 or more", 1)
        check_whole("seed", self.seed, "a whole number from 0 up")


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run, which ends at the first that it reaches.

    Args:
        updates: the most updates.
        epochs: the most passes over the data.
        seconds: the latest virtual time.
    """

    updates: float = math.inf
    epochs: float = math.inf
    seconds: float = math.inf

    @classmethod
    def of(cls, max_updates: int | None, max_epochs: int | None, max_seconds: float | None) -> RunLimits:
        """Return limits from arguments, of which some are None.

        Raises:
            ConfigurationError: all are None, one is not above 0, or updates or epochs are not whole.
        """
        given = {"max_updates": max_updates, "max_epochs": max_epochs, "max_seconds": max_seconds}
        if all(value is None for value in given.values()):
            raise ConfigurationError("when is the run to end? pass max_updates=, max_epochs= or max_seconds=")
        _check_above_zero("max_seconds", max_seconds)
        _check_counted("max_updates", max_updates)
        _check_counted("max_epochs", max_epochs)
        return cls(*(math.inf if value is None else value for value in given.values()))

    def fraction(self, updates: int, epochs: float, seconds: float) -> float:
        """Return the fraction of the run that is done, 0 to 1."""
        return min(1.0, max(updates / self.updates, seconds / self.seconds, epochs / self.epochs))


@dataclass(frozen=True)
class EvaluationSchedule:
    """The times of a run's evaluations, besides the one at its end, and the metric that ends it.

    Args:
        every_updates: updates between two evaluations.
        every_seconds: seconds of virtual time between two evaluations.
        target: name and value of a metric; the run ends with the evaluation that reaches it.

    Raises:
        ConfigurationError: a period is not above 0, the target is no pair of a name and a number, or a target is set
            without a period.
    """

    every_updates: int | None = None
    every_seconds: float | None = None
    target: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        _check_counted("evaluate_every", self.every_updates)
        _check_above_zero("evaluate_every_seconds", self.every_seconds)
        if self.target is not None:
            self._check_target(self.target)

    def _check_target(self, target: Any) -> None:
        what = 'a metric and its value, as ("accuracy", 0.9), or None'
        if not isinstance(target, (tuple, list)) or len(target) != 2 or not isinstance(target[0], str):
            raise ConfigurationError(f"target={target!r}: pass {what}")
        check_number("target", target[1], what, above=-math.inf, below=math.inf)
        if self.every_updates is None and self.every_seconds is None:
            raise ConfigurationError(
                "target= is looked for at evaluations; pass evaluate_every= or evaluate_every_seconds="
            )


def _check_above_zero(name: str, value: float | None) -> None:
    if value is not None:
        check_number(name, value, "a number above 0, or None", above=0)


def _check_counted(name: str, value: float | None) -> None:
    """Check a number of updates or epochs; infinity is equivalent to None."""
    if value is not None and value != math.inf:
        check_whole(name, value, "a whole number above 0, or None", 1)


class StopSimulation(Exception):
    """The exception by which a progress function ends the run, as at a limit."""


@contextmanager
def progress_of(wanted: bool | Progress) -> Iterator[Progress | None]:
    """Provide the progress function: that of a bar, the caller's, or None."""
    if callable(wanted):
        yield wanted
    elif wanted is False:
        yield None
    elif wanted is True:
        from rich.progress import Progress as Bars

        with Bars() as bars:
            bar = bars.add_task("simulating", total=1.0)
            yield lambda done, text: bars.update(bar, completed=done, description=text)
    else:
        raise ConfigurationError(f"progress={wanted!r}: pass True, False or a function of a fraction and a text")
