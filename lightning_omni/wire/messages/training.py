"""Messages of training: weights, gradients, and changes of the parameter groups."""

from __future__ import annotations

from typing import Any

from lightning_omni.methods import Exchange
from lightning_omni.wire.codec import Packed
from lightning_omni.wire.messages.base import Message


class UploadWeights(Message, frozen=True, kw_only=True):
    """The recorder's upload of the master weights and optimizers. The tensors follow as payload.

    ``request`` is as in `PushMessage`.
    """

    packed: Packed
    nbytes: int
    request: int = 0


class WeightsUploaded(Message, frozen=True, kw_only=True):
    """The answer to `UploadWeights`."""


class Restructure(Message, frozen=True, kw_only=True):
    """A change of a group's optimizer to other parameter groups, or more parameters. The tensors follow as payload.

    Attributes:
        packed: see `lightning_omni.wire.parameter_groups.read_structure`.
    """

    optimizer: int
    packed: Packed
    nbytes: int


class Restructured(Message, frozen=True, kw_only=True):
    """The answer to `Restructure`; the master weights that are new to the group follow as payload.

    Attributes:
        layout: version of the layout that the group now has.
    """

    optimizer: int
    layout: int
    nbytes: int


class PushMessage(Message, tag="Push", frozen=True, kw_only=True):
    """A push: a gradient, weights or a change of weights. The payload holds the tensors that are present.

    Attributes:
        optimizer: number of the optimizer.
        read_at: clock of the weights that it was computed from.
        layout: version of the layout of its tensors.
        present: one flag for each parameter; the others' tensor is None.
        hyperparameters: one mapping for each parameter group; empty if the optimizer steps at the workers.
        note: a number for the method.
        pull: whether the answer must contain tensors.
        epoch: the epoch, -1 if its data is not leased.
        trained: group batches of the epoch that are trained with this push.
        incarnation: incarnation of the group; pushes of an earlier one are refused.
        sequence: number of the push of this incarnation to this optimizer, from 1. The server applies each of them
            once. 0 where nothing is sent: at a merged head, in a replay.
        fragment: number of the method's fragment; -1 for all parameters. ``present`` then has a flag for each entry of
            `lightning_omni.wire.layout.Layout.fragment`.
        request: number of a rank's request to several servers, each of which gets a part; 0 for one server.
    """

    optimizer: int
    read_at: int
    present: tuple[bool, ...]
    hyperparameters: tuple[dict[str, Any], ...]
    epoch: int
    trained: int
    nbytes: int
    note: float = 0.0
    pull: bool = True
    layout: int = 0
    incarnation: int = 0
    sequence: int = 0
    fragment: int = -1
    request: int = 0

    @property
    def part(self) -> int | None:
        """Return the fragment; None for all parameters."""
        return None if self.fragment < 0 else self.fragment

    @classmethod
    def of(
        cls,
        need: Exchange,
        optimizer: int,
        present: tuple[bool, ...],
        nbytes: int,
        epoch: int,
        trained: int,
        layout: int = 0,
        incarnation: int = 0,
        sequence: int = 0,
    ) -> PushMessage:
        """Build a message from an exchange that a group side needs; for the other arguments see `PushMessage`."""
        return cls(
            layout=layout,
            optimizer=optimizer,
            read_at=need.read_at,
            present=present,
            hyperparameters=tuple([dict(group) for group in need.hyperparameters]),
            epoch=epoch,
            trained=trained,
            nbytes=nbytes,
            note=need.note,
            pull=need.pull,
            incarnation=incarnation,
            sequence=sequence,
            fragment=-1 if need.fragment is None else need.fragment,
        )


class AverageMessage(Message, tag="Average", frozen=True, kw_only=True):
    """A group's own weights, answered with the mean of all groups' weights once all have arrived. Payload follows.

    Attributes:
        request: as in `PushMessage`.
        absent: indices of the parameters that the payload leaves out, because this group has them frozen as the server
            has.
    """

    optimizer: int
    nbytes: int
    request: int = 0
    absent: tuple[int, ...] = ()


class FetchMessage(Message, tag="Fetch", frozen=True, kw_only=True):
    """A request for the master weights of one optimizer, with the group's trained batches, as in `PushMessage`."""

    optimizer: int
    epoch: int = -1
    trained: int = 0
    request: int = 0


class Weights(Message, frozen=True, kw_only=True):
    """The master weights, or the method's other answer; the payload follows.

    Attributes:
        clock: clock of this optimizer.
        staleness: staleness of the answered push; -1 for a fetch.
        applied: False if the push was not finite and was refused; then these are the master weights.
        refused_in_row: consecutive refused pushes of this group.
        repeated: whether the push had arrived before and was not applied again; then these are the master weights.
        progress: positions of the epoch trained by all groups.
        stop: as in `LeaveEpoch`.
        fragment: fragment of the answered push.
        validations: number of complete validations, as counted by `ClaimValidation`.
        groups: number of participating groups, if groups join the run on their own; otherwise 0.
    """

    optimizer: int
    clock: int
    staleness: int
    applied: bool
    refused_in_row: int
    progress: int
    stop: str
    nbytes: int
    note: float = 0.0
    repeated: bool = False
    fragment: int = -1
    validations: int = 0
    groups: int = 0
