"""What local SGD and DiLoCo have in common: exchanges in fragments, one by one, beside the local steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.contract import (
    Barrier,
    Exchange,
    Fetch,
    GroupSide,
    Method,
    NextGradient,
    Push,
    Receive,
    Reply,
    Send,
    Step,
    StepTime,
    Sum,
    Tensors,
    check_fragments,
    check_period,
)
from lightning_omni.methods.replica import Pulled, Replica, copies

STEADY = 16
"""Exchanges over which a group's step time is averaged before it says how many steps the group makes."""


class PacedBarrier(Barrier):
    """A barrier of groups that make fewer local steps if they are slower, so that none has to wait for them."""

    method: Streaming

    def setup(self) -> None:
        super().setup()
        self._step_times: dict[int, tuple[float, int]] = {}  # by group: the mean, and of how many exchanges

    def receive(self, push: Push) -> list[Reply]:
        self._remember_pace(push)
        return super().receive(push)

    def receive_sum(self, pushes: Sum) -> list[Reply]:
        for push in pushes.parts:
            self._remember_pace(push)
        return super().receive_sum(pushes)

    def _remember_pace(self, push: Push) -> None:
        if push.note > 0:
            mean, count = self._step_times.get(push.group, (0.0, 0))
            count = min(count + 1, STEADY)
            self._step_times[push.group] = mean + (push.note - mean) / count, count

    def released(self) -> list[Reply]:
        replies = super().released()
        if not self.method.dynamic_steps:
            return replies
        return [msgspec.structs.replace(each, note=float(self._local_steps(each.group))) for each in replies]

    def _local_steps(self, group: int) -> int:
        """The steps that a group is to make from this exchange to the next; all of them, until its pace is known."""
        every = self.method.push_period
        means = {number: mean for number, (mean, _) in self._step_times.items() if number in self.groups}
        return max(1, round(every * min(means.values()) / means[group])) if group in means else every

    def evict(self, group: int) -> list[Reply]:
        self._step_times.pop(group, None)
        return super().evict(group)

    def state(self) -> dict[str, Any]:
        # No lists, for one with an entry for each parameter is divided over several servers.
        means = {group: mean for group, (mean, _) in self._step_times.items()}
        counts = {group: count for group, (_, count) in self._step_times.items()}
        own = {"step_times": means, "step_times_of": counts}
        return {**super().state(), **(own if self._step_times else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        means, counts = (state.get(name, {}) for name in ("step_times", "step_times_of"))
        self._step_times = {int(group): (float(mean), int(counts[group])) for group, mean in means.items()}


class Streaming(Method, frozen=True, kw_only=True):
    r"""A method of local steps that exchanges one of P fragments every H/P steps, if it is told to.

    Fragment p is captured after step t and travels while further steps are made; what became of it is mixed in after
    step t + :math:`\tau`:

    .. math:: x_{i,p} \leftarrow \alpha\, x_{i,p} + (1 - \alpha)\, \theta_p

    or, with ``keep_steps=True``, what the group has learned in these :math:`\tau` steps is kept:

    .. math:: x_{i,p} \leftarrow \theta_p + (x_{i,p} - x_{i,p}^{\text{captured}})

    Groups go by the server's clock from one fragment to the next, so that they exchange the same one at a barrier, and
    each every H steps. With ``dynamic_steps=True`` slower groups make fewer of them, at least one between two
    exchanges, so that all come to the barrier at about the same time.

    Args:
        period: H, local steps between two exchanges of the same weight, in steps.
        fragments: P; it divides H.
        delay: :math:`\tau`, steps that an exchange may take without being waited for, fewer than H/P; 0 waits.
        alpha: :math:`\alpha`, the part of its own weights that a group keeps, from 0 to less than 1. With 0 what it
            learned in the last :math:`\tau` steps is lost.
        keep_steps: whether what it learned in these steps is kept instead, which takes a copy of one fragment.
        dynamic_steps: whether slow groups make fewer steps, as many as their pace allows; a mean then has as much of
            each group as it has learned.

    References:
        Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv:2501.18512 (algorithm 2); steps
        are kept as in Ryabinin et al., hivemind (``use_local_updates``); Liu et al. 2024, "Asynchronous Local-SGD
        Training for Language Modeling", arXiv:2401.09135 (dynamic local updates, there without a barrier).
    """

    period: int = 1
    fragments: int = 1  # type: ignore[misc]  # of any other method it is not to be chosen
    delay: int = 0
    alpha: float = 0.0
    keep_steps: bool = False
    dynamic_steps: bool = False

    def __post_init__(self) -> None:
        check_period(self.period)
        check_fragments(self.fragments, self.period)
        most = self.period // self.fragments - 1
        check_whole("delay", self.delay, f"0 to {most} steps: fewer than period / fragments", 0, most)
        check_number("alpha", self.alpha, "0 <= alpha < 1, the part of its own weights that a group keeps", 0, below=1)
        if self.keep_steps and (self.alpha or not self.delay):
            raise ConfigurationError(
                f"keep_steps=True with delay={self.delay} and alpha={self.alpha:g}: it keeps the steps that are made"
                " while a fragment is in flight; pass a delay of 1 or more, and no alpha="
            )

    def most_added(self, groups: int) -> int:
        """All: the server goes by their mean."""
        return groups

    @property
    def streams(self) -> bool:
        """Whether it is told to exchange in another way than all at once, waiting, and overwriting."""
        return self.fragments > 1 or self.delay > 0 or self.alpha > 0 or self.dynamic_steps

    def steps_to_push(self, replica: Replica) -> int:
        memory = replica.memory
        return max(1, int(memory.get("every", self.push_period)) - int(memory.get("steps", 0)))

    def changes_with_period(self, period: int) -> dict[str, Any]:
        """An answer is there before the next fragment is sent; steps are kept only if any are made meanwhile."""
        changes = super().changes_with_period(period)
        delay = min(self.delay, period // changes.get("fragments", 1) - 1)
        return {**changes, "delay": delay, "keep_steps": self.keep_steps and delay > 0}

    def begin(self, replica: Replica) -> None:
        """What a group remembers before it moves its weights."""

    def given(self, replica: Replica, fragment: int | None) -> Tensors:
        """What is pushed of a fragment."""
        return replica.offered(replica.part(fragment, self.fragments), fragment, self.fragments)

    def keep(self, replica: Replica, pulled: Pulled) -> None:
        """What a group remembers of an answer, before its own weights are mixed with it."""

    def stream(self, replica: Replica) -> GroupSide:
        """Local steps; after every H/P-th a fragment is sent, and what became of it is mixed in `delay` steps later.

        With dynamic steps, after as many as the server has said.
        """
        memory = replica.memory
        while True:
            gradient = yield NextGradient()
            if memory.get("diverged"):  # and so is this gradient
                replica.restart((yield Fetch()))
                memory.clear()
                continue
            self.begin(replica)
            yield Step(gradient)
            step = memory["steps"] = memory.get("steps", 0) + 1
            if memory.get("due") == step:
                self.apply_answer(replica, (yield Receive()))
            if step < memory.get("every", self.push_period) or memory.get("diverged"):
                continue
            memory["steps"] = 0
            pace = (yield StepTime()) if self.dynamic_steps else 0.0
            fragment = replica.clock % self.fragments if self.fragments > 1 else None
            exchange = Exchange(self.given(replica, fragment), replica.clock, note=pace, fragment=fragment)
            if self.delay:
                memory["due"] = min(self.delay, memory.get("every", self.delay))
                if self.keep_steps:
                    memory["sent"] = copies(replica.part(fragment, self.fragments))
                yield Send(exchange)
            else:
                self.apply_answer(replica, (yield exchange))

    def apply_answer(self, replica: Replica, pulled: Pulled) -> None:
        """Mixes a fragment in. After a push that was not finite the group begins again with its next gradient."""
        replica.memory.pop("due", None)
        sent = replica.memory.pop("sent", None)
        if pulled.refused:
            replica.memory["diverged"] = True
            return
        replica.clock = pulled.clock
        if pulled.note:
            replica.memory["every"] = int(pulled.note)
        self.keep(replica, pulled)
        if sent is None:
            replica.mix(pulled, self.fragments, self.alpha)
        else:
            replica.rebase(pulled, sent, self.fragments)
