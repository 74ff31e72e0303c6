"""The gradient noise scale that the first batches show."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_omni.runtime.balance import squared_length
from lightning_omni.tuning.callback.online_tuner import TimedStep, noise_scale


def steps_of(gradients: list[list[torch.Tensor]], samples: int) -> list[list[TimedStep]]:
    """Steps of each rank, whose gradients have the shape (steps, ranks)."""
    rows: list[list[TimedStep]] = [[] for _ in gradients[0]]
    for each in gradients:
        mean = float(squared_length(torch.stack(each).mean(0)))
        for row, own in zip(rows, each, strict=True):
            row.append(TimedStep(samples, 0.1, 0.1, 1.0, 0.0, (float(squared_length(own)), mean)))
    return rows


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_noise_scale_is_that_of_the_gradients_distribution(ranks: int) -> None:
    """The mean has a squared length of 4, and a sample's gradient 50 entries with a variance of 3."""
    draw, samples = torch.Generator().manual_seed(0), 16
    mean = torch.zeros(50)
    mean[0] = 2.0

    def gradient() -> torch.Tensor:
        return mean + math.sqrt(3 / samples) * torch.randn(50, generator=draw)

    rows = steps_of([[gradient() for _ in range(ranks)] for _ in range(2000)], samples)
    assert noise_scale(rows) == pytest.approx(50 * 3 / 4, rel=0.05)


def test_only_the_last_half_of_the_steps_counts() -> None:
    noisy, equal = [torch.tensor([1.0]), torch.tensor([-1.0])], [torch.tensor([1.0])] * 2
    assert noise_scale(steps_of([noisy, noisy, equal, equal], 8)) == 0.0
    assert noise_scale(steps_of([equal, equal, noisy, noisy], 8)) is None, "no signal"


def test_steps_with_infinite_gradients_are_left_out() -> None:
    finite, infinite = [torch.tensor([1.0]), torch.tensor([2.0])], [torch.tensor([math.inf]), torch.tensor([1.0])]
    assert noise_scale(steps_of([finite, finite, infinite, finite], 8)) == noise_scale(steps_of([finite] * 2, 8))


def test_batches_of_different_size_and_accumulated_ones_show_nothing() -> None:
    rows = steps_of([[torch.tensor([1.0]), torch.tensor([2.0])]] * 4, 8)
    assert noise_scale([rows[0], [TimedStep(4, 0.1, 0.1, 1.0, 0.0, each.squares) for each in rows[1]]]) is None
    assert noise_scale([[TimedStep(8, 0.1, 0.1, 1.0, 0.0)] * 4] * 2) is None


def test_the_length_of_a_half_precision_gradient_does_not_overflow() -> None:
    assert float(squared_length(torch.full((4,), 6e4, dtype=torch.float16))) == pytest.approx(4 * 6e4**2, rel=1e-3)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 4.0]), (3,), check_invariants=True
    )
    assert float(squared_length(sparse)) == pytest.approx(25.0)
