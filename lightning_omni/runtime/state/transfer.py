"""Transfers of optimizer state, weights and residuals: to the server and back, into a resumed run and new groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_omni.errors import MalformedMessage, UnsupportedError
from lightning_omni.methods.model.modules import describe_module
from lightning_omni.methods.model.replica import optimizer_state_of
from lightning_omni.methods.model.server_optimizer import held_by, hyperparameters_of, set_hyperparameter
from lightning_omni.runtime.model.parameter_groups import ParameterGroups
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.model.sharded import here, in_order, load_state, parts_of, whole
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.server_exchange import ServerExchange, ServerSnapshot
from lightning_omni.runtime.state.checkpoint import RunCheckpoint
from lightning_omni.runtime.state.served_state import ServedState, is_state_lost
from lightning_omni.topology import RECORDER
from lightning_omni.wire.codec import pack
from lightning_omni.wire.formats.base import RESIDUAL, to_wire

_log = logging.getLogger(__name__)


class StateTransfer:
    """The transfer of optimizer state, so that none is lost or kept twice.

    Rule 1: the state of an optimizer that steps at the server is there, and on no rank; with one group it is on the
    ranks.
    Rule 2: an optimizer that steps on the ranks has its state there, the same on all members of a group.
    """

    def __init__(self, parallel: ParallelState, exchange: ServerExchange, residuals: Residuals) -> None:
        self._parallel, self._exchange, self._residuals = parallel, exchange, residuals
        self._resumed = self._saved = RunCheckpoint()  # what was saved waits until the groups of the first batch form

    # --- A resumed run -----------------------------------------------------------------------------------------------

    def resume(self, saved: RunCheckpoint) -> None:
        """Continue from a checkpoint, when training begins.

        The states of server and groups are used only with the same method, number of groups and parameters; the
        server's with any number of groups if the method sums gradients.
        """
        for part, clock in zip(self._parallel.parts, saved.cut.clocks, strict=False):
            part.replica.clock = clock
        names = [list(part.replica.parameters) for part in self._parallel.parts]
        alike = (
            saved.method == to_wire(self._parallel.method)
            and len(saved.server) == len(self._parallel.parts)
            and saved.parameters == names
        )
        same = alike and saved.groups == len(self._parallel.topology.alive)
        self._saved = RunCheckpoint() if same else saved
        if not same:
            saved = replace(saved, states={}) if alike and self._parallel.method.sums_gradients else RunCheckpoint()
        self._resumed = self._filled(saved)

    def _filled(self, saved: RunCheckpoint) -> RunCheckpoint:
        """Return a saved state with its folder's tensors: the server's, and those of this group."""
        if saved.folder is None:
            return saved
        folder, parallel = saved.folder, self._parallel

        def filled(trees: Sequence[Any]) -> list[Any]:
            pairs = zip(parallel.parts, trees, strict=False)
            return [folder.filled(tree, part.replica.ordered, parallel.compute_group) for part, tree in pairs]

        own = sorted(saved.states)[parallel.group : parallel.group + 1]
        states = {number: filled(trees) if number in own else trees for number, trees in saved.states.items()}
        return replace(saved, server=filled(saved.server), states=states)

    def forget(self) -> None:
        self._resumed = RunCheckpoint()

    def forget_saved(self) -> None:
        self._residuals.leave_out(self._saved.states)
        self._saved = RunCheckpoint()

    # --- Groups are formed -------------------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """Send the run's state to the server, and restore this group's own, when several groups begin to train."""
        self.seed()
        states, group = self._resumed.states, self._parallel.group
        in_order = [states[number] for number in sorted(states)]  # numbers may have had gaps, where groups had died
        mine = in_order[group] if group < len(in_order) else ()
        for index, (part, state) in enumerate(zip(self._parallel.parts, mine, strict=False)):
            own = part.replica.part_of(dict(state))
            part.replica.resume(own)
            self._residuals.resume(index, own)

    def hand_over(self, was_synchronous: bool) -> tuple[tuple[int, int], ...]:
        """Move each piece of the state to its new holder, when other groups are formed. All of their ranks call it.

        With one group from here on, return the trained ranges of the epoch.
        """
        for part in self._parallel.parts:
            part.replica.abandon()  # memory, and a group's own weights
        self._residuals.carry_over()
        if was_synchronous:
            if self._saved.groups > 1:  # a tuner forms them before the first batch
                self.resume(self._saved)
            self.hand_out()
            self.forget()
            return ()
        if self._parallel.steps_at_worker:
            self._share(self._parallel.parts)
        if not self._parallel.is_synchronous:
            return ()
        for part in self._parallel.parts:
            part.release()
        mine = self.take_back_in_groups()
        spans = self._exchange.members.broadcast_bytes(msgspec.msgpack.encode(mine))
        return msgspec.msgpack.decode(spans, type=tuple[tuple[int, int], ...])

    def agree(self) -> None:
        """Load the optimizer state of a group's first replica into its others, as a loop begins.

        All ranks call it; it loads none before several groups have trained, or where the server has the state.
        """
        if not self._parallel.process_groups.had_several:
            return
        self._parallel.make_groups()
        if self._parallel.steps_at_worker or self._parallel.is_synchronous:
            self._share(self._parallel.parts)

    # --- To the server and back ---------------------------------------------------------------------------------------

    def seed(self) -> None:
        """Send the server the recorder's weights, and move the states of its optimizers to it. All ranks call it."""
        if self._parallel.owns_state:
            self._warn_of_lost_state()
            parts = [
                {
                    "optimizer": None if self._parallel.steps_at_worker else part.replica.described(),
                    "weights": dict(zip(part.replica.parameters, part.replica.weights(), strict=True)),
                    "clock": part.replica.clock,
                    "method": None if state is None else part.replica.part_of(state),
                    "head": _describe_head(part),
                    "room": ParameterGroups.room_of(part),
                }
                for part, state in zip_longest(self._parallel.parts, self._resumed.server)
            ]
            self._exchange.store.seed(parts)
        self.leave_to_server()
        self._parallel.barrier()

    def leave_to_server(self) -> None:
        """Clear the states of optimizers that step at the server, and follow other code's writes to them."""
        for part in self._parallel.parts:
            if not self._parallel.steps_at_worker:
                for parameter in part.optimizer.state.keys() & set(part.replica.ordered):
                    del part.optimizer.state[parameter]
                ServedState.install(part.optimizer)

    def _warn_of_lost_state(self) -> None:
        lost = [part.optimizer for part in self._parallel.parts if is_state_lost(part.optimizer)]
        if lost and self._parallel.is_recorder:
            _log.warning(
                "%s begins without the state that it had in a loop that has failed: the parameter server of that loop"
                " had it; load that of a checkpoint before world.training()",
                type(lost[0]).__name__,
            )

    def keep(self) -> None:
        """Keep the server's state besides weights, for the next `seed`."""
        if self._parallel.owns_state:
            snapshot = self._exchange.store.snapshot()
            self._give_back(snapshot)
            self._resumed = RunCheckpoint(server=[part["method"] for part in snapshot.parts])
            for part, clock in zip(self._parallel.parts, snapshot.cut.clocks, strict=True):
                part.replica.clock = clock

    def bring_to_all(self) -> None:
        """Load one state and the same hyperparameters of each optimizer on all live ranks, where several groups end.

        States are the server's or, where optimizers step on the ranks, rank 0's, as hyperparameters are; groups that
        have joined on their own keep all but the server's. All ranks call it, at a synchronization point.
        """
        parallel = self._parallel
        if parallel.registration is None:
            local = parallel.parts if parallel.steps_at_worker else []
            for optimizer in dict.fromkeys(part.optimizer for part in local):
                self._take_from_recorder(optimizer)
            self.share_hyperparameters()
        if parallel.parts and not parallel.steps_at_worker:
            self.take_back_in_groups()

    def _take_from_recorder(self, optimizer: Optimizer) -> None:
        """Load the recorder's state of an optimizer that steps on the ranks, share by share. All ranks call it."""
        parallel = self._parallel
        first = parallel.holders.members(parallel.holders.group_of(RECORDER))
        mine = parallel.holders.members(parallel.holders.group_of(parallel.rank)).index(parallel.rank)
        state: dict[Any, Any] = {}
        for share, rank in enumerate(first):
            tree = parts_of(optimizer_state_of(optimizer)) if rank == parallel.rank else {}
            found, refused = self._exchange.members.broadcast_tree_to_all(tree, rank)
            if refused:
                if parallel.is_recorder:
                    _log.warning(
                        "each group keeps its own state of %s, which cannot be sent to others: %s; plain"
                        " DistributedDataParallel with it would train other weights on each rank",
                        type(optimizer).__name__,
                        refused,
                    )
                return
            state = found if share == mine else state
        # Members of a group load together, for a sharded state takes collectives among them. The recorder's group loads
        # its own, too, since torch converts what it loads.
        load_state(optimizer, state)

    def share_hyperparameters(self) -> None:
        """Set the recorder's hyperparameters (learning rates, ...) on all ranks, which call it; warn if any differ."""
        parallel = self._parallel
        optimizers = list(dict.fromkeys(part.optimizer for part in parallel.parts))
        mine = [hyperparameters_of(optimizer, are_needed=False) for optimizer in optimizers]
        theirs = parallel.broadcast_from_recorder(mine)
        has_changed = False
        for optimizer, own, recorded in zip(optimizers, mine, theirs, strict=False):
            for group, before, after in zip(optimizer.param_groups, own, recorded, strict=False):
                differing = [name for name in after.keys() & before.keys() if repr(before[name]) != repr(after[name])]
                has_changed = has_changed or bool(differing)
                for name in differing:
                    set_hyperparameter(group, name, after[name])
        if any(parallel.all_reduce_max([has_changed])) and parallel.is_recorder:
            _log.warning(
                "the groups' optimizers had different learning rates or other hyperparameters: they were made so, or"
                " schedules have counted the steps of their own group; all ranks have those of rank 0 now: load rank"
                " 0's schedule.state_dict() on all ranks, too, before they train on"
            )

    def take_back_in_groups(self) -> tuple[tuple[int, int], ...]:
        """Call `take_back` on a group's first replica, and load its state into the others. All ranks call it.

        The first replica alone returns the trained ranges of the epoch.
        """
        mine = self.take_back() if self._parallel.exchanges else ()
        self._share([] if self._parallel.steps_at_worker else self._parallel.parts)
        return mine

    def take_back(self) -> tuple[tuple[int, int], ...]:
        """Load the server's state, if any, into this rank's optimizers; return the trained ranges of the epoch."""
        snapshot = self._exchange.store.snapshot(with_state=not self._parallel.steps_at_worker)
        self._give_back(snapshot)
        return snapshot.cut.trained

    def gather_group_state(self) -> None:
        """Store each group's own state for the next snapshot. All ranks call it, at a synchronization point.

        Raises:
            UnsupportedError: an optimizer's state cannot be encoded.
        """
        if self._parallel.exchanges:
            states = [
                {**part.replica.own_state(whole=self._parallel.steps_at_worker), **self._residuals.saved(index)}
                for index, part in enumerate(self._parallel.parts)
            ]
            try:
                packed = pack(states)
            except MalformedMessage as error:
                raise UnsupportedError(
                    f"a checkpoint of several groups cannot hold what an optimizer keeps in its state: {error}; save"
                    " none, or use groups=1"
                ) from error
            self._exchange.store.store_group_state(*packed)
        self._parallel.barrier()

    def _give_back(self, snapshot: ServerSnapshot) -> None:
        if not self._parallel.steps_at_worker:
            for optimizer in dict.fromkeys(part.optimizer for part in self._parallel.parts):
                load_state(optimizer, self.whole(optimizer, snapshot.parts))

    def gathered(self, snapshot: ServerSnapshot) -> ServerSnapshot:
        """Return a snapshot from `sharded`, without weights, merged on the recorder's CPU.

        All ranks of its replica call it; on the others None replaces sharded tensors.
        """
        parts = [
            {**theirs, "weights": dict.fromkeys(theirs["weights"]), "method": part.replica.sharded(theirs["method"])}
            for part, theirs in zip(self._parallel.parts, snapshot.parts, strict=True)
        ]
        groups = {
            group: [
                part.replica.sharded(in_order(tree)) for part, tree in zip(self._parallel.parts, trees, strict=True)
            ]
            for group, trees in sorted(snapshot.groups.items())
        }
        keeps = self._parallel.is_leader
        return ServerSnapshot(snapshot.cut, whole(in_order(parts), keeps), whole(groups, keeps))

    def sharded(self, snapshot: ServerSnapshot) -> ServerSnapshot:
        """Return a snapshot of this rank of the recorder's replica, weights and state sharded as their parameters."""
        parts = []
        for part, theirs in zip(self._parallel.parts, snapshot.parts, strict=True):
            weights = part.replica.sharded(list(theirs["weights"].values()))
            state = part.replica.sharded(in_order(theirs["state"]))
            parts.append({**theirs, "weights": dict(zip(theirs["weights"], weights, strict=True)), "state": state})
        return ServerSnapshot(snapshot.cut, parts, snapshot.groups)

    def whole(self, optimizer: Optimizer, parts: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
        """Return an optimizer's state as in its ``state_dict``: the server's, or this rank's for parts stepped here."""
        state = dict(optimizer.state_dict()["state"])
        wholes = {parameter: index for index, parameter in enumerate(held_by(optimizer))}
        for part, theirs in zip(self._parallel.parts, parts, strict=True):
            if part.optimizer is optimizer and not self._parallel.steps_at_worker:
                for index, parameter in enumerate(part.replica.ordered):
                    if (whole := wholes.get(parameter)) is not None:
                        state.pop(whole, None)
                        if index in theirs["state"]:
                            state[whole] = theirs["state"][index]
        return state

    def _share(self, parts: Sequence[Part]) -> None:
        if self._parallel.replicas == 1:
            return
        for part in parts:
            exchanges = self._parallel.exchanges
            tree = parts_of(optimizer_state_of(part.optimizer)) if exchanges else {}
            found, refused = self._exchange.members.broadcast_tree_to_replicas(tree)
            if refused:
                raise UnsupportedError(
                    "the ranks of a new group need one state, and a message cannot hold what an optimizer keeps in its"
                    f" state ({type(part.optimizer).__name__}: {refused}); leave out regroup() and OmniTuner,"
                    " or use another optimizer"
                )
            if not exchanges:
                load_state(part.optimizer, found)


class Residuals:
    """The memory of the senders of this rank's pushes, of which nothing may be lost or sent twice.

    Rule 1: only a leader has residuals; where a model is sharded, each rank that exchanges a share.
    Rule 2: a residual outlives its group. When other groups are formed, each new leader gets the sum of the residuals
    of its group's ranks (with the same share); while one group trains, which sends nothing, it keeps them.
    Rule 3: the loss of a residual is logged: of the remainder when training ends, and of one in a checkpoint that this
    run cannot restore. A rank that dies takes its residual along.
    """

    def __init__(self, parallel: ParallelState) -> None:
        self._parallel = parallel

    def saved(self, index: int) -> dict[str, Any]:
        """Return this rank's sender memory of one optimizer, for a checkpoint; empty if the wire format has none."""
        if not self._parallel.core.wire_format.pushes.is_stateful:
            return {}
        state = dict(self._parallel.core.sender_state(index))
        return {"sender": {"format": to_wire(self._parallel.core.wire_format.pushes), "state": state}}

    def resume(self, index: int, saved: Mapping[str, Any]) -> None:
        """Restore the sender's memory from the group's own state in a checkpoint, when training begins.

        A residual of another wire format is not restored; the user is warned.
        """
        sender = saved.get("sender")
        if sender is None or not self._parallel.exchanges:
            return
        if sender["format"] == to_wire(self._parallel.core.wire_format.pushes):
            replica = self._parallel.parts[index].replica
            self._parallel.core.load_sender_state(index, replica.on_device(sender["state"]))
        elif _largest(sender["state"]):
            _log.warning(
                "the checkpoint holds a residual that group %d had not pushed yet in the wire format %s; it is not"
                " restored, because this run has another wire format",
                self._parallel.group,
                sender["format"]["name"],
            )

    def leave_out(self, states: Mapping[Any, Any]) -> None:
        senders = [each["sender"]["state"] for state in states.values() for each in state if "sender" in each]
        owed = max(map(_largest, senders), default=0.0)
        is_unread = any(isinstance(each, Mapping) for sender in senders for each in sender.get(RESIDUAL, ()))
        if self._parallel.is_recorder and (owed or is_unread):
            _log.warning(
                "the checkpoint holds residuals that its groups had not pushed yet%s; they are not restored, because"
                " this run has other groups, another method or other parameters",
                f" (largest number: {owed:.3g})" if owed else "",  # those in a folder were not read
            )

    def carry_over(self) -> None:
        """Sum the residuals inside each newly formed group. All its ranks call it."""
        if not self._parallel.core.wire_format.pushes.is_stateful:
            if self._parallel.exchanges:  # one group pushes nothing, and keeps them
                self.warn_of_remainder("groups push without error feedback from here on")
                self.forget()
            return
        for index in range(len(self._parallel.parts)):
            total = self._total(index)
            state = {RESIDUAL: total} if self._parallel.exchanges and any(each is not None for each in total) else {}
            self._parallel.core.load_sender_state(index, state)

    def forget(self) -> None:
        for index in range(len(self._parallel.parts)):
            self._parallel.core.load_sender_state(index, {})

    def warn_of_remainder(self, why: str = "training has ended") -> None:
        for index in range(len(self._parallel.parts)):
            if largest := _largest(self._parallel.core.sender_state(index)):
                _log.warning(
                    "%s, and group %d has not pushed the residual of optimizer %d; its largest number: %.3g",
                    why,
                    self._parallel.group,
                    index,
                    largest,
                )

    def _total(self, index: int) -> list[Tensor | None]:
        """Return the sum of residuals over this group's ranks with one share; None for a parameter without any."""
        parallel = self._parallel
        parameters = parallel.parts[index].replica.ordered
        own: list[Tensor | None] = list(parallel.core.sender_state(index).get(RESIDUAL, ()))
        own += [None] * (len(parameters) - len(own))
        if parallel.replicas == 1:
            return own
        owes = torch.tensor([each is not None for each in own], dtype=torch.int64, device=parallel.device)
        dist.all_reduce(owes, group=parallel.replica_group)
        total: list[Tensor | None] = []
        for mine, parameter, there in zip(own, parameters, owes.tolist(), strict=True):
            wide = torch.promote_types(parameter.dtype, torch.float32)  # the same on all ranks, whatever a format keeps
            each = torch.zeros_like(here(parameter), dtype=wide, memory_format=torch.contiguous_format)
            if mine is not None:
                each += mine.to(each)
            if there:
                dist.all_reduce(torch.view_as_real(each) if each.is_complex() else each, group=parallel.replica_group)
            total.append(each if there else None)
        return total


def _describe_head(part: Part) -> dict[str, Any] | None:
    if part.head is None:
        return None
    name, module = part.head
    seed = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(torch.initial_seed())))
    return {"name": name, "module": describe_module(module), "seed": seed}


def _largest(state: Mapping[str, Any]) -> float:
    residual = [each for each in state.get(RESIDUAL, ()) if isinstance(each, Tensor) and each.numel()]
    return max((float(each.abs().max()) for each in residual), default=0.0)
