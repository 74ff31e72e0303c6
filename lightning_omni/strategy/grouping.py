"""An OmniStrategy in its groups: its parts during a fit, and the behaviour that differs between one group and several.

One group is Lightning's DistributedDataParallel: `Grouping` leaves the hooks unchanged, `SeveralGroups` does not.
`World.executor` makes the same distinction in the world.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_omni.checks import counted
from lightning_omni.errors import ConfigurationError, OmniError, UnsupportedError
from lightning_omni.group.leased_batches import apportion
from lightning_omni.metrics import RunReport
from lightning_omni.runtime import World, WorldOptions
from lightning_omni.runtime.balance import Balance, gather
from lightning_omni.runtime.model.buffer_sync import BufferSync, Merge, average_of, buffers_of
from lightning_omni.runtime.model.meshes import shown
from lightning_omni.runtime.model.sharded import reshard
from lightning_omni.runtime.model.tensor_sync import check_all_shared
from lightning_omni.runtime.model.wrapping import frozen
from lightning_omni.strategy.arguments import FitOptions
from lightning_omni.strategy.lightning_internals.callbacks import (
    averaged_models,
    call_rank_zero_hooks,
    callbacks_of,
    show_progress_bar,
    without_rank_zero_only,
)
from lightning_omni.strategy.lightning_internals.loops import validates_by_time, will_step
from lightning_omni.strategy.lightning_internals.strategies import has_model_averaging, set_ddp_options, set_rank
from lightning_omni.strategy.loops.driver import EpochDriver
from lightning_omni.strategy.loops.live_metrics import Reporting, StepTimes, gathering_sentence
from lightning_omni.strategy.optimizers import MergedSubmodule, Proxies, Trainable, check_wrapped
from lightning_omni.wire.compression import Compression

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy as _Base
else:
    _Base = object

_log = logging.getLogger(__name__)


class GroupedStrategy(_Base):
    """A DDPStrategy whose ranks form groups; `lightning_omni.strategy.hooks` adds Lightning's hooks.

    Attributes:
        epochs: the driver that leads the training loop through the epochs.
        balance: the measurement of ranks and the split of their groups' batches.
        step_times: the timing of batches.
        trainable: the parameters that were trainable when the module was wrapped.
        merged: the submodule that stays at the server.
        proxies: the optimizers that step in place of the user's.
        reporting: the source of the run's report.
        has_had_groups: whether this process has trained in one of several groups, in this fit or an earlier one.
        ddp_options: DDPStrategy's own arguments, as the user passed them.
    """

    rank_zero_info: Callable[[str], None]
    rank_zero_warn: Callable[[str], None]
    ddp_options: dict[str, Any]
    _world_options: WorldOptions
    _fit_options: FitOptions
    _last_report: RunReport | None

    def _make_parts(self, options: FitOptions) -> None:
        self._world: World | None = None
        self.merged = MergedSubmodule(options.merged)
        self.proxies = Proxies()
        self.epochs = EpochDriver(options.data, self.rank_zero_info, self.rank_zero_warn, options.validation)
        self.balance = Balance(options.rebalance, self.rank_zero_info)
        self.trainable = Trainable(self.rank_zero_warn)
        self.reporting = Reporting()
        self.step_times = StepTimes()
        self._one, self._several = Grouping(self), SeveralGroups(self)
        self._is_told_to_record = self._took_over = self._has_gathered = self.has_failed = False
        self.has_had_groups = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which this rank waits for others, so that the time does not count as compute time."""
        with self.balance.waiting(), self.step_times.waiting():
            yield

    @property
    def world(self) -> World:
        """Return this rank's view of the run.

        Raises:
            ConfigurationError: there is none yet.
        """
        if self._world is None:
            raise ConfigurationError("OmniStrategy has no world yet: use it in a hook, when the Trainer runs")
        return self._world

    @property
    def joins(self) -> bool:
        return bool(self._world_options.elastic.join)

    @property
    def pl_module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self.pl_module.trainer

    @property
    def grouping(self) -> Grouping:
        """Return the `Grouping` for the current number of groups."""
        return self._several if self.world.executor.exchanges else self._one

    @property
    def is_sharded(self) -> bool:
        return self._world_options.is_sharded

    def check_whole(self, what: str) -> None:
        """Raise `UnsupportedError` for a feature, named by ``what``, if each rank holds only a part of the model."""
        if self.is_sharded:
            raise UnsupportedError(
                f"{what}, and with {shown(self._world_options.model_parallel)} each rank has a part of the model that"
                " belongs to its place in its group: leave it out, or leave model_parallel= out"
            )

    def check_several(self, trainer: Trainer) -> None:
        self._several.check(trainer)

    # --- Model and optimizers -----------------------------------------------------------------------------------------

    @property
    def real_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that hold parameters, without Lightning's placeholder for no optimizer."""
        return [optimizer for optimizer in self.optimizers if optimizer.param_groups]

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """Return the loss scaler of precision="16-mixed"; None with any other precision."""
        scaler: torch.amp.GradScaler | None = getattr(self.precision_plugin, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def attach_optimizers(self) -> None:
        self.proxies.attach(self.world, self.pl_module, self.real_optimizers, self.merged, self._trainer)

    def wrap_for_group(self) -> None:
        """Wrap the module into a new DDP over the compute group. A group of one rank or a sharded module needs none."""
        self.model = self.pl_module
        self.trainable.remember(self.pl_module)
        exchanges = self.world.executor.exchanges
        if self.world.wrapper.sharded is not None:
            return
        if exchanges and len(self.world.members) == 1:
            self.world.reduction.install(self.model, self.world.compute_group)
            return  # without exchanges even a single rank is wrapped, as under DDPStrategy
        options = self.world.reduction.ddp_options(self.pl_module, self.ddp_options)
        options |= {"process_group": self.world.compute_group, "init_sync": False}
        set_ddp_options(self, options)
        with frozen(self.merged.parameters(self.pl_module) if exchanges else ()):
            if not self.merged or any(parameter.requires_grad for parameter in self.pl_module.parameters()):
                super().configure_ddp()  # rejects a module without trainable parameters, such as one with a frozen body
        self.world.reduction.install(self.model, self.world.compute_group)

    def follow_external_writes(self) -> None:
        """Register this Trainer's buffers, parameters and optimizers, which the world checks for users' changes."""
        edits = self.world.external_writes
        edits.buffers, edits.others = lambda: buffers_of(self.pl_module), self._others
        edits.switched = lambda: not self.proxies.are_of(self.real_optimizers)
        edits.reattach = self._reattach

    def _others(self) -> Iterator[BufferSync]:
        """Yield all parameters, and the averages that WeightAveraging holds."""
        reshard(self.world.wrapper.sharded)
        for name, parameter in self.pl_module.named_parameters():
            yield BufferSync(name, parameter, Merge.FIRST)
        for model in averaged_models(self._trainer):
            yield from average_of(model)

    def _reattach(self) -> None:
        """Attach the current optimizers and form the same number of groups again.

        Raises:
            UnsupportedError: an epoch is under way, or the server cannot run one of them.
        """
        if self.epochs.is_open:
            raise UnsupportedError(
                "strategy.optimizers was changed in a validation inside an epoch: change it at an epoch's start or end"
                " (on_train_epoch_start, say), or use groups=1"
            )
        for optimizer in self.real_optimizers:
            self.world.check_optimizer(optimizer)
        self.proxies.unguard()
        self.attach_optimizers()
        self.form(len(self.world.live_groups))

    # --- Groups -------------------------------------------------------------------------------------------------------

    def follow_recorder(self) -> None:
        """Begin to log and save if this rank has become the recorder, because the group of the former one is gone."""
        world = self.world
        if world.registration is not None and world.follow_recorder() and not self._is_told_to_record:
            self._is_told_to_record = self._took_over = True
            set_rank(0)
            self.rank_zero_info("OmniStrategy: the group that logged and saved is gone; this group does so now")
            call_rank_zero_hooks(self._trainer)
            show_progress_bar(self._trainer, self.epochs.is_open)

    def explain_take_over(self, exception: BaseException) -> None:
        """Log a hint if the user's code fails on a rank that became the recorder, which may be the cause."""
        if self._took_over and isinstance(exception, Exception) and not isinstance(exception, OmniError):
            _log.error(
                "OmniStrategy: this rank logs and saves since the group is gone that did: what a callback prepares only"
                " where trainer.is_global_zero is true, it does not have;"
                " see docs/how-to/joining.md, 'Logging and saving'"
            )

    def merge_groups(self) -> None:
        if self.world.executor.exchanges:
            self.form(1)

    def form(self, groups: int, speeds: Mapping[int, float] | None = None) -> None:
        """Form groups without the checks of `regroup`.

        ``speeds`` of all live ranks put ranks of similar speed into one group; None uses the order of ranks.
        """
        world = self.world
        before, spans = world.executor, self.epochs.before_regroup()
        self.proxies.unguard()
        spans = world.regroup(groups, self.pl_module, speeds) or spans
        self.grouping.guard()
        self.wrap_for_group()
        self.share_loss_scale()
        self.epochs.after_regroup(spans, before)
        self.balance.regrouped()
        self.step_times.interrupt()

    def share_loss_scale(self) -> None:
        """Give the members of this rank's group one loss scale, the smallest that any of them has. All members call it.

        Different groups have infinite gradients at different steps, so their scales differ. In one group
        DistributedDataParallel averages gradients that are scaled alike, and each rank divides the mean by its own
        scale: members with different scales would train different models. The steps since the last change of the scale
        restart at zero, so that it also grows on all members at once.
        """
        scaler = self.loss_scaler
        if scaler is None:
            return
        scale = torch.tensor(scaler.get_scale(), device=self.world.device)
        if len(self.world.members) > 1:
            dist.all_reduce(scale, op=dist.ReduceOp.MIN, group=self.world.compute_group)
        scaler.load_state_dict({**scaler.state_dict(), "scale": float(scale), "_growth_tracker": 0})

    def set_batch_shares(self, speeds: Sequence[float]) -> None:
        """Split the batches of this rank's group in proportion to its members' speeds, from here on.

        All members call it. Batches that a loader has already taken keep their split.
        """
        world, leases = self.world, self.epochs.leases
        assert leases is not None
        handed = max(int(number) for [number] in gather(world, [leases.handed]))
        leases.set_batch_shares(apportion(leases.batch_size * len(world.members), speeds), from_number=handed)

    # --- Messages and reports -----------------------------------------------------------------------------------------

    def announce_groups(self) -> None:
        """Log which groups were formed."""
        # Only a tuner has this method.
        is_chosen = any(hasattr(callback, "on_omni_launch") for callback in callbacks_of(self._trainer))
        text = f"OmniStrategy: {self.grouping.sentence}{'' if is_chosen else self.grouping.advice}"
        world = self.world
        if world.registration is not None and world.is_leader and not self.is_global_zero:
            # The terminal of this group shows nothing else: no progress, and no message of `rank_zero_info`.
            info = without_rank_zero_only(self.rank_zero_info)
            info(f"{text} | joined the run as group {world.group}; another group logs and saves")
        else:
            self.rank_zero_info(text)

    @property
    def last_report(self) -> RunReport | None:
        """Return the result of `report`, or None if there was no run yet."""
        return self._last_report if self._world is None else self.report()

    def remember_report(self, report: RunReport) -> None:
        """Store the report of a run in other processes, which this process started."""
        self._last_report = report

    def report(self) -> RunReport:
        """Return a report of the current or last run."""
        if self._world is None and self._last_report is not None:
            return self._last_report
        return self.reporting.report(self.world, self.step_times.bytes_per_step)

    # --- Regrouping --------------------------------------------------------------------------------------------------

    def regroup(self, groups: int, by_speed: bool = False) -> None:
        """Change the number of compute groups during a fit. Weights, optimizer state and data position are kept.

        Call it on every rank from a training hook at a batch boundary (``on_train_batch_end``, for example), after the
        same number of batches on each rank. Batches that were drawn but not trained return to the pool.

        Args:
            groups: the new number of groups, 1 to the number of live ranks, or of replicas of a sharded model.
            by_speed: puts ranks of similar speed into one group, so that no slow rank delays a fast group;
                ``rebalance="auto"`` must have measured every rank.

        Raises:
            ConfigurationError: ``groups`` is out of range, this is no batch boundary, or speeds are not known.
        """
        world, trainer = self.world, self._trainer
        if not self._is_fitting(trainer) or not self.proxies:
            raise ConfigurationError(
                "regroup() works while trainer.fit runs; before that, pass groups= to OmniStrategy"
            )
        if trainer.fit_loop.batch_idx >= 0 and self.epochs.is_open and not will_step(trainer):
            raise ConfigurationError(
                "regroup() inside an accumulation window would mix gradients of different groups; call it when"
                " accumulate_grad_batches batches are complete"
            )
        world.check_regroup(groups)
        if groups > 1:
            for optimizer in self.optimizers:
                world.check_optimizer(optimizer)
            self.merged.check(trainer)
        is_unchanged = groups == len(world.live_groups)
        speeds = self.balance.speeds_of_all(world) if by_speed else None
        if is_unchanged and (groups == 1 or not by_speed):
            return
        self.form(groups, speeds)
        if not self.epochs.is_open:
            world.enter_world(self.pl_module)  # between epochs: hooks are for all ranks together
        self.announce_groups()

    # --- Collectives -------------------------------------------------------------------------------------------------

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the default process group; while several groups train, this is the compute group."""
        world = self._world
        trains = world is not None and world.is_computing and not self.epochs.published.evaluates
        if trains and group in (None, dist.group.WORLD) and not self._has_gathered:
            self._has_gathered = True
            self.rank_zero_warn(gathering_sentence(self.world))
        with self.waiting():
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the default process group, without counting the wait as compute time.

        Groups train different numbers of batches. Lightning divides a metric of an epoch by the mean of these numbers,
        which torch would round to an integer; this reduces it as a float. A ``sync_dist_group=dist.group.WORLD`` of the
        training step was the compute group; it is replaced by the group of all ranks.
        """
        if self.has_had_groups and self._world is not None and self._world.is_begun and not self._world.is_computing:
            if group is not None and group is self._world.compute_group:
                group = None
            is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
            if is_mean and isinstance(tensor, Tensor) and tensor.dtype == torch.long:
                tensor = tensor.float()
        with self.waiting():
            return super().reduce(tensor, group=group, reduce_op=reduce_op)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast over the default process group, without counting the wait as compute time."""
        with self.waiting():
            return super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce a decision with "all" or "any" over the default process group, which may be smaller than the world.

        A rank that has failed returns its own decision: callbacks that save because of the error call this, and the
        other ranks may never call it.
        """
        if self.has_failed:
            return decision
        with self.waiting():
            agreed = self.grouping.reduce_boolean_decision(decision, every=all) if self._world is not None else None
        return super().reduce_boolean_decision(decision, all=all) if agreed is None else agreed  # by `reduce`

    @staticmethod
    def _is_fitting(trainer: Trainer) -> bool:
        return trainer.state.fn is not None and trainer.state.fn.value == "fit"


class Grouping:
    """The behaviour of Lightning's hooks for one way of grouping; this class is the one for one group.

    Args:
        strategy: the strategy whose hooks call it.
    """

    def __init__(self, strategy: GroupedStrategy) -> None:
        self._strategy = strategy

    def check(self, trainer: Trainer) -> None:
        """Raise `UnsupportedError` for features of this fit that do not work with this grouping."""

    def stepped(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that the precision plugin steps in place of one of the user's."""
        self._strategy.world.steps += 1
        return optimizer

    def guard(self) -> None:
        """Guard the user's optimizers after the groups were formed; one group needs no guard."""

    def batch_starts(self) -> None:
        """Prepare for a batch after the last callback and before the forward pass."""
        if self._strategy.world.size > 1:
            self._strategy.trainable.warn_of_late(self._strategy.optimizers)

    def begin_epoch(self) -> None:
        """Begin an epoch after all hooks of its start and before its first batch."""

    def begin_batch(self) -> None:
        """Begin a batch before all callbacks."""

    def reduce_boolean_decision(self, decision: bool, every: bool) -> bool | None:
        """Return the decision of all (or any) ranks of the default process group; None leaves it to Lightning."""
        return None

    @property
    def sentence(self) -> str:
        """Return the message for the user after the groups were formed."""
        options = self._strategy.world.options
        formats = replace(options.compression, all_reduce="fp32")  # which have no effect with one group
        given = [formats.given] if formats != Compression() else []
        given += ["overlap=True"] if options.overlap else []
        verb = "has" if len(given) == 1 else "have"
        without_effect = f"; nothing is pushed, so {' and '.join(given)} {verb} no effect" if given else ""
        return (
            f"{counted(self._strategy.world.size, 'rank')} in 1 group, which is"
            f" {_held_by(self._strategy.world)}: no parameter server, no"
            f" staleness{without_effect}"
        )

    @property
    def advice(self) -> str:
        """Return an addition to that message for runs in which no tuner chooses the groups."""
        return ". Pass groups= for asynchronous groups"


class SeveralGroups(Grouping):
    """The behaviour of the hooks where several groups train and exchange."""

    @override
    def check(self, trainer: Trainer) -> None:
        strategy = self._strategy
        if validates_by_time(trainer):
            raise UnsupportedError(
                "val_check_interval as a duration: groups would come to validation at different times and wait for each"
                " other; pass a number of batches or a fraction of the epoch"
            )
        if trainer.min_steps:
            raise UnsupportedError(
                "min_steps: groups count their own steps, and would disagree on when they may stop; use min_epochs"
            )
        if has_model_averaging(strategy):
            raise UnsupportedError("model_averaging_period averages over all ranks; use it with groups=1 only")
        if strategy.ddp_options.get("process_group") is not None:
            raise UnsupportedError(
                "process_group= is that of each compute group where there are several; leave it out, or use groups=1"
            )
        if (module := strategy.lightning_module) is not None:
            check_all_shared(module)
        strategy.merged.check(trainer)

    @override
    def stepped(self, optimizer: Optimizer) -> Optimizer:
        strategy = self._strategy
        if len(strategy.world.members) > 1:
            strategy.trainable.check_in_step()
        return strategy.proxies.of(optimizer) if optimizer.param_groups else optimizer

    @override
    def guard(self) -> None:
        self._strategy.has_had_groups = True
        self._strategy.proxies.guard(self._strategy.real_optimizers)

    @override
    def batch_starts(self) -> None:
        strategy, world = self._strategy, self._strategy.world
        with torch.no_grad():
            world.parameter_groups.follow_all()
        if len(world.members) > 1 and strategy.trainable.has_changed(strategy.optimizers):
            strategy.wrap_for_group()

    @override
    def begin_epoch(self) -> None:
        check_wrapped(self._strategy.pl_module.trainer, self._strategy.world.torch_members)

    @override
    def begin_batch(self) -> None:
        merged = self._strategy.merged
        merged.check(self._strategy.pl_module.trainer)  # again, since accumulation may have a schedule
        merged.step_done()  # ends any use of it by callbacks since the last step

    @override
    def reduce_boolean_decision(self, decision: bool, every: bool) -> bool | None:
        votes = torch.tensor(int(decision), device=self._strategy.world.device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if every else bool(votes)

    @property
    @override
    def sentence(self) -> str:
        world = self._strategy.world
        sizes = sorted({len(members) for members in world.topology.groups if members})
        data = "dynamic" if self._strategy.epochs.data.is_dynamic else "static"
        ranks, groups = len(world.topology.ranks), len(world.topology.alive)
        return (
            f"{counted(ranks, 'rank')} in {counted(groups, 'group')} of"
            f" {' or '.join(map(str, sizes))} | method {type(world.method).__name__} | server {world.server_address} |"
            f" data {data}{' | exchanges overlap' if world.core.overlaps else ''}"
            f"{'' if world.wrapper.sharded is None else f' | inside {_held_by(world)}'}"
        )

    @property
    @override
    def advice(self) -> str:
        return ""


def _held_by(world: World) -> str:
    """Return in words how the members of a group hold the model."""
    if world.wrapper.sharded is None:
        return "DistributedDataParallel"
    shards = f" with {world.shards} shards" if world.has_replicas else ""
    if world.tensor_parallel == 1:
        return f"FSDP2{shards}"
    return f"FSDP2 and tensor parallelism, {world.shards // world.tensor_parallel} x {world.tensor_parallel} ranks"
