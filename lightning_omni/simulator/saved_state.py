"""The server's state as it would lie on a disk, in virtual time: when it is saved, and how another server goes on.

Rule 1: it is saved when a real server saves it (`lightning_omni.server.saving`): when groups were formed or have
joined, and then every so many seconds, between two messages; if groups wait for answers then, as soon as none does, but
at most as many seconds later.
Rule 2: between two messages nothing changes. So it is enough to save before the next message what was due by then.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_omni.protocol import ServerCore
from lightning_omni.protocol.codec import Packed, pack, unpack
from lightning_omni.protocol.journal import Entry


class SavedState:
    """The last save of a server, and the journal of what ranks were told since.

    Args:
        every: seconds between two saves, above 0.
        on_save: called after each, but for that of a server that has just begun.
    """

    def __init__(self, every: float, on_save: Callable[[], None]) -> None:
        self._every, self._on_save = every, on_save
        self._due = self._latest = self._changed = 0.0
        self._saved: tuple[Packed, Tensor]
        self._journal: list[Entry] = []

    def save(self, core: ServerCore, moment: float) -> None:
        """Saves the state as of a moment, in seconds."""
        self._write(core, moment)
        self._on_save()

    def poll(self, core: ServerCore, now: float) -> None:
        """Saves what was due by now. To be called before each message, and before the server dies."""
        if core.has_state:
            due = self._changed if core.journal.is_due else self._due
            moment = max(self._changed, due if core.is_quiet else self._latest)
            if moment <= now:
                self.save(core, moment + (now - moment) // self._every * self._every)
        self._changed = now

    def restore(self, core: ServerCore, now: float) -> None:
        """Another server goes on from the last save, and saves at once."""
        packed, buffer = self._saved
        core.load(unpack(packed, buffer.clone()), self._journal, now)
        self._write(core, now)
        self._changed = now

    def _write(self, core: ServerCore, moment: float) -> None:
        self._saved, self._journal = pack(core.state()), []
        core.journal.write, core.journal.is_due = self._journal.append, False
        self._due = moment + self._every
        self._latest = self._due + self._every
