"""``lightning-omni device``: the fastest settings of this machine for a user's model, as a table, JSON, and code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_omni.cli.console import print_line, progress_bar, show
from lightning_omni.cli.output_files import check_file
from lightning_omni.cli.units import Quantity, check_above_zero, time_of
from lightning_omni.errors import ConfigurationError


def device(
    model: str,
    data: str | None = None,
    arguments: dict[str, Any] | None = None,
    input: list[int] | None = None,
    classes: int | None = None,
    batch_size: int | None = None,
    bf16: str = "propose",
    budget: Quantity = 120.0,
    tolerance: float = 0.02,
    json: Path | None = None,
) -> int:
    """Find this machine's fastest settings for a model: memory, compilation, precision.

    Args:
        model: The LightningModule, as file.py:Class or package.module:Class.
        data: A LightningDataModule, or a function that returns a DataLoader, in the same form as the model. By default
            the model's own train_dataloader, or random data from --input.
        arguments: Arguments of the model's constructor, as in '{"width": 64}'.
        input: Shape of one sample of random data, as in "[3, 32, 32]".
        classes: Number of labels of random data. Without it a batch has inputs only.
        batch_size: Samples in a batch of random data, 64 by default. Real data has its own batch size.
        bf16: What to do with bfloat16: apply, if it is faster and the losses agree; propose, or skip.
        budget: Time for all measurements, as in 2min, or in seconds.
        tolerance: Largest distance between the loss curves of two precisions, as a fraction of the losses.
        json: File for the report, in JSON.
    """
    if json is not None:
        check_file("--json", json)
    check_above_zero({"batch_size": batch_size, "classes": classes})
    seconds = time_of("--budget", budget)
    from lightning_omni.cli.device import subject  # here, so that --help does not wait for torch

    choice = subject.bf16_of(bf16)
    module = subject.made_from(model, "model", arguments or {})
    if not hasattr(module, "training_step"):
        raise ConfigurationError(f"model {model!r} is no LightningModule: it has no training_step; name one that has")
    given, batches = subject.data_of(module, data, input, classes, batch_size)
    with progress_bar() as progress:
        report = subject.measure(
            module,
            given,
            batches,
            bf16=choice,
            budget=seconds,
            tolerance=tolerance,
            progress=progress,
        )
    try:
        show(report.table())
        for line in subject.lines_of(report).splitlines():
            print_line(line)
    finally:  # a full disk or a closed standard output must not lose the measurements
        subject.write(report, json)
    return 0
