"""The metric that a run is tuned for, and a check as early as possible that the run logs it.

A metric that is logged in the sanity check is accepted; otherwise the first validations decide, as for EarlyStopping.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy import NAMESPACES
from lightning_omni.strategy.lightning_internals.callbacks import callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

MONITORED = "val_loss"
"""The default metric."""
_LATE = "on_train_epoch_end"
"""The hook whose metrics are missing until the second validation."""


class MonitoredMetric:
    """The metrics that were logged, until it is certain whether the wanted one is among them.

    Args:
        name: name of the metric.
        is_needed: whether anything depends on it.
    """

    def __init__(self, name: str, is_needed: bool) -> None:
        self.name, self._is_needed = name, is_needed
        self._known: set[str] = set()
        self._validations = 0
        self._is_decided = not is_needed

    def check_validated(self, trainer: Trainer) -> None:
        """Reject a fit in which the metric is never read.

        Raises:
            ConfigurationError: there is no validation.
        """
        if not self._is_decided and not trainer.enable_validation:
            raise ConfigurationError(
                f"target= is compared with monitor={self.name!r} when the run validates, and this one never does; pass"
                " validation data, or target=None"
            )

    def sanity_checked(self, names: Iterable[str]) -> None:
        self._add(names)

    @property
    def is_open(self) -> bool:
        """Return whether the next validation may still decide; the same on all ranks, even if their metrics differ."""
        return self._is_needed and self._validations < 2

    def validated(self, trainer: Trainer, module: LightningModule, names: Iterable[str]) -> str:
        """Record the metrics of a validation, and return an error message if the wanted one is missing."""
        self._add(names)
        self._validations += 1
        if self._is_decided or (self._validations == 1 and _may_log_late(trainer, module)):
            return ""  # metrics of an epoch's end appear in the next validation
        return self._problem

    def _add(self, names: Iterable[str]) -> None:
        self._known |= set(names)
        self._is_decided = self._is_decided or self.name in self._known

    @property
    def _problem(self) -> str:
        known = sorted(name for name in self._known if name.removesuffix("_step").removesuffix("_epoch") == name)
        near = difflib.get_close_matches(self.name, known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        there = f"Logged are {', '.join(known)}" if known else "Nothing is logged"
        return f"monitor={self.name!r}: no metric of that name is logged; {meant}{there}"


def _may_log_late(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether the hook `_LATE` of the module or a user's callback may log something."""
    owners = (module, *callbacks_of(trainer))
    return any(not _is_known(_home(each, _LATE)) for each in owners)


def _home(owner: Any, hook: str) -> type:
    return next((kind for kind in type(owner).__mro__ if hook in vars(kind)), object)


def _is_known(kind: type) -> bool:
    home = kind.__module__
    return kind is object or any(home.startswith(f"{name}.") for name in (*NAMESPACES, "lightning_omni"))
