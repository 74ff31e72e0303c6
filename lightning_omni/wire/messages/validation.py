"""Messages of validations that one group evaluates for all."""

from __future__ import annotations

from lightning_omni.wire.codec import Packed
from lightning_omni.wire.messages.base import Message


class ClaimValidation(Message, frozen=True, kw_only=True):
    """A group's report that it has passed ``passed`` validation points of the epoch; it waits for no other group."""

    epoch: int
    generation: int
    passed: int


class ValidationClaimed(Message, frozen=True, kw_only=True):
    """The number of the validation that the group is to evaluate, from 1; 0 if none."""

    number: int


class AskValidations(Message, frozen=True, kw_only=True):
    """A request for the number of complete validations."""


class Validations(Message, frozen=True, kw_only=True):
    """The number of complete validations, and whether a point of this epoch was passed without one."""

    complete: int
    is_missed: bool


class ReleaseVersion(Message, frozen=True, kw_only=True):
    """A report that validations up to this number need no further saves, so their stored versions may be deleted."""

    number: int


class VersionReleased(Message, frozen=True, kw_only=True):
    """The answer to `ReleaseVersion`."""


class PublishEvaluation(Message, frozen=True, kw_only=True):
    """The result of the validation assigned to a group. The tensors follow as payload.

    Attributes:
        packed: ``{"metrics": ..., "buffers": {name: tensor}, "steps": ...}``, for the other ranks.
    """

    number: int
    packed: Packed
    nbytes: int


class EvaluationPublished(Message, frozen=True, kw_only=True):
    """The answer to `PublishEvaluation`."""


class ReadEvaluation(Message, frozen=True, kw_only=True):
    """A request for the result of a validation."""

    number: int


class EvaluationResult(Message, frozen=True, kw_only=True):
    """The result of a validation, as in `PublishEvaluation`; the tensors follow. It is void if its group is gone."""

    packed: Packed
    nbytes: int
    is_void: bool = False
