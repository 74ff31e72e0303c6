"""Lightning's progress bar, whichever the user has, in a run of groups: its total, and one short entry.

Lightning knows beforehand how many batches a rank trains. Groups draw their batches from a common pool, so that a fast
one trains more of them: the total is what this rank comes to if all go on as so far. Nothing is replaced: a bar's total
and its `get_metrics` are public, and both are as they were when the fit is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

ENTRY = "omni"
"""Name of the entry."""


class ProgressDisplay:
    """Follows one fit on one rank."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._own: Callable[..., dict[str, Any]] | None = None
        self._text = ""

    def show(self, trainer: Trainer, expected: int | None) -> None:
        """A batch is done, and the bar has not heard of it yet.

        Args:
            trainer: whose bar it is.
            expected: batches of this rank in this epoch; None leaves the bar's own total.
        """
        bar: Any = trainer.progress_bar_callback  # whose total and entries the base class does not have
        if bar is None or not trainer.is_global_zero or getattr(bar, "is_disabled", False):
            return
        if bar is not self._bar:
            self.release()
            self._bar, self._own = bar, vars(bar).get("get_metrics")
            bar.get_metrics = partial(self._with_entry, bar.get_metrics)
        if expected is not None:
            # A bar of the user's own may have no such attribute, and none of Lightning's has it before its first batch.
            with contextlib.suppress(AttributeError, TypeError, AssertionError, IndexError):
                bar.train_progress_bar.total = expected

    def tell(self, metrics: Mapping[str, float]) -> None:
        """What the entry says from now on.

        Args:
            metrics: as they are logged.
        """
        rate = metrics.get("omni/updates_per_s")
        self._text = f"{_short(metrics['omni/staleness_mean'])} stale"
        if rate:  # the server has not counted for long yet
            self._text += f" {_short(rate)}/s"

    def release(self) -> None:
        """The fit is over: the bar is as it was."""
        if self._bar is not None:
            del self._bar.get_metrics
            if self._own is not None:
                self._bar.get_metrics = self._own
        self._bar, self._own, self._text = None, None, ""

    def _with_entry(self, get_metrics: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics = get_metrics(*args, **kwargs)
        return {**metrics, ENTRY: self._text} if self._text else metrics


def _short(value: float) -> str:
    """At most four characters for what is below 100,000."""
    if value >= 1000:
        return f"{value / 1000:.2g}k" if value < 9950 else f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
