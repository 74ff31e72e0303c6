"""``lightning-omni simulate`` and ``lightning-omni compare``: runs in virtual time, a table and a picture."""

from __future__ import annotations

import re
from typing import Any

from lightning_omni.cli.simulation_settings import SimulationSettings
from lightning_omni.errors import ConfigurationError

_SEPARATORS = re.compile(r"[\s;]+|,(?!\s*\w+\s*=)")
"""Between methods; a comma before ``name=`` stands between settings of one method."""


def simulate(method: str = "async_sgd", **settings: Any) -> int:
    """Simulates one method on a cluster: virtual time, real gradients. Writes a table, a picture and the trace.

    Args:
        method: Name, with settings after a colon, as in diloco:period=50,outer_lr=1.0; append @2 for 2 groups.
        settings: See SimulationSettings.
    """
    from lightning_omni.cli.runs import run  # not above: --help is not to wait for torch

    return run([method], SimulationSettings(**settings))


def compare(methods: str | list[str] = "async_sgd@1, hardsync, softsync:n=2, async_sgd", **settings: Any) -> int:
    """Simulates several methods on one cluster. Writes a table, one picture and the traces.

    Without --lr, a learning rate is found for each method, by short runs before its own.

    Args:
        methods: Names as for simulate, separated by commas, semicolons or spaces; in YAML also a list. Append @1 to a
            method for one group, which is plain synchronous training.
        settings: See SimulationSettings.
    """
    entries = [methods] if isinstance(methods, str) else methods
    names = [name for entry in entries for name in _SEPARATORS.split(entry) if name]
    if not names:
        raise ConfigurationError("--methods: pass at least one, as in --methods async_sgd,hardsync")
    from lightning_omni.cli.runs import run

    return run(list(dict.fromkeys(names)), SimulationSettings(**settings), together=True)
