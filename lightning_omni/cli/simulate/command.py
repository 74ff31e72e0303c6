"""``lightning-omni simulate``: runs in virtual time, a table and a picture."""

from __future__ import annotations

import re
from typing import Any

from lightning_omni.cli.simulate.settings import SimulationSettings
from lightning_omni.errors import ConfigurationError

_SEPARATORS = re.compile(r"[\s;]+|,(?!\s*\w+\s*=)")
"""Separators between methods; a comma before ``name=`` separates settings of one method."""


def simulate(method: str | list[str] = "async_sgd", **settings: Any) -> int:
    """Simulate methods on a cluster, in virtual time with real gradients. Write a table, a picture and the traces.

    Of several methods, without --lr, short runs find the learning rate that suits each before its own run.

    Args:
        method: Name, with settings after a colon, as in diloco:period=50,outer_lr=1.0; append @2 for 2 groups, and @1
            for one group, which is plain synchronous training. Several names, separated by commas, semicolons or
            spaces (in YAML also a list), are compared in one picture.
        settings: See SimulationSettings.
    """
    entries = [method] if isinstance(method, str) else method
    names = list(dict.fromkeys(name for entry in entries for name in _SEPARATORS.split(entry) if name))
    if not names:
        raise ConfigurationError("--method: pass at least one, as in --method async_sgd,hardsync")
    from lightning_omni.cli.simulate.runs import run  # here, so that --help does not wait for torch

    return run(names, SimulationSettings(**settings), together=len(names) > 1)
