"""Joining: groups that come on their own, each with a torch.distributed world of its own, while the run goes on.

Rule 1: the server gives ranks their numbers; the group that asks first begins the run, with whatever it was told.
Rule 2: a group joins between two synchronization points of the others, when they have parted and what it is given was
stored since; else it would have to come to collectives in the midst of which the others are, or to which they were
called without it. Until then it waits.
Rule 3: it has a batch from the moment on at which it has joined. With none it would take the epoch for over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import Packed, check_specs
from lightning_omni.protocol.journal import NumberedEntry
from lightning_omni.protocol.roster import TRAINED_TO_ITS_END
from lightning_omni.protocol.run_context import RunContext
from lightning_omni.protocol.service import Out, Payload, Sender, Service, as_tensor
from lightning_omni.protocol.synchronization import Synchronization

Admit = Callable[[Sender, m.Join, Payload], list[Out]]
"""Takes a group in at once: `lightning_omni.protocol.membership.Membership.join`."""


class Joining(Service):
    """Takes groups in that come on their own.

    Args:
        run: the run.
        synchronization: when the groups synchronized last.
        random: draws that many random bytes.
        admit: takes a group in.
    """

    def __init__(
        self, run: RunContext, synchronization: Synchronization, random: Callable[[int], bytes], admit: Admit
    ) -> None:
        self._roster, self._epochs, self._journal = run.roster, run.epochs, run.journal
        self._servers, self._limits = run.servers, run.limits
        self._synchronization, self._random, self._admit = synchronization, random, admit
        self._waiting: dict[int, tuple[Sender, m.Join]] = {}
        self._stored: tuple[Packed, Tensor] | None = None
        self._stored_at = -1
        self._called = (-1, 0)  # to validations, when that was stored

    # --- Messages ----------------------------------------------------------------------------------------------------

    def enlist(self, sender: Sender, message: m.Enlist, payload: Payload) -> list[Out]:
        """A group wants numbers for its ranks."""
        first, announced = self._roster.enlist(sender.peer, message.ranks, self._random(8).hex())
        if announced:
            self._journal.note(NumberedEntry(first + message.ranks))
        run = self._roster.run or self._roster.numbers.claimed
        silence = self._limits.silence_of_connections
        enlisted = m.Enlisted(run=run, first=first, announced=announced, silence=silence)
        return [Out(sender.peer, m.CONTROL, enlisted)]

    def ask(self, sender: Sender, message: m.Join, payload: Payload) -> list[Out]:
        """Ranks that came late want to be a group; answered when they are."""
        if not self._roster.joining or self._servers.number:  # the server that coordinates has taken it in
            return self._admit(sender, message, payload)
        self._waiting[sender.rank] = sender, message
        return self.resolve_pending()

    def check_state(self, sender: Sender, message: m.StoreRunState) -> int:
        """Bytes of what is stored."""
        check_specs(message.packed.specs, message.nbytes)
        return message.nbytes

    def store(self, sender: Sender, message: m.StoreRunState, payload: Payload) -> list[Out]:
        """The groups have parted, and this is what a further one is given."""
        self._stored = message.packed, as_tensor(payload)
        self._stored_at, self._called = self._synchronization.completed, self._epochs.called
        self._roster.can_go_on = True
        self._epochs.validations.give()
        self._journal.is_due = True
        return [Out(sender.peer, m.DATA, m.RunStateStored())]

    def read(self, sender: Sender, message: m.ReadRunState, payload: Payload) -> list[Out]:
        """A group that has joined reads it."""
        if self._stored is None:
            raise Refused("state", "nothing was stored for groups that join")
        packed, buffer = self._stored
        return [Out(sender.peer, m.DATA, m.StoredRunState(packed=packed, nbytes=buffer.numel()), (buffer,))]

    def state(self) -> dict[str, Any] | None:
        if self._stored is None:
            return None
        packed, buffer = self._stored
        stored = {"packed": msgspec.msgpack.encode(packed), "buffer": buffer}
        return {**stored, "at": self._stored_at, "called": list(self._called)}

    def load(self, state: dict[str, Any]) -> None:
        self._stored = msgspec.msgpack.decode(state["packed"], type=Packed), state["buffer"].clone()
        self._stored_at, self._roster.can_go_on = state["at"], True
        epoch, times = state.get("called", self._epochs.called)  # which earlier releases did not save
        self._called = epoch, times

    # --- What others wait for ----------------------------------------------------------------------------------------

    def resolve_pending(self) -> list[Out]:
        out: list[Out] = []
        for rank, (sender, message) in list(self._waiting.items()):
            if rank in self._roster.gone:
                del self._waiting[rank]
            elif reason := self._over:
                del self._waiting[rank]
                out.append(Out(sender.peer, m.CONTROL, m.RefusedMessage(code="over", reason=reason)))
            elif self._is_open:
                del self._waiting[rank]
                out += self._take_in(sender, message)
        return out

    @property
    def _over(self) -> str:
        """Why no group can join any more, or an empty string."""
        if self._roster.finished:
            return TRAINED_TO_ITS_END
        if not self._roster.live and not self._roster.can_go_on:
            return "the group that was to begin it is gone; start this one again, and it begins another"
        return ""

    @property
    def _is_open(self) -> bool:
        """Whether a group may join now."""
        book = self._epochs.book
        if self._stored is None or book is None:
            return False
        if not self._roster.live:  # no rank trains whose collectives it could come into, or will stop as was said
            return True
        return self._have_parted and not book.is_drained and not self._epochs.stop

    @property
    def _have_parted(self) -> bool:
        """Whether the groups have not come together since that was stored, nor were called to, nor has one begun to."""
        synchronization = self._synchronization
        is_since = self._stored_at == synchronization.completed and self._called == self._epochs.called
        return is_since and not synchronization.contributed

    def _take_in(self, sender: Sender, message: m.Join) -> list[Out]:
        try:
            return self._admit(sender, message, b"")
        except ProtocolError as error:
            code = error.code if isinstance(error, Refused) else "protocol"
            return [Out(sender.peer, m.CONTROL, m.RefusedMessage(code=code, reason=str(error)))]
