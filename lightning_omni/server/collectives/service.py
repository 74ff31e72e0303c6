"""CollectiveService points of all live ranks on the control channel, and transfers that are too large for it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from torch import Tensor

from lightning_omni.errors import MalformedMessage, ProtocolError, Refused
from lightning_omni.server.collectives.collective import Collectives
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Peer, Sender, Service, as_tensor, bytes_of, nbytes_of
from lightning_omni.server.training import Training
from lightning_omni.wire import messages as m
from lightning_omni.wire.journal import GatheredEntry

UPLOADED_ELSEWHERE = "uploaded"
"""Code of a refusal: this server has not received the rank's bytes; an earlier server may have."""

Forward = Callable[[Sender, bytes, Payload], list[Out]]
"""A function that handles a control message which did not arrive on the control channel."""


class CollectiveService(Service):
    """The service that gathers contributions of all live ranks.

    Args:
        run: the run.
        training: service that is notified of groups that wait meanwhile.
        forward: handles control messages that arrived on the data channel.

    Attributes:
        completed: number of completed synchronization points.
    """

    def __init__(self, run: RunContext, training: Training, forward: Forward) -> None:
        self._roster, self._journal, self._epochs = run.roster, run.journal, run.epochs
        self._training = training
        self._forward = forward
        self.completed = 0
        self._collectives = Collectives()
        self._uploads: dict[int, Payload] = {}
        self._gathered = GatheredEntry(-1, (), ())  # the last completed collective

    @property
    def contributed(self) -> set[int]:
        """Return the ranks that wait for others at a synchronization point."""
        return self._collectives.contributed

    def evict(self, group: int, lost: bool) -> list[Out]:
        self._collectives.forget(self._roster.lost)
        for rank in self._uploads.keys() & (self._roster.lost.keys() | self._roster.gone):
            del self._uploads[rank]
        return []

    def resolve_pending(self) -> list[Out]:
        out: list[Out] = []
        for number, parts in self._collectives.complete(self._roster.live) if not self._collectives.is_idle else ():
            ranks = tuple(rank for rank, _ in parts)
            # All ranks have received the previous result, or they would not be at this point.
            self._gathered = GatheredEntry(number, ranks, tuple(bytes_of(payload) for _, payload in parts))
            self.completed = number + 1
            self._journal.note(self._gathered)
            out += [self._answer(self._roster.members[rank].peer) for rank in ranks]
            for rank in ranks:
                self._training.resume(rank)
        return out

    def _answer(self, peer: Peer) -> Out:
        """Return the last completed collective as an answer; large payloads must be collected separately."""
        gathered = self._gathered
        sizes = tuple(map(len, gathered.payloads))
        must_download = max(sizes, default=0) > m.LARGEST_INLINE
        answer = m.Gathered(number=gathered.number, ranks=gathered.ranks, sizes=sizes, must_download=must_download)
        return Out(peer, m.CONTROL, answer, () if must_download else gathered.payloads)

    def state(self) -> bytes:
        return msgspec.msgpack.encode((self.completed, self._gathered))

    def load(self, state: bytes) -> None:
        self.completed, self._gathered = msgspec.msgpack.decode(state, type=tuple[int, GatheredEntry])

    def redo(self, gathered: GatheredEntry) -> None:
        self.completed, self._gathered = gathered.number + 1, gathered

    def contribute(self, sender: Sender, message: m.Contribute, payload: Payload) -> list[Out]:
        """Record a rank's contribution to a synchronization point."""
        if message.number == self._gathered.number and sender.rank in self._gathered.ranks:  # the answer was lost
            return [self._answer(sender.peer)]
        if message.uploaded:
            payload = self._take_upload(sender.rank)
        where, is_stopping = message.where or "", bool(self._epochs.stop)
        self._collectives.contribute(message.number, sender.rank, message.what, payload, where, is_stopping)
        return self._training.idle(sender.rank)

    def check_upload(self, sender: Sender, message: m.Upload) -> int:
        """Check the size of bytes for one synchronization point, and return it."""
        return _checked_size(message.nbytes, m.LARGEST_UPLOAD)

    def upload(self, sender: Sender, message: m.Upload, payload: Payload) -> list[Out]:
        """Store bytes that the rank's next message on the control channel refers to."""
        self._uploads[sender.rank] = payload
        return [Out(sender.peer, m.DATA, m.Uploaded())]

    def read_upload(self, sender: Sender, message: m.ReadUpload, payload: Payload) -> list[Out]:
        """Handle a rank's stored bytes as a control message."""
        uploaded = self._take_upload(sender.rank)
        data = uploaded.numpy().tobytes() if isinstance(uploaded, Tensor) else uploaded
        return self._forward(sender, data, payload)

    def download(self, sender: Sender, message: m.Download, payload: Payload) -> list[Out]:
        """Answer with the payloads of the last synchronization point."""
        if message.number != self._gathered.number:
            raise ProtocolError(f"there is nothing to collect of collective {message.number}")
        parts = tuple(as_tensor(payload) for payload in self._gathered.payloads)
        return [Out(sender.peer, m.DATA, m.Downloaded(nbytes=sum(map(nbytes_of, parts))), parts)]

    def check_long(self, sender: Sender, message: m.LargeMessage) -> int:
        """Check the size of a message that is too large for one frame, and return it. The transport assembles it."""
        return _checked_size(message.nbytes, m.LONGEST)

    def _take_upload(self, rank: int) -> Payload:
        if rank not in self._uploads:
            raise Refused(UPLOADED_ELSEWHERE, f"rank {rank} has uploaded nothing over its data connection")
        return self._uploads.pop(rank)


def _checked_size(nbytes: int, largest: int) -> int:
    if not 0 < nbytes <= largest:
        raise MalformedMessage(f"{nbytes} bytes are announced, and at most {largest} may come")
    return nbytes
