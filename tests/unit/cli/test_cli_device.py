"""``lightning-omni device``: models and data by name, random data, files, lines to paste, and wrong settings."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lightning_omni.cli import main
from lightning_omni.cli.console import progress_bar
from lightning_omni.cli.device import lines_of
from lightning_omni.tuning.device import DeviceReport, DeviceSetting, Finding

MODEL = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
import {namespace} as pl

class Model(pl.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))

    def training_step(self, batch):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

class Needs(Model):
    def __init__(self, size):
        super().__init__()

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader()

class Whole(Model):
    train_dataloader = Data.train_dataloader

def loader():
    return DataLoader(TensorDataset(torch.randn(48, 6), torch.zeros(48, dtype=torch.long)), batch_size=16)
"""
RANDOM = ("--input", "[6]", "--classes", "3")
SHORT = ("--budget", "1.5", "--bf16", "skip")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on which of two ways is the faster one: they need not be timed for long."""
    for module in ("trial", "tune"):
        monkeypatch.setattr(importlib.import_module(f"lightning_omni.tuning.device.{module}"), "BLOCK_SECONDS", 0.01)


@pytest.fixture(params=["pytorch_lightning", "lightning.pytorch"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's file."""
    path = tmp_path / "my_own_model.py"
    path.write_text(MODEL.format(namespace=request.param))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    threads = torch.get_num_threads()
    yield str(path)
    assert torch.get_num_threads() == threads
    sys.modules.pop(path.stem, None)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command refuses."""
    assert main(["device", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


def test_random_data_give_a_table_a_report_and_lines_to_paste(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--json", str(tmp_path / "device.json"))
    arguments = ("--arguments", '{"width": 5}', "--batch-size", "24")
    assert main(["device", f"{model}:Model", *RANDOM, *SHORT, *files, *arguments]) == 0
    output = capsys.readouterr().out
    assert "batches of 24" in output
    assert "memory format" in output
    assert "trainer = Trainer(" in output
    report = DeviceReport.from_dict(json.loads((tmp_path / "device.json").read_text()))
    assert report.batch_size == 24
    assert {each.step for each in report.findings} >= {"memory format", "compile"}


@pytest.mark.parametrize("data", ["Data", "loader", None])
def test_data_come_from_a_datamodule_a_function_or_the_model(
    data: str | None, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--data", f"{model}:{data}") if data else ()
    assert main(["device", f"{model}:{'Model' if data else 'Whole'}", *given, *SHORT]) == 0
    output = capsys.readouterr().out
    assert "batches of 16" in output


@pytest.mark.parametrize("model", ["pytorch_lightning"], indirect=True)
def test_wrong_settings_are_one_line_with_the_remedy(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        return refusal(capsys, *arguments)

    assert "there is no class 'Absent'" in said(f"{model}:Absent")
    assert "there is no file 'absent.py'" in said("absent.py:Model")
    assert "pass 'file.py:class' or 'package.module:class'" in said("Model")
    assert "is no LightningModule: it has no training_step" in said(f"{model}:loader")
    assert "missing a required argument: 'size'; pass its arguments with --arguments" in said(f"{model}:Needs")
    assert "'size'; name a class that needs none" in said(f"{model}:Model", "--data", f"{model}:Needs")
    assert "there is no file 'my_workload.py'" in said("my_workload.py:Model")
    assert "pass --data file.py:DataModule, or random data with --input" in said(f"{model}:Model")
    assert "--data and --input exclude each other" in said(f"{model}:Model", *RANDOM, "--data", f"{model}:Data")
    assert "--batch-size and --classes are for random data" in said(f"{model}:Whole", "--batch-size", "8")
    assert "--input: pass numbers of 1 or more" in said(f"{model}:Model", "--input", "[0]")
    for option in ("--batch-size", "--classes"):
        assert f"{option} 0: pass a number above 0" in said(f"{model}:Model", *RANDOM, option, "0")
    assert "--bf16 half: pass one of apply, propose, skip" in said(f"{model}:Whole", "--bf16", "half")
    assert "--budget 0.0: pass a time above 0" in said(f"{model}:Whole", "--budget", "0")
    assert "cannot be trained with the defaults: RuntimeError" in said(
        f"{model}:Model", "--input", "[7]", "--classes", "3"
    )


def test_what_cannot_be_written_is_refused_before_the_model_is_even_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        return refusal(capsys, "absent.py:Model", *arguments)

    folder = str(tmp_path)
    assert "--json '/absent/device.json': there is no folder '/absent'; make it" in said(
        "--json", "/absent/device.json"
    )
    assert f"--json {folder!r}: Is a directory; pass a file that can be written" in said("--json", folder)
    assert "--json '/proc/self/new': " in said("--json", "/proc/self/new")
    (tmp_path / "before.json").write_text("{}")
    assert "absent.py" in said("--json", f"{folder}/before.json")
    assert [each.name for each in tmp_path.iterdir()] == ["before.json"]
    assert (tmp_path / "before.json").read_text() == "{}"


def report(setting: DeviceSetting) -> DeviceReport:
    return DeviceReport((), setting, 1.0, 2.0, 2.0, 32)


def test_the_lines_to_paste_say_what_was_found() -> None:
    setting = DeviceSetting(keep_memory=True, channels_last=True, bf16=True)
    assert lines_of(report(setting)).splitlines() == [
        "from lightning_omni import DeviceTuner",
        "from lightning_omni.tuning.device import DeviceSetting",
        "",
        'trainer = Trainer(precision="bf16-mixed",'
        " callbacks=[DeviceTuner(setting=DeviceSetting(keep_memory=True, channels_last=True))])",
    ]


def finding(low: float, high: float) -> Finding:
    return Finding("step", "tried", "rejected", gain=(low + high) / 2, spread=(low, high))


def test_nothing_is_said_to_be_no_faster_that_the_budget_had_no_time_for() -> None:
    skipped = Finding("memory format", "channels_last", "skipped", "the budget of 5 s is used up")
    for findings, said in (
        ((skipped,), "nothing was compared with them"),
        ((skipped, finding(0.8, 0.9)), "nothing faster was found"),
    ):
        stays = replace(report(DeviceSetting()), findings=findings, gain=None)
        assert lines_of(stays) == f"trainer = Trainer()  # {said}"
        assert stays.summary == f"1 samples/s with the defaults; {said}"


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    file = io.StringIO()
    made = replace(report(DeviceSetting(channels_last=True)), findings=(finding(0.8, 1.3),) * 2, spread=(0.7, 2.1))
    Console(width=80, file=file).print(made.table())
    assert "0.80–1.30" in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert "2.00 times, 0.70 to 2.10" in made.summary


def test_progress_is_shown_on_a_terminal_and_only_there(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shows in ((Terminal(), True), (io.StringIO(), False)):
        with contextlib.redirect_stderr(stream), progress_bar() as told:
            told(0.5, "memory format: channels_last")
            told(1.0, "done")
        assert ("done" in stream.getvalue()) == shows
    assert capsys.readouterr().out == ""
