"""What a search has come to: how a setting is chosen from the evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_omni.checks import counted
from lightning_omni.performance.forecast import Forecast, Setting, SettingEstimate, log_costs
from lightning_omni.performance.measured import Measured
from lightning_omni.search import constants as c
from lightning_omni.search.evidence import Evidence, Observation, mean_error
from lightning_omni.search.rules import careful, is_faster, least
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
    if evidence.prior is not None:
        return _by_experience(evidence)
    best = best_by_forecast(evidence) if by_forecast else best_as_measured(evidence)
    forecast = evidence.forecast()
    if spec.current:
        gain = math.exp(forecast.log_seconds(evidence.as_it_would_be(start)) - forecast.log_seconds(best))
        if gain < c.GAIN:
            return Choice(start, "nothing that was tried is clearly better: the setting stays", forecast.of(start))
    return Choice(best, _reasons(evidence, best, forecast, stopped, by_forecast), forecast.of(best))


def gain_of_merging(evidence: Evidence) -> Choice | None:
    """What would be chosen if a submodule that was measured could be merged; None if that is not clearly faster.

    Args:
        evidence: by which a setting was chosen that merges none.
    """
    if evidence.profile is None or not evidence.profile.heads or evidence.prior is None:
        return None
    spec = replace(evidence.spec, space=replace(evidence.spec.space, merged=tuple(evidence.profile.heads)))
    other = Evidence(spec, evidence.known, evidence.prior, evidence.group_speed)
    found = _gain_with(evidence, other, evidence.observations)
    return found if found is not None and found.setting.merged else None


def gain_of_servers(evidence: Evidence, nodes: int) -> Choice | None:
    """What would be chosen if there were a server on each node; None if that is not clearly faster.

    Args:
        evidence: by which a setting was chosen with one server.
        nodes: how many.
    """
    if evidence.profile is None or evidence.prior is None:
        return None

    def spread(measured: Measured) -> Measured:
        return replace(measured, servers=nodes, per_node=True)

    known = [spread(each) for each in evidence.known]
    observations = [replace(each, measured=each.measured and spread(each.measured)) for each in evidence.observations]
    other = Evidence(evidence.spec, known, evidence.prior, evidence.group_speed)
    found = _gain_with(evidence, other, observations)
    return found if found is not None and found.setting.groups > 1 else None


def _gain_with(evidence: Evidence, other: Evidence, observations: Sequence[Observation]) -> Choice | None:
    """What would be chosen by other evidence; None if that is not clearly faster than what is chosen by this.

    Args:
        evidence: by which a setting was chosen.
        other: that has no observations yet.
        observations: of it.
    """
    other.observations = list(observations)
    chosen, best = choose(evidence, by_forecast=True).setting, choose(other, by_forecast=True).setting
    gain = math.exp(evidence.forecast().log_seconds(chosen) - other.forecast().log_seconds(best))
    if gain < c.GAIN:
        return None
    why = f"the target is predicted to be reached {gain:.2f} times faster ({best})"
    return Choice(best, why, other.forecast().of(best))


def best_as_measured(evidence: Evidence) -> Setting:
    """The probe that was at its loss first."""
    tried = evidence.tried
    times = [
        (cost - math.log(evidence.throughput(evidence.as_it_would_be(each.setting))), number)
        for number, ((cost, _), each) in enumerate(zip(log_costs(tried), tried, strict=True))
    ]
    return evidence.as_it_would_be(tried[min(times)[1]].setting)


def best_by_forecast(evidence: Evidence, groups: int | None = None) -> Setting:
    """Careful with what was not tried; among equals the fewest groups, the fewest samples and the smallest step.

    Args:
        evidence: what is known.
        groups: of the setting; None for any number.
    """
    forecast = evidence.forecast()
    candidates = [each for each in evidence.candidates() if groups in (None, each.groups)]
    return _best_of(evidence, forecast, _promising(evidence, forecast, candidates))


def _best_of(evidence: Evidence, forecast: Forecast, candidates: Sequence[Setting]) -> Setting:
    return least(
        candidates,
        lambda setting: careful(forecast.log_seconds(setting), forecast.efficiency(setting)[1]),
        lambda setting: (
            setting.groups,
            _unusual(setting),
            forecast.efficiency(setting)[0],
            evidence.scaling.step(setting),
        ),
    )


def _promising(evidence: Evidence, forecast: Forecast, candidates: Sequence[Setting]) -> list[Setting]:
    """Of hundreds of settings those that might be the best: the others cannot be, however fast their exchange is."""
    if evidence.prior is None:  # there are few
        return list(candidates)
    bounds = sorted(
        (
            (careful(cost - math.log(evidence.most(each)), error), number, each)
            for number, each in enumerate(candidates)
            for cost, error in [forecast.efficiency(each)]
        ),
    )
    lowest, found = math.inf, []
    for bound, _, each in bounds:
        if bound > lowest + math.log(c.FASTER):
            break
        found.append(evidence.as_it_would_be(each))
        lowest = min(lowest, careful(forecast.log_seconds(found[-1]), forecast.efficiency(found[-1])[1]))
    return found


def _unusual(setting: Setting) -> int:
    """How many things of a setting are there for its speed alone: between equals, the plain one is taken."""
    lossy = [each not in ("", "fp32") for each in (setting.wire, setting.all_reduce)]
    return sum((setting.method != "async_sgd", setting.overlap, bool(setting.merged), *lossy))


def _least_gain(setting: Setting) -> float:
    """Predicted speed-up for which a setting is used: less is known of what several groups cost than of one."""
    return c.GAIN if setting.groups > 1 else c.FASTER


def verdict(evidence: Evidence, is_early: bool = False, may_stay: bool = True, is_hurried: bool = False) -> str:
    """Whether it is certain by now that another setting is better, or that none is; empty if it is neither.

    Args:
        evidence: what is known.
        is_early: whether only proportional batches may be decided on, which leave the updates as they are.
        may_stay: whether it may be that none is better.
        is_hurried: whether it costs little to see more: then nothing is certain whose step times scatter too much. That
            a gain is certain shows sooner than which setting gains most.

    The interval of the hardware forecast gets narrower with every batch that is measured, what is known of samples does
    not: so it counts as it will in the end, with a part of its standard deviation against a change.
    """
    profile, start = evidence.profile, evidence.as_it_would_be(evidence.spec.start)
    if profile is None or (is_early and start == evidence.spec.start):
        return ""
    if is_hurried and not is_early and is_faster(1 + mean_error(evidence.measured), 1.0):
        return ""
    forecast = evidence.forecast()
    promising = _promising(evidence, forecast, evidence.candidates())
    best = _best_of(evidence, forecast, promising)
    if is_early and best != start:
        return ""
    if best == evidence.spec.start:
        return "nothing" if may_stay and _most(evidence, forecast, start, promising) < c.GAIN else ""
    cost, error = forecast.efficiency(best)
    least, _ = _speed_up(evidence, evidence.spec.start, best)
    least *= math.exp(-careful(cost, error))
    return "change" if least > _least_gain(best) else ""


def _most(evidence: Evidence, forecast: Forecast, start: Setting, promising: Sequence[Setting]) -> float:
    """The largest speed-up that any setting may have, by the interval of what hardware does."""
    first = min((each for each in promising if each != start), key=forecast.log_seconds, default=start)
    return _speed_up(evidence, start, first)[1] * math.exp(-forecast.efficiency(first)[0])


def _speed_up(evidence: Evidence, one: Setting, other: Setting) -> tuple[float, float]:
    """The speed-up of another setting over one, at least and at most, by the intervals of what hardware does.

    As if what either is off by had nothing to do with the other. They come from the same steps: it is less.
    """
    now, then = (evidence.prediction(each).samples_per_second for each in (one, other))
    ratio = then.value / now.value
    below = math.hypot(math.log(then.value / then.low), math.log(now.high / now.value))
    above = math.hypot(math.log(then.high / then.value), math.log(now.value / now.low))
    return ratio * math.exp(-below), ratio * math.exp(above)


def _by_experience(evidence: Evidence) -> Choice:
    """The best by what hardware does and what other tasks showed; several groups only for a clear gain."""
    forecast, start = evidence.forecast(), evidence.as_it_would_be(evidence.spec.start)

    def pays(setting: Setting) -> bool:
        _, error = forecast.efficiency(setting)
        gain = forecast.log_seconds(start) - careful(forecast.log_seconds(setting), error)
        return gain >= math.log(_least_gain(setting))

    promising = [each for each in _promising(evidence, forecast, evidence.candidates()) if pays(each)]
    best = _best_of(evidence, forecast, promising) if promising else start
    if best == evidence.spec.start:
        reasons = [
            "nothing is expected to be faster by enough",
            *evidence.corrected,
            _bottleneck(evidence, best),
        ]
        why = "; ".join(reasons)
        return Choice(best, why, forecast.of(best))
    return Choice(best, _reasons(evidence, best, forecast, ""), forecast.of(best))


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
    return Choice(start, "neither smaller nor larger steps are better by enough: the step size stays")


def _bottleneck(evidence: Evidence, setting: Setting) -> str:
    """What holds updates up with a setting; of computation, what holds that up."""
    bottleneck = evidence.prediction(setting).bottleneck
    if loading := evidence.loading(bottleneck):
        return f"loading data is the bottleneck ({loading:.0%} of a step's compute time; more num_workers may help)"
    return f"{bottleneck} is the bottleneck"


def _learnt(level: float, first_loss: float | None) -> float:
    """By how much the run has lowered its loss so far."""
    least = c.PAYS * abs(level)
    return least if first_loss is None else max(first_loss - level, least)


def _too_small(evidence: Evidence) -> str:
    return (
        f"the budget, {evidence.spec.share:.3g} of the run, is too small for one probe of {c.FEWEST_BATCHES} batches of"
        " each rank: nothing was tried or changed; raise budget=, or train for longer"
    )


def _reasons(evidence: Evidence, best: Setting, forecast: Forecast, stopped: str, by_forecast: bool = True) -> str:
    alone = evidence.proposal(1)
    seen = counted(len(evidence.observations), "probe")
    if evidence.prior is not None:
        seen = f"{len(evidence.tried[0].losses)} batches of the run"
    parts = [
        f"predicted to reach the target first, from {seen}" if by_forecast else f"the first of {seen} to reach its loss"
    ]
    if best.groups > 1:
        faster = evidence.throughput(best) / evidence.throughput(alone)
        more = math.exp(forecast.efficiency(best)[0] - forecast.efficiency(alone)[0])
        # Of its samples theory may say something else than the probes did.
        samples = f", for {more:.2f} times the samples" if by_forecast else ""
        parts.append(f"{faster:.2f} times the samples per second of one group{samples}")
    elif best.rebalance or best.all_reduce != alone.all_reduce:
        plain = replace(best, all_reduce=alone.all_reduce)
        if best.all_reduce != plain.all_reduce:
            gain = evidence.throughput(best) / evidence.throughput(plain)
            parts.append(f"averaging gradients by {best.all_reduce} makes one group {gain:.2f} times faster")
        if best.rebalance:
            gain = evidence.throughput(plain) / evidence.throughput(replace(plain, rebalance=False))
            parts.append(f"proportional batches make one group {gain:.2f} times faster, without staleness")
    elif by_forecast:
        parts.append("more groups are not faster by enough to pay for their staleness")
    parts += [*evidence.corrected, _bottleneck(evidence, best)]
    return ("; ".join(parts) + (f" ({stopped})" if stopped else "")).strip()
