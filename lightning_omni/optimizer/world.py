"""A rank's place in the run: its group, its process groups, its connections, and the meetings of all ranks.

`World` is what `OmniOptimizer` and the Lightning strategy stand on. It does no arithmetic on weights and knows no
Lightning. One rule governs everything here: inside the training epoch the default process group of torch.distributed
is the compute group; elsewhere it is the whole live world. `use_default_group` is the only place that switches.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_omni.errors import ConfigurationError, NonFiniteGradients, OmniError, Refused, UnsupportedError
from lightning_omni.methods import Exchange, Inbox, Method, Pulled, checked, method_named
from lightning_omni.methods.head import check_mergeable, held_by_one
from lightning_omni.methods.master import check_servable, class_path, describe, places_of
from lightning_omni.methods.modules import class_paths, describe_module
from lightning_omni.optimizer.head import RemoteHead
from lightning_omni.optimizer.process_group import BACKEND, LiveWorld, register
from lightning_omni.optimizer.replica import ModelReplica
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import Packed, pack, unpack
from lightning_omni.protocol.layout import Layout
from lightning_omni.server import (
    Address,
    ControlConnection,
    DataConnection,
    PeerConnections,
    PeerSocket,
    ServerProcess,
)
from lightning_omni.server.connection import check_address, own_host
from lightning_omni.server.keys import load as load_key
from lightning_omni.server.keys import new_key
from lightning_omni.server.process import Settings
from lightning_omni.topology import Topology, check_groups

_log = logging.getLogger(__name__)

PREFIX = 128
"""Bytes in front of the weights that a leader broadcasts to its group: what else the answer said."""
_NUMBERS = 64
"""Where among them the note lies, in bytes; whole numbers come before it."""
GRACE = 10.0
"""Seconds that a rank which must stop is given to find out by itself."""
_STOPS = ("", "validate", "end", "skip")
_Answer = TypeVar("_Answer", bound=m.Message)


@dataclass(frozen=True)
class WorldOptions:
    """Everything about a run that is not its size. All ranks must be given the same.

    Attributes:
        groups: number of compute groups, or None for one group for each node.
        method: how groups exchange, by name or as a `lightning_omni.methods.Method`.
        server: ``"tcp://host:port"`` of a server that runs already; None starts one with the run.
        host: address that the embedded server binds; None takes loopback on one node, and otherwise the address by
            which the other nodes reach rank 0 (MASTER_ADDR).
        heartbeat_timeout: seconds of silence after which a rank counts as dead.
        refusals: pushes with NaN or infinite gradients that a group may make in a row before the run ends.
        timeout: seconds after which a collective that does not complete is an error.
        server_threads: threads of the embedded server's arithmetic.
        record: file for a record of everything that moves the weights, written by the embedded server; see
            `lightning_omni.simulator.replay`.
    """

    groups: int | None = None
    method: str | Method = "async_sgd"
    server: str | None = None
    host: str | None = None
    heartbeat_timeout: float = 30.0
    refusals: int = 50
    timeout: timedelta = timedelta(minutes=30)
    server_threads: int = 1
    record: str | None = None

    def __post_init__(self) -> None:
        if self.groups is not None:
            check_groups(self.groups, sys.maxsize)
        if self.server is not None:
            check_address(self.server)
        if self.heartbeat_timeout < 2:
            raise ConfigurationError(
                f"heartbeat_timeout={self.heartbeat_timeout}: ranks give two signs of life a second, and a busy one"
                " may be late; pass at least 2 seconds"
            )
        for name in ("refusals", "server_threads"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: pass a positive number")
        if self.record is not None and self.server is not None:
            raise ConfigurationError(
                f"record={self.record!r}: the server at {self.server} runs already; start it with"
                " lightning-omni serve --record FILE"
            )
        method = self.resolved_method()
        if self.groups is not None:
            method.check(self.groups)

    def resolved_method(self) -> Method:
        """The method as a value."""
        return method_named(self.method) if isinstance(self.method, str) else checked(self.method)


@dataclass
class Exchanged:
    """What the last exchange with the server said, and what all of them took."""

    staleness: int = -1
    applied: bool = True
    progress: int = 0
    stop: str = ""
    seconds: float = 0.0
    moved: int = 0
    """Bytes of tensors to and from the server, in the whole run; only the leader of a group moves any."""


@dataclass
class Part:
    """One optimizer's share of the exchange."""

    optimizer: Optimizer
    replica: ModelReplica
    into: Tensor | None = None
    staleness: list[int] = field(default_factory=list)
    head: tuple[str, Module] | None = None
    """Name and submodule, if this is a merged head: it lives at the server, and nothing of it is pushed."""


@dataclass
class Peers:
    """A leader's way to the other leaders."""

    socket: PeerSocket
    connections: PeerConnections

    def close(self) -> None:
        """Ends both directions."""
        self.connections.close()
        self.socket.close()


class World:
    """This rank's place among all ranks. Call it after ``torch.distributed.init_process_group``.

    Args:
        groups: number of compute groups, or None for one group for each node.
        device: where the model's weights live.
        options: the rest; ``groups`` overrides its ``groups``.
        ranks_per_node: number of ranks on each node, in rank order; by default what torchrun says.

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
        if not dist.is_initialized():
            raise ConfigurationError("call torch.distributed.init_process_group before World(...)")
        self.options = options or WorldOptions(groups=groups)
        self.method = self.options.resolved_method()
        self.device = torch.device(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._ranks_per_node = list(ranks_per_node or _count_ranks_per_node(self.size))
        wanted = groups if groups is not None else self.options.groups
        self.topology = Topology.by_node(self._ranks_per_node) if wanted is None else Topology.even(self.size, wanted)
        self.method.check(len(self.topology.alive))
        self.generation = 0
        self.control: ControlConnection | None = None
        self.parts: list[Part] = []
        self.heads: list[RemoteHead] = []
        self.last = Exchanged()
        self.trained: Callable[[], tuple[int, int]] = lambda: (-1, 0)
        self._live_world: LiveWorld | None = None
        self._original_group: Any = None
        self._groups: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._in_compute = False
        self.phase = 0
        self._data: DataConnection | None = None
        self._peers: Peers | None = None
        self._resumed: Mapping[str, Any] = {}
        self._meetings = 0
        self._closed = threading.Event()
        self.ever_lost: set[int] = set()
        self.process: ServerProcess | None = None
        """Of the embedded server, on rank 0; one that was started before it was needed may be put here."""

    # --- Who is where ------------------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Number of this rank's group."""
        return self.topology.group_of(self.rank)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of this rank's group."""
        return self.topology.members(self.group)

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its group."""
        return self.members[0] == self.rank

    @property
    def is_synchronous(self) -> bool:
        """Whether there is just one group: plain synchronous training, with no server in the path."""
        return self.topology.is_synchronous

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks lost so far."""
        return self.control.lost if self.control else ()

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """Ranks that are not lost."""
        return tuple(rank for rank in range(self.size) if rank not in self.lost)

    @property
    def live_groups(self) -> tuple[int, ...]:
        """Numbers of the groups that have lost nobody."""
        lost = set(self.lost)
        return tuple(g for g in self.topology.alive if not lost.intersection(self.topology.members(g)))

    @property
    def steps_at_worker(self) -> bool:
        """Whether the user's optimizer steps on every rank, and groups have weights of their own."""
        return self.method.steps_at == "worker"

    @property
    def server_address(self) -> str:
        """Address of the parameter server, or an empty string while there is none."""
        return self.control.address if self.control else ""

    @property
    def compute_group(self) -> Any:
        """The process group of this rank's compute group."""
        return self._compute_group(self.topology)

    # --- Life --------------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Rank 0 starts the embedded server; returns at once, so that it comes up while the model is built."""
        if self.rank != 0 or self.options.server is not None:
            return
        if self.process is None:
            self.process = ServerProcess()
        if not self.process.is_told:
            self._key = new_key()
            self.process.tell(
                Settings(
                    key=self._key.hex(),
                    host=self._host(),
                    port=0,
                    heartbeat_timeout=self.options.heartbeat_timeout,
                    join_timeout=self.options.timeout.total_seconds(),
                    threads=self.options.server_threads,
                    allow_optimizers=tuple({class_path(type(part.optimizer)) for part in self.parts}),
                    methods=self._foreign_method,
                    allow_modules=tuple(
                        path for part in self.parts if part.head for path in class_paths(describe_module(part.head[1]))
                    ),
                    record=os.path.abspath(self.options.record) if self.options.record else "",
                )
            )

    def dismiss_server(self) -> None:
        """With one group, a server that was started because it might be needed, and that nobody joined, ends."""
        if self.process is not None and self.control is None and self.is_synchronous:
            self.process.stop()
            self.process = None

    @property
    def _foreign_method(self) -> tuple[str, ...]:
        """The path of a method that is not ours, for the server to import."""
        kind = type(self.method)
        return () if kind.__module__.startswith("lightning_omni.") else (class_path(kind),)

    def check_method(self, groups: int) -> None:
        """Raises if there cannot be that many groups with this method."""
        self.method.check(groups)
        kind = type(self.method)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise UnsupportedError(
                f"method={kind.__qualname__}: it is defined in the script itself, where the parameter server cannot"
                " import it; move it to a module of its own"
            )

    def attach(self, optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> int:
        """Takes an optimizer in, before training begins.

        Returns:
            Its number.

        Raises:
            UnsupportedError: a parameter is in another optimizer already.
        """
        self.parts.append(Part(optimizer, ModelReplica(parameters, optimizer)))
        self._check_not_shared()
        return len(self.parts) - 1

    def attach_head(self, name: str, model: Module, optimizers: Sequence[Optimizer]) -> RemoteHead:
        """Takes a submodule in as a merged head, before training begins: see `lightning_omni.protocol.head`.

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
        self.parts.append(part)
        self.heads.append(RemoteHead(self, part, len(self.parts) - 1, name, module))
        return self.heads[-1]

    def _place_heads(self) -> None:
        """A merged head is the server's while several groups train, and its own otherwise."""
        for head in self.heads:
            if self.control is None or self.is_synchronous:
                head.remove()
            else:
                head.install()

    def steps_here(self, part: Part) -> bool:
        """Whether the user's optimizer steps this part on every rank."""
        return self.steps_at_worker and part.head is None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises `UnsupportedError` if the method cannot step this optimizer across groups."""
        if not self.steps_at_worker or isinstance(optimizer, torch.optim.SparseAdam):
            check_servable(optimizer)
        elif isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates the loss several times in one step, between which no group may exchange weights; use"
                " groups=1, or a first-order optimizer such as SGD or AdamW"
            )

    def _check_not_shared(self) -> None:
        seen: set[int] = set()
        for part in () if self.is_synchronous else self.parts:
            for name, parameter in part.replica.parameters.items():
                if id(parameter) in seen:
                    raise UnsupportedError(
                        f"the parameter {name} is in two optimizers; the server keeps one master copy of it, moved by"
                        " one optimizer: give it to one of them, or use groups=1"
                    )
                seen.add(id(parameter))

    def detach_all(self) -> None:
        """Forgets the optimizers and merged heads; others may be attached."""
        self.parts, self.heads = [], []

    def begin(self) -> None:
        """Training begins on every rank: with several groups the server is joined and given the weights of rank 0."""
        self._closed.clear()
        self.last = Exchanged()
        self._check_not_shared()
        if not self.is_synchronous:
            self.check_method(len(self.topology.alive))
            self._join()
            self._form()
            self._seed()
            for part, state in zip(self.parts, self._states_to_resume(), strict=False):
                part.replica.resume(state)
        self._place_heads()
        self._resumed = {}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """When training begins, go on from what `snapshot` and `deposit` said at a meeting.

        Args:
            saved: ``{"method": {...}, "groups": n, "parameters": [[...]], "server": [...], "states": {group: [...]}}``.
                What the groups knew by themselves counts only if method, number of groups and parts are the same again.
        """
        same = (
            saved.get("method") == m.method_to_wire(self.method)
            and saved.get("groups") == len(self.topology.alive)
            and len(saved.get("server", ())) == len(self.parts)
            and saved.get("parameters", self.part_names if not self.heads else None) == self.part_names
        )
        self._resumed = saved if same else {}

    @property
    def part_names(self) -> list[list[str]]:
        """The parameters of each part, by which a checkpoint tells whether its parts are these."""
        return [list(part.replica.parameters) for part in self.parts]

    def _states_to_resume(self) -> list[Any]:
        states = self._resumed.get("states", {})
        in_order = [states[group] for group in sorted(states)]  # numbers may have had gaps, where groups had died
        return list(in_order[self.group]) if self.group < len(in_order) else []

    def training(self) -> _Training:
        """A context in which to train without Lightning: begins, and ends with the master weights on every rank."""
        return _Training(self)

    def fail(self, reason: str) -> None:
        """This rank cannot go on: says so to the server, so that nobody waits for it."""
        self._closed.set()
        if self.control is not None:
            self.control.close(reason=f"rank {self.rank} failed: {reason}")
        self._close_connections()

    def close(self) -> None:
        """Leaves the run in good order and stops the embedded server. Gives the default process group back."""
        if self.control is not None:
            self._world_barrier()  # nobody stops the server while others still need it
        self._closed.set()
        # Those who lost somebody go on, if at all, without.
        self.use_default_group(self._compute_group(Topology((self.live_ranks,))) if self.lost else self._original)
        if self.control is not None:
            self.control.close(reason="")
        self._close_connections()
        self._give_groups_up()

    def _give_groups_up(self) -> None:
        """Keeps no process group alive beyond the run: torch must be able to end them before the interpreter does."""
        kept = dist.group.WORLD
        for group in self._groups.values():
            if group is not kept:
                dist.destroy_process_group(group)
        self._groups, self._original_group = {}, None

    def _close_connections(self) -> None:
        if self._data is not None:
            self._data.close()
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        self.ever_lost.update(self.lost)
        self.control = self._data = None
        self._place_heads()
        if self.process is not None:
            self.process.stop()
            self.process = None

    # --- Phases ------------------------------------------------------------------------------------------------------

    @property
    def is_computing(self) -> bool:
        """Whether the default process group is the compute group."""
        return self._in_compute

    def enter_compute(self) -> None:
        """The training epoch begins or goes on: each group for itself."""
        if not self.is_synchronous:
            self.use_default_group(self.compute_group)
            self._in_compute = True
            self.phase += 1
            for part in self.parts:
                part.replica.take_up()

    def enter_world(self, buffers: Iterable[Tensor] = ()) -> None:
        """The groups meet: every rank gets the weights to evaluate, and the mean of all groups' floating-point buffers.

        Weights of their own, if the method has groups keep any, come back with `enter_compute`.

        Args:
            buffers: the model's buffers (running statistics of BatchNorm, say), in one order on all ranks.
        """
        if self.is_synchronous or not self._in_compute:
            return
        for head in self.heads:
            head.release()
        self.use_default_group(self._world_group())
        self._in_compute = False
        dist.barrier()
        self.pull()
        self._average(buffers)

    @property
    def _original(self) -> Any:
        """The default process group as we found it."""
        if self._original_group is None:
            self._original_group = dist.group.WORLD
        return self._original_group

    def use_default_group(self, group: Any) -> None:
        """Makes a process group the default of torch.distributed. The one place that does."""
        dist.GroupMember.WORLD = group
        if group is self._original:
            self._in_compute = False

    def wrap(self, module: Module, **ddp_options: Any) -> Module:
        """Wraps a module into DistributedDataParallel over the compute group; a group of one needs none.

        Initial weights are rank 0's.
        """
        self.broadcast_initial(module)
        if len(self.members) == 1:
            return module
        heads = () if self.is_synchronous else tuple(part for part in self.parts if part.head is not None)
        with frozen(parameter for part in heads for parameter in part.replica.ordered):
            return DistributedDataParallel(module, process_group=self.compute_group, init_sync=False, **ddp_options)

    def broadcast_initial(self, module: Module) -> None:
        """Everyone gets the parameters and buffers of rank 0; called before training begins."""
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    # --- Exchange ----------------------------------------------------------------------------------------------------

    def exchange(self, index: int, need: Exchange) -> Pulled:
        """Pushes for this group and hears the server's answer. Every rank of the group calls it.

        Raises:
            NonFiniteGradients: the server refused too many pushes in a row.
        """
        part = self.parts[index]

        def push() -> m.Weights:
            epoch, trained = self.trained()
            present, payload = part.replica.flatten(need.tensors)
            message = m.PushMessage(
                optimizer=index,
                read_at=need.read_at,
                present=present,
                hyperparameters=tuple(dict(group) for group in need.hyperparameters),
                epoch=epoch,
                trained=trained,
                nbytes=payload.numel(),
                note=need.note,
                pull=need.pull,
            )
            return self._ask(part, message, payload)

        return self._share(part, push, need.pull)

    def fetch(self, index: int) -> Pulled:
        """The server's weights for this group. Every rank of the group calls it."""
        part = self.parts[index]

        def ask() -> m.Weights:
            epoch, trained = self.trained()
            return self._ask(part, m.Fetch(optimizer=index, epoch=epoch, trained=trained))

        return self._share(part, ask)

    def pull(self) -> None:
        """Every rank gets the weights to evaluate, of all optimizers."""
        for index, part in enumerate(self.parts):
            if self.steps_here(part):
                part.replica.put_aside()
            is_mean = self.method.evaluated == "mean" and part.head is None
            pulled = self._mean(index) if is_mean else self.fetch(index)
            if pulled.refused:  # the own weights are not finite, and not in the mean: they do not come back
                part.replica.restart(pulled)
                part.replica.abandon()
            else:
                part.replica.load(pulled)

    def _mean(self, index: int) -> Pulled:
        """The mean of all groups' own weights."""
        part = self.parts[index]

        def contribute() -> m.Weights:
            _, payload = part.replica.flatten(part.replica.weights())
            return self._ask(part, m.Average(optimizer=index, nbytes=payload.numel()), payload)

        return self._share(part, contribute)

    # --- Peers -------------------------------------------------------------------------------------------------------

    def publish(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Other groups may read these weights."""
        if self._peers is not None:
            self._peers.socket.publish(index, tensors)

    def send_peer(self, index: int, group: int, tensors: Sequence[Tensor]) -> None:
        """Weights for another group's inbox."""
        if self._peers is not None:
            with self.timed():
                self._peers.connections.send(group, index, tensors)

    def read_peer(self, index: int, group: int) -> Sequence[Tensor] | None:
        """What another group has published. Every rank of the group calls it."""

        def read() -> tuple[Sequence[Tensor] | None, int]:
            assert self._peers is not None
            theirs = self._peers.connections.read(group, index)
            return theirs, int(theirs is not None)

        return self._share_tensors(self.parts[index], read)[0]

    def read_inbox(self, index: int) -> Inbox:
        """What other groups have sent. Every rank of the group calls it."""

        def read() -> tuple[Sequence[Tensor] | None, int]:
            assert self._peers is not None
            inbox = self._peers.socket.read_inbox(index)
            return inbox.total, inbox.count

        return Inbox(*self._share_tensors(self.parts[index], read))

    def _share_tensors(
        self, part: Part, read: Callable[[], tuple[Sequence[Tensor] | None, int]]
    ) -> tuple[Sequence[Tensor] | None, int]:
        """The leader reads something, and a count; its group gets both."""
        with self.timed():
            tensors, count = read() if self.is_leader else (None, 0)
            if len(self.members) == 1:
                return tensors, count
            memory = self._memory(part)
            prefix, views = memory[:_NUMBERS].view(torch.int64), part.replica.layout.views(memory[PREFIX:])
            if self.is_leader:
                prefix[0] = count
                for view, tensor in zip(views, tensors or (), strict=False):
                    view.copy_(tensor)
            self.broadcast_in_group(memory[:PREFIX])
            count = int(prefix[0])
            if count:
                self.broadcast_in_group(memory)
            return (views if count else None), count

    def snapshot(self, with_state: bool = True) -> dict[str, Any]:
        """Weights, optimizer states and clocks of all optimizers, as of one moment. For leaders.

        Returns:
            ``{"parts": [{"weights": {name: tensor}, "state": {...}, "clock": 0, "method": {...}}], "epoch": {...},
            "trained": [], "groups": {group: what it deposited}}``
        """
        answer, payload = self._data_connection().exchange(m.TakeSnapshot(with_state=with_state), m.Snapshot)
        # Copies: what is unpacked shares one memory, which torch.save refuses if there is more than one dtype.
        tree: dict[str, Any] = tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, unpack(answer.packed, payload)
        )
        return tree

    def deposit(self) -> None:
        """At a meeting, on every rank: what each group alone knows becomes part of the next `snapshot`."""
        if self.is_leader:
            states = [part.replica.own_state(whole=self.steps_here(part)) for part in self.parts]
            packed, buffer = pack(states)
            self._data_connection().exchange(m.Deposit(packed=packed, nbytes=buffer.numel()), m.Deposited, buffer)
        self._world_barrier()

    def ask(self, message: m.Message, expect: type[_Answer], payload: Tensor | None = None) -> tuple[_Answer, Tensor]:
        """Asks the server on the data channel; for leaders. Returns the answer and its payload, uint8."""
        return self._data_connection().exchange(message, expect, payload)

    def _ask(self, part: Part, message: m.Message, payload: Tensor | None = None) -> m.Weights:
        return self._data_connection().exchange(message, m.Weights, payload, self._memory(part)[PREFIX:])[0]

    def _share(self, part: Part, ask: Callable[[], m.Weights], pull: bool = True) -> Pulled:
        """The leader asks the server; its group gets the answer."""
        memory = self._memory(part) if pull else self._memory(part)[:PREFIX]
        prefix, numbers = memory[:_NUMBERS].view(torch.int64), memory[_NUMBERS:PREFIX].view(torch.float64)
        with self.timed():
            if self.is_leader:
                answer = ask()
                prefix[:6] = torch.tensor(
                    [
                        answer.clock,
                        answer.staleness,
                        int(answer.applied),
                        answer.refused_in_row,
                        answer.progress,
                        _STOPS.index(answer.stop),
                    ]
                )
                numbers[0] = answer.note
            self.broadcast_in_group(memory)
        clock, staleness, applied, refused, progress, stop = prefix[:6].tolist()
        self.last.staleness, self.last.applied = staleness, bool(applied)
        self.last.progress, self.last.stop = progress, _STOPS[stop]
        if staleness >= 0:
            part.staleness.append(staleness)
        self.watch_refusals(bool(applied), refused)
        tensors = part.replica.layout.views(memory[PREFIX:]) if pull else ()
        return Pulled(tensors, clock, float(numbers[0]), refused=not applied)

    def watch_refusals(self, applied: bool, in_row: int) -> None:
        """Warns of what was not finite, and gives up when there is no end to it.

        Raises:
            NonFiniteGradients: the server refused too many pushes in a row.
        """
        if in_row >= self.options.refusals:
            raise NonFiniteGradients(
                f"what group {self.group} pushed was NaN or infinite {in_row} times in a row, and none of it was"
                " applied: lower the learning rate, clip gradients (gradient_clip_val), or use precision='16-mixed'"
                " with its loss scaling; more groups need less momentum; refusals= sets how many are borne"
            )
        if not applied and in_row == 1:
            _log.warning(
                "group %d pushed something that is not finite; it was refused and the weights did not move", self.group
            )

    def broadcast_in_group(self, memory: Tensor) -> None:
        """From the leader to its group."""
        if len(self.members) == 1:
            return
        shared = memory.to(self.device) if self.device.type != "cpu" else memory
        dist.broadcast(shared, src=self._source(), group=self.compute_group)
        if shared is not memory:
            memory.copy_(shared)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts time and bytes as those of exchanges."""
        began, moved = time.perf_counter(), self._data.moved if self._data is not None else 0
        yield
        self.last.seconds += time.perf_counter() - began
        if self._data is not None:
            self.last.moved += self._data.moved - moved

    def _memory(self, part: Part) -> Tensor:
        if part.into is None:
            part.into = torch.zeros(PREFIX + part.replica.layout.nbytes, dtype=torch.uint8)
        return part.into

    def _source(self) -> int:
        # torch takes src as a rank of the default group if that is the very group, as a global one otherwise
        return 0 if self.compute_group is dist.group.WORLD else self.members[0]

    def _data_connection(self) -> DataConnection:
        if self._data is None:
            assert self.control is not None
            self._data = DataConnection(
                self.control.data_address,
                self.control.ticket,
                self.control.check,
                timeout=self.options.timeout.total_seconds(),
            )
        return self._data

    # --- Regrouping --------------------------------------------------------------------------------------------------

    def regroup(
        self, groups: int, buffers: Iterable[Tensor] = (), speeds: Mapping[int, float] | None = None
    ) -> tuple[tuple[int, int], ...]:
        """All live ranks form other groups, at one point of their programs. Weights and optimizer state carry on.

        Args:
            groups: the new number of groups.
            buffers: as in `enter_world`.
            speeds: each live rank's samples per second, the same on all ranks: groups are formed by them, like with
                like. None forms them in the order of ranks.

        Returns:
            The ranges of the epoch that the server knows to be trained, if there is one group from here on.
        """
        check_groups(groups, len(self.live_ranks))
        if groups > 1:
            self.check_method(groups)
        spans: tuple[tuple[int, int], ...] = ()
        computing, was_synchronous = self._in_compute, self.is_synchronous
        self.enter_world(buffers)
        if was_synchronous:
            if groups == 1:
                return spans
            self._join()
        self._form(groups, speeds)
        self._check_not_shared()
        for part in self.parts:
            part.replica.abandon()
        if was_synchronous:
            self._seed()
        elif self.steps_at_worker:
            self._share_states()
            if self.is_synchronous:
                spans = self.take_states_back()
        elif self.is_synchronous:
            spans = self.take_states_back()
        self._place_heads()
        if self.is_synchronous:
            self.use_default_group(self.compute_group)
        elif computing or was_synchronous:
            self.enter_compute()
        return spans

    def take_states_back(self) -> tuple[tuple[int, int], ...]:
        """This rank's optimizers get the server's state, to step for themselves or to be saved.

        Returns:
            The ranges of the epoch that are trained.
        """
        tree = self.snapshot(with_state=not all(map(self.steps_here, self.parts)))
        for optimizer in dict.fromkeys(part.optimizer for part in self.parts):
            if any(part.optimizer is optimizer and not self.steps_here(part) for part in self.parts):
                plain = optimizer.state_dict()
                optimizer.load_state_dict({**plain, "state": self.whole_state(optimizer, tree)})
        return self._trained_spans(tree)

    def whole_state(self, optimizer: Optimizer, tree: Mapping[str, Any]) -> dict[int, Any]:
        """An optimizer's state as in its ``state_dict``: the server's, and this rank's own for what steps here.

        Args:
            optimizer: one that was attached.
            tree: from `snapshot`.
        """
        state = dict(optimizer.state_dict()["state"])
        for part, theirs in zip(self.parts, tree["parts"], strict=True):
            if part.optimizer is optimizer and not self.steps_here(part):
                places = places_of(optimizer, set(part.replica.ordered))
                for place, whole in enumerate(places):
                    state.pop(whole, None)
                    if place in theirs["state"]:
                        state[whole] = theirs["state"][place]
        return state

    @staticmethod
    def _trained_spans(tree: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        return tuple((start, stop) for start, stop in tree["trained"])

    def _share_states(self) -> None:
        """Members of a new group may come from different ones: they take up their leader's optimizer state."""
        if len(self.members) == 1:
            return
        for part in (part for part in self.parts if self.steps_here(part)):
            packed, buffer = pack(part.optimizer.state_dict()["state"] if self.is_leader else {})
            head = msgspec.msgpack.encode(packed)
            sizes = torch.tensor([len(head), buffer.numel()], device=self.device)
            dist.broadcast(sizes, src=self._source(), group=self.compute_group)
            flat = torch.empty(int(sizes.sum()), dtype=torch.uint8)
            if self.is_leader:
                flat.copy_(torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), buffer]))
            self.broadcast_in_group(flat)
            if not self.is_leader:
                cut = int(sizes[0])
                theirs = msgspec.msgpack.decode(flat[:cut].numpy().tobytes(), type=Packed)
                state = unpack(theirs, flat[cut:].clone())
                part.optimizer.load_state_dict({**part.optimizer.state_dict(), "state": state})

    # --- How ---------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Connects to the server, which rank 0 has started or which runs elsewhere."""
        if self.control is not None:
            return
        self.start_server()
        address, key, run = self._agree_on_server()
        self._meetings = 0
        layout = Layout(tuple(spec for part in self.parts for spec in part.replica.layout.specs))
        self.control = ControlConnection(address, key, run, self.rank, self.size, layout, on_end=self._on_end)
        register()
        if self._live_world is None:
            self.use_default_group(self._original)
            self._live_world = dist.new_group(range(self.size), timeout=self.options.timeout, backend=BACKEND)
        assert isinstance(self._live_world, LiveWorld)
        self._live_world.connect(self._meet)
        dist.barrier()

    def _agree_on_server(self) -> tuple[str, bytes, str]:
        """Rank 0 tells everyone where the server is; a failure on rank 0 is everyone's error."""
        said: dict[str, str] = {}
        failure: Exception | None = None
        if self.rank == 0:
            try:
                if self.options.server is None:
                    assert self.process is not None
                    said = {"address": self._published(self.process.address()), "key": self._key.hex()}
                else:
                    said = {"address": self.options.server, "key": ""}
            except Exception as error:
                failure, said = error, {"error": str(error)}
            said["run"] = secrets.token_hex(8)
        said = json.loads(self._broadcast_text(json.dumps(said)))
        if failure is not None:
            raise failure
        if "error" in said:
            raise ConfigurationError(f"rank 0 could not start the parameter server: {said['error']}")
        return said["address"], bytes.fromhex(said["key"]) if said["key"] else load_key(), said["run"]

    def _broadcast_text(self, text: str) -> str:
        """Text from rank 0 to every rank, over torch.distributed's own group."""
        group = self.compute_group if self.is_synchronous else self._original
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)  # may be empty
        size = torch.tensor(data.numel(), device=self.device)
        dist.broadcast(size, src=0, group=group)
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, src=0, group=group)
        return bytes(data.cpu().numpy()).decode()

    def _form(self, groups: int | None = None, speeds: Mapping[int, float] | None = None) -> None:
        """Rank 0 forms the groups at the server, out of whoever is alive there, and tells the others.

        Args:
            groups: the new number of groups; None forms the groups of ``topology``.
            speeds: as in `regroup`.
        """
        assert self.control is not None
        self._world_barrier()
        if self.rank == 0:
            topology = self._form_until_accepted(groups, speeds)
        said = self._meet("topology", json.dumps(topology.groups).encode() if self.rank == 0 else b"")
        self.topology = Topology(tuple(tuple(members) for members in json.loads(said[0][1])))
        self.generation += 1
        if self.rank not in self.topology.ranks:
            self.control.check()
        _ = self.compute_group  # made now, while all its members are here
        for part in self.parts:
            # As formed, not as alive: mates hear of a loss at different moments, and must draw the same peer.
            part.replica.group, part.replica.peers = self.group, self.topology.alive
        self._meet_peers()

    def _meet_peers(self) -> None:
        """Where the method has groups talk to each other, leaders tell each other where they listen."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        if not self.method.talks_to_peers or self.is_synchronous:
            return
        assert self.control is not None
        layouts = [part.replica.layout for part in self.parts]
        host = own_host(self.control.address)
        if host.startswith("127.") and len(self._ranks_per_node) > 1:
            host = "0.0.0.0"  # the server is on this machine, and the other nodes know it by another address
        socket = PeerSocket(host, layouts) if self.is_leader else None
        mine = Address(self.group, self._published(socket.address), socket.ticket) if socket is not None else None
        said = self._meet("peers", msgspec.json.encode(mine) if mine else b"")
        if socket is not None:
            others = [msgspec.json.decode(payload, type=Address) for _, payload in said if payload]
            self._peers = Peers(
                socket,
                PeerConnections(
                    {other.group: other for other in others if other.group != self.group},
                    layouts,
                    lambda group: group not in self.live_groups,
                    self.control.check,
                ),
            )

    def _form_until_accepted(self, groups: int | None, speeds: Mapping[int, float] | None) -> Topology:
        assert self.control is not None
        while True:
            topology = self.topology if groups is None else self._topology_of_the_living(groups, speeds)
            form = m.Form(
                generation=self.generation + 1,
                groups=topology.groups,
                method=m.method_to_wire(self.method),
                keep_epoch=groups is not None and not self.is_synchronous,
            )
            try:
                self.control.request(form, m.Formed)
                return topology
            except Refused:
                # A rank died this very moment and the notice is on its way: form without it.
                if groups is None or topology.ranks == self.live_ranks:
                    raise

    def _topology_of_the_living(self, groups: int, speeds: Mapping[int, float] | None) -> Topology:
        if speeds is None:
            return Topology.of(self.live_ranks, groups)
        return Topology.by_speed({rank: speeds[rank] for rank in self.live_ranks if rank in speeds}, groups)

    def _seed(self) -> None:
        """Rank 0 hands weights and optimizer states to the server; every rank's own state is given up."""
        if self.rank == 0:
            parts = [
                {
                    "optimizer": None if self.steps_here(part) else self._describe(part),
                    "weights": {name: p.detach() for name, p in part.replica.parameters.items()},
                    "clock": part.replica.clock,
                    "method": state,
                    "head": self._describe_head(part),
                }
                for part, state in zip_longest(self.parts, self._resumed.get("server", ()))
            ]
            packed, buffer = pack({"parts": parts})
            self._data_connection().exchange(m.Seed(packed=packed, nbytes=buffer.numel()), m.Seeded, buffer)
        for part in self.parts:
            for parameter in () if self.steps_here(part) else part.replica.ordered:
                part.optimizer.state.pop(parameter, None)
        self._world_barrier()

    @staticmethod
    def _describe(part: Part) -> dict[str, Any]:
        return describe(part.optimizer, {p: name for name, p in part.replica.parameters.items()})

    @staticmethod
    def _describe_head(part: Part) -> dict[str, Any] | None:
        if part.head is None:
            return None
        name, module = part.head
        seed = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(torch.initial_seed())))
        return {"name": name, "module": describe_module(module), "seed": seed}

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all live ranks."""
        group = self._world_group() if self.control is not None else self._original
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu" if self.control else self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        largest: list[int] = tensor.tolist()
        return largest

    def connect(self) -> None:
        """Joins the server while there is one group yet: forming several takes less then. All ranks call it."""
        self._join()

    def tell(self, text: str) -> str:
        """What rank 0 says, on every rank; while there is one group. All ranks call it."""
        return self._broadcast_text(text)

    def _world_barrier(self) -> None:
        before = dist.group.WORLD
        dist.GroupMember.WORLD = self._world_group()
        dist.barrier()
        dist.GroupMember.WORLD = before

    def _world_group(self) -> LiveWorld:
        assert self._live_world is not None
        return self._live_world

    def _compute_group(self, topology: Topology) -> Any:
        """The process group of this rank's group in a topology; made when first needed, then kept.

        Every rank makes one for each topology, even if it has one of the same ranks: torch names a group by its ranks
        and by the number of groups that the rank has, and mates must arrive at the same name.
        """
        members = topology.members(topology.group_of(self.rank))
        original = self._original
        if len(members) == self.size:
            return original
        if topology.groups not in self._groups:
            before = dist.group.WORLD
            dist.GroupMember.WORLD = original
            self._groups[topology.groups] = dist.new_group(
                members, timeout=self.options.timeout, use_local_synchronization=True
            )
            dist.GroupMember.WORLD = before
        return self._groups[topology.groups]

    def _meet(self, what: str, payload: bytes) -> list[tuple[int, bytes]]:
        assert self.control is not None
        message = m.Contribute(number=self._meetings, what=what)
        self._meetings += 1
        gathered, parts = self.control.request_payload(
            message, m.Gathered, payload, timeout=self.options.timeout.total_seconds()
        )
        return list(zip(gathered.ranks, parts, strict=True))

    def _average(self, buffers: Iterable[Tensor]) -> None:
        """The mean over groups of every floating-point buffer; of whole numbers (they count things) the largest."""
        everything = [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
        floating = [b for b in everything if b.is_floating_point()]
        counting = [b for b in everything if not b.is_floating_point() and b.dtype != torch.bool]
        if floating:
            # The last number counts the leaders that spoke, so that all ranks divide by the same.
            flat = torch.cat([*(b.detach().double().cpu().flatten() for b in floating), torch.ones(1).double()])
            if not self.is_leader:
                flat.zero_()  # not multiplied: a mask may hold infinities
            dist.all_reduce(flat)
            _scatter(flat[:-1] / flat[-1], floating)
        if counting:
            flat = torch.cat([b.detach().long().cpu().flatten() for b in counting])
            dist.all_reduce(flat, op=dist.ReduceOp.MAX)
            _scatter(flat, counting)

    def _on_end(self, error: OmniError) -> None:
        """Called from the connection's thread: this rank must stop.

        The trainer finds out at its next exchange. If it is stuck in a collective with the dead it never does, so it
        gets a moment and then no more.
        """

        def end() -> None:
            if not self._closed.wait(GRACE):
                _log.critical("rank %d stops: %s", self.rank, error)
                os._exit(1)

        threading.Thread(target=end, name="omni-end", daemon=True).start()

    def _host(self) -> str:
        if self.options.host is not None:
            return self.options.host
        if len(self._ranks_per_node) == 1:
            return "127.0.0.1"
        address = _resolve(self._main_host())
        # Many systems call themselves 127.0.1.1; the other nodes know this one by another address.
        return "0.0.0.0" if address.startswith("127.") and not _is_loopback(self._main_host()) else address

    def _published(self, address: str) -> str:
        """The embedded server's address as the other ranks can reach it."""
        return address.replace("//0.0.0.0:", f"//{self._main_host()}:")

    @staticmethod
    def _main_host() -> str:
        return os.environ.get("MASTER_ADDR") or socket.gethostname()


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


def _count_ranks_per_node(size: int) -> list[int]:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # torchrun's word
    full, rest = divmod(size, local)
    return [local] * full + ([rest] if rest else [])


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "0.0.0.0"


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.copy_(part.view_as(tensor))


class _Training:
    """The context of `World.training`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> World:
        self._world.begin()
        self._world.enter_compute()
        return self._world

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._world.fail(f"{type(error).__name__}: {error}")
            return
        self._world.enter_world()
        for part in self._world.parts:
            part.replica.abandon()
        if self._world.rank == 0 and not self._world.is_synchronous:
            self._world.take_states_back()
        self._world.close()
