"""DeviceTuner and OmniTuner for ``lightning.pytorch``."""

# mypy checks the base classes against the other namespace.
# mypy: disable-error-code="misc, attr-defined, assignment"

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

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
