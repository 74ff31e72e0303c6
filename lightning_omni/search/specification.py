"""What is searched, and for how long: a `SearchSpec` for a setting, and two for the step of a run under way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import msgspec

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.performance.forecast import Scaling, Setting
from lightning_omni.search import constants as c
from lightning_omni.search.space import Space


@dataclass(frozen=True)
class SearchSpec:
    """A search for a setting.

    Args:
        start: the setting that would be used without a search.
        batch: samples of all ranks in one batch.
        reference: the *reference batch*: samples of the batch that learning rate and momentum of ``start`` belong to.
            None for ``batch``: a user's own belong to one synchronous step of all ranks, however many groups a run
            begins with. Those that an earlier search has chosen belong to one group's batch.
        horizon: samples that the run will train on.
        share: of the horizon's time that probes may take, 0.1 for a tenth.
        space: what is searched.
        scaling: of learning rates.
        seconds: time that probes may take, if it is known beforehand; otherwise it follows from ``share``.
        current: whether ``start`` has been trained with already, so that only a clear gain is worth a change.
        own: the user's own setting, if ``start`` is what an earlier search of the run has chosen.
        seed: of everything random.

    Raises:
        ConfigurationError: the learning rate of ``start`` is 0, which no factor changes.
    """

    kind: ClassVar[str] = "setting"
    probes: ClassVar[int] = c.PROBES
    tolerance: ClassVar[float] = 1.0

    start: Setting
    batch: int
    horizon: float
    share: float
    space: Space
    scaling: Scaling = field(default_factory=Scaling)
    seconds: float | None = None
    current: bool = False
    own: Setting | None = None
    seed: int = 0
    reference: float | None = None

    def __post_init__(self) -> None:
        if not self.start.lr > 0:
            raise ConfigurationError(f"lr={self.start.lr}: there is nothing to tune; pass a learning rate above 0")
        if self.reference is not None:
            check_number("reference", self.reference, "a number of samples above 0, or None", above=0, below=math.inf)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a bound that is infinite is None."""
        plain: dict[str, Any] = msgspec.to_builtins(replace(self, space=replace(self.space, further=())))
        plain["space"]["lr"] = [None if math.isinf(bound) else bound for bound in self.space.lr]
        return {**plain, "kind": self.kind}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> SearchSpec:
        """What `to_dict` gave, or the ``Job`` of earlier versions."""
        start = plain["start"]
        low, high = plain["space"]["lr"]
        space = {**plain["space"], "lr": (low, math.inf if high is None else high)}
        # Files without it took what a search started with for that of as many groups.
        known = {"reference": plain["batch"] / start["groups"], **plain, "space": space}
        kind = plain.get("kind") or ("final step" if plain["near"] and plain["steps"] else _OF_JOBS[plain["steps"]])
        return msgspec.convert(known, _KINDS[kind])

    @property
    def basis(self) -> Setting:
        """``start``, with the number of groups that its learning rate and momentum belong to; theory builds on it."""
        belongs_to = self.reference if self.reference is not None else self.batch
        return replace(self.start, groups=max(1, round(self.batch / belongs_to)))

    @property
    def batches(self) -> int:
        """Batches of each worker in a probe; 0 if the budget is too small for any."""
        affordable = self.share * self.horizon / self.batch
        if affordable < c.FEWEST_BATCHES:
            return 0
        return int(min(max(affordable / self.probes, c.FEWEST_BATCHES), c.MOST_BATCHES))

    def is_hurried(self, steps: int) -> bool:
        """Whether so many optimizer steps are a small part of the run, so that it costs little to see more of them."""
        return steps < c.UNHURRIED * self.horizon / self.batch

    def for_step(self, first_loss: float | None, is_final: bool) -> StepSearchSpec:
        """The search for the step alone, of a run under way that trains with ``start``.

        Args:
            first_loss: the training loss with which the run began; None if it is not known.
            is_final: whether the target is near.
        """
        known = {each.name: getattr(self, each.name) for each in fields(SearchSpec)}
        return (FinalStepSearchSpec if is_final else StepSearchSpec)(**known, first_loss=first_loss)


@dataclass(frozen=True)
class StepSearchSpec(SearchSpec):
    """A search for the size of the step alone, for a run that is under way.

    Args:
        first_loss: the training loss with which the run began; None if it is not known.
    """

    kind: ClassVar[str] = "step"
    probes: ClassVar[int] = c.STEP_PROBES
    tolerance: ClassVar[float] = c.TOLERATED

    first_loss: float | None = None


@dataclass(frozen=True)
class FinalStepSearchSpec(StepSearchSpec):
    """The same where the target is so near that what a smaller step gains at once outweighs what it loses later."""

    kind: ClassVar[str] = "final step"


_KINDS: dict[str, type[SearchSpec]] = {each.kind: each for each in (SearchSpec, StepSearchSpec, FinalStepSearchSpec)}
_OF_JOBS = {False: "setting", True: "step"}
