"""`OmniTuner`: Lightning's hooks, translated into what a fit does. What is decided is not known here.

Written once for both of Lightning's namespaces, as the strategy is (see ``pytorch_lightning.py`` and ``lightning.py``).
What comes of a hook is said by the `Fit`: a `TunedFit` where all ranks were started together, a `JoinedFit` where
groups join and leave.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from lightning_omni.checks import check_kind, check_number, check_whole, plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.search import Choice, Search, Space
from lightning_omni.strategy.arguments import refuses_unknown
from lightning_omni.strategy.hooks import OmniStrategyHooks, strategy_of
from lightning_omni.strategy.namespaces import need_namespace
from lightning_omni.tuner import names_for
from lightning_omni.tuner.beside import frequent_switches
from lightning_omni.tuner.fit import Fit, TunedFit, may_form_groups
from lightning_omni.tuner.joined_fit import JoinedFit
from lightning_omni.tuner.monitored_metric import MONITORED
from lightning_omni.tuner.run import TunedRun, TunerOptions, last_choice

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback as _CallbackBase
else:
    _CallbackBase = object

_MOST_SEED = (1 << 32) - (1 << 16)
"""Libraries take seeds below 2³², and a search adds small numbers to its own."""
_SMALLER = ("loss", "error")
"""What the names of metrics contain of which smaller values are better."""
_LARGER = {"acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "dice", "iou", "bleu", "map", "ndcg", "r2"}
"""Words in the names of metrics of which larger values are better."""


@dataclass(frozen=True)
class Found:
    """What a fit in other processes has found; see `OmniTunerHooks`, whose attributes these are."""

    searches: list[Search] = field(default_factory=list)
    problem: str = ""
    folder: Path | None = None


class OmniTunerHooks(_CallbackBase):
    """Choose the groups, method, momentum and learning rate with the shortest predicted time to the target.

    The run begins as it would without the tuner, in one group, and its first batches are timed: the compute time of
    each rank and the duration of the all-reduce. From these the tuner predicts the samples per second of every number
    of groups, method, number of local steps and wire format; their costs in samples are known from other tasks. A
    scikit-optimize phase then proposes what to train with: its surrogate model is this prediction, corrected by what
    the run has shown since. When a setting is predicted to be clearly faster, the run switches to it in the middle of
    the epoch: groups are formed, momentum and learning rate are set, and batches are split in proportion to the ranks'
    speeds where that pays. If no setting is faster, nothing changes. Groups that are slower than predicted are
    given up. No batch is discarded, and nothing is trained only to try it. See docs/tuning.md.

    With ``data="static"``, and with a sampler of your own, groups change at the end of the epoch.

    In a run that groups join on their own (``OmniStrategy(join=True)``) their number is given, and momentum and
    learning rate follow it whenever one joins, leaves or dies.

    It needs `OmniStrategy`, one optimizer, automatic optimization, and one DataLoader over a map-style dataset.

    Args:
        target: value of ``monitor`` that is to be reached soonest; None for the lowest loss at the end of the run.
        monitor: name of a logged metric, which is compared with ``target`` at validations.
        space: the search space: any of ``"groups"``, ``"method"``, ``"period"``, ``"wire"``, ``"overlap"``,
            ``"all_reduce"``, ``"merged"``, ``"momentum"``, ``"lr"``, ``"rebalance"``, each a value, a list, or the
            smallest and the largest value: ``{"groups": [1, 2, 4], "momentum": 0.9}``. ``"merged"`` names submodules
            that may become merged heads. By default groups are powers of two and the number of ranks, momentum is 0 to
            0.95 (or up to yours, if that is larger), the learning rate follows them, and batches may be split by speed;
            how groups exchange, and how their members average gradients, is searched unless you have chosen it
            (``method=``, ``wire=``, ``overlap=`` or ``all_reduce=`` of the strategy).
        budget: part of the run's time that choosing and forming groups may take, from 0 to below 1. 0 changes
            nothing.
        retune_every: epochs between two checks whether the setting is still the best; None for no checks.
        mode: ``"min"`` or ``"max"``: whether a smaller or a larger ``monitor`` is better; None decides by its name
            (``"min"`` if it contains "loss" or "error", otherwise ``"max"``), and with a ``target`` a name that says
            neither, such as "val_rmse", is refused.
        seed: of what scikit-optimize proposes.

    Attributes:
        choice: on rank 0, the latest choice, a `lightning_omni.search.Choice`.
        searches: on rank 0, all searches of this fit.
        problem: why nothing was searched; empty if there was no problem.
        folder: on rank 0, the folder of the report; None if there is none.

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
        self._found = Found()
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
    def searches(self) -> list[Search]:
        """All searches of this fit, on rank 0."""
        return self._found.searches if self._fit is None else self._fit.run.searches

    @property
    def choice(self) -> Choice | None:
        """What was chosen last; on rank 0."""
        return last_choice(self._found.searches) if self._fit is None else self._fit.run.choice

    @property
    def problem(self) -> str:
        """Why nothing was searched."""
        return self._found.problem if self._fit is None else self._fit.run.problem

    @property
    def folder(self) -> Path | None:
        """Where the report is; on rank 0."""
        return self._found.folder if self._fit is None else self._fit.run.folder

    # --- A fit is set up ----------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the strategy."""
        self._stage = stage
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, OmniStrategyHooks):
            raise ConfigurationError(
                f"OmniTuner forms compute groups, and {type(trainer.strategy).__name__} has none;"
                " pass Trainer(strategy=OmniStrategy())"
            )
        self._leave()
        if trainer.is_global_zero:  # by now a launcher has done so, if it is Lightning that starts the ranks
            self._load_libraries()
        names = names_for(trainer)
        run = TunedRun(trainer, pl_module, self._options, names.rank_zero_info)
        self._fit = JoinedFit(run) if run.strategy.joins else TunedFit(run)
        run.strategy.on_ready.append(self._fit.begin)

    def on_omni_launch(self, trainer: Trainer) -> None:
        """What a search needs comes up while the other ranks start: a server for several groups, and slow libraries."""
        self._load_libraries()
        if self.budget > 0 and may_form_groups(self._options, trainer):
            strategy_of(trainer).prepare_server()

    def _load_libraries(self) -> None:
        """Begins to import what a search needs: where it is first needed, all ranks would wait for it."""
        if self.budget > 0:
            threading.Thread(target=_import_libraries, name="omni-libraries", daemon=True).start()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The server is needed, or it is not."""
        self._fitting.fit_starts()

    # --- It trains ----------------------------------------------------------------------------------------------------

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Batches come."""
        self._fitting.epoch_starts()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Where no push is applied any more, the epoch ends early."""
        self._fitting.batch_starts()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Whether the run goes well with what was chosen, and how fast it is."""
        self._fitting.batch_done(outputs, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A synchronization point: is the setting still the best?"""
        self._fitting.epoch_done()

    # --- It validates -------------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """This is no training."""
        if self._fit is not None:
            self._fit.validation_starts()

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Which metrics a validation logs."""
        self._fitting.sanity_checked()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """How far the run is from its target."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._fitting.validated()

    # --- It ends ------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says if the target was not reached; the report gets to know how fast the run was with what was chosen."""
        self._fitting.ended()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """No hook of ours stays behind."""
        self._leave()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """No hook of ours stays behind."""
        self._leave()

    @override
    def state_dict(self) -> dict[str, Any]:
        """What was observed and chosen, as plain values: a resumed run goes on with it."""
        return self._fit.run.state_dict() if self._fit is not None else self._kept

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before the first batch it is known what is left to do. What a test loads says nothing of the last fit."""
        self._kept = state_dict
        if self._fit is not None and self._stage == "fit":
            self._fit.run.load_state_dict(state_dict)

    def omni_results(self) -> dict[str, Any]:
        """In rank 0's process, where the script's is another: what the script's is to know, in plain types."""
        folder = str(self.folder) if self.folder is not None else None
        return {"state": self.state_dict(), "problem": self.problem, "folder": folder}

    def take_omni_results(self, results: dict[str, Any]) -> None:
        """In the script's process: what rank 0's has found."""
        self._kept = results["state"]
        searches = [Search.from_dict(each) for each in self._kept.get("searches", ())]
        self._found = Found(searches, results["problem"], Path(results["folder"]) if results["folder"] else None)

    @property
    def _fitting(self) -> Fit:
        """The fit that is under way."""
        assert self._fit is not None
        return self._fit

    def _leave(self) -> None:
        if self._fit is None:
            return
        self._fit.close()
        if self._fit.begin in self._fit.run.strategy.on_ready:
            self._fit.run.strategy.on_ready.remove(self._fit.begin)


def _import_libraries() -> None:
    """Takes a second or two. Whatever is wrong with an installation is said where it is used."""
    with frequent_switches, suppress(ImportError):
        importlib.import_module("scipy.optimize")
        importlib.import_module("skopt")


__all__ = ["OmniTunerHooks"]
