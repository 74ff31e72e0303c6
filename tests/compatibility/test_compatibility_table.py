"""The table of cases leaves no callback and no option out; the docs say what it says; refusals are a closed list."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytorch_lightning as pl
import table
from cases import BY_NAME, CASES

PACKAGE = Path(__file__).parent.parent.parent / "lightning_omni"
REFUSALS = PACKAGE.parent / "docs" / "reference" / "compatibility.md"


def test_every_callback_of_lightning_has_a_row() -> None:
    assert [name for name in table.callbacks() if not table.rows_of_callback(name)] == []


def test_every_option_of_the_trainer_has_a_row_or_a_reason() -> None:
    without = [name for name in table.options() if not table.rows_of_option(name) and name not in table.ELSEWHERE]
    assert without == []
    assert set(table.ELSEWHERE) <= set(table.options())


def test_rows_cover_what_there_is() -> None:
    known = set(pl.callbacks.__all__) | set(table.options())
    assert {name for case in CASES for name in case.covers} <= known
    assert {name for case in CASES for name in case.options} <= known
    assert len(BY_NAME) == len(CASES), "two rows have one name"


def test_the_docs_are_made_of_the_table() -> None:
    assert table.DOCS.read_text() == table.page(), "run: python tests/compatibility/table.py"


@cache
def _refusals() -> dict[str, str]:
    """Where something is refused, and the words of the message that are always the same."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if "UnsupportedError(" not in source:
            continue
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UnsupportedError":
                names = {each.id for each in node.args if isinstance(each, ast.Name)}
                said = [each for each in ast.walk(tree) if isinstance(each, ast.Assign) and _target(each) in names]
                parts = [each.value for of in (node, *said) for each in ast.walk(of) if isinstance(each, ast.Constant)]
                text = "…".join(str(part) for part in parts)
                if len(text.split()) > 2:  # not what passes another refusal's words on
                    found[f"{path.relative_to(PACKAGE)}:{node.lineno}"] = text
    return found


def _target(assignment: ast.Assign) -> str:
    return getattr(assignment.targets[0], "id", "")


def _listed() -> list[str]:
    """Words of each refusal in the docs."""
    section = REFUSALS.read_text().partition("## What is refused")[2].partition("\n## ")[0]
    return re.findall(r"^\| “(.+?)” \|", section, flags=re.MULTILINE)


def test_everything_that_is_refused_is_in_the_closed_list() -> None:
    listed = _listed()
    assert len(listed) == len(set(listed)) > 10
    assert {where: text for where, text in _refusals().items() if not any(words in text for words in listed)} == {}


def test_nothing_in_the_closed_list_is_out_of_date() -> None:
    everything = list(_refusals().values())
    assert [words for words in _listed() if not any(words in text for text in everything)] == []


def test_what_a_row_expects_to_be_refused_is_in_the_closed_list() -> None:
    everything = " ".join(_refusals().values())
    assert [case.name for case in CASES if case.refused and case.refused not in everything] == []
