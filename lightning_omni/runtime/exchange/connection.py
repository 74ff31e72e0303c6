"""The connection of a rank to the parameter server, and the end of a process whose rank must stop.

The server is embedded, started by rank 0 for this run, or a standalone one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_omni.errors import ConnectionLost, OmniError, Refused
from lightning_omni.runtime.exchange.channel import Channel
from lightning_omni.runtime.model.sharded import division_of
from lightning_omni.runtime.parallel_state import Place
from lightning_omni.transport.zeromq.keys import load as load_key
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
        place.server.check(place.control.servers, address)
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
        assert place.options.server.address is not None
        return place.options.server.address, load_key(), place.enlistment.run

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
