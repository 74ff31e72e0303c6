"""Callbacks, options and modules that matter most: with one group bitwise as DDP, with two they train as well.

The whole matrix is `matrix.py` beside this file.
"""

from __future__ import annotations

import pytest
from cases import CASES
from matrix import check


@pytest.mark.processes
@pytest.mark.slow
def test_quick_cases_hold() -> None:
    failed = {case.name: found for case, found, _ in check([case for case in CASES if case.quick], ranks=2) if found}
    assert failed == {}
