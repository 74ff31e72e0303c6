"""A rank's connection to the server, compute groups, and groups that join the run late."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_omni.errors import ConfigurationError, ConnectionLost, OmniError, RankLost, Refused
from lightning_omni.methods import REGISTRY
from lightning_omni.runtime.model.sharded import division_of
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.registration import ask_for_all
from lightning_omni.runtime.server_exchange import ServerExchange
from lightning_omni.topology import RECORDER, GroupId, Topology
from lightning_omni.transport.connections import Answer
from lightning_omni.transport.zeromq.keys import load_key
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import argument_of, to_wire
from lightning_omni.wire.layout import Layout

_log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that a rank which must stop has to notice this, before its process is ended."""
LEARN = 2.0
"""Seconds in which a rank whose collective failed may learn from the server which other rank failed first."""


class Connection:
    """The joining and leaving of the server, and the forming of groups.

    All live ranks form groups, or one group joins a running run, with the rank numbers that its `GroupRegistration` has
    reserved.

    Attributes:
        on_stuck: called in a thread, with the reason, before this process is ended.
        is_writing: returns whether this process is writing a checkpoint, for which its end is delayed.
    """

    def __init__(self, parallel: ParallelState, exchange: ServerExchange) -> None:
        self._parallel, self._exchange = parallel, exchange
        self._closed = threading.Event()
        self.on_stuck: Callable[[OmniError], None] = lambda error: None
        self.is_writing: Callable[[], bool] = bool

    def open(self) -> None:
        self._closed.clear()

    def start_server(self) -> None:
        """Start this rank's embedded servers, without waiting for them."""
        self._parallel.server.start(self._parallel.method, self._parallel.parts)

    # --- To join -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Join the server, unless joined. All launched ranks call it."""
        if self._parallel.control is None:
            self._join()
            self._parallel.process_groups.join(self._exchange.synchronize, self._parallel.rank)

    def try_to_join(self) -> str:
        """Join the server if all ranks can; otherwise stop it. All ranks call it, while they are one group.

        Return why a rank could not, the same on all ranks; "" on success.
        """
        parallel, groups = self._parallel, self._parallel.process_groups
        if parallel.control is not None:
            return ""
        problem = ""
        try:
            self._join()
        except Exception as error:  # of any kind, because the other ranks wait for this one's result
            problem = str(error) or type(error).__name__
        mine = [int(rank == parallel.rank and problem != "") for rank in range(parallel.size)]
        failed = groups.largest(mine, groups.original)
        if not any(failed):
            groups.join(self._exchange.synchronize, parallel.rank)
            return ""
        problem = groups.broadcast_text(problem, groups.original, failed.index(1))
        self._take_back()
        return problem

    def _take_back(self) -> None:
        """Undo a join and stop the server. All ranks call it, while they are one group."""
        parallel = self._parallel
        self._closed.set()  # the departure of the others must not end this process
        if parallel.control is not None:
            parallel.control.close(reason="")
            parallel.control = None
            self._divide()
        dist.barrier(group=parallel.process_groups.original)
        parallel.server.stop()
        self._closed.clear()

    def _join(self) -> None:
        if (device := torch.get_default_device()).type != "cpu":
            raise ConfigurationError(
                f"torch.set_default_device({str(device)!r}): what groups exchange lies in buffers of the CPU; leave it"
                " out, and pass device= to what you make, or World(device=)"
            )
        self.start_server()
        parallel, registration = self._parallel, self._parallel.registration
        if registration is None:
            address, key, run = parallel.server.find(parallel.broadcast_text_at_launch)
        else:
            assert parallel.options.server.address is not None
            address, key, run = parallel.options.server.address, load_key(), registration.run
        self._exchange.synchronizations = 0
        specs = tuple(spec for part in parallel.parts for spec in part.replica.layout_with({}).specs)
        ordered = (each for part in parallel.parts for each in part.replica.ordered)
        layout = Layout(specs, division=division_of(ordered, parallel.mesh) if parallel.is_sharded else "")
        size = 0 if parallel.joins_running_run else parallel.size  # 0 if these ranks are not announced
        silence = registration.silence if registration is not None else 0.0
        try:
            if registration is not None:
                registration.check_goes_on()
            parallel.control = parallel.server.transport.join(
                address, key, run, parallel.rank, size, layout, self._on_end, silence
            )
        except (ConnectionLost, Refused):
            if registration is not None:
                registration.check_goes_on()
            raise
        parallel.server.check(parallel.control.servers, address)
        self._divide()
        parallel.server.share(address, key)

    def _divide(self) -> None:
        for part in self._parallel.parts:
            part.replica.divide(self._parallel.servers)

    # --- To leave ----------------------------------------------------------------------------------------------------

    def leave(self, reason: str = "", has_finished: bool = False) -> None:
        """Leave the server, if this rank has joined it.

        Its group is evicted with the ``reason`` for which this rank has failed, if any; ``has_finished`` is whether the
        run is at its end.
        """
        self._closed.set()
        if self._parallel.control is not None:
            self._parallel.control.has_finished = has_finished
            self._parallel.control.close(reason=reason)

    def close(self) -> None:
        parallel = self._parallel
        if parallel.registration is not None:
            parallel.registration.close()
        self._exchange.close()
        parallel.ever_lost.update(parallel.lost)
        parallel.failures += parallel.control.failures if parallel.control is not None else ()
        parallel.control = None

    def _on_end(self, error: OmniError) -> None:
        """End this process after `GRACE` unless this rank leaves. The connection's thread calls it.

        A trainer that is stuck in a collective would not notice that it must stop.
        """
        parallel = self._parallel

        def end() -> None:
            if self._closed.wait(GRACE / 5):
                return
            if not set(parallel.lost).isdisjoint(parallel.members):
                # In a thread, because it may wait for the device, too.
                threading.Thread(target=parallel.process_groups.abort, name="omni-abort", daemon=True).start()
            while not self._closed.wait(GRACE - GRACE / 5):
                if self.is_writing():  # its file may be all that remains of the run
                    continue
                _log.critical("rank %d stops: %s", parallel.rank, error)
                parallel.server.transport.clear(parallel.server_address)
                self.on_stuck(error)
                os._exit(1)

        threading.Thread(target=end, name="omni-end", daemon=True).start()

    # --- Groups are formed -------------------------------------------------------------------------------------------

    def form(
        self, groups: int | None = None, speeds: Mapping[int, float] | None = None, keeps_epoch: bool = False
    ) -> None:
        """Form groups, and set up this rank's own. All live ranks call it, after they have joined the server.

        ``groups`` and ``speeds`` are as in `World.regroup`; without ``groups``, those of ``ParallelState.topology`` are
        formed. With ``keeps_epoch`` the new groups continue the epoch.
        """
        parallel = self._parallel
        parallel.barrier()
        mine = b""
        if parallel.is_recorder:
            topology, incarnation = self._form_until_accepted(groups, speeds, keeps_epoch)
            mine = json.dumps([topology.groups, incarnation]).encode()
        text = dict(self._exchange.synchronize("topology", mine)).get(RECORDER)
        if text is None:  # the rank that forms the groups has failed meanwhile, and the run ends with it
            raise parallel.joined.wait_for_end(LEARN) or RankLost(
                f"rank {RECORDER} is gone before it has formed groups"
            )
        formed, incarnation = json.loads(text)
        parallel.topology = Topology(tuple(tuple(members) for members in formed))
        parallel.generation += 1
        if parallel.rank not in parallel.topology.ranks:
            parallel.joined.check()
        parallel.make_groups(self._exchange.gather)
        for part in parallel.parts:
            # As formed, not as alive: peers learn of a loss at different times, and must draw the same peer.
            part.replica.group, part.replica.peers = parallel.group, parallel.topology.alive
        parallel.core.form(GroupId(str(parallel.group), incarnation))
        self._exchange.peers.connect()

    def _form_until_accepted(
        self, groups: int | None, speeds: Mapping[int, float] | None, keeps_epoch: bool
    ) -> tuple[Topology, int]:
        parallel = self._parallel
        while True:
            topology = parallel.topology if groups is None else self._topology_of_the_living(groups, speeds)
            form = m.FormGroups(
                generation=parallel.generation + 1,
                groups=topology.groups,
                method=to_wire(parallel.method),
                keep_epoch=keeps_epoch,
                wire_format=to_wire(parallel.core.wire_format),
                overlap=parallel.core.overlaps,
                by_member=parallel.is_sharded,
            )
            try:
                return topology, self._request(form, m.GroupsFormed).incarnation
            except Refused as no:
                live = set(parallel.live_ranks)
                if speeds is not None and (missing := sorted(live - speeds.keys())):
                    raise ConfigurationError(
                        f"World.regroup(speeds=) has no speed of rank {missing[0]}; pass that of each live rank"
                    ) from no
                # A rank has just died and the notice is in flight: form groups without it.
                if groups is None or live.issuperset(topology.ranks):
                    raise

    def _request(self, message: m.Message, expect: type[Answer]) -> Answer:
        data = m.encode(message)
        if len(data) > m.LARGEST_INLINE:
            self._exchange.bring(data)
            message = m.ReadUpload()
        return self._parallel.joined.request(message, expect)

    def _topology_of_the_living(self, groups: int, speeds: Mapping[int, float] | None) -> Topology:
        parallel = self._parallel
        groups = min(groups, len(parallel.live_ranks) // parallel.shards)  # some may have died since the check
        if speeds is None:
            return Topology.of(parallel.live_ranks, groups, parallel.shards)
        known = {rank: speeds[rank] for rank in parallel.live_ranks if rank in speeds}
        return Topology.by_speed(known, groups, parallel.shards)

    # --- A group that joins a running run -----------------------------------------------------------------------------

    def take_part(self) -> m.Joined:
        """Join a running run, as soon as its groups train separately. All ranks of this group call it.

        Raises:
            ConfigurationError: the run has other settings or servers than this group; or torch's default device is
                no CPU.
            OmniError: the run is over, or the server is gone or refuses.
        """
        parallel = self._parallel
        self.join()
        assert parallel.registration is not None
        joined: m.Joined = m.decode(
            bytes.fromhex(ask_for_all(parallel.broadcast_text_at_launch, parallel.is_leader, self._ask_to_join)),
            at="rank",
            channel=m.CONTROL,
        )
        self._check_alike(joined)
        parallel.topology = Topology((*((),) * joined.group, parallel.members))
        parallel.generation, self._exchange.synchronizations = joined.generation, joined.synchronizations
        parallel.process_groups.live.ranks = joined.live
        for part in parallel.parts:
            part.replica.group, part.replica.peers = joined.group, joined.groups
        parallel.core.form(GroupId(str(joined.group), joined.incarnation))
        parallel.is_entering = parallel.joined_since_sync = True
        parallel.registration.close()
        parallel.joined.report_progress(is_expected=True)  # the others wait for the batch that the group has by now
        return joined

    def _ask_to_join(self) -> str:
        parallel = self._parallel
        _log.info("waiting to join the run until its groups train again")
        timeout = parallel.options.timeout.total_seconds()
        return m.encode(parallel.joined.request(m.Join(ranks=parallel.members), m.Joined, timeout=timeout)).hex()

    def _check_alike(self, joined: m.Joined) -> None:
        core = self._parallel.core
        mine = arguments_of(to_wire(core.method), to_wire(core.wire_format), core.overlaps)
        theirs = arguments_of(joined.method, joined.wire_format, joined.overlap)
        for own, other in zip(mine, theirs, strict=True):
            if own != other:
                raise ConfigurationError(
                    f"{own}: the run that this group joins has {other}; pass {other} to this group, too"
                )

    def read_again(self) -> None:
        parallel = self._parallel
        written = any(part.replica.written() for part in parallel.parts)
        if any(parallel.process_groups.largest([written], parallel.compute_group)):
            self._exchange.read_weights()
        for part in parallel.parts:
            part.replica.own_frozen()  # frozen weights that the run's groups have written are this group's own, too


def arguments_of(method: Mapping[str, Any], wire_format: Mapping[str, Any], overlap: bool) -> tuple[str, ...]:
    """Return the arguments of OmniStrategy for the exchanges of a run, which is described by plain data."""
    return f'method="{REGISTRY.text_of_wire(method)}"', argument_of(wire_format), f"overlap={overlap}"
