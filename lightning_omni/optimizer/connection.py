"""How a rank comes to the parameter server and leaves it, and what becomes of a rank that must stop.

The server may be this run's own, which rank 0 starts, or one that runs elsewhere.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_omni.errors import ConnectionLost, OmniError, Refused
from lightning_omni.optimizer.channel import Channel
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.sharding import division_of
from lightning_omni.protocol.layout import Layout
from lightning_omni.server.keys import load as load_key

_log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that a rank which must stop is given to find out by itself."""
LEARN = 2.0
"""Seconds in which a rank whose collective failed may hear from the server which other rank failed first."""


class Connection:
    """This rank's connection to the server, which is `Place.control` while it stands.

    Args:
        place: this rank's, in the run.
        channel: what is exchanged over it.

    Attributes:
        on_stuck: called from a thread of its own with the reason why this process is about to be ended.
    """

    def __init__(self, place: Place, channel: Channel) -> None:
        self._place, self._channel = place, channel
        self._closed = threading.Event()
        self.on_stuck: Callable[[OmniError], None] = lambda error: None

    def open(self) -> None:
        """From now on a rank that must stop, and does not find out by itself, is ended."""
        self._closed.clear()

    def start_server(self) -> None:
        """Rank 0 starts the embedded server; returns at once, so that it comes up while the model is built."""
        self._place.server.start(self._place.method, self._place.parts)

    # --- To join -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Joins the server, which rank 0 starts or which runs elsewhere. All ranks call it, even with one group yet."""
        if self._place.control is None:
            self._join()
            self._place.process_groups.join(self._channel.synchronize, self._place.rank)

    def try_to_join(self) -> str:
        """Joins the server if all ranks can; otherwise none has, and nothing is left of it. On all ranks, in one group.

        Returns:
            Why a rank could not, the same on all; or nothing.
        """
        place, groups = self._place, self._place.process_groups
        if place.control is not None:
            return ""
        problem = ""
        try:
            self._join()
        except Exception as error:  # whatever it is, the others wait to hear of it
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
        """As if no rank had come to the server, which is stopped. On all ranks, in one group."""
        place = self._place
        self._closed.set()  # that the others leave is no reason to end this process
        if place.control is not None:
            place.control.close(reason="")
            place.control = None
            self._divide()
        dist.barrier(group=place.process_groups.original)
        place.server.stop()
        self._closed.clear()

    def _join(self) -> None:
        """Starts the server, if it is this rank's to start and does not run, and connects this rank to it."""
        self.start_server()
        place, enlistment = self._place, self._place.enlistment
        address, key, run = place.server.find(place.broadcast_text) if enlistment is None else self._enlisted_at
        self._channel.synchronizations = 0
        specs = tuple(spec for part in place.parts for spec in part.replica.layout_with({}).specs)
        layout = Layout(specs, division=self._division)
        size = 0 if place.goes_on else place.size  # ranks that are not announced
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
        """How the members of a group share the parameters; empty if each exchanges all of them."""
        place = self._place
        if not place.is_sharded:
            return ""
        return division_of((each for part in place.parts for each in part.replica.ordered), place.mesh)

    @property
    def _enlisted_at(self) -> tuple[str, bytes, str]:
        """Address, key and name of the run that this group joins on its own."""
        place = self._place
        assert place.enlistment is not None
        assert place.options.server is not None
        return place.options.server, load_key(), place.enlistment.run

    # --- To leave ----------------------------------------------------------------------------------------------------

    def leave(self, reason: str = "", has_finished: bool = False) -> None:
        """Says goodbye to the server, if this rank has joined it.

        Args:
            reason: why the run cannot go on without this rank; empty if it can.
            has_finished: whether this rank has trained to the end.
        """
        self._closed.set()
        if self._place.control is not None:
            self._place.control.has_finished = has_finished
            self._place.control.close(reason=reason)

    def close(self) -> None:
        """Closes all connections of this rank."""
        place = self._place
        if place.enlistment is not None:
            place.enlistment.close()
        self._channel.close()
        place.ever_lost.update(place.lost)
        place.failures += place.control.failures if place.control is not None else ()
        place.control = None

    def _on_end(self, error: OmniError) -> None:
        """Called from the connection's thread: this rank must stop.

        The trainer finds out at its next exchange. If it is stuck in a collective with the dead it never does, so it
        gets a moment and then no more.
        """
        place = self._place

        def end() -> None:
            if not self._closed.wait(GRACE):
                _log.critical("rank %d stops: %s", place.rank, error)
                place.server.transport.clear(place.server_address)
                self.on_stuck(error)
                os._exit(1)

        threading.Thread(target=end, name="omni-end", daemon=True).start()
