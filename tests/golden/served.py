"""Golden transcripts of the server's state machine: fixed messages in, at fixed times, and everything that comes out.

Keys, nonces and tensors are drawn by Python's own generator. A case says what ranks say; what the server answers is not
looked at but for what the next message needs (clocks, leases, challenges).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from golden.digests import Outcome, digest, order_of, size_of
from golden.names import counted_fields, type_number
from golden.simulated import METHODS, fractions
from lightning_omni.errors import MalformedMessage, ProtocolError
from lightning_omni.methods import Method, method_named
from lightning_omni.methods.model.modules import describe_module
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of
from lightning_omni.registry import to_wire
from lightning_omni.server.core import ServerCore
from lightning_omni.server.event_log import Event
from lightning_omni.server.service import Out
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.handshake import client_mac, session_key
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.messages import EpochPlan

KEY = bytes(range(32))
SHAPES = {"first.weight": (4, 3), "first.bias": (4,), "last.weight": (5,)}
SILENCE, JOINING = 30.0, 300.0


def weights_of(seed: int = 0, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Parameter]:
    """Named parameters in single precision, as the server gets them."""
    named = shapes or SHAPES
    return {
        name: Parameter(fractions(100 + seed + place, *shape, dtype=torch.float32))
        for place, (name, shape) in enumerate(named.items())
    }


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.75)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01)


class Session:
    """All ranks of a run, which speak to a `ServerCore` as its sockets would; everything said is kept.

    Args:
        world_size: number of ranks.

    Attributes:
        spoken: what was said, in order: ``"in"`` or ``"out"``, channel, peer, message and payload.
        events: what the server recorded.
        clock: of each group and optimizer, the clock of what it read last.
        unanswered: groups and optimizers whose push has no answer yet.
    """

    def __init__(self, world_size: int = 4) -> None:
        self.events: list[Event] = []
        self.core = ServerCore(KEY, random.Random(0).randbytes, SILENCE, JOINING, record=self.events.append)
        self.core.data_port = 4242
        self.world_size, self.now = world_size, 100.0
        self.spoken: list[tuple[str, str, bytes, m.Message, bytes]] = []
        self.groups: tuple[tuple[int, ...], ...] = ()
        self.method: Method = method_named("async_sgd")
        self.generation = 0
        self.clock: dict[tuple[int, int], int] = defaultdict(int)
        self.unanswered: set[tuple[int, int]] = set()
        self.settings: tuple[dict[str, Any], ...] = ()
        self._sessions: dict[int, bytes] = {}
        self._tensors = 0
        self._pushes: Counter[tuple[int, int]] = Counter()

    # --- Speaking ----------------------------------------------------------------------------------------------------

    def say(self, channel: str, peer: bytes, message: m.Message, payload: bytes = b"") -> list[Out]:
        """A message from a peer, as bytes, and what the server sends for it; time goes on by a quarter of a second."""
        self.now += 0.25
        self.spoken.append(("in", channel, peer, message, payload))
        try:
            arrived = msgspec.msgpack.decode(m.encode(message), type=type(message))
            expected = self.core.check_payload(peer, arrived) if channel == m.DATA else len(payload)
            assert expected == len(payload), f"{type(message).__name__}: {len(payload)} bytes, {expected} expected"
            buffer = (
                torch.frombuffer(bytearray(payload), dtype=torch.uint8) if channel == m.DATA and payload else payload
            )
            out = self.core.receive(channel, peer, arrived, buffer, self.now)
        except ProtocolError as error:
            out = self.core.refuse(channel, peer, error)
        self.hear(out)
        self.core.status_service.end()
        return out

    def hear(self, out: Sequence[Out]) -> None:
        """What the server sends, as it leaves."""
        for item in out:
            parts = [part if isinstance(part, bytes) else part.numpy().tobytes() for part in item.payload]
            self.spoken.append(("out", item.channel, item.peer, item.message, b"".join(parts)))
            if isinstance(item.message, m.Weights):
                group = next(number for number, ranks in enumerate(self.groups) if int(item.peer[1:]) in ranks)
                self.clock[group, item.message.optimizer] = item.message.clock
                self.unanswered.discard((group, item.message.optimizer))

    def control(self, rank: int, message: m.Message, payload: bytes = b"") -> Any:
        """A control message of a rank; the first answer that it gets itself, or None."""
        out = self.say(m.CONTROL, b"c%d" % rank, message, payload)
        mine = (item.message for item in out if item.peer == b"c%d" % rank and not _is_unasked(item.message))
        return next(mine, None)

    def data(self, rank: int, message: m.Message, payload: bytes = b"") -> Any:
        """A data message of a rank; the first answer that it gets itself, or None."""
        out = self.say(m.DATA, b"d%d" % rank, message, payload)
        return next((item.message for item in out if item.peer == b"d%d" % rank), None)

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.hear(self.core.tick(self.now))

    # --- What ranks say ----------------------------------------------------------------------------------------------

    def hello(self, rank: int, /, **changes: Any) -> m.Hello:
        layout = Layout.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        fields: dict[str, Any] = {
            "version": m.VERSION,
            "run": "golden",
            "rank": rank,
            "world_size": self.world_size,
            "fingerprint": layout.fingerprint,
            "tensors": len(layout.specs),
            "numbers": layout.numel,
            "nonce": bytes([rank]) * 32,
        }
        return m.Hello(**{**fields, **changes})

    def join(self, rank: int, **changes: Any) -> None:
        hello = self.hello(rank, **changes)
        challenge = self.control(rank, hello)
        self.control(rank, m.Proof(mac=client_mac(KEY, hello, challenge.nonce)))
        self._sessions[rank] = session_key(KEY, hello, challenge.nonce)
        self.attach(rank, b"d%d" % rank)

    def attach(self, rank: int, peer: bytes) -> None:
        attach = m.Attach(rank=rank, nonce=bytes([rank]) * 32)
        (asked,) = self.say(m.DATA, peer, attach)
        assert isinstance(asked.message, m.AttachChallenge)
        mac = client_mac(self._sessions[rank], attach, asked.message.nonce)
        self.say(m.DATA, peer, m.AttachProof(mac=mac))

    def join_all(self) -> None:
        for rank in range(self.world_size):
            self.join(rank)

    def form(self, method: str, *groups: tuple[int, ...], keep_epoch: bool = False) -> None:
        self.method, self.groups, self.generation = method_named(method), groups, self.generation + 1
        self.clock.clear()
        self.unanswered.clear()
        wire = to_wire(self.method)
        self._pushes.clear()
        self.control(0, m.FormGroups(generation=self.generation, groups=groups, method=wire, keep_epoch=keep_epoch))

    def seed(self, *parts: Mapping[str, Any]) -> None:
        packed, payload = packed_bytes({"parts": list(parts)})
        self.data(0, m.UploadWeights(packed=packed, nbytes=len(payload)), payload)

    def begin(
        self, method: str, *groups: tuple[int, ...], make: Callable[[Any], Optimizer] = sgd, optimizers: int = 1
    ) -> None:
        """All ranks join, groups are formed, weights are handed over."""
        self.join_all()
        self.form(method, *groups)
        self.seed(*(self.part(make, number) for number in range(optimizers)))

    def part(self, make: Callable[[Any], Optimizer], seed: int = 0, **more: Any) -> dict[str, Any]:
        """Weights and optimizer as rank 0 hands them over; no optimizer if it steps at the workers."""
        parameters = weights_of(10 * seed)
        optimizer = make(list(parameters.values()))
        at_server = self.method.steps_at == "server"
        self.settings = tuple(hyperparameters_of(optimizer)) if at_server else ()
        names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        return {
            "optimizer": describe(optimizer, names) if at_server else None,
            "weights": {name: parameter.detach() for name, parameter in parameters.items()},
            "clock": 0,
            **more,
        }

    def leader(self, group: int) -> int:
        return self.groups[group][0]

    def push(
        self,
        group: int,
        optimizer: int = 0,
        present: tuple[bool, ...] = (True, True, True),
        spoil: bool = False,
        shapes: Sequence[tuple[int, ...]] = tuple(SHAPES.values()),
        **changes: Any,
    ) -> None:
        """A group pushes; not if it still waits for an answer, nor with a method that goes from group to group."""
        if (group, optimizer) in self.unanswered or self.method.talks_to_peers:
            return
        self._tensors += 1
        drawn = [fractions(1000 + 10 * self._tensors + place, *shape) / 4 for place, shape in enumerate(shapes)]
        tensors = [tensor.float() for tensor, there in zip(drawn, present, strict=True) if there]
        if spoil:
            tensors[-1][0] = torch.inf
        payload = flat_bytes(tensors)
        fields: dict[str, Any] = {
            "optimizer": optimizer,
            "read_at": self.clock[group, optimizer],
            "present": present,
            "hyperparameters": self.settings,
            "epoch": -1,
            "trained": 0,
            "nbytes": len(payload),
            "note": self._tensors % 3 / 8,
        }
        if "sequence" in m.PushMessage.__struct_fields__:  # not of an older commit, beside which this script runs
            fields["incarnation"] = self.core.roster.formed.identity(group).incarnation
            fields["sequence"] = self._pushes[group, optimizer] + 1
        self.unanswered.add((group, optimizer))
        answer = self.data(self.leader(group), m.PushMessage(**{**fields, **changes}), payload)
        self._pushes[group, optimizer] += not isinstance(answer, m.RefusedMessage)
        if isinstance(answer, m.RefusedMessage):
            self.unanswered.discard((group, optimizer))

    def take_snapshot(self, with_state: bool = True) -> Any:
        """The snapshot's tree."""
        (out,) = self.say(m.DATA, b"d0", m.TakeSnapshot(with_state=with_state))
        assert isinstance(out.message, m.Snapshot)
        (payload,) = out.payload
        assert isinstance(payload, Tensor)
        tree = unpack(out.message.packed, payload.clone())
        return {**tree, "trained": out.message.cut.trained}

    def synchronize(self, number: int, what: str = "barrier") -> None:
        """All who are in groups come to a synchronization point."""
        for rank in sorted(rank for ranks in self.groups for rank in ranks):
            self.control(rank, m.Contribute(number=number, what=what), b"%d" % rank)

    # --- What is kept ------------------------------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome:
        """What is kept of all that was said."""
        by_type: dict[str, list[Any]] = defaultdict(list)
        sequence: list[Any] = []
        counted: list[Any] = []
        sizes: list[float] = []
        for way, channel, peer, message, payload in self.spoken:
            kind = type_number(type(message))
            by_type["said" if way == "in" else str(kind)].append(message)
            sequence.append([way, channel, peer, kind])
            counted.append([way, channel, peer, kind, counted_fields(message)])
            if way == "out" and isinstance(message, m.Weights) and payload:
                sizes.append(size_of(torch.frombuffer(bytearray(payload), dtype=torch.float32)))
        bits = {name: digest(messages) for name, messages in sorted(by_type.items())}
        bits["sequence"] = digest(sequence)
        bits["payloads"] = digest(payload for way, *_, payload in self.spoken if way == "out")
        bits["events"] = digest(self.events)
        return Outcome(digest([*counted, *order_of(self.events)]), tuple(sizes[-3:]), bits)


def _is_unasked(message: m.Message) -> bool:
    return isinstance(message, m.Status) and message.sent < 0


def flat_bytes(tensors: Sequence[Tensor]) -> bytes:
    """Tensors as a payload."""
    layout = Layout.of({str(place): tensor for place, tensor in enumerate(tensors)})
    buffer = layout.empty().zero_()
    for view, tensor in zip(layout.views(buffer), tensors, strict=True):
        view.copy_(tensor)
    return buffer.numpy().tobytes()


def packed_bytes(tree: Any) -> tuple[Packed, bytes]:
    packed, buffer = pack(tree)
    return packed, buffer.numpy().tobytes()


# --- Training ---------------------------------------------------------------------------------------------------------

APART = ((0,), (1,), (2,), (3,))
ORDER = (0, 1, 2, 3, 1, 1, 0, 2, 1, 3, 0, 1, 2, 0, 0, 3, 1, 2, 3, 2)
"""Who pushes when; those that wait for an answer are passed over."""


class RankLeases:
    """The groups' places in an epoch of leased data.

    Args:
        session: with groups formed.
        plan: the epoch.
    """

    def __init__(self, session: Session, plan: EpochPlan) -> None:
        self.session, self.plan = session, plan
        self.drawn = [0] * len(session.groups)
        self.trained = [0] * len(session.groups)
        self.interval = 0
        for ranks in session.groups:
            for rank in ranks:
                session.control(rank, m.OpenEpoch(plan=plan))

    def draw(self, group: int) -> bool:
        """Whether the group has a batch to train; it draws if it has none."""
        if self.trained[group] < self.drawn[group]:
            return True
        session, number = self.session, self.drawn[group]
        message = m.DrawBatches(
            epoch=self.plan.epoch, generation=session.generation, number=number, trained=self.trained[group]
        )
        answers = [session.control(rank, message) for rank in session.groups[group]]
        self.drawn[group] += len(answers[0].batches)
        self.interval = max(self.interval, *(batch.interval for batch in answers[0].batches), 0)
        return bool(answers[0].batches)

    def push_all(self, group: int) -> None:
        """The group trains whatever it can have."""
        while self.draw(group):
            self.push(group)

    def push(self, group: int, **more: Any) -> None:
        """The group trains one batch and pushes, if it can."""
        if (group, 0) not in self.session.unanswered and self.draw(group):
            self.trained[group] += 1
            self.session.push(group, epoch=self.plan.epoch, trained=self.trained[group], **more)

    def wait(self, group: int) -> None:
        """All ranks of the group ask what is next."""
        for rank in self.session.groups[group]:
            message = m.AskNext(
                epoch=self.plan.epoch,
                generation=self.session.generation,
                trained=self.trained[group],
                interval=self.interval,
            )
            self.session.control(rank, message)


def plan_of(total: int = 64, epoch: int = 0, **more: Any) -> EpochPlan:
    return EpochPlan(epoch=epoch, total=total, batch_size=2, budget=more.pop("budget", total), **more)


def trains(method: str, is_leased: bool, make: Callable[[Any], Optimizer] = sgd) -> Session:
    """Pushes of four groups, a few of them odd; then all wait, synchronize and ask for a snapshot."""
    session = Session()
    session.begin(method, *APART, make=make)
    leases = RankLeases(session, plan_of()) if is_leased else None
    push = leases.push if leases is not None else session.push
    at_server = session.method.steps_at == "server"
    for step, group in enumerate(ORDER):
        push(
            group,
            spoil=step == 8,
            present=(True, step != 6, True) if at_server else (True, True, True),
            pull=step != 11 or not method.startswith("downpour"),
        )
        if step == 12:
            trained = leases.trained[2] if leases is not None else 0
            session.data(2, m.FetchMessage(optimizer=0, epoch=0 if is_leased else -1, trained=trained))
        if step == 14:
            session.control(1, m.Heartbeat(sent=1.5, compute_time=0.25, step_time=0.5, exchange_time=0.125))
    _finish(session, leases)
    return session


def _finish(session: Session, leases: RankLeases | None) -> None:
    """The end of an epoch, and the synchronization point after it, with all that belongs to it."""
    for group in range(len(session.groups)):
        if leases is not None and (group, 0) not in session.unanswered:
            leases.wait(group)
    session.synchronize(0)
    for group in range(len(session.groups)) if session.method.evaluated == "mean" else ():
        payload = flat_bytes(
            [fractions(500 + group + place, *shape).float() for place, shape in enumerate(SHAPES.values())]
        )
        session.data(session.leader(group), m.AverageMessage(optimizer=0, nbytes=len(payload)), payload)
    for group in range(len(session.groups)):
        own = {"memory": {"steps": group}, "weights": [fractions(600 + group, 3).float()]}
        packed, payload = packed_bytes(own)
        session.data(session.leader(group), m.GroupState(packed=packed, nbytes=len(payload)), payload)
    session.take_snapshot()
    session.take_snapshot(with_state=False)
    session.control(0, m.AskStatus())


def regroups(method: str) -> Session:
    """Two groups of two become four, then three, in the midst of an epoch; the server keeps what it knows."""
    session = Session()
    session.begin(method, (0, 1), (2, 3))
    leases = RankLeases(session, plan_of(96))
    for group in (0, 1, 1, 0, 1):
        leases.push(group)
    for number, groups in enumerate((APART, ((0, 3), (2,), (1,)))):
        session.synchronize(2 * number)
        tree = session.take_snapshot()
        session.form(method, *groups, keep_epoch=True)
        if number:  # once on the same weights, once handed back, as when ranks stepped in between
            session.seed(*_handed_back(session, tree))
        session.synchronize(2 * number + 1)
        leases = RankLeases(session, plan_of(96))
        for group in (1, 0, 2, 2, 0, 1):
            session.data(session.leader(group), m.FetchMessage(optimizer=0))
            leases.push(group)
    for group in range(3):
        leases.wait(group)
    session.control(0, m.DrawBatches(epoch=0, generation=1, number=0))  # of groups that are no more
    return session


def _handed_back(session: Session, tree: Any, make: Callable[[Any], Optimizer] = sgd) -> Iterator[dict[str, Any]]:
    """The parts of a snapshot, as rank 0 hands them to a server again."""
    for saved in tree["parts"]:
        parameters = {name: Parameter(weight) for name, weight in saved["weights"].items()}
        optimizer = make(list(parameters.values()))
        optimizer.load_state_dict({**optimizer.state_dict(), "state": saved["state"]})
        names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        yield {
            "optimizer": describe(optimizer, names) if session.method.steps_at == "server" else None,
            "weights": {name: parameter.detach() for name, parameter in parameters.items()},
            "clock": saved["clock"],
            "method": saved["method"],
        }


def resumes(method: str, make: Callable[[Any], Optimizer]) -> Session:
    """A snapshot goes to another server, in the midst of an epoch, and training goes on there."""
    first = Session()
    first.begin(method, *APART, make=make)
    leases = RankLeases(first, plan_of())
    for group in ORDER[:9]:
        leases.push(group)
    tree = first.take_snapshot()
    session = Session()
    session.join_all()
    session.form(method, *APART)
    session.settings = first.settings
    session.seed(*_handed_back(session, tree, make))
    again = RankLeases(session, plan_of(trained=tuple(tree["trained"])))
    for group in range(4):
        session.data(group, m.FetchMessage(optimizer=0))
    for group in ORDER[9:]:
        again.push(group)
    session.take_snapshot()
    session.spoken = first.spoken + session.spoken
    session.events = first.events + session.events
    return session


# --- Losses -----------------------------------------------------------------------------------------------------------


def loses(method: str) -> Session:
    """Groups die one after the other: told of by the launcher, silent, hung up, failed; at last that of rank 0."""
    session = Session(6)
    session.begin(method, (0,), (1, 5), (2,), (3,), (4,))
    leases = RankLeases(session, plan_of(120))
    for group in (0, 1, 2, 3, 4, 0, 1, 2):
        leases.push(group)
    session.control(0, m.RankEnded(rank=3, reason="rank 3 was killed by signal 9"))
    for group in (0, 1, 2, 4):
        leases.push(group)
    session.hear(session.core.hang_up(b"c5"))
    leases.push(2)
    leases.push(0)
    session.control(1, m.Heartbeat(sent=1.0))  # it is told that it was lost
    session.push(1)
    for _ in range(2):
        session.tick(SILENCE - 5)
        for rank in (0, 2):
            session.control(rank, m.Heartbeat(sent=session.now, compute_time=0.5, signal=15))
    for group in (0, 2, 0):
        leases.push(group)
    leases.wait(2)
    session.control(2, m.Goodbye(reason="rank 2 failed: KeyError"))
    leases.push(0)
    leases.wait(0)
    session.control(0, m.Goodbye(reason="out of memory"))
    session.control(0, m.AskStatus())
    session.data(0, m.FetchMessage(optimizer=0))
    return session


def fails() -> Session:
    """The server itself cannot go on."""
    session = Session(2)
    session.begin("async_sgd", (0,), (1,))
    session.hear(session.core.fail("ValueError: no"))
    session.push(0)
    return session


# --- Epochs and synchronization points --------------------------------------------------------------------------------


def validates() -> Session:
    """An epoch with validations in it, of which a part was trained before; then one that groups leave early."""
    session = Session(3)
    session.begin("async_sgd", (0, 1), (2,))
    leases = RankLeases(session, plan_of(40, budget=32, validate_every=12, validate_offset=4, trained=((4, 8),)))
    for _ in range(3):
        for group in (0, 1, 1):
            leases.push(group)
        for group in (1, 0):
            leases.wait(group)
    leases.push_all(0)
    leases.push_all(1)
    leases.wait(1)
    leases.wait(0)
    for epoch, stop in ((1, ""), (2, "skip"), (3, "validate"), (4, "end")):
        leases = RankLeases(session, plan_of(24, epoch))
        leases.push(0)
        leases.push(1)
        leave = m.LeaveEpoch(epoch=epoch, generation=session.generation, trained=leases.trained[1], stop=stop)
        session.control(2, leave)
        if stop:
            leases.push(0)
        else:
            leases.push_all(0)
        leases.wait(1)
        leases.wait(0)
    other = plan_of(26, 4)
    session.control(1, m.OpenEpoch(plan=other))
    return session


def publishes() -> Session:
    """Validations while groups train: one that is evaluated, one whose group dies, and what all ranks hear of them."""
    session = Session(3)
    session.begin("hardsync", (0, 1), (2,))
    leases = RankLeases(session, plan_of(40))
    leases.push(0)
    leases.push(1)
    for rank in (2, 0, 1):
        session.control(rank, m.ClaimValidation(epoch=0, generation=session.generation, passed=1))
    session.data(2, m.TakeSnapshot(with_state=False, version=1))
    leases.push(0)  # whose barrier does not wait for the group that evaluates
    session.data(0, m.TakeSnapshot(version=1))
    packed, buffer = pack({"metrics": {"loss": fractions(3, 1)[0].float()}, "buffers": {}, "steps": 4})
    result = m.PublishEvaluation(number=1, packed=packed, nbytes=buffer.numel())
    session.data(0, result, b"")
    session.data(2, result, buffer.numpy().tobytes())
    leases.push(0)
    leases.push(1)
    for rank in range(3):
        session.data(rank, m.ReadEvaluation(number=1))
    session.control(0, m.ReleaseVersion(number=1))
    session.control(2, m.ClaimValidation(epoch=0, generation=session.generation, passed=2))
    session.control(0, m.RankEnded(rank=2, reason="gone"))
    session.control(0, m.AskValidations())
    for rank in range(2):
        session.data(rank, m.ReadEvaluation(number=2))
        session.control(rank, m.ClaimValidation(epoch=0, generation=session.generation, passed=2))
    session.data(1, m.ReadEvaluation(number=3))
    leases.push(0)
    return session


def gathers() -> Session:
    """Synchronization points: small and large, one after another and at once, with a loss, and a mismatch."""
    session = Session(4)
    session.begin("hardsync", (0,), (1, 2), (3,))
    session.push(0)
    session.synchronize(0, "gather")
    large, form = bytes(range(256)) * 200, m.encode(m.AskStatus())
    session.data(1, m.Upload(nbytes=len(large)), large)
    for rank in range(4):
        session.control(
            rank, m.Contribute(number=1, what="gather", uploaded=rank == 1), b"" if rank == 1 else b"little"
        )
    for rank in range(4):
        session.data(rank, m.Download(number=1))
    session.data(0, m.Download(number=7))
    session.data(2, m.Upload(nbytes=len(form)), form)
    session.control(2, m.ReadUpload())
    session.control(2, m.ReadUpload())
    session.data(2, m.LargeMessage(nbytes=64), bytes(64))
    for number, rank in ((3, 0), (2, 0), (3, 1), (2, 1), (3, 2)):
        session.control(rank, m.Contribute(number=number, what="barrier"), b"")
    session.control(0, m.RankEnded(rank=3, reason="gone"))
    session.push(1)
    session.control(2, m.Contribute(number=2, what="all_reduce"), b"")
    return session


# --- Merged head, several optimizers, parameters that come ------------------------------------------------------------

HEAD = 1


class Head:
    """A merged head beside the body, and what groups say to it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        session.join_all()
        session.form("async_sgd", *APART)
        module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        with torch.no_grad():
            for place, parameter in enumerate(module.parameters()):
                parameter.copy_(fractions(700 + place, *parameter.shape))
        named = {f"head.{name}": parameter for name, parameter in module.named_parameters()}
        optimizer = sgd(list(named.values()))
        self.settings = tuple(hyperparameters_of(optimizer))
        names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
        head = {
            "optimizer": describe(optimizer, names),
            "weights": {name: parameter.detach() for name, parameter in named.items()},
            "clock": 0,
            "head": {"name": "head", "module": describe_module(module), "seed": 5},
        }
        session.seed(session.part(sgd, 0, head=None), head)

    def forward(self, group: int, seed: int, exclusive: bool = True, columns: int = 3) -> None:
        packed, payload = packed_bytes([[fractions(seed, 5, columns).float()], {}])
        asked: dict[str, Any] = {"exclusive": exclusive}
        message = m.HeadForward(
            optimizer=HEAD,
            packed=packed,
            nbytes=len(payload),
            training=(True,) * 4,
            trainable=(True,) * 4,
            **asked,
        )
        self.session.data(group, message, payload)

    def backward(self, group: int, seed: int, spoil: bool = False, **more: Any) -> None:
        gradient = fractions(seed, 5, 2).float() * (torch.inf if spoil else 1)
        packed, payload = packed_bytes([gradient])
        message = m.HeadBackward(
            optimizer=HEAD, packed=packed, nbytes=len(payload), hyperparameters=self.settings, **more
        )
        self.session.data(group, message, payload)


def merges() -> Session:
    """Access to a merged head: in line, given up, refused, clipped, cut short by a death."""
    session = Session()
    head = Head(session)
    for group in (0, 1, 2):
        head.forward(group, 30 + group)
    head.forward(3, 40, exclusive=False)
    head.forward(1, 41)  # twice in one step
    head.backward(0, 50)
    session.push(0)
    session.data(1, m.HeadRelease(optimizer=HEAD))
    head.backward(2, 51, clip=0.5, scale=0.5)
    head.backward(2, 52)  # without access
    session.push(2)
    head.forward(3, 42, columns=2)  # the head cannot take it
    head.forward(3, 43)
    head.forward(0, 44)
    head.backward(3, 53, spoil=True)
    head.forward(1, 45)
    session.control(0, m.RankEnded(rank=1, reason="gone"))
    head.backward(0, 54, clip=0.1, clip_algorithm="value")
    session.push(3)
    session.push(0)
    session.take_snapshot()
    session.control(2, m.AskStatus())
    return session


def steps_two(method: str) -> Session:
    """Two optimizers, which groups step in different orders: one that waits with one is idle at the other."""
    session = Session(3)
    session.begin(method, (0,), (1,), (2,), optimizers=2)
    pushes = ((0, 0), (1, 1), (2, 0), (0, 1), (1, 0), (2, 1), (0, 0), (1, 1), (2, 1), (2, 0), (0, 1), (1, 0))
    for group, optimizer in pushes:
        if not any(waits == group for waits, _ in session.unanswered):
            session.push(group, optimizer)
    session.synchronize(0)
    session.take_snapshot()
    return session


def grows(method: str) -> Session:
    """Parameters come in mid-run, to one group after another; one says something else, and is refused."""
    session = Session(3)
    session.begin(method, (0,), (1,), (2,))
    for group in (0, 1, 2, 0):
        session.push(group)
    shapes = (*SHAPES.values(), (2, 2))
    at_server = session.method.steps_at == "server"
    before = session.settings
    after = ({**before[0]}, {**before[0], "lr": 0.5}) if at_server else ()
    groups = [{**settings, "params": places} for settings, places in zip(after, ([0, 1], [2, 3]), strict=False)]
    tree = {"groups": groups, "state": {}}
    for group, extra in ((0, (2, 2)), (1, (3,)), (2, (2, 2))):
        weights = {"extra": fractions(800 + group, *extra).float()}
        packed, payload = packed_bytes({**tree, "weights": weights})
        session.data(group, m.Restructure(optimizer=0, packed=packed, nbytes=len(payload)), payload)
        session.unanswered.discard((group, 0))
        session.settings = after
        session.push(0, present=(True,) * 4, shapes=shapes)
        session.settings = before
        session.push(1)
    session.take_snapshot()
    session.data(1, m.FetchMessage(optimizer=0))
    return session


# --- Admission --------------------------------------------------------------------------------------------------------


def admits() -> Session:
    """Strangers, wrong keys, wrong versions, bytes that are no message, and a second run after the first."""
    session = Session(2)
    session.control(0, m.Heartbeat(sent=0.0))
    session.data(0, m.FetchMessage(optimizer=0))
    for changes in ({"version": m.VERSION + 1}, {"rank": 9}):
        session.control(7, session.hello(1, **changes))
    session.control(7, m.Proof(mac=b"no"))
    session.join(0)
    others: tuple[dict[str, Any], ...] = ({"run": "another"}, {"fingerprint": "f" * 64}, {"world_size": 5}, {"rank": 0})
    for changes in others:
        hello = session.hello(1, **changes)
        challenge = session.control(8, hello)
        session.control(8, m.Proof(mac=client_mac(KEY, hello, challenge.nonce)))
    session.hear(session.core.refuse(m.CONTROL, b"c9", MalformedMessage("not a control message")))
    session.attach(0, b"d9")
    session.say(m.DATA, b"d8", m.AttachProof(mac=b"no"))
    session.join(1)
    session.control(1, m.FormGroups(generation=1, groups=((0,), (1,)), method={"name": "async_sgd"}))
    session.control(0, m.FormGroups(generation=1, groups=((0,),), method={"name": "async_sgd"}))
    session.control(0, m.FormGroups(generation=1, groups=((0,), (1,)), method={"name": "telepathy"}))
    session.data(0, m.UploadWeights(packed=packed_bytes({})[0], nbytes=0))
    session.form("async_sgd", (0,), (1,))
    session.data(0, m.UploadWeights(packed=packed_bytes({})[0], nbytes=0))
    session.seed(session.part(sgd))
    for rank in (0, 1):
        session.control(rank, m.Goodbye())
    session.core.reset()
    session.generation = 0
    session.begin("async_sgd", (0,), (1,))
    session.push(1)
    return session


def joins() -> Session:
    """A group comes in the middle of an epoch, another one leaves, and its name comes back."""
    session = Session(world_size=2)
    session.begin("async_sgd", (0,), (1,))
    plan = EpochPlan(epoch=0, total=32, batch_size=4, budget=32)
    for rank in (0, 1):
        session.control(rank, m.OpenEpoch(plan=plan))
        session.control(rank, m.DrawBatches(epoch=0, generation=1, number=0))
        session.push(rank, epoch=0, trained=1)
    session.join(6, world_size=0)
    session.control(6, m.Join(ranks=(1,)))
    session.control(6, m.Join(ranks=(6,), name="1"))
    session.control(6, m.Join(ranks=(6,), name="guest"))
    session.groups = ((0,), (1,), (6,))
    session.data(6, m.FetchMessage(optimizer=0))
    session.control(6, m.DrawBatches(epoch=0, generation=1, number=0))
    session.push(2, epoch=0, trained=1)
    session.control(1, m.Goodbye())
    session.join(7, world_size=0)
    session.control(7, m.Join(ranks=(7,), name="1"))
    session.groups = ((0,), (1,), (6,), (7,))
    session.control(7, m.DrawBatches(epoch=0, generation=1, number=0))
    for group in (3, 2, 0):
        session.push(group)
    session.control(0, m.AskStatus())
    session.control(0, m.AskServerAddresses())
    return session


def travels() -> Outcome:
    """What leaders say to each other, and a message too long for a frame, as bytes."""
    messages = (
        m.LargeMessage(nbytes=1 << 20),
        m.ReadPublished(optimizer=1),
        m.PeerMessage(optimizer=0, nbytes=96),
        m.Published(nbytes=96),
        m.PeerMessageStored(),
    )
    bits = {str(type_number(type(message))): digest([message]) for message in messages}
    return Outcome(digest(sorted(bits)), (), bits)


OBSERVING = ("Observe", "ObserverProof", "ObserverWelcome", "AskOverview", "Overview", "Evict")
ASKING = ("AskServer", "ServerDescription", "Echo", "Echoed")
ENLISTING = ("RegisterGroup", "GroupRegistered", "StoreRunState", "RunStateStored", "ReadRunState", "StoredRunState")
TRAVELLING = (
    *(m.LargeMessage, m.ReadPublished, m.PeerMessage, m.Published, m.PeerMessageStored),
    *(getattr(m, name) for name in (*OBSERVING, *ASKING, *ENLISTING)),
)
"""Messages that no transcript holds: those from leader to leader, the one that announces others, those of observers
(tests/unit/server/test_observation.py and test_doctor.py have them), and of groups that come on their own
(tests/unit/runtime/test_joining.py)."""


def sessions() -> dict[str, Callable[[], Session]]:
    """Every transcript by its name."""
    found: dict[str, Callable[[], Session]] = {}
    for method in METHODS:
        for is_leased in (False, True):
            data = "dynamic" if is_leased else "static"
            found[f"served {method}, {data} data"] = partial(trains, method, is_leased)
        found[f"served {method}, a regroup"] = partial(regroups, method)
        found[f"served {method}, groups die"] = partial(loses, method)
        for name, make in (("SGD", sgd), ("AdamW", adamw)):
            found[f"served {method}, {name}, a resume"] = partial(resumes, method, make)
    for method in ("async_sgd", "softsync", "delay_compensated"):
        found[f"served {method}, AdamW"] = partial(trains, method, True, adamw)
    for method in ("async_sgd", "hardsync", "local_sgd:period=3"):
        found[f"served {method}, two optimizers"] = partial(steps_two, method)
        found[f"served {method}, parameters come"] = partial(grows, method)
    found["served async_sgd, merged head"] = merges
    return found | {
        "served groups that come and go": joins,
        "served validations while groups train": publishes,
        "served admission": admits,
        "served validations and stops": validates,
        "served synchronization points": gathers,
        "served failure of the server": fails,
    }


def cases() -> dict[str, Callable[[], Outcome]]:
    """Every case by its name."""

    def outcome(make: Callable[[], Session]) -> Outcome:
        return make().outcome

    return {**{name: partial(outcome, make) for name, make in sessions().items()}, "messages between leaders": travels}
