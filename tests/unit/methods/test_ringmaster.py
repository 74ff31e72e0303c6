"""Ringmaster ASGD: which gradients are declined, and that the samples of these are trained by others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import RingmasterASGD
from lightning_omni.simulator import Cluster, Computation, Device, Jitter, Limits, Workload, simulate
from lightning_omni.trace import Trace

SAMPLES = 480


class Counts(nn.Module):
    """A number for each sample. Trained with rate 1 by `loss`, it says how often the sample went into the weights."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(samples))


def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
    total: Tensor = -model.counts[batch[0]].sum()
    return total


def run(method: str, cluster: Cluster, samples: int = SAMPLES, **options: Any) -> Trace:
    workload = Workload(
        Counts(samples),
        TensorDataset(torch.arange(samples)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    options = {"limits": Limits(epochs=1), "batch_size": 2, "computation": Computation(batched=False), **options}
    return simulate(method, len(cluster.devices), cluster, workload, **options)


def ladder(groups: int) -> Cluster:
    """Devices of which number i takes i seconds for a batch; links take no time."""
    return Cluster(tuple(Device(0.5 * (place + 1)) for place in range(groups)))


@pytest.mark.parametrize(
    ("threshold", "accepted", "lag", "refused"),
    [(1, 1.0, 0.0, 0.63), (4, 1.5, 1.0, 0.45), (8, 2.0, 2.67, 0.26), (16, 2.46, 5.07, 0.09)],
)
def test_on_unequal_devices_as_many_gradients_are_applied_as_computed_by_hand(
    threshold: int, accepted: float, lag: float, refused: float
) -> None:
    method = f"ringmaster_asgd:max_staleness={threshold - 1}"
    trace = run(method, ladder(8), samples=8000, limits=Limits(seconds=900.0, epochs=1))
    staleness, declined = trace.rows["staleness"], trace.meta["refused"]
    assert len(staleness) / trace.seconds == pytest.approx(accepted, rel=0.02)
    assert staleness.mean() == pytest.approx(lag, abs=0.05)
    assert staleness.max() < threshold
    assert declined / (declined + len(staleness)) == pytest.approx(refused, abs=0.01)


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("scatter", ["exponential", "gamma"])
def test_each_sample_is_in_the_weights_once_though_gradients_of_it_are_declined(most: int, scatter: Any) -> None:
    trace = run(f"ringmaster_asgd:max_staleness={most}", Cluster.even(4, 1e-3, jitter=Jitter(scatter, 1.0)))
    assert trace.meta["refused"] > 0
    assert trace.rows["staleness"].max() <= most
    assert trace.weights["counts"].tolist() == [1.0] * SAMPLES


def test_a_bound_that_nothing_reaches_is_asynchronous_sgd_bit_for_bit() -> None:
    cluster = Cluster.even(4, 1e-3, jitter=Jitter("exponential"))
    bounded, plain = (run(method, cluster) for method in ("ringmaster_asgd:max_staleness=1000", "async_sgd"))
    for name, column in plain.rows.items():
        assert np.array_equal(column, bounded.rows[name], equal_nan=True)
    assert np.array_equal(plain.weights["counts"], bounded.weights["counts"])


def test_by_default_equal_groups_lose_nothing_and_one_ten_times_slower_is_declined() -> None:
    assert run("ringmaster_asgd", Cluster.even(4, 1e-3)).meta["refused"] == 0
    slow = run("ringmaster_asgd", Cluster((*[Device(1e-3)] * 3, Device(1e-2))))
    assert slow.meta["refused"] > 0
    assert slow.rows["staleness"].max() <= 6
    assert slow.weights["counts"].tolist() == [1.0] * SAMPLES


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_staleness"):
        RingmasterASGD(max_staleness=-1)
