"""The saved state of a run, from which another server continues: a state, and the journal since then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_omni.errors import ConfigurationError
from lightning_omni.server.collectives import CollectiveService
from lightning_omni.server.epochs.service import ValidationService
from lightning_omni.server.membership.service import Membership
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Service
from lightning_omni.server.training import Training
from lightning_omni.wire import messages as m
from lightning_omni.wire.journal import (
    AskedEntry,
    ClaimedEntry,
    DrawnEntry,
    Entry,
    EvaluatedEntry,
    FormedEntry,
    GatheredEntry,
    JoinedEntry,
    LeftEntry,
    LeftEpochEntry,
    LostEntry,
    NumberedEntry,
    OpenedEntry,
    ReadEntry,
    ResolvedEntry,
    RestartedEntry,
    RestructuredEntry,
    SavedEntry,
    SeededEntry,
    TrainedEntry,
)

STATE, STATE_VERSION = "lightning_omni.server_state", 6
"""Name and version of a saved state."""


class Restore:
    def __init__(
        self,
        run: RunContext,
        membership: Membership,
        services: Sequence[Service],
        training: Training,
        synchronization: CollectiveService,
        evaluations: ValidationService,
    ) -> None:
        self._roster, self._epochs, self._journal = run.roster, run.epochs, run.journal
        self._membership, self._services, self._training = membership, services, training
        self._collective_service, self._validation_service = synchronization, evaluations

    def state(self) -> dict[str, Any]:
        services = {type(each).__name__: each.state() for each in self._services}
        return {
            "name": STATE,
            "version": STATE_VERSION,
            "protocol": m.VERSION,
            "roster": self._roster.state(),
            "services": {name: state for name, state in services.items() if state is not None},
        }

    def load(self, state: Mapping[str, Any], journal: Iterable[Entry], now: float) -> None:
        """Continue from the `state` of an earlier server and the journal since then; this one must have no run yet.

        Raises:
            ConfigurationError: the run cannot continue from them.
        """
        self._roster.load(state["roster"], now)
        for service in self._services:
            if (saved := state["services"].get(type(service).__name__)) is not None:
                service.load(saved)
        writes, self._journal.write = self._journal.write, None
        for entry in (*journal, RestartedEntry()):
            self.redo(entry)
        for group in self._epochs.validations.evaluating:  # groups that wait for others report that again
            self._training.idle(self._roster.formed.exchanges_with(group, 0))
        self._journal.write, self._journal.is_due = writes, True

    def redo(self, entry: Entry) -> None:
        epochs, numbers = self._epochs, self._roster.numbers
        match entry:
            case OpenedEntry():
                epochs.open(entry.plan)
            case TrainedEntry():
                epochs.train(entry.group, entry.epoch, entry.batches, entry.counts)
            case DrawnEntry() if epochs.book is not None:
                epochs.redraw(entry.group, entry.number)
            case AskedEntry():
                epochs.wait(entry.group, entry.rank, entry.question)
            case ResolvedEntry():
                epochs.resolve_pending(entry.all_answered)
            case LeftEpochEntry():
                epochs.leave(entry.group, entry.message)
            case GatheredEntry():
                self._collective_service.redo(entry)
            case ClaimedEntry():
                epochs.validations.claim(entry.group, entry.epoch, entry.passed)
            case EvaluatedEntry():
                epochs.validations.publish(entry.group, entry.number, (entry.packed, entry.payload))
            case ReadEntry():
                self._validation_service.read_result(entry.rank, entry.number)
            case SavedEntry():
                epochs.validations.save(entry.number)
            case LostEntry() | LeftEntry() | JoinedEntry():
                self._membership.redo(entry)
            case RestructuredEntry():
                self._training.redo(entry)
            case NumberedEntry():
                numbers.given = max(numbers.given, entry.numbered)
            case FormedEntry() | SeededEntry():
                raise ConfigurationError(
                    "other groups were formed, or weights were handed over after the state was saved, and before it was"
                    " saved again; this run cannot go on: resume it from a checkpoint"
                )
            case RestartedEntry():
                epochs.go_back()


def check_state(state: Mapping[str, Any]) -> None:
    if state.get("name") != STATE or (state.get("version"), state.get("protocol")) != (STATE_VERSION, m.VERSION):
        raise ConfigurationError(
            f"the state is that of {state.get('name')} {state.get('version')} with protocol"
            f" {state.get('protocol')}, and this server reads {STATE} {STATE_VERSION} with protocol {m.VERSION};"
            " start the server in an empty directory"
        )
