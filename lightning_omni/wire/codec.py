"""The encoding of trees of plain data and tensors (optimizer states, snapshots) as bytes, without pickle.

The tree is MessagePack; its tensors are in one flat buffer, and the tree holds their indices.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage
from lightning_omni.wire.layout import Layout, TensorSpec, spec_of

_TENSOR, _TUPLE = 1, 2
_MOST_NESTED = 500


class Packed(msgspec.Struct, frozen=True):
    """A tree without its tensors, and the layout of these in the buffer sent with it."""

    tree: bytes
    specs: tuple[TensorSpec, ...]

    @property
    def layout(self) -> Layout:
        return Layout(self.specs)


def pack(tree: Any) -> tuple[Packed, Tensor]:
    """Split a tree into plain data and one flat buffer.

    Args:
        tree: nested dicts, lists, tuples, numbers, strings, bytes, None and tensors.

    Returns:
        The plain part, and a uint8 buffer ``(nbytes,)`` on the CPU with a copy of the tensors.

    Example:
        >>> packed, buffer = pack({"betas": (0.9, 0.99), "step": torch.tensor(3.0)})
        >>> unpack(packed, buffer)
        {'betas': (0.9, 0.99), 'step': tensor(3.)}
    """
    tensors: list[Tensor] = []

    def strip(node: Any) -> Any:
        if isinstance(node, Tensor):
            tensors.append(node.detach())
            return msgspec.msgpack.Ext(_TENSOR, str(len(tensors) - 1).encode())
        if isinstance(node, tuple):
            return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([strip(item) for item in node]))
        if isinstance(node, list):
            return [strip(item) for item in node]
        if isinstance(node, dict):
            for key in node:
                if key is not None and not isinstance(key, (bool, int, float, str, bytes)):
                    raise MalformedMessage(f"a {type(key).__qualname__} cannot be sent as the key of a dict")
            return {key: strip(value) for key, value in node.items()}
        if node is None or isinstance(node, (bool, int, float, str, bytes)):
            return node
        raise MalformedMessage(f"a {type(node).__qualname__} cannot be sent; only plain values and tensors can")

    try:
        plain = msgspec.msgpack.encode(strip(tree))
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise MalformedMessage(f"this tree cannot be sent: {error}") from error
    layout = Layout(tuple(spec_of(str(index), tensor) for index, tensor in enumerate(tensors)))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for view, tensor in zip(layout.views(buffer), tensors, strict=True):
        view.copy_(tensor)
    return Packed(plain, layout.specs), buffer


def unpack(packed: Packed, buffer: Tensor, copy: bool = False) -> Any:
    """Rebuild a tree from its plain part and its uint8 buffer.

    With ``copy``, each tensor has its own memory, as ``torch.save`` requires for several dtypes.
    """
    check_specs(packed.specs, buffer.numel())
    views = [view.clone() if copy else view for view in packed.layout.views(buffer)]

    def from_ext(code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            return views[int(bytes(data))]
        if code == _TUPLE:
            return tuple(msgspec.msgpack.decode(data, ext_hook=from_ext))
        raise ValueError(f"unknown extension {code}")

    try:
        tree = msgspec.msgpack.decode(packed.tree, ext_hook=from_ext)
        _check_nesting(tree)
        return tree
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise MalformedMessage(f"not a tree of plain data and tensors: {error}") from error


def _check_nesting(tree: Any) -> None:
    """Raise `ValueError` if recursion over the tree might fail."""
    level = [tree]
    for _ in range(_MOST_NESTED):
        nested = [each for each in level if isinstance(each, (dict, list, tuple))]
        if not (level := [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]):
            return
    raise ValueError("nested too deeply")


def check_specs(specs: tuple[TensorSpec, ...], nbytes: int) -> None:
    """Raise `MalformedMessage` unless every spec is sane and all fit exactly into ``nbytes``."""
    for spec in specs:
        if not spec.is_sane:
            part = f" and range {spec.range}" if spec.range is not None else ""
            raise MalformedMessage(f"tensor {spec.name!r} has dtype {spec.dtype!r} and shape {spec.shape}{part}")
    expected = Layout(specs).nbytes
    if expected != nbytes:
        raise MalformedMessage(f"the tensors need {expected} bytes, but {nbytes} came")
