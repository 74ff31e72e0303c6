"""What the product computed when its golden traces were recorded, it still computes; see golden/record.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

import msgspec
import pytest
import torch
from core import Kind
from core import messages as m
from covering import covering
from golden import names, record, served, simulated
from golden.digests import Outcome, apart, digest, here

from lightning_omni.methods import METHODS

OTHER_TYPES = {"Event", "Packed", "TensorSpec"}
"""Names in the table that the module of messages does not have."""


def cover(names: Iterable[str]) -> set[str]:
    """All cases, but of products a part in which each value occurs.

    These are the cases that say method, optimizer and groups, and those of a method in a situation that many are in.
    """
    parts = [tuple(name.split(", ")) for name in names]
    methods_in = Counter(case[1] for case in parts if len(case) == 2)
    products = (
        [case for case in parts if len(case) == 3],
        [case for case in parts if len(case) == 2 and methods_in[case[1]] > 5 and case[0] != "simulated merged head"],
    )
    left_out = {case.values for product in products for case in covering(product) if case not in product}
    return {", ".join(case) for case in parts if case not in left_out}


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config) -> dict[str, Outcome]:
    """All of them with ``--all``."""
    cases = record.cases()
    chosen = cases.keys() if pytestconfig.getoption("--all") else cover(cases)
    return record.outcomes({name: case for name, case in cases.items() if name in chosen})


def kept_of(found: dict[str, Outcome]) -> dict[str, Outcome]:
    """What was recorded of these cases."""
    return {name: outcome for name, outcome in record.recorded()[1].items() if name in found}


def test_every_case_is_recorded_and_every_record_is_a_case() -> None:
    assert record.cases().keys() == record.recorded()[1].keys()


def test_every_golden_case_keeps_its_order_counts_and_numbers(found: dict[str, Outcome]) -> None:
    changed = record.differences(kept_of(found), found, bits=False)
    assert not changed, f"{len(changed)} golden cases have changed, the first of them {changed[0]}"


def test_every_golden_case_keeps_its_bits_where_they_were_recorded(found: dict[str, Outcome]) -> None:
    where, _ = record.recorded()
    if why := apart(where, here()):
        pytest.skip(f"bits were recorded elsewhere ({why}); order and numbers are compared all the same")
    changed = record.differences(kept_of(found), found, bits=True)
    assert not changed, f"{len(changed)} golden cases have changed, the first of them {changed[0]}"


def test_golden_traces_hold_every_method_of_the_registry() -> None:
    own = {name for name, kind in METHODS.items() if kind.__module__.startswith("lightning_omni.")}
    assert {method.partition(":")[0] for method in simulated.METHODS} == own


def test_golden_transcripts_hold_every_message_of_the_protocol() -> None:
    with record.one_thread():
        spoken = {type(message) for make in served.sessions().values() for *_, message, _ in make().spoken}
    known = {kind for kind in m.Message.__subclasses__() if getattr(m, kind.__name__, None) is kind}
    assert spoken | set(served.TRAVELLING) == known


def test_the_table_of_names_holds_every_message_and_kind_of_event_and_nothing_else() -> None:
    messages = {kind.__name__ for kind in m.Message.__subclasses__() if getattr(m, kind.__name__, None) is kind}
    assert messages <= names.TYPES.keys()
    assert set(get_args(Kind)) <= names.VALUES.keys()
    assert all(hasattr(m, name) or name in OTHER_TYPES or name[0] == "-" for name in names.TYPES)
    for table in (names.TYPES, names.VALUES, names.KEYS):
        assert sorted(table.values()) == list(range(len(table))), "a word stands twice"


class First(msgspec.Struct, tag=True):
    kind: str
    spans: tuple[int, ...] = ()
    reason: str = ""


class Second(msgspec.Struct, tag=True):
    what: str
    positions: tuple[int, ...] = ()
    reason: str = ""
    more: int = 0


def test_a_digest_does_not_change_with_names_and_does_with_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "TYPES", {"First": 7})
    first = digest([First("push", (1, 2), "gone"), {"weights": 1, "lr": 0.5}])
    monkeypatch.setattr(names, "TYPES", {"Second": 7})
    monkeypatch.setattr(names, "VALUES", {"sent": names.VALUES["push"]})
    monkeypatch.setattr(names, "KEYS", {"parameters": names.KEYS["weights"]})
    renamed = {"parameters": 1, "lr": 0.5}
    assert digest([Second("sent", (1, 2), "not there any more"), renamed]) == first
    for changed in (
        [Second("sent", (2, 1), "gone"), renamed],
        [Second("kept", (1, 2), "gone"), renamed],
        [Second("sent", (1, 2)), renamed],
        [Second("sent", (1, 2), "gone", 1), renamed],
        [Second("sent", (1, 2), "gone"), {**renamed, "lr": 0.25}],
        [Second("sent", (1, 2), "gone"), {"lr": 0.5, "parameters": 1}],
    ):
        assert digest(changed) != first


def test_golden_outcomes_do_not_depend_on_the_number_of_threads() -> None:
    case = simulated.cases()["simulated merged head, AdamW, 4 groups"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        several = case()
    finally:
        torch.set_num_threads(before)
    assert record.outcomes({"": case}) == {"": several}
    assert torch.get_num_threads() == before
