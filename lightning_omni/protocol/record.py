"""What happened at the server, in order: enough to go through a run once more, step by step, without its devices."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from lightning_omni.errors import ConfigurationError

_log = logging.getLogger(__name__)

Kind = Literal[
    "seed", "form", "restructure", "push", "expire", "train", "fetch", "rest", "resume", "retire", "leave", "join"
]
Spans = tuple[tuple[int, int], ...]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to one optimizer's shard. An access to a merged head is a push to it.

    Attributes:
        kind: ``"seed"``: the server was given weights, for groups that stand; ``"form"``: other groups were formed on
            the same weights; ``"restructure"``: a group's optimizer has other parameter groups than before, or more
            parameters; ``"push"``; ``"expire"``: the method went on at a moment that it had asked for; ``"train"``: a
            group said, when it drew or waited or left, that it has begun to train batches of which no push has told;
            ``"fetch"``: a group read the master weights outside an exchange; ``"rest"``, ``"resume"``,
            ``"retire"`` (evicted): see `lightning_omni.methods.ServerSide`; ``"leave"``: a group evicted in good
            order, at the end of its run; ``"join"``: a group more takes part.
        time: seconds on the server's clock.
        group: number of the group.
        optimizer: number of the optimizer.
        read_at: of a push, the clock that it was computed at.
        clock: updates that the master weights contain after the event.
        refused: a push that was not finite.
        epoch: of a push or a training, the epoch; -1 if its data is not leased.
        spans: of the same, the epoch's positions that were trained since the last event that told of any, a batch
            each.
        hyperparameters: of a push, those that it travelled with.
        note: of a push, the number that it travelled with; of an access to a merged head, the value of clipping.
        groups: of a seed or form, the ranks of each group; of a join, those of the one.
        method: of a seed or form, the method as plain data.
        wire_format: of the same, how pushes are put into bytes, as plain data; none if they travel raw.
        overlap: of the same, whether exchanges travel while groups compute.
        servers: of a seed or form, how many hold a share of the weights each; the record is of the first.
        parameters: of a restructuring, the names of the parameters that are new to the group.
        param_groups: of the same, the settings of each parameter group, with places of its parameters as ``params``;
            none if the optimizer steps at the workers.
        present: of a push, which parameters have a tensor, if it is not the same as in the group's last push (or all,
            in its first). Of several servers: for each entry of the share that the first holds.
        elsewhere: of several servers, the same at each of the others; nothing for one at which all entries have a
            tensor. It stands wherever ``present`` does, and if either is not the same as in the group's last push.
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
    """A record on disk: one event in a line of JSON.

    If it cannot be written any more, because the disk is full, say, the recording ends with a warning and with its last
    whole line; the run goes on.

    Args:
        path: the file; overwritten if it exists.

    Raises:
        ConfigurationError: it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._file: io.FileIO | None
        try:
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115  # open for as long as the server runs
        except OSError as error:
            raise ConfigurationError(
                f"record={str(path)!r}: {error.strerror}; pass a file that can be written"
            ) from error
        self._written = 0

    def __call__(self, event: Event) -> None:
        """Writes an event down; at once, for the process may be killed."""
        if self._file is None:
            return
        line = msgspec.json.encode(event) + b"\n"
        try:
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
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_record(path: str | Path) -> Iterator[Event]:
    """The events of a record, in order.

    Raises:
        ConfigurationError: the file is no record.
    """
    decoder = msgspec.json.Decoder(Event)
    if not Path(path).is_file():
        raise ConfigurationError(f"{path}: there is no such record; pass the file that record= was given")
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:  # noqa: PERF203  # the line's number belongs into the error
                raise ConfigurationError(f"{path}, line {number}: not a record of a run: {error}") from error
