"""Optimizer state and weights on their way: from the ranks to the server, back again, and into a resumed run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_omni.methods.master import describe
from lightning_omni.methods.modules import describe_module
from lightning_omni.optimizer.channel import Channel, Snapshot
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.replica import Part
from lightning_omni.optimizer.residuals import Residuals
from lightning_omni.optimizer.run_state.saved import Saved
from lightning_omni.optimizer.structure import Structures
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import Packed, pack, unpack


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
        has_head = any(part.head is not None for part in self._place.parts)
        same = (
            saved.method == m.method_to_wire(self._place.method)
            and saved.groups == len(self._place.topology.alive)
            and len(saved.server) == len(self._place.parts)
            and (not has_head if saved.parameters is None else saved.parameters == self.names)
        )
        self._resumed = saved if same else Saved()
        if not same:
            self._residuals.leave_out(saved.states)

    @property
    def names(self) -> list[list[str]]:
        """The parameters of each part, by which a checkpoint tells whether its parts are these."""
        return [list(part.replica.parameters) for part in self._place.parts]

    @property
    def of_this_group(self) -> list[Any]:
        """What this group knew by itself when the checkpoint was saved, for each part."""
        states = self._resumed.states
        in_order = [states[group] for group in sorted(states)]  # numbers may have had gaps, where groups had died
        return list(in_order[self._place.group]) if self._place.group < len(in_order) else []

    def forget(self) -> None:
        """Training has begun: what was to be resumed is."""
        self._resumed = Saved()

    # --- Groups are formed -------------------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """Training begins in several groups: the server gets the run's state, each group what it alone knew."""
        self.seed()
        for index, (part, state) in enumerate(zip(self._place.parts, self.of_this_group, strict=False)):
            part.replica.resume(state)
            self._residuals.resume(index, state)

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
            self.share()
        return self.take_back() if self._place.is_synchronous else ()

    # --- To the server and back ---------------------------------------------------------------------------------------

    def seed(self) -> None:
        """The recorder hands weights and optimizer states to the server; every rank's own state is given up."""
        if self._place.is_recorder:
            parts = [
                {
                    "optimizer": None if self._place.steps_here(part) else _describe(part),
                    "weights": {name: p.detach() for name, p in part.replica.parameters.items()},
                    "clock": part.replica.clock,
                    "method": state,
                    "head": _describe_head(part),
                    "room": Structures.room_of(part),
                }
                for part, state in zip_longest(self._place.parts, self._resumed.server)
            ]
            packed, buffer = pack({"parts": parts})
            self._channel.ask(m.Seed(packed=packed, nbytes=buffer.numel()), m.Seeded, buffer)
        for part in self._place.parts:
            for parameter in () if self._place.steps_here(part) else part.replica.ordered:
                part.optimizer.state.pop(parameter, None)
        self._place.barrier()

    def keep(self) -> None:
        """What the server knows besides weights is handed back to it by the next `seed`."""
        if self._place.is_recorder:
            snapshot = self._channel.snapshot()
            self._give_back(snapshot)
            self._resumed = Saved(server=[part["method"] for part in snapshot.parts])
            for part, clock in zip(self._place.parts, snapshot.cut.clocks, strict=True):
                part.replica.clock = clock

    def take_back(self) -> tuple[tuple[int, int], ...]:
        """This rank's optimizers get the server's state, to step for themselves or to be saved.

        Returns:
            The ranges of the epoch that are trained.
        """
        snapshot = self._channel.snapshot(with_state=not all(map(self._place.steps_here, self._place.parts)))
        self._give_back(snapshot)
        return snapshot.cut.trained

    def gather_group_state(self) -> None:
        """At a synchronization point, on every rank: what each group alone knows is part of the next snapshot."""
        if self._place.is_leader:
            states = [
                {**part.replica.own_state(whole=self._place.steps_here(part)), **self._residuals.saved(index)}
                for index, part in enumerate(self._place.parts)
            ]
            packed, buffer = pack(states)
            self._channel.ask(m.GroupState(packed=packed, nbytes=buffer.numel()), m.GroupStateStored, buffer)
        self._place.barrier()

    def _give_back(self, snapshot: Snapshot) -> None:
        for optimizer in dict.fromkeys(part.optimizer for part in self._place.parts):
            if any(part.optimizer is optimizer and not self._place.steps_here(part) for part in self._place.parts):
                plain = optimizer.state_dict()
                optimizer.load_state_dict({**plain, "state": self.whole(optimizer, snapshot.parts)})

    def whole(self, optimizer: Optimizer, parts: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
        """An optimizer's state as in its ``state_dict``: the server's, and this rank's own for what steps here.

        Args:
            optimizer: one that was attached.
            parts: of a snapshot.
        """
        state = dict(optimizer.state_dict()["state"])
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        wholes = {parameter: place for place, parameter in enumerate(held)}
        for part, theirs in zip(self._place.parts, parts, strict=True):
            if part.optimizer is optimizer and not self._place.steps_here(part):
                for place, parameter in enumerate(part.replica.ordered):
                    if (whole := wholes.get(parameter)) is not None:
                        state.pop(whole, None)
                        if place in theirs["state"]:
                            state[whole] = theirs["state"][place]
        return state

    def share(self) -> None:
        """Members of a new group may come from different ones: they take up their leader's optimizer state."""
        if len(self._place.members) == 1:
            return
        for part in (part for part in self._place.parts if self._place.steps_here(part)):
            packed, buffer = pack(part.optimizer.state_dict()["state"] if self._place.is_leader else {})
            head = msgspec.msgpack.encode(packed)
            sizes = torch.tensor([len(head), buffer.numel()], device=self._place.device)
            dist.broadcast(sizes, src=self._channel.source(), group=self._place.compute_group)
            flat = torch.empty(int(sizes.sum()), dtype=torch.uint8)
            if self._place.is_leader:
                flat.copy_(torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), buffer]))
            self._channel.broadcast_in_group(flat)
            if not self._place.is_leader:
                cut = int(sizes[0])
                theirs = msgspec.msgpack.decode(flat[:cut].numpy().tobytes(), type=Packed)
                state = unpack(theirs, flat[cut:].clone())
                part.optimizer.load_state_dict({**part.optimizer.state_dict(), "state": state})


def _describe(part: Part) -> dict[str, Any]:
    return describe(part.optimizer, {p: name for name, p in part.replica.parameters.items()})


def _describe_head(part: Part) -> dict[str, Any] | None:
    if part.head is None:
        return None
    name, module = part.head
    seed = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(torch.initial_seed())))
    return {"name": name, "module": describe_module(module), "seed": seed}
