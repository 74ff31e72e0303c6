"""The settings of a run, except its size."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lightning_omni.checks import check_kind, check_number, check_whole, keep_plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method, checked, method_named
from lightning_omni.methods.overlap import check_overlap
from lightning_omni.runtime.model.meshes import Inside, ModelParallel, shown
from lightning_omni.topology import check_groups
from lightning_omni.transport.base import TRANSPORTS, Transport, name_of
from lightning_omni.transport.zeromq import ZeroMQ
from lightning_omni.transport.zeromq.keys import key_of_environment
from lightning_omni.wire.all_reduce import EXACT, AllReduce, all_reduce_of
from lightning_omni.wire.formats import Wire, wire_of
from lightning_omni.wire.formats.base import WireFormat
from lightning_omni.wire.partition import check_by_member


@dataclass(frozen=True)
class WorldOptions:
    """All settings of a run except its size, for `World`. All ranks must pass the same.

    `OmniStrategy` describes each of them at length, as its argument of the same name.

    Attributes:
        groups: number of compute groups, or None for one group per node.
        method: how groups exchange, by name or as a `lightning_omni.methods.Method`.
        wire: encoding of pushes: ``"fp32"`` (uncompressed), ``"bf16"``, ``"fp16"``, ``"int8"`` or ``"topk:0.01"``, or a
            `lightning_omni.wire.formats.base.WireFormat`; for pushes and answers ``{"push": "int8", "pull":
            "bf16"}``.
        overlap: whether a group computes its next gradient during an exchange, which makes it one step staler; for
            methods whose optimizer steps at the server.
        all_reduce: how gradients are averaged inside a group: ``"fp32"`` (uncompressed), ``"bf16"``, ``"fp16"``, or
            ``"powersgd:4"`` (products of matrices with 4 columns); or a `lightning_omni.wire.all_reduce.AllReduce`.
        server: ``"tcp://host:port"`` of a running server; None starts one beside rank 0, the *embedded* server.
        servers: number of servers, each of which holds a partition of the parameters, so that no single link carries
            everything: a number, which rank 0 starts on its node, or ``"per-node"``, one on each node. A server that is
            already running reports its number of servers to the ranks.
        host: address that the embedded server binds. None uses no port at all on one node (sockets in a directory that
            only this user may enter), and on several the address at which the other nodes reach rank 0 (MASTER_ADDR).
        encryption: encryption of connections over the network: ``"curve"``, or ``"off"`` on a network whose every user
            you trust; a server that is already running must use the same.
        transport: the connection between ranks and server; None is ZeroMQ, with that ``encryption``.
        save_every: seconds between two saves of the embedded server's state, from which rank 0 restarts it if it dies;
            with None nothing is saved, and the run ends if the server dies.
        record: file for a record of everything that changes the weights, written by the embedded server; see
            `lightning_omni.simulator.replay`.
        server_threads: number of threads for the embedded server's arithmetic.
        join: whether the ranks of this launcher are a group that joins the run of ``server`` on its own, at any time;
            see docs/joining.md.
        heartbeat_timeout: seconds of silence after which a rank counts as dead, at least 2.
        progress_timeout: seconds, at least 2, after which the embedded server evicts a group that has trained, is alive
            and makes no progress; None for never.
        timeout: time after which a collective that does not complete is an error.
        max_nonfinite_pushes: number of pushes in a row with NaN or infinite gradients that a group may make before the
            run ends.
        inside: how the members of a group hold the model: ``"ddp"``, each the whole model; or sharded, each with a part
            of every parameter, which it exchanges with its own server: ``"fsdp"``, in rows; or a `ModelParallel`, for a
            module that is parallelized on the group's mesh.
        shards: with ``inside="fsdp"``, ranks that hold one replica of the model together; each group consists of one or
            more replicas. None is the size of the smallest group.
    """

    groups: int | None = None
    method: str | Method = "async_sgd"
    wire: Wire = "fp32"
    overlap: bool = False
    all_reduce: str | AllReduce = "fp32"
    server: str | None = None
    servers: int | Literal["per-node"] = 1
    host: str | None = None
    encryption: str = "curve"
    transport: Transport | None = None
    save_every: float | None = 30.0
    record: str | None = None
    server_threads: int = 1
    join: bool = False
    heartbeat_timeout: float = 30.0
    progress_timeout: float | None = 600.0
    timeout: timedelta = timedelta(minutes=30)
    max_nonfinite_pushes: int = 50
    inside: Inside = "ddp"
    shards: int | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        if self.groups is not None:
            check_groups(self.groups, sys.maxsize)
        self._check_values()
        key_of_environment()  # raises its errors now, before the ranks are started
        transport = self.resolved_transport()
        if self.server is not None:
            transport.check_address(self.server)
        if self.record is not None and self.server is not None:
            raise ConfigurationError(
                f"record={self.record!r}: the server at {self.server} runs already; start it with"
                " lightning-omni serve --record FILE"
            )
        self._check_servers(transport)
        self._check_join(transport)
        self._check_inside(transport)
        self._check_all_reduce()
        method = self.resolved_method()
        self.resolved_wire().check(method)
        if self.overlap:
            check_overlap(method)
        if self.groups is not None:
            method.check(self.groups)

    def _check_values(self) -> None:
        """Check each value by itself: its type and range."""
        text = (str, type(None))
        check_kind(
            "method", self.method, (str, Method), 'a name such as "hardsync", or a value such as DiLoCo(period=50)'
        )
        check_kind("server", self.server, text, 'the address of a server, such as "tcp://host:5555", or None')
        check_kind("host", self.host, text, "an address, or None")
        late = (
            "a finite number of seconds, at least 2: ranks give two signs of life a second, and a busy one may be late"
        )
        check_number("heartbeat_timeout", self.heartbeat_timeout, late, low=2, below=math.inf)
        check_whole("max_nonfinite_pushes", self.max_nonfinite_pushes, "a number of pushes, 1 or more", low=1)
        if not (isinstance(self.timeout, timedelta) and self.timeout > timedelta(0)):
            raise ConfigurationError(f"timeout={self.timeout!r}: pass a timedelta such as timedelta(minutes=30)")
        check_whole("server_threads", self.server_threads, "a number of threads, 1 or more", low=1)
        check_kind("record", self.record, (*text, os.PathLike), "a file, or None")
        given = 'a name such as "int8", a value such as wire_formats.TopK(fraction=0.001), or both ways'
        check_kind("wire", self.wire, (str, WireFormat, Mapping), given)
        check_kind("overlap", self.overlap, bool, "True or False")
        if self.servers != "per-node":
            check_whole("servers", self.servers, 'a number of servers, 1 or more, or "per-node"', low=1)
        check_kind("join", self.join, bool, "True or False")
        if self.save_every is not None:
            seconds = "the seconds between two saves, such as 30, or None to save nothing"
            check_number("save_every", self.save_every, seconds, above=0, below=math.inf)
        if self.inside not in ("ddp", "fsdp") and not isinstance(self.inside, ModelParallel):
            raise ConfigurationError(f'inside={self.inside!r}: pass "ddp", "fsdp" or a ModelParallel(...)')
        if self.shards is not None:
            ranks = "the number of ranks that hold one replica of the model, 2 or more, or None"
            check_whole("shards", self.shards, ranks, low=2)
        if self.progress_timeout is not None:
            longest = "seconds, at least 2 and more than any batch or epoch's end takes, or None"
            check_number("progress_timeout", self.progress_timeout, longest, low=2, below=math.inf)
        check_kind(
            "all_reduce",
            self.all_reduce,
            (str, AllReduce),
            'a name such as "powersgd:4", or a value such as PowerSGD(rank=4)',
        )

    def _check_servers(self, transport: Transport) -> None:
        if self.servers == 1:
            return
        if self.server is not None:
            raise ConfigurationError(
                f"servers={self.servers!r} and server={self.server!r}: the number of servers is set where they are"
                " started, with lightning-omni serve --servers N; leave servers= out"
            )
        if type(transport).follow is Transport.follow:
            raise ConfigurationError(
                f"servers={self.servers!r} and transport={name_of(transport)!r}: with this transport one server holds"
                " all weights; leave servers= out"
            )

    def _check_join(self, transport: Transport) -> None:
        if not self.join:
            return
        if self.server is None:
            raise ConfigurationError(
                "join=True without server=: pass the address at which lightning-omni serve runs,"
                ' such as "tcp://host:5555"'
            )
        if self.groups not in (None, 1):
            raise ConfigurationError(
                f"groups={self.groups} and join=True: what one launcher starts is one group of the run; leave groups="
                " out, and start each group by itself"
            )
        method = self.resolved_method()
        if method.talks_to_peers:
            raise ConfigurationError(
                f"method={type(method).__name__}() and join=True: its groups exchange with those that were formed with"
                " them, and never with one that joins later; pass another method"
            )
        if not isinstance(transport, ZeroMQ):
            raise ConfigurationError(
                f"transport={name_of(transport)!r} and join=True: groups join over ZeroMQ; leave transport= out"
            )

    def _check_inside(self, transport: Transport) -> None:
        given = shown(self.inside)
        if self.shards is not None and self.inside != "fsdp":
            instead = (
                "data_parallel_size= times tensor_parallel_size= is their number; leave shards= out"
                if self.is_sharded
                else 'each rank holds the whole model; leave shards= out, or pass inside="fsdp"'
            )
            raise ConfigurationError(f"shards={self.shards} and {given}: {instead}")
        if not self.is_sharded:
            return
        check_by_member(self.resolved_method(), given)
        if self.servers != 1:
            raise ConfigurationError(
                f"servers={self.servers!r} and {given}: each member of a group has a server for its share, so"
                " their number is that of the shards; leave servers= out"
            )
        if self.record is not None:
            raise ConfigurationError(
                f"record={self.record!r} and {given}: a record is replayed with groups that hold the model whole;"
                ' leave record= out, or pass inside="ddp"'
            )
        if type(transport).follow is Transport.follow:
            raise ConfigurationError(
                f"{given} and transport={name_of(transport)!r}: with this transport there is one server, and each"
                ' member of a group needs one; leave transport= out, or pass inside="ddp"'
            )

    def _check_all_reduce(self) -> None:
        if self.resolved_all_reduce() == EXACT:
            return
        if self.is_sharded:
            raise ConfigurationError(
                f"all_reduce={self.all_reduce!r} and {shown(self.inside)}: FSDP2 averages what it shards; leave"
                ' all_reduce= out, or pass inside="ddp"'
            )
        if self.record is not None:
            raise ConfigurationError(
                f"all_reduce={self.all_reduce!r} and record={self.record!r}: a record is replayed with gradients that"
                " the members of a group average as they are; leave one of them out"
            )

    @property
    def is_sharded(self) -> bool:
        """Return whether the members of a group hold the model together."""
        return self.inside != "ddp"

    def resolved_method(self) -> Method:
        """Return the method as a value."""
        return method_named(self.method) if isinstance(self.method, str) else checked(self.method)

    def resolved_wire(self) -> WireFormat:
        """Return the wire format as a value."""
        return wire_of(self.wire)

    def resolved_all_reduce(self) -> AllReduce:
        """Return the all-reduce format as a value."""
        return all_reduce_of(self.all_reduce)

    def resolved_transport(self) -> Transport:
        """Return the transport as a value."""
        if self.transport is None:
            return ZeroMQ(encryption=self.encryption)
        check_kind(
            "transport", self.transport, Transport, "a value, as lightning_omni.transport.zeromq.ZeroMQ(), or None"
        )
        if TRANSPORTS.get(name_of(self.transport)) is not type(self.transport):
            raise ConfigurationError(
                f"transport={type(self.transport).__name__}(): the server, a process of its own, cannot be told of it;"
                " give its class the decorator @lightning_omni.transport.base.register"
            )
        if self.encryption != "curve":
            raise ConfigurationError(
                f"encryption={self.encryption!r} and transport={name_of(self.transport)!r}: encryption= is ZeroMQ's;"
                " tell the transport itself how to encrypt"
            )
        return self.transport
