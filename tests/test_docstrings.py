"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

import lightning_omni

PACKAGE = Path(lightning_omni.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(("lightning_omni", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>>" in path.read_text()
)
DOCS = Path(__file__).parent.parent / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}


@pytest.mark.parametrize("name", WITH_EXAMPLES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted
    assert failed == 0


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if ">>>" in text])
def test_the_examples_of_a_page_run(page: str) -> None:
    failed, attempted = doctest.testfile(str(DOCS / page), module_relative=False)
    assert attempted
    assert failed == 0


def test_every_method_has_an_example() -> None:
    for kind in importlib.import_module("lightning_omni.methods").METHODS.values():
        assert ">>>" in (kind.__doc__ or "")


@pytest.mark.parametrize(
    "module", ["lightning_omni", "lightning_omni.methods", "lightning_omni.simulator", "lightning_omni.runtime"]
)
def test_exported_names_and_their_public_methods_have_docstrings(module: str) -> None:
    importlib.import_module("pytorch_lightning")  # the base of the strategy and of the tuners
    home = importlib.import_module(module)
    exported = {name: getattr(home, name) for name in home.__all__}
    described = {name: each for name, each in exported.items() if inspect.isclass(each) or inspect.isroutine(each)}
    assert described
    missing = [name for name, each in described.items() if not each.__doc__]
    for name, kind in described.items():
        missing += [f"{name}.{member}" for member in _own_methods(kind) if not inspect.getdoc(getattr(kind, member))]
    assert not missing


def _own_methods(kind: object) -> list[str]:
    """Return the public methods and properties of a class but for those that override Lightning's or torch's."""
    bases = kind.__mro__ if isinstance(kind, type) else ()
    foreign = {name for base in bases if base.__module__.partition(".")[0] != "lightning_omni" for name in vars(base)}
    kinds = (property, functools.cached_property, classmethod, staticmethod)
    return [
        name
        for name in dir(kind)
        if bases and not name.startswith("_") and name not in foreign
        if isinstance(member := inspect.getattr_static(kind, name), kinds) or inspect.isfunction(member)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "contribute/changelog.md"])
def test_files_that_a_page_names_are_there(page: str) -> None:
    named = re.findall(r"`(?:lightning_omni/)?([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.py)?)`", PAGES[page])
    missing = {name for name in named if not (PACKAGE / name).exists() and not (DOCS.parent / name).exists()}
    assert not missing


def test_the_life_of_a_gradient_names_files() -> None:
    text = PAGES["contribute/life-of-a-gradient.md"]
    for section in ("## The path", "## A lease", "## A late message"):
        assert text.partition(section)[2].partition("\n## ")[0].count(".py`") >= 3, section
