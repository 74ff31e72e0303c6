"""`DeviceTuner`: Lightning's hooks, for both namespaces, translated into `tune_device`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from rich.console import Console
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_omni.checks import check_choice, check_kind, check_number
from lightning_omni.errors import ConfigurationError, describe
from lightning_omni.strategy.arguments import refuses_unknown
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.lightning_internals.callbacks import is_fast_dev_run
from lightning_omni.strategy.namespaces import need_namespace
from lightning_omni.tuning.device import DeviceReport, DeviceSetting, tune_device
from lightning_omni.tuning.device.setting import contiguous
from lightning_omni.tuning.device.trial import TOLERANCE, same_rng_state
from lightning_omni.tuning.device.tune import Bf16
from lightning_omni.tuning.trainer import arguments_of, folder_of, log, log_nothing, names_for

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback as _CallbackBase
    from pytorch_lightning.strategies import DDPStrategy
else:
    _CallbackBase = object

_BATCHES = 4


class DeviceTunerHooks(_CallbackBase):
    """A callback that finds the fastest settings of this device before the first batch, and trains with them.

    Measurements use copies: weights, data order and RNG state of the run are those of a run without the callback.
    Settings that change results only by rounding are applied: the C library's handling of freed memory, memory format,
    compiled submodules. After the fit everything is restored but the handling of freed memory.

    The callback works on a single device, and with DDPStrategy and OmniStrategy, where rank 0 measures and decides for
    all. See :doc:`/how-to/devices`.

    Args:
        bf16: ``"apply"`` trains in ``"bf16-mixed"`` if that is faster and the losses of a short probe agree;
            ``"propose"`` measures it for the report alone; ``"skip"`` does not measure it.
        budget: seconds for all measurements together.
        tolerance: largest difference between the loss curves of two precisions, as a fraction of the losses.
        setting: a setting of an earlier report, used without measuring; None measures, unless the checkpoint has one.
        batches: a list of batches to measure with; None takes some of the train dataloader's, from its dataset.

    Attributes:
        report: the `lightning_omni.tuning.device.DeviceReport`, if anything was measured.
        problem: why nothing was measured.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> from lightning_omni import DeviceTuner
        >>> tuner = DeviceTuner(bf16="apply")  # Trainer(callbacks=[tuner])
    """

    @refuses_unknown
    def __init__(
        self,
        bf16: Bf16 = "propose",
        budget: float = 60.0,
        tolerance: float = TOLERANCE,
        setting: DeviceSetting | None = None,
        batches: Sequence[Any] | None = None,
    ) -> None:
        need_namespace(type(self))
        super().__init__()
        check_choice("bf16", bf16, get_args(Bf16))
        for name, value in (("budget", budget), ("tolerance", tolerance)):
            check_number(name, value, "a number above 0", above=0)
        check_kind("setting", setting, (DeviceSetting, type(None)), "a DeviceSetting, or None")
        if batches is not None and (not isinstance(batches, Sequence) or isinstance(batches, str) or not batches):
            raise ConfigurationError(f"batches={batches!r}: pass a list of at least one batch, or None")
        self.report: DeviceReport | None = None
        self.problem: str | None = None
        self._setting, self._batches = setting, batches
        self._is_given = setting is not None
        self._options: dict[str, Any] = {"bf16": bf16, "budget": budget, "tolerance": tolerance}
        self._applied = ExitStack()
        self._stage = ""

    # --- Hooks --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stage = stage
        if stage == "fit" and not self._is_given:
            self._setting = self.report = None
        if isinstance(trainer.strategy, OmniStrategyHooks):
            trainer.strategy.parts.grouping.check_whole("DeviceTuner measures copies of the model")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the setting, measured if there is none, after all loading and before weights are sent to a server."""
        if self._setting is None:
            self._measure(trainer, pl_module)
        if self._setting is not None:
            self._applied = _apply(self._setting, trainer, pl_module, names_for(trainer).mixed_precision)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._applied.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo the setting, since Lightning calls no teardown after an exception."""
        self._applied.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "setting": self._setting.to_dict() if self._setting is not None else None,
            "report": self.report.to_dict() if self.report is not None else None,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._stage == "fit" and not self._is_given and state_dict.get("setting"):
            self._setting = DeviceSetting.from_dict(state_dict["setting"])
            self.report = DeviceReport.from_dict(state_dict["report"]) if state_dict.get("report") else None

    def omni_results(self) -> dict[str, Any]:
        """Return the results in rank 0's process for the script's process."""
        return {"report": self.report.to_dict() if self.report is not None else None, "problem": self.problem}

    def take_omni_results(self, results: dict[str, Any]) -> None:
        """Load the results of rank 0's process in the script's process."""
        self.problem, report = results["problem"], results["report"]
        self.report = DeviceReport.from_dict(report) if report else None

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save a channels_last model and its optimizer state in contiguous format; otherwise change nothing.

        A load without this callback has contiguous weights, and a fused optimizer needs state of their layout.
        """
        if self._setting is not None and self._setting.channels_last:
            for name in ("state_dict", "optimizer_states"):
                if name in checkpoint:
                    checkpoint[name] = contiguous(checkpoint[name])

    # --- Measuring ----------------------------------------------------------------------------------------------------

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.problem = None  # an earlier fit may have set it
        answer: dict[str, Any] = {}
        strategy = trainer.strategy  # no rank of a group that joins is the run's global zero
        if (strategy.world.torch_rank if isinstance(strategy, OmniStrategyHooks) else trainer.global_rank) == 0:
            try:
                report = self._probe(trainer, pl_module)
                answer = {"report": report.to_dict()}
            except Exception as error:  # of the user's dataset, say: other ranks wait for the answer
                answer = {"problem": str(error) if isinstance(error, ConfigurationError) else describe(error)}
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
            given = self._batches or [_load_batch(trainer.train_dataloader, number) for number in range(_BATCHES)]
            batches = [
                trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
                for batch in given
            ]
            loss = _loss_function(trainer, pl_module)
            return tune_device(
                pl_module, loss, trainer.optimizers[0], batches, skip=_skipped_steps(trainer), **self._options
            )

    def _refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        if getattr(pl_module, "_compiler_ctx", None) is not None:  # set by LightningModule's from_compiled
            raise ConfigurationError("the module was compiled before the Trainer got it; pass it uncompiled")
        if trainer.world_size > 1 and any(isinstance(each, torch.nn.SyncBatchNorm) for each in pl_module.modules()):
            raise ConfigurationError("SyncBatchNorm waits for the other ranks, and one rank measures alone")

    def _publish(self, trainer: Trainer, report: DeviceReport) -> None:
        file = io.StringIO()
        Console(file=file, width=100).print(report.table())
        names_for(trainer).rank_zero_info(f"DeviceTuner:\n{file.getvalue()}")
        metrics = {
            "omni/device/samples_per_s_before": report.baseline,
            "omni/device/samples_per_s": report.tuned,
            "omni/device/gain": report.gain or 1.0,
            "omni/device/seconds": report.seconds,
        }
        log(trainer, metrics)
        if (folder := folder_of(trainer)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "device.json").write_text(json.dumps(report.to_dict(), indent=1))


def _skipped_steps(trainer: Trainer) -> dict[str, str]:
    skipped = {}
    precision = trainer.precision_plugin.precision
    if precision != "32-true":
        skipped["precision"] = f"precision={precision!r} was chosen already"
    world = trainer.strategy.world if isinstance(trainer.strategy, OmniStrategyHooks) else None
    if world is not None and world.executor.exchanges and any(part.head is not None for part in world.parts):
        skipped["compile"] = "a part of the model is a merged head, which runs at the parameter server"
    return skipped


# --- The training step of a copy --------------------------------------------------------------------------------------


def _loss_function(trainer: Trainer, module: LightningModule) -> Callable[[Any, Any], Tensor]:
    """Return the ``training_step`` as a loss of model copy and batch, without logging."""
    arguments = arguments_of(type(module).training_step)

    def loss(copied: LightningModule, batch: Any) -> Tensor:
        _mute(copied)
        copied.trainer = trainer  # copies have none
        with trainer.precision_plugin.train_step_context():
            return _loss_of(copied.training_step(batch, *arguments))

    return loss


def _loss_of(found: Any) -> Tensor:
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, Tensor):
        raise ConfigurationError('training_step returns no loss: return it, or a dictionary with it as "loss"')
    return loss


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
    loggers = trainer.loggers
    trainer.loggers = [mute_logger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


# --- Data -------------------------------------------------------------------------------------------------------------


def _load_batch(loaders: Any, number: int) -> Any:
    """Load a batch from the loaders' datasets, without samplers or leases."""

    def load(loader: Any) -> Any:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                "the training data are a stream, and measuring with it would take batches from the run;"
                " pass DeviceTuner(batches=[...])"
            )
        dataset: Any = loader.dataset
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if size is None:
            raise ConfigurationError(
                "the DataLoader has no batch_size, and neither has its batch_sampler; pass DeviceTuner(batches=[...])"
            )
        size = min(size, len(dataset))
        generator = torch.Generator().manual_seed(number)
        indices = torch.randint(len(dataset), (size,), generator=generator).tolist()
        if hasattr(dataset, "__getitems__"):
            return loader.collate_fn(dataset.__getitems__(indices))
        return loader.collate_fn([dataset[index] for index in indices])

    return tree_map(load, loaders)


# --- Applying ---------------------------------------------------------------------------------------------------------


def _apply(
    setting: DeviceSetting, trainer: Trainer, module: LightningModule, mixed_precision: Callable[..., Any]
) -> ExitStack:
    strategy, plugin = trainer.strategy, trainer.strategy.precision_plugin
    applied = setting.apply(module, trainer.optimizers[0] if trainer.optimizers else None)
    applied.callback(setattr, strategy, "precision_plugin", plugin)
    if setting.bf16 and plugin.precision == "32-true":
        strategy.precision_plugin = mixed_precision("bf16-mixed", strategy.root_device.type)
    if setting.channels_last and strategy.model is not strategy.lightning_module:
        # DDP has built its buckets for the old layout.
        strategy.model = strategy.lightning_module
        cast("DDPStrategy", strategy).configure_ddp()
    return applied
