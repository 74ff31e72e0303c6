"""A dead worker costs its own group only; a dead run leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from benchmarks.kills import trained_samples
from patience import SLOWER
from processes import interpret
from runs import Run, Running, run

FIT = {
    "data": {"samples": 384},
    "sleep": {str(rank): 0.02 for rank in range(4)},
    "trainer": {"max_epochs": 2, "val_check_interval": 0.5},
}


def finish(running: Running, timeout: float = 90) -> Run:
    finished = running.wait(timeout)
    until(lambda: not running.survivors, 15, "processes are left behind")
    return finished


def until(condition: Any, timeout: float, otherwise: str) -> None:
    deadline = time.monotonic() + SLOWER * timeout
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def begun(running: Running, rank: int, word: str = "batch") -> bool:
    events = running.folder / f"events{rank}"
    return events.exists() and word in events.read_text()


STALLS = {"stall_at": {"3": 5}, "strategy": {"groups": 2, "elastic": {"timeout": 4}}, "no_loader": True}
IN_FRAGMENTS = {"groups": 2, "server": {"count": 2}, "method": "diloco:period=4,fragments=2,delay=1,outer_momentum=0.5"}
DIES = {"die_at": {"2": 5}, "strategy": IN_FRAGMENTS}
NO_LOADER = {"die_at": {"3": 5}, "no_loader": True}


@pytest.mark.parametrize(
    ("way", "victim"),
    [
        (DIES, 2),
        ({"die_in_validation": 3}, 3),
        (STALLS, 3),
        pytest.param(NO_LOADER, 3, marks=pytest.mark.exhaustive),  # as where a rank stalls
    ],
)
def test_the_run_outlives_a_worker_outside_the_first_group(way: dict[str, Any], victim: int) -> None:
    with Running("groups.py", {"fits": [{**FIT, **way, "test": True}]}) as running:
        finished = finish(running)
        assert finished.code == 0, finished.output[-4000:]
        assert all(len(seen) == 384 for seen in trained_samples(running.folder, (2, 3)))
    for rank in (0, 1):
        each = finished.results[rank][0]
        assert each["report"]["ranks_lost"] == [2, 3]
        assert len(each["validations"]) == 4 + 1
        # Those that are left evaluate all of the data, also when the fit is over.
        assert each["test"][0]["val_loss"] == pytest.approx(each["validations"][3][1], rel=1e-4)
    assert "its group is evicted" in finished.output
    assert ("ranks were lost during this validation (2, 3); its" in finished.output) == ("die_in_validation" in way)
    assert ("group 1 is alive and has made no progress for 4 s" in finished.output) == (way is STALLS)
    assert 2 not in finished.results
    assert 3 not in finished.results


def test_one_group_of_the_ranks_that_are_left_validates_all_of_the_data_and_saves_what_is_better() -> None:
    way = {"die_at": {"3": 3}, "strategy": {"groups": 4}, "regroup": {"11": 1}, "test": True}
    way |= {"checkpoint": {"monitor": "val_loss"}}
    with Running("groups.py", {"fits": [{**FIT, **way, "trainer": {"val_check_interval": 0.5}}]}) as running:
        finished = finish(running)
        assert finished.code == 0, finished.output[-4000:]
    for rank in (0, 1, 2):
        each = finished.results[rank][0]
        assert each["regroup_times"]
        assert each["test"][0]["val_loss"] == pytest.approx(each["validations"][1][1], rel=1e-4)
        assert each["validations"][1][1] < each["validations"][0][1]
        assert each["best"].endswith(f"step={each['validations'][1][0]}.ckpt")


def test_a_fit_after_one_that_has_lost_a_rank_says_so_and_what_to_do() -> None:
    fit = {"devices": 2, "data": {"samples": 128}}
    with Running("groups.py", {"fits": [{**fit, "die_at": {"1": 3}}, fit]}) as running:
        finished = finish(running)
    assert finished.code != 0
    last = finished.output.strip().splitlines()[-1]
    assert "RankLost: rank 1 was lost in the fit or loop before" in last, finished.output[-4000:]
    assert "start the script again" in last


SAVES = {**FIT, "checkpoint": {"save_on_exception": True, "save_top_k": 0}}


def test_an_exception_on_all_ranks_at_once_leaves_the_checkpoint_that_a_callback_saves() -> None:
    with Running("groups.py", {"fits": [{**SAVES, "devices": 2, "raise_at": dict.fromkeys("01", 4)}]}) as running:
        finished = finish(running)
        assert finished.code != 0
        saved = [*running.folder.glob("checkpoints/*")]
        assert len(saved) == 1, finished.output[-60000:]


def test_an_exception_in_one_group_is_told_to_the_others_who_go_on_and_to_who_asks_for_the_status() -> None:
    with Running("groups.py", {"fits": [{**SAVES, "raise_at": {"3": 4}, "test": True}]}) as running:
        finished = finish(running)
    assert finished.code == 1, finished.output[-4000:]
    assert finished.output.count("when the script has come to its end, this process ends with status 1") == 1
    assert 'raise ValueError("something is wrong with this batch")' in finished.output, "the traceback"
    assert finished.results[0][0]["test"], "the script has come to its end"
    reason = "rank 3 failed: ValueError: something is wrong with this batch"
    assert f"RuntimeError: rank 2's group is out of the run: {reason}" in finished.output, "rank 2 only lost its peer"
    assert f"{reason}; its group is evicted" in finished.output
    assert "rank 2 failed" not in finished.output
    assert finished.results[0][0]["report"]["ranks_lost"] == [2, 3]


def test_a_shorter_stream_on_one_member_ends_its_group_with_the_reason() -> None:
    """Under DDP the others wait for each other until torch's timeout, or are told that a connection was closed."""
    fit = {"loader": "shorter on rank 3", "trainer": {"max_epochs": 1}}
    with Running("groups.py", {"fits": [fit]}) as running:
        finished = finish(running)
    assert finished.code == 1, finished.output[-4000:]
    assert "rank 3 has left its loop after 5 steps, and rank 2 waits for it in a further step" in finished.output
    assert finished.results[0][0]["report"]["ranks_lost"] == [2, 3]


ENDS = ("", "raise SystemExit(3)", "raise ValueError")
RANKS_THAT_END = {"it fails later": (1, False), "it fails first": (1, True), "it ends well": (0, False)}
"""With which status the script of another rank ends, and whether it is over when that of rank 0 comes to its end."""
COPIES = f"""
import atexit, os, subprocess, sys, time
from lightning_omni.strategy import launcher
from lightning_omni.strategy.launcher import OmniLauncherHooks, exit_process

class Launcher(OmniLauncherHooks):
    num_processes, num_nodes = 2, 1
    class cluster_environment:
        validate_settings, creates_processes_externally = staticmethod(lambda **_: None), False
        node_rank = local_rank = staticmethod(lambda: 1)
    def _call_children_scripts(self): self.procs = [subprocess.Popen(child)]

class Launching:
    def on_death(self, rank, code): return False
    def is_writing(self): return False
    def failures(self): return ()

for given in {[*ENDS, *RANKS_THAT_END.values()]}:
    if os.fork() == 0:
        break  # a copy goes on to the end of the script, as a script does
    _, status = os.wait()
    print("status", os.waitstatus_to_exitcode(status), end="\\n\\n", flush=True)
else:
    os._exit(0)
if isinstance(given, str):
    atexit.register(print, "the last handler", end="; ")
    exit_process(1, "rank 3 failed")
    print("the script", end=", ")
    exec(given)
else:
    os.dup2(1, 2)
    end, first = given
    launcher.GRACE = 60.0  # on a busy machine, the child takes a while to start
    child = [sys.executable, "-c", f"import time; time.sleep({{int(not first)}}); raise SystemExit({{end}})"]
    rank_0 = Launcher()
    rank_0.launching = Launching()
    rank_0.launch(print, "the fit")
    if first:
        rank_0.procs[0].wait()
        time.sleep(0.5)
"""


@pytest.fixture(scope="module")
def copies() -> dict[str, str]:
    """What copies of a process say of which each comes to another end, some of them as rank 0 beside another rank."""
    done = interpret(COPIES)
    assert done.returncode == 0, done.stderr
    return dict(zip((*ENDS, *RANKS_THAT_END), done.stdout.split("\n\n"), strict=False))


@pytest.mark.parametrize("end", ENDS)
def test_the_status_of_a_run_that_had_a_failure_is_1_after_all_that_the_script_has_left_to_do(
    copies: dict[str, str], end: str
) -> None:
    assert copies[end] == "the script, the last handler; status 1"


@pytest.mark.parametrize("way", RANKS_THAT_END)
def test_a_rank_whose_script_fails_while_that_of_rank_0_ends_is_in_the_status(copies: dict[str, str], way: str) -> None:
    """Rank 0 has a batch less to predict, say; under DDP its status would be 0."""
    status, _ = RANKS_THAT_END[way]
    assert "the fit\n" in copies[way]
    assert copies[way].endswith(f"status {status}")
    assert ("the process of local rank 1 ended with exit code 1" in copies[way]) == bool(status)


def test_a_group_that_is_stopped_for_half_of_the_run_holds_up_none_and_takes_part_again() -> None:
    method = "decoupled_diloco:period=4,fragments=2,outer_momentum=0.5"
    fit = {
        "data": {"samples": 1024},
        "sleep": {str(rank): 0.02 for rank in range(4)},
        "strategy": {"groups": 4, "server": {"count": 2}, "method": method},
        "trainer": {"max_epochs": 1},
    }

    def batches(running: Running, rank: int) -> int:
        return sum(line.startswith("batch") for line in (running.folder / f"events{rank}").read_text().splitlines())

    with Running("groups.py", {"fits": [fit]}) as running:
        until(lambda: begun(running, 3), 120, "training never began")
        pid = int((running.folder / "events3").read_text().split()[1])
        os.kill(pid, signal.SIGSTOP)
        try:
            before = sum(batches(running, rank) for rank in range(3))
            until(lambda: sum(batches(running, rank) for rank in range(3)) > before + 64, 60, "the others wait for it")
            own = batches(running, 3)
        finally:
            os.kill(pid, signal.SIGCONT)
        finished = finish(running)
        assert finished.code == 0, finished.output[-4000:]
        assert batches(running, 3) > own
    samples = [sample for rank in range(4) for sample in finished.results[rank][0]["samples"][0]]
    assert set(samples) == set(range(1024))
    assert finished.results[0][0]["report"]["ranks_lost"] == []
    assert len({finished.results[rank][0]["weights"] for rank in range(4)}) == 1
    assert finished.results[0][0]["metrics"]["val_loss"] < 0.9


def test_a_job_that_is_suspended_as_a_whole_goes_on_as_if_nothing_had_been() -> None:
    fit = {
        **FIT,
        "strategy": {"groups": 2, "elastic": {"heartbeat": 8}},
        "sleep": {str(rank): 0.02 for rank in range(4)},
    }
    with Running("groups.py", {"fits": [fit]}) as running:
        until(lambda: all(begun(running, rank) for rank in range(4)), 120, "training never began")
        job = running.survivors
        assert len(job) >= 4 + 1
        for pid in job:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(11)  # what the test is about: longer than any silence is allowed to last
        for pid in job:
            os.kill(pid, signal.SIGCONT)
        finished = finish(running)
    assert finished.code == 0, finished.output[-4000:]
    assert finished.results[0][0]["report"]["ranks_lost"] == []


def test_a_death_in_the_first_group_ends_the_run_and_says_why() -> None:
    with Running("groups.py", {"fits": [{**FIT, "die_at": {"1": 5}}]}) as running:
        finished = finish(running, timeout=180)
    assert finished.code != 0
    assert "the run cannot go on without it" in finished.output
    assert not finished.results


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_the_end_of_the_main_process_leaves_nothing_running_and_no_files(number: signal.Signals) -> None:
    fits = {"fits": [{**FIT, "devices": 2, "trainer": {"max_epochs": 200}}]}
    with (
        TemporaryDirectory(prefix="omni-") as files,
        Running("groups.py", fits, {"TMPDIR": files}) as running,
    ):
        until(lambda: all(begun(running, rank) for rank in range(2)), 120, "training never began")
        assert len(running.servers) == 2, "the server has a process of its own, and one that watches it"
        assert len(running.survivors) == 2 + 2
        assert list(Path(files).glob("lightning-omni-*"))
        if number == signal.SIGKILL:
            running.process.kill()
        else:
            os.killpg(running.process.pid, number)  # as a terminal does, by Ctrl-C and when it is closed
        running.process.wait(180)
        until(lambda: not running.survivors, 30, "processes are left behind")
        assert not list(Path(files).glob("lightning-omni-*"))
        assert running.process.returncode != 0
        if number == signal.SIGINT:
            assert "Detected KeyboardInterrupt" in running.output


def test_a_loop_that_has_lost_a_group_regroups_and_wraps_its_module_again() -> None:
    finished = run("wrapped_again.py", timeout=120)
    assert finished.results[0] == finished.results[1]
