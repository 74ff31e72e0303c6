"""Rules for choosing between settings, in a search and in the planning of machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_omni.tuning.search.constants import CAUTION, FASTER

Option = TypeVar("Option")


def is_faster(rate: float, than: float) -> bool:
    """Return whether a rate is higher by enough to justify more groups or proportional batches."""
    return rate > FASTER * than


def risk_adjusted(log_cost: float, deviation: float) -> float:
    """Return a predicted cost, raised by a part of its uncertainty."""
    return log_cost + CAUTION * deviation


def cheapest(options: Sequence[Option], log_cost: Callable[[Option], float], order: Callable[[Option], Any]) -> Option:
    """Return the cheapest option; among options that tie with it, the first in an order."""
    lowest = min(map(log_cost, options))
    return min((each for each in options if log_cost(each) <= lowest + math.log(FASTER)), key=order)
