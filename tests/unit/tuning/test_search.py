"""What is searched: specifications and spaces, which are the user's own, and what they refuse."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import SearchSpec, Space
from lightning_omni.tuning.search.space import UNBOUNDED

FEW = settings(max_examples=15, deadline=None)


def test_the_users_own_momentum_is_not_out_of_bounds_unless_they_say_so() -> None:
    assert Space.of({}, 4, momentum=0.99).momentum == (0.0, 0.99)
    assert Space.of({"momentum": [0.0, 0.5]}, 4, momentum=0.99).momentum == (0.0, 0.5)


# --- Jobs ------------------------------------------------------------------------------------------------------------

job_of = st.builds(
    SearchSpec,
    start=st.builds(Setting, st.integers(1, 8), st.floats(0, 0.9), st.floats(1e-4, 1.0)),
    batch=st.integers(1, 4096),
    horizon=st.floats(0, 1e9),
    space=st.builds(
        Space,
        groups=st.sets(st.integers(1, 9), max_size=4).map(lambda groups: tuple(sorted(groups | {1}))),
        lr=st.sampled_from([(0.0, UNBOUNDED), (0.01, 0.1), (0.5, UNBOUNDED)]),
        rebalance=st.booleans(),
        period=st.sampled_from([(), (1,), (1, 4)]),
    ),
    scaling=st.builds(Scaling, st.booleans()),
    switch=st.floats(0, 1e3),
    budget=st.floats(0, 0.99),
    allowance=st.floats(-10, 10),
    seed=st.integers(0, 99),
)


@FEW
@given(job_of)
def test_plain_jobs_are_the_jobs(job: SearchSpec) -> None:
    assert SearchSpec.from_dict(json.loads(json.dumps(job.to_dict(), allow_nan=False))) == job


# --- Spaces ----------------------------------------------------------------------------------------------------------


@FEW
@given(st.integers(1, 100))
def test_by_default_groups_are_powers_of_two_and_all_ranks(ranks: int) -> None:
    groups = Space.of({}, ranks).groups
    assert list(groups) == sorted(set(groups))
    assert {1, ranks} <= set(groups)
    assert all(number == ranks or (number & (number - 1) == 0 and number <= ranks) for number in groups)
    assert all(2 * each in groups for each in groups[:-1] if 2 * each <= ranks)


def test_one_group_is_always_allowed() -> None:
    assert Space.of({"groups": [4, 2]}, 4).groups == (1, 2, 4)
    assert Space.of({}, 8, allowed=lambda groups: groups == 2).groups == (1, 2)
    assert Space.of({}, 8, allowed=lambda groups: False).groups == (1,)


@FEW
@given(st.floats(0, 0.99), st.floats(0, 0.99), st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_ranges_are_the_least_and_the_largest_value(a: float, b: float, low: float, high: float) -> None:
    space = Space.of({"momentum": [a, b], "lr": (low, high), "rebalance": False, "period": [4, 1, 4]}, 4)
    assert space.momentum == (min(a, b), max(a, b))
    assert space.lr == (min(low, high), max(low, high))
    assert not space.rebalance
    assert space.period == (1, 4)
    held = space.holds(Setting(2, 0.995, 1e-7))
    assert (held.momentum, held.lr) == (max(a, b), min(low, high))
    assert space.holds(held) == held
    assert Space.of({"momentum": a, "lr": low}, 4).holds(held) == Setting(2, a, low)


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({"group": 2}, "group"),
        ({"groups": 0}, "groups"),
        ({"groups": [1, 9]}, "groups"),
        ({"groups": 2.0}, "groups"),
        ({"groups": True}, "groups"),
        ({"groups": "all"}, "groups"),
        ({"groups": None}, "groups"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": [-0.1, 0.5]}, "momentum"),
        ({"momentum": math.nan}, "momentum"),
        ({"lr": -0.1}, "lr"),
        ({"lr": 0}, "lr"),
        ({"rebalance": "off"}, "rebalance"),
        ({"rebalance": []}, "rebalance"),
        ({"period": 0}, "period"),
        ({"period": []}, "period"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(given_: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"space=.*{named}"):
        Space.of(given_, 8)
