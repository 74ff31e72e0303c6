"""ReduceLROnPlateau with ``interval="step"`` that monitors a metric of validations inside the epoch.

Lightning steps it by the number of a rank's batch. Groups train different numbers of batches. It is therefore stepped
when a rank's callbacks receive a validation, and counts the batches that DDP would have trained by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_omni.strategy import _private
from lightning_omni.wire.messages import EpochPlan

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Plateaus:
    """The schedulers of this kind in one fit."""

    def __init__(self) -> None:
        self._validated: set[str] | None = None  # metrics of validations; None until there was one
        self._points = 0

    def begin(self, plan: EpochPlan, trained: int) -> None:
        """Begin an epoch, or join it, after ``trained`` of its samples."""
        self._points = (trained + plan.validate_offset) // plan.validate_every if plan.validate_every else 0

    def stepped_by_batches(self, trainer: Trainer, configs: list[Any]) -> list[Any]:
        """Return the schedulers that monitor no metric of a validation."""
        return [config for config in configs if not self._waits(trainer, config)]

    def validated(self, trainer: Trainer, before: dict[str, Any], plan: EpochPlan, batches: int, size: int) -> None:
        """Step the schedulers that are due, after a validation that this rank's callbacks have received.

        Args:
            trainer: the Trainer of this rank.
            before: metrics before the validation.
            plan: plan of the epoch.
            batches: batches of the epoch under DDP, if it is over; 0 inside it.
            size: samples in a batch of all ranks.
        """
        now = _private.metrics_by_now(trainer)
        self._validated = (self._validated or set()) | {name for name in now if now[name] is not before.get(name)}
        self._points += 1
        done = batches or (self._points * plan.validate_every - plan.validate_offset) // size
        configs = [config for config in trainer.lr_scheduler_configs if self._waits(trainer, config)]
        if due := [config for config in configs if done % config.frequency == 0]:
            _private.step_plateaus(trainer, due)

    def _waits(self, trainer: Trainer, config: Any) -> bool:
        if not (config.reduce_on_plateau and config.interval == "step"):
            return False
        if self._validated is None:
            return config.monitor not in _private.metrics_by_now(trainer)
        return config.monitor in self._validated
