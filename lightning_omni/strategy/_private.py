"""What touches underscore names of Lightning, which it does not promise to keep. Checked on Lightning 2.6.6.

One small place, so that a new release of Lightning can be checked against one small file; a test notices when one of
these names is gone or behaves otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def set_ddp_options(strategy: Any, options: dict[str, Any]) -> None:
    """The keyword arguments with which DDPStrategy wraps the module."""
    strategy._ddp_kwargs = options


def set_launcher(strategy: Any, launcher: Any) -> None:
    """The launcher that the Trainer calls."""
    strategy._launcher = launcher


def start_method(strategy: Any) -> str:
    """How DDPStrategy starts its processes."""
    return str(strategy._start_method)


def collective_timeout(strategy: Any) -> Any:
    """DDPStrategy's time-out for collectives."""
    return strategy._timeout


def averages_models(strategy: Any) -> bool:
    """Whether DDPStrategy was asked for post-local SGD."""
    return strategy._model_averaging_period is not None


def be_open_ended(trainer: Any) -> None:
    """The epoch ends when the leases do, not when a number of batches is reached."""
    fetcher = trainer.fit_loop._data_fetcher
    fetcher.length = float("inf")
    fetcher.done = False


def set_last_batch(trainer: Any, is_last: bool) -> None:
    """Whether the loop takes the current batch for the epoch's last."""
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = is_last


def will_step(trainer: Any) -> bool:
    """Whether the current batch ends an accumulation window."""
    return not trainer.fit_loop._should_accumulate()


def validates_this_epoch(trainer: Any) -> bool:
    """Whether validation is due in this epoch at all."""
    return bool(trainer.enable_validation and trainer.fit_loop.epoch_loop._should_check_val_epoch())


def validates_by_time(trainer: Any) -> bool:
    """Whether ``val_check_interval`` is a duration."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def stops_now(trainer: Any) -> bool:
    """Whether ``should_stop`` is set, and not put off by min_epochs."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def progress_counters(trainer: Any) -> list[int]:
    """How far this rank's loops are, in numbers that ranks of one group must agree on."""
    loop = trainer.fit_loop.epoch_loop
    batch = loop.batch_progress
    steps = loop.automatic_optimization.optim_progress.optimizer.step
    manual = loop.manual_optimization.optim_step_progress
    return [
        batch.current.ready,
        batch.total.ready,
        steps.total.completed,
        manual.total.completed,
        loop._batches_that_stepped,
    ]


def set_progress_counters(trainer: Any, counters: list[int]) -> None:
    """Sets what `progress_counters` reads."""
    loop = trainer.fit_loop.epoch_loop
    current, total, steps, manual, stepped = counters
    batch = loop.batch_progress
    for progress, ready in ((batch.current, current), (batch.total, total)):
        progress.completed += ready - progress.ready
        progress.processed += ready - progress.ready
        progress.started += ready - progress.ready
        progress.ready = ready
    for optimizer_steps, wanted in (
        (loop.automatic_optimization.optim_progress.optimizer.step, steps),
        (loop.manual_optimization.optim_step_progress, manual),
    ):
        optimizer_steps.total.ready += wanted - optimizer_steps.total.completed
        optimizer_steps.total.completed = wanted
    loop._batches_that_stepped = stepped


def ignore_missing_step(optimizer: Any) -> None:
    """Schedulers warn if the optimizer that they edit was never stepped; its twin at the server was."""
    optimizer._opt_called = True


def logs_now(trainer: Any) -> bool:
    """Whether Lightning sends what is logged in this batch to the loggers."""
    return bool(trainer._logger_connector.should_update_logs)


def set_batch_agreement(trainer: Any, agree: Callable[[], None] | None) -> None:
    """What all ranks do together before every training batch, in place of Lightning's own broadcast of SIGTERM."""
    loop = trainer.fit_loop.epoch_loop
    if agree is None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)
    else:
        loop._broadcast_sigterm_tensor = agree


def mark_terminated(trainer: Any) -> None:
    """What ``trainer.received_sigterm`` reads."""
    trainer._signal_connector.received_sigterm = True
