"""The checks of a push: it counts once and in order, it is finite, and its settings fit the optimizer; and counts.

Rule 1: pushes of an earlier incarnation of a group are refused: ``late``. So is a push that arrives after a later one.
Rule 2: the last push may arrive again, because its answer was lost. It is answered again and changes no weights.
Rule 3: a push whose predecessor is missing is refused: ``gap``. A server that continues from a save lacks the pushes
after it, so it accepts the first push of each group as the next one.
Rule 4: a push that contains a NaN or an infinity is refused and counted, never applied.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.methods.model.replica import all_finite
from lightning_omni.topology import GroupId
from lightning_omni.wire.layout import DTYPES, Layout
from lightning_omni.wire.messages import PushMessage


@dataclass
class Delivery:
    """The last push of a group to one optimizer that counted.

    Attributes:
        applied: whether it was merged, not refused.
        staleness: staleness in its answer; -1 before that, and if it was refused.
        is_answered: whether a repetition is answered.
    """

    sequence: int
    applied: bool = True
    staleness: int = -1
    is_answered: bool = False


class Deliveries:
    """The last pushes of all groups to all optimizers."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Delivery] = {}
        self._followed: set[tuple[int, int]] | None = None  # pairs with a push since the restart

    def check(self, group: int, identity: GroupId, message: PushMessage) -> Delivery | None:
        """Return the last delivery if this push repeats it; None if the push is the next one; refuse it otherwise."""
        if message.incarnation != identity.incarnation:
            raise Refused(
                "late",
                f"a push of group {GroupId(identity.name, message.incarnation)} came, and that name is now"
                f" {identity}: groups were formed, or it has joined again, since then",
            )
        last = self._last.get((group, message.optimizer))
        expected = last.sequence + 1 if last is not None else 1
        if message.sequence == expected:
            return None
        if last is not None and message.sequence == last.sequence:
            return last
        if message.sequence < expected:
            raise Refused(
                "late", f"push {message.sequence} of group {identity} came after push {expected - 1}; it has counted"
            )
        if self._followed is not None and (group, message.optimizer) not in self._followed:
            return None
        raise Refused("gap", f"push {message.sequence} of group {identity} came, and push {expected} has not")

    def count(self, group: int, message: PushMessage, applied: bool) -> None:
        key = group, message.optimizer
        if self._followed is not None:
            self._followed.add(key)
        self._last[key] = Delivery(message.sequence, applied, is_answered=not applied)

    def answer(self, group: int, optimizer: int, staleness: int) -> None:
        if (last := self._last.get((group, optimizer))) is not None:
            last.staleness, last.is_answered = staleness, True

    def forget(self, group: int) -> None:
        self._last = {key: last for key, last in self._last.items() if key[0] != group}

    def clear(self) -> None:
        self._last.clear()
        self._followed = None

    def state(self) -> list[Any]:
        return [(*key, last.sequence, last.applied, last.staleness) for key, last in self._last.items()]

    def load(self, state: list[Any]) -> None:
        # The method has merged unanswered pushes, which are answered when they are repeated.
        self._last = {
            (group, optimizer): Delivery(sequence, applied, staleness, is_answered=True)
            for group, optimizer, sequence, applied, staleness in state
        }
        self._followed = set()


# --- NaN and infinity -------------------------------------------------------------------------------------------------


def is_finite(layout: Layout, payload: Tensor) -> bool:
    return has_finite_sum(layout, payload) or all_finite(layout.views(payload))


def has_finite_sum(layout: Layout, payload: Tensor) -> bool:
    """Return whether a payload is certainly finite, by one sum over all tensors and the bytes between them."""
    if len(layout.dtypes) != 1:
        return False
    dtype = DTYPES[layout.dtypes[0]]
    whole = payload[: payload.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return bool(torch.isfinite(whole.sum()))


# --- Hyperparameters --------------------------------------------------------------------------------------------------


def check_settings(settings: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if name not in present or name == "params" or value is present[name]:
            continue
        if not _fits(value, present[name]):
            raise ProtocolError(f"the optimizer cannot take {name}={value!r}; it is {present[name]!r}")


def _fits(value: Any, present: Any) -> bool:
    if isinstance(present, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(present) and all(map(_fits, value, present))
    if isinstance(present, bool):  # fused optimizers accept no number for a boolean
        return isinstance(value, bool)
    if isinstance(present, (int, float)):
        return isinstance(value, (bool, int, float)) and (math.isfinite(value) or not math.isfinite(present))
    return present is None or value is None or type(value) is type(present)


# --- Counts -----------------------------------------------------------------------------------------------------------


class PushCounts:
    """The counts of merged pushes, and of refused ones: not finite, or declined by the method.

    Attributes:
        staleness: number of pushes with each staleness.
        by_group: for each group, the same since groups were formed.
        refused: refused pushes, and own weights left out of a mean, since the weights were uploaded.
        refused_in_row: each group's pushes and own weights that were not finite, since its last finite ones or declined
            push.
    """

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self.by_group: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.refused = 0
        self.refused_in_row: Counter[int] = Counter()

    def form(self) -> None:
        self.by_group.clear()
        self.refused_in_row.clear()

    def accept(self, group: int) -> None:
        self.refused_in_row[group] = 0

    def refuse(self, group: int) -> None:
        self.refused += 1
        self.refused_in_row[group] += 1

    def decline(self, group: int) -> None:
        self.refused += 1
        self.refused_in_row[group] = 0

    def merge(self, group: int, staleness: int) -> None:
        self.staleness[staleness] += 1
        self.by_group[group][staleness] += 1

    def state(self) -> dict[str, Any]:
        return {
            "staleness": dict(self.staleness),
            "by_group": {group: dict(counts) for group, counts in self.by_group.items()},
            "refused": self.refused,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.staleness, self.refused = Counter(state["staleness"]), int(state["refused"])
        self.by_group.update({group: Counter(counts) for group, counts in state["by_group"].items()})
