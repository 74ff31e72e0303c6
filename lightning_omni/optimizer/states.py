"""Optimizer state, weights and residuals on their way: to the server, back again, into a resumed run and new groups."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_omni.errors import MalformedMessage, UnsupportedError
from lightning_omni.methods.master import held_by
from lightning_omni.methods.modules import describe_module
from lightning_omni.methods.replica import learnt_by
from lightning_omni.optimizer.channel import Channel
from lightning_omni.optimizer.model_replica import Part, fingerprint
from lightning_omni.optimizer.parameter_groups import ParameterGroups
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.saved import Saved
from lightning_omni.optimizer.server_store import ServerSnapshot
from lightning_omni.optimizer.sharding import here, in_order, load_state, parts_of, whole
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import pack
from lightning_omni.protocol.wire_format import RESIDUAL, to_wire

_log = logging.getLogger(__name__)

_SAMPLED = 1 << 16
"""Numbers of a tensor by which ranks tell whether they have the same."""


class States:
    """Hands optimizer state over, so that none is lost or kept twice.

    Rule 1: what the server steps has its state there, and none on any rank; with one group it is the other way round.
    Rule 2: what steps on the ranks keeps its state there, the same on all members of a group.

    Args:
        place: this rank's, in the run.
        channel: its way to the server.
        residuals: what was not sent yet.
    """

    def __init__(self, place: Place, channel: Channel, residuals: Residuals) -> None:
        self._place, self._channel, self._residuals = place, channel, residuals
        self._resumed = Saved()

    # --- A resumed run -----------------------------------------------------------------------------------------------

    def resume(self, saved: Saved) -> None:
        """When training begins, go on from a checkpoint.

        Args:
            saved: what the checkpoint says. What server and groups remembered counts only if method, number of groups
                and parameters are the same again.
        """
        for part, clock in zip(self._place.parts, saved.cut.clocks, strict=False):
            part.replica.clock = clock
        names = [list(part.replica.parameters) for part in self._place.parts]
        same = (
            saved.method == m.method_to_wire(self._place.method)
            and saved.groups == len(self._place.topology.alive)
            and len(saved.server) == len(self._place.parts)
            and saved.parameters == names
        )
        self._resumed = self._filled(saved) if same else Saved()
        if not same:
            self._residuals.leave_out(saved.states)

    def _filled(self, saved: Saved) -> Saved:
        """With its tensors, if a folder has them: the server's, and those of this rank's group."""
        if saved.folder is None:
            return saved
        folder, place = saved.folder, self._place

        def filled(trees: Sequence[Any]) -> list[Any]:
            pairs = zip(place.parts, trees, strict=False)
            return [folder.filled(tree, part.replica.ordered, place.compute_group) for part, tree in pairs]

        own = sorted(saved.states)[place.group : place.group + 1]
        states = {number: filled(trees) if number in own else trees for number, trees in saved.states.items()}
        return replace(saved, server=filled(saved.server), states=states)

    def forget(self) -> None:
        """Training has begun: what was to be resumed is."""
        self._resumed = Saved()

    # --- Groups are formed -------------------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """Training begins in several groups: the server gets the run's state, each group what it alone knew."""
        self.seed()
        states, group = self._resumed.states, self._place.group
        in_order = [states[number] for number in sorted(states)]  # numbers may have had gaps, where groups had died
        mine = in_order[group] if group < len(in_order) else ()
        for index, (part, state) in enumerate(zip(self._place.parts, mine, strict=False)):
            own = part.replica.part_of(dict(state))
            part.replica.resume(own)
            self._residuals.resume(index, own)

    def hand_over(self, was_synchronous: bool) -> tuple[tuple[int, int], ...]:
        """Other groups stand: each piece of the state goes where it is from now on. On all ranks of them.

        Args:
            was_synchronous: whether there was one group before.

        Returns:
            The ranges of the epoch that the server knows to be trained, if there is one group from here on.
        """
        for part in self._place.parts:
            part.replica.abandon()  # memory, and a group's own weights
        self._residuals.carry_over()
        if was_synchronous:
            self.seed()
            return ()
        if self._place.steps_at_worker:
            self._share([part for part in self._place.parts if self._place.steps_here(part)])
        return self._take_back_everywhere() if self._place.is_synchronous else ()

    def agree(self) -> None:
        """Members whose optimizer states differ take those of their group's first replica, as a loop begins.

        An earlier loop in several groups may have left them so. All ranks call it.
        """
        if not self._place.process_groups.had_several:
            return
        self._place.make_groups()
        if self._place.replicas == 1:
            return
        parts = [part for part in self._place.parts if self._place.steps_here(part) or self._place.is_synchronous]
        marks = [_mark(learnt_by(part.optimizer)) for part in parts]
        both = self._place.process_groups.largest([*marks, *(-mark for mark in marks)], self._place.replica_group)
        least = both[len(parts) :]
        self._share([part for part, most, less in zip(parts, both, least, strict=False) if most != -less])

    # --- To the server and back ---------------------------------------------------------------------------------------

    def seed(self) -> None:
        """The recorder hands weights and optimizer states to the server; every rank's own state is given up."""
        if self._place.hands_over:
            parts = [
                {
                    "optimizer": None if self._place.steps_here(part) else part.replica.described(),
                    "weights": dict(zip(part.replica.parameters, part.replica.weights(), strict=True)),
                    "clock": part.replica.clock,
                    "method": None if state is None else part.replica.part_of(state),
                    "head": _describe_head(part),
                    "room": ParameterGroups.room_of(part),
                }
                for part, state in zip_longest(self._place.parts, self._resumed.server)
            ]
            self._channel.store.seed(parts)
        for part in self._place.parts:
            for parameter in () if self._place.steps_here(part) else part.replica.ordered:
                part.optimizer.state.pop(parameter, None)
        self._place.barrier()

    def keep(self) -> None:
        """What the server knows besides weights is handed back to it by the next `seed`."""
        if self._place.hands_over:
            snapshot = self._channel.store.snapshot()
            self._give_back(snapshot)
            self._resumed = Saved(server=[part["method"] for part in snapshot.parts])
            for part, clock in zip(self._place.parts, snapshot.cut.clocks, strict=True):
                part.replica.clock = clock

    def _take_back_everywhere(self) -> tuple[tuple[int, int], ...]:
        """As `take_back`, on all ranks, which are one group; its first replica asks the servers for all."""
        if self._place.share is None:
            return self.take_back()
        mine = self.take_back() if self._place.speaks else ()
        self._share([part for part in self._place.parts if not self._place.steps_here(part)])
        spans = self._channel.members.broadcast_bytes(msgspec.msgpack.encode(mine))
        return msgspec.msgpack.decode(spans, type=tuple[tuple[int, int], ...])

    def take_back(self) -> tuple[tuple[int, int], ...]:
        """This rank's optimizers get the server's state, to step for themselves or to be saved.

        Returns:
            The ranges of the epoch that are trained.
        """
        snapshot = self._channel.store.snapshot(with_state=not all(map(self._place.steps_here, self._place.parts)))
        self._give_back(snapshot)
        return snapshot.cut.trained

    def gather_group_state(self) -> None:
        """At a synchronization point, on every rank: what each group alone knows is part of the next snapshot."""
        if self._place.speaks:
            states = [
                {**part.replica.own_state(whole=self._place.steps_here(part)), **self._residuals.saved(index)}
                for index, part in enumerate(self._place.parts)
            ]
            try:
                packed = pack(states)
            except MalformedMessage as error:
                raise UnsupportedError(
                    f"a checkpoint of several groups cannot hold what an optimizer keeps in its state: {error}; save"
                    " none, or use groups=1"
                ) from error
            self._channel.store.store_group_state(*packed)
        self._place.barrier()

    def _give_back(self, snapshot: ServerSnapshot) -> None:
        for optimizer in dict.fromkeys(part.optimizer for part in self._place.parts):
            if any(part.optimizer is optimizer and not self._place.steps_here(part) for part in self._place.parts):
                load_state(optimizer, self.whole(optimizer, snapshot.parts))

    def gathered(self, snapshot: ServerSnapshot) -> ServerSnapshot:
        """Put together, on the recorder's CPU, what the recorder's group has of a snapshot, but for the weights.

        Args:
            snapshot: `sharded`. All members of the group call it.

        Returns:
            Elsewhere one with None in the place of what is sharded.
        """
        parts = [
            {**theirs, "weights": dict.fromkeys(theirs["weights"]), "method": part.replica.sharded(theirs["method"])}
            for part, theirs in zip(self._place.parts, snapshot.parts, strict=True)
        ]
        groups = {
            group: [part.replica.sharded(in_order(tree)) for part, tree in zip(self._place.parts, trees, strict=True)]
            for group, trees in sorted(snapshot.groups.items())
        }
        keeps = self._place.is_leader
        return ServerSnapshot(snapshot.cut, whole(in_order(parts), keeps), whole(groups, keeps))

    def sharded(self, snapshot: ServerSnapshot) -> ServerSnapshot:
        """A snapshot of what this member of the recorder's group has, its parameters' tensors sharded as they are."""
        parts = []
        for part, theirs in zip(self._place.parts, snapshot.parts, strict=True):
            weights = part.replica.sharded(list(theirs["weights"].values()))
            state = part.replica.sharded(in_order(theirs["state"]))
            parts.append({**theirs, "weights": dict(zip(theirs["weights"], weights, strict=True)), "state": state})
        return ServerSnapshot(snapshot.cut, parts, snapshot.groups)

    def whole(self, optimizer: Optimizer, parts: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
        """An optimizer's state as in its ``state_dict``: the server's, and this rank's own for what steps here.

        Args:
            optimizer: one that was attached.
            parts: of a snapshot.
        """
        state = dict(optimizer.state_dict()["state"])
        wholes = {parameter: place for place, parameter in enumerate(held_by(optimizer))}
        for part, theirs in zip(self._place.parts, parts, strict=True):
            if part.optimizer is optimizer and not self._place.steps_here(part):
                for place, parameter in enumerate(part.replica.ordered):
                    if (whole := wholes.get(parameter)) is not None:
                        state.pop(whole, None)
                        if place in theirs["state"]:
                            state[whole] = theirs["state"][place]
        return state

    def _share(self, parts: Sequence[Part]) -> None:
        """Members of a new group may come from different ones: they take the optimizer state of its first replica."""
        if self._place.replicas == 1:
            return
        for part in parts:
            if self._place.speaks:
                self._channel.members.broadcast_tree_to_replicas(parts_of(learnt_by(part.optimizer)))
            else:
                load_state(part.optimizer, self._channel.members.broadcast_tree_to_replicas({}))


class Residuals:
    """Keeps what the senders of this rank's pushes remember, so that none of it is lost or sent twice.

    Rule 1: only a leader owes anything, for it alone sends; or where a model is sharded, the ranks that speak for a
    share each. So what they owe is counted once.
    Rule 2: a residual outlives its group. When other groups are formed, each new leader owes what the ranks of its
    group owed together, or those of them that have the same share; while one group trains, which sends nothing, it goes
    on owing it.
    Rule 3: what is dropped is said: what is left when training ends, and what a checkpoint holds and this run cannot
    restore. A rank that dies takes its residual along, as it does the gradient that it was computing.

    Args:
        place: this rank's, in the run.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def saved(self, index: int) -> dict[str, Any]:
        """What the leader's sender of one optimizer remembers, for a checkpoint; nothing if its format remembers none.

        Args:
            index: number of the optimizer.
        """
        if not self._place.core.wire_format.pushes.is_stateful:
            return {}
        state = dict(self._place.core.sender_state(index))
        return {"sender": {"format": to_wire(self._place.core.wire_format), "state": state}}

    def resume(self, index: int, saved: Mapping[str, Any]) -> None:
        """Goes on from `saved`, when training begins.

        Args:
            index: number of the optimizer.
            saved: what the group knew by itself when the checkpoint was saved.
        """
        sender = saved.get("sender")
        if sender is None or not self._place.speaks:
            return
        if sender["format"] == to_wire(self._place.core.wire_format):
            replica = self._place.parts[index].replica
            self._place.core.load_sender_state(index, replica.on_device(sender["state"]))
        elif _largest(sender["state"]):
            _log.warning(
                "the checkpoint holds a residual that group %d had not pushed yet in the wire format %s; it is not"
                " restored, because this run has another wire format",
                self._place.group,
                sender["format"]["name"],
            )

    def leave_out(self, states: Mapping[Any, Any]) -> None:
        """What groups knew by themselves when a checkpoint was saved is not restored.

        Args:
            states: of each group, what it knew for each optimizer.
        """
        senders = [each["sender"]["state"] for state in states.values() for each in state if "sender" in each]
        owed = max(map(_largest, senders), default=0.0)
        is_unread = any(isinstance(each, Mapping) for sender in senders for each in sender.get(RESIDUAL, ()))
        if self._place.is_recorder and (owed or is_unread):
            _log.warning(
                "the checkpoint holds residuals that its groups had not pushed yet%s; they are not restored, because"
                " this run has other groups, another method or other parameters",
                f" (largest number: {owed:.3g})" if owed else "",  # those in a folder were not read
            )

    def carry_over(self) -> None:
        """Other groups were formed, of the same ranks and perhaps fewer. On every rank of them."""
        if not self._place.core.wire_format.pushes.is_stateful:
            return
        for index in range(len(self._place.parts)):
            total = self._total(index)
            state = {RESIDUAL: total} if self._place.speaks and any(each is not None for each in total) else {}
            self._place.core.load_sender_state(index, state)

    def warn_of_remainder(self) -> None:
        """Training ends: what is left is not in the weights."""
        for index in range(len(self._place.parts)):
            if self._place.speaks and (largest := _largest(self._place.core.sender_state(index))):
                _log.warning(
                    "training has ended, and group %d has not pushed the residual of optimizer %d; its largest number:"
                    " %.3g",
                    self._place.group,
                    index,
                    largest,
                )

    def _total(self, index: int) -> list[Tensor | None]:
        """What the ranks of this group with the same share owe together: one tensor or None for each parameter."""
        place = self._place
        parameters = place.parts[index].replica.ordered
        own: list[Tensor | None] = list(place.core.sender_state(index).get(RESIDUAL, ()))
        own += [None] * (len(parameters) - len(own))
        if place.replicas == 1:
            return own
        owes = torch.tensor([each is not None for each in own], dtype=torch.int64, device=place.device)
        dist.all_reduce(owes, group=place.replica_group)
        total: list[Tensor | None] = []
        for mine, parameter, there in zip(own, parameters, owes.tolist(), strict=True):
            wide = torch.promote_types(parameter.dtype, torch.float32)  # the same on all ranks, whatever a format keeps
            each = torch.zeros_like(here(parameter), dtype=wide, memory_format=torch.contiguous_format)
            if mine is not None:
                each += mine.to(each)
            if there:
                dist.all_reduce(torch.view_as_real(each) if each.is_complex() else each, group=place.replica_group)
            total.append(each if there else None)
        return total


def _mark(state: Mapping[Any, Any]) -> int:
    """Return a number by which ranks tell whether they have the same optimizer state."""
    tensors = [each for each in tree_leaves(state) if isinstance(each, Tensor)]
    return zlib.crc32(str([fingerprint(each, _SAMPLED) for each in tensors]).encode())


def _describe_head(part: Part) -> dict[str, Any] | None:
    if part.head is None:
        return None
    name, module = part.head
    seed = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(torch.initial_seed())))
    return {"name": name, "module": describe_module(module), "seed": seed}


def _largest(state: Mapping[str, Any]) -> float:
    """The largest magnitude of what has not been sent, as far as it was read."""
    residual = [each for each in state.get(RESIDUAL, ()) if isinstance(each, Tensor) and each.numel()]
    return max((float(each.abs().max()) for each in residual), default=0.0)
