"""The ``lightning-omni`` command: ``commands`` has all options, and modules the work."""

from lightning_omni.cli.entry_point import main

__all__ = ["main"]
