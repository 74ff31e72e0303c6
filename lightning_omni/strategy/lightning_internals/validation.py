"""A validation by one group, whose metrics all groups receive."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_omni.strategy.lightning_internals.callbacks import call_module

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


_ENDS = ("on_validation_epoch_end", "on_validation_end")


_STARTS = ("on_validation_start", "on_validation_epoch_start")


def validation_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of a fit's validation, and make them first if there are none. All ranks call it."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loop.setup_data()
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


@contextmanager
def divide_validation_data(trainer: Trainer, index: int, members: int) -> Iterator[None]:
    """Return a context in which ``members`` ranks divide the validation data; this rank is number ``index`` of them.

    The trainer's `validation_loaders` have DistributedSamplers.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loaders, limits = validation_loaders(trainer), loop._max_batches
    before = [(each.sampler.num_replicas, each.sampler.rank, len(each)) for each in loaders]
    for loader in loaders:
        _set_sampler(loader, index, members)
    loop._max_batches = [
        min(len(loader), -(-int(limit) * ranks // members)) if limit < whole else len(loader)
        for loader, limit, (ranks, _, whole) in zip(loaders, limits, before, strict=True)
    ]
    try:
        yield
    finally:
        loop._max_batches = limits
        for loader, (ranks, rank, _) in zip(loaders, before, strict=True):
            _set_sampler(loader, rank, ranks)


def _set_sampler(loader: DataLoader[Any], index: int, members: int) -> None:
    sampler = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    sampler.rank, sampler.num_replicas = index, members
    sampler.num_samples = -(-len(sampler.dataset) // members)  # type: ignore[arg-type]
    sampler.total_size = sampler.num_samples * members


@contextmanager
def capture_metrics(trainer: Trainer) -> Iterator[dict[str, dict[str, Any]]]:
    """Return a context in which a validation's metrics are captured and callbacks do not get the hooks of its end.

    Yields:
        Dicts that hold, after the validation, the metrics meant for callbacks, progress bars and loggers.
    """
    connector, relay = trainer._logger_connector, call_module(trainer)._call_callback_hooks
    names = {"callback": "_callback_metrics", "progress_bar": "_progress_bar_metrics"}
    kept = {name: getattr(connector, attribute) for name, attribute in names.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in (*names, "logged")}
    for name, attribute in names.items():
        setattr(connector, attribute, ChainMap(found[name], kept[name]))
    logged_before = dict(connector._logged_metrics)
    connector.log_eval_end_metrics = found["logged"].update  # type: ignore[method-assign,assignment]
    relay.held_back[trainer] = _ENDS
    try:
        yield found
    finally:
        del relay.held_back[trainer]
        vars(connector).pop("log_eval_end_metrics")
        connector._logged_metrics = logged_before
        for name, attribute in names.items():
            setattr(connector, attribute, kept[name])


@torch.no_grad()
def end_validation(trainer: Trainer, found: Mapping[str, Mapping[str, Any]], has_started: bool) -> None:
    """Pass the metrics of a validation, from `capture_metrics`, to callbacks, progress bars and loggers.

    The hooks of its end are called, and those of its start if ``has_started`` is False.
    """
    connector: Any = trainer._logger_connector
    call = partial(call_module(trainer)._call_callback_hooks, trainer)
    stage, first_iteration = trainer.state.stage, connector._first_loop_iter
    trainer.validating = True
    try:
        connector.epoch_end_reached()
        connector._evaluation_epoch_end()
        for hook in () if has_started else _STARTS:
            call(hook)
        connector._callback_metrics.update(found["callback"])
        connector._progress_bar_metrics.update(found["progress_bar"])
        connector._logged_metrics.update(found["logged"])
        call("on_validation_epoch_end")
        connector.on_epoch_end()
        connector.log_eval_end_metrics({**found["logged"], **connector.update_eval_epoch_metrics()})
        call("on_validation_end")
        connector.reset_results()
    finally:
        trainer.state.stage, connector._first_loop_iter = stage, first_iteration
