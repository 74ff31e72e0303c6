"""`SearchSpec`, the specification of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model.forecast import Scaling, Setting
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.space import Space


@dataclass(frozen=True)
class SearchSpec:
    """The specification of a search for a setting.

    Args:
        start: the setting that the run uses without a search.
        batch: samples of all ranks in one batch.
        horizon: samples that the run will still train on.
        space: the search space.
        reference: the *reference batch*: samples of the batch that learning rate and momentum of ``start`` belong to.
            None means ``batch``: a user's own belong to one synchronous step of all ranks, even if a run begins with
            several groups. Those chosen by an earlier search belong to one group's batch.
        scaling: the scaling of learning rates.
        seconds: the time after which the run ends in any case; infinite without a time limit.
        ends_by_time: whether nothing else ends the run, so that ``horizon`` is a guess.
        switch: seconds to form groups, as measured in this run.
        budget: part of the run's time that choosing and forming groups may take.
        allowance: seconds of the budget that the run has earned and not spent; the rest of the run adds to them.
        seed: the seed of all random numbers.

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
        """Return plain values, without user-defined dimensions; an infinite bound becomes None."""
        plain: dict[str, Any] = msgspec.to_builtins(replace(self, space=replace(self.space, further=())))
        plain["space"]["lr"] = [None if math.isinf(bound) else bound for bound in self.space.lr]
        return {**plain, "seconds": None if math.isinf(self.seconds) else self.seconds}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> SearchSpec:
        """Rebuild a specification from `to_dict`."""
        low, high = plain["space"]["lr"]
        space = {**plain["space"], "lr": (low, math.inf if high is None else high)}
        seconds = math.inf if plain["seconds"] is None else plain["seconds"]
        return msgspec.convert({**plain, "space": space, "seconds": seconds}, SearchSpec)

    @property
    def basis(self) -> Setting:
        """Return ``start`` with the number of groups that its learning rate and momentum belong to, for theory."""
        belongs_to = self.reference if self.reference is not None else self.batch
        return replace(self.start, groups=max(1, round(self.batch / belongs_to)))

    def is_hurried(self, steps: int) -> bool:
        """Return whether the steps are so small a part of the run that measuring more costs little."""
        return steps < c.UNHURRIED * self.horizon / self.batch
