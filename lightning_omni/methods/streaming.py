"""What local SGD and DiLoCo have in common: exchanges in fragments, one by one, beside the local steps."""

from __future__ import annotations

from typing import Any

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.contract import (
    Exchange,
    Fetch,
    GroupSide,
    Method,
    NextGradient,
    Receive,
    Send,
    Step,
    Tensors,
    check_fragments,
    check_period,
)
from lightning_omni.methods.replica import Pulled, Replica, copies


class Streaming(Method, frozen=True, kw_only=True):
    r"""A method of local steps that exchanges one of P fragments every H/P steps, if it is told to.

    Fragment p is captured after step t and travels while further steps are made; what became of it is mixed in after
    step t + :math:`\tau`:

    .. math:: x_{i,p} \leftarrow \alpha\, x_{i,p} + (1 - \alpha)\, \theta_p

    or, with ``keep_steps=True``, what the group has learned in these :math:`\tau` steps is kept:

    .. math:: x_{i,p} \leftarrow \theta_p + (x_{i,p} - x_{i,p}^{\text{captured}})

    Groups go by the server's clock from one fragment to the next, so that they exchange the same one at a barrier, and
    each every H steps.

    Args:
        period: H, local steps between two exchanges of the same weight, in steps.
        fragments: P; it divides H.
        delay: :math:`\tau`, steps that an exchange may take without being waited for, fewer than H/P; 0 waits.
        alpha: :math:`\alpha`, the part of its own weights that a group keeps, from 0 to less than 1. With 0 what it
            learned in the last :math:`\tau` steps is lost.
        keep_steps: whether what it learned in these steps is kept instead, which takes a copy of one fragment.

    References:
        Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv:2501.18512 (algorithm 2); steps
        are kept as in Ryabinin et al., hivemind (``use_local_updates``).
    """

    period: int = 1
    fragments: int = 1  # type: ignore[misc]  # of any other method it is not to be chosen
    delay: int = 0
    alpha: float = 0.0
    keep_steps: bool = False

    def __post_init__(self) -> None:
        check_period(self.period)
        check_fragments(self.fragments, self.period)
        most = self.period // self.fragments - 1
        check_whole("delay", self.delay, f"0 to {most} steps: fewer than period / fragments", 0, most)
        check_number("alpha", self.alpha, "0 <= alpha < 1, the part of its own weights that a group keeps", 0, below=1)
        if self.keep_steps and (self.alpha or not self.delay):
            raise ConfigurationError(
                f"keep_steps=True with delay={self.delay} and alpha={self.alpha:g}: all steps are kept that are made"
                " while a fragment travels; pass a delay of 1 or more, and no alpha="
            )

    def most_added(self, groups: int) -> int:
        """All: the server goes by their mean."""
        return groups

    @property
    def streams(self) -> bool:
        """Whether it is told to exchange in another way than all at once, waiting, and overwriting."""
        return self.fragments > 1 or self.delay > 0 or self.alpha > 0

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
        """Local steps; after every H/P-th a fragment is sent, and what became of it is mixed in `delay` steps later."""
        memory, every = replica.memory, self.period // self.fragments
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
            if step % every or memory.get("diverged"):
                continue
            fragment = replica.clock % self.fragments if self.fragments > 1 else None
            exchange = Exchange(self.given(replica, fragment), replica.clock, fragment=fragment)
            if self.delay:
                memory["due"] = step + self.delay
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
        self.keep(replica, pulled)
        if sent is None:
            replica.mix(pulled, self.fragments, self.alpha)
        else:
            replica.rebase(pulled, sent, self.fragments)
