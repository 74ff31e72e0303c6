"""The parameter server as a run sees it: a process that rank 0 starts, or an address at which one runs already."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method
from lightning_omni.methods.master import class_path
from lightning_omni.methods.modules import class_paths, describe_module
from lightning_omni.optimizer.model_replica import Part
from lightning_omni.optimizer.options import WorldOptions
from lightning_omni.protocol.transport import Transport
from lightning_omni.protocol.wire_format import WireFormat
from lightning_omni.registry import to_wire
from lightning_omni.server import ServerProcess
from lightning_omni.server.keys import ENVIRONMENT, key_of_environment, new_key
from lightning_omni.server.keys import load as load_key
from lightning_omni.server.process import ServerSettings


class RunServer:
    """Starts, finds and ends the server of a run.

    Args:
        rank: this rank; rank 0 starts the server.
        options: of the run.
        ranks_per_node: number of ranks on each node.

    Attributes:
        transport: how it is spoken to.
        process: of the embedded server, on rank 0; one that was started before it was needed may be put here.
    """

    def __init__(self, rank: int, options: WorldOptions, ranks_per_node: Sequence[int]) -> None:
        self._rank, self._options, self._ranks_per_node = rank, options, ranks_per_node
        self._key = b""
        self.transport = options.resolved_transport()
        self.process: ServerProcess | None = None

    @property
    def is_on_this_node_only(self) -> bool:
        """Whether all ranks are where rank 0 is."""
        return len(self._ranks_per_node) == 1

    def start(self, method: Method, parts: Iterable[Part]) -> None:
        """Rank 0 starts the embedded server; returns at once, so that it comes up while the model is built."""
        if self._rank != 0 or self._options.server is not None:
            return
        if self.process is None:
            self.process = ServerProcess()
        if not self.process.is_told:
            self._key = key_of_environment() or new_key()
            self.process.tell(self._settings(method, list(parts)))

    def stop(self) -> None:
        """Ends the embedded server, if there is one."""
        if self.process is not None:
            self.process.stop()
            self.process = None

    def find(self, tell: Callable[[str], str]) -> tuple[str, bytes, str]:
        """Rank 0 tells all ranks where the server is; a failure on rank 0 is an error on all.

        Args:
            tell: gives every rank the text of rank 0.

        Returns:
            Its address, the key, and a name for the run.

        Raises:
            ConfigurationError: there is no server, and none could be started.
        """
        said: dict[str, str] = {}
        failure: Exception | None = None
        if self._rank == 0:
            try:
                if self._options.server is None:
                    assert self.process is not None
                    # A key that all ranks were given does not travel: these connections are in the clear.
                    key = ENVIRONMENT if key_of_environment() else self._key.hex()
                    said = {"address": self.published(self.process.address()), "key": key}
                else:
                    said = {"address": self._options.server, "key": ""}
            except Exception as error:
                failure, said = error, {"error": str(error)}
            said["run"] = secrets.token_hex(8)
        said = json.loads(tell(json.dumps(said)))
        if failure is not None:
            raise failure
        if "error" in said:
            raise ConfigurationError(f"rank 0 could not start the parameter server: {said['error']}")
        return said["address"], self._key_of(said["key"]), said["run"]

    @staticmethod
    def _key_of(said: str) -> bytes:
        if said != ENVIRONMENT:
            return bytes.fromhex(said) if said else load_key()
        key = key_of_environment()
        if key is None:
            raise ConfigurationError(
                f"rank 0 has its key from the environment variable {ENVIRONMENT}, and this rank has none: set it to the"
                " same key for all ranks, or for none"
            )
        return key

    def published(self, address: str) -> str:
        """An address of this machine as the other ranks can reach it."""
        return address.replace("//0.0.0.0:", f"//{_main_host()}:")

    def _settings(self, method: Method, parts: Sequence[Part]) -> ServerSettings:
        options = self._options
        wire = options.resolved_wire()
        return ServerSettings(
            key=self._key.hex(),
            host=self._host(),
            port=0,
            heartbeat_timeout=options.heartbeat_timeout,
            join_timeout=options.timeout.total_seconds(),
            threads=options.server_threads,
            allow_optimizers=tuple({class_path(type(part.optimizer)) for part in parts}),
            methods=_foreign(method),
            allow_modules=tuple(
                path for part in parts if part.head for path in class_paths(describe_module(part.head[1]))
            ),
            record=os.path.abspath(options.record) if options.record else "",
            wire_formats=tuple({*_foreign(wire.pushes), *_foreign(wire.answers)}),
            transport=to_wire(self.transport),
            transports=_foreign(self.transport),
        )

    def _host(self) -> str:
        if self._options.host is not None:
            return self._options.host
        if self.is_on_this_node_only:
            return ""
        address = _resolve(_main_host())
        # Many systems call themselves 127.0.1.1; the other nodes know this one by another address.
        return "0.0.0.0" if address.startswith("127.") and not _is_loopback(_main_host()) else address


def _foreign(value: Method | WireFormat | Transport) -> tuple[str, ...]:
    """The class that the server is to import for it, if it is none of this package."""
    kind = type(value)
    return () if kind.__module__.startswith("lightning_omni.") else (class_path(kind),)


def _main_host() -> str:
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "0.0.0.0"


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")
