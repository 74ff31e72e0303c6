"""The journal of decisions that ranks have received since the server's state was last saved.

When a server dies, its weights return to the last save, but decisions sent to ranks must stay valid: drawn samples,
next steps, completed collectives, lost ranks. A server that continues from the save makes the calls in the journal
again.

Rule: a call is written before the answer that follows from it leaves the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import GenericAlias, MethodType
from typing import Any, cast, get_type_hints

import msgspec
from typing_extensions import TypeVarTuple, Unpack

from lightning_omni.errors import MalformedMessage

Arguments = TypeVarTuple("Arguments")


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call of a method of the server, with its encoded arguments.

    Example:
        >>> numbers = set()
        >>> call = Call.of(numbers.add, 3)
        >>> call.method
        'set.add'
    """

    method: str
    arguments: bytes

    @classmethod
    def of(cls, method: Callable[[Unpack[Arguments]], object], *arguments: Unpack[Arguments]) -> Call:
        return cls(method.__qualname__, msgspec.msgpack.encode(arguments))

    def make(self, methods: Iterable[Callable[..., Any]]) -> Any:
        """Call the one of these methods that has the name."""
        method = next((each for each in methods if each.__qualname__ == self.method), None)
        try:
            if method is None:
                raise MalformedMessage(f"no server repeats a call of {self.method!r}")
            arguments = _decoder_of(cast(MethodType, method).__func__).decode(self.arguments)
        except msgspec.MsgspecError as error:
            raise MalformedMessage(f"a call of {self.method} has other arguments: {error}") from error
        return method(*arguments)


@cache
def _decoder_of(function: Callable[..., Any]) -> msgspec.msgpack.Decoder[tuple[Any, ...]]:
    kinds = get_type_hints(function)
    del kinds["return"]
    return msgspec.msgpack.Decoder(GenericAlias(tuple, tuple(kinds.values())))


OUTDATED = Call("", b"")
"""The entry for other weights or groups: with it in the journal, no server continues an earlier save."""


class Journal:
    """The destination of calls.

    Attributes:
        write: takes each call; None without a journal.
        is_due: whether a save is requested.
        saves: number of completed saves.
    """

    def __init__(self) -> None:
        self.write: Callable[[Call], Any] | None = None
        self.is_due = False
        self.saves = 0

    def note(self, method: Callable[[Unpack[Arguments]], object], *arguments: Unpack[Arguments]) -> None:
        if self.write is not None:
            self.write(Call.of(method, *arguments))

    def outdate(self) -> None:
        """Make earlier saves useless, and request one: other groups are formed, or other weights were uploaded."""
        self.is_due = True
        if self.write is not None:
            self.write(OUTDATED)
