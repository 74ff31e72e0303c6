"""Messages of a merged head, whose submodule runs at the server."""

from __future__ import annotations

from typing import Any, Literal

from lightning_omni.wire.codec import Packed
from lightning_omni.wire.messages.base import Message


class HeadForward(Message, frozen=True, kw_only=True):
    """A group's batch for a merged head, answered once the group has access. The tensors follow as payload.

    Attributes:
        optimizer: number of the head, among the optimizers.
        packed: ``[arguments, keyword arguments]`` of the submodule; their tensors are in the payload, as encoded by
            `lightning_omni.wire.codec`.
        training: whether each of its submodules is in training mode, itself first.
        trainable: whether each of its weights is to be trained.
        autocast: dtype of automatic mixed precision, if any.
        exclusive: whether a `HeadBackward` will follow; otherwise no group has to wait for this one.
    """

    optimizer: int
    packed: Packed
    nbytes: int
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    autocast: str = ""
    exclusive: bool = True


class HeadOutput(Message, frozen=True, kw_only=True):
    """The head's output for a group that has exclusive access; the tensors follow as payload."""

    packed: Packed
    nbytes: int


class HeadBackward(Message, frozen=True, kw_only=True):
    """The gradients of a head's output, which step the head and end the access. The tensors follow as payload.

    Attributes:
        packed: a list with one gradient for each tensor of the output; None where the loss does not depend on it.
        hyperparameters: as in `PushMessage`, of the parameter groups that hold weights of the head.
        scale: factor for the gradients of the head's weights.
        clip: largest norm or magnitude of these; 0 clips nothing.
        clip_algorithm: ``"norm"`` or ``"value"``.
        epoch: as in `PushMessage`.
        trained: as in `PushMessage`, with this batch; the push of the body reports it.
    """

    optimizer: int
    packed: Packed
    nbytes: int
    hyperparameters: tuple[dict[str, Any], ...]
    epoch: int = -1
    trained: int = 0
    scale: float = 1.0
    clip: float = 0.0
    clip_algorithm: Literal["norm", "value"] = "norm"


class HeadGradients(Message, frozen=True, kw_only=True):
    """The gradients of a head's inputs, one or None for each tensor; they follow as payload.

    Attributes:
        clock: updates of the head so far.
        applied: False if the gradients were not finite and the head was not stepped.
        refused_in_row: consecutive refused gradients of this group.
    """

    packed: Packed
    nbytes: int
    clock: int
    applied: bool
    refused_in_row: int


class HeadRelease(Message, frozen=True, kw_only=True):
    """The end of an access without a backward pass; the head stays unchanged."""

    optimizer: int


class HeadReleased(Message, frozen=True, kw_only=True):
    """The answer to `HeadRelease`."""
