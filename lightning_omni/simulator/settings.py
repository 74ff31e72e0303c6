"""What a simulated run is told, as values: its groups, its batches, when it is evaluated and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method
from lightning_omni.protocol.wire_format import RAW, WireFormat
from lightning_omni.topology import Topology


@dataclass(frozen=True)
class Formation:
    """Who trains, and how they exchange.

    Args:
        method: what is exchanged.
        topology: which rank is in which group.
        merged: name of the submodule that stays at the server.
        wire_format: how pushes are put into bytes.
    """

    method: Method
    topology: Topology
    merged: str | None = None
    wire_format: WireFormat = RAW


@dataclass(frozen=True)
class Batches:
    """How a run's batches are made, and their gradients; see `simulate`.

    Args:
        size: samples in one device's batch.
        is_balanced: whether a group's devices get parts by their speeds.
        batched: whether gradients of several groups are computed at a time.
        members_apart: whether each member's gradient is computed by itself.
        seed: of all that is random.

    Raises:
        ConfigurationError: the size is not above 0.
    """

    size: int
    is_balanced: bool
    batched: bool | Literal["auto"]
    members_apart: bool
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigurationError(f"batch_size={self.size!r}: pass the samples in one device's batch, 1 or more")


@dataclass(frozen=True)
class Limits:
    """When a run ends: with whichever comes first.

    Args:
        updates: the most updates.
        epochs: the most passes over the data.
        seconds: the latest moment of virtual time.
    """

    updates: float = math.inf
    epochs: float = math.inf
    seconds: float = math.inf

    @classmethod
    def of(cls, max_updates: int | None, max_epochs: int | None, max_seconds: float | None) -> Limits:
        """Limits of which some are None.

        Raises:
            ConfigurationError: all are, or one is not above 0.
        """
        given = {"max_updates": max_updates, "max_epochs": max_epochs, "max_seconds": max_seconds}
        if all(value is None for value in given.values()):
            raise ConfigurationError("when is the run to end? pass max_updates=, max_epochs= or max_seconds=")
        _check_above_zero(given)
        return cls(*(math.inf if value is None else value for value in given.values()))

    def fraction(self, updates: int, epochs: float, seconds: float) -> float:
        """How much of the run is done, 0 to 1."""
        return min(1.0, max(updates / self.updates, seconds / self.seconds, epochs / self.epochs))


@dataclass(frozen=True)
class Cadence:
    """How often a run is evaluated, besides once at its end, and the metric that ends it.

    Args:
        every_updates: updates between two evaluations.
        every_seconds: seconds of virtual time between two evaluations.
        target: name and value of a metric; the run ends with the evaluation that reaches it.

    Raises:
        ConfigurationError: a period is not above 0, or nothing is ever compared with the target.
    """

    every_updates: int | None = None
    every_seconds: float | None = None
    target: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        _check_above_zero({"evaluate_every": self.every_updates, "evaluate_every_seconds": self.every_seconds})
        if self.target is not None and self.every_updates is None and self.every_seconds is None:
            raise ConfigurationError(
                "target= is looked for at evaluations; pass evaluate_every= or evaluate_every_seconds="
            )

    @property
    def needs_metrics(self) -> bool:
        """Whether the run cannot do without a function that evaluates."""
        return self != Cadence()


def _check_above_zero(values: Mapping[str, float | None]) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigurationError(f"{name}={value}: pass a number above 0, or None")
