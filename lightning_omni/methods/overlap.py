"""Local steps and their exchanges, and exchanges beside computation (``overlap=True``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.barrier import Barrier
from lightning_omni.methods.contract import (
    Exchange,
    Fetch,
    Gradient,
    GroupSide,
    Method,
    NextGradient,
    Push,
    Receive,
    Reply,
    Send,
    Step,
    StepTime,
    check_fragments,
    check_period,
)
from lightning_omni.methods.model.fragments import write
from lightning_omni.methods.model.replica import Pulled, Replica, copies

# --- Methods whose optimizer steps at the server ----------------------------------------------------------------------


def overlapped(replica: Replica) -> GroupSide:
    r"""Run the group side of `AsyncSGD`, with each exchange beside the next gradient.

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


# --- Methods whose groups make local steps ----------------------------------------------------------------------------

STEADY = 16
"""Exchanges after which each step time has the weight ``1 / STEADY`` in a group's mean."""


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


class LocalSteps(Method, frozen=True, kw_only=True):
    """A method whose groups make local steps, and exchange one of P fragments every `push_period` of them.

    At a barrier the clock selects the fragment; otherwise each group takes one after the other. With P = 1, no
    ``alpha`` and no ``keep_steps``, a group continues from its answer; else it mixes the answered fragment in.
    """

    steps_at = "worker"
    delay: ClassVar[int | None] = 0
    alpha: ClassVar[float] = 0.0
    keep_steps: ClassVar[bool] = False
    dynamic_steps: ClassVar[bool] = False

    @property
    def steps_in_flight(self) -> int:
        """Return the most steps that a group makes before it receives an answer; 0 if it waits for it."""
        return self.push_period if self.delay is None else self.delay

    def steps_between(self, replica: Replica) -> int:
        """Return the steps that a group makes from one exchange to the next."""
        return int(replica.memory.get("every", self.push_period))

    def steps_to_push(self, replica: Replica) -> int:
        return max(1, self.steps_between(replica) - int(replica.memory.get("steps", 0)))

    def count(self, replica: Replica, gradient: Gradient) -> None:
        """Count a step, for `note`."""

    def note(self, replica: Replica, number: int, step_time: float) -> float:
        """Return the note of a fragment's push: here ``step_time``, in seconds. It is called once for each push."""
        return step_time

    def group_side(self, replica: Replica) -> GroupSide:
        memory = replica.memory
        while True:
            gradient = yield NextGradient()
            if not memory.get("diverged"):  # otherwise this gradient has diverged, too
                if not self.pushes_weights:
                    replica.remember("outer")
                yield Step(gradient)
                memory["steps"] = memory.get("steps", 0) + 1
                self.count(replica, gradient)
                if memory.get("due") == memory["steps"]:
                    self.apply_answer(replica, (yield Receive()))
                if memory.get("steps", 0) >= self.steps_between(replica) and not memory.get("diverged"):
                    yield from self._exchange(replica)
            if memory.get("diverged"):
                replica.restart((yield Fetch()))
                memory.clear()

    def _exchange(self, replica: Replica) -> GroupSide:
        memory, of = replica.memory, self.fragments
        memory["steps"] = 0
        step_time = (yield StepTime()) if self.dynamic_steps or not self.has_barrier else 0.0
        if self.has_barrier:
            number, read_at = replica.clock % of, replica.clock
        else:
            number = memory.get("next", 0)
            memory["next"] = (number + 1) % of
            read_at = memory.setdefault("read_at", [replica.clock] * of)[number]
        fragment = number if of > 1 else None
        if self.pushes_weights:
            tensors = replica.offered(replica.part(fragment, of), fragment, of)
        else:
            tensors = replica.change(memory["outer"], -1.0, fragment, of)
        exchange = Exchange(tensors, read_at, note=self.note(replica, number, step_time), fragment=fragment)
        if not self.steps_in_flight:
            self.apply_answer(replica, (yield exchange))
            return
        memory["due"] = min(self.steps_in_flight, self.steps_between(replica))
        if self.keep_steps:
            memory["sent"] = copies(replica.part(fragment, of))
        yield Send(exchange)

    def apply_answer(self, replica: Replica, pulled: Pulled) -> None:
        """Load an answer, or mix it in; after a refused push restart, or leave that to `group_side` if P > 1."""
        memory, of = replica.memory, self.fragments
        memory.pop("due", None)
        sent = memory.pop("sent", None)
        if pulled.refused and of > 1:  # the answer holds one fragment, and the others may not be finite either
            memory["diverged"] = True
            return
        if pulled.refused:
            replica.restart(pulled)
            memory.clear()
            return
        if pulled.note:
            memory["every"] = int(pulled.note)
        if "read_at" in memory:
            memory["read_at"][pulled.fragment or 0] = pulled.clock
        if of == 1 and sent is None and not self.alpha:
            replica.load(pulled)
            memory.pop("outer", None)
            return
        replica.clock = pulled.clock
        if not self.pushes_weights:
            write(memory["outer"], replica.pieces(pulled.fragment, of), pulled.tensors)
        if sent is None:
            replica.mix(pulled, of, self.alpha)
        else:
            replica.rebase(pulled, sent, of)


class Streaming(LocalSteps, frozen=True, kw_only=True):
    r"""A method of local steps with a barrier, whose exchanges may travel while groups compute.

    `DiLoCo` describes the exchange of a fragment, and the arguments. With ``keep_steps=True`` and a copy of one
    fragment, a group keeps its progress in the :math:`\tau` steps:

    .. math:: x_{i,p} \leftarrow \theta_p + (x_{i,p} - x_{i,p}^{\text{captured}})

    With ``dynamic_steps=True`` slower groups make fewer steps, at least one between two exchanges.

    References:
        Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv:2501.18512 (algorithm 2); steps
        are kept as in Ryabinin et al., hivemind (``use_local_updates``); Liu et al. 2024, "Asynchronous Local-SGD
        Training for Language Modeling", arXiv:2401.09135 (dynamic local updates, there without a barrier).
    """

    period: int = 1
    fragments: int = 1  # type: ignore[misc]  # of other methods it is a class attribute
    delay: int = 0  # type: ignore[misc]
    alpha: float = 0.0  # type: ignore[misc]
    keep_steps: bool = False  # type: ignore[misc]
    dynamic_steps: bool = False  # type: ignore[misc]

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

    def changes_with_period(self, period: int) -> dict[str, Any]:
        changes = super().changes_with_period(period)
        delay = min(self.delay, period // changes.get("fragments", 1) - 1)
        return {**changes, "delay": delay, "keep_steps": self.keep_steps and delay > 0}
