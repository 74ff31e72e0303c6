"""``lightning-omni top``: a live view of a server's run, with keys that evict groups."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from lightning_omni.cli.units import Quantity, time_of

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

    Like the ranks, the command needs the run's key, in LIGHTNING_OMNI_KEY or a file. It does not join the run.

    Args:
        address: Address of the server, as in tcp://host:5555.
        key_file: File with the shared key, by default the one that lightning-omni serve creates.
        every: Time between two requests to the server, as in 2s, or in seconds.
        once: Print the table once and exit. This is the default if standard output is not a terminal, or one that
            cannot overwrite lines (TERM=dumb).
        encryption: "curve" or "off", the same as the server's.
    """
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.cli.console import show
    from lightning_omni.cli.top.groups_table import Rates, picture
    from lightning_omni.cli.top.screen import AGAIN, watch
    from lightning_omni.transport.zeromq.keys import load_key
    from lightning_omni.transport.zeromq.observer import Observer

    seconds = time_of("--every", every)
    key = load_key(key_file)
    observer = Observer(address, key, encryption, CONNECT_TIME)
    console = Console()
    if not once and console.is_terminal and not console.is_dumb_terminal:
        return watch(console, observer, lambda: Observer(address, key, encryption, AGAIN), seconds)
    try:
        rates = Rates()
        rates.add(time.monotonic(), observer.overview())
        time.sleep(seconds)  # a rate needs two readings
        rates.add(time.monotonic(), overview := observer.overview())
    finally:
        observer.close()
    show(picture(overview, rates, keys=False))
    return 0
