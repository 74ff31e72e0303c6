"""The rejoining of an evicted group, as a new one, by a restart of the process that has started its ranks.

An interrupted fit cannot be continued, neither in torch.distributed nor in a user's hooks, but the script can run again
from its beginning. Therefore nothing is repaired: if the script ends with the error, and no user code has caught it,
the process replaces itself (`os.execve`) with the command that started it. Rank numbers, weights and the position in
the epoch are then those of any group that joins late.
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

from lightning_omni.runtime.membership.registration import COMES_BACK, comes_back_to, return_to, run_is_saved
from lightning_omni.strategy import launcher

_log = logging.getLogger(__name__)

LONGEST_WAIT = 30.0
"""Maximum wait in seconds before a group rejoins; the wait starts at one second and doubles."""
FORGETS_AFTER = 2 * LONGEST_WAIT
"""Seconds in the run after which an eviction is no longer in a row with the one before."""
try:
    _DIRECTORY = os.getcwd()
except OSError:  # it was deleted; `_obstacle` reports that
    _DIRECTORY = ""
"""The directory in which the command was started: its paths may be relative, and the script may change it later."""


class Rejoining:
    """The rejoining of a group of which this process is the only rank, or has started the others.

    Attributes:
        is_armed: whether the process restarts its command when its script ends.
    """

    def __init__(self) -> None:
        self._run, self._count = comes_back_to()
        self._is_saved = run_is_saved()
        self._began = math.inf
        self._error: BaseException | None = None
        self._reason = ""
        self.is_armed = False

    def enlisted(self, run: str) -> None:
        """Note that the group is about to join the run of this name."""
        if run != self._run:
            self._run, self._is_saved = run, True  # assumed until `took_part`

    def took_part(self, run: str, is_saved: bool) -> None:
        """Note that the group participates in a run, and whether another server could continue it."""
        self._run, self._is_saved, self._began = run, is_saved, time.monotonic()

    def finished(self) -> None:
        """Note that the run is trained to its end, so that there is none to rejoin; a further fit is another run."""
        self._run, self._count = "", 0
        os.environ.pop(COMES_BACK, None)

    def arm(self, error: BaseException, reason: BaseException, most: int, ranks: int) -> bool:
        """Prepare to rejoin if the script ends with the error of the fit; return whether the group can.

        Args:
            error: the error that the fit raises.
            reason: why the group is out of the run.
            most: how often in a row the group may rejoin.
            ranks: number of ranks of the group.
        """
        if not most or not self._run:
            return False
        if time.monotonic() - self._began > FORGETS_AFTER:
            self._count = 0
        if self._count >= most:
            _log.warning(
                "this group has joined again %d times in a row (Elastic(max_rejoins=...)) and does so no more: %s",
                most,
                reason,
            )
        elif obstacle := _obstacle(ranks):
            _log.warning("this group does not rejoin automatically: %s", obstacle)
        else:
            self._error, self._reason, self.is_armed = error, str(reason), True
            self._replace_hook()
        return self.is_armed

    def start_again(self) -> None:
        """Restart this process's command after a wait. This does not return, except by Ctrl-C during the wait."""
        wait = min(LONGEST_WAIT, 2.0**self._count)
        _log.warning(
            "%s. The group joins again in %.0f s, as a new one (number %d in a row): this process starts `%s` again",
            self._reason,
            wait,
            self._count + 1,
            shlex.join(sys.orig_argv),
        )
        launcher.end_children()
        for child in multiprocessing.active_children():  # loader workers would survive, as the process id stays
            child.kill()
            child.join()
        time.sleep(wait)
        environment = {**launcher.environment(), COMES_BACK: return_to(self._run, self._count + 1, self._is_saved)}
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream may be closed or None
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
    """Return why this process cannot start all ranks of its group again, or an empty string."""
    if dist.is_torchelastic_launched():
        return "torchrun has started it, and starts it again if it is given --max-restarts"
    if multiprocessing.parent_process() is not None:
        return "its processes are copies that another one has made (start_method)"
    if launcher.is_interactive():
        return "in a notebook or an interactive session there is no script to start again"
    if not sys.executable or not (hasattr(sys.modules["__main__"], "__file__") or "-c" in sys.orig_argv):
        return "there is no command that could be started again"
    if not os.path.isdir(_DIRECTORY):
        return "the directory in which its command was started is gone"
    if launcher.children() != ranks - 1:
        return "not all of its ranks were started by this process"
    return ""


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from, or while handling."""
    seen: set[int] = set()
    next_one: BaseException | None = error
    while next_one is not None and id(next_one) not in seen:
        seen.add(id(next_one))
        yield next_one
        next_one = next_one.__cause__ or next_one.__context__


def _close_at_exec() -> None:
    """Close the sockets and devices of libraries at `os.execve`, so that their ports are free again."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
            if int(name) > 2:
                os.set_inheritable(int(name), False)
