"""`World`: a rank's group, its phases, and the synchronization points of all ranks.

Inside the training epoch torch.distributed's default process group is the compute group; elsewhere it is the whole live
world.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_omni.checks import plain
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError, OmniError, UnsupportedError, end_reason
from lightning_omni.group.core import NO_ANSWER
from lightning_omni.methods.model.head import check_mergeable, held_by_one
from lightning_omni.methods.model.server_optimizer import check_servable
from lightning_omni.runtime.executor import Exchanging, Executor
from lightning_omni.runtime.loop_checks import (
    ExitCheck,
    OwnSamplers,
    RawStepGuard,
    announced_wait,
    check_may_begin,
    untrained_of,
    unwrapped,
    warn_of_no_update,
    warn_of_own_statistics,
    warn_of_variables,
)
from lightning_omni.runtime.membership import LEARN, Connection
from lightning_omni.runtime.model.external_writes import ExternalWrites
from lightning_omni.runtime.model.merged_head import RemoteHead
from lightning_omni.runtime.model.meshes import shown
from lightning_omni.runtime.model.parameter_groups import ParameterGroups
from lightning_omni.runtime.model.replica import ModelReplica, Part
from lightning_omni.runtime.model.sharded import (
    check_sharded,
    reshard,
)
from lightning_omni.runtime.model.tensor_sync import agree, take_from_rank_zero
from lightning_omni.runtime.model.wrapping import ModelWrapper, ReductionCheck
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.process_groups import is_of_a_collective, is_of_a_loss, outlive
from lightning_omni.runtime.server_exchange import ServerExchange, Traffic
from lightning_omni.runtime.server_process import check_importable
from lightning_omni.runtime.state.transfer import Residuals, StateTransfer
from lightning_omni.runtime.state.validation import ValidationSnapshots
from lightning_omni.runtime.timing import clock_of
from lightning_omni.topology import Topology, check_groups
from lightning_omni.wire import messages as m

_log = logging.getLogger(__name__)

_END = "the end of training"
"""The name of the last collective of a loop, in the message to ranks that call another one."""


class World(ParallelState):
    """The compute groups of a run, as seen from this rank. All ranks create one after ``init_process_group``.

    With Lightning, use `OmniStrategy`. Loops use `wrap`, `training`, `enter_world`, `enter_compute`, `regroup` and
    `attach_head`; the other methods are for `OmniStrategy`.

    Args:
        groups: number of compute groups; None takes that of ``options``, by default one per node.
        device: device of the model's weights. By default the CPU, or with NCCL the current GPU
            (``torch.cuda.set_device``).
        options: all other settings; ``groups`` overrides their ``groups``.
        ranks_per_node: number of ranks on each node, in rank order; by default from torchrun or host names.

    Attributes:
        rank: this rank.
        size: number of ranks.
        group: number of this rank's compute group, from 0.
        members: ranks of this rank's compute group.

    Raises:
        ConfigurationError: an argument is wrong or not the same on all ranks; it is not after ``init_process_group``,
            or in another World's loop.
        RankLost: an earlier loop has lost ranks.

    Example:
        A loop run by ``torchrun --nproc-per-node 4 train.py``; :doc:`/how-to/loops` has one with epochs and
        checkpoints::

            dist.init_process_group("gloo")
            world = World(groups=2)
            model = world.wrap(Net())
            optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
            with world.training():
                for x, y in batches(seed=world.rank):  # the same number on all members of a group
                    optimizer.zero_grad()
                    loss(model(x), y).backward()
                    optimizer.step()
    """

    def __init__(
        self,
        groups: int | None = None,
        device: torch.device | str | None = None,
        options: WorldOptions | None = None,
        ranks_per_node: Sequence[int] | None = None,
    ) -> None:
        super().__init__(groups, device, options, ranks_per_node)
        self._process = os.getpid()
        self.heads: list[RemoteHead] = []
        self.residuals = Residuals(self)
        self.exchange = ServerExchange(self)
        self.connection = Connection(self, self.exchange)
        self.parameter_groups = ParameterGroups(self, self.exchange)
        self.states = StateTransfer(self, self.exchange, self.residuals)
        self.external_writes = ExternalWrites(self, self.exchange, self.states)
        self.versions = ValidationSnapshots(self, self.exchange, self.external_writes)
        self.wrapper = ModelWrapper(self, lambda: self.executor.not_reduced())
        self._raw_steps = RawStepGuard(self, lambda: self.executor)
        self._local = Executor(self.heads)
        self._exchanging = Exchanging(self, self.exchange, self.parameter_groups, self.external_writes, self.heads)
        self.wants_stop = self.is_finished = self.is_begun = self.is_in_loop = False
        self.on_stop: Callable[[], None] | None = None
        self.first_steps: ReductionCheck | None = None
        self._leaving: ExitCheck | None = None
        self._samplers: OwnSamplers | None = None
        self._watching = ExitStack()

    @property
    def executor(self) -> Executor:
        """Return the executor of the present groups."""
        return self._local if self.is_synchronous and self.registration is None else self._exchanging

    # --- Life --------------------------------------------------------------------------------------------------------

    def dismiss_server(self) -> None:
        """End a server that was started as a precaution, if there is one group and no rank has joined."""
        if self.control is None and not self.executor.exchanges:
            self.server.stop(waits=False)

    def check_method(self, groups: int) -> None:
        """Raise an error unless the method allows so many groups, and the server can import it and the format."""
        self.method.check(groups)
        wire = self.core.wire_format
        for name, value in (("method", self.method), ("compression", wire.pushes), ("compression", wire.answers)):
            check_importable(name, value)

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Parameter],
        names: Callable[[], Mapping[Parameter, str]] = dict,
        outside: Collection[Parameter] = (),
    ) -> int:
        """Attach an optimizer, before groups are formed, and return its number.

        ``parameters`` are its exchanged parameters by name, ``outside`` its others; ``names`` returns the present names
        of all the model's parameters.

        Raises:
            UnsupportedError: groups cannot train a parameter, or another optimizer has it.
        """
        if self.options.is_sharded:
            exchanged = {
                name: each for name, each in parameters.items() if self.share is not None or each.requires_grad
            }
            check_sharded(exchanged, self.mesh, self.options.model_parallel, self.replicas > 1)
        replica = ModelReplica(parameters, optimizer, is_shared=self.is_sharded)
        return self._add_group(Part(optimizer, replica, self.empty, self.device, names=names, outside=outside))

    def attach_head(self, name: str, model: Module, optimizers: Sequence[Optimizer]) -> RemoteHead:
        """Attach the submodule ``name`` of the whole ``model`` as a merged head, before training begins.

        One of the optimizers holds all its parameters; `attach` takes that optimizer's others.

        Raises:
            OmniError: the submodule cannot be merged.
        """
        refuse_pairs(self.method, {**self.options.features, "merged": f"merged={name!r}"})
        module = check_mergeable(name, model)
        optimizer, parameters = held_by_one(name, module, optimizers)
        check_servable(optimizer)
        replica = ModelReplica(parameters, optimizer)
        part = Part(optimizer, replica, self.empty, self.device, head=(name, module))
        self.heads.append(
            RemoteHead(self, self.exchange, self.parameter_groups, part, self._add_group(part), name, module)
        )
        return self.heads[-1]

    def _add_group(self, part: Part) -> int:
        self.parts.append(part)
        try:
            self.executor.check_parts()
        except UnsupportedError:
            self.parts.pop()
            raise
        part.replica.divide(self.servers)
        return self.core.attach(part.replica)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise `UnsupportedError` if the method cannot step this optimizer across groups."""
        self._exchanging.check_optimizer(optimizer)

    def detach_all(self) -> None:
        """Forget the optimizers and heads."""
        self.residuals.warn_of_remainder("the optimizers were replaced")
        self.parts = []
        self.heads.clear()
        self.core.detach_all()

    def begin(self) -> None:
        """Begin training, on every rank; several groups join the server, which gets the recorder's weights."""
        self.connection.open()
        self.is_finished, self.is_begun = False, True
        self.steps, self.core.last_answer, self.exchange.traffic = 0, NO_ANSWER, Traffic(clock_of(self.device))
        if not self.has_joined:  # otherwise the server gets changes since the group joined, before its first batch
            self.parameter_groups.renew()
        self.executor.check_parts()
        self.wrapper.average_over_replicas()  # refuses a hook that the user has set meanwhile
        if self.executor.exchanges:
            self.check_method(len(self.topology.alive))
            if self.has_joined:
                self.exchange.read_weights()
                self.states.leave_to_server()
            else:
                self.connection.join()
                self._form()
                self.states.hand_out()
            self.external_writes.begin()
        self.executor.place_heads()
        self.states.forget()
        if self.registration is not None:
            self.registration.close()

    def take_part(self) -> m.Joined:
        """Join a running run with this rank's group: see `Connection.take_part`."""
        self.executor.check_parts()
        return self.connection.take_part()

    def agree_on_recorder(self) -> None:
        """Agree in a sharded group whether it has the recorder, which may change meanwhile. All members call it."""
        if self.registration is not None and self.share is not None and self.is_computing:
            self._is_with_recorder = self.exchange.members.broadcast_bytes(str(self.is_recorder).encode()) == b"True"

    def read_again(self) -> None:
        """Load the server's weights again, if hooks have written this group's weights since it joined.

        All ranks of the group call it, before its first batch.
        """
        self.connection.read_again()
        self.states.forget()
        self.external_writes.begin()

    @contextmanager
    def training(self) -> Iterator[World]:
        """Provide the context for a training loop without Lightning. All ranks enter it.

        At the end every rank has the weights to evaluate, and one state of each optimizer. Buffers (BatchNorm's
        statistics) stay each rank's own; `enter_world` with the model merges them. Inside, `torch.distributed` and any
        DistributedSampler created there see the ranks of this compute group: to divide samples among all ranks, create
        the sampler before.

        Raises:
            UnsupportedError: a wrapped optimizer steps by itself while groups exchange; DDP over ranks of several
                groups is called; or ``elastic=True`` was passed, which works with Lightning only.
            ConfigurationError: the members of a group have not averaged their gradients; weights have moved without an
                OmniOptimizer of this world; ranks have different buffers or frozen parameters in a module that `wrap`
                has not wrapped, or optimizers of other parameters; or this is inside another loop of several groups.
            RankLost: an earlier loop has lost ranks; this one cannot continue without those that it lost; or the
                members of a group have made different numbers of steps.
        """
        check_may_begin(self, self.is_begun, self.executor.exchanges)
        if self.is_recorder:
            warn_of_variables(self.options)
            if unread := self.options.unread:
                _log.warning("world.training(): %s", unread)
        self.ever_lost.clear()  # those that left an earlier loop, with an exception that was caught, are here again
        closed: GeneratorExit | None = None
        try:
            self._share_weights()
            self._check_wrapped()
            self.states.agree()
            self.begin()
            self.enter_compute()
            before = [part.replica.clock for part in self.parts] if self.executor.exchanges else None
            with self._guarded() as leaving:
                try:
                    yield self
                except GeneratorExit as error:  # the loop is in a generator, whose caller has left it as by a break
                    closed = error
            with nullcontext() if closed is None else announced_wait():
                self._wait_for_all(_END)
                was_synchronized = not self.is_computing
                self._synchronize(_END)
                if was_synchronized:
                    self.executor.follow_writes()
            if self.executor.exchanges:
                warn_of_own_statistics(self, self._raw_steps.modules())
            if self.executor.exchanges and self.is_recorder:
                has_moved = [part.replica.clock for part in self.parts] != before or self.method.evaluated == "mean"
                if leaving.steps and not has_moved:
                    warn_of_no_update(self.method, leaving.steps)
            self._forget_own()
            if self.executor.control is not None:
                self.states.bring_to_all()
            self.close()
        except BaseException as error:
            self.explain(error)
            self.fail(error)
            self._forget_own()
            raise
        if closed is not None:
            raise closed

    def _wait_for_all(self, what: str) -> None:
        # An error names a rank that calls something else.
        if self.executor.exchanges and not self.is_computing:
            self.process_groups.live.contribute(what, b"")

    def _forget_own(self) -> None:
        self.is_computing = False
        self.external_writes.watch(None)
        for part in self.parts:
            part.replica.abandon()

    @contextmanager
    def _guarded(self) -> Iterator[ExitCheck]:
        if not self.options.is_sharded:
            self.first_steps = ReductionCheck(self.members, self.compute_group, self.reduction.check_reduced)
        self.is_in_loop = True
        self._samplers = OwnSamplers(self) if self.is_recorder and self.executor.exchanges else None
        leaving = self._leaving = ExitCheck(self)
        first_steps = nullcontext() if self.first_steps is None else self.first_steps.watch()
        try:
            with first_steps, leaving.watch(), self._raw_steps.watch(lambda: leaving.steps):
                yield leaving
            self.check_left()
        finally:
            self.first_steps = self._leaving = self._samplers = None
            self.is_in_loop = False
            if self.is_computing:
                self.external_writes.watch(None)

    def watch_members(self) -> None:
        """Watch until the run ends for members of this group that leave an epoch in which others train on.

        A group that has joined on its own is not watched.
        """
        if self.registration is None:
            self._leaving = ExitCheck(self)
            self._watching.enter_context(self._leaving.watch_others())

    def check_left(self) -> None:
        """Wait for the watched members of this group: see `ExitCheck.check`."""
        if self._leaving is not None:
            self._leaving.check()

    def _share_weights(self) -> None:
        """Copy rank 0's trained, unsharded weights to all ranks of several groups: the module may not be wrapped."""
        if not self.executor.exchanges:
            return
        self.parameter_groups.agree()
        if self.parts:  # groups whose loop an exception has ended had read weights of different clocks
            clocks = self.all_reduce_max([part.replica.clock for part in self.parts])
            for part, clock in zip(self.parts, clocks, strict=True):
                part.replica.clock = clock
        if not self.options.is_sharded:
            take_from_rank_zero(named for part in self.parts for named in part.replica.parameters.items())

    def _check_wrapped(self) -> None:
        if not self.executor.exchanges or self.options.is_sharded:
            return
        trained = {each for part in self.parts for each in part.replica.ordered}
        modules = unwrapped(trained, self._raw_steps.modules())
        for module in modules:
            self._raw_steps.wrapped(module)
        remedy = "groups would train different models: call world.wrap(net), which gives all ranks those of rank 0"
        found = untrained_of(modules, trained)
        agree(found, self.rank, self.all_reduce_max, remedy)

    def check_step(self) -> None:
        """Count a step; raise `ConfigurationError` if it is made where groups are synchronized."""
        if self._leaving is not None:
            self._leaving.steps += 1
            if self._leaving.steps == 1 and self._samplers is not None:
                self._samplers.warn()
        if self.is_begun and self.executor.exchanges and not self.is_computing:
            raise ConfigurationError(
                "OmniOptimizer.step() where all groups are synchronized: call world.enter_compute() before they train"
                " on; with Lightning (an epoch's start or end, a validation) step in a batch, such as the epoch's last"
                " one (trainer.is_last_batch), or use groups=1"
            )

    def step_done(self) -> None:
        """End an optimizer's step."""
        if self._leaving is not None:
            self._leaving.step_done()

    def explain(self, error: BaseException) -> None:
        """Name in an error of a collective the failure behind it, if reported within `LEARN`. Call it before `fail`."""
        if not is_of_a_collective(error):
            return
        if self.control is None:
            time.sleep(LEARN)  # the rank that failed first must end first: launchers name it
            return
        cause = self.control.wait_for_end(LEARN)
        if cause is not None:
            error.args = (f"{cause} (here: {error})",)

    def fail(self, error: BaseException, where: str = "") -> None:
        """End this rank's run with an error, which is reported to the server, so that no other rank waits for it."""
        if os.getpid() != self._process:  # a fork of this rank: the run goes on, and a copied socket would never answer
            return
        self.is_begun = False
        how = f"has lost its group: {error}" if is_of_a_loss(error) else end_reason(error)
        # A rank that has trained to the end has not failed, whatever happens afterwards.
        self.connection.leave("" if self.is_finished else f"rank {self.rank} {how}{where}", self.is_finished)
        self._close_connections(has_failed=True)
        self.abandon_groups()
        self.process_groups.leave()

    def close(self) -> None:
        """Leave the run in good order, and stop the embedded server. All live ranks call it.

        The default process group is then the original one, or the survivors'.
        """
        self.residuals.warn_of_remainder()
        groups, after = self.process_groups, self.process_groups.original
        try:
            if self.control is not None and self.registration is None:
                # No rank stops the server while others still need it. If the ranks here continue, they do so without
                # the lost ones, of which they may learn at different times.
                live = tuple(rank for rank, _ in self.exchange.synchronize(_END, b""))
                if len(live) < self.size:
                    survivors = Topology((live,))
                    groups.make(survivors, self.exchange.gather)
                    after = groups.compute(survivors)
                    outlive(after, sorted({*range(self.size)} - {*live}))
        except OmniError:
            if not self.is_finished:
                raise
        groups.use(after)
        self.is_computing = self.is_begun = False
        self.connection.leave(has_finished=self.is_finished)
        self._close_connections()
        groups.leave()

    def _close_connections(self, has_failed: bool = False) -> None:
        self._watching.close()
        self._leaving = None
        self.reduction.forget()
        self.residuals.forget()
        self.connection.close()
        self.executor.place_heads()
        self.server.stop(has_failed)

    # --- Phases ------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # an evaluation may be in it, and what is kept here is written outside of it
    def enter_compute(self) -> None:
        """Train each group separately from here, at an epoch's start or after a validation. All ranks call it.

        Raises:
            ConfigurationError: several groups call it outside ``with world.training():``.
        """
        if self.executor.exchanges and not self.is_begun:
            raise ConfigurationError(
                "world.enter_compute() outside `with world.training():`, which calls it when it begins; call it there,"
                " after world.enter_world()"
            )
        reshard(self.wrapper.sharded)
        if self.is_in_loop:
            self._wait_for_all("enter_compute()")
        self.executor.enter_compute()

    @torch.inference_mode(False)
    def enter_world(self, module: Module | None = None) -> None:
        """Synchronize the groups: every rank gets the weights to evaluate. All ranks call it; it waits for them.

        Tensors that no optimizer moves become the same on all ranks: running statistics and the parameters of a
        `torch.optim.swa_utils.AveragedModel` are averaged over the groups; other buffers, and other parameters that
        were written, become rank 0's. Groups with weights of their own get these back in `enter_compute`. If any rank
        ``wants_stop``, ``on_stop`` is called on all. With one group it does none of this.

        Args:
            module: the model, with all that belongs to it (its average, for example); with None each group keeps its
                own tensors.
        """
        if self.executor.exchanges and not self.is_begun:
            raise ConfigurationError(
                "world.enter_world() outside `with world.training():`, where groups are not synchronized any more; call"
                " it there, as the last line"
            )
        what, watched = f"enter_world({'' if module is None else 'module'})", self.external_writes.watched
        if self.is_in_loop and self.is_computing:
            self.check_left()
            self.external_writes.watch(module)
        elif self.is_in_loop and self.executor.exchanges and module is not None and module is not watched:
            self._wait_for_all(what)
            self.external_writes.watch(module)
            self.external_writes.merge(module)
        self._synchronize(what, module)

    def _synchronize(self, what: str, module: Module | None = None) -> None:
        reshard(self.wrapper.sharded)
        stops = self.executor.enter_world(module, self.wants_stop, what)
        if stops and self.on_stop is not None:
            self.on_stop()

    def wrap(self, module: Module, **ddp_options: Any) -> Module:
        """Wrap a module in DistributedDataParallel over the compute group, with rank 0's weights. All ranks call it.

        In a group of one rank, and where members hold the model together (sharded), the module itself is returned.

        Args:
            module: the model.
            ddp_options: further arguments of DistributedDataParallel.

        Raises:
            ConfigurationError: the module has other parameters or buffers on another rank.
            UnsupportedError: a tensor is sparse or ignored by DDP, or this is a second sharded module.
        """
        self._raw_steps.wrapped(module)
        if self.options.is_sharded:
            if self.wrapper.sharded not in (None, module):
                raise UnsupportedError(
                    f"world.wrap() of a second module with {shown(self.options.model_parallel)}: put all modules into"
                    " one torch.nn.ModuleDict, and wrap that"
                )
            self.wrapper.shard(module)
            self.wrapper.share_initial()
        else:
            self.wrapper.broadcast_initial(module)
        self.learn_names(module)
        return module if self.options.is_sharded else self.wrapper.wrap(module, ddp_options)

    # --- Regrouping --------------------------------------------------------------------------------------------------

    def check_regroup(self, groups: int) -> None:
        """Raise an error if these ranks cannot form so many groups now: see `regroup`."""
        if self.registration is not None:
            raise UnsupportedError(
                "elastic=True: groups that have joined on their own cannot form other groups, for ranks of different"
                " launchers have no process group in common; start other groups instead"
            )
        if not self.is_begun:
            raise ConfigurationError(
                f"World.regroup({groups}) forms groups of ranks that train; call it inside `with world.training():`, on"
                f" every rank at the same step, and to begin with other groups pass groups={groups} to World"
            )
        check_groups(groups, len(self.live_ranks), self.shards)
        if groups > 1:
            self.check_method(groups)
            for part in self.parts:
                self.check_optimizer(part.optimizer)
        if self.is_sharded:
            has_replicas = len(self.live_ranks) > groups * self.shards
            for part in self.parts:
                check_sharded(part.replica.parameters, self.mesh, self.options.model_parallel, has_replicas)

    def regroup(
        self, groups: int, module: Module | None = None, speeds: Mapping[int, float] | None = None
    ) -> tuple[tuple[int, int], ...]:
        """Change the number of groups. All live ranks call it, at the same step.

        Training continues from the weights of `enter_world`, without unpushed steps and the method's state. Where
        optimizers step on the ranks, each rank takes its new leader's optimizer state; that at the server is kept. In a
        loop without Lightning, `wrap` the module again afterwards: ``model = world.wrap(net)``. A step with the former
        wrapper's gradients is refused.

        Args:
            groups: the new number of groups.
            module: as in `enter_world`.
            speeds: each live rank's samples per second, the same on all ranks: ranks of similar speed form a group.
                None forms groups in the order of ranks.

        Returns:
            The trained ranges of the epoch's positions, if several groups become one.

        Raises:
            ConfigurationError: ``groups`` is out of range, a speed is missing, or this is outside `training`.
            UnsupportedError: the groups have joined on their own, or cannot train with an optimizer or the model.
        """
        self.check_regroup(groups)
        groups = plain(groups)
        before, computing = self.executor, self.is_computing
        if before.exchanges:
            self.parameter_groups.follow_all()
        else:
            self.parameter_groups.agree()
        self.enter_world(module)
        if before.exchanges and groups == 1 and not computing:
            self.executor.follow_writes()
        if not before.exchanges:
            if groups == 1:
                return ()
            self.connection.join()
        elif self.is_in_loop:  # with Lightning, the strategy sets the schedules
            self.states.share_hyperparameters()
        self._form(groups, speeds, keeps_epoch=before.exchanges)
        self.parameter_groups.check_alike()
        self.executor.check_parts()
        spans = self.states.hand_over(was_synchronous=not before.exchanges)
        if not before.exchanges:
            self.external_writes.begin()
        self.executor.place_heads()
        if not self.executor.exchanges:
            self.process_groups.use(self.compute_group)
        elif computing or not before.exchanges:
            self.enter_compute()
        if self.first_steps is not None:
            self.first_steps.renew(self.members, self.compute_group)
        if self._leaving is not None:
            self._leaving.renew()
        return spans

    def _form(
        self, groups: int | None = None, speeds: Mapping[int, float] | None = None, keeps_epoch: bool = False
    ) -> None:
        self.connection.form(groups, speeds, keeps_epoch)
        self.wrapper.average_over_replicas()
