"""Text that came from outside, as it may stand in a log: one line, no control characters, not too long."""

from __future__ import annotations

LONGEST = 200
"""Characters of such a text that are shown."""


def quoted(text: str) -> str:
    r"""The text with everything escaped that is not printable, cut to `LONGEST` characters.

    Example:
        >>> quoted("ok" + chr(10) + "WARNING forged")
        'ok\\nWARNING forged'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST and len(text) <= LONGEST else f"{shown[:LONGEST]}…"
