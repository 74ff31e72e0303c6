"""A disk that is full costs what was to be written there, for as long as it is full, and nothing else."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
from rich.console import Console
from test_resilience import Mortal, workers
from test_servers import same
from test_transport import KEY

from lightning_omni.cli.serve import Options, RunLog, StandaloneServer, StopSignals
from lightning_omni.methods import method_named
from lightning_omni.server.core import ServerCore
from lightning_omni.server.event_log import Event, RecordFile, read_record
from lightning_omni.transport.serving.process import ServerSettings
from lightning_omni.transport.serving.save_files import saved_weights
from lightning_omni.transport.serving.state_directory import RECONNECT_TIMEOUT, StateDirectory

resource = pytest.importorskip("resource")
EVERY = 1000.0


@contextlib.contextmanager
def full_from(nbytes: int) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def no_files() -> Iterator[None]:
    """No file can be opened, nor a directory read."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_record_that_cannot_be_written_ends_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    record = RecordFile("/dev/full")
    for clock in range(3):
        record(Event(kind="push", time=0.0, clock=clock))
    assert [each.message for each in caplog.records] == [
        "record='/dev/full': No space left on device; the record ends here, after 0 bytes, and the run goes on without"
    ]


def test_a_record_ends_with_its_last_whole_line(tmp_path: Path) -> None:
    record, events = RecordFile(tmp_path / "record"), [Event(kind="push", time=0.0, clock=i) for i in range(9)]
    with full_from(200):
        for event in events:
            record(event)
    kept = list(read_record(tmp_path / "record"))
    assert 0 < len(kept) < 9
    assert kept == events[: len(kept)]


def test_a_record_without_an_event_leaves_that_of_the_run_before(tmp_path: Path) -> None:
    for clocks in (range(3), (), (7,)):
        record = RecordFile(tmp_path / "record")
        for clock in clocks:
            record(Event(kind="push", time=0.0, clock=clock))
        record.close()
        assert [each.clock for each in read_record(tmp_path / "record")] == ([*clocks] or [0, 1, 2])


# --- The server's state ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SavedRun]:
    with contextlib.ExitStack() as stack:
        run = SavedRun(tmp_path / "state", stack)
        yield run
        run.states.close()


class SavedRun:
    """A run of two groups whose server saves its state."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        serving = Mortal(stack)
        self.path, self.core, self.groups = path, serving.core, workers(serving, method_named("async_sgd"))
        self.states = StateDirectory(path, every=EVERY)
        assert self.states.restore(self.core) == ""
        self.save()

    def save(self) -> None:
        """The next save is due."""
        self.states._due = self.states._asked = 0.0
        self.states.poll(self.core)
        self.states.wait()
        self.states._asked = 0.0
        self.states.poll(self.core)  # it sees what came of it

    def train(self) -> None:
        for group in self.groups:
            assert group.train(1)

    def continued(self) -> tuple[str, ServerCore]:
        """What a server says that is started now, and what it has."""
        self.states.close()
        self.states, core = StateDirectory(self.path, every=EVERY), ServerCore(KEY, secrets.token_bytes)
        return self.states.restore(core), core


def test_a_state_that_a_full_disk_has_no_room_for_is_saved_when_there_is_room_again(
    run: SavedRun, caplog: pytest.LogCaptureFixture
) -> None:
    before = saved_weights(run.path)
    with full_from(1000):
        for _ in range(3):
            run.train()
            run.save()
        assert [each.getMessage().split(":")[0] for each in caplog.records] == [
            f"the server's state could not be saved in {run.path}; the last save stays, if there is one, and the next"
            " one is tried when it is due"
        ]
        assert same(saved_weights(run.path), before)
        assert run.core.journal.saves == 1, "those that have failed are none"
        assert run.core.reconnect_timeout == RECONNECT_TIMEOUT, (
            "another server can go on from the last save and all journals"
        )
    caplog.clear()
    run.save()
    assert [each.getMessage() for each in caplog.records] == [f"the server's state is saved in {run.path} again"]
    assert sorted(path.name for path in run.path.iterdir()) == ["journal-00000005", "lock", "state-00000005"]
    run.save()
    assert len(caplog.records) == 1
    said, core = run.continued()
    assert "goes on with a run of 2 ranks" in said
    assert core.store.clock == run.core.store.clock == 6


def test_a_server_that_goes_on_after_saves_that_failed_knows_all_that_ranks_were_told(run: SavedRun) -> None:
    with full_from(1000):
        run.train()
        run.save()
        run.train()
    assert run.core.epochs.book is not None
    drawn = [run.core.epochs.book.drawn(group, 1) for group in (0, 1)]
    said, core = run.continued()
    assert "goes on with a run of 2 ranks" in said
    assert core.store.clock == 0
    assert core.epochs.book is not None
    assert [core.epochs.book.drawn(group, 1) for group in (0, 1)] == drawn


def test_after_a_gap_in_the_journal_no_server_goes_on_until_the_state_is_saved_again(
    run: SavedRun, caplog: pytest.LogCaptureFixture
) -> None:
    with full_from(0):
        for _ in range(3):
            run.train()
            run.save()
        assert ["its loss would end the run" in each.getMessage() for each in caplog.records] == [True, False]
        assert run.core.reconnect_timeout == 0.0
        names = sorted(path.name for path in run.path.iterdir())
        assert names == ["gap-00000003", "journal-00000004", "lock", "state-00000001"], "nothing piles up"
        assert sorted(saved_weights(run.path)) == ["b", "w"], "the last save stays"
    run.save()
    assert caplog.records[-1].getMessage() == f"the server's state is saved in {run.path} again"
    assert run.core.reconnect_timeout == RECONNECT_TIMEOUT
    assert sorted(path.name for path in run.path.iterdir()) == ["journal-00000005", "lock", "state-00000005"]
    run.train()
    said, core = run.continued()
    assert "goes on with a run of 2 ranks" in said
    assert core.store.clock == 6


def test_a_server_that_is_started_after_a_gap_begins_anew_and_keeps_the_weights(
    run: SavedRun, caplog: pytest.LogCaptureFixture
) -> None:
    run.train()
    run.save()
    before = saved_weights(run.path)
    with full_from(0):
        run.train()
    said, core = run.continued()
    assert (said, core.has_state) == ("", False)
    assert "no server can go on with the run" in caplog.records[-1].getMessage()
    run.states.poll(core)
    assert sorted(path.name for path in run.path.iterdir()) == ["ended", "lock"]
    assert same(saved_weights(run.path), before)


def test_a_directory_that_cannot_be_read_for_a_while_ends_no_run(
    run: SavedRun, caplog: pytest.LogCaptureFixture
) -> None:
    before = saved_weights(run.path)
    run.train()
    with no_files():
        run.save()
    assert "Too many open files" in caplog.records[-1].getMessage()
    with full_from(1000):
        run.save()
        with no_files():
            run.save()
        assert len(caplog.records) == 1
    assert same(saved_weights(run.path), before)
    run.save()
    assert "is saved in" in caplog.records[-1].getMessage()
    said, core = run.continued()
    assert "goes on with a run of 2 ranks" in said
    assert core.store.clock == 2


def test_a_run_after_one_whose_state_could_not_be_saved_is_saved(run: SavedRun) -> None:
    with full_from(0):
        run.train()
    assert run.core.reconnect_timeout == 0.0
    run.core.fail("the end")
    run.states._asked = 0.0
    run.states.poll(run.core)
    assert run.core.reconnect_timeout == RECONNECT_TIMEOUT
    with contextlib.ExitStack() as stack:
        serving = Mortal(stack)
        run.core, run.groups = serving.core, workers(serving, method_named("async_sgd"))
        run.train()
        run.save()
        assert "state-00000001" in {path.name for path in run.path.iterdir()}


# --- What a server says ----------------------------------------------------------------------------------------------


@pytest.fixture
def full() -> Iterator[IO[str]]:
    """A file to which nothing can be written."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as file:
        yield file


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[IO[str]]:
    """A pipe that has no reader any more, as in ``lightning-omni serve 2>&1 | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    out = (tmp_path / "out").open("w")
    monkeypatch.setattr(sys, "stdout", out)  # which rich leads nowhere then
    with out, contextlib.suppress(OSError), os.fdopen(writer, "w") as file:
        yield file


@pytest.mark.parametrize("log", ["full", "closed"])
def test_a_standing_server_whose_log_cannot_be_written_serves_on(
    run: SavedRun, log: str, request: pytest.FixtureRequest
) -> None:
    settings = ServerSettings(
        key=KEY.hex(),
        host="127.0.0.1",
        port=0,
        heartbeat_timeout=30.0,
        join_timeout=30.0,
        threads=torch.get_num_threads(),
        allow_optimizers=(),
    )
    options = Options(1, once=False, http=None, http_host="", key_file=None)
    console, signals = Console(file=request.getfixturevalue(log)), StopSignals()
    RunLog(run.core, console).write(at_once=True)
    assert run.core.status_service.run_events
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        server = StandaloneServer(settings, options, console, signals, lifeline=None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert server.run() == 0
    finally:
        for number, handler in before:
            signal.signal(number, handler)
