"""What benchmarks evaluate while groups train is what Lightning would validate then, whatever the method."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from runs import run

from lightning_omni.methods import METHODS

pytestmark = [pytest.mark.slow, pytest.mark.processes]

FITS: dict[str, dict[str, Any]] = {name: {"method": {"name": name}} for name in METHODS} | {
    "local_sgd": {"method": {"name": "local_sgd", "period": 3}},
    "diloco": {"method": {"name": "diloco", "period": 3}},
    "async_diloco": {"method": {"name": "async_diloco", "period": 4}},
    "decoupled_diloco": {"method": {"name": "decoupled_diloco", "period": 4, "fragments": 2}, "times": 2},
    "elastic_averaging": {"method": {"name": "elastic_averaging", "period": 3}},
    "streamed": {"method": {"name": "diloco", "period": 6, "fragments": 2, "delay": 1}},
    "streamed, under way": {"method": {"name": "diloco", "period": 8, "fragments": 2, "delay": 1}},
    "overlapped": {"method": {"name": "async_sgd"}, "strategy": {"overlap": True}},
}
UNDER_WAY = "streamed, under way", "overlapped"
"""Where an exchange is under way at the last batch."""


@cache
def finished() -> dict[str, list[Any]]:
    """Of each fit, what was read at the end of its epoch, and what was then validated; all in the same processes."""
    results = run("validated.py", {"fits": list(FITS.values())}, timeout=280).results[0]
    return dict(zip(FITS, results, strict=True))


@pytest.mark.parametrize("name", [name for name in FITS if name not in UNDER_WAY])
def test_weights_read_while_groups_train_are_those_that_would_be_validated(name: str) -> None:
    assert len(finished()[name]) == 1
    for read, validated in finished()[name]:
        assert len(read) == len(validated)
        for mine, theirs in zip(read, validated, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)


def test_an_exchange_under_way_is_not_waited_for() -> None:
    assert [read for read, _ in finished()["streamed, under way"]] == [None]
    assert all(read != validated for read, validated in finished()["overlapped"])
