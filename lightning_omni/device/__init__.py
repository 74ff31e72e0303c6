"""What a device can be made to give for a model: measured on copies. Lightning is not known here."""

from lightning_omni.device.report import DeviceReport, Finding
from lightning_omni.device.setting import DeviceSetting
from lightning_omni.device.tune import tune_device

__all__ = ["DeviceReport", "DeviceSetting", "Finding", "tune_device"]
