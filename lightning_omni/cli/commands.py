"""The subcommands of ``lightning-omni``: one function each, whose parameters are its options.

Most have their work in a module of the same name. Nothing heavy is imported at the top: ``--help`` must not wait for
torch.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from json import dumps
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lightning_omni.cli.console import (
    command_output,
    print_line,
    print_sentence,
    show,
    show_table,
)
from lightning_omni.cli.simulate_settings import SimulationSettings
from lightning_omni.cli.units import (
    Quantity,
    bytes_of,
    check_above_zero,
    check_momentum,
    rate_of,
    seconds_of,
    time_of,
)
from lightning_omni.errors import ConfigurationError, UnsupportedError

# --- compare ----------------------------------------------------------------------------------------------------------


def compare(
    speeds: str | None = None,
    link: Quantity | None = None,
    model_size: Quantity | None = None,
    step: Quantity | None = None,
    batch_size: int = 32,
    latency: Quantity = 0.0,
    sites: int = 1,
    site_link: Quantity | None = None,
    site_latency: Quantity | None = None,
    scatter: float = 0.05,
    optimizer: Literal["sgd", "adam"] = "sgd",
    momentum: float = 0.9,
    json: bool = False,
) -> int:
    """Compare DDP, the best setting of this package and the best peer on your machines, and print what to write.

    Nothing is run: the times are those that OmniTuner, which measures steps, would predict.

    Args:
        speeds: Relative speeds of the devices, as in 1,1,1,0.25; or 8x1 for eight equal ones.
        link: Bandwidth of the network, as in 100Mbit or 1GB/s.
        model_size: Bytes of the weights in float32, as in 50MB.
        step: Time of forward and backward pass of one batch on a device of speed 1, as in 0.2s.
        batch_size: Samples in one device's batch.
        latency: Latency of one message, as in 50us, or in seconds.
        sites: Number of sites, among which the devices are divided in order.
        site_link: Bandwidth between sites. By default that of --link.
        site_latency: Latency of one message between sites. By default that of --latency.
        scatter: Scatter of a device's step times, as a part of their mean.
        optimizer: sgd, or adam for Adam and its relatives.
        momentum: Momentum that suits DDP (the first beta of Adam).
        json: Print JSON instead of a table.
    """
    if speeds is None or link is None or model_size is None or step is None:
        raise ConfigurationError(
            "compare: pass --speeds, --link, --model-size and --step, as in"
            " --speeds 1,1,1,0.25 --link 100Mbit --model-size 50MB --step 0.2s"
        )
    check_above_zero({"batch_size": batch_size, "sites": sites})
    check_momentum(momentum)
    if not 0 <= scatter <= 2:
        raise ConfigurationError(f"--scatter {scatter}: pass a part of the mean, from 0 to 2")
    if sites == 1 and (site_link is not None or site_latency is not None):
        raise ConfigurationError(
            "--site-link and --site-latency are of the network between sites, and there is one site: pass --sites, too"
        )
    given: dict[str, Any] = {
        "speeds": _speeds(speeds),
        "step": time_of("--step", step),
        "batch_size": batch_size,
        "nbytes": bytes_of("--model-size", model_size),
        "bandwidth": rate_of("--link", link),
        "latency": seconds_of("--latency", latency),
        "sites": sites,
        "site_bandwidth": None if site_link is None else rate_of("--site-link", site_link),
        "site_latency": seconds_of("--site-latency", latency if site_latency is None else site_latency),
        "scatter": scatter,
    }
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.cli.compare import ASSUMED, DescribedMachines, MachineComparison

    try:
        machines = DescribedMachines(**given)
    except ConfigurationError as error:
        raise ConfigurationError(f"--{error}") from error
    found = MachineComparison.of(machines, momentum, optimizer == "adam")
    if json:
        print_line(dumps(found.to_dict()))
        return 0
    show_table([row.cells for row in found.rows], ("", "setting"), found.title, found.best)
    print_sentence(found.verdict)
    print_line(found.snippet)
    if found.tuned_snippet:
        print_line(found.tuned_snippet)
    for line in (found.ddp_step, *ASSUMED):
        print_sentence(line)
    return 0


def _speeds(text: str) -> tuple[float, ...]:
    found: list[float] = []
    try:
        for part in text.split(","):
            count, times, speed = part.rpartition("x")
            found += [float(speed)] * (min(int(count), 1 << 16) if times else 1)  # `compare` refuses more than that
    except ValueError as error:
        raise ConfigurationError(
            f"--speeds {text}: pass a number for each device, as in 1,1,1,0.25, or 8x1 for eight equal ones"
        ) from error
    return tuple(found)


# --- plan -------------------------------------------------------------------------------------------------------------


def plan(
    file: Path,
    ranks: int | None = None,
    bandwidth: Quantity | None = None,
    latency: Quantity | None = None,
    servers: int | str | None = None,
    nodes: int | None = None,
    batch_size: float | None = None,
    method: str | None = None,
    compression: str | None = None,
    period: int | None = None,
    all_reduce: str | None = None,
    samples: float | None = None,
    momentum: float | None = None,
    lr: float | None = None,
) -> int:
    """Predict how fast more machines, or another network, would train, and with how many groups.

    Args:
        file: An omni-tuning.json that OmniTuner wrote.
        ranks: Number of devices, of the measured kinds. By default as measured.
        bandwidth: Bandwidth of the network, as in 10Gbit or 1GB/s, or in bytes per second. By default as measured.
        latency: Latency of one message, as in 50us, or in seconds. By default as measured.
        servers: Number of parameter servers that share the weights; or per-node, one on each node. By default as
            measured.
        nodes: Number of nodes, for per-node. By default each device is a node.
        batch_size: Samples in one device's batch. By default as measured.
        method: Method of the exchange, as in local_sgd. By default the best of those that OmniTuner searched, or the
            run's own.
        compression: Format of pushes, or of push and pull, as in int8 or int8/bf16. By default the best, likewise.
        period: Local steps between two exchanges. By default the best.
        all_reduce: Format in which the members of a group average gradients, as in powersgd:8; fp32 for uncompressed.
            By default the best, likewise.
        samples: Samples that training takes with one group, to predict its whole time.
        momentum: Momentum that suits a single group. By default the file's.
        lr: Learning rate that suits a single group. By default the file's.
    """
    check_above_zero({"samples": samples, "lr": lr})
    if batch_size is not None and not 1 <= batch_size < math.inf:
        raise ConfigurationError(f"--batch-size {batch_size}: pass a number of samples, 1 or more")
    check_momentum(momentum)
    _check_planned_servers(servers, nodes)
    rate = None if bandwidth is None else rate_of("--bandwidth", bandwidth)
    delay = None if latency is None else seconds_of("--latency", latency)
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.cli.plan import exchanges_of
    from lightning_omni.tuning.model.setting import Setting
    from lightning_omni.tuning.report import TuningReport
    from lightning_omni.tuning.report import plan as of

    search = TuningReport.load(file).rounds[-1].search
    start = search.spec.start
    own = Setting(1, start.momentum if momentum is None else momentum, start.lr if lr is None else lr)
    per_node = servers == "per-node"
    count = nodes or ranks or search.profile.ranks if per_node else servers
    changes = {"ranks": ranks, "bandwidth": rate, "latency": delay, "servers": count, "batch_size": batch_size}
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    given |= {"per_node": True} if per_node else {}
    ways = exchanges_of(search, method, compression, period, all_reduce)
    planned = of.Plan(search, given, own, ways)
    rows, title, best = of.rows(planned, samples), of.title(planned), planned.rows.index(planned.best)
    show_table(rows, ("batches", "exchange", "bottleneck"), title, best)
    for line in of.sentences(planned, samples):
        print_sentence(line)
    return 0


def _check_planned_servers(servers: int | str | None, nodes: int | None) -> None:
    if isinstance(servers, str) and servers != "per-node":
        raise ConfigurationError(f"--servers {servers}: pass a number of servers, or per-node")
    check_above_zero({name: each for name, each in (("servers", servers), ("nodes", nodes)) if isinstance(each, int)})
    if nodes is not None and servers != "per-node":
        raise ConfigurationError(f"--nodes {nodes}: it is for --servers per-node; pass both, or leave it out")


# --- simulate ---------------------------------------------------------------------------------------------------------

_SEPARATORS = re.compile(r"[\s;]+|,(?!\s*\w+\s*=)")
"""Separators between methods; a comma before ``name=`` separates settings of one method."""


def simulate(method: str | list[str] = "async_sgd", **settings: Any) -> int:
    """Simulate methods on a cluster, in virtual time with real gradients. Write a table, a picture and the traces.

    Of several methods, without --lr, short runs find the learning rate that suits each before its own run.

    Args:
        method: Name, with settings after a colon, as in diloco:period=50,outer_lr=1.0; append @2 for 2 groups, and @1
            for one group, which is plain synchronous training. Several names, separated by commas, semicolons or
            spaces (in YAML also a list), are compared in one picture.
        settings: See SimulationSettings.
    """
    entries = [method] if isinstance(method, str) else method
    names = list(dict.fromkeys(name for entry in entries for name in _SEPARATORS.split(entry) if name))
    if not names:
        raise ConfigurationError("--method: pass at least one, as in --method async_sgd,hardsync")
    from lightning_omni.cli.simulate import run  # here, so that --help does not wait for torch

    return run(names, SimulationSettings(**settings), together=len(names) > 1)


# --- serve ------------------------------------------------------------------------------------------------------------

HEARTBEAT_TIMEOUT, JOINED_HEARTBEAT_TIMEOUT = 30.0, 5.0
"""Seconds; the second is for groups that joined on their own, which join again after a false eviction."""
JOIN_TIMEOUT = 300.0
"""Seconds in which all ranks must arrive after the first one, or other servers once a rank asks for them."""

LARGEST_PORT = 65_535
LOOPBACK, SAVE_EVERY = "127.0.0.1", 30.0


def serve(
    host: str | None = None,
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
    http_host: str = LOOPBACK,
    state: Path | None = None,
    save_every: Quantity = SAVE_EVERY,
    progress_timeout: Quantity = 600.0,
) -> int:
    """Run a parameter server for runs with OmniStrategy(server="tcp://host:port").

    The server takes one run at a time; when it is over and its ranks have left, the next one may join. Stop it with
    Ctrl-C.

    Args:
        host: Address to listen on. By default loopback, or with --number the one that the coordinator reaches.
        port: Port of the control socket; 0 selects a free one.
        data_port: Port of the data socket; 0 selects a free one.
        key_file: File with the shared key, created on first use. Copy it to the machines that train.
        allow_optimizer: Optimizers outside torch.optim that ranks may use, as module:Class, separated by commas.
        allow_module: Modules outside torch.nn that a merged head may contain, as module:Class, separated by commas.
        heartbeat_timeout: Silence after which a rank counts as dead, as in 30s, or in seconds, at least 2. By default
            5s if groups join on their own, and 30s if all ranks are started together.
        threads: Threads for the optimizer's arithmetic.
        once: Exit after the first run; with status 143 if SIGTERM ends the server before.
        record: File for a record of all changes to the weights, to replay in the simulator; needs --once. Of several
            servers, the coordinating one writes it.
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
            read; 0 selects a free one. By default none.
        http_host: Address for --http; see --host.
        state: Directory in which a single server saves its state. If it is killed, another one continues its run at
            once (on Linux), or a server that you start with the same directory and address. Ranks try to reconnect for
            five minutes.
        save_every: Time between two saves in --state, as in 30s, or in seconds.
        progress_timeout: Time without progress after which a live group that has trained is evicted, as in 10min, or in
            seconds, at least 2; 0 for never.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads, which compute nothing here
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.cli.serve import Options, stand
    from lightning_omni.methods.model.modules import module_resolver
    from lightning_omni.methods.model.server_optimizer import resolver
    from lightning_omni.registry import to_wire
    from lightning_omni.transport import registry
    from lightning_omni.transport.serving.process import ServerSettings
    from lightning_omni.transport.zeromq import ZeroMQ
    from lightning_omni.transport.zeromq.addresses import check_address
    from lightning_omni.transport.zeromq.keys import load_or_create

    for option, given in (("--host", host), ("--http-host", http_host)):
        if given == "":
            raise ConfigurationError(f"{option} '': pass an address; is a variable of the shell empty?")
    _check_ports({"--port": port, "--data-port": data_port, "--http": http})
    check_above_zero({"threads": threads})
    here = _check_servers(servers, servers_here, number, coordinator, record)
    if state is not None:
        _check_state(servers, record, transport, port)
    if record is not None and not once:
        raise ConfigurationError(f"--record {record}: a record is of one run; pass --once, too")
    silence = seconds_of("--heartbeat-timeout", HEARTBEAT_TIMEOUT if heartbeat_timeout is None else heartbeat_timeout)
    if silence < 2:
        raise ConfigurationError(f"--heartbeat-timeout {heartbeat_timeout}: pass 2s or more: a busy rank may be late")
    progress = seconds_of("--progress-timeout", progress_timeout)
    if 0 < progress < 2:
        raise ConfigurationError(f"--progress-timeout {progress_timeout}: pass 2s or more, or 0 for never")
    key, where = load_or_create(key_file)
    settings = ServerSettings(
        key=key.hex(),
        host="" if number and host is None else host or LOOPBACK,  # "": the one that the coordinator reaches
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
        transport=to_wire(registry.load(transport)() if transport else ZeroMQ(encryption=encryption)),
        transports=(transport,) if transport else (),
        data_port=data_port,
        servers=servers,
        number=number,
        coordinator=coordinator,
        state=str(state or ""),
        save_every=time_of("--save-every", save_every),
    )
    for option, is_given, needed in (
        (f"--save-every {save_every}", settings.save_every != SAVE_EVERY and state is None, "--state"),
        (f"--http-host {http_host}", http_host != LOOPBACK and http is None, "--http"),
    ):
        if is_given:
            raise ConfigurationError(f"{option}: it is for {needed}, which is missing; pass both, or leave it out")
    if coordinator and not transport:
        check_address(coordinator, f"--coordinator {coordinator}")
    for path in settings.allow_optimizers:
        resolver(settings.allow_optimizers)(path)
    for path in settings.allow_modules:
        module_resolver(settings.allow_modules)(path)
    options = Options(here, once, http, http_host, where)
    return stand(settings, options, Console(stderr=True))


def _listed(option: str, given: str) -> tuple[str, ...]:
    paths = tuple(path.strip() for path in given.split(",")) if given else ()
    for path in paths:
        module, _, name = path.partition(":")
        if not module or not name:
            raise ConfigurationError(f"{option} {given}: pass module:Class, several separated by commas")
    return paths


def _check_ports(given: Mapping[str, int | None]) -> None:
    for option, port in given.items():
        if port is not None and not 0 <= port <= LARGEST_PORT:
            raise ConfigurationError(f"{option} {port}: pass a port, 1 to {LARGEST_PORT}, or 0 for a free one")


def _check_servers(servers: int, here: int, number: int, coordinator: str, record: Path | None) -> int:
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
    if servers > 1:
        raise UnsupportedError(
            f"--state --servers {servers}: several servers save no state; leave one of both out, and resume from a"
            " checkpoint"
        )
    for option, given, why in (
        ("--record", record, "a record is of one server from beginning to end"),
        ("--transport", transport, "ranks find a server again where they speak to it over ZeroMQ"),
        ("--port 0", not port, "ranks look for the server at the same address: name a port"),
    ):
        if given:
            raise ConfigurationError(f"--state {option}: {why}; leave one of both out")


# --- doctor -----------------------------------------------------------------------------------------------------------


def doctor(address: str, key_file: Path | None = None, mb: float = 100.0, encryption: str = "curve") -> int:
    """Check and measure the connection from this machine to a parameter server.

    It checks ports, key, versions, latency, and bandwidth, for at least 0.7 s in each direction, and predicts
    the time of an exchange. It does not join the run. The exit status is 1 if a check failed.

    Args:
        address: Address of the server, as in tcp://host:5555.
        key_file: File with the shared key. By default the key in LIGHTNING_OMNI_KEY, or else in serve's default file.
        mb: Size of the model's parameters in MB (of 4 bytes each), to predict the time of an exchange.
        encryption: "curve" or "off", as the server's.
    """
    check_above_zero({"mb": mb})
    with command_output() as output:
        _, wait_for = output
        wait_for("this program to load")
        from lightning_omni.cli.doctor import Checkup, examine  # here, so that --help does not wait for torch

        checkup = Checkup(output)
        examine(checkup, address, key_file, mb, encryption)
    for sentence in checkup.sentences():
        show(sentence)
    return int(checkup.has_failed)


# --- top --------------------------------------------------------------------------------------------------------------

CONNECT_TIME = 10.0
"""Seconds in which the server must answer at the beginning."""


def top(
    address: str,
    key_file: Path | None = None,
    every: Quantity = 1.0,
    once: bool = False,
    encryption: str = "curve",
) -> int:
    """Watch the run of a parameter server: groups, speeds, staleness, progress, joins and losses.

    It does not join the run.

    Args:
        address: Address of the server, as in tcp://host:5555.
        key_file: File with the shared key. By default the key in LIGHTNING_OMNI_KEY, or else in serve's default file.
        every: Time between two requests to the server, as in 2s, or in seconds.
        once: Print the table once and exit. The default if standard output is no terminal, or cannot overwrite lines
            (TERM=dumb).
        encryption: "curve" or "off", as the server's.
    """
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.cli.top import AGAIN, Rates, picture, watch
    from lightning_omni.transport.zeromq.keys import load_key
    from lightning_omni.transport.zeromq.observer import Observer

    seconds = time_of("--every", every)
    key = load_key(key_file)
    observer = Observer(address, key, encryption, CONNECT_TIME)
    console = Console()
    if not once and sys.stdout.isatty() and not console.is_dumb_terminal:
        watch(console, observer, lambda: Observer(address, key, encryption, AGAIN), seconds)
    with closing(observer):
        rates = Rates()
        rates.add(time.monotonic(), observer.overview())
        time.sleep(seconds)  # a rate needs two readings
        rates.add(time.monotonic(), overview := observer.overview())
    show(picture(overview, rates))
    return 0


# --- evict ------------------------------------------------------------------------------------------------------------


def evict(address: str, group: str, bar: bool = False, key_file: Path | None = None, encryption: str = "curve") -> int:
    """Evict a group from the run of a parameter server.

    Its ranks exit with the reason, and do not rejoin by themselves; its batches go back to the pool, and the other
    groups continue.

    Args:
        address: Address of the server, as in tcp://host:5555.
        group: Name of the group, as top shows it.
        bar: Let no group that connects from the same addresses join any more, where groups join on their own.
        key_file: File with the shared key. By default the key in LIGHTNING_OMNI_KEY, or else in serve's default file.
        encryption: "curve" or "off", as the server's.
    """
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.transport.zeromq.keys import load_key
    from lightning_omni.transport.zeromq.observer import Observer

    with closing(Observer(address, load_key(key_file), encryption, CONNECT_TIME)) as observer:
        groups = {each.status.name: each.status for each in observer.overview().groups}
        if group not in groups:
            remedy = f"pass one of: {', '.join(groups)}" if groups else "no group takes part in a run there"
            raise ConfigurationError(f"there is no group {group}; {remedy}")
        observer.evict(groups[group], bar)
    print_line(f"group {group} is evicted")
    return 0
