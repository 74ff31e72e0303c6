"""The groups of a fit: how they are formed and wrapped, and how one group differs from several.

With one group, `OneGroup` leaves Lightning's hooks as they are under DDPStrategy; `SeveralGroups` does not.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import Optimizer
from typing_extensions import override

from lightning_omni.checks import counted
from lightning_omni.errors import ConfigurationError, OmniError, UnsupportedError
from lightning_omni.group.leased_batches import apportion
from lightning_omni.runtime import World
from lightning_omni.runtime.balance import Balance, gather
from lightning_omni.runtime.model.buffer_sync import BufferSync, average_of, buffers_of, parameters_of
from lightning_omni.runtime.model.meshes import shown
from lightning_omni.runtime.model.sharded import reshard
from lightning_omni.runtime.model.tensor_sync import check_all_shared
from lightning_omni.runtime.model.wrapping import frozen
from lightning_omni.runtime.parallel_state import Communication
from lightning_omni.strategy.lightning_internals.callbacks import (
    averaged_models,
    averages_weights,
    call_rank_zero_hooks,
    callbacks_of,
    show_progress_bar,
    use_own_folders,
)
from lightning_omni.strategy.lightning_internals.loops import is_fitting, validates_by_time, will_step
from lightning_omni.strategy.lightning_internals.strategies import has_model_averaging, set_ddp_options, set_rank
from lightning_omni.strategy.shared_parts import SharedParts
from lightning_omni.topology import Topology
from lightning_omni.wire.compression import Compression

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_log = logging.getLogger(__name__)


class Grouping:
    """The compute groups of a fit.

    Attributes:
        has_had_groups: whether this rank has trained in one of several groups, in any fit.
        took_over: whether it has become the recorder in this fit.
    """

    def __init__(self, parts: SharedParts, ddp_options: dict[str, Any], wrap: Callable[[], None]) -> None:
        self._parts, self.ddp_options, self._wrap_in_ddp = parts, ddp_options, wrap
        self._one, self._several = OneGroup(parts, self), SeveralGroups(parts, self)
        self.has_had_groups = self.took_over = False

    @property
    def hooks(self) -> OneGroup:
        return self._several if self._parts.world.executor.exchanges else self._one

    def check_whole(self, what: str) -> None:
        options = self._parts.world_options
        if options.is_sharded:
            raise UnsupportedError(
                f"{what}, and with {shown(options.model_parallel)} each rank has a part of the model that"
                " belongs to its place in its group: leave it out, or leave model_parallel= out"
            )

    def check_averages(self) -> None:
        if averages_weights(self._parts.trainer):
            raise UnsupportedError(
                f"{shown(self._parts.world_options.model_parallel)} and WeightAveraging or"
                " StochasticWeightAveraging: what they keep is whole, and each rank has a part of the model; leave the"
                " callback or model_parallel= out"
            )

    def check_precision(self) -> None:
        if self.loss_scaler is not None:
            raise UnsupportedError(
                f"{shown(self._parts.world_options.model_parallel)} and precision='16-mixed': the loss scaler of one"
                " rank would not know what is infinite in the part of another; use precision='bf16-mixed' or"
                " 'bf16-true'"
            )

    def check_several(self, trainer: Trainer) -> None:
        self._several.check(trainer)
        for optimizer in self._parts.strategy.optimizers:
            self._parts.world.check_optimizer(optimizer)

    # --- Model and optimizers -----------------------------------------------------------------------------------------

    @property
    def real_optimizers(self) -> list[Optimizer]:
        """Return the optimizers without Lightning's placeholder for none."""
        return [optimizer for optimizer in self._parts.strategy.optimizers if optimizer.param_groups]

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        scaler: torch.amp.GradScaler | None = getattr(self._parts.strategy.precision_plugin, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def attach_optimizers(self) -> None:
        parts, world = self._parts, self._parts.world
        parts.proxies.attach(world, parts.pl_module, self.real_optimizers, parts.merged, parts.trainer)

    def wrap(self) -> None:
        """Wrap the module into a new DDP over the compute group.

        The module stays unwrapped if it is sharded, its rank exchanges alone, or only a merged head is trained.
        """
        parts, world, strategy = self._parts, self._parts.world, self._parts.strategy
        module = strategy.model = parts.pl_module
        parts.trainable.remember(module)
        exchanges = world.executor.exchanges
        if world.wrapper.sharded is not None:
            return
        if exchanges and len(world.members) == 1:
            world.reduction.install(module, world.compute_group)
            return  # without exchanges even a single rank is wrapped, as under DDPStrategy
        options = world.reduction.ddp_options(module, self.ddp_options)
        options |= {"process_group": world.compute_group, "init_sync": False}
        set_ddp_options(strategy, options)
        with frozen(parts.merged.parameters(module) if exchanges else ()):
            if not parts.merged or any(parameter.requires_grad for parameter in module.parameters()):
                self._wrap_in_ddp()  # rejects a module without trainable parameters, such as one with a frozen body
        world.reduction.install(strategy.model, world.compute_group)

    def follow_external_writes(self) -> None:
        parts, edits = self._parts, self._parts.world.external_writes
        edits.buffers, edits.others = lambda: buffers_of(parts.pl_module), self._others
        edits.switched = lambda: not parts.proxies.are_of(self.real_optimizers)
        edits.reattach = self._reattach

    def _others(self) -> Iterator[BufferSync]:
        reshard(self._parts.world.wrapper.sharded)
        yield from parameters_of(self._parts.pl_module)
        for model in averaged_models(self._parts.trainer):
            yield from average_of(model)

    def _reattach(self) -> None:
        world, parts = self._parts.world, self._parts
        if parts.epochs.is_open:
            raise UnsupportedError(
                "strategy.optimizers was changed in a validation inside an epoch: change it at an epoch's start or end"
                " (on_train_epoch_start, say), or use groups=1"
            )
        if world.registration is not None:
            raise UnsupportedError(
                "strategy.optimizers was changed, and with elastic=True a group that joins later would have the first"
                " ones; make all optimizers in configure_optimizers, or start all ranks together"
            )
        for optimizer in self.real_optimizers:
            world.check_optimizer(optimizer)
        self.attach_optimizers()
        self.form(len(world.live_groups))

    # --- Groups -------------------------------------------------------------------------------------------------------

    def follow_recorder(self) -> None:
        parts, world = self._parts, self._parts.world
        if world.registration is not None and world.follow_recorder() and rank_zero_only.rank:  # type: ignore[attr-defined]
            self.took_over = True
            use_own_folders(parts.trainer)
            set_rank(0)
            parts.namespace.info("OmniStrategy: the group that logged and saved is gone; this group does so now")
            call_rank_zero_hooks(parts.trainer)
            show_progress_bar(parts.trainer, parts.epochs.is_open)

    def explain_take_over(self, exception: BaseException) -> None:
        if self.took_over and isinstance(exception, Exception) and not isinstance(exception, OmniError):
            _log.error(
                "OmniStrategy: this rank logs and saves since the group is gone that did: what a callback prepares only"
                " where trainer.is_global_zero is true, it does not have;"
                " see 'Logging and saving' on the documentation's page 'Joining a run'"
            )

    def merge(self) -> None:
        if self._parts.world.executor.exchanges:
            self.form(1)

    def form(self, groups: int, speeds: Mapping[int, float] | None = None) -> None:
        """Form groups, of ranks of similar ``speeds`` or in the order of ranks, with `World.regroup`'s checks only."""
        world, parts = self._parts.world, self._parts
        before, spans = world.executor, parts.epochs.before_regroup()
        parts.proxies.unguard()
        spans = world.regroup(groups, parts.pl_module, speeds) or spans
        self.hooks.guard()
        self.wrap()
        self.share_loss_scale()
        parts.epochs.after_regroup(spans, before)
        parts.balance.regrouped()
        parts.step_times.interrupt()

    def share_loss_scale(self) -> None:
        """Give the members of a group their smallest loss scale. All members call it.

        Each rank divides DDP's mean gradient by its own scale: members with different scales would train different
        models. The steps since the last change restart at zero: the scale grows on all members at once.
        """
        scaler = self.loss_scaler
        if scaler is None:
            return
        world = self._parts.world
        before = scaler.get_scale()
        scale = torch.tensor(before, device=world.device)
        if len(world.members) > 1:
            dist.all_reduce(scale, op=dist.ReduceOp.MIN, group=world.compute_group)
        scaler.load_state_dict({**scaler.state_dict(), "scale": float(scale), "_growth_tracker": 0})
        for unsent in world.reduction.memory.values() if before else ():  # PowerSGD's, in units of the scale
            unsent.error.mul_(float(scale) / before)

    def set_batch_shares(self, speeds: Sequence[float]) -> None:
        """Split the group's batches in proportion to its members' speeds. All members call it.

        Batches that a loader has already taken keep their split.
        """
        world, leases = self._parts.world, self._parts.epochs.leases
        assert leases is not None
        handed = max(int(number) for [number] in gather(world, [leases.handed]))
        leases.set_batch_shares(apportion(leases.batch_size * len(world.members), speeds), from_number=handed)

    def announce(self) -> None:
        parts, world = self._parts, self._parts.world
        # Only a tuner has this method.
        is_chosen = any(hasattr(callback, "on_omni_launch") for callback in callbacks_of(parts.trainer))
        text = f"OmniStrategy: {self.hooks.sentence}{'' if is_chosen else self.hooks.advice}"
        if world.registration is not None and world.is_leader and not parts.strategy.is_global_zero:
            # The terminal of this group shows nothing else: no progress, and no message of `rank_zero_info`.
            inspect.unwrap(parts.namespace.info)(
                f"{text} | joined the run as group {world.group}; another group logs and saves"
            )
        else:
            parts.namespace.info(text)

    def regroup(self, groups: int, by_speed: bool) -> None:
        parts, world = self._parts, self._parts.world
        if not is_fitting(parts.trainer) or not parts.proxies:
            raise ConfigurationError(
                "regroup() works while trainer.fit runs; before that, pass groups= to OmniStrategy"
            )
        if parts.trainer.fit_loop.batch_idx >= 0 and parts.epochs.is_open and not will_step(parts.trainer):
            raise ConfigurationError(
                "regroup() inside an accumulation window would mix gradients of different groups; call it when"
                " accumulate_grad_batches batches are complete"
            )
        world.check_regroup(groups)
        if groups > 1:
            self.check_several(parts.trainer)
        is_unchanged = not any(world.all_reduce_max([int(groups != len(world.live_groups))]))  # not all know of deaths
        speeds = parts.balance.speeds_of_all(world) if by_speed else None
        if is_unchanged and (groups == 1 or not by_speed):
            return
        self.form(groups, speeds)
        self.enter_world()
        self.announce()

    def enter_world(self) -> None:
        """Leave the compute groups that were formed between epochs, where hooks are for all ranks together."""
        if not self._parts.epochs.is_open:
            self._parts.world.enter_world(self._parts.pl_module)


# --- The groups that the user chose -----------------------------------------------------------------------------------

# A tuner chooses others; a later fit begins with those of the user again.


class UserGroupsStash:
    def __init__(self, parts: SharedParts, grouping: Grouping) -> None:
        self._parts, self._grouping = parts, grouping
        self._users: tuple[Topology, Communication, Balance] | None = None

    def stash(self) -> None:
        if self._users is None:
            parts, world = self._parts, self._parts.world
            self._users = world.topology, world.communication, parts.balance

    def begin_in_one_group(self) -> None:
        self.stash()
        self._parts.world.topology = Topology.even(self._parts.world.size, 1)

    def form(self) -> None:
        if self._users is None:
            return
        groups = len(self._users[0].alive)
        if groups != len(self._parts.world.topology.alive):
            self._grouping.check_several(self._parts.trainer)
            self._grouping.form(groups)
            self._grouping.enter_world()
            self._grouping.announce()

    def restore(self) -> None:
        """Restore the user's choice at the setup of a fit."""
        users, self._users = self._users, None
        if users is not None:
            parts, world = self._parts, self._parts.world
            world.topology, world.communication, parts.balance = users


# --- The hooks of one group and of several ----------------------------------------------------------------------------


class OneGroup:
    """The behaviour of Lightning's hooks where all ranks are one group."""

    def __init__(self, parts: SharedParts, grouping: Grouping) -> None:
        self._parts, self._grouping = parts, grouping

    def check(self, trainer: Trainer) -> None:
        """Reject features of this fit that do not work with this grouping."""

    def stepped(self, optimizer: Optimizer) -> Optimizer:
        """Count a step, and return the optimizer that the precision plugin makes it with."""
        self._parts.world.steps += 1
        return optimizer

    def guard(self) -> None:
        """Guard the user's optimizers after the groups were formed."""

    def batch_starts(self) -> None:
        if self._parts.world.size > 1 and self._parts.world.wrapper.sharded is None:
            self._parts.trainable.warn_of_late(self._parts.strategy.optimizers)

    def begin_batch(self) -> None:
        """Begin a batch before all callbacks."""

    def check_gradients(self) -> None:
        """Check the gradients of a step, after its backward pass."""

    @property
    def sentence(self) -> str:
        options = self._parts.world.options
        formats = replace(options.compression, all_reduce="fp32")  # which have no effect with one group
        given = [formats.given] if formats != Compression() else []
        given += ["overlap=True"] if options.overlap else []
        given += [f"server={options.server.address!r}"] if options.server.address else []
        verb = "has" if len(given) == 1 else "have"
        without_effect = f"; nothing is pushed, so {' and '.join(given)} {verb} no effect" if given else ""
        return (
            f"{counted(self._parts.world.size, 'rank')} in 1 group, which is"
            f" {_held_by(self._parts.world)}: no parameter server, no"
            f" staleness{without_effect}"
        )

    @property
    def advice(self) -> str:
        joins = ", or elastic=True to join the server's run" if self._parts.world.options.server.address else ""
        return f". Pass groups= for asynchronous groups{joins}"


class SeveralGroups(OneGroup):
    @override
    def check(self, trainer: Trainer) -> None:
        strategy = self._parts.strategy
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
        if self._grouping.ddp_options.get("process_group") is not None:
            raise UnsupportedError(
                "process_group= is that of each compute group where there are several; leave it out, or use groups=1"
            )
        module = strategy.lightning_module
        if module is not None and not self._parts.world_options.is_sharded:  # else DDP ignores all of it
            check_all_shared(module)
        self._parts.merged.check(trainer)

    @override
    def stepped(self, optimizer: Optimizer) -> Optimizer:
        return self._parts.proxies.of(optimizer) if optimizer.param_groups else optimizer

    @override
    def check_gradients(self) -> None:
        if len(self._parts.world.members) > 1:
            self._parts.trainable.check_in_step()

    @override
    def guard(self) -> None:
        self._grouping.has_had_groups = True
        self._parts.proxies.guard(self._grouping.real_optimizers)

    @override
    def batch_starts(self) -> None:
        parts, world = self._parts, self._parts.world
        with torch.no_grad():
            world.parameter_groups.follow_all()
        may_be_unused = bool(self._grouping.ddp_options.get("find_unused_parameters"))
        if len(world.members) > 1 and parts.trainable.has_changed(parts.strategy.optimizers, may_be_unused):
            self._grouping.wrap()

    @override
    def begin_batch(self) -> None:
        merged = self._parts.merged
        merged.check(self._parts.trainer)  # again, since accumulation may have a schedule
        merged.step_done()  # ends any use of it by callbacks since the last step

    @property
    @override
    def sentence(self) -> str:
        world = self._parts.world
        sizes = sorted({len(members) for members in world.topology.groups if members})
        data = "dynamic" if self._parts.epochs.data.is_dynamic else "static"
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
    if world.wrapper.sharded is None:
        return "DistributedDataParallel"
    shards = f" with {world.shards} shards" if world.has_replicas else ""
    if world.tensor_parallel == 1:
        return f"FSDP2{shards}"
    return f"FSDP2 and tensor parallelism, {world.shards // world.tensor_parallel} x {world.tensor_parallel} ranks"
