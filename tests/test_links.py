"""Links of the pages: the file that each leads to is there, and so is the heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *(ROOT / ".github").rglob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (found.group(1).lower() for found in re.finditer(r"^#+ +(.+?) *$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    links = (found.group(1) for found in LINK.finditer(CODE.sub("``", page.read_text())))
    return [link for link in links if "://" not in link and not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    file = page.parent / path if path else page
    return file.exists() and (not heading or heading in anchors(file))


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The `first` part\n[here](#the-first-part), [there](#another), [a file](no.md)\n`[code](no.md)`\n"
    )
    assert broken_links(page) == ["#another", "no.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []
