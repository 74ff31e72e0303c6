"""What groups were given to push and have not sent yet, on its way: into a checkpoint, a resumed run, and new groups.

Rule 1: only a leader owes anything: it alone sends. So what it owes is counted once.
Rule 2: a residual outlives its group. When other groups are formed, each new leader owes what the ranks of its group
owed together; while one group trains, which sends nothing, its leader goes on owing it.
Rule 3: what is dropped is said: what is left when training ends, and what a checkpoint holds and this run cannot take
up. A rank that dies takes its residual along, as it does the gradient that it was computing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_omni.optimizer.place import Place
from lightning_omni.protocol.wire_format import RESIDUAL, to_wire

_log = logging.getLogger(__name__)


class Residuals:
    """Keeps what the senders of this rank's pushes remember, so that none of it is lost or sent twice.

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
        if not self._place.core.wire_format.is_stateful:
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
        if sender is None or not self._place.is_leader:
            return
        if sender["format"] == to_wire(self._place.core.wire_format):
            self._place.core.load_sender_state(index, sender["state"])
        elif _largest(sender["state"]):
            _log.warning(
                "the checkpoint holds what group %d had not pushed yet in the wire format %s; this run has another one,"
                " and it is left out",
                self._place.group,
                sender["format"]["name"],
            )

    def leave_out(self, states: Mapping[Any, Any]) -> None:
        """What groups knew by themselves when a checkpoint was saved is not taken up.

        Args:
            states: of each group, what it knew for each optimizer.
        """
        owed = [_largest(each["sender"]["state"]) for state in states.values() for each in state if "sender" in each]
        if self._place.is_recorder and any(owed):
            _log.warning(
                "the checkpoint holds what its groups had not pushed yet (the largest number of it is %.3g); this run"
                " has other groups, another method or other parameters, and it is left out",
                max(owed),
            )

    def carry_over(self) -> None:
        """Other groups were formed, of the same ranks and perhaps fewer. On every rank of them."""
        if not self._place.core.wire_format.is_stateful:
            return
        for index in range(len(self._place.parts)):
            total = self._total(index)
            state = {RESIDUAL: total} if self._place.is_leader and any(each is not None for each in total) else {}
            self._place.core.load_sender_state(index, state)

    def tell_of_rest(self) -> None:
        """Training ends: what is left is not in the weights."""
        for index in range(len(self._place.parts)):
            if self._place.is_leader and (largest := _largest(self._place.core.sender_state(index))):
                _log.warning(
                    "training has ended, and of what group %d was to push with optimizer %d a rest has not been sent;"
                    " its largest number is %.3g",
                    self._place.group,
                    index,
                    largest,
                )

    def _total(self, index: int) -> list[Tensor | None]:
        """What the ranks of this group owe together: one tensor or None for each parameter."""
        place = self._place
        parameters = place.parts[index].replica.ordered
        own: list[Tensor | None] = list(place.core.sender_state(index).get(RESIDUAL, ()))
        own += [None] * (len(parameters) - len(own))
        if len(place.members) == 1:
            return own
        owes = torch.tensor([each is not None for each in own], dtype=torch.int64, device=place.device)
        dist.all_reduce(owes, group=place.compute_group)
        total: list[Tensor | None] = []
        for mine, parameter, there in zip(own, parameters, owes.tolist(), strict=True):
            wide = torch.promote_types(parameter.dtype, torch.float32)  # the same on all ranks, whatever a format keeps
            each = torch.zeros_like(parameter.detach(), dtype=wide)
            if mine is not None:
                each += mine.to(each)
            if there:
                dist.all_reduce(torch.view_as_real(each) if each.is_complex() else each, group=place.compute_group)
            total.append(each if there else None)
        return total


def _largest(state: Mapping[str, Any]) -> float:
    """The largest magnitude of what has not been sent."""
    residual = [each for each in state.get(RESIDUAL, ()) if each is not None and each.numel()]
    return max((float(each.abs().max()) for each in residual), default=0.0)
