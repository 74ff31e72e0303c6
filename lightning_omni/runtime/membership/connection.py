"""A rank's part in its run: its connection to the server, compute groups, and groups that join the run late.

The server is embedded, started by rank 0 for this run, or a standalone one.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from lightning_omni.errors import ConfigurationError, ConnectionLost, OmniError, RankLost, Refused
from lightning_omni.runtime.exchange.server_exchange import Channel
from lightning_omni.runtime.membership.registration import ask_for_all
from lightning_omni.runtime.model.sharded import division_of
from lightning_omni.runtime.parallel_state import Place
from lightning_omni.topology import RECORDER, GroupId, Topology
from lightning_omni.transport.connections import Answer
from lightning_omni.transport.zeromq.keys import load_key
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import to_wire
from lightning_omni.wire.layout import Layout

_log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that a rank which must stop has to notice this, before its process is ended."""
LEARN = 2.0
"""Seconds in which a rank whose collective failed may learn from the server which other rank failed first."""


class Connection:
    """The connection of this rank to the server, stored as `Place.control` while it is open.

    Attributes:
        on_stuck: called in a separate thread, with the reason, before this process is ended.
    """

    def __init__(self, place: Place, channel: Channel) -> None:
        self._place, self._channel = place, channel
        self._closed = threading.Event()
        self.on_stuck: Callable[[OmniError], None] = lambda error: None

    def open(self) -> None:
        """Enable the end of this process, in case the rank must stop and does not notice."""
        self._closed.clear()

    def start_server(self) -> None:
        """Start this rank's embedded servers without waiting, so that they start up while the model is built."""
        self._place.server.start(self._place.method, self._place.parts)

    # --- To join -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Join the server. All ranks call it, even while there is one group."""
        if self._place.control is None:
            self._join()
            self._place.process_groups.join(self._channel.synchronize, self._place.rank)

    def try_to_join(self) -> str:
        """Join the server if all ranks can, and undo this otherwise. All ranks call it, while they are one group.

        Returns:
            The reason why a rank could not, the same on all ranks; empty on success.
        """
        place, groups = self._place, self._place.process_groups
        if place.control is not None:
            return ""
        problem = ""
        try:
            self._join()
        except Exception as error:  # of any kind, because the other ranks wait for this one's result
            problem = str(error) or type(error).__name__
        mine = [int(rank == place.rank and problem != "") for rank in range(place.size)]
        failed = groups.largest(mine, groups.original)
        if not any(failed):
            groups.join(self._channel.synchronize, place.rank)
            return ""
        problem = groups.broadcast_text(problem, groups.original, failed.index(1))
        self._take_back()
        return problem

    def _take_back(self) -> None:
        """Undo a join and stop the server. All ranks call it, while they are one group."""
        place = self._place
        self._closed.set()  # the departure of the others must not end this process
        if place.control is not None:
            place.control.close(reason="")
            place.control = None
            self._divide()
        dist.barrier(group=place.process_groups.original)
        place.server.stop()
        self._closed.clear()

    def _join(self) -> None:
        self.start_server()
        place, enlistment = self._place, self._place.enlistment
        address, key, run = place.server.find(place.broadcast_text) if enlistment is None else self._enlisted_at
        self._channel.synchronizations = 0
        specs = tuple(spec for part in place.parts for spec in part.replica.layout_with({}).specs)
        layout = Layout(specs, division=self._division)
        size = 0 if place.goes_on else place.size  # 0 if these ranks are not announced
        silence = enlistment.silence if enlistment is not None else 0.0
        try:
            if enlistment is not None:
                enlistment.check_goes_on()
            place.control = place.server.transport.join(
                address, key, run, place.rank, size, layout, self._on_end, silence
            )
        except (ConnectionLost, Refused) as no:
            if enlistment is not None:
                enlistment.check_goes_on()
            if enlistment is None or isinstance(no, ConnectionLost) or no.code != "gone":
                raise
            raise ConnectionLost(f"the parameter server that this group came to is gone: {no}") from no
        place.server.check(place.control.shards, address)
        self._divide()
        place.server.share(address, key)

    def _divide(self) -> None:
        for part in self._place.parts:
            part.replica.divide(self._place.servers)

    @property
    def _division(self) -> str:
        """Return a description of how a group's members share the parameters; empty if each exchanges all of them."""
        place = self._place
        if not place.is_sharded:
            return ""
        return division_of((each for part in place.parts for each in part.replica.ordered), place.mesh)

    @property
    def _enlisted_at(self) -> tuple[str, bytes, str]:
        place = self._place
        assert place.enlistment is not None
        assert place.options.server is not None
        return place.options.server, load_key(), place.enlistment.run

    # --- To leave ----------------------------------------------------------------------------------------------------

    def leave(self, reason: str = "", has_finished: bool = False) -> None:
        """Leave the server, if this rank has joined it.

        Args:
            reason: why the run cannot continue without this rank; empty if it can.
            has_finished: whether this rank has trained to the end.
        """
        self._closed.set()
        if self._place.control is not None:
            self._place.control.has_finished = has_finished
            self._place.control.close(reason=reason)

    def close(self) -> None:
        place = self._place
        if place.enlistment is not None:
            place.enlistment.close()
        self._channel.close()
        place.ever_lost.update(place.lost)
        place.failures += place.control.failures if place.control is not None else ()
        place.control = None

    def _on_end(self, error: OmniError) -> None:
        """End this process after a grace period, because the rank must stop. The connection's thread calls it.

        The trainer notices at its next exchange, but not if it is stuck in a collective with dead ranks.
        """
        place = self._place

        def end() -> None:
            if not self._closed.wait(GRACE):
                _log.critical("rank %d stops: %s", place.rank, error)
                place.server.transport.clear(place.server_address)
                self.on_stuck(error)
                os._exit(1)

        threading.Thread(target=end, name="omni-end", daemon=True).start()


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
            form = m.Form(
                generation=place.generation + 1,
                groups=topology.groups,
                method=m.method_to_wire(place.method),
                keep_epoch=keeps_epoch,
                wire_format=to_wire(place.core.wire_format),
                overlap=place.core.overlaps,
                by_member=place.is_sharded,
            )
            try:
                return topology, self._request(form, m.Formed).incarnation
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
            message = m.ReadBrought()
        return self._place.control.request(message, expect)

    def _topology_of_the_living(self, groups: int, speeds: Mapping[int, float] | None) -> Topology:
        place = self._place
        if speeds is None:
            return Topology.of(place.live_ranks, groups, place.shards)
        known = {rank: speeds[rank] for rank in place.live_ranks if rank in speeds}
        return Topology.by_speed(known, groups, place.shards)
