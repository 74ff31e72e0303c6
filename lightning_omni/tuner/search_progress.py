"""What a user sees while `OmniTuner` searches: a progress bar where there is a terminal, and a line for each probe."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_omni.performance.forecast import log_costs
from lightning_omni.search import Observation, Probe, Search

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class SearchProgress:
    """Shows a search on rank 0.

    Args:
        trainer: whose progress bar is enabled or not.
        info: logs a message.
    """

    def __init__(self, trainer: Trainer, info: Callable[[str], None]) -> None:
        self._info = info
        visible = trainer.is_global_zero and trainer.progress_bar_callback is not None and sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("OmniTuner"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not visible,
        )
        self._task = self._bar.add_task("begins", total=1.0)

    def __enter__(self) -> SearchProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tries(self, search: Search, probe: Probe) -> None:
        """A probe begins."""
        known = math.isfinite(search.budget)
        left = f"{search.spent:.1f} of {search.budget:.1f} s spent" if known else "the first measurement"
        done = min(1.0, search.spent / search.budget) if known and search.budget else 0.0
        self._bar.update(self._task, completed=done, description=f"{probe.setting} ({probe.why}); {left}")

    def found(self, search: Search, probe: Probe, observation: Observation) -> None:
        """A probe has ended."""
        tried = observation.tried
        number = f"OmniTuner: probe {probe.number + 1}: {probe.setting} ({probe.why}): "
        left = f"; {search.spent:.1f} of {search.budget:.1f} s spent" if math.isfinite(search.budget) else ""
        if tried.has_failed:
            self._info(f"{number}{tried.problem or 'diverged'}{left}")
            return
        costs = [cost for cost, _ in log_costs(search.tried)]
        efficiency = (
            f"{math.exp(min(costs) - costs[-1]):.2f} of the best sample efficiency"
            if math.isfinite(costs[-1])
            else "no progress"
        )
        rate = f", {search.throughput(probe.setting):.4g} samples/s" if search.profile is not None else ""
        self._info(f"{number}loss {tried.last_loss:.4g} after {tried.end:.0f} samples, {efficiency}{rate}{left}")
