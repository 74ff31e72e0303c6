"""Clocks of the host, and of devices whose operations return before they have ended."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """The processor's clock, for devices that the host waits for."""

    def mark(self, instead_of: Any = None) -> Any:
        return time.perf_counter()

    def seconds(self, since: Any, until: Any) -> float | None:
        return float(until - since)

    def wait(self, since: Any, until: Any) -> float:
        return float(until - since)


class EventClock:
    """The clock of a CUDA stream, whose timestamps are read when the device has reached them."""

    def mark(self, instead_of: Any = None) -> Any:
        """Return a timestamp for the completion of all operations launched so far, reusing ``instead_of``."""
        event = instead_of or torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, since: Any, until: Any) -> float | None:
        """Return the seconds between two timestamps; None if the device has not reached the later one."""
        return float(since.elapsed_time(until)) / 1e3 if until.query() else None

    def wait(self, since: Any, until: Any) -> float:
        if not until.query():
            until.synchronize()
        return float(since.elapsed_time(until)) / 1e3


Clock = HostClock | EventClock


def clock_of(device: torch.device) -> Clock:
    return EventClock() if device.type == "cuda" else HostClock()


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
