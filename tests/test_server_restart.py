"""The parameter server is killed in mid-epoch: another one goes on, and so does training."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.server_restart import COMMAND, LISTENS, children, one_death
from core import GAVE_UP
from patience import SLOWER
from processes import Process
from runs import free_port
from test_joining import PATIENCE, Run
from test_private_directory import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SAVE_EVERY = 1.0
MOST = SLOWER * 60.0
"""Seconds until all ranks train on, on a machine that does other things, too; the benchmark says how many there are."""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    ("stands", "method"),
    [(False, "local_sgd:period=2"), (False, "diloco:period=2"), (True, "async_sgd")],
    ids=["embedded, local SGD", "embedded, DiLoCo", "standalone"],
)
def test_the_run_goes_on_when_its_server_is_killed_and_every_sample_is_trained(stands: bool, method: str) -> None:
    death = one_death(stands, method, SAVE_EVERY, delay=0.5)
    assert not death.problem, death.problem
    assert death.to_go_on < MOST
    assert 0 <= death.lost < 300 * SAVE_EVERY


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only there a server is forked")
def test_a_server_that_is_killed_is_back_and_ends_with_the_process_that_watches_it(tmp_path: Path) -> None:
    command = [*COMMAND, "serve", "--port", str(free_port()), "--state", str(tmp_path)]
    server = Process(command, {"LIGHTNING_OMNI_KEY": secrets.token_hex(32)})
    try:
        address = server.expect(LISTENS, PATIENCE)[1]
        (first,) = children(server.pid)
        os.kill(first, signal.SIGKILL)
        server.expect("process was killed by SIGKILL; another one continues$", PATIENCE)
        assert server.expect(LISTENS, PATIENCE)[1] == address
        (second,) = children(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not alive(second))
    finally:
        server.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only there a server is forked")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_server_that_is_watched_ends_in_good_order_when_only_the_watching_process_gets_the_signal(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    command = [*COMMAND, "serve", "--port", str(free_port()), "--state", str(tmp_path)]
    server = Process(command, {"LIGHTNING_OMNI_KEY": secrets.token_hex(32)})
    try:
        server.expect(LISTENS, PATIENCE)
        (serving,) = children(server.pid)
        os.kill(server.pid, number)
        assert server.end(PATIENCE) == code, server.output
        assert not alive(serving)
        assert "parameter server stopped" in server.output
        assert "Traceback" not in server.output
    finally:
        server.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_server_of_a_share_that_is_killed_before_it_has_come_is_not_awaited() -> None:
    command = [*COMMAND, "serve", "--port", str(free_port()), "--servers", "2"]
    server = Process(command, {"LIGHTNING_OMNI_KEY": secrets.token_hex(32)})
    try:
        server.expect(LISTENS, PATIENCE)
        (share,) = children(server.pid)
        os.kill(share, signal.SIGKILL)  # it takes longer than this to import torch
        server.expect("parameter server 1 of 2, .* never came: its process has ended with status -9$", PATIENCE)
        assert server.end(PATIENCE) == 1, server.output
    finally:
        server.kill()


ALONE = "from lightning_omni.transport.serving import supervisor; supervisor.can_supervise = lambda: False; "


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_server_that_saves_its_state_serves_by_itself_where_no_process_can_be_forked(tmp_path: Path) -> None:
    where = ["--port", str(free_port()), "--state", str(tmp_path)]
    program = [*COMMAND[:2], ALONE + COMMAND[2], "serve", *where]
    server = Process(program, {"LIGHTNING_OMNI_KEY": secrets.token_hex(32)})
    try:
        server.expect(LISTENS, PATIENCE)
        assert not children(server.pid)
        os.kill(server.pid, signal.SIGTERM)
        assert server.end(PATIENCE) == 0, server.output
        assert "parameter server stopped" in server.output
    finally:
        server.kill()


FALLS = """
import os, sys, time
from lightning_omni.transport.serving import supervisor
supervisor.RESTARTS, supervisor.SOON = 3, 1000.0
began = time.monotonic()
outcome = supervisor.supervise(lambda: False, lambda text: print(text, flush=True))
if isinstance(outcome, int):
    print("waited", time.monotonic() - began >= 1.0)
    sys.exit(outcome)
print("begins after", repr(outcome.report), flush=True)
outcome.send("there")
{end}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there a server is forked")
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("raise RuntimeError('of the server')", "has failed with status 1"),
    ],
)
def test_a_server_that_dies_again_and_again_is_started_ever_later_and_then_no_more(end: str, how: str) -> None:
    process = Process([sys.executable, "-c", FALLS.format(end=end)])
    try:
        assert process.end(PATIENCE) == GAVE_UP, process.output
    finally:
        process.kill()
    said = [line for line in process.output.splitlines() if line.startswith(("the parameter", "begins", "waited"))]
    assert said == [
        "begins after ''",
        f"the parameter server's process {how}; another one continues",
        "begins after 'there'",
        f"the parameter server's process {how}; another one continues in 1 s",
        "begins after 'there'",
        f"the parameter server's process {how}, 3 times in a row soon after its start: giving up",
        "waited True",
    ]


FREEZES = """
import atexit, gc, sys
atexit.register(lambda: print("frozen at the end:", gc.get_freeze_count(), flush=True))
from lightning_omni.transport.serving import supervisor
outcome = supervisor.supervise(lambda: False, print)
if isinstance(outcome, int):
    sys.exit(outcome)
print("frozen while it serves:", gc.get_freeze_count() > 0, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there a server is forked")
def test_what_is_frozen_for_a_forked_server_is_freed_at_the_end_of_both_processes() -> None:
    """Where it is not, libraries bound by nanobind, as Triton's is, print a page about leaks."""
    process = Process([sys.executable, "-c", FREEZES])
    try:
        assert process.end(PATIENCE) == 0, process.output
    finally:
        process.kill()
    said = [line for line in process.output.splitlines() if line.startswith("frozen")]
    assert said == ["frozen while it serves: True", "frozen at the end: 0", "frozen at the end: 0"]


def test_a_watched_server_that_cannot_listen_is_one_line_and_is_not_started_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*COMMAND, "serve", "--port", str(port), "--state", str(tmp_path)]
        server = Process(command, {"LIGHTNING_OMNI_KEY": secrets.token_hex(32)})
        try:
            assert server.end(PATIENCE) == 2
            [line] = server.output.splitlines()
            assert f"cannot listen on 127.0.0.1:{port}" in line
        finally:
            server.kill()


class Saving(Run):
    """A standing server that saves its state, and groups that come.

    Args:
        folder: for what they write.
        options: more of the server's.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.groups = folder, dict[str, Process]()
        key = secrets.token_hex(32)
        self._env = {"LIGHTNING_OMNI_KEY": key, "OMNI_TEST_FOLDER": str(folder), "OMNI_TEST_COPIES": "1"}
        where = ["--port", str(free_port()), "--state", f"{folder}/state", "--save-every", "1", "--once"]
        self._command = [*COMMAND, "serve", *where, *options]
        self._env["LIGHTNING_OMNI_SERVER"] = self._serve()

    def _serve(self) -> str:
        self.server = Process(self._command, self._env)
        return str(self.server.expect(LISTENS, PATIENCE)[1])

    def kill(self) -> None:
        """The server dies, with all that groups have said so far in its last save, and another one goes on.

        Else it would be where groups were before: those that hold in an epoch would keep it from coming to that.
        """
        self._wait_for_save()
        self.server.kill()
        self._serve()
        self.server.expect("goes on with a run of . ranks", PATIENCE)

    def _wait_for_save(self) -> None:
        began, deadline = self._saves, time.monotonic() + SLOWER * PATIENCE
        while self._saves < began + 2:  # the next one may have been under way
            assert time.monotonic() < deadline, f"nothing is saved: {self.server.output}"
            time.sleep(0.02)

    @property
    def _saves(self) -> int:
        """Number of the last save; 0 if there was none."""
        return max((int(file.name.rpartition("-")[2]) for file in (self.folder / "state").glob("state-*")), default=0)


def test_groups_that_have_joined_go_on_and_so_does_one_that_joins_the_server_that_goes_on(tmp_path: Path) -> None:
    run = Saving(tmp_path)
    try:
        options = {"epochs": 3, "hold": [1], "step": 0.02}
        first = run.start("a", options)
        run.wait_for("a0-in-1")
        second = run.start("b", options, seed=2)
        run.wait_for("b0-in-1")
        run.kill()
        third = run.start("c", options, seed=3)
        run.wait_for("c0-in-1")
        run.go(1)
        for each in (first, second, third):
            assert each.end(PATIENCE) == 0, each.output
        assert run.server.end(PATIENCE) == 0, run.server.output
        assert set(run.trained) == {(epoch, sample) for epoch in range(3) for sample in range(128)}
        assert len({run.result(name)["weights"] for name in "abc"}) == 1
        assert [path.name for path in (tmp_path / "state").iterdir()] == ["lock"]
    finally:
        run.close()


def test_a_run_whose_server_and_groups_are_all_gone_is_trained_on_and_saved_by_a_group_that_comes_to_another_server(
    tmp_path: Path,
) -> None:
    run = Saving(tmp_path, "--heartbeat-timeout", "10")  # as long as the other server waits for the group that is gone
    try:
        options = {"epochs": 3, "hold": [1]}
        first = run.start("a", options)
        run.wait_for("a0-in-1")
        run._wait_for_save()
        run.server.kill()
        first.kill()
        run._serve()
        run.server.expect("goes on with a run of . ranks", PATIENCE)
        run.go(1)
        second = run.start("b", options, seed=2)
        assert second.end(PATIENCE) == 0, second.output
        assert run.server.end(PATIENCE) == 0, run.server.output
        assert set(run.trained) == {(epoch, sample) for epoch in range(3) for sample in range(128)}
        assert run.result("b")["epochs"] == 3
        weights = torch.load(tmp_path / "a" / "epoch=2.ckpt", weights_only=True)["state_dict"]  # the run's folder
        assert all(bool(weight.isfinite().all()) for weight in weights.values())
    finally:
        run.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--servers", "2"], "--state --servers 2: several servers save no state"),
        (["--port", "0"], "name a port"),
        (["--save-every", "0"], "--save-every 0.0: pass a time above 0, as in 30s"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_by_the_name_of_the_option(
    options: list[str], reason: str, tmp_path: object
) -> None:
    server = Process([*COMMAND, "serve", "--state", f"{tmp_path}/state", *options], {})
    try:
        assert server.end(timeout=150) == 2
        assert reason in server.output
    finally:
        server.kill()
