"""Writes of user code during training: to weights, buffers, optimizers and their state.

Rule 1: at a synchronization point, the recorder's written values are copied to all ranks and to the server.
Rule 2: while several groups train, a write to trained weights or states is refused in the next step (through ``.data``,
within eight), unless the method steps at the workers: then the weights are the group's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import compress
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods.model.server_optimizer import plain_attributes_of
from lightning_omni.runtime.model.buffer_sync import BufferSync, buffers_of, merge, parameters_of
from lightning_omni.runtime.model.meshes import shown
from lightning_omni.runtime.model.replica import SAMPLED, Part, fingerprints
from lightning_omni.runtime.model.tensor_sync import take_from_rank_zero
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.server_exchange import ServerExchange
from lightning_omni.runtime.state.served_state import ServedState
from lightning_omni.runtime.state.transfer import StateTransfer


class ExternalWrites:
    """The detection of user code's writes, and their distribution to all ranks and the server.

    Attributes:
        others: returns the model's parameters, and averages of them that a callback keeps: a target network, say, is
            written although no optimizer moves it.
        switched: returns whether the user has replaced attached optimizers.
        are_validations_apart: whether one group validates while others train.
    """

    def __init__(self, parallel: ParallelState, exchange: ServerExchange, states: StateTransfer) -> None:
        self._parallel, self._exchange, self._states = parallel, exchange, states
        self.buffers: Callable[[], Iterable[BufferSync]] = tuple
        self.others: Callable[[], Iterable[BufferSync]] = tuple
        self.switched: Callable[[], bool] = bool
        self.reattach: Callable[[], None] = lambda: None
        self.are_validations_apart = False
        self.watched: Module | None = None
        self._buffers_seen: list[int] = []
        self._others_seen: list[int] = []
        self._states_seen: dict[Optimizer, Any] = {}
        self._attributes_seen: dict[Optimizer, dict[str, Any]] = {}

    def watch(self, module: Module | None) -> None:
        self.watched = module
        self.buffers = tuple if module is None else lambda: buffers_of(module)
        self.others = (
            tuple
            if module is None
            else lambda: (each for each in parameters_of(module) if not isinstance(each.tensor, DTensor))
        )

    def begin(self) -> None:
        """Record that all ranks and the server have the present values."""
        for part in self._parallel.parts:
            part.replica.know()
        self._know_states()
        self.others_followed()

    # --- A synchronization point --------------------------------------------------------------------------------------

    def merge(self, module: Module | None) -> None:
        """Merge a module's buffers, and those of ``others`` that any rank has written. All ranks call it."""
        buffers = () if module is None else buffers_of(module)
        merge(self._parallel, [*buffers, *self._others_written()])
        self.others_followed()

    def _others_written(self) -> list[BufferSync]:
        loaded = {id(parameter) for part in self._parallel.parts for parameter in part.replica.served()}
        others = list(self.others())
        found = list(compress(others, self._parallel.all_reduce_max(self._are_written(others, loaded))))
        _check_whole(found)
        return found

    def others_followed(self) -> None:
        self._buffers_seen, self._others_seen = _marks(self.buffers()), _marks(self.others())

    def follow(self, check_alike: Callable[[], object]) -> None:
        """Distribute the recorder's values if any rank has written since the last synchronization. All ranks call it.

        ``check_alike`` raises an error if their optimizers hold different parameters.
        """
        is_state_written = any(map(self._is_state_written, self._parallel.parts))
        is_other = is_state_written or any(map(self._changed_attribute, self._parallel.parts))
        written = [*self._written(), int(self.switched()), int(is_other)]
        weights, loose, switched, others = self._parallel.all_reduce_max(written)
        if loose:
            self._share_loose()
            self.others_followed()
        if switched:
            self._switch()
        if weights or switched or others:
            check_alike()
            self._hand_over(keep_states=not switched)
        self._know_states()

    # --- A step -------------------------------------------------------------------------------------------------------

    def check(self, part: Part) -> None:
        """Raise `UnsupportedError`, on ranks that exchange, for writes to trained weights or a served optimizer."""
        parallel = self._parallel
        if (
            parallel.exchanges
            and part.head is None
            and not parallel.steps_at_worker
            and (names := part.replica.written(in_passing=True))
        ):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            untrained = all(part.replica.parameters[name].grad is None for name in names)
            validation = (
                ' and, with validation="wait", in validation' if self.are_validations_apart else " or in validation"
            )
            no_gradient = "; if no gradient moves it, as a target network, call requires_grad_(False) on it"
            first = parallel.names.get(part.replica.parameters[names[0]], names[0])
            raise UnsupportedError(
                f"{first}{more} was written between two steps, by a callback, a hook of the module or the loop: the"
                " master weights are at the parameter server, and other groups train on them meanwhile; write weights"
                f" at an epoch's start or end{validation} (without Lightning: between world.enter_world() and"
                " world.enter_compute()), where all groups hear of it, or use a method whose groups have weights of"
                ' their own (method="local_sgd"), or groups=1' + (no_gradient if untrained else "")
            )
        if parallel.exchanges and part.head is None and self._is_state_written(part):
            raise UnsupportedError(
                f"the state of {type(part.optimizer).__name__} was loaded or given up between two steps: it is at the"
                " parameter server, where other groups' gradients move it meanwhile; do so at an epoch's start or end"
                " (without Lightning: between world.enter_world() and world.enter_compute()), where all groups hear of"
                " it, or use a method whose optimizer steps on the ranks"
                ' (method="local_sgd"), or groups=1'
            )
        if parallel.exchanges and part.head is None and (name := self._changed_attribute(part)):
            raise UnsupportedError(
                f"the attribute {name!r} of {type(part.optimizer).__name__} was changed between two steps, and the"
                " optimizer that steps is the parameter server's: do so at an epoch's start or end (without Lightning:"
                " between world.enter_world() and world.enter_compute()), where all groups hear of it, keep the value"
                " in the optimizer's parameter groups, which each push brings, or use a method whose optimizer steps on"
                ' the ranks (method="local_sgd"), or groups=1'
            )

    # --- How ----------------------------------------------------------------------------------------------------------

    def _written(self) -> list[int]:
        return [
            int(any(part.replica.written() for part in self._parallel.parts)),
            int(_marks(self.buffers()) != self._buffers_seen or _marks(self.others()) != self._others_seen),
        ]

    def _know_states(self) -> None:
        self._states_seen = {part.optimizer: part.optimizer.state for part in self._parallel.parts}
        served = [] if self._parallel.steps_at_worker else self._parallel.parts
        self._attributes_seen = {part.optimizer: plain_attributes_of(part.optimizer) for part in served}

    def _is_state_written(self, part: Part) -> bool:
        if self._parallel.steps_at_worker:  # otherwise it has none here
            return False
        state: Any = part.optimizer.state
        if isinstance(state, ServedState):
            return state.is_written
        is_replaced = state is not self._states_seen.get(part.optimizer, state)
        return is_replaced or any(state.get(parameter) for parameter in part.replica.ordered)

    def _changed_attribute(self, part: Part) -> str:
        if not (seen := self._attributes_seen.get(part.optimizer)):
            return ""
        now = plain_attributes_of(part.optimizer)
        return next((name for name, then in seen.items() if repr(now.get(name)) != repr(then)), "")

    def _switch(self) -> None:
        """Replace the attached optimizers by the user's new ones; those that remain get their state back."""
        parallel = self._parallel
        if parallel.share is not None:
            raise UnsupportedError(
                f"strategy.optimizers was changed, and with {shown(parallel.options.model_parallel)} each member of a"
                " group has its share of their state: make all optimizers in configure_optimizers, or leave"
                " model_parallel= out"
            )
        clock = max((part.replica.clock for part in parallel.parts), default=0)
        if parallel.is_recorder:
            self._states.take_back()
        self.reattach()
        for part in parallel.parts:
            part.replica.clock = clock

    def _hand_over(self, keep_states: bool) -> None:
        parallel = self._parallel
        for part in parallel.parts:
            part.replica.abandon()
        if keep_states:
            written = {part.optimizer: part.optimizer.state for part in parallel.parts if self._is_state_written(part)}
            self._states.keep()
            for optimizer, state in written.items():
                if isinstance(state, ServedState):
                    state.write_to(optimizer.state)
                else:
                    optimizer.state = state
        for index, part in enumerate(parallel.parts):
            part.replica.begin_layout()
            self._exchange.peers.grow(index, part.replica.layout)  # drops what was published or received before
        self._states.seed()
        self._states.forget()
        self._exchange.read_weights()

    def _share_loose(self) -> None:
        others = list(self.others())
        trained = {id(parameter) for part in self._parallel.parts for parameter in part.replica.ordered}
        _check_whole(compress(others, self._are_written(others, trained)))
        whole = [*self.buffers(), *(each for each in others if not isinstance(each.tensor, DTensor))]
        take_from_rank_zero(((each.name, each.tensor) for each in whole), self._parallel.process_groups.live)

    def _are_written(self, others: Sequence[BufferSync], known: Set[int]) -> list[bool]:
        seen = self._others_seen if len(self._others_seen) == len(others) else [0] * len(others)
        marks = iter(_marks(each for each in others if id(each.tensor) not in known))
        return [id(each.tensor) not in known and next(marks) != then for each, then in zip(others, seen, strict=True)]


def _marks(untrained: Iterable[BufferSync]) -> list[int]:
    return fingerprints((each.tensor for each in untrained), SAMPLED)


def _check_whole(written: Iterable[BufferSync]) -> None:
    if any(isinstance(each.tensor, DTensor) for each in written):
        raise UnsupportedError(
            "a parameter that no optimizer moves was written in mid-run, and each rank of a group has a part of it;"
            " keep such values in buffers, which are not sharded, or leave model_parallel= out"
        )
