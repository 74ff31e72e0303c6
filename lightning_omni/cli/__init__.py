"""The ``lightning-omni`` command."""

from lightning_omni.cli.entry_point import main

__all__ = ["main"]
