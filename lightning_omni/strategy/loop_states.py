"""The progress of Lightning's loops, as a checkpoint of Lightning 2.5 and later holds it: set to another moment.

Nothing of Lightning is imported: these are plain values, which a test compares with those that it saves itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any


def loops_at(
    loops: Mapping[str, Any], epoch: int, batches: int, before: int, steps: int, past: int, window: int, automatic: bool
) -> dict[str, Any]:
    """The progress of the loops between two batches, or where an epoch begins.

    Args:
        loops: of an earlier moment, an entry of a checkpoint.
        epoch: number of the epoch.
        batches: of it that are trained; with 0 the epoch has not begun.
        before: batches that were trained in earlier epochs.
        steps: ``global_step``.
        past: of these, those of earlier epochs.
        window: batches whose gradients are accumulated for one step.
        automatic: whether Lightning steps the optimizers, and not the module.
    """
    changed: dict[str, Any] = deepcopy(dict(loops))
    fit = changed["fit_loop"]
    begun = int(batches > 0)
    if fit["epoch_progress"]["current"]["processed"] != epoch:  # validations of this one have not begun
        _set(fit["epoch_loop.val_loop.batch_progress"]["total"], ready=0, started=0, processed=0, completed=0)
    for scope in fit["epoch_progress"].values():
        _set(scope, ready=epoch + begun, started=epoch + begun, processed=epoch, completed=epoch)
    progress = fit["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False
    # As Lightning saves it at a batch's end: before that batch counts as completed.
    for scope, count in ((progress["total"], before + batches), (progress["current"], batches)):
        _set(scope, ready=count, started=count, processed=count, completed=count - begun)
    optimizer = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    by_hand = fit["epoch_loop.manual_optimization.optim_step_progress"]
    begun_windows = int(batches % window > 0)  # whose gradients are zeroed, and with which no step was taken yet
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
    """Where an epoch's last batch is trained, as many are counted as DDP trains; changed in place.

    A group trains more of them, or fewer, and Lightning would not see that the epoch is over, and train another one.

    Args:
        loops: an entry of a checkpoint.
        batches: that each rank of DDP trains in an epoch.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    if progress["is_last_batch"]:
        _count(progress["current"], batches)


def cut_short(loops: Mapping[str, Any], batches: int) -> None:
    """Where max_steps ended a run inside an epoch, as DDP: its last batch was none of the epoch's; changed in place.

    Lightning would take the epoch for a whole one, and a run that is resumed with more steps for the next one.

    Args:
        loops: an entry of a checkpoint.
        batches: of the epoch that each rank of DDP would have trained, whatever the loops have counted.
    """
    loops["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
    go_on_after(loops, batches)


def batches_in(loops: Mapping[str, Any]) -> int:
    """Batches of the epoch under way that the loops have counted.

    Args:
        loops: an entry of a checkpoint.
    """
    return int(loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"])


def go_on_after(loops: Mapping[str, Any], batches: int) -> None:
    """Inside an epoch, DDP resumes after so many batches, whatever the loops have counted; changed in place.

    Args:
        loops: an entry of a checkpoint.
        batches: that each rank of DDP would have trained.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    if not progress["is_last_batch"]:
        _count(progress["current"], batches)


def _count(current: dict[str, int], batches: int) -> None:
    _set(current, **{name: count - current["ready"] + batches for name, count in current.items()})


def _set(scope: dict[str, int], **counts: int) -> None:
    scope.update({name: count for name, count in counts.items() if name in scope})
