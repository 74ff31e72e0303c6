"""How to ask for groups where only a strategy's name can be passed: environment variables, and names of the registry.

What is passed to OmniStrategy itself wins over the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method

GROUPS, METHOD, DATA = "LIGHTNING_OMNI_GROUPS", "LIGHTNING_OMNI_METHOD", "LIGHTNING_OMNI_DATA"

_DATA: tuple[Literal["dynamic"], Literal["static"]] = ("dynamic", "static")
_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "omni": ("Synchronous inside compute groups, asynchronous across them", {}),
    **{f"omni_{groups}": (f"OmniStrategy with {groups} groups", {"groups": groups}) for groups in (2, 4, 8, 16, 32)},
    **{
        f"omni_{name}": (f"OmniStrategy with start_method {method!r}", {"start_method": method})
        for name, method in (("spawn", "spawn"), ("fork", "fork"), ("notebook", "fork"))
    },
    "omni_find_unused_parameters_true": ("OmniStrategy, find_unused_parameters=True", {"find_unused_parameters": True}),
}


def register_names(registry: Any, strategy: type) -> None:
    """Registers the names of a namespace's strategy."""
    for name, (description, options) in _NAMES.items():
        registry.register(name, strategy, description=description, override=True, **options)


class Asked:
    """What is asked for, by an argument or else by the environment.

    Args:
        groups: as passed to OmniStrategy.
        method: likewise.
        data: likewise.

    Attributes:
        groups: number of groups, or None.
        method: a method or its name.
        data: ``"dynamic"`` or ``"static"``.

    Raises:
        ConfigurationError: a variable is no number of groups, or ``data`` is something else.
    """

    data: Literal["dynamic", "static"]

    def __init__(self, groups: int | None, method: str | Method | None, data: str | None) -> None:
        self._variables: list[str] = []
        self.groups = self._number_of_groups() if groups is None else groups
        self.method = self._said(METHOD, "async_sgd") if method is None else method
        self.data = self._checked(self._said(DATA, "dynamic") if data is None else data)

    def _number_of_groups(self) -> int | None:
        text = self._said(GROUPS, "")
        try:
            return int(text) if text else None
        except ValueError:
            raise ConfigurationError(
                f"{GROUPS}={text!r} in the environment: set it to a number of groups, as 2, or unset it"
            ) from None

    def _checked(self, data: str) -> Literal["dynamic", "static"]:
        with self.naming_variables():
            for known in _DATA:
                if data == known:
                    return known
            raise ConfigurationError(f'data={data!r}: pass "dynamic" or "static"')

    def _said(self, variable: str, otherwise: str) -> str:
        text = os.environ.get(variable, "").strip()
        if text:
            self._variables.append(f"{variable}={text}")
        return text or otherwise

    @contextmanager
    def naming_variables(self) -> Iterator[None]:
        """Errors about what is asked for say so where it comes from the environment."""
        try:
            yield
        except ConfigurationError as error:
            if not self._variables:
                raise
            raise ConfigurationError(f"{error} (the environment says {', '.join(self._variables)})") from error
