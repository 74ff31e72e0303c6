"""`Plan`: a report about other machines, which ``lightning-omni plan`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model.profile import BOTTLENECKS, Prediction, Profile
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.report.summary import duration
from lightning_omni.tuning.search import Search, SearchSpec, Space
from lightning_omni.tuning.search.choice import best_by_forecast, cheapest, risk_adjusted
from lightning_omni.tuning.search.evidence import PlannedEvidence, is_faster
from lightning_omni.tuning.search.space import group_counts

# --- Predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanRow:
    """The prediction for the best known setting with one number of groups.

    Args:
        efficiency: logarithm of the samples to a target, up to a constant, and its standard deviation.
        is_extrapolated: whether no simulation has had as many groups or local steps.
    """

    setting: Setting
    prediction: Prediction
    efficiency: tuple[float, float]
    is_extrapolated: bool

    @property
    def log_seconds(self) -> float:
        return self.efficiency[0] - math.log(self.prediction.samples_per_second.value)

    @property
    def risk_adjusted(self) -> float:
        return risk_adjusted(self.log_seconds, self.efficiency[1])


@dataclass(frozen=True)
class Plan:
    """The predictions for planned machines, for each number of groups.

    ``changes`` of the machines in ``search`` are arguments of `Profile.scaled`; ``own`` is the setting of one group.
    Groups may exchange, and their members average gradients, as in ``ways``; numbers of groups follow from the ranks.
    """

    search: Search
    changes: Mapping[str, Any]
    own: Setting
    ways: Space

    @cached_property
    def profile(self) -> Profile:
        measured = self.search.profile
        try:
            return measured.scaled(**self.changes)
        except ConfigurationError as error:
            raise ConfigurationError(f"--{error}") from error

    @cached_property
    def rows(self) -> list[PlanRow]:
        return [self._row(groups) for groups in self._evidence.possible_groups]

    def _row(self, groups: int) -> PlanRow:
        evidence = self._evidence
        best = best_by_forecast(evidence, groups)
        theory = evidence.theory
        is_extrapolated = not theory.covers(best)
        return PlanRow(best, evidence.prediction(best), (theory(best), theory.error(best)), is_extrapolated)

    @cached_property
    def _evidence(self) -> PlannedEvidence:
        profile, spec = self.profile, self.search.spec
        space = replace(self.ways, groups=tuple(group_counts(profile.ranks)), rebalance=spec.space.rebalance)
        batch = max(1, round(profile.ranks * profile.batch_size))
        return PlannedEvidence(SearchSpec(self.own, batch, batch, space, spec.scaling), profile)

    @cached_property
    def best(self) -> PlanRow:
        known = [row for row in self.rows if not row.is_extrapolated]
        return cheapest(known, lambda row: row.risk_adjusted, lambda row: row.setting.groups)

    def relative(self, row: PlanRow) -> float:
        return math.exp(row.log_seconds - self.best.log_seconds)

    def seconds(self, row: PlanRow, samples: float) -> float:
        return samples * math.exp(row.log_seconds - self.rows[0].efficiency[0])

    def changed(self, **changes: Any) -> Plan:
        return replace(self, changes={**self.changes, **changes})


# --- Text ------------------------------------------------------------------------------------------------------------


def title(plan: Plan) -> str:
    profile, count = plan.profile, plan.profile.model.servers
    servers = f", {count} servers" if count > 1 else ""
    return f"{profile.ranks} ranks, {_speeds(profile)}{servers}"


def rows(plan: Plan, samples: float | None) -> list[dict[str, str]]:
    """Return a row for each number of groups, by the heads of the columns; * marks extrapolated values."""
    fewest = min(each.efficiency[0] for each in plan.rows)
    return [
        {
            "groups": f"{'★ ' if row is plan.best else ''}{row.setting.groups}",
            "batches": "proportional" if row.setting.rebalance else "equal",
            "exchange": row.setting.exchange or "-",
            "samples/s": str(row.prediction.samples_per_second),
            "ms/update": f"{1000 * row.prediction.seconds_per_update.value:.4g}",
            "bottleneck": BOTTLENECKS[row.prediction.bottleneck],
            "samples": f"{math.exp(row.efficiency[0] - fewest):.2f}×{'*' * row.is_extrapolated}",
            "time": f"{plan.relative(row):.2f}×{'*' * row.is_extrapolated}",
            **({"hours": f"{plan.seconds(row, samples) / 3600:.3g}"} if samples is not None else {}),
            "momentum": f"{row.setting.momentum:.3g}",
            "lr": f"{row.setting.lr:.3g}",
        }
        for row in plan.rows
    ]


def _speeds(profile: Profile) -> str:
    slowest, fastest = min(profile.speeds), max(profile.speeds)
    if not is_faster(fastest, slowest):
        return f"{fastest:.4g} samples/s each"
    return f"{slowest:.4g} to {fastest:.4g} samples/s each"


def sentences(plan: Plan, samples: float | None) -> list[str]:
    best = plan.best
    alone = plan.relative(plan.rows[0])
    text = f"use {best.setting}: {best.prediction.samples_per_second.value:.4g} samples/s"
    if best.setting.groups > 1:
        text += f", {alone:.2f} times faster to the target than one group"
    if samples is not None:
        text += f", {duration(plan.seconds(best, samples))} for {samples:.4g} samples"
    lines = [text, f"buy next: {_advice(plan)}"]
    profile, measured = plan.profile, plan.search.profile
    growth = profile.ranks * profile.batch_size / (measured.ranks * measured.batch_size)
    if abs(growth - 1) > 0.01:
        lines.append(
            f"batches of all ranks together are {growth:.3g} times those that were measured; the samples to a target"
            " are taken to be the same"
        )
    if profile.ranks > measured.ranks:
        lines.append(
            f"extrapolated: {profile.ranks} ranks, of which {measured.ranks} were measured; the others are taken"
            " to have the same speeds"
        )
    if any(row.is_extrapolated for row in plan.rows):
        lines.append("*: extrapolated, because no simulation had as many groups or local steps; never recommended")
    lines.append("the samples that groups need, their momentum and rate are what other tasks showed in simulation")
    return lines


def _advice(plan: Plan) -> str:
    bottleneck = plan.best.prediction.bottleneck
    if bottleneck == "compute":
        count = 2 * plan.profile.ranks
        change, other = f"{count} ranks", plan.changed(ranks=count)
    elif bottleneck in ("allreduce", "exchange", "link") and "bandwidth" in plan.changes:
        change, other = "twice the bandwidth", plan.changed(bandwidth=2 * plan.changes["bandwidth"])
    elif bottleneck in ("server", "link") and not plan.profile.model.per_node:
        count = 2 * plan.profile.model.servers
        change, other = f"{count} servers", plan.changed(servers=count)
    else:
        what = "servers twice as fast" if bottleneck == "server" else "a network twice as fast"
        faster = f"{what} would be at most {_halved(plan.best.prediction):.2f} times faster"
        return f"{BOTTLENECKS[bottleneck]} is the bottleneck; {faster}"
    gain = math.exp(plan.best.log_seconds - other.best.log_seconds)
    faster = f"{change} would be {gain:.2f} times faster to the target, with {other.best.setting}"
    return f"{BOTTLENECKS[bottleneck]} is the bottleneck; {faster}"


def _halved(prediction: Prediction) -> float:
    parts: Mapping[str, float] = prediction.parts
    name = "serve" if prediction.bottleneck == "server" else prediction.bottleneck
    seconds = prediction.seconds_per_update.value
    if name in ("allreduce", "exchange"):
        return seconds / (seconds - parts[name] / 2)
    step = parts["compute"] + parts["allreduce"] + parts["exchange"]
    rest = [parts[other] for other in ("serve", "link") if other != name]
    return seconds / max(step, parts[name] / 2, *rest)
