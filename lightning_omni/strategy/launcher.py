"""The launchers, which start ranks as Lightning does and keep a run alive when some ranks die."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_all_start_methods
from subprocess import Popen
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.nn import Module
from typing_extensions import override

from lightning_omni.checks import counted
from lightning_omni.errors import ConfigurationError
from lightning_omni.run_report import RunReport
from lightning_omni.runtime.model.meshes import evenly, sizes_in
from lightning_omni.runtime.model.sharded import whole
from lightning_omni.strategy.lightning_internals.callbacks import callbacks_of
from lightning_omni.strategy.lightning_internals.loops import is_fitting
from lightning_omni.strategy.lightning_internals.strategies import set_start_method, start_method
from lightning_omni.strategy.shared_parts import SharedParts
from lightning_omni.topology import check_groups
from lightning_omni.transport.serving import ServerProcess
from lightning_omni.wire import messages as m

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher as _ProcessesBase
    from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as _Base

else:
    _Base = _ProcessesBase = object

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
_LAUNCHER = "OMNI_LAUNCHER_PID"
"""Environment variable with the id of the process that started a rank."""
GRACE = 5.0
"""Seconds that the other ranks get to end by themselves when the run cannot continue."""


_STATUS = "_lightning_omni_exit_status"
"""Name of the process's `ExitStatus` in the module `sys`."""


class ExitStatus:
    """An object in `sys` that ends this process with a status although its script ends without an error.

    `os._exit` in an `atexit` handler would skip other handlers; `sys` is cleared after all of them, with the streams
    flushed.
    """

    def __init__(self, code: int) -> None:
        self.code, self._process, self._exit, self._own = code, os.getpid(), os._exit, os.getpid

    def __del__(self) -> None:
        if self._own() == self._process:
            self._exit(self.code)


def exit_process(code: int, reason: str) -> None:
    """Set this process's status at the end of its script; the first call counts."""
    if not hasattr(sys, _STATUS):
        _log.error("%s; when the script has come to its end, this process ends with status %d", reason, code)
        setattr(sys, _STATUS, ExitStatus(code))


_observer: ChildObserver | None = None
"""The observer of this process's children; the first run of a script starts them, and later ones use them."""
_environment: dict[str, str] = {}
"""A copy of the environment before Lightning changes it."""


class OmniLauncherHooks(_Base):
    """Lightning's subprocess launcher with another observer of the children.

    Attributes:
        launching: the strategy's part that decides.
    """

    launching: Launching

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        global _observer
        _environment.update({} if _environment else os.environ)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_LAUNCHER] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[_LAUNCHER]
            _observer = ChildObserver(self.procs, self.launching)
            _observer.start()
            atexit.register(_observer.finish)
        elif _observer is not None:
            _observer.launching = ref(self.launching)  # a later fit of the script, with another strategy
        _share_threads(self.num_processes)
        if self.cluster_environment.node_rank() == self.cluster_environment.local_rank() == 0:
            self.launching.on_launch(trainer)
        with _not_orphaned():
            result = function(*args, **kwargs)
        if _observer is not None and (failures := self.launching.failures()):
            exit_process(1, f"{failures[0]}, and the others have gone on without its group")
        return result

    @override
    def kill(self, signum: Any) -> None:
        if signum == signal.SIGKILL:
            end_children()
        super().kill(signum)

    def __getstate__(self) -> dict[str, Any]:  # type: ignore[explicit-override, unused-ignore]  # from Python 3.11
        return {name: value for name, value in vars(self).items() if name != "launching"} | {"procs": []}


@contextmanager
def _not_orphaned() -> Iterator[None]:
    """Return a context in which a rank ends with the parent that started it, even if it is blocked."""
    parent, is_over = os.getppid(), threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            if is_over.wait(1.0):
                return
        if not is_over.wait(GRACE):
            _log.critical("the process of local rank 0 is gone; this rank ends")
            os._exit(1)

    if os.environ.get(_LAUNCHER) == str(parent):
        threading.Thread(target=watch, name="omni-parent-observer", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class OmniProcessesHooks(_ProcessesBase):
    """Lightning's launcher for ``start_method="spawn"`` and ``"fork"``, which also returns the run's report."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None and trainer.strategy.root_device.type == "cuda":
            _refuse_initialized_cuda(start_method(trainer.strategy))
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        def gather(module: Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
            state.update(whole(state, keeps=self._strategy.local_rank == 0))

        # Lightning writes the module's state for the script's process, which cannot load this rank's shards.
        gathering = trainer.lightning_module.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            gathering.remove()

    @override
    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        extra: dict[str, Any] = super().get_extra_results(trainer)
        strategy: Any = trainer.strategy
        report = strategy.last_report
        extra["omni_report"] = None if report is None else asdict(report)  # Lightning traverses it
        if trainer.state.fn == "fit":
            extra["omni_results"] = [each.omni_results() for each in _with_results(trainer)]
        return extra

    @override
    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        report = extra.pop("omni_report", None)
        if report is not None and trainer.state.fn == "fit":
            strategy: Any = trainer.strategy
            strategy.last_report = RunReport(**report)
        for callback, results in zip(_with_results(trainer), extra.pop("omni_results", ()), strict=False):
            callback.take_omni_results(results)
        super().update_main_process_results(trainer, extra)


def _with_results(trainer: Trainer) -> list[Any]:
    return [each for each in callbacks_of(trainer) if hasattr(each, "take_omni_results")]


def _refuse_initialized_cuda(method: str) -> None:
    if method != "spawn" and torch.cuda.is_initialized():
        remedy = "restart the kernel" if is_interactive() else 'pass start_method="spawn"'
        raise ConfigurationError(
            f"start_method={method!r}: this process has used CUDA, and its copies cannot use it; {remedy}, and"
            " leave CUDA (.cuda(), .to('cuda')) to the module and its Trainer"
        )


class Launching:
    """The strategy's decisions about the processes of its ranks.

    Attributes:
        is_writing: returns whether this process is writing a checkpoint, which a child's end must not interrupt.
    """

    def __init__(self, parts: SharedParts, is_writing: Callable[[], bool], is_rejoining: Callable[[], bool]) -> None:
        self._parts, self.is_writing, self._is_rejoining = parts, is_writing, is_rejoining

    def choose_start_method(self) -> None:
        """Fork the ranks in interactive sessions, as Lightning does."""
        strategy, environment = self._parts.strategy, self._parts.strategy.cluster_environment
        is_ours = environment is not None and not environment.creates_processes_externally
        if not is_ours or not is_interactive() or start_method(strategy) != "popen":
            return
        if "fork" not in get_all_start_methods():
            raise ConfigurationError(
                "OmniStrategy in a notebook or an interactive session: ranks are copies of its process there"
                ' (start_method="fork"), which this system cannot make; run the code as a script'
            )
        set_start_method(strategy, "fork")

    def check_groups(self) -> None:
        parts, strategy = self._parts, self._parts.strategy
        environment = strategy.cluster_environment
        groups, sharding = parts.world_options.groups, parts.world_options.model_parallel
        if groups is None or environment is None:
            return
        ranks = asked = strategy.num_nodes * strategy.num_processes
        if environment.creates_processes_externally:
            ranks = environment.world_size()
        if ranks < groups <= asked:
            raise ConfigurationError(
                f"groups={groups} and devices={strategy.num_processes}, but only {counted(ranks, 'rank')} of"
                f" {asked} came: {type(environment).__name__} has Lightning start none; start"
                " as many by torchrun --nproc-per-node or srun --ntasks-per-node, or, in an interactive shell"
                " of a SLURM job, set SLURM_JOB_NAME=interactive"
            )
        check_groups(groups, ranks)
        if sharding is not None:
            nodes = [ranks // strategy.num_nodes] * strategy.num_nodes
            sizes_in(evenly(ranks, groups, sharding), sharding, nodes)

    def launcher(self) -> OmniLauncherHooks | OmniProcessesHooks:
        parts, strategy = self._parts, self._parts.strategy
        if (method := start_method(strategy)) != "popen":
            processes: OmniProcessesHooks = parts.namespace.processes(strategy, method)
            return processes
        launcher: OmniLauncherHooks = parts.namespace.launcher(
            strategy.cluster_environment, strategy.num_processes, strategy.num_nodes
        )
        self.attach(launcher)
        return launcher

    def attach(self, launcher: Any) -> None:
        """Let a launcher ask this object, unless it forks or spawns."""
        if isinstance(launcher, OmniLauncherHooks):
            launcher.launching = self

    def on_launch(self, trainer: Trainer | None) -> None:
        """Prepare callbacks and the server on rank 0 while the others start."""
        if trainer is None or not is_fitting(trainer):
            return
        for callback in callbacks_of(trainer):
            if callable(prepare := getattr(callback, "on_omni_launch", None)):
                prepare(trainer)
        if (self._parts.world_options.groups or self._parts.strategy.num_nodes) > 1:
            self.prepare_server()

    def prepare_server(self) -> None:
        parts = self._parts
        if parts.world_options.server.address is None and parts.current_world is None and parts.server_process is None:
            with contextlib.suppress(OSError):  # `RunServer` tries again, and all ranks get the error
                parts.server_process = ServerProcess()

    def on_death(self, local_rank: int, code: int) -> bool:
        """Report, in the launcher's thread, that a child has failed; return whether the run continues."""
        parts, strategy = self._parts, self._parts.strategy
        world = parts.current_world
        registration = world.registration if world is not None else None
        rank = strategy.node_rank * strategy.num_processes + local_rank
        rank += registration.first if registration is not None else 0
        control = world.executor.control if world is not None else None  # read once: the run may end meanwhile
        if parts.signals.is_stopping or self._is_rejoining():
            return True
        if world is not None and (rank in world.lost or rank in world.ever_lost):
            return True
        if world is not None and world.is_finished and not self._parts.is_evaluating:
            if code > 0:  # its script failed after the end of training
                exit_process(1, f"the process of rank {rank} ended with {describe_exit(code)}")
            return True
        if world is None or control is None:
            return False
        control.post(m.RankEnded(rank=rank, reason=f"the process of rank {rank} ended with {describe_exit(code)}"))
        # The server evicts a group that has joined on its own; the group may then rejoin.
        return registration is not None or 0 not in world.topology.members(world.topology.group_of(rank))

    def failures(self) -> Sequence[str]:
        """Return the errors of ranks without which the run continued."""
        world = self._parts.current_world
        return () if world is None or world.registration is not None else world.failures


class ChildObserver(threading.Thread):
    """A thread that watches a launcher's children, and asks the strategy whether the run continues when one fails.

    Attributes:
        launching: held weakly, because it keeps a strategy's process groups alive.
    """

    def __init__(self, children: Sequence[Popen[bytes]], launching: Launching) -> None:
        super().__init__(name="omni-child-observer", daemon=True)
        self._children, self.launching = children, ref(launching)
        self._is_dismissed = self._is_finishing = False

    @property
    def count(self) -> int:
        return len(self._children)

    def finish(self) -> None:
        self._is_finishing = True
        if not hasattr(sys, "last_value"):  # if this script has failed, children may wait for it in vain
            self.join(GRACE)

    def dismiss(self) -> None:
        self._is_dismissed = True
        for child in self._children:
            child.kill()
            child.wait()

    @override
    def run(self) -> None:
        watched = dict(enumerate(self._children, start=1))
        while watched and not self._is_dismissed:
            time.sleep(POLL_SECONDS)
            for rank, child in list(watched.items()):
                code = child.poll()
                if code is None or self._is_dismissed:
                    continue
                del watched[rank]
                launching = self.launching()
                if code == 0 or (launching is not None and launching.on_death(rank, code)):
                    continue
                if launching is not None and not self._is_finishing:  # without its strategy there is no fit to end
                    self._end_everything(rank, code)
                    return
                if code > 0:
                    exit_process(1, f"the process of local rank {rank} ended with {describe_exit(code)}")

    def _end_everything(self, rank: int, code: int) -> None:
        # Ctrl-C interrupts all ranks, but this one gets no signal while it waits for the others to start.
        is_interrupted = code == -signal.SIGINT
        if not is_interrupted:
            text = describe_exit(code)
            _log.error("the process of local rank %d ended with %s; the run cannot go on without it", rank, text)
        self._give_grace()
        if self._is_dismissed:
            return
        if self._is_finishing:
            if not is_interrupted:
                exit_process(1, f"the process of local rank {rank} ended with {describe_exit(code)}")
            return
        for child in self._children:
            child.send_signal(signal.SIGKILL)
        if is_interrupted:
            os._exit(128 + signal.SIGINT)
        os.kill(os.getpid(), signal.SIGKILL)

    def _give_grace(self) -> None:
        # A rank that writes a checkpoint waits for no dead rank, and its file may be all that remains of the run.
        left = GRACE
        while left > 0 and not self._is_dismissed and not self._is_finishing:
            time.sleep(POLL_SECONDS)
            launching = self.launching()
            left = GRACE if launching is not None and launching.is_writing() else left - POLL_SECONDS


def is_interactive() -> bool:
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__") or bool(sys.flags.interactive)


def environment() -> dict[str, str]:
    return dict(_environment or os.environ)


def children() -> int:
    return _observer.count if _observer is not None else 0


def end_children() -> None:
    if _observer is not None:
        _observer.dismiss()


def describe_exit(code: int) -> str:
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def _share_threads(processes: int) -> None:
    # Lightning does this, too: otherwise every rank starts as many threads as the node has cores.
    if "OMP_NUM_THREADS" not in os.environ and processes > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, cores // processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
