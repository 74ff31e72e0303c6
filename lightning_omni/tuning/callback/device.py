"""`DeviceTuner`: Lightning's hooks, translated into `tune_device`, which measures and decides.

The classes serve both of Lightning's namespaces, as the strategy does: each namespace's Callback is mixed in by
``pytorch_lightning.py`` and ``lightning.py``.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_omni.checks import check_kind, check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy.arguments import refuses_unknown
from lightning_omni.strategy.declared import is_fast_dev_run
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.namespaces import need_namespace
from lightning_omni.tuning.callback import _private, names_for
from lightning_omni.tuning.callback.reports.loggers import log
from lightning_omni.tuning.callback.step import arguments_of, log_nothing, loss_of
from lightning_omni.tuning.device import DeviceReport, DeviceSetting, Finding, tune_device
from lightning_omni.tuning.device.agreement import TOLERANCE
from lightning_omni.tuning.device.setting import contiguous
from lightning_omni.tuning.device.trial import same_rng_state
from lightning_omni.tuning.device.tune import usable_cores

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback as _CallbackBase
    from pytorch_lightning.strategies import DDPStrategy
else:
    _CallbackBase = object

_ALLOWABLE = ("precision",)
_PROPOSABLE = ("precision", "batch_size")
_BATCHES = 4
_MUCH = 0.1
"""Share of a step from which on a data loader without workers is reported."""


class DeviceTunerHooks(_CallbackBase):
    """A callback that finds the fastest settings of this device before the first batch, and trains with them.

    Measurements use copies of the model, with the module's own ``training_step`` and batches of its own data: weights,
    data order and RNG state of the run are those of a run without the callback. Settings that change results only by
    rounding are applied: threads, the C library's handling of freed memory, memory format, fused optimizer, compiled
    submodules. Precision is changed only if it is allowed. After the fit everything is restored.

    The callback works on a single device, and with DDPStrategy and OmniStrategy, where rank 0 measures and decides for
    all. See docs/how-to/devices.md.

    Args:
        allow: ``("precision",)`` allows training in bfloat16 (``"bf16-mixed"``, or TF32 on CUDA) if that is faster and
            the losses of a short probe agree. Batch size and number of workers cannot change within a fit.
        propose: further measurements for the report alone: ``"precision"``, ``"batch_size"``.
        budget: seconds for all measurements together.
        tolerance: largest difference between the loss curves of two precisions, as a fraction of the losses.
        setting: a setting of an earlier report, which is used without measuring; None measures.
        batches: a list of batches to measure with; None takes some of the train dataloader's, from its dataset.

    Attributes:
        report: the measurements, a `lightning_omni.tuning.device.DeviceReport`; None if nothing was measured.
        problem: why nothing was measured; None if something was.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> from lightning_omni import DeviceTuner
        >>> tuner = DeviceTuner(allow=("precision",))  # Trainer(callbacks=[tuner])
    """

    @refuses_unknown
    def __init__(
        self,
        allow: Iterable[str] = (),
        propose: Iterable[str] = ("precision",),
        budget: float = 60.0,
        tolerance: float = TOLERANCE,
        setting: DeviceSetting | None = None,
        batches: Sequence[Any] | None = None,
    ) -> None:
        need_namespace(type(self))
        super().__init__()
        allow, propose = _names("allow", allow), _names("propose", propose)
        for name in allow:
            if name in ("batch_size", "workers"):
                remedy = "batch_size= of your DataLoader" if name == "batch_size" else "Trainer(devices=)"
                raise ConfigurationError(
                    f"allow={name!r}: a fit cannot change it, since schedulers and data were laid out for what it"
                    f" began with; measure it with `lightning-omni device`, and set {remedy} yourself"
                )
        _check_names("allow", allow, _ALLOWABLE)
        _check_names("propose", propose, _PROPOSABLE)
        for name, value in (("budget", budget), ("tolerance", tolerance)):
            check_number(name, value, "a number above 0", above=0)
        check_kind("setting", setting, (DeviceSetting, type(None)), "a DeviceSetting, or None")
        if batches is not None and (not isinstance(batches, Sequence) or isinstance(batches, str) or not batches):
            raise ConfigurationError(f"batches={batches!r}: pass a list of at least one batch, or None")
        self.report: DeviceReport | None = None
        self.problem: str | None = None
        self._setting, self._batches = setting, batches
        self._is_given = setting is not None
        self._model: object = None  # the model of the setting; None if a checkpoint set it
        self._options: dict[str, Any] = {"allow": allow, "propose": propose, "budget": budget, "tolerance": tolerance}
        self._applied = ExitStack()
        self._stage = ""

    # --- Hooks --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reject a model of which each rank has a part."""
        self._stage = stage
        if isinstance(trainer.strategy, OmniStrategyHooks):
            trainer.strategy.check_whole("DeviceTuner measures copies of the model")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and apply a setting; everything is loaded by now, and no server has the weights yet."""
        self._forget_other_model(_description(pl_module))
        if self._setting is None:
            self._measure(trainer, pl_module)
        if self._setting is not None:
            self._applied = _apply(self._setting, trainer, pl_module, names_for(trainer).mixed_precision)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._applied.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore everything, since Lightning calls no teardown after an exception."""
        self._applied.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the setting and the report, with which a resumed run continues."""
        return {
            "setting": self._setting.to_dict() if self._setting is not None else None,
            "report": self.report.to_dict() if self.report is not None else None,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a setting and its report for a fit, unless a setting was passed as an argument."""
        if self._stage == "fit" and not self._is_given and state_dict.get("setting"):
            self._model, self._setting = None, DeviceSetting.from_dict(state_dict["setting"])
            self.report = DeviceReport.from_dict(state_dict["report"]) if state_dict.get("report") else None

    def omni_results(self) -> dict[str, Any]:
        """Return the results in rank 0's process as plain values, for the script's process."""
        return {"report": self.report.to_dict() if self.report is not None else None, "problem": self.problem}

    def take_omni_results(self, results: dict[str, Any]) -> None:
        """Load the results of rank 0's process in the script's process."""
        self.problem, report = results["problem"], results["report"]
        self.report = DeviceReport.from_dict(report) if report else None

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save tensors in the plain layout, which a fused optimizer expects where it loads them."""
        if self._setting is not None and self._setting.channels_last:
            for name in ("state_dict", "optimizer_states"):
                if name in checkpoint:
                    checkpoint[name] = contiguous(checkpoint[name])

    # --- Measuring ----------------------------------------------------------------------------------------------------

    def _forget_other_model(self, model: object) -> None:
        """Drop a setting that an earlier fit has found for another model."""
        if not self._is_given and self._model not in (None, model):
            self._setting = self.report = None
        self._model = model

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure on rank 0, and broadcast the result to all ranks."""
        self.problem = None  # an earlier fit may have set it
        answer: dict[str, Any] = {}
        if trainer.is_global_zero:
            try:
                report = self._probe(trainer, pl_module)
                answer = {"report": report.to_dict()}
            except ConfigurationError as error:
                answer = {"problem": str(error)}
        answer = trainer.strategy.broadcast(answer, src=0)
        if "problem" in answer:
            self.problem = str(answer["problem"])
            names_for(trainer).rank_zero_info(f"DeviceTuner: nothing is measured or changed: {self.problem}")
            return
        self.report = DeviceReport.from_dict(answer["report"])
        self._setting = self.report.setting
        self._publish(trainer, self.report)

    def _probe(self, trainer: Trainer, pl_module: LightningModule) -> DeviceReport:
        self._refuse(trainer, pl_module)
        with same_rng_state(), _muted(trainer, names_for(trainer).mute_logger):
            given = self._batches
            data = _LoadedBatches(given) if given is not None else _LoadedBatches.of(trainer.train_dataloader)
            batches = [
                trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
                for batch in data.batches
            ]
            report = tune_device(
                pl_module,
                TrainingStep(trainer, pl_module),
                trainer.optimizers[0],
                batches,
                cores=_cores(trainer),
                skip=_skipped(trainer),
                **self._options,
            )
        return data.noted_in(report)

    def _refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error for a fit that cannot be measured on a copy, or changed."""
        strategy = trainer.strategy
        if is_fast_dev_run(trainer):
            raise ConfigurationError("fast_dev_run trains too little")
        if type(strategy) not in names_for(trainer).strategies and not isinstance(strategy, OmniStrategyHooks):
            raise ConfigurationError(
                f"{type(strategy).__name__} keeps the weights in its own way; use a single device, DDPStrategy or"
                " OmniStrategy"
            )
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "with manual optimization a copy's training_step would step the optimizers of the run; use"
                " lightning_omni.tuning.device.tune_device with a loss of your own"
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(f"it needs one optimizer, and there are {len(trainer.optimizers)}")
        if _private.is_compiled(pl_module):
            raise ConfigurationError("the module was compiled before the Trainer got it; pass it uncompiled")
        if trainer.world_size > 1 and any(isinstance(each, torch.nn.SyncBatchNorm) for each in pl_module.modules()):
            raise ConfigurationError("SyncBatchNorm waits for the other ranks, and one rank measures alone")

    def _publish(self, trainer: Trainer, report: DeviceReport) -> None:
        """Report to the console, the loggers, and files in the first logger's folder."""
        names_for(trainer).rank_zero_info(f"DeviceTuner:\n{_text(report)}")
        metrics = {
            "omni/device/samples_per_s_before": report.baseline,
            "omni/device/samples_per_s": report.tuned,
            "omni/device/gain": report.gain or 1.0,
            "omni/device/seconds": report.seconds,
        }
        if (folder := log(trainer, metrics)) is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "device.json").write_text(json.dumps(report.to_dict(), indent=1))
        try:
            report.plot(folder / "device.png")
        except ConfigurationError as error:
            names_for(trainer).rank_zero_info(f"DeviceTuner: no picture: {error}")


class DeviceProbeHooks(DeviceTunerHooks):
    """A `DeviceTuner` of the command line, which measures and ends the fit before its first batch."""

    trainer_class: Callable[..., Any]

    @classmethod
    def measure(
        cls, module: LightningModule, data: Mapping[str, Any], batches: Sequence[Any] | None, **options: Any
    ) -> DeviceReport:
        """Measure a LightningModule in a Trainer of its own, with all hooks up to the first batch.

        Args:
            module: the LightningModule.
            data: arguments of ``Trainer.fit``: ``train_dataloaders`` or ``datamodule``.
            batches: batches to measure with, instead of the data's.
            **options: options of `tune_device`.

        Raises:
            ConfigurationError: the module cannot be measured.
        """
        probe = cls(batches=batches)
        probe._options = options
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = cls.trainer_class(
            devices=1, max_epochs=1, num_sanity_val_steps=0, callbacks=[probe], **dict.fromkeys(quiet, False)
        )
        trainer.fit(module, **data)
        if probe.report is None:
            raise ConfigurationError(probe.problem or "the fit ended before its first batch; does the model have data?")
        return probe.report

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure(trainer, pl_module)
        trainer.should_stop = True

    @override
    def _publish(self, trainer: Trainer, report: DeviceReport) -> None:
        """Leave the report to the command."""


def _names(argument: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ConfigurationError(f"{argument}={given!r}: pass a tuple, as in ({given!r},)")
    check_kind(argument, given, Iterable, "a tuple of names")
    return tuple(given)


def _check_names(argument: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ConfigurationError(f"{argument}={name!r}: pass some of {', '.join(map(repr, known))}")


_WIDTH = 140
"""Columns of a table in a log file."""
_WIDE = 110
"""Columns below which a wide table would break words."""


def _text(report: DeviceReport) -> str:
    file = io.StringIO()
    width = Console(stderr=True).width if sys.stderr.isatty() else _WIDTH  # where Lightning's messages go
    Console(file=file, width=width).print(report.table() if width >= _WIDE else report.tall_table())
    return file.getvalue()


def _cores(trainer: Trainer) -> int:
    """Return this rank's share of its machine's cores."""
    return max(1, usable_cores() // max(1, int(trainer.num_devices)))


def _skipped(trainer: Trainer) -> dict[str, str]:
    skipped = {}
    precision = trainer.precision_plugin.precision
    if precision != "32-true":
        skipped["precision"] = f"precision={precision!r} was chosen already"
    world = trainer.strategy.world if isinstance(trainer.strategy, OmniStrategyHooks) else None
    if world is not None and world.executor.exchanges:
        if not world.steps_at_worker:
            skipped["fused optimizer"] = "the optimizer steps at the parameter server, which takes fused kernels itself"
        if any(part.head is not None for part in world.parts):
            skipped["compile"] = "a part of the model is a merged head, which runs at the parameter server"
    return skipped


def _description(module: LightningModule) -> object:
    """Return a description that is the same for models that were built alike."""
    parameters = module.named_parameters()
    return type(module), [(name, None if is_lazy(each) else each.shape) for name, each in parameters]


# --- The training step of a copy --------------------------------------------------------------------------------------


class TrainingStep:
    """A LightningModule's ``training_step`` as a loss of model and batch, with nothing logged.

    Args:
        trainer: the Trainer of the copies.
        module: the module that is copied.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer: Trainer | None = trainer
        self._arguments = arguments_of(type(module).training_step)

    def __call__(self, module: LightningModule, batch: Any) -> Tensor:
        """Return the loss.

        Raises:
            ConfigurationError: the step returns none.
        """
        _mute(module)
        if self._trainer is None:
            found = module.training_step(batch, *self._arguments)
        else:
            module.trainer = self._trainer  # copies have none
            with self._trainer.precision_plugin.train_step_context():
                found = module.training_step(batch, *self._arguments)
        return loss_of(found)

    def __getstate__(self) -> dict[str, Any]:  # type: ignore[explicit-override, unused-ignore]  # from Python 3.11
        # Other processes have no trainer.
        return {**vars(self), "_trainer": None}


def _mute(module: LightningModule) -> None:
    each: Any  # a LightningModule, though not always the outermost
    for each in module.modules():
        if hasattr(type(each), "training_step") and "log" not in vars(each):
            each.log = each.log_dict = log_nothing
            each.all_gather = _stand_alone


def _stand_alone(*_: Any, **__: Any) -> None:
    raise ConfigurationError("training_step calls all_gather, and one rank measures alone")


@contextmanager
def _muted(trainer: Trainer, mute_logger: type) -> Iterator[None]:
    """Mute the loggers, as Lightning's own tuner does."""
    loggers = trainer.loggers
    trainer.loggers = [mute_logger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


# --- Data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LoadedBatches:
    """Some batches, and the time to load one.

    Args:
        batches: results of the collate function.
        seconds: time to load one in this process; 0 if they were given.
        processes: number of the loader's workers.
    """

    batches: Sequence[Any]
    seconds: float = 0.0
    processes: int = 0

    @classmethod
    def of(cls, loaders: Any) -> _LoadedBatches:
        """Load batches from the datasets of loaders, without samplers or leases."""
        began = time.perf_counter()
        batches = [_batch(loaders, number) for number in range(_BATCHES)]
        seconds = (time.perf_counter() - began) / _BATCHES
        return cls(batches, seconds, max(_processes(loaders)))

    def noted_in(self, report: DeviceReport) -> DeviceReport:
        """Return the report, with a row about loading."""
        if not self.seconds:
            return report
        share = self.seconds / (self.seconds + report.batch_size / report.tuned)
        text = f"loading a batch takes {share:.1%} of a step"
        if not self.processes and share >= _MUCH:
            text += ": pass num_workers= to the DataLoader"
        elif self.processes:
            text += " if one process does it"
        note = Finding("data loader", f"num_workers={self.processes}", "noted", text, seconds=_BATCHES * self.seconds)
        return replace(report, findings=(*report.findings, note))


def _batch(loader: Any, number: int) -> Any:
    """Load a batch of one loader, or of a tree of loaders as CombinedLoader takes it."""
    if isinstance(loader, Mapping):
        return {key: _batch(each, number) for key, each in loader.items()}
    if isinstance(loader, (list, tuple)):
        return [_batch(each, number) for each in loader]
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "the training data are a stream, and measuring with it would take batches from the run;"
            " pass DeviceTuner(batches=[...])"
        )
    dataset: Any = loader.dataset
    size = min(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1, len(dataset))
    generator = torch.Generator().manual_seed(number)
    indices = torch.randint(len(dataset), (size,), generator=generator).tolist()
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[index] for index in indices])


def _processes(loader: Any) -> list[int]:
    if isinstance(loader, Mapping):
        return [each for inner in loader.values() for each in _processes(inner)]
    if isinstance(loader, (list, tuple)):
        return [each for inner in loader for each in _processes(inner)]
    return [loader.num_workers]


# --- Applying ---------------------------------------------------------------------------------------------------------


def _apply(
    setting: DeviceSetting, trainer: Trainer, module: LightningModule, mixed_precision: Callable[..., Any]
) -> ExitStack:
    """Apply a setting to a fit, and return a stack that restores everything."""
    strategy, plugin = trainer.strategy, trainer.strategy.precision_plugin
    if setting.threads is not None:  # this rank's machine may have fewer cores than rank 0's
        setting = replace(setting, threads=min(setting.threads, _cores(trainer)))
    applied = setting.apply(module, trainer.optimizers[0] if trainer.optimizers else None)
    applied.callback(setattr, strategy, "precision_plugin", plugin)
    if setting.precision == "bf16-mixed" and plugin.precision == "32-true":
        strategy.precision_plugin = mixed_precision("bf16-mixed", strategy.root_device.type)
    if setting.channels_last and strategy.model is not strategy.lightning_module:
        # DDP has built its buckets for the old layout.
        strategy.model = strategy.lightning_module
        cast("DDPStrategy", strategy).configure_ddp()
    return applied
