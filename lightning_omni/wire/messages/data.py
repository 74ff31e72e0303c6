"""Messages of an epoch's data: its plan, leases of batches, and validations."""

from __future__ import annotations

import msgspec

from lightning_omni.wire.codec import Packed
from lightning_omni.wire.messages.base import Message

# --- Leases -----------------------------------------------------------------------------------------------------------


Spans = tuple[tuple[int, int], ...]
"""Ranges of positions, in order."""


class EpochPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of an epoch's data, which every rank has before the first batch. Counts are positions.

    Attributes:
        total: length of the epoch's permutation (samples, padded as by DistributedSampler).
        batch_size: samples in one rank's batch.
        ranks_per_batch: ranks of a group that compute on the same samples together.
        budget: positions to train, with those ``trained`` before, at most ``total``.
        validate_every: distance of validations inside the epoch; 0 for none.
        validate_offset: positions that count towards the first of them already.
        trained: ranges that a resumed run had trained before.
        later: positions to train in later epochs; None for no limit.
    """

    epoch: int
    total: int
    batch_size: int
    budget: int
    validate_every: int = 0
    validate_offset: int = 0
    trained: Spans = ()
    ranks_per_batch: int = 1
    later: int | None = None


_IN_WORDS = {
    "total": "samples of an epoch",
    "batch_size": "batch size of the training loader",
    "ranks_per_batch": "ranks that compute on the same samples",
    "budget": "samples to train in this epoch",
    "validate_every": "samples between two validations, 0 for none",
    "validate_offset": "samples since the last validation",
    "trained": "samples of this epoch that a checkpoint has trained",
    "later": "samples to train in later epochs",
}
"""The fields that may differ between ranks, causes before consequences."""


def plan_difference(mine: EpochPlan, theirs: EpochPlan) -> tuple[str, str, str] | None:
    """Return in words what differs first between two plans of an epoch, and both values; None if they are equal.

    Example:
        >>> plan = EpochPlan(epoch=0, total=64, batch_size=4, budget=64)
        >>> plan_difference(plan, msgspec.structs.replace(plan, batch_size=8, budget=60))
        ('batch size of the training loader', '4', '8')
    """
    for name, words in _IN_WORDS.items():
        own, other = getattr(mine, name), getattr(theirs, name)
        if own != other:
            return words, _shown(own), _shown(other)
    return None


def _shown(value: Spans | int | None) -> str:
    if isinstance(value, tuple):
        return str(sum(stop - start for start, stop in value))
    return "no limit" if value is None else str(value)


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """A group batch: positions ``start .. stop-1``, and its validation interval."""

    start: int
    stop: int
    interval: int


class OpenEpoch(Message, frozen=True, kw_only=True):
    """A rank's request to open an epoch; all ranks must agree on the plan."""

    plan: EpochPlan


class EpochOpened(Message, frozen=True, kw_only=True):
    epoch: int


class DrawBatches(Message, frozen=True, kw_only=True):
    """A request for a group's batches from ``number`` on; ``trained`` of those before are trained."""

    epoch: int
    generation: int
    number: int
    trained: int = 0


class BatchesDrawn(Message, frozen=True, kw_only=True):
    """The batches from ``number`` on; none if none is free for the group now."""

    number: int
    batches: tuple[Batch, ...]


class AskNext(Message, frozen=True, kw_only=True):
    """A rank's request for the next decision: its group has trained its batches of this validation interval."""

    epoch: int
    generation: int
    trained: int
    interval: int


class Next(Message, frozen=True, kw_only=True):
    """The answer to `AskNext`.

    Attributes:
        next: ``"more"`` (draw again), ``"validate"`` (all groups wait: validate, then continue),
            ``"over"`` (the epoch is complete), ``"over:validate"`` (and a validation was due in its last batches), or
            ``"stop:..."`` (see `LeaveEpoch`).
    """

    next: str


STOPS = ("", "validate", "end", "skip")
"""The values of ``stop`` in `LeaveEpoch`."""


class LeaveEpoch(Message, frozen=True, kw_only=True):
    """A group's early departure from the epoch; its untrained batches return to the pool.

    Attributes:
        stop: ``""`` if the others continue. Otherwise all end the run, ``"validate"`` (after a validation, as when a
            callback requests the stop) or ``"end"`` (without, as when max_steps is reached), or only the epoch,
            ``"skip"``.
    """

    epoch: int
    generation: int
    trained: int
    stop: str = ""


class EpochLeft(Message, frozen=True, kw_only=True):
    """The answer to `LeaveEpoch`."""


# --- Validations that one group evaluates for all ---------------------------------------------------------------------


class ClaimValidation(Message, frozen=True, kw_only=True):
    """A report that a group has passed ``passed`` validation points of the epoch; it waits for no other group."""

    epoch: int
    generation: int
    passed: int


class ValidationClaimed(Message, frozen=True, kw_only=True):
    """The number of the validation that the group must evaluate, from 1; 0 for none."""

    number: int


class AskValidations(Message, frozen=True, kw_only=True):
    """A request for `Validations`."""


class Validations(Message, frozen=True, kw_only=True):
    """Number of complete validations, and whether a point of this epoch was passed without one, or with a void one."""

    complete: int
    is_missed: bool


class ReleaseVersion(Message, frozen=True, kw_only=True):
    """A report that validations up to this number need no further saves; their stored versions may be deleted."""

    number: int


class VersionReleased(Message, frozen=True, kw_only=True):
    """The answer to `ReleaseVersion`."""


class PublishEvaluation(Message, frozen=True, kw_only=True):
    """The result of a group's validation.

    Attributes:
        packed: ``{"metrics": ..., "buffers": {name: tensor}, "steps": ...}``, for the other ranks.
    """

    number: int
    packed: Packed
    nbytes: int


class EvaluationPublished(Message, frozen=True, kw_only=True):
    """The answer to `PublishEvaluation`."""


class ReadEvaluation(Message, frozen=True, kw_only=True):
    number: int


class EvaluationResult(Message, frozen=True, kw_only=True):
    """The result of a validation, as in `PublishEvaluation`; void if its group or its weights are gone."""

    packed: Packed
    nbytes: int
    is_void: bool = False
