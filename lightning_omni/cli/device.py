"""``lightning-omni device``: how this machine trains a model of yours fastest. A table, JSON, and lines to paste."""

from __future__ import annotations

import importlib.util
import inspect
import json as jsons
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lightning_omni.errors import ConfigurationError
from lightning_omni.performance import DeviceReport
from lightning_omni.performance.device import ALLOWABLE
from lightning_omni.performance.setting import DeviceSetting
from lightning_omni.simulator import workload
from lightning_omni.tuner import tuner_module

_WIDTH = 160
"""Columns of a table that goes into a file or a pipe."""

_SYNTHETIC_BATCHES = 4


def device(
    model: str,
    data: str | None = None,
    arguments: dict[str, Any] | None = None,
    input: list[int] | None = None,
    classes: int | None = None,
    batch_size: int | None = None,
    allow: str = "",
    propose: str = "precision,batch_size,workers",
    budget: float = 120.0,
    tolerance: float = 0.02,
    json: Path | None = None,
    picture: Path | None = None,
) -> int:
    """Measures how this machine trains a model fastest: threads, memory, optimizer, compilation, precision, batch.

    Args:
        model: The LightningModule, as file.py:Class or package.module:Class.
        data: A LightningDataModule, or a function that returns a DataLoader, named like the model. Without it the
            model's own train_dataloader, or random data made by --input.
        arguments: Of the model's constructor, as in '{"width": 64}'.
        input: Shape of one sample of random data, as in "[3, 32, 32]".
        classes: Labels of random data are 0 to this less one; without it the batch is the inputs alone.
        batch_size: Samples in a batch of random data, 64 by default; real data come with theirs.
        allow: What may be taken though it changes the statistics of training: precision, batch_size, workers,
            separated by commas.
        propose: Which of these are measured at least.
        budget: Seconds for all measurements.
        tolerance: How far apart the loss curves of two precisions may be, as a fraction of the losses.
        json: File for the report.
        picture: File for a picture of it (.png, .svg or .pdf).
    """
    _check_files(json, picture)
    allowed, proposed = _names("allow", allow), _names("propose", propose)
    module = _made(model, "model", arguments or {})
    if not hasattr(module, "training_step"):
        raise ConfigurationError(f"model {model!r} is no LightningModule: it has no training_step")
    given, batches = _data(module, data, input, classes, batch_size)
    console = Console(stderr=True)
    with _bar(console) as show, _quiet():
        report: DeviceReport = tuner_module(_flavour(module)).DeviceProbe.measure(
            module,
            given,
            batches,
            allow=allowed,
            propose=proposed,
            budget=budget,
            tolerance=tolerance,
            progress=show,
        )
    _write(report, json, picture)
    out = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    out.print(report.table())
    out.print(Text(_lines(report)), soft_wrap=True)
    return 0


# --- What is measured -------------------------------------------------------------------------------------------------


def _made(text: str, what: str, arguments: dict[str, Any] | None = None) -> Any:
    """What a class or function of that name returns."""
    try:
        make = workload._function(text)
    except ConfigurationError as error:  # which speaks of workloads
        said = str(error).replace("workload", what).replace("'synthetic', ", "").replace("function", "class")
        raise ConfigurationError(said) from error
    try:
        inspect.signature(make).bind(**(arguments or {}))
    except TypeError as error:
        remedy = " with --arguments" if what == "model" else " none"
        raise ConfigurationError(f"{what} {text!r}: {error}; pass its arguments{remedy}") from error
    except ValueError:
        pass  # it says nothing about itself
    return make(**(arguments or {}))


def _data(
    module: Any, data: str | None, shape: list[int] | None, classes: int | None, batch_size: int | None
) -> tuple[dict[str, Any], list[Any] | None]:
    """What `Trainer.fit` takes, and batches to measure with if they are not to come from there."""
    if shape is not None:
        if data is not None:
            raise ConfigurationError("--data and --input exclude each other; leave one out")
        if not shape or min(shape) < 1 or (classes is not None and classes < 1):
            raise ConfigurationError("--input and --classes: pass numbers of 1 or more, as in --input '[3, 32, 32]'")
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
    made = _made(data, "data")
    return {"datamodule" if hasattr(made, "prepare_data") else "train_dataloaders": made}, None


def _random(shape: list[int], classes: int | None, size: int, seed: int) -> Any:
    """A batch of normal inputs, float32 (size, *shape), and labels, int64 (size,)."""
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, *shape, generator=chance)
    return inputs if classes is None else (inputs, torch.randint(0, classes, (size,), generator=chance))


def _overrides(module: Any, name: str) -> bool:
    """Whether a method is the user's own, not Lightning's."""
    home = next((kind for kind in type(module).__mro__ if name in vars(kind)), object)
    return not _is_lightnings(home)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("lightning", "pytorch_lightning")


def _flavour(module: Any) -> str:
    """Name of the module of Lightning that the model is made from."""
    return next((kind.__module__ for kind in type(module).__mro__ if _is_lightnings(kind)), "lightning.pytorch")


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.replace(",", " ").split())
    for name in names:
        if name not in ALLOWABLE:
            raise ConfigurationError(f"--{option} {name}: pass some of {', '.join(ALLOWABLE)}")
    return names


# --- What is shown ----------------------------------------------------------------------------------------------------


@contextmanager
def _bar(console: Console) -> Iterator[Any]:
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=1.0)
        yield lambda done, text: bars.update(bar, completed=done, description=text)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's remarks on a Trainer that trains nothing."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check_files(*paths: Path | None) -> None:
    """Before minutes are spent on what cannot be written."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigurationError(
                f"{str(path)!r}: there is no folder {str(path.parent)!r}; make it, or name another"
            )
    if paths[1] is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("pictures need matplotlib; install it with: pip install 'lightning-omni[plot]'")


def _write(report: DeviceReport, path: Path | None, picture: Path | None) -> None:
    if path is not None:
        try:
            path.write_text(jsons.dumps(report.to_dict(), indent=1))
        except OSError as error:
            raise ConfigurationError(
                f"--json: {str(path)!r}: {error.strerror}; pass a file that can be written"
            ) from error
    if picture is not None:
        report.plot(picture)


def _lines(report: DeviceReport) -> str:
    """What to paste into a script."""
    setting = report.setting
    own = DeviceSetting(
        **{
            name: getattr(setting, name)
            for name in ("threads", "keep_memory", "cudnn_benchmark", "channels_last", "fused", "compiled")
        }
    )
    changed = ", ".join(
        f"{name}={value!r}" for name, value in vars(own).items() if value != getattr(DeviceSetting(), name)
    )
    trainer = [f'precision="{setting.precision}"'] if setting.precision == "bf16-mixed" else []
    trainer += [f"devices={setting.workers}"] if setting.workers > 1 else []
    trainer += [f"callbacks=[DeviceTuner(setting=DeviceSetting({changed}))]"] if changed else []
    lines = []
    if changed:
        lines += ["from lightning_omni import DeviceTuner", "from lightning_omni.performance import DeviceSetting", ""]
    if setting.precision == "tf32":
        lines += ['torch.set_float32_matmul_precision("high")']
    lines += [f"trainer = Trainer({', '.join(trainer)})" + ("" if trainer else "  # nothing was faster")]
    if setting.batch_size is not None:
        lines += [f"# and batch_size={setting.batch_size} in your DataLoader"]
    return "\n".join(lines)
