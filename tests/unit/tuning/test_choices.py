"""What is chosen from the first batches of runs whose hardware is known, and what is made of it later."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_omni.tuning.callback.microbenchmarks import seconds_per_byte
from lightning_omni.tuning.callback.speed import ForecastCheck, Speed
from lightning_omni.tuning.callback.tuned_run import TunerState, last_choice
from lightning_omni.tuning.model.measurements import Measured, TrainedBatches
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.report.summary import SearchSummary
from lightning_omni.tuning.search import Dimension, Observation, Search, SearchSpec, Space, TrainedSegment
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.choice import best_enumerated, log_seconds, risk_adjusted, verdict
from lightning_omni.tuning.search.search import Optimization

OWN = Setting(1, 0.9, 0.05, method="async_sgd", wire="fp32")
AVERAGED = "diloco:outer_lr=1.0,outer_momentum=0"
METHODS = ("async_sgd", "local_sgd", "elastic_averaging", AVERAGED, f"{AVERAGED},fragments=4,delay=1,keep_steps=true")
EVERYTHING = Space((1, 2, 4), method=METHODS, compression=("fp32", "int8", "int8/bf16"))
LENET = 1_724_320


def seen(own: np.ndarray, allreduce: float = 0.002) -> Observation:
    """The first batches of ranks that compute so long, shape (ranks, steps), of 64 samples each, in one group."""
    ranks, steps = own.shape
    measured = Measured(
        ranks=tuple(range(ranks)),
        samples=((64,) * steps,) * ranks,
        own=own.tolist(),
        steps=(own.max(axis=0) + allreduce).tolist(),
        nbytes=LENET,
        round_trip=0.0005,
    )
    ends = 64.0 * ranks * np.arange(1, steps + 1)
    return Observation(TrainedBatches(tuple(ends), tuple(2.3 - 0.02 * np.arange(steps))), measured)


def equal(steps: int = 12, ranks: int = 4, slow: float = 1.0) -> np.ndarray:
    own = 0.1 * np.random.default_rng(0).normal(1, 0.01, (ranks, steps))
    own[-1] *= slow
    return own


def exponential(steps: int = 24, ranks: int = 4) -> np.ndarray:
    return np.random.default_rng(0).exponential(0.1, (ranks, steps))


def search(observation: Observation, space: Space = EVERYTHING, own: Setting = OWN) -> Search:
    return Search(SearchSpec(own, batch=256, horizon=600_000, space=space), observation)


def test_on_equal_ranks_with_fast_links_nothing_changes_and_soon() -> None:
    found = search(seen(equal(steps=6)))
    assert verdict(found) == "nothing"
    assert found.choice().setting == OWN


def test_a_slow_rank_gets_a_smaller_part_of_the_batch_and_staleness_is_not_paid_for() -> None:
    found = search(seen(equal(steps=6, slow=4.0)))
    assert verdict(found) == "change"
    assert found.choice().setting == replace(OWN, rebalance=True)


def test_where_more_steps_cost_little_nothing_is_decided_before_each_ranks_mean_is_known() -> None:
    """A few random step times tell that groups gain, but not which of them gain most."""
    random = search(seen(exponential()))
    assert verdict(random) == "change"
    assert verdict(random, can_wait=True) == ""
    many = replace(random.spec, space=replace(EVERYTHING, groups=(1, 2, 4, 8)))
    assert [many.can_wait(steps) for steps in (6, 12, 24, 48)] == [True, True, False, False], "of 2,344 steps"
    assert not random.spec.can_wait(6), "four ranks have few ways to choose from"
    for own, found in ((equal(steps=6), "nothing"), (equal(steps=6, slow=4.0), "change")):
        assert verdict(search(seen(own)), can_wait=True) == found


def test_a_slow_rank_is_seen_in_two_steps_and_nothing_else_is_decided_so_early() -> None:
    assert verdict(search(seen(equal(steps=2, slow=4.0))), is_early=True) == "change"
    assert verdict(search(seen(equal(steps=2))), is_early=True) == ""
    assert verdict(search(seen(equal(steps=2, slow=4.0), allreduce=0.5)), is_early=True) == "", "it asks for groups"
    wrong = 0
    for seed in range(20):
        own = np.random.default_rng(seed).exponential(0.1, (4, 2))
        wrong += verdict(search(seen(own)), is_early=True) == "change"
    assert wrong <= 1, "random step times are seldom taken for ranks of different speed"


def test_random_step_times_ask_for_groups_that_do_not_wait() -> None:
    found = search(seen(exponential()))
    chosen = found.choice().setting
    assert chosen.groups == 4
    assert chosen.momentum <= 0.9
    assert found.prediction(chosen).bottleneck == "compute"


@pytest.mark.parametrize("own", [equal(steps=6), equal(steps=6, slow=4.0), exponential()])
def test_where_ranks_compute_nothing_but_their_loading_that_is_said_to_be_the_bottleneck(own: np.ndarray) -> None:
    known, means = seen(own), own.mean(axis=1)
    for share, named in ((0.75, "loading data is the bottleneck (75%"), (0.25, "compute is the bottleneck")):
        loading = tuple(share * means)
        found = search(replace(known, measured=replace(known.measured, loading=loading)))
        assert named in found.choice().why
        summary = SearchSummary(found)
        in_report = summary.bottleneck(found.prediction(found.choice().setting))
        assert named.startswith(f"{in_report} is"), "as the report says"


def test_a_setting_that_pays_is_chosen_though_a_simpler_one_nearly_as_fast_does_not_pay() -> None:
    """Nearly as fast is a tie, which the fewest groups win; if these gain too little, what gains enough is chosen."""
    draw = np.random.default_rng(0)
    for scatter in np.linspace(0.25, 0.45, 5):
        found = search(seen(0.1 * draw.lognormal(0.0, scatter, (4, 48)), allreduce=0.001))
        start = found.spec.start
        gains = {
            each: found.log_time(start) - risk_adjusted(found.log_time(each), found.theory.error(each))
            for each in map(found.with_rebalance, found.candidates)
        }
        least = {each: c.GAIN if each.groups > 1 else c.FASTER for each in gains}
        pays = any(gain >= math.log(least[each]) for each, gain in gains.items() if each != start)
        assert (found.choice().setting != start) == pays, f"{scatter:.3f}"


def test_where_the_server_would_take_as_long_as_a_step_groups_are_few_or_exchange_seldom() -> None:
    def pushed_in(serve: float) -> Search:
        known = seen(exponential())
        return search(replace(known, measured=replace(known.measured, serve=serve)))

    free, busy = pushed_in(0.0), pushed_in(0.1)
    eager = replace(free.choice().setting, period=1)
    assert eager.groups == 4
    assert free.prediction(eager).bottleneck == "compute"
    assert busy.prediction(eager).bottleneck == "server"
    assert busy.throughput(eager) <= 64 / 0.1 * 1.15, "a push each 0.1 s, and what a forecast may be off by"
    chosen = busy.choice().setting
    assert busy.throughput(chosen) > 1.2 * busy.throughput(eager)


def test_where_the_all_reduce_binds_groups_exchange_less_often_or_less() -> None:
    found = search(seen(equal(), allreduce=0.25))
    assert found.prediction(OWN).bottleneck == "allreduce"
    chosen = found.choice().setting
    assert chosen.groups == 4
    assert chosen.period > 1
    assert found.throughput(chosen) > 2 * found.throughput(OWN)


def test_one_group_averages_in_half_the_bytes_for_a_gain_that_would_be_too_small_for_groups() -> None:
    own = replace(OWN, all_reduce="fp32")
    space = replace(EVERYTHING, all_reduce=("fp32", "bf16"))

    def chosen(allreduce: float) -> Setting:
        known = seen(equal(), allreduce=allreduce)
        shaped = replace(known.measured, shapes=((LENET // 400, 100),))
        return search(replace(known, measured=shaped), space, own).choice().setting

    assert chosen(0.008) == own, "4 % faster"
    assert chosen(0.016) == replace(own, all_reduce="bf16"), "7 % faster"


def test_few_steps_that_scatter_are_not_decided_by_but_in_the_end_they_are() -> None:
    own = 0.1 * np.random.default_rng(1).lognormal(0.0, 0.25, (4, 24))
    few, many = (search(seen(own[:, :steps])) for steps in (3, 24))
    assert verdict(few) == ""
    assert many.choice().setting.groups >= 1
    low, high = (each.prediction(OWN).samples_per_second for each in (few, many))
    assert math.log(high.high / high.low) < math.log(low.high / low.low), "the interval gets narrower"


def test_what_the_user_has_chosen_is_what_groups_exchange_by() -> None:
    own = replace(OWN, method="local_sgd:warmup_steps=10", period=4)
    chosen = search(seen(exponential()), Space((1, 2, 4), period=(4,)), own).choice().setting
    assert (chosen.method, chosen.period, chosen.wire) == ("local_sgd:warmup_steps=10", 4, "fp32")


@pytest.mark.parametrize(("low", "high"), [(0.9, 0.9), (0.5, 0.7), (0.0, 0.1)])
def test_groups_have_a_momentum_that_is_allowed_and_their_steps_are_as_large_with_it(low: float, high: float) -> None:
    free = search(seen(exponential()))
    for best, held in zip(
        free.candidates,
        search(seen(exponential()), replace(EVERYTHING, momentum=(low, high))).candidates,
        strict=True,
    ):
        if held.groups > 1:
            assert held.momentum == min(max(best.momentum, low), high)
            assert Scaling().step(held) == pytest.approx(Scaling().step(best))


def test_groups_have_a_rate_that_is_allowed() -> None:
    found = search(seen(exponential()), replace(EVERYTHING, lr=(0.04, 0.06)))
    assert all(0.04 <= each.lr <= 0.06 for each in found.candidates)
    assert found.choice().setting.groups > 1


def test_a_search_that_travels_chooses_the_same() -> None:
    found = search(seen(exponential()))
    again = Search.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.choice() == found.choice()
    assert again.spec == found.spec


def test_methods_that_average_keep_the_users_rate_and_those_that_add_up_divide_it() -> None:
    scaling = Scaling()
    for method, groups in (("async_sgd", 4), ("softsync:n=2", 2), ("hardsync", 1), ("local_sgd", 1), ("diloco", 1)):
        setting = Setting(4, 0.9, 0.1, method=method)
        assert setting.updates_per_batch == groups
        assert scaling.step(setting) == pytest.approx(scaling.step(replace(OWN, lr=0.1)) * groups)


def test_a_forecast_of_hundreds_of_settings_takes_a_moment() -> None:
    found = search(seen(exponential()))
    assert len(found.candidates) > 50
    asked = len(found._rates)
    found.choice()
    assert len(found._rates) - asked < len(found.candidates) / 2, (
        "most of them are ruled out by what their groups could do at most"
    )


def test_members_get_what_their_leader_was_answered_over_the_links_of_their_group() -> None:
    known = seen(equal(), allreduce=0.25)
    at_once, handed = (search(replace(known, measured=replace(known.measured, hands_on=how))) for how in (False, True))
    two, four = (replace(OWN, groups=groups, method="local_sgd", period=8) for groups in (2, 4))
    per_step = at_once.spec.batch / at_once.throughput(two), handed.spec.batch / handed.throughput(two)
    whole = 0.25 / 1.5  # a ring of four carries a gradient one and a half times over each link
    assert per_step[1] - per_step[0] == pytest.approx(whole / 8, rel=0.1)
    assert handed.throughput(four) == at_once.throughput(four), "a member is its own leader"
    assert handed.throughput(OWN) == at_once.throughput(OWN)


@given(
    megabytes=st.floats(0.1, 1000),
    latency=st.floats(1e-5, 0.1),
    burst=st.sampled_from([0, 1 << 12, 1 << 15]),
    nbytes=st.integers(1 << 18, 1 << 26),
)
def test_what_a_byte_takes_is_told_although_a_link_lets_the_first_ones_pass_at_once(
    megabytes: float, latency: float, burst: int, nbytes: int
) -> None:
    sent: list[int] = []

    def timed(count: int) -> float:
        sent.append(4 * count)
        return latency + max(0, 4 * count - burst) / (1e6 * megabytes)

    assert seconds_per_byte(timed, nbytes) == pytest.approx(1e-6 / megabytes, rel=1e-3)
    assert max(sent) <= nbytes


def test_of_a_small_gradient_one_message_tells_what_a_byte_takes() -> None:
    assert seconds_per_byte(lambda count: 0.01 + count * 4e-6, 4000) == pytest.approx(1e-6)
    assert seconds_per_byte(lambda count: 0.01, 4) > 0


@given(nbytes=st.integers(4, 1 << 12), late=st.floats(0, 0.01))
def test_what_a_busy_machine_adds_to_one_message_is_not_what_a_small_gradient_takes(nbytes: int, late: float) -> None:
    per_byte = seconds_per_byte(lambda count: 0.001 + late * (count > 1), nbytes)
    assert per_byte * nbytes <= max(late, 1e-9) / 15


@given(nbytes=st.integers((1 << 16) + 4, 1 << 22), late=st.floats(0, 1e-3))
def test_what_a_busy_machine_adds_to_a_message_is_not_divided_by_the_few_bytes_that_it_has_more(
    nbytes: int, late: float
) -> None:
    def timed(count: int) -> float:
        return 0.001 + count * 4e-8 + (late if 4 * count == nbytes // 4 * 4 else 0.0)

    assert seconds_per_byte(timed, nbytes) * nbytes <= 1e-8 * nbytes + 4 * late + 1e-12


def slower(found: Search, setting: Setting, log_ratio: float, observation: Observation) -> Search:
    """The next search of a run whose groups took so much longer than predicted, by new batches of one group."""
    return Search(found.spec, observation, segments=[TrainedSegment(setting, log_ratio, 0.01**2)])


@cache
def searched() -> Search:
    """A search that chose groups by the first batches; nothing is told to it."""
    return search(seen(exponential()), replace(EVERYTHING, method=METHODS[:2], compression=("fp32",)))


@settings(max_examples=12, deadline=None)
@given(log_ratio=st.just(0.0) | st.floats(-1.0, -0.01) | st.floats(0.01, 2.0))
def test_a_setting_that_was_slower_or_faster_than_predicted_is_so_again_and_others_the_less_the_less_they_are_alike(
    log_ratio: float,
) -> None:
    found = searched()
    trained = found.choice().setting
    again = slower(found, trained, log_ratio, found.observation)
    assert math.log(found.throughput(trained) / again.throughput(trained)) == pytest.approx(log_ratio, rel=0.01)
    for each in found.candidates:
        shift = math.log(found.throughput(each) / again.throughput(each))
        if each.groups == 1:
            assert shift == 0, "it is timed itself"
        else:
            assert -1e-9 <= shift / (log_ratio or 1.0) <= 1.0
        assert again.throughput_bound(each) >= again.throughput(each) * (1 - 1e-6)
    far = next(each for each in found.candidates if each.groups > 1 and each.period > 16)
    near = replace(trained, momentum=0.5)
    shifts = [math.log(found.throughput(each) / again.throughput(each)) for each in (near, far)]
    assert abs(shifts[0]) >= abs(shifts[1])
    predicted, before = (each.prediction(trained).samples_per_second for each in (again, found))
    assert math.log(before.low / predicted.low) == pytest.approx(log_ratio, rel=0.01)


def test_groups_that_were_too_slow_are_not_chosen_by_the_next_batches_and_it_says_why() -> None:
    found = searched()
    groups, one = found.choice().setting, found.throughput(OWN)
    log_ratio = math.log(found.throughput(groups) / (0.5 * one))
    again = slower(found, groups, log_ratio, found.observation)
    assert groups.groups == 4
    assert again.choice().setting == OWN
    assert f"4 groups have trained {0.5 * one:.3g} samples per second" in again.choice().why
    assert f"{found.throughput(groups):.3g} were predicted" in again.choice().why
    read = Search.from_dict(json.loads(json.dumps(again.to_dict())))
    assert read.choice() == again.choice()


def test_groups_that_are_slower_as_one_group_is_by_now_are_chosen_again() -> None:
    found = search(seen(exponential()))
    again = search(seen(3 * exponential()))
    assert again.choice().setting.groups == found.choice().setting.groups == 4


def test_groups_that_do_not_pay_are_given_up_if_groups_did_not_before() -> None:
    found = search(seen(exponential()))
    groups = replace(OWN, groups=4)
    gave_up: list[Setting] = []
    run: Any = SimpleNamespace(
        state=TunerState(setting=groups, own=OWN, rounds=1),
        setting=groups,
        own=OWN,
        searches=[found],
        is_rank_zero=True,
    )
    run.broadcast_command = lambda said: said
    run.strategy = SimpleNamespace(parts=SimpleNamespace(epochs=SimpleNamespace(is_open=False)))
    speeds: Any = SimpleNamespace(speed=Speed(256, 10.0, error=0.01), changed=lambda: None)
    applied: Any = SimpleNamespace(return_to_one_group=gave_up.append)
    reports: Any = SimpleNamespace(chosen=lambda command: None)
    check = ForecastCheck(run, applied, speeds, reports)
    assert "were predicted" in check.epoch_done(), "one group is timed again"
    assert not check.epoch_done(), "of one choice this is asked once"
    (segment,) = run.state.segments
    assert segment.setting == groups
    assert found.throughput(groups) * math.exp(-segment.log_ratio) == pytest.approx(25.6)
    assert segment.variance > 0.01**2, "the prediction was uncertain, too"
    assert segment.samples_per_second == pytest.approx(25.6), "to be compared with what is predicted next"
    run.state.rounds = 2
    assert not check.epoch_done()
    assert gave_up == [OWN]
    assert len(run.state.segments) == 1, "of each setting the last one is kept"


def steps_until_timed_again(seconds: np.ndarray) -> int | None:
    """After how many steps one group is timed again, of the times of steps that follow the first batches."""
    done: list[float] = []

    def so_far() -> Speed:
        error = np.std(done) / math.sqrt(len(done) - 1) / np.mean(done)
        return Speed(256.0 * len(done), sum(done), float(error))

    run: Any = SimpleNamespace(
        state=TunerState(setting=OWN, own=OWN, rounds=1),
        setting=OWN,
        searches=[search(seen(equal()))],
        world=SimpleNamespace(broadcast_text=lambda text: text),
    )
    others: Any = SimpleNamespace(speed_so_far=so_far)
    check = ForecastCheck(run, others, others, others)
    for step, each in enumerate(seconds, 1):
        done.append(float(each))
        if check.step_done():
            return step
    return None


@given(st.integers(40, 1000), st.floats(3.0, 8.0), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_a_rank_that_becomes_slow_is_seen_before_half_as_many_steps_again_are_trained(
    begin: int, slower: float, seed: int
) -> None:
    seconds = 0.1 * np.random.default_rng(seed).normal(1, 0.02, 2 * begin)
    seconds[begin:] *= slower
    found = steps_until_timed_again(seconds)
    assert found is not None
    assert begin < found <= 1.5 * begin


@given(st.floats(0.9, 1.03), st.floats(0.005, 0.05), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_a_run_that_is_as_fast_as_forecast_is_not_timed_again(level: float, scatter: float, seed: int) -> None:
    seconds = 0.1 * level * np.random.default_rng(seed).normal(1, scatter, 3000)
    assert steps_until_timed_again(seconds) is None


@given(
    st.floats(0.1, 10.0),
    st.floats(0.0, 0.1),
    st.integers(3, 60).map(lambda number: 8 * number),
    st.integers(0, 9),
)
@settings(deadline=None)
def test_learnt_is_what_lies_below_the_last_of_the_first_batches_by_more_than_their_standard_error(
    level: float, scatter: float, steps: int, seed: int
) -> None:
    losses = level + scatter * level * np.random.default_rng(seed).normal(size=steps)
    batches = TrainedBatches(tuple(256.0 * np.arange(1, steps + 1)), tuple(losses.tolist()))
    found = search(Observation(batches, seen(equal()).measured)).learnt_below
    error = scatter * level / math.sqrt(3 / 8 * steps)
    assert found == pytest.approx(losses[-3 * steps // 8 :].mean() - error, abs=0.6 * error + 1e-9)


def test_of_first_batches_whose_losses_are_no_numbers_it_is_not_known_what_would_be_better() -> None:
    observation = seen(equal())
    lost = search(replace(observation, batches=replace(observation.batches, losses=())))
    assert math.isnan(lost.learnt_below)
    assert math.isnan(lost.divergence_threshold)
    assert lost.choice().setting == OWN
    assert "lower the learning rate" in lost.choice().why


# --- The phase --------------------------------------------------------------------------------------------------------


class Workers(Dimension):
    """Something that the tuner knows nothing of."""

    name = "workers"

    def axis(self, known: Any) -> list[int]:
        return [1, 2, 4]

    def current(self, world: Any) -> Any:
        return world.workers

    def apply(self, world: Any, value: Any) -> None:
        world.workers = value


SCENES: dict[str, Callable[[], Search]] = {
    "equal": lambda: search(seen(equal())),
    "a slow rank": lambda: search(seen(equal(slow=4.0))),
    "exponential": lambda: search(seen(exponential())),
    "a slow all-reduce": lambda: search(seen(equal(), allreduce=0.25)),
    "a slow all-reduce, exponential": lambda: search(seen(exponential(), allreduce=0.25)),
    "two ranks": lambda: search(seen(exponential(ranks=2)), replace(EVERYTHING, groups=(1, 2))),
    "momentum is fixed": lambda: search(seen(exponential()), replace(EVERYTHING, momentum=(0.9, 0.9))),
    "rates are bounded": lambda: search(seen(exponential()), replace(EVERYTHING, lr=(0.04, 0.06))),
}


@pytest.mark.parametrize("name", SCENES)
def test_without_segments_what_is_chosen_is_the_best_of_the_list_or_better(name: str) -> None:
    found = SCENES[name]()
    listed, chosen = best_enumerated(found), found.choice().setting

    def log_careful(setting: Setting) -> float:
        return risk_adjusted(log_seconds(found, setting), found.theory.error(setting))

    assert log_careful(chosen) <= log_careful(listed) + 1e-9
    assert found.spec.space.holds(chosen) == chosen
    if chosen.groups == 1:
        assert (chosen.momentum, chosen.lr) == (OWN.momentum, OWN.lr), "one group keeps the user's own"
    considered = found.considered
    assert considered[0] == replace(considered[0], setting=found.start, improvement=0.0, by="the run")
    assert {each.by for each in considered} <= {"the run", "the list", "scikit-optimize"}
    assert chosen in [each.setting for each in considered]


def test_a_number_of_groups_that_the_space_has_no_more_is_not_chosen_although_it_was_trained() -> None:
    found = search(seen(exponential()))
    trained = found.choice().setting
    assert trained.groups > 1
    spec = replace(found.spec, space=replace(found.spec.space, groups=(1,)))
    again = Search(spec, found.observation, segments=[TrainedSegment(trained, -0.3, 0.01**2)])
    assert again.choice().setting.groups == 1
    assert {each.setting.groups for each in again.considered} == {1}


def test_scikit_optimize_proposes_a_setting_that_improves_on_the_runs() -> None:
    found = search(seen(exponential()))
    found.choice()
    proposed = next(each for each in found.considered if each.by == "scikit-optimize")
    assert proposed.improvement > 0.03
    assert proposed.deviation > 0
    assert proposed.setting.groups > 1


def test_a_momentum_that_is_proposed_is_below_one_however_it_is_rounded() -> None:
    asked = Optimization(search(seen(exponential()), replace(EVERYTHING, momentum=(0.0, 0.999))))
    several = next(number for number, each in enumerate(asked._ways) if each.groups > 1)
    proposed = asked._axes.setting([several, 0.998, 0.0])
    assert proposed.momentum == 0.999
    assert proposed.lr > 0


def test_bounds_of_rates_are_those_of_groups_and_one_group_keeps_the_users_rate() -> None:
    asked = Optimization(search(seen(exponential()), replace(EVERYTHING, lr=(0.2, 0.3))))
    rates = {each.groups: asked._axes.setting([number, 0.5, 0.0]).lr for number, each in enumerate(asked._ways)}
    assert rates.pop(1) == OWN.lr
    assert all(0.2 <= rate <= 0.3 for rate in rates.values())


def test_of_a_run_that_has_given_its_choice_up_the_latest_is_what_it_trains_with() -> None:
    found = search(seen(exponential()))
    assert found.choice().setting != OWN
    for state, setting in ((TunerState(setting=OWN, is_final=True), OWN), (TunerState(), found.choice().setting)):
        choice = last_choice([found], state)
        assert choice is not None
        assert choice.setting == setting


def test_the_same_is_chosen_whenever_the_same_is_told() -> None:
    one, other = (search(seen(exponential())) for _ in range(2))
    assert one.choice() == other.choice()
    assert one.considered == other.considered
    read = Search.from_dict(json.loads(json.dumps(one.to_dict())))
    assert read.considered == one.considered


def test_groups_are_not_formed_if_that_takes_more_than_its_part_of_the_run_and_it_says_so() -> None:
    found = search(seen(exponential()))
    left = math.exp(log_seconds(found, found.start))
    for switch, groups in ((0.09 * left, 4), (0.11 * left, 1)):
        spec = replace(found.spec, switch=switch, budget=0.1)
        chosen = Search(spec, found.observation).choice()
        assert chosen.setting.groups == groups
        assert ("forming groups takes" in chosen.why) == (groups == 1)
        assert ("budget=0.1 allows" in chosen.why) == (groups == 1)


def test_what_forming_groups_takes_counts_against_them() -> None:
    found = search(seen(exponential()))
    groups = found.choice().setting
    seconds = math.exp(log_seconds(found, groups))
    later = Search(replace(found.spec, switch=5.0), found.observation)
    assert math.exp(log_seconds(later, groups)) == pytest.approx(seconds + 5.0)
    assert log_seconds(later, later.start) == log_seconds(found, found.start)


def test_a_dimension_of_the_users_own_is_proposed_for_what_is_not_known_of_it() -> None:
    own = replace(OWN, further=(("workers", 1),))
    found = search(seen(equal()), replace(EVERYTHING, further=(Workers(),)), own)
    chosen = found.choice().setting
    assert chosen.further_value("workers") != 1
    assert replace(chosen, further=own.further) == own, "nothing else is worth a change"
    assert "proposed by scikit-optimize" in found.choice().why


def test_a_phase_takes_a_moment() -> None:
    found = search(seen(exponential()))
    best_enumerated(found)  # imports and speeds are remembered
    found.choice()
    again = Search(found.spec, found.observation)
    best_enumerated(again)
    began = time.process_time()
    again.choice()
    assert time.process_time() - began < 1.0, "0.1 s on an idle machine"


def test_a_value_of_the_users_own_that_was_faster_stays_and_one_that_was_slower_is_not_chosen_again() -> None:
    own = replace(OWN, further=(("workers", 1),))
    space = replace(EVERYTHING, further=(Workers(),))
    found = search(seen(equal()), space, own)
    tried = found.choice().setting
    other = next(value for value in (2, 4) if value != tried.further_value("workers"))
    segments = [
        TrainedSegment(tried, -0.3, 0.01**2),
        TrainedSegment(tried.with_further("workers", other), 0.0, 0.01**2),
    ]
    assert Search(found.spec, found.observation, segments=segments).choice().setting == tried
    slow = [replace(each, log_ratio=0.3) for each in segments]
    assert Search(found.spec, found.observation, segments=slow).choice().setting == own
