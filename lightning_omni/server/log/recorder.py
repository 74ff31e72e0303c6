"""Events of the parameter store for the recorder, in order. Without a recorder nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_omni.server.epochs.epoch import Epochs
from lightning_omni.server.log.record import Event, Kind, Recorder, Spans
from lightning_omni.server.parameter_store import ParameterStore
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, to_wire


class Presence(NamedTuple):
    """The tensors that a push has, at this server and at others; see `lightning_omni.server.log.record.Event`."""

    present: tuple[bool, ...]
    elsewhere: tuple[tuple[bool, ...], ...]

    @property
    def is_whole(self) -> bool:
        """Return whether all parameters have a tensor."""
        return all(self.present) and not any(self.elsewhere)


class EventRecorder:
    """The event log of one run.

    Args:
        record: function that takes each event; None to record nothing.
        store: the parameters that the events concern.
        epochs: the epochs, from which newly trained batches are read.
        now: returns the time of the current message.
        servers: number of servers, each of which holds a share of the weights.

    Attributes:
        record: as above.
    """

    def __init__(
        self, record: Recorder | None, store: ParameterStore, epochs: Epochs, now: Callable[[], float], servers: int
    ) -> None:
        self.record = record
        self._store = store
        self._epochs = epochs
        self._now = now
        self._servers = servers
        self._present: dict[tuple[int, int], Presence] = {}

    def form(self, groups: tuple[tuple[int, ...], ...], message: m.FormGroups) -> None:
        """Record that groups were formed on the same weights."""
        for number, _ in self._store.pushed:
            self.note("form", -1, number, groups=groups, **self._agreed(message))
        self._present.clear()

    def seed(self, number: int, groups: tuple[tuple[int, ...], ...], message: m.FormGroups) -> None:
        """Record the upload of an optimizer's weights, for the existing groups."""
        self.note("seed", -1, number, groups=groups, **self._agreed(message))

    def note(self, kind: Kind, group: int, optimizer: int, **more: Any) -> None:
        """Record an event; see `lightning_omni.server.log.record.Event`."""
        if self.record is not None:
            clock = self._store.all[optimizer].master.clock
            self.record(Event(kind=kind, time=self._now(), group=group, optimizer=optimizer, clock=clock, **more))

    def new_spans(
        self, group: int, message: m.DrawBatches | m.AskNext | m.LeaveEpoch | m.FetchMessage | m.HeadBackward
    ) -> Spans:
        """Return the batches that a message newly reports as trained; none if nothing is recorded."""
        if self.record is None or not self._epochs.holds(group, message.epoch):
            return ()
        return self._epochs.new_spans(group, message.epoch, message.trained)

    def train(self, group: int, epoch: int, spans: Spans) -> None:
        """Record that a group has begun to train batches that no push has reported."""
        if spans:
            for number, _ in self._store.pushed:
                self.note("train", group, number, epoch=epoch, spans=spans)

    def push(
        self, group: int, message: m.PushMessage, refused: bool, elsewhere: tuple[tuple[bool, ...], ...] = ()
    ) -> None:
        """Record a push that was merged or refused, before the epoch counts its batches as trained.

        ``elsewhere`` is its presence at other servers; see `lightning_omni.server.service.Sender`.
        """
        if self.record is None:
            return
        self.note(
            "push",
            group,
            message.optimizer,
            read_at=message.read_at,
            refused=refused,
            epoch=message.epoch,
            spans=self._epochs.new_spans(group, message.epoch, message.trained),
            hyperparameters=message.hyperparameters,
            note=message.note,
            **self._news_of_presence((group, message.optimizer), Presence(message.present, elsewhere)),
        )

    def _news_of_presence(self, where: tuple[int, int], now: Presence) -> dict[str, Any]:
        """Return the presence of a group's push if it differs from its last push (or is not whole, in its first)."""
        before, self._present[where] = self._present.get(where), now
        same = now == before if before is not None else now.is_whole
        return {} if same else now._asdict()

    def _agreed(self, message: m.FormGroups) -> dict[str, Any]:
        """Return how the groups exchange, as fields of an event."""
        wire_format = {} if message.wire_format == to_wire(RAW) else message.wire_format
        return {
            "method": message.method,
            "wire_format": wire_format,
            "overlap": message.overlap,
            "servers": max(self._servers, *(served.layout.servers for _, served in self._store.pushed)),
        }
