"""Each file of tests that start ranks is selected or left out for a reason, and nothing is named that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import selection

TESTS = Path(__file__).parents[1]
STARTING = {
    path.stem.removeprefix("test_")
    for path in [*TESTS.glob("test_*.py"), *TESTS.glob("unit/*/test_*.py")]
    if re.search(r"^(from|import) runs\b", path.read_text(), re.MULTILINE)
}


def test_each_file_that_starts_ranks_is_selected_or_left_out() -> None:
    chosen = [*selection.FILES.split(), *selection.TESTS, *selection.FILES_LEFT_OUT]
    assert len(chosen) == len(set(chosen))
    assert len(STARTING) > 40
    assert STARTING - {*chosen} == set()


def test_each_file_and_test_that_is_named_exists() -> None:
    for name in [*selection.selected(), *selection.TESTS_LEFT_OUT]:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}" in (TESTS / file).read_text(), name
    assert all(selection.path_of(name) for name in selection.FILES_LEFT_OUT)
