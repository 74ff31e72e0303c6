"""Admission of ranks and their connections.

Rule 1: a rank is admitted by a proof that it holds the run's key, its data connection by one that it belongs to that
rank's process.
Rule 2: a rank has one control connection and one data connection, and keeps those.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_omni.errors import Refused
from lightning_omni.server.membership.roster import JOINS, MOST_RANKS
from lightning_omni.server.replication import stand_in
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Sender
from lightning_omni.wire import messages as m
from lightning_omni.wire.handshake import OPENS_NOTHING, Challenges, fingerprint_problem, server_mac


class Admission:
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
        self._check(hello)
        self._roster.add_member(sender.peer, hello, challenge, self._now())
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

    def _check(self, hello: m.Hello) -> None:
        """Refuse a rank that has answered its challenge if it cannot take part in this run."""
        roster = self._roster
        joins = hello.run.startswith(JOINS)
        if hello.run != roster.run and (hello.returns or (joins and not hello.world_size)):
            raise Refused(
                "gone",
                "this server knows nothing of the run: it was not started with the same --state, nothing was saved yet,"
                " or its log says why it cannot go on with what was; start the run again: each of its groups",
            )
        if joins and (roster.run if roster.joining else roster.numbers.claimed) not in ("", hello.run):
            raise Refused(
                "busy",
                "another group is about to begin a run here, or has begun it, and this server knows nothing of this"
                " one: it was started again, or this one's connection was cut; start it again, and it joins the other",
            )
        if hello.world_size > MOST_RANKS:
            raise Refused("rank", f"a run of {hello.world_size} ranks cannot be: {MOST_RANKS} are the most")
        first = roster.first or hello
        comes_late = roster.first is not None and not hello.world_size
        if hello.run != first.run or (hello.world_size != first.world_size and not comes_late):
            raise Refused(
                "busy",
                f"this server is busy with another run of {first.world_size} ranks; wait until it is over, a while"
                " after its ranks have died, or start a server for each run",
            )
        allowed = range(first.world_size, MOST_RANKS) if comes_late else range(min(hello.world_size, MOST_RANKS))
        if hello.rank not in allowed or hello.rank in roster.lost or hello.rank in roster.gone:
            of = f" of {hello.world_size}" if hello.world_size else ""  # a group that joins on its own announces none
            raise Refused("rank", f"rank {hello.rank}{of} cannot join: it was lost or never was")
        if hello.rank in roster.members and roster.members[hello.rank].peer:
            why = (
                "its connection was cut, and its group is evicted" if hello.returns else "is the script running twice?"
            )
            raise Refused("rank", f"rank {hello.rank} has joined already; {why}")
        if problem := fingerprint_problem(hello, first):
            raise Refused("fingerprint", problem)

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
