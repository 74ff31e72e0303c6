"""The site: charts and the ratios of the README follow the tables of measurements, and its strategies can be made."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from lightning_omni import FSDP, Compression, Elastic, OmniStrategy, Server, methods

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NAMES = {each.__name__: each for each in (Compression, Elastic, FSDP, OmniStrategy, Server)} | {"methods": methods}


@pytest.fixture(scope="module")
def draw() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))


@pytest.mark.parametrize("picture", ["groups", "hosts", "link", "tasks"])
def test_a_picture_is_what_its_script_draws(picture: str, draw: dict[str, Any]) -> None:
    drawn = (ROOT / "docs" / "pictures" / f"{picture}.svg").read_text()
    assert drawn == draw[picture](), "run: python docs/pictures/draw.py"
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("hosts", "column", "peer"),
    [
        ("exponential step times", 1, "DDP"),
        ("one 4 times slower", 1, "DDP"),
        ("equal, 40 Mbit links", 2, "PowerSGD"),
        ("one 4 times slower, 40 Mbit links", 2, "PowerSGD"),
    ],
)
def test_the_readme_has_the_speed_ups_that_were_measured(
    hosts: str, column: int, peer: str, draw: dict[str, Any]
) -> None:
    rows = {row[0]: row for row in draw["table"]("tuning-measurements.md", "On emulated hosts", "hosts")}
    theirs = rows[hosts][column].partition("PowerSGD:")[2] if peer == "PowerSGD" else rows[hosts][column]
    ratios = [a / b for a, b in zip(draw["numbers"](theirs), draw["numbers"](rows[hosts][3]), strict=True)]
    assert f"| {min(ratios):.1f} to {max(ratios):.1f} times faster than {peer}" in README


def test_the_recorded_session_has_the_commands_of_its_script_and_lasts_two_minutes() -> None:
    commands = runpy.run_path(str(ROOT / "docs" / "pictures" / "record.py"))["COMMANDS"]
    header, *events = map(json.loads, (ROOT / "docs" / "pictures" / "session.cast").read_text().splitlines())
    assert header["version"] == 2
    assert [text for _, _, text in events if text.startswith("$ ")] == [f"$ {each}\r\n" for each in commands]
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    assert events[-1][0] < 130


def strategies() -> list[tuple[str, str]]:
    """Return each call of OmniStrategy on a page that is whole, with the page; one page has those that are refused."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if page.name == "errors.md":
            continue
        text = page.read_text()
        for start in re.finditer(r"OmniStrategy\(", text):
            depth = 1
            end = next(
                at for at in range(start.end(), len(text)) if (depth := depth + {"(": 1, ")": -1}.get(text[at], 0)) == 0
            )
            found.append((page.name, " ".join(text[start.start() : end + 1].split())))
    return [(page, call) for page, call in found if "..." not in call and "`" not in call and "=mesh" not in call]


@pytest.mark.parametrize(("page", "call"), strategies())
def test_a_strategy_that_a_page_shows_can_be_made(page: str, call: str) -> None:
    assert isinstance(eval(call, dict(NAMES)), OmniStrategy), page
