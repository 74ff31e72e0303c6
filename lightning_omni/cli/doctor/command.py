"""``lightning-omni doctor``: checks of the connection to a server, and the predicted time of an exchange."""

from __future__ import annotations

from pathlib import Path

from lightning_omni.cli.console import command_output, show
from lightning_omni.cli.units import check_above_zero


def doctor(address: str, key_file: Path | None = None, mb: float = 100.0, encryption: str = "curve") -> int:
    """Check and measure the connection from this machine to a parameter server.

    The command checks ports, key, versions, clock, latency, and bandwidth in both directions, for two seconds, and
    predicts the time of an exchange. Every failure shows a remedy. The command does not join the run. The exit status
    is 0, or 1 if a check failed.

    Args:
        address: Address of the server, as in tcp://host:5555.
        key_file: File with the shared key, by default the one that lightning-omni serve creates.
        mb: Size of the model's parameters in MB (of 4 bytes each), to predict the time of an exchange.
        encryption: "curve" or "off", the same as the server's.
    """
    check_above_zero({"mb": mb})
    with command_output() as tell:
        tell.wait_for("this program to load")
        from lightning_omni.cli.doctor.checkup import Checkup, examine  # here, so that --help does not wait for torch

        checkup = Checkup(tell)
        examine(checkup, address, key_file, mb, encryption)
    for sentence in checkup.sentences():
        show(sentence)
    return int(checkup.has_failed)
