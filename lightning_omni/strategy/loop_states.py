"""The progress of Lightning's loops in a checkpoint of Lightning 2.5 or later, set to another position.

This module does not import Lightning: the states are plain values, and a test compares them with checkpoints that
Lightning saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any


def loops_at(
    loops: Mapping[str, Any], epoch: int, batches: int, before: int, steps: int, past: int, window: int, automatic: bool
) -> dict[str, Any]:
    """Return the progress of the loops between two batches, or at the beginning of an epoch.

    Args:
        loops: loops at an earlier position, from a checkpoint.
        epoch: number of the epoch.
        batches: batches of the epoch that are trained; with 0 the epoch has not begun.
        before: batches that were trained in earlier epochs.
        steps: ``global_step``.
        past: steps of earlier epochs among ``steps``.
        window: batches whose gradients are accumulated for one step.
        automatic: whether Lightning steps the optimizers, and not the module.
    """
    changed: dict[str, Any] = deepcopy(dict(loops))
    fit = changed["fit_loop"]
    begun = int(batches > 0)
    if fit["epoch_progress"]["current"]["processed"] != epoch:  # no validation of this epoch has begun
        _set(fit["epoch_loop.val_loop.batch_progress"]["total"], ready=0, started=0, processed=0, completed=0)
    for scope in fit["epoch_progress"].values():
        _set(scope, ready=epoch + begun, started=epoch + begun, processed=epoch, completed=epoch)
    progress = fit["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False
    # Lightning saves at a batch's end before it counts that batch as completed.
    for scope, count in ((progress["total"], before + batches), (progress["current"], batches)):
        _set(scope, ready=count, started=count, processed=count, completed=count - begun)
    optimizer = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    by_hand = fit["epoch_loop.manual_optimization.optim_step_progress"]
    begun_windows = int(batches % window > 0)  # gradients are zeroed when a window begins, and stepped when it ends
    for tracked, more in (
        ((optimizer["step"], 0), (optimizer["zero_grad"], begun_windows)) if automatic else ((by_hand, 0),)
    ):
        for scope, count in ((tracked["total"], steps), (tracked["current"], steps - past)):
            _set(scope, ready=count + more, started=count + more, completed=count + more)
    stepped = steps if automatic else before + batches
    is_counted_later = begun and batches % window == 0
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = max(0, stepped - int(is_counted_later))
    return changed


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
    _set(current, **{name: count - current["ready"] + batches for name, count in current.items()})


def _set(scope: dict[str, int], **counts: int) -> None:
    scope.update({name: count for name, count in counts.items() if name in scope})
