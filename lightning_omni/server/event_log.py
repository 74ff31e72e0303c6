"""The record of a run: the server's events in order, for a replay."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from lightning_omni.errors import ConfigurationError
from lightning_omni.server.epochs.epoch import Epochs
from lightning_omni.server.parameters.store import ParameterStore
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, to_wire
from lightning_omni.wire.messages.data import Spans

_log = logging.getLogger(__name__)

Kind = Literal[
    "seed", "form", "restructure", "push", "expire", "train", "fetch", "rest", "resume", "retire", "leave", "join"
]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of one optimizer at the server, at ``time`` in seconds of a monotonic clock.

    A merged head's backward pass counts as a push.

    Attributes:
        kind: ``"seed"``: the server received weights, for existing groups; ``"form"``: other groups were formed on the
            same weights; ``"restructure"``: a group's optimizer changed to other parameter groups, or more parameters;
            ``"push"``; ``"expire"``: the method continued at a time that it had requested; ``"train"``: a group has
            trained batches that no push has reported; ``"fetch"``: a group read the master weights outside an
            exchange; ``"rest"`` (idle), ``"resume"``, ``"retire"`` (evicted): see `lightning_omni.methods.ServerSide`;
            ``"leave"``: a rank left in order, and its group with it; ``"join"``: a group joined.
        read_at: for a push, the clock of the weights that it was computed from.
        clock: updates in the optimizer's master weights after the event.
        refused: whether the push was refused.
        epoch: for a push, training or fetch, the epoch; -1 if its data is not leased.
        spans: for the same, the positions newly reported as trained, one range per batch; of pushes to several
            optimizers, the first reports them. At a merged head, only its batch.
        note: for a push, its note; at a merged head, the value for gradient clipping.
        groups: for a seed or form, the ranks of each group; for a join, those of the new group.
        method: for a seed or form, the method as plain data.
        wire_format: likewise, as plain data; empty for raw tensors.
        overlap: likewise, whether exchanges overlap the groups' computation.
        servers: likewise, the number of servers with a partition each; the first one records.
        parameters: for a restructuring, the names of the group's new parameters.
        param_groups: for a restructuring, the settings of each parameter group, with the indices of its parameters as
            ``params``.
        present: for a push, whether each parameter (or entry of the fragment, or of the first server's share) has a
            tensor. Left out if equal to that of the group's last push, or if all have one in its first.
        elsewhere: the same for each other server; empty where all entries have a tensor. Recorded with ``present``, if
            either differs from the group's last push.
    """

    kind: Kind
    time: float
    group: int = -1
    optimizer: int = 0
    read_at: int = -1
    clock: int = 0
    refused: bool = False
    epoch: int = -1
    spans: Spans = ()
    hyperparameters: tuple[dict[str, Any], ...] = ()
    note: float = 0.0
    groups: tuple[tuple[int, ...], ...] = ()
    method: dict[str, Any] = {}
    wire_format: dict[str, Any] = {}
    overlap: bool = False
    servers: int = 1
    parameters: tuple[str, ...] = ()
    param_groups: tuple[dict[str, Any], ...] = ()
    present: tuple[bool, ...] = ()
    elsewhere: tuple[tuple[bool, ...], ...] = ()


Recorder = Callable[[Event], None]


class RecordFile:
    """A record on disk, one event per line of JSON; the first event overwrites an existing file.

    If a write fails, a warning is logged, and the record ends after its last whole line.

    Raises:
        ConfigurationError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._file: io.FileIO | None
        try:
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115  # open for as long as the server runs
        except OSError as error:
            raise ConfigurationError(
                f"record={str(path)!r}: {error.strerror}; pass a file that can be written"
            ) from error
        self._written = 0

    def __call__(self, event: Event) -> None:
        """Write an event at once: the process may be killed."""
        if self._file is None:
            return
        line = msgspec.json.encode(event) + b"\n"
        try:
            if not self._written:
                Path(self._path).write_bytes(b"")  # of an earlier run, which one without events leaves
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._written += len(line)
        except OSError as error:
            _log.warning(
                "record=%r: %s; the record ends here, after %d bytes, and the run goes on without",
                self._path,
                error.strerror,
                self._written,
            )
            with contextlib.suppress(OSError):
                self._file.truncate(self._written)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_record(path: str | Path) -> Iterator[Event]:
    """Yield the events of a record, in order.

    Raises:
        ConfigurationError: the file is missing, or is not a record.
    """
    decoder = msgspec.json.Decoder(Event)
    if not Path(path).is_file():
        raise ConfigurationError(f"{path}: there is no such record; pass the file that record= was given")
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:  # noqa: PERF203  # the error contains the line's number
                raise ConfigurationError(f"{path}, line {number}: not a record of a run: {error}") from error


class Presence(NamedTuple):
    present: tuple[bool, ...]
    elsewhere: tuple[tuple[bool, ...], ...]

    @property
    def is_whole(self) -> bool:
        return all(self.present) and not any(self.elsewhere)


class EventRecorder:
    """The event log of one run: ``record`` takes each event; None records nothing."""

    def __init__(
        self, record: Recorder | None, store: ParameterStore, epochs: Epochs, now: Callable[[], float], servers: int
    ) -> None:
        self.record = record
        self._store = store
        self._epochs = epochs
        self._now = now
        self._servers = servers
        self._present: dict[tuple[int, int], Presence] = {}

    def form(self, groups: tuple[tuple[int, ...], ...], message: m.FormGroups) -> None:
        for number, _ in self._store.pushed:
            self.note("form", -1, number, groups=groups, **self._agreed(message))
        self._present.clear()

    def seed(self, number: int, groups: tuple[tuple[int, ...], ...], message: m.FormGroups) -> None:
        self.note("seed", -1, number, groups=groups, **self._agreed(message))

    def note(self, kind: Kind, group: int, optimizer: int, **more: Any) -> None:
        if self.record is not None:
            clock = self._store.all[optimizer].master.clock
            self.record(Event(kind=kind, time=self._now(), group=group, optimizer=optimizer, clock=clock, **more))

    def new_spans(
        self, group: int, message: m.DrawBatches | m.AskNext | m.LeaveEpoch | m.FetchMessage | m.HeadBackward
    ) -> Spans:
        """Return the spans that a message newly reports as trained; none without a record, or outside the epoch."""
        if self.record is None or not self._epochs.holds(group, message.epoch):
            return ()
        return self._epochs.new_spans(group, message.epoch, message.trained)

    def train(self, group: int, epoch: int, spans: Spans) -> None:
        if spans:
            for number, _ in self._store.pushed:
                self.note("train", group, number, epoch=epoch, spans=spans)

    def push(
        self, group: int, message: m.PushMessage, refused: bool, elsewhere: tuple[tuple[bool, ...], ...] = ()
    ) -> None:
        """Record a push, which the epoch must not have counted yet; ``elsewhere`` is as in `Sender`."""
        if self.record is None:
            return
        where, now = (group, message.optimizer), Presence(message.present, elsewhere)
        before, self._present[where] = self._present.get(where), now
        is_known = now == before if before is not None else now.is_whole
        self.note(
            "push",
            group,
            message.optimizer,
            read_at=message.read_at,
            refused=refused,
            epoch=message.epoch,
            spans=self._epochs.new_spans(group, message.epoch, message.trained),
            hyperparameters=message.hyperparameters,
            note=message.note,
            **({} if is_known else now._asdict()),
        )

    def _agreed(self, message: m.FormGroups) -> dict[str, Any]:
        wire_format = {} if message.wire_format == to_wire(RAW) else message.wire_format
        return {
            "method": message.method,
            "wire_format": wire_format,
            "overlap": message.overlap,
            "servers": self._servers,
        }
