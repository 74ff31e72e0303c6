"""Groups that join a running run on their own, each with its own torch.distributed world.

Rule 1: the server assigns rank numbers; the first group to request them begins the run, with its own settings.
Rule 2: a group joins between two synchronization points of the others, after they have parted and the state for it was
stored. Otherwise it would enter collectives that the others have begun or were called to without it. Until then it
waits.
Rule 3: it holds a batch as soon as it joins. Without one it would consider the epoch over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.server.collectives import CollectiveService
from lightning_omni.server.membership.roster import TRAINED_TO_ITS_END
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Sender, Service, as_tensor
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, check_specs
from lightning_omni.wire.journal import NumberedEntry

Admit = Callable[[Sender, m.Join, Payload], list[Out]]
"""A function that admits a group at once: `lightning_omni.server.membership.service.Membership.join`."""


class Joining(Service):
    """The service that admits groups that join on their own.

    Args:
        run: the run.
        synchronization: synchronization points of the run.
        random: returns a number of random bytes.
        admit: admits a group.
    """

    def __init__(
        self, run: RunContext, synchronization: CollectiveService, random: Callable[[int], bytes], admit: Admit
    ) -> None:
        self._roster, self._epochs, self._journal = run.roster, run.epochs, run.journal
        self._replication, self._limits = run.replication, run.limits
        self._collective_service, self._random, self._admit = synchronization, random, admit
        self._waiting: dict[int, tuple[Sender, m.Join]] = {}
        self._stored: tuple[Packed, Tensor] | None = None
        self._stored_at = -1
        self._called = (-1, 0)  # to validations, when the state was stored

    # --- Messages ----------------------------------------------------------------------------------------------------

    def register(self, sender: Sender, message: m.RegisterGroup, payload: Payload) -> list[Out]:
        """Assign numbers to the ranks of a group."""
        first, announced = self._roster.register(sender.peer, message.ranks, self._random(8).hex())
        if announced:
            self._journal.note(NumberedEntry(first + message.ranks))
        run = self._roster.run or self._roster.numbers.claimed
        silence = self._limits.silence_of_connections
        enlisted = m.GroupRegistered(run=run, first=first, announced=announced, silence=silence)
        return [Out(sender.peer, m.CONTROL, enlisted)]

    def ask(self, sender: Sender, message: m.Join, payload: Payload) -> list[Out]:
        """Admit a group of ranks that were not announced; it is answered once it has joined."""
        if not self._roster.joining or self._replication.number:  # the coordinating server has admitted it
            return self._admit(sender, message, payload)
        self._waiting[sender.rank] = sender, message
        return self.resolve_pending()

    def check_state(self, sender: Sender, message: m.StoreRunState) -> int:
        """Check the size of the state for joining groups, and return it."""
        check_specs(message.packed.specs, message.nbytes)
        return message.nbytes

    def store(self, sender: Sender, message: m.StoreRunState, payload: Payload) -> list[Out]:
        """Store the state for joining groups, after the groups have parted."""
        self._stored = message.packed, as_tensor(payload)
        self._stored_at, self._called = self._collective_service.completed, self._epochs.called
        self._roster.can_continue = True
        self._journal.is_due = True
        return [Out(sender.peer, m.DATA, m.RunStateStored())]

    def read(self, sender: Sender, message: m.ReadRunState, payload: Payload) -> list[Out]:
        """Send the stored state to a group that has joined."""
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
        self._stored_at, self._roster.can_continue = state["at"], True
        epoch, times = state["called"]
        self._called = epoch, times

    # --- Pending requests --------------------------------------------------------------------------------------------

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
                out += self._add_group(sender, message)
        return out

    @property
    def _over(self) -> str:
        """Return why no group can join any more, or an empty string."""
        if self._roster.finished:
            return TRAINED_TO_ITS_END
        if not self._roster.live and not self._roster.can_continue:
            return "the group that was to begin it is gone; start this one again, and it begins another"
        return ""

    @property
    def _is_open(self) -> bool:
        """Return whether a group may join now."""
        book = self._epochs.book
        if self._stored is None or book is None:
            return False
        if not self._roster.live:  # without live ranks no collective or stop is under way
            return True
        return self._have_parted and not book.is_drained and not self._epochs.stop

    @property
    def _have_parted(self) -> bool:
        """Return whether, since the state was stored, no synchronization or validation has begun."""
        synchronization = self._collective_service
        is_since = self._stored_at == synchronization.completed and self._called == self._epochs.called
        return is_since and not synchronization.contributed

    def _add_group(self, sender: Sender, message: m.Join) -> list[Out]:
        try:
            return self._admit(sender, message, b"")
        except ProtocolError as error:
            code = error.code if isinstance(error, Refused) else "protocol"
            return [Out(sender.peer, m.CONTROL, m.RefusedMessage(code=code, reason=str(error)))]
