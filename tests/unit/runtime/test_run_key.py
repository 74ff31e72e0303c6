"""The run's key: it does not travel where all ranks were given it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import AsyncSGD
from lightning_omni.runtime import WorldOptions
from lightning_omni.runtime.server_process import RunServer
from lightning_omni.transport.zeromq.keys import ENVIRONMENT, load_or_create

KEY = "ab" * 32


def test_a_key_of_the_environment_is_the_runs_and_a_rank_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, KEY)
    said = json.dumps({"answer": ["tcp://10.0.0.1:1", ENVIRONMENT, "a run"]})
    other = RunServer(1, WorldOptions(), [1, 1])
    assert other.find(lambda _: said) == ("tcp://10.0.0.1:1", bytes.fromhex(KEY), "a run")
    monkeypatch.delenv(ENVIRONMENT)
    with pytest.raises(ConfigurationError, match="this rank has none: set it to the same key for all ranks"):
        other.find(lambda _: said)


def test_a_server_whose_process_cannot_be_started_is_the_same_error_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("lightning_omni.runtime.server_process.ServerProcess", refuses)
    heard: list[str] = []

    def tell(text: str) -> str:
        heard.append(text)
        return heard[0]

    for rank in range(2):
        server = RunServer(rank, WorldOptions(), [2])
        server.start(AsyncSGD(), [])
        with pytest.raises(ConfigurationError, match=r"server's process could not be started: .* temporarily unavail"):
            server.find(tell)


def test_what_is_no_key_is_refused_where_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "a5" * 31)
    with pytest.raises(ConfigurationError, match=f"{ENVIRONMENT} does not hold a key: .*; set it to .*, or unset it"):
        WorldOptions()


def test_a_key_file_of_random_bytes_is_refused_as_one_that_holds_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\x82" * 32)  # as of head -c 32 /dev/urandom
    with pytest.raises(ConfigurationError, match="does not hold a key: 32 bytes in hexadecimal are expected"):
        load_or_create(tmp_path / "key")


def test_servers_that_start_together_for_the_first_time_make_one_key(tmp_path: Path) -> None:
    for number in range(200):
        file, begin = tmp_path / str(number) / "key", threading.Barrier(4)
        keys: list[bytes] = []

        def make(file: Path = file, begin: threading.Barrier = begin, keys: list[bytes] = keys) -> None:
            begin.wait()
            keys.append(load_or_create(file)[0])

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(keys) == 4
        assert len(set(keys)) == 1
        assert file.stat().st_mode & 0o777 == 0o600
        assert [*file.parent.iterdir()] == [file]


@pytest.mark.parametrize("address", ["fd00::1", "10.0.0.1"])
def test_the_server_of_several_nodes_listens_on_the_address_that_they_know(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    assert RunServer(0, WorldOptions(), [1, 1])._host() == address


def test_what_rank_0_says_holds_no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started:
        """Says where a server is, without one."""

        is_told = True

        def address(self) -> str:
            return "tcp://10.0.0.1:1"

    heard: list[str] = []

    def tell(text: str) -> str:
        heard.append(text)
        return text

    server = RunServer(0, WorldOptions(), [1, 1])
    server.processes[0] = Started()  # type: ignore[assignment]
    server._key = bytes.fromhex(KEY)
    assert server.find(tell)[1] == bytes.fromhex(KEY)
    assert KEY in heard[0]
    monkeypatch.setenv(ENVIRONMENT, KEY)
    assert server.find(tell)[1] == bytes.fromhex(KEY)
    assert KEY not in heard[1]
