"""Rules by which settings are chosen, in a search and when machines are planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_omni.search.constants import CAUTION, FASTER

Option = TypeVar("Option")


def is_faster(rate: float, than: float) -> bool:
    """Whether a rate is higher by enough to be worth more groups, or proportional batches."""
    return rate > FASTER * than


def careful(log_cost: float, deviation: float) -> float:
    """A predicted cost, with what was not tried made a little worse."""
    return log_cost + CAUTION * deviation


def least(options: Sequence[Option], log_cost: Callable[[Option], float], order: Callable[[Option], Any]) -> Option:
    """The option that costs least; among those that tie with it the first in an order."""
    lowest = min(map(log_cost, options))
    return min((each for each in options if log_cost(each) <= lowest + math.log(FASTER)), key=order)
