"""Settings of a simulated run, as values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from lightning_omni.checks import check_choice, check_kind, check_number, check_whole, keep_plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method
from lightning_omni.topology import Topology
from lightning_omni.wire.compression import Compression

Progress = Callable[[float, str], None]
"""A function of the fraction done, 0 to 1, and a text."""


@dataclass(frozen=True)
class Formation:
    """The groups of a run, and how they exchange.

    ``merged`` names the submodule that stays at the server; with ``overlap``, exchanges travel while groups compute.
    """

    method: Method
    topology: Topology
    merged: str | None = None
    compression: Compression = field(default_factory=Compression)
    overlap: bool = False


@dataclass(frozen=True)
class Computation:
    """The ways in which the devices of a simulated group compute gradients.

    Args:
        rebalance: ``"auto"`` divides a group's batch over its members in proportion to their expected speeds, slowdowns
            included; ``"off"`` gives all equal parts.
        batched: whether gradients of several groups are computed at a time, where possible, with ``torch.func.vmap``,
            which changes rounding and random numbers; ``"auto"`` where that is faster, in models without buffers and
            dropout modules, unless the loss draws random numbers.
        members_apart: whether each member's gradient is computed separately, and averaged as in DDP; for bit-equality
            with real groups of several ranks.

    Raises:
        ConfigurationError: an argument is wrong, or two exclude each other.

    Example:
        >>> Computation(rebalance="on")
        Traceback (most recent call last):
        lightning_omni.errors.ConfigurationError: Computation(rebalance='on'): pass "off" or "auto"
    """

    rebalance: Literal["off", "auto"] = "off"
    batched: bool | Literal["auto"] = "auto"
    members_apart: bool = False

    def __post_init__(self) -> None:
        check_choice("Computation(rebalance", self.rebalance, ("off", "auto"))
        if self.batched != "auto":
            check_kind("Computation(batched", self.batched, bool, 'True, False or "auto"')
        check_kind("Computation(members_apart", self.members_apart, bool, "True or False")
        if self.members_apart and self.rebalance == "auto":
            raise ConfigurationError(
                "Computation(rebalance='auto', members_apart=True): the mean of the members' gradients is that of equal"
                ' parts; pass rebalance="off"'
            )


@dataclass(frozen=True)
class Batches:
    """The settings of a run's batches and gradients.

    ``size`` is the number of samples in one device's batch, ``seed`` that of all random numbers.
    """

    size: int
    seed: int
    computation: Computation

    def __post_init__(self) -> None:
        keep_plain(self)
        check_whole("batch_size", self.size, "the samples in one device's batch, 1 or more", 1)
        check_whole("seed", self.seed, "a whole number from 0 up")
        check_kind("computation", self.computation, Computation, "a Computation(...), or None")


@dataclass(frozen=True)
class Limits:
    """The limits of a simulated run, which ends at the first that it reaches.

    Args:
        updates: the most updates: ticks of the server's clock or, with gossip, local steps of any group. Fragments
            merged at one moment may exceed it.
        epochs: the most passes over the data.
        seconds: the latest virtual time, in seconds.

    Raises:
        ConfigurationError: there is no limit, one is not above 0, or updates or epochs are not whole.

    Example:
        >>> Limits(updates=100, seconds=60.0).epochs
        inf
    """

    updates: float = math.inf
    epochs: float = math.inf
    seconds: float = math.inf

    def __post_init__(self) -> None:
        keep_plain(self)
        if self.updates == self.epochs == self.seconds == math.inf:
            raise ConfigurationError("Limits(): when is the run to end? pass updates=, epochs= or seconds=")
        check_number("Limits(seconds", self.seconds, "a number above 0", above=0)
        for name in ("updates", "epochs"):
            if (count := getattr(self, name)) != math.inf:
                check_whole(f"Limits({name}", count, "a whole number above 0", 1)

    def fraction(self, updates: int, epochs: float, seconds: float) -> float:
        """Return the fraction of the run that is done, 0 to 1."""
        return min(1.0, max(updates / self.updates, seconds / self.seconds, epochs / self.epochs))


@dataclass(frozen=True)
class Evaluation:
    """The times of a simulated run's evaluations before its end, and the metric that ends the run.

    Args:
        every: updates between two evaluations.
        every_seconds: seconds of virtual time between two evaluations.
        target: name and value of a metric; the run ends with the evaluation that reaches it (from above if the name
            contains "loss" or "error").

    Raises:
        ConfigurationError: a period is not above 0 or ``every`` not whole, the target is no pair of a name and a
            number, or a target is set without a period.

    Example:
        >>> Evaluation(every=50, target=("accuracy", 0.9)).target
        ('accuracy', 0.9)
    """

    every: int | None = None
    every_seconds: float | None = None
    target: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        if self.every is not None:
            check_whole("Evaluation(every", self.every, "a whole number above 0, or None", 1)
        if self.every_seconds is not None:
            check_number("Evaluation(every_seconds", self.every_seconds, "a number above 0, or None", above=0)
        if self.target is not None:
            self._check_target(self.target)

    def _check_target(self, target: Any) -> None:
        what = 'a metric and its value, as ("accuracy", 0.9), or None'
        if not isinstance(target, (tuple, list)) or len(target) != 2 or not isinstance(target[0], str):
            raise ConfigurationError(f"Evaluation(target={target!r}): pass {what}")
        check_number("Evaluation(target", target[1], what, above=-math.inf, below=math.inf)
        if self.every is None and self.every_seconds is None:
            raise ConfigurationError(
                f"Evaluation(target={target!r}): evaluations look for it; pass every= or every_seconds=, too"
            )


class StopSimulation(Exception):
    """The exception by which a progress function ends the run, as at a limit."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a transient bar on a terminal's standard error; yield a function of completed fraction and text."""
    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=max(10, min(40, console.width // 3))),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    is_shown = console.is_terminal or console.is_jupyter
    with Bars(*columns, console=console, transient=True, disable=not is_shown) as bars:
        bar = bars.add_task("starting", total=1.0)

        def update(done: float, text: str) -> None:
            if math.isfinite(done):
                bars.update(bar, completed=done, description=text)

        yield update
