"""The state of a run that its services share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lightning_omni.server.epochs.epoch import Epochs
from lightning_omni.server.event_log import EventRecorder
from lightning_omni.server.membership.roster import Roster
from lightning_omni.server.membership.timeouts import TimeLimits
from lightning_omni.server.parameters.store import ParameterStore
from lightning_omni.server.replication import Replication
from lightning_omni.wire.journal import Journal


class RunContext(NamedTuple):
    """The shared state of one run; ``now`` returns the time of the current message or tick."""

    roster: Roster
    store: ParameterStore
    epochs: Epochs
    events: EventRecorder
    journal: Journal
    replication: Replication
    limits: TimeLimits
    now: Callable[[], float]
