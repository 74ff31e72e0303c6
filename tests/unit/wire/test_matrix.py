"""Every method, wire format, overlap, number of servers and fate of a group: what trains keeps the promises.

With ``--all`` every two of them; the whole of the matrix is measured by ``tests/benchmarks/matrix.py``.
"""

from __future__ import annotations

import pytest
from cells import Cell, Training, cells, methods, pairwise, refusal, wires
from covering import covering

from lightning_omni.combinations import PAIRS
from lightning_omni.methods import METHODS
from lightning_omni.wire.formats import wire_of
from lightning_omni.wire.formats.base import FORMATS, name_of

SOME = pairwise([cell for cell in cells() if not refusal(cell)])


def test_every_method_and_every_format_is_in_the_matrix() -> None:
    shipped = {name for name, kind in METHODS.items() if kind.__module__.startswith("lightning_omni.")}
    assert {METHODS[text.partition(":")[0]] for text in methods() if text.partition(":")[0] in METHODS} == {
        METHODS[name] for name in shipped
    }
    shipped = {name for name, kind in FORMATS.items() if kind.__module__.startswith("lightning_omni.wire.formats.")}
    assert {name_of(wire_of(wire)) for wire in wires() if not wire.endswith("both ways")} == shipped - {"both_ways"}


def test_the_matrix_refuses_pairs_of_the_table_and_top_k_answers() -> None:
    endings = [f": {pair.reason}; {pair.remedy}" for pair in PAIRS]
    for said in filter(None, map(refusal, cells())):
        assert said.endswith(tuple(endings)) or "answers are not added up" in said


@pytest.mark.parametrize(Cell._fields, covering(SOME))
def test_nothing_is_lost_or_counted_twice_and_all_ranks_end_with_the_same_weights(
    method: str, wire: str, overlap: bool, servers: int, fate: str
) -> None:
    Training(Cell(method, wire, overlap, servers, fate))
