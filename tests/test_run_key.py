"""The run's key: it does not travel where all ranks were given it."""

from __future__ import annotations

import json

import pytest

from lightning_omni.errors import ConfigurationError
from lightning_omni.optimizer import WorldOptions
from lightning_omni.optimizer.embedded import RunServer
from lightning_omni.server.keys import ENVIRONMENT

KEY = "ab" * 32


def test_a_key_of_the_environment_is_the_runs_and_a_rank_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, KEY)
    said = json.dumps({"address": "tcp://10.0.0.1:1", "key": ENVIRONMENT, "run": "a run"})
    other = RunServer(1, WorldOptions(), [1, 1])
    assert other.find(lambda _: said) == ("tcp://10.0.0.1:1", bytes.fromhex(KEY), "a run")
    monkeypatch.delenv(ENVIRONMENT)
    with pytest.raises(ConfigurationError, match="this rank has none: set it to the same key for all ranks"):
        other.find(lambda _: said)


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
    server.process = Started()  # type: ignore[assignment]
    server._key = bytes.fromhex(KEY)
    assert server.find(tell)[1] == bytes.fromhex(KEY)
    assert KEY in heard[0]
    monkeypatch.setenv(ENVIRONMENT, KEY)
    assert server.find(tell)[1] == bytes.fromhex(KEY)
    assert KEY not in heard[1]
