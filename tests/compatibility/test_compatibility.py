"""Callbacks, options and modules that matter most: with one group bitwise as DDP, with two they train as well.

The whole matrix is `matrix.py` beside this file.
"""

from __future__ import annotations

import pytest
from cases import CASES, QUICK, USUAL
from matrix import check


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("names", [QUICK, pytest.param(USUAL, marks=pytest.mark.exhaustive)], ids=["quick", "usual"])
def test_cases_hold(names: tuple[str, ...]) -> None:
    failed = {case.name: found for case, found, _ in check([case for case in CASES if case.name in names], 2) if found}
    assert failed == {}
