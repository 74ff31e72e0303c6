"""``lightning-omni serve``: a parameter server that stands by itself."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from rich.console import Console

from lightning_omni.cli.console import INTERRUPTED
from lightning_omni.cli.units import Quantity, seconds_of


def serve(
    host: str = "127.0.0.1",
    port: int = 5555,
    data_port: int = 0,
    key_file: Path | None = None,
    allow_optimizer: str = "",
    allow_module: str = "",
    heartbeat_timeout: Quantity = 30.0,
    threads: int = 1,
    once: bool = False,
    record: Path | None = None,
    method: str = "",
    encryption: str = "curve",
    wire_format: str = "",
    transport: str = "",
) -> int:
    """Runs a parameter server that trainings join with OmniStrategy(server="tcp://host:port").

    One run at a time; when all its ranks have left, the next one may come. Ctrl-C ends the server.

    Args:
        host: Address to listen on. Loopback by default: other machines can connect only if you name an address here.
        port: Port of the control socket; 0 takes a free one.
        data_port: Port of the data socket; 0 takes a free one.
        key_file: File with the shared key, made on first use. Copy it to the machines that train.
        allow_optimizer: Optimizers outside torch.optim that ranks may ask for, as module:Class, separated by commas.
        allow_module: Modules outside torch.nn that a merged head may consist of, as module:Class, separated by commas.
        heartbeat_timeout: Silence after which a rank counts as dead, as in 30s, or in seconds.
        threads: Threads for the optimizer's arithmetic.
        once: End after the first run.
        record: File for a record of everything that moves the weights, to be gone through again in the simulator.
        method: Methods of your own that runs may use, as module:Class, separated by commas.
        encryption: "curve", or "off" on a network whose every user you trust; the runs must be given the same.
        wire_format: Wire formats of your own that runs may use, as module:Class, separated by commas.
        transport: A transport of your own in place of ZeroMQ, as module:Class; the runs must be given the same.
    """
    # Not above: --help is not to wait for torch.
    import torch

    from lightning_omni import methods
    from lightning_omni.methods.master import resolver
    from lightning_omni.methods.modules import module_resolver
    from lightning_omni.protocol import transport as transports
    from lightning_omni.protocol import wire_format as wire_formats
    from lightning_omni.protocol.record import RecordFile
    from lightning_omni.protocol.server import ServerCore
    from lightning_omni.server import ZeroMQ
    from lightning_omni.server.keys import load_or_create
    from lightning_omni.server.process import raise_limit_of_files

    console = Console(stderr=True)
    key, where = load_or_create(key_file)
    torch.set_num_threads(threads)
    for path in method.split(",") if method else ():
        methods.load(path)
    for path in wire_format.split(",") if wire_format else ():
        wire_formats.load(path)
    core = ServerCore(
        key,
        secrets.token_bytes,
        heartbeat_timeout=seconds_of("--heartbeat-timeout", heartbeat_timeout),
        resolve=resolver(allow_optimizer.split(",") if allow_optimizer else ()),
        clock=time.monotonic,
        resolve_module=module_resolver(allow_module.split(",") if allow_module else ()),
        record=RecordFile(record) if record is not None else None,
    )
    raise_limit_of_files()
    chosen = transports.load(transport)() if transport else ZeroMQ(encryption=encryption)
    server = chosen.serve(core, host, port, data_port)
    stopped = threading.Event()
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    # Never wrapped: programs read the address.
    console.print(
        f"parameter server on {server.address}, key from {where or 'the environment'}", soft_wrap=True, markup=False
    )

    def is_over() -> bool:
        if core.is_over:
            console.print(f"a run is over: {core.clock} updates, ranks lost: {len(core.roster.lost)}")
            if once:
                stopped.set()
            core.reset()
        return stopped.is_set()

    try:
        server.run(until=is_over)
    finally:
        server.close()
    console.print("parameter server stopped")
    return INTERRUPTED if signal.SIGINT in signals else 0
