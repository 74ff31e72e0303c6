"""``lightning-omni simulate`` and ``lightning-omni compare``: runs in virtual time, a table and a picture."""

from __future__ import annotations

import re
from typing import Any

from lightning_omni.cli.simulate.settings import SimulationSettings
from lightning_omni.errors import ConfigurationError

_SEPARATORS = re.compile(r"[\s;]+|,(?!\s*\w+\s*=)")
"""Separators between methods; a comma before ``name=`` separates settings of one method."""


def simulate(method: str = "async_sgd", **settings: Any) -> int:
    """Simulate one method on a cluster, in virtual time with real gradients. Write a table, a picture and the trace.

    Args:
        method: Name, with settings after a colon, as in diloco:period=50,outer_lr=1.0; append @2 for 2 groups.
        settings: See SimulationSettings.
    """
    from lightning_omni.cli.simulate.runs import run  # here, so that --help does not wait for torch

    return run([method], SimulationSettings(**settings))


def compare(methods: str | list[str] = "async_sgd@1, hardsync, softsync:n=2, async_sgd", **settings: Any) -> int:
    """Simulate several methods on one cluster. Write a table, one picture and the traces.

    Without --lr, short runs find a learning rate for each method before its own run.

    Args:
        methods: Names as for simulate, separated by commas, semicolons or spaces; in YAML also a list. Append @1 to a
            method for one group, which is plain synchronous training.
        settings: See SimulationSettings.
    """
    entries = [methods] if isinstance(methods, str) else methods
    names = [name for entry in entries for name in _SEPARATORS.split(entry) if name]
    if not names:
        raise ConfigurationError("--methods: pass at least one, as in --methods async_sgd,hardsync")
    from lightning_omni.cli.simulate.runs import run

    return run(list(dict.fromkeys(names)), SimulationSettings(**settings), together=True)
