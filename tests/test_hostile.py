"""Strangers beside a run: processes that reach its ports and hold no key, in every way that `attacks` knows.

A server in a process of its own, and a rank that pushes to it and compares every answer bit for bit with the same
optimizer here. Whatever is thrown at the server's ports, its memory stays within the bound of
docs/explanation/security.md, a rank with the key comes in, and the pushes go on.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator

import pytest
from attacks import ESCAPES, STRANGERS, parse, replay
from beside import RANKS, Pushing, Target, attack, forget_peak, megabytes, rates, wait_for_round
from core import new_key
from patience import SLOWER
from runs import Running
from test_wire import Rank, Serving, Wiretap, eventually

from lightning_omni.errors import OmniError

BOUND = 128.0
"""Megabytes that strangers may cost a server, at the defaults; see docs/explanation/security.md."""
SLACK = 16.0
"""Megabytes that an allocator may find or keep from one round to the next."""
ROUNDS = 6
SOFT_LIMIT = 256
"""Files that the server may open before it asks for more: fewer than there are idle connections."""
SECONDS = 30.0
"""In which a rank with the key is let in, on a busy machine."""
RATE = 0.8
"""Pushes beside an attacker, over those beside an idle spinner on the attacker's core."""
PAIRS, TRIES = 3, 4
"""Measurements whose median counts, and how often all of them may be taken again: others use this machine, too."""
LOG = 20_000
"""Bytes that a server may log of all that."""

pytestmark = [pytest.mark.slow, pytest.mark.processes]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads memory and pins cores as Linux has it")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("log") / "log", SOFT_LIMIT, encryption="curve")
    yield target
    target.close()


@linux
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_cost_bounded_memory_and_keep_no_rank_out(target: Target, kind: str) -> None:
    before, counted = megabytes(target.pid), target.strangers
    forget_peak(target.pid)
    with attack(kind, target.addresses) as attacker:
        first = megabytes(target.pid, "VmHWM") - before
        assert target.let_in() < SECONDS
        wait_for_round(attacker, ROUNDS)
        most = megabytes(target.pid, "VmHWM") - before
        target.pushing.go_on(3)
    assert most < BOUND
    assert most < first + SLACK
    assert eventually(lambda: target.strangers > counted), "refused in silence"


@linux
def test_what_strangers_say_fills_no_log_and_forges_no_line(target: Target) -> None:
    with attack("forged_logs", target.addresses):
        target.pushing.go_on(3)
    text = target.log.read_text()
    assert "refused" in text
    assert len(text) < LOG
    assert not set(text) & (set(ESCAPES) - set(ESCAPES.encode("unicode_escape").decode()) - {"\n"})
    assert not any(line.startswith("WARNING") for line in text.splitlines())


@linux
def test_pushes_go_on_beside_strangers_as_beside_a_spinner(target: Target) -> None:
    core = max(os.sched_getaffinity(0))
    medians = []
    for _ in range(TRIES):
        medians.append(statistics.median(rates(target, "every_kind", core, seconds=0.5) for _ in range(PAIRS)))
        if medians[-1] >= RATE:
            return
    raise AssertionError(f"pushes at {medians} of their rate beside a spinner")


@pytest.mark.parametrize("encryption", ["curve", "off"])
def test_bytes_that_were_overheard_open_nothing(encryption: str) -> None:
    serving = Serving(encryption=encryption)
    targets = [parse(serving.address), parse(serving.data_address)]
    control, data = (Wiretap(port) for _, port in targets)
    serving.core.data_port = data.port
    pushing = Pushing(Rank(f"tcp://127.0.0.1:{control.port}", 0, RANKS, encryption=encryption))
    try:
        pushing.go_on(5)
        counted = serving.core.strangers
        for target, tap in zip(targets, (control, data), strict=True):
            replay(target, bytes(tap.heard[0]))
        assert eventually(lambda: serving.core.strangers >= counted + len(targets)), serving.core.strangers
        pushing.go_on(5)
        pushing.stop()
        assert serving.core.store.clock == pushing.pushes
        assert serving.core.roster.members.keys() == {0}
    finally:
        pushing.close()
        serving.stop()


@pytest.mark.parametrize("encryption", ["curve", "off"])
def test_another_key_is_refused_and_counted(encryption: str) -> None:
    serving = Serving(encryption=encryption)
    try:
        # With encryption the rank hears nothing at all, and gives up; without, it is told.
        patience = 1.0 if encryption == "curve" else 60.0
        with pytest.raises(OmniError, match="key"):
            Rank(serving.address, key=new_key(), encryption=encryption, connect_timeout=patience)
        assert eventually(lambda: serving.core.strangers > 0)
        assert not serving.core.roster.members
    finally:
        serving.stop()


@linux
def test_a_run_of_two_groups_ends_with_the_weights_that_it_has_without_strangers() -> None:
    with Running("hostile.py", {"fits": [0, 1]}) as running:
        deadline = time.monotonic() + SLOWER * 100
        while not (ports := running.folder / "ports.json").exists():
            assert running.process.poll() is None, running.output
            assert time.monotonic() < deadline, running.output
            time.sleep(0.02)
        addresses = json.loads(ports.read_text())
        assert all(address.startswith("tcp://") for address in addresses)
        with attack("every_kind", addresses):
            (running.folder / "attacked").touch()
            finished = running.wait(200)
    assert finished.code == 0, finished.output
    assert sorted(finished.results) == [0, 1]
    for result in finished.results.values():
        assert result["attacked"].pop("strangers") > 0
        assert result["attacked"] == result["quiet"]
