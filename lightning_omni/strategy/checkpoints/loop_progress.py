"""The progress of Lightning's loops in a checkpoint of Lightning 2.5 or later, set to another position.

This module does not import Lightning: the states are plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def end_whole_epoch(loops: Mapping[str, Any], batches: int) -> None:
    """Set the batch count after an epoch's last batch to that of DDP; changed in place.

    A group trains another number of batches, from which Lightning would not recognize that the epoch is over.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    if progress["is_last_batch"]:
        _count(progress["current"], batches)


def cut_short(loops: Mapping[str, Any], batches: int) -> None:
    """Mark an epoch that max_steps has ended early as incomplete after ``batches`` of DDP; changed in place.

    Otherwise Lightning would treat the epoch as complete, and a resumed run with more steps would begin the next one.
    """
    loops["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
    go_on_after(loops, batches)


def batches_in(loops: Mapping[str, Any]) -> int:
    """Return the batches of the current epoch that the loops of a checkpoint have counted."""
    return int(loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"])


def go_on_after(loops: Mapping[str, Any], batches: int) -> None:
    """Set the batch count of the loops inside an epoch, after which DDP resumes; changed in place."""
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    if not progress["is_last_batch"]:
        _count(progress["current"], batches)


def _count(current: dict[str, int], batches: int) -> None:
    current.update({name: count - current["ready"] + batches for name, count in current.items()})
