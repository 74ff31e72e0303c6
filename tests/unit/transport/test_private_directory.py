"""On one node a run listens on no port: its sockets lie in a directory of its user's own, and nothing of it remains."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from patience import SLOWER
from processes import Process

from lightning_omni.errors import ConfigurationError
from lightning_omni.transport.serving.process import ServerSettings
from lightning_omni.transport.zeromq import shared_memory
from lightning_omni.transport.zeromq.addresses import (
    PREFIX,
    PrivateDirectory,
    check_address,
    remove_if_abandoned,
    sibling,
)
from lightning_omni.transport.zeromq.client import ControlConnection
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.transport.zeromq.peers import PeerSocket
from lightning_omni.wire.layout import Layout

SETTINGS = ServerSettings("00" * 32, "", 0, 30.0, 60.0, 1, ())


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a short path, of any characters, for this test and what it starts."""
    with tempfile.TemporaryDirectory(prefix="om #?[-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SLOWER * 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def listening(pid: int) -> set[str]:
    """Inodes of a process's sockets that listen on TCP."""
    ours = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                found.add(fields[1])
    return found


def has_ended(pid: int) -> bool:
    """Whether a process with all its threads holds nothing any more: it is gone, or waits for its parent only."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return True


def join(address: str) -> ControlConnection:
    return ControlConnection(address, bytes(32), "run", 0, 1, Layout.of({"w": torch.zeros(1)}))


PARENT = """
import signal, sys, msgspec, spares
from lightning_omni.transport.serving import ServerProcess
from lightning_omni.transport.serving.process import ServerSettings
spares.prepare(ranks=0, servers=1)
process = ServerProcess(msgspec.json.decode(sys.argv[1], type=ServerSettings))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(process.pid, process.address(), flush=True)
signal.sigwait({signal.SIGTERM})
process.stop()
"""


class Parent:
    """A process like rank 0, which has started a server."""

    def __init__(self) -> None:
        self.process = Process([sys.executable, "-c", PARENT, msgspec.json.encode(SETTINGS).decode()])

    def wait_until_ready(self) -> None:
        pid, self.address = self.process.expect(r"^(\d+) (.+)$", timeout=60).groups()
        self.server, self.folder = int(pid), Path(self.address.removeprefix("ipc://")).parent

    def end(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)
        assert self.process.end(60) == 0


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
def test_a_run_on_one_node_listens_on_no_port_and_leaves_nothing_behind_however_it_ends(base: Path) -> None:
    parents = orderly, no_server, no_rank_0, none_left = [Parent() for _ in range(4)]
    with ExitStack() as stack:
        for parent in parents:
            stack.callback(parent.process.kill)
            parent.wait_until_ready()
        for parent in parents:
            assert parent.folder.parent == base
            assert parent.folder.stat().st_mode & 0o777 == 0o700
            assert sorted(path.name for path in parent.folder.iterdir()) == [
                "control",
                "data",
                *["memory"] * shared_memory.can_share_memory(),
            ]
            assert listening(parent.server) == set()

        control = join(orderly.address)
        control.close()
        assert orderly.folder.exists(), "the server still serves"
        orderly.end()
        assert not orderly.folder.exists()

        control = join(no_server.address)
        os.kill(no_server.server, signal.SIGKILL)
        wait_for(lambda: control.cause is not None)
        wait_for(lambda: has_ended(no_server.server))  # its connection ends first, then its lock
        control.close()  # any rank that ends finds that the server is gone
        assert not no_server.folder.exists()
        no_server.end()

        os.kill(no_rank_0.process.pid, signal.SIGKILL)
        wait_for(lambda: not no_rank_0.folder.exists())  # the server removes it

        os.kill(none_left.process.pid, signal.SIGKILL)
        os.kill(none_left.server, signal.SIGKILL)
        assert none_left.folder.exists()
        wait_for(lambda: has_ended(none_left.server))
        next_one = PrivateDirectory()
        assert not none_left.folder.exists()
        next_one.remove()
    assert list(base.glob(f"{PREFIX}*")) == []


def test_a_directory_in_use_is_neither_swept_nor_removed_and_other_directories_are_left_alone(base: Path) -> None:
    first = PrivateDirectory()
    (base / "lightning-omni-is-a-file").write_text("")
    (base / "lightning-omni-a-link").symlink_to("/tmp")
    for name, mode in (("state", 0o700), ("main", 0o755)):
        (base / f"lightning-omni-{name}").mkdir(mode=mode)
    (base / "lightning-omni-state" / "state-00000001").write_text("")
    second = PrivateDirectory()
    remove_if_abandoned(first.address("control"))
    remove_if_abandoned("tcp://127.0.0.1:1")
    remove_if_abandoned(f"ipc://{base}/control")
    assert first.path.exists()
    assert first.path != second.path
    for directory in (first, second):
        directory.remove()
    names = ("a-link", "is-a-file", "main", "state")
    assert sorted(path.name for path in base.iterdir()) == [f"lightning-omni-{name}" for name in names]


def test_a_path_too_long_for_sockets_is_passed_over_and_alone_it_is_an_error(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = base / ("d" * 60) / ("e" * 40)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    directory = PrivateDirectory()
    assert directory.path.parent == base
    directory.remove()
    with pytest.raises(ConfigurationError, match=r"bytes too long for sockets; set TMPDIR .* or pass Server\(host="):
        PrivateDirectory(deep)
    assert not list(deep.iterdir())


def test_a_temporary_directory_that_is_the_current_one_has_an_address_for_all(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base)
    monkeypatch.setenv("TMPDIR", ".")
    directory = PrivateDirectory()
    check_address(directory.address("control"))
    assert directory.path.parent == base
    directory.remove()


def test_leaders_talk_beside_the_servers_sockets() -> None:
    directory = PrivateDirectory()
    layout = Layout.of({"w": torch.zeros(1)})
    socket = PeerSocket(sibling(directory.address("control"), "peer-0"), [layout], RunKeys(bytes(32)))
    assert socket.address == directory.address("peer-0")
    socket.close()
    directory.remove()


def test_an_address_of_a_socket_file_is_one(base: Path) -> None:
    check_address(f"ipc://{base}/{PREFIX}1/control")
    for wrong in ("ipc://relative/control", "ipc://", "tcp://with blank:1"):
        with pytest.raises(ConfigurationError):
            check_address(wrong)
