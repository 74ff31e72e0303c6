"""The forming of groups: the recorder requests them from the server, out of the live ranks, and announces them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lightning_omni.errors import RankLost, Refused
from lightning_omni.runtime.exchange.channel import Channel
from lightning_omni.runtime.exchange.connection import LEARN
from lightning_omni.runtime.parallel_state import Place
from lightning_omni.topology import RECORDER, GroupId, Topology
from lightning_omni.transport.base import Answer
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import to_wire


class Forming:
    """The procedure by which the ranks of a run form groups."""

    def __init__(self, place: Place, channel: Channel) -> None:
        self._place, self._channel = place, channel

    def form(
        self, groups: int | None = None, speeds: Mapping[int, float] | None = None, keeps_epoch: bool = False
    ) -> None:
        """Form groups, and set up this rank's own. All live ranks, which have joined the server, call it.

        Args:
            groups: the new number of groups; None forms the groups of ``Place.topology``.
            speeds: each live rank's samples per second, by which groups are formed. None forms them in the order of
                ranks.
            keeps_epoch: whether the new groups continue the epoch, whose trained part the server knows.
        """
        place = self._place
        assert place.control is not None
        place.barrier()
        mine = b""
        if place.is_recorder:
            topology, incarnation = self._form_until_accepted(groups, speeds, keeps_epoch)
            mine = json.dumps([topology.groups, incarnation]).encode()
        text = dict(self._channel.synchronize("topology", mine)).get(RECORDER)
        if text is None:  # the rank that forms the groups has failed meanwhile, and the run ends with it
            raise place.control.wait_for_end(LEARN) or RankLost(f"rank {RECORDER} is gone before it has formed groups")
        formed, incarnation = json.loads(text)
        place.topology = Topology(tuple(tuple(members) for members in formed))
        place.generation += 1
        if place.rank not in place.topology.ranks:
            place.control.check()
        place.make_groups(self._channel.gather)
        for part in place.parts:
            # As formed, not as alive: peers learn of a loss at different times, and must draw the same peer.
            part.replica.group, part.replica.peers = place.group, place.topology.alive
        place.core.form(GroupId(str(place.group), incarnation))
        self._channel.peers.connect()

    def _form_until_accepted(
        self, groups: int | None, speeds: Mapping[int, float] | None, keeps_epoch: bool
    ) -> tuple[Topology, int]:
        """Return the groups that the server has accepted, and their incarnation."""
        place = self._place
        while True:
            topology = place.topology if groups is None else self._topology_of_the_living(groups, speeds)
            form = m.FormGroups(
                generation=place.generation + 1,
                groups=topology.groups,
                method=m.method_to_wire(place.method),
                keep_epoch=keeps_epoch,
                wire_format=to_wire(place.core.wire_format),
                overlap=place.core.overlaps,
                by_member=place.is_sharded,
            )
            try:
                return topology, self._request(form, m.GroupsFormed).incarnation
            except Refused:
                # A rank has just died and the notice is in flight: form groups without it.
                if groups is None or topology.ranks == place.live_ranks:
                    raise

    def _request(self, message: m.Message, expect: type[Answer]) -> Answer:
        """Send a request of any size on the control channel."""
        assert self._place.control is not None
        data = m.encode(message)
        if len(data) > m.LARGEST_INLINE:
            self._channel.bring(data)
            message = m.ReadUpload()
        return self._place.control.request(message, expect)

    def _topology_of_the_living(self, groups: int, speeds: Mapping[int, float] | None) -> Topology:
        place = self._place
        if speeds is None:
            return Topology.of(place.live_ranks, groups, place.shards)
        known = {rank: speeds[rank] for rank in place.live_ranks if rank in speeds}
        return Topology.by_speed(known, groups, place.shards)
