"""Ctrl-C in a loop without Lightning, where the loop catches it itself and ends.

The members of a compute group wait for each other in every step. If one of them leaves its loop, the others would wait
until torch's collectives time out, and so would this one, where all ranks synchronize.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any

from lightning_omni.errors import RankLost
from lightning_omni.optimizer.failing import are_alike

WITHIN = 10.0
"""Seconds in which all members of a group that was interrupted must have left their loops."""
_loops = count()


class Interruption:
    """Knows whether a loop of this process was interrupted. All ranks make one for each loop.

    Attributes:
        steps: that this rank has begun.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._loop, self._times = next(_loops), 0
        self._has_come = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Meanwhile Ctrl-C is noted, where Python's own handler would raise a KeyboardInterrupt, and does."""
        is_ours = threading.current_thread() is threading.main_thread()
        if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self, group: Any, rank: int, members: Sequence[int]) -> None:
        """This rank has left its loop to synchronize with all others: if it was interrupted, so must its group be.

        Args:
            group: a process group of all ranks.
            rank: this one.
            members: ranks of its compute group.

        Raises:
            RankLost: another member has not left its loop, or at another step.
        """
        if not self._has_come or len(members) == 1:
            return
        self._has_come, self._times = False, self._times + 1
        where = f"interrupted/{self._loop}/{self._times}"
        if not are_alike(group, rank, members, where, str(self.steps), WITHIN):
            raise RankLost(
                f"rank {rank} was interrupted (Ctrl-C) after {self.steps} steps and has left its loop; other members of"
                f" its compute group have not within {WITHIN:.0f} s, or after another number of steps: catch"
                " KeyboardInterrupt outside `with world.training():`, or end the loop alike on all ranks"
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        signal.default_int_handler(number, frame)
