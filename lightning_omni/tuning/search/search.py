"""`Search`, the tuner's decisions without a trainer, a cluster or a clock.

Its caller, a Lightning fit or the simulator, decides nothing. Equal inputs lead to equal choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_omni.tuning.model.measured import Measured
from lightning_omni.tuning.search.choice import Choice
from lightning_omni.tuning.search.evidence import Evidence, Observation, TrainedSegment
from lightning_omni.tuning.search.phase import Phase
from lightning_omni.tuning.search.specification import SearchSpec


class Search(Evidence):
    """A search for the setting to train with next, driven by the observations passed to it.

    Attributes:
        overhead: seconds spent deciding and forming groups; the caller adds to it.

    Args:
        spec: the specification of the search.
        observation: the measurements of the first batches.
        known: earlier measurements of the same ranks in one group, with other batches.
        segments: the segments that the run has trained since.

    Example:
        >>> from lightning_omni.tuning.model.forecast import Setting, TrainedBatches
        >>> from lightning_omni.tuning.model.measured import Measured
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
        self.phase = Phase(self)

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
            "phase": self.phase.to_dict(),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Search:
        """Rebuild a search from `to_dict`, including its last choice."""
        known = [Measured.from_dict(each) for each in plain["known"]]
        segments = [TrainedSegment.from_dict(each) for each in plain["segments"]]
        search = cls(SearchSpec.from_dict(plain["spec"]), Observation.from_dict(plain["observation"]), known, segments)
        search.overhead, search.widths = plain["overhead"], dict(plain["widths"])
        search.phase.load(plain["phase"])
        return search

    def choice(self, asks: bool = True) -> Choice:
        """Return the setting with the shortest predicted time to the target.

        Args:
            asks: whether scikit-optimize proposes a setting, too; a choice that was made before is returned unchanged.
        """
        return self.phase.choice(asks)
