"""Several servers that hold a partition each and their groups, in memory: what is said arrives in any order.

Each connection keeps its order; which one is served next, a random number says.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import msgspec
import torch
from core import (
    COORDINATOR,
    RAW,
    Action,
    Event,
    GroupCore,
    Layout,
    Memory,
    Out,
    Outgoing,
    Partition,
    ServerCore,
    ServerRequest,
    Total,
    WireFormat,
    as_tensor,
    copies,
    decode,
    describe,
    handshake,
    hyperparameters_of,
    pack,
    read,
    registry,
    unpack,
)
from core import messages as m
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import ProtocolError
from lightning_omni.methods import (
    Answer,
    Exchange,
    Gradient,
    Inbox,
    Method,
    NextGradient,
    Publish,
    Pulled,
    ReadInbox,
    ReadPeer,
    Receive,
    Replica,
    SendPeer,
)
from lightning_omni.registry import to_wire
from lightning_omni.topology import GroupId

KEY = bytes(range(32))
NONCE = bytes(32)
TICK = 1e-3
"""Seconds from one thing that arrives to the next."""
SHAPES = ((5, 40), (3,), (130,), ())

Make = Callable[[Sequence[Parameter]], torch.optim.Optimizer]


def drawn_parameters() -> dict[str, Parameter]:
    """Weights of no model."""
    generator = torch.Generator().manual_seed(0)
    return {f"p{place}": Parameter(torch.randn(shape, generator=generator)) for place, shape in enumerate(SHAPES)}


class Ensemble:
    """The run.

    Args:
        servers: servers that hold a partition each.
        groups: of one rank each.
        method: what they follow.
        make: makes the user's optimizer.
        wire_format: of pushes and their answers.
        seed: of the order in which things arrive.
        overlap: whether exchanges travel while groups compute.
        parameters: makes the weights that each group begins with.
        member: the class of its groups.
        by_member: whether groups have a rank for each server, which says and hears the part that is that server's.
        stands_for: of one server, how many it stands for: fragments are cut out of their shares.

    Attributes:
        order: groups of the pushes that were handled, in order.
        events: what the server that coordinates records.
        dead: ranks that have died.
        now: the time, which passes with each thing that arrives.
        published: of each group, what it has published.
        inboxes: of each group, what others have sent it.
    """

    stands_for = 1

    def __init__(
        self,
        servers: int,
        groups: int,
        method: Method,
        make: Make,
        wire_format: WireFormat = RAW,
        seed: int = 0,
        overlap: bool = False,
        parameters: Callable[[], dict[str, Parameter]] = drawn_parameters,
        member: type[Group] | None = None,
        by_member: bool = False,
        stands_for: int = 1,
    ) -> None:
        self.by_member, self.stands_for = by_member, stands_for
        self.begin(method, wire_format, seed, overlap, parameters)
        self.cores = [
            ServerCore(
                KEY, Random(9).randbytes, record=self._note if number == 0 else None, servers=servers, number=number
            )
            for number in range(servers)
        ]
        for number in range(1, servers):
            self._link(number)
        self.groups = [(member or Group)(self, rank, make) for rank in range(groups)]
        for group in self.groups:
            group.join(groups)
        first = self.groups[0]
        form = m.FormGroups(
            generation=1,
            groups=tuple(tuple(group.ranks) for group in self.groups),
            method=to_wire(method),
            wire_format=to_wire(wire_format),
            overlap=overlap,
            by_member=by_member,
        )
        self.control(0, form, m.GroupsFormed)
        first.seed()
        if stands_for > 1:
            self._stand_for(stands_for)

    def _stand_for(self, servers: int) -> None:
        """The one server cuts fragments out of the shares of several, as groups do."""
        [served] = self.cores[0].store.all
        layout = served.layout = msgspec.structs.replace(served.layout, servers=servers)
        served._layouts = {len(layout.specs): layout}
        master, side = served.master, served.method_side

        def cut(fragments: int) -> None:
            several = range(fragments) if fragments > 1 else ()
            parts = [read(master.weights(), layout.pieces(number, fragments)) for number in several]
            master._fragments = [list(map(Parameter, part)) for part in parts] or [list(master.parameters.values())]

        master.cut = cut  # type: ignore[assignment, method-assign, unused-ignore]
        served.method_side = side.method.server_side(master, side.groups)

    def begin(
        self,
        method: Method,
        wire_format: WireFormat,
        seed: int,
        overlap: bool = False,
        parameters: Callable[[], dict[str, Parameter]] = drawn_parameters,
    ) -> None:
        """Nothing has happened yet."""
        self.random, self.method, self.wire_format = Random(seed), method, wire_format
        self.overlap, self.parameters = overlap, parameters
        self.now = 0.0
        self.published: dict[int, list[Tensor]] = {}
        self.inboxes: dict[int, Total] = defaultdict(Total)
        self.order: list[int] = []
        self.events: list[Event] = []
        self.dead: set[int] = set()
        self.said: list[m.Message] = []
        self.queues: dict[tuple[Any, ...], deque[Any]] = defaultdict(deque)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "push":
            self.order.append(event.group)

    # --- What is said ------------------------------------------------------------------------------------------------

    def control(self, rank: int, message: m.Message, expect: type[Any]) -> Any:
        """A rank's request on its control connection, answered in time."""
        self.queues["control", rank].append(message)
        answers = self.queues["told", rank]
        while True:
            while not answers:
                self.step()
            answer = answers.popleft()
            if isinstance(answer, expect):
                return answer
            assert isinstance(answer, (m.Status, m.Notice)), answer

    def tell(self, server: int, rank: int, message: m.Message, payload: Any = b"") -> None:
        """A rank's message on its data connection is on its way."""
        self.queues["data", server, rank].append((message, payload))

    def answers(self, rank: int) -> list[tuple[m.Message, Tensor]] | None:
        """What all servers have answered a group, if they have."""
        speaker = self.groups[rank].speaker
        queues = [self.queues["answer", server, speaker(server)] for server in range(len(self.cores))]
        return [queue.popleft() for queue in queues] if all(queues) else None

    def step(self) -> bool:
        """One thing arrives, or the moment comes that a method waits for. Returns whether anything did."""
        self.now += TICK
        if (due := self.cores[0].due) <= self.now:
            self._send(0, self.cores[0].tick(self.now))
            return True
        ready = [key for key, queue in self.queues.items() if queue and key[0] in ("control", "data", "up", "down")]
        if not ready:
            self.now = max(self.now, due) if due < math.inf else self.now
            return due < math.inf
        self._arrive(self.random.choice(ready))
        return True

    def arrive(self) -> None:
        """All that is on its way arrives."""
        while self.step():
            pass

    def read(self, group: int) -> list[Tensor] | None:
        """What a living group has published."""
        published = None if group in self.dead else self.published.get(group)
        return copies(published) if published is not None else None

    def empty(self, group: int) -> Inbox:
        """A group reads its inbox."""
        count = self.inboxes[group].count
        return Inbox(self.inboxes[group].take() if count else None, count)  # type: ignore[arg-type]

    def lose(self, rank: int) -> None:
        """A group's last rank dies; what it has said may still arrive."""
        self.dead.add(rank)
        self._send(0, self.cores[0].hang_up(b"c%d" % self.groups[rank].ranks[-1]))

    def _arrive(self, key: tuple[Any, ...]) -> None:
        what = self.queues[key].popleft()
        if key[0] == "control":
            self._send(0, self.cores[0].receive(m.CONTROL, b"c%d" % key[1], what, b"", self.now))
        elif key[0] == "up":
            self._send(0, self.cores[0].receive(m.CONTROL, b"s%d" % key[1], what, b"", self.now))
        elif key[0] == "down":
            self._send(key[1], self.cores[key[1]].follow(what))
        else:
            _, server, rank = key
            message, payload = what
            core, peer = self.cores[server], b"d%d" % rank
            out: list[Out] = []
            try:
                core.check_payload(peer, message)
            except ProtocolError as error:
                out = registry.refusal(core, m.DATA, peer, error)
            else:
                out = core.receive(m.DATA, peer, message, payload, self.now)
            self._send(server, out)

    def _send(self, server: int, out: Sequence[Out]) -> None:
        for item in out:
            if item.peer == COORDINATOR:
                self.queues["up", server].append(item.message)
            elif item.peer[:1] == b"s":
                self.queues["down", int(item.peer[1:])].append(item.message)
            elif item.channel == m.CONTROL:
                self.said.append(item.message)
                self.queues["told", int(item.peer[1:])].append(item.message)
            else:
                parts = [as_tensor(part) for part in item.payload]
                payload = torch.cat(parts).clone() if parts else torch.empty(0, dtype=torch.uint8)
                self.queues["answer", server, int(item.peer[1:])].append((item.message, payload))

    def _link(self, number: int) -> None:
        def say(message: m.Message, expect: type[Any]) -> Any:
            out = self.cores[0].receive(m.CONTROL, b"s%d" % number, message, b"", self.now)
            answer, rest = out[0].message, out[1:]
            self._send(0, rest)
            assert isinstance(answer, expect), answer
            return answer

        core = self.cores[number]
        handshake.join_as_follower(say, core.key, core.follower_hello(f"memory://{number}", NONCE))


class Group:
    """A group of one rank, or of one for each server.

    Args:
        ensemble: the run.
        rank: its number, and that of its one rank.
        make: makes the user's optimizer.
    """

    def __init__(self, ensemble: Ensemble, rank: int, make: Make) -> None:
        self.ensemble, self.rank = ensemble, rank
        count = len(ensemble.cores) if ensemble.by_member else 1
        self.ranks = range(rank * count, (rank + 1) * count)
        self.parameters = ensemble.parameters()
        self.layout = Layout.of({name: parameter.detach() for name, parameter in self.parameters.items()})
        count = len(ensemble.cores)
        self.stands_for = ensemble.stands_for if count == 1 else 1
        self.layout = msgspec.structs.replace(self.layout, servers=max(count, self.stands_for))
        self.split = Partition.of(self.layout, count, elementwise=True) if count > 1 else Partition.whole(self.layout)
        self.replica = Replica(list(self.parameters.values()), make(list(self.parameters.values())), rank)
        self.replica.servers = self.layout.servers
        self.core = GroupCore(ensemble.method, ensemble.wire_format, overlap=ensemble.overlap)
        self.core.attach(self.replica)
        self.core.form(GroupId(str(rank), 1))
        self.gradients = torch.Generator().manual_seed(100 + rank)
        self.action: Action = NextGradient()
        self.under_way: ServerRequest | None = None
        self.requests = 0
        self.given: list[Tensor] = []
        self.refused: list[str] = []
        self._memories = [Memory() for _ in ensemble.cores]

    def speaker(self, server: int) -> int:
        """Which of its ranks speaks to a server."""
        return self.ranks[server] if len(self.ranks) > 1 else self.ranks[0]

    def join(self, groups: int) -> None:
        for rank in self.ranks:
            self._join(rank, groups * len(self.ranks))

    def _join(self, rank: int, size: int) -> None:
        hello = handshake.hello_of("run", rank, size, self.layout, NONCE)
        welcome, secret = handshake.join(
            lambda message, expect: self.ensemble.control(rank, message, expect), KEY, hello
        )
        assert welcome.servers == len(self.ensemble.cores)
        self.ensemble.control(rank, m.AskServerAddresses(), m.ServerAddresses)
        for server in range(len(self.ensemble.cores)):
            handshake.attach(partial(self._ask_one, server, rank), secret, rank, NONCE)

    def _ask_one(self, server: int, rank: int, message: m.Message, expect: type[Any]) -> Any:
        self.ensemble.tell(server, rank, message)
        answers = self.ensemble.queues["answer", server, rank]
        while not answers:
            self.ensemble.step()
        return answers.popleft()[0]

    def seed(self) -> None:
        """Hands weights and optimizer over."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        at_server = self.core.method.steps_at == "server"
        description = describe(self.replica.optimizer, names) if at_server else None
        said = []
        for server, weights in enumerate(self.split.parts(self.replica.weights())):
            specs = self.split.shares[server].specs
            part = {
                "optimizer": self.split.described(description, server),
                "weights": {spec.name: weight for spec, weight in zip(specs, weights, strict=True)},
                "clock": 0,
            }
            packed, buffer = pack({"parts": [part]})
            said.append(Outgoing(m.UploadWeights(packed=packed, nbytes=buffer.numel()), buffer))
        self.ask(said)
        assert all(isinstance(answer, m.WeightsUploaded) for answer, _ in self.hear())

    def ask(self, said: Sequence[Outgoing], servers: Sequence[int] | None = None) -> None:
        """Says its part to each server, or to some."""
        self.requests += 1
        for server, (message, payload) in enumerate(said):
            if servers is None or server in servers:
                numbered = msgspec.structs.replace(message, request=self.requests)
                speaker = self.speaker(server)
                self.ensemble.tell(server, speaker, numbered, b"" if payload is None else payload.clone())

    def hear(self) -> list[tuple[m.Message, Tensor]]:
        """What all servers answer, when they have."""
        while (answers := self.ensemble.answers(self.rank)) is None:
            assert self.ensemble.step(), "nothing is on its way, and no answer has come"
        return answers

    def snapshot(self) -> list[Any]:
        """Of every server, what it holds."""
        self.ask([Outgoing(m.TakeSnapshot())] * len(self.ensemble.cores))
        return [(answer, unpack(answer.packed, payload)) for answer, payload in self.hear()]  # type: ignore[attr-defined]

    @property
    def is_computing(self) -> bool:
        return isinstance(self.action, NextGradient)

    @torch.no_grad()
    def compute(self, gradient: list[Any] | None = None, servers: Sequence[int] | None = None) -> None:
        """Computes a gradient, and says what follows from it."""
        if gradient is None:
            gradient = [torch.randn(shape, generator=self.gradients) for shape in SHAPES]
        self._do(self.core.gradient(0, Gradient(gradient, hyperparameters_of(self.replica.optimizer))), servers)

    def _do(self, action: Action, servers: Sequence[int] | None = None) -> None:
        """Does what can be done at once, and says what is to be said."""
        while True:
            self.action = action
            answer: Answer = None
            match action:
                case ServerRequest():
                    self.say(action, servers)
                    if action.waits:
                        return
                    self.under_way = action
                case Publish():
                    self.ensemble.published[self.rank] = copies(action.tensors)
                case SendPeer():
                    self.ensemble.inboxes[action.group].add(action.tensors)
                case ReadPeer():
                    answer = self.ensemble.read(action.group)
                case ReadInbox():
                    answer = self.ensemble.empty(self.rank)
                case NextGradient() | Receive():
                    return
            action = self.core.answer(0, answer)

    def say(self, ask: ServerRequest, servers: Sequence[int] | None = None) -> None:
        """Says it; again, if the answer was lost."""
        self.given = [tensor.clone() for tensor in ask.tensors if tensor is not None]
        self.said = self.core.send(ask, self.split, self._memories)
        self.ask(self.said, servers)

    @torch.no_grad()
    def go_on(self) -> bool:
        """Goes on, if all servers have answered. Returns whether they have."""
        if self.is_computing or (answers := self.ensemble.answers(self.rank)) is None:
            return False
        asked, self.under_way = self.under_way or self.action, None
        refusals = [answer.reason for answer, _ in answers if isinstance(answer, m.RefusedMessage)]
        if refusals:
            assert len(refusals) == len(answers), "what one server refuses all do"
            self.refused += refusals
            return True
        assert isinstance(asked, ServerRequest)
        self._do(self.core.answer(0, self.pulled_of(asked, answers)))
        return True

    def pulled_of(self, asked: ServerRequest, answers: Sequence[tuple[m.Message, Tensor]]) -> Pulled:
        """What the servers' answers are to the method."""
        weights = [answer for answer, _ in answers if isinstance(answer, m.Weights)]
        assert len({(each.clock, each.staleness, each.applied, each.repeated) for each in weights}) == 1
        split = self.split.fragment(asked.fragment, self.core.method.fragments)
        layout = split.layout
        into, first = layout.empty(), weights[0]
        if asked.pulls:
            coded = self.core.wire_format.answers if isinstance(asked.need, Exchange) else RAW
            parts = zip(answers, split.shares, strict=True)
            split.write(into, [decode(coded, payload, share, Memory()) for (_, payload), share in parts])
        tensors = layout.views(into) if asked.pulls else []
        return self.core.receive(first, tensors)


def train(ensemble: Ensemble, pushes: int, order: Sequence[int] | None = None) -> list[int]:
    """Groups compute in some order, or in a given one, and all that is said arrives in some order.

    Returns:
        The order of gradients.
    """
    wanted = deque(order) if order is not None else None
    computed: list[int] = []
    while True:
        live = [group for group in ensemble.groups if group.rank not in ensemble.dead]
        for group in live:
            group.go_on()
        ready = [group for group in live if group.is_computing]
        if wanted is not None:
            ready = [group for group in ready if wanted and group.rank == wanted[0]]
        if ready and len(computed) < pushes and (wanted is not None or ensemble.random.random() < 0.3):
            group = ensemble.random.choice(ready)
            if wanted is not None:
                wanted.popleft()
            group.compute()
            computed.append(group.rank)
            if wanted is not None:
                ensemble.arrive()
        elif (
            not ensemble.step() and not (ready and len(computed) < pushes) and not any(group.go_on() for group in live)
        ):
            return computed


def whole(group: Group, trees: Sequence[Any], what: str) -> Any:
    """What servers hold together of the one optimizer."""
    parts = [tree["parts"][0] for tree in trees]
    if what == "weights":
        return group.split.merged([list(part["weights"].values()) for part in parts])
    return group.split.merged_tree([part[what] for part in parts])


def decoded(group: Group) -> list[Tensor]:
    """What servers make of the last push."""
    pushes = group.ensemble.wire_format.pushes
    parts = [
        share.views(decode(pushes, said.payload, share, Memory()).clone())
        for said, share in zip(group.said, group.split.shares, strict=True)
        if said.payload is not None
    ]
    return [tensor for tensor in group.split.merged(parts) if tensor is not None]
