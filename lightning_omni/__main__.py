"""``python -m lightning_omni`` is the ``lightning-omni`` command."""

import sys

from lightning_omni.cli import main

if __name__ == "__main__":
    sys.exit(main())
