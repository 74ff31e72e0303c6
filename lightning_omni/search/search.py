"""What `OmniTuner` decides by, and what it chooses: the tuner without a trainer, a cluster or a clock.

A `Search` is told what the first batches of a run showed, and what was seen of settings that were trained with since,
and says what to train with from now on. What trains (a Lightning fit, the simulator) does not decide anything, and this
decides the same whenever it is told the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_omni.performance.measured import Measured
from lightning_omni.search.choice import Choice
from lightning_omni.search.evidence import Evidence, Observation, TrainedSegment
from lightning_omni.search.phase import Phase
from lightning_omni.search.specification import SearchSpec


class Search(Evidence):
    """Chooses a setting.

    Attributes:
        overhead: seconds that it took; what carries it out adds them up.

    Args:
        spec: what is searched.
        observation: what the first batches showed.
        known: what was measured of the same ranks in one group before, with other batches.
        segments: what the run has trained with since.

    Example:
        >>> from lightning_omni.performance.forecast import Setting, TrainedBatches
        >>> from lightning_omni.performance.measured import Measured
        >>> from lightning_omni.search import Observation, SearchSpec, Space
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
        """A copy, here or in another process, is told all of it once more."""
        return type(self).from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Everything that there is to know, in plain values."""
        return {
            "spec": self.spec.to_dict(),
            "observation": self.observation.to_dict(),
            "known": [each.to_dict() for each in self.known],
            "segments": [each.to_dict() for each in self.segments],
            "overhead": self.overhead,
            "phase": self.phase.to_dict(),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Search:
        """What `to_dict` gave; what was chosen is not chosen once more."""
        known = [Measured.from_dict(each) for each in plain["known"]]
        segments = [TrainedSegment.from_dict(each) for each in plain["segments"]]
        search = cls(SearchSpec.from_dict(plain["spec"]), Observation.from_dict(plain["observation"]), known, segments)
        search.overhead = plain["overhead"]
        search.phase.load(plain["phase"])
        return search

    def choice(self, asks: bool = True) -> Choice:
        """The setting that is expected to be at the target first, as far as is known.

        Args:
            asks: whether scikit-optimize is asked, too, if nothing was chosen yet.
        """
        return self.phase.choice(asks)
