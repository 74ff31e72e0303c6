"""`OmniOptimizer`: a torch optimizer whose ``step()`` is one step of a distributed method."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.checks import check_kind
from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.runtime._private import caller_in, hooks_of, is_unscaled, untraced
from lightning_omni.runtime.model.sharded import state_like
from lightning_omni.runtime.state.served_state import is_state_lost
from lightning_omni.runtime.world import World

_log = logging.getLogger(__name__)

_STATE_DICTS = "torch.distributed.checkpoint.state_dict"
"""A module of torch whose functions step an optimizer without state."""


class OmniOptimizer(Optimizer):
    """A wrapper of any torch optimizer that steps across compute groups, with the method of the world.

    Use it in place of the optimizer in loops without Lightning, also for schedulers. Where the method steps at the
    parameter server, every push contains the hyperparameters. Where it steps at the workers, the wrapped optimizer
    steps, and the groups exchange weights. With one group the wrapped optimizer steps, bit for bit.

    Args:
        optimizer: the optimizer to wrap, over parameters on this rank.
        world: the run.
        names: a unique name for every parameter, or a function that returns these, if parameters are added during the
            run. By default their positions: ``"0.3"`` is the fourth parameter of the first parameter group.
        merged: parameters of a merged head, which the server steps separately: see `World.attach_head`.

    Raises:
        UnsupportedError: groups cannot step the optimizer or train a parameter; the message names an alternative.
        ConfigurationError: two parameters have one name; an argument is wrong; or this is inside `World.training`.

    Example:
        >>> from lightning_omni import OmniOptimizer  # see World for a whole training loop
    """

    def __init__(
        self,
        optimizer: Optimizer,
        world: World,
        names: Mapping[Parameter, str] | Callable[[], Mapping[Parameter, str]] | None = None,
        merged: Collection[Parameter] = (),
    ) -> None:
        check_kind("world", world, World, "the World of this run, as in OmniOptimizer(optimizer, world)")
        if isinstance(optimizer, OmniOptimizer) or not hasattr(optimizer, "param_groups"):
            raise ConfigurationError(
                f"optimizer={optimizer!r}: pass the optimizer itself, such as SGD(model.parameters(), lr=0.1), which"
                " no other OmniOptimizer wraps"
            )
        if world.is_in_loop:
            raise ConfigurationError(
                "OmniOptimizer inside `with world.training():`, whose server was given all optimizers when it began:"
                " make it before"
            )
        # Optimizer.__init__ is left out on purpose: parameter groups, state and defaults are the wrapped optimizer's.
        world.executor.check_optimizer(optimizer)
        self.optimizer = optimizer
        self.world = world
        # Hooks are registered on the wrapped optimizer, and get that; those that get a state_dict get this one.
        vars(self).update(hooks_of(optimizer), _optimizer_state_dict_post_hooks=OrderedDict())
        merged = set(merged)
        names_now = names if callable(names) else lambda: names or {}
        parameters = _named(optimizer, names_now(), merged)
        if merged and not parameters:
            raise ConfigurationError(
                "merged= names all that this optimizer moves, and nothing is left for the groups to train; merge a part"
            )
        self._index = world.attach(optimizer, parameters, names_now, merged)

    # --- The interface of a torch optimizer ---------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the wrapped optimizer's state: empty while the server holds it."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError: an attribute of the wrapped optimizer might move weights without an exchange."""
        wrapped = self.__dict__.get("optimizer")
        where = (
            ""
            if wrapped is None or not hasattr(wrapped, name)
            else (
                f"; that of {type(wrapped).__name__}, which it wraps, is optimizer.optimizer.{name}. Groups exchange in"
                " optimizer.step() alone: where the optimizer evaluates the loss more than once, call step(closure)"
            )
        )
        raise AttributeError(f"'OmniOptimizer' object has no attribute '{name}'{where}", name=name, obj=self)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict. While the server holds the state, call it on rank 0.

        Other ranks return their own state, which is empty. Where ranks hold the model together, those that hold it with
        rank 0 call it, and each gets the state of its share.
        """
        own: dict[str, Any] = self.optimizer.state_dict()
        if not self._is_at_server and is_state_lost(self.optimizer) and self.world.is_recorder:
            _log.warning(
                "optimizer.state_dict() has no state of %s: the parameter server had it, and the loop has failed; load"
                " that of a checkpoint",
                type(self.optimizer).__name__,
            )
        if self._is_at_server and self.world.owns_state:
            state = self.world.states.whole(self.optimizer, self.world.exchange.store.snapshot().parts)
            own["state"] = state_like(state, self.optimizer)
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, own)
            own = own if changed is None else changed
        return own

    @property
    def _is_at_server(self) -> bool:
        return self.world.executor.control is not None and not self.world.steps_at_worker

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the wrapped optimizer alone.

        Raises:
            UnsupportedError: the server holds the state.
        """
        if self._is_at_server:
            raise UnsupportedError(
                "a copy of an OmniOptimizer while the parameter server holds its state would be without it: call"
                " optimizer.state_dict() on rank 0, or copy the optimizer outside world.training()"
            )
        return _wrapped, (self.optimizer,)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict. Call it before training begins: then the server receives the state."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, in mid-run with one server only. Call it on every rank, here or on the wrapped one.

        The parameters take the values that the server has for them, or this group's if it is the first to add them.
        """
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"OmniOptimizer({self.optimizer!r})"

    # --- The step -----------------------------------------------------------------------------------------------------

    @untraced
    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Make one step, the closure and the exchange; return the closure's result. Call it on every rank of the group.

        Args:
            closure: computes loss and gradients, as for any torch optimizer.
            arguments: further arguments of the wrapped optimizer's step, if it steps on the ranks.
        """
        if is_unscaled(self.optimizer):  # in `GradScaler.step`, which knows optimizers by their identity
            raise ConfigurationError(
                f"scaler.unscale_() of the {type(self.optimizer).__name__} and scaler.step() of the OmniOptimizer that"
                " wraps it, so the gradients are unscaled twice: pass the OmniOptimizer to both"
            )
        if self.world.executor.exchanges:
            self._check_is_of_training()
        self.world.check_step()
        if self.world.first_steps is not None:
            closure = self.world.first_steps.checked(
                self._index, self.world.parts[self._index].replica.ordered, closure
            )
        loss = self.world.executor.step(self._index, self.optimizer, closure, arguments)
        self.world.step_done()
        return loss

    def _check_is_of_training(self) -> None:
        """Raise `UnsupportedError` if torch makes this step, with a rate of 0, to create an optimizer's state."""
        for group in self.optimizer.param_groups:
            rate = group.get("lr", 0.0)
            # torch's rate is a number or on the CPU. To read one of a device would be to wait for it in each step.
            if (isinstance(rate, Tensor) and not rate.is_cpu) or rate:
                return
        if caller_in(_STATE_DICTS) is not None:
            raise UnsupportedError(
                f"the functions of {_STATE_DICTS} (get_state_dict, say) step an optimizer that has no state, which"
                " would be a step of this rank's group: save optimizer.state_dict() on rank 0, and call"
                " optimizer.load_state_dict() before world.training()"
            )


def _wrapped(optimizer: Optimizer) -> Optimizer:
    return optimizer


def _named(optimizer: Optimizer, names: Mapping[Parameter, str], merged: Collection[Parameter]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter in merged:
                continue
            name = names.get(parameter, f"{number}.{index}")
            if found.get(name, parameter) is not parameter:
                raise ConfigurationError(
                    f"names=: two parameters of the optimizer are called {name}, and groups would exchange one of them;"
                    " give each a name of its own, or put the modules into one (a ModuleDict, say) and pass its"
                    " names_of()"
                )
            found[name] = parameter
    return found


def names_of(module: torch.nn.Module) -> dict[Parameter, str]:
    """Return every parameter's name in a module, for `OmniOptimizer`."""
    return {parameter: name for name, parameter in module.named_parameters()}
