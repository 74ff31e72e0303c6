"""The versions of Python and of the packages of this process, for comparison between the sides of a run."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import zmq

from lightning_omni.wire.messages import ProcessInfo

PACKAGES = ("lightning-omni", "torch", "pytorch-lightning", "lightning", "pyzmq")


@cache
def versions() -> Mapping[str, str]:
    """Return the versions by name, without packages that are not installed."""
    found = {"python": platform.python_version(), "libzmq": zmq.zmq_version()}
    return {**found, **{package: number for package in PACKAGES if (number := _version(package))}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def about() -> ProcessInfo:
    """Return the versions and clock of this process."""
    return ProcessInfo(dict(versions()), time.time())
