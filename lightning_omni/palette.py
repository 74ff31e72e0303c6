"""Colours of plots, by meaning, and matplotlib figures.

Most are those of Okabe and Ito (predictions, measurements, settings) and of Tol (methods, the parts of a step), which
are distinguishable with colour blindness. Numbers are shades of viridis.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_omni.errors import ConfigurationError

EXPECTED = "#0072b2"
"""A model's predictions."""
PROPORTIONAL = "#e69f00"
"""Predictions with batches in proportion to speeds."""
MEASURED = "#009e73"
"""Measurements in training."""
CHOSEN = "#d55e00"
"""The setting in use, or the recommended one."""
YOURS = "#aa4499"
"""The original setting."""
GREY = "#767676"
"""All other meanings."""
FAINT = "#c8c8c8"
"""Lines in the background."""

QUANTITY = "cividis"
"""Colour map of a time or a staleness, shown with a colour bar."""

PARTS: Mapping[str, str] = {"compute": "#bbcc33", "allreduce": "#77aadd", "exchange": "#44bb99", "wait": "#ee8866"}
"""The parts of a group's step."""

ONE_GROUP = "#333333"
"""Plain synchronous training, with any method."""
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
    "ringmaster_asgd": "#117733",
}
"""Colours by method name."""
_OTHERS = ("#ddaa33", "#88ccee", "#661100", "#aaaa00")
"""Colours of other methods, in order of appearance."""

_DASHES: Sequence[Any] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = "os^Dv*Pp"
_MOST_WIDTH = 3.6


def method_colours(names: Sequence[str], groups: Sequence[int]) -> list[str]:
    """Return each run's colour, from its method's name and number of groups.

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
    """Return styles of curves in these colours that keep each visible where they coincide.

    Earlier curves are wider and below; up to four of one colour differ in dashes, up to eight in markers.
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
    """Return shades for numbers above 0, with equal distances for equal ratios."""
    from matplotlib import colormaps

    # The yellow end of viridis is invisible on white.
    span = math.log(max(numbers) / min(numbers)) or 1.0
    return {each: colormaps["viridis"](0.85 * math.log(each / min(numbers)) / span) for each in numbers}


# --- matplotlib figures -----------------------------------------------------------------------------------------------

_MISSING = "pictures need matplotlib; install it with: pip install 'lightning-omni[plot]'"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_can_draw(option: str = "", remedy: str = "") -> None:
    """Raise `ConfigurationError` if matplotlib is missing; its message is between ``option`` and ``remedy``."""
    if not can_draw():
        raise ConfigurationError(f"{option}{_MISSING}{remedy}")


def new_figure(width: float, height: float, **options: Any) -> Any:
    """Return a matplotlib figure of this size in inches.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", **options)


def plot_interval(axes: Any, places: Sequence[float], estimates: Sequence[Any], colour: str) -> None:
    """Draw a curve of estimates (``value``, ``low``, ``high``) and the band of their intervals."""
    axes.plot(places, [each.value for each in estimates], color=colour, marker="o", markersize=4)
    lows, highs = ([getattr(each, end) for each in estimates] for end in ("low", "high"))
    axes.fill_between(places, lows, highs, color=colour, alpha=0.16, linewidth=0)


def png_of(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure to a file, in the format of its suffix.

    Raises:
        ConfigurationError: the file cannot be written.
        ValueError: matplotlib does not write this format.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigurationError(f"path={str(path)!r}: {error.strerror}; pass a file that can be written") from error
