"""What the product computed when its golden traces were recorded, it still computes; see golden/record.py."""

from __future__ import annotations

import pytest
import torch
from golden import record, served, simulated
from golden.digests import Outcome, here

from lightning_omni.methods import METHODS
from lightning_omni.protocol import messages as m


@pytest.fixture(scope="module")
def found() -> dict[str, Outcome]:
    return record.outcomes()


def test_every_golden_case_keeps_its_order_counts_and_numbers(found: dict[str, Outcome]) -> None:
    _, kept = record.recorded()
    changed = record.differences(kept, found, bits=False)
    assert not changed, f"{len(changed)} golden cases have changed, the first of them {changed[0]}"


def test_every_golden_case_keeps_its_bits_where_they_were_recorded(found: dict[str, Outcome]) -> None:
    where, kept = record.recorded()
    if where != here():
        pytest.skip(f"bits were recorded on {where}, and this is {here()}; order and numbers are compared all the same")
    changed = record.differences(kept, found, bits=True)
    assert not changed, f"{len(changed)} golden cases have changed, the first of them {changed[0]}"


def test_golden_traces_hold_every_method_of_the_registry() -> None:
    own = {name for name, kind in METHODS.items() if kind.__module__.startswith("lightning_omni.")}
    assert {method.partition(":")[0] for method in simulated.METHODS} == own


def test_golden_transcripts_hold_every_message_of_the_protocol() -> None:
    with record.one_thread():
        spoken = {type(message) for make in served.sessions().values() for *_, message, _ in make().spoken}
    known = {kind for kind in m.Message.__subclasses__() if kind.__module__ == m.__name__}
    assert spoken | set(served.TRAVELLING) == known


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
