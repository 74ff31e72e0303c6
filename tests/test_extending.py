"""The code of docs/contribute/extending.md, run: its methods train when simulated and obey their equations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni.methods import METHODS, method_named
from lightning_omni.simulator import Cluster, Jitter, Limits, Workload, simulate
from lightning_omni.trace import Trace

PAGE = Path(__file__).parents[1] / "docs" / "contribute" / "extending.md"
LR, GROUPS = 0.1, 4


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """What the page's code registers, and no other code gets to see."""
    known = dict(METHODS)
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), {"__name__": "extending"})
    yield
    METHODS.clear()
    METHODS.update(known)


def run(method: str, loss: Any, **limits: Any) -> Trace:
    """Four groups of one rank each, of random speed, on data from which a line can be learned."""
    torch.manual_seed(0)
    inputs = torch.rand(256, 3, dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + 1)
    model = nn.Linear(3, 1, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return simulate(
        method,
        GROUPS,
        Cluster.even(GROUPS, jitter=Jitter("exponential")),
        Workload(model, data, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR)),
        batch_size=8,
        **limits,
    )


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    difference: Tensor = model(batch[0]) - batch[1]
    return difference.square().mean()


def slope(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Its gradient is 1 for the bias and 0 for the rest, whatever the weights."""
    outputs: Tensor = model(torch.zeros_like(batch[0]))
    return outputs.mean()


def test_the_page_has_two_methods() -> None:
    assert method_named("polynomial_sgd:power=1").power == 1.0  # type: ignore[attr-defined]
    assert method_named("shared_steps").steps_at == "worker"


@pytest.mark.parametrize("method", ["polynomial_sgd", "shared_steps"])
def test_a_method_of_the_page_trains(method: str) -> None:
    trace = run(method, squares, limits=Limits(epochs=20))
    losses = trace.columns()["loss"]
    assert trace.ended == "max_epochs"
    assert trace.columns()["staleness"].max() > 0
    assert losses[-10:].mean() < losses[:10].mean() / 20


def test_the_learning_rate_falls_with_a_power_of_the_staleness() -> None:
    trace = run("polynomial_sgd:power=1.5", slope, limits=Limits(updates=60))
    staleness = trace.columns()["staleness"]
    assert len(np.unique(staleness)) > 2
    expected = -LR * ((1.0 + staleness) ** -1.5).sum()
    np.testing.assert_allclose(trace.weights["bias"], [expected], rtol=1e-12)
    np.testing.assert_array_equal(trace.weights["weight"], np.zeros((1, 3)))


def test_the_server_adds_each_groups_share_of_its_steps() -> None:
    trace = run("shared_steps:period=3", slope, limits=Limits(updates=20))
    assert set(trace.columns()["steps"]) == {3}
    np.testing.assert_allclose(trace.weights["bias"], [-LR * 3 * 20 / GROUPS], rtol=1e-12)
