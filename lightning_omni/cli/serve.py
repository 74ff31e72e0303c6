"""``lightning-omni serve``: a standalone parameter server."""

from __future__ import annotations

import math
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from rich.console import Console

from lightning_omni.cli.console import INTERRUPTED
from lightning_omni.cli.units import Quantity, seconds_of
from lightning_omni.errors import ConfigurationError

HEARTBEAT_TIMEOUT, JOINED_HEARTBEAT_TIMEOUT = 30.0, 5.0
"""Seconds; a group that has joined on its own, and was evicted by mistake, joins again."""


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
    shards: int = 1,
    shards_here: int = 0,
    shard: int = 0,
    coordinator: str = "",
    upstream: str = "",
    http: int | None = None,
    http_host: str = "127.0.0.1",
    state: Path | None = None,
    save_every: Quantity = 30.0,
    progress_timeout: Quantity = 600.0,
) -> int:
    """Runs a parameter server for runs with OmniStrategy(server="tcp://host:port").

    It takes one run at a time; when all its ranks have left, the next one may join. Stop the server with Ctrl-C.

    Args:
        host: Address to listen on. Loopback by default: other machines can connect only if you set an address here.
        port: Port of the control socket; 0 selects a free one.
        data_port: Port of the data socket; 0 selects a free one.
        key_file: File with the shared key, created on first use. Copy it to the machines that train.
        allow_optimizer: Optimizers outside torch.optim that ranks may use, as module:Class, separated by commas.
        allow_module: Modules outside torch.nn that a merged head may contain, as module:Class, separated by commas.
        heartbeat_timeout: Silence after which a rank counts as dead, as in 30s, or in seconds. By default 5s where
            groups join on their own, and 30s where all ranks are started together.
        threads: Threads for the optimizer's arithmetic.
        once: Exit after the first run.
        record: File for a record of everything that changes the weights, for replay in the simulator. With several
            servers, the coordinating one writes it.
        method: Methods of your own that runs may use, as module:Class, separated by commas.
        encryption: "curve", or "off" on a network whose every user you trust; the runs must use the same.
        wire_format: Wire formats of your own that runs may use, as module:Class, separated by commas.
        transport: A transport of your own instead of ZeroMQ, as module:Class; the runs must use the same.
        shards: Number of servers that share the weights. Runs need only the address of this one.
        shards_here: How many of them run on this machine, including this one; 0 means all. Start the others on their
            machines, each with its own number: lightning-omni serve --shards 4 --shard 1 --coordinator tcp://...
        shard: Number of the share that this server holds, if another one coordinates.
        coordinator: Address of the coordinating server.
        upstream: Address of another server, for which this one sums the pushes of groups (an aggregator): it holds no
            weights itself. Runs use the address of the other server.
        http: Port for /metrics (Prometheus), /status (JSON), /healthz and /readyz, which anyone who can connect may
            read; 0 selects a free one. Without it nothing is served over HTTP.
        http_host: Address for these. Loopback by default: other machines can connect only if you set an address here.
        state: Directory in which the server saves its state. If it is killed, another one continues its run at once
            (on Linux), as does one that is started with the same directory; ranks try to reconnect at the same
            address for five minutes.
        save_every: Time between two saves, as in 30s, or in seconds.
        progress_timeout: Time after which a group that has trained, is alive and makes no progress is evicted, as in
            10min, or in seconds, at least 2; 0 for never.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's, with which nothing is computed
    # Not above: --help is not to wait for torch.
    import msgspec
    import torch

    from lightning_omni import methods
    from lightning_omni.cli.run_log import RunLog
    from lightning_omni.methods.master import resolver
    from lightning_omni.methods.modules import module_resolver
    from lightning_omni.protocol import transport as transports
    from lightning_omni.protocol import wire_format as wire_formats
    from lightning_omni.protocol.record import RecordFile
    from lightning_omni.protocol.server import ServerCore
    from lightning_omni.server import ZeroMQ
    from lightning_omni.server.addresses import EVERYWHERE
    from lightning_omni.server.keys import load_or_create
    from lightning_omni.server.process import ServerProcess, ServerSettings, raise_limit_of_files
    from lightning_omni.server.saving import StateDirectory, share_directory
    from lightning_omni.server.supervisor import can_supervise, preload, supervise
    from lightning_omni.server.web import StatusServer

    console = Console(stderr=True)
    here = _check_shards(shards, shards_here, shard, coordinator, record)
    if upstream:
        _check_upstream(shards, record, http, once)
    if state is not None:
        _check_state(shards if here < shards else 1, upstream, record, transport, port)
    follows = bool(shard or upstream)
    silence = seconds_of("--heartbeat-timeout", HEARTBEAT_TIMEOUT if heartbeat_timeout is None else heartbeat_timeout)
    progress = seconds_of("--progress-timeout", progress_timeout)
    if 0 < progress < 2:
        raise ConfigurationError(f"--progress-timeout {progress_timeout}: pass 2s or more, or 0 for never")
    key, where = load_or_create(key_file)
    signals: list[int] = []
    lifeline = None
    supervises = state is not None and can_supervise()
    if supervises:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: signals.append(number))
    preload()  # before ranks come: they take a server that is silent for long to be gone
    if supervises:
        outcome = supervise(lambda: bool(signals), lambda text: console.print(text, soft_wrap=True, markup=False))
        if isinstance(outcome, int):  # in the process that does not serve itself
            return INTERRUPTED if outcome == 0 and signal.SIGINT in signals else outcome
        lifeline = outcome
    torch.set_num_threads(threads)
    for path in method.split(",") if method else ():
        methods.load(path)
    for path in wire_format.split(",") if wire_format else ():
        wire_formats.load(path)
    core = ServerCore(
        key,
        secrets.token_bytes,
        heartbeat_timeout=silence,
        joined_heartbeat_timeout=JOINED_HEARTBEAT_TIMEOUT if heartbeat_timeout is None else silence,
        resolve=resolver(allow_optimizer.split(",") if allow_optimizer else ()),
        clock=time.monotonic,
        resolve_module=module_resolver(allow_module.split(",") if allow_module else ()),
        record=RecordFile(record) if record is not None else None,
        shards=shards,
        shard=shard,
        adds_up=bool(upstream),
        progress_timeout=progress or math.inf,
    )
    states = None
    if state is not None:
        states = StateDirectory(state, _seconds("--save-every", save_every), servers=shards)
    raise_limit_of_files()
    chosen = transports.load(transport)() if transport else ZeroMQ(encryption=encryption)
    web = StatusServer(http_host, http) if http is not None else None
    try:
        goes_on = states.restore(core) if states is not None else ""
        if follows:
            server = chosen.follow(core, coordinator or upstream, host, port, data_port)
        else:
            server = chosen.serve(core, host, port, data_port)
    except BaseException:
        if web is not None:
            web.close()
        raise
    run_log = None if follows else RunLog(core, console)  # what happens stands in the log of the one it follows
    settings = ServerSettings(
        key=key.hex(),
        host=host,
        port=0,
        heartbeat_timeout=silence,
        join_timeout=300.0,
        threads=threads,
        allow_optimizers=tuple(allow_optimizer.split(",")) if allow_optimizer else (),
        methods=tuple(method.split(",")) if method else (),
        allow_modules=tuple(allow_module.split(",")) if allow_module else (),
        wire_formats=tuple(wire_format.split(",")) if wire_format else (),
        transport=transports.to_wire(chosen),
        transports=(transport,) if transport else (),
        shards=shards,
        coordinator=server.address.replace(f"//{EVERYWHERE}:", "//127.0.0.1:"),
    )
    beside = []
    for other in range(1, here):
        own = msgspec.structs.replace(settings, shard=other)
        if state is not None and states is not None:
            own = msgspec.structs.replace(own, state=str(share_directory(state, other)), restore=states.restored)
        beside.append(ServerProcess(own))
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if signals:  # one has come since the fork
        stopped.set()
    # Never wrapped: programs read the address.
    name = f"aggregator for {upstream}" if upstream else "parameter server"
    console.print(f"{name} on {server.address}, key from {where or 'the environment'}", soft_wrap=True, markup=False)

    if web is not None:
        console.print(f"status on {web.url}", soft_wrap=True, markup=False)

    if goes_on:
        console.print(goes_on, soft_wrap=True, markup=False)

    def is_over() -> bool:
        if states is not None:
            states.tend(core)
        if run_log is not None:
            run_log.tell()
        if web is not None:
            web.tend(core)
        if core.gone or (lifeline is not None and lifeline.is_over):
            stopped.set()
        if core.is_over:
            if run_log is not None:
                run_log.tell(at_once=True)
            console.print(f"a run is over: {core.clock} updates, ranks lost: {len(core.roster.lost)}")
            if once:
                stopped.set()
            if states is not None:
                states.discard(core)
            core.reset()
        return stopped.is_set()

    try:
        server.run(until=is_over)
    finally:
        if states is not None:
            states.close(core if not core.gone else None)
        server.close()
        if web is not None:
            web.close()
        for process in beside:  # they end with this one
            process.stop()
    if core.gone:
        console.print(core.gone, style="red", soft_wrap=True, markup=False)
        return 1
    if upstream and not signals:
        console.print(f"the parameter server at {upstream} is gone", markup=False)
    console.print(f"{'aggregator' if upstream else 'parameter server'} stopped")
    return INTERRUPTED if signal.SIGINT in signals else 0


def _check_shards(shards: int, here: int, shard: int, coordinator: str, record: Path | None) -> int:
    """How many servers run on this machine, this one among them."""
    if shards < 1 or not 0 <= here <= shards:
        raise ConfigurationError(
            f"--shards {shards} --shards-here {here}: pass the number of servers, and how many of them run here"
        )
    if not 0 <= shard < shards:
        raise ConfigurationError(f"--shard {shard}: the servers are numbered from 0 to {shards - 1}")
    if bool(shard) != bool(coordinator):
        raise ConfigurationError(
            f"--shard {shard} --coordinator {coordinator!r}: a server with a number other than 0 needs the address of"
            " the one that coordinates, and that one needs none"
        )
    if shard and record is not None:
        raise ConfigurationError(
            f"--record {record} --shard {shard}: the server that coordinates records what all do; give it --record"
        )
    return 1 if shard else here or shards


def _seconds(option: str, given: Quantity) -> float:
    if (seconds := seconds_of(option, given)) <= 0:
        raise ConfigurationError(f"{option} {given}: pass a time, as 30s")
    return seconds


def _check_state(shards: int, upstream: str, record: Path | None, transport: str, port: int) -> None:
    for option, given, why in (
        ("--shards-here or --shard", shards > 1, "servers on several machines do not save their shares"),
        ("--upstream", upstream, "an aggregator holds nothing that could be saved; give --state to its server"),
        ("--record", record, "a record is of one server from beginning to end"),
        ("--transport", transport, "ranks find a server again where they speak to it over ZeroMQ"),
        ("--port 0", not port, "ranks look for the server at the same address: name a port"),
    ):
        if given:
            raise ConfigurationError(f"--state {option}: {why}; leave one of both out")


def _check_upstream(shards: int, record: Path | None, http: int | None, once: bool) -> None:
    for option, given in (
        ("--shards", shards > 1),
        ("--record", record),
        ("--http", http is not None),
        ("--once", once),
    ):
        if given:
            raise ConfigurationError(
                f"{option} --upstream: an aggregator holds no weights and ends with its server; give {option} to that"
            )
