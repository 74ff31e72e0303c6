"""What takes rank 0 a while to find out, and what the training of all ranks does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Found = TypeVar("Found")


def beside(find: Callable[[], Found]) -> Future[Found]:
    """Finds something out in a thread of its own.

    Args:
        find: is called once; it may change nothing that the run uses meanwhile.

    Returns:
        What it gives or raises, once it has.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="omni-tuner")
    found = thread.submit(find)
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


__all__ = ["at_once", "beside"]
