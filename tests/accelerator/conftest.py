"""Tests of this folder run with emulated devices alone: see `make test-accelerator`."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("OMNI_TEST_ACCELERATOR") == "gpu" else ["test_*.py"]
