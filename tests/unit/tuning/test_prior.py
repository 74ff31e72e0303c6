"""The prior of the search: what it says between its rows, and from what it was learnt."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_omni.tuning.search.constants import LARGEST_STEP, RELATED
from lightning_omni.tuning.search.prior import STREAMING, Prior, PriorRow, Steepness
from lightning_omni.tuning.search.space import DEFAULT_ALL_REDUCES

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from stacked import StackedRun
from tasks import CLUSTERS, DEVELOPING, JUDGING, PRIOR_CLUSTERS, TASKS

PRIOR = Prior.load()
MEASURED = [row for row in PRIOR.rows if row.tasks]


def row(groups: int, period: int, log_cost: float, times: str = "equal", scatter: float = 0.1) -> PriorRow:
    momentum, step = 0.8 / groups, 1.0 / groups
    return PriorRow("async_sgd", False, groups, period, times, scatter, momentum, step, log_cost, 0.1, 3, 2)


SMALL = Prior(
    (row(2, 1, 0.1), row(8, 1, 0.4), row(2, 1, 0.2, "scattered", 0.6), row(8, 1, 0.8, "scattered", 1.0)),
    {False: Steepness(0.2, 0.5, 0.1, 0.3)},
    wire=(0.02, 0.03),
)


@pytest.mark.parametrize("one", PRIOR.rows, ids=lambda one: f"{one.method}-{one.groups}-{one.period}-{one.times}")
def test_the_prior_passes_through_its_rows(one: PriorRow) -> None:
    place = one.method, one.groups, one.period
    found = PRIOR.log_cost(*place, scatter=one.scatter, is_adaptive=one.is_adaptive)
    assert found == pytest.approx((one.log_cost, one.deviation))
    step = min(one.step, LARGEST_STEP)
    assert PRIOR.suggested(*place, 1.0, one.scatter, one.is_adaptive) == pytest.approx((one.momentum, step), rel=1e-4)


@given(
    method=st.sampled_from(["async_sgd", "elastic_averaging", "local_sgd", "streaming", "diloco", "gossip"]),
    groups=st.integers(2, 64),
    period=st.sampled_from([1, 2, 8, 32]),
    scatter=st.floats(0, 2),
    is_adaptive=st.booleans(),
)
def test_no_step_is_suggested_that_is_much_larger_than_the_users_own(
    method: str, groups: int, period: int, scatter: float, is_adaptive: bool
) -> None:
    momentum, step = PRIOR.suggested(method, groups, period, 0.9, scatter, is_adaptive)
    assert 0 < step <= LARGEST_STEP < math.sqrt(3), "which never learns on some tasks"
    assert 0 <= momentum <= 0.9


@given(groups=st.integers(2, 8), scatter=st.floats(0, 2))
def test_between_rows_costs_lie_between_theirs(groups: int, scatter: float) -> None:
    cost, deviation = SMALL.log_cost("async_sgd", groups, 1, scatter=scatter)
    share = math.log(groups / 2) / math.log(4)
    assert 0.1 + 0.3 * share - 1e-9 <= cost <= 0.2 + 0.6 * share + 1e-9
    assert deviation == pytest.approx(0.1)


@given(groups=st.integers(2, 64), scatter=st.floats(0, 1), more=st.floats(0, 1))
def test_costs_rise_with_groups_and_scatter_where_the_rows_do(groups: int, scatter: float, more: float) -> None:
    def cost(of: int, at: float) -> float:
        return SMALL.log_cost("async_sgd", of, 1, scatter=at)[0]

    assert cost(groups, scatter) <= cost(groups + 1, scatter) + 1e-9
    assert cost(groups, scatter) <= cost(groups, scatter + more) + 1e-9


@given(
    method=st.sampled_from(["async_sgd", "local_sgd", "gossip", "of_my_own"]),
    period=st.integers(1, 500),
    momentum=st.floats(0, 0.99),
    is_adaptive=st.booleans(),
)
@settings(max_examples=30)
def test_one_group_and_hardsync_cost_nothing(method: str, period: int, momentum: float, is_adaptive: bool) -> None:
    for place in ((method, 1, period), ("hardsync", 8, 1)):
        assert PRIOR.log_cost(*place, scatter=1.0, is_adaptive=is_adaptive) == (0.0, 0.0)
        assert PRIOR.suggested(*place, momentum, 1.0, is_adaptive) == (momentum, 1.0)


@given(
    method=st.sampled_from([*sorted({one.method for one in PRIOR.rows}), "softsync", "of_my_own"]),
    groups=st.integers(2, 64),
    period=st.integers(1, 500),
    scatter=st.floats(0, 1),
    own=st.floats(0, 0.95),
    is_adaptive=st.booleans(),
)
@settings(max_examples=60)
def test_what_is_suggested_can_be_set(
    method: str, groups: int, period: int, scatter: float, own: float, is_adaptive: bool
) -> None:
    momentum, step = PRIOR.suggested(method, groups, period, own, scatter, is_adaptive)
    cost, deviation = PRIOR.log_cost(method, groups, period, scatter=scatter, is_adaptive=is_adaptive)
    assert 0 <= momentum <= own
    assert 0.01 < step < 10
    assert -0.5 < cost < 7
    assert 0 < deviation < 3


def test_another_momentum_or_step_costs_more() -> None:
    best = SMALL.log_cost("async_sgd", 2, 1, scatter=0.1)[0]
    assert SMALL.log_cost("async_sgd", 2, 1, scatter=0.1, momentum=0.4, step=0.5)[0] == pytest.approx(best)
    assert SMALL.log_cost("async_sgd", 2, 1, scatter=0.1, momentum=0.9)[0] == pytest.approx(best + 0.5 * 0.5**2)
    small = SMALL.log_cost("async_sgd", 2, 1, scatter=0.1, step=0.5 / math.e)[0]
    large = SMALL.log_cost("async_sgd", 2, 1, scatter=0.1, step=0.5 * math.e)[0]
    assert [small - best, large - best] == pytest.approx([0.1, 0.3])


def test_a_lossy_wire_format_adds_its_own_cost_and_error() -> None:
    cost, deviation = SMALL.log_cost("async_sgd", 2, 1, scatter=0.1, wire=True)
    assert cost == pytest.approx(0.12)
    assert deviation == pytest.approx(math.hypot(0.1, 0.03))


def test_hardsync_pays_for_a_lossy_wire_format_and_for_overlap_where_it_exchanges() -> None:
    for variant, cost in (("wire", PRIOR.wire), ("overlap", PRIOR.overlap)):
        used: dict[str, Any] = {variant: True}
        assert PRIOR.log_cost("hardsync", 4, 1, scatter=0.1, **used) == pytest.approx(cost)
        assert PRIOR.log_cost("hardsync", 1, 1, scatter=0.1, **used) == (0.0, 0.0)


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_thinner_matrices_of_powersgd_cost_more(is_adaptive: bool) -> None:
    def cost(format_: str) -> float:
        return PRIOR.log_cost("async_sgd", 1, 1, scatter=0.0, is_adaptive=is_adaptive, all_reduce=format_)[0]

    for dtype in ("", ",dtype=bf16"):
        assert cost(f"powersgd:4{dtype}") > cost(f"powersgd:8{dtype}") >= cost(f"powersgd:16{dtype}") >= 0
    assert set(DEFAULT_ALL_REDUCES) <= set(PRIOR.all_reduce[is_adaptive])


def test_a_method_that_was_not_measured_is_judged_by_its_relative_and_less_certain() -> None:
    (known, error), (cost, wide) = (PRIOR.log_cost(name, 4, 1, scatter=1.0) for name in ("async_sgd", "softsync"))
    assert cost == known
    assert wide == pytest.approx(math.hypot(error, RELATED))


def test_an_optimizer_of_another_kind_than_was_measured_is_less_certain() -> None:
    sgd, adaptive = (SMALL.log_cost("async_sgd", 2, 1, scatter=0.1, is_adaptive=each) for each in (False, True))
    assert adaptive == pytest.approx((sgd[0], math.hypot(sgd[1], RELATED)))


def test_a_method_that_is_unknown_is_taken_for_the_worst() -> None:
    cost, deviation = PRIOR.log_cost("of_my_own", 4, 8, scatter=1.0)
    assert cost == max(PRIOR.log_cost(one.method, 4, 8, scatter=1.0)[0] for one in PRIOR.rows)
    assert deviation >= 2 * RELATED


def test_beyond_the_table_nothing_gets_better_or_more_certain() -> None:
    found = [SMALL.log_cost("async_sgd", groups, 1, scatter=0.1) for groups in (8, 16, 32, 1024)]
    assert found == sorted(found)
    assert found[-1][1] > found[0][1]


# --- From what it was learnt -----------------------------------------------------------------------------------------


def test_the_prior_was_learnt_on_tasks_to_develop_on_and_no_others() -> None:
    for made, rows in (
        (PRIOR.provenance, [one for one in MEASURED if one.method != STREAMING]),
        (PRIOR.provenance[STREAMING], [one for one in MEASURED if one.method == STREAMING]),
    ):
        names = set(made["tasks"])
        assert names
        assert names <= set(DEVELOPING)
        assert not names & set(JUDGING)
        assert 0 < max(one.tasks for one in rows) <= len(names)
    assert PRIOR.provenance["step_times"] == list(PRIOR_CLUSTERS)


def test_no_task_is_on_both_sides() -> None:
    assert len(TASKS) == len(DEVELOPING) + len(JUDGING)
    assert len(CLUSTERS) >= 8
    assert all(task.recorded["target"] > 0 for task in DEVELOPING.values())


@pytest.mark.parametrize(("name", "method"), [("powerlaw", "local_sgd:period=2"), ("fraud", "async_sgd")])
def test_copies_in_a_stack_train_as_runs_of_their_own_do(name: str, method: str) -> None:
    task, cluster = DEVELOPING[name], PRIOR_CLUSTERS["exponential"]
    settings = [(0.0, task.own_lr / 2), (0.6, task.own_lr / 4)]
    stack = StackedRun(task, settings, -math.inf)
    task.simulate(stack, cluster, method, 4, target=("open_loss", 0.5), most=12)
    for copy, (momentum, lr) in enumerate(settings):
        alone = task.train(cluster, method, 4, momentum=momentum, lr=lr, most=12, until=-math.inf)
        expected = alone.trace.evaluated["held_out"]
        assert [float(losses[copy]) for losses in stack.held_out] == pytest.approx(expected, rel=1e-3)
        assert expected[-1] < expected[0]
