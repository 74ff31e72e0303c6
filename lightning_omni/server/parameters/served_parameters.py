"""One optimizer's master weights at the server, with the merging of pushes and the tensors of answers.

Rule: the method counts staleness against the clock in `Master`; `counts` has its statistics.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import MalformedMessage, ProtocolError, Refused
from lightning_omni.methods import Master, Method, Push, Reply
from lightning_omni.methods.contract import Tensors, Total
from lightning_omni.methods.model.replica import all_finite
from lightning_omni.methods.model.server_optimizer import Resolve, check_state, describe, rebuild
from lightning_omni.server.parameters.push_checks import PushCounts, check_settings, has_finite_sum
from lightning_omni.wire.formats.base import RAW, Memory, WireFormat, decode
from lightning_omni.wire.layout import Layout, Structure, Structures, TensorSpec, read_structure, settings_of, specs_of
from lightning_omni.wire.messages import PushMessage

ROOM = 1 << 30
"""The most bytes of parameters added during a run, beyond the announced ones."""
_STATES = 4
"""The most bytes of added parameters with optimizer state, as a multiple of all weights' bytes and the room left."""


class GroupHistory(NamedTuple):
    """The numbers of all groups since the last forming.

    Attributes:
        joined: groups that have joined later, in order.
        gone: groups of either kind that have ended, with the number of groups until then.
    """

    formed: Sequence[int]
    joined: Sequence[int]
    gone: Mapping[int, int]


class ServedParameters:
    """The master weights of one optimizer in one flat buffer, with the server side of the method.

    Args:
        description: the optimizer, from `lightning_omni.methods.model.server_optimizer.describe`; None if it steps at
            the workers.
        weights: initial value of each of its parameters; copied.
        clock: number of updates that these already contain.
        state: state of the method's server side to continue from.
        room: the most bytes of parameters added during the run.
        sizes: number of parameters of each version of the layout.
    """

    is_head = False

    def __init__(
        self,
        description: Mapping[str, Any] | None,
        weights: Mapping[str, Tensor],
        clock: int,
        method: Method,
        groups: Iterable[int],
        resolve: Resolve,
        state: Mapping[str, Any] | None = None,
        room: int = ROOM,
        sizes: Sequence[int] = (),
    ) -> None:
        if clock < 0:
            raise MalformedMessage(f"the clock cannot be {clock}")
        if (description is None) != (method.steps_at == "worker"):
            raise MalformedMessage(f"with {type(method).__name__} the optimizer steps at the {method.steps_at}")
        versions = _versions(specs_of(weights), sizes)
        self.layout = versions[-1]
        self.buffer = self.layout.empty()
        parameters = {}
        for view, (name, value) in zip(self.layout.views(self.buffer), weights.items(), strict=True):
            view.copy_(value)
            parameters[name] = Parameter(view, requires_grad=view.is_floating_point() or view.is_complex())
        optimizer = rebuild(description, parameters, resolve) if description is not None else None
        self.master = Master(parameters, optimizer, clock, len(versions[0].specs))
        param_groups = optimizer.param_groups if optimizer is not None else []
        places = {id(parameter): place for place, parameter in enumerate(parameters.values())}
        arranged = tuple(tuple(places[id(parameter)] for parameter in group["params"]) for group in param_groups)
        self.structures = Structures([Structure(len(places), arranged)])
        self._settings = [settings_of(group) for group in param_groups]
        self._room = room
        self._layouts = {len(version.specs): version for version in versions}
        self.method_side = method.server_side(self.master, groups)
        if state is not None:
            self.method_side.load_state(state)
        self.counts = PushCounts()
        self._answer: Tensor | None = None
        self._answers: WireFormat = RAW
        self._out, self._back = Memory(), Memory()
        self._mean = Total()
        self._averaging: dict[int, bool] = {}
        self._resumed = False

    # --- Saved state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.master.parameters.items()}
        optimizer = self.master.optimizer
        return {
            "optimizer": describe(optimizer, names) if optimizer is not None else None,
            "weights": {name: parameter.detach() for name, parameter in self.master.parameters.items()},
            "clock": self.master.clock,
            "method": self.method_side.state(),
            "room": self._room,
            "sizes": list(self._layouts),
            "structures": msgspec.msgpack.encode(self.structures),
            **self.counts.state(),
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], method: Method, groups: GroupHistory, resolve: Resolve
    ) -> ServedParameters:
        where = state["weights"], int(state["clock"]), method, groups.formed, resolve
        served = cls(state["optimizer"], *where, room=int(state["room"]), sizes=state["sizes"])
        # The history is repeated, because a method may compute values from the number of groups when they are formed.
        for number in (*groups.joined, len(groups.formed) + len(groups.joined)):
            for gone in (group for group, numbers in groups.gone.items() if numbers == number):
                served.method_side.evict(gone)
            if number in groups.joined:
                served.method_side.join(number)
        served.method_side.load_state(state["method"])
        served.structures = msgspec.msgpack.decode(state["structures"], type=Structures)
        served.counts.load(state)
        served._resumed = True
        return served

    def change_method(self, method: Method, groups: Iterable[int]) -> None:
        self.method_side = method.server_side(self.master, groups)
        self._answers = RAW
        self.structures.form()
        self.counts.form()
        self._mean.clear()
        self._averaging = {}

    # --- Parameters and their groups ---------------------------------------------------------------------------------

    def layout_of(self, group: int) -> Layout:
        return self._layouts[self.structures.of(group).size]

    def check_room(self, nbytes: int) -> None:
        # Each group uploads parameters that other groups have added, too, perhaps with optimizer state.
        if nbytes > _STATES * (self._room + self.layout.nbytes):
            raise Refused("structure", f"{nbytes} bytes came with added parameters, and {self._room} are left for such")

    def restructure(self, group: int, tree: Any) -> int:
        """Change a group's optimizer as `read_structure` reads it; return the index of its first new parameter."""
        known = self._size_before(group, tree)
        structure, groups, weights, state = read_structure(tree, known)
        if self.master.optimizer is None:  # it steps at the workers, which have the parameter groups
            structure = Structure(structure.size, ())
        specs, here = specs_of(weights), self.layout.specs[known : structure.size]
        for mine, theirs in zip(here, specs, strict=False):
            if mine != theirs:
                raise Refused(
                    "structure",
                    f"group {group} has added the parameter {theirs.name} {theirs.shape}, and before it another group"
                    f" added {mine.name} {mine.shape}; let all groups add the same parameters in the same order",
                )
        number = self.structures.find(group, structure)
        if number is None:
            fresh = dict(list(weights.items())[len(here) :])
            state = {place: each for place, each in state.items() if place >= known + len(here)}
            self._check_fresh(fresh, groups)
            if self.master.optimizer is not None and state:
                of = {place: list(weights.values())[place - known] for place in state}
                check_state(self.master.optimizer, of, state)
            self._grow(fresh)
            if self.master.optimizer is not None:
                self._arrange(groups, state)
        self.structures.move(group, structure, number)
        if weights:
            self.method_side.read_from(group, known)
        return known

    def _size_before(self, group: int, tree: Any) -> int:
        """Return the group's number of parameters before a change, which is repeated if its answer was lost."""
        known = self.structures.of(group).size
        weights = tree.get("weights") if isinstance(tree, Mapping) else None
        named = list(weights) if isinstance(weights, Mapping) else []
        before = known - len(named)
        is_repeated = before >= self.structures.first.size and list(self.master.parameters)[before:known] == named
        return before if is_repeated else known

    def _check_fresh(self, fresh: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
        if fresh and self.is_head:
            raise Refused("structure", f"{next(iter(fresh))} cannot be added: a merged head stays as it is")
        for name in fresh:
            if name in self.master.parameters:
                raise MalformedMessage(f"there is a parameter {name} already")
        if (more := Layout.of(fresh).nbytes) > self._room:
            raise Refused(
                "structure",
                f"the parameters that were added, {next(iter(fresh))} first, take {more} bytes, and {self._room} are"
                " left for such; build the module whole before training begins, and freeze what is to be trained later",
            )
        optimizer = self.master.optimizer
        kinds = {**optimizer.defaults, **self._settings[0]} if optimizer is not None and self._settings else {}
        for group in groups:
            check_settings(settings_of(group), kinds)

    def _grow(self, fresh: Mapping[str, Tensor]) -> None:
        if not fresh:
            return
        start, before = len(self.layout.specs), self.buffer
        self.layout = self._layouts[start + len(fresh)] = self.layout.grown(specs_of(fresh))
        self.buffer = self.layout.empty()
        self.buffer[: before.numel()].copy_(before)
        views = self.layout.views(self.buffer)
        for parameter, view in zip(self.master.parameters.values(), views, strict=False):
            parameter.data = view
        parameters = {}
        for (name, value), view in zip(fresh.items(), views[start:], strict=True):
            view.copy_(value)
            parameters[name] = Parameter(view, requires_grad=view.is_floating_point() or view.is_complex())
        self.master.grow(parameters)
        self._room -= self.buffer.numel() - before.numel()
        self._answer = None
        with torch.no_grad():
            self.method_side.grow(start)

    def _arrange(self, groups: Sequence[Mapping[str, Any]], state: Mapping[int, Any]) -> None:
        copies = {
            place: {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
            for place, values in state.items()
        }
        self.master.arrange(groups, copies)
        self._settings = [settings_of(group) for group in groups]
        self.method_side.rearranged(self._settings)

    def _in_newest(self, message: PushMessage, known: Structure) -> Sequence[Mapping[str, Any]]:
        """Keep and return a push's hyperparameters for the server's parameter groups: the last where it has none."""
        newest = self.structures.newest
        if known == newest:
            self._settings = list(message.hyperparameters)
        else:
            theirs = zip(self._settings, newest.counterparts(known), strict=True)
            self._settings = [old if number is None else message.hyperparameters[number] for old, number in theirs]
        return self._settings

    # --- Pushes ------------------------------------------------------------------------------------------------------

    def layout_of_push(self, group: int, message: PushMessage) -> Layout:
        known = self.layout_of(group)
        if message.layout != known.version:
            raise MalformedMessage(
                f"the push lies in version {message.layout} of the layout, and group {group} knows version"
                f" {known.version}"
            )
        fragments = self.method_side.method.fragments
        if not (message.fragment == -1 if fragments == 1 else 0 <= message.fragment < fragments):
            raise MalformedMessage(f"the push is of fragment {message.fragment}, and the method has {fragments}")
        known = known.fragment(message.part, fragments)
        if len(message.present) != len(known.specs):
            raise MalformedMessage(
                f"the push speaks of {len(message.present)} parameters, the optimizer has {len(known.specs)}"
            )
        return known.subset(message.present)

    def push(
        self,
        group: int,
        message: PushMessage,
        payload: Tensor,
        layout: Layout | None = None,
        finite: bool | None = None,
    ) -> list[Reply] | None:
        """Merge a push, whose ``payload`` is in flat memory; ``layout`` is its `layout_of_push`, if known.

        ``finite`` tells whether all parts of the push are; None if it is whole and not checked.

        Returns:
            The method's replies, or None if the push was refused: it is not finite, or the method declines it.
        """
        layout = layout or self.layout_of_push(group, message)
        views = iter(layout.views(payload))
        tensors = [next(views) if there else None for there in message.present]
        if finite is None and has_finite_sum(layout, payload):
            finite = True
        return self.take(group, message, tensors, finite)

    def take(
        self,
        group: int,
        message: PushMessage,
        tensors: Sequence[Tensor | None],
        finite: bool | None = None,
    ) -> list[Reply] | None:
        known = self.structures.of(group)
        if self.method_side.declines(self.master.clock - message.read_at):
            self.counts.decline(group)
            return None
        if self._resumed and message.read_at > self.master.clock:  # the newer weights of an earlier server are lost
            message = msgspec.structs.replace(message, read_at=self.master.clock)
        self._check(message, known)
        if not (all_finite(tensors) if finite is None else finite):
            self.counts.refuse(group)
            return None
        self.counts.accept(group)
        layout = self.layout.fragment(message.part, self.method_side.method.fragments)
        if unknown := len(layout.specs) - len(tensors):
            tensors = [*tensors, *[None] * unknown]
        settings = self._in_newest(message, known)
        push = Push(group, message.read_at, tensors, settings, message.note, message.part)
        self.counts.merge(group, self.method_side.staleness_of(push))
        with torch.no_grad():
            return self.method_side.receive(push)

    # --- Answers -----------------------------------------------------------------------------------------------------

    def answer_in(self, answers: WireFormat) -> None:
        """Set the wire format of answers until the method changes."""
        self._answers = RAW if answers == RAW else answers
        if answers != RAW:
            self.method_side.as_sent = self._as_sent

    def as_bytes(self, flat: Tensor, layout: Layout) -> Tensor:
        if self._answers is RAW:
            return flat
        return self._answers.encode(layout.views(flat), layout, {}, self._out).payload.clone()  # several may be pending

    def arrived(self, payload: Tensor, layout: Layout) -> Tensor:
        return payload if self._answers is RAW else decode(self._answers, payload, layout, self._back)

    def _as_sent(self, tensors: Tensors) -> Tensors:
        flat = self.payload_of(Reply(-1, 0, tensors))
        views = self.layout.views(self.arrived(self.as_bytes(flat, self.layout), self.layout).clone())
        return [None if tensor is None else view for tensor, view in zip(tensors, views, strict=True)]

    def payload_of(self, reply: Reply, fragment: int | None = None) -> Tensor:
        """Return the answer to a push of a fragment, or of all, in flat memory valid until the next update or call."""
        if reply.tensors is None and fragment is None:
            return self.buffer
        if self._answer is None:
            self._answer = self.layout.empty()
        layout = self.layout.fragment(fragment, self.method_side.method.fragments)
        tensors = self.master.weights(fragment) if reply.tensors is None else reply.tensors
        for view, tensor in zip(layout.views(self._answer), tensors, strict=True):
            view.zero_() if tensor is None else view.copy_(tensor)
        return self._answer[: layout.nbytes]

    def _check(self, message: PushMessage, known: Structure) -> None:
        if not 0 <= message.read_at <= self.master.clock:
            raise ProtocolError(f"weights of clock {message.read_at} were never sent; the clock is {self.master.clock}")
        if not math.isfinite(message.note):
            raise ProtocolError(f"the note of a push is a number, not {message.note}")
        if len(message.hyperparameters) != len(known.groups):
            raise ProtocolError(
                f"the push has {len(message.hyperparameters)} parameter groups, the optimizer {len(known.groups)}"
            )
        if self.master.optimizer is None:
            return
        groups, newest = self.master.optimizer.param_groups, self.structures.newest
        numbers: Sequence[int | None] = range(len(groups)) if known == newest else newest.counterparts(known)
        for group, number in zip(groups, numbers, strict=True):
            if number is not None:
                check_settings(message.hyperparameters[number], group)

    # --- Mean of all groups' own weights -----------------------------------------------------------------------------

    def layout_of_average(self, group: int, absent: Collection[int]) -> Layout:
        known = self.layout_of(group)
        if not all(0 <= place < len(known.specs) for place in absent):
            raise MalformedMessage(f"the weights lack parameters {absent}, the optimizer has {len(known.specs)}")
        return known.subset(_there(absent, len(known.specs)))

    def average(self, group: int, payload: Tensor, finite: bool | None = None, absent: Collection[int] = ()) -> None:
        if group in self._averaging:
            raise ProtocolError(f"group {group} has handed its weights in already")
        views = iter(self.layout_of_average(group, absent).views(payload))
        weights = [next(views) if there else None for there in _there(absent, len(self.layout_of(group).specs))]
        if good := all_finite(weights) if finite is None else finite:
            self._mean.add(weights)
            self.counts.accept(group)
        else:
            self.counts.refuse(group)
        self._averaging[group] = good

    @property
    def averaging(self) -> Collection[int]:
        return self._averaging.keys()

    def averaged(self, live: Collection[int]) -> list[tuple[int, bool]]:
        """Set the master weights to the mean, once all ``live`` groups have sent their own.

        Return the groups to answer, and whether their own weights are in the mean.
        """
        if not self._averaging or not set(live) <= self._averaging.keys():
            return []
        if self._mean.count:
            self._mean.reach(len(self.layout.specs))
            for weight, value in zip(self.master.weights(), self._mean.means(), strict=True):
                if value is not None:  # else no live group has it, or all share the master's
                    weight.copy_(value)
        self._mean.clear()
        answered, self._averaging = self._averaging, {}
        return [(group, good) for group, good in answered.items() if group in live]


def _there(absent: Collection[int], count: int) -> list[bool]:
    gone = set(absent)
    return [place not in gone for place in range(count)]


def _versions(specs: tuple[TensorSpec, ...], sizes: Sequence[int]) -> list[Layout]:
    first, *others = sizes or (len(specs),)
    versions = [Layout(specs[:first])]
    for size in others:
        versions.append(versions[-1].grown(specs[len(versions[-1].specs) : size]))
    return versions
