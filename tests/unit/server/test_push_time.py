"""The server's own time for a push, as it measures and reports it."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest
from test_server_core import Link, gradient, push_of, trained_link
from test_wire import Serving, ranks

from lightning_omni.run_report import Staleness
from lightning_omni.strategy.loops.live_metrics import StepTimes, live_metrics
from lightning_omni.wire import messages as m


def ticking(link: Link, seconds: float) -> Link:
    """The server's clock goes on by so much whenever it is looked at."""
    times = itertools.count()
    link.core.status_service._clock = lambda: seconds * next(times)
    return link


def test_the_time_of_a_push_is_measured_until_its_answer_is_handed_over() -> None:
    link = ticking(trained_link((0, 1), (2,)), 0.25)
    link.data(0, m.FetchMessage(optimizer=0))
    link.core.status_service.end()
    assert link.core.status_service.status(0.0).serve_time == 0
    for step in range(3):
        link.data(0, *push_of(gradient(step)))
        # The first push after groups were formed is not counted.
        assert link.core.status_service.status(0.0).serve_time == pytest.approx(0.25 if step > 1 else 0.0)
        link.core.status_service.end()
        link.core.status_service.end()  # says nothing new
    assert link.core.status_service.status(0.0).serve_time == pytest.approx(0.25)
    link.core.reset()
    assert link.core.status_service.status(0.0).serve_time == 0


def test_a_server_with_sockets_reports_it() -> None:
    serving = Serving(clock=time.perf_counter)
    try:
        with ranks(serving.address, 1) as (rank,):
            rank.begin((0,))
            before = rank.control.request(m.AskStatus(), m.Status, timeout=30)
            assert before.serve_time == 0
            began = time.perf_counter()
            for step in range(3):
                rank.push(step, read_at=step)
            lasted = time.perf_counter() - began
            status = rank.control.request(m.AskStatus(), m.Status, timeout=30)
    finally:
        serving.stop()
    assert 0 < status.serve_time < lasted


def test_it_is_logged_once_it_is_known() -> None:
    status = trained_link((0, 1), (2,)).core.status_service.status(0.0)
    assert "omni/serve_time" not in live_metrics(status, Staleness(), StepTimes())
    known = msgspec.structs.replace(status, serve_time=0.5)
    assert m.decode(m.encode(known), at="rank", channel=m.CONTROL) == known
    values = live_metrics(known, Staleness(), StepTimes())
    assert values["omni/serve_time"] == 0.5
