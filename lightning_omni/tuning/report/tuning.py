"""`TuningReport`: the searches of one fit, as files for people and for programs."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.report.page import Section, page
from lightning_omni.tuning.report.run import Round, RunTimes, Written
from lightning_omni.tuning.report.summary import NAMES, SearchSummary
from lightning_omni.tuning.report.texts import number, times

_STEM = "omni-tuning"


@dataclass(frozen=True)
class TuningReport:
    """The searches of a fit, their results, and the predicted costs of other settings.

    Args:
        rounds: the first search and the retunings, in their order.
        target: value of ``monitor`` at which the run is over; None if none was named.
        monitor: name of a metric.
        times: the time spent so far; None before the run has trained.
        validated: seconds of training, and value of ``monitor``, at the end of each validation.
        written: when and where it was written; None if unknown.

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
    written: Written | None = None

    def __post_init__(self) -> None:
        if not self.rounds:
            raise ConfigurationError("rounds=(): pass at least one search")

    @cached_property
    def summaries(self) -> tuple[SearchSummary, ...]:
        """Return the derived numbers of each round."""
        return tuple(SearchSummary(each.search, each.measured_after) for each in self.rounds)

    @property
    def numbers(self) -> dict[str, float]:
        """Return the numbers of the last search's headline, by the names that they have in files and loggers."""
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
        return text if len(self.rounds) == 1 else f"since epoch {self.rounds[-1].epoch} {text}"

    # --- Files -------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        rounds = [each.to_dict() for each in self.rounds]
        times = self.times.to_dict() if self.times is not None else None
        return {
            "target": self.target,
            "monitor": self.monitor,
            "numbers": self.numbers,
            "statement": self.statement,
            "rounds": rounds,
            "times": times,
            "validated": [list(each) for each in self.validated],
            "written": self.written.to_dict() if self.written is not None else None,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TuningReport:
        """Rebuild a report from `to_dict`."""
        rounds = tuple(map(Round.from_dict, plain["rounds"]))
        times, written = plain["times"], plain["written"]
        return cls(
            rounds,
            plain["target"],
            plain["monitor"],
            RunTimes.from_dict(times) if times else None,
            tuple((float(seconds), float(value)) for seconds, value in plain["validated"]),
            Written.from_dict(written) if written else None,
        )

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``omni-tuning.json`` and ``omni-tuning.html``.

        Args:
            folder: the folder, which is created if it is missing.

        Returns:
            The files.

        Raises:
            ConfigurationError: a file cannot be written.
        """
        folder = Path(folder)
        files = [folder / f"{_STEM}.json", folder / f"{_STEM}.html"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files[0].write_text(json.dumps(self.to_dict()), encoding="utf-8")
            files[1].write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"folder={str(folder)!r}: {error.strerror}; pass a folder that can be written"
            ) from error
        return files

    @classmethod
    def load(cls, path: str | Path) -> TuningReport:
        """Read the JSON file that `save` wrote, or the one in a folder.

        Raises:
            ConfigurationError: the file is not a report.
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

    def html(self) -> str:
        """Return a page that includes its tables and styles, and loads nothing from elsewhere."""
        sections = [
            Section(place, each, summary)
            for place, (each, summary) in enumerate(zip(self.rounds, self.summaries, strict=True))
        ]
        return page(self.target, self.monitor, self.statement, self.times, sections, self.written)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame of its own."""
        text = html.escape(self.html())
        return f'<iframe srcdoc="{text}" style="width: 100%; height: 900px; border: 0"></iframe>'

    def table(self) -> Table:
        """Return a table for `rich.print`, with one row for each considered setting of all rounds."""
        right = [Column(head, justify="right") for head in ("samples/s", "samples", NAMES["speed_up"])]
        table = Table(
            Column("setting"), Column("proposed by"), *right, title="OmniTuner", caption=escape(self.statement)
        )
        for chosen, summary in zip(self.rounds, self.summaries, strict=True):
            if len(self.rounds) > 1:
                table.add_section()
                table.add_row(Text(f"epoch {chosen.epoch}: {summary.choice.setting}", style="bold"))
            for row in summary.considered:
                numbers = number(row.rate), times(row.samples), times(row.speed_up)
                table.add_row(Text(str(row.setting)), Text(row.by), *numbers)
        return table
