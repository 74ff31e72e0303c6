"""The API reference is whole: a public name without an entry is a warning, and so an error."""

from __future__ import annotations

import importlib

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

ROOMS = [
    "lightning_omni",
    "lightning_omni.methods",
    "lightning_omni.simulator",
    "lightning_omni.transport",
    "lightning_omni.tuning.device",
    "lightning_omni.tuning.report",
    "lightning_omni.tuning.search",
]
"""The packages whose `__all__` is public."""

_log = logging.getLogger(__name__)


def public_names() -> set[str]:
    """Return the dotted name of everything public, below the package that exports it."""
    return {f"{room}.{name}" for room in ROOMS for name in importlib.import_module(room).__all__}


def _check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    documented = env.domains.python_domain.objects
    for name in sorted(public_names() - documented.keys()):
        if name not in ROOMS:
            _log.warning("%s is public, and not in the API reference", name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the check, which runs once all pages are read."""
    app.connect("env-check-consistency", _check_reference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
