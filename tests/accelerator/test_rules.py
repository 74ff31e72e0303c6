"""The emulated device refuses what a GPU refuses, and ends later what a GPU ends later."""

from __future__ import annotations

import re
from typing import Any

import pytest
from runs import SCRIPTS, run

SCRIPT = SCRIPTS / "device_rules.py"
CLAIMS = re.findall(r"^@claim\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    results: dict[str, Any] = run(SCRIPT.name, timeout=100).results[0]
    return results


@pytest.mark.parametrize("claim", CLAIMS)
def test_of_emulated_devices_it_holds_that(found: dict[str, str], claim: str) -> None:
    assert found[claim] == ""
