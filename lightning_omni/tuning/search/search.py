"""`Search`, the tuner's decisions without a trainer, a cluster or a clock.

Its caller, a Lightning fit or the simulator, decides nothing. Equal inputs lead to equal choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.choice import (
    Choice,
    best_enumerated,
    explain,
    is_worth_switching,
    is_worth_trying,
    risk_adjusted_seconds,
)
from lightning_omni.tuning.search.evidence import Evidence, Observation, TrainedSegment
from lightning_omni.tuning.search.optimization import (
    ASKED,
    ConsideredSetting,
    Optimization,
    is_same_exchange,
)
from lightning_omni.tuning.search.space import SearchSpec


class Search(Evidence):
    """A search for the setting to train with next, driven by the observations passed to it.

    Attributes:
        overhead: seconds spent deciding and forming groups; the caller adds to it.
        considered: the settings that were compared for the choice.

    Args:
        spec: the specification of the search.
        observation: the measurements of the first batches.
        known: earlier measurements of the same ranks in one group, with other batches.
        segments: the segments that the run has trained since.

    Example:
        >>> from lightning_omni.tuning.model.forecast import Setting, TrainedBatches
        >>> from lightning_omni.tuning.model.measurements import Measured
        >>> from lightning_omni.tuning.search import Observation, SearchSpec, Space
        >>> spec = SearchSpec(Setting(1, 0.9, 0.1), batch=64, horizon=64_000, space=Space((1, 2)))
        >>> batches = TrainedBatches(spec.start, (64.0, 128.0, 192.0), (2.3, 2.2, 2.1))
        >>> times = Measured(((0, 1),), ((32,) * 3,) * 2, ((0.1,) * 3,) * 2, ((0.1,) * 3,), ((0.0,) * 3,))
        >>> str(Search(spec, Observation(batches, times)).choice().setting)
        '1 group, momentum 0.9, lr 0.1'
    """

    observation: Observation

    def __init__(
        self,
        spec: SearchSpec,
        observation: Observation,
        known: Sequence[Measured] = (),
        segments: Sequence[TrainedSegment] = (),
    ) -> None:
        super().__init__(spec, known, observation, segments)
        self.overhead = 0.0
        self.considered: list[ConsideredSetting] = []
        self._chosen: tuple[Setting, str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the search from `to_dict` when it is copied or unpickled."""
        return type(self).from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the search as plain values."""
        return {
            "spec": self.spec.to_dict(),
            "observation": self.observation.to_dict(),
            "known": [each.to_dict() for each in self.known],
            "segments": [each.to_dict() for each in self.segments],
            "overhead": self.overhead,
            "widths": self.widths,
            "chosen": [self._chosen[0].to_dict(), self._chosen[1]] if self._chosen is not None else None,
            "considered": [each.to_dict() for each in self.considered],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Search:
        """Rebuild a search from `to_dict`, including its last choice."""
        known = [Measured.from_dict(each) for each in plain["known"]]
        segments = [TrainedSegment.from_dict(each) for each in plain["segments"]]
        search = cls(SearchSpec.from_dict(plain["spec"]), Observation.from_dict(plain["observation"]), known, segments)
        search.overhead, search.widths = plain["overhead"], dict(plain["widths"])
        search.considered = [ConsideredSetting.from_dict(each) for each in plain["considered"]]
        if plain["chosen"] is not None:
            setting, why = plain["chosen"]
            search._chosen = Setting.from_dict(setting), why
        return search

    def choice(self, asks: bool = True) -> Choice:
        """Return the setting with the shortest predicted time to the target, and the reasons.

        Args:
            asks: whether scikit-optimize proposes a setting, too; otherwise the best of the list is chosen. A choice
                that was made before is returned unchanged.
        """
        if self._chosen is None:
            found = self._choose(asks)
            self._chosen = found.setting, found.why
        setting, why = self._chosen
        return Choice(setting, why, self.forecast().of(setting) if self.observation.batches.is_finite else None)

    def _choose(self, asks: bool) -> Choice:
        if not self.observation.batches.is_finite:
            why = "the loss of the first batches is not finite: nothing was changed; lower the learning rate"
            return Choice(self.spec.start, why)
        listed = best_enumerated(self)
        if not asks:
            return explain(self, listed)
        self.considered = Optimization(self).considered(listed)
        eligible = [each for each in self.considered if self._is_eligible(each, listed)]
        best = max(eligible, key=lambda each: each.improvement, default=None)
        if best is None or best.setting == listed:
            return explain(self, listed)
        is_asked = best.by == ASKED
        return explain(self, best.setting, f"proposed by {ASKED}" if is_asked else "it was as fast when trained")

    def _is_eligible(self, each: ConsideredSetting, listed: Setting) -> bool:
        """Return whether a setting is worth a change and no worse than the best of the list.

        A setting that exchanges in another way must be clearly better. Of the eligible settings, the largest expected
        improvement favours the least certain one, so that an unknown value in a user-defined dimension is tried.
        """
        most = risk_adjusted_seconds(self, listed)
        tried = {segment.setting.further for segment in self.segments} - {self.start.further}
        if not is_same_exchange(each.setting, listed):
            most -= math.log(c.FASTER)  # the list has decided ties
        if risk_adjusted_seconds(self, each.setting) > most + 1e-9:
            return False
        may_try = each.setting.further not in tried and len(tried) < c.MOST_TRIED
        is_new = may_try and each.setting.further != listed.further and each.improvement >= math.log(c.FASTER)
        return is_worth_switching(self, each.setting) or (is_new and is_worth_trying(self, each.setting))
