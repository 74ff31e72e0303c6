"""Where the ranks of the tests' scripts compute: on the CPU, or on emulated devices with OMNI_TEST_ACCELERATOR=gpu."""

from __future__ import annotations

import os

import torch

ACCELERATOR = os.environ.get("OMNI_TEST_ACCELERATOR", "cpu")
"""The Trainer's `accelerator`."""
BACKEND = "emulated_nccl" if ACCELERATOR == "gpu" else "gloo"
"""torch.distributed's backend for tensors of the ranks' devices."""


def own_device(rank: int | None = None) -> torch.device:
    """Return the device of a rank of this host; that of this process, where it has an environment, for None."""
    own = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    return torch.device("cuda", own) if ACCELERATOR == "gpu" else torch.device("cpu")
