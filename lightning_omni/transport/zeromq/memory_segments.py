"""Memory that processes of one machine share: created and sealed by one, checked and mapped by another. Linux only.

A segment is a memfd: it has a descriptor but no name, and it disappears with the last process that holds it, however
that ends.

Rule 1: a process maps no memory that the creator could shorten, because access to removed pages would end it by SIGBUS.
Rule 2: the contents of another process's segment may change while they are read. They are copied first, and the copy is
checked.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_omni.errors import Refused

if sys.platform == "linux":
    import fcntl

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Segment:
    """A segment that this process has created.

    Attributes:
        number: number that no other segment of this process has had.
        descriptor: descriptor to pass to other processes.
        address: address of its first byte in this process.
        nbytes: its size.
    """

    number: int
    descriptor: int
    address: int
    nbytes: int


_made: dict[int, Segment] = {}
"""The segments whose memory this process still uses, by number."""


def is_offered() -> bool:
    """Return whether this system offers such memory."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def empty(nbytes: int) -> Tensor:
    """Return zeros, uint8, ``(nbytes,)``, in a segment of their own, which lives as long as the tensor.

    Raises:
        OSError: no such memory is available.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has memfd_create")
    descriptor = os.memfd_create("lightning-omni", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Allocates the pages, so that a memory limit fails here and not at the first access.
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(descriptor, max(nbytes, 1), flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(descriptor)
        raise
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
    segment = Segment(next(_NUMBERS), descriptor, tensor.data_ptr(), nbytes)
    _made[segment.number] = segment
    weakref.finalize(memory, _forget, segment).atexit = False
    return tensor


def find(tensor: Tensor) -> tuple[Segment, int] | None:
    """Return this process's segment that holds a tensor of bytes, and the offset in it; None if no segment does."""
    start = tensor.data_ptr()
    for segment in list(_made.values()):
        if segment.address <= start and start + tensor.numel() <= segment.address + segment.nbytes:
            return segment, start - segment.address
    return None


def is_in_use(number: int) -> bool:
    """Return whether the memory of a segment of this process is still in use."""
    return number in _made


def open_shared(descriptor: int, nbytes: int) -> Tensor:
    """Map another process's segment: uint8, ``(nbytes,)``. The caller keeps the descriptor.

    Raises:
        Refused: the memory is not safe to access.
    """
    if sys.platform != "linux":
        raise Refused("memory", "only Linux has memory that is safe to share")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # only a memfd has seals
        if not seals & fcntl.F_SEAL_SHRINK:
            raise Refused("memory", "this memory is not sealed against shrinking")
        if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:  # huge pages may run out on access
            raise Refused("memory", "this memory is made of huge pages")
        if not 0 < nbytes <= os.fstat(descriptor).st_size:
            raise Refused("memory", f"this memory has {os.fstat(descriptor).st_size} bytes, {nbytes} were announced")
        return torch.frombuffer(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise Refused("memory", f"this memory cannot be mapped: {error}") from error


def _forget(segment: Segment) -> None:
    _made.pop(segment.number, None)
    with contextlib.suppress(OSError):
        os.close(segment.descriptor)
