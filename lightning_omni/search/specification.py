"""What is searched: a `SearchSpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
        horizon: samples that the run will train on.
        space: what is searched.
        reference: the *reference batch*: samples of the batch that learning rate and momentum of ``start`` belong to.
            None for ``batch``: a user's own belong to one synchronous step of all ranks, however many groups a run
            begins with. Those that an earlier search has chosen belong to one group's batch.
        scaling: of learning rates.
        seconds: after which the run ends in any case; infinite if it does not.
        ends_by_time: whether nothing else ends it, so that ``horizon`` is a guess.
        switch: seconds that it takes to form groups, as far as this run has shown.
        budget: part of the run's time that choosing and forming groups may take.
        allowance: seconds of it that are left by now; what the rest of the run adds comes on top.
        seed: of everything random.

    Raises:
        ConfigurationError: the learning rate of ``start`` is 0, which no factor changes.
    """

    start: Setting
    batch: int
    horizon: float
    space: Space
    scaling: Scaling = field(default_factory=Scaling)
    seconds: float = math.inf
    ends_by_time: bool = False
    switch: float = 0.0
    budget: float = 1.0
    allowance: float = 0.0
    seed: int = 0
    reference: float | None = None

    def __post_init__(self) -> None:
        if not self.start.lr > 0:
            raise ConfigurationError(f"lr={self.start.lr}: there is nothing to tune; pass a learning rate above 0")
        if self.reference is not None:
            check_number("reference", self.reference, "a number of samples above 0, or None", above=0, below=math.inf)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without dimensions of a user's own; a bound that is infinite is None."""
        plain: dict[str, Any] = msgspec.to_builtins(replace(self, space=replace(self.space, further=())))
        plain["space"]["lr"] = [None if math.isinf(bound) else bound for bound in self.space.lr]
        return {**plain, "seconds": None if math.isinf(self.seconds) else self.seconds}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> SearchSpec:
        """What `to_dict` gave."""
        low, high = plain["space"]["lr"]
        space = {**plain["space"], "lr": (low, math.inf if high is None else high)}
        seconds = math.inf if plain["seconds"] is None else plain["seconds"]
        return msgspec.convert({**plain, "space": space, "seconds": seconds}, SearchSpec)

    @property
    def basis(self) -> Setting:
        """``start``, with the number of groups that its learning rate and momentum belong to; theory builds on it."""
        belongs_to = self.reference if self.reference is not None else self.batch
        return replace(self.start, groups=max(1, round(self.batch / belongs_to)))

    def is_hurried(self, steps: int) -> bool:
        """Whether so many optimizer steps are a small part of the run, so that it costs little to see more of them."""
        return steps < c.UNHURRIED * self.horizon / self.batch
