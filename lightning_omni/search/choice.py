"""The best of all settings that can be enumerated, by what is known, and whether it is worth a change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_omni.performance.forecast import Forecast, Setting, SettingEstimate
from lightning_omni.performance.measured import Measured
from lightning_omni.search import constants as c
from lightning_omni.search.evidence import Evidence, Observation, mean_error
from lightning_omni.search.rules import careful, is_faster, least


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


def log_seconds(evidence: Evidence, setting: Setting, forming: bool = True) -> float:
    """The logarithm of the seconds from now to the end of the run with a setting.

    Args:
        evidence: what is known.
        setting: from now on.
        forming: whether forming its groups is included.
    """
    spec, forecast, start = evidence.spec, evidence.forecast(), evidence.start
    by_samples = math.inf if spec.ends_by_time else spec.horizon / max(evidence.throughput(start), 1e-12)
    left = min(spec.seconds, by_samples)
    seconds = left * math.exp(forecast.log_seconds(setting) - forecast.log_seconds(start))
    return math.log(max(seconds + spec.switch * (forming and _is_formed(evidence, setting)), 1e-12))


def _is_formed(evidence: Evidence, setting: Setting) -> bool:
    """Whether groups have to be formed for a setting: all that one group may change it changes where it is."""
    return setting.groups > 1 and setting != evidence.start


def allowed_seconds(evidence: Evidence) -> float:
    """Seconds that forming groups may take."""
    spec = evidence.spec
    return spec.allowance + spec.budget * math.exp(log_seconds(evidence, evidence.start))


def gains(evidence: Evidence, setting: Setting, forming: bool = True) -> bool:
    """Whether a setting is expected to gain what a change asks for; several groups only for a clear gain."""
    gain = log_seconds(evidence, evidence.start)
    gain -= careful(log_seconds(evidence, setting, forming), evidence.theory.error(setting))
    return gain >= math.log(_least_gain(setting))


def pays(evidence: Evidence, setting: Setting) -> bool:
    """Whether a setting gains enough, and forming its groups takes no longer than it may."""
    is_affordable = setting.groups == 1 or evidence.spec.switch <= allowed_seconds(evidence)
    return is_affordable and gains(evidence, setting)


def pays_or_stays(evidence: Evidence, setting: Setting) -> bool:
    """Whether a setting is worth a change but for a user's own dimensions, or is what the run has but for these."""
    plain = replace(setting, further=evidence.start.further)
    return plain == evidence.start or pays(evidence, plain)


def best_listed(evidence: Evidence) -> Setting:
    """The best of all settings that can be enumerated and are worth a change; else what the run has."""
    forecast = evidence.forecast()
    promising = [each for each in promising_settings(evidence, forecast) if pays(evidence, each)]
    return _best_of(evidence, forecast, promising) if promising else evidence.start


def explained(evidence: Evidence, setting: Setting, proposed: str = "") -> Choice:
    """A choice, with its reasons.

    Args:
        evidence: by which it was chosen.
        setting: that was chosen.
        proposed: what proposed it, if it was not found in the list.
    """
    if setting == evidence.spec.start:
        reasons = ["nothing is expected to be faster by enough"]
        if any(gains(evidence, each, forming=False) for each in promising_settings(evidence, evidence.forecast())):
            reasons = [_too_short(evidence)]
        why = "; ".join([*reasons, *evidence.corrected, _bottleneck(evidence, setting)])
    else:
        why = _reasons(evidence, setting, proposed)
    return Choice(setting, why, evidence.forecast().of(setting))


def _too_short(evidence: Evidence) -> str:
    """Why groups are not formed that would train faster."""
    spec, left = evidence.spec, math.exp(log_seconds(evidence, evidence.start))
    allowed = max(0.0, allowed_seconds(evidence))
    text = f"forming groups takes {spec.switch:.2g} s of the {left:,.4g} s that are left"
    if spec.switch > allowed:
        return f"{text}, and budget={spec.budget:g} allows {allowed:.2g} s"
    return f"{text}; with that they are not faster by enough"


def gain_of_merging(evidence: Evidence) -> Choice | None:
    """What would be chosen if a submodule that was measured could be merged; None if that is not clearly faster.

    Args:
        evidence: by which a setting was chosen that merges none.
    """
    if not evidence.profile.heads:
        return None
    spec = replace(evidence.spec, space=replace(evidence.spec.space, merged=tuple(evidence.profile.heads)))
    found = _gain_with(evidence, Evidence(spec, evidence.known, evidence.observation, evidence.segments))
    return found if found is not None and found.setting.merged else None


def gain_of_servers(evidence: Evidence, nodes: int) -> Choice | None:
    """What would be chosen if there were a server on each node; None if that is not clearly faster.

    Args:
        evidence: by which a setting was chosen with one server.
        nodes: how many.
    """

    def spread(measured: Measured) -> Measured:
        return replace(measured, servers=nodes, per_node=True)

    observation: Observation | None = evidence.observation
    if observation is not None:
        observation = replace(observation, measured=spread(observation.measured))
    known = [spread(each) for each in evidence.known]
    found = _gain_with(evidence, Evidence(evidence.spec, known, observation, evidence.segments))
    return found if found is not None and found.setting.groups > 1 else None


def _gain_with(evidence: Evidence, other: Evidence) -> Choice | None:
    """What would be chosen by other evidence; None if that is not clearly faster than what is chosen by this."""
    chosen, best = best_listed(evidence), best_listed(other)
    gain = math.exp(evidence.forecast().log_seconds(chosen) - other.forecast().log_seconds(best))
    if gain < c.GAIN:
        return None
    why = f"the target is predicted to be reached {gain:.2f} times faster ({best})"
    return Choice(best, why, other.forecast().of(best))


def best_by_forecast(evidence: Evidence, groups: int | None = None) -> Setting:
    """Careful with what was not tried; among equals the fewest groups, the fewest samples and the smallest step.

    Args:
        evidence: what is known.
        groups: of the setting; None for any number.
    """
    forecast = evidence.forecast()
    return _best_of(evidence, forecast, promising_settings(evidence, forecast, groups))


def _best_of(evidence: Evidence, forecast: Forecast, candidates: Sequence[Setting]) -> Setting:
    return least(
        candidates,
        lambda setting: careful(forecast.log_seconds(setting), forecast.theory.error(setting)),
        lambda setting: (
            setting.groups,
            _unusual(setting),
            forecast.theory(setting),
            evidence.scaling.step(setting),
        ),
    )


def promising_settings(evidence: Evidence, forecast: Forecast, groups: int | None = None) -> list[Setting]:
    """Of hundreds of settings those that might be the best: the others cannot be, however fast their exchange is.

    Args:
        evidence: what is known.
        forecast: by it.
        groups: of the settings; None for any number.
    """
    candidates = [each for each in evidence.candidates() if groups in (None, each.groups)]
    bounds = sorted(
        (careful(forecast.theory(each) - math.log(evidence.most(each)), forecast.theory.error(each)), number, each)
        for number, each in enumerate(candidates)
    )
    lowest, found = math.inf, []
    for bound, _, each in bounds:
        if bound > lowest + math.log(c.FASTER):
            break
        found.append(evidence.as_it_would_be(each))
        lowest = min(lowest, careful(forecast.log_seconds(found[-1]), forecast.theory.error(found[-1])))
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
    start = evidence.start
    if is_early and start == evidence.spec.start:
        return ""
    if is_hurried and not is_early and is_faster(1 + mean_error(evidence.measured), 1.0):
        return ""
    forecast = evidence.forecast()
    promising = promising_settings(evidence, forecast)
    best = _best_of(evidence, forecast, promising)
    if is_early and best != start:
        return ""
    if best == evidence.spec.start:
        return "nothing" if may_stay and _most(evidence, forecast, start, promising) < c.GAIN else ""
    least, _ = _speed_up(evidence, evidence.spec.start, best)
    least *= math.exp(-careful(forecast.theory(best), forecast.theory.error(best)))
    return "change" if least > _least_gain(best) else ""


def _most(evidence: Evidence, forecast: Forecast, start: Setting, promising: Sequence[Setting]) -> float:
    """The largest speed-up that any setting may have, by the interval of what hardware does."""
    first = min((each for each in promising if each != start), key=forecast.log_seconds, default=start)
    return _speed_up(evidence, start, first)[1] * math.exp(-forecast.theory(first))


def _speed_up(evidence: Evidence, one: Setting, other: Setting) -> tuple[float, float]:
    """The speed-up of another setting over one, at least and at most, by the intervals of what hardware does.

    As if what either is off by had nothing to do with the other. They come from the same steps: it is less.
    """
    now, then = (evidence.prediction(each).samples_per_second for each in (one, other))
    ratio = then.value / now.value
    below = math.hypot(math.log(then.value / then.low), math.log(now.high / now.value))
    above = math.hypot(math.log(then.high / then.value), math.log(now.value / now.low))
    return ratio * math.exp(-below), ratio * math.exp(above)


def _bottleneck(evidence: Evidence, setting: Setting) -> str:
    """What holds updates up with a setting; of computation, what holds that up."""
    bottleneck = evidence.prediction(setting).bottleneck
    if loading := evidence.loading(bottleneck):
        return f"loading data is the bottleneck ({loading:.0%} of a step's compute time; more num_workers may help)"
    return f"{bottleneck} is the bottleneck"


def _reasons(evidence: Evidence, best: Setting, proposed: str = "") -> str:
    batches = len(evidence.observation.batches.losses) if evidence.observation is not None else 0
    alone, forecast = evidence.start, evidence.forecast()
    changed = [each for each in best.further if each not in alone.further]
    parts = [f"{proposed or 'predicted to reach the target first'}, from {batches} batches of the run"]
    if best.groups > 1:
        faster = evidence.throughput(best) / evidence.throughput(alone)
        more = math.exp(forecast.theory(best) - forecast.theory(alone))
        parts.append(f"{faster:.2f} times the samples per second of one group, for {more:.2f} times the samples")
    elif best.rebalance or best.all_reduce != alone.all_reduce:
        plain = replace(best, all_reduce=alone.all_reduce)
        if best.all_reduce != plain.all_reduce:
            gain = evidence.throughput(best) / evidence.throughput(plain)
            parts.append(f"averaging gradients by {best.all_reduce} makes one group {gain:.2f} times faster")
        if best.rebalance:
            gain = evidence.throughput(plain) / evidence.throughput(replace(plain, rebalance=False))
            parts.append(f"proportional batches make one group {gain:.2f} times faster, without staleness")
    if changed:
        values = ", ".join(f"{name}={value}" for name, value in changed)
        gain = evidence.throughput(best) / evidence.throughput(replace(best, further=alone.further))
        known = best.further in [each.setting.further for each in evidence.segments]
        parts.append(f"with {values} it was {gain:.2f} times faster" if known else f"nothing is known of {values} yet")
    return "; ".join([*parts, *evidence.corrected, _bottleneck(evidence, best)])
