"""Ranks that are started in other ways, Trainers that are pickled and copied, and strategies asked for by name."""

from __future__ import annotations

import copy
import pickle
import sys
import time
from typing import Any

import pytest
import torch
from core import lease
from patience import SLOWER
from pytorch_lightning import Trainer
from runs import Run, Running
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy.pytorch_lightning import OmniStrategy

OPTIONS: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}


def check(result: dict[str, Any]) -> None:
    assert result["pickled before"] == result["pickled after"] == ["Trainer", "Trainer", "OmniStrategy", "OmniStrategy"]
    assert result["report survives"]
    assert result["groups"] == 2
    # A group that comes when the other has drawn the whole epoch trains its first batch once more: see LeaseBook.draw.
    assert result["updates"] in (256 // 8, 256 // 8 + 1)
    assert result["validated"] in (None, pytest.approx(result["loss"]))


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_groups_train_however_ranks_are_started_and_the_report_comes_back(start_method: str) -> None:
    fits: list[dict[str, Any]] = [{"strategy": {"groups": 2, "method": "async_sgd", "start_method": start_method}}]
    fits[0]["validates"] = start_method != "spawn"  # its processes take seconds to start
    env = {}
    if start_method == "popen":
        fits.append({"strategy": {"groups": 2}, "is_tuned": True, "validates": False, "max_epochs": 2})
    if start_method == "fork":
        fits.append({"strategy": "omni_fork"})
        fits.append({"strategy": {"groups": 2}, "is_interactive": True, "is_tuned": True, "max_epochs": 8})
        fits[-1]["validates"] = False
        env = {
            "LIGHTNING_OMNI_GROUPS": "2",
            "LIGHTNING_OMNI_METHOD": "hardsync",
            "OMNI_TEST_NAMESPACE": "lightning.pytorch",
        }
    spares = 1 if start_method == "popen" else 0  # a spawned rank cannot be a copy
    with Running("started.py", {"fits": fits}, env, spares=spares) as running:
        finished = running.wait(440)
    assert finished.code == 0, finished.output[-6000:]
    check(finished.results[0][0])
    if start_method == "popen":
        tuned = finished.results[0][1]
        assert tuned["pickled after"] == tuned["pickled before"], "with all that the tuner knows"
        assert tuned["report survives"]
    for each in finished.results[0]:
        assert each["loaded"] == ([] if start_method == "popen" else ["omni", "state_dict"])
        assert each["left behind"] == []
    if start_method == "fork":
        [found] = finished.results[0][2]["found"]
        assert found["choice"] in (1, 2), (found, finished.output[-3000:])
        assert found["searches"] > 0
        assert found["problem"] == ""
        assert "omni-tuning.json" in found["report"], found
        assert finished.results[0][1]["updates"] == 256 // 8 // 2, "hardsync takes the groups' steps as one"


def test_a_notebook_where_ranks_cannot_be_copies_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr("lightning_omni.strategy.launcher.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ConfigurationError, match=r"start_method=\"fork\".*run the code as a script"):
        Trainer(strategy=OmniStrategy(groups=2), **OPTIONS)


@pytest.mark.parametrize(
    ("where", "remedy"), [("script", 'pass start_method="spawn"'), ("shell", "restart the kernel")]
)
def test_copies_of_a_process_that_has_used_cuda_are_refused_with_the_remedy(
    where: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = OmniStrategy(start_method="fork")
    trainer = Trainer(strategy=strategy, **OPTIONS)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(OmniStrategy, "root_device", torch.device("cuda"))
    if where == "shell":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert strategy.launcher is not None
    with pytest.raises(ConfigurationError, match=remedy):
        strategy.launcher.launch(print, trainer=trainer)


def test_the_script_gets_whole_weights_of_a_model_that_its_forked_ranks_divide() -> None:
    options = {"strategy": {"groups": 1, "model_parallel": "fsdp", "start_method": "fork"}, "validates": False}
    with Running("started.py", {"fits": [options]}, spares=0) as running:
        finished: Run = running.wait(180)
    assert finished.code == 0, finished.output[-6000:]
    assert set(finished.results[0][0]["weights"]) == {"Tensor"}


@pytest.mark.parametrize("start_method", ["fork"])
def test_the_death_of_a_rank_that_was_forked_ends_the_script_with_an_error(start_method: str) -> None:
    options = {"strategy": {"groups": 2, "start_method": start_method}, "dies": True, "max_epochs": 1000}
    with Running("started.py", {"fits": [options]}, spares=0) as running:
        finished: Run = running.wait(180)
        deadline = time.monotonic() + SLOWER * 30
        while running.survivors:
            assert time.monotonic() < deadline, "processes are left behind"
            time.sleep(0.05)
    assert finished.code == 1
    assert "process 1 terminated with signal SIGKILL" in finished.output


def test_a_copy_of_a_leased_loader_is_the_loader_that_it_was_made_of() -> None:
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0))
    leased = lease(loader, rank=0, before_epoch=print, is_local=True)
    for copied in (pickle.loads(pickle.dumps(leased)), copy.deepcopy(leased)):
        assert type(copied) is DataLoader
        assert [batch[0].tolist() for batch in copied] == [batch[0].tolist() for batch in loader]


# --- By name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "groups", "launcher"),
    [
        ("omni", None, "OmniLauncher"),
        ("omni_2", 2, "OmniLauncher"),
        ("omni_8", 8, "OmniLauncher"),
        ("omni_spawn", None, "OmniProcesses"),
        ("omni_fork", None, "OmniProcesses"),
        ("omni_notebook", None, "OmniProcesses"),
    ],
)
def test_names_of_the_registry_ask_for_groups_and_start_methods(name: str, groups: int | None, launcher: str) -> None:
    strategy = Trainer(strategy=name, **{**OPTIONS, "devices": 8}).strategy
    assert isinstance(strategy, OmniStrategy)
    assert (strategy.world_options.groups, type(strategy.launcher).__name__) == (groups, launcher)


def test_the_environment_asks_for_what_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_OMNI_GROUPS", "2")
    monkeypatch.setenv("LIGHTNING_OMNI_METHOD", "diloco:period=7")
    monkeypatch.setenv("LIGHTNING_OMNI_DATA", "static")
    strategy = Trainer(strategy="omni", **OPTIONS).strategy
    assert isinstance(strategy, OmniStrategy)
    assert strategy.world_options.groups == 2
    assert strategy.world_options.method == "diloco:period=7"
    assert strategy.parts.epochs.data.kind == "static"
    explicit = OmniStrategy(groups=1, method="async_sgd", data="dynamic")
    options = explicit.world_options
    assert (options.groups, options.method, explicit.parts.epochs.data.kind) == (1, "async_sgd", "dynamic")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("LIGHTNING_OMNI_GROUPS", "two", ["LIGHTNING_OMNI_GROUPS='two'", "a number of groups"]),
        ("LIGHTNING_OMNI_GROUPS", "0", ["groups=0", "LIGHTNING_OMNI_GROUPS=0"]),
        ("LIGHTNING_OMNI_GROUPS", "3", ["groups=3", "only 2 ranks", "LIGHTNING_OMNI_GROUPS=3"]),
        ("LIGHTNING_OMNI_METHOD", "magic", ["method='magic'", "LIGHTNING_OMNI_METHOD=magic"]),
        ("LIGHTNING_OMNI_DATA", "some", ["data='some'", "LIGHTNING_OMNI_DATA=some"]),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, value: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy=OmniStrategy(), **OPTIONS)
    for word in words:
        assert word in str(caught.value)
