"""Each file of tests that start ranks is selected or left out for a reason, and nothing is named that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import selection

TESTS = Path(__file__).parents[1]
STARTING = {
    path.name for path in TESTS.glob("test_*.py") if re.search(r"^(from|import) runs\b", path.read_text(), re.MULTILINE)
}


def test_each_file_that_starts_ranks_is_selected_or_left_out() -> None:
    assert len(STARTING) > 40
    assert {*selection.files(), *selection.FILES_LEFT_OUT} >= STARTING
    assert not {*selection.files()} & {*selection.FILES_LEFT_OUT}


def test_each_file_that_is_named_exists() -> None:
    assert all((TESTS / name).exists() for name in [*selection.files(), *selection.FILES_LEFT_OUT])


def test_each_test_that_is_left_out_exists() -> None:
    for test in selection.TESTS_LEFT_OUT:
        file, _, function = test.partition("::")
        assert file in selection.files()
        assert f"def {function.partition('[')[0]}(" in (TESTS / file).read_text()
