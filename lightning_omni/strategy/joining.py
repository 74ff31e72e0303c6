"""Groups that join a running run: the state that they receive, and an evicted group that joins again."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_omni.checks import plain
from lightning_omni.errors import ConfigurationError, MalformedMessage, UnsupportedError
from lightning_omni.runtime import names_of
from lightning_omni.runtime.model.replica import fingerprints
from lightning_omni.runtime.model.sharded import fill, is_part, local_of, reshard, tensors_of
from lightning_omni.runtime.model.tensor_sync import write
from lightning_omni.runtime.registration import COMES_BACK, comes_back_to, return_to
from lightning_omni.strategy import launcher
from lightning_omni.strategy.lightning_internals.callbacks import (
    averaged_models,
    deciding_callbacks,
    dump_checkpoint,
    limits_in_callbacks,
    load_callback_states,
    load_checkpoint,
    output_folders,
    set_output_folders,
)
from lightning_omni.strategy.lightning_internals.loops import (
    progress_counters,
    reload_epochs,
    replaces_scheduler,
    runs_finder,
    set_reload_epochs,
    start_fit_at_epoch,
)
from lightning_omni.strategy.lightning_internals.metrics import cached_metric_values, set_cached_metrics
from lightning_omni.strategy.loops.epoch import DataSizes, EntryPoint
from lightning_omni.strategy.shared_parts import SharedParts
from lightning_omni.wire.codec import pack
from lightning_omni.wire.steps_and_samples import Progress

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


# --- The state that a joining group receives --------------------------------------------------------------------------

# The recorder's group makes the state each time the groups begin to compute, and the server stores it. It is a
# checkpoint without weights and optimizer state, whose progress is that of the run. A group that joins loads it before
# its loops begin, and continues in the current epoch.

_APART = ("state_dict", "current_model_state", "loops", "epoch", "global_step")
"""Omitted entries of Lightning's checkpoint: the server has the weights, and progress is counted in samples."""
_ALIKE = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
)
"""Arguments of the Trainer that must be equal in all groups."""


class RunStates:
    """The state of a run, made by the recorder's group for joining groups.

    Attributes:
        is_described: whether the checkpoint being made is for groups that join: without optimizer state, and with
            weights only for hooks.
    """

    def __init__(self, parts: SharedParts) -> None:
        self._parts = parts
        self._told: set[str] = set()
        self._again: dict[str, Any] | None = None
        self._limits: dict[str, float | str | None] = {}
        self._first_marks: dict[str, int] = {}
        self.is_described = False

    def check(self, trainer: Trainer) -> None:
        self._again = None  # the fit before may have failed between its join and its first batch
        if self._parts.world.registration is None:
            return
        if runs_finder(trainer):
            raise UnsupportedError(
                "elastic=True with LearningRateFinder, BatchSizeFinder, Tuner.lr_find or Tuner.scale_batch_size: it"
                " measures all ranks as one group, which ranks of different launchers cannot form; find the rate or"
                " batch size before, without server= and LIGHTNING_OMNI_SERVER, and pass it to all groups"
            )
        if replaces_scheduler(trainer):
            raise UnsupportedError(
                "elastic=True with StochasticWeightAveraging: it replaces a learning-rate scheduler in mid-run, and a"
                " group that joins has none to replace it with; use WeightAveraging, or start all ranks together"
            )
        if len(averaged_models(trainer)) > 1:
            raise UnsupportedError(
                "elastic=True with several WeightAveraging callbacks: a checkpoint has room for the average of one, and"
                " so has what a group that joins is given; keep one of them"
            )
        self._limits = {name: plain(getattr(trainer, name)) for name in _ALIKE}
        algorithm = trainer.gradient_clip_algorithm
        self._limits["gradient_clip_algorithm"] = algorithm.value if algorithm else "norm"
        self._limits |= limits_in_callbacks(trainer)
        self._first_marks = _marks(_not_persistent(self._parts.pl_module))

    # --- The recorder's group ----------------------------------------------------------------------------------------

    def store(self) -> None:
        """Store the state at the server, after the groups have begun to compute. All ranks call it."""
        world = self._parts.world
        if world.registration is None or world.process_groups.live.ranks[0] not in world.members:
            return
        self.renew()

    def renew(self) -> None:
        """Replace the state at the server, while groups compute. The recorder's group calls it."""
        world = self._parts.world
        reshard(world.wrapper.sharded)
        tree = self._describe()  # all members make it, since hooks of users that save may need collectives
        if tree["shared"]:
            if world.exchanges and not world.is_leader:
                world.exchange.store.store_run_state(*pack({"shared": tree["shared"]}))
            dist.barrier(group=world.compute_group)  # other groups may join as soon as the leader has stored its part
        if world.is_leader:
            try:
                packed, buffer = pack(tree)
            except MalformedMessage as error:
                packed, buffer = pack({"refused": f"the run's schedulers or optimizers cannot be sent: {error}"})
            world.exchange.store.store_run_state(packed, buffer)

    def _describe(self) -> dict[str, Any]:
        parts, trainer = self._parts, self._parts.trainer
        self.is_described = True
        try:
            checkpoint = dump_checkpoint(trainer)
        finally:
            self.is_described = False
        served = {id(each) for part in parts.world.parts for each in part.replica.served()}
        entries = tensors_of(parts.pl_module).items()
        own = {name: each for name, each in entries if isinstance(each, Tensor) and id(each) not in served}
        shared = {name: own.pop(name) for name in list(own) if is_part(own[name])}
        more = _not_persistent(parts.pl_module)
        now = _marks(more)  # constants, such as a mask, are not sent
        own |= {
            name: each for name, each in more.items() if name not in now or self._first_marks.get(name) != now[name]
        }
        leads = parts.epochs.schedulers.leads
        averages = averaged_models(trainer)
        progress = parts.epochs.run.progress
        return {
            "limits": self._limits,
            "configured": self._configured(),
            "epoch": trainer.current_epoch,
            "counters": progress_counters(trainer)[1:],
            "samples": parts.epochs.samples,
            "progress": None if progress is None else msgspec.to_builtins(progress),
            "metrics": cached_metric_values(trainer),
            "order": parts.epochs.data.order,
            "split": parts.epochs.data.split,
            "sizes": list(parts.epochs.sizes),
            "folders": output_folders(trainer),
            "reloads": reload_epochs(trainer),
            "schedule": [list(leads.get(config.scheduler, ())) for config in trainer.lr_scheduler_configs],
            "schedulers": checkpoint.pop("lr_schedulers"),
            "functions": [_sampled(config.scheduler) for config in trainer.lr_scheduler_configs],
            "hyperparameters": checkpoint.pop("optimizer_states"),
            "layouts": parts.world.parameter_groups.first_layouts,
            "held": [_names_in(optimizer, parts.pl_module) for optimizer in parts.strategy.optimizers],
            "trainable": {name: each.requires_grad for name, each in parts.pl_module.named_parameters()},
            "tracking": _tracking(parts.pl_module),
            "module": {name: each.detach() for name, each in own.items()},
            "shared": {name: local_of(each) for name, each in shared.items()},
            "averages": [average.state_dict() for average in averages],
            "callbacks": self._sendable("the state of the callback", checkpoint.pop("callbacks")),
            "more": self._sendable("the checkpoint's entry", {k: v for k, v in checkpoint.items() if k not in _APART}),
        }

    def _configured(self) -> dict[str, str]:
        """Return in words the settings that must be equal in all groups, lest they wait in different collectives."""
        parts, trainer = self._parts, self._parts.trainer
        schedulers = [_in_words(config) for config in trainer.lr_scheduler_configs]
        return {
            "optimization": "automatic" if parts.pl_module.automatic_optimization else "manual",
            "optimizers": ", ".join(type(each).__name__ for each in parts.strategy.optimizers) or "none",
            "schedulers": ", ".join(schedulers) or "none",
            "callbacks": ", ".join(deciding_callbacks(trainer)) or "none that saves, stops, tunes, freezes or prunes",
            "default dtype": str(torch.get_default_dtype()),  # of the tensors that torch and Lightning reduce
        }

    def _sendable(self, what: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        problems = {name: problem for name, value in entries.items() if (problem := _problem(value))}
        for name in problems.keys() - self._told:
            self._told.add(name)
            self._parts.namespace.warn(
                f"OmniStrategy: {what} {name} is not given to groups that join: {problems[name]}"
            )
        return {name: value for name, value in entries.items() if name not in problems}

    # --- A group that has joined -------------------------------------------------------------------------------------

    def take_over(self, trainer: Trainer) -> None:
        """Join the run, and load its state, on all ranks of the group before its loops begin.

        Raises:
            UnsupportedError: the state of the run cannot be sent.
            ConfigurationError: this group has another module, or other limits, callbacks, optimizers, schedulers or
                settings.
            OmniError: as in `Connection.take_part`.
        """
        parts = self._parts
        joined = parts.world.take_part()
        tree = parts.world.exchange.store.read_run_state()
        self._check_given(trainer, tree)
        assert joined.plan is not None  # the server admits groups only during an epoch
        checkpoint = {**tree["more"], "callbacks": tree["callbacks"], "state_dict": tree["module"]}
        if tree["averages"]:  # the callback loads both; the module's own weights are read when training begins
            [average] = tree["averages"]
            whole = {name[7:]: each for name, each in average.items() if name.startswith("module.")}
            checkpoint |= {"state_dict": whole, "current_model_state": parts.pl_module.state_dict()}
        set_output_folders(trainer, tree["folders"])
        load_checkpoint(trainer, checkpoint)
        if tree["shared"] and not (parts.world.share is None or parts.world.is_leader):
            tree["shared"] = parts.world.exchange.store.read_run_state(share=True)["shared"]
        self._take_over_module(tree)
        self._again = tree
        self._load_schedulers(tree)
        configs = zip(trainer.lr_scheduler_configs, tree["schedule"], strict=True)
        leads: dict[Any, Any] = {config.scheduler: tuple(lead) for config, lead in configs if lead}
        entered = EntryPoint(
            plan=joined.plan,
            # The groups may have died before they stored the state of the epoch that had begun.
            samples=tree["samples"] if tree["epoch"] == joined.plan.epoch else 0,
            progress=msgspec.convert(tree["progress"], Progress | None),
            split=tree["split"],
            sizes=DataSizes(*tree["sizes"]),
        )
        parts.epochs.enter(entered, leads)
        set_cached_metrics(trainer, tree["metrics"])
        parts.epochs.data.order = tree["order"]
        start_fit_at_epoch(trainer, joined.plan.epoch, tree["counters"])

    def _check_given(self, trainer: Trainer, tree: Mapping[str, Any]) -> None:
        if "refused" in tree:
            raise UnsupportedError(f"no group can join this run: {tree['refused']}")
        for name, limit in tree["limits"].items():
            if self._limits[name] != limit:  # this group would end while others train, or train alone
                raise ConfigurationError(
                    f"{name}={self._limits[name]}: the run that this group joins has {name}={limit}; give all groups"
                    " the same"
                )
        for name, own in self._configured().items():
            if own != (theirs := tree["configured"][name]):
                raise ConfigurationError(
                    f"{name}: {own}; the run that this group joins has: {theirs}; give all groups the same script"
                )
        for config, theirs in zip(trainer.lr_scheduler_configs, tree["functions"], strict=True):
            _check_functions(config, theirs)
        if len(averaged_models(trainer)) != len(tree["averages"]):
            raise ConfigurationError(
                "callbacks: WeightAveraging is either in the run or in the group that joins it, and not in both; give"
                " all groups the same callbacks"
            )

    def hooks_are_over(self) -> None:
        """Load the run's state again after the hooks of the epoch's start.

        The run had called them before: loading undoes their second effect.
        """
        if (tree := self._again) is None:
            return
        self.take_over_optimizers()
        self._load_schedulers(tree)
        self._again = None
        load_callback_states(self._parts.trainer, tree)
        set_reload_epochs(self._parts.trainer, tree["reloads"])
        self._take_over_module(tree)
        self._parts.world.read_again()

    def _load_schedulers(self, tree: Mapping[str, Any]) -> None:
        for config, state in zip(self._parts.trainer.lr_scheduler_configs, tree["schedulers"], strict=True):
            config.scheduler.load_state_dict(_like(vars(config.scheduler), state))

    def _take_over_module(self, tree: Mapping[str, Any]) -> None:
        """Load buffers and untrained parameters; each member loads its own shards."""
        module = self._parts.pl_module
        not_saved = _not_persistent(module)
        _check_tensors(module, not_saved, tree)
        more = {name: each for name, each in not_saved.items() if name in tree["module"]}
        for name, buffer in more.items():
            write(buffer, tree["module"][name], name)
        saved = {name: each for name, each in tree["module"].items() if name not in more}
        unexpected = Module.load_state_dict(module, saved, strict=False).unexpected_keys
        if unexpected:
            raise ConfigurationError(
                f"the module of the run that this group joins has {unexpected[0]}, and this group's module has not:"
                " give all groups the same module, which has it from the beginning; what a callback adds in mid-run"
                " (ModelPruning, say), no group that joins later has"
            )
        if tree["shared"]:
            fill(tensors_of(module), tree["shared"])

    def training_begins(self) -> None:
        if self._again is not None:
            self.take_over_optimizers()
            self._parts.world.parameter_groups.begin_with(self._again["layouts"])

    def take_over_optimizers(self) -> None:
        """Train the parameters that the run trains, with its settings.

        All ranks of the group call it after ``on_fit_start``, in which a callback may have frozen some.
        """
        if (run := self._again) is None:
            return
        module = self._parts.pl_module
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(run["trainable"].get(name, parameter.requires_grad))
        for name, tracks in run["tracking"].items():
            module.get_submodule(name).track_running_stats = tracks
        optimizers = self._parts.strategy.optimizers
        for optimizer, state, held in zip(optimizers, run["hyperparameters"], run["held"], strict=True):
            if held != _names_in(optimizer, module):
                _hold(optimizer, held, module)
            for group, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update(
                    (name, _as_here(group.get(name), value)) for name, value in theirs.items() if name != "params"
                )


def _in_words(config: Any) -> str:
    inside = [type(each).__name__ for each in getattr(config.scheduler, "_schedulers", ())]
    within = f"({', '.join(inside)})" if inside else ""
    when = config.interval if config.frequency == 1 else f"{config.frequency} {config.interval}s"
    return f"{type(config.scheduler).__name__}{within} every {when}"


def _sampled(scheduler: Any) -> list[list[tuple[int, float]]]:
    """Return, for each function of a scheduler, which its state lacks, counts and values there, or NaN."""
    return [_values(function, (0, 1, count, count + 1)) for function, count in _functions(scheduler)]


def _functions(scheduler: Any) -> list[tuple[Callable[[int], Any], int]]:
    """Return the functions of a LambdaLR, or of those in a scheduler, and the count that each has come to."""
    count = max(0, int(getattr(scheduler, "last_epoch", 0)))
    own = [(each, count) for each in getattr(scheduler, "lr_lambdas", ())]
    return own + [found for each in getattr(scheduler, "_schedulers", ()) for found in _functions(each)]


def _values(function: Callable[[int], Any], counts: Iterable[int]) -> list[tuple[int, float]]:
    found = dict.fromkeys(counts, math.nan)
    for count in found:
        with contextlib.suppress(Exception):  # a table, for example, has an end
            found[count] = float(function(count))
    return [*found.items()]


def _check_functions(config: Any, theirs: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Reject a scheduler whose functions give other values than the run's: groups would train at other rates."""
    for (function, _), values in zip(_functions(config.scheduler), theirs, strict=False):
        for (count, own), (_, other) in zip(_values(function, (count for count, _ in values)), values, strict=False):
            is_same = math.isclose(own, other, rel_tol=1e-6)  # other machines may round otherwise
            if not is_same and not (math.isnan(own) and math.isnan(other)):
                raise ConfigurationError(
                    f"schedulers: a function of {_in_words(config)} returns {own:.6g} for {count}; that of the run that"
                    f" this group joins returns {other:.6g}; give all groups the same script"
                )


def _check_tensors(module: Module, not_saved: Mapping[str, Tensor], tree: Mapping[str, Any]) -> None:
    """Reject buffers and untrained parameters of another type or shape than the run's, and buffers that it lacks."""
    saved = {name: each for name, each in tensors_of(module).items() if isinstance(each, Tensor)}
    mine = {**saved, **not_saved}
    for name, theirs in tree["module"].items():
        own = mine.get(name, theirs)
        if not is_lazy(own) and (own.dtype, own.shape) != (theirs.dtype, theirs.shape):
            raise ConfigurationError(
                f"{name} is {_kind(own)} in this group's module, and {_kind(theirs)} in that of the run that it joins:"
                " give all groups the same module"
            )
    others = saved.keys() & {name for name, _ in module.named_buffers()}
    if surplus := sorted(others - tree["module"].keys() - tree["shared"].keys()):
        raise ConfigurationError(
            f"this group's module has the buffer {surplus[0]}, and the module of the run that it joins has not: give"
            " all groups the same module"
        )


def _not_persistent(module: Module) -> dict[str, Tensor]:
    saved = tensors_of(module)
    return {name: each for name, each in module.named_buffers() if name not in saved}


def _marks(buffers: Mapping[str, Tensor]) -> dict[str, int]:
    there = {name: each for name, each in buffers.items() if not (is_lazy(each) or each.is_meta)}
    return dict(zip(there, fingerprints(there.values()), strict=True))


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}".removeprefix("torch.")


def _names_in(optimizer: Optimizer, module: Module) -> list[list[str]]:
    names = names_of(module)
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def _hold(optimizer: Optimizer, held: Sequence[Sequence[str]], module: Module) -> None:
    known, before = dict(module.named_parameters()), optimizer.param_groups
    if missing := [name for group in held for name in group if name not in known]:
        raise ConfigurationError(
            f"the optimizers of the run hold {missing[0] or 'a parameter that is not in the module'}, which came"
            " to them after it had begun, and this group cannot find it in its module: give all groups the same module,"
            " and register in it what an optimizer may come to hold"
        )
    optimizer.param_groups = [
        {**(before[number] if number < len(before) else optimizer.defaults), "params": [known[name] for name in group]}
        for number, group in enumerate(held)
    ]


def _tracking(module: Module) -> dict[str, bool]:
    flags = ((name, getattr(each, "track_running_stats", None)) for name, each in module.named_modules())
    return {name: flag for name, flag in flags if isinstance(flag, bool)}


def _problem(tree: Any) -> str:
    if any(isinstance(leaf, Tensor) and is_part(leaf) for leaf in tree_leaves(tree)):
        return "it holds a part of the model"
    try:
        pack(tree)
    except MalformedMessage as error:
        return str(error)
    return ""


def _as_here(own: Any, value: Any) -> Any:
    return value.to(own.device) if isinstance(value, Tensor) and isinstance(own, Tensor) else value


def _like(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    # A Counter is sent as a dict.
    return {name: Counter(value) if isinstance(own.get(name), Counter) else value for name, value in state.items()}


# --- An evicted group -------------------------------------------------------------------------------------------------

# An interrupted fit cannot be continued, neither in torch.distributed nor in a user's hooks, but the script can run
# again from its beginning. Therefore nothing is repaired: if the script ends with the error, and no user code has
# caught it, the process replaces itself (`os.execve`) with the command that started it. Rank numbers, weights and the
# position in the epoch are then those of any group that joins late.

_log = logging.getLogger(__name__)

LONGEST_WAIT = 30.0
"""Maximum wait in seconds before a group rejoins; the wait starts at one second and doubles."""
FORGETS_AFTER = 2 * LONGEST_WAIT
"""Seconds in the run after which an eviction is no longer in a row with the one before."""
try:
    _DIRECTORY = os.getcwd()
except OSError:  # it was deleted; `_obstacle` reports that
    _DIRECTORY = ""
"""The directory in which the command was started; the script may change it later."""


class Rejoining:
    """The rejoining of a group of which this process is the only rank, or has started the others.

    Attributes:
        is_armed: whether the process restarts its command when its script ends with the error.
    """

    def __init__(self) -> None:
        self._run, self._count, self._is_saved = comes_back_to()
        self._began = math.inf
        self._error: BaseException | None = None
        self._reason = ""
        self.is_armed = False

    def enlisted(self, run: str) -> None:
        self.is_armed = False  # if the script has caught the error of an earlier fit
        if run != self._run:
            self._run, self._is_saved = run, True  # assumed until `took_part`

    def took_part(self, run: str, is_saved: bool) -> None:
        self._run, self._is_saved, self._began = run, is_saved, time.monotonic()

    def finished(self) -> None:
        self._run, self._count, self.is_armed = "", 0, False
        os.environ.pop(COMES_BACK, None)

    def arm(self, error: BaseException, reason: BaseException, most: int, ranks: int) -> bool:
        """Prepare to rejoin if the script ends with ``error``; return whether the group can.

        A group rejoins at most ``most`` times in a row; ``reason`` is logged.
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
        """Kill this process's ranks and loader workers, wait, and restart its command, unless Ctrl-C ends the wait."""
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
            is_another = not self.is_armed or all(each is not self._error for each in _behind(error))
            if is_another or isinstance(error, KeyboardInterrupt):
                before(kind, error, traceback)
                return
            try:
                self.start_again()
            except KeyboardInterrupt:
                raise SystemExit(130) from None

        sys.excepthook = hook


def _obstacle(ranks: int) -> str:
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
    seen: set[int] = set()
    next_one: BaseException | None = error
    while next_one is not None and id(next_one) not in seen:
        seen.add(id(next_one))
        yield next_one
        next_one = next_one.__cause__ or next_one.__context__


def _close_at_exec() -> None:
    """Close the sockets and devices of libraries at `os.execve`."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
            if int(name) > 2:
                os.set_inheritable(int(name), False)
