"""Memory that processes of one machine share: made and sealed by one, checked and mapped by another. Linux only.

A segment is a memfd: it has a descriptor and no name, and is gone with the last process that has it, however that ends.

Rule 1: nothing is mapped that its maker could shorten: to touch what was cut off would end this process by SIGBUS.
Rule 2: what lies in another's segment may change while it is read. It is copied first, and the copy is looked at.
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
    """A segment that this process has made.

    Attributes:
        number: no other of this process has had it.
        descriptor: by which it is handed over.
        address: of its first byte, here.
        nbytes: its size.
    """

    number: int
    descriptor: int
    address: int
    nbytes: int


_made: dict[int, Segment] = {}
"""Those whose memory is still in use here, by number."""


def is_offered() -> bool:
    """Whether this system has such memory."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def empty(nbytes: int) -> Tensor:
    """Zeros, uint8, ``(nbytes,)``, in a segment of their own, which lasts for as long as the tensor.

    Raises:
        OSError: there is none to be had.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has memfd_create")
    descriptor = os.memfd_create("lightning-omni", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Not only a size: where memory is limited this fails, and not the first touch of a page.
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
    """The segment of this process that holds a tensor of bytes, and where in it that begins; None if none does."""
    start = tensor.data_ptr()
    for segment in list(_made.values()):
        if segment.address <= start and start + tensor.numel() <= segment.address + segment.nbytes:
            return segment, start - segment.address
    return None


def is_in_use(number: int) -> bool:
    """Whether the memory of a segment of this process is still in use."""
    return number in _made


def open_shared(descriptor: int, nbytes: int) -> Tensor:
    """Maps another process's segment: uint8, ``(nbytes,)``. The descriptor stays the caller's.

    Raises:
        Refused: it is none that is safe to touch.
    """
    if sys.platform != "linux":
        raise Refused("memory", "only Linux has memory that is safe to share")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # anything but a memfd has none
        if not seals & fcntl.F_SEAL_SHRINK:
            raise Refused("memory", "this memory is not sealed against shrinking")
        if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:  # huge pages may run out when they are touched
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
