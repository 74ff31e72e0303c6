"""The state of an optimizer on a rank while the parameter server has it: empty, and aware of user code's writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any

from torch.optim import Optimizer
from typing_extensions import Self, override


class ServedState(defaultdict[Any, Any]):
    """The empty ``state`` of an optimizer that steps at the server. It records ``clear()`` and the like."""

    def __init__(self) -> None:
        super().__init__(dict)
        self._is_cleared = False
        self._removed: set[Any] = set()

    @classmethod
    def install(cls, optimizer: Optimizer) -> None:
        """Replace the state of an optimizer, if it is empty and of torch's own kind."""
        state = vars(optimizer).get("state")
        if not state and type(state) in (defaultdict, cls):
            optimizer.state = cls()

    @property
    def is_written(self) -> bool:
        return self._is_cleared or bool(self._removed) or any(self.values())

    def write_to(self, state: MutableMapping[Any, Any]) -> None:
        if self._is_cleared:
            state.clear()
        for parameter in self._removed:
            state.pop(parameter, None)
        state.update({parameter: values for parameter, values in self.items() if values})

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

    @override
    def __missing__(self, parameter: Any) -> Any:
        values: dict[str, Any] = {}
        super().__setitem__(parameter, values)
        return values

    @override
    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def is_state_lost(optimizer: Optimizer) -> bool:
    """Return whether a parameter server had the optimizer's state when its loop failed; call it outside of a loop."""
    state: Any = optimizer.state
    return isinstance(state, ServedState) and not state.is_written
