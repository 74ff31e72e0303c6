"""The parameter servers of a run, which its ranks start or find."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods import Method
from lightning_omni.methods.model.modules import class_path, class_paths, describe_module
from lightning_omni.registry import to_wire
from lightning_omni.runtime.model.meshes import shown
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.runtime.registration import ask_for_all
from lightning_omni.transport.registry import Transport
from lightning_omni.transport.serving import ServerProcess
from lightning_omni.transport.serving.process import ServerSettings
from lightning_omni.transport.zeromq.addresses import PrivateDirectory, beside, tcp_endpoint
from lightning_omni.transport.zeromq.keys import ENVIRONMENT, key_of_environment, load_key, new_key
from lightning_omni.wire.formats.base import WireFormat

_log = logging.getLogger(__name__)


class RunServer:
    """The servers of a run, each with a partition of the parameters.

    Args:
        rank: this rank. Rank 0 starts the server; with one per node, the first rank of each node.
        shares: required number of servers, one for each share of a sharded model; None for that in the options.

    Attributes:
        processes: processes of this rank's embedded servers, by number; 0 coordinates, and one that was started in
            advance may be set as that.
    """

    def __init__(
        self, rank: int, options: WorldOptions, ranks_per_node: Sequence[int], shares: int | None = None
    ) -> None:
        self._rank, self._options, self._ranks_per_node, self._needed = rank, options, ranks_per_node, shares
        self._key = b""
        self.transport = options.server.resolved_transport()
        self.processes: dict[int, ServerProcess] = {}
        self._states: PrivateDirectory | None = None
        self._taught: tuple[Method, Sequence[Part]] | None = None
        self._failure: Exception | None = None

    @property
    def count(self) -> int:
        if self._needed is not None:
            return self._needed
        count = self._options.server.count
        return self.nodes if count == "per-node" else count

    @property
    def nodes(self) -> int:
        return len(self._ranks_per_node)

    @property
    def node(self) -> int | None:
        """Return the node that all servers are on; None if it is unknown, or if each node has a server."""
        return 0 if self._options.server.address is None and not self.per_node else None

    def nodes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the node of each rank; empty if all are on one, or some belong to another launcher."""
        known = [node for node, count in enumerate(self._ranks_per_node) for _ in range(count)]
        found = tuple(known[rank] for rank in ranks if rank < len(known))
        return found if len(found) == len(ranks) and len(set(found)) > 1 else ()

    @property
    def per_node(self) -> bool:
        return self._options.server.count == "per-node" and self.count > 1

    @property
    def _own(self) -> Sequence[int]:
        """Return the numbers of the servers that this rank starts."""
        if self._options.server.count != "per-node":
            return range(self.count) if self._rank == 0 else ()
        firsts = itertools.accumulate([0, *self._ranks_per_node[:-1]])
        return [number for number, first in enumerate(firsts) if first == self._rank]

    @property
    def is_on_this_node_only(self) -> bool:
        return self.nodes == 1

    def check(self, servers: int, address: str) -> None:
        if self._needed is None or servers == self._needed:
            return
        if self._options.elastic.join:
            raise ConfigurationError(
                f"{shown(self._options.model_parallel)} and {self._needed} ranks, each of which exchanges a share:"
                f" the server at {address} is one of {servers}; all groups of the run need as many shards as there are"
                " servers (lightning-omni serve --servers N), and FSDP(shards=...) if they have more ranks"
            )
        raise ConfigurationError(
            f"{shown(self._options.model_parallel)} and {self._needed} ranks, each of which exchanges a share:"
            f" the server at {address} is one of {servers}; start it and the others with lightning-omni serve"
            f" --servers {self._needed}, or leave server= out"
        )

    def start(self, method: Method, parts: Iterable[Part]) -> None:
        if self._options.server.address is not None:
            return
        self._taught = method, list(parts)
        if self._rank == 0 and self._options.server.count == "per-node" and self.count == 1:
            _log.info('server="per-node" on one node is one server')
        self._failure = None
        try:
            for number in self._own:
                if number not in self.processes:
                    self.processes[number] = ServerProcess()
            if self._rank == 0 and not self.processes[0].is_told:
                self._key = key_of_environment() or new_key()
                self._states = self._states or self._place_for_states(self._taught[1])
                self.processes[0].configure(self._settings(method, self._taught[1]))
        except ConfigurationError as error:  # `find`, where others wait for rank 0, or `share` reports it
            self._failure = error
        except OSError as error:
            self._failure = ConfigurationError(f"the parameter server's process could not be started: {error}")

    def share(self, address: str, key: bytes) -> None:
        """Let this rank's further servers join the coordinating one, and wait for them.

        Raises:
            ConfigurationError, ConnectionLost: a server could not be started.
        """
        if self._taught is None:
            return
        if self._failure is not None:
            raise self._failure
        settings = self._settings(*self._taught)
        for number, process in self.processes.items():
            if not process.is_told:
                # On rank 0's node it has the same host; elsewhere the address from which it reaches rank 0's server.
                host = settings.host if self._rank == 0 else ""
                own = {"key": key.hex(), "host": host, "number": number, "coordinator": address, "record": ""}
                process.configure(msgspec.structs.replace(settings, **own))
        for process in self.processes.values():
            process.address()

    def stop(self, has_failed: bool = False, waits: bool = True) -> None:
        """End the embedded servers, and wait for them; unless it ``waits``, a thread does.

        If a rank other than 0 has failed, its servers continue: they end with the one that coordinates.
        """
        processes, states = list(self.processes.values()), self._states
        self.processes, self._states, self._failure = {}, None, None

        def end() -> None:
            for process in processes:
                process.leave() if has_failed and self._rank else process.stop()
            if states is not None:
                states.remove()

        end() if waits else threading.Thread(target=end, name="omni-dismiss").start()

    def find(self, broadcast_text: Callable[[str], str]) -> tuple[str, bytes, str]:
        """Return address, key and a name for the run on all ranks, which call it; a key that they have is not sent.

        Raises:
            ConfigurationError, ConnectionLost: rank 0 could not start the server, or this rank lacks its key.
        """
        failed = "rank 0 could not start the parameter server"
        address, key, run = ask_for_all(broadcast_text, self._rank == 0, self._found, failed, ConfigurationError)
        return address, self._key_of(key), run

    def _found(self) -> tuple[str, str, str]:
        if self._failure is not None:
            raise self._failure
        run = secrets.token_hex(8)
        if self._options.server.address is not None:
            return self._options.server.address, "", run
        # A key that all ranks were given is not sent, because these connections are not encrypted.
        key = ENVIRONMENT if key_of_environment() else self._key.hex()
        return self.published(self.processes[0].address()), key, run

    @staticmethod
    def _key_of(text: str) -> bytes:
        if text != ENVIRONMENT:
            return bytes.fromhex(text) if text else load_key()
        key = key_of_environment()
        if key is None:
            raise ConfigurationError(
                f"rank 0 has its key from the environment variable {ENVIRONMENT}, and this rank has none: set it to the"
                " same key for all ranks, or for none"
            )
        return key

    def published(self, address: str) -> str:
        return beside(address, tcp_endpoint(_main_host()))

    def _settings(self, method: Method, parts: Sequence[Part]) -> ServerSettings:
        options = self._options
        wire, server = options.compression.wire_format, options.server
        return ServerSettings(
            key=self._key.hex(),
            host=self._host(),
            port=0,
            heartbeat_timeout=options.elastic.heartbeat,
            join_timeout=options.timeout.total_seconds(),
            threads=server.threads,
            allow_optimizers=tuple({class_path(type(part.optimizer)) for part in parts}),
            methods=_foreign(method),
            allow_modules=tuple(
                path for part in parts if part.head for path in class_paths(describe_module(part.head[1]))
            ),
            record=os.path.abspath(server.record) if server.record else "",
            wire_formats=tuple({*_foreign(wire.pushes), *_foreign(wire.answers)}),
            transport=to_wire(self.transport),
            transports=_foreign(self.transport),
            servers=self.count,
            state=str(self._states.path / "state") if self._states is not None else "",
            save_every=server.save or 0.0,
            progress_timeout=options.elastic.timeout,
        )

    def _place_for_states(self, parts: Sequence[Part]) -> PrivateDirectory | None:
        """Create the directory for the server's saved state; return None if the run ends with its server."""
        server = self._options.server
        goes_on = sys.platform == "linux" and type(self.transport).serve_again is not Transport.serve_again
        if server.save is None or server.record or not goes_on or self.count > 1 or any(part.head for part in parts):
            return None
        try:
            return PrivateDirectory()
        except ConfigurationError as error:
            _log.warning("the parameter server's state is not saved, and its loss would end the run: %s", error)
            return None

    def _host(self) -> str:
        if self._options.server.host is not None:
            return self._options.server.host
        if self.is_on_this_node_only:
            return ""
        address = _resolve(_main_host())
        # Many systems resolve their own name to 127.0.1.1; other nodes reach this one at another address.
        return "0.0.0.0" if _is_loopback(address) and not _is_loopback(_main_host()) else address


def check_importable(name: str, value: Method | WireFormat) -> None:
    kind = type(value)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise UnsupportedError(
            f"{name}={kind.__qualname__}: it is defined in the script itself, where the parameter server cannot import"
            " it; move it to a module of its own"
        )


def _foreign(value: Method | WireFormat | Transport) -> tuple[str, ...]:
    kind = type(value)
    return () if kind.__module__.startswith("lightning_omni.") else (class_path(kind),)


def _main_host() -> str:
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _resolve(host: str) -> str:
    """Return the address of a host, IPv4 if it has one; for an unknown host, 0.0.0.0."""
    try:
        found = sorted(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), key=lambda each: each[0])
    except OSError:
        return "0.0.0.0"
    return str(found[0][4][0])


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
