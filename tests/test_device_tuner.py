"""`DeviceTuner` in a Trainer: what it applies, what it leaves as it was, checkpoints, ranks, and refusals."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from core import DeviceSetting
from pytorch_lightning.loggers import CSVLogger
from runs import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.callback.pytorch_lightning import DeviceTuner

LAST = torch.channels_last
ALL = DeviceSetting(keep_memory=True, channels_last=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on which of two ways is the faster one: they need not be timed for long."""
    for module in ("trial", "tune"):
        monkeypatch.setattr(importlib.import_module(f"lightning_omni.tuning.device.{module}"), "BLOCK_SECONDS", 0.01)


class Net(pl.LightningModule):
    """Logs, draws random numbers, and notes how it is called."""

    def __init__(self, kind: Any = torch.optim.SGD, convolution: bool = True) -> None:
        super().__init__()
        features = [nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)] if convolution else [nn.Linear(3, 3)]
        self.net = nn.Sequential(*features)
        self.drop = nn.Dropout(0.2)
        self.kind = kind
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.training
        self.seen.append(
            {
                "batch": batch[1].tolist(),
                "bf16": torch.is_autocast_enabled("cpu"),
                "last": next(self.parameters()).is_contiguous(memory_format=LAST)
                if next(self.parameters()).dim() == 4
                else None,
            }
        )
        loss = cross_entropy(self.drop(self.net(batch[0])), batch[1])
        self.log("train_loss", loss, on_step=True)
        if self.logger is not None:
            self.logger.log_metrics({"own": float(batch_idx)}, step=self.global_step)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        options = {"momentum": 0.9} if self.kind is torch.optim.SGD else {}
        return self.kind(self.parameters(), lr=0.05, **options)


class Linear(Net):
    """With nothing to choose but precision: no convolution, nothing to compile."""

    def __init__(self) -> None:
        super().__init__(torch.optim.Adadelta, convolution=False)


def data(shape: tuple[int, ...] = (3, 6, 6), samples: int = 32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *shape, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.arange(samples) % 3), batch_size=4, shuffle=True)


def fit(module: pl.LightningModule, tuner: Any = None, loader: Any = None, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    callbacks = [tuner] if tuner is not None else []
    ckpt_path = options.pop("ckpt_path", None)
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, **{**quiet, **options})
    trainer.fit(module, data() if loader is None else loader, ckpt_path=ckpt_path)
    return trainer


def made(kind: Any, *arguments: Any) -> Any:
    pl.seed_everything(3, verbose=False)
    return kind(*arguments)


# --- Applied, and undone ----------------------------------------------------------------------------------------------


def test_a_setting_is_in_use_from_the_first_batch_on_and_gone_after_the_fit() -> None:
    module = made(Net)
    trainer = fit(module, DeviceTuner(setting=ALL))
    assert [(each["bf16"], each["last"]) for each in module.seen] == [(False, True)] * 8
    assert module.net[0].weight.is_contiguous()
    assert trainer.precision == "32-true"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_is_applied_changes_the_weights_by_rounding_only(kind: Any) -> None:
    plain, tuned = made(Net, kind), made(Net, kind)
    fit(plain)
    tuned.load_state_dict(made(Net, kind).state_dict())
    fit(tuned, DeviceTuner(setting=DeviceSetting(channels_last=True)))
    assert [each["batch"] for each in plain.seen] == [each["batch"] for each in tuned.seen]
    for own, other in zip(plain.parameters(), tuned.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def test_precision_is_lightnings_own_and_goes_back() -> None:
    module = made(Net)
    trainer = fit(module, DeviceTuner(setting=DeviceSetting(bf16=True)))
    assert all(each["bf16"] for each in module.seen)
    assert trainer.precision == "32-true"
    module = made(Net)
    assert fit(module, DeviceTuner(setting=DeviceSetting(bf16=True)), precision="bf16-mixed")
    assert all(each["bf16"] for each in module.seen)


def test_after_an_error_all_is_as_it_was() -> None:
    class Breaks(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("broken")

    module = made(Breaks)
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, DeviceTuner(setting=ALL))
    assert module.net[0].weight.is_contiguous()


# --- Measured ---------------------------------------------------------------------------------------------------------


def test_measuring_leaves_weights_data_order_and_rng_state_bitwise() -> None:
    plain, tuned = made(Linear), made(Linear)
    fit(plain, loader=data((3,)))
    made(Linear)  # the same RNG state again
    tuner = DeviceTuner(budget=150)  # it ends when all is measured
    fit(tuned, tuner, loader=data((3,)))
    assert tuner.report is not None
    measured = {each.step for each in tuner.report.findings if each.gain is not None}
    assert "precision" in measured
    assert [each["batch"] for each in plain.seen] == [each["batch"] for each in tuned.seen]
    for own, other in zip(plain.parameters(), tuned.parameters(), strict=True):
        assert torch.equal(own, other)


def test_only_the_run_itself_is_logged_and_the_report_lies_beside(tmp_path: Path) -> None:
    module = made(Net)
    tuner = DeviceTuner(budget=4)
    trainer = fit(module, tuner, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    folder = Path(trainer.log_dir or "")
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert sum(bool(row["train_loss"]) for row in rows) == sum(bool(row["own"]) for row in rows) == 8
    [numbers] = [row for row in rows if row["omni/device/gain"]]
    assert tuner.report is not None
    assert float(numbers["omni/device/samples_per_s_before"]) == tuner.report.baseline
    assert json.loads((folder / "device.json").read_text()) == json.loads(json.dumps(tuner.report.to_dict()))
    assert len(module.seen) == 8


def test_what_is_found_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(made(Net), DeviceTuner(budget=2))
    assert "memory format" in caplog.text
    assert "channels_last" in caplog.text


def test_data_may_come_in_trees_of_loaders() -> None:
    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch["b"][1].shape == (4,)
            return super().training_step(batch["a"], batch_idx)

    tuner = DeviceTuner(budget=2)
    fit(made(Two), tuner, loader={"a": data(), "b": data()})
    assert tuner.report is not None
    assert tuner.report.batch_size == 4


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_what_was_found(tmp_path: Path) -> None:
    tuner = DeviceTuner(budget=3)
    trainer = fit(made(Net), tuner)
    tuner._setting = ALL  # as if all had been found faster
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    module, resumed = made(Net), DeviceTuner(budget=3)
    fit(module, resumed, ckpt_path=tmp_path / "run.ckpt", max_epochs=2)
    assert resumed.report == tuner.report
    assert all(each["last"] for each in module.seen)
    assert len(module.seen) == 8


@pytest.mark.filterwarnings("ignore:The 'test_dataloader' does not have many workers")
def test_a_fit_does_not_go_on_with_what_a_test_has_loaded(tmp_path: Path) -> None:
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            """Nothing is asked of it."""

    trainer = fit(made(Net), DeviceTuner(setting=ALL))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    tuner = DeviceTuner(budget=3)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    tests = pl.Trainer(accelerator="cpu", devices=1, callbacks=[tuner], **quiet)
    tests.test(made(Tested), DataLoader(data().dataset), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert tuner.state_dict() == {"setting": None, "report": None}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_a_checkpoint_loads_in_a_run_without_the_callback(kind: Any, tmp_path: Path) -> None:
    class Saves(Net):
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "run.ckpt")

    def resumed(setting: DeviceSetting) -> list[Tensor]:
        fit(made(Saves, kind), DeviceTuner(setting=setting))
        module = made(Net, kind)
        fit(module, ckpt_path=tmp_path / "run.ckpt", max_epochs=2)
        return list(module.parameters())

    checkpoint_of = DeviceSetting(channels_last=True)
    for own, other in zip(resumed(DeviceSetting()), resumed(checkpoint_of), strict=True):
        torch.testing.assert_close(own, other)
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert all(tensor.is_contiguous() for tensor in saved["state_dict"].values())
    for state in saved["optimizer_states"][0]["state"].values():
        assert all(value.is_contiguous() for value in state.values() if isinstance(value, Tensor))


# --- Refusals and harmlessness ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bf16": "allow"}, 'bf16=\'allow\': pass "apply", "propose" or "skip"'),
        ({"budget": 0}, "budget=0: pass a number above 0"),
        ({"tolerance": -1}, "tolerance=-1: pass a number above 0"),
    ],
)
def test_wrong_arguments_are_refused_with_the_remedy(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        DeviceTuner(**options)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.randn(3, 6, 6), number % 3) for number in range(8)])


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()


class Gathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[1])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "loader", "options", "text"),
    [
        (Net, DataLoader(Stream(), batch_size=4), {}, "pass DeviceTuner(batches=[...])"),
        (Net, "of unknown size", {}, "the DataLoader has no batch_size, and neither has its batch_sampler"),
        (Manual, None, {}, "with manual optimization"),
        (Net, None, {"fast_dev_run": True}, "fast_dev_run"),
        (Gathers, None, {}, "training_step calls all_gather"),
    ],
)
def test_where_nothing_can_be_measured_the_run_goes_on_as_it_was(
    module: Any, loader: Any, options: dict[str, Any], text: str
) -> None:
    tuner = DeviceTuner(budget=2)
    if loader == "of unknown size":
        loader = DataLoader(data().dataset, batch_sampler=[[0, 1, 2], [3, 4, 5]])
    trainer = fit(made(module), tuner, loader, **options)
    assert text in (tuner.problem or "")
    assert tuner.report is None
    assert trainer.global_step > 0


def test_what_an_earlier_fit_could_not_measure_is_no_problem_of_the_next_one() -> None:
    tuner = DeviceTuner(budget=2)
    fit(made(Manual), tuner)
    assert tuner.problem
    fit(made(Net), tuner)
    assert tuner.report is not None
    assert tuner.problem is None


def test_a_further_fit_measures_again_and_a_setting_that_was_passed_stays() -> None:
    tuner = DeviceTuner(budget=2)
    fit(made(Net), tuner)
    first, tuner._setting = tuner.report, ALL
    for kind, shape in ((Net, (3, 6, 6)), (Linear, (3,))):
        fit(made(kind), tuner, data(shape))
        assert tuner.report is not None
        assert tuner.report is not first
    fit(made(Manual), tuner)
    assert tuner.state_dict() == {"setting": None, "report": None}
    given = DeviceTuner(setting=ALL)
    for kind, shape in ((Net, (3, 6, 6)), (Linear, (3,))):
        fit(made(kind), given, data(shape))
        assert given.state_dict()["setting"] == ALL.to_dict()


def test_a_setting_of_another_model_is_refused_with_the_name_that_is_missing() -> None:
    with pytest.raises(ConfigurationError, match=r"Net has no submodule 'net\.7'; the setting is of another model"):
        fit(made(Net), DeviceTuner(setting=DeviceSetting(compiled=("net.7",))))


def test_a_stream_can_be_measured_with_batches_of_ones_own() -> None:
    batches = [next(iter(data()))]
    tuner = DeviceTuner(budget=2, batches=batches)
    fit(made(Net), tuner, DataLoader(Stream(), batch_size=4))
    assert tuner.report is not None


def test_a_module_that_was_compiled_as_a_whole_is_left_alone() -> None:
    module, tuner = made(Net), DeviceTuner(budget=2)
    assert hasattr(module, "_compiler_ctx"), "set by Lightning's from_compiled"
    module._compiler_ctx = {"compiler": "dynamo"}
    fit(module, tuner)
    assert "the module was compiled before the Trainer got it" in (tuner.problem or "")


# --- Ranks ------------------------------------------------------------------------------------------------------------

FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "set": {"setting": {"channels_last": True}},
    "measured": {"budget": 2},
    "one group": {"groups": 1, "setting": {"channels_last": True}},
    "two groups": {"groups": 2, "setting": {"channels_last": True}},
    "two groups, measured": {"groups": 2, "budget": 2},
    "two groups, stepping themselves": {
        "groups": 2,
        "method": "local_sgd:period=2",
        "setting": {"channels_last": True},
    },
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    """What rank 0 and rank 1 report of each fit."""
    finished = run("device_tuner.py", {"fits": list(FITS.values())}, timeout=220)
    return {name: [finished.results[rank][number] for rank in (0, 1)] for number, name in enumerate(FITS)}


@pytest.mark.processes
@pytest.mark.slow
def test_all_ranks_decide_alike_and_end_alike(ranks: dict[str, list[Any]]) -> None:
    for name, (first, second) in ranks.items():
        assert first["problem"] is None, name
        assert first["setting"] == second["setting"], name
        assert first["findings"] == second["findings"], name
        assert [each[1:] for each in first["seen"]] == [each[1:] for each in second["seen"]], name
        assert len(first["seen"]) == 1, name
        assert all(first["plain"]), name
        assert first["threads"][0] == first["threads"][1], name
        if name not in ("two groups", "two groups, measured", "two groups, stepping themselves"):
            assert first["weights"] == second["weights"], name
    assert ranks["set"][0]["seen"][0][1:] == [True, False]
    assert ranks["measured"][0]["findings"]


@pytest.mark.processes
@pytest.mark.slow
def test_ddp_and_one_group_train_as_without_the_callback(ranks: dict[str, list[Any]]) -> None:
    for name in ("set", "one group"):
        for own, other in zip(ranks["plain"][0]["weights"], ranks[name][0]["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(own), torch.tensor(other), msg=name)
