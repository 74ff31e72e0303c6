"""The command line: a server that stands by itself, runs that join it, and what goes wrong with either."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Process
from runs import free_port

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SCRIPT = Path(__file__).parent / "scripts" / "regression.py"
COMMAND = [sys.executable, "-c", "from lightning_omni.cli import main; raise SystemExit(main())"]
LISTENS = r"parameter server on (tcp://127\.0\.0\.1:\d+), key from"
START = 150.0
"""Seconds for a process to import what it needs, on a busy machine."""

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes, and ends them with the test."""
    processes: list[Process] = []

    def start(*command: str, **env: str) -> Process:
        given = {"LIGHTNING_OMNI_KEY": None, "OMNI_TEST_SPARES": "1"}
        processes.append(Process(command, {**given, **env}))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def train(start: Start, address: str, key: str, *more: str) -> Process:
    command = [sys.executable, str(SCRIPT), "--groups=2", f"--server={address}", *more]
    return start(*command, LIGHTNING_OMNI_KEY=key, MASTER_PORT=str(free_port()))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, and on which no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_help_names_the_command_and_its_arguments(start: Start) -> None:
    of_all, of_serve = start(*COMMAND, "--help"), start(*COMMAND, "serve", "--help")
    assert of_all.end(timeout=START) == of_serve.end(timeout=START) == 0
    assert "serve " in of_all.output
    for option in ("--host HOST", "--port PORT", "--key-file KEY_FILE", "--once"):
        assert option in of_serve.output


def test_a_run_joins_a_standing_server_which_ends_after_it_with_once(start: Start, tmp_path: Path) -> None:
    key_file = tmp_path / "new" / "key"
    server = start(*COMMAND, "serve", "--port", "0", "--key-file", str(key_file), "--once")
    address = server.expect(LISTENS, timeout=START)[1]
    assert key_file.stat().st_mode & 0o777 == 0o600

    run = train(start, address, key_file.read_text().strip())
    assert run.end(timeout=220) == 0, run.output
    assert sorted(run.results) == [0, 1]
    assert run.results[0]["weights"] == run.results[1]["weights"]
    assert run.results[0]["server"] == address
    assert run.results[0]["error"] < 0.5

    assert server.end(timeout=30) == 0, server.output
    assert f"a run is over: {run.results[0]['updates']} updates, ranks lost: 0" in server.output
    assert "parameter server stopped" in server.output


def test_ctrl_c_ends_an_idle_server_in_good_order(start: Start, tmp_path: Path) -> None:
    server = start(*COMMAND, "serve", "--port", "0", "--key-file", str(tmp_path / "key"))
    server.expect(LISTENS, timeout=START)
    server.interrupt()
    assert server.end(timeout=30) == 130
    assert "parameter server stopped" in server.output
    assert "Traceback" not in server.output


def test_with_once_sigterm_before_the_end_of_a_run_is_no_success(start: Start, tmp_path: Path) -> None:
    """A job that has ended with 0 is not started again."""
    options = ["--key-file", str(tmp_path / "key"), "--once"]
    plain = start(*COMMAND, "serve", "--port", "0", *options)
    saving = start(*COMMAND, "serve", "--port", str(free_port()), "--state", str(tmp_path / "state"), *options)
    for server in (plain, saving):
        server.expect(LISTENS, timeout=START)
        os.kill(server.pid, signal.SIGTERM)
        assert server.end(timeout=30) == 143
        assert "parameter server stopped" in server.output


def test_a_port_in_use_is_one_line_with_the_remedy(start: Start, tmp_path: Path, closed_port: int) -> None:
    server = start(*COMMAND, "serve", "--port", str(closed_port), "--key-file", str(tmp_path / "key"))
    assert server.end(timeout=START) == 2
    [line] = server.output.splitlines()
    assert f"127.0.0.1:{closed_port}" in line
    assert "pass another port" in line


def test_a_run_whose_server_is_not_there_says_so_and_ends(start: Start, closed_port: int) -> None:
    address = f"tcp://127.0.0.1:{closed_port}"
    run = train(start, address, secrets.token_hex(32))
    assert run.end(timeout=220) != 0
    assert f"no parameter server answers at {address}; check server=" in run.output


def test_a_wrong_key_is_told_on_both_sides(start: Start, tmp_path: Path) -> None:
    server = start(*COMMAND, "serve", "--port", "0", "--key-file", str(tmp_path / "key"))
    address = server.expect(LISTENS, timeout=START)[1]
    run = train(start, address, secrets.token_hex(32))
    assert run.end(timeout=220) != 0
    assert "the key does not match the server's" in run.output
    server.expect("refused .*: the key does not match the server's", timeout=30)


def test_what_rank_0_is_refused_when_groups_are_formed_is_the_error_of_all(start: Start, tmp_path: Path) -> None:
    server = start(*COMMAND, "serve", "--port", "0", "--key-file", str(tmp_path / "key"))
    address = server.expect(LISTENS, timeout=START)[1]
    run = train(start, address, (tmp_path / "key").read_text().strip(), "--wire=largest")
    assert run.end(timeout=220) != 0
    refused = "unknown wire format 'largest'"
    for error in (rf"\[rank0\]: \S+\.Refused: {refused}", rf"\[rank1\]: \S+\.RankLost: .*rank 0 failed: .*{refused}"):
        assert re.search(rf"^{error}", run.output, re.MULTILINE), run.output
    assert "KeyError" not in run.output
