"""Admission of ranks and their connections.

Rule 1: a rank is admitted by a proof that it holds the run's key, its data connection by one that it belongs to that
rank's process.
Rule 2: a rank has one control connection and one data connection, and keeps those.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_omni.errors import Refused
from lightning_omni.server.replication import stand_in
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Sender
from lightning_omni.wire import messages as m
from lightning_omni.wire.handshake import OPENS_NOTHING, Challenges, server_mac


class Admission:
    """The service that admits ranks and their data connections."""

    def __init__(
        self,
        run: RunContext,
        key: bytes,
        random: Callable[[int], bytes],
        data_port: Callable[[], int],
        reconnect_timeout: Callable[[], float],
    ) -> None:
        self._roster, self._replication, self._limits, self._now = run.roster, run.replication, run.limits, run.now
        self._key, self._challenges = key, Challenges[m.Hello](random)
        self._store, self._data_port, self._reconnect_timeout = run.store, data_port, reconnect_timeout
        self._attaching = Challenges[m.Attach](random, refusal=OPENS_NOTHING)

    def hello(self, sender: Sender, message: m.Hello, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.CONTROL, m.Challenge(nonce=self._challenges.ask(sender.peer, message)))]

    def admit(self, sender: Sender, message: m.Proof, payload: Payload) -> list[Out]:
        hello, challenge = self._challenges.proved(sender.peer, message.mac, lambda _: self._key)
        self._roster.admit(sender.peer, hello, challenge, self._now())
        welcome = m.Welcome(
            mac=server_mac(self._key, hello, challenge),
            data_port=self._data_port(),
            heartbeat_timeout=self._limits.heartbeat,
            servers=self._replication.count,
            reconnect_timeout=self._reconnect_timeout(),
            clock=self._store.clock,
        )
        self._replication.send_to_all(self.follow, hello, challenge)
        return [Out(sender.peer, m.CONTROL, welcome)]

    def follow(self, hello: m.Hello, challenge: bytes) -> None:
        """Admit a rank that the coordinating server has admitted."""
        self._roster.add_member(stand_in(hello.rank), hello, challenge, self._now())
        self._roster.can_continue = self._roster.joining  # the coordinator reports the end

    def challenge(self, sender: Sender, message: m.Attach, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.DATA, m.AttachChallenge(nonce=self._attaching.ask(sender.peer, message)))]

    def attach(self, sender: Sender, message: m.AttachProof, payload: Payload) -> list[Out]:
        attach, challenge = self._attaching.proved(sender.peer, message.mac, self._session_of)
        if self._roster.members[attach.rank].data_peer:
            raise Refused("attached", f"rank {attach.rank} has a data connection already; it keeps that one")
        self._roster.attach(attach.rank, sender.peer)
        mac = server_mac(self._session_of(attach), attach, challenge)
        return [Out(sender.peer, m.DATA, m.Attached(mac=mac))]

    def _session_of(self, attach: m.Attach) -> bytes:
        member = self._roster.members.get(attach.rank)
        return member.session if member is not None else b""
