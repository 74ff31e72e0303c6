"""The server's state on disk, from which another server can continue when this one is gone.

A save is a file of plain data and tensors (`lightning_omni.wire.codec`), written beside the last one and then renamed.
Each has a journal (`lightning_omni.wire.journal`) of the decisions sent to ranks after it. Every entry is written
before its answer is sent.

Rule 1: the state is copied between two messages, while the server waits; a separate thread writes the copy.
Rule 2: a failed save is repeated when the next one is due, and the last one stays until then. If the journal lacks an
entry, no server continues from an earlier save, which would contradict answers that ranks have.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from torch import Tensor

from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.server.core import ServerCore
from lightning_omni.transport.serving.save_files import (
    ENDED,
    JOURNAL,
    LENGTH,
    NEW,
    SAVED,
    file_of,
    numbers_in,
    read,
    write_save,
)
from lightning_omni.wire.codec import Packed, pack
from lightning_omni.wire.journal import OUTDATED, Call

_log = logging.getLogger(__name__)

EVERY = 30.0
"""Seconds between two saves."""
RECONNECT_TIMEOUT = 300.0
"""Seconds for which ranks look for a standalone server that is gone."""
EMBEDDED_RECONNECT_TIMEOUT = 60.0
"""Seconds for which ranks look for an embedded server that is gone; its supervisor forks another."""
LARGEST_FRACTION = 0.02
"""The largest fraction of its time that the server spends on periodic saves; it saves a larger state less often."""
_LOCK = "lock"
_GAP = "gap-"
"""Prefix that a journal gets when an entry could not be written: renaming needs no space on the disk."""
_PAUSE = 0.25
"""Seconds between two checks whether the run is over, or a lock is free."""
_RELEASE = 10.0
"""Seconds for which a server waits for the lock of its directory."""
_NOT_SAVED = (
    "the server's state could not be saved in %s; the last save stays, if there is one, and the next one is tried when"
    " it is due: %s"
)
_LOST = (
    "what ranks are told could not be written in %s: until the server's state is saved again, its loss would end the"
    " run: %s"
)


class StateDirectory:
    """The directory in which a server saves its state, used by one server at a time.

    Args:
        path: created if missing, so that only its user may enter it.
        every: seconds between two saves.
        reconnect_timeout: seconds for which ranks look for the server when it is gone.

    Raises:
        ConfigurationError: the directory cannot be used, or another server uses it.
    """

    def __init__(self, path: str | Path, every: float = EVERY, reconnect_timeout: float = RECONNECT_TIMEOUT) -> None:
        self._path, self._every, self._reconnect_timeout = Path(path), every, reconnect_timeout
        self._is_written = True  # whether the last save is
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _take(self._lock)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigurationError(f"--state {path}: another server saves its state there; pass another") from None
        except OSError as error:
            raise ConfigurationError(f"--state {path}: {error.strerror}; pass a directory of your own") from error
        for writer in numbers_in(self._path, f"{NEW}-"):  # a server that was killed while writing
            (self._path / f"{NEW}-{writer}").unlink(missing_ok=True)
        files = [number for kind in (SAVED, JOURNAL, _GAP) for number in numbers_in(self._path, kind)]
        self._number = max(files, default=0)
        self._gap = 0  # number of the last journal that lacks an entry
        self._failures = _FailureLog(self._path)
        self._journal: int | None = None
        self._writer: threading.Thread | None = None
        self._due = self._latest = self._asked = 0.0
        self._went_on = False

    def restore(self, core: ServerCore) -> str:
        """Continue the saved run, if one can be continued; return a sentence about it, or ""."""
        core.reconnect_timeout = self._reconnect_timeout
        saves = numbers_in(self._path, SAVED)
        if not saves:
            return ""
        last = saves[-1]
        journals = [number for number in numbers_in(self._path, JOURNAL) if number >= last]
        entries = [entry for number in journals for entry in self._entries(number)]
        is_incomplete = max(numbers_in(self._path, _GAP), default=0) >= last
        if is_incomplete or OUTDATED in entries:
            self._keep_ended(last)
            _log.warning(
                "no server can go on with the run in %s, because %s; the weights of the last save are kept",
                self._path,
                "not all that its ranks were told could be written there"
                if is_incomplete
                else "other groups were formed, or weights handed over, since the last save",
            )
            return ""
        path = file_of(self._path, SAVED, last)
        state = read(path)
        core.load(state, entries, time.monotonic())
        for member in core.roster.members.values():  # loading may have taken longer than they may be silent
            member.last_seen = time.monotonic()
        self._went_on = True
        age = time.time() - path.stat().st_mtime
        return (
            f"goes on with a run of {core.roster.world_size} ranks, from a state that was saved {age:.1f} s before:"
            f" {core.store.clock} updates"
        )

    def poll(self, core: ServerCore) -> None:
        """Save the state if it is due, or discard that of an ended run; call this often, between two messages."""
        try:
            self._poll(core)
        except OSError as error:  # the directory is not even readable
            self._failures.write(_NOT_SAVED, error)

    def _poll(self, core: ServerCore) -> None:
        now = time.monotonic()
        if now < min(self._due, self._asked + _PAUSE) and not core.journal.is_due:
            return
        self._asked = now
        if not core.has_state:
            if self._journal is not None or self._went_on or self._number:
                self.discard(core)
            return
        if not self._is_written and self._number in numbers_in(self._path, SAVED):
            self._is_written = True
            core.journal.saves += 1
            if self._gap < self._number:
                self._gap, core.reconnect_timeout = 0, self._reconnect_timeout
                self._failures.end()
        if now < self._due and not core.journal.is_due:
            return
        if self._writer is not None and self._writer.is_alive():
            return
        if core.training.all_answered or now >= self._latest or self._went_on:
            self._save(core)

    def discard(self, core: ServerCore) -> None:
        """Remove the state of a run that is over; an early end leaves the last save as `ENDED`."""
        self.wait()
        core.journal.write, core.journal.is_due = None, False
        self._close_journal()
        with contextlib.suppress(OSError):
            if core.roster.over and (saves := numbers_in(self._path, SAVED)):  # its weights may still be of use
                self._keep_ended(saves[-1])
            elif not core.roster.over and core.generation and (core.roster.finished or not core.roster.lost):
                # It has ended in good order: nothing of an earlier one stays.
                (self._path / ENDED).unlink(missing_ok=True)
            self._remove_before(self._number + 1)
        self._number, self._due, self._latest, self._went_on, self._is_written = 0, 0.0, 0.0, False, True
        self._gap, core.reconnect_timeout = 0, self._reconnect_timeout

    def close(self, core: ServerCore | None = None) -> None:
        """Stop saving. With ``core``, first save a run that has not ended."""
        self.wait()
        if core is not None and core.has_state:
            self._save(core)
            self.wait()
        if core is not None:
            core.journal.write = None
        self._close_journal()
        os.close(self._lock)

    # --- Files -------------------------------------------------------------------------------------------------------

    def _save(self, core: ServerCore) -> None:
        began = time.monotonic()
        self._number += 1
        self._due, core.journal.is_due = began + self._every, False
        try:
            self._open_journal(core)
            packed, buffer = pack(core.state())
        except (OSError, MemoryError, RuntimeError, OmniError) as error:  # an optimizer's state may hold anything
            if self._journal is None or core.journal.write is None:  # else the last save's journal is of use
                self._lose(core, error)
            self._failures.write(_NOT_SAVED, error)
            return
        self._is_written = False
        took = time.monotonic() - began
        self._due = began + max(self._every, took / LARGEST_FRACTION)
        self._latest = self._due + self._every  # even if groups then wait for answers
        self._writer = threading.Thread(
            target=self._write, args=(self._number, packed, buffer), name="omni-save", daemon=True
        )
        self._writer.start()

    def _write(self, number: int, packed: Packed, buffer: Tensor) -> None:
        if error := write_save(self._path, number, packed, buffer):
            self._failures.write(_NOT_SAVED, error)
        else:
            with contextlib.suppress(OSError):
                self._remove_before(number)

    def _open_journal(self, core: ServerCore) -> None:
        journal = os.open(file_of(self._path, JOURNAL, self._number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._close_journal()
        self._journal = journal

        def write(entry: Call) -> None:
            data = msgspec.msgpack.encode(entry)
            data = len(data).to_bytes(LENGTH, "little") + data
            try:
                if os.write(journal, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._lose(core, error)

        core.journal.write = write
        if self._went_on:
            core.journal.note(core.epochs.go_back)
            self._went_on = False

    def _lose(self, core: ServerCore, error: Exception) -> None:
        """Mark the journal as incomplete: no server can continue from it until the state is saved again."""
        core.journal.write, core.reconnect_timeout, self._gap = None, 0.0, self._number
        with contextlib.suppress(OSError):
            if journals := numbers_in(self._path, JOURNAL):
                file_of(self._path, JOURNAL, journals[-1]).rename(file_of(self._path, _GAP, self._gap))
            for kind in (JOURNAL, _GAP):  # earlier ones are of no use
                for number in numbers_in(self._path, kind):
                    if number < self._gap:
                        file_of(self._path, kind, number).unlink()
        self._failures.write(_LOST, error)

    def _keep_ended(self, number: int) -> None:
        with contextlib.suppress(OSError):
            file_of(self._path, SAVED, number).rename(self._path / ENDED)

    def _entries(self, number: int) -> Iterator[Call]:
        data, decode = file_of(self._path, JOURNAL, number).read_bytes(), msgspec.msgpack.Decoder(Call).decode
        position = 0
        while position + LENGTH <= len(data):
            start = position + LENGTH
            position = start + int.from_bytes(data[position:start], "little")
            if position > len(data):
                return
            try:
                yield decode(data[start:position])
            except msgspec.MsgspecError as error:
                raise ConfigurationError(
                    f"{self._path}: journal {number} is damaged: {error}; pass another directory to begin without"
                ) from error

    def _remove_before(self, before: int) -> None:
        for kind in (SAVED, JOURNAL, _GAP):
            for number in numbers_in(self._path, kind):
                if number < before:
                    with contextlib.suppress(OSError):
                        file_of(self._path, kind, number).unlink()

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None


class _FailureLog:
    """A log that reports once that saving fails, and once that it works again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said: set[str] = set()

    def write(self, text: str, error: Exception) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning(text, self._folder, error)

    def end(self) -> None:
        if self._said:
            self._said.clear()
            _log.warning("the server's state is saved in %s again", self._folder)


def _take(lock: int) -> None:
    """Lock a file, or raise `BlockingIOError`.

    A successor may start before the system has ended the killed server, which holds the lock.
    """
    deadline = time.monotonic() + _RELEASE
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE)
