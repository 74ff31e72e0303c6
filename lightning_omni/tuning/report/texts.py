"""Numbers as text, for all pages, pictures, tables and sentences."""

from __future__ import annotations

import math

from lightning_omni.tuning.model.estimate import Estimate


def number(value: float) -> str:
    """Return a number with three digits, or a dash for NaN.

    Example:
        >>> number(12345.6), number(0.012345), number(float("nan"))
        ('12,346', '0.0123', '–')
    """
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def times(value: float) -> str:
    """Return a ratio as text.

    Example:
        >>> times(1.234), times(123.4), times(float("inf"))
        ('1.23×', '123×', '∞')
    """
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def span(ratio: Estimate) -> str:
    """Return a ratio with its interval as text.

    Example:
        >>> span(Estimate(1.5, 1.2, 2.0))
        '1.50× (80 % interval 1.20× to 2.00×)'
    """
    return f"{times(ratio.value)} (80 % interval {times(ratio.low)} to {times(ratio.high)})"


def between(rate: Estimate) -> str:
    """Return a number with its interval as text.

    Example:
        >>> between(Estimate(1050.0, 990.0, 1200.0))
        '1,050 (80 % interval 990 to 1,200)'
    """
    return f"{number(rate.value)} (80 % interval {number(rate.low)} to {number(rate.high)})"


def duration(seconds: float) -> str:
    """Return seconds as text, in a suitable unit.

    Example:
        >>> duration(0.25), duration(42.0), duration(200), duration(9000), duration(1e6)
        ('0.25 s', '42 s', '3.3 min', '2.5 h', '11.6 days')
    """
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit and math.isfinite(seconds):
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.3g} s"


def interval(seconds: Estimate) -> str:
    """Return seconds with their interval as text.

    Example:
        >>> interval(Estimate(42.0, 30.0, 60.0)), interval(Estimate(42.0, 30.0, math.inf))
        ('42 s (30 s to 60 s)', '42 s (30 s or more)')
    """
    end = "or more" if math.isinf(seconds.high) else f"to {duration(seconds.high)}"
    return f"{duration(seconds.value)} ({duration(seconds.low)} {end})"
