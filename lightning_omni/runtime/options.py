"""The settings of a run, except its size."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal

from lightning_omni.checks import check_kind, check_number, check_whole, keep_plain
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method, checked, method_named
from lightning_omni.runtime.model.meshes import FSDP, ModelParallel, Sharding, shown
from lightning_omni.topology import check_groups
from lightning_omni.transport.registry import TRANSPORTS, Transport, name_of
from lightning_omni.transport.zeromq import ZeroMQ
from lightning_omni.transport.zeromq.keys import key_of_environment
from lightning_omni.wire.compression import Compression
from lightning_omni.wire.formats.base import WireFormat


@dataclass(frozen=True)
class Server:
    """The parameter server of a run, with its files. A text in its place is an address, or ``"per-node"`` a count.

    Args:
        address: ``"tcp://host:port"`` of a running server (``lightning-omni serve``). None starts the *embedded*
            server, a process beside rank 0.
        count: number of embedded servers, each with a partition of the parameters: a number, all on rank 0's node; or
            ``"per-node"``, one on each node. See :doc:`/how-to/servers`.
        host: address that the embedded server binds. None uses no port on one node (sockets in a directory that
            only this user may enter), and MASTER_ADDR on several: 0.0.0.0 if that name resolves to a loopback address
            or to none.
        encryption: ``"curve"``, or ``"off"`` on a network whose every user you trust. A running server must use the
            same.
        save: seconds between two saves of the embedded server's state, from the last of which another server continues
            if it dies (Linux): see :doc:`/explanation/resilience`. With None, several servers, a record or a merged
            head, nothing is saved, and the run ends if a server dies.
        record: the embedded server's file of all that changes the weights, for `lightning_omni.simulator.replay`; each
            fit overwrites it.
        max_nonfinite_pushes: pushes in a row with NaN or infinite elements after which a group fails.
        threads: threads for the embedded server's arithmetic.
        transport: the connection between ranks and server; None is ZeroMQ.

    Raises:
        ConfigurationError: an argument is wrong, or two exclude each other; the message names them.

    Example:
        >>> Server(count=2, save=5.0).count
        2
        >>> Server(count=0)
        Traceback (most recent call last):
        lightning_omni.errors.ConfigurationError: Server(count=0): pass a number of servers, 1 or more, or "per-node"
    """

    address: str | None = None
    count: int | Literal["per-node"] = 1
    host: str | None = None
    encryption: Literal["curve", "off"] = "curve"
    save: float | None = 30.0
    record: str | os.PathLike[str] | None = None
    max_nonfinite_pushes: int = 50
    threads: int = 1
    transport: Transport | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        text = (str, type(None))
        address = 'the address of a server, such as "tcp://host:5555", or None'
        check_kind("Server(address", self.address, text, address)
        if self.address == "per-node":
            raise ConfigurationError('Server(address="per-node"): it is no address; pass Server(count="per-node")')
        if self.count != "per-node":
            check_whole("Server(count", self.count, 'a number of servers, 1 or more, or "per-node"', low=1)
        check_kind("Server(host", self.host, text, "an address, or None")
        if self.host == "":
            raise ConfigurationError('Server(host=""): pass an address, or None')
        if self.save is not None:
            seconds = "the seconds between two saves, such as 30, or None to save nothing"
            check_number("Server(save", self.save, seconds, above=0, below=math.inf)
        check_kind("Server(record", self.record, (*text, os.PathLike), "a file, or None")
        pushes = "a number of pushes, 1 or more"
        check_whole("Server(max_nonfinite_pushes", self.max_nonfinite_pushes, pushes, low=1)
        check_whole("Server(threads", self.threads, "a number of threads, 1 or more", low=1)
        transport = self.resolved_transport()
        if self.address is not None:
            self._check_address(self.address, transport)
        if self.count != 1 and type(transport).follow is Transport.follow:
            raise ConfigurationError(
                f"Server(count={self.count!r}, transport={name_of(transport)!r}): with this transport one server holds"
                " all weights; leave count= out"
            )

    def _check_address(self, address: str, transport: Transport) -> None:
        transport.check_address(address)
        if self.record is not None:
            raise ConfigurationError(
                f"Server(record={self.record!r}): the server at {address} runs already; start it with"
                " lightning-omni serve --once --record FILE"
            )
        if self.count != 1:
            raise ConfigurationError(
                f"{self.given_count} and the server at {address}: the number of servers is set where they are"
                " started, with lightning-omni serve --servers N; leave it out"
            )

    @classmethod
    def of(cls, given: str | Server | None) -> Server:
        """Return the server for a user's argument; raise `ConfigurationError` if it is no valid one."""
        wanted = 'an address such as "tcp://host:5555", "per-node", a Server(...), or None'
        check_kind("server", given, (str, Server, type(None)), wanted)
        if isinstance(given, Server):
            return given
        return cls(count="per-node") if given == "per-node" else cls(address=given)

    @property
    def given_count(self) -> str:
        """Return the number of servers as a user writes it, for messages."""
        others = (each for each in fields(self) if each.name not in ("address", "count"))
        if self.count == "per-node" and all(getattr(self, each.name) == each.default for each in others):
            return 'server="per-node"'
        return f"Server(count={self.count!r})"

    def resolved_transport(self) -> Transport:
        """Return the transport as a value.

        Raises:
            ConfigurationError: it is no `Transport`, its class is not registered in this process, ``encryption`` is not
                "curve" beside it, or unknown without it.
        """
        if self.transport is None:
            return ZeroMQ(encryption=self.encryption)
        wanted = "a value, as lightning_omni.transport.zeromq.ZeroMQ(), or None"
        check_kind("Server(transport", self.transport, Transport, wanted)
        if TRANSPORTS.get(name_of(self.transport)) is not type(self.transport):
            raise ConfigurationError(
                f"Server(transport={type(self.transport).__name__}()): the server, a process of its own, cannot be told"
                " of it; give its class the decorator @lightning_omni.transport.registry.register"
            )
        if self.encryption != "curve":
            raise ConfigurationError(
                f"Server(encryption={self.encryption!r}, transport={name_of(self.transport)!r}): encryption= is"
                " ZeroMQ's; tell the transport itself how to encrypt"
            )
        return self.transport


@dataclass(frozen=True)
class Elastic:
    """The rules by which groups join, leave and are evicted. True in its place is ``Elastic(join=True)``.

    Args:
        join: whether the ranks of this launcher are one group, which joins the run at the server's address at any time,
            or begins it if it is the first: see :doc:`/how-to/joining`. None means True if OmniStrategy, passed no
            address, takes it from LIGHTNING_OMNI_SERVER, and otherwise False.
        max_rejoins: with ``join``, how often in a row a group that was evicted by mistake (its machine was suspended or
            its link failed) rejoins as a new group: if the script ends with that error, its process runs its command
            again, after 1, 2, 4, ... seconds. Only OmniStrategy uses it.
        timeout: seconds, at least 2, after which a group that answers heartbeats but completes no training or
            validation batch is evicted, unless the run would end with it. The embedded server counts from the first
            trained batch on; ``lightning-omni serve`` has its own option. None disables this. Only OmniStrategy has it.
        heartbeat: seconds of silence after which a rank counts as dead at the embedded server, at least 2.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> Elastic(join=True, max_rejoins=3)
        Elastic(join=True, max_rejoins=3, timeout=600.0, heartbeat=30.0)
        >>> Elastic(join="yes")
        Traceback (most recent call last):
        lightning_omni.errors.ConfigurationError: Elastic(join='yes'): pass True, False or None
    """

    join: bool | None = None
    max_rejoins: int = 10
    timeout: float | None = 600.0
    heartbeat: float = 30.0

    def __post_init__(self) -> None:
        keep_plain(self)
        check_kind("Elastic(join", self.join, (bool, type(None)), "True, False or None")
        often = "how often in a row an evicted group may join again, or 0"
        check_whole("Elastic(max_rejoins", self.max_rejoins, often)
        if self.timeout is not None:
            longest = "seconds, at least 2 and more than any batch or epoch's end takes, or None"
            check_number("Elastic(timeout", self.timeout, longest, low=2, below=math.inf)
        late = (
            "a finite number of seconds, at least 2: ranks give two signs of life a second, and a busy one may be late"
        )
        check_number("Elastic(heartbeat", self.heartbeat, late, low=2, below=math.inf)

    @classmethod
    def of(cls, given: bool | Elastic | None) -> Elastic:
        """Return the rules for a user's argument; raise `ConfigurationError` if it is no valid one."""
        wanted = "True, False, rules such as Elastic(join=True, max_rejoins=3), or None"
        check_kind("elastic", given, (bool, Elastic, type(None)), wanted)
        return given if isinstance(given, Elastic) else cls(join=given)


_AT_SERVER: Mapping[str, Callable[[Any], str]] = {
    "host": lambda host: f"--host {host}",
    "save": lambda every: "" if every is None else f"--state DIR --save-every {every:g}",
    "threads": lambda threads: f"--threads {threads}",
    "timeout": lambda seconds: f"--progress-timeout {seconds or 0:g}",
    "heartbeat": lambda seconds: f"--heartbeat-timeout {seconds:g}",
}
"""Settings of the embedded server that a running one has of its own, as options of its command line; "" for none."""


def sharding_of(given: object) -> Sharding:
    if given == "fsdp":
        return FSDP()
    if given is None or isinstance(given, (FSDP, ModelParallel)):
        return given
    raise ConfigurationError(f'model_parallel={given!r}: pass "fsdp", FSDP(...), ModelParallel(...), or None')


@dataclass(frozen=True, init=False)
class WorldOptions:
    """All settings of a run except its size, for `World`. All ranks must pass the same.

    Args:
        groups: number of compute groups, or None for one group per node.
        method: how groups exchange, by name or as a `lightning_omni.methods.Method`.
        compression: the format of pushes, such as ``"int8"``, or a `Compression`.
        overlap: whether a group computes its next gradient during an exchange, which makes it one step staler; for
            async_sgd.
        server: address of a running server; or ``"per-node"``, or a `Server`. None starts one beside rank 0.
        elastic: under OmniStrategy, True lets the ranks of this launcher join the run at ``server`` as one group, which
            `World.training` refuses; or an `Elastic`.
        model_parallel: None: each member of a group holds the whole model. ``"fsdp"`` or an `FSDP`: each holds rows of
            every parameter; or a `ModelParallel`, for a module that is parallelized on the group's mesh.
        timeout: time after which a collective that does not complete is an error.

    Raises:
        ConfigurationError: an argument is wrong, or two exclude each other; the message names them.

    Example:
        >>> WorldOptions(groups=2, compression="int8").compression.push
        'int8'
    """

    groups: int | None
    method: str | Method
    compression: Compression
    overlap: bool
    server: Server
    elastic: Elastic
    model_parallel: Sharding
    timeout: timedelta

    def __init__(
        self,
        groups: int | None = None,
        method: str | Method = "async_sgd",
        compression: str | WireFormat | Compression = "fp32",
        overlap: bool = False,
        server: str | Server | None = None,
        elastic: bool | Elastic | None = None,
        model_parallel: Literal["fsdp"] | Sharding = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        vars(self).update(
            groups=groups,
            method=method,
            compression=Compression.of(compression),
            overlap=overlap,
            server=Server.of(server),
            elastic=Elastic.of(elastic),
            model_parallel=sharding_of(model_parallel),
            timeout=timeout,
        )
        keep_plain(self)
        self._check()

    def _check(self) -> None:
        if self.groups is not None:
            check_groups(self.groups, sys.maxsize)
        check_kind(
            "method", self.method, (str, Method), 'a name such as "hardsync", or a value such as DiLoCo(period=50)'
        )
        check_kind("overlap", self.overlap, bool, "True or False")
        if not (isinstance(self.timeout, timedelta) and self.timeout > timedelta(0)):
            raise ConfigurationError(f"timeout={self.timeout!r}: pass a timedelta such as timedelta(minutes=30)")
        key_of_environment()  # raises its errors now, before the ranks are started
        method = self.resolved_method()
        refuse_pairs(method, self.features)
        if self.elastic.join:
            self._check_join()
        if self.is_sharded:
            self._check_transport()
        if self.groups is not None:
            method.check(self.groups)

    def _check_join(self) -> None:
        if self.server.address is None:
            raise ConfigurationError(
                "elastic=True without the address of a server: pass the one at which lightning-omni serve runs, such as"
                ' server="tcp://host:5555"'
            )
        if self.groups not in (None, 1):
            raise ConfigurationError(
                f"groups={self.groups} and elastic=True: what one launcher starts is one group of the run; leave"
                " groups= out, and start each group by itself"
            )
        transport = self.server.resolved_transport()
        if not isinstance(transport, ZeroMQ):
            raise ConfigurationError(
                f"Server(transport={name_of(transport)!r}) and elastic=True: groups join over ZeroMQ; leave transport="
                " out"
            )

    def _check_transport(self) -> None:
        transport = self.server.resolved_transport()
        if type(transport).follow is Transport.follow:
            raise ConfigurationError(
                f"{shown(self.model_parallel)} and Server(transport={name_of(transport)!r}): with this transport there"
                " is one server, and each member of a group needs one; leave transport= or model_parallel= out"
            )

    @property
    def features(self) -> dict[str, str]:
        """Return the features of `lightning_omni.combinations` that these settings use, as the user wrote them."""
        server, sharding = self.server, self.model_parallel
        used = {
            "sharded": (sharding is not None, shown(sharding)),
            "mesh": (isinstance(sharding, ModelParallel), shown(sharding)),
            "servers": (server.count != 1, server.given_count),
            "overlap": (self.overlap, "overlap=True"),
            "joining": (self.elastic.join, "elastic=True"),
            "record": (server.record is not None, f"Server(record={server.record!r})"),
        }
        return {**{name: given for name, (is_used, given) in used.items() if is_used}, **self.compression.features}

    @property
    def of_all_ranks(self) -> dict[str, str]:
        """Return the settings in which all ranks of a run must agree, as text."""
        wire, server = self.compression.wire_format, self.server
        return {
            **({} if self.elastic.join else {"server": repr(server.address)}),
            "groups": repr(self.groups),
            "method": repr(self.resolved_method()),
            "compression=Compression(push=)": repr(wire.pushes),
            "compression=Compression(pull=)": repr(wire.answers),
            "compression=Compression(all_reduce=)": repr(self.compression.all_reduce_format),
            "overlap": repr(self.overlap),
            "server=Server(count=)": repr(server.count),
            "server=Server(transport=)": repr(server.resolved_transport()),
            "server=Server(max_nonfinite_pushes=)": repr(server.max_nonfinite_pushes),
            "elastic=Elastic(join=)": repr(bool(self.elastic.join)),
            "model_parallel": repr(self.model_parallel),
        }

    @property
    def unread(self) -> str:
        """Return a warning that names the settings that a running server has of its own; "" if none is given here.

        Example:
            >>> WorldOptions(server=Server("tcp://10.0.0.9:5555", threads=4)).unread  # doctest: +ELLIPSIS
            'Server(threads=4): the server at tcp://10.0.0.9:5555 ... lightning-omni serve --threads 4'
            >>> WorldOptions(server=Server(threads=4)).unread
            ''
        """
        given = [
            (f"{type(value).__name__}({each.name}={own!r})", written)
            for value in (self.server, self.elastic)
            for each in fields(value)
            if each.name in _AT_SERVER and (own := getattr(value, each.name)) != each.default
            if (written := _AT_SERVER[each.name](own))
        ]
        if self.server.address is None or not given:
            return ""
        names, remedies = zip(*given, strict=True)
        return (
            f"{', '.join(names)}: the server at {self.server.address} runs already, and does not read this; pass it"
            f" where the server is started: lightning-omni serve {' '.join(remedies)}"
        )

    @property
    def is_sharded(self) -> bool:
        """Return whether the members of a group hold the model together."""
        return self.model_parallel is not None

    def resolved_method(self) -> Method:
        """Return the method as a value."""
        return method_named(self.method) if isinstance(self.method, str) else checked(self.method)
