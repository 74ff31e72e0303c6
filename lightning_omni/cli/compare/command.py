"""``lightning-omni compare``: DDP, this package and its peers on machines that the user describes in one line."""

from __future__ import annotations

from json import dumps
from typing import Any, Literal

from lightning_omni.cli.console import print_line, print_sentence, show, table_of
from lightning_omni.cli.units import Quantity, bytes_of, check_above_zero, rate_of, seconds_of, time_of
from lightning_omni.errors import ConfigurationError


def compare(
    speeds: str | None = None,
    link: Quantity | None = None,
    model_size: Quantity | None = None,
    step: Quantity | None = None,
    batch_size: int = 32,
    latency: Quantity = 0.0,
    sites: int = 1,
    site_link: Quantity | None = None,
    site_latency: Quantity = 0.0,
    scatter: float = 0.05,
    optimizer: Literal["sgd", "adam"] = "sgd",
    momentum: float = 0.9,
    json: bool = False,
) -> int:
    """Compare DDP, the best setting of this package and the best peer on your machines, and print what to write.

    Nothing is run: the times are those that OmniTuner would predict. It measures the steps instead of asking for them.

    Args:
        speeds: Relative speeds of the devices, as in 1,1,1,0.25; or 8x1 for eight equal ones.
        link: Bandwidth of the network, as in 100Mbit or 1GB/s.
        model_size: Bytes of the weights in float32, as in 50MB.
        step: Time of forward and backward pass of one batch on a device of speed 1, as in 0.2s.
        batch_size: Samples in one device's batch.
        latency: Latency of one message, as in 50us, or in seconds.
        sites: Sites among which the devices are divided, in their order. The network between sites has its own options.
        site_link: Bandwidth between sites. By default that of the network.
        site_latency: Latency of one message between sites.
        scatter: Scatter of the times of a device's steps, as a part of their mean.
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
    if not 0 <= momentum < 1:
        raise ConfigurationError(f"--momentum {momentum}: pass a number from 0 up to 1, but not 1")
    if not 0 <= scatter <= 2:
        raise ConfigurationError(f"--scatter {scatter}: pass a part of the mean, from 0 to 2")
    given: dict[str, Any] = {
        "speeds": _speeds(speeds),
        "step": time_of("--step", step),
        "batch_size": batch_size,
        "nbytes": bytes_of("--model-size", model_size),
        "bandwidth": rate_of("--link", link),
        "latency": seconds_of("--latency", latency),
        "sites": sites,
        "site_bandwidth": None if site_link is None else rate_of("--site-link", site_link),
        "site_latency": seconds_of("--site-latency", site_latency),
        "scatter": scatter,
    }
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.cli.compare.comparison import ASSUMED, MachineComparison
    from lightning_omni.cli.compare.machines import DescribedMachines

    try:
        machines = DescribedMachines(**given)
    except ConfigurationError as error:
        raise ConfigurationError(f"--{error}") from error
    found = MachineComparison.of(machines, momentum, optimizer == "adam")
    if json:
        print_line(dumps(found.to_dict()))
        return 0
    rows = [row.cells for row in found.rows]
    show(table_of(rows, ("", "setting"), title=found.title, bold=found.best))
    print_sentence(found.verdict)
    print_line(found.snippet)
    for line in ASSUMED:
        print_sentence(line)
    return 0


def _speeds(text: str) -> tuple[float, ...]:
    """Return the speeds of ``"1,1,0.25"`` or ``"4x1,2x0.5"``."""
    found: list[float] = []
    try:
        for part in text.replace(" ", "").split(","):
            count, times, speed = part.rpartition("x")
            found += [float(speed)] * (int(count) if times else 1)
    except ValueError as error:
        raise ConfigurationError(
            f"--speeds {text}: pass a number for each device, as in 1,1,1,0.25, or 8x1 for eight equal ones"
        ) from error
    return tuple(found)
