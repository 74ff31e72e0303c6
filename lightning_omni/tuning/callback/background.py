"""Computations of rank 0 in a thread, which the training of all ranks does not wait for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Found = TypeVar("Found")

SWITCH_INTERVAL = 1e-4
"""Seconds after which a thread that only computes lets training continue. Every operation on tensors releases Python's
lock and waits this long for it: with Python's default of 5 ms, a batch would take as long as the computation."""


def run_in_background(find: Callable[[], Found]) -> Future[Found]:
    """Run a function in a thread of its own.

    Args:
        find: the function, called once; it must not change anything that the run uses meanwhile.

    Returns:
        The future of its result or error.
    """

    def find_in_background() -> Found:
        with frequent_switches:
            return find()

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="omni-tuner")
    found = thread.submit(find_in_background)
    thread.shutdown(wait=False)
    return found


def run_inline(find: Callable[[], Found]) -> Future[Found]:
    """Run a fast function in the calling thread, and return its finished future."""
    found: Future[Found] = Future()
    try:
        found.set_result(find())
    except Exception as error:
        found.set_exception(error)
    return found


class _FrequentSwitches:
    """A context in which Python switches threads every `SWITCH_INTERVAL`."""

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
"""The context of a thread that computes beside training."""


__all__ = ["frequent_switches", "run_in_background", "run_inline"]
