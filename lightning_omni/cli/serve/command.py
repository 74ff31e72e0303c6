"""``lightning-omni serve``: a standalone parameter server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from lightning_omni.cli.units import Quantity, check_above_zero, seconds_of, time_of
from lightning_omni.errors import ConfigurationError

HEARTBEAT_TIMEOUT, JOINED_HEARTBEAT_TIMEOUT = 30.0, 5.0
"""Seconds; the second is for groups that joined on their own, which join again after a false eviction."""
JOIN_TIMEOUT = 300.0
"""Seconds in which all ranks, or servers of other shares, must arrive after the first one."""

LARGEST_PORT = 65_535


def serve(
    host: str = "127.0.0.1",
    port: int = 5555,
    data_port: int = 0,
    key_file: Path | None = None,
    allow_optimizer: str = "",
    allow_module: str = "",
    heartbeat_timeout: Quantity | None = None,
    threads: int = 1,
    once: bool = False,
    record: Path | None = None,
    method: str = "",
    encryption: str = "curve",
    wire_format: str = "",
    transport: str = "",
    servers: int = 1,
    servers_here: int = 0,
    number: int = 0,
    coordinator: str = "",
    http: int | None = None,
    http_host: str = "127.0.0.1",
    state: Path | None = None,
    save_every: Quantity = 30.0,
    progress_timeout: Quantity = 600.0,
) -> int:
    """Run a parameter server for runs with OmniStrategy(server="tcp://host:port").

    The server takes one run at a time; when all its ranks have left, the next one may join. Stop it with Ctrl-C.

    Args:
        host: Address to listen on. Loopback by default: other machines can connect only if you set an address here.
        port: Port of the control socket; 0 selects a free one.
        data_port: Port of the data socket; 0 selects a free one.
        key_file: File with the shared key, created on first use. Copy it to the machines that train.
        allow_optimizer: Optimizers outside torch.optim that ranks may use, as module:Class, separated by commas.
        allow_module: Modules outside torch.nn that a merged head may contain, as module:Class, separated by commas.
        heartbeat_timeout: Silence after which a rank counts as dead, as in 30s, or in seconds, at least 2. By default
            5s if groups join on their own, and 30s if all ranks are started together.
        threads: Threads for the optimizer's arithmetic.
        once: Exit after the first run.
        record: File for a record of all changes to the weights, for replay in the simulator. With several servers, the
            coordinating one writes it.
        method: Methods of your own that runs may use, as module:Class, separated by commas.
        encryption: "curve", or "off" on a network whose every user you trust; the runs must use the same.
        wire_format: Wire formats of your own that runs may use, as module:Class, separated by commas.
        transport: A transport of your own instead of ZeroMQ, as module:Class; the runs must use the same.
        servers: Number of servers, each with a partition of the parameters. Runs need only the address of this one.
        servers_here: Number of these servers on this machine, including this one; 0 means all. Start the others on
            their machines, each with its own number: lightning-omni serve --servers 4 --number 1 --coordinator
            tcp://...
        number: Number of the share that this server holds, if another one coordinates.
        coordinator: Address of the coordinating server.
        http: Port for /metrics (Prometheus), /status (JSON), /healthz and /readyz, which anyone who can connect may
            read; 0 selects a free one. By default the server has no HTTP port.
        http_host: Address for --http. Loopback by default: other machines can connect only if you set an address here.
        state: Directory in which the server saves its state. If it is killed, another one continues its run at once (on
            Linux); so does a server that you start with the same directory. Ranks try to reconnect at the same address
            for five minutes.
        save_every: Time between two saves in --state, as in 30s, or in seconds.
        progress_timeout: Time without progress after which a live group that has trained is evicted, as in 10min, or in
            seconds, at least 2; 0 for never.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads, which compute nothing here
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.cli.serve.standalone_server import Options, stand
    from lightning_omni.transport.serving.process import ServerSettings
    from lightning_omni.transport.zeromq.keys import load_or_create

    _check_ports({"--port": port, "--data-port": data_port, "--http": http})
    check_above_zero({"threads": threads})
    here = _check_servers(servers, servers_here, number, coordinator, record)
    if state is not None:
        _check_state(servers if here < servers else 1, record, transport, port)
    silence = seconds_of("--heartbeat-timeout", HEARTBEAT_TIMEOUT if heartbeat_timeout is None else heartbeat_timeout)
    if silence < 2:
        raise ConfigurationError(f"--heartbeat-timeout {heartbeat_timeout}: pass 2s or more: a busy rank may be late")
    progress = seconds_of("--progress-timeout", progress_timeout)
    if 0 < progress < 2:
        raise ConfigurationError(f"--progress-timeout {progress_timeout}: pass 2s or more, or 0 for never")
    key, where = load_or_create(key_file)
    settings = ServerSettings(
        key=key.hex(),
        host=host,
        port=port,
        heartbeat_timeout=silence,
        joined_heartbeat_timeout=JOINED_HEARTBEAT_TIMEOUT if heartbeat_timeout is None else silence,
        join_timeout=JOIN_TIMEOUT,
        progress_timeout=progress or None,
        threads=threads,
        record=str(record or ""),
        allow_optimizers=_listed("--allow-optimizer", allow_optimizer),
        allow_modules=_listed("--allow-module", allow_module),
        methods=_listed("--method", method),
        wire_formats=_listed("--wire-format", wire_format),
        transports=(transport,) if transport else (),
        servers=servers,
        number=number,
        coordinator=coordinator,
        state=str(state or ""),
        save_every=time_of("--save-every", save_every),
    )
    options = Options(here, data_port, encryption, once, http, http_host, where)
    return stand(settings, options, Console(stderr=True))


def _listed(option: str, given: str) -> tuple[str, ...]:
    """Return the class paths in an option's text, which commas separate.

    Raises:
        ConfigurationError: one of them is not of the form module:Class.
    """
    paths = tuple(path.strip() for path in given.split(",")) if given else ()
    for path in paths:
        module, _, name = path.partition(":")
        if not module or not name:
            raise ConfigurationError(f"{option} {given}: pass module:Class, several separated by commas")
    return paths


def _check_ports(given: Mapping[str, int | None]) -> None:
    """Raise an error for a port out of range, of which ZeroMQ would use the last 16 bits."""
    for option, port in given.items():
        if port is not None and not 0 <= port <= LARGEST_PORT:
            raise ConfigurationError(f"{option} {port}: pass a port, 1 to {LARGEST_PORT}, or 0 for a free one")


def _check_servers(servers: int, here: int, number: int, coordinator: str, record: Path | None) -> int:
    """Check the options for several servers, and return the number of servers on this machine."""
    if servers < 1 or not 0 <= here <= servers:
        raise ConfigurationError(
            f"--servers {servers} --servers-here {here}: pass the number of servers, and how many of them run here"
        )
    if not 0 <= number < servers:
        raise ConfigurationError(f"--number {number}: the servers are numbered from 0 to {servers - 1}")
    if bool(number) != bool(coordinator):
        raise ConfigurationError(
            f"--number {number} --coordinator {coordinator!r}: a server with a number other than 0 needs the address of"
            " the one that coordinates, and that one needs none"
        )
    if number and record is not None:
        raise ConfigurationError(
            f"--record {record} --number {number}: the server that coordinates records what all do; give it --record"
        )
    return 1 if number else here or servers


def _check_state(servers: int, record: Path | None, transport: str, port: int) -> None:
    for option, given, why in (
        ("--servers-here or --number", servers > 1, "servers on several machines do not save their shares"),
        ("--record", record, "a record is of one server from beginning to end"),
        ("--transport", transport, "ranks find a server again where they speak to it over ZeroMQ"),
        ("--port 0", not port, "ranks look for the server at the same address: name a port"),
    ):
        if given:
            raise ConfigurationError(f"--state {option}: {why}; leave one of both out")
