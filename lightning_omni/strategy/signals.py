"""SIGTERM and SLURM's requeue signal: a handler sets a flag, and all ranks act on it at the same batch.

Lightning's own handlers make collectives inside the handler, wherever that interrupts the rank: ranks then wait for
each other in different ones. Here nothing but a flag is set, and it travels with what is exchanged anyway: with an
all-reduce in the place of the broadcast that Lightning makes before every batch, and with the heartbeats where there is
a server.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_omni.optimizer import World
from lightning_omni.strategy import _private
from lightning_omni.strategy.waiting import waiting_sentence, waits_in
from lightning_omni.topology import RECORDER

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_log = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds without progress after which a rank that is to end is taken to be blocked, by the dead, say, and ends."""
LONG_WAIT = 60.0
"""Seconds without progress after which a rank that waits in a collective of the user's says so."""
_POLL_SECONDS = 0.25
"""Seconds between two polls of the flags."""

# What ranks tell each other before a batch, and servers by heartbeats; of those of several ranks the largest counts.
_NOTHING, _REQUEUE, _TERMINATE = range(3)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Signals:
    """The signals of one rank, from before the first batch of a fit to its end.

    Args:
        terminated: the exception by which Lightning's loops end on SIGTERM.

    Attributes:
        is_stopping: whether all ranks have agreed to end.
    """

    def __init__(self, terminated: type[SystemExit]) -> None:
        self._terminated = terminated
        self._before: dict[int, _Handler] = {}
        self._replaced: dict[int, _Handler] = {}
        self._trainer: Trainer | None = None
        self._world: World | None = None
        self._leave: Callable[[], None] = lambda: None
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._terminates = self._requeues = self._requeued = False
        self._progress = self._longest = 0.0
        self._watcher: threading.Thread | None = None
        self.is_stopping = False

    def __getstate__(self) -> dict[str, Any]:  # type: ignore[explicit-override, unused-ignore]  # from Python 3.11
        return {"_terminated": self._terminated}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_terminated"])  # type: ignore[misc]

    # --- Handlers -----------------------------------------------------------------------------------------------------

    def prepare(self, requeue: int | None) -> None:
        """Before Lightning registers its handlers.

        Args:
            requeue: SLURM's signal on which a job is put into the queue again, if that is on.
        """
        self.is_stopping = self._terminates = self._requeues = self._requeued = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, requeue) if number is not None}

    def install(
        self,
        trainer: Trainer,
        world: World,
        leave: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """After Lightning has registered its handlers, in whose place ours come. Called again, does nothing.

        Args:
            trainer: the Trainer.
            world: this rank's place in the run.
            leave: synchronizes all groups, for the last time.
            waiting: within it this rank waits for others.
        """
        is_alone = world.size == 1 and world.enlistment is None
        if self._replaced or is_alone or threading.current_thread() is not threading.main_thread():
            return
        self._trainer, self._world, self._leave, self._waiting = trainer, world, leave, waiting
        for number, before in self._before.items():
            if number == signal.SIGTERM:
                self._replaced[number] = signal.signal(number, self._on_terminate)
            elif before in (None, signal.SIG_DFL) and callable(signal.getsignal(number)):  # none of the user's
                self._replaced[number] = signal.signal(number, self._on_requeue)
        _private.set_batch_agreement(trainer, self.agree)
        world.wants_stop, world.on_stop = False, self._stop
        self._longest, self._progress = 0.0, time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="omni-signals", daemon=True)
        self._watcher.start()

    def restore(self) -> None:
        """The handlers are those of before the fit, which Lightning restores, too, when it has torn down more.

        Its own would make a collective in between, to which ranks that are ready earlier do not come any more.
        """
        for number, handler in self._replaced.items():
            if signal.getsignal(number) in (self._on_terminate, self._on_requeue):
                before = self._before[number]
                signal.signal(number, handler if before is None else before)
        self._replaced, self._watcher = {}, None
        if self._trainer is not None:
            _private.set_batch_agreement(self._trainer, None)
        self._trainer, self._world = None, None

    @property
    def is_told_to_end(self) -> bool:
        """Whether this rank was told to end by SIGTERM."""
        return self._terminates

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminates = True
        if callable(theirs := self._before.get(number)):
            theirs(number, frame)

    def _on_requeue(self, number: int, frame: FrameType | None) -> None:
        self._requeues = True

    # --- Together -----------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """At the start of a batch, on every rank of the default process group: whether there is something to do."""
        if self._trainer is None:
            return
        self.progress()
        wanted = torch.tensor(self._wanted(), device=self._trainer.strategy.root_device)
        with self._waiting():
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
            code = int(wanted)  # each look at a tensor on a GPU waits for all that the GPU still computes
        if code == _REQUEUE:
            self._requeue()
        elif code == _TERMINATE:
            assert self._world is not None
            self._world.wants_stop = True
            self._leave()
            self._stop()

    def agree_alone(self) -> None:
        """The same, for a rank that is a group by itself and has joined others: Lightning takes it for the only one."""
        if self._world is not None and self._world.size == 1:
            self.agree()

    def _requeue(self) -> None:
        """The recorder's group saves, and the recorder has the job requeued: all as Lightning does it.

        A group that has joined on its own has a job of its own, and nothing to save: the run's state is at the server.
        """
        self._requeued = True
        assert self._world is not None
        if self._world.enlistment is not None:
            if dist.get_rank() == 0:
                _requeue_job()
            return
        for number, handler in self._replaced.items():
            if number != signal.SIGTERM and callable(handler):
                handler(number, None)

    def _stop(self) -> None:
        """All ranks are here, and end."""
        assert self._trainer is not None
        _private.mark_terminated(self._trainer)
        self.is_stopping = True
        self.pause()
        raise self._terminated(128 + signal.SIGTERM)

    def _wanted(self) -> int:
        """What this rank was told to do, or has heard that another was."""
        world = self._world
        assert world is not None
        status = world.control.status if world.control is not None and world.enlistment is None else None
        others = status.signal if status is not None else _NOTHING
        saves = RECORDER in world.members or world.enlistment is not None
        if saves and not self._requeued and (self._requeues or others == _REQUEUE):
            return _REQUEUE
        return _TERMINATE if self._terminates or others == _TERMINATE else _NOTHING

    # --- While the rank is elsewhere ----------------------------------------------------------------------------------

    def progress(self) -> None:
        """This rank is not blocked: it begins a batch, say."""
        now = time.monotonic()
        if math.isfinite(self._progress):
            self._longest = max(self._longest, now - self._progress)
        self._progress = now

    def pause(self) -> None:
        """What comes now, a checkpoint, say, may take its time."""
        self._progress = math.inf

    def _watch(self) -> None:
        """Tells others of this rank's signals, says what it waits in for long, and ends it if it is blocked."""
        trainer, world, since, has_said = self._trainer, self._world, math.inf, False
        while self._watcher is threading.current_thread() and world is not None and trainer is not None:
            time.sleep(_POLL_SECONDS)
            if world.control is not None and world.enlistment is None:
                world.control.signal = _TERMINATE if self._terminates else _REQUEUE if self._requeues else _NOTHING
            now = time.monotonic()
            if self._terminates and now < since:
                since = now
                ends = "the run ends" if world.enlistment is None else "its group leaves the run"
                _log.warning("rank %d was told to end by SIGTERM; %s at the start of a batch", world.rank, ends)
                if trainer.strategy.launcher is not None:
                    trainer.strategy.launcher.kill(signal.SIGTERM)
            silent = now - self._progress
            if silent > LONG_WAIT and not has_said:
                where = waits_in(sys._current_frames().get(threading.main_thread().ident or 0))
                has_said = bool(where)
                if has_said:
                    _log.warning(waiting_sentence(world.rank, silent, where))
            is_blocked = min(silent, now - since) > max(GRACE, 2 * self._longest)
            if self._terminates and not self.is_stopping and is_blocked:
                _log.critical("rank %d ends: SIGTERM, and for %.0f s no batch has begun or ended", world.rank, silent)
                os._exit(128 + signal.SIGTERM)


def _requeue_job() -> None:
    """Has SLURM put this process's job into the queue again, which then ends it by SIGTERM."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    try:
        status = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        _log.error("the job of this group, %s, is not requeued: scontrol cannot be run: %s", job, error)
    else:
        outcome = "is requeued" if status == 0 else f"is not requeued: scontrol requeue ended with status {status}"
        _log.log(logging.WARNING if status else logging.INFO, "the job of this group, %s, %s", job, outcome)
