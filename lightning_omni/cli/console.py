"""The output of commands: results to standard output, progress and errors to standard error, and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from lightning_omni.errors import ConfigurationError

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
TERMINATED = 143
"""Exit code after SIGTERM."""

_WIDEST = 400
"""Largest width of a table in a file or a pipe, in columns."""


def show(wide: RenderableType, tall: RenderableType | None = None) -> None:
    """Print a table to standard output, or ``tall`` in terminals in which it does not fit.

    A file or a pipe receives the whole table, unless ``COLUMNS`` is set.
    """
    console = _output()
    needed = console.measure(wide, options=console.options.update(max_width=_WIDEST)).maximum
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=max(needed, 80))
    console.print(wide if tall is None or needed <= console.width else tall)


def show_table(
    rows: Sequence[Mapping[str, str]], left: Container[str], title: str | None = None, bold: int | None = None
) -> None:
    """Print rows by their heads, or upright where that does not fit; columns ``left`` are of text."""
    show(_table_of(rows, left, title, bold), _tall_table_of(rows, title))


def _table_of(rows: Sequence[Mapping[str, str]], left: Container[str], title: str | None, bold: int | None) -> Table:
    heads = list(dict.fromkeys(head for row in rows for head in row))
    table = Table(
        *(
            Column(head, overflow="fold") if head in left else Column(head, justify="right", no_wrap=True)
            for head in heads
        ),
        title=title,
    )
    for place, row in enumerate(rows):
        table.add_row(*(Text(row.get(head, "-")) for head in heads), style="bold" if place == bold else None)
    return table


def _tall_table_of(rows: Sequence[Mapping[str, str]], title: str | None) -> Table:
    first, *heads = dict.fromkeys(head for row in rows for head in row)
    columns = [Column(Text(row[first]), justify="right", overflow="fold") for row in rows]
    table = Table(Column(first, no_wrap=True), *columns, title=title)
    for head in heads:
        table.add_row(head, *(Text(row.get(head, "-")) for row in rows))
    return table


def print_line(line: str) -> None:
    """Print a line unbroken, for programs and the clipboard."""
    _output().print(Text(line), soft_wrap=True)


def print_sentence(sentence: str) -> None:
    console = _output()
    console.print(Text(sentence), soft_wrap=not console.is_terminal)


def log(console: Console, line: str, style: str | None = None, highlight: bool | None = None) -> None:
    with suppress(OSError, SystemExit):  # rich ends the program if a pipe has lost its reader
        console.print(line, style=style, soft_wrap=True, markup=False, highlight=highlight)


CommandOutput = tuple[Callable[[RenderableType], None], Callable[[str], None]]
"""Functions that print a result, and that announce the next wait."""


@contextmanager
def command_output() -> Iterator[CommandOutput]:
    """Provide a `CommandOutput`, which announces waits on a terminal only."""
    console = _output()
    with console.status("") as status:  # nothing without a terminal
        result = console.print if console.is_terminal else show
        yield result, lambda what: status.update(Text(f"waiting for {what}"))


def _output() -> Console:
    return Console(file=sys.stdout, highlight=False)


# --- Output files, which are checked before a command spends minutes on their contents --------------------------------


def check_file(option: str, path: Path) -> None:
    """Raise `ConfigurationError`, with the ``option``, if a file cannot be written; leave the file as it is."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigurationError(
            f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}; make it, or name another"
        )
    try:
        if path.is_dir() or path.is_file():
            path.open("ab").close()
        elif not path.exists():  # opening and closing a pipe would end it for its reader
            TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(option, path, error, "file") from error


def make_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(option, folder, error, "folder") from error


def _unwritable(option: str, path: Path, error: OSError, kind: str) -> ConfigurationError:
    return ConfigurationError(f"{option} {str(path)!r}: {error.strerror}; pass a {kind} that can be written")
