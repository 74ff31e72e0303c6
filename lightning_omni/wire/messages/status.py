"""Heartbeats, and the state of run and server as ranks and observers see it."""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_omni.wire.messages.base import Message
from lightning_omni.wire.messages.data import EpochPlan


class Heartbeat(Message, frozen=True, kw_only=True):
    """A rank's sign of life, with its recent step times in seconds.

    Attributes:
        sent: the rank's own clock in seconds, which the answer returns.
        compute_time: mean from a step's start to the end of its forward pass, without waits.
        step_time: mean of a whole step, waiting included.
        exchange_time: the part of it in exchanges with the server or other groups.
        signal: the response to a signal that the rank has received, 0 for none; the larger, the more urgent.
        progress: a count that grows with batches and in waits for the server; 0 while the rank must not be judged by
            it: before its first batch is trained, while a checkpoint is written, after training.
        metrics: latest numbers of the rank's training, such as its loss.
    """

    sent: float
    compute_time: float = 0.0
    step_time: float = 0.0
    exchange_time: float = 0.0
    signal: int = 0
    progress: int = 0
    metrics: dict[str, float] = {}


class AskStatus(Message, frozen=True, kw_only=True):
    """A request for `Status`."""


class GroupStatus(msgspec.Struct, frozen=True):
    """The status of one group, whose identity is as in `lightning_omni.topology.GroupId`. Times are in seconds."""

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
    """The status of the run. It answers every heartbeat, and is sent unrequested when groups are formed or join.

    Attributes:
        sent: value from the heartbeat; 0 answers `AskStatus`, a negative number no request.
        refused: pushes, and own weights for a mean, that were not finite, or declined.
        strangers: `ServerCore.strangers`.
        staleness: count of merged pushes by staleness 0, 1, 2, ...
        head_time: recent mean seconds of exclusive access, summed over merged heads.
        serve_time: recent mean seconds for one push, from the arrival of the whole message until its answers are passed
            to the socket; 0 before the second since groups were formed, and in virtual time.
        signal: largest signal in the ranks' last heartbeats.
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
    """A request for `ServerDescription`."""


class ServerDescription(Message, frozen=True, kw_only=True):
    """A description of a server; see also `Welcome`. Time-outs are in seconds.

    Attributes:
        versions: those of Python and of installed packages.
        progress_timeout: as in `lightning_omni.server.membership.timeouts.TimeLimits`; may be infinite.
        joined_heartbeat_timeout: heartbeat timeout of runs that groups join on their own; 0 if unknown.
    """

    versions: dict[str, str]
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
    """A request for `Overview`."""


class GroupOverview(msgspec.Struct, frozen=True):
    """An observer's view of one group.

    Attributes:
        hosts: distinct addresses of its ranks, as far as known.
        age: seconds since the last of its ranks was admitted.
        silence: seconds since the last sign of life of its most silent rank.
        samples: leased samples that it was the first to train since groups were formed; None without leases.
    """

    status: GroupStatus
    hosts: tuple[str, ...]
    age: float
    silence: float
    samples: int | None


class LogEntry(msgspec.Struct, frozen=True):
    """An event of the run, ``age`` seconds ago.

    ``kind`` is ``"joined"``, ``"formed"``, ``"lost"``, ``"left"``, ``"over"`` or ``"restored"``.
    """

    age: float
    kind: str
    text: str


class Overview(Message, frozen=True, kw_only=True):
    """An observer's view of the run. Ages are in seconds.

    Attributes:
        run: its name; empty before a rank has joined.
        missing: announced ranks that have not joined yet.
        method: as in `FormGroups`, as is ``wire_format``; None before groups are formed.
        plan: the current or last epoch; None if its data is not leased.
        serve_time: the server's seconds for all ``pushes``.
        over: why the run cannot continue, or an empty string.
        saved: age of the last save; -1 without one.
        metrics: as in `Heartbeat`, averaged over the ranks that report one.
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
