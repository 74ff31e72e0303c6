"""The site: charts and ratios follow the tables of measurements, numbers are in one place, strategies can be made."""

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
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = {each.__name__: each for each in (Compression, Elastic, FSDP, OmniStrategy, Server)} | {"methods": methods}


@pytest.fixture(scope="module")
def draw() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))


@pytest.mark.parametrize("picture", ["groups", "waiting", "hosts", "link", "tasks"])
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
    assert f" | {min(ratios):.1f} to {max(ratios):.1f} times faster than {peer}" in README


def test_the_recorded_session_has_the_commands_of_its_script_and_lasts_two_minutes() -> None:
    commands = runpy.run_path(str(ROOT / "docs" / "pictures" / "record.py"))["COMMANDS"]
    header, *events = map(json.loads, (ROOT / "docs" / "pictures" / "session.cast").read_text().splitlines())
    assert header["version"] == 2
    assert [text for _, _, text in events if text.startswith("$ ")] == [f"$ {each}\r\n" for each in commands]
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    assert events[-1][0] < 130


COLUMN = 90
"""Characters of a line of code that the site shows beside its contents, on a screen of 1,280 pixels."""
UNITS = r"s|ms|us|seconds?|minutes?|min|hours?|%|kB|MB|GB|KiB|MiB|GiB|bytes|[MG]bit(?:/s)?|megabits|points|times"
CONDITIONS = {
    *("4 times", "40 Mbit", "40 Mbit/s", "50 megabits", "100 Mbit", "1 Gbit/s"),  # slower devices, and links
    *("10 MB", "100 MB", "86 %", "80 %", "95 %"),  # models, the target, and intervals
}
"""How something was measured: several measurements have the same, and each says so."""
BY_CHANCE = {
    *("1 MB", "5 s", "10 s", "60 s", "0.05 s"),  # sizes and time-outs
    *("2 %", "11 %", "90.3 %", "98 %", "1.10 times"),  # results, and bounds
}
"""The same number of facts that have nothing to do with each other."""


def numbers_with_units(page: Path) -> set[str]:
    """Return what a page has in its text and tables; code has the user's numbers, and examples."""
    text = re.sub(r"```.*?```|`[^`\n]*`|^    [^\n]*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {f"{number} {unit}" for number, unit in re.findall(rf"(?<![\w.,])(\d[\d,.]*)\s({UNITS})(?![\w/])", text)}


def test_a_number_with_a_unit_is_in_one_place() -> None:
    places: dict[str, set[str]] = {}
    for page in PAGES:
        kind = page.relative_to(ROOT).parts[:2][-1]
        if kind != "contribute":
            for number in numbers_with_units(page):
                places.setdefault(number, set()).add(page.name if kind != "evidence" else f"evidence/{page.name}")
    twice = {number: sorted(found) for number, found in places.items() if len(found) > 1}
    assert {number: found for number, found in twice.items() if number not in BY_CHANCE | CONDITIONS} == {}
    assert set(twice) == BY_CHANCE | CONDITIONS, "an exception that is none"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_blank_line_cuts_a_table_in_two(page: Path) -> None:
    assert not re.findall(r"^\|.*\|\n\n(\|.*\|)\n(?!\|-)", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_no_wider_than_its_column(page: Path) -> None:
    code = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert [line for block in code for line in block.splitlines() if len(line) > COLUMN] == []


def strategies() -> list[tuple[str, str]]:
    """Return each call of OmniStrategy on a page that is whole, with the page; one page has those that are refused."""
    found = []
    for page in PAGES:
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
