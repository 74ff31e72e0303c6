"""The state of an optimizer on a rank while the parameter server has it: empty, and aware of user code's accesses."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from typing_extensions import Self, override

_LIBRARIES = {"lightning", "lightning_fabric", "lightning_omni", "pytorch_lightning"}
"""Packages that go through all states, to move or save them, and know of the server or need nothing of it."""
_PASSING_ON = {"copy", "torch"}
"""Packages that read the state for their callers, as in ``optimizer.state_dict()`` and ``deepcopy(optimizer)``."""


class ServedState(defaultdict[Any, Any]):
    """The empty ``state`` of an optimizer that steps at the parameter server.

    In an ordinary dict ``clear()`` and the like would leave no trace, and code that reads the state would take it for
    that of a first step. ``on_read`` is called at user code's first read.
    """

    def __init__(self, on_read: Callable[[], None]) -> None:
        super().__init__(dict)
        self._on_read: Callable[[], None] | None = on_read
        self._is_cleared = False
        self._removed: set[Any] = set()

    @classmethod
    def install(cls, optimizer: Optimizer, on_read: Callable[[], None]) -> None:
        """Replace the state of an optimizer that has none left, unless its class has a state of its own kind."""
        state = vars(optimizer).get("state")
        if not state and type(state) in (defaultdict, cls):
            optimizer.state = cls(on_read)

    @property
    def is_written(self) -> bool:
        return self._is_cleared or bool(self._removed) or any(super().values())  # no read by user code

    def write_to(self, state: MutableMapping[Any, Any]) -> None:
        if self._is_cleared:
            state.clear()
        for parameter in self._removed:
            state.pop(parameter, None)
        state.update({parameter: values for parameter, values in self.items() if values})

    # --- Writes -------------------------------------------------------------------------------------------------------

    @override
    def clear(self) -> None:
        self._is_cleared = True
        super().clear()

    @override
    def __setitem__(self, parameter: Any, values: Any) -> None:
        self._removed.add(parameter)
        super().__setitem__(parameter, values)

    @override
    def __delitem__(self, parameter: Any) -> None:
        self.pop(parameter, None)

    @override
    def pop(self, parameter: Any, *default: Any) -> Any:
        self._removed.add(parameter)
        return super().pop(parameter, *default)

    @override
    def update(self, *others: Any, **more: Any) -> None:
        for parameter, values in dict(*others, **more).items():
            self[parameter] = values

    @override
    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    # --- Reads --------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._on_read is not None and not _is_called_by_library():
            self._on_read()
            self._on_read = None

    @override
    def __missing__(self, parameter: Any) -> Any:
        self._read()
        values: dict[str, Any] = {}
        super().__setitem__(parameter, values)
        return values

    @override
    def __reduce__(self) -> Any:
        self._read()
        return defaultdict, (dict,), None, None, iter(self.items())


def _noting(name: str) -> Callable[..., Any]:
    def read(self: ServedState, *arguments: Any) -> Any:
        self._read()
        return getattr(super(ServedState, self), name)(*arguments)

    return read


for _name in ("__contains__", "__len__", "__iter__", "get", "keys", "values", "items"):
    setattr(ServedState, _name, _noting(_name))


def is_state_lost(optimizer: Optimizer) -> bool:
    """Return whether a parameter server had the optimizer's state when its loop failed; call it outside of a loop."""
    state: Any = optimizer.state
    return isinstance(state, ServedState) and not state.is_written


def _is_called_by_library() -> bool:
    frame: FrameType | None = sys._getframe(3)  # the caller of the method that calls `_read`
    while frame is not None and (package := frame.f_globals.get("__name__", "").partition(".")[0]) in _PASSING_ON:
        frame = frame.f_back
    return frame is not None and package in _LIBRARIES
