"""Everything that a probe changes, kept in memory, and the way back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from copy import deepcopy
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


class Snapshot:
    """Weights, gradients, buffers, optimizer states, chance, and what modules have noted for themselves.

    Noted are the attributes of all modules, states of torchmetrics among them: ``training_step`` may write to them.
    What they are bound to comes back, and so does what is in lists, dictionaries, sets, deques, tensors, arrays and
    generators of random numbers, and in those inside them. Objects of other kinds are left to themselves.

    All of it is put back in place, since others may hold the same objects, and attributes and entries that are new
    vanish.

    Args:
        module: what is trained.
        optimizers: their state and hyperparameters.
        others: anything else with ``state_dict`` and ``load_state_dict``: a loss scaler, say.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> snapshot = Snapshot(net, [])
        >>> before = net.weight.item()
        >>> _ = net.weight.data.add_(1.0)
        >>> snapshot.restore()
        >>> net.weight.item() == before
        True
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer], others: Iterable[Any] = ()) -> None:
        self._notes = _Notes()
        self._optimizers = [(each, each.state, each.param_groups) for each in optimizers]
        for _, state, groups in self._optimizers:
            # Not state_dict(): load_state_dict() casts what it loads, and this has to come back to the bit.
            self._notes.keep(state, groups)
        self._attributes = [(each, _attributes_of(each)) for each in module.modules()]
        for _, attributes in self._attributes:
            self._notes.keep(*attributes.values())
        self._others = [(each, deepcopy(each.state_dict())) for each in others]
        self.chance = Chance()

    def restore(self) -> None:
        """Puts everything back, to the bit, as often as it takes."""
        for optimizer, state, groups in self._optimizers:
            optimizer.state, optimizer.param_groups = state, groups  # load_state_dict() makes new ones
        for module, attributes in self._attributes:
            for name in set(_attributes_of(module)) - set(attributes):
                del vars(module)[name]
            vars(module).update(attributes)
        self._notes.restore()
        for each, kept in self._others:
            each.load_state_dict(deepcopy(kept))
        self.chance.restore()


class Chance:
    """The state of every generator that a training step may draw from: Python's, numpy's and torch's."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Puts them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _INTERNAL}


# --- What is inside --------------------------------------------------------------------------------------------------


class _Notes:
    """What is in objects that can be changed, each of which is kept once, whoever holds it."""

    def __init__(self) -> None:
        self._back: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}  # which also keeps them alive, so that no number is given twice

    def keep(self, *values: Any) -> None:
        """Copies what is in them, and in what they hold."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            kind = type(value)  # not isinstance(): it asks the object behind a weak proxy, which may be gone
            if issubclass(kind, tuple):
                waiting += value
            elif not issubclass(kind, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                if issubclass(kind, _CONTAINERS):
                    inside = _inside(value)
                    self._back.append(partial(_refill, value, inside))
                    waiting += inside
                elif issubclass(kind, Tensor):
                    waiting += self._keep_tensor(value)
                else:
                    self._back += [back(value) for each, back in _BACK.items() if issubclass(kind, each)]

    def restore(self) -> None:
        """Puts it back."""
        with torch.no_grad():
            for back in self._back:
                back()

    def _keep_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Returns its gradient, if there is one."""
        if not any(size > 1 and step == 0 for size, step in zip(*_shape_of(tensor), strict=True)):
            # Of the others nobody can write to a part. Not to `tensor` itself: a graph may have saved its version.
            self._back.append(partial(_copy, tensor, tensor.detach().clone()))
        if not (tensor.requires_grad and tensor.is_leaf):
            return []
        self._back.append(partial(setattr, tensor, "grad", tensor.grad))
        return [] if tensor.grad is None else [tensor.grad]


def _shape_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (tensor.shape, tensor.stride()) if tensor.layout is torch.strided else ((), ())


def _copy(tensor: Tensor, kept: Tensor) -> None:
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
