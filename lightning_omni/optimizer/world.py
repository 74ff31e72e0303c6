"""A rank's place in the run: its group, its phases, and the synchronization points of all ranks.

`World` is what `OmniOptimizer` and the Lightning strategy stand on. It does no arithmetic on weights and knows no
Lightning. One rule governs everything here: inside the training epoch the default process group of torch.distributed
is the compute group; elsewhere it is the whole live world.

What it is made of: `Place` (which rank is where, torch's groups, the control connection), `Channel` (what is
exchanged with the server and with other groups), `ParameterGroups` (those of optimizers, that change), `States`
(optimizer state on its way), `Edits` (what others write) and `Versions` (weights that are evaluated while groups
train). Each of them is given those before it, and none knows the world.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_omni.errors import ConfigurationError, OmniError, RankLost, Refused, UnsupportedError, ending
from lightning_omni.methods.head import check_mergeable, held_by_one
from lightning_omni.methods.master import check_servable
from lightning_omni.optimizer.channel import Channel, Traffic
from lightning_omni.optimizer.edits import Edits
from lightning_omni.optimizer.enlistment import ask_for_all
from lightning_omni.optimizer.executor import Exchanging, Executor
from lightning_omni.optimizer.first_steps import FirstSteps
from lightning_omni.optimizer.model_replica import ModelReplica, Part
from lightning_omni.optimizer.options import WorldOptions
from lightning_omni.optimizer.parameter_groups import ParameterGroups
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.remote_head import RemoteHead
from lightning_omni.optimizer.sharding import (
    average_over_replicas,
    check_sharded,
    division_of,
    reshard,
    shard,
    share_initial,
)
from lightning_omni.optimizer.states import Residuals, States
from lightning_omni.optimizer.untrained import check_dense
from lightning_omni.optimizer.versions import Versions
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.group import Heard
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.transport import Answer
from lightning_omni.protocol.wire_format import to_wire
from lightning_omni.server.keys import load as load_key
from lightning_omni.topology import RECORDER, GroupId, Topology, check_groups

_log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that a rank which must stop is given to find out by itself."""
LEARN = 2.0
"""Seconds in which a rank whose collective failed may hear from the server which other rank failed first."""


class World(Place):
    """A run's compute groups, as seen from this rank. Create it after ``torch.distributed.init_process_group``.

    Args:
        groups: number of compute groups, or None for one group per node.
        device: device of the model's weights.
        options: all other settings; ``groups`` overrides their ``groups``.
        ranks_per_node: number of ranks on each node, in rank order; by default that of torchrun.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        A loop without Lightning, run by ``torchrun --nproc-per-node 4 train.py``::

            dist.init_process_group("gloo")
            world = World(groups=2)
            model = world.wrap(Net())
            optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
            with world.training():
                for x, y in batches(seed=world.group):   # members of a group need equal numbers of batches
                    optimizer.zero_grad()
                    loss(model(x), y).backward()
                    optimizer.step()
    """

    def __init__(
        self,
        groups: int | None = None,
        device: torch.device | str = "cpu",
        options: WorldOptions | None = None,
        ranks_per_node: Sequence[int] | None = None,
    ) -> None:
        super().__init__(groups, device, options, ranks_per_node)
        self.heads: list[RemoteHead] = []
        self.residuals = Residuals(self)
        self.channel = Channel(self)
        self.parameter_groups = ParameterGroups(self, self.channel)
        self.states = States(self, self.channel, self.residuals)
        self.edits = Edits(self, self.channel, self.states)
        self.versions = Versions(self, self.channel, self.edits)
        self._local = Executor(self.heads)
        self._exchanging = Exchanging(self, self.channel, self.parameter_groups, self.edits, self.heads)
        self.wants_stop = self.is_finished = self.is_begun = False
        self.on_stop: Callable[[], None] | None = None
        self.on_stuck: Callable[[OmniError], None] = lambda error: None
        self.ever_lost: set[int] = set()
        self.sharded: Module | None = None
        self.first_steps: FirstSteps | None = None
        self._closed = threading.Event()

    @property
    def executor(self) -> Executor:
        """How the ranks train together, in the groups that there are."""
        return self._local if self.is_synchronous and self.enlistment is None else self._exchanging

    # --- Life --------------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Rank 0 starts the embedded server; returns at once, so that it comes up while the model is built."""
        self.server.start(self.method, self.parts)

    def dismiss_server(self) -> None:
        """With one group, a server that was started because it might be needed, and that no rank joined, ends."""
        if self.control is None and not self.executor.exchanges:
            self.server.dismiss()

    def check_method(self, groups: int) -> None:
        """Raises if there cannot be that many groups with this method."""
        self.method.check(groups)
        for name, kind in (("method", type(self.method)), ("wire_format", type(self.core.wire_format))):
            if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
                raise UnsupportedError(
                    f"{name}={kind.__qualname__}: it is defined in the script itself, where the parameter server cannot"
                    " import it; move it to a module of its own"
                )

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Parameter],
        names: Callable[[], Mapping[Parameter, str]] = dict,
        outside: Collection[Parameter] = (),
    ) -> int:
        """Takes an optimizer in, before training begins.

        Args:
            optimizer: the optimizer.
            parameters: what is exchanged of what it holds.
            names: gives the names of all the model's parameters, for those that come in mid-run.
            outside: what it holds besides.

        Returns:
            Its number.

        Raises:
            UnsupportedError: a parameter is in another optimizer already.
        """
        if self.options.is_sharded:
            exchanged = {
                name: each for name, each in parameters.items() if self.share is not None or each.requires_grad
            }
            check_sharded(exchanged, self.mesh, self.options.inside, self.replicas > 1)
        replica = ModelReplica(parameters, optimizer, is_shared=self.is_sharded)
        number = self._take_in(Part(optimizer, replica, names=names, outside=outside))
        self.executor.check_parts()
        return number

    def attach_head(self, name: str, model: Module, optimizers: Sequence[Optimizer]) -> RemoteHead:
        """Takes a submodule in as a merged head, before training begins: see `lightning_omni.protocol.head_shard`.

        The optimizer that holds its parameters is attached for the others by `attach`, with these left out.

        Args:
            name: the submodule's name in the model.
            model: the whole model.
            optimizers: all optimizers; one of them holds all parameters of the submodule.

        Raises:
            ConfigurationError: the submodule cannot be merged; the message says why.
        """
        module = check_mergeable(name, model)
        optimizer, parameters = held_by_one(name, module, optimizers)
        check_servable(optimizer)  # whatever the method, a head is stepped at the server
        part = Part(optimizer, ModelReplica(parameters, optimizer), head=(name, module))
        self.heads.append(
            RemoteHead(self, self.channel, self.parameter_groups, part, self._take_in(part), name, module)
        )
        return self.heads[-1]

    def _take_in(self, part: Part) -> int:
        self.parts.append(part)
        part.replica.divide(self.servers)
        return self.core.attach(part.replica, is_head=part.head is not None)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises `UnsupportedError` if the method cannot step this optimizer across groups."""
        self._exchanging.check_optimizer(optimizer)

    def detach_all(self) -> None:
        """Forgets the optimizers and merged heads; others may be attached."""
        self.parts = []
        self.heads.clear()
        self.core.detach_all()

    def begin(self) -> None:
        """Training begins on every rank: with several groups the server is joined and given those of the recorder."""
        self._closed.clear()
        self.is_finished, self.is_begun = False, True
        self.steps, self.core.heard, self.channel.traffic = 0, Heard(), Traffic()
        if not self.takes_part:  # or the server is told of what has changed since it was asked, before the first batch
            self.parameter_groups.renew()
        self.executor.check_parts()
        self._average_over_replicas()  # a hook that the user has set meanwhile is refused
        if self.executor.exchanges:
            self.check_method(len(self.topology.alive))
            if self.takes_part:
                self._read_weights()
            else:
                self.connect()
                self._form()
                self.states.hand_out()
            self.edits.begin()
        self.executor.place_heads()
        self.states.forget()
        if self.enlistment is not None:
            self.enlistment.close()

    @property
    def goes_on(self) -> bool:
        """Whether this rank's group is to join a run that goes on already; see `take_part`."""
        return self.enlistment is not None and not self.enlistment.begins

    @property
    def takes_part(self) -> bool:
        """Whether it has."""
        return self.goes_on and self.control is not None

    def take_part(self) -> m.Joined:
        """This rank's group joins a run that goes on already, as soon as the groups of that have parted. On all of it.

        Returns:
            What the group has to know. What else was stored for it is read by `Channel.read_run_state`, and weights are
            read when training begins.

        Raises:
            ConfigurationError: the run exchanges otherwise than this group was told.
            RankLost: it is over.
        """
        self.executor.check_parts()
        self.connect()
        assert self.enlistment is not None
        joined: m.Joined = m.decode(
            bytes.fromhex(ask_for_all(self.tell, self.is_leader, self._ask_to_join)), at="rank", channel=m.CONTROL
        )
        self._check_alike(joined)
        self.topology = Topology((*((),) * joined.group, self.members))
        self.generation, self.channel.synchronizations = joined.generation, joined.synchronizations
        self.process_groups.live.ranks = joined.live
        for part in self.parts:
            part.replica.group, part.replica.peers = joined.group, joined.groups
        self.core.form(GroupId(str(joined.group), joined.incarnation))
        self.is_entering = self.is_new = True
        self.enlistment.close()
        return joined

    def _ask_to_join(self) -> str:
        """Waits until the group may join. By its leader; what all of it has to know, as text."""
        assert self.control is not None
        _log.info("waiting to join the run, until its groups have parted")
        timeout = self.options.timeout.total_seconds()
        return m.encode(self.control.request(m.Join(ranks=self.members), m.Joined, timeout=timeout)).hex()

    def agree_on_recorder(self) -> None:
        """While groups compute, the recorder may go: its new group learns of it at one moment. On all of a group."""
        if self.enlistment is not None and self.share is not None and self.is_computing:
            self._is_with_recorder = self.channel.tell_group(str(self.is_recorder).encode()) == b"True"

    def wait_for_members(self) -> None:
        """Until all of this rank's group are here."""
        dist.barrier(group=self.compute_group)

    def _check_alike(self, joined: m.Joined) -> None:
        """Raises `ConfigurationError` if the groups of the run exchange otherwise than this one was told."""
        mine = m.method_to_wire(self.method), to_wire(self.core.wire_format), self.core.overlaps
        theirs = joined.method, joined.wire_format, joined.overlap
        for name, own, other in zip(("method", "wire", "overlap"), mine, theirs, strict=True):
            if own != other:
                raise ConfigurationError(f"{name}={own}: the run that this group joins has {other}; pass the same")

    def _read_weights(self) -> None:
        """The group that has joined begins with the weights that the server has now, and no state of optimizers."""
        for index, part in enumerate(self.parts):
            part.replica.load(self.channel.fetch(index))

    def read_again(self) -> None:
        """Hooks have written weights of this group, which has joined, as those of the run had before: the run's hold.

        On all of the group, before its first batch.
        """
        written = torch.tensor(any(part.replica.written() for part in self.parts), device=self.device)
        if len(self.members) > 1:
            dist.all_reduce(written, op=dist.ReduceOp.MAX, group=self.compute_group)
        if written:
            self._read_weights()
        self.states.forget()
        self.edits.begin()

    @contextmanager
    def training(self) -> Iterator[World]:
        """A context in which to train without Lightning: begins, and ends with the master weights on every rank.

        Buffers (BatchNorm's statistics) stay those that each rank has; `enter_world` with the model merges them.

        Inside it `torch.distributed` has the ranks of this compute group, and so has a DistributedSampler that is made
        there: to divide the samples among all ranks, make it before.

        Raises:
            UnsupportedError: a wrapped optimizer steps by itself while groups exchange; DDP over ranks of several
                groups is called; or with ``join=True``: what a group that joins is given beside the weights is
                Lightning's.
            ConfigurationError: the members of a group have not averaged their gradients.
            RankLost: ranks have died in an earlier loop; or in this one, and it cannot go on without them.
        """
        if self.enlistment is not None:
            raise UnsupportedError(
                "World.training() with join=True: a group that joins late must find its place in the epoch, which is"
                " done for Lightning's loops; use OmniStrategy(join=True), or start all ranks together"
            )
        if dist.get_world_size() < self.size:
            raise RankLost(
                f"world.training(): an earlier loop has lost the ranks {', '.join(map(str, sorted(self.ever_lost)))},"
                f" and a loop begins with all {self.size}; start the script again, from a checkpoint"
            )
        self.ever_lost.clear()  # those that left an earlier loop, with an exception that was caught, are here again
        try:
            self._share_weights()
            self.begin()
            self.enter_compute()
            with self._guarded():
                yield self
            self.enter_world()
            self._forget_own()
            if self.hands_over and self.executor.control is not None:
                self.states.take_back()
            self.close()
        except BaseException as error:
            self.explain(error)
            self.fail(error)
            self._forget_own()
            raise

    def _forget_own(self) -> None:
        """What this group alone remembers (an exchange that was under way, say) is none of a further loop's."""
        self.is_computing = False
        for part in self.parts:
            part.replica.abandon()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Refuses meanwhile what would have groups train by themselves."""
        guard = register_optimizer_step_pre_hook(self._refuse_raw_step)
        if not self.options.is_sharded:
            self.first_steps = FirstSteps(self.members, self.compute_group)
        try:
            with nullcontext() if self.first_steps is None else self.first_steps.watch():
                yield
        finally:
            guard.remove()
            self.first_steps = None

    def _share_weights(self) -> None:
        """Groups begin with rank 0's weights: the module was not wrapped, perhaps, or loaded on some ranks since."""
        if self.executor.exchanges and not self.options.is_sharded:
            _take_from_rank_zero(parameter for part in self.parts for parameter in part.replica.ordered)

    def _refuse_raw_step(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer is about to step, whosever it is."""
        executor = self.executor
        if not self.is_computing or not executor.exchanges or executor.is_called:
            return
        if any(part.optimizer is optimizer for part in self.parts):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() would move this rank's weights, and groups would exchange nothing;"
                " call step() of the OmniOptimizer that wraps it"
            )

    def explain(self, error: BaseException) -> None:
        """If another rank's failure is the cause of this one, the error is told to name that; call it before `fail`.

        A rank that waits in a collective sees no more than a broken connection, often before the server has heard why.
        """
        if not _is_of_a_collective(error):
            return
        if self.control is None:
            time.sleep(LEARN)  # the process of the rank that failed first shall end first: a launcher names it
            return
        cause = self.control.wait_for_end(LEARN)
        if cause is not None:
            error.args = (f"{cause} (here: {error})",)

    def fail(self, error: BaseException, where: str = "") -> None:
        """This rank cannot go on: says so to the server, so that no other waits for it.

        Args:
            error: by which it ends.
            where: said after that.
        """
        self._closed.set()
        self.is_begun = False
        if self.control is not None:  # a rank that has trained to the end has not failed, whatever comes then
            self.control.close(reason="" if self.is_finished else f"rank {self.rank} {ending(error)}{where}")
        self._close_connections(has_failed=True)
        self.abandon_groups()

    def close(self) -> None:
        """Leaves the run in good order and stops the embedded server. Gives the default process group back."""
        self.residuals.tell_of_remainder()
        groups, after = self.process_groups, self.process_groups.original
        try:
            if self.control is not None and self.enlistment is None:
                # No rank stops the server while others still need it. Those here go on, if at all, without the lost;
                # of a loss they may hear at different moments.
                live = tuple(rank for rank, _ in self.channel.synchronize("survivors", b""))
                if len(live) < self.size:
                    survivors = Topology((live,))
                    groups.make(survivors, self.channel.gather)
                    after = groups.compute(survivors)
        except OmniError:
            if not self.is_finished:
                raise
        self._closed.set()
        groups.use(after)
        self.is_computing = self.is_begun = False
        if self.control is not None:
            self.control.has_finished = self.is_finished
            self.control.close(reason="")
        self._close_connections()
        groups.leave()

    def _close_connections(self, has_failed: bool = False) -> None:
        if self.enlistment is not None:
            self.enlistment.close()
        self.channel.close()
        self.ever_lost.update(self.lost)
        self.control = None
        self.executor.place_heads()
        self.server.stop(has_failed)

    # --- Phases ------------------------------------------------------------------------------------------------------

    def enter_compute(self) -> None:
        """The training epoch begins or goes on: each group for itself."""
        reshard(self.sharded)
        self.executor.enter_compute()

    def enter_world(self, module: Module | None = None) -> None:
        """The groups synchronize: every rank gets the weights to evaluate.

        Buffers become the same on all ranks: running statistics the mean over the groups, others those of rank 0.
        Weights of their own, if the method has groups keep any, come back with `enter_compute`. If any rank
        ``wants_stop``, all are told, by ``on_stop``.

        Args:
            module: the model, whose buffers these are; None leaves each group its own.
        """
        reshard(self.sharded)
        stops = self.executor.enter_world(module, self.wants_stop)
        if stops and self.on_stop is not None:
            self.on_stop()

    def wrap(self, module: Module, **ddp_options: Any) -> Module:
        """Wraps a module into DistributedDataParallel over the compute group; a group of one needs none.

        Initial weights are rank 0's. Where the members of a group hold the model together, the module itself is
        sharded, or has been on `mesh`.
        """
        if self.options.is_sharded:
            self.shard(module)
            self.share_initial()
            return module
        self.broadcast_initial(module)
        if len(self.members) == 1:
            self.reduction.forget()
            return module
        with frozen(self.executor.not_reduced()):
            options = self.reduction.ddp_options(module, ddp_options)
            wrapped = DistributedDataParallel(module, process_group=self.compute_group, init_sync=False, **options)
        self.reduction.install(wrapped, self.compute_group)
        return wrapped

    def shard(self, module: Module) -> None:
        """The members of this rank's group hold a module together from now on. All ranks call it, before training.

        Args:
            module: see `lightning_omni.optimizer.sharding.shard`. With a `ModelParallel` it has been parallelized.
        """
        if self.options.inside == "fsdp":
            shard(module, self.mesh)
        self.sharded = module
        self._average_over_replicas()

    def _average_over_replicas(self) -> None:
        """Members of this rank's group that have the same of a sharded model average their gradients."""
        if self.sharded is not None:
            average_over_replicas(self.sharded, self._mean_over_replicas if self.replicas > 1 else None)

    def _mean_over_replicas(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.replica_group)
        gradient.div_(self.replicas)

    def share_initial(self) -> None:
        """All groups get the weights with which the recorder's begins. All ranks call it, before training."""
        # Other launchers' groups are not in this torch.distributed world: they read what the server is given.
        is_alone = len(self.holders.alive) == 1 and self.enlistment is None
        if self.sharded is not None and not is_alone and not self.ever_lost:
            share_initial(self.sharded, self.holders, self.torch_rank)

    def broadcast_initial(self, module: Module) -> None:
        """All ranks get the parameters and buffers of rank 0; called before training begins, while all are here.

        Raises:
            UnsupportedError: one of them is sparse.
        """
        check_dense((*module.named_parameters(), *module.named_buffers()))
        self.process_groups.make(self.topology)
        _take_from_rank_zero((*module.parameters(), *module.buffers()))

    # --- Regrouping --------------------------------------------------------------------------------------------------

    def check_regroup(self) -> None:
        """Raises `UnsupportedError` if these ranks cannot form other groups."""
        if self.enlistment is not None:
            raise UnsupportedError(
                "join=True: groups that have joined on their own cannot form other groups, for ranks of different"
                " launchers have no process group in common; start other groups instead"
            )

    def regroup(
        self, groups: int, module: Module | None = None, speeds: Mapping[int, float] | None = None
    ) -> tuple[tuple[int, int], ...]:
        """All live ranks form other groups, at one point of their programs. Weights and optimizer state carry on.

        Args:
            groups: the new number of groups.
            module: as in `enter_world`.
            speeds: each live rank's samples per second, the same on all ranks: groups are formed by them, like with
                like. None forms them in the order of ranks.

        Returns:
            The ranges of the epoch that the server knows to be trained, if there is one group from here on.

        Raises:
            ConfigurationError: wrong number, or no training is under way.
        """
        self.check_regroup()
        if not self.is_begun:
            raise ConfigurationError(
                f"World.regroup({groups}) forms groups of ranks that train; call it inside `with world.training():`, on"
                f" every rank at the same step, and to begin with other groups pass groups={groups} to World"
            )
        check_groups(groups, len(self.live_ranks), self.shards)
        if groups > 1:
            self.check_method(groups)
        if self.is_sharded:
            has_replicas = len(self.live_ranks) > groups * self.shards
            for part in self.parts:
                check_sharded(part.replica.parameters, self.mesh, self.options.inside, has_replicas)
        before, computing = self.executor, self.is_computing
        if before.exchanges:
            self.parameter_groups.follow_all()
        else:
            self.parameter_groups.renew()
        self.enter_world(module)
        if not before.exchanges:
            if groups == 1:
                return ()
            self.connect()
        self._form(groups, speeds)
        self.parameter_groups.check_alike()
        self.executor.check_parts()
        spans = self.states.hand_over(was_synchronous=not before.exchanges)
        if not before.exchanges:
            self.edits.begin()
        self.executor.place_heads()
        if not self.executor.exchanges:
            self.process_groups.use(self.compute_group)
        elif computing or not before.exchanges:
            self.enter_compute()
        return spans

    # --- How ---------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Joins the server, which rank 0 starts or which runs elsewhere. All ranks call it, even with one group yet."""
        if self.control is None:
            self._join_server()
            self.process_groups.join(self.channel.synchronize, self.rank)

    def try_to_connect(self) -> str:
        """Joins the server if all ranks can; otherwise none has, and nothing is left of it. On all ranks, in one group.

        Returns:
            Why a rank could not, the same on all; or nothing.
        """
        if self.control is not None:
            return ""
        problem = ""
        try:
            self._join_server()
        except Exception as error:  # whatever it is, the others wait to hear of it
            problem = str(error) or type(error).__name__
        groups = self.process_groups
        mine = [int(rank == self.rank and problem != "") for rank in range(self.size)]
        failed = groups.largest(mine, groups.original)
        if not any(failed):
            groups.join(self.channel.synchronize, self.rank)
            return ""
        problem = groups.tell(problem, groups.original, failed.index(1))
        self._disconnect()
        return problem

    def _disconnect(self) -> None:
        """As if no rank had come to the server, which is stopped. On all ranks, in one group."""
        self._closed.set()  # that the others leave is no reason to end this process
        if self.control is not None:
            self.control.close(reason="")
            self.control = None
            for part in self.parts:
                part.replica.divide(self.servers)
        dist.barrier(group=self.process_groups.original)
        self.server.stop()
        self._closed.clear()

    def _join_server(self) -> None:
        """Starts the server, if it is this rank's to start and does not run, and connects this rank to it."""
        self.start_server()
        address, key, run = self.server.find(self.tell) if self.enlistment is None else self._enlisted_at
        self.channel.synchronizations = 0
        specs = tuple(spec for part in self.parts for spec in part.replica.layout_with({}).specs)
        layout = Layout(specs, division=self._division)
        size = 0 if self.goes_on else self.size  # ranks that are not announced
        silence = self.enlistment.silence if self.enlistment is not None else 0.0
        self.control = self.server.transport.join(address, key, run, self.rank, size, layout, self._on_end, silence)
        self.server.check(self.control.shards, address)
        for part in self.parts:
            part.replica.divide(self.servers)
        self.server.share(address, key)

    @property
    def _division(self) -> str:
        """How the members of a group share the parameters; empty if each exchanges all of them."""
        if not self.is_sharded:
            return ""
        return division_of((each for part in self.parts for each in part.replica.ordered), self.mesh)

    @property
    def _enlisted_at(self) -> tuple[str, bytes, str]:
        """Address, key and name of the run that this group joins on its own."""
        assert self.enlistment is not None
        assert self.options.server is not None
        return self.options.server, load_key(), self.enlistment.run

    def _form(self, groups: int | None = None, speeds: Mapping[int, float] | None = None) -> None:
        """The recorder forms the groups at the server, out of the ranks that are alive there, and tells the others.

        Args:
            groups: the new number of groups; None forms the groups of ``topology``.
            speeds: as in `regroup`.
        """
        assert self.control is not None
        self.barrier()
        mine = b""
        if self.is_recorder:
            topology, incarnation = self._form_until_accepted(groups, speeds)
            mine = json.dumps([topology.groups, incarnation]).encode()
        formed, incarnation = json.loads(dict(self.channel.synchronize("topology", mine))[RECORDER])
        self.topology = Topology(tuple(tuple(members) for members in formed))
        self.generation += 1
        if self.rank not in self.topology.ranks:
            self.control.check()
        self.make_groups(self.channel.gather)
        self._average_over_replicas()
        for part in self.parts:
            # As formed, not as alive: peers hear of a loss at different moments, and must draw the same peer.
            part.replica.group, part.replica.peers = self.group, self.topology.alive
        self.core.form(GroupId(str(self.group), incarnation))
        self.channel.connect_peers()

    def _form_until_accepted(self, groups: int | None, speeds: Mapping[int, float] | None) -> tuple[Topology, int]:
        """The groups that stand now, and their incarnation."""
        assert self.control is not None
        while True:
            topology = self.topology if groups is None else self._topology_of_the_living(groups, speeds)
            form = m.Form(
                generation=self.generation + 1,
                groups=topology.groups,
                method=m.method_to_wire(self.method),
                keep_epoch=groups is not None and self.executor.exchanges,
                wire_format=to_wire(self.core.wire_format),
                overlap=self.core.overlaps,
                by_member=self.is_sharded,
            )
            try:
                return topology, self._say(form, m.Formed).incarnation
            except Refused:
                # A rank died this very moment and the notice is on its way: form without it.
                if groups is None or topology.ranks == self.live_ranks:
                    raise

    def _say(self, message: m.Message, expect: type[Answer]) -> Answer:
        """A request on the control channel, however large."""
        assert self.control is not None
        data = m.encode(message)
        if len(data) > m.LARGEST_INLINE:
            self.channel.bring(data)
            message = m.ReadBrought()
        return self.control.request(message, expect)

    def _topology_of_the_living(self, groups: int, speeds: Mapping[int, float] | None) -> Topology:
        if speeds is None:
            return Topology.of(self.live_ranks, groups, self.shards)
        known = {rank: speeds[rank] for rank in self.live_ranks if rank in speeds}
        return Topology.by_speed(known, groups, self.shards)

    def _on_end(self, error: OmniError) -> None:
        """Called from the connection's thread: this rank must stop.

        The trainer finds out at its next exchange. If it is stuck in a collective with the dead it never does, so it
        gets a moment and then no more.
        """

        def end() -> None:
            if not self._closed.wait(GRACE):
                _log.critical("rank %d stops: %s", self.rank, error)
                self.server.transport.clear(self.server_address)
                self.on_stuck(error)
                os._exit(1)

        threading.Thread(target=end, name="omni-end", daemon=True).start()


def _take_from_rank_zero(tensors: Iterable[Tensor]) -> None:
    """All ranks of the default process group get the values that rank 0 has."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


@contextmanager
def frozen(parameters: Iterable[Parameter]) -> Iterator[None]:
    """While DDP looks for what is trainable: it waits for each gradient, and those of merged heads never come."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether torch.distributed raised it; gloo's errors have no class of their own."""
    names = ("gloo", "nccl")
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(name in str(error).lower() for name in names)
    )
