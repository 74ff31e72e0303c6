"""The ``lightning-omni`` command: one module for each subcommand, and the modules that they share."""

from lightning_omni.cli.command import main

__all__ = ["main"]
