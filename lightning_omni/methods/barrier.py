"""The barrier of synchronous methods: the server side that waits until all working groups have pushed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from lightning_omni.errors import OmniError, StepFailed
from lightning_omni.methods.contract import Push, Reply, ServerSide, Total
from lightning_omni.methods.model.fragments import state_of, states_in
from lightning_omni.methods.model.replica import Hyperparameters


class Barrier(ServerSide):
    """A server side that sums the pushes of the working groups, merges the total once all have pushed, and answers all.

    Each fragment has its own total; groups that resume from the ends of different epochs may push different fragments.
    """

    waits_for_all = True

    def setup(self) -> None:
        self._totals = [Total() for _ in range(self.method.fragments)]
        self._waiting: dict[int, int] = {}  # group: staleness
        self._last: dict[int, Push] = {}  # by fragment

    @abstractmethod
    def merge(self, total: Total, last: Push) -> None:
        """Update the master, or ``last.fragment`` of it, once by all pushes; ``last`` is the last, without tensors."""

    def receive(self, push: Push) -> list[Reply]:
        self._totals[push.fragment or 0].add(push.tensors)
        self._waiting[push.group] = self.staleness_of(push)
        self._last[push.fragment or 0] = Push(
            push.group, push.read_at, (), push.hyperparameters, push.note, push.fragment
        )
        return self.released()

    def released(self) -> list[Reply]:
        if not self._last or not self.working <= self._waiting.keys():
            return []
        for number, last in self._last.items():
            try:
                self.merge(self._totals[number], last)
            except OmniError as error:  # all groups wait for it, and it would fail again
                raise StepFailed(str(error)) from error
            self._totals[number].clear()
        waiting, self._waiting, self._last = self._waiting, {}, {}
        return [Reply(group, staleness) for group, staleness in waiting.items() if group in self.groups]

    def evict(self, group: int) -> list[Reply]:
        # Its push stays in the total, because its samples were trained.
        self._waiting.pop(group, None)
        return super().evict(group)

    def grow(self, start: int) -> None:
        for number, total in enumerate(self._totals):
            total.reach(len(self.master.fragment(number)))

    def rearranged(self, hyperparameters: Hyperparameters) -> None:
        self._last = {
            number: msgspec.structs.replace(push, hyperparameters=hyperparameters)
            for number, push in self._last.items()
        }

    def state(self) -> dict[str, Any]:
        return state_of([self.state_of_fragment(number) for number in range(self.method.fragments)])

    def state_of_fragment(self, number: int) -> dict[str, Any]:
        """Return the state of a fragment; its number is 0 without fragments."""
        return {"total": self._totals[number].state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        # The total waits for the next push, because the weights that groups have read do not contain it.
        for total, saved in zip(self._totals, states_in(state), strict=True):
            total.load_state(saved["total"])
