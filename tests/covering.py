"""A part of a product of cases: every value of every factor is in it, and not every combination of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def covering(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All cases as parameters of a test; those that add no value to the ones before them are run with `--all` only.

    Args:
        cases: tuples of as many values each; values are told apart by their text.
    """
    left = list(cases)
    used = Counter[tuple[int, str]]()
    always = []
    while best := max(left, key=lambda case: _gain(case, used), default=None):
        if not any(used[each] == 0 for each in _values(best)):
            break
        left.remove(best)
        used.update(_values(best))
        always.append(best)
    return [*always, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in left)]


def _values(case: tuple[Any, ...]) -> list[tuple[int, str]]:
    return [(place, str(value)) for place, value in enumerate(case)]


def _gain(case: tuple[Any, ...], used: Counter[tuple[int, str]]) -> tuple[int, int]:
    """Values that were in no case yet; and of the others those that were in few."""
    counts = [used[each] for each in _values(case)]
    return counts.count(0), -sum(counts)
