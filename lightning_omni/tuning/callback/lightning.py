"""DeviceTuner and OmniTuner for ``lightning.pytorch``."""

# mypy checks the base classes against the other namespace.
# mypy: disable-error-code="misc, attr-defined, assignment"

from __future__ import annotations

import lightning.pytorch as pl

from lightning_omni.tuning.callback import both_namespaces
from lightning_omni.tuning.callback.hooks import OmniTunerHooks
from lightning_omni.tuning.device.device_tuner import DeviceTunerHooks

Names = both_namespaces.names_of(pl)


class DeviceTuner(DeviceTunerHooks, pl.Callback):
    __doc__ = DeviceTunerHooks.__doc__


class OmniTuner(OmniTunerHooks, pl.Callback):
    __doc__ = OmniTunerHooks.__doc__


both_namespaces.take_base(pl.Callback)
