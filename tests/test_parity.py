"""One group is DDP, bit for bit."""

from __future__ import annotations

import pytest
from runs import Run, run

ROW_NAMES = [
    "SGD",
    "AdamW",
    "clipping",
    "accumulation",
    "bf16",
    "fp16",
    "schedule by step",
    "schedule by epoch",
    "schedule on plateau",
    "manual",
    "several optimizers",
    "unused parameters",
    "left to each rank",
    "synchronised logging",
    "validation in mid-epoch",
    "workers",
    "drop last",
    "partial last batch",
]


@pytest.fixture(scope="module")
def both() -> Run:
    return run("parity.py", timeout=480)


@pytest.mark.parametrize("row", ROW_NAMES)
def test_one_group_equals_ddp_bit_for_bit(both: Run, row: str) -> None:
    for rank in (0, 1):
        got = both.results[rank][row]
        assert got["omni"] == got["ddp"]
