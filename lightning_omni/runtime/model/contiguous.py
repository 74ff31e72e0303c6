"""The transfer of a tensor's values between ranks, whatever its layout in memory.

gloo and NCCL read and write as many elements of memory as a tensor has, from its first one on. That is the tensor
itself only if it is contiguous: a view with gaps has others in between, a tensor with another order of dimensions would
arrive scrambled, and the memory after an expanded one belongs to other data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_omni.errors import UnsupportedError


@contextmanager
def contiguous(tensor: Tensor, name: str) -> Iterator[Tensor]:
    """Provide contiguous memory with a tensor's values for a collective; afterwards the tensor has the memory's.

    Args:
        tensor: strided; if it is contiguous, the memory is its own.
        name: name for errors.

    Raises:
        UnsupportedError: the tensor cannot have these values.

    Example:
        >>> table = torch.zeros(2, 4)[:, ::2]
        >>> with contiguous(table, "table") as memory:
        ...     memory.view(-1)[1] = 5.0
        >>> table
        tensor([[0., 5.],
                [0., 0.]])
    """
    own = tensor.detach()
    if own.is_contiguous() and not own.is_conj() and not own.is_neg():
        yield own
        return
    memory = _copy(own, own)
    yield memory
    write(own, memory, name)


def write(tensor: Tensor, values: Tensor, name: str = "a tensor") -> None:
    """Overwrite a tensor; a number that several of its elements share is written once.

    Args:
        tensor: strided.
        values: values of its shape, on any device.
        name: name for errors.

    Raises:
        UnsupportedError: elements that share a number would get different values.
    """
    once, part = tensor.detach(), values
    for dim, (size, stride) in enumerate(zip(once.shape, once.stride(), strict=True)):
        if size > 1 and stride == 0:
            once, part = once.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    once.copy_(part)
    if not tensor.is_contiguous() and not torch.equal(_bytes(tensor, tensor), _bytes(values, tensor)):
        raise UnsupportedError(
            f"places of {name} share memory (its shape is {list(tensor.shape)}, its strides are"
            f" {list(tensor.stride())}), and it cannot have the different values that rank 0 has in them; register a"
            " copy with memory of its own, .clone()"
        )


def _copy(values: Tensor, like: Tensor) -> Tensor:
    """Return values in contiguous memory, in the dtype and on the device of another tensor."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).copy_(values)


def _bytes(values: Tensor, like: Tensor) -> Tensor:
    """Return values as bytes, which compare equal where they are NaN, too."""
    return _copy(values.detach(), like.detach()).view(-1).view(torch.uint8)
