"""How far a simulation is, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_omni.errors import ConfigurationError

Progress = Callable[[float, str], None]
"""Called with the fraction that is done, 0 to 1, and a text."""


class Enough(Exception):
    """Raised by a function that is told the progress: the run ends there, as if it had been asked for no more."""


@contextmanager
def progress_of(wanted: bool | Progress) -> Iterator[Progress | None]:
    """What shows progress: a bar, the caller's function, or None."""
    if callable(wanted):
        yield wanted
    elif wanted is False:
        yield None
    elif wanted is True:
        from rich.progress import Progress as Bars

        with Bars() as bars:
            bar = bars.add_task("simulating", total=1.0)
            yield lambda done, text: bars.update(bar, completed=done, description=text)
    else:
        raise ConfigurationError(f"progress={wanted!r}: pass True, False or a function of a fraction and a text")
