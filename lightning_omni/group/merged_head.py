"""A group's side of a merged head: its messages to the server, and the state of its access. No I/O.

Rule: exclusive access is one forward pass and one backward pass, with which the head is stepped; or it is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods.model.head import modes_of
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack


class MergedHeadClient:
    """A rank's access to a merged head, and the messages for it.

    Args:
        name: name of the submodule, for errors.
        number: number of the head, among the optimizers.
        parameters: its parameters, in the optimizer's order.

    Attributes:
        clip: largest norm or magnitude of the head's gradient; 0 clips nothing.
        clip_algorithm: ``"norm"`` or ``"value"``.
    """

    def __init__(
        self,
        name: str,
        number: int,
        module: nn.Module,
        optimizer: Optimizer,
        parameters: Sequence[Parameter],
    ) -> None:
        self.number = number
        self._name, self._module, self._optimizer, self._parameters = name, module, optimizer, parameters
        self.has_access = self._was_used = False
        self.clip = 0.0
        self.clip_algorithm: Literal["norm", "value"] = "norm"

    # --- Access ------------------------------------------------------------------------------------------------------

    def begin_loop(self) -> None:
        self.has_access = self._was_used = False

    def check(self) -> None:
        if self._was_used:
            raise self._used_twice()

    def begin(self) -> None:
        """Record that the output of a forward pass with exclusive access has arrived."""
        self.has_access = self._was_used = True

    def end(self) -> None:
        """Record that the loss's backward pass has reached the head, which ends the access.

        Raises:
            UnsupportedError: the access has ended already.
        """
        if not self.has_access:
            raise self._used_twice()
        self.has_access = False

    def step_done(self) -> None:
        self._was_used = False

    # --- Messages ----------------------------------------------------------------------------------------------------

    def forward(self, tree: Any, autocast: str = "", exclusive: bool = True) -> tuple[m.HeadForward, Tensor]:
        """Return the message with the group's batch, and its payload: uint8.

        ``tree`` is (arguments, keyword arguments); the others are as in `HeadForward`.
        """
        packed, buffer = pack(tree)
        forward = m.HeadForward(
            optimizer=self.number,
            packed=packed,
            nbytes=buffer.numel(),
            training=modes_of(self._module),
            trainable=tuple(parameter.requires_grad for parameter in self._parameters),
            autocast=autocast,
            exclusive=exclusive,
        )
        return forward, buffer

    def backward(
        self, gradients: Sequence[Tensor | None], place: tuple[int, int] = (-1, 0), scale: float = 1.0
    ) -> tuple[m.HeadBackward, Tensor]:
        """Return the message with the gradients of the head's output, and its payload: uint8.

        ``place`` is from `LeaseClient.place`; the others are as in `HeadBackward`.
        """
        packed, buffer = pack(list(gradients))
        epoch, trained = place
        backward = m.HeadBackward(
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
        return backward, buffer

    def release(self) -> m.HeadRelease:
        self.has_access = False
        return m.HeadRelease(optimizer=self.number)

    def _used_twice(self) -> UnsupportedError:
        return UnsupportedError(
            f'merged="{self._name}": the submodule is used twice in one training step, and its access at the server is'
            " one forward pass and one backward pass, with which it is stepped; use it once, on all inputs together,"
            " or under torch.no_grad()"
        )
