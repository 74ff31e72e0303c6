"""Control over the memory that tensors free: the C library keeps it or returns it (Linux with glibc only).

PyTorch allocates CPU tensors with malloc. By default glibc returns freed blocks of 32 MiB and more to the kernel at
once, and the next step requests them again, page by page, each page zeroed. The arithmetic does not change.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

# These are the constants of <malloc.h>; mallopt(3) explains them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MOST_MAPPINGS = 65536
_LARGEST_THRESHOLD = 32 * 2**20
"""Upper limit of glibc's own growing threshold, in bytes."""


@cache
def _library() -> Any:
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def can_keep_memory() -> bool:
    """Return whether `keep_memory` has any effect here."""
    return _library() is not None


def keep_memory(keep: bool) -> None:
    """Set whether the process keeps freed memory for the next tensors, or returns it to the kernel.

    glibc's growing threshold cannot be restored, so ``False`` sets its final value in a process that frees large
    tensors: 32 MiB, and 64 MiB for memory at the heap's end.
    """
    library = _library()
    if library is None:
        return
    if keep:
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
    else:
        library.mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
        library.malloc_trim(0)
