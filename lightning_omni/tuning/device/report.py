"""The report of a search on a device: findings, numbers, a table, a picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from lightning_omni.palette import CHOSEN, EXPECTED, FAINT, GREY, PROPORTIONAL, YOURS, new_figure, save_figure
from lightning_omni.serialization import Serializable
from lightning_omni.tuning.device.setting import DeviceSetting
from lightning_omni.tuning.device.timing import FEWEST, MARGIN

Verdict = Literal["applied", "proposed", "rejected", "skipped", "noted"]
"""In use; faster, but the user's decision; measured and not used; not measured; no decision."""

_STYLES = {"applied": "green", "proposed": "yellow", "rejected": "dim", "skipped": "dim", "noted": ""}


@dataclass(frozen=True)
class Finding:
    """The result for one candidate.

    Args:
        step: varied property: ``"threads"``, ``"memory format"``, ...
        tried: description of the candidate.
        verdict: decision about the candidate.
        reason: reason for the verdict.
        before: samples per second without the candidate; None if nothing was measured.
        after: samples per second with it.
        gain: median ratio of paired blocks; not quite ``after / before``, whose medians are each over all blocks.
        spread: smallest and largest of these ratios.
        pairs: number of pairs.
        seconds: duration of the measurement.
        preparation: seconds of the first step beyond a usual one: compilation. They do not count as throughput.
    """

    step: str
    tried: str
    verdict: Verdict
    reason: str = ""
    before: float | None = None
    after: float | None = None
    gain: float | None = None
    spread: tuple[float, float] | None = None
    pairs: int = 0
    seconds: float = 0.0
    preparation: float = 0.0


@dataclass(frozen=True)
class DeviceReport(Serializable):
    """The speed of a model on a device, and the settings that increase it.

    Args:
        findings: results in the order of the search, each compared to the best setting known by then.
        setting: best setting that may be applied.
        proposal: best measured setting; differs from `setting` in changes that were not allowed.
        baseline: samples per second with all defaults.
        tuned: samples per second with `setting`.
        gain: ratio of `setting` to the baseline, measured in separate pairs; if no time was left for them, the product
            of the steps' gains, which a row of the table states; None if nothing is applied.
        batch_size: samples in the given batches.
        seconds: duration of the search.
        device: description of the device.
        curves: by name, throughput by batch size, and losses of the precision probe.
        spread: smallest and largest of the paired ratios behind `gain`.

    Example:
        >>> found = Finding("threads", "2 instead of 1", "applied", before=100.0, after=150.0, gain=1.5)
        >>> report = DeviceReport((found,), DeviceSetting(threads=2), DeviceSetting(threads=2), 100.0, 150.0, 1.5, 32)
        >>> report.summary
        '150 instead of 100 samples/s (1.50 times): 2 threads'
    """

    findings: tuple[Finding, ...]
    setting: DeviceSetting
    proposal: DeviceSetting
    baseline: float
    tuned: float
    gain: float | None
    batch_size: int
    seconds: float = 0.0
    device: str = ""
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    spread: tuple[float, float] | None = None

    @property
    def noise(self) -> str:
        """Return a sentence about why the numbers are unreliable; empty if they are reliable.

        The smallest and the largest of n paired ratios enclose their true median with probability 1 - 2^(1-n): 75 % for
        three pairs, 98 % for seven. A comparison is inconclusive if that interval includes both no gain and a
        worthwhile one, and is wider than twice the least worthwhile gain. The machine is too noisy if the interval of
        the total gain includes no gain, or if half of the comparisons are inconclusive.
        """
        spreads = [each.spread for each in self.findings if each.spread is not None and each.pairs >= FEWEST]
        lost = [each for each in spreads if _says_nothing(each)]
        claim = self.gain is not None and self.spread is not None and self.spread[0] <= 1
        if not claim and (not lost or 2 * len(lost) < len(spreads)):
            return ""
        low, high = (self.spread if claim else None) or (min(each[0] for each in lost), max(each[1] for each in lost))
        what = "the gain in all" if claim else f"{len(lost)} of {len(spreads)} comparisons"
        return (
            f"this machine is too noisy for these numbers: paired ratios scatter from {low:.2f} to {high:.2f}, so that"
            f" {what} cannot be told from none; stop other programs and measure again, or raise the budget"
        )

    @property
    def of_none(self) -> str:
        """Return the phrase for a report without a gain; it claims nothing if nothing was compared."""
        has_compared = any(each.gain is not None for each in self.findings)
        return "nothing faster was found" if has_compared else "nothing was compared with them"

    @property
    def summary(self) -> str:
        """Return the result in one sentence."""
        if self.gain is None:
            return f"{_number(self.baseline)} samples/s with the defaults; {self.of_none}"
        scatter = f", {self.spread[0]:.2f} to {self.spread[1]:.2f}" if self.spread else ""
        times = f"{_number(self.tuned)} instead of {_number(self.baseline)} samples/s ({self.gain:.2f} times{scatter})"
        return f"{times}: {self.setting.words}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, including `noise`; None replaces a loss that is not finite."""
        curves = {
            name: [value if math.isfinite(value) else None for value in curve] for name, curve in self.curves.items()
        }
        return {**super().to_dict(), "curves": curves, "noise": self.noise}

    @classmethod
    @override
    def from_dict(cls, plain: Mapping[str, Any]) -> DeviceReport:
        """Rebuild a report from `to_dict`; None among the losses becomes NaN."""
        curves = {
            name: [math.nan if value is None else value for value in curve]
            for name, curve in plain.get("curves", {}).items()
        }
        return super().from_dict({**plain, "curves": curves})

    @property
    def _caption(self) -> str:
        return f"{self.summary}\n{self.noise}" if self.noise else self.summary

    @property
    def _title(self) -> str:
        return f"{self.device}, batches of {self.batch_size}"

    def table(self) -> Table:
        """Return a table for `rich.print`, with one row per candidate."""
        columns = [Column(head, overflow="fold") for head in ("step", "tried")]
        columns += [Column(head, justify="right", no_wrap=True) for head in ("before", "after", "gain", "spread")]
        table = Table(*columns, Column("verdict", overflow="fold"), title=self._title, caption=self._caption)
        for each in self.findings:
            table.add_row(
                each.step,
                Text(each.tried),
                _number(each.before),
                _number(each.after),
                f"{each.gain:.2f}" if each.gain is not None else "-",
                _interval(each.spread),
                Text(_verdict(each), style=_STYLES[each.verdict]),
            )
        return table

    def tall_table(self) -> Table:
        """Return a table for narrow terminals, with candidate and verdict below one another."""
        columns = [Column(head, justify="right", no_wrap=True) for head in ("samples/s", "gain", "spread")]
        tried = Column("tried", overflow="fold")
        table = Table(tried, *columns, title=self._title, caption=self._caption, show_lines=True)
        for each in self.findings:
            cell = Text(f"{each.step}: {each.tried}\n").append(_verdict(each), style=_STYLES[each.verdict])
            gain = f"{each.gain:.2f}" if each.gain is not None else "-"
            table.add_row(cell, _number(each.after), gain, _interval(each.spread))
        return table

    def plot(self, path: str | Path) -> None:
        """Draw the samples per second of all candidates, and the curves.

        Args:
            path: image file; its suffix selects the format.

        Raises:
            ConfigurationError: matplotlib is missing, or the file cannot be written.
        """
        save_figure(_figure_of(self), path)


def _says_nothing(spread: tuple[float, float]) -> bool:
    """Return whether an interval is wide and includes both no gain and a worthwhile one."""
    low, high = spread
    return low <= 1 and high >= 1 + MARGIN and high - low > 2 * MARGIN


def _interval(spread: tuple[float, float] | None) -> str:
    return f"{spread[0]:.2f}–{spread[1]:.2f}" if spread else "-"


def _verdict(finding: Finding) -> str:
    return f"{finding.verdict}: {finding.reason}" if finding.reason else finding.verdict


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _figure_of(report: DeviceReport) -> Any:
    measured = [each for each in report.findings if each.after is not None]
    figure = new_figure(12, 2.2 + 0.3 * (len(measured) + 4))
    from matplotlib.patches import Patch

    bars, curves = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _draw_rates(bars, report, measured)
    _draw_curves(curves, report.curves)
    named = {"defaults": YOURS, "applied": CHOSEN, "proposed": PROPORTIONAL, "not taken": FAINT}
    figure.legend(
        [Patch(color=colour) for colour in named.values()],
        list(named),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.suptitle("\n".join(line for part in report._caption.splitlines() for line in textwrap.wrap(part, 130)))
    return figure


def _draw_rates(bars: Any, report: DeviceReport, measured: Sequence[Finding]) -> None:
    labels = ["defaults", *(f"{each.step}: {each.tried}" for each in measured)]
    colours = {"applied": CHOSEN, "proposed": PROPORTIONAL}
    places = range(len(labels))
    bars.barh(
        places,
        [report.baseline, *(each.after for each in measured)],
        color=[YOURS, *(colours.get(each.verdict, FAINT) for each in measured)],
    )
    for place, each in enumerate(measured, 1):
        if each.spread is not None and each.before is not None:
            bars.plot([each.before * end for end in each.spread], [place, place], color="0.2", linewidth=1.2)
    bars.set_yticks(places, ["\n".join(textwrap.wrap(label, 34)) for label in labels], fontsize="small")
    bars.invert_yaxis()
    bars.set(xlabel="samples/s (line: smallest and largest of the paired ratios)", title="What was measured")


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw losses in other precisions, or throughput by batch size if no losses were recorded."""
    losses = {name: numbers for name, numbers in curves.items() if name.startswith("loss")}
    for place, (name, numbers) in enumerate(losses.items()):
        axes.plot(
            numbers,
            label=name.removeprefix("loss "),
            color=(YOURS, PROPORTIONAL, EXPECTED, GREY)[place % 4],
            linewidth=max(1.2, 3.2 - 2 * place),
        )
    if losses:
        axes.legend(fontsize="small")
        axes.set(xlabel="step", ylabel="loss", title="Losses in other precisions")
    elif (sizes := curves.get("batch size")) is not None:
        axes.plot(sizes, curves["samples/s"], marker=".", color=EXPECTED)
        axes.set(xlabel="batch size", ylabel="samples/s", xscale="log")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
    else:
        axes.set_axis_off()
