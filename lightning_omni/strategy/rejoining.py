"""A group that was evicted joins the run again, as a new one: the process that has started its ranks begins afresh.

What a fit was cut off in cannot be gone back to, neither in torch.distributed nor in a user's hooks; the script can be
run again from its beginning. So nothing is repaired: when the script has ended with the error, and no code of the
user's has caught it, the process replaces itself (`os.execve`) with the command that it was started with. Numbers,
weights and the place in the epoch are then those of any group that comes late.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

from lightning_omni.optimizer.enlistment import COMES_BACK, comes_back_to, return_to, run_is_saved
from lightning_omni.strategy import launcher

_log = logging.getLogger(__name__)

LONGEST_WAIT = 30.0
"""Seconds before a group joins again, at most; they double from one."""
FORGETS_AFTER = 2 * LONGEST_WAIT
"""Seconds in the run after which an eviction is not one more in a row: it has trained for longer than it waits."""
_DIRECTORY = os.getcwd()


class Rejoining:
    """Has a group join again of which this process is the only rank, or has started the others.

    Attributes:
        is_armed: whether the process starts its command again when its script ends.
    """

    def __init__(self) -> None:
        self._run, self._count = comes_back_to()
        self._is_saved = run_is_saved()
        self._began = math.inf
        self._error: BaseException | None = None
        self._reason = ""
        self.is_armed = False

    def enlisted(self, run: str) -> None:
        """The group is to take part in the run of that name."""
        if run != self._run:
            self._run, self._is_saved = run, True  # as far as is known

    def took_part(self, run: str, is_saved: bool) -> None:
        """Note that the group takes part in a run.

        Args:
            run: its name.
            is_saved: whether another server could continue it.
        """
        self._run, self._is_saved, self._began = run, is_saved, time.monotonic()

    def finished(self) -> None:
        """The run has been trained to its end: there is none to join again, and a further fit is of another one."""
        self._run, self._count = "", 0
        os.environ.pop(COMES_BACK, None)

    def arm(self, error: BaseException, reason: BaseException, most: int, ranks: int) -> bool:
        """The fit ends with this error: if the script does, too, the group joins again.

        Args:
            error: that comes out of the fit.
            reason: that the group is out of the run.
            most: how often in a row it may join again.
            ranks: of the group.

        Returns:
            Whether it can.
        """
        if not most or not self._run:
            return False
        if time.monotonic() - self._began > FORGETS_AFTER:
            self._count = 0
        if self._count >= most:
            _log.warning(
                "this group has joined again %d times in a row (max_rejoins=) and does so no more: %s", most, reason
            )
        elif obstacle := _obstacle(ranks):
            _log.warning("this group does not rejoin automatically: %s", obstacle)
        else:
            self._error, self._reason, self.is_armed = error, str(reason), True
            self._replace_hook()
        return self.is_armed

    def start_again(self) -> None:
        """This process begins afresh. Does not return, but by Ctrl-C while it waits."""
        wait = min(LONGEST_WAIT, 2.0**self._count)
        _log.warning(
            "%s. The group joins again in %.0f s, as a new one (number %d in a row): this process starts `%s` again",
            self._reason,
            wait,
            self._count + 1,
            shlex.join(sys.orig_argv),
        )
        launcher.end_children()
        for child in multiprocessing.active_children():  # workers of data loaders, which would take it for their parent
            child.kill()
            child.join()
        time.sleep(wait)
        environment = {**launcher.environment(), COMES_BACK: return_to(self._run, self._count + 1, self._is_saved)}
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
                stream.flush()
        _close_at_exec()
        os.chdir(_DIRECTORY)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

    def _replace_hook(self) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            if isinstance(error, KeyboardInterrupt) or all(each is not self._error for each in _behind(error)):
                before(kind, error, traceback)
                return
            try:
                self.start_again()
            except KeyboardInterrupt:
                raise SystemExit(130) from None

        sys.excepthook = hook


def _obstacle(ranks: int) -> str:
    """Why this process cannot start all ranks of its group again, or an empty string."""
    if dist.is_torchelastic_launched():
        return "torchrun has started it, and starts it again if it is given --max-restarts"
    if multiprocessing.parent_process() is not None:
        return "its processes are copies that another one has made (start_method)"
    if launcher.is_interactive():
        return "in a notebook or an interactive session there is no script to start again"
    if not sys.executable or not (hasattr(sys.modules["__main__"], "__file__") or "-c" in sys.orig_argv):
        return "there is no command that could be started again"
    if launcher.children() != ranks - 1:
        return "not all of its ranks were started by this process"
    return ""


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from or in the handling of."""
    seen: set[int] = set()
    next_one: BaseException | None = error
    while next_one is not None and id(next_one) not in seen:
        seen.add(id(next_one))
        yield next_one
        next_one = next_one.__cause__ or next_one.__context__


def _close_at_exec() -> None:
    """Sockets and devices that libraries hold open are not for what comes: its ports are to be free again."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # that of the list itself, for one
            if int(name) > 2:
                os.set_inheritable(int(name), False)
