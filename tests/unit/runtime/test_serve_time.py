"""What a server will take for a push is told before there is one."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_omni.methods.contract import Gradient, NextGradient
from lightning_omni.runtime import executor
from lightning_omni.runtime.model import reduction
from lightning_omni.runtime.model.reduction import TIMED_PUSHES, seconds_of_push
from lightning_omni.tuning.model.steps import StepTimer


class Slow(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        Slow.steps += 1
        time.sleep(0.01)
        return super().step(closure)


def test_the_optimizers_step_is_in_it_and_the_users_own_optimizer_and_weights_stay() -> None:
    weight = Parameter(torch.ones(8, 4))
    optimizer = Slow([weight], lr=0.1, momentum=0.9)
    Slow.steps, threads = 0, torch.get_num_threads()
    assert seconds_of_push(optimizer) >= 0.01
    assert Slow.steps == TIMED_PUSHES
    assert torch.equal(weight, torch.ones(8, 4))
    assert not optimizer.state
    assert weight.grad is None
    assert torch.get_num_threads() == threads


def test_a_large_model_is_timed_with_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [Parameter(torch.ones(64)) for _ in range(8)]
    monkeypatch.setattr(reduction, "TIMED_BYTES", 2 * weights[0].nbytes)
    assert seconds_of_push(Slow(weights, lr=0.1)) >= 4 * 0.01


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_it_goes_with_any_optimizer_that_a_server_can_run(kind: Any) -> None:
    frozen, trained = Parameter(torch.ones(3), requires_grad=False), Parameter(torch.ones(5, dtype=torch.bfloat16))
    assert seconds_of_push(kind([{"params": [frozen]}, {"params": [trained], "lr": 0.2}], lr=0.1)) > 0


def test_where_no_server_can_run_the_optimizer_or_nothing_is_trained_it_is_unknown() -> None:
    assert seconds_of_push(torch.optim.LBFGS([Parameter(torch.ones(3))])) == 0
    assert seconds_of_push(torch.optim.SGD([Parameter(torch.ones(3), requires_grad=False)], lr=0.1)) == 0


def test_the_time_of_one_optimizers_step_has_no_exchange_of_another_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, traffic, took = [0.0], SimpleNamespace(seconds=0.0), defaultdict[int, list[float]](list)
    monkeypatch.setattr(executor, "StepTimer", partial(StepTimer, lambda: now[0]))

    def do(index: int, action: Any) -> None:
        now[0] += 10.0 * (index + 1)
        traffic.seconds += 10.0 * (index + 1)

    core = SimpleNamespace(
        gradient=lambda index, gradient: "exchange",
        answer=lambda index, answer: NextGradient(),
        step_took=lambda index, seconds: took[index].append(seconds),
    )
    exchange: Any = SimpleNamespace(traffic=traffic, do=do)
    parts: Any = [SimpleNamespace(core=core), exchange, None, None, []]
    exchanging = executor.Exchanging(*parts)
    for _ in range(3):
        for index in range(2):
            now[0] += 1.0
            exchanging._advance(index, Gradient([], ()))
    assert took == {0: [2.0, 2.0], 1: [2.0, 2.0]}
