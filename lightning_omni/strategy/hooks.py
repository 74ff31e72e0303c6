"""`OmniStrategy`: Lightning's hooks, translated into calls on the world. No arithmetic, no sockets.

Written once for both of Lightning's namespaces: the classes here are mixed into each namespace's own DDPStrategy and
Callback (see ``pytorch_lightning.py`` and ``lightning.py`` beside this file).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_omni.errors import ConfigurationError, OmniError, UnsupportedError
from lightning_omni.methods import Method
from lightning_omni.methods.master import check_servable
from lightning_omni.metrics import RunReport, Staleness
from lightning_omni.optimizer import OmniOptimizer, World, WorldOptions, names_of
from lightning_omni.optimizer.data import Leases, can_lease, lease
from lightning_omni.protocol import EpochPlan
from lightning_omni.protocol import messages as m
from lightning_omni.strategy import _private
from lightning_omni.strategy.launcher import say_exit
from lightning_omni.strategy.schedulers import Pacer
from lightning_omni.strategy.watch import Stopwatch, live_metrics, straggler_sentence
from lightning_omni.topology import check_groups

if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback as _CallbackBase
    from pytorch_lightning.strategies import DDPStrategy as _Base
else:
    _Base = _CallbackBase = object

_ON_PROGRESS_BAR = ("omni/staleness_mean", "omni/updates_per_s")


class OmniStrategyHooks(_Base):
    """Trains synchronously inside compute groups and asynchronously across them.

    Args:
        groups: number of compute groups, from 1 (plain DDP, bit for bit, with no server in the path) to the number
            of ranks. None makes one group for each node. Groups differ in size by at most one rank.
        method: how groups exchange, by name or as a value: see `lightning_omni.methods`.
        server: ``"tcp://host:port"`` of a parameter server that runs already (``lightning-omni serve``); None starts
            one for this run, in a process of its own beside rank 0.
        data: ``"dynamic"`` deals the samples of an epoch out to whoever is free, so that a slow group delays nobody;
            ``"static"`` gives every rank its share beforehand, as DistributedSampler does.
        host: address that the embedded server binds. None takes loopback on one node, and otherwise MASTER_ADDR.
        heartbeat_timeout: seconds of silence after which a rank counts as dead.
        refusals: pushes with NaN or infinite gradients that a group may make in a row before the run ends.
        **ddp: DDPStrategy's own arguments.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> from lightning_omni import OmniStrategy
        >>> strategy = OmniStrategy(groups=2)  # Trainer(strategy=strategy, devices=4)
    """

    rank_zero_info: Callable[[str], None]
    callback_class: type
    launcher_class: type

    def __init__(
        self,
        groups: int | None = None,
        method: str | Method = "async_sgd",
        server: str | None = None,
        data: Literal["dynamic", "static"] = "dynamic",
        host: str | None = None,
        heartbeat_timeout: float = 30.0,
        refusals: int = 50,
        **ddp: Any,
    ) -> None:
        if data not in ("dynamic", "static"):
            raise ConfigurationError(f'data={data!r}: pass "dynamic" or "static"')
        self._omni_options = {
            "groups": groups,
            "method": method,
            "server": server,
            "host": host,
            "heartbeat_timeout": heartbeat_timeout,
            "refusals": refusals,
        }
        WorldOptions(**self._omni_options)
        self._groups = groups
        self._data = data
        super().__init__(**ddp)
        self._ddp_options = dict(vars(self).get("_ddp_kwargs", {}))
        self.world: World | None = None
        self.leases: Leases | None = None
        self._new_leases: list[Leases] = []
        self._proxies: dict[int, OmniOptimizer] = {}
        self._pacer: Pacer | None = None
        self._snapshot: dict[str, Any] | None = None
        self._resume: dict[str, Any] = {}
        self._last_status: m.Status | None = None
        self._stop_announced = False
        self._epoch_begun = -1
        self._epoch_is_open = False
        self._open_ended = False
        self._plan: EpochPlan | None = None
        self.stopwatch = Stopwatch()

    # --- Processes ---------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        ranks = self.num_nodes * self.num_processes
        if self._groups is not None and self.cluster_environment is not None:
            if self.cluster_environment.creates_processes_externally:
                ranks = self.cluster_environment.world_size()
            check_groups(self._groups, ranks)
        if _private.start_method(self) == "popen":
            launcher = self.launcher_class(self.cluster_environment, self.num_processes, self.num_nodes)
            launcher.on_death = self._on_child_death
            _private.set_launcher(self, launcher)

    def _on_child_death(self, local_rank: int, code: int) -> bool:
        """A process that this rank started has ended badly. Called from the launcher's thread."""
        world = self.world
        if world is None or world.is_synchronous or world.control is None:
            return False
        rank = self.node_rank * self.num_processes + local_rank
        if rank in world.lost:
            return True
        world.control.post(m.Lost(rank=rank, reason=f"the process of rank {rank} ended with {say_exit(code)}"))
        return 0 not in world.topology.members(world.topology.group_of(rank))

    def setup_environment(self) -> None:
        """Joins the other ranks; the world is laid out, and nothing of the server is needed yet."""
        super().setup_environment()
        if self.world is None:
            timeout = _private.collective_timeout(self)
            self.world = World(
                device=self.root_device,
                options=WorldOptions(**self._omni_options, timeout=timeout or timedelta(minutes=30)),
                ranks_per_node=[self.num_processes] * self.num_nodes,
            )

    # --- Model and optimizers ----------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Wraps the module over the compute group, and starts the server while the data is prepared."""
        if not any(isinstance(callback, OmniCallbackHooks) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, self.callback_class(self))
        if self._is_fitting(trainer):
            self._check_trainer(trainer)
        super().setup(trainer)
        if self._is_fitting(trainer):
            self._attach_optimizers()
            if not self._world.is_synchronous:
                self._world.start_server()

    def configure_ddp(self) -> None:
        """Wraps the module into DDP over the compute group. A group of one needs no wrapping."""
        world = self._world
        if world.is_synchronous:
            _private.set_ddp_options(self, self._ddp_options)
            super().configure_ddp()
            return
        assert self.lightning_module is not None
        world.broadcast_initial(self.lightning_module)
        self._wrap_for_group()

    def _wrap_for_group(self) -> None:
        world = self._world
        self.model = self.lightning_module
        if len(world.members) > 1 or world.is_synchronous:
            options = {**self._ddp_options, "process_group": world.compute_group, "init_sync": False}
            _private.set_ddp_options(self, options)
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimizers and refuses those that no server can run."""
        super().setup_optimizers(trainer)
        if not self._world.is_synchronous:
            for optimizer in self.optimizers:
                check_servable(optimizer)

    def _attach_optimizers(self) -> None:
        assert self.lightning_module is not None
        names = names_of(self.lightning_module)
        self._world.detach_all()
        self._proxies = {id(each): OmniOptimizer(each, self._world, names) for each in self.optimizers}

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Hands the precision plugin an optimizer whose step is an exchange."""
        if not self._world.is_synchronous:
            optimizer = self._proxies[id(optimizer)]
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _guard_optimizers(self) -> None:
        """Among several groups, a raw ``optimizer.step()`` would move one rank's weights behind the server's back."""
        for optimizer in self.optimizers:
            if not hasattr(optimizer, "_omni_own_step"):
                optimizer._omni_own_step = vars(optimizer).get("step")  # type: ignore[attr-defined]
                optimizer.step = types.MethodType(_refuse_raw_step, optimizer)  # type: ignore[method-assign]
                _private.ignore_missing_step(optimizer)

    def _unguard_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if hasattr(optimizer, "_omni_own_step"):
                own = vars(optimizer).pop("_omni_own_step")
                del optimizer.step
                if own is not None:
                    optimizer.step = own  # type: ignore[method-assign]

    # --- Training ----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """The last hook before the first batch: the server gets the weights, and groups go their own ways."""
        super().on_train_start()
        world, trainer = self._world, self._trainer
        self._stop_announced, self._epoch_begun = False, -1
        self._max_steps = trainer.max_steps
        for part, clock in zip(world.parts, self._resume.get("clocks", ()), strict=False):
            part.replica.clock = clock
        world.begin()
        world.trained = self._trained
        self._adopt_leases()
        if not world.is_synchronous:
            self._guard_optimizers()
            if self._is_dynamic:
                self._pacer = Pacer(trainer.lr_scheduler_configs, self._nominal_steps, lambda: trainer.current_epoch + 1)
        self._say_hello()

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins: the groups part, and its samples are laid out to be drawn. Called again, does nothing."""
        world, trainer = self._world, self._trainer
        if not trainer.training or trainer.state.fn is None or epoch == self._epoch_begun or not self._proxies:
            return
        if world.control is None and not world.is_synchronous:
            return  # the loader is iterated before training begins
        self._epoch_begun = epoch
        self._adopt_leases()
        world.enter_compute()
        self._epoch_is_open = True
        self._open_ended = self._is_dynamic
        self._plan = None
        if self.leases is not None:
            self._plan = self._make_plan(epoch)
            if self._is_dynamic:
                self.leases.begin(self._plan)
                self._count_steps_together()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """The forward pass is done: the last moment at which a rank's time is its own and not its group's."""
        self.stopwatch.forward_done()
        super().pre_backward(closure_loss)

    def begin_batch(self) -> None:
        """A batch begins."""
        self.stopwatch.begin()
        self.begin_epoch(self._trainer.current_epoch)  # a resumed epoch starts without its first hook
        if self.leases is not None:
            self.leases.begin_batch()
            if self._open_ended:
                # Perhaps the last: then an accumulation window ends here. `end_batch` knows for certain.
                self._set_last_batch(self.leases.peek() is None)

    def end_batch(self) -> None:
        """A batch has ended: finds out, together with the other groups, whether to go on, validate or stop."""
        world = self._world
        if world.control is not None:
            self.stopwatch.end(world.last.seconds)
            world.control.report_timings(*self.stopwatch.means)
        if world.is_synchronous and not self._open_ended:
            return
        verdict = self._what_next()
        trainer = self._trainer
        if self._open_ended:
            self._set_last_batch(verdict == "over")
            at_end = verdict == "over" and self._validates_at_end()
            if verdict == "over" and self._plan is not None and self._reaches_max_steps(self._plan.epoch):
                self._stop_at_max_steps()
            self._let_validate(verdict in ("validate", "stop:validate") or at_end)
        if verdict.startswith("stop:"):
            self._stop_announced = True
            if verdict == "stop:validate":
                trainer.should_stop = True
            else:
                self._let_validate(False)
                trainer.fit_loop.epoch_loop.max_steps = trainer.global_step

    def _set_last_batch(self, is_last: bool) -> None:
        trainer = self._trainer
        _private.be_open_ended(trainer)
        _private.set_last_batch(trainer, is_last)
        if not is_last:
            # Never the very number of the current batch: Lightning would take it for the last.
            trainer.fit_loop.max_batches = max(self._nominal_batches, trainer.fit_loop.batch_idx + 2)

    def _count_steps_together(self) -> None:
        """max_steps counts the steps that DDP would take. A group's own count must not end the run for it alone."""
        if self._max_steps == -1:
            return
        assert self._plan is not None
        reached = self._max_steps <= self._plan.epoch * self._steps_an_epoch
        loop = self._trainer.fit_loop.epoch_loop
        loop.max_steps = self._trainer.global_step if reached else sys.maxsize

    def _reaches_max_steps(self, epoch: int) -> bool:
        return self._max_steps != -1 and (epoch + 1) * self._steps_an_epoch >= self._max_steps

    def _stop_at_max_steps(self) -> None:
        trainer = self._trainer
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step
        self.rank_zero_info(
            f"OmniStrategy: max_steps={self._max_steps} reached: as many samples as {self._max_steps} steps of all"
            f" {self._world.size} ranks; this group took {trainer.global_step} steps of its own"
        )

    def _what_next(self) -> str:
        leases = self.leases
        if self._world.last.stop:
            return f"stop:{self._world.last.stop}"
        if not self._open_ended or leases is None:
            return ""
        coming = leases.peek()
        if coming is not None and coming.stretch == leases.current.stretch:
            return ""
        return leases.ask()

    def end_epoch(self) -> None:
        """An epoch has ended, in good order or before its time: the groups meet."""
        world, trainer = self._world, self._trainer
        if world.is_computing and not trainer.is_last_batch and not self._stop_announced:
            stops = trainer.should_stop or -1 < trainer.max_steps <= trainer.global_step
            self.leave_epoch("end" if stops else "")
        self.meet()
        if self._pacer is not None:
            self._pacer.catch_up()
        self._restore_epoch()

    def leave_epoch(self, stop: str) -> None:
        """This group ends the epoch early; ``stop`` ends the run for all."""
        control = self._world.control
        if control is None:
            return
        if self.leases is not None and self._is_dynamic:
            self.leases.leave(stop)
        elif stop:
            generation = self._world.generation
            control.request(m.Leave(epoch=-1, generation=generation, trained=0, stop=stop), m.Left)
        self._stop_announced = self._stop_announced or bool(stop)

    def meet(self) -> None:
        """Every rank gets the master weights, and the default process group is the world's."""
        assert self.lightning_module is not None
        self._world.enter_world(self.lightning_module.buffers())

    def before_validation(self) -> None:
        """Validation is for all groups together. One that comes on its own (a callback said stop) brings the others."""
        if self._world.is_computing and self._trainer.should_stop and not self._stop_announced:
            self.leave_epoch("validate")
        self.meet()

    def on_validation_end(self) -> None:
        """After the last callback: back into the epoch, if it goes on."""
        super().on_validation_end()
        if self._epoch_is_open and self._is_fitting(self._trainer) and not self._trainer.is_last_batch:
            self._world.enter_compute()

    def on_train_end(self) -> None:
        """After the last callback: what the server knows comes home."""
        super().on_train_end()
        world = self._world
        self._remember_status()
        self._trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        if world.control is not None and not world.is_synchronous:
            if self.is_global_zero:
                world.take_states_back()
            self._unguard_optimizers()
        if self._pacer is not None:
            self._pacer.release()
            self._pacer = None
        self._epoch_is_open = False

    def on_exception(self, exception: BaseException) -> None:
        """Tells the others why this rank does not come back."""
        super().on_exception(exception)
        if self.world is not None:
            self._remember_status()
            self.world.fail(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """Leaves the run; the embedded server stops."""
        super().teardown()
        if self.world is not None:
            self.world.close()
        self._proxies, self.leases, self._new_leases = {}, None, []

    # --- Regrouping --------------------------------------------------------------------------------------------------

    def regroup(self, groups: int) -> None:
        """Forms other compute groups, in mid-fit. Weights, optimizer state and data carry on.

        Call it on every rank from a training hook at a batch boundary (``on_train_batch_end``, say), at the same
        number of batches on each rank. Batches that were drawn and not trained go back to the pool.

        Args:
            groups: the new number of groups, 1 to the number of live ranks.

        Raises:
            ConfigurationError: wrong number, or not at a batch boundary.
        """
        world, trainer = self._world, self._trainer
        check_groups(groups, len(world.live_ranks))
        if not self._is_fitting(trainer) or not self._proxies:
            raise ConfigurationError("regroup() forms groups while trainer.fit runs; before that, pass groups=")
        if trainer.fit_loop.batch_idx >= 0 and self._epoch_is_open and not _private.will_step(trainer):
            raise ConfigurationError(
                "regroup() inside an accumulation window would mix gradients of different groups; call it when"
                " accumulate_grad_batches batches are complete"
            )
        if groups > 1:
            for optimizer in self.optimizers:
                check_servable(optimizer)
        if groups == len([members for members in world.topology.groups if members]):
            return
        was_dynamic, was_synchronous = self._is_dynamic, world.is_synchronous
        spans = self.leases.trained_spans if self.leases is not None else ()
        if was_dynamic and self._epoch_is_open:
            self.leave_epoch("")
        self._unguard_optimizers()
        assert self.lightning_module is not None
        spans = world.regroup(groups, self.lightning_module.buffers()) or spans
        if not world.is_synchronous:
            self._guard_optimizers()
        self._wrap_for_group()
        self._assign_leases()
        self._go_on_with_epoch(spans, was_synchronous)
        self._align_progress()
        self._repace()
        self._say_hello()

    def _go_on_with_epoch(self, spans: tuple[tuple[int, int], ...], was_synchronous: bool) -> None:
        if not self._epoch_is_open or self.leases is None or self._plan is None or self._data == "static":
            return
        self._open_ended = True
        if self._world.is_synchronous:
            self.leases.begin_local(_with_trained(self._plan, spans), goes_on=True)
        elif was_synchronous:
            self.leases.begin(_with_trained(self._plan, spans))
        else:
            self.leases.go_on(self._plan.epoch)

    def _align_progress(self) -> None:
        mine = _private.progress_counters(self._trainer)
        theirs = self._world.agree(mine)
        if mine != theirs:
            _private.set_progress_counters(self._trainer, theirs)

    def _repace(self) -> None:
        if self._pacer is not None:
            self._pacer.release()
            self._pacer = None
        if self._is_dynamic:
            trainer = self._trainer
            self._pacer = Pacer(trainer.lr_scheduler_configs, self._nominal_steps, lambda: trainer.current_epoch + 1)

    # --- Data --------------------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For DistributedSampler. The rank is marked, so that a sampler of Lightning's is told from a user's own."""
        given = super().distributed_sampler_kwargs
        return {**given, "rank": _GivenRank(given["rank"])}

    def process_dataloader(self, dataloader: object) -> object:
        """Turns the training DataLoader into one with leased batches, if it is one whose samples we may deal out."""
        dataloader = super().process_dataloader(dataloader)
        world = self.world
        if self._data == "static" or world is None or not self._trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader) or not can_lease(dataloader) or not _is_given(dataloader):
            if not world.is_synchronous:
                self.rank_zero_info(
                    'OmniStrategy: the training data is dealt out beforehand (as with data="static"), because it has a'
                    " sampler of its own, is iterable, or is no plain DataLoader; a slow group delays the end of an epoch"
                )
            return dataloader
        leased = lease(
            dataloader, rank=self.global_rank, before_epoch=self.begin_epoch, is_local=world.is_synchronous
        )
        self._new_leases.append(leased.leases)  # type: ignore[attr-defined]
        return leased

    def _adopt_leases(self) -> None:
        """New loaders were made: at the start, or because they are reloaded every few epochs."""
        if not self._new_leases:
            return
        if len(self._new_leases) > 1:
            # Several loaders advance together; each deals its samples out as DistributedSampler does.
            for each in self._new_leases:
                each.is_local = True
            self.leases = None
        else:
            self.leases = self._new_leases[0]
            self._assign_leases()
        self._new_leases = []

    def _assign_leases(self) -> None:
        world = self._world
        if self.leases is not None and not (world.is_synchronous and self.leases.is_local and self.leases.generation == 0):
            member = world.members.index(world.rank)
            control = None if world.is_synchronous else world.control
            self.leases.assign(member, len(world.members), control, world.generation)

    @property
    def _is_dynamic(self) -> bool:
        return self.leases is not None and not self.leases.is_local

    def _trained(self) -> tuple[int, int]:
        if self.leases is None or not self._is_dynamic:
            return (-1, 0)
        return self.leases.epoch, self.leases.trained

    def _make_plan(self, epoch: int) -> EpochPlan:
        """The epoch's data: what Lightning's limits mean for all ranks together."""
        trainer, leases = self._trainer, self.leases
        assert leases is not None
        limit = trainer.num_training_batches
        self._nominal_batches = int(limit) if limit != float("inf") else -(-leases.total // self._step_positions)
        self._val_check_batch = trainer.val_check_batch
        every, offset = 0, 0
        if _private.validates_this_epoch(trainer) and self._val_check_batch != float("inf"):
            # Without check_val_every_n_epoch, the batches of earlier epochs count, too.
            done = epoch * self._nominal_batches if trainer.check_val_every_n_epoch is None else 0
            every = int(self._val_check_batch) * self._step_positions
            offset = done % int(self._val_check_batch) * self._step_positions
        budget = min(leases.total, self._nominal_batches * self._step_positions)
        if self._max_steps != -1:
            left = max(0, self._max_steps - epoch * self._steps_an_epoch)
            budget = min(budget, left * trainer.accumulate_grad_batches * self._step_positions)
        resume = self._resume if self._resume.get("epoch") == epoch and self._resume.get("total") == leases.total else {}
        return EpochPlan(
            epoch=epoch,
            total=leases.total,
            batch_size=leases.batch_size,
            budget=budget,
            validate_every=every,
            validate_offset=offset,
            trained=tuple((start, stop) for start, stop in resume.get("trained", ())),
        )

    def _validates_at_end(self) -> bool:
        """Whether the end of the epoch is one of the points at which val_check_interval asks for a validation."""
        plan = self._plan
        if plan is None or self._val_check_batch == float("inf"):
            return True
        if not plan.validate_every:
            return False
        return (self._nominal_batches * self._step_positions + plan.validate_offset) % plan.validate_every == 0

    def _let_validate(self, now: bool) -> None:
        """Lightning validates when the number of batches is a multiple of this: the current one is, or is not."""
        trainer = self._trainer
        loop = trainer.fit_loop
        number = (loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx) + 1
        trainer.val_check_batch = number if now else number + 1

    def _restore_epoch(self) -> None:
        trainer = self._trainer
        self._epoch_is_open = False
        if self._plan is not None and self._open_ended:
            trainer.fit_loop.max_batches = self._nominal_batches
            trainer.val_check_batch = self._val_check_batch
        self._open_ended = False

    @property
    def _step_positions(self) -> int:
        """Samples that all ranks together train in one step of DDP."""
        assert self.leases is not None
        return self.leases.world_size * self.leases.batch_size

    @property
    def _steps_an_epoch(self) -> int:
        """Optimizer steps in an epoch of DDP."""
        return -(-self._nominal_batches // int(self._trainer.accumulate_grad_batches))

    def _nominal_steps(self) -> int:
        """The run's progress in optimizer steps as DDP would count them."""
        trainer, plan = self._trainer, self._plan
        if plan is None:
            return 0
        window, steps_an_epoch = trainer.accumulate_grad_batches, self._steps_an_epoch
        if not self._epoch_is_open:
            return (trainer.current_epoch + 1) * steps_an_epoch
        trained = self._world.last.progress if self._is_dynamic else sum(b - a for a, b in self.leases.trained_spans)  # type: ignore[union-attr]
        return int(trainer.current_epoch * steps_an_epoch + min(steps_an_epoch, trained // (self._step_positions * window)))

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    @property
    def _server_holds_weights(self) -> bool:
        world = self.world
        return world is not None and world.control is not None and not world.is_synchronous and self.is_global_zero

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, with the master weights of one moment in the place of this group's own."""
        state = super().lightning_module_state_dict()
        if self._server_holds_weights:
            self._snapshot = self._world.snapshot()
            for part in self._snapshot["parts"]:
                state.update({name: value for name, value in part["weights"].items() if name in state})
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The server's optimizer state, of the same moment, with this rank's hyperparameters.

        (The server's own are those of the last push, one scheduler step behind.)
        """
        own: dict[str, Any] = super().optimizer_state(optimizer)
        if not self._server_holds_weights:
            return own
        if self._snapshot is None:
            self._snapshot = self._world.snapshot()
        raw = getattr(optimizer, "optimizer", optimizer)
        index = next(i for i, part in enumerate(self._world.parts) if part.optimizer is raw)
        return {"state": self._snapshot["parts"][index]["state"], "param_groups": own["param_groups"]}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Adds what the server knows beyond Lightning: clocks, and which samples of the epoch are trained."""
        if self._server_holds_weights and self._snapshot is not None:
            plan = self._snapshot["epoch"] or {}
            checkpoint["omni"] = {
                "groups": len(self._world.topology.alive),
                "clocks": [part["clock"] for part in self._snapshot["parts"]],
                "epoch": plan.get("epoch", -1),
                "total": plan.get("total", 0),
                "trained": [list(span) for span in self._snapshot["trained"]],
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._snapshot = None

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint of this strategy or of plain DDP."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._resume = dict(checkpoint.get("omni", {}))
        return checkpoint

    # --- Collectives -------------------------------------------------------------------------------------------------

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 (Lightning's name)
        """All or any over the default process group, which may be smaller than the world."""
        if self.world is None or self.world.is_synchronous:
            return super().reduce_boolean_decision(decision, all=all)
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes)

    # --- What a user sees --------------------------------------------------------------------------------------------

    def report(self) -> RunReport:
        """The run in numbers, while it runs or after it."""
        world = self._world
        status = (world.control.status if world.control else None) or self._last_status
        if world.is_synchronous and (status is None or not status.clock):
            trainer = self._trainer
            return RunReport(trainer.global_step, 0.0, 0, 1, len(world.members))
        seen: tuple[int, ...] = status.staleness if status else ()
        return RunReport(
            updates=status.clock if status else 0,
            staleness_mean=sum(t * count for t, count in enumerate(seen)) / max(1, sum(seen)),
            staleness_max=max(0, len(seen) - 1),
            groups=len(status.groups) if status else len(world.topology.alive),
            group_size=max(len(members) for members in world.topology.groups),
            refused=status.refused if status else 0,
            ranks_lost=status.lost if status else (),
        )

    def _remember_status(self) -> None:
        control = self._world.control
        if control is None:
            return
        try:
            self._last_status = control.request(m.AskStatus(), m.Status, timeout=5.0)
        except OmniError:
            self._last_status = control.status

    def _say_hello(self) -> None:
        world = self._world
        if world.is_synchronous:
            self.rank_zero_info(
                f"OmniStrategy: {world.size} ranks in 1 group, which is DistributedDataParallel: no parameter server, no"
                " staleness. Pass groups= for asynchronous groups"
            )
            return
        sizes = sorted({len(members) for members in world.topology.groups if members})
        data = "dynamic" if self._is_dynamic else "static"
        self.rank_zero_info(
            f"OmniStrategy: {len(world.topology.ranks)} ranks in {len(world.topology.alive)} groups of"
            f" {' or '.join(map(str, sizes))} | method {type(world.method).__name__} | server {world.server_address} |"
            f" data {data}"
        )

    # --- Shorthand ---------------------------------------------------------------------------------------------------

    @property
    def _world(self) -> World:
        if self.world is None:
            raise ConfigurationError("OmniStrategy has no world yet: it is laid out when the Trainer starts to run")
        return self.world

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @staticmethod
    def _is_fitting(trainer: Any) -> bool:
        return trainer.state.fn is not None and trainer.state.fn.value == "fit"

    def _check_trainer(self, trainer: Any) -> None:
        if self._world.is_synchronous:
            return
        if _private.validates_by_time(trainer):
            raise UnsupportedError(
                "val_check_interval as a duration: groups would come to validation at different times and wait for each"
                " other; pass a number of batches or a fraction of the epoch"
            )
        if vars(self).get("_model_averaging_period") is not None:
            raise UnsupportedError("model_averaging_period averages over all ranks; use it with groups=1 only")


class OmniCallbackHooks(_CallbackBase):
    """What the strategy needs to hear that Lightning tells callbacks only. Stands first in the Trainer's list."""

    def __init__(self, strategy: OmniStrategyHooks) -> None:
        super().__init__()
        self._strategy = strategy
        self._staleness = Staleness()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Before anyone else: the groups part."""
        self._staleness.reset()
        self._strategy.begin_epoch(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch is there."""
        self._strategy.begin_batch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is done."""
        self._strategy.end_batch()
        control = self._strategy._world.control
        if control is not None and _private.logs_now(trainer):
            self._watch_staleness()
            values = live_metrics(control.status, self._staleness, self._strategy.stopwatch)
            for name, value in values.items():
                pl_module.log(name, value, prog_bar=name in _ON_PROGRESS_BAR, rank_zero_only=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Before anyone else: the groups meet."""
        if not trainer.sanity_checking:
            self._strategy.before_validation()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Before anyone else: the groups meet."""
        self._strategy.end_epoch()
        control = self._strategy._world.control
        if control is None:
            return
        self._watch_staleness()
        if not self._strategy._world.is_synchronous:
            for name, value in self._staleness.compute().items():
                if name in ("mean", "max"):
                    pl_module.log(f"omni/staleness_{name}", value.float(), sync_dist=True)
        if control.status is not None and (sentence := straggler_sentence(control.status)):
            self._strategy.rank_zero_info(f"OmniStrategy: {sentence}")

    def _watch_staleness(self) -> None:
        world = self._strategy._world
        for part in world.parts:
            if world.is_leader:  # its mates hear the same numbers
                self._staleness.update(torch.tensor(part.staleness))
            part.staleness.clear()


class _GivenRank(int):
    """A rank that OmniStrategy gave to a sampler."""


def _is_given(loader: DataLoader[Any]) -> bool:
    return isinstance(getattr(loader.sampler, "rank", None), _GivenRank)


def _with_trained(plan: EpochPlan, spans: tuple[tuple[int, int], ...]) -> EpochPlan:
    fields: Mapping[str, Any] = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return EpochPlan(**{**fields, "trained": spans})


def _refuse_raw_step(self: Optimizer, closure: Any = None) -> Tensor:
    raise UnsupportedError(
        "a raw optimizer.step() would move this rank's weights behind the parameter server's back; take the optimizer"
        " from self.optimizers() (with use_pl_optimizer=True, its default), or use groups=1"
    )


_refuse_raw_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers look for their own mark
