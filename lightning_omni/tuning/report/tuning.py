"""`TuningReport`: the searches of one fit, as files for people and for programs."""

from __future__ import annotations

import html
import json
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_omni.errors import ConfigurationError
from lightning_omni.json_dataclasses import Serializable
from lightning_omni.palette import can_draw, png_of
from lightning_omni.tuning.report.summary import (
    ReportOrigin,
    Round,
    RunTimes,
    SearchSummary,
    duration,
    number,
    times,
)

# --- Page: one HTML file that includes its pictures and styles and needs no network -----------------------------------

# This module has the content of its tables; their layout is in `templates`.

_WORD = re.compile(r"[A-Za-z]{5,}")
"""A word that is longer than any unit."""
_COSTS = {
    "compute": "compute",
    "allreduce": "all-reduce",
    "exchange": "way to the server",
    "serve": "server",
    "link": "its link",
}


@dataclass(frozen=True)
class TextTable:
    """The content of a table.

    Attributes:
        heads: heads of the columns; if empty, the first column has them.
        chosen: index of the marked row.
        bars: by column, how full each row's cell is, from 0 to 1.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    chosen: int | None = None
    bars: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def is_numeric(self, column: int) -> bool:
        return all(_is_number(row[column]) for row in self.rows)


def _is_number(text: str) -> bool:
    return not text or text in ("–", "∞") or (text[0].isdigit() and not _WORD.search(text))


@dataclass(frozen=True)
class Section:
    """The part of the page about one search, whose index is ``place``."""

    place: int
    round: Round
    summary: SearchSummary
    png: bytes | None

    @property
    def title(self) -> str:
        name = "First search" if self.place == 0 else f"Retuning {self.place}"
        return f"{name}, epoch {self.round.epoch}"

    @property
    def picture(self) -> str:
        return "" if self.png is None else b64encode(self.png).decode()

    @property
    def finding(self) -> str:
        """Return the choice beside the user's own setting."""
        return self.summary.statement.partition("; ")[0]

    @property
    def overview(self) -> list[str]:
        chosen = str(self.summary.choice.setting)
        return [str(self.round.epoch), duration(self.round.seconds_run), chosen, self.summary.expense]

    @property
    def choice(self) -> TextTable:
        summary, search = self.summary, self.summary.search
        setting = summary.choice.setting
        rows = [[name, text] for name, text in summary.headline.items()]
        rows.append(["why", summary.choice.why])
        if (setting.groups, False) in summary.predictions:
            rows.append(["bottleneck", summary.bottleneck(summary.prediction(setting.groups))])
        rows.append(["search", f"{summary.ranks} ranks, batches of {search.spec.batch} in all; {summary.expense}"])
        return TextTable([], rows)

    @property
    def contributions(self) -> TextTable:
        parts = self.summary.contributions
        heads = ["", "samples/s", "samples to the target", "factor", "speed-up"]
        so_far = list(accumulate((each.speed_up for each in parts), mul, initial=1.0))
        rows = [["your own setting", "", "", "", times(1.0)]]
        rows += [
            [each.part, times(each.rate), times(each.samples), times(each.speed_up), times(total)]
            for each, total in zip(parts, so_far[1:], strict=True)
        ]
        return TextTable(heads, rows, len(rows) - 1, {4: [value / max(so_far) for value in so_far]})

    @property
    def considered(self) -> TextTable:
        rows = [
            [str(row.setting), row.by, number(row.rate), times(row.samples), times(row.speed_up)]
            for row in self.summary.considered
        ]
        chosen = [row.setting for row in self.summary.considered].index(self.summary.choice.setting) if rows else None
        heads = ["setting", "proposed by", "samples/s", "samples", "speed-up"]
        return TextTable(heads, rows, chosen)

    @property
    def segments(self) -> TextTable:
        rows = [
            [str(each.setting), times(math.exp(each.log_ratio)), f"{100 * math.sqrt(each.variance):.2g} %"]
            for each in self.summary.search.segments
        ]
        return TextTable(["trained with", "seconds, measured over predicted", "standard error"], rows)

    @property
    def hardware(self) -> TextTable:
        summary, setting = self.summary, self.summary.choice.setting
        rows = []
        for (groups, rebalance), prediction in summary.predictions.items():
            has_trained = groups != setting.groups or rebalance == setting.rebalance
            measured = self.round.measured_after.get(groups, math.nan) if has_trained else math.nan
            batches = "proportional" if rebalance else "equal"
            seconds = prediction.seconds_per_update.value
            rate = [str(prediction.samples_per_second), number(measured), number(1000 * seconds)]
            costs = [number(round(1000 * prediction.parts[name], 4)) for name in _COSTS]
            rows.append([str(groups), batches, *rate, *costs, summary.bottleneck(prediction)])
        key = setting.groups, setting.rebalance
        heads = ["groups", "batches", "samples/s", "in training", "ms per update", *_COSTS.values(), "bottleneck"]
        return TextTable(heads, rows, list(summary.predictions).index(key) if key in summary.predictions else None)

    @property
    def ranks(self) -> TextTable:
        speeds = self.summary.search.profile.speeds
        rows = [[str(rank), number(speed)] for rank, speed in enumerate(speeds)]
        return TextTable(["rank", "samples/s"], rows, bars={1: [speed / max(speeds) for speed in speeds]})


@cache
def templates() -> Environment:
    return Environment(
        loader=PackageLoader("lightning_omni.tuning.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _run(run: RunTimes, has_target: bool) -> TextTable:
    rows = [["trained", duration(run.training)], ["tuned", duration(run.tuning)]]
    if has_target:
        reached = "not reached" if run.to_target is None else run.sentence.removeprefix("the target was ")
        rows.append(["target", reached])
    return TextTable([], rows)


# --- Report -----------------------------------------------------------------------------------------------------------

_STEM = "omni-tuning"


@dataclass(frozen=True)
class TuningReport(Serializable):
    """The searches of a fit, their results, and the predicted costs of other settings.

    Args:
        rounds: the first search and the retunings, in order.
        target: value of ``monitor`` to be reached, if any.
        monitor: name of a metric.
        times: the time spent so far, if the run has trained.
        validated: seconds of training, and value of ``monitor``, at the end of each validation.
        written: when and where it was written, if known.

    Raises:
        ConfigurationError: there is no round.

    Example:
        >>> TuningReport((), target=None, monitor="val_loss")
        Traceback (most recent call last):
        ...
        lightning_omni.errors.ConfigurationError: rounds=(): pass at least one search
    """

    rounds: tuple[Round, ...]
    target: float | None
    monitor: str
    times: RunTimes | None = None
    validated: tuple[tuple[float, float], ...] = ()
    written: ReportOrigin | None = None

    def __post_init__(self) -> None:
        if not self.rounds:
            raise ConfigurationError("rounds=(): pass at least one search")

    @cached_property
    def summaries(self) -> tuple[SearchSummary, ...]:
        return tuple(SearchSummary(each.search, each.measured_after) for each in self.rounds)

    @property
    def numbers(self) -> dict[str, float]:
        """Return the numbers of the last search's headline, by their names in files and loggers."""
        return self.summaries[-1].numbers

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics for loggers."""
        found = {f"omni/tuner/{name}": value for name, value in self.numbers.items()}
        return found if self.times is None else {**found, **self.times.metrics}

    @property
    def statement(self) -> str:
        """Return a sentence about the last search."""
        text = self.summaries[-1].statement
        return text if len(self.rounds) == 1 else f"since epoch {self.rounds[-1].epoch}: {text}"

    # --- Files -------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, with the numbers and the sentence that follow from them."""
        return {"numbers": self.numbers, "statement": self.statement, **super().to_dict()}

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``omni-tuning.json``, ``omni-tuning.html`` and, if matplotlib is installed, ``omni-tuning.png``.

        A missing folder is created. Return the files.

        Raises:
            ConfigurationError: a file cannot be written.
        """
        folder = Path(folder)
        files = [folder / f"{_STEM}.json", folder / f"{_STEM}.html"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files[0].write_text(json.dumps(self.to_dict()), encoding="utf-8")
            files[1].write_text(self.html(), encoding="utf-8")
            if (picture := self.picture()) is not None:
                files.append(folder / f"{_STEM}.png")
                files[-1].write_bytes(picture)
        except OSError as error:
            raise ConfigurationError(
                f"folder={str(folder)!r}: {error.strerror}; pass a folder that can be written"
            ) from error
        return files

    @classmethod
    def load(cls, path: str | Path) -> TuningReport:
        """Read the JSON file that `save` wrote, or the one in a folder.

        Raises:
            ConfigurationError: no report can be read.
        """
        path = Path(path)
        path = path / f"{_STEM}.json" if path.is_dir() else path
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"path={str(path)!r}: no report ({error}); pass an {_STEM}.json that TuningReport.save wrote"
            ) from error

    # --- Presentation ------------------------------------------------------------------------------------------------

    def figure(self, which: int = -1) -> Any:
        """Return the picture of one round as a matplotlib figure, 1400 pixels wide.

        Raises:
            ConfigurationError: matplotlib is missing.
        """
        return self._drawn(which, self.summaries[which].statement)

    def _drawn(self, which: int, statement: str) -> Any:
        from lightning_omni.tuning.report.picture import draw, heading_of

        chosen, summary = self.rounds[which], self.summaries[which]
        when = f"epoch {chosen.epoch}, after {duration(chosen.seconds_run)} of training"
        foot = self.written.sentence if self.written is not None else ""
        loss = self.validated if "loss" in self.monitor else ()
        return draw(summary, heading_of(summary, when, foot, statement), loss, self.monitor)

    def picture(self, which: int = -1) -> bytes | None:
        """Return the picture of one round as the bytes of a PNG file; None if matplotlib is missing."""
        return png_of(self.figure(which)) if can_draw() else None

    def html(self) -> str:
        """Return a page that loads nothing from elsewhere."""
        places = range(len(self.rounds))
        pictures = [png_of(self._drawn(place, "")) if can_draw() else None for place in places]  # texts are beside them
        sections = [
            Section(place, *parts)
            for place, parts in enumerate(zip(self.rounds, self.summaries, pictures, strict=True))
        ]
        overview, target = [each.overview for each in sections], self.target
        heads = ["epoch", "training before", "choice", "spent"]
        return (
            templates()
            .get_template("tuning.html")
            .render(
                until="" if target is None else f" until {self.monitor} is {number(target)}",
                statement=self.statement,
                is_outside=sections[-1].summary.is_outside,
                written=self.written.sentence if self.written is not None else "",
                run=None if self.times is None else _run(self.times, target is not None),
                searches=TextTable(heads, overview, len(overview) - 1) if len(overview) > 1 else None,
                sections=list(reversed(sections)),  # the latest search is at the top
            )
        )

    def _repr_html_(self) -> str:
        text = html.escape(self.html())
        return f'<iframe srcdoc="{text}" style="width: 100%; height: 900px; border: 0"></iframe>'
