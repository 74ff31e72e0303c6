"""The server's state on disk, from which another server can continue when this one is gone.

A save is a file of plain data and tensors (`lightning_omni.wire.codec`), written beside the last one and then renamed.
Each has a journal (`lightning_omni.wire.journal`) of the answers sent to ranks after it. Every entry is written before
the answer is sent.

Rule 1: the state is copied between two messages, while the server waits; a separate thread writes the copy.
Rule 2: a failed save is repeated when the next one is due, and the last one stays until then. If the journal lacks an
entry, no server continues from an earlier save, which would contradict answers that ranks have.
Rule 3: several servers save a consistent state by a command of the coordinating server, which alone has a journal. A
save counts once all have written theirs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from torch import Tensor

from lightning_omni.checks import counted
from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.server.core import ServerCore
from lightning_omni.server.membership.roster import AGAIN
from lightning_omni.transport.serving.save_files import (
    ENDED,
    JOURNAL,
    LENGTH,
    NEW,
    SAVED,
    SHARE,
    file_of,
    numbers_in,
    read,
    share_directory,
    write_save,
)
from lightning_omni.wire.codec import Packed, pack
from lightning_omni.wire.journal import AnyEntry, Entry, RestartedEntry

_log = logging.getLogger(__name__)

EVERY = 30.0
"""Seconds between two saves."""
RECONNECT_TIMEOUT = 300.0
"""Seconds for which ranks look for a standalone server that is gone."""
EMBEDDED_RECONNECT_TIMEOUT = 60.0
"""Seconds for which ranks look for an embedded server that is gone; its supervisor or rank 0 starts it again."""
LARGEST_FRACTION = 0.02
"""The largest fraction of its time that the server spends on saves; it saves a larger state less often."""
_LOCK = "lock"
_BEGUN = "begun-"
"""Prefix of an empty file that names a run whose groups join on their own, until it is saved: see `_as_begun`."""
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
_NAME = re.compile(r"[\w+-]{1,200}", re.ASCII)
"""Names of runs that are valid as file names."""
_MILLISECOND = 1_000_000
"""Nanoseconds in a millisecond."""


class StateDirectory:
    """The directory in which a server saves its state, used by one server at a time.

    Args:
        path: created if missing, so that only its user may enter it.
        every: seconds between two saves.
        reconnect_timeout: seconds for which ranks look for the server when it is gone.
        servers: number of servers; this one coordinates.

    Attributes:
        restored: number of the save that the server continues from; 0 for none.

    Raises:
        ConfigurationError: the directory cannot be used, or another server uses it.
    """

    def __init__(
        self, path: str | Path, every: float = EVERY, reconnect_timeout: float = RECONNECT_TIMEOUT, servers: int = 1
    ) -> None:
        self._path, self._every, self._reconnect_timeout = Path(path), every, reconnect_timeout
        self._others = [share_directory(path, number) for number in range(1, servers)]
        self.restored = 0
        self._is_whole = True  # whether all servers have written the last save
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _take(self._lock)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigurationError(f"--state {path}: another server saves its state there; pass another") from None
        except OSError as error:
            raise ConfigurationError(f"--state {path}: {error.strerror}; pass a directory of your own") from error
        shares = [share_directory(path, number) for number in numbers_in(self._path, SHARE)]
        if servers == 1 or not numbers_in(self._path, SAVED):
            _remove_leftovers(self._path, shares)
        if len(shares) + 1 != servers and any(numbers_in(folder, SAVED) for folder in (self._path, *shares)):
            os.close(self._lock)
            raise ConfigurationError(
                f"--state {path}: a save of {counted(len(shares) + 1, 'server')} lies there; pass --servers"
                f" {len(shares) + 1}, or another directory"
            )
        for folder in (self._path, *shares):
            for writer in numbers_in(folder, f"{NEW}-"):  # a server that was killed while writing
                (folder / f"{NEW}-{writer}").unlink(missing_ok=True)
        for folder in shares[servers - 1 :]:  # left by a run that is over
            with contextlib.suppress(OSError):
                folder.rmdir()
        files = [number for folder in self._folders for number in numbers_in(folder, SAVED)]
        self._number = max(files + numbers_in(self._path, JOURNAL) + numbers_in(self._path, _GAP), default=0)
        self._gap = 0  # number of the last journal that lacks an entry
        self._failures = _FailureLog(self._path)
        self._journal: int | None = None
        self._writer: threading.Thread | None = None
        self._due = self._latest = self._asked = 0.0
        self._went_on = False
        self._begun = ""  # name of the run in the last `_BEGUN` file

    def restore(self, core: ServerCore) -> str:
        """Continue the saved run, if any; return a sentence about it, or ""."""
        core.reconnect_timeout, core.started_at_ms = self._reconnect_timeout, self._start()
        saves = self._whole()
        self._remove_parts(set(saves[-1:]))
        if not saves:
            core.roster.numbers.lost = self._lost()
            return ""
        if max(numbers_in(self._path, _GAP), default=0) >= saves[-1]:
            self._keep_ended(saves[-1])
            _log.warning(
                "no server can go on with the run in %s, because not all that its ranks were told could be written"
                " there; the weights of the last save are kept",
                self._path,
            )
            return ""
        last = self.restored = saves[-1]
        path = file_of(self._path, SAVED, last)
        state = read(path)
        journals = [number for number in numbers_in(self._path, JOURNAL) if number >= last]
        entries = [entry for number in journals for entry in self._entries(number)]
        core.load(state, entries, time.monotonic())
        for member in core.roster.members.values():  # loading may have taken longer than they may be silent
            member.last_seen = time.monotonic()
        self._went_on, self._begun = True, _as_begun(core)
        age = time.time() - path.stat().st_mtime
        return (
            f"goes on with a run of {core.roster.world_size} ranks, from a state that was saved {age:.1f} s before:"
            f" {core.clock} updates"
        )

    def _start(self) -> int:
        """Choose, record and return this server's start time in milliseconds.

        The lock file's modification time stores it, so that it is later than those before even if the clock was set
        back.
        """
        started = max(time.time_ns(), os.fstat(self._lock).st_mtime_ns + _MILLISECOND) // _MILLISECOND
        with contextlib.suppress(OSError):
            os.utime(self._lock, ns=(started * _MILLISECOND, started * _MILLISECOND))
        return started

    def poll(self, core: ServerCore) -> None:
        """Save the state if it is due; call this often, between two messages."""
        try:
            self._note_begun(core)
            self._poll(core)
        except OSError as error:  # the directory is not even readable
            self._failures.write(_NOT_SAVED, error)

    def _poll(self, core: ServerCore) -> None:
        now = time.monotonic()
        if now < min(self._due, self._asked + _PAUSE) and not core.journal.is_due:
            return
        self._asked = now
        if not core.has_state:
            if self._journal is not None or self._went_on or (self._number and not self._others):
                self.discard(core)
            return
        if not self._is_whole and self._number in self._whole():
            self._is_whole = True
            core.journal.saves += 1
            self._remove_before(self._number)
            if self._gap < self._number:
                self._gap, core.reconnect_timeout = 0, self._reconnect_timeout
                self._failures.end()
        if now < self._due and not core.journal.is_due:
            return
        awaits_others = bool(self._others) and not self._is_whole and now < self._latest
        if awaits_others or (self._writer is not None and self._writer.is_alive()):
            return
        if core.training.all_answered or now >= self._latest or self._went_on:
            self._save(core)

    def discard(self, core: ServerCore) -> None:
        """Remove the state of a run that is over; with one server, an early end leaves the last save as `ENDED`."""
        self.wait()
        core.journal.write, core.journal.is_due = None, False
        self._close_journal()
        if core.roster.run:
            self._forget_begun()
        with contextlib.suppress(OSError):
            if core.over and (saves := numbers_in(self._path, SAVED)):  # its weights may still be of use
                self._keep_ended(saves[-1])
            elif not core.over and core.generation and (core.roster.finished or not core.roster.lost):
                # It has ended in good order: nothing of an earlier one stays.
                (self._path / ENDED).unlink(missing_ok=True)
            self._remove_before(self._number + 1)
        # Another server may still be writing the last save, so its number is not used again.
        self._number = self._number if self._others else 0
        self._due, self._latest, self._went_on, self._is_whole = 0.0, 0.0, False, True
        self._gap, core.reconnect_timeout = 0, self._reconnect_timeout

    def close(self, core: ServerCore | None = None) -> None:
        """Stop saving. With ``core``, and without other servers, first save a run that has not ended."""
        self.wait()
        if core is not None and core.has_state and not self._others:  # other servers receive no commands any more
            self._save(core)
            self.wait()
        if core is not None:
            core.journal.write = None
        self._close_journal()
        for folder in self._others:  # empty after a run that is over
            with contextlib.suppress(OSError):
                folder.rmdir()
        os.close(self._lock)

    # --- Files -------------------------------------------------------------------------------------------------------

    def _save(self, core: ServerCore) -> None:
        began = time.monotonic()
        self._number += 1
        self._due, core.journal.is_due = began + self._every, False
        try:
            self._remove_parts({*self._whole()[-1:], self._number - 1})  # the previous save may still be unfinished
            self._open_journal(core)
            packed, buffer = pack(core.state())
        except (OSError, MemoryError, RuntimeError, OmniError) as error:  # an optimizer's state may hold anything
            if self._journal is None or core.journal.write is None:  # else the last save's journal is of use
                self._lose(core, error)
            self._failures.write(_NOT_SAVED, error)
            self._forget_begun()
            return
        if self._others:
            core.save_partitions(self._number)
        self._is_whole = False
        took = time.monotonic() - began
        self._due = began + max(self._every, took / LARGEST_FRACTION)
        self._latest = self._due + self._every  # even if groups then wait for answers
        self._writer = threading.Thread(
            target=self._write, args=(self._number, packed, buffer), name="omni-save", daemon=True
        )
        self._writer.start()

    def _write(self, number: int, packed: Packed, buffer: Tensor) -> None:
        error = write_save(self._path, number, packed, buffer)
        self._forget_begun()
        if error:
            self._failures.write(_NOT_SAVED, error)
        elif not self._others:
            with contextlib.suppress(OSError):
                self._remove_before(number)

    def _open_journal(self, core: ServerCore) -> None:
        journal = os.open(file_of(self._path, JOURNAL, self._number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._close_journal()
        self._journal = journal

        def write(entry: Entry) -> None:
            data = msgspec.msgpack.encode(entry)
            data = len(data).to_bytes(LENGTH, "little") + data
            try:
                if os.write(journal, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._lose(core, error)

        core.journal.write = write
        if self._went_on:
            write(RestartedEntry())
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

    def _note_begun(self, core: ServerCore) -> None:
        """Record a run that groups join on their own: if this server is lost now, they begin it again."""
        begun = _as_begun(core)
        if begun == self._begun or not _NAME.fullmatch(begun):  # ranks choose the name, which may be any text
            return
        self._forget_begun()
        self._begun = begun
        with contextlib.suppress(OSError):  # without the file the run is not begun again, which is safe
            (self._path / f"{_BEGUN}{begun}").touch(mode=0o600)

    def _forget_begun(self) -> None:
        with contextlib.suppress(OSError):
            for begun in self._path.glob(f"{_BEGUN}*"):
                begun.unlink()

    def _lost(self) -> str:
        names = [begun.name.removeprefix(_BEGUN) for begun in self._path.glob(f"{_BEGUN}*")]
        return names[0] if names else ""

    def _keep_ended(self, number: int) -> None:
        if not self._others:
            with contextlib.suppress(OSError):
                file_of(self._path, SAVED, number).rename(self._path / ENDED)

    def _entries(self, number: int) -> Iterator[Entry]:
        data, decode = file_of(self._path, JOURNAL, number).read_bytes(), msgspec.msgpack.Decoder(AnyEntry).decode
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

    @property
    def _folders(self) -> list[Path]:
        return [self._path, *self._others]

    def _whole(self) -> list[int]:
        return sorted(set.intersection(*(set(numbers_in(folder, SAVED)) for folder in self._folders)))

    def _remove_parts(self, but: set[int]) -> None:
        for folder in self._folders if self._others else ():
            for number in set(numbers_in(folder, SAVED)) - but:
                file_of(folder, SAVED, number).unlink(missing_ok=True)

    def _remove_before(self, before: int) -> None:
        for folder in self._folders:
            for kind in (SAVED, JOURNAL, _GAP):
                for number in numbers_in(folder, kind):
                    if number < before:
                        with contextlib.suppress(OSError):
                            file_of(folder, kind, number).unlink()

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None


class ShareDirectory:
    """The directory in which a server saves its share, at the coordinating server's command.

    The coordinating server's lock on its own directory protects this one.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._failures = _FailureLog(self._path)
        self._writer: threading.Thread | None = None
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--state {path}: {error.strerror}; pass a directory of your own") from error

    def restore(self, core: ServerCore, number: int) -> None:
        """Load this server's share of save ``number``, if not 0, and save at each command."""
        if number:
            core.load(read(file_of(self._path, SAVED, number)), (), 0.0)
        core.on_save = lambda number: self._save(core, number)

    def _save(self, core: ServerCore, number: int) -> None:
        if self._writer is not None:
            self._writer.join()
        try:
            packed, buffer = pack(core.state())
        except (MemoryError, RuntimeError, OmniError) as error:  # an optimizer's state may hold anything
            self._failures.write(_NOT_SAVED, error)
            return
        self._writer = threading.Thread(
            target=self._write, args=(number, packed, buffer), name="omni-save", daemon=True
        )
        self._writer.start()

    def _write(self, number: int, packed: Packed, buffer: Tensor) -> None:
        if error := write_save(self._path, number, packed, buffer):
            self._failures.write(_NOT_SAVED, error)
        else:
            self._failures.end()


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


def _as_begun(core: ServerCore) -> str:
    """Return the name of the run that groups join on their own, with `AGAIN` once a rank has joined."""
    return f"{core.roster.run}{AGAIN}" if core.roster.joining else core.roster.numbers.claimed


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


def _remove_leftovers(path: Path, shares: list[Path]) -> None:
    """Remove, also from the list, saves of other servers that match none of server 0."""
    saved = set(numbers_in(path, SAVED))
    for folder in list(shares):
        numbers = numbers_in(folder, SAVED)
        if numbers and saved.isdisjoint(numbers):
            for number in numbers:
                file_of(folder, SAVED, number).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
            shares.remove(folder)
