"""How groups exchange and average gradients, as a setting says it."""

from __future__ import annotations

from lightning_omni.methods import method_named, with_period
from lightning_omni.optimizer.place import Communication
from lightning_omni.performance.forecast import Setting
from lightning_omni.protocol.all_reduce import all_reduce_of
from lightning_omni.protocol.wire_formats import wire_of
from lightning_omni.search.space import wire_given
from lightning_omni.strategy.hooks import OmniStrategyHooks


def communication_of(setting: Setting, current: Communication) -> Communication:
    """How a setting has it; what it does not say stays.

    Args:
        setting: to train with.
        current: what there is now.
    """
    method, wire, overlap, all_reduce = current
    if setting.method:
        method, overlap = method_named(setting.method), setting.overlap
    if setting.wire:
        wire = wire_of(wire_given(setting.wire))
    if setting.all_reduce:
        all_reduce = all_reduce_of(setting.all_reduce)
    return Communication(with_period(method, setting.period), wire, overlap, all_reduce)


def communicate(strategy: OmniStrategyHooks, wanted: Communication) -> bool:
    """Groups that are formed from now on exchange so; members of the one group that there may be average so at once.

    Args:
        strategy: of the run. All ranks do the same.
        wanted: how.

    Returns:
        Whether it was otherwise.
    """
    world = strategy.world
    before, world.communication = world.communication, wanted
    if before.all_reduce != wanted.all_reduce and not world.executor.exchanges:
        strategy.wrap_for_group()
    return before != wanted


__all__ = ["communicate", "communication_of"]
