"""`OmniStrategy`: Lightning's hooks, translated into calls on the world."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method
from lightning_omni.run_report import RunReport
from lightning_omni.runtime import Elastic, Server, World, WorldOptions
from lightning_omni.runtime.loop_checks import forget
from lightning_omni.runtime.model.meshes import FSDP
from lightning_omni.runtime.model.sharded import check_clipping, reshard
from lightning_omni.runtime.process_groups import check_none_lost
from lightning_omni.runtime.timing import clock_of
from lightning_omni.strategy.arguments import (
    FitOptions,
    RequestedOptions,
    refuse_unknown_of_ddp,
    split_model_parallel,
)
from lightning_omni.strategy.checkpoints import SAVING
from lightning_omni.strategy.lightning_internals.callbacks import forget_loaded_path
from lightning_omni.strategy.lightning_internals.loops import is_fitting, loops_iterate, seed_workers
from lightning_omni.strategy.lightning_internals.metrics import validation_loaders
from lightning_omni.strategy.lightning_internals.strategies import (
    FIRST_BARRIER,
    collective_timeout,
    exclude_from_broadcast,
    keep_on_device,
    set_ddp_options,
    set_device_mesh,
    set_launcher,
    set_rank,
)
from lightning_omni.strategy.loops.epoch import LightningRank, draws_batches, has_lightning_sampler
from lightning_omni.strategy.loops.live_metrics import StepTimes, gathering_sentence
from lightning_omni.strategy.namespaces import namespace_of, need_namespace, new_in, strategy_class_in
from lightning_omni.strategy.parts import FitParts
from lightning_omni.strategy.shared_parts import Namespace
from lightning_omni.strategy.signals import requeue_signal
from lightning_omni.topology import RECORDER
from lightning_omni.wire.compression import Compression
from lightning_omni.wire.formats import WireFormat

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies import DDPStrategy as _Base
    from pytorch_lightning.strategies import ModelParallelStrategy
else:
    OfLightning = Any
    _Base = object
if TYPE_CHECKING is True:  # hides this import from LightningCLI, which executes other TYPE_CHECKING blocks
    from lightning.pytorch.strategies import ModelParallelStrategy as OfLightning


class OmniStrategyHooks(_Base):
    """A strategy that trains synchronously inside compute groups and asynchronously across them.

    Use it where synchronization is the bottleneck: step times that vary, a slow network, or workers that may die. See
    :doc:`/how-to/groups`. Only ``groups`` and ``method`` matter at first.

    Args:
        groups: number of compute groups, from 1 (plain DDP, bit for bit, with no server in the path) to the number of
            ranks. Groups differ in size by at most one rank, or one replica of a sharded model. None uses the
            environment variable LIGHTNING_OMNI_GROUPS, or one group per node.
        method: how groups exchange: a name (``"hardsync"``), a name with settings (``"diloco:period=50"``) or a value
            (``DiLoCo(period=50)``): see `lightning_omni.methods`. None uses LIGHTNING_OMNI_METHOD, or ``"async_sgd"``.
        data: ``"dynamic"`` assigns samples to the groups as they become free, so that a slow group does not delay the
            others; ``"static"`` gives every rank its share in advance, as DistributedSampler does. None uses
            LIGHTNING_OMNI_DATA, or ``"dynamic"``.
        rebalance: ``"auto"`` measures the ranks' speeds and splits each group's batch in proportion, where that makes
            the group more than 5 % faster; the loss must be a mean over the batch. ``"off"`` gives all ranks equal
            parts.
        compression: the formats in which tensors are sent: ``"int8"`` or the like for pushes, or a `Compression` for
            pushes, pulls and the averages inside a group: see :doc:`/reference/wire-formats`.
        overlap: whether a group computes its next gradient during an exchange, which makes that gradient one step
            staler; for async_sgd: see :doc:`/explanation/staleness`.
        server: ``"tcp://host:port"`` of a running parameter server (``lightning-omni serve``); ``"per-node"``, which
            starts one server on each node; or a `Server`. Without an address LIGHTNING_OMNI_SERVER is used, and the
            ranks join the run there (see `Elastic`); without that, rank 0 starts a server process for this run.
        elastic: True lets the ranks of this launcher join the run at ``server`` as one group, at any time; or an
            `Elastic`. See :doc:`/how-to/joining`.
        model_parallel: how the members of a group hold the model. None: each holds the whole model. ``"fsdp"`` or an
            `FSDP`: each holds a shard. ``ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=...)`` of
            Lightning: ``configure_model`` parallelizes and shards the module on the group's ``self.device_mesh``. See
            :doc:`/how-to/large-models`.
        validation: ``"wait"``: all groups synchronize and validate together. ``"published"``: inside an epoch one group
            validates while the others train on; see :doc:`/how-to/validation`.
        merged: name of a submodule that stays at the server, such as the last layers of a classifier. Each group's
            batch passes through it there, one group at a time: its weights are never stale, and while groups train,
            only activations and their gradients are sent. No effect with one group. See :doc:`/how-to/merged-head`.
        **ddp: arguments of DDPStrategy (``find_unused_parameters``, ``timeout``, ``start_method``, ...).

    Attributes:
        world_options: the arguments that a loop without Lightning would pass to `World`.
        ddp_options: the arguments of DistributedDataParallel, as they were passed.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> from lightning_omni import OmniStrategy
        >>> strategy = OmniStrategy(groups=2)  # Trainer(strategy=strategy, devices=4)
        >>> strategy = OmniStrategy(groups=2, method="diloco:period=50", compression="int8")
    """

    namespace: ClassVar[Namespace]
    """For extensions: the names that it uses of the Trainer's ``lightning.pytorch`` or ``pytorch_lightning``."""
    parts: FitParts
    """For extensions: the objects that do its work in this process. They may change in any release."""
    ddp_options: dict[str, Any]

    def __init__(
        self,
        groups: int | None = None,
        method: str | Method | None = None,
        *,
        data: Literal["dynamic", "static"] | None = None,
        rebalance: Literal["off", "auto"] = "off",
        compression: str | WireFormat | Compression = "fp32",
        overlap: bool = False,
        server: str | Server | None = None,
        elastic: bool | Elastic | None = None,
        model_parallel: Literal["fsdp"] | FSDP | ModelParallelStrategy | OfLightning | None = None,
        validation: Literal["wait", "published"] = "wait",
        merged: str | None = None,
        **ddp: Any,
    ) -> None:
        need_namespace(type(self))
        refuse_unknown_of_ddp(self, OmniStrategyHooks, ddp)
        sharding, theirs = split_model_parallel(model_parallel)
        ddp = {**theirs, **ddp}
        asked = self._asked = RequestedOptions(groups, method, data, server, elastic)
        with asked.naming_variables():
            self.world_options = WorldOptions(
                groups=asked.groups,
                method=asked.method,
                compression=compression,
                overlap=overlap,
                server=asked.server,
                elastic=asked.elastic,
                model_parallel=sharding,
            )
            self._fit_options = FitOptions(merged, asked.data, rebalance, validation)
            self._fit_options.check(self.world_options, ddp)
        # Where the environment names the server, the options are those of the script's runs without one.
        if asked.names_server and (unread := self.world_options.unread):
            self.namespace.warn(f"OmniStrategy: {unread}")
        super().__init__(**ddp)
        self.ddp_options = dict(vars(self).get("_ddp_kwargs", {}))
        self._last_report: RunReport | None = None
        self._make_parts()

    def _make_parts(self) -> None:
        self.parts = FitParts(
            self, self.namespace, self.world_options, self._fit_options, self.ddp_options, super().configure_ddp
        )

    @override
    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "parts": None, "_last_report": self.last_report}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_parts()
        self.parts.launching.attach(self.launcher)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a reduction that names the namespace: another process may import namespaces in another order."""
        parts: Any = super().__reduce_ex__(max(2, protocol))
        kind = type(self)
        return new_in, (vars(kind).get("_original", kind), namespace_of(kind)), *parts[2:]

    # --- The run, for callbacks ---------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """Return this rank's view of the run; raise `ConfigurationError` if this process has none."""
        return self.parts.world

    @property
    def last_report(self) -> RunReport | None:
        """Return the result of `report`, or None before the first run; a run in other processes sets it."""
        return self._last_report if self.parts.current_world is None else self.report()

    @last_report.setter
    def last_report(self, report: RunReport) -> None:
        self._last_report = report

    def report(self) -> RunReport:
        """Return a report of the current or last run; raise `ConfigurationError` before the first."""
        if self.parts.current_world is None and self._last_report is not None:
            return self._last_report
        return self.parts.reporting.report(self.world, self.parts.step_times.bytes_per_step)

    def regroup(self, groups: int, by_speed: bool = False) -> None:
        """Change the number of compute groups during a fit. Weights, optimizer state and data position are kept.

        Call it on every rank at a batch boundary (in ``on_train_batch_end``, for example), after equally many batches
        on each. Batches that were drawn but not trained return to the pool.

        Args:
            groups: 1 to the number of live ranks, or of replicas of a sharded model.
            by_speed: puts ranks of similar speed into one group, so that no slow rank delays a fast group;
                ``rebalance="auto"`` must have measured every rank.

        Raises:
            ConfigurationError: no fit runs, ``groups`` is out of range or does not work with this fit, this is inside
                an accumulation window, or speeds are not known.
        """
        self.parts.grouping.regroup(groups, by_speed)

    # --- Namespaces ---------------------------------------------------------------------------------------------------

    @property  # type: ignore[explicit-override, unused-ignore]  # mypy does not see the override of a setter
    @override
    def accelerator(self) -> Any:
        """Return the accelerator; setting it switches this strategy to the namespace of the Trainer."""
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        own, theirs = namespace_of(type(self)), namespace_of(type(accelerator))
        if theirs not in (None, own):
            kept = {name: value for name, value in vars(self).items() if namespace_of(type(value)) != own}
            self.__class__ = strategy_class_in(type(self), theirs)
            super().__init__()
            vars(self).update(kept)
            self._make_parts()
        super(OmniStrategyHooks, type(self)).accelerator.fset(self, accelerator)  # type: ignore[attr-defined]

    # --- Processes ---------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        launching = self.parts.launching
        launching.choose_start_method()
        super()._configure_launcher()
        self.parts.checkpoints.check_plugin()
        with self._asked.naming_variables():
            launching.check_groups()
        set_launcher(self, launching.launcher())

    @override
    def setup_environment(self) -> None:
        options, parts, fits = self.world_options, self.parts, is_fitting(self.parts.trainer)
        parts.is_evaluating = not fits
        if options.is_sharded and fits:
            parts.grouping.check_averages()
        is_on_gpu = any(device.type == "cuda" for device in self.parallel_devices or ())
        if is_on_gpu and (options.groups != 1 or options.elastic.join):  # see `ProcessGroups.abort`
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        super().setup_environment()
        if options.elastic.join:
            if fits:
                parts.current_world = None  # each fit joins a run of its own
            else:
                elastic, server = replace(options.elastic, join=False), replace(options.server, address=None)
                options = replace(options, elastic=elastic, server=server, groups=1)
        if fits:
            forget_loaded_path(parts.trainer)  # Lightning has chosen that of this fit, and sets it later
            check_none_lost()
            parts.user_groups.restore()  # an earlier fit may have been tuned
            if parts.current_world is not None:
                self.world.is_finished = False  # a process that ends from here on has failed
        if parts.current_world is None:
            timeout = collective_timeout(self) or options.timeout
            world = parts.current_world = World(
                device=self.root_device,
                options=replace(options, timeout=timeout),
                ranks_per_node=self._ranks_per_node(),
            )
            if parts.server_process is not None:
                world.server.processes[0], parts.server_process = parts.server_process, None
            world.check_same(self._fit_options.of_all_ranks)
            world.connection.is_writing = lambda: parts.checkpoints.is_writing
            if world.registration is not None:
                world.connection.on_stuck = parts.failures.start_again
                parts.rejoining.enlisted(world.registration.run)
                parts.grouping.took_over = False
        if self.world.registration is not None:  # Lightning has set the rank in the group
            set_rank(0 if self.world.is_recorder else self.world.rank)
        if options.is_sharded:
            set_device_mesh(parts.pl_module, self.world.mesh)
            forget(self.world.process_groups.original, self.world.rank)

    def _ranks_per_node(self) -> list[int]:
        """Return the number of ranks on each node, which are numbered node by node. All ranks call it."""
        if self.num_nodes > 1 and self.world_options.groups != 1:
            is_elsewhere = self.global_rank != self.node_rank * self.num_processes + self.local_rank
            any_is = torch.tensor(int(is_elsewhere), device=self.root_device)
            dist.all_reduce(any_is, op=dist.ReduceOp.MAX)
            if any_is:
                raise ConfigurationError(
                    "the ranks of each node have no successive numbers, and ranks with such form groups: give them"
                    " successive ones (srun --distribution=block, mpirun --map-by slot), or use groups=1"
                )
        return [self.num_processes] * self.num_nodes

    @property
    @override
    def is_global_zero(self) -> bool:
        """Return whether this rank logs and saves for the run; among groups that join, one rank does."""
        if self.parts.current_world is None or self.world.registration is None:
            return super().is_global_zero
        return self.world.is_recorder

    # --- Model and optimizers ----------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        parts, fits = self.parts, is_fitting(trainer)
        if self.world_options.is_sharded:
            parts.grouping.check_precision()
        if fits:
            parts.grouping.hooks.check(trainer)
            parts.run_states.check(trainer)
            parts.signals.prepare(requeue_signal(self.cluster_environment))
            parts.begin(trainer)
            parts.epochs.connect(trainer, self.world)
        super().setup(trainer)
        if fits:
            parts.grouping.attach_optimizers()
            if parts.grouping.has_had_groups:  # in an earlier fit of the same Trainer
                parts.grouping.share_loss_scale()
            if self.world.executor.exchanges:
                self.world.parameter_groups.agree()
                self.world.connection.start_server()
            if self.world.joins_running_run:
                parts.checkpoints.contents.forget()
                parts.epochs.resume(parts.checkpoints.contents.resumed)
                parts.run_states.take_over(trainer)

    @override
    def model_to_device(self) -> None:
        if self.world_options.is_sharded:
            self.world.wrapper.shard(self.parts.pl_module)
        super().model_to_device()
        if self.world_options.is_sharded:
            self.world.wrapper.share_initial()
            exclude_from_broadcast(self.parts.pl_module, [name for name, _ in self.parts.pl_module.named_parameters()])

    @override
    def configure_ddp(self) -> None:
        if self.world_options.is_sharded:
            self.parts.grouping.wrap()
            return
        if self.world.executor.exchanges:
            self.world.wrapper.broadcast_initial(self.parts.pl_module)
            self.parts.grouping.wrap()
            return
        set_ddp_options(self, self.ddp_options)
        super().configure_ddp()
        self.world.reduction.install(self.model, self.world.compute_group)
        self.parts.trainable.remember(self.parts.pl_module)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.world.executor.check_optimizer(optimizer)
        if self.world_options.is_sharded and trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
            check_clipping(self.optimizers, self.world_options.model_parallel)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        return super().optimizer_step(self.parts.grouping.hooks.stepped(optimizer), closure, model, **kwargs)

    # --- Training ----------------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        parts = self.parts
        parts.signals.install(parts.trainer, self.world, lambda: parts.epochs.interrupt(parts.pl_module), parts.waiting)

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.parts.signals.progress()
        if self.parts.current_world is not None and self.world.control is not None:
            self.world.control.report_progress()
        return super().batch_to_device(batch, *args, **kwargs)

    @override
    def on_train_start(self) -> None:
        """Begin training, after all callbacks; several groups form and join the server."""
        super().on_train_start()
        world, parts, trainer = self.world, self.parts, self.parts.trainer
        if parts.nested.is_running:
            return
        self._install_signals()
        if world.registration is not None and trainer.enable_validation and trainer.val_dataloaders is None:
            validation_loaders(trainer)  # made here, as all groups do
        parts.reporting.begin()
        world.states.resume(parts.checkpoints.contents.resumed)
        parts.grouping.follow_external_writes()
        world.begin()
        parts.checkpoints.contents.forget()  # the server and the groups have what was resumed
        world.watch_members()
        if world.registration is not None:
            control = world.executor.control
            parts.rejoining.took_part(world.registration.run, is_saved=control is None or control.reconnect_timeout > 0)
        parts.epochs.start()
        parts.balance.begin(world, parts.pl_module, lambda: parts.epochs.leases)
        parts.step_times = StepTimes(clock_of(world.device))
        parts.grouping.hooks.guard()
        parts.grouping.announce()
        if warning := parts.reporting.warning_before(world, parts.epochs.run.steps_left()):
            self.namespace.warn(f"OmniStrategy: {warning}")
        for call in parts.on_ready:
            call()
        world.states.forget_saved()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.parts.grouping.hooks.batch_starts()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.parts.balance.begin_forward()
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.parts.step_times.forward_done(self.world.exchange.traffic.seconds)
        super().pre_backward(closure_loss)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(self.parts.epochs.data.weigh(closure_loss), optimizer, *args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        parts = self.parts
        if parts.current_world is not None:
            reshard(parts.world.wrapper.sharded)  # hooks of the next epoch may add parameters to the optimizer
        parts.epochs.after_validation()
        parts.balance.after_validation()
        parts.step_times.interrupt()

    @override
    def on_train_end(self) -> None:
        """End training, after the last callback; several groups load one state of each optimizer on all ranks."""
        super().on_train_end()
        world, parts = self.world, self.parts
        if parts.nested.is_running:
            return
        parts.take_time()
        parts.balance.end()
        world.is_finished = True
        parts.reporting.ask(world)
        parts.epochs.finish()
        if world.executor.control is not None:
            world.executor.follow_writes()
            if warning := parts.reporting.warning(world):
                self.namespace.info(f"OmniStrategy: {warning}")
            world.states.bring_to_all()
            for part in world.parts:
                part.replica.abandon()
            parts.proxies.unguard()
        parts.rejoining.finished()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.parts.failures.explain(exception)
        super().on_exception(exception)
        self.parts.failures.report(exception)

    @override
    def teardown(self) -> None:
        try:
            if self.world_options.is_sharded:
                with keep_on_device(self):
                    super().teardown()
                reshard(self.world.wrapper.sharded if self.parts.current_world is not None else None)
            else:
                super().teardown()
        finally:  # AsyncCheckpointIO, for example, raises the error of a save
            set_ddp_options(self, self.ddp_options)  # drops the process group of the former compute group
            self.parts.finish()

    # --- Collectives -------------------------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks of the default process group, unless this rank has failed.

        The first barrier after Lightning has registered its signal handlers installs ours. A failed rank does not wait
        in the barrier that ends a callback's save: its peers are elsewhere. In the recorder's group, or one that has
        joined on its own, it gives the leader time to fetch state.
        """
        parts = self.parts
        if name == FIRST_BARRIER and is_fitting(parts.trainer) and not parts.nested.is_running:
            self._install_signals()
        if parts.failures.at is None:
            with parts.waiting():
                super().barrier(name)
            return
        world = self.world
        if world.control is not None and not world.is_leader and (world.registration or RECORDER in world.members):
            world.control.wait_for_end(SAVING)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over ``group``, or the default process group: while several groups train, the compute group."""
        parts = self.parts
        trains = parts.current_world is not None and parts.world.is_computing and not parts.epochs.published.evaluates
        if trains and group in (None, dist.group.WORLD) and parts.reporting.is_first_gather():
            self.namespace.warn(gathering_sentence(self.world))
        with parts.waiting():
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over ``group``, or the default process group.

        Once several groups have trained, and while they do not, a mean of whole numbers, such as the batch sizes by
        which Lightning divides an epoch's metric, is a float; and a ``sync_dist_group=dist.group.WORLD`` of the
        training step, then the compute group, is replaced by the group of all ranks.
        """
        world = self.parts.current_world
        if self.parts.grouping.has_had_groups and world is not None and world.is_begun and not world.is_computing:
            if group is not None and group is world.compute_group:
                group = None
            is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
            if is_mean and isinstance(tensor, Tensor) and tensor.dtype == torch.long:
                tensor = tensor.float()
        with self.parts.waiting():
            return super().reduce(tensor, group=group, reduce_op=reduce_op)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self.parts.waiting():
            return super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce a decision with "all" or "any" over the default process group.

        A rank that has failed returns its own decision.
        """
        parts = self.parts
        if parts.failures.at is not None:
            return decision
        if parts.current_world is None:
            return super().reduce_boolean_decision(decision, all=all)
        votes = torch.tensor(int(decision), device=self.root_device)
        with parts.waiting():
            dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes)  # Lightning counts lost ranks, too

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.parts.checkpoints.module_state(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.parts.checkpoints.optimizer_state(optimizer, super().optimizer_state(optimizer))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(self.parts.checkpoints.weights_to_load(checkpoint), strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(self.parts.checkpoints.optimizer_states_to_load(checkpoint))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        self.parts.checkpoints.save(write, checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.parts.checkpoints.has_written:  # otherwise the rank that was to write its successor may have died
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        options = {} if weights_only is None else {"weights_only": weights_only}  # older releases do not have it
        read = partial(super().load_checkpoint, checkpoint_path, **options)
        return self.parts.checkpoints.load(checkpoint_path, read, **options)

    # --- Data --------------------------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the arguments of DistributedSampler; the rank's type marks samplers that Lightning makes."""
        given, world = super().distributed_sampler_kwargs, self.parts.current_world
        if world is not None and not is_fitting(self.parts.trainer):
            if world.ever_lost:  # the remaining ranks evaluate all of the data
                given = {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}
        elif world is not None and (registration := world.registration) is not None:
            # The group that began the run determines lengths; samples are leased.
            given = {"num_replicas": registration.announced, "rank": given["rank"] if registration.begins else 0}
        same = world.tensor_parallel if world is not None else 1  # ranks that get the same samples
        return {**given, "num_replicas": given["num_replicas"] // same, "rank": LightningRank(given["rank"] // same)}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if self.parts.current_world is not None and self.world.registration is not None:
            seed_workers(self.parts.trainer, loader, self.world.rank)
        trainer = self.parts.trainer
        is_trained = trainer.training or loops_iterate(trainer)  # in a hook of a validation, too
        return self.parts.epochs.data.process(loader, self.global_rank, self._objection) if is_trained else loader

    def _objection(self, loader: DataLoader[Any]) -> str:
        if draws_batches(self.parts.pl_module.training_step):
            return "training_step draws from it (dataloader_iter)"
        return "" if has_lightning_sampler(loader) else "it has a DistributedSampler of its own"
