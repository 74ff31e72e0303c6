"""The saved state of a simulated server: when it is saved, and how a replacement server continues from it.

Rule 1: it is saved when a real server saves it (`lightning_omni.transport.serving.state_directory`): after groups were
formed or have joined, and then periodically, between two messages. If groups wait for answers when a save is due, it is
made once none waits, at most one period later.
Rule 2: the state does not change between two messages, so it suffices to make due saves before the next message.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_omni.server import ServerCore
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.journal import Entry


class SavedState:
    """The last save of a server, and the journal of its answers to ranks since.

    Args:
        every: seconds between two saves, above 0.
        on_save: called after each save, except that of a server that has just started.
    """

    def __init__(self, every: float, on_save: Callable[[], None]) -> None:
        self._every, self._on_save = every, on_save
        self._due = self._latest = self._changed = 0.0
        self._saved: tuple[Packed, Tensor]
        self._journal: list[Entry] = []

    def save(self, core: ServerCore, moment: float) -> None:
        self._write(core, moment)
        self._on_save()

    def poll(self, core: ServerCore, now: float) -> None:
        """Make the saves that are due by now. The caller polls before each message, and before the server dies."""
        if core.has_state:
            due = self._changed if core.journal.is_due else self._due
            moment = max(self._changed, due if core.is_quiet else self._latest)
            if moment <= now:
                self.save(core, moment + (now - moment) // self._every * self._every)
        self._changed = now

    def restore(self, core: ServerCore, now: float) -> None:
        """Restore the last save in another server, which saves at once."""
        packed, buffer = self._saved
        core.load(unpack(packed, buffer.clone()), self._journal, now)
        self._write(core, now)
        self._changed = now

    def _write(self, core: ServerCore, moment: float) -> None:
        self._saved, self._journal = pack(core.state()), []
        core.journal.write, core.journal.is_due = self._journal.append, False
        self._due = moment + self._every
        self._latest = self._due + self._every
