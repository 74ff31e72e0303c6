"""A rank's copy of one optimizer's parameters, and how they lie in the flat memory through which they travel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import Pulled, Replica
from lightning_omni.methods.master import park
from lightning_omni.methods.replica import copies
from lightning_omni.optimizer.writes import Writes
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.wire_format import Memory


class ModelReplica(Replica):
    """The parameters of one optimizer on this rank.

    Args:
        parameters: name and parameter, in the optimizer's order.
        optimizer: the worker's own optimizer over them.

    Attributes:
        parameters: names and parameters, in the order of the layout.
        ever_held: the same parameters, also those that the optimizer has let go.
    """

    def __init__(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        super().__init__(list(parameters.values()), optimizer)
        self.parameters = dict(parameters)
        self.ever_held = set(self.ordered)
        self._writes = Writes()
        self._aside: Pulled | None = None
        self._released: set[Parameter] = set()
        self._parked: dict[Tensor, Any] = {}
        self._version = 0

    @cached_property
    def layout(self) -> Layout:
        """How the parameters lie in flat memory."""
        return self.layout_with({})

    def layout_with(self, more: Mapping[str, Parameter]) -> Layout:
        """The layout if further parameters come behind these."""
        plain = Layout.of({name: parameter.detach() for name, parameter in {**self.parameters, **more}.items()})
        return Layout(plain.specs, self._version)

    # --- Parameters that come and go in mid-run ----------------------------------------------------------------------

    def hold(self, parameters: Mapping[str, Parameter]) -> None:
        """These are the parameters, and nothing is remembered of others."""
        self.parameters, self.ordered = dict(parameters), list(parameters.values())
        self.ever_held, self._released = set(self.ordered), set()
        self._writes.forget()
        self.abandon()
        self._lay_out()

    def begin_layout(self) -> None:
        """A server is about to be given the parameters as they are: its first version of their layout."""
        self._version = 0
        self._lay_out()

    def grow(self, more: Mapping[str, Parameter], version: int) -> None:
        """Further parameters come behind the others; that is the version of the layout that the server gives it."""
        self._version = version
        self.parameters.update(more)
        self.ordered.extend(more.values())
        self.ever_held.update(more.values())
        if self._aside is not None:
            self._aside = Pulled(
                [*self._aside.tensors, *copies([each.detach() for each in more.values()])], self._aside.clock
            )
        self._lay_out()

    def release(self, held: Set[Parameter]) -> None:
        """The optimizer holds just these: the others stay as they are, and have no gradient."""
        self._released = self.ever_held - held
        park(self.optimizer, self._parked)

    def _lay_out(self) -> None:
        vars(self).pop("layout", None)

    def load(self, pulled: Pulled) -> None:
        """Overwrites the weights, but for frozen ones that the group has written by itself: those are its own."""
        own = self.own_frozen()
        for name, parameter, value in zip(self.parameters, self.ordered, pulled.tensors, strict=True):
            if name not in own:
                parameter.detach().copy_(value, non_blocking=True)
        self.clock = pulled.clock
        self._writes.remember(self.ordered, pulled.tensors)

    def know(self) -> None:
        """What the weights are now, the server knows."""
        self._writes.remember(self.ordered, copies(self.weights()))

    def descend(self, gradient: Sequence[Tensor | None]) -> None:
        """A local step between two fetches: it is the method that has written these weights."""
        super().descend(gradient)
        self.know()

    def written(self, in_passing: bool = False) -> list[str]:
        """Names of trained weights that somebody has written since they were loaded: see `Writes.of_trained`."""
        return self._writes.of_trained(self.parameters, in_passing)

    def own_frozen(self) -> set[str]:
        """Names of frozen weights that somebody has written while they were frozen, so that they are this group's."""
        return self._writes.of_frozen(self.parameters)

    def gradients(self) -> list[Tensor | None]:
        """The gradients, in order; None where a parameter took no part in the loss.

        Raises:
            UnsupportedError: a gradient is sparse.
        """
        gradients = [parameter.grad if parameter not in self._released else None for parameter in self.ordered]
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise UnsupportedError(
                    f"the gradient of {name} is sparse, and gradients travel dense; build the embedding with"
                    " sparse=False, or use groups=1"
                )
        return gradients

    # --- Meetings: a group's own weights make way for those that are evaluated --------------------------------------

    def put_aside(self) -> None:
        """Keeps the own weights while others are evaluated in their place."""
        if self._aside is None:
            self._aside = Pulled(copies(self.weights()), self.clock)

    def take_up(self) -> None:
        """The own weights come back, if they were put aside."""
        if self._aside is not None:
            self.load(self._aside)
            self._aside = None

    def abandon(self) -> None:
        """The own weights do not come back: training goes on, or ends, with those that were evaluated."""
        self._aside = None
        self.memory.clear()

    def own_state(self, whole: bool) -> dict[str, Any]:
        """What this group alone knows: its memory, and if ``whole`` its own weights and optimizer state."""
        if not whole:
            return {"memory": self.memory}
        state = self.state()
        if self._aside is not None:
            state.update(weights=list(self._aside.tensors), clock=self._aside.clock)
        return state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from an `own_state` when training begins."""
        self.memory = _on(state["memory"], self.ordered[0].device)
        if "weights" in state and len(state["weights"]) == len(self.ordered):
            self._aside = Pulled(copies(state["weights"]), int(state["clock"]))
            plain = self.optimizer.state_dict()
            self.optimizer.load_state_dict({**plain, "state": state["optimizer"]})


def _on(tree: Any, device: torch.device) -> Any:
    """The tree with its tensors on a device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: _on(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on(value, device) for value in tree)
    return tree


@dataclass
class Part:
    """One optimizer's share of the exchange."""

    optimizer: Optimizer
    replica: ModelReplica
    into: Tensor | None = None
    out: Memory = field(default_factory=Memory)
    staleness: list[int] = field(default_factory=list)
    head: tuple[str, Module] | None = None
    """Name and submodule, if this is a merged head: it lives at the server, and nothing of it is pushed."""
    names: Callable[[], Mapping[Parameter, str]] = dict
    """Names of all the model's parameters, as it is at the moment."""
    outside: Collection[Parameter] = ()
    """What the optimizer holds and others than this part exchange."""
    arranged: list[list[int]] = field(init=False)
    """The `arrangement` that the server knows of."""

    def __post_init__(self) -> None:
        self.arranged = self.arrangement

    @property
    def arrangement(self) -> list[list[int]]:
        """Which parameters each parameter group holds, as identities: quick to compare."""
        return [list(map(id, group["params"])) for group in self.optimizer.param_groups]
