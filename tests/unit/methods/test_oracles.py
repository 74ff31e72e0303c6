"""Every method against what its paper says must hold: equations, reductions to one another, laws of conservation.

Weights are compared bitwise where two methods do the same arithmetic, and to rounding where they do the same
mathematics.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import eq
from typing import Any

import msgspec
import pytest
import torch
from covering import covering
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rounds import Cluster, Make, by_speed, noisy, sgd, start, zero
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import ConfigurationError, MalformedMessage, ProtocolError
from lightning_omni.group.core import GroupCore, ServerRequest
from lightning_omni.methods import (
    METHODS,
    PRESETS,
    REGISTRY,
    AsyncDiLoCo,
    AsyncSGD,
    DecoupledDiLoCo,
    DelayCompensated,
    DiLoCo,
    Downpour,
    ElasticAveraging,
    Exchange,
    Fetch,
    Gossip,
    Gradient,
    HardSync,
    LocalSGD,
    Master,
    Method,
    NextGradient,
    Push,
    ReadInbox,
    ReadPeer,
    Reply,
    ServerSide,
    SoftSync,
    method_named,
    register,
)
from lightning_omni.methods.contract import GroupSide
from lightning_omni.methods.model.replica import Pulled, Replica, all_finite
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of, resolver
from lightning_omni.registry import to_wire
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.wire import messages as m
from lightning_omni.wire.layout import Layout

varied = settings(deadline=None, max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

NESTEROV = sgd(0.05, momentum=0.9, nesterov=True)
RULES: dict[str, Make] = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": NESTEROV,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())


def orders(groups: int, most: int = 40) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, groups - 1), min_size=1, max_size=most)


def shuffled(groups: int, length: int, seed: int = 0) -> list[int]:
    """An order in which some groups are faster than others."""
    return random.Random(seed).choices(range(groups), weights=range(1, groups + 1), k=length)


def rounds(groups: int, count: int, seed: int = 0) -> list[int]:
    """Every group once in each round, in any order."""
    draw = random.Random(seed)
    return [group for _ in range(count) for group in draw.sample(range(groups), groups)]


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_close(first: Iterable[Tensor], second: Iterable[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def combine(*terms: tuple[float, Sequence[Tensor]]) -> list[Tensor]:
    """A linear combination: ``(factor, tensors), ...``."""
    columns = zip(*(tensors for _, tensors in terms), strict=True)
    return [torch.stack([f * t for (f, _), t in zip(terms, column, strict=True)]).sum(0) for column in columns]


def mean_of(many: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return combine(*((1 / len(many), tensors) for tensors in many))


class Reference:
    """A torch optimizer on its own."""

    def __init__(self, make: Make, weights: Sequence[Tensor] = ()) -> None:
        self.parameters = [Parameter(weight.clone()) for weight in weights or start()]
        self.optimizer = make(self.parameters)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def step(self, gradient: Sequence[Tensor], scale: float = 1.0) -> None:
        for parameter, direction in zip(self.parameters, gradient, strict=True):
            parameter.grad = direction.clone()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= scale
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def ballot(weights: Sequence[Tensor], group: int, step: int) -> list[Tensor]:
    """With plain SGD and lr 1, minus the weights count the updates of each group that they contain."""
    vote = torch.zeros_like(weights[0])
    vote[group] = 1.0
    return [vote]


def counting(method: Method, groups: int) -> Cluster:
    return Cluster(method, groups, [torch.zeros(groups, dtype=torch.float64)], sgd(1.0), ballot)


def seen(cluster: Cluster, group: int | None = None) -> list[int]:
    """The updates of each group in a group's weights."""
    return [round(-count) for count in cluster.weights(group)[0].tolist()]


# --- Staleness -------------------------------------------------------------------------------------------------------

NONE_WAITS: dict[str, Method] = {
    "async_sgd": AsyncSGD(),
    "staleness_aware": AsyncSGD(staleness_aware=True),
    "softsync 1": SoftSync(n=1),
    "softsync 2": SoftSync(n=2, modulation="average"),
    "softsync 4": SoftSync(n=4, modulation="none"),
    "delay_compensated": DelayCompensated(),
    "downpour": Downpour(),
    "downpour 3": Downpour(n_push=3, n_fetch=3),
    "gpu_asgd": Downpour(n_push=2, n_fetch=2, send="updates"),
    "elastic_averaging": ElasticAveraging(period=2),
    "async_diloco": AsyncDiLoCo(period=2, dynamic_steps=False),
}


@pytest.mark.parametrize("method", NONE_WAITS.values(), ids=NONE_WAITS.keys())
@varied
@given(order=orders(4, 60))
def test_every_update_makes_every_other_groups_work_one_update_older(method: Method, order: list[int]) -> None:
    cluster = Cluster(method, 4)
    cluster.run(order)
    in_flight = sum(cluster.master.clock - replica.clock for replica in cluster.replicas)
    assert sum(cluster.all_staleness) + in_flight == cluster.master.clock * (4 - 1)
    assert not cluster.waiting


@pytest.mark.parametrize(("n", "slowest"), covering(itertools.product((1, 2, 4, 8), (1.0, 3.0, 20.0))))
def test_mean_staleness_is_p_minus_1_over_c_whatever_the_speeds(n: int, slowest: float) -> None:
    draw = random.Random(n)
    p, pushes = 8, 2000
    cluster = Cluster(SoftSync(n=n), p, [torch.zeros(1)])
    speeds = [draw.uniform(1.0, slowest) for _ in range(p)]
    by_speed(cluster, lambda group: speeds[group] * draw.expovariate(1.0), pushes)
    law = (p - 1) / (p // n)
    assert sum(cluster.all_staleness) / pushes == pytest.approx(law, rel=0.02)


@pytest.mark.parametrize(("n", "mean", "most"), [(1, 29 / 30, 2), (15, 14.5, 30), (30, 29.0, 60)])
def test_softsync_staleness_stays_below_2n_among_equal_groups(n: int, mean: float, most: int) -> None:
    # Zhang et al. 2016, figure 1: 30 learners.
    draw = random.Random(n)
    cluster = Cluster(SoftSync(n=n), 30, [torch.zeros(1)])
    by_speed(cluster, lambda group: max(0.5, draw.gauss(1.0, 0.05)), 2000)
    staleness = cluster.all_staleness
    assert sum(staleness) / len(staleness) == pytest.approx(mean, rel=0.02)
    assert max(staleness) <= most
    if n == 1:
        assert set(staleness) == {0, 1, 2}


def test_two_n_is_no_bound_where_some_groups_are_slow() -> None:
    draw = random.Random(0)
    cluster = Cluster(SoftSync(n=32), 32, [torch.zeros(1)])
    by_speed(cluster, lambda group: (4.0 if group < 8 else 1.0) * draw.gauss(1.0, 0.05), 4000)
    staleness = cluster.all_staleness
    assert max(staleness) > 100
    assert sum(tau > 2 * 32 for tau in staleness) / len(staleness) == pytest.approx(0.077, abs=0.01)


def test_staleness_is_counted_in_updates_and_not_in_pushes() -> None:
    cluster = Cluster(SoftSync(n=1), 4)
    cluster.run([0, 1, 2, 3, 0, 1, 2, 3])  # eight pushes, two updates
    assert cluster.master.clock == 2
    assert {group: cluster.staleness[group] for group in range(4)} == {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0, 0]}


def test_when_n_does_not_divide_the_groups_c_is_rounded_down() -> None:
    cluster = Cluster(SoftSync(n=7), 30, [torch.zeros(1)])
    cluster.run(shuffled(30, 400))
    assert cluster.master.clock == 400 // 4


# --- Softsync and hardsync -------------------------------------------------------------------------------------------


def test_softsync_with_n_1_is_no_barrier_and_takes_one_group_twice() -> None:
    order = [0, 0, 1]
    soft, hard = (Cluster(method, 3) for method in (SoftSync(n=1), HardSync()))
    soft.run(order)
    hard.run(order)
    expected = Reference(sgd())
    gradients = [noisy(start(), 0, 0), noisy(start(), 0, 1), noisy(start(), 1, 0)]
    expected.step(mean_of(gradients))
    assert soft.master.clock == 1
    assert_close(soft.weights(), expected.weights())
    assert not soft.waiting
    assert hard.master.clock == 0
    assert hard.waiting == {0, 1}


@pytest.mark.parametrize("modulation", ["none", "average", "each"])
@varied
@given(order=orders(5), n=st.integers(1, 5))
def test_softsync_averages_and_modulates_as_its_equation_says(modulation: Any, order: list[int], n: int) -> None:
    cluster = Cluster(SoftSync(n=n, modulation=modulation), 5)
    lr, c, clock = 0.1, 5 // n, 0
    weights, buffer = start(), []
    read, steps = [(weights, clock)] * 5, [0] * 5
    for group in order:
        cluster.compute(group)
        at, when = read[group]
        buffer.append((noisy(at, group, steps[group]), clock - when))
        steps[group] += 1
        if len(buffer) == c:
            average = max(1.0, sum(tau for _, tau in buffer) / c)
            rates = [lr / {"none": 1, "average": average, "each": max(1, tau)}[modulation] for _, tau in buffer]
            weights = combine((1.0, weights), *((-rate / c, g) for rate, (g, _) in zip(rates, buffer, strict=True)))
            buffer, clock = [], clock + 1
        read[group] = (weights, clock)
        assert_close(cluster.weights(), weights)
        assert cluster.master.clock == clock


@pytest.mark.parametrize("modulation", ["none", "average"])
def test_momentum_is_applied_once_for_each_update(modulation: Any) -> None:
    make = sgd(0.1, momentum=0.9)
    cluster = Cluster(SoftSync(n=2, modulation=modulation), 4, make=make)
    expected, buffer, clock = Reference(make), [], 0
    read, steps = [(expected.weights(), 0)] * 4, [0] * 4
    for group in shuffled(4, 30):
        cluster.compute(group)
        buffer.append((noisy(read[group][0], group, steps[group]), clock - read[group][1]))
        steps[group] += 1
        if len(buffer) == 2:
            average = sum(tau for _, tau in buffer) / 2
            expected.step(mean_of([g for g, _ in buffer]), 1 / max(1.0, average) if modulation == "average" else 1.0)
            buffer, clock = [], clock + 1
        read[group] = (expected.weights(), clock)
    assert clock == 15
    assert_close(cluster.weights(), expected.weights())


def test_the_learning_rate_is_as_before_after_a_modulated_step() -> None:
    cluster = Cluster(AsyncSGD(staleness_aware=True), 3)
    cluster.run([0, 1, 2, 2, 2])
    assert cluster.staleness[2] == [2, 0, 0]
    weights = cluster.weights(2)
    cluster.compute(2)
    assert_close(cluster.weights(), combine((1.0, weights), (-0.1, noisy(weights, 2, 3))))


@every_rule
def test_hardsync_is_one_group_with_the_batch_of_them_all(make: Make) -> None:
    cluster = Cluster(HardSync(), 4, make=make)
    expected = Reference(make)
    for step in range(6):
        cluster.run(rounds(4, 1, seed=step))
        expected.step(mean_of([noisy(expected.weights(), group, step) for group in range(4)]))
        assert_close(cluster.weights(), expected.weights(), 1e-10)
        assert all(same(cluster.weights(), cluster.weights(group)) for group in range(4))
    assert cluster.all_staleness == [0] * 24


@every_rule
def test_softsync_with_n_of_p_is_async_sgd_to_the_bit(make: Make) -> None:
    clusters = [Cluster(method, 4, make=make) for method in (SoftSync(n=4, modulation="none"), AsyncSGD())]
    for cluster in clusters:
        cluster.run(shuffled(4, 40))
    assert same(clusters[0].everything(), clusters[1].everything())


def test_softsync_with_n_of_p_that_weighs_each_gradient_is_staleness_aware_async_sgd() -> None:
    clusters = [Cluster(method, 4) for method in (SoftSync(n=4, modulation="each"), AsyncSGD(staleness_aware=True))]
    for cluster in clusters:
        cluster.run(shuffled(4, 40))
    assert_close(clusters[0].weights(), clusters[1].weights())


@varied
@given(order=orders(3))
def test_staleness_aware_async_sgd_divides_the_rate_by_the_staleness_or_one(order: list[int]) -> None:
    cluster = Cluster(AsyncSGD(staleness_aware=True), 3)
    weights = start()
    read, steps = [(weights, 0)] * 3, [0] * 3
    for clock, group in enumerate(order):
        cluster.compute(group)
        at, when = read[group]
        gradient = noisy(at, group, steps[group])
        weights = combine((1.0, weights), (-0.1 / max(1, clock - when), gradient))
        read[group], steps[group] = (weights, clock + 1), steps[group] + 1
    assert_close(cluster.weights(), weights)


# --- Stale-synchronous parallel --------------------------------------------------------------------------------------


@varied
@given(order=orders(4, 60), bound=st.integers(0, 3))
def test_no_group_computes_more_than_the_bound_ahead_and_all_see_what_they_must(order: list[int], bound: int) -> None:
    cluster = counting(AsyncSGD(bound=bound), 4)
    pushes = [0] * 4
    for group in order:
        if group in cluster.waiting:
            continue
        cluster.compute(group)
        pushes[group] += 1
        free = [other for other in range(4) if other not in cluster.waiting]
        assert max(pushes[other] for other in free) - min(pushes) <= bound
        for other in free:  # Ho et al. 2013: all updates of clocks up to t-s-1, and one's own
            clock, read = pushes[other], seen(cluster, other)
            assert min(read) >= clock - bound or clock <= bound
            assert read[other] == clock
        assert seen(cluster) == pushes


def test_a_bound_of_0_is_bulk_synchronous() -> None:
    cluster, weights, expected = Cluster(AsyncSGD(bound=0), 3), start(), Reference(sgd())
    for step in range(4):
        order = rounds(3, 1, seed=step)
        assert all(same(cluster.weights(group), weights) for group in range(3))
        cluster.run(order)
        for group in order:
            expected.step(noisy(weights, group, step))
        weights = expected.weights()
        assert same(cluster.weights(), weights)
        assert cluster.master.clock == 3 * (step + 1)


def test_no_bound_is_a_bound_that_is_never_reached() -> None:
    clusters = [Cluster(AsyncSGD(bound=bound), 3) for bound in (None, 1000)]
    for cluster in clusters:
        cluster.run(shuffled(3, 40))
    assert same(clusters[0].everything(), clusters[1].everything())


def test_a_group_that_comes_back_holds_no_other_up_for_what_it_missed() -> None:
    cluster = Cluster(AsyncSGD(bound=1), 3)
    cluster.idle(2)
    cluster.run([0, 1] * 10)
    assert not cluster.waiting
    cluster.resume(2)
    cluster.run([0])
    assert not cluster.waiting
    cluster.run([0])
    assert cluster.waiting == {0}  # one ahead of groups 1 and 2 by the bound, and one more
    cluster.run([1, 2])
    assert not cluster.waiting


def test_a_group_that_had_died_before_a_save_holds_no_other_up_after_it() -> None:
    cluster = Cluster(AsyncSGD(bound=1), 3)
    cluster.run([0, 1, 2])
    cluster.side.evict(1)
    cluster.run([0, 2] * 5)
    side = AsyncSGD(bound=1).server_side(cluster.master, range(3))
    side.load_state(cluster.side.state())
    assert side.state() == {"pushes": {0: 6, 1: 6, 2: 6}}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_synchronization_of_all_groups_sets_them_level(order: list[int]) -> None:
    cluster = Cluster(AsyncSGD(bound=2), 2)
    cluster.run([0, 0])
    cluster.synchronize([0, 1])
    for group in order:
        cluster.resume(group)
    cluster.run([0, 0])
    assert not cluster.waiting
    cluster.run([0])
    assert cluster.waiting == {0}


# --- Elastic averaging -----------------------------------------------------------------------------------------------


def scatter(cluster: Cluster) -> None:
    """Weights of its own for every group."""
    for group, replica in enumerate(cluster.replicas):
        for weight, value in zip(replica.weights(), start(group + 1), strict=True):
            weight.copy_(value)


@varied
@given(order=orders(3), rate=st.floats(0, 1))
def test_without_gradients_an_elastic_exchange_conserves_group_plus_centre(order: list[int], rate: float) -> None:
    cluster = Cluster(ElasticAveraging(period=1, moving_rate=rate), 3, gradient=zero)
    scatter(cluster)
    for group in order:
        before = combine((1.0, cluster.weights()), (1.0, cluster.weights(group)))
        apart = combine((1.0, cluster.weights(group)), (-1.0, cluster.weights()))
        cluster.compute(group)
        assert_close(combine((1.0, cluster.weights()), (1.0, cluster.weights(group))), before)
        # Old values on both sides: the difference shrinks by 1 - 2 rate, and not by (1 - rate) squared.
        now = combine((1.0, cluster.weights(group)), (-1.0, cluster.weights()))
        assert_close(now, combine((1 - 2 * rate, apart)))


@pytest.mark.parametrize("delta", [0.0, 0.9, 0.99])
@varied
@given(order=orders(3), period=st.integers(1, 3))
def test_elastic_averaging_with_nesterov_momentum_is_eamsgd(delta: float, order: list[int], period: int) -> None:
    # Zhang et al. 2015, algorithm 2: v <- dv - hg(x + dv), x <- x + v, and in every period-th step both ends of the
    # spring move by their old difference. For d = 0 it is algorithm 1, EASGD.
    lr, rate = 0.05, 0.3
    make = sgd(lr, momentum=delta, nesterov=delta > 0)
    cluster = Cluster(ElasticAveraging(period=period, moving_rate=rate), 3, make=make)
    centre = start()
    x = [start() for _ in range(3)]
    v = [[torch.zeros_like(weight) for weight in centre] for _ in range(3)]
    steps = [0] * 3
    for group in order:
        cluster.compute(group)
        gradient = noisy(combine((1.0, x[group]), (delta, v[group])), group, steps[group])
        steps[group] += 1
        pull = combine((rate, x[group]), (-rate, centre))
        v[group] = combine((delta, v[group]), (-lr, gradient))
        x[group] = combine((1.0, x[group]), (1.0, v[group]))
        if steps[group] % period == 0:
            x[group] = combine((1.0, x[group]), (-1.0, pull))
            centre = combine((1.0, centre), (1.0, pull))
        assert_close(cluster.weights(), centre)
        assert_close(cluster.weights(group), combine((1.0, x[group]), (delta, v[group])))
        assert_close(cluster.replicas[group].base(), x[group])


def test_the_base_of_nesterov_momentum_is_without_the_look_ahead_also_of_a_maximized_objective() -> None:
    for maximize in (False, True):
        weight = torch.nn.Parameter(torch.zeros(1))
        replica = Replica([weight], torch.optim.SGD([weight], 0.1, momentum=0.9, nesterov=True, maximize=maximize))
        weight.grad = torch.full((1,), 1.0 if maximize else -1.0)
        replica.optimizer.step()
        assert (weight.item(), replica.base()[0].item()) == pytest.approx((0.19, 0.1))


def test_weight_decay_is_that_of_the_weights_which_the_spring_has_moved() -> None:
    lr, rate, decay = 0.05, 0.3, 0.5
    cluster = Cluster(ElasticAveraging(period=1, moving_rate=rate), 1, make=sgd(lr, weight_decay=decay), gradient=zero)
    scatter(cluster)
    moved = combine((1 - rate, cluster.weights(0)), (rate, cluster.weights()))
    cluster.compute(0)
    assert_close(cluster.weights(0), combine((1 - lr * decay, moved)))


@every_rule
def test_one_group_on_a_spring_without_force_is_the_users_optimizer_to_the_bit(make: Make) -> None:
    cluster, expected = Cluster(ElasticAveraging(period=1, moving_rate=0.0), 1, make=make), Reference(make)
    for step in range(10):
        cluster.compute(0)
        expected.step(noisy(expected.weights(), 0, step))
    assert same(cluster.weights(0), expected.weights())
    assert same(cluster.weights(), start())


def test_the_moving_rate_is_nine_tenths_over_the_groups_by_default() -> None:
    clusters = [Cluster(ElasticAveraging(period=2, moving_rate=rate), 4) for rate in (None, 0.9 / 4)]
    for cluster in clusters:
        cluster.run(shuffled(4, 20))
    assert same(clusters[0].everything(), clusters[1].everything())


def slope(weights: Sequence[Tensor], group: int, step: int) -> list[Tensor]:
    """Of a quadratic of curvature 1."""
    return [weight.clone() for weight in weights]


@pytest.mark.parametrize("lr", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("groups", [1, 3])
def test_round_robin_elastic_averaging_is_stable_up_to_its_bound(lr: float, groups: int) -> None:
    # Zhang et al. 2015, section 4: 0 <= rate <= (4 - 2h) / (4 - h).
    bound = (4 - 2 * lr) / (4 - lr)

    def size_after(rate: float, rounds: int) -> float:
        cluster = Cluster(ElasticAveraging(period=1, moving_rate=rate), groups, make=sgd(lr), gradient=slope)
        scatter(cluster)
        cluster.run(list(range(groups)) * rounds)
        return max(float(weight.abs().max()) for weight in cluster.everything())

    assert size_after(0.9 * bound, 150) < 1e-3
    if groups == 1:  # beyond it, one group already diverges
        assert size_after(min(1.0, 1.1 * bound), 150) > 1e3


# --- Gossip ----------------------------------------------------------------------------------------------------------


def gossip_round(cluster: Cluster) -> None:
    """All publish or send before any group reads."""
    groups = range(len(cluster.replicas))
    for group in groups:
        cluster.begin(group)
        cluster.drive(group, until=(ReadPeer, ReadInbox))
    for group in groups:
        cluster.drive(group)


def variances(kind: Any, p: int, trials: int) -> tuple[float, float]:
    """What a synchronous round makes of the variance about the mean, and how far it moves the mean.

    Group i begins with the i-th unit vector, so that its weights after the round are its row of the mixing matrix W,
    and these expectations over all initial weights are traces.
    """
    weights = torch.zeros(p, dtype=torch.float64)
    cluster = Cluster(Gossip(kind=kind), p, [weights], gradient=zero)
    unit = torch.eye(p, dtype=torch.float64)
    spread = drift = 0.0
    for _ in range(trials):
        for group, replica in enumerate(cluster.replicas):
            replica.weights()[0].copy_(unit[group])
        gossip_round(cluster)
        mixing = torch.stack([cluster.weights(group)[0] for group in range(p)])
        assert torch.allclose(mixing.sum(1), torch.ones(p, dtype=torch.float64))
        spread += float(((mixing - mixing.mean(0)) ** 2).sum()) / (p - 1)
        drift += float(((mixing.mean(0) - 1 / p) ** 2).sum()) * p / (p - 1)
    return spread / trials, drift / trials


@pytest.mark.parametrize("p", [2, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_a_round_of_pulls_halves_the_variance_and_moves_the_mean(p: int) -> None:
    spread, drift = variances("pull", p, 600)
    assert spread == pytest.approx(1 / 2 - 1 / (4 * p), rel=0.03)
    assert drift == pytest.approx(1 / (4 * p), rel=0.08)


@pytest.mark.parametrize(
    ("p", "factor", "shift"),
    [
        (8, 0.596, 0.013),
        pytest.param(16, 0.618, 0.006, marks=pytest.mark.exhaustive),
        pytest.param(32, 0.625, 0.003, marks=pytest.mark.exhaustive),
    ],
)
def test_a_round_of_pushes_mixes_less_and_moves_the_mean_far_less(p: int, factor: float, shift: float) -> None:
    spread, drift = variances("push", p, 4000 // p)
    assert spread == pytest.approx(factor, rel=0.02)
    assert drift == pytest.approx(shift, rel=0.15)


def drawing(kind: Any, wanted: Callable[[int], bool], **others: Any) -> Gossip:
    """Gossip of a seed with which group 0, of three, first draws a peer that is wanted."""
    seeds = (seed for seed in range(100) if wanted(random.Random(f"{seed} 0 1").choice((0, 1, 2))))
    return Gossip(kind=kind, seed=next(seeds), **others)


def test_a_pull_reads_what_the_peer_published_and_leaves_the_peer_as_it_is() -> None:
    cluster = Cluster(drawing("pull", lambda peer: peer == 1), 3, gradient=zero)
    scatter(cluster)
    cluster.begin(1)
    cluster.drive(1, until=ReadPeer)  # has published, and not averaged yet
    published, first = cluster.weights(1), cluster.weights(0)
    cluster.drive(1)
    second = cluster.weights(1)
    cluster.compute(0)
    assert_close(cluster.weights(0), mean_of([first, published]))
    assert same(cluster.weights(1), second)


def test_a_pull_of_oneself_or_of_a_peer_that_has_published_nothing_changes_nothing() -> None:
    for wanted in (0, 1):
        cluster = Cluster(drawing("pull", partial(eq, wanted)), 3, gradient=zero)
        scatter(cluster)
        before = cluster.weights(0)
        cluster.compute(0)
        assert same(cluster.weights(0), before)


@pytest.mark.parametrize(("itself", "weight"), [(True, 2), (False, 1)])
def test_a_push_counts_its_own_weights_twice_if_it_keeps_them(itself: bool, weight: int) -> None:
    cluster = Cluster(drawing("push", lambda peer: (peer == 0) == itself), 3, gradient=zero)
    scatter(cluster)
    others = [cluster.weights(1), cluster.weights(2)]
    for sent in others:
        cluster.inboxes[0].add(sent)
    own = cluster.weights(0)
    cluster.compute(0)
    total = weight + 2
    assert_close(cluster.weights(0), combine((weight / total, own), *((1 / total, sent) for sent in others)))
    assert cluster.inboxes[0].count == 0


@pytest.mark.parametrize("itself", [True, False])
def test_an_empty_inbox_changes_nothing(itself: bool) -> None:
    cluster = Cluster(drawing("push", lambda peer: (peer == 0) == itself), 3, gradient=zero)
    scatter(cluster)
    before = cluster.weights(0)
    cluster.compute(0)
    assert same(cluster.weights(0), before)
    assert sum(inbox.count for inbox in cluster.inboxes) == (0 if itself else 1)


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_gossip_takes_the_look_ahead_off_before_it_sends_and_puts_it_on_again(kind: Any) -> None:
    lr, delta, p = 0.05, 0.9, 3
    cluster = Cluster(Gossip(kind=kind, period=2, seed=3), p, make=NESTEROV)
    x = [start() for _ in range(p)]
    v = [[torch.zeros_like(weight) for weight in start()] for _ in range(p)]
    for step in range(8):
        for group in range(p):
            gradient = noisy(combine((1.0, x[group]), (delta, v[group])), group, step)
            v[group] = combine((delta, v[group]), (-lr, gradient))
            x[group] = combine((1.0, x[group]), (1.0, v[group]))
        if step % 2:
            old = list(x)
            drawn = [random.Random(f"3 {group} {step + 1}").choice(range(p)) for group in range(p)]
            for group in range(p):
                if kind == "pull":
                    x[group] = mean_of([old[group], old[drawn[group]]])
                else:
                    inbox = [old[other] for other in range(p) if drawn[other] == group and other != group]
                    x[group] = (
                        mean_of([old[group], *[old[group]] * (drawn[group] == group), *inbox]) if inbox else x[group]
                    )
        gossip_round(cluster)
        for group in range(p):
            assert_close(cluster.weights(group), combine((1.0, x[group]), (delta, v[group])), 1e-10)


def test_weights_that_are_not_finite_are_not_gossiped_on() -> None:
    cluster = Cluster(drawing("pull", lambda peer: peer == 1), 3, gradient=zero)
    cluster.published[1] = [weight * torch.inf for weight in start()]
    cluster.compute(0)
    assert same(cluster.weights(0), start())
    assert all_finite([torch.ones(1 << 17, dtype=torch.float16)]), "the sum alone is too large"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="newer releases of torch have it")
def test_a_buffer_that_is_no_velocity_of_the_weights_is_not_taken_off_them() -> None:
    weight = Parameter(torch.ones(2, 3))
    optimizer = torch.optim.Muon([weight], lr=0.1)  # its momentum is Nesterov's, of what it makes orthogonal then
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert same(Replica([weight], optimizer).base(), [weight.detach()])


def test_gossip_draws_only_from_groups_that_are_alive() -> None:
    cluster = Cluster(Gossip(kind="push"), 4, gradient=zero)
    cluster.evict(3)
    cluster.run(rounds(3, 30))
    assert cluster.inboxes[3].count == 0


# --- Delay compensation ----------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("adaptive", [True, False])
def test_delay_compensation_of_strength_0_is_async_sgd_to_the_bit(make: Make, adaptive: bool) -> None:
    clusters = [
        Cluster(method, 4, make=make) for method in (DelayCompensated(strength=0.0, adaptive=adaptive), AsyncSGD())
    ]
    for cluster in clusters:
        cluster.run(shuffled(4, 40))
    assert same(clusters[0].everything(), clusters[1].everything())


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.95])
@varied
@given(order=orders(3))
def test_delay_compensation_follows_its_equation_with_one_backup_for_each_group(
    adaptive: bool, decay: float, order: list[int]
) -> None:
    strength = 2.0 if adaptive else 0.5
    cluster = Cluster(DelayCompensated(strength=strength, adaptive=adaptive, decay=decay), 3)
    weights = start()
    backup, steps = [weights] * 3, [0] * 3
    square = [[torch.zeros_like(weight) for weight in weights] for _ in range(3)]
    for group in order:
        cluster.compute(group)
        gradient = noisy(backup[group], group, steps[group])
        steps[group] += 1
        square[group] = [decay * s + (1 - decay) * g * g for s, g in zip(square[group], gradient, strict=True)]
        factors = [strength / (s + 1e-7).sqrt() if adaptive else torch.as_tensor(strength) for s in square[group]]
        weights = [
            w - 0.1 * (g + f * g * g * (w - b))
            for w, g, f, b in zip(weights, gradient, factors, backup[group], strict=True)
        ]
        backup[group] = weights
        assert_close(cluster.weights(), weights, 1e-10)


RISING = sgd(0.1, maximize=True)


def rising(weights: Sequence[Tensor], group: int, step: int) -> list[Tensor]:
    """The gradient of what is maximized, which is minus the one that is minimized."""
    return [-each for each in noisy(weights, group, step)]


@pytest.mark.parametrize(
    "method", [DelayCompensated(strength=0.5), DelayCompensated(adaptive=True), Downpour(n_push=2, n_fetch=3)], ids=str
)
def test_maximizing_is_minimizing_the_negative(method: Method) -> None:
    clusters = [
        Cluster(method, 3, make=make, gradient=gradient) for make, gradient in ((sgd(0.1), noisy), (RISING, rising))
    ]
    for cluster in clusters:
        cluster.run(shuffled(3, 40))
    assert_close(clusters[0].everything(), clusters[1].everything())


@pytest.mark.parametrize("adaptive", [True, False])
def test_delay_compensation_takes_a_complex_number_for_two_real_ones(adaptive: bool) -> None:
    numbers = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for view in (torch.view_as_complex, torch.clone):
        weight = Parameter(view(numbers[0].clone()))
        method = DelayCompensated(strength=0.5, adaptive=adaptive)
        side = method.server_side(Master({"w": weight}, torch.optim.SGD([weight], lr=0.1)), [0, 1, 2])
        for group, each in enumerate(numbers[1:]):
            side.receive(Push(group, 0, [view(each)], [{"lr": 0.1}]))
        found.append(torch.view_as_real(weight.detach()) if weight.is_complex() else weight.detach())
    assert_close(found[:1], found[1:])


def test_delay_compensation_skips_parameters_without_a_gradient() -> None:
    def partly(weights: Sequence[Tensor], group: int, step: int) -> list[Any]:
        gradient: list[Any] = noisy(weights, group, step)
        return [None, gradient[1]]

    cluster = Cluster(DelayCompensated(adaptive=True), 2, gradient=partly)
    cluster.run(shuffled(2, 10))
    assert same(cluster.weights()[:1], start()[:1])
    assert not same(cluster.weights()[1:], start()[1:])


# --- Downpour --------------------------------------------------------------------------------------------------------


@every_rule
def test_downpour_that_pushes_and_fetches_in_every_step_is_async_sgd_to_the_bit(make: Make) -> None:
    clusters = [Cluster(method, 4, make=make) for method in (Downpour(n_push=1, n_fetch=1), AsyncSGD())]
    for cluster in clusters:
        cluster.run(shuffled(4, 40))
    assert same(clusters[0].everything(), clusters[1].everything())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_with_plain_sgd_updates_and_gradients_are_one_downpour(n: int) -> None:
    clusters = [Cluster(Downpour(n_push=n, n_fetch=n, send=send), 3) for send in ("gradients", "updates")]
    for cluster in clusters:
        cluster.run(shuffled(3, 60))
    assert clusters[0].master.clock == clusters[1].master.clock > 10 / n
    assert_close(clusters[0].everything(), clusters[1].everything())


@varied
@given(order=orders(3), n_push=st.integers(1, 4), n_fetch=st.integers(1, 4))
def test_downpour_descends_alone_pushes_sums_and_is_overwritten(order: list[int], n_push: int, n_fetch: int) -> None:
    # Dean et al. 2012, algorithm 7.1.
    cluster = Cluster(Downpour(n_push=n_push, n_fetch=n_fetch), 3)
    weights, steps = start(), [0] * 3
    x = [weights] * 3
    total = [[torch.zeros_like(weight) for weight in weights] for _ in range(3)]
    for group in order:
        cluster.compute(group)
        gradient = noisy(x[group], group, steps[group])
        steps[group] += 1
        total[group] = combine((1.0, total[group]), (1.0, gradient))
        x[group] = combine((1.0, x[group]), (-0.1, gradient))
        if steps[group] % n_push == 0:
            weights = combine((1.0, weights), (-0.1, total[group]))
            total[group] = [torch.zeros_like(weight) for weight in weights]
        if steps[group] % n_fetch == 0:
            x[group] = weights
            assert same(cluster.weights(group), cluster.weights())
        assert_close(cluster.weights(), weights)
        assert_close(cluster.weights(group), x[group])


def test_gpu_asgd_adds_what_the_users_optimizer_did_and_keeps_its_velocity() -> None:
    make = sgd(0.1, momentum=0.9)
    cluster = Cluster(Downpour(n_push=2, n_fetch=2, send="updates"), 2, make=make)
    weights, workers = start(), [Reference(make), Reference(make)]
    before, steps = [start(), start()], [0, 0]
    for group in shuffled(2, 20):
        cluster.compute(group)
        worker = workers[group]
        worker.step(noisy(worker.weights(), group, steps[group]))
        steps[group] += 1
        if steps[group] % 2 == 0:
            weights = combine((1.0, weights), (1.0, worker.weights()), (-1.0, before[group]))
            before[group] = weights
            for parameter, weight in zip(worker.parameters, weights, strict=True):
                parameter.detach().copy_(weight)
            assert same(cluster.weights(group), cluster.weights())
    assert_close(cluster.weights(), weights)


@pytest.mark.parametrize("send", ["gradients", "updates"])
def test_a_warm_start_is_lock_step_until_its_clock_and_no_longer(send: Any) -> None:
    cluster = Cluster(Downpour(n_push=2, n_fetch=2, send=send, warm_start=3), 3)
    expected = Reference(sgd())
    for step in range(3):
        for group in (0, 1):
            cluster.compute(group)
        assert cluster.waiting == {0, 1}
        assert cluster.master.clock == step
        cluster.compute(2)
        assert not cluster.waiting
        expected.step(mean_of([noisy(expected.weights(), group, step) for group in range(3)]))
        assert_close(cluster.weights(), expected.weights())
    assert cluster.master.clock == 3
    assert cluster.all_staleness == [0] * 9
    cluster.run([0, 0, 0, 1, 1, 0, 0, 0])
    assert not cluster.waiting
    assert cluster.master.clock > 3
    assert max(cluster.all_staleness) > 0


# --- Local SGD -------------------------------------------------------------------------------------------------------


def test_local_sgd_that_averages_every_step_is_hardsync() -> None:
    clusters = [Cluster(method, 4) for method in (LocalSGD(period=1), HardSync())]
    for cluster in clusters:
        cluster.run(rounds(4, 8))
    assert_close(clusters[0].everything(), clusters[1].everything())


@every_rule
@pytest.mark.parametrize("period", [1, 3])
def test_averages_conserve_the_mean_and_leave_the_optimizers_alone(make: Make, period: int) -> None:
    cluster = Cluster(LocalSGD(period=period), 3, make=make)
    alone = [Reference(make) for _ in range(3)]
    for step in range(6):
        cluster.run(rounds(3, 1, seed=step))
        for group, worker in enumerate(alone):
            worker.step(noisy(worker.weights(), group, step))
        if (step + 1) % period == 0:
            mean = mean_of([worker.weights() for worker in alone])
            for worker in alone:
                for parameter, value in zip(worker.parameters, mean, strict=True):
                    parameter.detach().copy_(value)
            assert all(same(cluster.weights(group), cluster.weights()) for group in range(3))
            assert_close(cluster.weights(), mean, 1e-10)
        assert_close(cluster.mean(), mean_of([worker.weights() for worker in alone]), 1e-10)


def test_post_local_sgd_averages_every_step_of_its_warm_up() -> None:
    cluster = Cluster(LocalSGD(period=3, warmup_steps=4), 2)
    clocks = []
    for _ in range(11):
        cluster.run([0, 1])
        clocks.append(cluster.master.clock)
    assert clocks == [1, 2, 3, 4, 4, 4, 5, 5, 5, 6, 6]


# --- DiLoCo ----------------------------------------------------------------------------------------------------------


def test_diloco_of_one_plain_step_is_hardsync() -> None:
    diloco = Cluster(DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0), 4)
    hard = Cluster(HardSync(), 4)
    for cluster in (diloco, hard):
        cluster.run(rounds(4, 8))
    assert_close(diloco.everything(), hard.everything())


@every_rule
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_diloco_is_torchs_nesterov_on_the_mean_change_to_the_bit(make: Make, beta: float) -> None:
    cluster = Cluster(DiLoCo(period=2, outer_lr=0.7, outer_momentum=beta), 4, make=make)
    outer = Reference(sgd(0.7, momentum=beta, nesterov=beta > 0))
    workers = [Reference(make) for _ in range(4)]  # four groups: a mean by a power of two is exact
    for block in range(4):
        cluster.run([0, 1, 2, 3] * 2)
        at, total = outer.weights(), [torch.zeros_like(weight) for weight in start()]
        for group, worker in enumerate(workers):
            for parameter, weight in zip(worker.parameters, at, strict=True):
                parameter.detach().copy_(weight)
            for step in (2 * block, 2 * block + 1):
                worker.step(noisy(worker.weights(), group, step))
            change = [a - x for a, x in zip(at, worker.weights(), strict=True)]
            total = [sum_ + delta for sum_, delta in zip(total, change, strict=True)]
        outer.step([sum_ / 4 for sum_ in total])
        assert same(cluster.weights(), outer.weights())
        assert all(same(cluster.weights(group), outer.weights()) for group in range(4))
    assert cluster.master.clock == 4


# --- Streaming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha"),
    [(1, 2, 0.0), (2, 0, 0.0), (2, 1, 0.5), (3, 1, 0.25), (1, 2, "keep_steps"), (2, 1, "keep_steps")],
)
def test_streaming_diloco_is_the_papers_algorithm(fragments: int, delay: int, alpha: Any) -> None:
    """Algorithm 2 of arXiv:2501.18512, with SGD as the inner optimizer and Nesterov's as the outer one."""
    period, groups, steps, lr, outer_lr, beta = 6, 2, 30, 0.1, 0.7, 0.9
    mixes = {"keep_steps": True} if alpha == "keep_steps" else {"alpha": alpha}
    method = DiLoCo(period=period, fragments=fragments, delay=delay, outer_lr=outer_lr, outer_momentum=beta, **mixes)
    cluster = Cluster(method, groups, make=sgd(lr))
    cluster.run(list(range(groups)) * steps)

    flat = torch.cat([weight.flatten() for weight in start()])
    outer, momentum = flat.clone(), torch.zeros_like(flat)
    own = [flat.clone() for _ in range(groups)]
    anchor = flat.clone()
    bounds = [-(-number * len(flat) // fragments) for number in range(fragments + 1)]
    due: dict[int, tuple[slice, Tensor, list[Tensor]]] = {}
    exchanges = itertools.count()
    for step in range(1, steps + 1):
        for group, x in enumerate(own):
            weights = [part.view_as(like) for part, like in zip(x.split([6, 4]), start(), strict=True)]
            x -= lr * torch.cat([each.flatten() for each in noisy(weights, group, step - 1)])
        if step % (period // fragments) == 0:
            number = next(exchanges) % fragments
            part = slice(bounds[number], bounds[number + 1])
            change = torch.stack([anchor[part] - x[part] for x in own]).mean(0)
            momentum[part] = beta * momentum[part] + change
            outer[part] -= outer_lr * (change + beta * momentum[part])
            due[step + delay] = part, outer[part].clone(), [x[part].clone() for x in own]
        if step in due:
            part, theirs, captured = due.pop(step)
            anchor[part] = theirs
            for x, then in zip(own, captured, strict=True):
                keeps = alpha == "keep_steps"
                x[part] = theirs + (x[part] - then) if keeps else alpha * x[part] + (1 - alpha) * theirs
    for group, x in enumerate(own):
        torch.testing.assert_close(torch.cat([each.flatten() for each in cluster.weights(group)]), x)
    torch.testing.assert_close(torch.cat([each.flatten() for each in cluster.weights()]), outer)


def test_groups_that_are_at_different_fragments_after_an_epochs_end_exchange_the_same_fragment_again() -> None:
    method = LocalSGD(period=4, fragments=2)
    cluster = Cluster(method, 2)
    cluster.run([0, 1, 0, 1])  # both: the first
    cluster.idle(1)
    cluster.run([0, 0])  # one alone: the second
    cluster.resume(1)
    met = []
    for _ in range(4):
        cluster.run([0, 1, 0, 1])
        parts = [[replica.part(number, 2) for replica in cluster.replicas] for number in range(2)]
        met.append([all(map(torch.equal, *both)) for both in parts])
    assert met[1:] in ([[True, False], [False, True], [True, False]], [[False, True], [True, False], [False, True]])


# --- Asynchronous DiLoCo ---------------------------------------------------------------------------------------------


def changes_of(cluster: Cluster) -> list[list[Tensor]]:
    """What every push of a cluster brings, in the order of arrival, from now on."""
    pushed: list[list[Tensor]] = []
    receive = cluster.side.receive

    def recording(push: Push) -> list[Reply]:
        pushed.append([tensor.clone() for tensor in push.tensors if tensor is not None])
        return receive(push)

    cluster.side.receive = recording  # type: ignore[method-assign]
    return pushed


def test_a_buffer_of_one_arrival_is_nesterovs_momentum() -> None:
    cluster = Cluster(AsyncDiLoCo(period=2, buffer=1, dynamic_steps=False), 3)
    pushed = changes_of(cluster)
    cluster.run(shuffled(3, 30))
    expected = Reference(sgd(0.7, momentum=0.9, nesterov=True))
    for change in pushed:
        expected.step(change)
    assert len(pushed) > 10
    assert_close(cluster.weights(), expected.weights())


def test_a_block_of_arrivals_is_one_nesterov_step_on_their_mean() -> None:
    # Liu et al. 2024: without activation, momentum waits for the full buffer.
    cluster = Cluster(AsyncDiLoCo(period=1, dynamic_steps=False), 4)
    pushed = changes_of(cluster)
    expected = Reference(sgd(0.7, momentum=0.9, nesterov=True))
    for block in range(5):
        cluster.run(shuffled(4, 4, seed=block))
        expected.step(mean_of(pushed[-4:]))
        assert_close(cluster.weights(), expected.weights())


@varied
@given(order=orders(3), buffer=st.integers(1, 4), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_delayed_nesterov_follows_its_equation(order: list[int], buffer: int, share: float) -> None:
    c, lr, beta = share / buffer, 0.7, 0.9
    cluster = Cluster(AsyncDiLoCo(period=1, buffer=buffer, activation=c, dynamic_steps=False), 3)
    pushed = changes_of(cluster)
    cluster.run(order)
    weights = start()
    momentum = [torch.zeros_like(weight) for weight in weights]
    for arrival, change in enumerate(pushed, 1):
        factor = c
        if arrival % buffer == 0:
            momentum = combine((beta, momentum), *((1 / buffer, delta) for delta in pushed[arrival - buffer : arrival]))
            factor = 1 - c * buffer + c
        weights = combine((1.0, weights), (-lr * factor * beta, momentum), (-lr / buffer, change))
    assert_close(cluster.weights(), weights)


def local_steps(cluster: Cluster, group: int) -> int:
    """Steps from here to the group's next exchange."""
    done = len(cluster.staleness[group])
    before = cluster.steps[group]
    while len(cluster.staleness[group]) == done:
        cluster.compute(group)
    return cluster.steps[group] - before


def test_slow_groups_make_fewer_steps_rounded_down() -> None:
    cluster = Cluster(AsyncDiLoCo(period=20, min_steps=2), 4, [torch.zeros(1)])
    cluster.step_time = [0.5, 0.75, 1.7, 40.0]
    assert [local_steps(cluster, group) for group in range(4)] == [20] * 4  # no speed is known yet
    assert [local_steps(cluster, group) for group in range(4)] == [20, 13, 5, 2]  # 13.3, 5.9, 0.25


def test_once_the_fastest_is_gone_the_next_one_sets_the_pace() -> None:
    cluster = Cluster(AsyncDiLoCo(period=12), 3, [torch.zeros(1)])
    cluster.step_time = [0.1, 1.0, 2.0]
    for group in (0, 1, 2):
        local_steps(cluster, group)
    assert local_steps(cluster, 1) == 1
    cluster.evict(0)
    local_steps(cluster, 1)
    assert local_steps(cluster, 1) == 12
    local_steps(cluster, 2)
    assert local_steps(cluster, 2) == 6


PACED = pytest.mark.parametrize(
    "method",
    [
        LocalSGD(period=8, dynamic_steps=True),
        DiLoCo(period=8, dynamic_steps=True),
        DiLoCo(period=16, fragments=2, delay=2, keep_steps=True, dynamic_steps=True),
    ],
    ids=["local_sgd", "diloco", "diloco in fragments, delayed, steps kept"],
)


def steps_at_barriers(cluster: Cluster, barriers: int) -> list[list[int]]:
    """Steps of each group from each of so many barriers to the next; all go on at their own pace."""
    found, before, clock, now = list[list[int]](), cluster.steps[:], cluster.master.clock, [0.0] * len(cluster.steps)
    while len(found) < barriers:
        group = min(cluster.alive - cluster.waiting, key=lambda each: (now[each], each))
        now[group] += cluster.step_time[group]
        cluster.compute(group)
        if cluster.master.clock > clock:
            found.append([after - number for after, number in zip(cluster.steps, before, strict=True)])
            before, clock = cluster.steps[:], cluster.master.clock
    return found


@PACED
def test_groups_that_wait_for_each_other_come_at_one_time_if_slow_ones_make_fewer_steps(method: Method) -> None:
    cluster = Cluster(method, 4, [torch.zeros(1), torch.zeros(1)])
    cluster.step_time = [0.5, 0.52, 1.0, 4.0]
    # A group that does not wait has made a step or two more, or less, when the last push comes.
    first, *_, last = steps_at_barriers(cluster, 8)
    slack = 0 if not method.fragments > 1 else 2
    assert all(abs(found - 8) <= slack for found in first), "nothing is known of their pace yet"
    assert all(abs(found - wanted) <= slack for found, wanted in zip(last, [8, 8, 4, 1], strict=True))


@PACED
def test_groups_of_one_pace_train_bit_for_bit_as_without_dynamic_steps(method: Method) -> None:
    clusters = [Cluster(each, 3) for each in (method, msgspec.structs.replace(method, dynamic_steps=False))]
    for cluster in clusters:
        steps_at_barriers(cluster, 5)
    for paced, plain in zip(*(cluster.master.weights() for cluster in clusters), strict=True):
        assert torch.equal(paced, plain)


def test_a_step_that_took_long_once_changes_no_groups_steps_for_long() -> None:
    cluster = Cluster(DiLoCo(period=8, dynamic_steps=True), 2, [torch.zeros(1)])
    steps_at_barriers(cluster, 20)
    cluster.step_time = [1.0, 3.0]
    steps_at_barriers(cluster, 1)
    cluster.step_time = [1.0, 1.0]
    assert steps_at_barriers(cluster, 1) == [[8, 7]]  # a mean over sixteen exchanges: 1.125


def test_the_pace_of_groups_that_wait_for_each_other_is_remembered_and_forgotten_with_them() -> None:
    method = DiLoCo(period=8, dynamic_steps=True)
    cluster = Cluster(method, 3, [torch.zeros(1)])
    cluster.step_time = [0.25, 0.5, 1.0]
    steps_at_barriers(cluster, 3)
    resumed = Cluster(method, 3, state=cluster.state())
    resumed.step_time = [0.25, 0.5, 1.0]
    steps_at_barriers(resumed, 1)
    assert steps_at_barriers(resumed, 1) == [[8, 4, 2]]
    resumed.evict(0)
    steps_at_barriers(resumed, 1)
    assert steps_at_barriers(resumed, 1) == [[0, 8, 4]]


def test_a_mean_has_as_much_of_a_group_as_it_has_learned() -> None:
    """Groups move by one a step: four steps and one are a mean of two and a half."""
    method = DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0, dynamic_steps=True)
    cluster = Cluster(method, 2, [torch.zeros(1)], make=sgd(lr=1.0), gradient=lambda weights, *_: [-torch.ones(1)])
    cluster.step_time = [1.0, 4.0]
    steps_at_barriers(cluster, 2)
    before = float(cluster.master.weights()[0])
    assert steps_at_barriers(cluster, 1) == [[4, 1]]
    assert float(cluster.master.weights()[0]) - before == 2.5


def test_speeds_are_remembered() -> None:
    cluster = Cluster(AsyncDiLoCo(period=12), 2, [torch.zeros(1)])
    cluster.step_time = [0.5, 1.0]
    for group in (0, 1):
        local_steps(cluster, group)
    resumed = Cluster(AsyncDiLoCo(period=12), 2, state=cluster.state())
    resumed.step_time = [0.5, 2.0]
    assert local_steps(resumed, 1) == 6  # as the server said before
    assert local_steps(resumed, 1) == 3  # group 0 has not spoken yet, but was known


def test_all_groups_make_as_many_steps_unless_they_are_dynamic() -> None:
    cluster = Cluster(AsyncDiLoCo(period=4, dynamic_steps=False), 2, [torch.zeros(1)])
    cluster.step_time = [1.0, 9.0]
    assert [local_steps(cluster, group) for group in (0, 1, 0, 1)] == [4] * 4


@varied
@given(order=orders(3), fragments=st.integers(2, 3), buffer=st.integers(1, 3), share=st.sampled_from([0.0, 1.0]))
def test_each_fragment_has_delayed_nesterov_of_its_own_and_each_group_its_own_turn(
    order: list[int], fragments: int, buffer: int, share: float
) -> None:
    c, lr, outer_lr, beta, stride = share / buffer, 0.1, 0.7, 0.9, 2
    method = AsyncDiLoCo(
        period=stride * fragments, fragments=fragments, buffer=buffer, activation=c, dynamic_steps=False
    )
    cluster = Cluster(method, 3, make=sgd(lr))
    order = order * 4
    cluster.run(order)

    outer = torch.cat([weight.flatten() for weight in start()])
    momentum, block = torch.zeros_like(outer), torch.zeros_like(outer)
    own, read = [outer.clone() for _ in range(3)], [outer.clone() for _ in range(3)]
    steps, arrivals = [0] * 3, [0] * fragments
    bounds = [-(-number * len(outer) // fragments) for number in range(fragments + 1)]
    for group in order:
        x = own[group]
        weights = [part.view_as(like) for part, like in zip(x.split([6, 4]), start(), strict=True)]
        x -= lr * torch.cat([each.flatten() for each in noisy(weights, group, steps[group])])
        steps[group] += 1
        if steps[group] % stride:
            continue
        number = (steps[group] // stride - 1) % fragments
        part = slice(bounds[number], bounds[number + 1])
        change = read[group][part] - x[part]
        block[part] += change
        arrivals[number] += 1
        factor = c
        if arrivals[number] % buffer == 0:
            momentum[part] = beta * momentum[part] + block[part] / buffer
            block[part] = 0
            factor = 1 - c * buffer + c
        outer[part] -= outer_lr * (factor * beta * momentum[part] + change / buffer)
        read[group][part] = x[part] = outer[part]
    for group, x in enumerate(own):
        torch.testing.assert_close(torch.cat([each.flatten() for each in cluster.weights(group)]), x)
    torch.testing.assert_close(torch.cat([each.flatten() for each in cluster.weights()]), outer)


def test_slow_groups_make_fewer_steps_from_fragment_to_fragment_and_one_at_least() -> None:
    cluster = Cluster(AsyncDiLoCo(period=24, fragments=4), 3, [torch.zeros(4)])
    cluster.step_time = [0.5, 1.0, 40.0]
    assert [local_steps(cluster, group) for group in range(3)] == [6] * 3  # no speed is known yet
    for group, steps in enumerate((6, 3, 1)):
        assert [local_steps(cluster, group) for _ in range(4)] == [steps] * 4


def test_after_a_fragment_that_was_refused_a_group_begins_again_from_all_of_the_weights() -> None:
    core = GroupCore(AsyncDiLoCo(period=2, fragments=2))
    weight = Parameter(torch.ones(4))
    replica = Replica([weight], sgd(0.1)([weight]))
    core.attach(replica)
    ask = core.gradient(0, Gradient([torch.full((4,), torch.inf)], ()))
    assert isinstance(ask, ServerRequest)
    assert isinstance(ask.need, Exchange)
    assert ask.need.fragment == 0
    again = core.answer(0, Pulled([torch.zeros(2)], 3, refused=True, fragment=0))
    assert isinstance(again, ServerRequest)
    assert isinstance(again.need, Fetch)
    assert isinstance(core.answer(0, Pulled([torch.full((4,), 2.0)], 5)), NextGradient)
    assert weight.tolist() == [2.0] * 4
    ask = core.gradient(0, Gradient([torch.ones(4)], ()))
    assert isinstance(ask, ServerRequest)
    assert isinstance(ask.need, Exchange)
    assert (ask.need.fragment, ask.need.read_at) == (0, 5)


def test_downpour_begins_again_from_the_servers_weights_after_a_push_that_was_refused() -> None:
    core = GroupCore(Downpour(n_push=1, n_fetch=100))
    weight = Parameter(torch.ones(4))
    core.attach(Replica([weight], sgd(0.1)([weight])))
    assert isinstance(core.gradient(0, Gradient([torch.full((4,), torch.nan)], ())), ServerRequest)
    ask = core.answer(0, Pulled([], 0, refused=True))
    assert isinstance(ask, ServerRequest)
    assert isinstance(ask.need, Fetch)
    assert isinstance(core.answer(0, Pulled([torch.full((4,), 2.0)], 5)), NextGradient)
    assert weight.tolist() == [2.0] * 4


def test_downpour_pushes_nothing_of_before_weights_were_replaced() -> None:
    core = GroupCore(Downpour(n_push=3, n_fetch=3))
    weight = Parameter(torch.ones(4))
    replica = Replica([weight], sgd(0.1)([weight]))
    core.attach(replica)
    core.gradient(0, Gradient([torch.ones(4)], ()))
    replica.memory.clear()
    for _ in range(3):
        ask = core.gradient(0, Gradient([torch.ones(4)], ()))
    assert isinstance(ask, ServerRequest)
    assert isinstance(ask.need, Exchange)
    assert [each.tolist() for each in ask.need.tensors if each is not None] == [[3.0] * 4]


# --- Who waits for whom ----------------------------------------------------------------------------------------------

MANY: dict[str, Method] = {
    **NONE_WAITS,
    "stale_synchronous": AsyncSGD(bound=1),
    "bulk_synchronous": AsyncSGD(bound=0),
    "hardsync": HardSync(),
    "downpour 2 3": Downpour(n_push=2, n_fetch=3),
    "warm start": Downpour(n_push=2, n_fetch=2, warm_start=3),
    "gpu_asgd warm start": Downpour(n_push=2, n_fetch=2, send="updates", warm_start=3),
    "elastic_averaging 1": ElasticAveraging(period=1),
    "pull_gossip": Gossip(kind="pull"),
    "push_gossip": Gossip(kind="push", period=2),
    "local_sgd": LocalSGD(period=2, warmup_steps=1),
    "local_sgd in fragments, delayed": LocalSGD(period=4, fragments=2, delay=1),
    "diloco": DiLoCo(period=2),
    "diloco in fragments": DiLoCo(period=2, fragments=2),
    "diloco in fragments, delayed": DiLoCo(period=4, fragments=2, delay=1, alpha=0.5),
    "diloco in fragments, steps kept": DiLoCo(period=4, fragments=2, delay=1, keep_steps=True),
    "async_diloco": AsyncDiLoCo(period=2, buffer=3, activation=0.1),
    "async_diloco in fragments": AsyncDiLoCo(period=4, fragments=2),
    "decoupled_diloco": DecoupledDiLoCo(period=2, fragments=2, delay=0, grace=0),
    "decoupled_diloco 1": DecoupledDiLoCo(period=1, fragments=1, quorum=3, delay=0, grace=0),
    "delay_compensated adaptive": DelayCompensated(strength=2.0, adaptive=True),
}
many = pytest.mark.parametrize("method", MANY.values(), ids=MANY.keys())


@many
@varied
@given(
    st.lists(
        st.tuples(st.sampled_from([*["push"] * 6, "idle", "resume", "evict", "join"]), st.integers(0, 5)), max_size=40
    )
)
def test_every_push_is_answered_once_and_no_group_waits_for_idle_or_evicted_ones(
    method: Method, events: list[tuple[str, int]]
) -> None:
    # The cluster itself fails if a group is answered twice, or unasked, or after its end.
    cluster = Cluster(method, 4, [torch.zeros(2)])
    idle: set[int] = set()
    for event, group in events:
        busy = group in cluster.alive - cluster.waiting
        if event == "push" and busy and group not in idle:
            cluster.compute(group)
        elif event == "idle" and busy and group not in idle:
            idle.add(group)
            cluster.idle(group)
        elif event == "resume" and group in idle:
            idle.discard(group)
            cluster.resume(group)
        elif event == "evict" and group in cluster.alive:
            idle.discard(group)
            cluster.evict(group)
        elif event == "join" and len(cluster.replicas) < 6:
            cluster.join()
        # A group that works and does not wait must push before those that wait are answered.
        assert not cluster.waiting or cluster.alive - idle - cluster.waiting
    for group in sorted(cluster.alive - idle - cluster.waiting):
        cluster.idle(group)
    for group in sorted(cluster.alive - idle):
        if group not in cluster.side.idle_groups:
            cluster.idle(group)
    assert not cluster.waiting


@pytest.mark.parametrize("method", [HardSync(), LocalSGD(period=1), DiLoCo(period=1)])
def test_a_barrier_goes_on_without_idle_groups_and_waits_for_them_again(method: Method) -> None:
    cluster = Cluster(method, 3)
    cluster.run([0, 1])
    assert cluster.waiting == {0, 1}
    cluster.idle(2)
    assert not cluster.waiting
    assert cluster.master.clock == 1
    cluster.run([0, 1])
    assert cluster.master.clock == 2
    cluster.resume(2)
    cluster.run([0, 1])
    assert cluster.waiting == {0, 1}
    cluster.compute(2)
    assert not cluster.waiting
    assert cluster.master.clock == 3


def test_what_a_group_pushed_before_its_end_still_counts_at_the_barrier() -> None:
    cluster = Cluster(HardSync(), 3)
    cluster.run([0, 1])
    cluster.evict(0)
    cluster.compute(2)
    expected = Reference(sgd())
    expected.step(mean_of([noisy(start(), group, 0) for group in range(3)]))
    assert_close(cluster.weights(), expected.weights())
    assert cluster.staleness.keys() == {1, 2}


def test_softsync_applies_a_part_of_a_sum_when_all_groups_are_idle() -> None:
    cluster = Cluster(SoftSync(n=1), 4)
    cluster.run([0, 1])
    for group in (0, 1, 2):
        cluster.idle(group)
    assert cluster.master.clock == 0
    cluster.idle(3)
    expected = Reference(sgd())
    expected.step(mean_of([noisy(start(), group, 0) for group in (0, 1)]))
    assert cluster.master.clock == 1
    assert_close(cluster.weights(), expected.weights())


def test_softsync_waits_for_fewer_gradients_once_groups_are_gone() -> None:
    cluster = Cluster(SoftSync(n=1), 3)
    cluster.run([0, 1])
    assert cluster.master.clock == 0
    cluster.evict(2)
    assert cluster.master.clock == 1


@pytest.mark.parametrize(
    "method", [AsyncSGD(), AsyncSGD(bound=1), SoftSync(n=4, modulation="none"), DelayCompensated(strength=0)]
)
def test_no_gradient_is_lost_or_applied_twice(method: Method) -> None:
    cluster = counting(method, 4)
    cluster.run(shuffled(4, 50))
    assert seen(cluster) == cluster.steps


@pytest.mark.parametrize(
    "method", [AsyncSGD(), AsyncSGD(bound=1), SoftSync(n=5, modulation="none"), DelayCompensated(strength=0)]
)
def test_no_gradient_is_lost_or_applied_twice_when_one_group_joins_and_another_ends(method: Method) -> None:
    cluster = Cluster(method, 4, [torch.zeros(5, dtype=torch.float64)], sgd(1.0), ballot)
    cluster.run(shuffled(4, 20))
    assert cluster.join() == 4
    cluster.run(shuffled(5, 20))
    cluster.evict(next(group for group in range(4) if group not in cluster.waiting))
    cluster.run(group for group in shuffled(5, 20) if group in cluster.alive)
    assert seen(cluster) == cluster.steps
    assert cluster.steps[4] > 0


@pytest.mark.parametrize("method", [HardSync(), LocalSGD(period=1), DiLoCo(period=1)])
def test_a_barrier_waits_for_a_group_that_has_joined(method: Method) -> None:
    cluster = Cluster(method, 2)
    cluster.compute(0)
    cluster.join()
    cluster.compute(1)
    assert cluster.waiting == {0, 1}
    cluster.compute(2)
    assert not cluster.waiting
    assert cluster.master.clock == 1


def test_the_centre_loses_what_groups_gain_when_one_has_joined_and_no_group_draws_it_further() -> None:
    cluster = Cluster(ElasticAveraging(period=1), 3, gradient=zero)
    assert cluster.join() == 3
    for group, replica in enumerate(cluster.replicas):
        for weight in replica.weights():
            weight.data.add_(group)
    for group in range(4):
        before = [mine + theirs for mine, theirs in zip(cluster.weights(group), cluster.weights(), strict=True)]
        apart = [mine - theirs for mine, theirs in zip(cluster.weights(group), cluster.weights(), strict=True)]
        centre = cluster.weights()
        cluster.compute(group)
        after = [mine + theirs for mine, theirs in zip(cluster.weights(group), cluster.weights(), strict=True)]
        assert_close(after, before)
        moved = [now - then for now, then in zip(cluster.weights(), centre, strict=True)]
        assert_close(moved, [0.9 / 4 * each for each in apart])


def test_gossip_refuses_pushes() -> None:
    cluster = Cluster(Gossip(), 2)
    with pytest.raises(ProtocolError, match="gossip"):
        cluster.side.receive(Push(0, 0, start()))


# --- State -----------------------------------------------------------------------------------------------------------


def synchronized(cluster: Cluster, order: Sequence[int]) -> None:
    """All groups become idle. With delay compensation they read the server's weights, too, as a barrier does."""
    cluster.synchronize(order)
    if isinstance(cluster.method, DelayCompensated):
        for group in order:
            cluster.side.fetched(group)
            for weight, value in zip(cluster.replicas[group].weights(), cluster.master.weights(), strict=True):
                weight.copy_(value)
            cluster.replicas[group].clock = cluster.master.clock


@pytest.mark.parametrize(("name", "rule"), covering(itertools.product(MANY, ("nesterov", "adamw"))))
@settings(varied, max_examples=4)
@given(before=orders(3, 25), after=orders(3, 25), order=st.permutations(range(3)))
def test_a_run_goes_on_to_the_bit_from_what_was_saved_in_its_midst(
    name: str, rule: str, before: list[int], after: list[int], order: list[int]
) -> None:
    method, make = MANY[name], RULES[rule]
    whole = Cluster(method, 3, make=make)
    whole.step_time = [1.0, 1.5, 2.0]
    whole.run(before)
    synchronized(whole, order)
    parted = Cluster(method, 3, make=make, state=whole.state())
    parted.step_time = whole.step_time
    for cluster in (whole, parted):
        for group in order:
            cluster.resume(group)
        cluster.run(after)
    assert parted.waiting == whole.waiting
    assert parted.master.clock == whole.master.clock
    assert same(parted.everything(), whole.everything())


REMEMBERS_READS = ("delay_compensated",)  # what a group has read is read again when a run goes on


@pytest.mark.parametrize("name", [name for name in NONE_WAITS if name not in REMEMBERS_READS])
@settings(varied, max_examples=4)
@given(before=orders(4, 25), after=st.lists(st.integers(0, 3), max_size=15))
@example(before=[0, 1, 2, 3, 1, 0, 3], after=[2, 1])  # half a sum, and stale
def test_where_none_waits_any_moment_will_do_to_save_at(name: str, before: list[int], after: list[int]) -> None:
    whole = Cluster(NONE_WAITS[name], 4, make=NESTEROV)
    whole.run(before)
    parted = Cluster(NONE_WAITS[name], 4, make=NESTEROV, state=whole.state())
    for cluster in (whole, parted):
        cluster.run(after)
        cluster.synchronize(range(4))
    assert parted.master.clock == whole.master.clock
    assert same(parted.everything(), whole.everything())


def test_after_a_read_without_a_push_there_is_no_delay_to_compensate() -> None:
    cluster = Cluster(DelayCompensated(strength=5.0), 2)
    cluster.run([0, 0, 1, 0])
    synchronized(cluster, [0, 1])
    weights = cluster.weights()
    cluster.compute(1)
    assert_close(cluster.weights(), combine((1.0, weights), (-0.1, noisy(weights, 1, 1))))


@many
@settings(varied, max_examples=4)
@given(order=orders(3, 30))
def test_a_group_side_can_be_made_again_before_any_gradient(method: Method, order: list[int]) -> None:
    steady, fickle = (Cluster(method, 3, make=NESTEROV) for _ in range(2))
    for group in order:
        for cluster in (steady, fickle):
            cluster.run([group])
        for other in {0, 1, 2} - fickle.waiting:
            fickle.remake(other)
    assert same(steady.everything(), fickle.everything())


@many
def test_what_is_remembered_is_plain_data_and_tensors(method: Method) -> None:
    cluster = Cluster(method, 3)
    cluster.run(shuffled(3, 12))
    tree = cluster.state()
    assert tree["side"].keys() == cluster.side.state().keys()
    assert [replica["memory"].keys() for replica in tree["replicas"]] == [r.memory.keys() for r in cluster.replicas]


def test_a_state_of_a_barrier_keeps_what_was_pushed_before_it_was_taken() -> None:
    cluster = Cluster(HardSync(), 2)
    cluster.compute(0)
    resumed = Cluster(HardSync(), 2, state=cluster.state())
    resumed.run([0, 1])
    expected = Reference(sgd())
    expected.step(mean_of([noisy(start(), 0, 0), noisy(start(), 0, 1), noisy(start(), 1, 0)]))
    assert_close(resumed.weights(), expected.weights())


# --- Settings that cannot be -----------------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("async_sgd", {"bound": -1}, r"bound=-1.*0"),
    ("softsync", {"n": 0}, r"n=0.*1 or more"),
    ("softsync", {"n": -2}, r"n=-2.*1 or more"),
    ("downpour", {"n_push": 0}, r"n_push=0.*at least 1"),
    ("downpour", {"n_fetch": 0}, r"n_fetch=0.*at least 1"),
    ("downpour", {"warm_start": -1}, r"warm_start=-1.*0"),
    ("downpour", {"send": "updates", "n_push": 2, "n_fetch": 3}, r"n_push=2, n_fetch=3.*n_push=n_fetch"),
    ("elastic_averaging", {"moving_rate": 1.5}, r"moving_rate=1.5.*0 to 1"),
    ("elastic_averaging", {"moving_rate": -0.1}, r"moving_rate=-0.1.*0 to 1"),
    ("elastic_averaging", {"moving_rate": float("nan")}, r"moving_rate=nan.*0 to 1"),
    ("elastic_averaging", {"period": 0}, r"period=0.*1 or more"),
    ("gossip", {"period": 0}, r"period=0.*1 or more"),
    ("local_sgd", {"period": 0}, r"period=0.*1 or more"),
    ("local_sgd", {"warmup_steps": -1}, r"warmup_steps=-1.*0"),
    ("local_sgd", {"warmup_steps": 1, "delay": 1}, r"warmup_steps=1 with fragments=, delay=.*leave either out"),
    ("local_sgd", {"warmup_steps": 1, "dynamic_steps": True}, r"warmup_steps=1 with.* dynamic_steps=.*leave"),
    ("local_sgd", {"fragments": 0}, r"fragments=0.*1 or more"),
    ("local_sgd", {"period": 6, "fragments": 4}, r"fragments=4 with period=6.*divides the period"),
    ("diloco", {"period": 6, "fragments": 3, "delay": 2}, r"delay=2.*0 to 1 steps"),
    ("diloco", {"delay": -1}, r"delay=-1"),
    ("diloco", {"alpha": 1}, r"alpha=1.*0 <= alpha < 1"),
    ("diloco", {"keep_steps": True}, r"keep_steps=True with delay=0.*delay of 1 or more"),
    ("local_sgd", {"keep_steps": True, "delay": 1, "alpha": 0.5}, r"keep_steps=True with.*alpha=0.5.*no alpha="),
    ("diloco", {"period": 0}, r"period=0.*1 or more"),
    ("diloco", {"outer_lr": 0}, r"outer_lr=0.*above 0"),
    ("diloco", {"outer_lr": float("inf")}, r"outer_lr=inf"),
    ("diloco", {"outer_momentum": 1}, r"outer_momentum=1.*< 1"),
    ("diloco", {"outer_momentum": -0.5}, r"outer_momentum=-0.5.*0 <="),
    ("decoupled_diloco", {"period": 0}, r"period=0.*1 or more"),
    ("decoupled_diloco", {"outer_lr": 0}, r"outer_lr=0.*above 0"),
    ("decoupled_diloco", {"fragments": 0}, r"fragments=0.*1 or more"),
    ("decoupled_diloco", {"fragments": 5}, r"fragments=5.*period=48.*divides the period"),
    ("decoupled_diloco", {"quorum": 0}, r"quorum=0.*1 or more, or None"),
    ("decoupled_diloco", {"grace": 1}, r"grace=1.*0 <= grace < 1"),
    ("decoupled_diloco", {"delay": 13}, r"delay=13.*0 to period/fragments=12"),
    ("async_diloco", {"period": 0}, r"period=0.*1 or more"),
    ("async_diloco", {"period": 6, "fragments": 4}, r"fragments=4 with period=6.*divides the period"),
    ("async_diloco", {"outer_lr": 0}, r"outer_lr=0.*above 0"),
    ("async_diloco", {"outer_momentum": 1}, r"outer_momentum=1.*< 1"),
    ("async_diloco", {"buffer": 0}, r"buffer=0.*1 or more"),
    ("async_diloco", {"buffer": 4, "activation": 0.3}, r"activation=0.3.*0 to 0.25"),
    ("async_diloco", {"activation": 1.5}, r"activation=1.5.*0 to 1"),
    ("async_diloco", {"activation": -0.1}, r"activation=-0.1.*0 to"),
    ("async_diloco", {"min_steps": 0}, r"min_steps=0.*1 to"),
    ("async_diloco", {"period": 5, "min_steps": 6}, r"min_steps=6.*period=5"),
    ("delay_compensated", {"strength": -1}, r"strength=-1.*0 or more"),
    ("delay_compensated", {"decay": 1}, r"decay=1.*decay < 1"),
    ("delay_compensated", {"decay": -0.1}, r"decay=-0.1.*0 <= decay"),
]
WRONG_TYPES: list[tuple[str, dict[str, Any], str]] = [
    ("async_sgd", {"bound": "3"}, r"bound='3': pass .* pushes"),
    ("elastic_averaging", {"moving_rate": "0.5"}, r"moving_rate='0.5'.*0 to 1"),
    ("async_diloco", {"buffer": "2"}, r"buffer='2'.*1 or more"),
    ("async_diloco", {"activation": "0.1"}, r"activation='0.1'.*0 to 1"),
]
WRONG_WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("softsync", {"modulation": "some"}, r"modulation='some'.*\"average\""),
    ("downpour", {"send": "x"}, r"send='x'.*\"updates\""),
    ("gossip", {"kind": "x"}, r"kind='x'.*\"push\""),
]


@pytest.mark.parametrize(("name", "arguments", "message"), [*WRONG, *WRONG_TYPES, *WRONG_WORDS])
def test_a_wrong_setting_is_refused_by_name_and_with_its_bound(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        METHODS[name](**arguments)


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG)
def test_a_wrong_setting_that_arrives_is_a_malformed_message(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(MalformedMessage, match=f"{name}.*{message}"):
        REGISTRY.from_wire({"name": name, **arguments})


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG_WORDS)
def test_a_wrong_word_that_arrives_is_a_malformed_message(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedMessage, match=name):
        REGISTRY.from_wire({"name": name, **arguments})


@pytest.mark.parametrize(
    ("method", "groups", "message"),
    [
        (SoftSync(n=5), 4, r"n=5.*4 groups.*n<=4"),
        (Gossip(), 1, r"gossip.*just 1.*groups=2 or more"),
        (AsyncDiLoCo(activation=0.5), 4, r"activation=0.5.*0.25"),
        (DecoupledDiLoCo(quorum=5), 4, r"quorum=5.*4 groups"),
    ],
)
def test_a_method_that_cannot_work_with_so_many_groups_says_so(method: Method, groups: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        method.check(groups)


@many
def test_sound_settings_pass(method: Method) -> None:
    method.check(4)


# --- The table of methods --------------------------------------------------------------------------------------------

TABLE = {
    "async_sgd": ("server", "server"),
    "hardsync": ("server", "server"),
    "softsync": ("server", "server"),
    "downpour": ("server", "server"),
    "delay_compensated": ("server", "server"),
    "ringmaster_asgd": ("server", "server"),
    "staleness_aware": ("server", "server"),
    "stale_synchronous": ("server", "server"),
    "gpu_asgd": ("server", "worker"),
    "elastic_averaging": ("centre", "worker"),
    "gossip": ("mean", "worker"),
    "pull_gossip": ("mean", "worker"),
    "push_gossip": ("mean", "worker"),
    "local_sgd": ("mean", "worker"),
    "diloco": ("server", "worker"),
    "async_diloco": ("server", "worker"),
    "decoupled_diloco": ("server", "worker"),
}


def test_every_method_says_what_is_evaluated_and_who_steps() -> None:
    named = {name: method_named(name) for name in [*METHODS, *PRESETS]}
    assert {name: (method.evaluated, method.steps_at) for name, method in named.items()} == TABLE
    assert not METHODS.keys() & PRESETS.keys()


def test_names_give_default_settings_and_presets_their_own() -> None:
    assert all(method_named(name) == kind() for name, kind in METHODS.items())
    assert all(method_named(name) == preset for name, preset in PRESETS.items())
    assert method_named("stale_synchronous") == AsyncSGD(bound=3)


@pytest.mark.parametrize("name", ["", "asgd", "AsyncSGD"])
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"method='{name}'.*'async_sgd'.*'push_gossip'"):
        method_named(name)


class SignSGD(Method, frozen=True, kw_only=True, tag="sign_sgd"):
    """A method of a user's own: asynchronous SGD along the signs."""

    def group_side(self, replica: Replica) -> GroupSide:
        while True:
            gradient = yield NextGradient()
            signs = [None if tensor is None else tensor.sign() for tensor in gradient.tensors]
            replica.load((yield Exchange(signs, replica.clock, gradient.hyperparameters)))

    def server_side(self, master: Master, groups: Iterable[int]) -> ServerSide:
        return AsyncSGD().server_side(master, groups)


@pytest.fixture
def _own_methods_forgotten() -> Iterator[None]:
    """What a test registers, no other test gets to see."""
    known = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(known)


@pytest.mark.usefixtures("_own_methods_forgotten")
def test_a_method_of_ones_own_is_registered_travels_and_serves() -> None:
    assert register(SignSGD) is SignSGD
    assert register(SignSGD) is SignSGD  # a module that is imported twice does no harm
    assert method_named("sign_sgd") == REGISTRY.from_wire(to_wire(SignSGD())) == SignSGD()

    parameters = {"weight": Parameter(torch.zeros(2))}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5)
    description = describe(optimizer, {p: name for name, p in parameters.items()})
    weights = {name: p.detach() for name, p in parameters.items()}
    served = ServedParameters(description, weights, 0, SignSGD(), range(2), resolver(()))
    cluster = Cluster(SignSGD(), 2, [*weights.values()], sgd(0.5), lambda w, g, s: [torch.tensor([3.0, -0.1])])
    cluster.begin(0)
    need = cluster.need(0)
    assert isinstance(need, Exchange)
    assert need.tensors[0] is not None
    layout = Layout.of({"weight": parameters["weight"].detach()})
    payload = layout.empty()
    layout.views(payload)[0].copy_(need.tensors[0])
    push = m.PushMessage(
        optimizer=0,
        read_at=need.read_at,
        present=(True,),
        hyperparameters=tuple(hyperparameters_of(optimizer)),
        epoch=-1,
        trained=0,
        nbytes=payload.numel(),
    )
    push = msgspec.msgpack.decode(msgspec.msgpack.encode(push), type=m.PushMessage)
    assert served.push(0, push, payload) == [Reply(0, staleness=0)]
    assert torch.equal(served.master.weights()[0], torch.tensor([-0.5, 0.5]))
    assert served.counts.staleness == Counter({0: 1})


def test_a_name_that_is_taken_is_refused() -> None:
    other = type("Other", (Method,), {"__module__": __name__}, frozen=True, kw_only=True, tag="async_sgd")
    with pytest.raises(ConfigurationError, match=r"'async_sgd' belongs to AsyncSGD.*tag="):
        register(other)
