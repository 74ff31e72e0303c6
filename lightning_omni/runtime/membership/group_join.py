"""A group that joins a run on its own while others train: its request, and the state that it takes over."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from lightning_omni.errors import ConfigurationError
from lightning_omni.runtime.exchange.channel import Channel
from lightning_omni.runtime.exchange.connection import Connection
from lightning_omni.runtime.membership.registration import ask_for_all
from lightning_omni.runtime.parallel_state import Place
from lightning_omni.topology import GroupId, Topology
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import to_wire

_log = logging.getLogger(__name__)


class LateGroup:
    """The group of this rank, if it joins a run on its own. `Enlistment` has reserved its rank numbers."""

    def __init__(self, place: Place, channel: Channel, connection: Connection) -> None:
        self._place, self._channel, self._connection = place, channel, connection

    def take_part(self) -> m.Joined:
        """Join a running run, as soon as its groups train separately. All ranks of this group call it.

        Returns:
            The server's answer. `ServerStore.read_run_state` reads further state, and weights are read when training
            begins.

        Raises:
            ConfigurationError: the run exchanges with other settings than this group.
            RankLost: the run is over.
        """
        place = self._place
        self._connection.join()
        assert place.enlistment is not None
        joined: m.Joined = m.decode(
            bytes.fromhex(ask_for_all(place.broadcast_text, place.is_leader, self._ask_to_join)),
            at="rank",
            channel=m.CONTROL,
        )
        self._check_alike(joined)
        place.topology = Topology((*((),) * joined.group, place.members))
        place.generation, self._channel.synchronizations = joined.generation, joined.synchronizations
        place.process_groups.live.ranks = joined.live
        for part in place.parts:
            part.replica.group, part.replica.peers = joined.group, joined.groups
        place.core.form(GroupId(str(joined.group), joined.incarnation))
        place.is_entering = place.is_new = True
        place.enlistment.close()
        return joined

    def _ask_to_join(self) -> str:
        """Wait until the group may join, on its leader; return the server's answer as text."""
        place = self._place
        assert place.control is not None
        _log.info("waiting to join the run until its groups train again")
        timeout = place.options.timeout.total_seconds()
        return m.encode(place.control.request(m.Join(ranks=place.members), m.Joined, timeout=timeout)).hex()

    def _check_alike(self, joined: m.Joined) -> None:
        core = self._place.core
        mine = m.method_to_wire(core.method), to_wire(core.wire_format), core.overlaps
        theirs = joined.method, joined.wire_format, joined.overlap
        for name, own, other in zip(("method", "wire", "overlap"), mine, theirs, strict=True):
            if own != other:
                raise ConfigurationError(f"{name}={own}: the run that this group joins has {other}; pass the same")

    def read_weights(self) -> None:
        """Load the server's present weights into the group that has joined, without optimizer state."""
        for index, part in enumerate(self._place.parts):
            part.replica.load(self._channel.fetch(index))

    def read_again(self) -> None:
        """Load the server's weights again, if hooks have written this group's weights since it joined.

        The same hooks ran in the run's groups before these trained. All ranks of the group call it.
        """
        place = self._place
        written = torch.tensor(any(part.replica.written() for part in place.parts), device=place.device)
        if len(place.members) > 1:
            dist.all_reduce(written, op=dist.ReduceOp.MAX, group=place.compute_group)
        if written:
            self.read_weights()
