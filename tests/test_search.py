"""`Search`, whatever it decides: it ends, keeps to its budget, chooses what it knows, and can be replayed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from covering import covering
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_omni.errors import ConfigurationError
from lightning_omni.performance.forecast import Scaling, Setting, TrialResult
from lightning_omni.performance.measured import Measured
from lightning_omni.search import SAMPLERS, Choice, Observation, Probe, Search, SearchSpec, Space
from lightning_omni.search.constants import FEWEST_BATCHES, MOST_BATCHES, MOST_PROBES
from lightning_omni.topology import Topology
from lightning_omni.tuner.retuning import ends_soon
from lightning_omni.tuner.run import TunerOptions

FEW = settings(max_examples=30, deadline=None)
STRATEGIES = [name for name, kind in SAMPLERS.items() if not kind.learns_from_run]
RANKS, BATCH = 4, 16
SLOWNESS = (1.0, 1.1, 1.0, 1.3)
START = Setting(1, 0.9, 0.05)
SPACE = Space.of({}, RANKS)
JOB = SearchSpec(START, BATCH * RANKS, horizon=64_000.0, share=0.1, space=SPACE)

# --- A world ---------------------------------------------------------------------------------------------------------


def measured(setting: Setting, steps: int, random: np.random.Generator) -> Measured:
    """Ranks that wait for each other in a group, and groups that wait for a server."""
    groups = list(Topology.even(RANKS, setting.groups).groups)
    own = {rank: (0.01 + BATCH * 0.004 * SLOWNESS[rank]) * random.uniform(0.9, 1.1, steps) for rank in range(RANKS)}
    exchanges = [np.full(steps, 0.01 * (len(groups) > 1)) for _ in groups]
    rows = [
        np.max([own[rank] for rank in members], axis=0) + 0.1 * (len(members) - 1) / len(members) + exchange
        for members, exchange in zip(groups, exchanges, strict=True)
    ]
    return Measured(
        tuple(map(tuple, groups)),
        ((float(BATCH),) * steps,) * RANKS,
        tuple(tuple(own[rank]) for rank in range(RANKS)),
        tuple(map(tuple, rows)),
        tuple(map(tuple, exchanges)),
        serve=0.003 * (len(groups) > 1),
        nbytes=4_000_000,
    )


def speed_of(setting: Setting) -> float:
    """Small staleness costs, and so do steps that are far from the best."""
    away = math.log(max(Scaling().step(setting), 1e-9) / 0.5)
    return math.exp(-0.1 * (setting.groups - 1) - 0.1 * away**2)


def show(probe: Probe, problem: str = "", is_timed: bool = True) -> Observation:
    """What comes of a probe: the loss falls by `speed_of`, and half a second goes by besides."""
    random = np.random.default_rng(probe.number)
    steps = probe.samples // (BATCH * RANKS)
    found = measured(probe.setting, steps, random)
    ends = np.arange(1, steps * probe.setting.groups + 1) * BATCH * RANKS / probe.setting.groups
    losses = 0.4 + 1.9 / (1 + speed_of(probe.setting) * ends / 500) + random.normal(0, 0.01, len(ends))
    seconds = 0.5 + max(sum(row) for row in found.steps)
    tried = TrialResult(probe.setting, tuple(ends.tolist()), tuple(losses.tolist()), seconds, problem)
    return Observation(tried, found if is_timed else None)


def drive(search: Search, most: int = 99, shows: Callable[[Probe], Observation] = show) -> Iterator[Probe]:
    """Carries probes out, each after it is yielded."""
    while len(search.observations) < most and (probe := search.next()) is not None:
        yield probe
        search.tell(shows(probe))


@cache
def ended(strategy: str) -> Search:
    """A search that is over; do not change it."""
    search = Search(JOB, strategy)
    assert len(list(drive(search))) == len(search.observations) < 99
    return search


def came_to(search: Search) -> tuple[Any, ...]:
    choice = search.choice()
    return search.next(), choice, [each.setting for each in search.probes], search.spent


def again(search: Search) -> Search:
    """What a checkpoint would hold of it, and a resumed run make of that."""
    return Search.from_dict(json.loads(json.dumps(search.to_dict())))


# --- All strategies to their end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_search_ends_and_chooses_one_of_its_candidates(strategy: str) -> None:
    search = ended(strategy)
    assert search.next() is None
    assert search.next() is None
    assert 2 <= len(search.observations) <= MOST_PROBES
    choice = search.choice()
    assert choice.setting in search.candidates()
    assert choice.why
    assert choice.estimate is not None
    assert choice.estimate.setting == choice.setting
    assert choice.estimate.seconds.low <= choice.estimate.seconds.value <= choice.estimate.seconds.high
    assert search.choice() == choice


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_two_ends_of_the_space_are_always_tried(strategy: str) -> None:
    groups = [probe.setting.groups for probe in ended(strategy).probes]
    assert {1, RANKS} == set(groups[:2])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_probes_are_numbered_and_train_on_as_many_samples(strategy: str) -> None:
    probes = ended(strategy).probes
    assert [probe.number for probe in probes] == list(range(len(probes)))
    assert {probe.samples for probe in probes} == {JOB.batches * JOB.batch}
    assert all(probe.why for probe in probes)
    assert [probe.setting for probe in probes] == [each.setting for each in ended(strategy).tried]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_probe_begins_that_would_not_end_within_the_budget(strategy: str) -> None:
    search = ended(strategy)
    # As it is known in the end: without the last probe all was within the budget.
    assert search.spent - search.tried[-1].seconds <= search.budget * 1.05
    assert search.spent <= search.budget + search.cost(search.probes[-1])


def test_before_each_probe_its_predicted_cost_is_within_the_budget() -> None:
    search = Search(JOB, "random")
    for number, probe in enumerate(drive(search)):
        assert number == 0 or search.spent + search.cost(probe) <= search.budget
    assert len(search.observations) > 2


@pytest.mark.parametrize("seconds", [3.0, 8.0])
def test_seconds_that_are_given_are_the_budget(seconds: float) -> None:
    search = Search(replace(JOB, seconds=seconds, current=True), "random")
    for _ in drive(search):
        pass
    assert search.budget == seconds
    assert search.spent - search.tried[-1].seconds <= seconds
    assert search.choice().why


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_one_group_there_is_still_something_to_search(strategy: str) -> None:
    search = Search(replace(JOB, space=Space((1,))), strategy)
    assert {probe.setting.groups for probe in drive(search, most=3)} == {1}
    assert search.choice().setting.groups == 1


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "omnivore"])  # it has a grid of its own
def test_what_is_tried_and_chosen_is_in_the_space(strategy: str) -> None:
    space = Space.of({"groups": [1, 3], "momentum": [0.5, 0.7], "lr": [0.02, 0.04], "rebalance": False}, RANKS)
    search = Search(replace(JOB, space=space), strategy)
    for probe in drive(search, most=5):
        assert space.holds(probe.setting) == probe.setting
        assert probe.setting.groups in (1, 3)
        assert not probe.setting.rebalance
    chosen = search.choice().setting
    assert space.holds(chosen) == chosen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_choice_by_the_probes_alone_is_not_explained_by_a_prediction(strategy: str) -> None:
    search = Search(JOB, strategy)
    for _ in drive(search, most=5):
        pass
    predicted, measured = (
        "predicted to reach the target first",
        f"the first of {len(search.observations)} ",
    )
    assert search.choice().why.startswith(predicted if search.sampler.by_forecast else measured)


# --- Asked again, stopped, and replayed ------------------------------------------------------------------------------


def test_the_next_probe_is_the_same_until_its_outcome_is_told() -> None:
    search = Search(JOB, "random")
    for probe in drive(search, most=4):
        assert search.next() is probe
        search.choice()
        assert search.next() is probe


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_search_from_a_checkpoint_asks_and_chooses_the_same(strategy: str) -> None:
    search = Search(JOB, strategy)
    for _ in range(4):
        copied = again(search)
        assert came_to(copied) == came_to(search)
        if (probe := search.next()) is None or len(search.observations) == 3:
            break
        search.tell(show(probe))
        copied.tell(show(probe))
        assert copied.to_dict() == search.to_dict()


def test_a_probe_that_was_rejected_is_not_chosen_after_a_resume() -> None:
    def shows(probe: Probe) -> Observation:
        seen = show(probe)
        if probe.number:  # nothing is left for a third one
            return replace(seen, tried=replace(seen.tried, seconds=1e9))
        return replace(seen, tried=replace(seen.tried, losses=(2.0,) * len(seen.tried.losses)))

    search = Search(JOB)
    assert len(list(drive(search, shows=shows))) == 2
    assert search.rejected
    assert again(search).rejected == search.rejected
    assert again(search).choice() == search.choice()


def test_a_search_that_was_over_is_over() -> None:
    search = ended("random")
    copied = again(search)
    assert came_to(copied) == came_to(search)
    assert copied.to_dict() == search.to_dict()


def test_other_seeds_try_other_settings() -> None:
    searches = [Search(replace(JOB, seed=seed), "random") for seed in (0, 0, 1)]
    first, same, other = ([probe.setting for probe in drive(search, most=4)] for search in searches)
    assert first == same != other


@pytest.mark.parametrize("probes", [0, 1, 2])
def test_a_search_that_was_stopped_says_why_and_asks_no_more(probes: int) -> None:
    search = Search(JOB, "grid")
    for _ in drive(search, most=probes):
        pass
    search.next()
    search.stop("rank 3 was lost while tuning")
    assert search.next() is None
    assert "rank 3 was lost while tuning" in search.choice().why
    assert came_to(again(search)) == came_to(search)


# --- What can go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("share", [0.0, 0.9 * FEWEST_BATCHES * BATCH * RANKS / 64_000])
def test_without_a_budget_nothing_is_tried_and_that_is_said(strategy: str, share: float) -> None:
    search = Search(replace(JOB, share=share), strategy)
    assert search.spec.batches == 0
    assert search.next() is None
    choice = search.choice()
    assert (choice.setting, choice.estimate) == (START, None)
    assert "budget" in choice.why


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_if_all_probes_diverge_nothing_is_changed(strategy: str) -> None:
    search = Search(JOB, strategy)
    for _ in drive(search, most=4, shows=lambda probe: show(probe, "diverged: gradients are not finite")):
        pass
    choice = search.choice()
    assert choice == Choice(START, choice.why)
    assert "diverged" in choice.why
    assert "learning rate" in choice.why


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_that_diverged_is_not_chosen(strategy: str) -> None:
    search = Search(JOB, strategy)
    for _ in drive(search, most=3, shows=lambda probe: show(probe, "diverged" * (probe.setting.groups > 1))):
        pass
    failed = {each.setting for each in search.tried if each.has_failed}
    assert failed
    assert search.choice().setting not in failed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_if_nothing_could_be_timed_nothing_is_changed(strategy: str) -> None:
    search = Search(JOB, strategy)
    probes = list(drive(search, shows=lambda probe: show(probe, is_timed=False)))
    assert len(probes) == 2
    assert search.choice().setting == START
    assert search.choice().why


def test_a_setting_that_is_trained_with_stays_unless_another_is_clearly_better() -> None:
    start = replace(START, lr=0.05, rebalance=False)
    search = Search(replace(JOB, start=start, space=replace(SPACE, groups=(1,), rebalance=False), current=True), "grid")
    for _ in drive(search, most=1):
        pass
    choice = search.choice()
    assert choice.setting == start
    assert "stays" in choice.why


UNDER_WAY = replace(JOB, current=True, seconds=1e3).for_step(None, is_final=False)


def test_a_step_that_has_come_to_diverge_is_made_smaller() -> None:
    search = Search(UNDER_WAY)
    for probe in drive(search, most=2, shows=lambda probe: show(probe, "" if probe.number else "diverged")):
        assert probe.number < 2
    assert search.choice().setting == search.tried[1].setting
    assert "diverge" in search.choice().why
    lost = replace(search.observations[0].tried, losses=(math.nan,) * 8, samples=tuple(range(8)), problem="")
    search.observations[0] = replace(search.observations[0], tried=lost)
    assert search.choice().setting.lr == pytest.approx(START.lr / 3)


@pytest.mark.parametrize("near", [False, True])
def test_near_the_target_steps_get_smaller_whatever_probes_say(near: bool) -> None:
    search = Search(UNDER_WAY.for_step(None, is_final=near))
    for probe in drive(search, most=3, shows=lambda probe: replace_setting(show(replace(probe, setting=START)), probe)):
        assert probe.number < (1 if near else 3)
    assert search.choice().setting.lr == pytest.approx(START.lr / (3 if near else 1))
    assert ("near" in search.choice().why) is near


def test_near_the_target_steps_that_diverge_are_probed_smaller() -> None:
    search = Search(UNDER_WAY.for_step(None, is_final=True))
    for _ in drive(search, most=2, shows=lambda probe: show(probe, "" if probe.number else "diverged")):
        pass
    assert len(search.tried) == 2
    assert search.choice().setting == search.tried[1].setting
    assert SearchSpec.from_dict(json.loads(json.dumps(search.spec.to_dict()))) == search.spec


def replace_setting(seen: Observation, probe: Probe) -> Observation:
    """What was seen, as if with the probe's own setting."""
    return replace(seen, tried=replace(seen.tried, setting=probe.setting))


@pytest.mark.parametrize(
    ("values", "seconds", "near"),
    [
        ((0.84, 0.86, 0.868, 0.873), 40.0, True),  # 0.7 % are left, and the latest two gained 1.3 %
        ((0.60, 0.61, 0.612, 0.614), 40.0, False),
        ((0.84, 0.86), 20.0, False),
        ((0.84, 0.86, 0.86, 0.86), 40.0, False),
        ((0.84, 0.86, 0.87, 0.88), 40.0, False),  # it is there
    ],
)
def test_a_target_is_near_if_it_is_expected_before_the_run_has_lasted_three_times_as_long(
    values: tuple[float, ...], seconds: float, near: bool
) -> None:
    options = TunerOptions(0.88, "val_acc", False, 0.1, "bayes", {}, (), 1, 0)
    reached = [(10.0 * number, value) for number, value in enumerate(values, 1)]
    assert ends_soon(options.seconds_to_target(reached), seconds) is near


def test_groups_are_judged_at_the_period_with_which_they_would_train() -> None:
    slow_network = replace(JOB, start=replace(START, period=16))

    def shows(probe: Probe) -> Observation:
        seen = show(probe)
        assert seen.measured is not None
        apart = probe.setting.groups > 1
        slow = [np.asarray(row) + 0.5 / 16 * apart for row in seen.measured.steps]
        exchanges = tuple((0.5 / 16 * apart,) * len(row) for row in slow)
        steps = tuple(tuple(row.tolist()) for row in slow)
        return replace(seen, measured=replace(seen.measured, steps=steps, exchanges=exchanges, period=16))

    search = Search(slow_network)
    for probe in drive(search, most=2, shows=shows):
        assert probe.setting.period == 16
    one, several = (search.throughput(Setting(groups, 0.0, 0.0, False, 16)) for groups in (1, 4))
    assert several > 1.1 * one > 1.1 * search.throughput(Setting(4, 0.0, 0.0))
    assert 4 in search.groups()


def test_a_period_that_the_user_fixed_is_that_of_every_probe() -> None:
    search = Search(replace(JOB, start=replace(START, period=16), space=Space.of({"period": 8}, RANKS)))
    assert {probe.setting.period for probe in drive(search)} == {8}
    assert search.choice().setting.period == 8


def test_the_users_own_momentum_is_not_out_of_bounds_unless_they_say_so() -> None:
    start = Setting(1, 0.99, 0.05)
    for space, momentum in (({}, 0.99), ({"momentum": [0.0, 0.9]}, 0.9)):
        search = Search(replace(JOB, start=start, space=Space.of(space, RANKS, momentum=start.momentum)))
        assert search.proposal(1).momentum == momentum


def test_proportional_batches_are_not_tried_for_themselves() -> None:
    search = ended("bayes")
    assert search.is_uneven(search.spec.start)
    assert len({replace(each.setting, rebalance=False) for each in search.tried}) == len(search.tried)


@pytest.mark.parametrize("reduction", [0.075, 0.0], ids=["slow all-reduce", "none"])
def test_smaller_steps_are_tried_where_several_groups_could_pay_for_them(reduction: float) -> None:
    def shows(probe: Probe) -> Observation:
        seen = show(probe, problem="diverged" if probe.setting.groups > 1 else "")
        assert seen.measured is not None
        saved = 0.075 - reduction if probe.setting.groups == 1 else 0.0
        steps = tuple(tuple(step - saved for step in row) for row in seen.measured.steps)
        return replace(seen, measured=replace(seen.measured, steps=steps))

    search = Search(JOB)
    whys = [probe.why for probe in drive(search, shows=shows)]
    assert ("a smaller step" in whys) == bool(reduction)
    assert search.choice().setting.groups == 1


def test_there_is_no_other_strategy() -> None:
    with pytest.raises(ConfigurationError, match="search='best'"):
        Search(JOB, "best")


# --- The reference batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "adaptive"), covering(product(STRATEGIES, (False, True))))
def test_however_many_groups_a_run_begins_with_the_search_is_the_same(strategy: str, adaptive: bool) -> None:
    came = []
    for groups in (1, 2, 4):
        job = replace(JOB, start=replace(START, groups=groups), scaling=Scaling(adaptive))
        search = again(Search(job, strategy))
        probes = list(drive(search))
        assert search.choice().setting != job.start or groups == 1
        came.append((probes, search.choice().setting, search.candidates()))
    assert came[0] == came[1] == came[2]


def test_the_users_rate_and_momentum_are_those_of_one_synchronous_group() -> None:
    search = Search(replace(JOB, start=replace(START, groups=4)))
    assert search.proposal(1) == START
    assert search.proposal(4) == Search(JOB).proposal(4) == replace(START, groups=4, momentum=0.6)


def test_what_a_search_has_chosen_belongs_to_the_batch_of_one_group() -> None:
    chosen = Search(JOB).proposal(4)
    later = Search(replace(JOB, start=chosen, current=True, own=START, reference=JOB.batch / 4))
    assert later.proposal(4) == chosen
    assert later.proposal(1) == START


def test_if_everything_diverges_a_run_goes_on_as_it_began() -> None:
    start = replace(START, groups=4)
    search = Search(replace(JOB, start=start))
    list(drive(search, shows=lambda probe: show(probe, problem="diverged")))
    assert search.choice().setting == start


def test_steps_of_a_run_under_way_are_those_it_takes_whatever_they_belong_to() -> None:
    start = replace(START, groups=4)
    search = Search(replace(UNDER_WAY, start=start))
    lrs = [
        probe.setting.lr / start.lr
        for probe in drive(search)
        if (probe.setting.groups, probe.setting.momentum) == (4, 0.9)
    ]
    assert lrs[:2] == pytest.approx([1.0, 1 / 3])


def test_a_file_of_before_means_what_it_meant() -> None:
    plain = replace(JOB, start=replace(START, groups=4)).to_dict()
    del plain["reference"]
    assert SearchSpec.from_dict(plain).basis.groups == 4


def test_a_reference_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="reference=0: pass a number of samples"):
        replace(JOB, reference=0)


# --- Jobs ------------------------------------------------------------------------------------------------------------

job_of = st.builds(
    SearchSpec,
    start=st.builds(Setting, st.integers(1, 8), st.floats(0, 0.9), st.floats(1e-4, 1.0)),
    batch=st.integers(1, 4096),
    horizon=st.floats(0, 1e9),
    share=st.floats(0, 0.99),
    space=st.builds(
        Space,
        groups=st.sets(st.integers(1, 9), max_size=4).map(lambda groups: tuple(sorted(groups | {1}))),
        lr=st.sampled_from([(0.0, math.inf), (0.01, 0.1), (0.5, math.inf)]),
        rebalance=st.booleans(),
        period=st.sampled_from([(), (1,), (1, 4)]),
    ),
    scaling=st.builds(Scaling, st.booleans()),
    seconds=st.none() | st.floats(0, 1e6),
    current=st.booleans(),
    own=st.none() | st.just(START),
    seed=st.integers(0, 99),
    reference=st.none() | st.floats(0.5, 4096),
)


@FEW
@given(job_of)
def test_plain_jobs_are_the_jobs(job: SearchSpec) -> None:
    assert SearchSpec.from_dict(json.loads(json.dumps(job.to_dict(), allow_nan=False))) == job


@FEW
@given(job_of)
def test_probes_have_enough_batches_within_the_share_or_there_are_none(job: SearchSpec) -> None:
    affordable = job.share * job.horizon / job.batch
    assert job.batches == 0 or FEWEST_BATCHES <= job.batches <= MOST_BATCHES
    assert (job.batches == 0) == (affordable < FEWEST_BATCHES)
    assert job.batches <= max(affordable, 0)


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


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("lr=0.0: there is nothing to tune")):
        replace(JOB, start=replace(START, lr=0.0))


def test_a_space_without_one_group_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="groups"):
        Space((2, 4))
    with pytest.raises(ConfigurationError, match="factor"):
        Space((1,), factor=(3.0, 0.3))
