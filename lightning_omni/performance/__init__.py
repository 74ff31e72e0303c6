"""How long training takes: what this device can be made to give for this model. Lightning is not known here."""

from lightning_omni.performance.device import tune_device
from lightning_omni.performance.report import DeviceReport, Finding
from lightning_omni.performance.setting import DeviceSetting

__all__ = ["DeviceReport", "DeviceSetting", "Finding", "tune_device"]
