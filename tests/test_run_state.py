"""`RunState`: one value of all that a run must remember; a probe has a state of its own, and the run's comes back."""

from __future__ import annotations

import ast
import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_snapshot import bits
from topk import TopK
from torch import nn
from torch._C._distributed_c10d import HashStore

import lightning_omni
from lightning_omni import OmniOptimizer, World
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import AsyncSGD, LocalSGD
from lightning_omni.optimizer.folders import Folder, beside, is_folder, save
from lightning_omni.optimizer.loaders import Leases
from lightning_omni.optimizer.options import WorldOptions
from lightning_omni.optimizer.run_state import GroupScope, Live, RollbackPoint, RunScope, RunState, ShardScope
from lightning_omni.optimizer.server_store import ServerSnapshot
from lightning_omni.protocol.all_reduce import PowerSGD
from lightning_omni.protocol.cut import Cut
from lightning_omni.protocol.group import GroupCore, LastAnswer
from lightning_omni.protocol.progress import Progress, ReferenceBatch
from lightning_omni.strategy.checkpoints import Checkpoints

varied = settings(deadline=None, max_examples=6, derandomize=True)


class Epochs:
    """What takes a run through its epochs."""

    progress: Progress | None = Progress(ReferenceBatch(4, 8), batches=10, epochs=2, samples=100)

    def __init__(self, scheduler: Any) -> None:
        self.schedule: Any = {scheduler: (3, 4)}


class Run:
    """A run of one rank."""

    module: Any

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.module.register_buffer("seen", torch.zeros(2))
        self.module.noted = [1.0]
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.world = World(1, options=WorldOptions(groups=1, wire=TopK()))
        OmniOptimizer(self.optimizer, self.world)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.epochs = Epochs(self.scheduler)
        self.world.core.load_sender_state(0, {"residual": [torch.ones(4, 3), None]})
        self.world.core.data = Leases(1, 2, 8, 0, lambda epoch: None, is_local=True)
        self.world.parts[0].replica.memory["outer"] = [torch.ones(2)]
        self.train()
        live = Live(self.world, self.world.channel, self.epochs, self.module, [self.optimizer], [self.scaler])
        self.live = live

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.module(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()

    @property
    def everything(self) -> Any:
        world, part = self.world, self.world.parts[0]
        return bits(
            {
                "progress": repr(self.epochs.progress),
                "schedule": [*self.epochs.schedule.values()],
                "method": repr(world.method),
                "clocks": part.replica.clock,
                "steps": world.steps,
                "last_answer": repr(world.core.last_answer),
                "traffic": repr(world.channel.traffic),
                "staleness": sorted(part.staleness.elements()),
                "memory": part.replica.memory,
                "senders": world.core.sender_state(0),
                "buffers": [*self.module.buffers()],
                "leases": id(world.core.data),
                "weights": [*self.module.parameters()],
                "gradients": [each.grad for each in self.module.parameters()],
                "optimizers": [self.optimizer.state_dict()["state"], self.optimizer.param_groups[0]["lr"]],
                "scaler": self.scaler.state_dict(),
                "unsent": [each.error for each in self.world.reduction.memory.values()],
                "modules": [self.module.noted, self.module.training],
                "generators": [torch.get_rng_state(), random.getstate()],
            }
        )

    DISTURBANCES = (
        *("progress", "schedule", "method", "clocks", "steps", "last_answer", "traffic", "staleness"),
        *("memory", "senders"),
        *("buffers", "leases", "weights", "gradients", "optimizers", "scaler", "unsent", "modules", "generators"),
    )

    def disturb(self, what: str) -> None:
        """A probe changes one piece, perhaps by the way others."""
        world, part = self.world, self.world.parts[0]
        match what:
            case "progress":
                assert self.epochs.progress is not None
                self.epochs.progress = replace(self.epochs.progress, samples=101)
            case "schedule":
                self.epochs.schedule = {}
            case "method":
                world.method = LocalSGD(period=7)
                assert world.core.method == LocalSGD(period=7), "what groups do is what the server is told"
            case "clocks":
                part.replica.clock += 1
            case "steps":
                world.steps += 1
            case "last_answer":
                world.core.last_answer = LastAnswer(3, False, 9, "end")
            case "traffic":
                world.channel.traffic.seconds += 1.0
            case "staleness":
                part.staleness[2] += 1
            case "memory":
                part.replica.memory["outer"][0].add_(1.0)
            case "senders":
                world.core.sender_state(0)["residual"][0].add_(1.0)
            case "buffers":
                self.module.seen.add_(1.0)
            case "leases":
                world.core.data = Leases(1, 2, 16, 0, lambda epoch: None, is_local=True)
            case "weights":
                self.module[0].weight.data.add_(1.0)
            case "gradients":
                self.module[0].weight.grad = None
            case "optimizers":
                self.train()
                self.optimizer.param_groups[0]["lr"] *= 2
            case "scaler":
                self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": 2.0})
            case "unsent":
                gradient = [torch.randn(20, 20, generator=torch.Generator().manual_seed(1))]
                steps = PowerSGD(rank=1).average(gradient, [self.module[0].weight], self.world.reduction.memory)
                with suppress(StopIteration):
                    steps.send(steps.send(next(steps)))
            case "modules":
                self.module.noted.append(2.0)
                self.module.eval()
            case "generators":
                random.random(), torch.rand(1)


def test_every_piece_is_disturbed() -> None:
    pieces = [field.name for scope in (RunScope, GroupScope, ShardScope) for field in fields(scope)]
    assert sorted(pieces) == sorted(Run.DISTURBANCES)


def table_of(heading: str) -> list[str]:
    """The pieces in one table of docs/state.md."""
    page = (Path(__file__).parents[1] / "docs" / "state.md").read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)^#", page, re.M | re.S)
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    assert all(cell.strip() for row in rows for cell in row)
    assert {len(row) for row in rows} == {8}
    return [re.sub("[` ]", "", row[0]) for row in rows]


@pytest.mark.parametrize(("heading", "scope"), [("Run", RunScope), ("Group", GroupScope), ("Rank × shard", ShardScope)])
def test_the_docs_say_of_every_piece_and_of_no_other_what_becomes_of_it(heading: str, scope: Any) -> None:
    assert table_of(heading) == [field.name for field in fields(scope)]


def test_what_is_rolled_back_is_what_the_docs_say() -> None:
    page = (Path(__file__).parents[1] / "docs" / "state.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    back = [re.sub("[` ]", "", row[0]) for row in rows if len(row) == 8 and "put back" in row[5]]
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
    point.put_back(GroupCore(AsyncSGD()))
    assert [*is_spoilt, point.is_spoilt] == [False, True, False]
    assert average.tolist() == [0.0, 0.0]


def test_an_expanded_buffer_is_rolled_back() -> None:
    module = torch.nn.Linear(2, 2)
    mask = torch.ones(1, 4).expand(3, 4)
    module.register_buffer("mask", mask)
    point = RollbackPoint.of(module, [], GroupCore(AsyncSGD()))
    mask[:1].fill_(5.0)
    point.put_back(GroupCore(AsyncSGD()))
    assert mask.tolist() == [[1.0] * 4] * 3


def test_a_tuner_touches_nothing_private_of_the_strategy() -> None:
    for path in (Path(lightning_omni.__file__).parent / "tuner").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
                owner = ast.unparse(node.value)
                assert not re.search("strategy|world|epochs", owner), f"{path.name}: {ast.unparse(node)}"


def test_no_module_remembers_runs() -> None:
    """Two remember what is the process's: torch's process groups, and children."""
    package = Path(lightning_omni.__file__).parent
    remember = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    }
    weak = {path.name for path in package.rglob("*.py") if re.search(r"^_?\w+.*= Weak\w+\(", path.read_text(), re.M)}
    assert remember == {"optimizer/process_groups.py", "strategy/launcher.py"}
    assert not weak


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """torch.distributed, of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@varied
@example([Run.DISTURBANCES, Run.DISTURBANCES[::-1]], True)
@given(st.lists(st.lists(st.sampled_from(Run.DISTURBANCES), max_size=6, unique=True), max_size=3), st.booleans())
def test_whatever_probes_do_and_however_they_end_the_runs_state_comes_back_in_place(
    alone: None, probes: list[Sequence[str]], fails: bool
) -> None:
    run = Run()
    state, before, weight = RunState.of(run.live), run.everything, run.module[0].weight
    for probe in probes:
        with pytest.raises(ZeroDivisionError) if fails else state.swapped(), state.swapped():
            for what in probe:
                was = run.everything
                run.disturb(what)
                assert run.everything != was
            if fails:
                raise ZeroDivisionError
        assert run.everything == before
    assert run.module[0].weight is weight
    assert type(run.world.core.waits_for(0)).__name__ == "NextGradient"
    assert isinstance(run.world.method, AsyncSGD)


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
    second = replace(first, epochs=1, past=first.steps_before(1), batches=4)
    third = replace(second, reference=replace(second.reference, window=2), epochs=2, past=second.steps_before(2))
    assert (second.steps, replace(second, samples=64).steps, third.steps) == (10, 12, 14)
    assert (third.steps_left(15, 2), third.steps_before(4)) == (1, 18)
    assert (first.past_batches, second.past_batches, third.past_batches) == (0, 10, 8)


# --- A server that dies while a checkpoint is saved ------------------------------------------------------------------


def test_what_groups_alone_know_is_in_a_checkpoint_of_all_groups_or_of_none() -> None:
    said: list[str] = []
    checkpoints = Checkpoints(said.append)
    whole = ServerSnapshot(Cut(), [], {0: ["first"], 2: ["third"]})
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
    assert Folder(path).metadata() == {"epoch": 3}
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
    assert Folder(path).metadata() == {"epoch": 3}
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
