"""Copies of objects that can be changed, to be restored into the very same objects.

What an object is bound to comes back, and so does what is in lists, dictionaries, sets, deques, tensors, arrays and
generators of random numbers, and in those inside them. Objects of other kinds are left to themselves. All of it is put
back in place, since others may hold the same objects; attributes and entries that are new vanish.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_ATOMS = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (list, dict, set, deque)
_INTERNAL = set(vars(nn.Module())) - {"training", "_parameters", "_buffers"}
"""Hooks and the like, which others than the training step may add and remove."""

Seen = dict[int, Any]
"""What is kept already, by identity; which also keeps it alive, so that no identity is given twice."""


class ObjectSnapshot:
    """What is in objects that can be changed, each of which is kept once, however many hold it.

    Args:
        seen: shared by those that are kept at one moment.

    Example:
        >>> noted = {"losses": [1.0]}
        >>> kept = ObjectSnapshot().keep(noted)
        >>> noted["losses"].append(2.0)
        >>> kept.put_back()
        >>> noted
        {'losses': [1.0]}
    """

    def __init__(self, seen: Seen | None = None) -> None:
        self._back: list[Callable[[], object]] = []
        self._seen: Seen = {} if seen is None else seen

    def keep(self, *values: Any) -> ObjectSnapshot:
        """Copies what is in them, and in what they hold."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            kind = type(value)  # not isinstance(): it asks the object behind a weak proxy, which may be gone
            if issubclass(kind, tuple):
                waiting += value
            elif not issubclass(kind, _ATOMS) and self._is_new(value):
                if issubclass(kind, _CONTAINERS):
                    inside = _inside(value)
                    self._back.append(partial(_refill, value, inside))
                    waiting += inside
                elif issubclass(kind, Tensor):
                    self._keep_values(value)
                    waiting += self._keep_binding(value)
                else:
                    self._back += [back(value) for each, back in _BACK.items() if issubclass(kind, each)]
        return self

    def keep_values(self, tensors: Iterable[Tensor]) -> ObjectSnapshot:
        """Copies tensors, without their gradients."""
        for tensor in tensors:
            if self._is_new(tensor):
                self._keep_values(tensor)
        return self

    def keep_gradients(self, tensors: Iterable[Tensor]) -> ObjectSnapshot:
        """Copies the gradients of tensors, and which tensor has which."""
        for tensor in tensors:
            self.keep(*self._keep_binding(tensor))
        return self

    def keep_attributes(self, module: nn.Module) -> ObjectSnapshot:
        """Copies what all modules have noted for themselves, states of torchmetrics among it."""
        for each in module.modules():
            attributes = _attributes_of(each)
            self._back.append(partial(_rebind, each, attributes))
            self.keep(*attributes.values())
        return self

    def keep_optimizers(self, optimizers: Iterable[Optimizer]) -> ObjectSnapshot:
        """Copies state and hyperparameters."""
        for each in optimizers:
            # Not state_dict(): load_state_dict() casts what it loads and makes new objects, and this has to come back
            # bitwise, in place.
            self._back.append(partial(_rebind_optimizer, each, each.state, each.param_groups))
            self.keep(each.state, each.param_groups)
        return self

    def keep_states(self, objects: Iterable[Any]) -> ObjectSnapshot:
        """Copies anything that has ``state_dict`` and ``load_state_dict``: a loss scaler, say."""
        self._back += [partial(_load, each, deepcopy(each.state_dict())) for each in objects]
        return self

    def put_back(self) -> None:
        """Puts it back, bitwise, as often as it takes."""
        with torch.no_grad():
            for back in self._back:
                back()

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _keep_values(self, tensor: Tensor) -> None:
        if not any(size > 1 and step == 0 for size, step in zip(*_shape_of(tensor), strict=True)):
            # Of the others no part can be written to. Not to `tensor` itself: a graph may have saved its version.
            self._back.append(partial(_copy, tensor, tensor.detach().clone()))

    def _keep_binding(self, tensor: Tensor) -> list[Tensor]:
        """Returns its gradient, if there is one."""
        if not (tensor.requires_grad and tensor.is_leaf):
            return []
        self._back.append(partial(setattr, tensor, "grad", tensor.grad))
        return [] if tensor.grad is None else [tensor.grad]


@dataclass(frozen=True)
class Generators:
    """The state of every generator that a training step may draw from: Python's, numpy's and torch's.

    Attributes:
        python: of `random`.
        numpy: of ``numpy.random``.
        cpu: of torch, on the CPU.
        cuda: of torch, on each GPU; none where this process has not used one, and so draws nothing there.
    """

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> Generators:
        """As they are."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), tuple(cuda))  # noqa: NPY002

    def put_back(self) -> None:
        """As they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _INTERNAL}


def _rebind(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in set(_attributes_of(module)) - set(attributes):
        del vars(module)[name]
    vars(module).update(attributes)


def _rebind_optimizer(optimizer: Optimizer, state: Any, groups: list[dict[str, Any]]) -> None:
    optimizer.state, optimizer.param_groups = state, groups


def _load(target: Any, state: Any) -> None:
    target.load_state_dict(deepcopy(state))


def _shape_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (tensor.shape, tensor.stride()) if tensor.layout is torch.strided else ((), ())


def _copy(tensor: Tensor, kept: Tensor) -> None:
    if tensor.shape != kept.shape:  # it was resized
        tensor.data = kept.clone()
    else:
        (tensor if isinstance(tensor, nn.Parameter) else tensor.data).copy_(kept)


def _inside(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _refill(container: Any, kept: list[Any]) -> None:
    now = _inside(container)
    pairs = zip(kept, now, strict=False)
    if len(now) == len(kept) and all(
        old[0] is new[0] and old[1] is new[1] if isinstance(container, dict) else old is new for old, new in pairs
    ):
        return  # it may be of a kind that refuses to be written to
    container.clear()
    if isinstance(container, dict):
        container.update(dict(kept))  # of pairs a Counter would count each
    elif isinstance(container, set):
        container.update(kept)
    else:
        container.extend(kept)


_BACK: dict[type, Callable[[Any], Callable[[], object]]] = {
    np.ndarray: lambda array: partial(_copy_array, array, array.copy() if array.flags.writeable else array),
    torch.Generator: lambda generator: partial(generator.set_state, generator.get_state()),
    random.Random: lambda generator: partial(generator.setstate, generator.getstate()),
    np.random.RandomState: lambda generator: partial(generator.set_state, generator.get_state()),
    np.random.Generator: lambda generator: partial(
        setattr, generator.bit_generator, "state", generator.bit_generator.state
    ),
}
"""What is not a container, with how to put it back."""


def _copy_array(array: np.ndarray[Any, Any], kept: np.ndarray[Any, Any]) -> None:
    if array.flags.writeable:
        array[...] = kept
