"""The package's own errors, as one tree, and the words of errors.

    OmniError
    ├── ConfigurationError (also a ValueError)   an argument or a call is wrong
    │   ├── UnknownArgument (also a TypeError)   no argument has that name
    │   └── UnsupportedError                     a feature is not supported
    ├── ConnectionLost                           the parameter server cannot be reached, or has exited
    ├── ProtocolError                            a message or an event broke the protocol
    │   ├── MalformedMessage                     ... it could not be read or encoded
    │   └── Refused                              ... the other side refused it; ``code`` is the reason
    ├── RankLost                                 this rank's group was evicted or cannot go on, or the run is over
    │   └── Evicted                              ... the run continues, and the group may rejoin as a new one
    ├── CollectiveMismatch                       ranks called different collectives
    ├── StepFailed                               a step at the server failed
    └── NonFiniteGradients                       gradients stayed NaN or infinite for too long

Look for the cause of a :class:`ConfigurationError` at the caller first, of a :class:`ProtocolError` at the other
process, of a :class:`ConnectionLost` at the machine or network. :doc:`/reference/errors` has remedies.
"""

from __future__ import annotations

import re


class OmniError(RuntimeError):
    """The base class of all errors of this package."""


class ConfigurationError(OmniError, ValueError):
    """A wrong argument, file, environment or call. Most messages have a remedy."""


class UnknownArgument(ConfigurationError, TypeError):
    """An argument of an unknown name. The message has the name or value to pass, or all names."""


class UnsupportedError(ConfigurationError):
    """A feature that is not supported, mostly across groups. The message has the reason and mostly a remedy."""


class ConnectionLost(OmniError):
    """A parameter server that did not answer in time or has exited, or a connection that has ended."""


class ProtocolError(OmniError):
    """A message, a call or an event of a record that the protocol does not allow at this point.

    `MalformedMessage` and `Refused` are kinds of it.
    """


class MalformedMessage(ProtocolError):
    """A message that cannot be encoded, or whose bytes do not decode to a message of this protocol."""


class Refused(ProtocolError):
    """A request that the other process refused.

    Attributes:
        code: the reason for programs (``"version"``, ``"fingerprint"``, ``"key"``, ...).
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class RankLost(OmniError):
    """The end of this rank's run: its group was evicted or cannot go on, the run is over, or needed ranks are lost."""


class Evicted(RankLost):
    """The eviction of this rank's group after silence, a stall or a death; it may rejoin as a new group."""


class CollectiveMismatch(OmniError):
    """Different collectives on live ranks; the message names the ranks and their calls.

    The server raises it and ends the run; ranks raise a :class:`RankLost` with its message.
    """


class StepFailed(OmniError):
    """A step at the parameter server failed for which several groups wait; the server ends the run."""


class NonFiniteGradients(OmniError):
    """Too many pushes in a row that the server refused because their gradients were NaN or infinite."""


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


INTERRUPTED = "was interrupted (Ctrl-C)"
"""The `end_reason` of a KeyboardInterrupt, which a terminal sends to all ranks."""


def end_reason(error: BaseException) -> str:
    """Return how an error ends a rank, to follow the rank's name.

    Example:
        >>> end_reason(ValueError("no such class")), end_reason(KeyboardInterrupt())
        ('failed: ValueError: no such class', 'was interrupted (Ctrl-C)')
    """
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{_FAILED}{describe(error)}"


_FAILED = "failed: "


def is_failure_reason(reason: str) -> bool:
    """Return whether an exception ended a rank, not its death, a cut link or a person who evicted its group.

    Example:
        >>> is_failure_reason("rank 3 failed: ValueError"), is_failure_reason("rank 3 was interrupted (Ctrl-C)")
        (True, True)
        >>> is_failure_reason("the process of rank 3 ended with signal SIGKILL")
        False
    """
    return re.match(rf"rank \d+ ({_FAILED}|{re.escape(INTERRUPTED)})", reason) is not None


# --- Text from outside ------------------------------------------------------------------------------------------------

LONGEST = 200
"""The most characters that are quoted of a text."""


def quoted(text: str) -> str:
    r"""Return the text with all unprintable characters escaped, cut after `LONGEST` characters.

    Example:
        >>> quoted("ok" + chr(10) + "WARNING forged")
        'ok\\nWARNING forged'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST and len(text) <= LONGEST else f"{shown[:LONGEST]}…"
