"""Tells the recorder what happens to the shards, in order. Without a recorder nothing is looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_omni.protocol import messages as m
from lightning_omni.protocol.epochs import Epochs
from lightning_omni.protocol.record import Event, Kind, Recorder, Spans
from lightning_omni.protocol.shards import HeldShards
from lightning_omni.protocol.wire_format import RAW, to_wire


class Presence(NamedTuple):
    """Which tensors a push has, at this server and at others; see `lightning_omni.protocol.record.Event`."""

    present: tuple[bool, ...]
    elsewhere: tuple[tuple[bool, ...], ...]

    @property
    def is_whole(self) -> bool:
        """Whether all of them are there."""
        return all(self.present) and not any(self.elsewhere)


class Notes:
    """The events of one run.

    Args:
        record: told of each event; None if they are not to be recorded.
        shards: those that the events happen to.
        epochs: knows which batches a message brings news of.
        now: the time of the message that is being handled.
        servers: how many hold a share of the weights each.

    Attributes:
        record: as above.
    """

    def __init__(
        self, record: Recorder | None, shards: HeldShards, epochs: Epochs, now: Callable[[], float], servers: int
    ) -> None:
        self.record = record
        self._shards = shards
        self._epochs = epochs
        self._now = now
        self._servers = servers
        self._present: dict[tuple[int, int], Presence] = {}

    def form(self, groups: tuple[tuple[int, ...], ...], message: m.Form) -> None:
        """Groups were formed on the same weights."""
        for number, _ in self._shards.pushed:
            self.note("form", -1, number, groups=groups, **self._agreed(message))
        self._present.clear()

    def seed(self, number: int, groups: tuple[tuple[int, ...], ...], message: m.Form) -> None:
        """An optimizer's weights were handed over, for groups that stand."""
        self.note("seed", -1, number, groups=groups, **self._agreed(message))

    def note(self, kind: Kind, group: int, optimizer: int, **more: Any) -> None:
        """One event; see `lightning_omni.protocol.record.Event`."""
        if self.record is not None:
            clock = self._shards.all[optimizer].master.clock
            self.record(Event(kind=kind, time=self._now(), group=group, optimizer=optimizer, clock=clock, **more))

    def new_spans(self, group: int, message: m.Draw | m.Await | m.Leave | m.FetchMessage | m.HeadBackward) -> Spans:
        """The batches that a message brings news of; none if there is no recorder."""
        if self.record is None or not self._epochs.holds(group, message.epoch):
            return ()
        return self._epochs.new_spans(group, message.epoch, message.trained)

    def train(self, group: int, epoch: int, spans: Spans) -> None:
        """A group has begun to train batches of which no push has told."""
        if spans:
            for number, _ in self._shards.pushed:
                self.note("train", group, number, epoch=epoch, spans=spans)

    def push(
        self, group: int, message: m.PushMessage, refused: bool, elsewhere: tuple[tuple[bool, ...], ...] = ()
    ) -> None:
        """A push was merged, or refused; its epoch does not know yet what it has trained.

        Args:
            group: number of the group.
            message: the push.
            refused: whether it was.
            elsewhere: which of its tensors are at other servers; see `lightning_omni.protocol.service.Sender`.
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
        """Which parameters had a tensor, if it is not the same as in the group's last push."""
        before, self._present[where] = self._present.get(where), now
        same = now == before if before is not None else now.is_whole
        return {} if same else now._asdict()

    def _agreed(self, message: m.Form) -> dict[str, Any]:
        """How the groups exchange, as it is written down."""
        wire_format = {} if message.wire_format == to_wire(RAW) else message.wire_format
        return {
            "method": message.method,
            "wire_format": wire_format,
            "overlap": message.overlap,
            "servers": max(self._servers, *(shard.layout.servers for _, shard in self._shards.pushed)),
        }
