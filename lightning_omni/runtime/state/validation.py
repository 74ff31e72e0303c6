"""A group's part in validations while groups train: it claims one, evaluates a snapshot of the weights, and reports.

Every rank of a group makes the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_omni.methods import Pulled
from lightning_omni.runtime.model.external_writes import ExternalWrites
from lightning_omni.runtime.model.replica import fingerprints
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.server_exchange import ServerExchange, ServerSnapshot
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack, unpack
from lightning_omni.wire.messages import SnapshotId

_SAMPLED = 1 << 12
"""Approximate number of a parameter's elements by which it is recognized."""


class ValidationSnapshots:
    def __init__(self, parallel: ParallelState, exchange: ServerExchange, edits: ExternalWrites) -> None:
        self._parallel, self._exchange, self._external_writes = parallel, exchange, edits
        self._evaluated: list[list[int]] = []

    def claim(self, epoch: int, passed: int) -> int:
        """Report how many validation points this group has passed; return the validation to evaluate, or 0."""
        message = m.ClaimValidation(epoch=epoch, generation=self._parallel.generation, passed=passed)
        return self._parallel.joined.request(message, m.ValidationClaimed).number

    def ask(self) -> m.Validations:
        return self._parallel.joined.request(m.AskValidations(), m.Validations)

    @contextmanager
    def loaded(self, number: int) -> Iterator[SnapshotId]:
        """Load the weights of a claimed validation in this context; then restore the group's own.

        It yields the cut of the weights on the leader, and an empty one on its peers.
        """
        for part in self._parallel.parts:
            self._external_writes.check(part)
        self._exchange.finish_exchanges()
        snapshot = self._exchange.store.snapshot(with_state=False, version=number) if self._parallel.is_leader else None
        for index in range(len(self._parallel.parts)):
            self._load(index, snapshot)
        self._evaluated.append(self._marks())
        try:
            yield SnapshotId() if snapshot is None else snapshot.cut
        finally:
            for part in self._parallel.parts:
                part.replica.restore()

    @contextmanager
    def own_weights(self) -> Iterator[None]:
        """Keep the group's weights if hooks in this context restore those that they saved as a validation began."""
        if not self._evaluated:
            yield
            return
        own = [(weight, weight.clone()) for part in self._parallel.parts for weight in part.replica.weights()]
        before = self._marks()
        yield
        after = self._marks()
        if after != before and after in self._evaluated:
            for weight, value in own:
                weight.copy_(value)

    def forget_evaluated(self) -> None:
        self._evaluated.clear()

    def _marks(self) -> list[int]:
        return fingerprints((each for part in self._parallel.parts for each in part.replica.ordered), _SAMPLED)

    def _load(self, index: int, snapshot: ServerSnapshot | None) -> None:
        replica = self._parallel.parts[index].replica
        tensors = [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in replica.weights()]
        for name, tensor in zip(replica.parameters, tensors, strict=True):
            if snapshot is not None:
                tensor.copy_(snapshot.parts[index]["weights"][name])
            self._exchange.members.broadcast(tensor.view(-1).view(torch.uint8))  # gloo takes no complex numbers
        replica.stash()
        replica.load(Pulled(tensors, replica.clock))

    def publish(self, number: int, result: dict[str, Any]) -> None:
        """Publish the result of a validation to all ranks. Every member calls it; the leader sends its own."""
        if self._parallel.is_leader:
            packed, buffer = pack(result)
            message = m.PublishEvaluation(number=number, packed=packed, nbytes=buffer.numel())
            self._exchange.ask(message, m.EvaluationPublished, buffer)

    def read(self, number: int) -> dict[str, Any] | None:
        evaluation, buffer = self._exchange.ask(m.ReadEvaluation(number=number), m.EvaluationResult)
        if evaluation.is_void:
            return None
        tree: dict[str, Any] = unpack(evaluation.packed, buffer, copy=True)
        return tree

    def release(self, number: int) -> None:
        if self._parallel.is_recorder:
            self._parallel.joined.request(m.ReleaseVersion(number=number), m.VersionReleased)
