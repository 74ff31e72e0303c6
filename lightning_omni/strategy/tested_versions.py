"""The releases of torch and Lightning that the tests were run with, and a warning about others."""

from __future__ import annotations

import os
import re
import warnings
from importlib.metadata import PackageNotFoundError, version

TESTED = {
    "torch": ((2, 13), (2, 15)),
    "pytorch-lightning": ((2, 6), (2, 6)),
    "lightning": ((2, 6), (2, 6)),
}
"""By package, the oldest and the newest tested minor release. The oldest is also the lower bound in pyproject.toml."""


def warn_about_untested() -> None:
    """Warn on rank 0 of each node about each installed package whose release is outside the tested range."""
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
