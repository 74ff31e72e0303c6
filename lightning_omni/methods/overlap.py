"""Exchanges beside computation: whole pushes (``overlap=True``), and the fragments of local methods."""

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
    Tensors,
    check_fragments,
    check_period,
)
from lightning_omni.methods.model.replica import Pulled, Replica, copies

# --- Methods whose optimizer steps at the server ----------------------------------------------------------------------


def overlapped(replica: Replica) -> GroupSide:
    r"""Run the group side of `AsyncSGD` without waiting for its exchanges.

    The exchange of step t travels while step t+1 computes its gradient, at the answer to step t-1:

    .. math:: w_{t+1} = \mathrm{answer}(t - 1), \qquad \mathrm{push}(t) = g(w_t)

    Each gradient is one step older than without overlap.

    References:
        Gupta, Zhang, Wang 2016, arXiv:1509.04210 (Rudra-adv*: pushes and pulls beside the computation); Ren et al.
        2021, "ZeRO-Offload", arXiv:2101.06840 (one-step delayed parameter update).
    """
    is_under_way = False
    while True:
        gradient = yield NextGradient()
        read_at = replica.clock
        if is_under_way:
            replica.load((yield Receive()))
        yield Send(Exchange(gradient.tensors, read_at, gradient.hyperparameters))
        is_under_way = True


# --- Local SGD and DiLoCo: exchanges of single fragments, in parallel with the local steps ----------------------------

STEADY = 16
"""Largest number of exchanges over which a group's step time is averaged."""


class PacedBarrier(Barrier):
    """A barrier whose slower groups make fewer local steps with ``dynamic_steps``."""

    method: Streaming

    def setup(self) -> None:
        super().setup()
        self._step_times: dict[int, tuple[float, int]] = {}  # by group: the mean, and of how many exchanges

    def receive(self, push: Push) -> list[Reply]:
        if push.note > 0:
            mean, count = self._step_times.get(push.group, (0.0, 0))
            count = min(count + 1, STEADY)
            self._step_times[push.group] = mean + (push.note - mean) / count, count
        return super().receive(push)

    def released(self) -> list[Reply]:
        replies = super().released()
        if not self.method.dynamic_steps:
            return replies
        return [msgspec.structs.replace(each, note=float(self._local_steps(each.group))) for each in replies]

    def _local_steps(self, group: int) -> int:
        """Return a group's steps until its next exchange; the full number while its speed is unknown."""
        every = self.method.push_period
        means = {number: mean for number, (mean, _) in self._step_times.items() if number in self.groups}
        return max(1, round(every * min(means.values()) / means[group])) if group in means else every

    def evict(self, group: int) -> list[Reply]:
        self._step_times.pop(group, None)
        return super().evict(group)

    def state(self) -> dict[str, Any]:
        # No lists: a list as long as the parameters would be divided over several servers.
        means = {group: mean for group, (mean, _) in self._step_times.items()}
        counts = {group: count for group, (_, count) in self._step_times.items()}
        own = {"step_times": means, "step_times_of": counts}
        return {**super().state(), **(own if self._step_times else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        means, counts = (state.get(name, {}) for name in ("step_times", "step_times_of"))
        self._step_times = {int(group): (float(mean), int(counts[group])) for group, mean in means.items()}


class Streaming(Method, frozen=True, kw_only=True):
    r"""A method of local steps that can exchange one of P fragments every H/P steps.

    Fragment p is captured after step t and travels while further steps are made; the group mixes in the answer after
    step t + :math:`\tau` (``delay``):

    .. math:: x_{i,p} \leftarrow \alpha\, x_{i,p} + (1 - \alpha)\, \theta_p

    or, with ``keep_steps=True`` and a copy of one fragment, keeps its progress in these :math:`\tau` steps:

    .. math:: x_{i,p} \leftarrow \theta_p + (x_{i,p} - x_{i,p}^{\text{captured}})

    With ``dynamic_steps=True`` slower groups make fewer steps, at least one between two exchanges. `DiLoCo` describes
    the arguments.

    References:
        Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv:2501.18512 (algorithm 2); steps
        are kept as in Ryabinin et al., hivemind (``use_local_updates``); Liu et al. 2024, "Asynchronous Local-SGD
        Training for Language Modeling", arXiv:2401.09135 (dynamic local updates, there without a barrier).
    """

    period: int = 1
    fragments: int = 1  # type: ignore[misc]  # of other methods it is a class attribute
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

    @property
    def streams(self) -> bool:
        """Return whether exchanges differ from plain ones, which send all weights, wait, and overwrite."""
        return self.fragments > 1 or self.delay > 0 or self.alpha > 0 or self.dynamic_steps

    def steps_to_push(self, replica: Replica) -> int:
        memory = replica.memory
        return max(1, int(memory.get("every", self.push_period)) - int(memory.get("steps", 0)))

    def changes_with_period(self, period: int) -> dict[str, Any]:
        changes = super().changes_with_period(period)
        delay = min(self.delay, period // changes.get("fragments", 1) - 1)
        return {**changes, "delay": delay, "keep_steps": self.keep_steps and delay > 0}

    def begin(self, replica: Replica) -> None:
        """Store values that the group needs from before its step."""

    def given(self, replica: Replica, fragment: int | None) -> Tensors:
        """Return the tensors that an exchange of a fragment, or of all parameters, sends."""
        return replica.offered(replica.part(fragment, self.fragments), fragment, self.fragments)

    def keep(self, replica: Replica, pulled: Pulled) -> None:
        """Store values of an answer that the group needs, before its own weights are mixed with it."""

    def stream(self, replica: Replica) -> GroupSide:
        """Make local steps; after every H/P-th, send a fragment, and mix in the answer `delay` steps later."""
        memory = replica.memory
        while True:
            gradient = yield NextGradient()
            if memory.get("diverged"):  # this gradient has diverged, too
                replica.restart((yield Fetch()))
                memory.clear()
                continue
            self.begin(replica)
            yield Step(gradient)
            step = memory["steps"] = memory.get("steps", 0) + 1
            if memory.get("due") == step:
                self.apply_answer(replica, (yield Receive()))
            if step >= memory.get("every", self.push_period) and not memory.get("diverged"):
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
            if memory.get("diverged"):
                replica.restart((yield Fetch()))
                memory.clear()

    def apply_answer(self, replica: Replica, pulled: Pulled) -> None:
        """Mix a fragment in. After a refused push, the group restarts with its next gradient."""
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
