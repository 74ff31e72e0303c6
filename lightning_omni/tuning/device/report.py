"""The report of a search on a device: findings, numbers, a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.table import Column, Table
from rich.text import Text

from lightning_omni.serialization import Serializable
from lightning_omni.tuning.device.setting import DeviceSetting

Verdict = Literal["applied", "proposed", "rejected", "skipped"]
"""In use; faster, but the user's decision; measured and not used; not measured."""

_STYLES = {"applied": "green", "proposed": "yellow", "rejected": "dim", "skipped": "dim"}


@dataclass(frozen=True)
class Finding:
    """The result for one candidate.

    Args:
        step: varied property: ``"allocator"``, ``"memory format"``, ...
        tried: description of the candidate.
        verdict: decision about the candidate.
        reason: reason for the verdict.
        after: samples per second with the candidate; None if nothing was measured.
        gain: median ratio of paired blocks; with the candidate over without it.
        spread: smallest and largest of these ratios.
    """

    step: str
    tried: str
    verdict: Verdict
    reason: str = ""
    after: float | None = None
    gain: float | None = None
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class DeviceReport(Serializable):
    """The speed of a model on a device, and the settings that increase it.

    Args:
        findings: results in the order of the search, each compared to the best setting known by then.
        setting: best setting that may be applied.
        proposal: best measured setting; differs from `setting` in changes that were not allowed.
        baseline: samples per second with all defaults.
        tuned: samples per second with `setting`.
        gain: ratio of `setting` to the baseline, measured in separate pairs; None if nothing is applied.
        batch_size: samples in the given batches.
        seconds: duration of the search.
        device: description of the device.
        spread: smallest and largest of the paired ratios behind `gain`.

    Example:
        >>> found = Finding("memory format", "channels_last", "applied", after=150.0, gain=1.5)
        >>> setting = DeviceSetting(channels_last=True)
        >>> DeviceReport((found,), setting, setting, 100.0, 150.0, 1.5, 32).summary
        '150 instead of 100 samples/s (1.50 times): channels_last'
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
    spread: tuple[float, float] | None = None

    @property
    def of_none(self) -> str:
        """Return the phrase for a report without a gain; it claims nothing if nothing was compared."""
        was_compared = [each.gain is not None for each in self.findings]
        return "nothing faster was found" if any(was_compared) else "nothing was compared with them"

    @property
    def summary(self) -> str:
        """Return the result in one sentence."""
        if self.gain is None:
            return f"{_number(self.baseline)} samples/s with the defaults; {self.of_none}"
        scatter = f", {self.spread[0]:.2f} to {self.spread[1]:.2f}" if self.spread else ""
        times = f"{_number(self.tuned)} instead of {_number(self.baseline)} samples/s ({self.gain:.2f} times{scatter})"
        return f"{times}: {self.setting.words}"

    def table(self) -> Table:
        """Return a table for `rich.print`, with one row per candidate, that fits a terminal of 80 columns."""
        columns = [Column(head, justify="right", no_wrap=True) for head in ("samples/s", "gain", "spread")]
        table = Table(
            Column("tried", overflow="fold"),
            *columns,
            title=f"{self.device}, batches of {self.batch_size}",
            caption=self.summary,
            show_lines=True,
        )
        for each in self.findings:
            verdict = f"{each.verdict}: {each.reason}" if each.reason else each.verdict
            cell = Text(f"{each.step}: {each.tried}\n").append(verdict, style=_STYLES[each.verdict])
            gain = f"{each.gain:.2f}" if each.gain is not None else "-"
            spread = f"{each.spread[0]:.2f}–{each.spread[1]:.2f}" if each.spread else "-"
            table.add_row(cell, _number(each.after), gain, spread)
        return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
