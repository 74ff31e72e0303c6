"""Values of the wrong kind or out of range are refused: messages name the argument, and say what to pass instead."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from lightning_omni.errors import ConfigurationError


def counted(number: int, noun: str) -> str:
    """The number and its noun.

    Args:
        number: how many.
        noun: of one of them; with an s, of several.

    Example:
        >>> counted(1, "rank"), counted(4, "rank")
        ('1 rank', '4 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plain(value: Any) -> Any:
    """Return a number as one of Python's own, which can be sent and saved; anything else as it is.

    Args:
        value: that a user has passed; NumPy's numbers, say, are numbers like any other.

    Example:
        >>> from fractions import Fraction
        >>> plain(Fraction(1, 2)), plain(True), plain("2")
        (0.5, True, '2')
    """
    if isinstance(value, (bool, int)):
        return value if type(value) in (bool, int) else int(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def keep_plain(values: Any) -> None:
    """Have a frozen dataclass hold its numbers as `plain` returns them; for its ``__post_init__``."""
    for each in fields(values):
        object.__setattr__(values, each.name, plain(getattr(values, each.name)))


def check_number(
    name: str,
    value: Any,
    what: str,
    low: float = -math.inf,
    high: float = math.inf,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Refuses what is no number from ``low`` to ``high``: text, booleans and NaN, too.

    Args:
        name: of the argument.
        value: that was passed.
        what: to pass instead, in words.
        low: the least.
        high: the largest.
        above: it has to be larger than this.
        below: it has to be smaller than this.

    Raises:
        ConfigurationError: it is none.

    Example:
        >>> check_number("target", 0.88, "a number")
        >>> check_number("target", "0.88", "a number")
        Traceback (most recent call last):
        lightning_omni.errors.ConfigurationError: target='0.88': pass a number
    """
    is_good = not isinstance(value, bool) and isinstance(value, Real) and low <= float(value) <= high
    if not is_good or (above is not None and value <= above) or (below is not None and value >= below):
        raise ConfigurationError(f"{name}={value!r}: pass {what}")


def check_whole(name: str, value: Any, what: str, low: int = 0, high: int | None = None) -> None:
    """Refuses what is no whole number from ``low`` to ``high``; see `check_number`.

    Args:
        name: of the argument.
        value: that was passed.
        what: to pass instead, in words.
        low: the least.
        high: the largest; None if there is none.

    Raises:
        ConfigurationError: it is none.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        raise ConfigurationError(f"{name}={value!r}: pass {what}")


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> None:
    """Refuses what is of another class.

    Args:
        name: of the argument.
        value: that was passed.
        kinds: classes that it may be of.
        what: to pass instead, in words.

    Raises:
        ConfigurationError: it is of none of them.
    """
    if not isinstance(value, kinds):
        raise ConfigurationError(f"{name}={value!r}: pass {what}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses what is none of these words.

    Args:
        name: of the argument.
        value: that was passed.
        choices: words that it may be.

    Raises:
        ConfigurationError: it is none of them.
    """
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise ConfigurationError(f"{name}={value!r}: pass {', '.join(others)} or {last}")
