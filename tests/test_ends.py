"""A process that was in a run ends quietly, with the exit status that it was given."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import SCRIPTS


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a thread is doing")
def test_a_process_ends_quietly_while_gloo_still_holds_tensors() -> None:
    """Without the wait at the exit, about half of them end with "terminate called without an active exception"."""
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / "ends.py"), "4"], capture_output=True, text=True, timeout=200, check=True
    )
    assert json.loads(finished.stdout) == [0] * 4, finished.stderr
    assert "terminate called" not in finished.stderr
