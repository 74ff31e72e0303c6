"""Which of the tests that start ranks run with emulated devices too, and why the others do not."""

from __future__ import annotations

FILES = """
    groups steps regroup cluster_methods checkpoints deaths parity all_reduce overlap lossy shards frozen wire_format
    inside tensor_parallel joining omni_tuner finetuning merged validation
"""
"""Those that do: file names without `test_` and `.py`."""

FILES_LEFT_OUT: dict[str, str] = {}
"""Those that do not, with the reason."""

TESTS_LEFT_OUT: dict[str, str] = {}
"""Tests of the files that do which do not, with the reason; the name of a function stands for all its parameters."""


def files() -> list[str]:
    """Return the names of the files to run."""
    return [f"test_{name}.py" for name in FILES.split()]
