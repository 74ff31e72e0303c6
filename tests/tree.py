"""A server, aggregators between it and groups, and these, in one process; what is said arrives in a random order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from ensemble import KEY, NONCE, SHAPES, Ensemble, Group, Make
from torch import Tensor

from lightning_omni.errors import MalformedMessage, ProtocolError
from lightning_omni.methods import Method, Push
from lightning_omni.methods.contract import Sum
from lightning_omni.methods.totals import Total
from lightning_omni.protocol import ServerCore, handshake
from lightning_omni.protocol import messages as m
from lightning_omni.protocol import shard_messages as sm
from lightning_omni.protocol.aggregator import DIRECTLY
from lightning_omni.protocol.group import Ask, LastAnswer, Outgoing
from lightning_omni.protocol.service import Out, as_tensor, nbytes_of
from lightning_omni.protocol.shard_servers import COORDINATOR
from lightning_omni.protocol.transport import refusal
from lightning_omni.protocol.wire_format import RAW, Memory, WireFormat, decode
from lightning_omni.registry import to_wire


class Tree(Ensemble):
    """The run.

    Args:
        aggregators: between groups and the server.
        groups: of one rank.
        method: what they follow.
        make: makes the user's optimizer.
        wire_format: of pushes and answers.
        seed: of the order in which things arrive.

    Attributes:
        sums: what aggregators have sent to the server.
        up: bytes of pushes that have come in at the server, and ...
        down: ... of answers to pushes that went out.
        received: of each group, pushes that its method's server side was given.
        total: what that was given, added up, by fragment.
    """

    def __init__(
        self,
        aggregators: int,
        groups: int,
        method: Method,
        make: Make,
        wire_format: WireFormat = RAW,
        seed: int = 0,
    ) -> None:
        self.begin(method, wire_format, seed)
        self.by_member = False
        self.cores = [ServerCore(KEY, Random(9).randbytes)]
        self.gone: set[int] = set()
        self.sums: list[sm.Sum] = []
        self.up = self.down = 0
        self.received: Counter[int] = Counter()
        self.total: defaultdict[int | None, Total] = defaultdict(Total)
        self.groups: list[Leaf] = [Leaf(self, rank, make) for rank in range(groups)]  # type: ignore[assignment]
        for group in self.groups:
            group.join(groups)
        for number in range(1, aggregators + 1):
            self._begin(number)
        form = m.Form(
            generation=1,
            groups=tuple((rank,) for rank in range(groups)),
            method=m.method_to_wire(method),
            wire_format=to_wire(wire_format),
        )
        self.control(0, form, m.Formed)
        self.groups[0].seed()
        for group in self.groups:
            group.attach_aggregator()
        self.arrive()
        self._watch()

    def _begin(self, number: int) -> None:
        """An aggregator joins the server."""
        core = ServerCore(KEY, Random(number).randbytes, adds_up=True)
        self.cores.append(core)

        def say(channel: m.Channel, peer: bytes, message: m.Message, expect: type[Any]) -> Any:
            first, *others = self.cores[0].receive(channel, peer, message, b"", 0.0)
            self._send(0, others)
            assert isinstance(first.message, expect), first
            return first.message

        welcome, secret = handshake.join_as_shard(
            partial(say, m.CONTROL, b"s%d" % number), KEY, core.shard_hello(f"memory://{number}", NONCE)
        )
        handshake.attach(partial(say, m.DATA, b"a%d" % number), secret, welcome.number, NONCE)

    def _watch(self) -> None:
        """Counts what the method's server side is given."""
        side = self.cores[0].shards[0].method_side
        receive, receive_sum = side.receive, side.receive_sum

        def one(push: Push) -> Any:
            self._count([push], push.tensors)
            return receive(push)

        def several(pushes: Sum) -> Any:
            self._count(pushes.parts, pushes.tensors)
            return receive_sum(pushes)

        side.receive, side.receive_sum = one, several  # type: ignore[method-assign]

    def _count(self, pushes: Sequence[Push], tensors: Sequence[Tensor | None]) -> None:
        self.received.update(push.group for push in pushes)
        self.total[pushes[0].fragment].add(tensors)

    # --- What is said ------------------------------------------------------------------------------------------------

    def answers(self, rank: int) -> list[tuple[m.Message, Tensor]] | None:
        queue = self.queues["answer", 0, rank]
        return [queue.popleft()] if queue else None

    def step(self) -> bool:
        kinds = ("control", "data", "up", "down", "sum", "summed")
        ready = [key for key, queue in self.queues.items() if queue and key[0] in kinds]
        if not ready:
            return False
        self._arrive(self.random.choice(ready))
        return True

    def end(self, number: int, drops: bool) -> None:
        """An aggregator dies.

        Args:
            number: which.
            drops: whether what it has said is lost, too.
        """
        self.gone.add(number)
        for key, queue in self.queues.items():
            if key[:2] in (("data", number), ("answer", number), ("down", number), ("summed", number)) or (
                drops and key[:2] in (("up", number), ("sum", number))
            ):
                queue.clear()
        self._send(0, self.cores[0].hang_up(b"s%d" % number))
        for group in self.groups:
            group.lose_aggregator(number)

    def lose(self, rank: int) -> None:
        super().lose(rank)
        self.groups[rank].action = None  # type: ignore[assignment]

    def _arrive(self, key: tuple[Any, ...]) -> None:
        if key[0] == "sum":
            message, payload = self.queues[key].popleft()
            self.sums.append(message)
            self.up += payload.numel()
            self._data(0, b"a%d" % key[1], message, payload)
        elif key[0] == "summed":
            message, payload = self.queues[key].popleft()
            self._send(key[1], self.cores[key[1]].receive_answer(message, payload))
        elif key[0] == "data":
            _, server, rank = key
            message, payload = self.queues[key].popleft()
            if server == 0 and isinstance(message, m.PushMessage):
                self.up += nbytes_of(payload)
            self._data(server, b"d%d" % rank, message, payload)
        else:
            super()._arrive(key)

    def _data(self, server: int, peer: bytes, message: m.Message, payload: Any) -> None:
        core = self.cores[server]
        arrived = core.decode(m.DATA, m.encode(message))
        try:
            if core.check_payload(peer, arrived) != nbytes_of(payload):
                raise MalformedMessage("another size was announced")
        except ProtocolError as error:
            self._send(server, refusal(core, m.DATA, peer, error))
        else:
            self._send(server, core.receive(m.DATA, peer, arrived, payload, 0.0))

    def _send(self, server: int, out: Sequence[Out]) -> None:
        for item in out:
            if item.peer == COORDINATOR:
                (part,) = item.payload or (torch.empty(0, dtype=torch.uint8),)
                what = (item.message, as_tensor(part).clone()) if item.channel == m.DATA else item.message
                self.queues["sum" if item.channel == m.DATA else "up", server].append(what)
            elif item.peer[:1] == b"a":
                payload = torch.cat([as_tensor(part) for part in item.payload] or [torch.empty(0, dtype=torch.uint8)])
                self.down += payload.numel()
                if int(item.peer[1:]) not in self.gone:
                    message = sm.decode_answer(m.encode(item.message))
                    self.queues["summed", int(item.peer[1:])].append((message, payload.clone()))
            elif item.peer[:1] == b"s" and int(item.peer[1:]) in self.gone:
                continue
            elif isinstance(item.message, m.PushDirectly):
                continue  # groups notice it by themselves here
            else:
                if server == 0 and isinstance(item.message, m.Weights) and item.message.staleness >= 0:
                    self.down += item.message.nbytes
                super()._send(server, [item])


class Leaf(Group):
    """A group of one rank that may push to an aggregator."""

    ensemble: Tree

    def __init__(self, ensemble: Tree, rank: int, make: Make) -> None:
        super().__init__(ensemble, rank, make)
        self.aggregator = self.asked = 0
        self.pushed: list[tuple[int | None, list[Tensor]]] = []
        self.heard: list[LastAnswer] = []

    def whole_numbers(self) -> list[Tensor]:
        """A gradient."""
        return [torch.randint(-8, 9, shape, generator=self.gradients).float() for shape in SHAPES]

    def attach_aggregator(self) -> None:
        """Asks the server for an aggregator, and opens its data connection there."""
        address = self.ensemble.control(self.rank, m.AskAggregator(), m.Aggregator).address
        self.aggregator = int(address.rpartition("/")[2]) if address else 0
        if self.aggregator:
            assert self._secret is not None
            handshake.attach(partial(self._ask_one, self.aggregator, self.rank), self._secret, self.rank, NONCE)

    def join(self, size: int) -> None:
        self._secret: bytes | None = None
        hello = handshake.hello_of("run", self.rank, size, self.layout, NONCE)
        _, self._secret = handshake.join(
            lambda message, expect: self.ensemble.control(self.rank, message, expect), KEY, hello
        )
        handshake.attach(partial(self._ask_one, 0, self.rank), self._secret, self.rank, NONCE)

    def lose_aggregator(self, number: int) -> None:
        """Its aggregator is gone: what was not answered is pushed to the server."""
        if self.aggregator != number:
            return
        self.aggregator = 0
        if self.asked == number and isinstance(self.action, Ask):
            self.ask(self.said)

    def ask(self, said: Sequence[Outgoing], servers: Sequence[int] | None = None) -> None:
        ((message, payload),) = said
        to = self.aggregator if isinstance(message, m.PushMessage) and servers is None else 0
        self.asked = to
        self.ensemble.tell(to, self.rank, message, b"" if payload is None else payload.clone())

    def say(self, ask: Ask, servers: Sequence[int] | None = None) -> None:
        self.said = [self.core.send(ask, self.layout, self._memories[0])]
        ((message, payload),) = self.said
        if isinstance(message, m.PushMessage) and payload is not None:
            layout = self.layout.fragment(message.part, self.core.method.fragments)
            flat = decode(self.core.wire_format.pushes, payload, layout.subset(message.present), Memory())
            self.pushed.append((message.part, [view.clone() for view in layout.views(flat)]))
        self.ask(self.said)

    @torch.no_grad()
    def go_on(self) -> bool:
        queue = self.ensemble.queues["answer", self.asked, self.rank]
        if not isinstance(self.action, Ask) or not queue:
            return False
        answer, payload = queue.popleft()
        if isinstance(answer, m.RefusedMessage):
            assert answer.code == DIRECTLY, answer
            self.refused.append(answer.reason)
            self.ask(self.said, servers=[0])
            return True
        assert isinstance(answer, m.Weights), answer
        self.heard.append(heard := LastAnswer.of(answer))
        ask = self.action
        layout = self.layout.fragment(ask.fragment, self.core.method.fragments)
        answers = self.core.wire_format.answers
        flat = decode(answers, payload, layout, Memory()) if ask.pulls else layout.empty()
        tensors = layout.views(flat) if ask.pulls else []
        self._do(self.core.answer(0, self.core.receive(heard, tensors, answer.clock, answer.note, ask.fragment)))
        return True


def trained(
    tree: Tree, gradients: int, eagerness: float = 0.3, deaths: Sequence[tuple[str, int, int]] = (), whole: bool = False
) -> None:
    """Groups compute in some order until that many gradients are computed, or some more, and all have their answers.

    Args:
        tree: the run.
        gradients: how many.
        eagerness: how likely the next gradient is to be computed before anything more arrives.
        deaths: ``("rank", number, when)`` or ``("aggregator", number, when)``, in things that have happened before.
        whole: whether gradients are whole numbers, of which sums are exact.
    """
    computed = 0
    for moment in range(10**5):
        for kind, number, when in deaths:
            if when == moment and kind == "rank":
                tree.lose(number)
            elif when == moment:
                tree.end(number, drops=tree.random.random() < 0.5)
        live = [group for group in tree.groups if group.rank not in tree.dead]
        for group in live:
            group.go_on()
        ready = [group for group in live if group.is_computing]
        if ready and computed < gradients and tree.random.random() < eagerness:
            group = tree.random.choice(ready)
            group.compute(group.whole_numbers() if whole else None)
            computed += 1
        elif not tree.step() and not any(group.go_on() for group in live) and computed >= gradients:
            if len(ready) in (0, len(live)):
                return
            for group in ready:  # others wait for these at a barrier
                group.compute(group.whole_numbers() if whole else None)
    raise AssertionError("it goes on for ever")
