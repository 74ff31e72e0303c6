"""What rank 0 finds out in a thread, while its training goes on."""

from __future__ import annotations

import sys
import threading

import pytest
from patience import SLOWER

from lightning_omni.tuning.callback.online_tuner import SWITCH_INTERVAL, run_in_background


def test_while_something_is_found_threads_switch_often_and_then_as_before() -> None:
    before = sys.getswitchinterval()
    assert before > SWITCH_INTERVAL, "Python's own holds each operation on tensors up for as long"
    first, second = threading.Event(), threading.Event()
    begun = threading.Barrier(3, timeout=SLOWER * 30)

    def until(event: threading.Event) -> float:
        begun.wait()
        assert event.wait(30)
        return sys.getswitchinterval()

    one, other = run_in_background(lambda: until(first)), run_in_background(lambda: until(second))
    begun.wait()
    first.set()
    assert one.result(30) == pytest.approx(SWITCH_INTERVAL, rel=0.01)
    second.set()
    assert other.result(30) == pytest.approx(SWITCH_INTERVAL, rel=0.01), "though the first has ended"
    for thread in threading.enumerate():
        if thread.name.startswith("omni-tuner"):
            thread.join(30)
    assert sys.getswitchinterval() == before


def test_what_it_raises_comes_where_it_is_asked_for() -> None:
    def fails() -> None:
        raise ValueError("no target")

    with pytest.raises(ValueError, match="no target"):
        run_in_background(fails).result(30)
    assert run_in_background(lambda: 3).result(30) == 3
