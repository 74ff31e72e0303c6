"""Everything that a probe changes, kept in memory, and the way back."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple)
_IN_PLACE = (list, dict, set, deque)


class Snapshot:
    """Weights, buffers, optimizer states, chance, and what modules have noted for themselves.

    Also kept are the states of torchmetrics inside the module, and attributes of its modules that hold numbers, text,
    tensors or collections of them: a probe calls ``training_step``, which may write to them.

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
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]
        self._gradients = [(parameter, _copied(parameter.grad)) for parameter in module.parameters()]
        self._optimizers = [(each, _state_of(each)) for each in optimizers]
        self._others = [(each, copy.deepcopy(each.state_dict())) for each in others]
        self._notes = [(each, _notes_of(each)) for each in module.modules()]
        self.chance = Chance()

    def restore(self) -> None:
        """Puts everything back, to the bit, as often as it takes."""
        with torch.no_grad():
            for tensor, kept in self._tensors:
                tensor.copy_(kept)
        for parameter, gradient in self._gradients:
            parameter.grad = _copied(gradient)
        for optimizer, state in self._optimizers:
            _put_back(optimizer, state)
        for each, kept in self._others:
            each.load_state_dict(copy.deepcopy(kept))
        for module, notes in self._notes:
            _restore_notes(module, notes)
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


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


# --- Optimizers ------------------------------------------------------------------------------------------------------

_State = tuple[dict[Any, Any], list[dict[str, Any]]]


def _state_of(optimizer: Optimizer) -> _State:
    # Not state_dict(): load_state_dict() casts what it loads, and this has to come back to the bit.
    state = {parameter: copy.deepcopy(values) for parameter, values in optimizer.state.items()}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return state, copy.deepcopy(groups)


def _put_back(optimizer: Optimizer, kept: _State) -> None:
    state, groups = kept
    optimizer.state.clear()
    for parameter, values in state.items():
        optimizer.state[parameter] = copy.deepcopy(values)
    for group, hyperparameters in zip(optimizer.param_groups, groups, strict=True):
        for name in set(group) - {"params", *hyperparameters}:
            del group[name]
        group.update(copy.deepcopy(hyperparameters))


# --- What modules note -----------------------------------------------------------------------------------------------


def _notes_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """By name the object itself and a copy of what is in it."""
    hidden = {*module._parameters, *module._buffers, *module._modules}
    names = {name for name in vars(module) if not name.startswith("_") and name not in hidden}
    if isinstance(module, Metric):
        names |= {*module._defaults, "_update_count", "_computed"}
    values = {name: getattr(module, name) for name in names if name in vars(module)}
    return {name: (value, _note(value)) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, (list, set, deque, tuple)):
        return all(_is_plain(each) for each in value)
    return isinstance(value, (*_PLAIN, Tensor)) and not isinstance(value, nn.Parameter)


def _note(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_leaf else value
    if isinstance(value, dict):
        return {key: _note(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_note(each) for each in value]) if type(value) in (list, tuple) else value
    return copy.copy(value) if isinstance(value, (set, deque)) else value


def _restore_notes(module: nn.Module, notes: dict[str, tuple[Any, Any]]) -> None:
    for name, (holder, kept) in notes.items():
        if isinstance(holder, _IN_PLACE):
            # The same object, since others may hold it, too.
            holder.clear()
            holder.update(_note(kept)) if isinstance(holder, (dict, set)) else holder.extend(_note(kept))
            vars(module)[name] = holder
        else:
            vars(module)[name] = _note(kept)
