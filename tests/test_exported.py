"""A server's saved state becomes a checkpoint: plain Lightning and further runs go on from it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run as run_script
from test_joining import PATIENCE
from test_server_restart import Saving

from lightning_omni.cli import main
from lightning_omni.errors import ConfigurationError
from lightning_omni.protocol.saved_run import SavedRun
from lightning_omni.server.saving import saved_states, saved_weights
from lightning_omni.strategy.exported import checkpoint_of

SAMPLES, BATCH = 1024, 8
BATCHES = SAMPLES // BATCH


def is_inside_epoch(folder: Path, epoch: int) -> bool:
    """Whether the last save is of the midst of an epoch."""
    try:
        cut = SavedRun.of(saved_states(folder)).cut
    except ConfigurationError:
        return False
    return cut.epoch == epoch and BATCH < sum(stop - start for start, stop in cut.trained) < SAMPLES // 2


def abandoned(folder: Path, *options: str, **more: Any) -> Path:
    """The directory of a server that was killed with all its groups, in the midst of epoch 1."""
    run, state = Saving(folder, *options), folder / "state"
    try:
        given = {"epochs": 3, "samples": SAMPLES, "hold": [1], **more}
        run.start("a", given)
        run.wait_for("a0-in-1")
        run.start("b", given, seed=2)
        run.wait_for("b0-in-1")
        run.go(1)
        deadline = time.monotonic() + PATIENCE
        while not is_inside_epoch(state, 1):  # the server is using the directory meanwhile
            assert time.monotonic() < deadline, run.server.output
            time.sleep(0.02)
    finally:
        run.server.kill()
        run.close()
    return state


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return abandoned(tmp_path_factory.mktemp("abandoned"), step=0.04)


@pytest.fixture(scope="module")
def exported(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "run.ckpt"
    assert main(["checkpoint", str(state), str(out)]) == 0
    return out


@pytest.mark.slow
@pytest.mark.processes
def test_x(exported: Path, state: Path) -> None:
    checkpoint = torch.load(exported, weights_only=True)
    print(checkpoint.keys(), checkpoint["loops"]["fit_loop"], checkpoint["lr_schedulers"])
    print(run_script("exported.py", {"epochs": 2, "samples": SAMPLES, "path": str(exported)}, env={"OMNI_TEST_NAME": "x"}).results[0])
