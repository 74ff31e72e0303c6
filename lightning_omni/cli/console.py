"""Where commands write: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_WIDEST = 400
"""Columns of a table that goes into a file or a pipe, at most."""


def show(wide: RenderableType, tall: RenderableType | None = None) -> None:
    """Writes a table to standard output.

    A terminal has the width that it has; a file or a pipe takes the table whole, unless ``COLUMNS`` is set.

    Args:
        wide: the table.
        tall: the same in other words, for terminals in which the table does not fit.
    """
    console = _output()
    needed = console.measure(wide, options=console.options.update(max_width=_WIDEST)).maximum
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=max(needed, 80))
    console.print(wide if tall is None or needed <= console.width else tall)


def say(line: str) -> None:
    """Writes a line to standard output; it is never broken, because programs and the clipboard read it."""
    _output().print(Text(line), soft_wrap=True)


def tell(sentence: str) -> None:
    """Writes a sentence to standard output, broken at the terminal's width."""
    console = _output()
    console.print(Text(sentence), soft_wrap=not console.is_terminal)


@contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None]]:
    """A bar on standard error, which is gone afterwards; nothing if that is no terminal.

    Yields:
        What is told the fraction that is done, 0 to 1, and a text.
    """
    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=max(10, min(40, console.width // 3))),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=1.0)

        def update(done: float, text: str) -> None:
            if math.isfinite(done):
                bars.update(bar, completed=done, description=text)

        yield update


def _output() -> Console:
    return Console(file=sys.stdout, highlight=False)
