"""The exchange and the all-reduce of a setting, applied to a run."""

from __future__ import annotations

from lightning_omni.methods import method_named, with_period
from lightning_omni.runtime.parallel_state import Communication
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.search.space import compression_named
from lightning_omni.wire.all_reduce import all_reduce_of


def communication_of(setting: Setting, current: Communication) -> Communication:
    """Return the communication of a setting; properties that it leaves open stay as they are."""
    method, wire, overlap, all_reduce = current
    if setting.method:
        method, overlap = method_named(setting.method), setting.overlap
    if setting.wire:
        wire = compression_named(setting.wire).wire_format
    if setting.all_reduce:
        all_reduce = all_reduce_of(setting.all_reduce)
    return Communication(with_period(method, setting.period), wire, overlap, all_reduce)


def communicate(strategy: OmniStrategyHooks, wanted: Communication) -> bool:
    """Set the communication of groups formed from now on, and return whether that is a change. All ranks call it.

    If all ranks are one group, its members average in the new format at once.
    """
    world = strategy.world
    before, world.communication = world.communication, wanted
    if before.all_reduce != wanted.all_reduce and not world.executor.exchanges:
        strategy.wrap_for_group()
    return before != wanted


__all__ = ["communicate", "communication_of"]
