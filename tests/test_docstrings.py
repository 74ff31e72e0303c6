"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import lightning_omni

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(lightning_omni.__path__, "lightning_omni.")
    if not module.name.endswith("__main__")
)
DOCS = Path(__file__).parent.parent / "docs"
PAGES = list(DOCS.glob("*.md"))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("page", sorted(page.name for page in PAGES if ">>>" in page.read_text()))
def test_the_examples_of_a_page_run(page: str) -> None:
    failed, attempted = doctest.testfile(str(DOCS / page), module_relative=False)
    assert attempted
    assert failed == 0


def test_every_method_has_an_example() -> None:
    for kind in importlib.import_module("lightning_omni.methods").METHODS.values():
        assert ">>>" in (kind.__doc__ or "")
