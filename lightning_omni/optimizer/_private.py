"""What touches underscore names of torch.distributed, which it does not promise to keep. Checked on torch 2.6 to 2.13.

One small place, so that a new release of torch can be checked against one small file; a test notices when one of these
names is gone or behaves otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_omni.errors import UnsupportedError


def new_named_group(name: str, ranks: Sequence[int], timeout: timedelta) -> Any:
    """``torch.distributed.new_group`` for its members alone, under a name of one's choice.

    Left alone, torch names such a group by its ranks and by how many groups the rank has at the moment. Ranks with
    unequal histories then wait for each other under different names.

    The communicator is not split off that of the default group: all ranks would have to take part in that, and some may
    be dead.

    Args:
        name: the same on all members, and never used before with this default process group.
        ranks: the members.
        timeout: seconds after which a collective that does not complete is an error.
    """
    if not hasattr(distributed_c10d, "_process_group_name"):
        import torch

        raise UnsupportedError(
            f"torch {torch.__version__} names process groups in a way that this release of lightning-omni does not"
            " know; use groups=1, or torch 2.6 to 2.13"
        )
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        with patch.object(distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name):
            return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        default.bound_device_id = bound
