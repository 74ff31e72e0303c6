"""Libraries that a search needs, and that an installation may lack."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress

from lightning_omni.errors import ConfigurationError


def load_libraries() -> None:
    """Imports what takes a second or two, before it is needed. It is no error if something is missing."""
    with suppress(ImportError):
        importlib.import_module("scipy.optimize")
        importlib.import_module("skopt")


def check_libraries(needs_scikit_optimize: bool) -> None:
    """Refuses a search whose libraries are missing, without importing them.

    Args:
        needs_scikit_optimize: whether the search's sampler does.

    Raises:
        ConfigurationError: SciPy, or scikit-optimize if it is needed, is not installed.
    """
    needed = {"scipy": "SciPy", **({"skopt": "scikit-optimize"} if needs_scikit_optimize else {})}
    for module, name in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigurationError(missing(name))


def import_libraries(needs_scikit_optimize: bool) -> None:
    """Imports what a search needs, before its first probe: an installation may be broken.

    Args:
        needs_scikit_optimize: whether the search's sampler does.

    Raises:
        ConfigurationError: a library cannot be imported.
    """
    try:
        importlib.import_module("scipy.optimize")
        if needs_scikit_optimize:
            importlib.import_module("skopt")
    except ImportError as error:
        raise ConfigurationError(f"{missing(error.name or 'a library')} ({error})") from error


def missing(name: str) -> str:
    """What users are told."""
    return f"OmniTuner needs {name}; install it with: pip install 'lightning-omni[tune]'"
