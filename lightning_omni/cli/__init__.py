"""The ``lightning-omni`` command: ``commands`` has the options of all, and a module of its name the work of each."""

from lightning_omni.cli.entry_point import main

__all__ = ["main"]
