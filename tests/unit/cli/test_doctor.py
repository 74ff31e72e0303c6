"""``lightning-omni doctor``: what it finds on the way to a server, and what it says is to be done."""

from __future__ import annotations

import io
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import Process
from rich.text import Text
from runs import free_port
from test_observation import say, watch
from test_server_core import Link, expect_refusal

from lightning_omni.cli import main, top
from lightning_omni.cli.console import command_output
from lightning_omni.server.core import ServerCore
from lightning_omni.transport.zeromq.server import ZeroMQServer, versions
from lightning_omni.wire import messages as m

KEY = "5a" * 32
COMMAND = [sys.executable, "-c", "from lightning_omni.cli import main; raise SystemExit(main())"]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_OMNI_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "200")  # no sentence is broken
    monkeypatch.setattr("lightning_omni.cli.doctor.SECONDS", 0.1)


@contextmanager
def serving() -> Iterator[ZeroMQServer]:
    """A server on TCP, in a thread."""
    server, stop = ZeroMQServer(ServerCore(bytes.fromhex(KEY), secrets.token_bytes)), threading.Event()
    thread = threading.Thread(target=server.run, args=(stop.is_set,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(20)
        server.close()


def test_all_is_well_with_a_server_that_serves(capsys: pytest.CaptureFixture[str]) -> None:
    server = Process([*COMMAND, "serve", "--port", "0", "--progress-timeout", "20min"], {"LIGHTNING_OMNI_KEY": KEY})
    try:
        address = server.expect(r"parameter server on (tcp://\S+),", 150)[1]
        assert main(["doctor", address, "--mb", "8"]) == 0
    finally:
        server.kill()
    refused = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d refused a connection( from 127\.0\.0\.1)?: it ended before it had"
    assert re.search(refused, server.output, re.MULTILINE), server.output
    assert "the key does not match" not in server.output
    said = capsys.readouterr().out
    for step in ("key", "address", "control port", "handshake", "versions", "data port", "run", "latency"):
        assert re.search(rf"✓\s*│ {step}\s", said), said
    for way in ("to", "from"):
        assert float(re.search(rf"bandwidth {way} it\s*│ (?:at least )?(\d+) MB/s", said)[1]) > 1  # type: ignore[index]
    assert "from 127.0.0.1" in said
    assert "do:" not in said
    times = [float(number) for number in re.findall(r"(?:fp32|bf16|int8|topk:0.01) (\S+) s", said)]
    assert len(times) == 4
    assert times == sorted(times, reverse=True)  # the fewer bytes, the sooner
    assert "a group after 30 s of silence (5 s where groups join on their own), and" in said
    assert "gets nothing done after 1200 s" in said
    assert "start it with --state" in said


def test_without_a_server_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["doctor", f"tcp://127.0.0.1:{port}"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"127.0.0.1:{port} refuses connections" in said
    assert "do: control port: start lightning-omni serve there with its IP address as --host" in said
    assert "handshake" not in said


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("tcp://0.0.0.0:5555", "pass that machine's address"),
        ("10.0.0.9", "pass what lightning-omni serve has printed"),
        ("ipc:///nowhere/at/all/control", "run this where the server is"),
    ],
)
def test_an_address_that_leads_nowhere_has_a_remedy(
    address: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", address]) == 1
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["top", "doctor"])
def test_a_command_says_which_address_was_meant(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "localhost:5555"]) != 0
    said = " ".join("".join(capsys.readouterr()).replace("│", " ").split())
    assert "localhost:5555: pass the address" in said
    assert 'here "tcp://localhost:5555"' in said
    assert "server=" not in said


def test_the_data_port_is_told_from_the_control_port(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert main(["doctor", f"tcp://127.0.0.1:{server.core.data_port}"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "this is the server's data port; pass its address with the control port (serve --port)" in said
    assert "do: handshake: pass the address that lightning-omni serve has printed" in said


def test_another_key_and_no_key_have_remedies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with serving() as server:
        for given in ({"LIGHTNING_OMNI_KEY": "a5" * 32}, {"XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("empty"))}):
            monkeypatch.delenv("LIGHTNING_OMNI_KEY", raising=False)
            for name, value in given.items():
                monkeypatch.setenv(name, value)
            assert main(["doctor", server.address]) == 1
            assert "copy the server's key file here, or set LIGHTNING_OMNI_KEY" in capsys.readouterr().out.replace(
                "\n", " "
            )


def test_where_an_encoding_has_not_all_characters_others_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    with serving() as server:
        assert main(["doctor", server.address]) == 0
    sys.stdout.flush()
    assert rb"\u2713" in written.getvalue()


def test_in_a_terminal_in_which_nothing_can_be_written_over_the_table_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TTY_COMPATIBLE": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(top, "watch", lambda *_: pytest.fail("nothing would be seen"))
    with serving() as server:
        assert main(["top", server.address, "--every", "0.1"]) == 0
    assert "No run: the server waits for ranks." in capsys.readouterr().out


def test_a_key_file_that_others_can_read_is_warned_of_at_both_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o644)
    server = Process([*COMMAND, "serve", "--port", "0", "--key-file", str(file)])
    try:
        address = server.expect(r"parameter server on (tcp://\S+),", 150)[1]
        server.expect(r"other users of this machine can read or write the key file: chmod 600 /", 20)
        assert main(["doctor", address, "--key-file", str(file)]) == 0
        assert re.search(r"!\s*│ key .*can be read or written by other users", said := capsys.readouterr().out)
        assert f"do: key: chmod 600 {file}" in said.replace("\n", "")
        file.chmod(0o600)
        assert main(["doctor", address, "--key-file", str(file)]) == 0
        assert re.search(r"✓\s*│ key ", capsys.readouterr().out)
    finally:
        server.kill()


def test_each_step_is_told_when_it_is_done() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        doctor = Process([*COMMAND, "doctor", address], {"LIGHTNING_OMNI_KEY": KEY})
        try:
            doctor.expect(r"✓ │ control port ", 150)
            assert "│ handshake" not in doctor.output, "it is not over"
        finally:
            doctor.kill()


def test_at_a_terminal_a_line_that_disappears_has_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with command_output() as (show, wait_for):
            wait_for("an answer")
            show(Text("✓ it came"))
            wait_for("another one")
            time.sleep(0.2)
        said = os.read(reader, 1 << 16).decode()
    os.close(reader)
    for words in ("it came", "waiting for another one", "\x1b[2K"):  # the last erases a line
        assert words in said, said


def test_a_data_port_that_cannot_be_reached_is_told_from_the_control_port(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.core.data_port = free_port()
        assert main(["doctor", server.address]) == 1
        said = capsys.readouterr().out
    assert re.search(r"✓\s*│ control port", said)
    assert re.search(r"✗\s*│ data port", said)
    assert "--data-port" in said
    assert "bandwidth" not in said


def test_other_versions_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.core.versions = {**versions(), "torch": "1.0.0"}
        assert main(["doctor", server.address]) == 0
        said = capsys.readouterr().out
    assert re.search(r"!\s*│ versions .*torch .* \(server 1\.0\.0\)", said)
    assert "install the same torch on both sides" in said


def test_only_who_holds_the_key_is_told_what_the_server_is_and_no_echo_is_too_large() -> None:
    link = Link(1)
    link.core.versions = versions()
    for message in (m.AskServer(), m.Echo()):
        expect_refusal(say(link, message, b"stranger"), "stranger")
    watch(link)
    described = say(link, m.AskServer())
    assert (described.data_port, described.heartbeat_timeout, described.servers) == (4242, 30.0, 1)
    assert described.versions["python"]
    for nbytes in (-1, m.LARGEST_ECHO + 1):
        expect_refusal(say(link, m.Echo(nbytes=nbytes)), "protocol")
    ((answer, payload),) = link.say(b"observer", m.Echo(nbytes=1000), b"x" * 1000)
    assert (answer, len(payload)) == (m.Echoed(), 1000)


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tcp://127.0.0.1:5555", "--mb", "0"]) == 2
    assert "--mb 0" in capsys.readouterr().err


def test_an_encryption_that_there_is_not_is_no_fault_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tcp://127.0.0.1:1", "--encryption", "tls"]) == 2
    assert "encryption='tls': pass \"curve\"" in capsys.readouterr().err
