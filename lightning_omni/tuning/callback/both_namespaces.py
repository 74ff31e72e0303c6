"""The tuners that `lightning_omni` exports, which are callbacks in both of Lightning's namespaces."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from lightning_omni.strategy import follow
from lightning_omni.tuning.callback.hooks import OmniTunerHooks
from lightning_omni.tuning.device.device_tuner import DeviceTunerHooks


class DeviceTuner(DeviceTunerHooks):
    __doc__ = DeviceTunerHooks.__doc__


class OmniTuner(OmniTunerHooks):
    __doc__ = OmniTunerHooks.__doc__


def names_of(pl: ModuleType) -> SimpleNamespace:
    return SimpleNamespace(
        rank_zero_info=pl.utilities.rank_zero_info,
        mixed_precision=pl.plugins.MixedPrecision,
        mute_logger=pl.loggers.logger.DummyLogger,
        strategies=(pl.strategies.SingleDeviceStrategy, pl.strategies.DDPStrategy),
    )


def take_base(callback: type) -> None:
    for kind in (DeviceTuner, OmniTuner):
        kind.__bases__ = (*kind.__bases__, callback)


follow("tuning.callback")
