"""Quoting of text from outside for a log: one line, no control characters, limited length."""

from __future__ import annotations

LONGEST = 200
"""The most characters of a quoted text."""


def quoted(text: str) -> str:
    r"""Return the text with all unprintable characters escaped, cut to `LONGEST` characters.

    Example:
        >>> quoted("ok" + chr(10) + "WARNING forged")
        'ok\\nWARNING forged'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST and len(text) <= LONGEST else f"{shown[:LONGEST]}…"
