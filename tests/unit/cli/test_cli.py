"""What all commands have in common: help at once, the version, units, Ctrl-C, and tables that fit."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Process

import lightning_omni
from lightning_omni.cli import entry_point as commands
from lightning_omni.cli import main
from lightning_omni.cli.console import print_line, show
from lightning_omni.cli.simulate_settings import SimulationSettings
from lightning_omni.cli.simulate_task import Task
from lightning_omni.cli.units import rate_of, seconds_of
from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator.settings import progress_bar

COMMAND = [sys.executable, "-m", "lightning_omni"]
START = 150.0


@pytest.mark.parametrize("command", ["serve", "top", "evict", "doctor", "simulate", "compare", "plan"])
def test_the_help_of_a_command_is_its_whole_docstring_without_python_types(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    whole, _, _ = (inspect.getdoc(getattr(commands, command)) or "").partition("\n\nArgs:\n")
    assert " ".join(whole.split()) in told
    assert not re.search(r"Union\[|Optional\[|Literal\[|<class |\bnull\b|\(type:", told)


def test_help_names_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "2 if a setting is wrong;" in " ".join(capsys.readouterr().out.split())


def test_help_and_version_do_not_wait_for_torch() -> None:
    program = """
import sys, contextlib, io
from lightning_omni.cli import entry_point as commands
from lightning_omni.cli import main
for arguments in (["--help"], ["--version"], ["simulate", "--help"], ["compare", "--help"], ["plan", "--help"],
                  ["serve", "--help"]):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main(arguments)
        except SystemExit as ended:
            assert not ended.code
    assert said.getvalue()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "msgspec", "zmq", "matplotlib"}))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=START)
    assert ran.stdout.strip() == "[]"


def test_the_module_is_the_command_and_knows_its_version() -> None:
    ran = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True, timeout=START)
    assert ran.stdout.strip() == f"lightning-omni {lightning_omni.__version__}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10Gbit", 1.25e9),
        ("100 Mbit/s", 1.25e7),
        ("10Gbps", 1.25e9),
        ("5GBps", 5e9),
        ("1GB/s", 1e9),
        ("1MiB/s", 2.0**20),
        ("1e7", 1e7),
        (2.5e8, 2.5e8),
        ("inf", float("inf")),
    ],
)
def test_rates_are_read_with_their_units(given: float | str, expected: float) -> None:
    assert rate_of("--bandwidth", given) == expected


@pytest.mark.parametrize(("given", "expected"), [("5ms", 5e-3), ("2s", 2), ("50 us", 5e-5), ("2min", 120), (1.5, 1.5)])
def test_times_are_read_with_their_units(given: float | str, expected: float) -> None:
    assert seconds_of("--latency", given) == pytest.approx(expected, rel=1e-12)


def test_what_is_no_quantity_is_refused_with_the_option_and_the_spelling() -> None:
    for given in ("fast", "10Gbat", "0", "-1", "nan", "5ms"):
        with pytest.raises(ConfigurationError, match=rf"--bandwidth {given}: pass bytes per second, as in 1e9"):
            rate_of("--bandwidth", given)
    with pytest.raises(ConfigurationError, match=r"--bandwidth 10Gb: bits or bytes\? pass 10Gbit or 10GB"):
        rate_of("--bandwidth", "10Gb")
    for given in ("soon", "-1", "inf", "10Gbit", "5 m"):
        with pytest.raises(ConfigurationError, match=rf"--latency {given}: pass seconds, as in 0.005, or with a unit"):
            seconds_of("--latency", given)


def test_all_commands_and_yaml_know_the_same_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command refuses the same wrong text in the same words, so each reads it with the same parser."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("latency: 5 parsecs\n")
    wrong = "5 parsecs: pass seconds, as in 0.005, or with a unit"
    for arguments in (
        ["simulate", "--latency", "5 parsecs"],
        ["compare", "--speeds=1,1", "--link=1Gbit", "--model-size=1MB", "--step", "5 parsecs"],
        ["simulate", "--config", str(cluster)],
        ["plan", "absent.json", "--latency", "5 parsecs"],
        ["serve", "--heartbeat-timeout", "5 parsecs", "--key-file", str(tmp_path / "key")],
    ):
        assert main(arguments) == 2
        assert wrong in capsys.readouterr().err


def test_all_commands_refuse_a_time_of_0_in_the_same_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, arguments in (
        ("--seconds", ["simulate"]),
        ("--evaluate-every-seconds", ["simulate"]),
        ("--every", ["top", "tcp://192.0.2.1:5555"]),
        ("--save-every", ["serve", "--key-file", str(tmp_path / "key")]),
    ):
        assert main([*arguments, option, "0s"]) == 2
        assert f"{option} 0s: pass a time above 0, as in 30s or 2min" in capsys.readouterr().err


def test_a_port_that_there_is_not_is_refused_instead_of_another_being_listened_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--port", "--data-port", "--http"):
        for port in ("65536", "-1"):
            assert main(["serve", "--key-file", str(tmp_path / "key"), f"{option}={port}"]) == 2
            assert f"{option} {port}: pass a port, 1 to 65535, or 0 for a free one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--threads", "0"], "--threads 0: pass a number above 0"),
        (["--heartbeat-timeout", "0"], "--heartbeat-timeout 0.0: pass 2s or more"),
        (["--allow-optimizer", "Mine"], "--allow-optimizer Mine: pass module:Class"),
        (["--allow-optimizer", "torch.optim:Nope"], "cannot import the optimizer torch.optim:Nope"),
        (["--allow-module", "torch.nn:Nope"], "cannot import the module class torch.nn:Nope"),
        (["--allow-module", "mine:A,mine:"], "--allow-module mine:A,mine:: pass module:Class"),
        (["--save-every", "5s"], "--save-every 5s: it is for --state, which is missing; pass both"),
        (["--record", "run.jsonl"], "--record run.jsonl: a record is of one run; pass --once, too"),
        (["--http-host", "0.0.0.0"], "--http-host 0.0.0.0: it is for --http, which is missing; pass both"),
        (
            ["--servers", "2", "--number", "1", "--coordinator", "127.0.0.1:1"],
            '--coordinator 127.0.0.1:1: pass the address of a running server as "tcp://host:port", here "tcp://127',
        ),
        (["--key-file", "taken/key"], "cannot make the key file taken/key (File exists); name another one"),
    ],
)
def test_what_a_server_could_not_work_with_is_refused_before_it_listens(
    given: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_OMNI_KEY", raising=False)
    Path("taken").touch()
    # Where nothing of this is refused, an address of no machine is, instead of a server being run.
    assert main(["serve", "--host", "192.0.2.1", "--port", "0", "--key-file", "key", *given]) == 2
    assert says in capsys.readouterr().err


def test_a_server_says_for_which_other_one_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_omni.transport.zeromq.server.CONNECT_TIME", 1.0)
    given = ["serve", "--port", "0", "--key-file", str(tmp_path / "key")]
    assert main([*given, "--servers", "2", "--number", "1", "--coordinator", "tcp://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert "waiting for the server at tcp://127.0.0.1:1, up to 1 s" in said
    assert "no parameter server answers at tcp://127.0.0.1:1" in said


def test_tables_fit_a_terminal_and_are_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.table import Table

    wide, tall = Table("x" * 150), Table("tall")
    monkeypatch.delenv("COLUMNS", raising=False)
    show(wide, tall)
    assert "x" * 150 in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    show(wide, tall)
    output = capsys.readouterr().out
    assert "tall" in output
    assert max(map(len, output.splitlines())) <= 80
    print_line("y" * 150)
    assert capsys.readouterr().out == "y" * 150 + "\n"


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


@pytest.mark.processes
def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        # A signal that comes right before a sleep does not end it.
        "import time\n\ndef made():\n    print('it runs', flush=True)\n"
        "    for _ in range(6000):\n        time.sleep(0.1)\n"
    )
    for arguments, sign in (
        (["simulate", "--workload", f"{tmp_path / 'slow.py'}:made"], "it runs"),
        (["serve", "--port", "0", "--key-file", str(tmp_path / "key")], "parameter server on"),
    ):
        process = Process([*COMMAND, *arguments], {"OMP_NUM_THREADS": "1"})
        try:
            process.expect(sign, timeout=START)
            process.interrupt()
            assert process.end(timeout=START) == 128 + signal.SIGINT, (arguments, process.output)
        finally:
            process.kill()
        assert "Traceback" not in process.output
        assert "KeyboardInterrupt" not in process.output


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """As in ``lightning-omni ... | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "simulate", "--updates", "2", "--no-picture", "--out", str(tmp_path)]
    with os.fdopen(writer, "w") as out:
        ran = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=START)
    assert "Traceback" not in ran.stderr
    assert "Exception" not in ran.stderr
    assert (tmp_path / "async_sgd.npz").exists(), "what was simulated is lost"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device on which there is no space")
def test_output_for_which_there_is_no_space_is_an_error_of_one_line() -> None:
    command = [*COMMAND, "compare", "--speeds", "1,1", "--link", "1Gbit", "--model-size", "1MB", "--step", "0.1s"]
    with open("/dev/full", "w") as out:
        ran = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=START)
    assert ran.returncode == 1
    assert ran.stderr == "lightning-omni: the output could not be written: No space left on device\n"


def test_a_rate_keeps_the_ratios_between_those_of_parameter_groups() -> None:
    def two_rates(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": [each], "lr": lr} for each, lr in zip(parameters, (0.1, 0.02), strict=True)]
        return torch.optim.SGD(groups, momentum=0.9)

    task = Task.of(SimulationSettings())
    task = replace(task, workload=replace(task.workload, optimizer=two_rates))
    for rate, rates in ((None, [0.1, 0.02]), (0.1, [0.1, 0.02]), (0.5, [0.5, 0.1])):
        made = task.optimizer(rate)([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)])
        assert [group["lr"] for group in made.param_groups] == pytest.approx(rates)
