"""Every method, wire format, overlap, number of servers and fate of a group: what trains keeps the promises.

With ``--all`` every two of them; the whole of the matrix is measured by ``tests/benchmarks/matrix.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cells import Cell, Training, cells, methods, pairwise, refusal, wires
from covering import covering

from lightning_omni.methods import METHODS
from lightning_omni.wire.formats import wire_of
from lightning_omni.wire.formats.base import FORMATS, name_of

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
SOME = pairwise([cell for cell in cells() if not refusal(cell)])


def test_every_method_and_every_format_is_in_the_matrix() -> None:
    shipped = {name for name, kind in METHODS.items() if kind.__module__.startswith("lightning_omni.")}
    assert {METHODS[text.partition(":")[0]] for text in methods() if text.partition(":")[0] in METHODS} == {
        METHODS[name] for name in shipped
    }
    shipped = {name for name, kind in FORMATS.items() if kind.__module__.startswith("lightning_omni.wire.formats.")}
    assert {name_of(wire_of(wire)) for wire in wires() if not wire.endswith("both ways")} == shipped - {"both_ways"}


def documented() -> list[str]:
    """Words of the messages in the list of what cannot be combined."""
    (section,) = re.findall(r"^## What cannot be combined$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return re.findall(r"^\| “(.+?)” \|", section, re.M)


def test_what_the_matrix_refuses_is_the_documented_list() -> None:
    said = {cell[:4]: words for cell in cells() if (words := refusal(cell))}
    rows = documented()
    for cell, words in said.items():
        assert sum(row in words for row in rows) == 1, f"{cell} is refused, and the page does not say so: {words}"
    unused = [row for row in rows if not any(row in words for words in said.values())]
    assert not unused, "nothing is refused with these words"


@pytest.mark.parametrize(Cell._fields, covering(SOME))
def test_nothing_is_lost_or_counted_twice_and_all_ranks_end_with_the_same_weights(
    method: str, wire: str, overlap: bool, servers: int, fate: str
) -> None:
    Training(Cell(method, wire, overlap, servers, fate))
