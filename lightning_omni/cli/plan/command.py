"""``lightning-omni plan``: predicted groups, speed and time on other machines, from measurements on some."""

from __future__ import annotations

import math
from pathlib import Path

from lightning_omni.cli.console import print_line, print_sentence, show
from lightning_omni.cli.output_files import check_file, make_folder
from lightning_omni.cli.units import Quantity, check_above_zero, rate_of, seconds_of
from lightning_omni.errors import ConfigurationError


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
    out: Path | None = None,
) -> int:
    """Predict how fast more machines, or another network, would train, and with how many groups.

    Args:
        file: An omni-tuning.json that OmniTuner wrote, or the JSON of a Profile.
        ranks: Number of devices of the planned machines, of the measured kinds. By default as measured.
        bandwidth: Bandwidth of the network, as in 10Gbit or 1GB/s, or in bytes per second. By default as measured.
        latency: Latency of one message, as in 50us, or in seconds. By default as measured.
        servers: Number of parameter servers that share the weights; or per-node, one on each node. By default as
            measured.
        nodes: Nodes of the planned machines, for per-node. By default each device is a node.
        batch_size: Samples in one device's batch. By default as measured.
        method: Method of the exchange, as in local_sgd. By default the best of those that OmniTuner searches.
        compression: Format of pushes, or of push and pull, as in int8 or int8/bf16. The default follows the rule for
            the method.
        period: Local steps between two exchanges. By default the best.
        all_reduce: Format in which the members of a group average gradients, as in powersgd:8; fp32 for uncompressed.
            The default follows the rule for the method.
        samples: Number of samples that training takes with one group, to predict the time of the whole training.
        momentum: Momentum that suits a single group. By default the file's; 0.9 if it has none.
        lr: Learning rate that suits a single group. By default the file's; if it has none, rates are multiples of it.
        out: Folder for the page, plan.html.
    """
    check_above_zero({"samples": samples, "lr": lr})
    if batch_size is not None and not 1 <= batch_size < math.inf:
        raise ConfigurationError(f"--batch-size {batch_size}: pass a number of samples, 1 or more")
    if momentum is not None and not 0 <= momentum < 1:
        raise ConfigurationError(f"--momentum {momentum}: pass a number from 0 up to 1, but not 1")
    _check_servers(servers, nodes)
    rate = None if bandwidth is None else rate_of("--bandwidth", bandwidth)
    delay = None if latency is None else seconds_of("--latency", latency)
    # Imported here, so that --help does not wait for torch.
    from lightning_omni.cli.plan.exchanges import exchanges_of, tables
    from lightning_omni.tuning.report import plan as of

    known = of.PlanSource.of(file)
    per_node = servers == "per-node"
    count = nodes or ranks or known.profile.ranks if per_node else servers
    cluster = of.PlannedCluster(known.profile, ranks, rate, delay, count, per_node, batch_size)  # type: ignore[arg-type]
    has_lr = known.search is not None or lr is not None
    ways = exchanges_of(known, method, compression, period, all_reduce)
    if out is not None:
        make_folder("--out", out)
        check_file("--out", out / of.PAGE)
    planned = of.Plan(cluster, known, known.theory(momentum, lr), ways, has_lr)
    show(*tables(planned, samples))
    for line in of.sentences(planned, samples):
        print_sentence(line)
    if out is not None:
        print_line(f"page: {of.save(planned, samples, out)}")
    return 0


def _check_servers(servers: int | str | None, nodes: int | None) -> None:
    if isinstance(servers, str) and servers != "per-node":
        raise ConfigurationError(f"--servers {servers}: pass a number of servers, or per-node")
    check_above_zero({name: each for name, each in (("servers", servers), ("nodes", nodes)) if isinstance(each, int)})
    if nodes is not None and servers != "per-node":
        raise ConfigurationError(f"--nodes {nodes}: it is for --servers per-node; pass both, or leave it out")
