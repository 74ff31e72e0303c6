"""The best of all settings that can be enumerated, and whether it is worth a change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, TypeVar

from lightning_omni.json_dataclasses import Serializable
from lightning_omni.tuning.model.profile import BOTTLENECKS
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.evidence import Evidence, is_faster, mean_error

Option = TypeVar("Option")


def risk_adjusted(log_cost: float, deviation: float) -> float:
    return log_cost + c.CAUTION * deviation


def cheapest(options: Sequence[Option], log_cost: Callable[[Option], float], order: Callable[[Option], Any]) -> Option:
    """Return the cheapest option; among options that tie with it, the first in an order."""
    lowest = min(map(log_cost, options))
    return min((each for each in options if log_cost(each) <= lowest + math.log(c.FASTER)), key=order)


@dataclass(frozen=True)
class Choice(Serializable):
    """The setting that a search has chosen, with its reasons for the user."""

    setting: Setting
    why: str

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(str(self.setting))}</b><br>{escape(self.why)}</p>"


def log_seconds(evidence: Evidence, setting: Setting, forming: bool = True) -> float:
    """Return the log of the predicted seconds from now to the end; ``forming`` includes the time to form groups."""
    spec, start = evidence.spec, evidence.start
    left = spec.horizon / max(evidence.throughput(start), 1e-12)
    seconds = left * math.exp(evidence.log_time(setting) - evidence.log_time(start))
    needs_forming = forming and setting.groups > 1 and setting != start
    return math.log(max(seconds + spec.switch * needs_forming, 1e-12))


def allowed_seconds(evidence: Evidence) -> float:
    spec = evidence.spec
    return spec.allowance + spec.budget * math.exp(log_seconds(evidence, evidence.start))


def risk_adjusted_seconds(evidence: Evidence, setting: Setting, forming: bool = True) -> float:
    return risk_adjusted(log_seconds(evidence, setting, forming), evidence.theory.error(setting))


def gains_enough(evidence: Evidence, setting: Setting, forming: bool = True) -> bool:
    gain = log_seconds(evidence, evidence.start) - risk_adjusted_seconds(evidence, setting, forming)
    return gain >= math.log(_least_gain(setting))


def is_worth_switching(evidence: Evidence, setting: Setting) -> bool:
    is_affordable = setting.groups == 1 or evidence.spec.switch <= allowed_seconds(evidence)
    return is_affordable and gains_enough(evidence, setting)


def worthwhile_settings(evidence: Evidence) -> list[Setting]:
    promising = promising_settings(evidence)
    return [each for each in promising if is_worth_switching(evidence, each)]


def best_enumerated(evidence: Evidence) -> Setting:
    worthwhile = worthwhile_settings(evidence)
    return _best_of(evidence, worthwhile) if worthwhile else evidence.start


def explain(evidence: Evidence, setting: Setting, proposed: str = "") -> str:
    """Return the reasons of a choice; ``proposed`` names the source of a setting that is not from the list."""
    if setting != evidence.spec.start:
        return _reasons(evidence, setting, proposed)
    promising = promising_settings(evidence)
    is_too_short = any(gains_enough(evidence, each, forming=False) for each in promising)
    reason = _why_too_short(evidence) if is_too_short else "nothing is expected to be faster by enough"
    return "; ".join([reason, *evidence.corrections, _bottleneck(evidence, setting)])


def _why_too_short(evidence: Evidence) -> str:
    spec, left = evidence.spec, math.exp(log_seconds(evidence, evidence.start))
    allowed = max(0.0, allowed_seconds(evidence))
    text = f"forming groups takes {spec.switch:.2g} s of the {left:,.4g} s that are left"
    if spec.switch > allowed:
        return f"{text}, and budget={spec.budget:g} allows {allowed:.2g} s"
    return f"{text}; with that they are not faster by enough"


def best_by_forecast(evidence: Evidence, groups: int | None = None) -> Setting:
    """Return the best setting by the forecast, worth a change or not; ``groups`` fixes the number of groups.

    Uncertainty counts against a setting. Ties are decided by the fewest groups, the plainest exchange, the fewest
    samples and the smallest step, in this order.
    """
    return _best_of(evidence, promising_settings(evidence, groups))


def _best_of(evidence: Evidence, candidates: Sequence[Setting]) -> Setting:
    return cheapest(
        candidates,
        lambda setting: _risk_adjusted(evidence, setting),
        lambda setting: (
            setting.groups,
            _complexity(setting),
            evidence.theory(setting),
            evidence.scaling.step(setting),
        ),
    )


def promising_settings(evidence: Evidence, groups: int | None = None) -> list[Setting]:
    """Return, of hundreds of settings, those that may be the best; the others would lose even with a free exchange."""
    theory, candidates = evidence.theory, [each for each in evidence.candidates if groups in (None, each.groups)]
    bounds = sorted(
        (
            risk_adjusted(theory(each) - math.log(evidence.throughput_bound(each)), theory.error(each)),
            number,
            each,
        )
        for number, each in enumerate(candidates)
    )
    lowest, found = math.inf, []
    for bound, _, each in bounds:
        if bound > lowest + math.log(c.FASTER):
            break
        found.append(evidence.with_rebalance(each))
        lowest = min(lowest, _risk_adjusted(evidence, found[-1]))
    return found


def _risk_adjusted(evidence: Evidence, setting: Setting) -> float:
    return risk_adjusted(evidence.log_time(setting), evidence.theory.error(setting))


def _complexity(setting: Setting) -> int:
    lossy = [each not in ("", "fp32") for each in (setting.wire, setting.all_reduce)]
    return sum((setting.method != "async_sgd", setting.overlap, *lossy))


def _least_gain(setting: Setting) -> float:
    return c.GAIN if setting.groups > 1 else c.FASTER


def verdict(evidence: Evidence, is_early: bool = False, may_stay: bool = True, can_wait: bool = False) -> str:
    """Return "change" if another setting is certainly better, "nothing" if none is, and "" if neither is certain.

    A part of the standard deviation of the predicted samples always counts against a change.

    With ``is_early``, only proportional batches may be decided on, which leave the updates unchanged. Without
    ``may_stay``, "nothing" is not returned. With ``can_wait``, measuring more costs little, and step times that scatter
    much decide nothing.
    """
    start = evidence.start
    if is_early and start == evidence.spec.start:
        return ""
    if can_wait and not is_early and is_faster(1 + mean_error(evidence.measured), 1.0):
        return ""
    theory, promising = evidence.theory, promising_settings(evidence)
    best = _best_of(evidence, promising)
    if is_early and best != start:
        return ""
    if best == evidence.spec.start:
        fastest = min((each for each in promising if each != start), key=evidence.log_time, default=start)
        most = _speed_up(evidence, start, fastest)[1] * math.exp(-theory(fastest))
        return "nothing" if may_stay and most < c.GAIN else ""
    least, _ = _speed_up(evidence, evidence.spec.start, best)
    least *= math.exp(-risk_adjusted(theory(best), theory.error(best)))
    return "change" if least > _least_gain(best) else ""


def _speed_up(evidence: Evidence, one: Setting, other: Setting) -> tuple[float, float]:
    """Return the lower and upper bound of another setting's speed-up, by the intervals of the hardware forecast.

    The errors of both settings are treated as independent.
    """
    now, then = (evidence.prediction(each).samples_per_second for each in (one, other))
    ratio = then.value / now.value
    below = math.hypot(math.log(then.value / then.low), math.log(now.high / now.value))
    above = math.hypot(math.log(then.high / then.value), math.log(now.value / now.low))
    return ratio * math.exp(-below), ratio * math.exp(above)


def _bottleneck(evidence: Evidence, setting: Setting) -> str:
    bottleneck = evidence.prediction(setting).bottleneck
    if loading := evidence.loading(bottleneck):
        return f"loading data is the bottleneck ({loading:.0%} of a step's compute time; more num_workers may help)"
    return f"{BOTTLENECKS[bottleneck]} is the bottleneck"


def _reasons(evidence: Evidence, best: Setting, proposed: str = "") -> str:
    batches = len(evidence.observation.batches.samples) if evidence.observation is not None else 0
    own = evidence.spec.start
    changed = [each for each in best.further if each not in own.further]
    faster = evidence.throughput(best) / evidence.throughput(own)
    more = math.exp(evidence.theory(best) - evidence.theory(own))
    parts = [
        f"{proposed or 'predicted to reach the target first'}, from {batches} batches of the run",
        f"{faster:.2f} times the samples per second of your own setting, for {more:.2f} times the samples",
    ]
    if changed:
        values = ", ".join(f"{name}={value}" for name, value in changed)
        gain = evidence.throughput(best) / evidence.throughput(replace(best, further=own.further))
        known = best.further in [each.setting.further for each in evidence.segments]
        parts.append(f"with {values} it was {gain:.2f} times faster" if known else f"nothing is known of {values} yet")
    return "; ".join([*parts, *evidence.corrections, _bottleneck(evidence, best)])
