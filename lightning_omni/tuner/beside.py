"""What takes rank 0 a while to find out, and what the training of all ranks does not wait for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Found = TypeVar("Found")

SWITCH_INTERVAL = 1e-4
"""Seconds after which a thread that only computes lets training go on. Every operation on tensors releases Python's
lock and waits that long to get it back: with Python's own 5 ms a batch takes as long as there is something to find."""


def beside(find: Callable[[], Found]) -> Future[Found]:
    """Finds something out in a thread of its own.

    Args:
        find: is called once; it may change nothing that the run uses meanwhile.

    Returns:
        What it gives or raises, once it has.
    """

    def find_beside() -> Found:
        with frequent_switches:
            return find()

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="omni-tuner")
    found = thread.submit(find_beside)
    thread.shutdown(wait=False)
    return found


def at_once(find: Callable[[], Found]) -> Future[Found]:
    """The same where it takes no time that matters: it has been found when this returns."""
    found: Future[Found] = Future()
    try:
        found.set_result(find())
    except Exception as error:
        found.set_exception(error)
    return found


class _FrequentSwitches:
    """While any thread is within, Python switches threads after `SWITCH_INTERVAL`; then as before."""

    def __init__(self) -> None:
        self._lock, self._within, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL, self._before))
            self._within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                sys.setswitchinterval(self._before)


frequent_switches = _FrequentSwitches()
"""A context in which a thread computes beside training."""


__all__ = ["at_once", "beside", "frequent_switches"]
