"""DeviceTuner and OmniTuner for ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from lightning_omni.tuning.callback import both_namespaces
from lightning_omni.tuning.callback.hooks import OmniTunerHooks
from lightning_omni.tuning.device.device_tuner import DeviceProbeHooks, DeviceTunerHooks


class Names:
    """The names that callbacks use of this namespace."""

    rank_zero_info = staticmethod(rank_zero_info)
    mixed_precision = MixedPrecision
    mute_logger = DummyLogger
    strategies = (SingleDeviceStrategy, DDPStrategy)


class DeviceTuner(DeviceTunerHooks, Callback):
    __doc__ = DeviceTunerHooks.__doc__


class DeviceProbe(DeviceProbeHooks, DeviceTuner):
    """A `DeviceTuner` that ends the fit before its first batch."""

    trainer_class = Trainer


class OmniTuner(OmniTunerHooks, Callback):
    __doc__ = OmniTunerHooks.__doc__


both_namespaces.take_base(Callback)
