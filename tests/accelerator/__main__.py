"""Builds the emulated device, and runs with it the tests of this folder and those that `selection.py` names.

Without a C++ compiler, on another system than Linux, or with another torch than the one that the device is written for,
it says so in one line and succeeds. More arguments go to pytest, in the place of the tests if they name any.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import device_library
import pytest
import selection

TESTS = Path(__file__).parents[1]
WORKERS = 4


def main(arguments: list[str]) -> int:
    """Run pytest unless there can be no emulated device; return its exit code, or 0."""
    if reason := device_library.build():
        sys.stdout.write(f"skipped: no emulated device, for {reason}\n")
        return 0
    chosen = [
        each for each in arguments if not each.startswith("-") and (TESTS.parent / each.partition("::")[0]).exists()
    ]
    files = [] if chosen else [str(TESTS / "accelerator"), *(str(TESTS / name) for name in selection.selected())]
    left_out = [part for test in selection.TESTS_LEFT_OUT for part in ("--deselect", f"tests/{test}")]
    command = [sys.executable, "-m", "pytest"]
    beside = ["--cache-clear", "-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder"]
    again = ["--again", "--last-failed", "--last-failed-no-failures", "none"]  # as `make test` does
    environment = {**os.environ, "OMNI_TEST_ACCELERATOR": "gpu", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for options in (beside, again):
        tests = [*command, *options, *left_out, *files, *arguments]
        code = subprocess.run(tests, cwd=TESTS.parent, env=environment).returncode
        if code != pytest.ExitCode.TESTS_FAILED:
            break
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
