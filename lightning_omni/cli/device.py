"""The model and the data of ``lightning-omni device``, and the lines to paste."""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast, get_args

import torch

from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator.workload import imported
from lightning_omni.tuning.device import DeviceReport
from lightning_omni.tuning.device.setting import DeviceSetting
from lightning_omni.tuning.device.tune import Bf16
from lightning_omni.tuning.trainer import tuner_module

_SYNTHETIC_BATCHES = 4


def measure(module: Any, given: dict[str, Any], batches: list[Any] | None, **options: Any) -> DeviceReport:
    with _quiet():
        probe = tuner_module(type(module)).DeviceProbe
        try:
            report: DeviceReport = probe.measure(module, given, batches, **options)
        except SystemExit as ended:
            if isinstance(ended.__context__, KeyboardInterrupt):  # which Lightning has replaced
                raise ended.__context__ from None
            raise
    return report


def made_from(text: str, what: str, arguments: dict[str, Any] | None = None) -> Any:
    make = imported(text, what, "class")
    try:
        inspect.signature(make).bind(**(arguments or {}))
    except TypeError as error:
        remedy = "pass its arguments with --arguments" if what == "model" else "name a class that needs none"
        raise ConfigurationError(f"{what} {text!r}: {error}; {remedy}") from error
    except ValueError:
        pass  # it has no signature
    return make(**(arguments or {}))


def data_of(
    module: Any, data: str | None, shape: list[int] | None, classes: int | None, batch_size: int | None
) -> tuple[dict[str, Any], list[Any] | None]:
    """Return arguments of `Trainer.fit`, and batches to measure with if these provide none."""
    if shape is not None:
        if data is not None:
            raise ConfigurationError("--data and --input exclude each other; leave one out")
        if not shape or min(shape) < 1:
            raise ConfigurationError("--input: pass numbers of 1 or more, as in --input '[3, 32, 32]'")
        batches = [_random(shape, classes, batch_size or 64, number) for number in range(_SYNTHETIC_BATCHES)]
        return {"train_dataloaders": torch.utils.data.DataLoader([0])}, batches  # type: ignore[arg-type]
    if batch_size is not None or classes is not None:
        raise ConfigurationError("--batch-size and --classes are for random data; pass --input, too, or leave them out")
    if data is None:
        if not _overrides(module, "train_dataloader"):
            raise ConfigurationError(
                "the model has no train_dataloader of its own; pass --data file.py:DataModule, or random data with"
                " --input '[3, 32, 32]' --classes 10"
            )
        return {}, None
    made = made_from(data, "data")
    return {"datamodule" if hasattr(made, "prepare_data") else "train_dataloaders": made}, None


def _random(shape: list[int], classes: int | None, size: int, seed: int) -> Any:
    """Return a batch of normal inputs, float32 (size, *shape), and labels, int64 (size,)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, *shape, generator=generator)
    return inputs if classes is None else (inputs, torch.randint(0, classes, (size,), generator=generator))


def _overrides(module: Any, name: str) -> bool:
    home = next((kind for kind in type(module).__mro__ if name in vars(kind)), object)
    return not _is_lightnings(home)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("lightning", "pytorch_lightning")


def bf16_of(text: str) -> Bf16:
    if text not in get_args(Bf16):
        raise ConfigurationError(f"--bf16 {text}: pass one of {', '.join(get_args(Bf16))}")
    return cast("Bf16", text)


def write(report: DeviceReport, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(report.to_dict(), indent=1))
    except OSError as error:
        raise ConfigurationError(f"--json: {str(path)!r}: {error.strerror}; pass a file that can be written") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Lightning's remarks on a Trainer that trains nothing."""
    with ExitStack() as kept, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, ("lightning.pytorch", "pytorch_lightning")):
            kept.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def lines_of(report: DeviceReport) -> str:
    setting = report.setting
    names = ("keep_memory", "channels_last", "compiled")
    values = {name: getattr(setting, name) for name in names}
    changed = ", ".join(f"{name}={value!r}" for name, value in values.items() if value != getattr(DeviceSetting, name))
    trainer = ['precision="bf16-mixed"'] if setting.bf16 else []
    trainer += [f"callbacks=[DeviceTuner(setting=DeviceSetting({changed}))]"] if changed else []
    text = []
    if changed:
        text += ["from lightning_omni import DeviceTuner", "from lightning_omni.tuning.device import DeviceSetting", ""]
    text += [f"trainer = Trainer({', '.join(trainer)})" + ("" if trainer else f"  # {report.of_none}")]
    return "\n".join(text)
