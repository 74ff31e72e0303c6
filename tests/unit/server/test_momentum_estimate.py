"""What the server measures of a run while it serves it: its own time for a push, and the total momentum."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_server_core import Link, gradient, push_of, trained_link
from test_statistical import arrivals, staleness_of
from test_wire import Serving, ranks
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from lightning_omni.methods import AsyncSGD, HardSync, LocalSGD, Method, SoftSync
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of, resolver
from lightning_omni.metrics import Staleness
from lightning_omni.server.parameters import momentum_estimate
from lightning_omni.server.parameters.momentum_estimate import FEWEST, total_momentum
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.simulator import Cluster, Jitter, Limits, Workload
from lightning_omni.simulator.run import simulate
from lightning_omni.simulator.server import SimulatedServer
from lightning_omni.strategy.loops.live_metrics import StepTimes, live_metrics
from lightning_omni.tuning.callback.hyperparameters import explicit_momentum
from lightning_omni.wire import messages as m
from lightning_omni.wire.layout import Layout

SHAPES = {"a": (40, 10), "b": (200,)}
CURVATURE = [torch.logspace(-1, 0, 400).reshape(40, 10), torch.logspace(0, -1, 200)]

Make = Callable[[Any], Optimizer]


def sgd(lr: float = 0.1, **settings: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **settings)


class Quadratic:
    """Groups that descend a quadratic through one optimizer at the server."""

    def __init__(self, make: Make, method: Method, groups: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        parameters = {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
        self.optimizer = make(parameters.values()) if method.steps_at == "server" else None
        description = describe(self.optimizer, {p: name for name, p in parameters.items()}) if self.optimizer else None
        weights = {name: p.detach() for name, p in parameters.items()}
        self.served = ServedParameters(description, weights, 0, method, range(groups), resolver(()))
        self.noise, self.generator = noise, generator
        self.past = [self.weights]

    @property
    def weights(self) -> list[Tensor]:
        return [weight.clone() for weight in self.served.master.weights()]

    @property
    def reading(self) -> float | None:
        return total_momentum([self.served.momentum_estimator])

    def gradient(self, read_at: int) -> list[Tensor]:
        exact = [h * w for h, w in zip(CURVATURE, self.past[read_at], strict=True)]
        return [g + self.noise * torch.randn(g.shape, generator=self.generator) for g in exact]

    def push(self, group: int, read_at: int, present: tuple[bool, ...] = (True, True), **changes: Any) -> None:
        there = {str(i): g for i, g in enumerate(self.gradient(read_at)) if present[i]}
        layout = Layout.of(there)
        payload = layout.empty()
        for view, tensor in zip(layout.views(payload), there.values(), strict=True):
            view.copy_(tensor)
        settings = hyperparameters_of(self.optimizer) if self.optimizer else ()
        message = m.PushMessage(
            optimizer=0,
            read_at=read_at,
            present=present,
            hyperparameters=tuple({**group, **changes} for group in settings),
            epoch=-1,
            trained=0,
            nbytes=layout.nbytes,
        )
        assert self.served.push(group, message, payload) is not None
        payload.fill_(255)  # it is the connection's, and the next message overwrites it
        if self.served.master.clock == len(self.past):
            self.past.append(self.weights)

    def run(self, updates: int, groups: int = 1) -> Iterator[float | None]:
        """Readings after each update of groups whose steps take exponential times."""
        for read_at, _ in itertools.islice(arrivals(groups, np.random.default_rng(groups)), updates):
            self.push(0, read_at)
            yield self.reading


def steady(run: Quadratic, updates: int, groups: int = 1) -> float:
    readings = list(run.run(updates, groups))
    return float(np.median([reading for reading in readings[150:] if reading is not None]))


# --- Total momentum --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("settings", [{"momentum": 0.6}, {"momentum": 0.6, "weight_decay": 0.1}, {"momentum": 0.0}])
def test_one_group_at_a_time_reads_the_explicit_momentum(settings: dict[str, float], noise: float) -> None:
    run = Quadratic(sgd(**settings), AsyncSGD(), 1, noise)
    readings = list(run.run(200))
    assert readings[: FEWEST - 1] == [None] * (FEWEST - 1)
    assert readings[-1] == pytest.approx(settings["momentum"], abs=0.02)


@pytest.mark.parametrize("method", [HardSync(), SoftSync(n=1, modulation="none")])
def test_groups_with_a_barrier_read_the_explicit_momentum(method: Method) -> None:
    run = Quadratic(sgd(momentum=0.6), method, 4, noise=0.5)
    for _ in range(100):
        clock = run.served.master.clock
        for group in range(4):
            run.push(group, clock)
    assert run.served.master.clock == 100
    assert run.reading == pytest.approx(0.6, abs=0.02)


def test_a_group_that_leaves_a_synchronization_does_not_spoil_the_reading() -> None:
    run = Quadratic(sgd(momentum=0.6), HardSync(), 2)
    for number in range(100):
        clock = run.served.master.clock
        run.push(0, clock)
        if number % 10:
            run.push(1, clock)
        else:  # the update comes without a push
            with torch.no_grad():
                run.served.method_side.idle(1)
            run.past.append(run.weights)
            run.served.method_side.resume(1)
    assert run.reading == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("groups", [4, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (2, 8))])
def test_asynchronous_groups_read_as_momentum(groups: int) -> None:
    """1 - 1/g without explicit momentum, and (1 - total) = (1 - m) / g with it."""
    for explicit in (0.0, 0.5):
        run = Quadratic(sgd(momentum=explicit), AsyncSGD(), groups)
        read = steady(run, 500, groups)
        assert read > explicit + 0.1
        assert read == pytest.approx(1 - (1 - explicit) / groups, abs=0.06)


def test_the_server_reads_the_total_that_the_explicit_momentum_was_chosen_for() -> None:
    advice = explicit_momentum(0.9, staleness_of(4))
    assert advice.momentum == pytest.approx(0.6, abs=0.02)
    assert steady(Quadratic(sgd(momentum=advice.momentum), AsyncSGD(), 4), 500, 4) == pytest.approx(0.9, abs=0.06)


def test_noise_pulls_an_asynchronous_reading_towards_the_middle_but_not_below_the_explicit_momentum() -> None:
    assert 0.6 < steady(Quadratic(sgd(momentum=0.5), AsyncSGD(), 4, noise=1.0), 500, 4) < 0.875


def read_off(past: list[list[Tensor]], pushes: list[tuple[int, list[Tensor]]], lr: float, m: float) -> float:
    """The same from all weights that there were, push by push: the median of (D' + κ lr g) / (D + κ lr g)."""
    averages = torch.zeros(2, sum(weight.numel() for weight in past[0]), dtype=torch.float64)
    flat = [torch.cat([weight.flatten() for weight in weights]).double() for weights in past]
    for read_at, pushed in pushes:
        acting = lr / (1 - m) * torch.cat([each.flatten() for each in pushed]).double()
        steps = torch.stack([flat[read_at + 1] - flat[read_at], flat[read_at] - flat[read_at - 1]])
        averages = (1 - 1 / momentum_estimate.MEMORY) * averages + steps + acting
    return float((averages[0] / averages[1]).median())


def test_weights_that_stand_still_or_break_do_not_spoil_the_reading() -> None:
    terms = torch.tensor([[0.4, math.nan, 0.0], [1.0, 1.0, 0.0]])
    assert float(
        momentum_estimate.median_ratio(momentum_estimate.averaged(torch.zeros(2, 3), terms, 0.9))
    ) == pytest.approx(0.4)
    assert math.isnan(float(momentum_estimate.median_ratio(torch.zeros(2, 3))))


def test_the_server_reads_what_is_read_off_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(momentum_estimate, "RUNS", 75)  # all of the weights
    run = Quadratic(sgd(momentum=0.5), AsyncSGD(), 4, noise=0.1)
    pushes: list[tuple[int, list[Tensor]]] = []
    for read_at, _ in itertools.islice(arrivals(4, np.random.default_rng(0)), 300):
        noise = run.generator.get_state()
        pushed = run.gradient(read_at)
        run.generator.set_state(noise)
        run.push(0, read_at)
        pushes += [(read_at, pushed)] * (read_at > 0)  # the step before the first one is not known
    assert run.reading == pytest.approx(read_off(run.past, pushes, 0.1, 0.5), abs=1e-4)


def test_parameter_groups_have_rates_of_their_own() -> None:
    def make(parameters: Any) -> Optimizer:
        first, second = parameters
        own: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.5, "weight_decay": 0.01}]
        return torch.optim.SGD(own, lr=0.1, momentum=0.6)

    assert steady(Quadratic(make, AsyncSGD(), 1), 200) == pytest.approx(0.6, abs=0.02)


def test_a_parameter_without_a_gradient_leaves_the_others_readable() -> None:
    run = Quadratic(sgd(momentum=0.6), AsyncSGD(), 1)
    for step in range(200):
        run.push(0, step, present=(step % 5 > 0, True))
    assert run.reading == pytest.approx(0.6, abs=0.02)
    for step in range(200, 203):
        run.push(0, step, present=(False, False))
    assert run.reading is not None


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (lambda parameters: torch.optim.Adam(parameters, lr=0.01), AsyncSGD()),
        (sgd(momentum=0.6, nesterov=True), AsyncSGD()),
        (sgd(momentum=0.6, dampening=0.5), AsyncSGD()),
        (sgd(maximize=True), AsyncSGD()),
        (sgd(), LocalSGD(period=1)),
    ],
)
def test_what_is_no_plain_step_at_the_server_is_not_sensed(make: Make, method: Method) -> None:
    run = Quadratic(make, method, 1)
    assert all(reading is None for reading in run.run(150))


def test_steps_that_stop_being_plain_are_not_sensed_any_more() -> None:
    run = Quadratic(sgd(momentum=0.6), AsyncSGD(), 1)
    assert list(run.run(150))[-1] is not None
    run.push(0, 150, nesterov=True)
    assert run.reading is None


def test_new_groups_are_sensed_afresh() -> None:
    run = Quadratic(sgd(momentum=0.6), AsyncSGD(), 1)
    assert list(run.run(150))[-1] is not None
    run.served.change_method(HardSync(), range(2))
    assert run.reading is None
    for clock in range(150, 250):
        run.push(0, clock)
        run.push(1, clock)
    assert run.reading == pytest.approx(0.6, abs=0.02)


def test_weights_and_the_optimizer_are_as_without_sensing() -> None:
    seen, unseen = (Quadratic(sgd(momentum=0.6, weight_decay=0.1), AsyncSGD(), 3, noise=0.5) for _ in range(2))
    unseen.served.momentum_estimator = None
    for _ in zip(seen.run(150, 3), unseen.run(150, 3), strict=True):
        pass
    assert seen.reading is not None
    assert unseen.reading is None
    assert torch.equal(seen.served.buffer, unseen.served.buffer)
    states = (run.served.master.snapshot()["state"] for run in (seen, unseen))
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])


def test_more_groups_in_the_simulator_read_as_more_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[SimulatedServer] = []
    join = SimulatedServer._join

    def noted(server: SimulatedServer, rank: int) -> None:
        servers.append(server)
        join(server, rank)

    monkeypatch.setattr(SimulatedServer, "_join", noted)
    generator = torch.Generator().manual_seed(0)
    inputs, wanted = torch.randn(20_000, 40, generator=generator), torch.randn(40, 4, generator=generator)
    data = TensorDataset(inputs, inputs @ wanted)
    readings: list[float] = []
    for groups in (2, 4, 8):
        simulate(
            "async_sgd",
            groups,
            Cluster.even(groups, jitter=Jitter("exponential")),
            Workload(
                torch.nn.Linear(40, 4),
                data,
                loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
                optimizer=sgd(lr=0.05),
            ),
            batch_size=64,
            limits=Limits(updates=300),
        )
        status = servers[-1].core.status(0.0)
        assert status.total_momentum is not None
        assert status.serve_time == 0, "virtual time does not pass while the server works"
        readings.append(status.total_momentum)
    assert readings == sorted(readings)
    assert readings[0] > 0.2, readings


# --- What a user sees ------------------------------------------------------------------------------------------------


def ticking(link: Link, seconds: float) -> Link:
    """The server's clock goes on by so much whenever it is looked at."""
    times = itertools.count()
    link.core._clock = lambda: seconds * next(times)
    return link


def test_the_time_of_a_push_is_measured_until_its_answer_is_handed_over() -> None:
    link = ticking(trained_link((0, 1), (2,)), 0.25)
    link.data(0, m.FetchMessage(optimizer=0))
    link.core.handed_over()
    assert link.core.status(0.0).serve_time == 0
    for step in range(3):
        link.data(0, *push_of(gradient(step)))
        # The first push after groups were formed is not counted.
        assert link.core.status(0.0).serve_time == pytest.approx(0.25 if step > 1 else 0.0)
        link.core.handed_over()
        link.core.handed_over()  # says nothing new
    assert link.core.status(0.0).serve_time == pytest.approx(0.25)
    link.core.reset()
    assert link.core.status(0.0).serve_time == 0


def test_a_server_with_sockets_tells_both() -> None:
    serving = Serving(clock=time.perf_counter)
    try:
        with ranks(serving.address, 1) as (rank,):
            rank.begin((0,))
            before = rank.control.request(m.AskStatus(), m.Status, timeout=30)
            assert (before.serve_time, before.total_momentum) == (0, None)
            began = time.perf_counter()
            for step in range(FEWEST + 1):
                rank.push(step, read_at=step)
            lasted = time.perf_counter() - began
            status = rank.control.request(m.AskStatus(), m.Status, timeout=30)
    finally:
        serving.stop()
    assert 0 < status.serve_time < lasted
    assert status.total_momentum == pytest.approx(0.9, abs=0.02)


def test_both_are_logged_once_they_are_known() -> None:
    status = trained_link((0, 1), (2,)).core.status(0.0)
    keys = {"omni/serve_time", "omni/total_momentum"}
    assert not keys & live_metrics(status, Staleness(), StepTimes()).keys()
    known = msgspec.structs.replace(status, serve_time=0.5, total_momentum=-0.25)
    assert m.decode(m.encode(known), at="rank", channel=m.CONTROL) == known
    values = live_metrics(known, Staleness(), StepTimes())
    assert (values["omni/serve_time"], values["omni/total_momentum"]) == (0.5, -0.25)
