"""A group's side of a merged head: what is said to the server, and whether the group has access. No I/O.

The other half of `lightning_omni.protocol.merged_head`. What brings the batch there and back (a rank, the simulator)
is not its business.

Rule: exclusive access is one forward pass and one backward pass, with which the head is stepped; or it is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods.head import modes_of
from lightning_omni.methods.master import hyperparameters_of
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.activations import RAW_BOTH, Both, flat_of, pack_in
from lightning_omni.protocol.codec import Packed


class ToHead(NamedTuple):
    """What is said to the server, and its payload: uint8."""

    message: m.HeadForward | m.HeadBackward
    payload: Tensor


class HeadSide:
    """What one group says for a merged head, in the order in which it may be said.

    Args:
        name: of the submodule, for errors.
        number: of the head, among the optimizers.
        module: the submodule.
        optimizer: the user's that holds its parameters, which says its hyperparameters.
        parameters: these parameters, in the optimizer's order.
        wire: how activations and gradients travel.

    Attributes:
        clip: largest norm or magnitude of the head's gradient; 0 clips nothing.
        clip_algorithm: ``"norm"`` or ``"value"``.

    Example:
        >>> import torch
        >>> head = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        >>> side = HeadSide("head", 1, head, optimizer, list(head.parameters()))
        >>> forward = side.forward(((torch.ones(3, 2),), {}))
        >>> side.begin()
        >>> side.end()
        >>> side.backward([torch.ones(3, 1)]).message.hyperparameters[0]["lr"]
        0.1
    """

    def __init__(
        self,
        name: str,
        number: int,
        module: nn.Module,
        optimizer: Optimizer,
        parameters: Sequence[Parameter],
        wire: Both = RAW_BOTH,
    ) -> None:
        self.number, self.wire = number, wire
        self._name, self._module, self._optimizer, self._parameters = name, module, optimizer, parameters
        self.has_access = self._was_used = False
        self.clip = 0.0
        self.clip_algorithm: Literal["norm", "value"] = "norm"

    # --- Access ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `UnsupportedError` if the submodule was used in this training step already."""
        if self._was_used:
            raise self._used_twice()

    def begin(self) -> None:
        """The group's batch was brought there for exclusive access, and the output is here."""
        self.has_access = self._was_used = True

    def end(self) -> None:
        """The loss is taken backward, and the access is over with its gradients.

        Raises:
            UnsupportedError: it was taken backward already.
        """
        if not self.has_access:
            raise self._used_twice()
        self.has_access = False

    def step_done(self) -> None:
        """A step has ended, and the submodule may be used again."""
        self._was_used = False

    # --- What is said ------------------------------------------------------------------------------------------------

    def forward(self, tree: Any, autocast: str = "", exclusive: bool = True) -> ToHead:
        """The group's batch.

        Args:
            tree: arguments and keyword arguments of the submodule.
            autocast: dtype of automatic mixed precision, if any.
            exclusive: whether a backward pass will follow.
        """
        packed, buffer = pack_in(self.wire.up, tree)
        message = m.HeadForward(
            optimizer=self.number,
            packed=packed,
            nbytes=buffer.numel(),
            training=modes_of(self._module),
            trainable=tuple(parameter.requires_grad for parameter in self._parameters),
            autocast=autocast,
            exclusive=exclusive,
        )
        return ToHead(message, buffer)

    def backward(
        self, gradients: Sequence[Tensor | None], place: tuple[int, int] = (-1, 0), scale: float = 1.0
    ) -> ToHead:
        """The gradients of what the head gave.

        Args:
            gradients: one for each tensor of the output; None if it took no part in the loss.
            place: where the group is in the epoch's data: see `lightning_omni.protocol.lessee.Lessee.place`.
            scale: multiplies the gradients of the head's weights.
        """
        packed, buffer = pack_in(self.wire.up, list(gradients))
        epoch, trained = place
        message = m.HeadBackward(
            optimizer=self.number,
            packed=packed,
            nbytes=buffer.numel(),
            hyperparameters=tuple(hyperparameters_of(self._optimizer, set(self._parameters))),
            scale=scale,
            clip=self.clip,
            clip_algorithm=self.clip_algorithm,
            epoch=epoch,
            trained=trained,
        )
        return ToHead(message, buffer)

    def flat_of(self, packed: Packed, payload: Tensor) -> Tensor:
        """The tensors of what the server answers, in flat memory."""
        return flat_of(self.wire.down, packed, payload)

    def release(self) -> m.HeadRelease:
        """An access whose loss was never taken backward is given up."""
        self.has_access = False
        return m.HeadRelease(optimizer=self.number)

    def _used_twice(self) -> UnsupportedError:
        return UnsupportedError(
            f'merged="{self._name}": the submodule is used twice in one training step, and its access at the server is'
            " one forward pass and one backward pass, with which it is stepped; use it once, on all inputs together,"
            " or under torch.no_grad()"
        )
