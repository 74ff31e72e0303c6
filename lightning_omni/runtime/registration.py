"""The rank numbers of a group that joins a run on its own, which it requests before it has a model."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning_omni.errors import ConnectionLost, Evicted, OmniError, RankLost, Refused
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.transport.zeromq import ZeroMQ
from lightning_omni.transport.zeromq.keys import load_key
from lightning_omni.wire.messages import GroupRegistered

if TYPE_CHECKING:
    from lightning_omni.transport.zeromq.observer import Observer

_log = logging.getLogger(__name__)

_ASK_AGAIN = 0.5
"""Seconds between two requests, while another group is about to begin the run."""
_CONNECT_TIME = 5.0
"""Seconds in which a machine must accept or reject a connection."""
COMES_BACK = "OMNI_COMES_BACK_TO"
"""The environment variable of an evicted group's restarted command; `return_to` makes its value."""


def comes_back_to() -> tuple[str, int, bool]:
    """Return the run that this group rejoins, its rejoins in a row, and whether the run is saved; or "", 0 and True.

    The number includes this rejoin. Another server could continue a saved run.
    """
    name, count, unsaved, *_ = [*os.environ.get(COMES_BACK, "").split(" "), "", ""]
    return name, int(count or 0), not unsaved


def return_to(run: str, count: int, is_saved: bool) -> str:
    """Return the value of `COMES_BACK` for the ``count``-th rejoining of a run in a row."""
    return f"{run} {count}" if is_saved else f"{run} {count} unsaved"


class GroupRegistration:
    """A reservation of rank numbers for a group. All of its ranks create one.

    Args:
        rank: this rank, in its own torch.distributed world; rank 0 sends the request.
        broadcast_text: returns the text of rank 0 on every rank of the group.

    Attributes:
        first: as in `GroupRegistered`, as is ``silence``.
        announced: as there, or this group's ranks if it begins the run.

    Raises:
        OmniError: the server cannot be reached or refuses; or the run is over, or is not the one that evicted this
            group.
    """

    def __init__(self, options: WorldOptions, rank: int, size: int, broadcast_text: Callable[[str], str]) -> None:
        self._observer: Observer | None = None
        answer = ask_for_all(broadcast_text, rank == 0, lambda: self._ask(options, size))
        self.run, self.first, announced, self.silence = answer
        self.begins = announced == 0
        self.announced = announced or size

    def _ask(self, options: WorldOptions, size: int) -> tuple[str, int, int, float]:
        self._connect(options)
        deadline, is_said = time.monotonic() + options.timeout.total_seconds(), False
        try:
            while (answer := self._enlist(options, size)).first < 0:
                if time.monotonic() > deadline:
                    raise ConnectionLost(
                        f"another group was about to begin the run at {options.server.address}, and has not done so"
                        f" within {options.timeout.total_seconds():.0f} s; raise timeout= if its model takes that long"
                    )
                if not is_said:
                    is_said = True
                    _log.info(
                        "another group is about to begin the run at %s; this one joins it next", options.server.address
                    )
                time.sleep(_ASK_AGAIN)
            _check_same(answer.run, options)
        except BaseException:
            self.close()
            raise
        return answer.run, answer.first, answer.announced, answer.silence

    def _connect(self, options: WorldOptions) -> None:
        from lightning_omni.transport.zeromq.observer import Observer  # other ranks need no sockets before they train

        transport = options.server.resolved_transport()
        assert options.server.address is not None
        assert isinstance(transport, ZeroMQ)  # `WorldOptions` refuses others
        self.close()
        try:
            self._observer = Observer(options.server.address, load_key(), transport.encryption)
        except ConnectionLost as error:
            name, _, is_saved = comes_back_to()
            if not name:
                raise
            if not is_saved and _rejects_connections(options.server.address):
                raise RankLost(
                    f"the run {name}, which this group was evicted from, is over: no process listens at"
                    f" {options.server.address} any more, and its server has saved no state for another one (serve"
                    " --state)"
                ) from error
            raise ConnectionLost(
                f"no parameter server answers at {options.server.address}, where this group was in the run {name}:"
                " either that is over (with --once its server ends with it), or its server is not back yet"
            ) from error

    def _enlist(self, options: WorldOptions, size: int) -> GroupRegistered:
        assert self._observer is not None
        try:
            return self._observer.enlist(size)
        except ConnectionLost as error:  # another server may have replaced this one
            _log.info("%s; it is looked for", error)
        except Refused as no:
            if no.code != "stranger":  # more recent connections have displaced this one
                raise
        self._connect(options)
        return self._observer.enlist(size)

    def check_goes_on(self) -> None:
        if self._observer is not None and (reason := self._observer.why_over()):
            raise RankLost(f"the run is over: {reason}")

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None


def ask_for_all(
    broadcast_text: Callable[[str], str],
    asks: bool,
    ask: Callable[[], Any],
    what: str = "rank 0 of this group could not join",
    kind: type[OmniError] = RankLost,
) -> Any:
    """Return the answer to rank 0's request on all ranks, or raise its error on rank 0.

    Other ranks then raise a ConnectionLost if rank 0 may try again, else a ``kind``; the message begins with ``what``.
    ``asks`` is true on rank 0, whose ``ask`` returns plain values.
    """
    failure: Exception | None = None
    result: dict[str, Any] = {}
    if asks:
        try:
            result = {"answer": ask()}
        except Exception as error:  # of any kind, because the other ranks wait for the result
            failure, may_retry = error, isinstance(error, (ConnectionLost, Evicted))
            result = {"error": str(error), "may_retry": may_retry}
    result = json.loads(broadcast_text(json.dumps(result)))
    if "error" in result:
        raise failure or (ConnectionLost if result["may_retry"] else kind)(f"{what}: {result['error']}")
    return result["answer"]


def _check_same(run: str, options: WorldOptions) -> None:
    name, *_ = comes_back_to()
    if name and run != name:
        raise Refused(
            "gone",
            f"this group was evicted from the run {name}, which is over: the server at {options.server.address} knows"
            " nothing of it; start the group again by hand if it is to train in another one",
        )


def _rejects_connections(address: str) -> bool:
    """Return whether a server's machine is reachable, and no process listens on the server's port."""
    parts = urlsplit(address)
    if parts.scheme != "tcp":
        return False
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), _CONNECT_TIME).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
