"""Arguments of OmniStrategy and WorldOptions from JSON."""

from __future__ import annotations

from typing import Any

import lightning_omni as omni


def values_in(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as Python passes them: in JSON a value is a dictionary of its own arguments."""
    kinds: dict[str, Any] = {
        "compression": omni.Compression,
        "server": omni.Server,
        "elastic": omni.Elastic,
        "model_parallel": omni.FSDP,
    }
    return {
        name: kinds[name](**value) if name in kinds and isinstance(value, dict) else value
        for name, value in options.items()
    }
