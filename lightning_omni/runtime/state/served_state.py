"""The state of an optimizer on a rank while the parameter server has it: empty, and aware of what user code does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any

from torch.optim import Optimizer


class ServedState(defaultdict[Any, Any]):
    """The empty ``state`` of an optimizer that steps at the parameter server.

    In an ordinary dict ``clear()`` and the like would leave no trace, and code that reads the state would take it for
    that of a first step.

    Args:
        on_read: called at the first read of a parameter's state.
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
        """Return whether user code has written or discarded the state of any parameter."""
        return self._is_cleared or bool(self._removed) or any(self.values())

    def write_to(self, state: MutableMapping[Any, Any]) -> None:
        """Repeat in the server's state what user code has done here."""
        if self._is_cleared:
            state.clear()
        for parameter in self._removed:
            state.pop(parameter, None)
        state.update({parameter: values for parameter, values in self.items() if values})

    def clear(self) -> None:
        self._is_cleared = True
        super().clear()

    def __setitem__(self, parameter: Any, values: Any) -> None:
        self._removed.add(parameter)
        super().__setitem__(parameter, values)

    def pop(self, parameter: Any, *default: Any) -> Any:
        self._removed.add(parameter)
        return super().pop(parameter, *default)

    def __missing__(self, parameter: Any) -> Any:
        if self._on_read is not None:
            self._on_read()
            self._on_read = None
        values: dict[str, Any] = {}
        super().__setitem__(parameter, values)
        return values

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())
