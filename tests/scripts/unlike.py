"""A fit whose ranks pass different arguments to the strategy, and why it ends."""

from __future__ import annotations

import os
from typing import Any

from common import OPTIONS, Net, loaders, omni, report, trainer

from lightning_omni.errors import ConfigurationError

RANK = int(os.environ.get("LOCAL_RANK", 0))


def why_it_ends(arguments: list[dict[str, Any]]) -> str:
    """Each rank's arguments are its own."""
    try:
        trainer(omni.OmniStrategy(groups=2, **arguments[RANK]), len(arguments)).fit(Net(), *loaders())
    except ConfigurationError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    report(RANK, why_it_ends(OPTIONS["arguments"]))
