"""Messages of training: weights, gradients, changes of the parameter groups, merged heads, and snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from lightning_omni.wire.codec import Packed
from lightning_omni.wire.messages.base import Message
from lightning_omni.wire.steps_and_samples import Progress

# --- Weights and gradients --------------------------------------------------------------------------------------------


class UploadWeights(Message, frozen=True, kw_only=True):
    """The recorder's upload of master weights and optimizers."""

    packed: Packed
    nbytes: int
    request: int = 0


class WeightsUploaded(Message, frozen=True, kw_only=True):
    """The answer to `UploadWeights`."""


class Restructure(Message, frozen=True, kw_only=True):
    """A group's change of parameter groups, or added parameters; see `lightning_omni.wire.layout.read_structure`."""

    optimizer: int
    packed: Packed
    nbytes: int


class Restructured(Message, frozen=True, kw_only=True):
    """The answer to `Restructure`: the group's layout version, and the master weights that are new to it."""

    optimizer: int
    layout: int
    nbytes: int


class PushMessage(Message, tag="Push", frozen=True, kw_only=True):
    """A push: a gradient, weights or a change of weights, as far as tensors are present.

    ``read_at``, ``hyperparameters``, ``note`` and ``pull`` are as in `lightning_omni.methods.Exchange`.

    Attributes:
        present: for each parameter, whether it has a tensor.
        epoch: the epoch; -1 if its data is not leased, and at other servers than the coordinating one.
        trained: number of the group's batches of the epoch that are trained so far, those of this push included.
        layout: version of the group's layout.
        incarnation: the group's incarnation; pushes of an earlier one are refused.
        sequence: number of this incarnation's push to this optimizer, from 1, each counted once; 0 at a merged head.
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
        return None if self.fragment < 0 else self.fragment


class AverageMessage(Message, tag="Average", frozen=True, kw_only=True):
    """A group's own weights, answered by the mean of all groups' finite ones once all have arrived.

    ``absent`` parameters are frozen, equal the server's, and are not in the payload.
    """

    optimizer: int
    nbytes: int
    request: int = 0
    absent: tuple[int, ...] = ()


class FetchMessage(Message, tag="Fetch", frozen=True, kw_only=True):
    """A request for one optimizer's master weights, with the group's trained batches as in `PushMessage`."""

    optimizer: int
    epoch: int = -1
    trained: int = 0
    request: int = 0


class Weights(Message, frozen=True, kw_only=True):
    """The master weights, or the method's other answer.

    Attributes:
        staleness: staleness of the answered push; -1 if it was refused, and for other requests.
        applied: False if the push was refused, or own weights are not in the mean. Refused and repeated pushes get the
            master weights.
        repeated: whether the push had been counted before.
        progress: positions of the epoch trained by all groups.
        stop: as in `LeaveEpoch`.
        validations: complete validations, as in `Validations`.
        groups: participating groups, if groups join the run on their own; otherwise 0.
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


# --- Merged heads, whose submodule runs at the server -----------------------------------------------------------------


class HeadForward(Message, frozen=True, kw_only=True):
    """A batch for the merged head ``optimizer``.

    Attributes:
        packed: ``[arguments, keyword arguments]`` of the submodule.
        training: whether each of its submodules, itself first, is in training mode.
        autocast: dtype of automatic mixed precision, if any.
        exclusive: whether `HeadBackward` or `HeadRelease` follows; the answer then waits for access.
    """

    optimizer: int
    packed: Packed
    nbytes: int
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    autocast: str = ""
    exclusive: bool = True


class HeadOutput(Message, frozen=True, kw_only=True):
    packed: Packed
    nbytes: int


class HeadBackward(Message, frozen=True, kw_only=True):
    """The gradients of a head's output, which step the head and end the access.

    Attributes:
        packed: one gradient for each tensor of the output; None where the loss does not depend on it.
        hyperparameters: as in `Exchange`, of the parameter groups that hold weights of the head.
        scale: factor for the gradients of the head's weights.
        clip: largest norm or magnitude of these; 0 clips nothing.
        trained: as in `PushMessage`, with this batch, which only the push of the body counts.
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
    """The gradients of a head's inputs, one or None for each tensor.

    ``applied`` is False if those of its weights were not finite, and the head was not stepped.
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


# --- Consistent snapshots of the run ----------------------------------------------------------------------------------


class SnapshotId(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent state of the server, described by the counts of everything handled before it.

    Several servers must agree on ``pushes``.

    Attributes:
        clocks: updates in the weights of each optimizer.
        pushes: each group's pushes to all optimizers since groups were formed, also those refused or waiting for
            others.
        epoch: the current or last epoch; -1 if none was leased.
        trained: its trained ranges, in order.
    """

    clocks: tuple[int, ...] = ()
    pushes: dict[int, int] = {}
    epoch: int = -1
    total: int = 0
    trained: tuple[tuple[int, int], ...] = ()

    def progress(self, known: Progress) -> Progress:
        """Return the run's progress at this cut; a rank's own count inside the epoch is approximate.

        Example:
            >>> from lightning_omni.wire.steps_and_samples import ReferenceBatch
            >>> cut = SnapshotId(epoch=2, total=320, trained=((0, 64), (96, 128)))
            >>> cut.progress(Progress(ReferenceBatch(4, 8), batches=10, epochs=2, samples=64)).samples
            96
        """
        if self.epoch != known.epochs:
            return known
        return replace(known, samples=sum(stop - start for start, stop in self.trained))


class GroupState(Message, frozen=True, kw_only=True):
    """The state that only this group holds, for the next snapshot."""

    packed: Packed
    nbytes: int


class GroupStateStored(Message, frozen=True, kw_only=True):
    """The answer to `GroupState`."""


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """A request for a consistent snapshot of weights, optimizer states and clocks.

    Attributes:
        version: number of a validation, for the state at the first request with this number; 0 or that of a saved one
            for the current state.
    """

    with_state: bool = True
    request: int = 0
    version: int = 0


class Snapshot(Message, frozen=True, kw_only=True):
    """A consistent snapshot, described by its ``cut``."""

    cut: SnapshotId
    packed: Packed
    nbytes: int
