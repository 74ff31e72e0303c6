"""The parameter server is killed in mid-epoch: another one goes on, and so does training."""

from __future__ import annotations

import sys

import pytest
from benchmarks.server_restart import COMMAND, one_death
from processes import Process

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
