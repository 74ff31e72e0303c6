"""What `OmniTuner` tries next, and what it chooses: the tuner without a trainer, a cluster or a clock.

A `Search` is told what probes showed and says which comes next. What runs the probes (a Lightning fit, the
simulator) does not decide anything, and this decides the same whenever it is told the same: so a checkpoint holds the
observations, and a resumed search replays them.

Rule 1: one probe with as many groups as may be and one with a single group come first: from these two the hardware
model knows the speed of everything between, and both are points of the search.
Rule 2: all probes train on the same samples from the same snapshot.
Rule 3: no probe begins that would not end within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_omni.checks import counted
from lightning_omni.performance.forecast import Setting
from lightning_omni.performance.measured import Measured
from lightning_omni.search import constants as c
from lightning_omni.search.choice import Choice, choose
from lightning_omni.search.evidence import Evidence, GroupSpeed, Observation
from lightning_omni.search.prior import Prior
from lightning_omni.search.samplers import Steps, sampler_of
from lightning_omni.search.specification import SearchSpec, StepSearchSpec


@dataclass(frozen=True)
class Probe:
    """What is to be tried next.

    Attributes:
        number: of the probe, from 0.
        setting: to train with.
        samples: to train on, all groups together; 0 for batches that the run itself trains, as many as it takes.
        why: in a few words.
    """

    number: int
    setting: Setting
    samples: int
    why: str


class Search(Evidence):
    """Proposes probes and chooses a setting.

    Attributes:
        probes: what was tried.
        overhead: seconds that the search took beside its probes; what carries them out adds them up.
        stopped: why it was stopped, if it was.
        is_over: whether there are no more probes.

    Args:
        spec: what is searched, and for how long.
        strategy: ``"bayes"``: scikit-optimize on the predicted time, about the theory; ``"omnivore"``: the published
            algorithm; ``"grid"``, ``"random"`` and ``"skopt"`` (scikit-optimize without theory), to compare with; or
            what `register_sampler` was told. A search for a step goes through its few steps whatever it is.
        observations: of an earlier search for the same, which is gone on with.
        known: what was measured in earlier searches of the same run.
        group_speed: of groups that it had chosen in one of these, if they seemed slower than predicted.

    Raises:
        ConfigurationError: there is no such strategy, or scikit-optimize is missing.

    Example:
        >>> from lightning_omni.search import Space
        >>> spec = SearchSpec(Setting(1, 0.9, 0.1), batch=64, horizon=64_000, share=0.1, space=Space((1, 2, 4)))
        >>> probe = Search(spec).next()
        >>> probe.setting.groups, probe.samples // 64
        (4, 14)
    """

    def __init__(
        self,
        spec: SearchSpec,
        strategy: str = "bayes",
        observations: Sequence[Observation] = (),
        known: Sequence[Measured] = (),
        group_speed: GroupSpeed | None = None,
    ) -> None:
        sampler = sampler_of(strategy)
        super().__init__(spec, known, Prior.load() if sampler.learns_from_run else None, group_speed)
        self.strategy = strategy
        self.sampler = sampler
        self.probes: list[Probe] = []
        self.overhead = 0.0
        self.stopped = ""
        self._plan = self._go_through()
        self._current: Probe | None = None
        self.is_over = False
        for observation in observations:
            if self.next() is None:
                break
            self.tell(observation)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or in another process, is asked and told all of it once more."""
        return type(self).from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Everything that there is to know, in plain values; `from_dict` asks and tells it all once more."""
        return {
            "job": self.spec.to_dict(),
            "strategy": self.strategy,
            "observations": [each.to_dict() for each in self.observations],
            "rejected": {str(number): why for number, why in self.rejected.items()},
            "stopped": self.stopped,
            "overhead": self.overhead,
            "known": [each.to_dict() for each in self.known],
            "group_speed": self.group_speed and self.group_speed.to_dict(),
            "is_over": self.is_over,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Search:
        """What `to_dict` gave."""
        observations = [Observation.from_dict(each) for each in plain["observations"]]
        known = [Measured.from_dict(each) for each in plain["known"]]
        seen = plain.get("group_speed")  # None in checkpoints of before it was told
        group_speed = GroupSpeed.from_dict(seen) if seen else None
        search = cls(SearchSpec.from_dict(plain["job"]), plain["strategy"], observations, known, group_speed)
        search.overhead = plain["overhead"]
        search.rejected.update((int(number), why) for number, why in plain.get("rejected", {}).items())
        if plain["is_over"]:
            search.stop(plain["stopped"])
        return search

    # --- From outside ------------------------------------------------------------------------------------------------

    def next(self) -> Probe | None:
        """The next probe, the same until its outcome is told; None if the search is over."""
        if self._current is None and not self.is_over:
            self._current = next(self._plan, None)
            self.is_over = self._current is None
        return self._current

    def tell(self, observation: Observation) -> None:
        """What the probe showed."""
        if self._current is not None:
            self.probes.append(self._current)
        self.observations.append(observation)
        self._current = None

    def stop(self, why: str) -> None:
        """No more probes: a rank was lost, or the user wants to go on."""
        self.stopped, self.is_over, self._current = why, True, None

    def choice(self) -> Choice:
        """The setting that is expected to be at the target first, as far as is known."""
        return choose(self, self.sampler.by_forecast, self.stopped)

    # --- Probes and their budget -------------------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        """Seconds that the search took: its probes, and what belongs to no probe."""
        return sum(each.tried.seconds for each in self.observations) + self.overhead

    @property
    def budget(self) -> float:
        """Seconds that probes may take altogether; infinite until something was timed."""
        if self.spec.seconds is not None:
            return self.spec.seconds
        if self.profile is None:
            return math.inf
        fastest = max(self.throughput(each) for each in self.candidates())
        return self.spec.share * self.spec.horizon / fastest

    def cost(self, probe: Probe) -> float:
        """Seconds that a probe will take, as far as can be told; 0 until something was timed."""
        if self.profile is None:
            return 0.0
        overheads = [each.seconds - each.end / self.throughput(each.setting) for each in self.tried]
        return probe.samples / self.throughput(probe.setting) + max(0.0, min(overheads, default=0.0))

    def affords(self, probe: Probe) -> bool:
        """Whether the budget is enough for a probe."""
        allowed = self.spec.tolerance * self.budget
        return len(self.observations) < c.MOST_PROBES and self.spent + self.cost(probe) <= allowed

    def _go_through(self) -> Iterator[Probe]:
        """The two ends of the space, if it is a setting that is searched, and then what the sampler proposes."""
        if self.sampler.learns_from_run and not isinstance(self.spec, StepSearchSpec):
            yield Probe(0, self.spec.start, 0, "the run's own first batches")
            return
        if not self.spec.batches:
            return
        if not isinstance(self.spec, StepSearchSpec):
            yield from self._ends()
            if self.profile is None or not self.observations:
                return
        sampler = Steps() if isinstance(self.spec, StepSearchSpec) else self.sampler
        for setting, why in sampler.propose(self):
            probe = self._probe(setting, why)
            if not self.affords(probe):
                return
            yield probe

    def _ends(self) -> Iterator[Probe]:
        for groups in (max(self.spec.space.groups), 1):
            probe = self._probe(self.proposal(groups), counted(groups, "group"))
            if groups not in {each.setting.groups for each in self.tried} and self.affords(probe):
                yield probe

    def _probe(self, setting: Setting, why: str) -> Probe:
        batches = self.probes[0].samples // self.spec.batch if self.probes else self.spec.batches
        if isinstance(self.spec, StepSearchSpec) and self.spec.seconds is not None and not self.observations:
            # Three probes have to fit in, and one batch more or less does not matter to them.
            affordable = c.STEP_SHARE * self.budget * self.throughput(setting) / self.spec.batch
            if self.profile is not None:
                batches = int(min(max(affordable, c.FEWEST_BATCHES), c.MOST_BATCHES))
        return Probe(len(self.observations), setting, batches * self.spec.batch, why)
