"""Decoupled DiLoCo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_omni.checks import check_number, check_whole, counted
from lightning_omni.errors import ConfigurationError, ProtocolError
from lightning_omni.methods.contract import Gradient, Push, Reply, ServerSide, Total, check_fragments, check_period
from lightning_omni.methods.diloco import check_outer, outer_sgd
from lightning_omni.methods.model.fragments import state_of, states_in
from lightning_omni.methods.model.replica import Replica
from lightning_omni.methods.overlap import LocalSteps

_MOST = 1e15
"""The largest weight of a group's part; sums of larger ones would overflow."""


class _Round:
    """The parts of one fragment that have arrived since its last merge.

    Attributes:
        total: sum of the changes, weighted by their groups' weights over ``unit``.
        unit: the weight that arrived first.
        came: groups whose parts are in the total.
        in_time: the groups among them that had read the last merge.
        merged_at: clock of the last merge.
        closes: end of the grace period; infinite while there is none.
    """

    def __init__(self) -> None:
        self.total, self.unit = Total(), 0.0
        self.came: set[int] = set()
        self.in_time: set[int] = set()
        self.merged_at = 0
        self.closes = math.inf


class _Syncer(ServerSide):
    """A server side that merges a fragment once a quorum sent it and the grace period is over, or all groups wait."""

    method: DecoupledDiLoCo

    def setup(self) -> None:
        self._rounds = [_Round() for _ in range(self.method.fragments)]
        self._waiting: dict[int, tuple[int, int]] = {}  # group: fragment that it waits for, and staleness
        self._pushed: dict[int, tuple[float, float]] = {}  # group: when it pushed last, seconds since the push before
        self._outer = [
            outer_sgd(self.master.fragment(number), self.method.outer_lr, self.method.outer_momentum)
            for number in range(self.method.fragments)
        ]

    @property
    def _quorum(self) -> int:
        quorum = self.method.quorum
        return len(self.groups) // 2 + 1 if quorum is None else quorum

    def declines(self, staleness: int) -> bool:
        return staleness < 0  # the change is from weights that this server, which went back, does not have

    def receive(self, push: Push) -> list[Reply]:
        weight = push.note or 1.0
        if not 1 <= weight <= _MOST:
            raise ProtocolError(f"the weight of a group's part is 1 to {_MOST:g}, not {weight:g}")
        number = push.fragment or 0
        current = self._rounds[number]
        current.unit = current.unit or weight
        current.total.add(push.tensors, weight / current.unit)
        current.came.add(push.group)
        self._waiting[push.group] = number, self.staleness_of(push)
        last, _ = self._pushed.get(push.group, (self.now, 0.0))
        self._pushed[push.group] = self.now, self.now - last
        if push.read_at >= current.merged_at:
            current.in_time.add(push.group)
        replies = self.released()
        if push.group not in current.in_time and push.group in self._waiting and current.closes == math.inf:
            replies.append(self._reply(push.group))  # its part counts in the next merge, and it need not wait for that
        return replies

    def resume(self, group: int) -> None:
        if group in self._pushed:  # the time that it was idle is no interval
            self._pushed[group] = self.now, self._pushed[group][1]
        super().resume(group)

    def released(self) -> list[Reply]:
        complete = waited_for = sorted({number for number, _ in self._waiting.values()})
        if not self.working <= self._waiting.keys():  # otherwise all groups wait, and no further push can arrive
            complete = [number for number in waited_for if self._is_complete(number, self._rounds[number])]
        replies = [reply for number in complete for reply in self._merge(number, self._rounds[number])]
        self.due = min((self._rounds[number].closes for number in waited_for), default=math.inf)
        return replies

    def expire(self) -> list[Reply]:
        return self.released()

    def _is_complete(self, number: int, current: _Round) -> bool:
        if current.closes == math.inf:  # a group that joins later does not raise the quorum of an open window
            if len(current.came if self._quorum == 1 else current.in_time) < self._quorum:
                return False
            current.closes = self.now + self.method.grace * self._slack(number)
        return self.now >= current.closes or self.working <= current.in_time | self._waiting.keys()

    def _slack(self, number: int) -> float:
        """Return the seconds until the first group that waits for a fragment needs it, from its push interval."""
        waiting = [self._pushed[group] for group, (fragment, _) in self._waiting.items() if fragment == number]
        return max(0.0, min((last + between for last, between in waiting), default=0.0) - self.now)

    def _merge(self, number: int, current: _Round) -> list[Reply]:
        merged = current.total.scaled(1 / current.total.weight)
        self.master.step(self._outer[number], merged, number)
        current.total.clear()
        current.unit = 0.0
        current.came.clear()
        current.in_time.clear()
        current.merged_at, current.closes = self.master.clock, math.inf
        waiting = [group for group, (fragment, _) in self._waiting.items() if fragment == number]
        return [self._reply(group) for group in waiting]

    def _reply(self, group: int) -> Reply:
        _, staleness = self._waiting.pop(group)
        return Reply(group, staleness)

    def evict(self, group: int) -> list[Reply]:
        # Its pushes stay in the totals, because their samples were trained.
        number, _ = self._waiting.pop(group, (None, 0))
        if number is not None and number not in {waited_for for waited_for, _ in self._waiting.values()}:
            self._rounds[number].closes = math.inf  # no group waits for this merge
        self._pushed.pop(group, None)
        return super().evict(group)

    def grow(self, start: int) -> None:
        for number, (current, outer) in enumerate(zip(self._rounds, self._outer, strict=True)):
            pieces, known = self.master.fragment(number), outer.param_groups[0]["params"]
            known.extend(pieces[len(known) :])
            current.total.reach(len(pieces))

    def state(self) -> dict[str, Any]:
        return state_of(
            [
                {
                    "total": current.total.state(),
                    "unit": current.unit,
                    # No list: one as long as the parameters would count as state per parameter.
                    "came": {group: group in current.in_time for group in sorted(current.came | current.in_time)},
                    "merged_at": current.merged_at,
                    "outer": outer.state_dict()["state"],
                }
                for current, outer in zip(self._rounds, self._outer, strict=True)
            ]
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        # The totals count in the next merges, because the weights that groups have read do not contain them.
        for current, outer, saved in zip(self._rounds, self._outer, states_in(state), strict=True):
            current.total.load_state(saved["total"])
            current.unit, current.merged_at = float(saved["unit"]), int(saved["merged_at"])
            current.came = set(saved["came"])
            current.in_time = {group for group, in_time in saved["came"].items() if in_time}
            outer.load_state_dict({**outer.state_dict(), "state": saved["outer"]})


class DecoupledDiLoCo(LocalSteps, frozen=True, kw_only=True, tag="decoupled_diloco"):
    r"""Decoupled DiLoCo: a merge waits for a quorum of the groups, not for all.

    The parameters are split into P fragments. Each group makes steps of the user's optimizer at its own speed; every
    H/P of them it sends the change of the next fragment, and continues computing. The server merges fragment p when K
    groups have sent it and a grace period for others is over, or when all groups wait:

    .. math:: w_m \propto n_m \frac{n_m}{s_m}, \quad \sum_m w_m = 1; \qquad
        \Delta_p = \sum_m w_m (\Theta_p - \theta_{m,p}), \quad m_p \leftarrow \beta m_p + \Delta_p, \quad
        \Theta_p \leftarrow \Theta_p - \eta_o (\Delta_p + \beta m_p)

    over the groups m that have sent it, which have trained :math:`n_m` samples in :math:`s_m` steps since they last
    sent this fragment. A group loads :math:`\Theta_p` after ``delay`` steps, and keeps its changes in between. The
    change of a late group counts in the next merge.

    Args:
        period: H, inner steps between two exchanges of the same fragment.
        fragments: P, of equal bytes at the start; divides ``period``.
        quorum: K, groups that a merge needs; None for more than half of the live groups.
        grace: how long a merge with a quorum waits for more groups, as a fraction (from 0 to less than 1) of the time
            until the first waiting group needs its answer.
        delay: steps after which the merged fragment is loaded; None for H/P, when the next one is sent. With 0 a group
            waits for the merge, as in `DiLoCo`.
        outer_lr: :math:`\eta_o`, above 0.
        outer_momentum: :math:`\beta`, from 0 to less than 1.

    Raises:
        ConfigurationError: arguments are out of range, or do not go together.

    Example:
        >>> DecoupledDiLoCo(period=24, fragments=4, quorum=2).outer_lr
        0.7

    References:
        Douillard et al. 2026, "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428 (algorithms 1
        and 2, equation 3). There a late fragment's change is taken from the server's present weights, and the change
        made while a fragment is under way is overwritten.
    """

    side = _Syncer
    keep_steps = True
    period: int = 48
    fragments: int = 4  # type: ignore[misc]
    quorum: int | None = None
    grace: float = 0.5
    delay: int | None = None  # type: ignore[misc]
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        check_period(self.period)
        check_outer(self.outer_lr, self.outer_momentum)
        check_fragments(self.fragments, self.period)
        if self.quorum is not None:
            check_whole("quorum", self.quorum, "the groups that a merge needs, 1 or more, or None", 1)
        check_number("grace", self.grace, "0 <= grace < 1; 0 waits for no group beyond the quorum", 0, below=1)
        if self.delay is not None:
            most = self.push_period
            check_whole("delay", self.delay, f"0 to period/fragments={most} steps, or None", 0, most)

    def check(self, groups: int) -> None:
        if self.quorum is not None and self.quorum > groups:
            instead, are = (f"1 to {groups}", "are") if groups > 1 else ("1", "is")
            raise ConfigurationError(
                f"quorum={self.quorum}, but there {are} only {counted(groups, 'group')}; pass {instead}, or None"
            )

    def changes_with_period(self, period: int) -> dict[str, Any]:
        changes = super().changes_with_period(period)
        if self.delay is not None:
            changes["delay"] = min(self.delay, period // changes.get("fragments", 1))
        return changes

    def count(self, replica: Replica, gradient: Gradient) -> None:
        memory = replica.memory
        for name, count in (("made", 1), ("samples", gradient.samples or 1)):
            memory[name] = [before + count for before in memory.get(name, [0] * self.fragments)]

    def note(self, replica: Replica, number: int, step_time: float) -> float:
        """Return the weight of a fragment's change, from the training since its last push, and restart its counts."""
        memory = replica.memory
        samples, steps = memory["samples"][number], memory["made"][number]
        memory["samples"][number] = memory["made"][number] = 0
        return float(samples * (samples / steps))
