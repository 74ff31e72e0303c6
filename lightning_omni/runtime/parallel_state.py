"""The position of a rank: its compute group, the live ranks, and agreements among them."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from lightning_omni.checks import check_kind, plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.group.core import GroupCore
from lightning_omni.methods import Method
from lightning_omni.runtime._private import forget_meshes
from lightning_omni.runtime.model.meshes import ModelParallel, columns_of, evenly, mesh_of, rows_of, sizes_in
from lightning_omni.runtime.model.reduction import Reduction
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.model.tensor_sync import agree
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.runtime.process_groups import ProcessGroups, check_none_lost, check_not_in_loop
from lightning_omni.runtime.registration import GroupRegistration
from lightning_omni.runtime.server_process import RunServer
from lightning_omni.topology import RECORDER, Topology
from lightning_omni.transport.connections import Control
from lightning_omni.wire.all_reduce import AllReduce
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.formats.base import WireFormat
from lightning_omni.wire.partition import Partition, is_elementwise


class Communication(NamedTuple):
    """The settings for exchanges across groups, and for averages inside them (``all_reduce``)."""

    method: Method
    wire_format: WireFormat
    overlap: bool
    all_reduce: AllReduce


def default_device(backend: str, current_gpu: Callable[[], int] = torch.cuda.current_device) -> torch.device:
    """Return the default device of the weights: NCCL refuses tensors on the CPU."""
    return torch.device("cuda", current_gpu()) if backend == dist.Backend.NCCL else torch.device("cpu")


class ParallelState:
    """The position of this rank among all ranks. The arguments are those of `World`.

    Attributes:
        rank: this rank, as all groups of the run number it.
        torch_rank: this rank, as torch.distributed numbers all launched ones.
        is_synchronous: whether ``topology`` has one group; no server is then in the path, unless it joins on its own.
        group: number of this rank's group; -1 if it was lost.
        members: ranks of this rank's group; the first one leads.
        exchanges: whether this rank exchanges for its group: the leader does, or the first replica of a sharded model.
        generation: number of times that groups were formed.
        control: the connection by which ranks synchronize; None unless the server was joined.
        parts: the exchanged part of each optimizer.
        names: names of parameters in modules that a loop without Lightning has wrapped.
        steps: optimizer steps that Lightning has made in one group, which no server's clock counts.
        rate_factor: factor of all learning rates in steps of several groups; the parameter groups hold them without it.
        shards: number of ranks that hold one replica of the model together.
        holders: ranks, as torch numbers them, by the replica of the model that they hold together.
        tensor_parallel: number of neighbours that compute on the same samples together.
        is_computing: whether groups that exchange train; the default process group is then this rank's group.
        is_entering: whether the group has joined groups that train, and is about to train.
        ever_lost: ranks that were lost in loops or fits that have ended; `World.training` clears it.
        failures: reasons of ranks that have failed by themselves in these.
        where: returns this rank's position in its loop, in words.
        registration: the reservation of a group that joins on its own, whose ranks are the only ones in
            torch.distributed; None where all ranks were started together.
    """

    def __init__(
        self,
        groups: int | None = None,
        device: torch.device | str | None = None,
        options: WorldOptions | None = None,
        ranks_per_node: Sequence[int] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("call torch.distributed.init_process_group before World(...)")
        check_none_lost()
        check_not_in_loop()
        check_kind("options", options, (WorldOptions, type(None)), 'WorldOptions(method="local_sgd", ...), or None')
        options = options or WorldOptions()
        options = self.options = options if groups is None else replace(options, groups=groups)
        self.core = GroupCore(
            options.resolved_method(),
            options.compression.wire_format,
            options.server.max_nonfinite_pushes,
            options.overlap,
        )
        self.control: Control | None = None
        self.where: Callable[[], str] = str
        self.device = default_device(dist.get_backend()) if device is None else torch.device(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.torch_rank = self.rank
        joins, sharding = bool(options.elastic.join), options.model_parallel
        self.process_groups = ProcessGroups(self.rank, self.size, options.timeout, self.device, is_group=joins)
        given = None if ranks_per_node is None else self._checked(ranks_per_node)
        self.check_same({"ranks_per_node": repr(given), **options.of_all_ranks})
        ranks_per_node = given or self._count_ranks_per_node()
        wanted = 1 if joins else options.groups
        topology = Topology.by_node(ranks_per_node) if wanted is None else evenly(self.size, wanted, sharding)
        self.method.check(len(topology.alive))
        self.is_sharded = options.is_sharded
        self.shards = self.tensor_parallel = 1
        if sharding is not None:
            samples, self.tensor_parallel = sizes_in(topology, sharding, ranks_per_node, joins)
            self.shards = samples * self.tensor_parallel
        self.holders = rows_of(topology, self.shards)
        self.registration: GroupRegistration | None = None
        if joins:
            self.registration = GroupRegistration(options, self.rank, self.size, self.broadcast_text_at_launch)
            first = self.registration.first
            self.rank += first
            topology = Topology((tuple(range(first, first + self.size)),))
        self.topology = topology
        self._records = self.rank == RECORDER
        self._is_with_recorder = RECORDER in self.members
        self.generation = 0
        self.parts: list[Part] = []
        self.names: dict[Parameter, str] = {}
        self.steps = 0
        self.rate_factor = 1.0
        self.server = RunServer(self.rank, options, ranks_per_node, self.shards if self.is_sharded else None)
        self.is_computing = self.is_entering = self.joined_since_sync = False
        self.ever_lost: set[int] = set()
        self.failures: tuple[str, ...] = ()
        self._mesh: DeviceMesh | None = None
        self.reduction = Reduction(options.compression.all_reduce_format)

    def _checked(self, ranks_per_node: Sequence[int]) -> list[int]:
        is_list = isinstance(ranks_per_node, Sequence) and not isinstance(ranks_per_node, str)
        found = list(map(plain, ranks_per_node)) if is_list else []
        if not all(type(count) is int and count >= 0 for count in found) or sum(found) != self.size:
            raise ConfigurationError(
                f"ranks_per_node={ranks_per_node!r}: torch.distributed has {self.size} ranks; pass a list of numbers of"
                " ranks that add up to that, with Lightning by devices= and num_nodes="
            )
        return found

    def _count_ranks_per_node(self) -> list[int]:
        """Return the number of ranks on each node, from torchrun or host names. All ranks call it."""
        local, host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), zlib.crc32(socket.gethostname().encode())
        sizes, hosts = zip(*self.process_groups.gather([local, host]), strict=True)
        found = list[int]()
        if not all(sizes):  # srun and mpirun set no LOCAL_WORLD_SIZE
            found = [len([*of_host]) for _, of_host in groupby(hosts)]
            if len(found) > len(set(hosts)):
                raise ConfigurationError(
                    f"ranks_per_node=None: the {self.size} ranks are not in the order of their hosts, and"
                    " LOCAL_WORLD_SIZE, which torchrun sets, is missing; give the ranks of each host successive numbers"
                    " (srun --distribution=block, mpirun --map-by slot)"
                )
            return found
        while (first := sum(found)) < self.size:
            found.append(min(sizes[first], self.size - first))
        return found

    def check_same(self, settings: Mapping[str, str]) -> None:
        """Raise `ConfigurationError` unless all ranks started together, which call it, pass the same settings."""
        remedy = "all ranks train in one run: pass the same on each of them, and set the same environment variables"
        agree(
            {f"setting {name}": text for name, text in settings.items()}, self.torch_rank, self.all_reduce_max, remedy
        )

    # --- Which rank is where ------------------------------------------------------------------------------------------

    @property
    def method(self) -> Method:
        """Return the method; set another only before other groups are formed."""
        return self.core.method

    @method.setter
    def method(self, method: Method) -> None:
        self.core.method = method

    @property
    def communication(self) -> Communication:
        """Return the settings for communication; set others only before groups are formed and modules wrapped."""
        return Communication(self.core.method, self.core.wire_format, self.core.overlap, self.reduction.format)

    @communication.setter
    def communication(self, communication: Communication) -> None:
        self.core.method, self.core.wire_format, self.core.overlap, self.reduction.format = communication

    @property
    def topology(self) -> Topology:
        """Return the compute groups. Setting them sets this rank's place among them."""
        return self._topology

    @topology.setter
    def topology(self, topology: Topology) -> None:
        self._topology, self.is_synchronous = topology, topology.is_synchronous
        self.group: int = topology.find(self.rank)
        self.members: tuple[int, ...] = topology.members(self.group) if self.group >= 0 else ()
        self.is_leader = self.rank in self.members[:1]
        self.exchanges = self.rank in self.members[: self.shards]

    @property
    def torch_members(self) -> Sequence[int]:
        """Return `members`, as torch.distributed numbers them."""
        return self.members if self.registration is None else range(self.size)

    @property
    def is_recorder(self) -> bool:
        """Return whether this rank is the recorder, which forms groups, transfers weights, logs and saves for the run.

        Where groups join on their own, it is the lowest live rank, agreed on where ranks synchronize. While they
        compute it changes only in `follow_recorder`.
        """
        if self.registration is not None and self.control is not None and not self.is_computing:
            self._records = self.rank == self.process_groups.live.ranks[0]
        return self._records

    def follow_recorder(self) -> bool:
        """Become the recorder if the server reports so while groups compute; return `is_recorder`."""
        status = self.control.status if self.control is not None else None
        if self.registration is not None and status is not None and self.is_computing:
            self._records |= self.rank == status.recorder  # never reset, because the status may be old
        return self.is_recorder

    @property
    def is_with_recorder(self) -> bool:
        """Return whether this rank holds a replica of the model together with the recorder.

        Where groups join on their own, ranks agree on it where they synchronize, or in `World.agree_on_recorder`.
        """
        if self.registration is None:
            return RECORDER in self.members and self.exchanges
        if self.control is not None and not self.is_computing:
            self._is_with_recorder = self.process_groups.live.ranks[0] in self.members
        return self._is_with_recorder and self.exchanges

    @property
    def share(self) -> tuple[int, int] | None:
        """Return this rank's share of a sharded model: index and count.

        None without one, or in one group without a server.
        """
        if not self.is_sharded or (self.is_synchronous and self.registration is None and self.control is None):
            return None
        return self.members.index(self.rank) % self.shards, self.shards

    @property
    def replicas(self) -> int:
        """Return the number of replicas of the model in this rank's group."""
        return len(self.members) // self.shards

    @property
    def data_rank(self) -> tuple[int, int]:
        """Return the index of this rank's part of its group's samples, and the number of parts."""
        return self.members.index(self.rank) // self.tensor_parallel, len(self.members) // self.tensor_parallel

    @property
    def owns_state(self) -> bool:
        """Return whether this rank sends the run's state, or its share, to the server and reads it back."""
        return self.is_recorder or (self.share is not None and self.is_with_recorder)

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that hold a replica with this one, the same after a regrouping.

        All ranks make the first access, before training begins.
        """
        if self._mesh is None:
            for topology in self._parted:
                self.process_groups.make(topology, stays=True)
            self.make_groups()
            groups = [self.process_groups.compute(topology) for topology in self._parted]
            own = self.holders.members(self.holders.group_of(self.torch_rank))
            forget_meshes()
            self._mesh = mesh_of(own, groups, self.tensor_parallel, self.device.type)
        return self._mesh

    @property
    def _parted(self) -> list[Topology]:
        """Return the ranks that hold a replica of the model, and their tensor-parallel columns and rows, if any."""
        if not isinstance(self.options.model_parallel, ModelParallel):
            return [self.holders]
        return [self.holders, *(part(self.holders, self.tensor_parallel) for part in (columns_of, rows_of))]

    @property
    def _compute_groups(self) -> Topology:
        return self.topology if self.registration is None else Topology.even(self.size, 1)

    @property
    def _alike(self) -> Topology:
        """Return each group's ranks with the same part of the model."""
        return columns_of(self._compute_groups, self.shards) if self.is_sharded else self._compute_groups

    @property
    def has_replicas(self) -> bool:
        """Return whether any group holds several replicas of a sharded model."""
        return self.is_sharded and any(len(members) > self.shards for members in self._compute_groups.groups)

    def make_groups(self, gather: Callable[[list[int]], list[list[int]]] | None = None) -> None:
        """Create the process groups of the compute groups, and of ranks with the same part of a sharded model.

        All live ranks call it; ``gather`` is as in `ProcessGroups.make`.
        """
        self.process_groups.make(self._compute_groups, gather)
        if self.has_replicas:
            self.process_groups.make(self._alike, gather)

    @property
    def groups_inside(self) -> list[Any]:
        """Return the process group of this rank's compute group, and its process groups inside."""
        if not self.is_sharded:
            return [self.compute_group]
        topologies = [self._compute_groups, *self._parted, *([self._alike] if self.has_replicas else [])]
        return list({id(group): group for group in map(self.process_groups.compute, topologies)}.values())

    def abandon_groups(self) -> None:
        """Destroy this failed rank's `groups_inside`."""
        for topology in (self._compute_groups, self._alike, *self._parted):
            self.process_groups.abandon(topology)
        self._mesh = None

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the ranks that the server has reported as lost."""
        return self.control.lost if self.control else ()

    @property
    def joins_running_run(self) -> bool:
        """Return whether this rank's group joins, or has joined, a running run."""
        return self.registration is not None and not self.registration.begins

    @property
    def has_joined(self) -> bool:
        """Return whether this rank's group has joined a running run."""
        return self.joins_running_run and self.control is not None

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """Return the ranks that are not lost; in a group that joined on its own, its own."""
        ranks = range(self.size) if self.registration is None else self.members
        return tuple(rank for rank in ranks if rank not in self.lost)

    @property
    def live_groups(self) -> tuple[int, ...]:
        """Return the numbers of the groups without a lost rank."""
        lost = set(self.lost)
        return tuple(g for g in self.topology.alive if not lost.intersection(self.topology.members(g)))

    @property
    def steps_at_worker(self) -> bool:
        """Return whether the user's optimizer steps on every rank."""
        return self.method.steps_at == "worker"

    @property
    def servers(self) -> int:
        """Return the number of servers that divide this rank's exchanged parameters."""
        return 1 if self.control is None or self.is_sharded else self.control.servers

    @property
    def server_address(self) -> str:
        """Return the server's address; empty without one."""
        return self.control.address if self.control else ""

    @property
    def compute_group(self) -> Any:
        """Return the process group of `members`."""
        return self.process_groups.compute(self.topology)

    @property
    def replica_group(self) -> Any:
        """Return the process group of the members with this rank's part of the model."""
        return self.process_groups.compute(self._alike)

    @property
    def holder_group(self) -> Any:
        """Return the process group of the ranks that hold a replica with this one."""
        return self.process_groups.compute(self.holders)

    def split_of(self, part: Part, servers: int) -> Partition:
        """Return the division of an optimizer's parameters over so many servers."""
        if servers == 1:
            return Partition.whole(part.replica.layout)
        return Partition.of(part.replica.layout, servers, is_elementwise(self.method, part.optimizer))

    @property
    def joined(self) -> Control:
        """Return the connection to the server, which this rank has joined."""
        assert self.control is not None
        return self.control

    def empty(self, nbytes: int) -> Tensor:
        """Return memory for exchanges with the server: see `Control.empty`."""
        return self.joined.empty(nbytes)

    def learn_names(self, module: Module) -> None:
        """Record a module's names of its parameters, made unique among modules."""
        taken = set(self.names.values())
        for name, parameter in module.named_parameters():
            if parameter not in self.names:
                while name in taken:
                    name += "'"
                self.names[parameter] = name
                taken.add(name)

    # --- Among all ranks ---------------------------------------------------------------------------------------------

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over all live ranks, which call it."""
        groups = self.process_groups
        return groups.largest(numbers, groups.live if self.control is not None else groups.original)

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every live rank; in a group that has joined on its own, that of its first rank.

        All call it; several groups while they are synchronized.
        """
        if self.is_synchronous:
            return self.process_groups.broadcast_text(text, self.compute_group)
        if self.control is None:
            return self.broadcast_text_at_launch(text)
        mine = text.encode() if self.rank == RECORDER else b""
        return dict(self.process_groups.live.contribute("a text of rank 0", mine))[RECORDER].decode()

    def broadcast_text_at_launch(self, text: str) -> str:
        """Return the first launched rank's text on every launched rank, before any can be lost."""
        return self.process_groups.broadcast_text(text, self.process_groups.original)

    def broadcast_from_recorder(self, tree: Any) -> Any:
        """Return the recorder's tree of plain values and tensors on all live ranks; each its own if that one has died.

        All call it, connected to the server. The tree has at most `LARGEST_UPLOAD` bytes.
        """
        packed, buffer = pack(tree)
        mine = msgspec.msgpack.encode((packed, bytes(buffer.numpy()))) if self.is_recorder else b""
        data = b"".join(each for _, each in self.process_groups.live.contribute("the recorder's values", mine))
        if not data:
            return tree
        packed, values = msgspec.msgpack.decode(data, type=tuple[Packed, bytes])
        return unpack(packed, torch.tensor([*values], dtype=torch.uint8), copy=True)

    def barrier(self) -> None:
        """Wait until all live ranks call this."""
        dist.barrier(self.process_groups.live)  # by torch's frame `user_collective_of` finds the user's call
