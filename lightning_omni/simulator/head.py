"""A merged head in virtual time: a group's batch goes through the real server's head, whole, when its turn ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.head import check_mergeable, held_by_one, pass_through
from lightning_omni.methods.modules import describe_module, tensors_of, with_tensors
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import unpack
from lightning_omni.protocol.head_side import HeadSide
from lightning_omni.simulator.server import HEAD, SimulatedServer
from lightning_omni.simulator.workbench import Loss


class SimulatedHead:
    """Stands in the place of the submodule's ``forward`` in the simulation's model.

    Args:
        name: the submodule's name.
        model: the simulation's model.
        optimizer: the user's, over all of its parameters.

    Attributes:
        parameters: the head's own, by name, in the optimizer's order.

    Raises:
        ConfigurationError: the submodule cannot be merged.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: Optimizer) -> None:
        self.name, self._optimizer = name, optimizer
        self._module = check_mergeable(name, model)
        _, self.parameters = held_by_one(name, self._module, [optimizer])
        self._side = HeadSide(name, HEAD, self._module, optimizer, list(self.parameters.values()))
        self._server: SimulatedServer | None = None
        self._who = (0, -1, 0)
        self._output: Any = None

    def part(self, seed: int) -> dict[str, Any]:
        """What a server is told of it, beyond its weights and optimizer."""
        return {"name": self.name, "module": describe_module(self._module), "seed": seed}

    def sizes(self, model: nn.Module, loss: Loss, batch: Any) -> tuple[int, int]:
        """Bytes that go into the head and come out of it for a batch."""
        seen: list[tuple[int, int]] = []

        def look(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((_nbytes((args, kwargs)), _nbytes(output)))

        was_training = model.training
        hook = self._module.register_forward_hook(look, with_kwargs=True)
        try:
            model.eval()  # nothing is drawn, nothing is counted
            loss(model, batch)
        finally:
            hook.remove()
            model.train(was_training)
        if len(seen) != 1:
            raise ConfigurationError(
                f"merged={self.name!r}: the loss uses the submodule {len(seen)} times, and a turn at the server is one"
                " forward and one backward pass"
            )
        return seen[0]

    def install(self, server: SimulatedServer) -> None:
        """From now on the submodule is the server's."""
        self._server = server
        self._module.forward = self

    def turn_of(self, leader: int, epoch: int, trained: int) -> None:
        """The next forward pass is this group's; with its batch it will have trained so many of the epoch."""
        self._who = (leader, epoch, trained)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The head's output, as the server gives it."""
        tree = (args, kwargs)
        outputs = pass_through(self, tree) if torch.is_grad_enabled() else self._ask(tree, turn=False)
        return with_tensors(self._output, outputs)

    def bring(self, tree: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The batch to the server; back come the output's tensors."""
        return self._ask(with_tensors(tree, tensors), turn=True)

    def _ask(self, tree: Any, turn: bool) -> list[Tensor]:
        assert self._server is not None
        said = self._side.forward(tree, turn=turn)
        answer, payload = self._server.ask_head(self._who[0], said.message, said.payload, m.HeadOutput)
        self._output = unpack(answer.packed, payload)
        return tensors_of(self._output)

    def take_back(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> list[Any]:
        """The output's gradients to the server, which steps the head; back come those of the inputs."""
        assert self._server is not None
        leader, epoch, trained = self._who
        said = self._side.backward(gradients, (epoch, trained))
        answer, payload = self._server.ask_head(leader, said.message, said.payload, m.HeadGradients)
        found: list[Any] = unpack(answer.packed, payload)
        return found


def _nbytes(tree: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(tree))


def without(parameters: Mapping[str, Parameter], head: SimulatedHead | None) -> dict[str, Parameter]:
    """Those parameters that groups train."""
    inside = head.parameters if head is not None else {}
    return {name: parameter for name, parameter in parameters.items() if name not in inside}
