"""The logger connector's results, torchmetrics' lists, and a validation with metrics for all groups."""

from __future__ import annotations

import builtins
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_omni.errors import UnsupportedError
from lightning_omni.strategy.lightning_internals.callbacks import call_module, reloads

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def cached_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return the callback metrics without computing any; a newly computed metric is another tensor."""
    return dict(trainer._logger_connector._callback_metrics)


def names_in_training(trainer: Trainer) -> set[str]:
    """Return the names of training's metrics, each also with ``_step`` and ``_epoch``."""
    results: Any = trainer.fit_loop.epoch_loop._results
    names = {result.meta.name for result in results.values()}
    return names | {f"{name}_{suffix}" for name in names for suffix in ("step", "epoch")}


def logs_now(trainer: Trainer) -> bool:
    return bool(trainer._logger_connector.should_update_logs)


def loss_in(outputs: Any, accumulated: int) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss * accumulated if isinstance(loss, Tensor) else None


def cached_metric_values(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer._logger_connector._callback_metrics.items()}


def set_cached_metrics(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    known = {name: torch.tensor(value, device=trainer.strategy.root_device) for name, value in metrics.items()}
    trainer._logger_connector._callback_metrics.update(known)


class _UnevenListGather:
    def __init__(self, sync: Callable[..., None], is_needed: Callable[[], bool]) -> None:
        self.sync, self.is_needed = sync, is_needed

    def __get__(self, metric: Any, owner: Any = None) -> Any:
        return self if metric is None else partial(self._join, metric)

    def _join(self, metric: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        group = process_group or metric.process_group
        if self.is_needed() and group is None:
            dist.barrier()  # torchmetrics reads the number of ranks before it waits, and some may have died
        lists = {name: own for name in metric._reductions if isinstance(own := getattr(metric, name), list)}
        of_all: list[Any] = []
        if lists and dist_sync_fn is gather_all_tensors and self.is_needed():
            of_all = [None] * dist.get_world_size(group)
            mine = tree_map_only(Tensor, lambda each: each.detach().cpu(), lists)
            dist.all_gather_object(of_all, mine, group=group)
            vars(metric).update({name: [] for name in lists})
        self.sync(metric, dist_sync_fn, process_group)
        for name in lists if of_all else ():
            entries = [entry for theirs in of_all for entry in theirs[name]]
            joined = tree_map_only(Tensor, lambda each: each.to(metric.device), entries)
            if joined:  # otherwise torchmetrics has set what it has for none
                reduce = metric._reductions[name]
                setattr(metric, name, joined if reduce is None else reduce(joined))


def patch_list_gather(is_needed: Callable[[], bool]) -> None:
    """Patch metrics to gather lists as objects if ``is_needed``: torchmetrics needs as many tensors on all ranks."""
    restore_list_gather()
    Metric._sync_dist = _UnevenListGather(Metric._sync_dist, is_needed)  # type: ignore[method-assign,assignment]


def restore_list_gather() -> None:
    joined = vars(Metric)["_sync_dist"]
    if isinstance(joined, _UnevenListGather):
        Metric._sync_dist = joined.sync  # type: ignore[method-assign]


_METADATA = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)
"""The metadata of a result that ranks exchange."""


def forget_old_results(trainer: Trainer) -> None:
    """Remove results of earlier epochs: a group that has joined has none, and all reduce theirs in one order."""
    results: Any = trainer._results
    for key in [key for key, result in results.items() if result.has_reset]:
        del results[key]


def forget_batch_results(trainer: Trainer, names: Iterable[str]) -> None:
    """Remove results of ``on_train_batch_end``, which Lightning would log again until the epoch ends."""
    for name in names:
        trainer._results.pop(f"on_train_batch_end.{name}", None)  # type: ignore[union-attr]


def collective_metrics(trainer: Trainer, group: Any) -> list[Any]:
    """Return the metrics of the last epoch that ranks reduce by collectives, as keys and plain values.

    ``group`` was ``dist.group.WORLD`` in the epoch.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    found = []
    for key, result in results.items():
        meta, reduce_fx = result.meta, result.meta.reduce_fx
        if meta.on_epoch and not result.has_reset and _is_collective(result, group):
            dtype = str(result.value.dtype).removeprefix("torch.") if result.is_tensor else ""
            is_torchs = getattr(torch, reduce_fx.__name__, None) is reduce_fx
            reduced = (reduce_fx.__name__, is_torchs, meta.sync.should, meta.sync.group is not None)
            told = {name: getattr(meta, name) for name in _METADATA}
            found.append((key, dtype, reduced, told))
    return found


def _is_collective(result: Any, group: Any) -> bool:
    sync = result.meta.sync
    if sync.rank_zero_only:
        return False
    if not result.is_tensor:
        return bool(result.value.sync_on_compute)
    return bool(sync.should) and (sync.group is None or sync.group is group)


def align_collective_metrics(trainer: Trainer, group: Any, of_all: Sequence[list[Any]]) -> None:
    """Make all ranks reduce every metric that any rank has logged in the epoch, in the same order.

    Otherwise Lightning would combine different metrics. ``of_all`` has the `collective_metrics` of all ranks.

    Raises:
        UnsupportedError: another rank has logged a metric object that the module does not have here.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    doubles = {key for logged in of_all for key, dtype, *_ in logged if dtype == "float64"}
    for key, dtype, reduced, told in {each[0]: each for logged in of_all for each in logged}.values():
        result = results.pop(key, None)
        if result is None:
            result = _placeholder_result(trainer, group if reduced[-1] else None, bool(dtype), reduced, told)
        if result.has_reset or not result.update_called:  # this rank has not logged it in this epoch and adds nothing
            result.has_reset, result._computed, result._update_count = False, None, 1
        if dtype:  # a reduction needs one type on all ranks
            result.value = result.value.to(torch.float64 if key in doubles else torch.float32)
        results[key] = result


def _placeholder_result(trainer: Trainer, group: Any, is_tensor: bool, reduced: Any, told: Mapping[str, Any]) -> Any:
    results: Any = trainer.fit_loop.epoch_loop._results
    made: Any = sys.modules[type(results).__module__]
    name, is_torchs, should, _ = reduced
    meta = made._Metadata(**told, reduce_fx=getattr(torch if is_torchs else builtins, name))
    meta.sync = made._Sync(_should=should, fn=trainer.strategy.reduce, _group=group)
    result = made._ResultMetric(meta, is_tensor).to(trainer.strategy.root_device)
    if not is_tensor:
        try:
            result.value = attrgetter(meta.metric_attribute)(trainer.lightning_module)
        except AttributeError as error:
            raise UnsupportedError(
                f"self.log({meta.name!r}, ...): another rank has logged the metric {meta.metric_attribute}, and the"
                " LightningModule has none here: make metrics where all ranks do, as in __init__"
            ) from error
    return result


# --- A validation by one group ----------------------------------------------------------------------------------------

_ENDS = ("on_validation_epoch_end", "on_validation_end")


_STARTS = ("on_validation_start", "on_validation_epoch_start")


def validation_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of a fit's validation. To make them, all ranks call it."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    stage, trainer.validating = trainer.state.stage, True  # loaders of a training stage are leased
    try:
        loop.setup_data()
    finally:
        trainer.state.stage = stage
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


def validation_sizes(trainer: Trainer) -> list[int] | None:
    """Return the samples in a fit's validation datasets, -1 for one without a length.

    Return None if loaders were not made yet, or those of another epoch may have other datasets.
    """
    if not trainer.enable_validation:
        return []
    loaders: Any = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    if loaders is None or reloads(trainer):
        return None
    return [_size_of(getattr(each, "dataset", each)) for each in loaders.flattened]


def _size_of(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return -1


@contextmanager
def divide_validation_data(trainer: Trainer, index: int, members: int) -> Iterator[None]:
    """Return a context in which ``members`` ranks, of which this is number ``index``, divide the validation data.

    The loaders must have DistributedSamplers.
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
    """Return a context that captures a validation's metrics and omits the hooks of its end.

    Yields:
        Dicts that afterwards hold the metrics for callbacks, progress bars and loggers.
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
    """Pass metrics from `capture_metrics` to callbacks, progress bars and loggers.

    Call the hooks of a validation's end, and unless it ``has_started`` those of its start.
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
