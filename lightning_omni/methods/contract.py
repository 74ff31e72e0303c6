"""What every method is: a frozen value with a group side and a server side. No sockets, clocks or threads here.

The *group side* is a generator that reads as the paper's pseudo-code of a worker. It yields what it needs (the next
gradient, an exchange with the server) and is sent the answer by whoever drives it, in real time or in any other. Every
rank of a group runs the same generator on the same answers.

The *server side* is a plain object: a push goes in, and the groups that now get the master weights come out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from torch import Tensor

from lightning_omni.methods.master import Master

Hyperparameters = Sequence[Mapping[str, Any]]
"""One mapping for each parameter group of the optimizer: lr, momentum, betas, ... without ``params``."""


@dataclass(frozen=True)
class NextGradient:
    """Need: the next gradient of the group's batch, at the weights that the replica holds. Answer: `Gradient`."""


@dataclass(frozen=True)
class Gradient:
    """A group's gradient: the mean over the group's batch, after clipping, unscaling and accumulation.

    Attributes:
        tensors: one for each parameter, shaped like it; ``None`` where the parameter took no part in the loss.
        hyperparameters: the worker's hyperparameters at this step.
    """

    tensors: Sequence[Tensor | None]
    hyperparameters: Hyperparameters


@dataclass(frozen=True)
class Exchange:
    """Need: push ``gradient``, computed on weights of clock ``read_at``, and pull. Answer: `MasterWeights`."""

    gradient: Gradient
    read_at: int


@dataclass(frozen=True)
class MasterWeights:
    """The master weights at one tick of the server's clock.

    Attributes:
        tensors: one for each parameter, in the optimizer's order.
        clock: number of updates that they contain.
    """

    tensors: Sequence[Tensor]
    clock: int


Need = NextGradient | Exchange
Answer = Gradient | MasterWeights


class Replica(Protocol):
    """A group's own copy of the weights, as the group side sees it."""

    @property
    def clock(self) -> int:
        """The server's clock when these weights were read."""
        ...

    def load(self, master: MasterWeights) -> None:
        """Overwrites the weights and remembers their clock."""
        ...


@dataclass(frozen=True)
class Push:
    """What a group's push brings to the server side.

    Attributes:
        group: number of the group.
        read_at: clock of the weights that the gradient was computed on.
        gradient: the gradient and the hyperparameters to apply it with.
    """

    group: int
    read_at: int
    gradient: Gradient


@dataclass(frozen=True)
class Reply:
    """The server side's answer: send the master weights to ``group``.

    Attributes:
        group: number of the group.
        staleness: updates between the read and the application of the gradient that this answers.
    """

    group: int
    staleness: int


class ServerSide(ABC):
    """The server's half of a method, for one optimizer. Its whole state is here and in its `Master`."""

    def __init__(self, master: Master) -> None:
        self.master = master

    @abstractmethod
    def receive(self, push: Push) -> list[Reply]:
        """Merges a push and says which groups now read the master weights."""

    def retire(self, group: int) -> list[Reply]:
        """A group is gone for good. A method that waits for groups says here who need not wait any more."""
        return []


class Method(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """A distributed-SGD method: its hyperparameters, and how to make its two sides.

    A method is a value: frozen, comparable, and it travels to the server as plain numbers. (A msgspec struct cannot
    be an abstract base class, hence the two errors.)
    """

    def group_side(self, replica: Replica) -> Generator[Need, Any, None]:
        """The worker's half: an endless generator of needs."""
        raise NotImplementedError(f"{type(self).__name__} has no group side")

    def server_side(self, master: Master) -> ServerSide:
        """The server's half."""
        raise NotImplementedError(f"{type(self).__name__} has no server side")
