"""The search for the settings with which a device trains a model fastest, measured on copies."""

from lightning_omni.tuning.device.setting import DeviceSetting
from lightning_omni.tuning.device.tune import DeviceReport, Finding, tune_device

__all__ = ["DeviceReport", "DeviceSetting", "Finding", "tune_device"]
