"""Every error that lightning-omni raises, as one tree.

    OmniError
    ├── ConfigurationError (also a ValueError)   an argument is wrong; nothing was started
    │   ├── UnknownArgument (also a TypeError)   there is no argument of that name
    │   └── UnsupportedError                     a feature that asynchronous training cannot serve
    ├── ConnectionLost                           the parameter server cannot be reached, or went away
    ├── ProtocolError                            a message broke the protocol
    │   ├── MalformedMessage                     ... it could not be read
    │   └── Refused                              ... the other side refused it; ``code`` says why
    ├── RankLost                                 this rank's group was evicted, or the run is over
    │   └── Evicted                              ... the run continues, and the group may join it again as a new one
    ├── CollectiveMismatch                       ranks called different collectives
    └── NonFiniteGradients                       gradients stayed NaN or infinite for too long

The class says where to look for the cause: a :class:`ConfigurationError` at the caller, a :class:`ProtocolError` at
the other process, a :class:`ConnectionLost` at the machine or network. docs/errors.md has remedies.
"""

from __future__ import annotations

import re


class OmniError(RuntimeError):
    """Base class of all errors of this package."""


class ConfigurationError(OmniError, ValueError):
    """An argument is wrong. The message names it and says what to pass instead."""


class UnknownArgument(ConfigurationError, TypeError):
    """There is no argument of that name. The message has the one that was probably meant."""


class UnsupportedError(ConfigurationError):
    """Something does not work across asynchronous groups. The message says why and what to do instead."""


class ConnectionLost(OmniError):
    """The parameter server did not answer in time, or its process is gone."""


class ProtocolError(OmniError):
    """A message came that the protocol does not allow at this point."""


class MalformedMessage(ProtocolError):
    """Bytes came that are not a message of this protocol."""


class Refused(ProtocolError):
    """The server refused a request.

    Attributes:
        code: a short word for programs (``"version"``, ``"fingerprint"``, ``"key"``, ...).
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class RankLost(OmniError):
    """This rank was evicted because a member of its compute group died, or because the run is over."""


class Evicted(RankLost):
    """This rank's group was evicted because one of its ranks was silent or is gone; it may join again, as a new one."""


class CollectiveMismatch(OmniError):
    """Live ranks called different collectives; the message names the ranks and what each of them called.

    It is raised at the server and ends the run; ranks see a :class:`RankLost` that carries its message.
    """


class NonFiniteGradients(OmniError):
    """The server refused too many pushes in a row because their gradients were NaN or infinite."""


def named(error: BaseException) -> str:
    """An error's class, and what it says, if anything."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


INTERRUPTED = "was interrupted (Ctrl-C)"
"""What is said of a rank that ends by a KeyboardInterrupt; of a terminal, all ranks are sent one."""


def ending(error: BaseException) -> str:
    """How a rank ends that an error ends, to be said after its name.

    Example:
        >>> ending(ValueError("no such class")), ending(KeyboardInterrupt())
        ('failed: ValueError: no such class', 'was interrupted (Ctrl-C)')
    """
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{_FAILED}{named(error)}"


_FAILED = "failed: "


def tells_of_failure(reason: str) -> bool:
    """Return whether a rank is lost because it has failed by itself: not by a death, a cut link, Ctrl-C or a person.

    Args:
        reason: of its loss.

    Example:
        >>> tells_of_failure("rank 3 failed: ValueError"), tells_of_failure("rank 3 was interrupted (Ctrl-C)")
        (True, False)
    """
    return re.match(rf"rank \d+ {_FAILED}", reason) is not None
