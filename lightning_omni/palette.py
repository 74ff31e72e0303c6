"""One meaning, one colour, in all pictures: of runs, of searches, of devices, of the examples; and their files.

What is said of a setting has the colours of Okabe and Ito, methods and the parts of a step have Tol's: people who see
colours differently can tell them apart. Numbers (of groups, of learning rates) are shades of viridis.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_omni.errors import ConfigurationError

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
    "decoupled_diloco": "#cc6677",
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
    step = min(1.1, (_MOST_WIDTH - 1.4) / max(1, len(colours) - 1))
    return [
        {
            "color": colour,
            "linewidth": 1.4 + step * (len(colours) - 1 - place),
            "linestyle": _DASHES[list(colours[:place]).count(colour) % len(_DASHES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "markersize": 4.5 + 0.6 * step * (len(colours) - 1 - place),
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
            "zorder": 3 + place,
        }
        for place, colour in enumerate(colours)
    ]


def number_colours(numbers: Sequence[float]) -> dict[float, Any]:
    """Shades for numbers above 0, equally far apart where their ratios are equal."""
    from matplotlib import colormaps

    # Not up to its yellow, which white would swallow.
    span = math.log(max(numbers) / min(numbers)) or 1.0
    return {each: colormaps["viridis"](0.85 * math.log(each / min(numbers)) / span) for each in numbers}


# --- matplotlib figures -----------------------------------------------------------------------------------------------

_MISSING = "pictures need matplotlib; install it with: pip install 'lightning-omni[plot]'"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_can_draw(option: str = "", remedy: str = "") -> None:
    """Refuses pictures where there can be none, before time is spent on what they are to show.

    Args:
        option: that asks for one, before the message.
        remedy: what else may be done, behind it.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    if not can_draw():
        raise ConfigurationError(f"{option}{_MISSING}{remedy}")


def new_figure(width: float, height: float, **options: Any) -> Any:
    """A figure of matplotlib, of so many inches.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(_MISSING) from error
    return Figure(figsize=(width, height), layout="constrained", **options)


def plot_interval(axes: Any, places: Sequence[float], estimates: Sequence[Any], colour: str, label: str = "") -> None:
    """A curve of values, and the band of their intervals.

    Args:
        axes: of matplotlib.
        places: where the values are.
        estimates: have ``value``, ``low`` and ``high``.
        colour: of both.
        label: of the curve.
    """
    axes.plot(places, [each.value for each in estimates], color=colour, marker="o", markersize=4, label=label)
    lows, highs = ([getattr(each, end) for each in estimates] for end in ("low", "high"))
    axes.fill_between(places, lows, highs, color=colour, alpha=0.16, linewidth=0)


def save_figure(figure: Any, path: str | Path) -> None:
    """Writes a figure; the file's suffix says which kind.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigurationError(f"path={str(path)!r}: {error.strerror}; pass a file that can be written") from error
