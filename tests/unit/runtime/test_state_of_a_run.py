"""What becomes of a run's state: what is rolled back, counted, and in a checkpoint."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import lightning_omni
from lightning_omni.errors import ConfigurationError
from lightning_omni.group.core import GroupCore
from lightning_omni.methods import AsyncSGD, DiLoCo, Method, SoftSync
from lightning_omni.registry import to_wire
from lightning_omni.runtime.leased_loader import RankLeases
from lightning_omni.runtime.model.replica import ModelReplica
from lightning_omni.runtime.server_exchange import ServerSnapshot
from lightning_omni.runtime.state.checkpoint import (
    CheckpointFolder,
    RollbackPoint,
    RunCheckpoint,
    beside,
    is_folder,
    save,
)
from lightning_omni.runtime.state.transfer import Residuals, StateTransfer
from lightning_omni.strategy.checkpoints import Checkpoints
from lightning_omni.strategy.loops.limits import FitLimits
from lightning_omni.strategy.loops.progress import RunProgress
from lightning_omni.wire.formats.base import PerDirection, WireFormat, wire_named
from lightning_omni.wire.messages import SnapshotId
from lightning_omni.wire.steps_and_samples import Progress, ReferenceBatch


def table_of(heading: str) -> list[str]:
    """The pieces in one table of docs/contribute/state.md."""
    page = (Path(__file__).parents[3] / "docs" / "contribute" / "state.md").read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)^#", page, re.M | re.S)
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    assert all(cell.strip() for row in rows for cell in row)
    assert {len(row) for row in rows} == {7}
    return [re.sub("[` ]", "", row[0]) for row in rows]


@pytest.mark.parametrize("heading", ["Run", "Group", "Rank × shard"])
def test_the_docs_say_of_every_piece_what_becomes_of_it(heading: str) -> None:
    assert len(table_of(heading)) >= 4


def test_what_is_rolled_back_is_what_the_docs_say() -> None:
    page = (Path(__file__).parents[3] / "docs" / "contribute" / "state.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    back = [re.sub("[` ]", "", row[0]) for row in rows if len(row) == 7 and "put back" in row[4]]
    assert sorted(back) == sorted(field.name for field in fields(RollbackPoint))


def test_weights_are_spoilt_where_a_number_is_not_finite_that_was() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("mask", torch.full((2,), -math.inf))  # which is meant
    module.register_buffer("scales", torch.ones(2).to(torch.float8_e4m3fn))
    average = torch.zeros(2)
    point = RollbackPoint.of(module, [], GroupCore(AsyncSGD()), [average])
    is_spoilt = [point.is_spoilt]
    average[1] = math.nan
    is_spoilt.append(point.is_spoilt)
    point.restore(GroupCore(AsyncSGD()))
    assert [*is_spoilt, point.is_spoilt] == [False, True, False]
    assert average.tolist() == [0.0, 0.0]


def test_an_expanded_buffer_is_rolled_back() -> None:
    module = torch.nn.Linear(2, 2)
    mask = torch.ones(1, 4).expand(3, 4)
    module.register_buffer("mask", mask)
    point = RollbackPoint.of(module, [], GroupCore(AsyncSGD()))
    mask[:1].fill_(5.0)
    point.restore(GroupCore(AsyncSGD()))
    assert mask.tolist() == [[1.0] * 4] * 3


def test_a_tuner_touches_nothing_private_of_the_strategy() -> None:
    paths = list((Path(lightning_omni.__file__).parent / "tuning").rglob("*.py"))
    assert len(paths) > 10
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
                owner = ast.unparse(node.value)
                assert not re.search("strategy|world|epochs", owner), f"{path.name}: {ast.unparse(node)}"


def test_no_module_remembers_runs() -> None:
    """Three know what is the process's: children, torch's process groups, and guards, for torch's hook on all steps."""
    package = Path(lightning_omni.__file__).parent
    remember = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    }
    weak = {path.name for path in package.rglob("*.py") if re.search(r"^_?\w+.*= Weak\w+\(", path.read_text(), re.M)}
    assert remember == {"strategy/launcher.py"}
    assert weak == {"loop_checks.py", "process_groups.py"}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """torch.distributed, of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_steps_are_samples_by_the_reference_batch() -> None:
    reference = ReferenceBatch(ranks=4, batch_size=8, window=3)
    progress = Progress(reference, batches=10, epochs=2)
    assert (reference.samples, progress.samples_an_epoch, progress.steps_an_epoch) == (96, 320, 4)
    steps = [replace(progress, samples=samples).steps for samples in (0, 95, 96, 287, 288, 384, 999)]
    assert steps == [8, 8, 9, 10, 11, 12, 12]
    assert [progress.steps_left(10, epoch) for epoch in (0, 2, 3)] == [10, 2, 0]
    assert [progress.budget(316, 2, steps) for steps in (-1, 10, 8, 99)] == [316, 192, 0, 316]


def test_epochs_that_are_over_have_as_many_steps_as_they_had() -> None:
    first = Progress(ReferenceBatch(ranks=4, batch_size=8), batches=10)
    second = replace(first, epochs=1, past=first.steps_before(1), past_batches=first.batches_before(1), batches=4)
    past, batches = second.steps_before(2), second.batches_before(2)
    third = replace(second, reference=replace(second.reference, window=2), epochs=2, past=past, past_batches=batches)
    assert (second.steps, replace(second, samples=64).steps, third.steps) == (10, 12, 14)
    assert (third.steps_left(15, 2), third.steps_before(4)) == (1, 18)
    assert [first.batches_before(0), *(third.batches_before(epoch) for epoch in (2, 4))] == [0, 14, 22]


@pytest.mark.parametrize(("skipped_at", "offset"), [(None, 15), (12, 12)])
def test_validations_are_due_where_they_are_under_ddp_though_earlier_steps_had_more_batches(
    skipped_at: int | None, offset: int
) -> None:
    """Every 25 batches of 8 samples, with epochs of 40; DDP counts batches on from the epoch before."""
    loop = SimpleNamespace(max_batches=40, epoch_loop=SimpleNamespace(_should_check_val_epoch=lambda: True))
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=4,
        callbacks=[],
        check_val_every_n_epoch=None,
        max_epochs=-1,
        enable_validation=True,
        fit_loop=loop,
        lightning_module=SimpleNamespace(automatic_optimization=True),
        max_steps=-1,
        val_check_batch=25,
    )
    leases = RankLeases(2, 4, 320, 0, lambda epoch: None, is_local=False)
    data: Any = SimpleNamespace(leases=leases)
    run = RunProgress(data, lambda _: None)
    run.limits, run.trainer, run.is_counted_together = FitLimits(trainer), trainer, True
    assert run.begin(0).validate_offset == 0
    run.end(0, skipped_at and 8 * skipped_at)
    trainer.accumulate_grad_batches = 1
    plan = run.begin(1)
    assert (plan.validate_every, plan.validate_offset) == (25 * 8, offset * 8)


# --- A resumed run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "groups", "is_kept"),
    [(SoftSync(), 4, True), (SoftSync(), 2, True), (DiLoCo(), 4, True), (DiLoCo(), 2, False)],
)
def test_a_sum_of_gradients_is_restored_with_any_number_of_groups(method: Method, groups: int, is_kept: bool) -> None:
    """Its samples count as trained."""
    own: Any = [{"memory": 1}]
    saved = RunCheckpoint(groups=4, method=to_wire(method), parameters=[["w"]], server=[{"total": 1}], states={0: own})
    part = SimpleNamespace(replica=SimpleNamespace(parameters={"w": None}))
    parallel: Any = SimpleNamespace(parts=[part], method=method, topology=SimpleNamespace(alive=range(groups)))
    left_out: list[Any] = []
    residuals: Any = SimpleNamespace(leave_out=left_out.append)
    transfer = StateTransfer(parallel, SimpleNamespace(), residuals)  # type: ignore[arg-type]
    transfer.resume(saved)
    assert transfer._resumed.server == ([{"total": 1}] if is_kept else ())
    assert transfer._resumed.states == ({0: own} if groups == 4 else {})
    transfer.forget_saved()
    assert left_out == [{} if groups == 4 else {0: own}]


def test_a_residual_is_restored_in_a_run_with_another_format_of_answers() -> None:
    def new(wire_format: WireFormat) -> tuple[GroupCore, Residuals]:
        core, parameters = GroupCore(AsyncSGD(), wire_format), {"w": torch.nn.Parameter(torch.zeros(2))}
        replica = ModelReplica(parameters, torch.optim.SGD(parameters.values(), lr=1.0))
        core.attach(replica)
        parallel: Any = SimpleNamespace(core=core, exchanges=True, group=0, parts=[SimpleNamespace(replica=replica)])
        return core, Residuals(parallel)

    formats = wire_named("int8"), PerDirection(push={"name": "int8"}, pull={"name": "bf16"})
    for before, after in (formats, formats[::-1]):
        (core, residuals), (resumed, others) = new(before), new(after)
        core.load_sender_state(0, {"residual": [torch.ones(2)]})
        others.resume(0, residuals.saved(0))
        assert resumed.sender_state(0)["residual"][0].tolist() == [1.0, 1.0]


# --- A server that dies while a checkpoint is saved ------------------------------------------------------------------


def test_what_groups_alone_know_is_in_a_checkpoint_of_all_groups_or_of_none() -> None:
    said: list[str] = []
    checkpoints = Checkpoints(said.append)
    whole = ServerSnapshot(SnapshotId(), [], {0: ["first"], 2: ["third"]})
    assert checkpoints._complete_groups(whole, (0, 2)) == whole
    assert checkpoints._complete_groups(whole, (2,)) == whole, "one has died since"
    assert not said
    assert checkpoints._complete_groups(whole, (0, 1, 2)).groups == {}, "the third one's would be the second one's"
    assert "the groups 1 alone know" in said[0]


@pytest.mark.parametrize("leads", ["to a folder", "nowhere"])
@pytest.mark.usefixtures("alone")
def test_a_checkpoint_takes_the_place_of_a_link(tmp_path: Path, leads: str) -> None:
    other, path = tmp_path / "other", tmp_path / "last.ckpt"
    if leads == "to a folder":
        other.mkdir()
        (other / "file").touch()
    path.symlink_to(other)
    save(path, {"state_dict": {"w": torch.ones(2)}}, {"epoch": 3}, dist.group.WORLD)
    assert not path.is_symlink()
    assert CheckpointFolder(path).metadata() == {"epoch": 3}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.ckpt"] + ["other"] * (leads == "to a folder")
    assert not other.exists() or (other / "file").exists()


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_which_the_first_rank_cannot_write_its_part_is_refused_and_the_old_one_kept(
    tmp_path: Path,
) -> None:
    path, tensors = tmp_path / "last.ckpt", {"state_dict": {"w": torch.ones(2)}}
    save(path, tensors, {"epoch": 3}, dist.group.WORLD)
    cause = "get local object" if sys.version_info >= (3, 13) else "pickle"
    with pytest.raises(OSError, match=rf"one of before is as it was: .*{cause}.* \([\d.]+ MB are free there\)"):
        save(path, tensors, {"epoch": lambda: 3}, dist.group.WORLD)
    assert CheckpointFolder(path).metadata() == {"epoch": 3}
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"this checkpoint was not saved; .* Not a directory"):
        save(tmp_path / "file" / "last.ckpt", {"state_dict": {"w": torch.ones(2)}}, {}, dist.group.WORLD)


def test_a_folder_whose_saving_was_interrupted_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt.partial").mkdir()
    (tmp_path / "last.ckpt.partial" / "__0_0.distcp").touch()
    with pytest.raises(ConfigurationError, match=r"partial'.* no complete checkpoint, because it has no meta\.pt"):
        is_folder(tmp_path / "last.ckpt.partial")
    assert not is_folder(tmp_path / "absent.ckpt")


@pytest.mark.parametrize("suffix", ["17.partial", "partial", "17.before"])
def test_lightning_resumes_from_the_last_complete_checkpoint_beside_what_a_killed_process_has_left(
    tmp_path: Path, suffix: str
) -> None:
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    beside(tmp_path / "hpc_ckpt_2.ckpt", suffix).mkdir()
    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False)
    assert trainer._checkpoint_connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_1.ckpt")
