"""Whether the C library keeps the memory that tensors give back. Linux with glibc only.

PyTorch's CPU tensors are malloc's. By default glibc hands blocks of 32 MiB and more back to the kernel as soon as they
are freed, and the next step gets them again, page by page, each page zeroed. Nothing of the arithmetic changes.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

# <malloc.h>; mallopt(3) explains them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MOST_MAPPINGS = 65536
_LARGEST_THRESHOLD = 32 * 2**20
"""Where glibc's own, growing threshold ends: bytes."""


@cache
def _library() -> Any:
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def can_keep_memory() -> bool:
    """Whether `keep_memory` does anything here."""
    return _library() is not None


def keep_memory(keep: bool) -> None:
    """Lets the process keep freed memory for the next tensors, or hand it back.

    glibc's threshold that grows by itself cannot be restored, so ``False`` sets what that ends at in a process
    that frees large tensors: 32 MiB, and 64 MiB for what is kept at the heap's end.

    Args:
        keep: whether to keep it.
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
