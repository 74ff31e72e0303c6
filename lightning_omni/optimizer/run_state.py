"""All that a run must remember, as one value in three scopes: the run, the group, and the rank's part of the model.

What happens to each piece when groups are formed, a rank dies, a group joins, a probe runs, a run is resumed, and in a
checkpoint, the table in ``docs/state.md`` says; its rows are the fields of the scopes here.

Rule 1: a `RunState` is a copy. The run has the objects themselves, and goes on with them.
Rule 2: what is put back is put back into these very objects, bitwise: others hold them, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from lightning_omni.methods import Method
from lightning_omni.optimizer.channel import Channel, Traffic
from lightning_omni.optimizer.object_snapshot import Generators, ObjectSnapshot, Seen
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.reduction import KeptMemory, Reduction
from lightning_omni.optimizer.values import write
from lightning_omni.protocol.group import GroupCore, LastAnswer
from lightning_omni.protocol.lessee import Lessee
from lightning_omni.protocol.progress import Progress
from lightning_omni.protocol.wire_format import State

Schedule = Mapping[LRScheduler, tuple[int, int]]
"""For each scheduler, its count and the run's progress at one and the same moment: from there it keeps pace."""


class EpochState(Protocol):
    """What takes the run through its epochs, and has these."""

    progress: Progress | None
    schedule: Schedule


@dataclass(frozen=True)
class RunScope:
    """A copy of what the run is as a whole: its progress, and what was counted and heard of it.

    Attributes:
        progress: in samples and steps; None if the data are not leased.
        schedule: where schedulers count from.
        method: how groups exchange.
        clocks: updates that the weights of each optimizer contain.
        steps: optimizer steps that were taken in one group, which no clock of a server counts.
        last_answer: the last that the server said of the run.
        traffic: what exchanges took.
        staleness: of the pushes since the last report, how often each was, for each optimizer.
    """

    progress: Progress | None
    schedule: Schedule
    method: Method
    clocks: tuple[int, ...]
    steps: int
    last_answer: LastAnswer
    traffic: Traffic
    staleness: tuple[Counter[int], ...]

    @classmethod
    def of(cls, place: Place, channel: Channel, epochs: EpochState) -> RunScope:
        """As it is now.

        Args:
            place: this rank's, in the run.
            channel: its way to the server.
            epochs: has progress and schedule.
        """
        return cls(
            progress=epochs.progress,
            schedule=dict(epochs.schedule),
            method=place.method,
            clocks=tuple(part.replica.clock for part in place.parts),
            steps=place.steps,
            last_answer=replace(place.core.last_answer),
            traffic=replace(channel.traffic),
            staleness=tuple(Counter(part.staleness) for part in place.parts),
        )

    def put_back(self, place: Place, channel: Channel, epochs: EpochState) -> None:
        """As it was."""
        epochs.progress, epochs.schedule = self.progress, dict(self.schedule)
        place.method, place.steps = self.method, self.steps
        place.core.last_answer, channel.traffic = replace(self.last_answer), replace(self.traffic)
        for part, clock, staleness in zip(place.parts, self.clocks, self.staleness, strict=True):
            part.replica.clock = clock
            part.staleness = Counter(staleness)


@dataclass(frozen=True)
class GroupScope:
    """A copy of what a compute group has, the same on all its ranks; what a sender remembers, its leader alone.

    Attributes:
        memory: what the group side of the method remembers, for each optimizer.
        senders: what the sender of its pushes remembers (a residual, say), for each optimizer.
        buffers: of the module.
        leases: the position in the epoch's data, if it is leased; the object itself, for others draw from ones of
            their own.
    """

    memory: tuple[Mapping[str, Any], ...]
    senders: tuple[State, ...]
    buffers: ObjectSnapshot
    leases: Lessee | None

    @classmethod
    def of(cls, place: Place, buffers: Iterable[Tensor], seen: Seen | None = None) -> GroupScope:
        """As it is now.

        Args:
            place: this rank's, in the run.
            buffers: of the module.
            seen: shared with others that are kept at this moment.
        """
        return cls(
            memory=tuple(copied(part.replica.memory) for part in place.parts),
            senders=tuple(copied(place.core.sender_state(index)) for index in range(len(place.parts))),
            buffers=ObjectSnapshot(seen).keep_values(buffers),
            leases=place.core.data,
        )

    def put_back(self, place: Place) -> None:
        """As it was. Groups must not train meanwhile: their method begins again with what it remembers."""
        for part, memory in zip(place.parts, self.memory, strict=True):
            part.replica.memory = copied(memory)
        for index, state in enumerate(self.senders):
            place.core.load_sender_state(index, copied(state))
        self.buffers.put_back()
        place.core.data = self.leases
        place.core.form()


@dataclass(frozen=True)
class ShardScope:
    """A copy of what one rank has of the model. As long as models are not sharded, that is all of it.

    Attributes:
        weights: of the module.
        gradients: of its parameters and buffers.
        optimizers: their state and hyperparameters.
        scaler: of the loss, where 16-bit gradients need one.
        unsent: what of its gradients this rank's group has not been given yet, where it averages them in fewer bytes.
        modules: what modules have noted for themselves: attributes, and what is in them.
        generators: of random numbers, in this process.
    """

    weights: ObjectSnapshot
    gradients: ObjectSnapshot
    optimizers: ObjectSnapshot
    scaler: ObjectSnapshot
    unsent: KeptMemory
    modules: ObjectSnapshot
    generators: Generators

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizers: Iterable[Optimizer],
        reduction: Reduction,
        scalers: Iterable[Any] = (),
        seen: Seen | None = None,
    ) -> ShardScope:
        """As it is now.

        Args:
            module: what is trained.
            optimizers: that train it.
            reduction: averages its gradients.
            scalers: of the loss; or anything else with ``state_dict`` and ``load_state_dict``.
            seen: shared with others that are kept at this moment.
        """
        seen = {} if seen is None else seen
        return cls(
            weights=ObjectSnapshot(seen).keep_values(module.parameters()),
            gradients=ObjectSnapshot(seen).keep_gradients((*module.parameters(), *module.buffers())),
            optimizers=ObjectSnapshot(seen).keep_optimizers(optimizers),
            scaler=ObjectSnapshot().keep_states(scalers),
            unsent=reduction.kept(),
            modules=ObjectSnapshot(seen).keep_attributes(module),
            generators=Generators.now(),
        )

    def put_back(self) -> None:
        """Bitwise as it was, in the same objects."""
        parts = self.weights, self.gradients, self.optimizers, self.scaler, self.unsent, self.modules, self.generators
        for each in parts:
            each.put_back()


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
    epochs: EpochState
    module: nn.Module
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
        """As it is now. While several groups train, each has its own."""
        seen: Seen = {}
        return cls(
            live=live,
            run=RunScope.of(live.place, live.channel, live.epochs),
            group=GroupScope.of(live.place, live.module.buffers(), seen),
            shard=ShardScope.of(live.module, live.optimizers, live.place.reduction, live.scalers, seen),
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


@dataclass(frozen=True)
class RollbackPoint:
    """What a run in one group is rolled back to when it has diverged with what was chosen for it. All else stays.

    It stands for long, and keeps values only: while several groups train, the objects of a `RunState` would be a second
    copy of optimizer states that no rank has any use for.

    Attributes:
        weights: parameters, and averages of them that callbacks keep, and what they held.
        buffers: buffers, and what they held.
        optimizers: each, and its states by parameter. Hyperparameters are not rolled back.
        senders: what the sender of the group's pushes remembered, for each optimizer. What was given to it since are
            gradients of weights that are no more.
    """

    weights: tuple[tuple[Tensor, Tensor], ...]
    buffers: tuple[tuple[Tensor, Tensor], ...]
    optimizers: tuple[tuple[Optimizer, Mapping[Any, Any]], ...]
    senders: tuple[State, ...]

    @classmethod
    def of(
        cls, module: nn.Module, optimizers: Sequence[Optimizer], core: GroupCore, averages: Iterable[Tensor] = ()
    ) -> RollbackPoint:
        """As it is now.

        Args:
            module: what is trained.
            optimizers: that train it; the group has taken them in.
            core: the group.
            averages: of weights, which callbacks keep.
        """
        return cls(
            weights=tuple((each, each.detach().clone()) for each in (*module.parameters(), *averages)),
            buffers=tuple((each, each.detach().clone()) for each in module.buffers()),
            optimizers=tuple(
                (each, {parameter: deepcopy(values) for parameter, values in each.state.items()}) for each in optimizers
            ),
            senders=tuple(copied(core.sender_state(index)) for index in range(len(optimizers))),
        )

    @property
    def is_spoilt(self) -> bool:
        """Whether a number that was finite then is not now, as in the average of weights of which some were not."""
        pairs = (*self.weights, *self.buffers)
        return any(bool((_are_finite(kept) & ~_are_finite(tensor.detach())).any()) for tensor, kept in pairs)

    @torch.no_grad()
    def keep_weights(self) -> None:
        """The run has got on well so far: weights and buffers are those of now.

        Optimizer states stay as they are. While several groups train, those of now are at the server or differ from
        group to group, and a few steps make up for it.
        """
        for tensor, kept in (*self.weights, *self.buffers):
            kept.copy_(tensor)

    def put_back(self, core: GroupCore) -> None:
        """The run goes on from there, in one group.

        Args:
            core: the group.
        """
        with torch.no_grad():
            for tensor, kept in (*self.weights, *self.buffers):
                write(tensor, kept)
        for optimizer, states in self.optimizers:
            optimizer.state.clear()
            for parameter, values in states.items():
                optimizer.state[parameter] = deepcopy(values)
        for index, state in enumerate(self.senders):
            core.load_sender_state(index, copied(state))


def _are_finite(tensor: Tensor) -> Tensor:
    """Which elements are; of floats of 8 bits, too, of which torch cannot say it for all kinds."""
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor).isfinite()


def copied(tree: Any) -> Any:
    """A tree of plain data and tensors that no other holds."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
