"""What was measured on a device, step by step, and what became of it: numbers, a table, a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from lightning_omni.errors import ConfigurationError
from lightning_omni.performance.setting import DeviceSetting

Verdict = Literal["applied", "proposed", "rejected", "skipped", "noted"]
"""In use; faster, but yours to decide; measured and not taken; not measured; nothing to decide."""

_STYLES = {"applied": "green", "proposed": "yellow", "rejected": "dim", "skipped": "dim", "noted": ""}


@dataclass(frozen=True)
class Finding:
    """One thing that was tried.

    Args:
        step: what is varied: ``"threads"``, ``"memory format"``, ...
        tried: what was tried, in words.
        verdict: what became of it.
        reason: why.
        before: samples per second without it; None if nothing was measured.
        after: samples per second with it.
        gain: median ratio of paired blocks; not quite ``after / before``, whose medians are each over all blocks.
        spread: smallest and largest of these ratios.
        pairs: number of pairs.
        seconds: that the measurement took.
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
class DeviceReport:
    """What a device can be made to give for a model.

    Args:
        findings: in the order in which things were tried, each beside the best that was known by then.
        setting: the best of what may be applied.
        proposal: the best of all that was measured; differs from `setting` by what was not allowed.
        baseline: samples per second with everything as it comes.
        tuned: samples per second with `setting`.
        gain: of `setting` over the baseline, measured in pairs of its own (the product of the steps' gains, and a row
            that says so, if there was no time for that); None if nothing is applied.
        batch_size: samples in the batches that were given.
        seconds: that all took.
        device: what was measured, in words.
        curves: throughput by batch size, and losses of the precision probe: name to numbers.

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

    @property
    def summary(self) -> str:
        """One sentence."""
        if self.gain is None:
            return f"{_number(self.baseline)} samples/s as it comes; nothing faster was found"
        times = f"{_number(self.tuned)} instead of {_number(self.baseline)} samples/s ({self.gain:.2f} times)"
        return f"{times}: {self.setting.words}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "setting": self.setting.to_dict(),
            "proposal": self.proposal.to_dict(),
            "findings": [asdict(finding) for finding in self.findings],
            "curves": {name: list(numbers) for name, numbers in self.curves.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeviceReport:
        """The report that `to_dict` wrote."""
        return cls(
            findings=tuple(
                Finding(**{**each, "spread": tuple(each["spread"]) if each["spread"] else None})
                for each in values["findings"]
            ),
            setting=DeviceSetting.from_dict(values["setting"]),
            proposal=DeviceSetting.from_dict(values["proposal"]),
            curves={name: tuple(numbers) for name, numbers in values["curves"].items()},
            **{name: values[name] for name in _PLAIN},
        )

    def table(self) -> Table:
        """For `rich.print`: one row for each thing that was tried."""
        table = Table(title=f"{self.device}, batches of {self.batch_size}", caption=self.summary)
        for head in ("step", "tried", "before", "after", "gain", "spread", "verdict"):
            right = head in ("before", "after", "gain", "spread")
            table.add_column(head, justify="right" if right else "left", overflow="fold", no_wrap=right)
        for each in self.findings:
            spread = f"{each.spread[0]:.2f}–{each.spread[1]:.2f}" if each.spread else "-"
            verdict = f"{each.verdict}: {each.reason}" if each.reason else each.verdict
            table.add_row(
                each.step,
                Text(each.tried),
                _number(each.before),
                _number(each.after),
                f"{each.gain:.2f}" if each.gain is not None else "-",
                spread,
                Text(verdict, style=_STYLES[each.verdict]),
            )
        return table

    def plot(self, path: str | Path) -> None:
        """Draws samples per second of all that was measured, and the curves.

        Args:
            path: the image file; its suffix says which kind.

        Raises:
            ConfigurationError: matplotlib is missing, or the file cannot be written.
        """
        try:
            _figure_of(self).savefig(path, dpi=120)
        except OSError as error:
            raise ConfigurationError(
                f"path={str(path)!r}: {error.strerror}; pass a file that can be written"
            ) from error


_PLAIN = ("baseline", "tuned", "gain", "batch_size", "seconds", "device")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _figure_of(report: DeviceReport) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "pictures need matplotlib; install it with: pip install lightning-omni[plot]"
        ) from error
    measured = [each for each in report.findings if each.after is not None]
    losses = {name: numbers for name, numbers in report.curves.items() if name.startswith("loss")}
    figure = Figure(figsize=(11, 1.8 + 0.3 * (len(measured) + 4)), layout="constrained")
    bars, curves = figure.subplots(1, 2)
    labels = ["as it comes", *(f"{each.step}: {each.tried}" for each in measured)]
    colours = {"applied": "tab:green", "proposed": "tab:orange"}
    bars.barh(
        labels,
        [report.baseline, *(each.after for each in measured)],
        color=["0.5", *(colours.get(each.verdict, "0.8") for each in measured)],
    )
    bars.invert_yaxis()
    bars.set(xlabel="samples/s", title="green: applied, orange: proposed")
    for name, numbers in losses.items():
        curves.plot(numbers, label=name.removeprefix("loss "), linewidth=1)
    if losses:
        curves.legend(fontsize="small")
        curves.set(xlabel="step", ylabel="loss", title="precision probe")
    elif "batch size" in report.curves:
        curves.plot(report.curves["batch size"], report.curves["samples/s"], marker=".")
        curves.set(xlabel="batch size", ylabel="samples/s", xscale="log")
    else:
        curves.set_axis_off()
    figure.suptitle(report.summary, fontsize="medium")
    return figure
