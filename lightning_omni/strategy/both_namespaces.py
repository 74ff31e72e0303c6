"""The `OmniStrategy` that `lightning_omni` exports, for both of Lightning's namespaces. See ``__init__.py``."""

from __future__ import annotations

import os
import re
import warnings
from abc import ABCMeta
from importlib.metadata import PackageNotFoundError, version

from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.namespaces import namespace_of

# --- Releases of torch and Lightning that the tests were run with -----------------------------------------------------

TESTED = {
    "torch": ((2, 13), (2, 15)),
    "pytorch-lightning": ((2, 6), (2, 6)),
    "lightning": ((2, 6), (2, 6)),
}
"""By package, the oldest and the newest tested minor release. The oldest is also the lower bound in pyproject.toml."""


def warn_about_untested() -> None:
    """Warn on rank 0 of each node about packages outside the tested range."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for package, (oldest, newest) in TESTED.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        release = re.match(r"(\d+)\.(\d+)", installed)
        if release is not None and not oldest <= (int(release[1]), int(release[2])) <= newest:
            first, last = (".".join(map(str, each)) for each in (oldest, newest))
            tested = first if first == last else f"{first} to {last}"
            warnings.warn(
                f"lightning-omni was tested with {package} {tested}, and {installed} is installed; if something fails,"
                f" try a tested release",
                stacklevel=2,
            )


# --- The class --------------------------------------------------------------------------------------------------------

warn_about_untested()


class OmniStrategy(OmniStrategyHooks, metaclass=ABCMeta):
    __doc__ = OmniStrategyHooks.__doc__


def take_base(base: type, twin: type) -> None:
    """Derive `OmniStrategy` and its subclasses from a namespace's base class; only the first call does.

    ``twin``, OmniStrategy of the namespace of ``base`` alone, becomes a virtual subclass.
    """
    if namespace_of(OmniStrategy) is None:
        OmniStrategy.__bases__ = (*OmniStrategy.__bases__, base)
    OmniStrategy.register(twin)
