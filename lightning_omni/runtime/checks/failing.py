"""A check that ranks which hold a model together have failed together: only then may they call collectives again.

A rank that has failed alone, or was interrupted, is at another collective than its peers, which would mistake its next
one for theirs. Ranks therefore report failures through the store of a process group, and not through the group.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lightning_omni.runtime._private import store_of


def forget(group: Any, rank: int) -> None:
    """Delete this rank's report from an earlier run of this process, in a process group of all ranks."""
    store_of(group).delete_key(_key(rank))


def have_failed_alike(group: Any, rank: int, ranks: Sequence[int], where: str, within: float) -> bool:
    """Return whether all of these ranks report a failure at the same line of the program; each waits for the others.

    Args:
        group: a process group that contains these ranks.
        rank: this rank.
        ranks: all of them, including this one.
        where: position of this rank's failure; see `place_of`.
        within: seconds to wait for the others' reports.
    """
    store, keys = store_of(group), [_key(each) for each in ranks]
    try:
        store.set(_key(rank), where)
        store.wait(keys, timedelta(seconds=within))
        return all(store.get(key) == where.encode() for key in keys)
    except RuntimeError:  # a rank has not reported in time, or the store's process is gone
        return False


def place_of(error: BaseException) -> str:
    """Return the position in the program at which an error was raised."""
    frames = (f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__))
    return f"{type(error).__name__} at {' '.join(frames)}"


def _key(rank: int) -> str:
    return f"lightning-omni/failed/{rank}"
