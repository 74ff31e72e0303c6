"""The counters of Lightning's loops: batches, steps, epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_omni.strategy.lightning_internals.callbacks import callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def progress_counters(trainer: Trainer) -> list[int]:
    """Return this rank's counts of batches and steps, on which the ranks of a group must agree."""
    batch = trainer.fit_loop.epoch_loop.batch_progress
    return [batch.current.ready, batch.total.ready, *step_counters(trainer)]


def batches_started(trainer: Trainer) -> int:
    """Return how many batches this rank has begun to train, in all epochs."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def batches_trained(trainer: Trainer) -> int:
    """Return how many batches of the current epoch this rank has trained."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.current.processed)


def batches_resumed(trainer: Trainer) -> int:
    """Return how many batches of its epoch each rank had trained when the checkpoint of a resumed fit was saved.

    Return 0 if the fit resumes from no checkpoint, or from one that was not saved inside an epoch.
    """
    if not trainer.fit_loop.restarted_mid_epoch:
        return 0
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    batches = int(progress.current.processed)
    return batches if batches < trainer.num_training_batches else 0


def accumulation_windows(trainer: Trainer, epochs: int) -> list[int]:
    """Return ``accumulate_grad_batches`` of the first epochs if a callback has a schedule for it; otherwise nothing."""
    for callback in callbacks_of(trainer):
        if hasattr(callback, "get_accumulate_grad_batches"):
            return [int(callback.get_accumulate_grad_batches(epoch)) for epoch in range(epochs)]
    return []


def manual_steps(trainer: Trainer) -> int:
    """Return how many steps of all optimizers the user has taken in manual optimization."""
    return int(trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed)


def set_progress_counters(trainer: Trainer, counters: list[int]) -> None:
    """Set the counts that `progress_counters` returns."""
    current, total, *steps = counters
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress
    for progress, ready in ((batch.current, current), (batch.total, total)):
        progress.completed += ready - progress.ready
        progress.processed += ready - progress.ready
        progress.started += ready - progress.ready
        progress.ready = ready
    set_step_counters(trainer, steps)


def step_counters(trainer: Trainer) -> list[int]:
    """Return this rank's counts of steps, from which Lightning computes ``global_step`` and the steps of logs."""
    loop = trainer.fit_loop.epoch_loop
    return [
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed,
        loop.manual_optimization.optim_step_progress.total.completed,
        loop._batches_that_stepped,
    ]


def set_step_counters(trainer: Trainer, counters: list[int]) -> None:
    """Set the counts that `step_counters` returns."""
    loop = trainer.fit_loop.epoch_loop
    automatic, manual, loop._batches_that_stepped = counters
    for steps, wanted in (
        (loop.automatic_optimization.optim_progress.optimizer.step, automatic),
        (loop.manual_optimization.optim_step_progress, manual),
    ):
        steps.total.ready += wanted - steps.total.completed
        steps.total.completed = wanted


def reload_epochs(trainer: Trainer) -> list[float]:
    """Return the epochs in which the training and validation loaders were made last, from which reloads are counted."""
    loop: Any = trainer.fit_loop
    return [loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch]


def set_reload_epochs(trainer: Trainer, epochs: list[float]) -> None:
    """Set the epochs that `reload_epochs` returns."""
    loop: Any = trainer.fit_loop
    loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epochs


def start_fit_at_epoch(trainer: Trainer, epoch: int, counters: list[int]) -> None:
    """Set the fit loop to begin with an epoch, without a sanity check.

    ``counters`` are those of `progress_counters`, without the batches of this epoch.
    """
    progress: Any = trainer.fit_loop.epoch_progress
    for each in (progress.total, progress.current):
        each.ready = each.started = each.processed = each.completed = epoch
    set_progress_counters(trainer, [0, *counters])
    trainer.num_sanity_val_steps = 0
