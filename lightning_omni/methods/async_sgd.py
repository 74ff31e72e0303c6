"""Asynchronous SGD."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_omni.checks import check_whole
from lightning_omni.methods.contract import Method, Push, Reply, ServerSide


class _ApplyAtOnce(ServerSide):
    method: AsyncSGD

    def setup(self) -> None:
        self._pushes: Counter[int] = Counter()
        self._held: dict[int, int] = {}  # group: staleness

    def receive(self, push: Push) -> list[Reply]:
        staleness = self.staleness_of(push)
        scale = 1 / max(1, staleness) if self.method.staleness_aware else 1.0
        self.master.update(push.tensors, push.hyperparameters, scale)
        self._pushes[push.group] += 1
        self._held[push.group] = staleness
        return self.released()

    def released(self) -> list[Reply]:
        if self.groups <= self.idle_groups:  # all groups are synchronized and restart level
            self._pushes.clear()
        free = [group for group in self._held if self._may_go_on(group)]
        return [Reply(group, self._held.pop(group)) for group in free]

    def resume(self, group: int) -> None:
        # The others have trained while it was idle; they need not wait for the pushes that it did not make.
        self._pushes[group] = max(self._pushes[group], self._slowest)
        super().resume(group)

    def join(self, group: int) -> None:
        # It starts level with the slowest group, so that neither has to wait for the other.
        self._pushes[group] = self._slowest
        super().join(group)

    def evict(self, group: int) -> list[Reply]:
        self._held.pop(group, None)
        self._pushes.pop(group, None)
        return super().evict(group)

    def state(self) -> dict[str, Any]:
        return {"pushes": dict(self._pushes)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        least = min(state["pushes"].values(), default=0)  # one that had died begins level with the slowest
        self._pushes = Counter({**dict.fromkeys(self.groups, least), **state["pushes"]})

    @property
    def _slowest(self) -> int:
        return min((self._pushes[group] for group in self.working), default=0)

    def _may_go_on(self, group: int) -> bool:
        bound = self.method.bound
        return bound is None or self._pushes[group] - self._slowest <= bound


class AsyncSGD(Method, frozen=True, kw_only=True, tag="async_sgd"):
    r"""Asynchronous SGD with the user's own optimizer at the server.

    .. math:: w_{t+1} = \mathrm{step}\bigl(w_t,\; g(w_{t-\tau})\bigr), \qquad t \leftarrow t + 1

    where ``step`` is one step of the user's torch optimizer (with one state for all groups), ``g`` the mean gradient of
    one compute group's batch, and :math:`\tau` its staleness: the updates between this group's read and its write.

    Args:
        staleness_aware: divide the learning rate of every step by :math:`\max(1, \tau)`.
        bound: pushes by which a group may be ahead of the slowest one before it waits (stale-synchronous parallel). 0
            is bulk-synchronous; None is unbounded.

    Raises:
        ConfigurationError: ``bound`` is negative or no whole number.

    Example:
        >>> AsyncSGD(bound=3)
        AsyncSGD(staleness_aware=False, bound=3)

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks" (Downpour SGD, n_push = n_fetch = 1);
        Hadjis et al. 2016, "Omnivore" (compute groups; one momentum buffer at the server);
        Zhang et al. 2016, "Staleness-aware Async-SGD", arXiv:1511.05950 (learning rate over staleness);
        Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (bound).
    """

    side = _ApplyAtOnce
    staleness_aware: bool = False
    bound: int | None = None

    def __post_init__(self) -> None:
        if self.bound is not None:
            pushes = "the pushes that a group may be ahead of the slowest, 0 for lock-step, or None for no bound"
            check_whole("bound", self.bound, pushes)

    @property
    def has_barrier(self) -> bool:
        return self.bound == 0  # no group may be ahead of another
