"""Samplers, one a file, by the names that ``OmniTuner(search=...)`` takes."""

from __future__ import annotations

from lightning_omni.errors import ConfigurationError
from lightning_omni.search.samplers.forecast import ByForecast
from lightning_omni.search.samplers.grid import Grid
from lightning_omni.search.samplers.published import PublishedAlgorithm
from lightning_omni.search.samplers.random_settings import RandomSettings
from lightning_omni.search.samplers.sampler import Proposal, Sampler
from lightning_omni.search.samplers.scikit_optimize import ScikitOptimize
from lightning_omni.search.samplers.steps import Steps
from lightning_omni.search.samplers.theory_led import TheoryLed

SAMPLERS: dict[str, type[Sampler]] = {
    "forecast": ByForecast,
    "bayes": TheoryLed,
    "omnivore": PublishedAlgorithm,
    "grid": Grid,
    "random": RandomSettings,
    "skopt": ScikitOptimize,
}


def register_sampler(name: str, kind: type[Sampler]) -> None:
    """Makes a sampler of a user's own known, on every rank.

    Args:
        name: for ``OmniTuner(search=...)``; checkpoints and reports have it.
        kind: the sampler's class.

    Raises:
        ConfigurationError: the name is taken.
    """
    if SAMPLERS.setdefault(name, kind) is not kind:
        raise ConfigurationError(f"name={name!r}: this is {SAMPLERS[name].__name__} already; pass another")


def sampler_of(strategy: str) -> Sampler:
    """The sampler of that name.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if strategy not in SAMPLERS:
        raise ConfigurationError(f"search={strategy!r}: pass one of {', '.join(map(repr, SAMPLERS))}")
    return SAMPLERS[strategy]()


__all__ = ["SAMPLERS", "Proposal", "Sampler", "Steps", "register_sampler", "sampler_of"]
