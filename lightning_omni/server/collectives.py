"""Collectives of all live ranks: each contributes bytes and receives those of all.

Rule 1: a collective is complete when every *live* rank has contributed.
Rule 2: all ranks must call the same collective; two different ones at the same point end the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from torch import Tensor

from lightning_omni.errors import CollectiveMismatch, MalformedMessage, ProtocolError, Refused
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Peer, Sender, Service, as_tensor, bytes_of, nbytes_of
from lightning_omni.server.training import Training
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages.collectives import UPLOADED_ELSEWHERE

MOST_OPEN = 16
"""A rank that waits at this many collectives may not open another one."""

_OF_EACH_BATCH = (
    ". Groups train different numbers of batches, so what a hook has kept of each batch has other sizes on other ranks:"
    " gather the sizes and pad to the largest, use torch.distributed.all_gather_object, or a metric of torchmetrics"
)

_ELSEWHERE = (
    ". If ranks have data of different lengths, such as an IterableDataset each, limit_train_batches= gives all of them"
    " as many batches as the shortest has"
)


class _Contribution(NamedTuple):
    what: str
    where: str
    payload: bytes | Tensor

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class Gathering(msgspec.Struct, frozen=True, array_like=True):
    """A complete collective."""

    number: int = -1
    ranks: tuple[int, ...] = ()
    payloads: tuple[bytes, ...] = ()


Forward = Callable[[Sender, bytes, Payload], list[Out]]
"""A function that handles a control message which did not arrive on the control channel."""


class CollectiveService(Service):
    def __init__(self, run: RunContext, training: Training, forward: Forward) -> None:
        self._roster, self._journal, self._epochs = run.roster, run.journal, run.epochs
        self._training = training
        self._forward = forward
        self._open: dict[int, dict[int, _Contribution]] = {}
        self._uploads: dict[int, Payload] = {}
        self._gathered = Gathering()  # the last one

    @property
    def completed(self) -> int:
        return self._gathered.number + 1

    @property
    def contributed(self) -> set[int]:
        return {rank for present in self._open.values() for rank in present}

    def evict(self, group: int, lost: bool) -> list[Out]:
        for present in self._open.values():
            for rank in self._roster.lost.keys() & present.keys():
                del present[rank]
        for rank in self._uploads.keys() & (self._roster.lost.keys() | self._roster.gone):
            del self._uploads[rank]
        return []

    def resolve_pending(self) -> list[Out]:
        out: list[Out] = []
        live = self._roster.live if self._open else ()
        for number, present in sorted(self._open.items()):
            if not all(rank in present for rank in live):
                continue
            del self._open[number]
            ranks = tuple(sorted(present.keys() & set(live)))
            # All ranks have received the previous result, or they would not be at this point.
            self.gather(Gathering(number, ranks, tuple(bytes_of(present[rank].payload) for rank in ranks)))
            out += [self._answer(self._roster.members[rank].peer) for rank in ranks]
            for rank in ranks:
                self._training.resume(rank)
        return out

    def _answer(self, peer: Peer) -> Out:
        gathered = self._gathered
        sizes = tuple(map(len, gathered.payloads))
        must_download = max(sizes, default=0) > m.LARGEST_INLINE
        answer = m.Gathered(number=gathered.number, ranks=gathered.ranks, sizes=sizes, must_download=must_download)
        return Out(peer, m.CONTROL, answer, () if must_download else gathered.payloads)

    def state(self) -> bytes:
        return msgspec.msgpack.encode(self._gathered)

    def load(self, state: bytes) -> None:
        self._gathered = msgspec.msgpack.decode(state, type=Gathering)

    def gather(self, gathered: Gathering) -> None:
        self._gathered = gathered
        self._journal.note(self.gather, gathered)

    def contribute(self, sender: Sender, message: m.Contribute, payload: Payload) -> list[Out]:
        if message.number == self._gathered.number and sender.rank in self._gathered.ranks:  # the answer was lost
            return [self._answer(sender.peer)]
        if message.uploaded:
            payload = self._take_upload(sender.rank)
        self._contribute(message.number, sender.rank, _Contribution(message.what, message.where or "", payload))
        return self._training.idle(sender.rank)

    def _contribute(self, number: int, rank: int, mine: _Contribution) -> None:
        if number not in self._open and sum(rank in waiting for waiting in self._open.values()) >= MOST_OPEN:
            raise ProtocolError(f"rank {rank} comes to collective {number}, and waits at {MOST_OPEN} others")
        present = self._open.setdefault(number, {})
        for other, theirs in present.items():
            if theirs.what != mine.what:
                sizes_differ = mine.what.partition("(")[0] == theirs.what.partition("(")[0]
                is_of_loops = mine.where and theirs.where and not self._epochs.stop
                hint = _OF_EACH_BATCH if sizes_differ else _ELSEWHERE if is_of_loops else ""
                raise CollectiveMismatch(
                    f"rank {rank} called {mine} while rank {other} called {theirs}; outside the training epoch all"
                    f" ranks must make the same collective calls in the same order, as under DDP{hint}"
                )
        present[rank] = mine

    def check_upload(self, sender: Sender, message: m.Upload) -> int:
        return _checked_size(message.nbytes, m.LARGEST_UPLOAD)

    def upload(self, sender: Sender, message: m.Upload, payload: Payload) -> list[Out]:
        self._uploads[sender.rank] = payload
        return [Out(sender.peer, m.DATA, m.Uploaded())]

    def read_upload(self, sender: Sender, message: m.ReadUpload, payload: Payload) -> list[Out]:
        uploaded = self._take_upload(sender.rank)
        data = uploaded.numpy().tobytes() if isinstance(uploaded, Tensor) else uploaded
        return self._forward(sender, data, payload)

    def download(self, sender: Sender, message: m.Download, payload: Payload) -> list[Out]:
        if message.number != self._gathered.number:
            raise ProtocolError(f"there is nothing to collect of collective {message.number}")
        parts = tuple(as_tensor(payload) for payload in self._gathered.payloads)
        return [Out(sender.peer, m.DATA, m.Downloaded(nbytes=sum(map(nbytes_of, parts))), parts)]

    def check_long(self, sender: Sender, message: m.LargeMessage) -> int:
        return _checked_size(message.nbytes, m.LONGEST)

    def _take_upload(self, rank: int) -> Payload:
        if rank not in self._uploads:
            raise Refused(UPLOADED_ELSEWHERE, f"rank {rank} has uploaded nothing over its data connection")
        return self._uploads.pop(rank)


def _checked_size(nbytes: int, largest: int) -> int:
    if not 0 < nbytes <= largest:
        raise MalformedMessage(f"{nbytes} bytes are announced, and at most {largest} may come")
    return nbytes
