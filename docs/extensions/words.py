"""The pages for users stay short: more words than `MOST_WORDS` are a warning, and so an error.

What a page shows is counted: everything between blanks that has a letter or a digit, in text, tables, formulas and
code, also what directives make, as the command line's options; not the targets of links. README.md counts as the first
page. The generated API and the pages for contributors are not counted.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

MOST_WORDS = 45_000

_log = logging.getLogger(__name__)


def words_of(env: BuildEnvironment) -> dict[str, int]:
    """Return the number of words on each page for users."""
    pages = [page for page in sorted(env.found_docs) if not re.match(r"contribute/|reference/api/", page)]
    return {page: len(re.findall(r"\S*\w\S*", env.get_doctree(page).astext())) for page in pages}


def _check(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        words = words_of(app.env)
        lines = [*(f"{count:7,} {page}" for page, count in words.items()), f"{sum(words.values()):7,} in all"]
        (app.outdir / "words.txt").write_text("\n".join(lines) + "\n")
        if sum(words.values()) > MOST_WORDS:
            _log.warning("the pages for users have %s words, more than %s", sum(words.values()), MOST_WORDS)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the count, which runs once all pages are written."""
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
