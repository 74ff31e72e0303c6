"""A server's saved state becomes a checkpoint: plain Lightning and further runs go on from it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from runs import SLOWER
from runs import run as run_script
from test_joining import PATIENCE, Run
from test_resilience import Mortal, saved, workers
from test_server_restart import Saving
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from lightning_omni.cli import main
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import method_named
from lightning_omni.protocol.persistence import STATE
from lightning_omni.protocol.saved_run import SavedRun
from lightning_omni.server.saving import StateDirectory, saved_states, saved_weights
from lightning_omni.strategy.exported import checkpoint_of
from lightning_omni.strategy.loop_states import loops_at

SAMPLES, BATCH = 512, 8
BATCHES = SAMPLES // BATCH


def is_inside_epoch(folder: Path, epoch: int) -> bool:
    """Whether the last save is of the midst of an epoch."""
    try:
        cut = SavedRun.of(saved_states(folder)).cut
    except ConfigurationError:
        return False
    return cut.epoch == epoch and BATCH < sum(stop - start for start, stop in cut.trained) < SAMPLES - 16 * BATCH


def abandoned(folder: Path, *options: str, **more: Any) -> Path:
    """The directory of a server that was killed with all its groups, in the midst of epoch 1."""
    run, state = Saving(folder, *options), folder / "state"
    try:
        given = {"epochs": 3, "samples": SAMPLES, "hold": [1], **more}
        run.start("a", given)
        run.wait_for("a0-in-1")
        run.start("b", given, seed=2)
        run.wait_for("b0-in-1")
        run.go(1)
        deadline = time.monotonic() + SLOWER * PATIENCE
        while not is_inside_epoch(state, 1):  # the server is using the directory meanwhile
            assert time.monotonic() < deadline, run.server.output
            time.sleep(0.02)
    finally:
        run.server.kill()
        run.close()
    return state


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return abandoned(tmp_path_factory.mktemp("abandoned"), step=0.08)


@pytest.fixture(scope="module")
def exported(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "run.ckpt"
    assert main(["checkpoint", str(state), str(out)]) == 0
    return out


def digest(state: Mapping[str, Tensor]) -> str:
    """As the scripts have it."""
    hasher = hashlib.sha256()
    for name, value in state.items():
        hasher.update(name.encode())
        hasher.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def rate_after(steps: int) -> float:
    """Of the schedule of the script, which has a step a batch in three epochs."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.05)
    schedule = OneCycleLR(optimizer, 0.05, total_steps=3 * BATCHES, cycle_momentum=False)
    optimizer.step()
    for _ in range(steps):
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])


def fit(exported: Path, **options: Any) -> dict[int, Any]:
    """What each rank says of a fit that goes on to the end of epoch 1."""
    env = {"OMNI_TEST_NAME": "on", "OMNI_TEST_NAMESPACE": options.pop("namespace", "pytorch_lightning")}
    given = {"epochs": 2, "samples": SAMPLES, "path": str(exported), **options}
    return run_script("exported.py", given, env=env, spares=options.get("groups", 1) - 1).results


@pytest.mark.slow
@pytest.mark.processes
def test_the_weights_of_an_abandoned_run_are_the_servers_and_load_into_the_module(exported: Path, state: Path) -> None:
    checkpoint = torch.load(exported, weights_only=True)
    weights = saved_weights(state)
    assert len(weights) == 7
    assert all(torch.equal(checkpoint["state_dict"][name], weight) for name, weight in weights.items())
    net = Sequential(Linear(12, 32), BatchNorm1d(32), ReLU(), Linear(32, 3))
    theirs = {name.removeprefix("net."): each for name, each in checkpoint["state_dict"].items() if "net." in name}
    net.load_state_dict(theirs, strict=True)
    assert theirs["1.num_batches_tracked"] > BATCHES // 2  # of the recorder, when the groups had last synchronized
    assert checkpoint["callbacks"]["Record"]["epochs"] == 1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [{}, {"namespace": "lightning.pytorch", "strategy": "ddp"}], ids=["one device", "ddp"]
)
def test_plain_lightning_goes_on_where_an_abandoned_run_was(
    options: dict[str, Any], exported: Path, state: Path
) -> None:
    checkpoint, cut = torch.load(exported, weights_only=True), SavedRun.of(saved_states(state)).cut
    trained = sum(stop - start for start, stop in cut.trained) // BATCH
    assert 0 < trained < BATCHES
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (1, BATCHES + trained)
    said = fit(exported, **options)[0]
    assert said["weights"] == digest(checkpoint["state_dict"])
    assert (said["epoch"], said["step"], said["batch"], said["count"]) == (
        1,
        BATCHES + trained,
        trained,
        BATCHES + trained,
    )
    assert said["rate"] == pytest.approx(rate_after(BATCHES + trained))
    assert (said["momentum"] > 0, said["callback"]) == (True, 1)
    assert [(epoch, number) for epoch, number, _ in said["seen"]] == [(1, each) for each in range(trained, BATCHES)]
    assert (said["end"]["step"], said["end"]["finite"]) == (2 * BATCHES, True)
    assert said["end"]["rate"] == pytest.approx(rate_after(2 * BATCHES))


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_of_several_groups_goes_on_with_the_samples_that_are_left(exported: Path, state: Path) -> None:
    checkpoint, cut = torch.load(exported, weights_only=True), SavedRun.of(saved_states(state)).cut
    trained = sum(stop - start for start, stop in cut.trained)
    results = fit(exported, groups=2)
    assert digest(checkpoint["state_dict"]) in {each["weights"] for each in results.values()}  # of who was first
    assert results[0]["rate"] == pytest.approx(rate_after(BATCHES + trained // BATCH))
    assert {each["epoch"] for each in results.values()} == {1}
    new = [sample for each in results.values() for _, _, samples in each["seen"] for sample in samples]
    assert len(set(new)) == SAMPLES - trained
    before = "".join(file.read_text() for file in state.parent.glob("seen-*"))
    old = {sample for epoch, samples, _ in map(json.loads, before.splitlines()) if epoch == 1 for sample in samples}
    assert old | set(new) == set(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.processes
def test_another_server_and_groups_that_join_it_go_on_where_an_abandoned_run_was(exported: Path, run: Run) -> None:
    checkpoint = torch.load(exported, weights_only=True)
    trained = sum(stop - start for start, stop in checkpoint["omni"]["run"]["cut"]["trained"])
    assert trained
    options = {"epochs": 3, "samples": SAMPLES, "hold": [1], "path": str(exported)}
    first, second = run.train_together(options)
    assert (first["weights"], first["epochs"]) == (second["weights"], 3)  # epochs that the callback has counted
    assert first["finite"]
    seen = Counter(epoch for epoch, _ in run.trained)
    assert seen == {1: SAMPLES - trained, 2: SAMPLES}
    assert set(run.trained.values()) == {1}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        pytest.param("", rate_after(BATCHES), marks=pytest.mark.exhaustive),
        ("function", 0.05 / (1 + (BATCHES - 1) / 100)),
    ],
)
def test_an_epoch_of_which_all_is_trained_is_over_and_the_next_one_begins(
    schedule: str, rate: float, tmp_path: Path
) -> None:
    """A schedule of a function of the user's has the rate of the last push until it is stepped."""
    run, state = Saving(tmp_path), tmp_path / "state"
    try:
        run.start("a", {"epochs": 3, "samples": SAMPLES, "hold_validation": [0], "schedule": schedule})
        run.wait_for("a0-validates-0")
        run._wait_for_save()
        run.server.kill()
    finally:
        run.close()
    exported = checkpoint_of(state)
    torch.save(exported.checkpoint, tmp_path / "run.ckpt")
    said = fit(tmp_path / "run.ckpt", schedule=schedule)[0]
    assert said["weights"] == digest(exported.checkpoint["state_dict"])
    assert (said["epoch"], said["step"], said["batch"], said["count"]) == (1, BATCHES, 0, BATCHES)
    assert said["rate"] == pytest.approx(rate)
    assert [number for _, number, _ in said["seen"]] == list(range(BATCHES))
    assert said["end"]["step"] == 2 * BATCHES


@pytest.mark.slow
@pytest.mark.processes
def test_a_schedule_that_was_told_where_to_go_is_where_it_was_told_last(tmp_path: Path) -> None:
    """It counts in epochs, and steps that it would have to be taken on by are none of its own."""
    state = abandoned(tmp_path, step=0.08, schedule="told")
    exported = checkpoint_of(state)
    assert exported.checkpoint["global_step"] > BATCHES
    [schedule] = exported.checkpoint["lr_schedulers"]
    assert schedule["T_cur"] == pytest.approx(1.0, abs=0.1)  # epochs, when the groups had last synchronized
    [group] = exported.checkpoint["optimizer_states"][0]["param_groups"]
    assert group["lr"] == pytest.approx(0.05 * (0.5 + 0.5 * math.cos(math.pi / 4 * schedule["T_cur"])))
    assert not any("schedule" in note for note in exported.notes)


# --- Beside a checkpoint of the Trainer -------------------------------------------------------------------------------


def alike(mine: Any, theirs: Any) -> bool:
    """Whether two trees are the same, and tensors in them bitwise."""
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, Mapping):
        return mine.keys() == theirs.keys() and all(alike(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    return bool(mine == theirs)


def held(folder: Path, servers: int, **more: Any) -> Path:
    """The directory of servers that were killed with their group before it pushed anything in epoch 1."""
    run = Saving(folder, *(["--shards", str(servers)] if servers > 1 else []))
    try:
        run.start("a", {"epochs": 3, "hold": [1], **more})
        run.wait_for("a0-in-1")
        run._wait_for_save()
        run.server.kill()
    finally:
        run.close()
    return folder / "state"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("servers", "more"),
    [
        (1, {"average": 0.5}),
        (1, {"by_hand": True}),
        pytest.param(2, {"optimizer": "AdamW"}, marks=pytest.mark.exhaustive),
        (2, {"optimizer": "AdamW", "inside": "fsdp", "devices": 2, "method": "hardsync"}),
        (2, {"optimizer": "SGD", "inside": "fsdp", "devices": 2, "method": "diloco:period=4"}),
    ],
    ids=["averaged weights", "two optimizers by hand", "two servers", "sharded", "sharded, optimizers on the ranks"],
)
def test_a_state_in_which_nothing_was_pushed_since_is_the_checkpoint_that_the_trainer_saved_then(
    servers: int, more: dict[str, Any], tmp_path: Path
) -> None:
    exported = checkpoint_of(held(tmp_path, servers, **more))
    mine, theirs = exported.checkpoint, torch.load(tmp_path / "a" / "epoch=0.ckpt", weights_only=True)
    assert mine.keys() == theirs.keys()
    assert alike(mine["state_dict"], theirs["state_dict"])
    assert alike(mine.get("current_model_state"), theirs.get("current_model_state"))
    assert alike(mine["lr_schedulers"], theirs["lr_schedulers"])
    if "diloco" in more.get("method", ""):
        assert [each["state"] for each in mine["optimizer_states"]] == [{}]
        assert exported.notes == (
            "optimizer 0 steps on the ranks with this method, and its state is lost with them: it is empty",
        )
    else:
        assert alike(mine["optimizer_states"], theirs["optimizer_states"])
        assert all("the module steps its schedulers itself" in note for note in exported.notes)
        assert len(exported.notes) == int("by_hand" in more)
    assert mine["global_step"] == theirs["global_step"]
    assert (mine["epoch"], theirs["epoch"]) == (1, 0)  # which is saved before the epoch is over


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.exhaustive
def test_shares_of_a_model_in_tensor_parallel_groups_are_refused_with_the_remedy(tmp_path: Path) -> None:
    state = held(tmp_path, 2, optimizer="AdamW", inside="1 x 2", devices=2, method="hardsync")
    with pytest.raises(ConfigurationError, match=r"divide the model otherwise than by rows .*Let a group join the run"):
        checkpoint_of(state)


# --- Weights alone, and nothing ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict")
def test_a_run_whose_ranks_were_started_together_gives_its_weights_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        for group in workers(serving, method_named("async_sgd")):
            group.train(1)
        states = StateDirectory(tmp_path / "state")
        states.restore(serving.core)
        saved(states, serving.core)
        out = tmp_path / "run.ckpt"
        assert main(["checkpoint", str(tmp_path / "state"), str(out)]) == 0
        first, missing, remedy = capsys.readouterr().out.splitlines()
        assert first.endswith("weights of 2 updates, and no more; it cannot be passed as ckpt_path=")
        assert "buffers, parameters that are not trained, optimizers, schedulers, loops and callbacks" in missing
        assert "load_from_checkpoint(path, strict=False)" in remedy

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.w, self.b = torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(3))
                self.register_buffer("count", torch.zeros(1))

        module = Module.load_from_checkpoint(out, strict=False, weights_only=True)
        weights = saved_weights(tmp_path / "state")
        assert torch.equal(module.w, weights["w"])
        assert torch.equal(module.b, weights["b"])

        assert main(["checkpoint", str(tmp_path / "state"), str(out)]) == 2
        assert "run.ckpt exists; pass --overwrite" in capsys.readouterr().err
        assert main(["checkpoint", str(tmp_path / "state"), str(out), "--overwrite"]) == 0
        assert main(["checkpoint", str(tmp_path / "state"), str(out / "below")]) == 2
        assert "cannot be written" in capsys.readouterr().err
        assert main(["checkpoint", str(tmp_path / "state"), str(tmp_path), "--overwrite"]) == 2
        assert f"{tmp_path} is a directory; pass the name of a file" in capsys.readouterr().err

        serving.core.fail("the end")  # the last save stays
        states.discard(serving.core)
        ended = checkpoint_of(tmp_path / "state")
        assert (ended.is_whole, ended.updates) == (False, 2)
        assert torch.equal(ended.checkpoint["state_dict"]["w"], weights["w"])
        states.close()


def test_what_is_no_state_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere: there is no such directory; pass .*--state"):
        checkpoint_of(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"nothing is saved there.*load a checkpoint"):
        checkpoint_of(tmp_path)
    save = tmp_path / "state-00000001"
    save.write_bytes(b"something else")
    with pytest.raises(ConfigurationError, match="state-00000001: no saved state: it does not begin as one"):
        checkpoint_of(tmp_path)
    (tmp_path / "share-1").mkdir()
    with pytest.raises(ConfigurationError, match="nothing is saved there"):  # by both of them
        checkpoint_of(tmp_path)


def test_a_state_of_another_release_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use the release of lightning-omni that has saved it"):
        SavedRun.of([{"name": STATE, "version": 1, "protocol": 1}])


# --- Loops ------------------------------------------------------------------------------------------------------------


class _Saves(pl.Callback):
    """What Lightning itself would save of its loops, at the beginning of epoch 1 and after some batches of it."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.began: dict[str, Any] = {}
        self.then: dict[str, Any] = {}

    def of(self, trainer: pl.Trainer) -> dict[str, Any]:
        return deepcopy(trainer._checkpoint_connector._get_loops_state_dict())

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.current_epoch == 1 and index == 0:
            self.began = self.of(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 1 and trainer.fit_loop.batch_idx + 1 == self.batches:
            self.then = self.of(trainer)


@pytest.mark.parametrize(("window", "batches", "steps"), [(1, 3, 9), (2, 3, 4), (2, 4, 5)])
@pytest.mark.filterwarnings("ignore")
def test_the_progress_of_loops_is_what_lightning_saves_itself(window: int, batches: int, steps: int) -> None:
    saves = _Saves(batches)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=window, callbacks=[saves], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 12), batch_size=2))
    past = 6 // window
    mine = loops_at(saves.began, 1, batches, before=6, steps=steps, past=past, window=window, automatic=True)
    fits = [each["fit_loop"] for each in (mine, saves.then)]
    for each in fits:  # which restores nothing
        del each["epoch_loop.scheduler_progress"]
    assert fits[0] == fits[1]
