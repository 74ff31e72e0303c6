"""What a search has come to: how a setting is chosen from the evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lightning_omni.performance.forecast import Forecast, Setting, SettingEstimate, log_costs
from lightning_omni.search import constants as c
from lightning_omni.search.evidence import Evidence
from lightning_omni.search.rules import careful, least
from lightning_omni.search.specification import FinalStepSearchSpec, StepSearchSpec


@dataclass(frozen=True)
class Choice:
    """What a search has come to.

    Attributes:
        setting: to train with from now on.
        why: a sentence for the user.
        estimate: what is to be expected of it; None if nothing was measured.
    """

    setting: Setting
    why: str
    estimate: SettingEstimate | None = None


def choose(evidence: Evidence, by_forecast: bool, stopped: str = "") -> Choice:
    """The setting that is expected to be at the target first, as far as is known.

    Args:
        evidence: what is known.
        by_forecast: whether theory counts; otherwise what was measured alone.
        stopped: why the search was stopped, if it was.
    """
    spec, tried = evidence.spec, evidence.tried
    start = spec.start
    if not tried:
        return Choice(start, stopped or _too_small(evidence))
    if all(each.has_failed for each in tried):
        why = f"all {len(tried)} probes diverged: nothing was changed; lower the learning rate"
        return Choice(start, f"{stopped}: nothing was changed" if stopped else why)
    if evidence.profile is None:
        return Choice(start, f"{stopped or 'nothing could be timed'}: nothing was changed")
    if isinstance(spec, StepSearchSpec):
        return _best_step(evidence, spec)
    best = _best_by_forecast(evidence) if by_forecast else best_as_measured(evidence)
    forecast = evidence.forecast()
    if spec.current:
        gain = math.exp(forecast.log_seconds(evidence.as_it_would_be(start)) - forecast.log_seconds(best))
        if gain < c.GAIN:
            return Choice(start, "nothing that was tried is clearly better: it stays", forecast.of(start))
    return Choice(best, _reasons(evidence, best, forecast, stopped), forecast.of(best))


def best_as_measured(evidence: Evidence) -> Setting:
    """The probe that was at its loss first."""
    tried = evidence.tried
    times = [
        (cost - math.log(evidence.throughput(evidence.as_it_would_be(each.setting))), number)
        for number, ((cost, _), each) in enumerate(zip(log_costs(tried), tried, strict=True))
    ]
    return evidence.as_it_would_be(tried[min(times)[1]].setting)


def _best_by_forecast(evidence: Evidence) -> Setting:
    """Careful with what was not tried; among equals the fewest groups and the smallest step."""
    forecast = evidence.forecast()
    return least(
        evidence.candidates(),
        lambda setting: careful(forecast.log_seconds(setting), forecast.efficiency(setting)[1]),
        lambda setting: (setting.groups, evidence.scaling.step(setting)),
    )


def _best_step(evidence: Evidence, spec: StepSearchSpec) -> Choice:
    """A step as it is, unless another is clearly better at once.

    A smaller step nearly always gains at once, because the weights converge, and loses later; one that is too
    large may never come to the target. If the target is near, there is no later, and nothing to ask.
    """
    start, tried = evidence.as_it_would_be(spec.start), evidence.tried
    if tried[0].has_failed:  # or all would have
        return Choice(tried[1].setting, "steps as large as they are diverge, and a third as large do not")
    reduced = evidence.stepped(1 / c.SMALLER)
    if isinstance(spec, FinalStepSearchSpec) and reduced != start:
        return Choice(reduced, "the target is near: with steps a third as large the weights converge")
    smaller, larger = (evidence.gain(number) if len(tried) > number else -math.inf for number in (1, 2))
    learnt = _learnt(float(np.mean(tried[0].losses)), spec.first_loss)
    if smaller >= c.PAYS * learnt:
        return Choice(tried[1].setting, f"steps a third as large lower the loss by {smaller:.2g} at once")
    if larger >= max(c.DARES * learnt, -smaller):
        return Choice(tried[2].setting, f"steps three times as large lower the loss by {larger:.2g} at once")
    return Choice(start, "neither smaller nor larger steps are better by enough: it stays")


def _learnt(level: float, first_loss: float | None) -> float:
    """By how much the run has lowered its loss so far."""
    least = c.PAYS * abs(level)
    return least if first_loss is None else max(first_loss - level, least)


def _too_small(evidence: Evidence) -> str:
    return (
        f"the budget, {evidence.spec.share:.3g} of the run, is too small for one probe of {c.FEWEST_BATCHES} batches of"
        " each rank: nothing was tried or changed; raise budget=, or train for longer"
    )


def _reasons(evidence: Evidence, best: Setting, forecast: Forecast, stopped: str) -> str:
    alone = evidence.proposal(1)
    parts = [f"expected to be first at the target, after {len(evidence.observations)} probes"]
    if best.groups > 1:
        faster = evidence.throughput(best) / evidence.throughput(alone)
        more = math.exp(forecast.efficiency(best)[0] - forecast.efficiency(alone)[0])
        parts.append(f"{faster:.2f} times the samples per second of one group, for {more:.2f} times the samples")
    elif best.rebalance:
        gain = evidence.throughput(best) / evidence.throughput(replace(best, rebalance=False))
        parts.append(f"proportional batches make one group {gain:.2f} times faster, without staleness")
    else:
        parts.append("more groups are not faster by enough to pay for their staleness")
    parts.append(f"{evidence.prediction(best).bottleneck} is the bottleneck")
    return ("; ".join(parts) + (f" ({stopped})" if stopped else "")).strip()
