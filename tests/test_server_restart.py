"""The parameter server is killed in mid-epoch: another one goes on, and so does training."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pytest
from benchmarks.server_restart import COMMAND, LISTENS, one_death
from processes import Process
from runs import free_port
from test_joining import PATIENCE, Run

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SAVE_EVERY = 1.0
MOST = 60.0
"""Seconds until all ranks train on, on a machine that does other things, too; the benchmark says how many there are."""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize(("stands", "method"), [(False, "local_sgd:period=2"), (True, "async_sgd")])
def test_the_run_goes_on_when_its_server_is_killed_and_every_sample_is_trained(stands: bool, method: str) -> None:
    death = one_death(stands, method, SAVE_EVERY, delay=0.5)
    assert not death.problem
    assert death.to_go_on < MOST
    assert 0 <= death.lost < 300 * SAVE_EVERY


class Saving(Run):
    """A standing server that saves its state, and groups that come."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.groups = folder, dict[str, Process]()
        self._env = {"LIGHTNING_OMNI_KEY": secrets.token_hex(32), "OMNI_TEST_FOLDER": str(folder)}
        where = ["--port", str(free_port()), "--state", f"{folder}/state", "--save-every", "1", "--once"]
        self._command = [*COMMAND, "serve", *where]
        self._env["LIGHTNING_OMNI_SERVER"] = self._serve()

    def _serve(self) -> str:
        self.server = Process(self._command, self._env)
        return str(self.server.expect(LISTENS, PATIENCE)[1])

    def kill(self) -> None:
        """The server dies, and another one goes on."""
        self.server.kill()
        self._serve()
        self.server.expect("goes on with a run of 1 ranks", PATIENCE)


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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--shards", "2"], "several servers that hold a share of the weights each do not save it"),
        (["--port", "0"], "name a port"),
        (["--save-every", "0"], "pass a time, as 30s"),
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
