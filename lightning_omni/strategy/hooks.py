"""`OmniStrategy`: Lightning's hooks, translated into calls on the world. It has no arithmetic and no sockets.

The class here serves both of Lightning's namespaces: it is mixed into each namespace's own DDPStrategy (see
``pytorch_lightning.py`` and ``lightning.py`` in this package).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_all_start_methods
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_omni.checks import counted
from lightning_omni.errors import ConfigurationError, ConnectionLost, Evicted, OmniError, RankLost, UnsupportedError
from lightning_omni.methods import Method
from lightning_omni.runtime import Elastic, Server, World, WorldOptions
from lightning_omni.runtime.loop_checks import forget
from lightning_omni.runtime.model.meshes import FSDP, evenly, shown, sizes_in
from lightning_omni.runtime.model.sharded import check_clipping, reshard
from lightning_omni.runtime.process_groups import check_none_lost
from lightning_omni.runtime.timing import clock_of
from lightning_omni.strategy.arguments import (
    FitOptions,
    RequestedOptions,
    refuse_unknown_of_ddp,
    split_model_parallel,
)
from lightning_omni.strategy.checkpoints import Checkpoints, SavingStrategy
from lightning_omni.strategy.joining import Rejoining, RunStates
from lightning_omni.strategy.launcher import describe_exit, exit_process, is_interactive
from lightning_omni.strategy.lightning_internals.callbacks import averages_weights, callbacks_of
from lightning_omni.strategy.lightning_internals.loops import loops_iterate, seed_workers
from lightning_omni.strategy.lightning_internals.strategies import (
    FIRST_BARRIER,
    collective_timeout,
    exclude_from_broadcast,
    keep_on_device,
    set_ddp_options,
    set_device_mesh,
    set_launcher,
    set_rank,
    set_start_method,
    start_method,
)
from lightning_omni.strategy.loops.epoch import LightningRank, draws_batches, has_lightning_sampler
from lightning_omni.strategy.loops.listener import Listener, NestedRuns
from lightning_omni.strategy.namespaces import namespace_of, need_namespace, new_in, strategy_class_in
from lightning_omni.strategy.optimizers import MergedSubmodule, Proxies, explain_unused
from lightning_omni.strategy.signals import Signals, end_in_one_line, requeue_signal
from lightning_omni.strategy.user_groups import UserGroupsStash
from lightning_omni.topology import check_groups
from lightning_omni.transport.serving import ServerProcess
from lightning_omni.wire import messages as m
from lightning_omni.wire.compression import Compression
from lightning_omni.wire.formats import WireFormat

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies import ModelParallelStrategy
else:
    OfLightning = Any
if TYPE_CHECKING is True:  # hides this import from LightningCLI, which executes other TYPE_CHECKING blocks
    from lightning.pytorch.strategies import ModelParallelStrategy as OfLightning


class OmniStrategyHooks(SavingStrategy):
    """A strategy that trains synchronously inside compute groups and asynchronously across them.

    Use it where synchronization is the bottleneck: step times that vary, a slow network, or workers that may die. See
    docs/how-to/groups.md. Only ``groups`` and ``method`` matter at first; the defaults of the others suit most runs.

    Args:
        groups: number of compute groups, from 1 (plain DDP, bit for bit, with no server in the path) to the number of
            ranks. Groups differ in size by at most one rank. None uses the environment variable LIGHTNING_OMNI_GROUPS
            if it is set, and otherwise one group per node.
        method: how groups exchange: a name (``"hardsync"``), a name with settings (``"diloco:period=50"``) or a value
            (``DiLoCo(period=50)``): see `lightning_omni.methods`. None uses LIGHTNING_OMNI_METHOD, or ``"async_sgd"``.
        data: ``"dynamic"`` assigns the samples of an epoch to the groups as they become free, so that a slow group does
            not delay the others; ``"static"`` gives every rank its share in advance, as DistributedSampler does. None
            uses LIGHTNING_OMNI_DATA, or ``"dynamic"``.
        rebalance: for ranks of different speed: ``"auto"`` measures their speeds and splits each group's batch in
            proportion, where that makes the group more than 5 % faster; ``"off"`` gives all ranks equal parts. The loss
            must be a mean over the batch.
        compression: the formats in which tensors are sent, for slow networks: ``"int8"`` or the like for pushes, or a
            `Compression` for pushes, pulls and the averages inside a group: see docs/reference/wire-formats.md.
        overlap: whether a group computes its next gradient during an exchange, which makes that gradient one step
            staler; for async_sgd. Use it where exchanges take long: see docs/explanation/staleness.md.
        server: ``"tcp://host:port"`` of a running parameter server (``lightning-omni serve``); ``"per-node"``, which
            starts one server on each node; or a `Server`. Without an address LIGHTNING_OMNI_SERVER is used, and the
            ranks join the run there (see `Elastic`); if that is not set either, rank 0 starts a server for this run in
            a separate process.
        elastic: how groups join, leave and fail: True lets the ranks of this launcher join the run at ``server`` as one
            group, at any time; or an `Elastic`. See docs/how-to/joining.md.
        model_parallel: how the members of a group hold the model. None: each holds the whole model. ``"fsdp"`` or an
            `FSDP`: each holds a shard. ``ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=...)`` of
            Lightning: the module's ``configure_model`` parallelizes and shards it on the group's
            ``self.device_mesh``. See docs/how-to/large-models.md.
        validation: ``"wait"``: all groups synchronize and validate together. ``"published"``: one group does a
            validation inside an epoch, with the weights of that time, while the others train on; see
            docs/how-to/validation.md.
        merged: name of a submodule that stays at the server, such as the last layers of a classifier. Each group's
            batch passes through it there, one group at a time: its weights are never stale and never sent, only
            activations and their gradients are. See docs/how-to/merged-head.md. With one group this has no effect.
        **ddp: arguments of DDPStrategy (``find_unused_parameters``, ``timeout``, ``start_method``, ...).

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> from lightning_omni import OmniStrategy
        >>> strategy = OmniStrategy(groups=2)  # Trainer(strategy=strategy, devices=4)
        >>> strategy = OmniStrategy(groups=2, method="diloco:period=50", compression="int8")
    """

    launcher_class: type
    terminated_class: type[SystemExit]
    processes_class: type

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
            self._world_options = WorldOptions(
                groups=asked.groups,
                method=asked.method,
                compression=compression,
                overlap=overlap,
                server=asked.server,
                elastic=asked.elastic,
                model_parallel=sharding,
            )
            self._fit_options = FitOptions(merged, asked.data, rebalance, validation)
            self._fit_options.check(self._world_options, ddp)
        super().__init__(**ddp)
        self.ddp_options = dict(vars(self).get("_ddp_kwargs", {}))
        self._last_report = None
        self._make_run()

    def _make_run(self) -> None:
        """Make the parts that exist once per process and are never sent to another one."""
        self._make_parts(self._fit_options)
        self.nested = NestedRuns(self)
        self._listener: Listener | None = None
        self.run_states = RunStates(self)
        self.epochs.on_parted = self.run_states.store
        self.signals = Signals(self.terminated_class)
        self.rejoining = Rejoining()
        self.checkpoints = Checkpoints(self.rank_zero_warn)
        self.has_failed = self.is_writing = False
        self._failed_at = ""
        self.arrangement = UserGroupsStash(self)
        self.on_ready: list[Callable[[], None]] = []
        """Functions called on every rank after the groups are formed and before the first batch, such as a tuner's."""
        self._server_process: ServerProcess | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the constructor's settings and the report of the last fit."""
        state: dict[str, Any] = super().__getstate__()
        fresh = object.__new__(type(self))
        fresh._fit_options = self._fit_options
        fresh._make_run()
        kept = {name: value for name, value in state.items() if name not in vars(fresh)}
        return {**kept, "_fit_options": self._fit_options, "_last_report": self.last_report}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_run()

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a reduction that names the namespace: another process may import namespaces in another order."""
        parts: Any = super().__reduce_ex__(max(2, protocol))
        kind = type(self)
        return new_in, (vars(kind).get("_original", kind), namespace_of(kind)), *parts[2:]

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
            self._make_run()
        super(OmniStrategyHooks, type(self)).accelerator.fset(self, accelerator)  # type: ignore[attr-defined]

    # --- Processes ---------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        self._choose_start_method()
        super()._configure_launcher()
        if self.saves_folders and type(self.checkpoint_io) is not self.plain_checkpoint_io:
            raise UnsupportedError(
                f"{self.given_folders} and {type(self.checkpoint_io).__name__}: each rank writes its share by itself,"
                " and there is no whole checkpoint to hand to a CheckpointIO; leave one of them out"
            )
        ranks = asked = self.num_nodes * self.num_processes
        groups = self._world_options.groups
        if groups is not None and self.cluster_environment is not None:
            if self.cluster_environment.creates_processes_externally:
                ranks = self.cluster_environment.world_size()
            with self._asked.naming_variables():
                if ranks < groups <= asked:
                    raise ConfigurationError(
                        f"groups={groups} and devices={self.num_processes}, but only {counted(ranks, 'rank')} of"
                        f" {asked} came: {type(self.cluster_environment).__name__} has Lightning start none; start"
                        " as many by torchrun --nproc-per-node or srun --ntasks-per-node, or, in an interactive shell"
                        " of a SLURM job, set SLURM_JOB_NAME=interactive"
                    )
                check_groups(groups, ranks)
                if (sharding := self._world_options.model_parallel) is not None:
                    nodes = [ranks // self.num_nodes] * self.num_nodes
                    sizes_in(evenly(ranks, groups, sharding), sharding, nodes)
        if start_method(self) != "popen":
            set_launcher(self, self.processes_class(self, start_method(self)))
        else:
            launcher = self.launcher_class(self.cluster_environment, self.num_processes, self.num_nodes)
            launcher.on_death, launcher.on_launch = self._on_child_death, self._on_launch
            launcher.is_writing, launcher.failures = self._writes, self._failures
            set_launcher(self, launcher)

    def _choose_start_method(self) -> None:
        """Fork the ranks in interactive sessions, which have no script to start; Lightning does the same."""
        environment = self.cluster_environment
        is_ours = environment is not None and not environment.creates_processes_externally
        if not is_ours or not is_interactive() or start_method(self) != "popen":
            return
        if "fork" not in get_all_start_methods():
            raise ConfigurationError(
                "OmniStrategy in a notebook or an interactive session: ranks are copies of its process there"
                ' (start_method="fork"), which this system cannot make; run the code as a script'
            )
        set_start_method(self, "fork")

    def _on_launch(self, trainer: Trainer | None) -> None:
        """Prepare callbacks and the server on rank 0 in the seconds that the other ranks need for their imports."""
        if trainer is None or not self._is_fitting(trainer):
            return
        for callback in callbacks_of(trainer):
            if callable(prepare := getattr(callback, "on_omni_launch", None)):
                prepare(trainer)
        if (self._world_options.groups or self.num_nodes) > 1:
            self.prepare_server()

    def prepare_server(self) -> None:
        """Start the embedded server's process on rank 0, without waiting for it; the process gets its options later."""
        if self._world_options.server.address is None and self._world is None and self._server_process is None:
            self._server_process = ServerProcess()

    def _on_child_death(self, local_rank: int, code: int) -> bool:
        """Report that a process which this rank started has failed; return whether the run continues.

        The launcher's thread calls it.
        """
        world, rank = self._world, self.node_rank * self.num_processes + local_rank
        registration = world.registration if world is not None else None
        rank += registration.first if registration is not None else 0
        control = world.executor.control if world is not None else None  # read once: the run may end meanwhile
        if self.signals.is_stopping or self.rejoining.is_armed:
            return True
        if world is not None and (rank in world.lost or rank in world.ever_lost):
            return True
        if world is not None and world.is_finished:
            if code > 0:  # its script failed after the end of training
                exit_process(1, f"the process of rank {rank} ended with {describe_exit(code)}")
            return True
        if world is None or control is None:
            return False
        control.post(m.RankEnded(rank=rank, reason=f"the process of rank {rank} ended with {describe_exit(code)}"))
        # The server evicts a group that has joined on its own; the group may then rejoin.
        return registration is not None or 0 not in world.topology.members(world.topology.group_of(rank))

    def _failures(self) -> Sequence[str]:
        """Return the failures of other ranks, for this process's exit status; groups that join have their own."""
        return () if self._world is None or self.world.registration is not None else self.world.failures

    def _writes(self) -> bool:
        return self.is_writing

    @override
    def setup_environment(self) -> None:
        """Join the other ranks and make the world; nothing needs the server yet."""
        if self.is_sharded and self._is_fitting(self._trainer):
            self._check_averages()
        super().setup_environment()
        options = self._world_options
        if options.elastic.join:
            fits = self._is_fitting(self._trainer)
            self._world = None if fits else self._world  # each fit joins a run of its own
            if not fits:
                elastic, server = replace(options.elastic, join=False), replace(options.server, address=None)
                options = replace(options, elastic=elastic, server=server, groups=1)
        if self._is_fitting(self._trainer):
            check_none_lost()
        if self._world is None:
            timeout = collective_timeout(self) or options.timeout
            self._world = World(
                device=self.root_device,
                options=replace(options, timeout=timeout),
                ranks_per_node=self.ranks_per_node(),
            )
            self.world.server.process, self._server_process = self._server_process, None
            if self.world.registration is not None:
                self.world.connection.on_stuck = self._start_again
                self.rejoining.enlisted(self.world.registration.run)
                set_rank(self.world.rank)
                self._is_told_to_record, self._took_over = self.world.is_recorder, False
        if self.is_sharded:
            set_device_mesh(self.pl_module, self.world.mesh)
            forget(self.world.process_groups.original, self.world.rank)

    def ranks_per_node(self) -> list[int]:
        """Return the number of ranks on each node, in rank order."""
        return [self.num_processes] * self.num_nodes

    @property
    @override
    def is_global_zero(self) -> bool:
        """Return whether this rank logs and saves for the run; among groups that join on their own, one rank does."""
        if self._world is None or self.world.registration is None:
            return super().is_global_zero
        return self.world.is_recorder

    # --- Model and optimizers ----------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        """Wrap the module over the compute group, and start the server while the data is prepared."""
        if self.is_sharded:
            self._check_precision()
        if self._is_fitting(trainer):
            self.grouping.check(trainer)
            self.run_states.check(trainer)
            self.signals.prepare(requeue_signal(self.cluster_environment))
            self._listener = Listener(self, self.nested, trainer, self.signals)
            self.epochs.connect(trainer, self.world)
        super().setup(trainer)
        if self._is_fitting(trainer):
            self.attach_optimizers()
            if self.has_had_groups:  # in an earlier fit of the same Trainer
                self.share_loss_scale()
            if self.world.executor.exchanges:
                self.world.parameter_groups.agree()
                self.world.connection.start_server()
            if self.world.joins_running_run:
                self.checkpoints.forget()
                self.epochs.resume(self.checkpoints.resumed)
                self.run_states.take_over(trainer)

    def _check_averages(self) -> None:
        """Raise `UnsupportedError` for callbacks that average weights, before they copy a module that is sharded."""
        if averages_weights(self._trainer):
            raise UnsupportedError(
                f"{shown(self._world_options.model_parallel)} and WeightAveraging or StochasticWeightAveraging: what"
                " they keep is whole, and each rank has a part of the model; leave the callback or model_parallel= out"
            )

    def _check_precision(self) -> None:
        """Raise `UnsupportedError` for a precision that ModelParallelStrategy refuses, too."""
        if self.loss_scaler is not None:
            raise UnsupportedError(
                f"{shown(self._world_options.model_parallel)} and precision='16-mixed': the loss scaler of one rank"
                " would not know what is infinite in the part of another; use precision='bf16-mixed' or 'bf16-true'"
            )

    @override
    def model_to_device(self) -> None:
        """Move the module to the device; shard it first, block by block, if the members of a group hold it together."""
        if self.is_sharded:
            self.world.wrapper.shard(self.pl_module)
        super().model_to_device()
        if self.is_sharded:
            self.world.wrapper.share_initial()
            exclude_from_broadcast(self.pl_module, [name for name, _ in self.pl_module.named_parameters()])

    @override
    def configure_ddp(self) -> None:
        """Wrap the module into DDP over the compute group. A group of one rank needs no wrapping."""
        if self.is_sharded:
            self.wrap_for_group()
            return
        if self.world.executor.exchanges:
            self.world.broadcast_initial(self.pl_module)
            self.wrap_for_group()
            return
        set_ddp_options(self, self.ddp_options)
        super().configure_ddp()
        self.world.reduction.install(self.model, self.world.compute_group)
        self.trainable.remember(self.pl_module)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.world.executor.check_optimizer(optimizer)
        if self.is_sharded and trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
            check_clipping(self.optimizers, self._world_options.model_parallel)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Pass the precision plugin an optimizer whose step is an exchange."""
        return super().optimizer_step(self.grouping.stepped(optimizer), closure, model, **kwargs)

    # --- Training ----------------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        self.signals.install(self._trainer, self.world, lambda: self.epochs.interrupt(self.pl_module), self.waiting)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; install the signal handlers at the first barrier after Lightning's own are registered."""
        if name == FIRST_BARRIER and self._is_fitting(self._trainer) and not self.nested.is_running:
            self._install_signals()
        super().barrier(name)

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.signals.progress()
        if self._world is not None and self.world.control is not None:
            self.world.control.report_progress()
        return super().batch_to_device(batch, *args, **kwargs)

    @override
    def on_train_start(self) -> None:
        """Send the weights to the server and form the groups, after all callbacks and before the first batch."""
        super().on_train_start()
        if self.nested.is_running:
            return
        self._install_signals()
        world = self.world
        self.reporting.begin()
        self._has_gathered = False
        world.states.resume(self.checkpoints.resumed)
        self.follow_external_writes()
        world.begin()
        if world.registration is not None:
            control = world.executor.control
            self.rejoining.took_part(world.registration.run, is_saved=control is None or control.reconnect_timeout > 0)
        self.epochs.start()
        self.balance.begin(world, self.pl_module, lambda: self.epochs.leases)
        self.step_times.clock = clock_of(world.device)
        self.grouping.guard()
        self.announce_groups()
        if warning := self.reporting.warning_before(world, self.epochs.run.steps_left()):
            self.rank_zero_warn(f"OmniStrategy: {warning}")
        for call in self.on_ready:
            call()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Follow parameters that were frozen, unfrozen or added, after all callbacks and before the forward pass."""
        super().on_train_batch_start(batch, batch_idx)
        self.grouping.batch_starts()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.balance.begin_forward()
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Note the end of the forward pass, after which this rank may have to wait for its group."""
        self.step_times.forward_done(self.world.exchange.traffic.seconds)
        super().pre_backward(closure_loss)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().backward(self.epochs.data.weigh(closure_loss), optimizer, *args, **kwargs)
        self.balance.backward_done()  # the listener may have called it already
        return loss

    @override
    def on_validation_end(self) -> None:
        """Return to the epoch after the last callback, if the epoch continues."""
        super().on_validation_end()
        if self._world is not None:
            reshard(self.world.wrapper.sharded)  # hooks of the next epoch may add parameters to the optimizer
        self.epochs.after_validation()
        self.balance.after_validation()
        self.step_times.interrupt()

    @override
    def on_train_end(self) -> None:
        """Restore the server's weights and optimizer states, after the last callback."""
        super().on_train_end()
        if self.nested.is_running:
            return
        self._take_time()
        self.balance.end()
        world = self.world
        world.is_finished = True
        self.reporting.ask(world)
        self.epochs.finish()
        if world.executor.control is not None:
            world.external_writes.finish()
            if warning := self.reporting.warning(world):
                self.rank_zero_info(f"OmniStrategy: {warning}")
            world.states.bring_to_all()
            for part in world.parts:
                part.replica.abandon()
            self.proxies.unguard()
        self.rejoining.finished()

    @override
    def fails(self, exception: BaseException) -> None:
        """Note that the fit has failed, before callbacks are called.

        If a callback raises another error (when it saves, for example), Lightning does not call `on_exception`.
        """
        super().fails(exception)
        if self.has_failed:
            self._rejoin_if_cut_off(exception)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Report to the other ranks why this rank has failed, or start a group again that can rejoin its run."""
        explain_unused(exception)
        if isinstance(exception, RankLost):
            end_in_one_line(exception)
        super().on_exception(exception)
        if self._ends_with_all(exception):
            self.reporting.ask(self.world)
            return
        if self._world is not None:
            self.reporting.keep(self.world)
            if not self.has_failed:
                self.world.explain(exception)
                self._rejoin_if_cut_off(exception)
            self.explain_take_over(exception)
            self.world.fail(exception)
        elif self._world_options.elastic.join:
            self._rejoin(exception, exception)
        elif self._server_process is not None:
            self._server_process.stop()
            self._server_process = None

    def _rejoin_if_cut_off(self, error: BaseException) -> None:
        """Prepare to rejoin if this group has joined on its own, once the reason for its exclusion is known."""
        world = self.world
        if world.registration is not None:
            self._rejoin(error, (world.control.cause if world.control is not None else None) or error)

    def _rejoin(self, error: BaseException, reason: BaseException) -> bool:
        """Prepare this group to rejoin when its script ends with this error, if it was excluded by mistake."""
        by_mistake = isinstance(reason, (Evicted, ConnectionLost)) and isinstance(error, Exception)
        if not by_mistake or self.signals.is_told_to_end or self.local_rank:
            return False
        return self.rejoining.arm(error, reason, self._world_options.elastic.max_rejoins, self.world_size)

    def _start_again(self, error: OmniError) -> None:
        """Restart this process, which is out of the run, and whose fit is blocked and raises no error."""
        if self._rejoin(error, error):
            self.rejoining.start_again()

    @override
    def teardown(self) -> None:
        """Leave the run and stop the embedded server."""
        if self.is_sharded:
            with keep_on_device(self):
                super().teardown()
            reshard(self._world.wrapper.sharded if self._world is not None else None)
        else:
            super().teardown()
        set_ddp_options(self, self.ddp_options)  # drops the process group of the former compute group
        self.has_failed = False
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.balance.end()
        self.proxies.unguard()
        try:
            if self._world is not None:
                self.world.close()
        finally:
            self.signals.restore()
        self.epochs.forget()
        self.checkpoints.forget()
        self.nested, self.merged, self.proxies = NestedRuns(self), MergedSubmodule(self.merged.name), Proxies()

    # --- Data --------------------------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the arguments of DistributedSampler; the type of the rank marks samplers that Lightning makes."""
        given, world = super().distributed_sampler_kwargs, self._world
        if world is not None and not self._is_fitting(self._trainer):
            if world.ever_lost:  # the remaining ranks evaluate all of the data
                given = {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}
        elif world is not None and (registration := world.registration) is not None:
            # The group that began the run determines lengths; samples are leased.
            given = {"num_replicas": registration.announced, "rank": given["rank"] if registration.begins else 0}
        same = world.tensor_parallel if world is not None else 1  # ranks that get the same samples
        return {**given, "num_replicas": given["num_replicas"] // same, "rank": LightningRank(given["rank"] // same)}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Replace the training DataLoader by one with leased batches, if the strategy may assign its samples."""
        loader = super().process_dataloader(dataloader)
        if self._world is not None and self.world.registration is not None:
            seed_workers(self._trainer, loader, self.world.rank)
        is_trained = self._trainer.training or loops_iterate(self._trainer)  # in a hook of a validation, too
        return self.epochs.data.process(loader, self.global_rank, self._objection) if is_trained else loader

    def _objection(self, loader: DataLoader[Any]) -> str:
        """Return why the samples of a plain DataLoader cannot be leased; empty if they can."""
        if draws_batches(self.pl_module.training_step):
            return "training_step draws from it (dataloader_iter)"
        return "" if has_lightning_sampler(loader) else "it has a DistributedSampler of its own"
