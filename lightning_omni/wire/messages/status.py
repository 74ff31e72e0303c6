"""Messages of the state of run and server: heartbeats, and the views of ranks and observers."""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_omni.wire.messages.base import Message
from lightning_omni.wire.messages.data import EpochPlan


class Heartbeat(Message, frozen=True, kw_only=True):
    """A sign of life of a rank, with its recent step times.

    Attributes:
        sent: the rank's own clock in seconds, which the answer returns.
        compute_time: mean seconds that the rank computed in a recent step.
        step_time: mean seconds of a whole step, waiting included.
        exchange_time: the part of it in the exchange with the server.
        signal: number of a signal that the rank has received; the larger, the more urgent.
        progress: count of batches and awaited answers of the server. 0 while the rank must not be judged by that:
            before its first batch is trained, or while a checkpoint is written.
        metrics: latest numbers of the rank's training for observers, by name, such as its loss.
    """

    sent: float
    compute_time: float = 0.0
    step_time: float = 0.0
    exchange_time: float = 0.0
    signal: int = 0
    progress: int = 0
    metrics: dict[str, float] = {}


class AskStatus(Message, frozen=True, kw_only=True):
    """A request for the status of the run."""


class GroupStatus(msgspec.Struct, frozen=True):
    """The status of one group: seconds per step, its slowest rank, and the staleness of its gradients.

    ``name`` and ``incarnation`` identify the group: see `lightning_omni.topology.GroupId`.
    """

    group: int
    ranks: tuple[int, ...]
    updates: int
    staleness_mean: float
    step_time: float
    compute_time: float
    exchange_time: float
    slowest_rank: int
    slowest_time: float
    name: str = ""
    incarnation: int = 0


class Status(Message, frozen=True, kw_only=True):
    """The status of the run. It answers every heartbeat, and is sent unrequested when groups have been formed.

    Attributes:
        sent: value from the heartbeat; 0 answers `AskStatus`, a negative number no request.
        refused: pushes refused because their gradients were not finite.
        strangers: messages refused because they were malformed or their sender had not been admitted.
        staleness: count of updates by staleness 0, 1, 2, ...
        head_time: recent mean seconds of exclusive access to the merged head; 0 if there is none.
        serve_time: recent mean seconds of the server's time for one push, from the arrival of the whole message until
            its answers are passed to the socket; 0 before the first, and in virtual time.
        signal: the largest signal in the ranks' last heartbeats.
    """

    sent: float
    clock: int
    updates_per_second: float
    refused: int
    strangers: int
    groups: tuple[GroupStatus, ...]
    staleness: tuple[int, ...]
    lost: tuple[int, ...]
    head_time: float = 0.0
    serve_time: float = 0.0
    signal: int = 0
    recorder: int = 0


class AskServer(Message, frozen=True, kw_only=True):
    """A request for the server's description."""


class ProcessInfo(msgspec.Struct, frozen=True):
    """A description of a server's process, independent of its run.

    Attributes:
        versions: versions of Python and of installed packages, by name.
        time: seconds since the epoch, by its clock.
    """

    versions: dict[str, str] = {}
    time: float = 0.0


class ServerDescription(Message, frozen=True, kw_only=True):
    """A description of a server; see also `Welcome`.

    Attributes:
        progress_timeout: seconds without progress after which a group counts as dead; may be infinite.
        reconnect_timeout: above 0 if another server would continue.
        joined_heartbeat_timeout: the heartbeat timeout of runs that groups join on their own; 0 if unknown.
    """

    about: ProcessInfo
    data_port: int
    heartbeat_timeout: float
    progress_timeout: float
    servers: int
    reconnect_timeout: float
    joined_heartbeat_timeout: float = 0.0


class Echo(Message, frozen=True, kw_only=True):
    """A request to send ``nbytes`` bytes back, at most `LARGEST_ECHO`. A payload may follow, and is dropped."""

    nbytes: int = 0


class Echoed(Message, frozen=True, kw_only=True):
    """The answer to `Echo`; the requested bytes follow."""


class AskOverview(Message, frozen=True, kw_only=True):
    """A request for the overview of the run."""


class GroupOverview(msgspec.Struct, frozen=True):
    """An observer's view of one group.

    Attributes:
        hosts: distinct addresses from which its ranks have connected, as far as the transport knows.
        age: seconds since the last of its ranks was admitted.
        silence: seconds since the last sign of life of the most silent rank.
        samples: leased samples that it was the first to train since groups were formed; None without leases.
    """

    status: GroupStatus
    hosts: tuple[str, ...]
    age: float
    silence: float
    samples: int | None


class LogEntry(msgspec.Struct, frozen=True):
    """An event of the run, ``age`` seconds ago.

    ``kind`` is one of ``"joined"``, ``"formed"``, ``"lost"``, ``"left"``, ``"over"`` and
    ``"restored"``.
    """

    age: float
    kind: str
    text: str


class Overview(Message, frozen=True, kw_only=True):
    """An observer's view of the run.

    Attributes:
        run: its name; empty before a rank has joined.
        age: seconds since its first rank was admitted.
        missing: announced ranks that have not joined yet.
        recorder: the rank that logs and saves; the run ends with its group.
        method: as in `FormGroups`, as is ``wire_format``; None before groups are formed.
        plan: the current or last epoch; None if its data is not leased.
        serve_time: seconds of the server's own time for all ``pushes``.
        log: events, the oldest first.
        over: why the run cannot continue, or an empty string.
        saved: seconds since the server's state was last saved; -1 if it was not.
        metrics: as in `Heartbeat`, on average over the participating ranks that report one.
    """

    run: str
    age: float
    announced: int
    live: tuple[int, ...]
    missing: tuple[int, ...]
    recorder: int
    status: Status
    groups: tuple[GroupOverview, ...]
    method: dict[str, Any] | None
    wire_format: dict[str, Any] | None
    plan: EpochPlan | None
    trained: int
    pushes: int
    serve_time: float
    log: tuple[LogEntry, ...]
    over: str
    saved: float = -1.0
    metrics: dict[str, float] = {}


class SaveNow(Message, frozen=True, kw_only=True):
    """A request to save the server's state, even if that is not due."""
