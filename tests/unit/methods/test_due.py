"""Moments that a method asks for: they come in simulated and in real time, and are events of the record."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_transport import InMemoryData, InMemoryServer
from rounds import sent
from test_transport import Serving, serving, two  # noqa: F401  # a fixture
from torch import nn
from torch.utils.data import TensorDataset

from lightning_omni.checks import check_number
from lightning_omni.group.core import ServerRequest
from lightning_omni.methods import METHODS, Barrier, Gradient, Method, Push, Reply, register
from lightning_omni.methods.contract import Total
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.server.event_log import Event
from lightning_omni.simulator import Cluster, Computation, Failure, Jitter, Limits, Link, Workload, replay, simulate
from lightning_omni.simulator.workbench import Samples
from lightning_omni.wire import messages as m

varied = settings(deadline=None, max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


class Patient(Barrier):
    """A barrier that waits for nobody longer than so long after the first."""

    method: PatientSync

    def merge(self, total: Total, last: Push) -> None:
        self.master.update(total.scaled(1 / total.count), last.hyperparameters)

    def receive(self, push: Push) -> list[Reply]:
        if not self._last:
            self.due = self.now + self.method.patience
        return super().receive(push)

    def released(self) -> list[Reply]:
        replies = super().released()
        self.due = self.due if self._last else math.inf
        return replies

    def expire(self) -> list[Reply]:
        assert self.now >= self.due
        late = self.working - self._waiting.keys()
        self.groups -= late
        replies = self.released()
        self.groups |= late
        return replies


class PatientSync(Method, frozen=True, kw_only=True, tag="patient_sync"):
    side = Patient
    patience: float = 0.01

    def __post_init__(self) -> None:
        check_number("patience", self.patience, "seconds, 0 or more", 0)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    known = dict(METHODS)
    register(PatientSync)
    yield
    METHODS.clear()
    METHODS.update(known)


INPUTS = torch.linspace(-1, 1, 240).reshape(80, 3)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


def run(method: str | Method, cluster: Cluster, **options: Any) -> dict[str, Any]:
    """A simulated run, what was recorded of it, and what a replay of that ends with."""
    events: list[Event] = []
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    how: dict[str, Any] = {
        "loss": lambda net, batch: (net(batch[0]) - batch[1]).square().mean(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5),
    }
    groups = len(cluster.devices)
    trace = simulate(
        method,
        groups,
        cluster,
        Workload(model, DATA, **how),
        batch_size=4,
        computation=Computation(batched=False),
        record=events.append,
        **options,
    )
    samples = Samples(DATA, seed=0)
    again = replay(events, model, batches=lambda *where: samples.batch(samples.at(*where)), **how)
    return {"trace": trace, "events": events, "replayed": again}


@varied
@given(
    patience=st.sampled_from([0.0, 0.003, 0.01, 1.0]),
    speeds=st.lists(st.sampled_from([1.0, 1.0, 2.0, 7.0]), min_size=2, max_size=5),
    jitter=st.sampled_from([0.0, 0.3]),
    dies=st.none() | st.floats(0.0, 0.1),
)
def test_no_group_waits_longer_than_the_method_says_and_the_replay_is_bitwise_the_same(
    patience: float, speeds: list[float], jitter: float, dies: float | None
) -> None:
    events = () if dies is None else (Failure(len(speeds) - 1, dies),)
    cluster = Cluster.of_speeds(speeds, 0.002, jitter=Jitter("lognormal", jitter), link=Link(1e6, 1e-4), events=events)
    found = run(PatientSync(patience=patience), cluster, limits=Limits(epochs=1))
    record, trace = cast(list[Event], found["events"]), found["trace"]
    assert trace.ended == "max_epochs"
    opened: float | None = None
    clock = 0
    for event in record:
        opened = event.time if opened is None and event.kind == "push" else opened
        if event.kind == "expire":
            assert opened is not None
            assert event.time == opened + patience  # in virtual time nobody is late
            assert event.clock == clock + 1
        if event.clock > clock:
            assert opened is not None
            assert event.time <= opened + patience
            opened, clock = None, event.clock
    assert found["replayed"].clock == clock == trace.updates
    for name, weight in found["replayed"].weights.items():
        assert (weight.numpy() == trace.weights[name]).all()


def test_a_barrier_that_waits_for_ever_and_one_that_does_not_wait_are_known_methods() -> None:
    cluster = Cluster.of_speeds([1.0, 2.03, 3.07], 0.002)  # no two push at the same moment
    for method, patience in (("hardsync", 1e9), ("async_sgd", 0.0)):
        one, other = (
            run(method, cluster, limits=Limits(epochs=1)),
            run(PatientSync(patience=patience), cluster, limits=Limits(epochs=1)),
        )
        assert one["trace"].updates == other["trace"].updates
        for name, weight in one["trace"].weights.items():
            assert (weight == other["trace"].weights[name]).all()


@torch.no_grad()
def test_a_group_whose_answer_is_due_gets_it_in_real_time(serving: Serving) -> None:  # noqa: F811
    first, _ = two(serving, method=PatientSync(patience=0.05))
    if not isinstance(first.data, InMemoryData):
        first.step(seed=1)  # returns once it is answered, although the other group pushes nothing
    else:  # there nothing waits by itself
        server = cast(InMemoryServer, serving.server)
        server.link.now = 1.0
        tensors = [torch.ones_like(parameter) for parameter in first.parameters.values()]
        ask = first.core.gradient(0, Gradient(tensors, hyperparameters_of(first.replica.optimizer)))
        said = sent(first.core, cast(ServerRequest, ask), first.layout, first._memory)
        first.data.send(said.message, said.payload)
        assert serving.core.due == 1.05
        for now, answered in ((1.04, False), (1.06, True)):
            server.link.now = now
            server.run(lambda: True)
            assert (first.data.take(m.Weights) is not None) == answered
    assert serving.core.store.clock == 1
    assert serving.core.due == math.inf
