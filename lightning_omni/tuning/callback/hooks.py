"""`OmniTuner`: Lightning's hooks, translated into calls of a `Fit`, which decides."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from lightning_omni.checks import check_kind, check_number, check_whole, plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy.arguments import refuses_unknown
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.namespaces import need_namespace
from lightning_omni.tuning.callback.online_tuner import frequent_switches
from lightning_omni.tuning.callback.tuned_fit import MONITORED, Fit, JoinedFit, TunedFit, may_form_groups
from lightning_omni.tuning.callback.tuned_run import TunedRun, TunerOptions, TunerState, last_choice, strategy_of
from lightning_omni.tuning.report import Round
from lightning_omni.tuning.search import Choice, Search, Space
from lightning_omni.tuning.trainer import names_for

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback as _CallbackBase
else:
    _CallbackBase = object

_MOST_SEED = (1 << 32) - (1 << 16)
"""The largest seed: libraries take seeds below 2³², and a search adds small numbers to its own."""
_SMALLER = ("loss", "error")
"""Parts of the names of metrics that are better if smaller."""
_LARGER = {"acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "dice", "iou", "bleu", "map", "ndcg", "r2"}
"""Words in the names of metrics that are better if larger."""


class OmniTunerHooks(_CallbackBase):
    """A callback that chooses groups, method, momentum and learning rate for the shortest predicted time to a target.

    The run begins in one group, whose first batches are timed. When a setting is predicted to be clearly faster, the
    run switches to it in the middle of the epoch; groups that prove not to pay are given up. The timed batches
    count as training. See :doc:`/how-to/tuning`.

    With ``data="static"``, and with a sampler of your own, groups change at the end of the epoch. In a run that groups
    join on their own (``OmniStrategy(elastic=True)``) their number is given, and momentum and learning rate follow it.

    The callback needs `OmniStrategy`, one optimizer, automatic optimization, and one DataLoader over a map-style
    dataset.

    Args:
        target: value of ``monitor`` to reach; the log and the report state when it was reached. It changes no choice.
        monitor: name of a logged metric, which is compared with ``target`` at validations.
        space: the search space: any of ``"groups"``, ``"method"``, ``"period"``, ``"compression"``, ``"overlap"``,
            ``"all_reduce"``, ``"momentum"``, ``"lr"``, ``"rebalance"``, each a value, a list, or the smallest and the
            largest value: ``{"groups": [1, 2, 4], "momentum": 0.9}``; and user-defined dimensions. By default groups
            are powers of two and the number of ranks, momentum is 0 to 0.95 (or up to yours, if that is larger), the
            learning rate follows them, periods are powers of two up to 32, and batches may be split by speed; methods,
            wire formats and all-reduce formats are searched unless the strategy has ``method=``, ``compression=`` or
            ``overlap=``.
        budget: part of the run's time that choosing and forming groups may take, from 0 to below 1. 0 changes nothing.
        retune_every: epochs between two checks, at an epoch's end, whether the setting is still the best; there are
            others inside epochs. None checks for divergence only.
        mode: ``"min"`` or ``"max"``: whether a smaller or a larger ``monitor`` is better; None decides by its name
            (``"min"`` if it contains "loss" or "error", otherwise ``"max"``), and with a ``target`` a name that tells
            neither, such as "val_rmse", is refused.
        seed: seed of scikit-optimize's proposals.

    Attributes:
        choice: on rank 0, the latest `lightning_omni.tuning.search.Choice`.
        searches: the run's searches, including those from before it was resumed, unless with other ranks, new
            dimensions or ``budget=0``; only rank 0's list is complete.
        problem: why nothing was tuned; otherwise empty.
        folder: on rank 0 after training, the first logger's folder on this machine, for a report; otherwise None.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> from lightning_omni import OmniTuner
        >>> tuner = OmniTuner(target=0.88, monitor="val_acc")  # Trainer(strategy=OmniStrategy(), callbacks=[tuner])

    References:
        Hadjis et al. 2016, "Omnivore", for the objective.
    """

    @refuses_unknown
    def __init__(
        self,
        target: float | None = None,
        monitor: str = MONITORED,
        space: Mapping[str, Any] | None = None,
        budget: float = 0.1,
        retune_every: int | None = 1,
        mode: Literal["min", "max"] | None = None,
        seed: int = 0,
    ) -> None:
        need_namespace(type(self))
        super().__init__()
        if target is not None:
            check_number("target", target, "a finite number, or None", -sys.float_info.max, sys.float_info.max)
        check_kind("monitor", monitor, str, "the name of a metric that is logged")
        check_number(
            "budget",
            budget,
            "the part of the run's time that choosing and forming groups may take, from 0 to below 1, such as 0.1",
            0,
            below=1,
        )
        check_kind("space", space, (Mapping, type(None)), "a dictionary, or None")
        if retune_every is not None:
            check_whole("retune_every", retune_every, "a number of epochs, or None", low=1)
        if mode not in (None, "min", "max"):
            raise ConfigurationError(f'mode={mode!r}: pass "min", "max" or None')
        is_lower_better = any(each in monitor.lower() for each in _SMALLER)
        is_named = is_lower_better or not _LARGER.isdisjoint(re.split(r"[^a-z0-9]+", monitor.lower()))
        if mode is None and target is not None and not is_named:
            raise ConfigurationError(
                f"target={target} and monitor={monitor!r}: its name does not say whether a smaller or a larger value is"
                ' better; pass mode="min" or mode="max"'
            )
        check_whole("seed", seed, "a whole number from 0 up", high=_MOST_SEED)
        self._space = dict(space or {})
        self._further = Space.of(self._space, ranks=1 << 30).further
        self.target, self.monitor, self.budget = plain(target), monitor, plain(budget)
        self.retune_every, self.seed = plain(retune_every), plain(seed)
        self._mode = mode or ("min" if is_lower_better else "max")
        self._fit: Fit | None = None
        self._kept: dict[str, Any] = {}
        self._problem, self._folder = "", ""  # of a fit in other processes
        self._stage = ""

    @property
    def _options(self) -> TunerOptions:
        return TunerOptions(
            target=self.target,
            monitor=self.monitor,
            is_lower_better=self._mode == "min",
            budget=self.budget,
            space=self._space,
            further=self._further,
            retune_every=self.retune_every,
            seed=self.seed,
        )

    @property
    def omni_settings(self) -> str:
        """Return the arguments that must be equal in all groups that join a run."""
        return f"(space={dict(sorted(self._space.items()))}, budget={self.budget})"

    @property
    def searches(self) -> list[Search]:
        """Return the run's searches."""
        if self._fit is not None:
            return self._fit.run.searches
        return [Round.from_dict(each).search for each in self._kept.get("searches", ())]

    @property
    def choice(self) -> Choice | None:
        """Return the latest choice, on rank 0."""
        if self._fit is not None:
            return self._fit.run.choice
        return last_choice(self.searches, TunerState.from_dict(self._kept))

    @property
    def problem(self) -> str:
        """Return why nothing was tuned."""
        return self._problem if self._fit is None else self._fit.run.problem

    @property
    def folder(self) -> Path | None:
        """Return the report's folder, on rank 0."""
        if self._fit is not None:
            return self._fit.run.folder
        return Path(self._folder) if self._folder else None

    # --- Set-up -------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stage = stage
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, OmniStrategyHooks):
            raise ConfigurationError(
                f"OmniTuner forms compute groups, and {type(trainer.strategy).__name__} has none;"
                " pass Trainer(strategy=OmniStrategy())"
            )
        self._leave()
        if trainer.is_global_zero:  # Lightning's launcher has done so already if it starts the ranks
            self._load_libraries()
        names = names_for(trainer)
        run = TunedRun(trainer, pl_module, self._options, names.rank_zero_info)
        self._fit = JoinedFit(run) if run.strategy.world_options.elastic.join else TunedFit(run)
        run.strategy.parts.on_ready.append(self._fit.begin)

    def on_omni_launch(self, trainer: Trainer) -> None:
        """Start a server if several groups may form, and import slow libraries, while the other ranks start."""
        self._load_libraries()
        if self.budget > 0 and may_form_groups(self._options, trainer):
            strategy_of(trainer).parts.launching.prepare_server()

    def _load_libraries(self) -> None:
        if self.budget > 0:
            threading.Thread(target=_import_libraries, name="omni-libraries", daemon=True).start()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fitting.fit_starts()

    # --- Training -----------------------------------------------------------------------------------------------------

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fitting.interrupted()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._fitting.batch_starts()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._fitting.batch_done(outputs, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fitting.epoch_done()

    # --- Validation ---------------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.interrupted()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._fitting.validated()

    # --- End ----------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fitting.ended()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._fit.run.state_dict() if self._fit is not None else self._kept

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict
        if self._fit is not None and self._stage == "fit":
            self._fit.run.load_state_dict(state_dict)

    def omni_results(self) -> dict[str, Any]:
        """Return rank 0's results as plain values."""
        return {"state": self.state_dict(), "problem": self.problem, "folder": str(self.folder or "")}

    def take_omni_results(self, results: dict[str, Any]) -> None:
        """Load the results of rank 0's process in the script's process."""
        self._kept, self._problem, self._folder = results["state"], results["problem"], results["folder"]

    @property
    def _fitting(self) -> Fit:
        assert self._fit is not None
        return self._fit

    def _leave(self) -> None:
        if self._fit is None:
            return
        self._fit.close()
        if self._fit.begin in self._fit.run.strategy.parts.on_ready:
            self._fit.run.strategy.parts.on_ready.remove(self._fit.begin)


def _import_libraries() -> None:
    with frequent_switches(), suppress(ImportError):
        importlib.import_module("scipy.optimize")
        importlib.import_module("skopt")


__all__ = ["OmniTunerHooks"]
