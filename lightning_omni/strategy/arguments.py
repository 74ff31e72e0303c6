"""What a constructor was given: names that it does not know, and values of the wrong kind or out of range.

Nothing here knows what an argument is for. Each message names it as the user wrote it, and says what to pass instead.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from numbers import Integral, Real
from typing import Any, TypeVar

from torch.nn.parallel import DistributedDataParallel

from lightning_omni.errors import ConfigurationError, UnknownArgument
from lightning_omni.methods import Method

_Init = TypeVar("_Init", bound=Callable[..., None])
_OF_LIGHTNING = ("module", "device_ids")
"""What Lightning passes to DistributedDataParallel by itself."""


_NONE: Mapping[str, Any] = {}


def refuse_unknown(
    owner: str, given: Mapping[str, Any], known: Iterable[str], others: Mapping[str, Any] = _NONE
) -> None:
    """Refuses keyword arguments that there are none of.

    Args:
        owner: who was given them.
        given: the keyword arguments.
        known: names of its own.
        others: names of what it passes on, by whose they are.

    Raises:
        UnknownArgument: one is not among them; the message has the name that it is nearest to.
    """
    own = list(known)
    names = [*own, *chain.from_iterable(others.values())]
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            takes = ", ".join([*own, *(f"and what {whose} takes" for whose in others)])
            meant = f"did you mean {near[0]}={value!r}?" if near else f"it takes {takes}"
            raise UnknownArgument(f"{owner}({name}={value!r}): there is no argument {name}; {meant}")


def refuses_unknown(init: _Init) -> _Init:
    """For a constructor: a keyword argument that it does not take is refused with the one that was meant."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        refuse_unknown(type(self).__name__, options, known)
        init(self, *args, **options)

    return checked  # type: ignore[return-value]


def refuse_unknown_of_ddp(strategy: Any, own: type, given: Mapping[str, Any]) -> None:
    """Refuses what neither a strategy, nor the DDPStrategy that it is, nor DistributedDataParallel takes.

    DDPStrategy passes what it does not know to DistributedDataParallel, which is made much later, on every rank.

    Args:
        strategy: whose constructor is running.
        own: the class whose constructor took ``given`` as the rest.
        given: the rest.

    Raises:
        UnknownArgument: an argument is not known; the message has the one that was meant.
        ConfigurationError: an argument is Lightning's to pass.
    """
    base = next(each for each in _after(type(strategy), own) if "__init__" in vars(each))
    ddp = [name for name in _parameters(DistributedDataParallel) if name not in _OF_LIGHTNING]
    for name in _OF_LIGHTNING:
        if name in given:
            raise ConfigurationError(
                f"{name}={given[name]!r}: Lightning passes it to DistributedDataParallel; leave it"
            )
    passed_on = {base.__name__: [*_parameters(base), *ddp]}
    refuse_unknown(type(strategy).__name__, given, _parameters(own), passed_on)


def check_strategy(
    method: object,
    server: object,
    host: object,
    heartbeat_timeout: object,
    refusals: object,
    merged: object,
    record: object,
) -> None:
    """Refuses arguments of OmniStrategy that are of the wrong kind; whoever uses them checks what they mean.

    Raises:
        ConfigurationError: an argument is of another kind; the message names it.
    """
    text = (str, type(None))
    check_kind("method", method, (str, Method), 'a name, as "hardsync", or a value, as methods.DiLoCo(period=50)')
    check_kind("server", server, text, 'the address of a server, as "tcp://host:port", or None')
    check_kind("host", host, text, "an address, or None")
    check_number("heartbeat_timeout", heartbeat_timeout, "seconds, at least 2")
    check_whole("refusals", refusals, "a number of pushes, 1 or more", low=1)
    check_kind("merged", merged, text, "the name of a submodule, or None")
    check_kind("record", record, (*text, os.PathLike), "a file, or None")


def _after(kind: type, own: type) -> tuple[type, ...]:
    order = kind.__mro__
    return order[order.index(own) + 1 :]


def _parameters(kind: type) -> list[str]:
    """Names of all that a constructor takes by name."""
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return [each.name for each in parameters if each.kind not in collected and each.name != "self"]


# --- Values -----------------------------------------------------------------------------------------------------------


def check_number(name: str, value: Any, what: str, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuses what is no number from ``low`` to ``high``: text, truth values and NaN, too.

    Args:
        name: of the argument.
        value: that was passed.
        what: to pass instead, in words.
        low: the least.
        high: the largest.

    Raises:
        ConfigurationError: it is none.

    Example:
        >>> check_number("target", 0.88, "a number")
        >>> check_number("target", "0.88", "a number")
        Traceback (most recent call last):
        lightning_omni.errors.ConfigurationError: target='0.88': pass a number
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise ConfigurationError(f"{name}={value!r}: pass {what}")


def check_whole(name: str, value: Any, what: str, low: int = 0, high: int | None = None) -> None:
    """Refuses what is no whole number from ``low`` to ``high``; see `check_number`.

    Args:
        name: of the argument.
        value: that was passed.
        what: to pass instead, in words.
        low: the least.
        high: the largest; None if there is none.

    Raises:
        ConfigurationError: it is none.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        raise ConfigurationError(f"{name}={value!r}: pass {what}")


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> None:
    """Refuses what is of another class.

    Args:
        name: of the argument.
        value: that was passed.
        kinds: classes that it may be of.
        what: to pass instead, in words.

    Raises:
        ConfigurationError: it is of none of them.
    """
    if not isinstance(value, kinds):
        raise ConfigurationError(f"{name}={value!r}: pass {what}")
