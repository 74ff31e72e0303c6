"""A group that joins a run on its own, when others train already: what it asks, and what it takes over.

The place that it gets is in `Enlistment`, which is there before the group's ranks know the server.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from lightning_omni.errors import ConfigurationError
from lightning_omni.optimizer.channel import Channel
from lightning_omni.optimizer.connection import Connection
from lightning_omni.optimizer.enlistment import ask_for_all
from lightning_omni.optimizer.place import Place
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.wire_format import to_wire
from lightning_omni.topology import GroupId, Topology

_log = logging.getLogger(__name__)


class LateGroup:
    """This rank's group, if it joins a run on its own.

    Args:
        place: this rank's, in the run.
        channel: its way to the server.
        connection: by which it joins that.
    """

    def __init__(self, place: Place, channel: Channel, connection: Connection) -> None:
        self._place, self._channel, self._connection = place, channel, connection

    def take_part(self) -> m.Joined:
        """This rank's group joins a run that goes on already, as soon as the groups of that have parted. On all of it.

        Returns:
            What the group has to know. What else was stored for it is read by `ServerStore.read_run_state`, and weights
            are read when training begins.

        Raises:
            ConfigurationError: the run exchanges otherwise than this group was told.
            RankLost: it is over.
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
        """Waits until the group may join. By its leader; what all of it has to know, as text."""
        place = self._place
        assert place.control is not None
        _log.info("waiting to join the run until its groups train again")
        timeout = place.options.timeout.total_seconds()
        return m.encode(place.control.request(m.Join(ranks=place.members), m.Joined, timeout=timeout)).hex()

    def _check_alike(self, joined: m.Joined) -> None:
        """Raises `ConfigurationError` if the groups of the run exchange otherwise than this one was told."""
        core = self._place.core
        mine = m.method_to_wire(core.method), to_wire(core.wire_format), core.overlaps
        theirs = joined.method, joined.wire_format, joined.overlap
        for name, own, other in zip(("method", "wire", "overlap"), mine, theirs, strict=True):
            if own != other:
                raise ConfigurationError(f"{name}={own}: the run that this group joins has {other}; pass the same")

    def read_weights(self) -> None:
        """The group that has joined begins with the weights that the server has now, and no state of optimizers."""
        for index, part in enumerate(self._place.parts):
            part.replica.load(self._channel.fetch(index))

    def read_again(self) -> None:
        """Hooks have written weights of this group, which has joined, as those of the run had before: the run's hold.

        On all of the group.
        """
        place = self._place
        written = torch.tensor(any(part.replica.written() for part in place.parts), device=place.device)
        if len(place.members) > 1:
            dist.all_reduce(written, op=dist.ReduceOp.MAX, group=place.compute_group)
        if written:
            self.read_weights()
