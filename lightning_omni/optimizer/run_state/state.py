"""`RunState`: a copy of all that a run must remember, and the way back to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning_omni.optimizer.channel import Channel
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.run_state.group import GroupScope
from lightning_omni.optimizer.run_state.kept import Seen
from lightning_omni.optimizer.run_state.run import Epochs, RunScope
from lightning_omni.optimizer.run_state.shard import ShardScope


@dataclass(frozen=True)
class Live:
    """The objects that a run has its state in.

    Attributes:
        place: this rank's, in the run.
        channel: its way to the server.
        epochs: has progress and schedule.
        module: what is trained.
        optimizers: that train it.
        scalers: of the loss.
    """

    place: Place
    channel: Channel
    epochs: Epochs
    module: Module
    optimizers: Sequence[Optimizer]
    scalers: Sequence[Any] = ()


@dataclass(frozen=True)
class RunState:
    """What a run must remember, as of one moment of this rank.

    Attributes:
        live: the objects that it was copied from.
        run: what is the run's.
        group: what is the group's.
        shard: what is this rank's, of the model.
    """

    live: Live
    run: RunScope
    group: GroupScope
    shard: ShardScope

    @classmethod
    def of(cls, live: Live) -> RunState:
        """As it is now. While groups train apart, each has its own."""
        seen: Seen = {}
        return cls(
            live=live,
            run=RunScope.of(live.place, live.channel, live.epochs),
            group=GroupScope.of(live.place, live.module.buffers(), seen),
            shard=ShardScope.of(live.module, live.optimizers, live.scalers, seen),
        )

    def put_back(self) -> None:
        """The run is as it was, as often as it takes."""
        self.run.put_back(self.live.place, self.live.channel, self.live.epochs)
        self.group.put_back(self.live.place)
        self.shard.put_back()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Meanwhile the objects may hold anything: the state of a probe, say. Then the run's comes back.

        Also after an exception; so what is saved when that is handled is the run's state.
        """
        try:
            yield
        finally:
            self.put_back()
