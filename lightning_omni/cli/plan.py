"""``lightning-omni plan``: machines yet to be had, from what was measured on some: groups, speed, time."""

from __future__ import annotations

import math
from pathlib import Path

from lightning_omni.cli.console import say, show, tell
from lightning_omni.cli.units import Quantity, check_above_zero, rate_of, seconds_of
from lightning_omni.errors import ConfigurationError
from lightning_omni.palette import check_can_draw


def plan(
    file: Path,
    ranks: int | None = None,
    bandwidth: Quantity | None = None,
    latency: Quantity | None = None,
    batch_size: float | None = None,
    period: int | None = None,
    samples: float | None = None,
    momentum: float | None = None,
    lr: float | None = None,
    out: Path | None = None,
) -> int:
    """Says how fast more machines, or another network, would train, and with how many groups.

    Args:
        file: An omni-tuning.json that OmniTuner wrote, or the JSON of a Profile.
        ranks: Devices of the planned machines, of the kinds that were measured. None for those that were.
        bandwidth: Of the network, as in 10Gbit or 1GB/s, or in bytes per second. None for the one that was measured.
        latency: Of one message, as in 50us, or in seconds. None for the one that was measured.
        batch_size: Samples in one device's batch. None for those that were measured.
        period: Local steps between two exchanges. None for those that were measured.
        samples: Samples that training takes with the sample efficiency of the best probe, to know the time.
        momentum: Momentum that suits a single group. None for the file's; 0.9 if it has none.
        lr: Learning rate that suits a single group. None for the file's; if it has none, rates are multiples of it.
        out: Folder for a picture.
    """
    check_above_zero({"samples": samples, "lr": lr})
    if batch_size is not None and not 1 <= batch_size < math.inf:
        raise ConfigurationError(f"--batch-size {batch_size}: pass a number of samples, 1 or more")
    if momentum is not None and not 0 <= momentum < 1:
        raise ConfigurationError(f"--momentum {momentum}: pass a number from 0 up to 1, without 1")
    if out is not None:
        check_can_draw("--out: ")
    rate = None if bandwidth is None else rate_of("--bandwidth", bandwidth)
    delay = None if latency is None else seconds_of("--latency", latency)
    from lightning_omni.cli import planning as of  # not above: --help is not to wait for torch

    known = of.PlanSource.of(file)
    cluster = of.PlannedCluster(known.profile, ranks, rate, delay)
    has_lr = known.search is not None or lr is not None
    planned = of.Plan(cluster, known, known.efficiency(momentum, lr), batch_size, period, has_lr)
    show(of.table(planned, samples), of.tall_table(planned, samples))
    for line in of.sentences(planned, samples):
        tell(line)
    if out is not None:
        say(f"picture: {of.draw(planned, out)}")
    return 0
