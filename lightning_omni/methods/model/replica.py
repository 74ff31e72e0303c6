"""A group's own copy of one optimizer's weights, as the group side of a method uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.methods.model.fragments import Piece, Pieces, cut, read, sizes_of, write
from lightning_omni.methods.model.server_optimizer import directions_of, held_by, rate_of

Hyperparameters = Sequence[Mapping[str, Any]]
"""One mapping for each parameter group of the optimizer: lr, momentum, betas, ... without ``params``."""


class Pulled(msgspec.Struct, frozen=True):
    """The server's answer.

    Attributes:
        tensors: one for each parameter, in the optimizer's order, valid until the group side's next request; empty if
            none were requested.
        clock: number of updates that the master weights contain.
        refused: whether the push, or weights for a mean, were refused (not finite, or declined by the method), or its
            first answer was lost while the optimizer steps at the worker; ``tensors`` are then the master weights.
        fragment: fragment of ``tensors``, one for each of its pieces; None for all parameters.
    """

    tensors: Sequence[Tensor]
    clock: int
    note: float = 0.0
    refused: bool = False
    fragment: int | None = None


class Drift:
    """A record of the weights, by parameter index, that a group has moved since it received them, by fragment."""

    def __init__(self) -> None:
        self._now = 0
        self._moved: dict[int, int] = {}
        self._read: dict[int | None, int] = {}

    def move(self, places: Iterable[int]) -> None:
        self._now += 1
        self._moved.update(dict.fromkeys(places, self._now))

    def read(self, fragment: int | None = None) -> None:
        """Record that a fragment equals the server's; None for all weights."""
        self._now += 1
        self._read[fragment] = self._now

    def forget(self, places: Iterable[int]) -> None:
        for place in places:
            self._moved.pop(place, None)

    def has(self, place: int, fragment: int | None = None) -> bool:
        read = max(self._read.get(None, 0), self._read.get(fragment, 0))
        return self._moved.get(place, 0) > read


class Replica:
    """The parameters of one optimizer on one rank.

    A frozen weight stays bitwise constant until a group writes it: neither a lossy wire format nor the mean of equal
    values may move it. It is exchanged only where groups have trained it before: see `agreed`.

    Args:
        parameters: in the optimizer's order; moved in place.
        optimizer: the worker's own optimizer.

    Attributes:
        first: number of parameters before any were added.
        servers: number of servers, from whose shares of the parameters fragments are cut.
        clock: the server's clock when the weights were read.
        peers: numbers of the groups when this one was formed, itself included; some may be gone.
        drift: the weights that differ from the server's.
        memory: state of the group side: plain values, tensors, and lists and dicts of them.
        closure: computes loss and gradients again, for optimizers that call it in their step.
        loss: the closure's result for the present gradients.
        arguments: further keyword arguments of the optimizer's current step.
    """

    def __init__(self, parameters: Sequence[Parameter], optimizer: Optimizer, group: int = 0) -> None:
        self.ordered = list(parameters)
        self.first = len(self.ordered)
        self.servers = 1
        self.optimizer = optimizer
        self.group = group
        self.clock = 0
        self.peers: tuple[int, ...] = (group,)
        self.drift = Drift()
        self.memory: dict[str, Any] = {}
        self.closure: Callable[[], Any] | None = None
        self.loss: Any = None
        self.arguments: Mapping[str, Any] = {}

    def here(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter, gradient or optimizer state that this rank exchanges: all of it."""
        return tensor.detach()

    def weights(self) -> list[Tensor]:
        """Return the live weights, for reading only."""
        return [self.here(parameter) for parameter in self.ordered]

    def pieces(self, fragment: int | None, of: int) -> Pieces:
        """Return the pieces of a fragment; None for all parameters."""
        if fragment is None:
            return [Piece(place) for place in range(len(self.ordered))]
        return cut(sizes_of(self.ordered), of, self.first, self.servers)[fragment]

    def load(self, pulled: Pulled) -> None:
        """Overwrite the weights and store their clock; an answer without tensors changes nothing."""
        if not pulled.tensors:
            return
        torch._foreach_copy_(self.weights(), list(pulled.tensors))
        self.clock = pulled.clock
        self.drift.read()

    def restart(self, pulled: Pulled) -> None:
        """Restart from the master weights, without optimizer state, after a refused push."""
        self.load(pulled)
        self.optimizer.state.clear()

    def continue_from(self, pulled: Pulled) -> None:
        """Load the server's answer; restart from it if the push was refused."""
        if pulled.refused:
            self.restart(pulled)
        else:
            self.load(pulled)

    def move(self, by: Sequence[Tensor], factor: float = 1.0) -> None:
        """Add ``factor * by`` to the weights, except frozen ones, which rounding must not move."""
        for parameter, weight, change in zip(self.ordered, self.weights(), by, strict=True):
            if parameter.requires_grad:
                weight.add_(change.to(weight.device), alpha=factor)

    def descend(self, gradient: Sequence[Tensor | None]) -> None:
        """Make a step of plain SGD: ``weights -= lr * gradient`` with each parameter group's lr, ``+=`` to maximize."""
        rates = {
            id(parameter): rate_of(self.optimizer, group)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        directions = directions_of(self.optimizer)
        for parameter, weight, direction in zip(self.ordered, self.weights(), gradient, strict=True):
            if direction is not None:
                weight.add_(direction, alpha=-rates[id(parameter)] * directions[id(parameter)])
        self.drift.move(self._trained_by(gradient))

    def step(self, gradient: Sequence[Tensor | None]) -> None:
        """Make a step of the worker's own optimizer along this gradient."""
        for parameter, direction in zip(self.ordered, gradient, strict=True):
            if parameter.grad is not direction:
                parameter.grad = direction
        # This calls the class's step, because schedulers replace that of the instance.
        with torch.enable_grad():
            closure = [] if self.closure is None else [self._evaluated(self.closure)]
            type(self.optimizer).step(self.optimizer, *closure, **self.arguments)
        self.drift.move(self._trained_by(gradient))

    def _evaluated(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure with the known loss first, unless the optimizer (such as SAM) has moved the weights."""
        known, before = [self.loss], self._versions()

        def evaluated() -> Any:
            return known.pop() if known and self._versions() == before else closure()

        return evaluated

    def _versions(self) -> list[tuple[int, int]]:
        """Return versions of weights and gradients; none for torch's optimizers, which call the closure first."""
        if type(self.optimizer).__module__.startswith("torch.optim."):
            return []
        tensors = [tensor for each in self.ordered for tensor in (each, each.grad) if tensor is not None]
        return [(self.here(tensor).data_ptr(), tensor._version) for tensor in tensors]

    def _trained_by(self, gradient: Sequence[Tensor | None]) -> list[int]:
        pairs = zip(self.ordered, gradient, strict=True)
        return [place for place, (each, part) in enumerate(pairs) if part is not None or each.requires_grad]

    def part(self, fragment: int | None, of: int) -> list[Tensor]:
        """Return the weights' pieces of a fragment, or all weights if it is None."""
        return read(self.weights(), self.pieces(fragment, of))

    def overwrite(self, values: Sequence[Tensor], fragment: int | None = None, of: int = 1) -> None:
        """Overwrite the weights' pieces of a fragment, one value for each; None for all weights."""
        write(self.weights(), self.pieces(fragment, of), values)
        self.drift.read(fragment)

    def mix(self, pulled: Pulled, of: int, own: float = 0.0) -> None:
        """Set ``weights = own * weights + (1 - own) * pulled`` in the pulled fragment; ``own`` is 0 for frozen ones."""
        values: Sequence[Tensor] = pulled.tensors
        if own:
            each = zip(self.pieces(pulled.fragment, of), values, self.part(pulled.fragment, of), strict=True)
            values = [
                torch.lerp(value.to(mine), mine, own) if self.ordered[piece.place].requires_grad else value
                for piece, value, mine in each
            ]
        self.overwrite(values, pulled.fragment, of)

    def agreed(self, fragment: int | None = None, of: int = 1) -> list[bool]:
        """Return, for each piece of a fragment or of all parameters, whether it is frozen and equals the server's."""
        return [self._is_agreed(piece.place, fragment) for piece in self.pieces(fragment, of)]

    def _is_agreed(self, place: int, fragment: int | None = None) -> bool:
        return not self.ordered[place].requires_grad and not self.drift.has(place, fragment)

    def offered(self, weights: Sequence[Tensor], fragment: int | None = None, of: int = 1) -> list[Tensor | None]:
        """Return the weights, or their pieces of a fragment, to be averaged; None for the agreed ones."""
        agreed = self.agreed(fragment, of)
        return [None if known else weight for weight, known in zip(weights, agreed, strict=True)]

    def exactly(self, pulled: Pulled, of: int) -> Pulled:
        """Return an answer of a lossy wire format, with the exact own values in place of agreed pieces."""
        if not pulled.tensors or not any(agreed := self.agreed(pulled.fragment, of)):
            return pulled
        each = zip(self.part(pulled.fragment, of), pulled.tensors, agreed, strict=True)
        return msgspec.structs.replace(pulled, tensors=[mine if known else value for mine, value, known in each])

    @property
    def loose(self) -> list[int]:
        """Return the indices of frozen weights that differ from the server's: the group has trained them before."""
        return [place for place, each in enumerate(self.ordered) if not each.requires_grad and self.drift.has(place)]

    def take_frozen(self, pulled: Pulled) -> None:
        """Load the `loose` weights from an answer with the server's weights."""
        weights, loose = self.weights(), self.loose
        for place in loose:
            weights[place].copy_(pulled.tensors[place])
        self.drift.forget(loose)

    def rebase(self, pulled: Pulled, sent: Sequence[Tensor], of: int) -> None:
        """Set ``weights = pulled + (weights - sent)`` in the pulled fragment, to keep the steps made since the push."""
        mine = self.part(pulled.fragment, of)
        changes = self._differences(self.pieces(pulled.fragment, of), mine, sent)
        moved = [
            value.to(now) if change is None else value.to(now) + change
            for value, now, change in zip(pulled.tensors, mine, changes, strict=True)
        ]
        self.overwrite(moved, pulled.fragment, of)

    def remember(self, name: str) -> list[Tensor]:
        """Return the weights at the first call with this name, from ``memory``.

        Parameters added mid-run have their value at the first call with them.
        """
        kept: list[Tensor] = self.memory.setdefault(name, [])
        kept.extend(copies(self.weights()[len(kept) :]))
        return kept

    def change(
        self, since: Sequence[Tensor], factor: float = 1.0, fragment: int | None = None, of: int = 1
    ) -> list[Tensor | None]:
        """Return ``factor * (weights - since)``; None for an unchanged weight that the optimizer does not move.

        ``since`` is from `remember`, ``factor`` 1 or -1, and ``fragment`` one of ``of`` fragments, or None for all.
        """
        pieces = self.pieces(fragment, of)
        weights, before = read(self.weights(), pieces), read(since, pieces)
        return self._differences(pieces, *((weights, before) if factor == 1.0 else (before, weights)))

    def _differences(self, pieces: Pieces, first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor | None]:
        held = {id(each) for each in held_by(self.optimizer) if each.requires_grad}
        return [  # an equal infinity, as in a frozen mask, has no difference
            change if id(self.ordered[piece.place]) in held or not torch.equal(one, other) else None
            for piece, one, other, change in zip(pieces, first, second, minus(first, second), strict=True)
        ]

    def base(self) -> list[Tensor]:
        r"""Return copies of the weights without Nesterov's look-ahead, for methods that exchange weights.

        ``torch.optim.SGD(nesterov=True)`` keeps the point :math:`\tilde x = x + \delta v` at which the next gradient is
        taken; with :math:`v = -\eta b` for its buffer b, this returns :math:`x = \tilde x + \eta\delta b`. For
        optimizers without SGD in their classes' names it returns copies of the weights.
        """
        bases = [weight.clone() for weight in self.weights()]
        kinds = type(self.optimizer).__mro__
        if not any("SGD" in kind.__name__ for kind in kinds):  # Muon's buffer, say, is no velocity of the weights
            return bases
        where = {id(parameter): base for parameter, base in zip(self.ordered, bases, strict=True)}
        for group in self.optimizer.param_groups:
            if not group.get("nesterov"):
                continue
            for parameter in (each for each in group["params"] if id(each) in where):
                buffer = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
                if buffer is not None:
                    ahead = float(group["lr"]) * float(group["momentum"])  # with maximize, the buffer is negated
                    where[id(parameter)].add_(self.here(buffer), alpha=ahead)
        return bases

    def state(self) -> dict[str, Any]:
        """Return weights, clock, memory and optimizer state. The tensors are live."""
        return {
            "weights": self.weights(),
            "clock": self.clock,
            "memory": self.memory,
            "optimizer": optimizer_state_of(self.optimizer),
        }


def optimizer_state_of(optimizer: Optimizer) -> dict[Any, Any]:
    """Return an optimizer's state without its hyperparameters.

    That of an optimizer that wraps another, and has a ``state_dict`` of its own form, is returned whole.
    """
    everything = optimizer.state_dict()
    state: dict[Any, Any] = everything.get("state", everything)
    return state


def load_optimizer_state(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    own = optimizer.state_dict()
    optimizer.load_state_dict({**own, "state": state} if "state" in own else dict(state))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def all_finite(tensors: Sequence[Tensor | None] | None) -> bool:
    """Return whether all tensors that are present are finite; False for None, where a peer has none to give."""
    there = [tensor for tensor in tensors or () if tensor is not None]
    if not there:
        return tensors is not None
    # The sum is fast, but in float16 it may overflow although all elements are finite. A device returns one number.
    are_finite = torch.stack([torch.isfinite(tensor.sum()) for tensor in there]).all()
    return bool(are_finite) or all(bool(torch.isfinite(tensor).all()) for tensor in there)


def minus(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return list(torch._foreach_sub(list(first), list(second))) if len(first) else []
