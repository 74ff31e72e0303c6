"""Checks of a loop: members leave it together, and without Lightning only wrapped optimizers step in it."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from types import FrameType
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_omni.errors import ConfigurationError, RankLost, UnsupportedError
from lightning_omni.methods import Method, method_named
from lightning_omni.methods.model.server_optimizer import held_by
from lightning_omni.runtime._private import collectives_of, iterated_datasets, store_of
from lightning_omni.runtime.executor import Executor
from lightning_omni.runtime.model.buffer_sync import Merge, buffers_of
from lightning_omni.runtime.model.replica import SAMPLED, fingerprints
from lightning_omni.runtime.model.sharded import local_of
from lightning_omni.runtime.model.tensor_sync import are_alike
from lightning_omni.runtime.options import WorldOptions
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
# A rank that holds a part of a model and has failed alone, or was interrupted, is at another collective than its peers,
# which would mistake its next one for theirs. `failed_at_one_place` therefore compares reports of failures in the
# store.

WITHIN = 10.0
"""Seconds for which `ExitCheck.check` of an interrupted rank waits for the others."""
POLL_S = 0.5
"""Seconds between two polls of the store."""
_LEAVE_TOGETHER = (
    "all members of a compute group must make the same number of steps: give each the same number of batches, or end"
    " the loop alike on all of them"
)
_loops = count()


class ExitCheck:
    """A check that the members of this rank's group leave a loop together.

    Unless groups join on their own, all ranks create one for each `World.training`, or for each fit.
    """

    def __init__(self, parallel: ParallelState) -> None:
        self._parallel = parallel
        self.steps = 0
        self._is_interrupted = False
        self._collectives = 0
        self.renew()

    def renew(self) -> None:
        """Count from here: new groups may have members with different step counts. All ranks call it."""
        self._loop, self._times = next(_loops), 0
        self._earlier = self.steps
        self.step_done()

    @contextmanager
    def watch(self) -> Iterator[None]:
        with self.watch_others(), self._noting():
            yield

    @contextmanager
    def watch_others(self) -> Iterator[None]:
        is_over = threading.Event()
        threading.Thread(target=self._watch_others, args=(is_over,), name="omni-leaving", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    @contextmanager
    def _noting(self) -> Iterator[None]:
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

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        signal.default_int_handler(number, frame)

    def step_done(self) -> None:
        """Count this rank's collectives at the end of a step; inside one, members' counts may differ."""
        self._ended = self._steps_here
        if self._is_needed:
            self._collectives = self._count()

    def check(self) -> None:
        """Wait until this group's members leave the loop, too, up to the run's timeout, before ranks synchronize.

        Raises:
            RankLost: another member waits for this one in a further step, has left after another number of steps or,
                if this one was interrupted, has not left `WITHIN` seconds after this call.
        """
        if not self._is_needed:
            return
        parallel, control = self._parallel, self._parallel.control
        is_interrupted, self._is_interrupted = self._is_interrupted, False
        since = self._count() - self._collectives
        self._times += 1
        steps = self._steps_here
        store, keys = self._store, [self._key(member) for member in parallel.members]
        limit = time.monotonic() + (WITHIN if is_interrupted else parallel.options.timeout.total_seconds())
        try:
            store.set(self._key(parallel.rank), str(steps))
            store.set(self._key("first"), f"{parallel.rank} {self._ended} {since}")
            while not _are_there(store, keys):
                if control is None or control.cause is not None:
                    return  # this rank's next call raises the cause
                if store.check([waits := self._key("waits")]):
                    self._end(is_interrupted, f"rank {store.get(waits).decode()} waits for it in a further step")
                if time.monotonic() > limit:
                    if not is_interrupted:
                        return
                    self._end(is_interrupted, f"other members of its compute group have not within {WITHIN:.0f} s")
            theirs = {member: int(store.get(key)) for member, key in zip(parallel.members, keys, strict=True)}
            store.delete_key(self._key(parallel.rank, self._times - 1))  # read by all members, as they are here
        except RankLost:
            raise
        except RuntimeError:  # the store's process is gone, and the server knows of it
            return
        for member, others in theirs.items():
            if others != steps:
                self._end(is_interrupted, f"rank {member} of its compute group has left it after {others}")

    def _end(self, is_interrupted: bool, but: str) -> None:
        left, remedy = f"has left its loop after {self._steps_here} steps", _LEAVE_TOGETHER
        if is_interrupted:
            left = f"was interrupted (Ctrl-C) after {self._steps_here} steps and has left its loop"
            remedy = "catch KeyboardInterrupt outside `with world.training():`, or end the loop alike on all ranks"
        raise RankLost(f"rank {self._parallel.rank} {left}, and {but}: {remedy}")

    def _watch_others(self, is_over: threading.Event) -> None:
        """Report, in a thread, that this rank waits for a member which has left the loop."""
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
        _guards.add(self)

    def wrapped(self, module: Module) -> None:
        self._wrapped.append(ref(module))
        if self._executor().exchanges:
            _watch_outside()
            _outside.add(self)

    def steps(self, optimizer: Optimizer) -> bool:
        """Return whether an `OmniOptimizer` of this world, in several groups, steps this optimizer now."""
        return self._executor().is_stepping and any(part.optimizer is optimizer for part in self._parallel.parts)

    def warn_outside(self, optimizer: Optimizer) -> None:
        """Warn once, on rank 0, of a step outside of a loop that moves wrapped weights, unless DDP has all ranks."""
        if self._parallel.control is not None or set(held_by(optimizer)).isdisjoint(self._weights()):
            return
        _outside.discard(self)
        modules = {id(module()) for module in self._wrapped}
        # `isinstance` would ask proxies for their class, which may be gone.
        wrappers = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
        if self._parallel.rank or any(
            id(each.module) in modules and each.process_group.size() == self._parallel.size for each in wrappers
        ):
            return
        _log.warning(
            "%s.step() outside of `with world.training():` moves weights of a module that world.wrap() has wrapped for"
            " groups: unless your program averages the gradients of all ranks, each group trains a model of its own."
            " Put the loop into `with world.training():`, with an OmniOptimizer, or, for plain DistributedDataParallel,"
            " wrap the module in it",
            type(optimizer).__name__,
        )

    @contextmanager
    def watch(self, steps: Callable[[], int]) -> Iterator[None]:
        """Watch all optimizers' steps in this context; ``steps`` returns the number of the world's own.

        Raises:
            ConfigurationError: an optimizer steps, or weights have moved in the end, and no optimizer is wrapped; one
                moves other weights of wrapped modules; or in the end only others than the wrapped ones have stepped.
            UnsupportedError: a wrapped optimizer, or another one with its weights, steps by itself.
        """
        self._stranger = ""
        before = self._sums() if self._executor().exchanges and not self._parallel.parts else []
        guard = register_optimizer_step_pre_hook(self._refuse)
        try:
            yield
        finally:
            guard.remove()
        if steps() or not self._executor().exchanges:
            return
        if self._stranger:
            raise ConfigurationError(
                f"world.training(): no OmniOptimizer of this world has stepped, and {self._stranger} has; {_WRAP_THEM}"
            )
        if before and before != self._sums():
            raise ConfigurationError(
                f"world.training(): no OmniOptimizer was made, and the weights of the module have moved; {_WRAP_THEM}"
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

    def _sums(self) -> list[int]:
        return [int(local_of(each).contiguous().view(-1).view(torch.uint8).sum()) for each in self._weights()]


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


_guards: WeakSet[RawStepGuard] = WeakSet()
_outside: WeakSet[RawStepGuard] = WeakSet()
"""The guards that have not warned yet."""


@cache
def _watch_outside() -> None:
    """Watch the steps of all optimizers from now on: no hook can be removed while hooks are called."""

    def warn(optimizer: Optimizer, *_: Any) -> None:
        if any(guard.steps(optimizer) for guard in list(_guards)):  # also that of another World, for the same module
            return
        for guard in list(_outside):
            guard.warn_outside(optimizer)

    register_optimizer_step_pre_hook(warn)


# --- What a loop does not hear of, or divides otherwise than meant ----------------------------------------------------


@contextmanager
def announced_wait() -> Iterator[None]:
    """Log after `WITHIN` seconds of this context that this rank, whose loop was closed, waits for the others."""
    words = (
        "the generator that has this rank's loop was closed, by a break or an error of its caller: the rank waits until"
        " all others have left their loops"
    )
    timer = threading.Timer(WITHIN, _log.warning, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn_of_no_update(method: Method, steps: int) -> None:
    _log.warning(
        "world.training(): the parameter server has made no update in the %d steps of this rank's group, none of which"
        " is in the model: with %r a group pushes every %d steps; pass settings with which it pushes more often, or"
        " train for longer",
        *(steps, method, method.push_period),
    )


def warn_of_variables(options: WorldOptions) -> None:
    """Warn if OmniStrategy's variables of groups, method or server differ from a loop's settings: loops ignore them."""
    own = {"GROUPS": options.groups, "METHOD": options.method, "SERVER": options.server.address}
    given = {f"LIGHTNING_OMNI_{name}": str(value) for name, value in own.items()}
    texts = {name: os.environ.get(name, "").strip() for name in given}
    with suppress(ConfigurationError):  # the loop's own method may be spelled with other settings
        if method_named(texts["LIGHTNING_OMNI_METHOD"]) == options.resolved_method():
            del given["LIGHTNING_OMNI_METHOD"]
    if unread := [name for name, value in given.items() if texts[name] not in ("", value)]:
        _log.warning(
            "%s in the environment is read by OmniStrategy alone, and this World has another setting: pass groups=, or"
            " options=WorldOptions(method=..., server=...)",
            " and ".join(unread),
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
