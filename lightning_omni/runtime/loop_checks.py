"""Checks of a loop: members leave it together, and without Lightning only wrapped optimizers step in it."""

from __future__ import annotations

import gc
import inspect
import logging
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_omni.errors import ConfigurationError, RankLost, UnsupportedError
from lightning_omni.methods import Method
from lightning_omni.methods.model.server_optimizer import held_by
from lightning_omni.runtime._private import collectives_of, iterated_datasets, store_of
from lightning_omni.runtime.executor import Executor
from lightning_omni.runtime.model.buffer_sync import Merge, buffers_of
from lightning_omni.runtime.model.replica import SAMPLED, fingerprints
from lightning_omni.runtime.model.tensor_sync import are_alike
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.process_groups import check_none_lost, is_switched

# --- The begin of a loop ----------------------------------------------------------------------------------------------


def check_may_begin(parallel: ParallelState, is_begun: bool, exchanges: bool) -> None:
    """Raise the errors of `World.training` for a loop in elastic runs, inside another loop, or after lost ranks."""
    if parallel.registration is not None:
        raise UnsupportedError(
            "World.training() with elastic=True: a group that joins late must find its place in the epoch, which is"
            " done for Lightning's loops; use OmniStrategy(elastic=True), or start all ranks together"
        )
    is_part = dist.get_world_size() < parallel.size
    if not parallel.ever_lost:
        check_none_lost()  # in a loop of another World
    is_inside = is_begun or (is_switched() and not parallel.ever_lost)
    if (is_inside and exchanges) or (is_part and not parallel.ever_lost):
        raise ConfigurationError(
            "world.training() inside `with world.training():`, of this World or another one: one loop trains all"
            " that the OmniOptimizers of one World hold, and further epochs belong into it; make all of them before"
        )
    if is_part:
        raise RankLost(
            f"world.training(): an earlier loop has lost the ranks {', '.join(map(str, sorted(parallel.ever_lost)))},"
            f" and a loop begins with all {parallel.size}; start the script again, from a checkpoint"
        )


# --- The end of a loop ------------------------------------------------------------------------------------------------

# If a member of a compute group has left its loop, after Ctrl-C or without further batches, another would wait in its
# next step until torch's collectives time out, and so would the first, where all ranks synchronize. `ExitCheck` ends
# their group instead. With Lightning, a loop is an epoch, or what is trained of it before a validation.
#
# Rule 1: a step costs nothing. A thread of each member polls the store of torch's process groups, and members write to
# it once one of them has left its loop.
# Rule 2: the others wait for a slow member. Only a member that has begun a collective which the first will never join
# waits in vain, and process groups count their collectives.
#
# A rank that holds a part of a model and has failed or was interrupted alone is at another collective than its peers,
# which would mistake its next one for theirs. `failed_at_one_place` therefore compares reports of failures in the
# store.

POLL_S = 0.5
"""Seconds between two polls of whether another member has left its loop."""
_loops = count()


class ExitCheck:
    """A check that the members of this rank's group leave a loop together.

    Unless groups join on their own, all ranks create one for each `World.training`, or for each fit.
    """

    def __init__(self, parallel: ParallelState) -> None:
        self._parallel = parallel
        self.steps = 0
        self._collectives = 0
        self.renew()

    def renew(self) -> None:
        """Count from here: new groups may have members with different step counts. All ranks call it."""
        self._loop, self._times = next(_loops), 0
        self._earlier = self.steps
        self.step_done()

    @contextmanager
    def watch(self) -> Iterator[None]:
        is_over = threading.Event()
        threading.Thread(target=self._watch_others, args=(is_over,), name="omni-leaving", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def step_done(self) -> None:
        """Count this rank's collectives at the end of a step; inside one, members' counts may differ."""
        self._ended = self._steps_here
        if self._is_needed:
            self._collectives = self._count()

    def check(self) -> None:
        """Wait until this group's members leave the loop, too, up to the run's timeout, before ranks synchronize.

        Raises:
            RankLost: another member waits for this one in a further step, or has left after another number of steps.
        """
        if not self._is_needed:
            return
        parallel, control = self._parallel, self._parallel.control
        since = self._count() - self._collectives
        self._times += 1
        steps = self._steps_here
        store, keys = self._store, [self._key(member) for member in parallel.members]
        limit = time.monotonic() + parallel.options.timeout.total_seconds()
        try:
            store.set(self._key(parallel.rank), str(steps))
            store.set(self._key("first"), f"{parallel.rank} {self._ended} {since}")
            while not _are_there(store, keys):
                if control is None or control.cause is not None or time.monotonic() > limit:
                    return  # this rank's next call raises the cause
                if store.check([waits := self._key("waits")]):
                    self._end(f"rank {store.get(waits).decode()} waits for it in a further step")
            theirs = {member: int(store.get(key)) for member, key in zip(parallel.members, keys, strict=True)}
            store.delete_key(self._key(parallel.rank, self._times - 1))  # read by all members, as they are here
        except RankLost:
            raise
        except RuntimeError:  # the store's process is gone, and the server knows of it
            return
        for member, others in theirs.items():
            if others != steps:
                self._end(f"rank {member} of its compute group has left it after {others}")

    def _end(self, but: str) -> None:
        raise RankLost(
            f"rank {self._parallel.rank} has left its loop after {self._steps_here} steps, and {but}: all members of a"
            " compute group must make the same number of steps: give each the same number of batches, or end the loop"
            " alike on all of them, also after Ctrl-C"
        )

    def _watch_others(self, is_over: threading.Event) -> None:
        """Report, in a thread, that this rank waits for another member which has left the loop."""
        before: tuple[int, int] | None = None
        while not is_over.wait(POLL_S):
            if not self._is_needed:
                continue
            times = self._times
            try:
                first = self._key("first", times + 1)
                if not self._store.check([first]):
                    continue
                _, steps, since = map(int, self._store.get(first).split())
                mine = (self._ended, self._count() - self._collectives)  # a step that is not over has some
                if times == self._times and mine > (steps, since) and mine == before:
                    self._store.set(self._key("waits", times + 1), str(self._parallel.rank))
                before = mine
            except RuntimeError:  # the store's process is gone
                continue

    @property
    def _steps_here(self) -> int:
        return self.steps - self._earlier

    @property
    def _is_needed(self) -> bool:
        return self._parallel.is_computing and len(self._parallel.members) > 1

    @property
    def _store(self) -> Any:
        return store_of(self._parallel.process_groups.original)

    def _key(self, what: Any, times: int | None = None) -> str:
        times = self._times if times is None else times
        return f"lightning-omni/left/{self._loop}/{times}/{self._parallel.members[0]}/{what}"

    def _count(self) -> int:
        try:
            return sum(map(collectives_of, self._parallel.groups_inside))
        except KeyError:  # other groups are being formed
            return 0


def _are_there(store: Any, keys: list[str]) -> bool:
    until = time.monotonic() + POLL_S
    while not store.check(keys):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)  # torch logs a warning, with a traceback, for each `store.wait` that ends in vain
    return True


def forget(group: Any, rank: int) -> None:
    """Delete this rank's report of a failure in an earlier run of this process."""
    store_of(group).delete_key(_key(rank))


def failed_at_one_place(group: Any, rank: int, ranks: Sequence[int], where: str, within: float) -> bool:
    """Return whether all of these ranks, which call it, report the same place of failure.

    ``where`` is that of this rank (see `place_of`). The others' reports are awaited for ``within`` seconds.
    """
    store, keys = store_of(group), [_key(each) for each in ranks]
    try:
        store.set(_key(rank), where)
        store.wait(keys, timedelta(seconds=within))
        return all(store.get(key) == where.encode() for key in keys)
    except RuntimeError:  # a rank has not reported in time, or the store's process is gone
        return False


def place_of(error: BaseException) -> str:
    frames = (f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__))
    return f"{type(error).__name__} at {' '.join(frames)}"


def _key(rank: int) -> str:
    return f"lightning-omni/failed/{rank}"


# --- Optimizers that are not wrapped ----------------------------------------------------------------------------------

# With an optimizer that the user has not wrapped, each group would train a model of its own, without any error.

_log = logging.getLogger(__name__)

_WRAP_THEM = (
    "groups would exchange nothing of it, and each would train a model of its own: wrap every optimizer before `with"
    " world.training():`, optimizer = OmniOptimizer(optimizer, world), and step that"
)


class RawStepGuard:
    """A guard against steps without an `OmniOptimizer` of the world, while several groups train."""

    def __init__(self, parallel: ParallelState, executor: Callable[[], Executor]) -> None:
        self._parallel, self._executor = parallel, executor
        self._wrapped: list[ref[Module]] = []
        self._stranger = ""

    def wrapped(self, module: Module) -> None:
        self._wrapped.append(ref(module))

    @contextmanager
    def watch(self, steps: Callable[[], int]) -> Iterator[None]:
        """Watch all optimizers' steps in this context; ``steps`` returns the number of the world's own.

        Raises:
            ConfigurationError: another optimizer steps wrapped weights, or only others step.
            UnsupportedError: a wrapped optimizer steps by itself.
        """
        self._stranger = ""
        guard = register_optimizer_step_pre_hook(self._refuse)
        try:
            yield
        finally:
            guard.remove()
        if self._stranger and self._executor().exchanges and not steps():
            raise ConfigurationError(
                f"world.training(): no OmniOptimizer of this world has stepped, and {self._stranger} has; {_WRAP_THEM}"
            )

    def _refuse(self, optimizer: Optimizer, *_: Any) -> None:
        parallel, executor = self._parallel, self._executor()
        if not executor.exchanges or executor.is_stepping or (parallel.steps_at_worker and not parallel.is_computing):
            return
        name = type(optimizer).__name__
        if any(part.optimizer is optimizer for part in parallel.parts):
            raise UnsupportedError(
                f"{name}.step() would move this rank's weights, and groups would exchange nothing; call step() of the"
                " OmniOptimizer that wraps it"
            )
        moved = set(held_by(optimizer))
        for part in parallel.parts:
            if not moved.isdisjoint(part.replica.ordered):
                raise UnsupportedError(
                    f"{name}.step() would move weights of {type(part.optimizer).__name__}, which is one of the group's:"
                    " call its step(closure), that of the OmniOptimizer, in which groups exchange, with a closure that"
                    " computes the loss and its gradients"
                )
        if not parallel.is_computing:  # perhaps the model is evaluated, by a classifier that is trained on top of it
            return
        if not parallel.parts or not moved.isdisjoint(self._weights()):
            raise ConfigurationError(f"{name}.step() of an optimizer that no OmniOptimizer wraps; {_WRAP_THEM}")
        self._stranger = name

    def modules(self) -> Iterator[Module]:
        for module in self._wrapped:
            if (alive := module()) is not None:
                yield alive

    def _weights(self) -> Iterator[Parameter]:
        for module in self.modules():
            yield from module.parameters()


def unwrapped(trained: Iterable[Parameter], wrapped: Iterable[Module]) -> list[Module]:
    """Return the outermost modules in memory that hold trained weights which no wrapped module holds."""
    loose = set(trained) - {each for module in wrapped for each in module.parameters()}
    if not loose:
        return []
    modules = [each for each in gc.get_objects() if issubclass(type(each), Module) and "_parameters" in vars(each)]
    holders = [each for each in modules if not loose.isdisjoint(each.parameters())]
    parts = {id(part) for each in holders for part in each.modules() if part is not each}
    return [each for each in holders if id(each) not in parts]


def untrained_of(modules: Iterable[Module], trained: Container[Tensor]) -> dict[str, str]:
    """Describe the tensors of modules that no optimizer moves, by name: each by a checksum of a sample."""
    found = {
        id(tensor): (f"{name} of the {type(module).__name__} that world.wrap() has not wrapped", tensor)
        for module in modules
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor not in trained and tensor.layout == torch.strided and not is_lazy(tensor)
    }
    marks = fingerprints((tensor for _, tensor in found.values()), SAMPLED)
    names = [name for name, _ in found.values()]
    return dict(sorted((name, f"of checksum {mark:08x}") for name, mark in zip(names, marks, strict=True)))


def warn_of_own_statistics(parallel: ParallelState, modules: Iterable[Module]) -> None:
    """Warn if ranks have different running statistics in the wrapped ``modules`` after a loop. All ranks call it."""
    held = {id(each.tensor): each for module in modules for each in buffers_of(module) if each.merge is Merge.MEAN}
    marks = fingerprints(each.tensor for each in held.values())
    [are_one] = are_alike([zlib.crc32(repr(marks).encode())], parallel.all_reduce_max)
    if not are_one and held and parallel.is_recorder:
        first, *others = (each.name for each in held.values())
        _log.warning(
            "world.training(): each rank has running statistics of its own after the loop (%s%s), and would"
            " evaluate another model: call world.enter_world(net) as the loop's last line, which merges them",
            *(first, f" and {len(others)} more" if others else ""),
        )


# --- What a loop does not hear of, or divides otherwise than meant ----------------------------------------------------


def warn_of_no_update(method: Method, steps: int) -> None:
    _log.warning(
        "world.training(): the parameter server has made no update in the %d steps of this rank's group, none of which"
        " is in the model: with %r a group pushes every %d steps; pass settings with which it pushes more often, or"
        " train for longer",
        *(steps, method, method.push_period),
    )


class OwnSamplers:
    """The samplers and iterable datasets of a loop by which each group trains all samples."""

    def __init__(self, parallel: ParallelState) -> None:
        self._parallel, self._before = parallel, WeakSet(_samplers())

    def warn(self) -> None:
        parallel, members = self._parallel, len(self._parallel.members)
        is_made = any(each.num_replicas == members and each not in self._before for each in _samplers())
        name = "a DistributedSampler was made" if is_made else _iterable_that_asks()
        if name:
            _log.warning(
                "%s inside `with world.training():`, where torch.distributed has the %d ranks of one group, so each of"
                " the %d groups trains all samples: to divide them among all ranks, pass num_replicas=world.size,"
                " rank=world.rank to the sampler, or both numbers to the dataset",
                *(name, members, len(parallel.topology.alive)),
            )


def _samplers() -> list[DistributedSampler[Any]]:
    return [each for each in gc.get_objects() if issubclass(type(each), DistributedSampler)]


def _iterable_that_asks() -> str:
    """Describe an iterable dataset being loaded whose code asks for the number of ranks; "" if there is none."""
    for kind in {type(each) for each in iterated_datasets() if isinstance(each, IterableDataset)}:
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name != "__init__" and "get_world_size" in method.__code__.co_names:
                return f"{kind.__name__}.{name} calls get_world_size()"
    return ""
