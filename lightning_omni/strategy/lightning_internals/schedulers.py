"""Steps of learning-rate schedulers by Lightning's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_omni.strategy.lightning_internals.callbacks import call_module, callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def step_schedules_by_epoch(trainer: Trainer) -> None:
    """Step the schedulers as the loop does after an epoch's last batch, without those that monitor a metric."""
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def step_schedule(trainer: Trainer, scheduler: Any) -> None:
    """Call the module's ``lr_scheduler_step`` for a scheduler without a metric, as the loop does."""
    call_module(trainer)._call_lightning_module_hook(trainer, "lr_scheduler_step", scheduler, None)


@contextmanager
def intercept_scheduler_steps(trainer: Trainer, step: Callable[[Any, Callable[[], Any]], None]) -> Iterator[None]:
    """Return a context in which ``step`` makes the loop's calls of the module's ``lr_scheduler_step``.

    ``step`` receives the scheduler and the call. The loop alone knows which schedulers are due.
    """
    hook, own = "lr_scheduler_step", trainer.lightning_module.lr_scheduler_step
    attributes = vars(trainer.lightning_module)
    before = {hook: attributes[hook]} if hook in attributes else {}
    attributes[hook] = lambda scheduler, metric: step(scheduler, partial(own, scheduler, metric))
    try:
        yield
    finally:
        del attributes[hook]
        attributes.update(before)


@contextmanager
def with_schedulers(trainer: Trainer, configs: list[Any]) -> Iterator[None]:
    """Return a context in which the loop has these schedulers and no others."""
    strategy = trainer.strategy
    before, strategy.lr_scheduler_configs = strategy.lr_scheduler_configs, configs
    try:
        yield
    finally:
        strategy.lr_scheduler_configs = before


def step_plateaus(trainer: Trainer, configs: list[Any]) -> None:
    """Step schedulers that monitor a metric and are due, whatever the number of this rank's batch."""
    with with_schedulers(trainer, [replace(config, frequency=1) for config in configs]):
        trainer.fit_loop.epoch_loop._update_learning_rates("step", update_plateau_schedulers=True)


def ignore_missing_step(optimizer: Any) -> None:
    """Suppress the warning of schedulers that their optimizer was never stepped: the server steps its copy."""
    optimizer._opt_called = True


def replaces_scheduler(trainer: Trainer) -> bool:
    """Return whether a callback replaces the user's learning-rate scheduler during the run."""
    return any(hasattr(callback, "_swa_scheduler") for callback in callbacks_of(trainer))


def runs_lr_finder(trainer: Trainer) -> bool:
    """Return whether a callback runs the loop inside a hook, to find a learning rate."""
    return any(hasattr(callback, "lr_find") for callback in callbacks_of(trainer))
