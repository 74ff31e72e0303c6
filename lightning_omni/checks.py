"""Checks of arguments. The messages name the argument, and a value to pass instead."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from lightning_omni.errors import ConfigurationError


def counted(number: int, noun: str) -> str:
    """Return the number and its noun, plural with an s.

    Example:
        >>> counted(1, "rank"), counted(4, "rank")
        ('1 rank', '4 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plain(value: Any) -> Any:
    """Return a user's real number, such as one of NumPy's, as a plain Python number; other values unchanged.

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
    """Make the numbers in a frozen dataclass's fields `plain`, as it is constructed."""
    for each in fields(values):
        object.__setattr__(values, each.name, plain(getattr(values, each.name)))


def _refused(name: str, value: Any, what: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r}{')' if '(' in name else ''}: pass {what}")


def check_number(
    name: str,
    value: Any,
    what: str,
    low: float = -math.inf,
    high: float = math.inf,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raise `ConfigurationError` unless a value is a number in a range; text, booleans and NaN are not.

    ``name`` is the argument's, or ``Class(name`` for an argument of a class; ``what`` are the valid values, in words.
    ``low`` and ``high`` are inclusive bounds, ``above`` and ``below`` exclusive ones.

    Example:
        >>> check_number("target", 0.88, "a number")
        >>> check_number("target", "0.88", "a number")
        Traceback (most recent call last):
        lightning_omni.errors.ConfigurationError: target='0.88': pass a number
    """
    is_good = not isinstance(value, bool) and isinstance(value, Real) and low <= float(value) <= high
    if not is_good or (above is not None and value <= above) or (below is not None and value >= below):
        raise _refused(name, value, what)


def check_whole(name: str, value: Any, what: str, low: int = 0, high: int | None = None) -> None:
    """Raise `ConfigurationError` unless a value is a whole number from ``low`` to ``high``."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        raise _refused(name, value, what)


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> None:
    if not isinstance(value, kinds):
        raise _refused(name, value, what)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise _refused(name, value, f"{', '.join(others)} or {last}")
