"""Samples to a loss, extrapolated from the losses of first batches, against known curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.convergence import Estimate, samples_to

SAMPLES = [32.0 * batch for batch in range(1, 49)]


def losses_of(rate: float, noise: float = 0.0, seed: int = 0, scale: float = 1.0) -> list[float]:
    """Losses that are 2 at the start and fall as the law says, to 2 / e after ``1 / rate`` samples."""
    scatter = np.exp(noise * np.random.default_rng(seed).normal(size=len(SAMPLES)))
    return list(scale * 2 * np.exp(-((rate * np.array(SAMPLES)) ** c.DECAY_POWER)) * scatter)


def test_the_law_is_extrapolated_exactly_whatever_the_units() -> None:
    truth = 2000 * math.log(4) ** (1 / c.DECAY_POWER)
    for scale in (1.0, 1e-3, 1e4):
        samples = [scale * each for each in SAMPLES]
        found = samples_to(0.5 * scale, samples, losses_of(1 / 2000, scale=scale))
        assert found is not None
        assert found.value == pytest.approx(scale * truth, rel=1e-6)


def test_the_interval_widens_with_the_noise_and_holds_the_truth_of_noisy_losses() -> None:
    truth, widths = 2000 * math.log(4) ** (1 / c.DECAY_POWER), []
    for noise in (0.0, 0.05, 0.2):
        made = [samples_to(0.5, SAMPLES, losses_of(1 / 2000, noise, seed)) for seed in range(20)]
        found = [each for each in made if each is not None]
        assert sum(each.low <= truth <= each.high for each in found) >= 0.8 * len(found)
        widths.append(np.median([math.log(each.high / each.low) for each in found]))
    assert widths == sorted(widths)
    assert widths[0] == pytest.approx(2 * 1.2816 * c.EXTRAPOLATION_ERROR, rel=1e-3)


def test_a_loss_above_the_start_is_there_already() -> None:
    assert samples_to(3.0, SAMPLES, losses_of(1 / 2000)) == Estimate(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("target", "losses"),
    [
        (0.5, [2.0] * 48),
        (0.5, losses_of(1 / 2000)[::-1]),
        (0.5, [*losses_of(1 / 2000)[:-1], math.nan]),
        (0.5, [*losses_of(1 / 2000)[:-1], math.inf]),
        (0.5, [-each for each in losses_of(1 / 2000)]),
        (-0.5, losses_of(1 / 2000)),
        (0.5, losses_of(1 / 2000)[:7]),
    ],
)
def test_of_what_never_arrives_or_has_no_logarithm_or_is_too_short_nothing_is_said(
    target: float, losses: list[float]
) -> None:
    assert samples_to(target, SAMPLES[: len(losses)], losses) is None


@given(st.lists(st.floats(1e-9, 1e9), min_size=8, max_size=48), st.floats(1e-9, 1e9))
@settings(max_examples=25, deadline=None)
def test_any_losses_give_an_ordered_estimate_or_none(losses: list[float], target: float) -> None:
    found = samples_to(target, SAMPLES[: len(losses)], losses)
    assert found is None or 0 <= found.low <= found.value <= found.high


def test_estimates_are_scaled_and_shown_with_their_interval() -> None:
    assert str(Estimate(10.0, 5.0, math.inf).times(2)) == "20 (10 to inf)"
