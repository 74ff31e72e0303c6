"""Server sides at which all groups meet: nobody is answered before everybody has pushed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_omni.methods.contract import Push, Reply, ServerSide
from lightning_omni.methods.master import Master
from lightning_omni.methods.totals import Total


class Barrier(ServerSide):
    """Adds up what the working groups push; when all have, merges the total once and answers them all.

    A group that rests or is gone is not waited for: then the total is that of the others.
    """

    def __init__(self, master: Master, groups: Iterable[int]) -> None:
        super().__init__(master, groups)
        self._total = Total()
        self._waiting: dict[int, int] = {}  # group: staleness
        self._last: Push | None = None

    @abstractmethod
    def merge(self, total: Total, last: Push) -> None:
        """One update of the master from everybody's pushes, of which ``last`` came last."""

    def receive(self, push: Push) -> list[Reply]:
        self._waiting[push.group] = self.staleness_of(push)
        self._total.add(push.tensors)
        self._last = Push(push.group, push.read_at, (), push.hyperparameters, push.note)
        return self.released()

    def released(self) -> list[Reply]:
        if self._last is None or not self.working <= self._waiting.keys():
            return []
        self.merge(self._total, self._last)
        self._total.clear()
        waiting, self._waiting, self._last = self._waiting, {}, None
        return [Reply(group, staleness) for group, staleness in waiting.items() if group in self.groups]

    def evict(self, group: int) -> list[Reply]:
        # What it pushed stays in the total: those samples were trained.
        self._waiting.pop(group, None)
        return super().evict(group)

    def grow(self, start: int) -> None:
        self._total.reach(len(self.master.parameters))

    def state(self) -> dict[str, Any]:
        return {"total": self._total.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        # What had come in waits for the next push: groups have read the weights as they are without it.
        self._total.load_state(state["total"])
