"""Whether ranks that hold a model together have failed together: only then may they call collectives once more.

A rank that has failed alone, or was interrupted, is at another collective than its peers: its next one would be taken
for theirs. What ranks say of it therefore does not go by a process group, but by the store with which that was made.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lightning_omni.optimizer._private import store_of


def forget(group: Any, rank: int) -> None:
    """What this rank has said in an earlier run of this process counts no more.

    Args:
        group: a process group of all ranks.
        rank: this one.
    """
    store_of(group).delete_key(_key(rank))


def have_failed_alike(group: Any, rank: int, ranks: Sequence[int], where: str, within: float) -> bool:
    """Whether all of some ranks say that they have failed at the same place; each waits for the others.

    Args:
        group: a process group of theirs, and perhaps of others.
        rank: this one.
        ranks: all of them, this one among them.
        where: this one has failed; see `place_of`.
        within: seconds in which the others must have said so.
    """
    store, keys = store_of(group), [_key(each) for each in ranks]
    try:
        store.set(_key(rank), where)
        store.wait(keys, timedelta(seconds=within))
        return all(store.get(key) == where.encode() for key in keys)
    except RuntimeError:  # one is elsewhere; or the process is gone that has the store
        return False


def place_of(error: BaseException) -> str:
    """Where a program was when an error was raised."""
    frames = (f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__))
    return f"{type(error).__name__} at {' '.join(frames)}"


def _key(rank: int) -> str:
    return f"lightning-omni/failed/{rank}"
