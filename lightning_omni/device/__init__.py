"""Finds the settings with which a device trains a model fastest, measured on copies of the model. Without Lightning."""

from lightning_omni.device.report import DeviceReport, Finding
from lightning_omni.device.setting import DeviceSetting
from lightning_omni.device.tune import tune_device

__all__ = ["DeviceReport", "DeviceSetting", "Finding", "tune_device"]
