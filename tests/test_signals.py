"""SIGTERM, SLURM's requeue signal and Ctrl-C: all ranks end together, with what is to be saved, and nothing stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core import Signals, end_in_one_line, training_position
from patience import SLOWER
from processes import interpret
from runs import Run, Running, free_port, search_path
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_omni.errors import Evicted

TERMINATED = 128 + signal.SIGTERM


def until(condition: Callable[[], bool], otherwise: Callable[[], str], timeout: float = 120) -> None:
    deadline = time.monotonic() + SLOWER * timeout
    while not condition():
        assert time.monotonic() < deadline, otherwise()[-6000:]
        time.sleep(0.02)


def processes(folder: Path, ranks: int, output: Callable[[], str]) -> list[int]:
    """Waits until all ranks train; their process numbers."""
    files = [folder / f"ready{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() and file.read_text() for file in files), output)
    return [int(file.read_text()) for file in files]


def has_ended(running: Running) -> bool:
    return not running.survivors


def finish(running: Running) -> Run:
    finished = running.wait(180)
    assert not running.survivors, "processes are left behind"
    return finished


def test_a_rank_that_waits_long_in_a_collective_of_a_callback_says_where() -> None:
    options = {"long_wait": 0.5, "strategy": {"groups": 1}, "devices": 2, "trainer": {"max_epochs": 1}}
    with Running("signals.py", options) as running:
        finished = finish(running)
        assert finished.code == 0, finished.output
        said = (running.folder / "said").read_text()
    where = r"in barrier\(\), called in .*on_train_batch_end \(signals.py, line \d+\)"
    assert re.match(rf"rank 0 has waited for \d+ s {where}: not all ranks have called it", said)
    assert "count by batch_idx or trainer.global_step" in said


def test_a_rank_that_calls_a_collective_of_all_says_in_which_hook_and_after_which_batch() -> None:
    trainer: Any = SimpleNamespace(
        lightning_module=SimpleNamespace(_current_fx_name="on_train_epoch_end"),
        fit_loop=SimpleNamespace(batch_idx=5),
        current_epoch=2,
    )
    assert training_position(trainer) == "in on_train_epoch_end, after batch 6 of epoch 2"


class Looks(TorchDispatchMode):
    """Counts how often Python asks for the value of a tensor, for which it waits where that is on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Those of a rank in a process group of two, which is all of the run."""
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu"), launcher=None),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()),
    )
    world: Any = SimpleNamespace(size=2, rank=0, members=[0, 1], registration=None, control=None)
    signals = Signals(SystemExit)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        signals.install(trainer, world, lambda: None, nullcontext)
        yield signals
    finally:
        signals.restore()
        dist.destroy_process_group()


def test_ranks_look_once_before_a_batch_at_what_they_agree_on(signals: Signals) -> None:
    with Looks() as looks:
        signals.agree()
    assert looks.count == 1


PUBLISHED = {
    "strategy": {"groups": 2, "validation": "published"},
    "devices": 2,
    "trainer": {"val_check_interval": 0.25},
}


@pytest.mark.parametrize(
    ("options", "to_all"),
    [
        ({"strategy": {"groups": 1}, "devices": 2}, False),
        ({"strategy": {"groups": 2}}, True),
        ({"strategy": {"groups": 2, "method": "local_sgd:period=500", "data": "static"}, "devices": 2}, False),
        (PUBLISHED, False),
    ],
    ids=[
        "one group, one rank",
        "two groups, all ranks",
        "groups that hardly ever exchange, one rank",
        "groups that do not wait for validations, one rank",
    ],
)
def test_sigterm_ends_all_ranks_at_one_batch_and_saves(options: dict[str, Any], to_all: bool) -> None:
    ranks = options.get("devices", 4)
    with Running("signals.py", options) as running:
        last = processes(running.folder, ranks, lambda: running.output)[-1]
        if to_all:
            os.killpg(running.process.pid, signal.SIGTERM)
        else:
            os.kill(last, signal.SIGTERM)
        finished = finish(running)
        assert finished.code == TERMINATED, finished.output[-6000:]
        assert set(finished.results) == set(range(ranks))
        for seen in finished.results.values():
            assert (seen["exception"], seen["received"]) == ("SIGTERMException", True)
            assert seen["world"] == ranks, "callbacks see all ranks, not a group's"
        updates = {int((running.folder / f"updates{rank}").read_text()) for rank in range(ranks)}
        assert len(updates) == 1
        assert updates != {0} or "method" in options["strategy"]
        for name in ("exception", "model"):
            saved = torch.load(running.folder / f"{name}.ckpt", weights_only=False)
            assert saved["global_step"] == finished.results[0]["step"] > 0
    if options["strategy"]["groups"] == 1:
        assert finished.results[0] == finished.results[1]


def test_sigterm_before_the_first_batch_ends_all_ranks_with_it() -> None:
    options = {"strategy": {"groups": 1}, "devices": 2, "terminate": "start", "trainer": {"max_epochs": 1}}
    with Running("signals.py", options) as running:
        finished = finish(running)
    assert finished.code == TERMINATED, finished.output[-6000:]
    for seen in finished.results.values():
        assert (seen["exception"], seen["received"], seen["step"]) == ("SIGTERMException", True, 0)
    assert len(finished.results) == 2


def test_sigterm_while_ranks_take_leave_of_each_other_leaves_a_finished_fit_finished() -> None:
    options = {"strategy": {"groups": 2}, "devices": 2, "ready": 1, "terminate": "end", "trainer": {"max_epochs": 1}}
    with Running("signals.py", options) as running:
        finished = finish(running)
    assert finished.code == 0, finished.output[-6000:]
    assert [seen["handler"] for seen in finished.results.values()] == [str(signal.SIG_DFL)] * 2
    assert "Received SIGTERM" not in finished.output, "Lightning's handler waits for all ranks"


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_sigterm_after_the_last_batch_of_a_fit_lets_it_end_as_one_that_is_finished(groups: int) -> None:
    options = {"strategy": {"groups": groups}, "devices": 2, "terminate": "last batch", "trainer": {"max_epochs": 1}}
    with Running("signals.py", options) as running:
        finished = finish(running)
    assert finished.code == 0, finished.output[-6000:]
    assert [seen["exception"] for seen in finished.results.values()] == ["", ""]
    assert "rank 1 was told to end by SIGTERM; the run ends at the start of a batch" in finished.output


def test_a_rank_that_sigterm_finds_blocked_ends_after_a_while() -> None:
    options = {"strategy": {"groups": 1}, "devices": 2, "ready": 2, "block": {"1": 3}, "grace": 1.0}
    with Running("signals.py", options) as running:
        processes(running.folder, 2, lambda: running.output)
        until((running.folder / "blocked1").exists, lambda: running.output)
        os.killpg(running.process.pid, signal.SIGTERM)
        finished = finish(running)
    assert finished.code != 0
    assert "no batch has begun or ended" in finished.output


def test_a_blocked_rank_does_not_outlive_the_one_that_started_it() -> None:
    options = {"strategy": {"groups": 1}, "devices": 2, "ready": 2, "block": {"1": 3}}
    with Running("signals.py", options) as running:
        processes(running.folder, 2, lambda: running.output)
        until((running.folder / "blocked1").exists, lambda: running.output)
        running.process.kill()
        finished = finish(running)
    assert "the process of local rank 0 is gone; this rank ends" in finished.output


def test_a_finished_fit_that_is_interrupted_has_not_failed() -> None:
    options = {"strategy": {"groups": 2}, "devices": 2, "interrupt_at_end": True, "trainer": {"max_epochs": 1}}
    with Running("signals.py", options) as running:
        finished = finish(running)
    assert "Detected KeyboardInterrupt" in finished.output
    for claim in ("failed", "cannot go on", "Traceback", "stops:", "lost"):
        assert claim not in finished.output, finished.output[-6000:]


@pytest.mark.parametrize("to_all", [True, False])
def test_ctrl_c_leaves_rank_0_the_time_to_save_and_blames_no_other(to_all: bool) -> None:
    options = {"strategy": {"groups": 1}, "devices": 2, "ready": 2, "grace": 0.4, "slow_disk": 1.5}
    with Running("signals.py", options) as running:
        processes(running.folder, 2, lambda: running.output)
        (os.killpg if to_all else os.kill)(running.process.pid, signal.SIGINT)
        finished = finish(running)
        assert finished.code == 1, finished.output[-6000:]
        for name in ("exception", "model"):
            assert torch.load(running.folder / f"{name}.ckpt", weights_only=False)["global_step"] > 0
    assert "SIGKILL" not in finished.output


ASKED = """
import signal, subprocess, sys
from lightning_omni.strategy import launcher

class Asked:
    def on_death(self, rank, code):
        return False

    def is_writing(self):
        return False

launcher.GRACE, asked = 0.1, Asked()
"""


INTERRUPTED_WHILE_IT_STARTS = f"""{ASKED}
kill = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
child = subprocess.Popen([sys.executable, "-c", kill], stderr=subprocess.DEVNULL)
observer = launcher.ChildObserver([child], asked)
observer.start()
observer.join(60)
"""


FAILED_WITHOUT_A_STRATEGY = f"""{ASKED}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(3)"])
observer = launcher.ChildObserver([child], asked)
del asked
observer.start()
observer.join(60)
print("goes on")
"""


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_ranks_that_hold_the_model_together_save_because_of_an_error_that_all_of_them_have(groups: int) -> None:
    options = {
        "strategy": {"groups": groups, "model_parallel": "fsdp"},
        "devices": 2 * groups,
        "trainer": {"max_epochs": 1},
    }
    with Running("signals.py", {**options, "raise_at": dict.fromkeys("0123", 4)}) as running:
        finished = finish(running)
        assert finished.code == 1, finished.output[-6000:]
        for name in ("exception", "model"):
            saved = torch.load(running.folder / f"{name}.ckpt", weights_only=False)
            assert saved["global_step"] == finished.results[0]["step"] == 3
            assert all(value.isfinite().all() for value in saved["state_dict"].values())
    with Running("signals.py", {**options, "raise_at": {"0": 4}, "saving": 1.0, "grace": 0.4}) as running:
        finished = finish(running)
        assert finished.code == 1, finished.output[-6000:]
        assert "no checkpoint is saved: the ranks of a group hold the model together" in finished.output
        assert not list(running.folder.glob("*.ckpt"))


def test_a_rank_that_fails_when_no_strategy_is_left_leaves_rank_0_to_come_to_its_end() -> None:
    ended = interpret(FAILED_WITHOUT_A_STRATEGY)
    assert (ended.returncode, ended.stdout) == (1, "goes on\n")


def test_ctrl_c_while_the_other_ranks_start_ends_all_without_an_error() -> None:
    ended = interpret(INTERRUPTED_WHILE_IT_STARTS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")


INTERRUPTED_EXAMPLE = """
import os, pathlib, signal, sys, threading, time

started = pathlib.Path(sys.argv[0]).with_suffix(".started")
if __name__ == "__mp_main__":  # a process that simulates, as it starts
    started.touch()
    time.sleep(15)

from functools import partial

import torch
from comparison import Images, Run, simulate_all
from lightning_omni.simulator import Cluster

def interrupt():
    while not started.exists():
        time.sleep(0.02)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    part = (torch.zeros(10_000, 1, 14, 14), torch.zeros(10_000, dtype=torch.int64))
    threading.Thread(target=interrupt).start()
    run = Run("async_sgd", 2, Cluster.even(2), partial(torch.optim.SGD, lr=0.1), updates=1)
    simulate_all({"only": run}, Images("nothing", part, part), "simulating", processes=1)
"""


def test_ctrl_c_ends_an_example_while_its_processes_start(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(INTERRUPTED_EXAMPLE)
    path = os.pathsep.join([search_path(), str(Path(__file__).parents[1] / "examples" / "studies")])
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (128 + signal.SIGINT, "Interrupted.", "")


@contextmanager
def slurm_job(folder: Path, options: dict[str, Any], tasks: int) -> Iterator[list[Running]]:
    """As srun starts tasks; ``scontrol`` writes down what it is asked."""
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    scontrol.chmod(0o755)
    port = str(free_port())
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Running(
                    "signals.py",
                    options,
                    env={
                        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
                        "OMNI_TEST_FOLDER": str(folder),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                        "SLURM_JOB_ID": "4242",
                        "SLURM_JOB_NAME": "train",
                        "SLURM_NTASKS": str(tasks),
                        "SLURM_NTASKS_PER_NODE": str(tasks),
                        "SLURM_NNODES": "1",
                        "SLURM_NODEID": "0",
                        "SLURM_PROCID": str(task),
                        "SLURM_LOCALID": str(task),
                    },
                    spares=0,
                )
            )
            for task in range(tasks)
        ]


@pytest.mark.skipif(sys.platform != "linux", reason="SLURM runs on Linux")
def test_slurm_requeues_a_job_with_groups_and_then_ends_it(tmp_path: Path) -> None:
    """Both signals come to a rank that is neither rank 0 nor in its group."""
    with slurm_job(tmp_path, {"strategy": {"groups": 2}, "devices": 2}, tasks=2) as (first, second):
        processes(tmp_path, 2, lambda: first.output + second.output)
        saved = tmp_path / "hpc_ckpt_1.ckpt"
        os.kill(second.process.pid, signal.SIGUSR1)
        until((tmp_path / "asked").exists, lambda: first.output + second.output)
        assert (tmp_path / "asked").read_text() == "requeue 4242\n"
        assert torch.load(saved, weights_only=False)["omni"]["run"]["groups"] == 2
        os.kill(second.process.pid, signal.SIGTERM)
        for each in (first, second):
            assert each.process.wait(180) == TERMINATED
            until(partial(has_ended, each), lambda: "processes are left behind", 60)
    assert not (tmp_path / "hpc_ckpt_2.ckpt").exists()


def test_an_eviction_that_ends_the_process_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> Exception:
        try:
            try:
                raise RuntimeError("gloo")
            except RuntimeError as cause:
                raise error from cause
        except Exception as raised:
            return raised

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    evicted, other = fail(Evicted("group 1 was evicted by hand")), fail(ValueError("of the user's"))
    end_in_one_line(evicted)
    sys.excepthook(type(evicted), evicted, evicted.__traceback__)
    assert capsys.readouterr().err == "lightning_omni.errors.Evicted: group 1 was evicted by hand\n"
    sys.excepthook(type(other), other, other.__traceback__)
    assert capsys.readouterr().err.count("Traceback") == 2
