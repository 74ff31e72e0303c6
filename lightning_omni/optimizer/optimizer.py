"""`OmniOptimizer`: a torch optimizer whose ``step()`` is an exchange with the parameter server."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import Exchange, Gradient, NextGradient
from lightning_omni.methods.contract import Answer, Need
from lightning_omni.methods.master import check_servable, hyperparameters_of
from lightning_omni.optimizer.world import World


class OmniOptimizer(Optimizer):
    """Wraps any torch optimizer so that it steps at the parameter server, across compute groups.

    The wrapped optimizer stays the place where hyperparameters are read and edited (by schedulers, say); they travel
    with every push. With one group nothing is exchanged and the wrapped optimizer steps itself, bit for bit.

    Args:
        optimizer: the optimizer to wrap, over parameters that live on this rank.
        world: this rank's place in the run.
        names: a name for every parameter; by default their places, ``"0.3"`` for the fourth of the first group.

    Raises:
        UnsupportedError: the optimizer cannot run at a server; the message says what to do instead.

    Example:
        >>> from lightning_omni import OmniOptimizer  # see World for a whole training loop
    """

    def __init__(self, optimizer: Optimizer, world: World, names: Mapping[Parameter, str] | None = None) -> None:
        # Optimizer.__init__ is left out on purpose: parameter groups, state and defaults are the wrapped optimizer's.
        if not world.is_synchronous:
            check_servable(optimizer)
        self.optimizer = optimizer
        self.world = world
        parameters = {
            (names or {}).get(parameter, f"{number}.{place}"): parameter
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        }
        self._index = world.attach(optimizer, parameters)
        self._replica = world.parts[self._index].replica
        self._group_side: Generator[Need, Any, None] | None = None
        self._generation = -1

    # --- What makes it a torch optimizer ------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state: empty while the server holds it."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict; its state is the server's, if several groups train.

        Rank 0 has to ask the server, so call it there; other ranks return their (empty) own.
        """
        own: dict[str, Any] = self.optimizer.state_dict()
        if self.world.control is not None and not self.world.is_synchronous and self.world.rank == 0:
            own["state"] = self.world.snapshot()["parts"][self._index]["state"]
        return own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict, before training begins; the server is given the state when it does."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before training begins, and only on the wrapped optimizer."""
        raise UnsupportedError("add parameter groups to the wrapped optimizer, before OmniOptimizer(...) is made")

    def __repr__(self) -> str:
        return f"OmniOptimizer({self.optimizer!r})"

    # --- The step -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: the closure, then the exchange. On every rank of the group.

        Args:
            closure: computes loss and gradients, as for any torch optimizer.

        Returns:
            What the closure returns.
        """
        if self.world.is_synchronous:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._advance(Gradient(self._replica.gradients(), hyperparameters_of(self.optimizer)))
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a missing step
        return loss

    def _advance(self, gradient: Gradient) -> None:
        """Drives the group side of the method from this gradient to the next."""
        need = self._side().send(gradient)
        while not isinstance(need, NextGradient):
            need = self._side().send(self._supply(need))

    def _supply(self, need: Need) -> Answer:
        assert isinstance(need, Exchange)
        given = need.gradient
        return self.world.exchange(self._index, given.tensors, given.hyperparameters, need.read_at)

    def _side(self) -> Generator[Need, Any, None]:
        if self._group_side is None or self._generation != self.world.generation:
            self._generation = self.world.generation
            self._group_side = self.world.method.group_side(self._replica)
            next(self._group_side)
        return self._group_side


def names_of(module: torch.nn.Module) -> dict[Parameter, str]:
    """Every parameter's name in a module, for `OmniOptimizer`."""
    return {parameter: name for name, parameter in module.named_parameters()}
