"""Changes of the user's parameter groups in mid-run, for example by a callback that unfreezes layers.

Rule 1: every rank of a group arrives at a change at the same step, and makes the same calls; the leader sends the
change to the server.
Rule 2: a gradient counts only if it was computed at weights that the server held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import ConfigurationError, ProtocolError, UnsupportedError
from lightning_omni.methods.model.server_optimizer import held_by, holds, hyperparameters_of, state_of
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.model.tensor_sync import agree, are_alike, describe
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.server_exchange import ServerExchange
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack
from lightning_omni.wire.formats.base import RESIDUAL

AGREEMENT_TIMEOUT = timedelta(minutes=5)
"""The longest wait of a member of a group for another one to change its parameter groups, too."""
_UNLIKE = (
    "the ranks of one group have changed their optimizers' parameter groups differently, and they train as one: freeze,"
    " unfreeze and add_param_group on all ranks at the same batch"
)


class ParameterGroups:
    """The agreement of this rank's parts, and of the server, with the user's parameter groups."""

    def __init__(self, parallel: ParallelState, exchange: ServerExchange) -> None:
        self._parallel, self._exchange = parallel, exchange

    def renew(self) -> None:
        """Adopt the parameters that the optimizers hold now, before several groups train."""
        for index, part in enumerate(self._parallel.parts):
            part.replica.begin_layout()
            if part.arranged == part.arrangement:
                continue
            if part.head is None:
                before = part.replica.ordered
                part.replica.hold(self._named(part, {}))
                self._reorder_residual(index, before)
            elif not set(part.replica.ordered) <= set(held_by(part.optimizer)):
                raise UnsupportedError(
                    f'merged="{part.head[0]}": its weights were taken out of their optimizer; put them back, or leave'
                    " merged= out"
                )
            part.arranged = part.arrangement

    def _reorder_residual(self, index: int, before: Sequence[Parameter]) -> None:
        core, ordered = self._parallel.core, self._parallel.parts[index].replica.ordered
        if RESIDUAL in (state := core.sender_state(index)):
            owed = dict(zip(before, state[RESIDUAL], strict=False))
            core.load_sender_state(index, {**state, RESIDUAL: [owed.get(each) for each in ordered]})

    def agree(self) -> None:
        """Bring the optimizers' parameters into the first rank's order. All ranks call it before several groups train.

        Raises:
            ConfigurationError: optimizers are of different classes, or hold different parameters or parameter groups.
        """
        self.renew()
        held = dict(self._held())
        remedy = "make the same optimizers on all ranks, with the same parameters in the same parameter groups"
        kinds = {
            f"optimizer {number}": type(part.optimizer).__name__ for number, part in enumerate(self._parallel.parts)
        }
        found = kinds | {name: describe(parameter) for name, parameter in held.items()}
        order = agree(found, self._parallel.rank, self._parallel.all_reduce_max, remedy)
        if order is None:
            return
        places = {held[name]: place for place, name in enumerate(order) if name not in kinds}
        for part in self._parallel.parts:
            own = set(part.replica.ordered)
            for group in part.optimizer.param_groups:
                following = iter(sorted(own.intersection(group["params"]), key=places.__getitem__))
                group["params"][:] = [next(following) if each in own else each for each in group["params"]]
        self.renew()

    def _held(self) -> Iterator[tuple[str, Parameter]]:
        for number, part in enumerate(self._parallel.parts):
            known = self._parallel.names
            names = {parameter: known.get(parameter, name) for name, parameter in part.replica.parameters.items()}
            for index, group in enumerate(part.optimizer.param_groups):
                where = f"in parameter group {index} of optimizer {number}"
                yield from ((f"parameter {names[each]} {where}", each) for each in group["params"] if each in names)

    @property
    def first_layouts(self) -> list[list[str]]:
        """Return the parameter names with which the server last received each optimizer, without those added later."""
        return [list(part.replica.parameters)[: part.replica.first] for part in self._parallel.parts]

    def begin_with(self, layouts: Sequence[Sequence[str]]) -> None:
        """Adopt these `first_layouts` of the run that this rank's group has joined.

        Raises:
            ConfigurationError: one of the parameters is not in the model.
        """
        for part, names in zip(self._parallel.parts, layouts, strict=True):
            if list(part.replica.parameters) == list(names):
                continue
            known = {**{name: each for each, name in part.names().items()}, **part.replica.parameters}
            if missing := [name for name in names if name not in known]:
                raise ConfigurationError(
                    f"the optimizers of the run hold {missing[0]}, which this group cannot find in its model: give all"
                    " groups the same model, and register in it what an optimizer may come to hold"
                )
            part.replica.hold({name: known[name] for name in names})

    def follow_all(self) -> bool:
        grown = [self.follow(index) for index in range(len(self._parallel.parts))]
        return any(grown)

    def follow(self, index: int) -> bool:
        """Follow a change of one optimizer; return whether parameters were added.

        All ranks of a group call it, between two gradients.

        Raises:
            UnsupportedError: the change cannot be followed.
        """
        part = self._parallel.parts[index]
        arrangement = part.arrangement
        if part.arranged == arrangement:
            return False
        self._exchange.finish_exchanges()  # they have the earlier layout
        if self._parallel.joined.servers > 1:
            instead = "Server(count=1)" if self._parallel.share is None else "model_parallel=None"
            raise UnsupportedError(
                "parameter groups cannot change in mid-run where several servers hold a partition each: pass"
                f" {instead}, or build the optimizer whole before training begins"
            )
        replica, start = part.replica, len(part.replica.ordered)
        try:
            fresh = self._fresh(part)
            if not self._parallel.steps_at_worker:  # no write of the user's, which `ServedState` would note
                dict.update(part.optimizer.state, replica.take_detached(fresh.values()))
            grown = replica.layout_with(fresh)
            tree = self._tree(part, fresh)
        except UnsupportedError as error:
            with suppress(UnsupportedError):  # the others may be gone; this error is the reason
                self._check_same_in_group(str(error))  # or they would see only the end of a connection
            raise
        self._check_same_in_group(_structure_of(tree))
        first = grown.offsets[start] if fresh else grown.nbytes
        version, theirs = self._announce(index, tree, grown.nbytes - first)
        if fresh:
            replica.grow(fresh, version)
            self._exchange.peers.grow(index, grown)
            buffer = torch.cat([torch.zeros(first, dtype=torch.uint8), theirs])
            _take_over(list(fresh.values()), grown.views(buffer)[start:])
        if not self._parallel.steps_at_worker:  # rule 1 of `StateTransfer`
            for parameter in fresh.values():
                dict.pop(part.optimizer.state, parameter, None)
        replica.release(set(held_by(part.optimizer)))
        part.arranged = arrangement
        return bool(fresh)

    def check_alike(self) -> None:
        mine = _digest(repr([(list(part.replica.parameters), self._places(part)) for part in self._parallel.parts]))
        if not all(are_alike([mine], self._parallel.all_reduce_max)):
            raise ConfigurationError(
                "all ranks are to continue with one state, because other groups are to be formed, or weights or an"
                " optimizer were written, and the ranks' optimizers do not hold the same parameters in the same"
                " parameter groups: freeze, unfreeze and add_param_group on all ranks before, or after"
            )

    def read_beyond(self) -> None:
        """Load weights that only other groups train, by their names in the model. All ranks call it."""
        sizes = [len(part.replica.ordered) for part in self._parallel.parts]
        if self._parallel.all_reduce_max(sizes) == sizes:
            return
        snapshot = self._exchange.store.snapshot(with_state=False)
        for part, theirs in zip(self._parallel.parts, snapshot.parts, strict=True):
            known = {name: parameter for parameter, name in part.names().items()}
            for name, value in theirs["weights"].items():
                if name not in part.replica.parameters and name in known:
                    known[name].detach().copy_(value)

    @staticmethod
    def room_of(part: Part) -> int:
        """Return the bytes of the model's parameters that may be added to the part."""
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter in part.names()
            if parameter not in part.replica.ever_held
        )

    # --- What is new -------------------------------------------------------------------------------------------------

    def _fresh(self, part: Part) -> dict[str, Parameter]:
        fresh = {} if part.head is not None else self._named(part, part.replica.parameters)
        for name, parameter in fresh.items():
            if any(parameter in other.replica.ever_held for other in self._parallel.parts if other is not part):
                raise UnsupportedError(
                    f"the parameter {name} was added to an optimizer while another one holds it, or has held it; the"
                    " server keeps one master copy of it, moved by one optimizer: leave it there, or use groups=1"
                )
        return fresh

    @staticmethod
    def _named(part: Part, known: Mapping[str, Parameter]) -> dict[str, Parameter]:
        names, found = part.names(), dict[str, Parameter]()
        seen = {*known.values(), *part.outside}
        for number, group in enumerate(part.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter not in seen:
                    name = names.get(parameter, f"{number}.{index}")
                    while name in known or name in found:
                        name += "'"
                    found[name] = parameter
        return found

    def _tree(self, part: Part, fresh: Mapping[str, Parameter]) -> dict[str, Any]:
        here = self._parallel.steps_at_worker
        return {
            "groups": self._describe(part, fresh, are_needed=not here),
            "weights": {name: parameter.detach() for name, parameter in fresh.items()},
            "state": {} if here else self._state(part, fresh),
        }

    @staticmethod
    def _describe(part: Part, fresh: Mapping[str, Parameter], are_needed: bool) -> list[dict[str, Any]]:
        places = {parameter: place for place, parameter in enumerate((*part.replica.ordered, *fresh.values()))}
        settings = hyperparameters_of(part.optimizer, places, are_needed=are_needed)
        groups = [group["params"] for group in part.optimizer.param_groups if holds(group, places)]
        return [
            {**each, "params": [places[parameter] for parameter in group if parameter in places]}
            for each, group in zip(settings, groups, strict=True)
        ]

    @staticmethod
    def _state(part: Part, fresh: Mapping[str, Parameter]) -> dict[int, Any]:
        start = len(part.replica.ordered)
        return {
            start + index: each
            for index, parameter in enumerate(fresh.values())
            if part.optimizer.state.get(parameter)
            for each in state_of(part.optimizer, {parameter}).values()
        }

    def _places(self, part: Part) -> list[list[int]]:
        places = {id(parameter): place for place, parameter in enumerate(part.replica.ordered)}
        return [[places[each] for each in group if each in places] for group in part.arrangement]

    # --- To the server ---------------------------------------------------------------------------------------------

    def _check_same_in_group(self, text: str) -> None:
        parallel = self._parallel
        if len(parallel.members) == 1:
            return
        mine = torch.tensor([_digest(text)], device=parallel.device)
        timeout = min(parallel.options.timeout, AGREEMENT_TIMEOUT)
        alike, theirs = torch.ones_like(mine), torch.zeros_like(mine)
        others = range(1, len(parallel.members)) if parallel.is_leader else (0,)
        group = parallel.compute_group
        try:
            if not parallel.is_leader:
                _wait(dist.isend(mine, group=group, group_dst=0), timeout)
            for member in others:
                _wait(dist.irecv(theirs, group=group, group_src=member), timeout)
                alike *= int(theirs) == (int(mine) if parallel.is_leader else 1)
            for member in others if parallel.is_leader else ():
                _wait(dist.isend(alike, group=group, group_dst=member), timeout)
        except RuntimeError as error:
            raise UnsupportedError(f"{_UNLIKE}; not all of them came to this change: {error}") from error
        if not int(alike):
            raise UnsupportedError(f"{_UNLIKE}; they hold other parameters now")

    def _announce(self, index: int, tree: Any, nbytes: int) -> tuple[int, Tensor]:
        """Send a change to the server; return the layout's version and, on every member, the added master weights."""
        parallel, theirs, reason, version = self._parallel, torch.zeros(nbytes, dtype=torch.uint8), "", 0
        if parallel.is_leader:
            packed, buffer = pack(tree)
            message = m.Restructure(optimizer=index, packed=packed, nbytes=buffer.numel())
            try:
                answer, theirs = self._exchange.ask(message, m.Restructured, buffer)
                version = answer.layout
            except ProtocolError as error:  # the other members wait here, and must get it
                reason = str(error)
        note = self._exchange.members.broadcast_bytes(msgspec.msgpack.encode((reason, version)))
        reason, version = msgspec.msgpack.decode(note, type=tuple[str, int])
        if reason:
            raise UnsupportedError(
                f"the optimizer's parameter groups have changed, and the server cannot follow: {reason}"
            )
        if nbytes:
            self._exchange.members.broadcast(theirs)
        return version, theirs


def _wait(work: dist.Work | None, timeout: timedelta) -> None:
    assert work is not None
    work.wait(timeout)


def _structure_of(tree: Any) -> str:
    places = [group["params"] for group in tree["groups"]]
    return repr((places, [(name, *value.shape, value.dtype) for name, value in tree["weights"].items()]))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _take_over(parameters: list[Parameter], values: list[Tensor]) -> None:
    """Copy the server's weights into added parameters that differ from them, and drop the gradients of these."""
    for parameter, value in zip(parameters, values, strict=True):
        own = parameter.detach()
        if not torch.equal(own, value := value.to(own.device)):
            own.copy_(value)
            parameter.grad = None
