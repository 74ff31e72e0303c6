"""What all services of one run share. Each run has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lightning_omni.protocol.epochs import Epochs
from lightning_omni.protocol.journal import Journal
from lightning_omni.protocol.notes import Notes
from lightning_omni.protocol.roster import Roster
from lightning_omni.protocol.shard_servers import Servers
from lightning_omni.protocol.shards import HeldShards
from lightning_omni.protocol.time_limits import TimeLimits


class RunContext(NamedTuple):
    """One run, without what its services know of it.

    Attributes:
        roster: its ranks and groups.
        shards: master weights, and the methods' server sides.
        epochs: the epoch that is under way.
        notes: told of all that happens to the weights.
        journal: told of what ranks will know, and when the state should be saved.
        servers: those that hold a share each, which must know of what concerns all of them.
        limits: for how long ranks are waited for.
        now: the time of the message that is being handled.
    """

    roster: Roster
    shards: HeldShards
    epochs: Epochs
    notes: Notes
    journal: Journal
    servers: Servers
    limits: TimeLimits
    now: Callable[[], float]
