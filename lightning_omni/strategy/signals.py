"""SIGTERM and SLURM's requeue signal: a handler sets a flag, and a group's ranks act on it at the same batch.

Lightning's own handlers call collectives wherever they interrupt the rank, so that ranks may wait in different ones.
Here an all-reduce sends the flag, in place of Lightning's broadcast before every batch, and so do the heartbeats if
there is a server.
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
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_omni.runtime import World
from lightning_omni.strategy import NAMESPACES
from lightning_omni.strategy.lightning_internals.callbacks import current_hook
from lightning_omni.strategy.lightning_internals.loops import set_batch_agreement
from lightning_omni.strategy.lightning_internals.strategies import mark_terminated
from lightning_omni.topology import RECORDER

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


_log = logging.getLogger(__name__)

GRACE = 30.0
"""Fewest seconds without progress after which a rank that received SIGTERM counts as blocked, and exits."""
LONG_WAIT = 60.0
"""Seconds without progress after which a rank that waits in a collective of the user's code logs a warning."""
_POLL_SECONDS = 0.25
_HELD = 10.0
"""Seconds for which heartbeats do not pass on a SIGTERM that torchrun may have sent because a worker died.

Meanwhile the dead worker's group is evicted; another group of that node still ends the run.
"""

# Codes that ranks exchange before a batch, and send to the server with heartbeats; the maximum over ranks applies.
_NOTHING, _REQUEUE, _TERMINATE = range(3)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Signals:
    """The signals of one rank, from before the first batch of a fit to its end.

    Attributes:
        is_stopping: whether this rank ends as agreed with others.
        is_told_to_end: whether this rank has received SIGTERM.
    """

    _trainer: Trainer
    _world: World
    _leave: Callable[[], None]
    _waiting: Callable[[], AbstractContextManager[None]]

    def __init__(self, terminated: type[SystemExit]) -> None:
        self._terminated = terminated
        self._before: dict[int, _Handler] = {}
        self._replaced: dict[int, _Handler] = {}
        self.is_told_to_end = self._requeues = self._requeued = False
        self._progress = self._longest = 0.0
        self._watcher: threading.Thread | None = None
        self.is_stopping = False

    # --- Handlers -----------------------------------------------------------------------------------------------------

    def prepare(self, requeue: int | None) -> None:
        """Reset all flags, and store the present handlers, before Lightning registers its own."""
        self.is_stopping = self.is_told_to_end = self._requeues = self._requeued = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, requeue) if number is not None}

    def install(
        self,
        trainer: Trainer,
        world: World,
        leave: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Replace Lightning's handlers, after it has registered them.

        Further calls do nothing, nor does one outside the main thread or on the only rank of a run.

        ``leave`` is `EpochDriver.interrupt`; within ``waiting`` this rank waits for others.
        """
        is_alone = world.size == 1 and world.registration is None
        if self._replaced or is_alone or threading.current_thread() is not threading.main_thread():
            return
        self._trainer, self._world, self._leave, self._waiting = trainer, world, leave, waiting
        for number, before in self._before.items():
            if number == signal.SIGTERM:
                self._replaced[number] = signal.signal(number, self._on_terminate)
            elif before in (None, signal.SIG_DFL) and callable(signal.getsignal(number)):  # the user has set no handler
                self._replaced[number] = signal.signal(number, self._on_requeue)
        set_batch_agreement(trainer, self.agree)
        world.wants_stop, world.on_stop = False, self._stop
        self._longest, self._progress = 0.0, time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="omni-signals", daemon=True)
        self._watcher.start()

    def restore(self) -> None:
        """Restore the handlers from before the fit, as Lightning does later in its teardown.

        In between, its own would call a collective that finished ranks do not join.
        """
        for number, handler in self._replaced.items():
            if signal.getsignal(number) in (self._on_terminate, self._on_requeue):
                before = self._before[number]
                signal.signal(number, handler if before is None else before)
        if self._replaced:
            set_batch_agreement(self._trainer, None)
        self._replaced, self._watcher = {}, None

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self.is_told_to_end = True
        if callable(theirs := self._before.get(number)):
            theirs(number, frame)

    def _on_requeue(self, number: int, frame: FrameType | None) -> None:
        self._requeues = True

    # --- Together -----------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Agree with the default process group at the start of a batch on an action, and perform it."""
        self.progress()
        code = self._wanted()
        if dist.get_world_size() > 1:
            wanted = torch.tensor(code, device=self._trainer.strategy.root_device)
            with self._waiting():
                dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
                code = int(wanted)  # reading a GPU tensor waits for all pending work of the GPU
        if code == _REQUEUE:
            self._requeue()
        elif code == _TERMINATE:
            self._world.wants_stop = True
            self._leave()
            self._stop()

    def agree_alone(self) -> None:
        """Call `agree` on a rank that has joined as a group by itself: Lightning sees only this rank."""
        if self._replaced and self._world.size == 1:
            self.agree()

    def _requeue(self) -> None:
        """Save from the recorder's group and have the recorder requeue the job, as Lightning does.

        A group that has joined saves nothing, and requeues its own job.
        """
        self._requeued = True
        if self._world.registration is not None:
            if dist.get_rank() == 0:
                _requeue_job()
            return
        for number, handler in self._replaced.items():
            if number != signal.SIGTERM and callable(handler):
                handler(number, None)

    def _stop(self) -> None:
        mark_terminated(self._trainer)
        self.is_stopping = True
        self.pause()
        raise self._terminated(128 + signal.SIGTERM)

    def _wanted(self) -> int:
        world = self._world
        status = world.control.status if world.control is not None and world.registration is None else None
        others = status.signal if status is not None else _NOTHING
        requeues = (self._requeues or others == _REQUEUE) and not self._requeued
        if requeues and (RECORDER in world.members or world.registration is not None):  # this group saves
            return _REQUEUE
        return _TERMINATE if self.is_told_to_end or others == _TERMINATE else _NOTHING

    # --- While the rank is elsewhere ----------------------------------------------------------------------------------

    def progress(self) -> None:
        now = time.monotonic()
        if math.isfinite(self._progress):
            self._longest = max(self._longest, now - self._progress)
        self._progress = now

    def pause(self) -> None:
        self._progress = math.inf

    def _watch(self) -> None:
        """Pass on signals, warn about long waits in user collectives, and exit if blocked after SIGTERM."""
        trainer, world, since, has_said = self._trainer, self._world, math.inf, False
        while self._watcher is threading.current_thread():
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if world.control is not None and world.registration is None:
                # torchrun ends the other workers of a node when one has died, which the server may not know yet.
                is_told = self.is_told_to_end and (not dist.is_torchelastic_launched() or now - since > _HELD)
                world.control.signal = _TERMINATE if is_told else _REQUEUE if self._requeues else _NOTHING
            if self.is_told_to_end and now < since:
                since = now
                ends = "the run ends" if world.registration is None else "its group leaves the run"
                _log.warning("rank %d was told to end by SIGTERM; %s at the start of a batch", world.rank, ends)
                if trainer.strategy.launcher is not None:
                    trainer.strategy.launcher.kill(signal.SIGTERM)
            silent = now - self._progress
            if silent > LONG_WAIT and not has_said:
                where = user_collective_of(sys._current_frames().get(threading.main_thread().ident or 0))
                has_said = bool(where)
                if has_said:
                    _log.warning(waiting_sentence(world.rank, silent, where))
            is_blocked = min(silent, now - since) > max(GRACE, 2 * self._longest)
            if self.is_told_to_end and not self.is_stopping and is_blocked:
                _log.critical("rank %d ends: SIGTERM, and for %.0f s no batch has begun or ended", world.rank, silent)
                os._exit(128 + signal.SIGTERM)


def _requeue_job() -> None:
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    try:
        status = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        _log.error("the job of this group, %s, is not requeued: scontrol cannot be run: %s", job, error)
    else:
        outcome = "is requeued" if status == 0 else f"is not requeued: scontrol requeue ended with status {status}"
        _log.log(logging.WARNING if status else logging.INFO, "the job of this group, %s, %s", job, outcome)


_COLLECTIVES = "torch.distributed.distributed_c10d"
_LIBRARIES = {
    "torch",
    "torchmetrics",
    "lightning_omni",
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
}
_LOOPS = tuple(f"{name}.loops." for name in NAMESPACES)


def user_collective_of(frame: FrameType | None) -> str:
    """Return the collective that a thread is in and the user's code that called it, if any."""
    collective = ""
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        if module.startswith(_LOOPS):
            return ""
        if module == _COLLECTIVES:
            collective = code.co_name
        elif collective and module.partition(".")[0] not in _LIBRARIES | sys.stdlib_module_names:
            called = getattr(code, "co_qualname", code.co_name)  # exists from Python 3.11 on
            return f"{collective}(), called in {called} ({Path(code.co_filename).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


def training_position(trainer: Trainer) -> str:
    called = user_collective_of(sys._getframe()).partition(", ")[2] or f"in {current_hook(trainer) or 'no hook'}"
    return f"{called}, after batch {trainer.fit_loop.batch_idx + 1} of epoch {trainer.current_epoch}"


def waiting_sentence(rank: int, seconds: float, where: str) -> str:
    return (
        f"rank {rank} has waited for {seconds:.0f} s in {where}: not all ranks have called it. If a hook calls it every"
        " n batches, let it count by batch_idx or trainer.global_step, in which the ranks of a group agree. Counts of"
        " its own differ after OmniTuner or regroup() has put ranks of different groups together."
        " A process group with ranks of several groups is for outside of the training epoch"
    )


def end_in_one_line(error: BaseException) -> None:
    """Print an error that ends the process in one line: the traceback of an eviction points nowhere in the script."""
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, traceback: TracebackType | None) -> None:
        if raised is error:
            raised.__cause__ = None  # hides the context, too
            before(kind, raised.with_traceback(None), None)
        else:
            before(kind, raised, traceback)

    sys.excepthook = hook


def requeue_signal(environment: Any) -> int | None:
    return getattr(environment, "requeue_signal", None) if getattr(environment, "auto_requeue", False) else None
