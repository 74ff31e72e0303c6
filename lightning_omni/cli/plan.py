"""``lightning-omni plan``: predicted groups, speed and time on other machines, from measurements on some."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Group
from rich.table import Table

from lightning_omni.cli.console import print_line, print_sentence, show, table_of
from lightning_omni.cli.output_files import check_file, make_folder
from lightning_omni.cli.units import Quantity, check_above_zero, rate_of, seconds_of
from lightning_omni.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_omni.tuning.report.plan import Plan, PlanSource, Ways

_Read = TypeVar("_Read")


def plan(
    file: Path,
    ranks: int | None = None,
    bandwidth: Quantity | None = None,
    latency: Quantity | None = None,
    servers: int | str | None = None,
    nodes: int | None = None,
    batch_size: float | None = None,
    method: str | None = None,
    wire: str | None = None,
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
        wire: Wire format of pushes and answers, as in int8 or int8/bf16. The default follows the rule for the method.
        period: Local steps between two exchanges. By default the best.
        all_reduce: Format in which the members of a group average gradients, as in powersgd:8; fp32 for uncompressed.
            The default follows the rule for the method.
        samples: Number of samples that training takes with one group, to predict the time of the whole training.
        momentum: Momentum that suits a single group. By default the file's; 0.9 if it has none.
        lr: Learning rate that suits a single group. By default the file's; if it has none, rates are multiples of it.
        out: Folder for the page, plan.html, and the picture.
    """
    check_above_zero({"samples": samples, "lr": lr})
    if batch_size is not None and not 1 <= batch_size < math.inf:
        raise ConfigurationError(f"--batch-size {batch_size}: pass a number of samples, 1 or more")
    if momentum is not None and not 0 <= momentum < 1:
        raise ConfigurationError(f"--momentum {momentum}: pass a number from 0 up to 1, but not 1")
    _check_servers(servers, nodes)
    rate = None if bandwidth is None else rate_of("--bandwidth", bandwidth)
    delay = None if latency is None else seconds_of("--latency", latency)
    from lightning_omni.tuning.report import plan as of  # here, so that --help does not wait for torch

    known = of.PlanSource.of(file)
    per_node = servers == "per-node"
    count = nodes or ranks or known.profile.ranks if per_node else servers
    cluster = of.PlannedCluster(known.profile, ranks, rate, delay, count, per_node, batch_size)  # type: ignore[arg-type]
    has_lr = known.search is not None or lr is not None
    ways = ways_of(known, method, wire, period, all_reduce)
    if out is not None:
        make_folder("--out", out)
        for each in of.files(out):
            check_file("--out", each)
    planned = of.Plan(cluster, known, known.theory(momentum, lr), ways, has_lr)
    show(*_tables(planned, samples))
    for line in of.sentences(planned, samples):
        print_sentence(line)
    if out is not None:
        for each in of.save(planned, samples, out):
            print_line(f"{'page' if each.suffix == '.html' else 'picture'}: {each}")
    return 0


def _tables(planned: Plan, samples: float | None) -> tuple[Table, Group]:
    """Return the table of a plan, and the same in three parts for narrow terminals."""
    from lightning_omni.tuning.report import plan as of

    rows, title, left = of.rows(planned, samples), of.title(planned), ("batches", "exchange", "bottleneck")
    best = planned.rows.index(planned.best)
    first, *heads = (head for head in rows[0] if head != "exchange")
    parts = [["exchange"], heads[:4], heads[4:]]
    tall = [
        table_of(rows, left, [first, *part], None if place else title, bold=best) for place, part in enumerate(parts)
    ]
    return table_of(rows, left, (), title, bold=best), Group(*tall)


def _check_servers(servers: int | str | None, nodes: int | None) -> None:
    if isinstance(servers, str) and servers != "per-node":
        raise ConfigurationError(f"--servers {servers}: pass a number of servers, or per-node")
    check_above_zero({name: each for name, each in (("servers", servers), ("nodes", nodes)) if isinstance(each, int)})
    if nodes is not None and servers != "per-node":
        raise ConfigurationError(f"--nodes {nodes}: it is for --servers per-node; pass both, or leave it out")


def ways_of(
    known: PlanSource, method: str | None, wire: str | None, period: int | None, all_reduce: str | None = None
) -> Ways:
    """Return the possible exchanges, from the file and the options that the user has passed.

    Raises:
        ConfigurationError: a name does not exist, or the options do not work together.
    """
    from lightning_omni.checks import check_whole
    from lightning_omni.methods import method_named, text_of
    from lightning_omni.tuning.report.plan import Ways
    from lightning_omni.tuning.search.space import ALL_REDUCES, METHODS, WIRES

    if period is not None:
        _as_option(lambda: check_whole("period", period, "local steps between two exchanges, 1 or more", low=1))
    spec = known.search.spec if known.search is not None else None
    methods: tuple[str, ...] = METHODS
    wires: tuple[str, ...] = WIRES
    if spec is not None:
        methods, wires = spec.space.method or (spec.start.method,), spec.space.wire or (spec.start.wire,)
    if method is not None:
        value = _as_option(lambda: method_named(method))
        methods = (text_of(value, without=("period",)),)
        if period is None and "period=" in method:
            period = getattr(value, "period", None)
    if wire is not None:
        wires = (wire,)
        _check_wire(wire, methods if method is not None else ())
    all_reduces = ALL_REDUCES if spec is None else spec.space.all_reduce
    if all_reduce is not None:
        all_reduces = _asked_all_reduce(all_reduce, known)
    return Ways(methods, wires, () if period is None else (period,), all_reduces if known.profile.shapes else ())


def _check_wire(wire: str, methods: Sequence[str]) -> None:
    """Raise a `ConfigurationError` if the wire format does not exist, or not for one of these methods."""
    from lightning_omni.methods import method_named
    from lightning_omni.tuning.search.space import wire_argument
    from lightning_omni.wire.formats import wire_of

    wire_format = _as_option(lambda: wire_of(wire_argument(wire)))
    for method in methods:
        _as_option(partial(wire_format.check, method_named(method)))


def _asked_all_reduce(all_reduce: str, known: PlanSource) -> tuple[str, ...]:
    """Return the all-reduce formats beside the exact one, if the user requests this one."""
    from lightning_omni.wire.all_reduce import EXACT, all_reduce_of

    if _as_option(lambda: all_reduce_of(all_reduce)) == EXACT:
        return ()
    if not known.profile.shapes:
        raise ConfigurationError(
            f"--all-reduce {all_reduce}: how many bytes that is depends on the parameters' shapes, which the file does"
            " not have; pass one that OmniTuner wrote, or leave it out"
        )
    return (all_reduce,)


def _as_option(read: Callable[[], _Read]) -> _Read:
    """Call ``read``, and name the option in its error."""
    try:
        return read()
    except ConfigurationError as error:
        name, equals, rest = str(error).partition("=")
        raise ConfigurationError(f"--{name.replace('_', '-')}{equals}{rest}") from error
