"""One meaning, one colour, in all pictures: of runs, of searches, of devices, of the examples.

What is said of a setting has the colours of Okabe and Ito, methods and the parts of a step have Tol's: people who see
colours differently can tell them apart. Numbers (of groups, of learning rates) are shades of viridis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

EXPECTED = "#0072b2"
"""What a model predicts."""
PROPORTIONAL = "#e69f00"
"""Predicted with batches in proportion to speeds; and what is faster, but proposed only."""
MEASURED = "#009e73"
"""Measured in training."""
CHOSEN = "#d55e00"
"""What is in use, or advised."""
YOURS = "#aa4499"
"""As it was before anything was changed."""
GREY = "#767676"
"""Whatever else there is."""
FAINT = "#c8c8c8"
"""What was tried and not taken."""

QUANTITY = "cividis"
"""Colour map of a time or a staleness, with a bar beside it that says how much."""

PARTS: Mapping[str, str] = {"compute": "#bbcc33", "allreduce": "#77aadd", "exchange": "#44bb99", "wait": "#ee8866"}
"""Of which a group's step consists."""

ONE_GROUP = "#333333"
"""Plain synchronous training, whatever the method would be."""
METHODS: Mapping[str, str] = {
    "async_sgd": "#0077bb",
    "hardsync": "#ee7733",
    "softsync": "#009988",
    "delay_compensated": "#33bbee",
    "downpour": "#cc3311",
    "elastic_averaging": "#ee3377",
    "gossip": "#999933",
    "local_sgd": "#882255",
    "diloco": "#6f4fa0",
    "async_diloco": "#b07aa1",
}
"""By a method's name."""
_OTHERS = ("#117733", "#ddaa33", "#88ccee", "#661100", "#aaaa00")
"""Methods of one's own, in the order in which they come."""

_DASHES: Sequence[Any] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = "os^Dv*Pp"
_MOST_WIDTH = 3.6


def method_colours(names: Sequence[str], groups: Sequence[int]) -> list[str]:
    """A colour for each of some runs.

    Args:
        names: their methods, as ``"softsync:n=2@4"``.
        groups: their numbers of groups.

    Example:
        >>> method_colours(["async_sgd@1", "softsync:n=2", "async_sgd"], [1, 8, 8]) == [
        ...     ONE_GROUP, METHODS["softsync"], METHODS["async_sgd"]
        ... ]
        True
    """
    others: dict[str, str] = {}
    colours = []
    for name, count in zip(names, groups, strict=True):
        method = name.partition("@")[0].partition(":")[0]
        if count == 1:
            colours.append(ONE_GROUP)
        elif method in METHODS:
            colours.append(METHODS[method])
        else:
            colours.append(others.setdefault(method, _OTHERS[len(others) % len(_OTHERS)]))
    return colours


def line_styles(colours: Sequence[str]) -> list[dict[str, Any]]:
    """How to draw that many curves of these colours so that each is seen, even where all are one.

    Earlier ones are wider and lie below; those of one colour differ in their dashes, all in their markers.
    """
    styles: list[dict[str, Any]] = []
    step = min(1.1, (_MOST_WIDTH - 1.4) / max(1, len(colours) - 1))
    for place, colour in enumerate(colours):
        before = list(colours[:place]).count(colour)
        styles.append(
            {
                "color": colour,
                "linewidth": 1.4 + step * (len(colours) - 1 - place),
                "linestyle": _DASHES[before % len(_DASHES)],
                "marker": _MARKERS[place % len(_MARKERS)],
                "markersize": 4.5 + 0.6 * step * (len(colours) - 1 - place),
                "markeredgecolor": "white",
                "markeredgewidth": 0.5,
                "zorder": 3 + place,
            }
        )
    return styles


def number_colours(numbers: Sequence[float]) -> dict[float, Any]:
    """Shades for numbers above 0, equally far apart where their ratios are equal."""
    from matplotlib import colormaps

    # Not up to its yellow, which white would swallow.
    span = math.log(max(numbers) / min(numbers)) or 1.0
    return {each: colormaps["viridis"](0.85 * math.log(each / min(numbers)) / span) for each in numbers}
