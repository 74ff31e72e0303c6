"""Every method in every wire format, overlapped or not, with one server or several, whatever becomes of a group.

A cell of the matrix is one of each. It trains a small net on the state machines of a real run, in memory and in a
random order of arrival, or it is refused. The matrix is made from what is registered, so a new method or format is in
it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import torch
from core import (
    FORMATS,
    RAW,
    RESIDUAL,
    EpochPlan,
    Layout,
    LeaseClient,
    PerDirection,
    ServerRequest,
    WorldOptions,
    read,
    write,
)
from core import messages as m
from ensemble import Ensemble, Group
from torch import Tensor
from torch.nn import Parameter

from lightning_omni import Compression, Server
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import METHODS, PRESETS, Exchange, Method, Push, Reply, ServerSide, method_named

GROUPS, EPOCHS, BATCH, SAMPLES = 3, 2, 8, 80
FATED, ITS_PUSH = 1, 2
"""Of which group something becomes, and with which of its pushes."""
SETTINGS = {"topk": "topk:0.4"}
"""Of formats whose defaults are not for a net of 241 numbers."""
SHORT = {"period": 2, "fragments": 1, "n_push": 2, "n_fetch": 2, "outer_momentum": 0.5}
"""Of methods whose defaults are not for a dozen steps."""
FATES = ("lives", "answer lost", "dies waiting", "dies half said", "dies computing")
"""What becomes of one of the groups. It dies when it has said all of a push, or a part, or is in between two."""


class Cell(NamedTuple):
    """One of each."""

    method: str
    wire: str
    overlap: bool
    servers: int
    fate: str

    def __str__(self) -> str:
        parts = (self.method, self.wire, "overlap" * self.overlap, f"{self.servers} servers" * (self.servers > 1))
        return ", ".join(part for part in (*parts, self.fate) if part)


# --- What there is ---------------------------------------------------------------------------------------------------


@cache
def methods() -> tuple[str, ...]:
    """Every method with few steps between its exchanges, each of its switches, fragments, delays; and the presets."""
    found: dict[Method, str] = {}
    kinds = {name: kind for name, kind in METHODS.items() if kind.__module__.startswith("lightning_omni.")}
    for name, kind in (*kinds.items(), *((name, type(preset)) for name, preset in PRESETS.items())):
        for settings in _settings_of(kind):
            text = f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}".rstrip(":").lower()
            found.setdefault(method_named(text), text)
    return tuple(found.values())


def _settings_of(kind: type[Method]) -> Iterator[dict[str, Any]]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    base = {name: value for name, value in SHORT.items() if name in fields}
    yield base
    for each in fields.values():
        if each.name == "keep_steps":  # which needs a delay
            continue
        choices = (
            get_args(each.type) if get_origin(each.type) is Literal else (False, True) if each.type is bool else ()
        )
        yield from ({**base, each.name: choice} for choice in choices if choice != each.default)
    if "fragments" in fields:
        yield {**base, "fragments": 2}
        yield {**base, "fragments": 2, "period": 4, **({"delay": 1} if "delay" in fields else {})}
    if "keep_steps" in fields:
        yield {**base, "fragments": 2, "period": 4, "delay": 1, "keep_steps": True}


@cache
def wires() -> tuple[str, ...]:
    """Every format of pushes; and of both ways, as ``"int8 both ways"``."""
    kinds = {name: kind for name, kind in FORMATS.items() if kind.__module__.startswith("lightning_omni.wire.formats.")}
    lossy = [SETTINGS.get(name, name) for name, kind in kinds.items() if kind not in (type(RAW), PerDirection)]
    return ("fp32", *lossy, *(f"{name} both ways" for name in lossy))


def wire_as_passed(wire: str) -> Compression:
    """What a user passes for it."""
    name = wire.removesuffix(" both ways")
    return Compression(push=name, pull="fp32" if name == wire else name)


def refusal(cell: Cell) -> str:
    """What a user is told who asks for it; nothing if it can be had."""
    return _refusal(*cell[:4])


@cache
def _refusal(method: str, wire: str, overlap: bool, servers: int) -> str:
    try:
        WorldOptions(
            groups=GROUPS,
            method=method,
            compression=wire_as_passed(wire),
            overlap=overlap,
            server=Server(count=servers),
        )
    except ConfigurationError as error:
        return str(error)
    return ""


def cells() -> list[Cell]:
    """All of it."""
    return [Cell(*each) for each in product(methods(), wires(), (False, True), (1, 3), FATES)]


def pairwise(possible: Sequence[Cell], seed: int = 0) -> list[Cell]:
    """Some of these cells, in which every two things that are in one of these cells are in one."""
    order = list(possible)
    random.Random(seed).shuffle(order)
    left = {pair for cell in order for pair in _pairs(cell)}
    by_pair: dict[tuple[str, str], list[Cell]] = {}
    for cell in order:
        by_pair.setdefault(cell[:2], []).append(cell)
    chosen = []
    for among in (*by_pair.values(), *([order] * len(order))):
        if not left:
            break
        best = max(among, key=lambda cell: len(left & _pairs(cell)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


@cache
def _pairs(cell: Cell) -> frozenset[Any]:
    return frozenset(combinations(enumerate(cell), 2))


# --- A net, and a group that trains it -------------------------------------------------------------------------------


def net() -> dict[str, Parameter]:
    """Two layers."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (24, 8), "0.bias": (24,), "1.weight": (1, 24), "1.bias": (1,)}
    return {name: Parameter(0.3 * torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


@cache
def samples() -> tuple[Tensor, Tensor]:
    """What it is to learn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return x, torch.sin(x[:, :1] + x[:, 1:2]) + 0.5 * x[:, 2:3]


def loss_of(parameters: Sequence[Tensor], where: slice) -> Tensor:
    """Mean squared error of a batch."""
    x, y = (each[where] for each in samples())
    weight, bias, last, offset = parameters
    return (torch.tanh(x @ weight.T + bias) @ last.T + offset - y).square().mean()


class Account:
    """The sum of pushes, number by number.

    Args:
        layout: of all parameters, or of a share.
        of: how many fragments there are.
    """

    def __init__(self, layout: Layout, of: int) -> None:
        self._layout, self._of = layout, of
        self.total = [torch.zeros(spec.local_shape, dtype=torch.float64) for spec in layout.specs]
        self.before = self.total
        self.count = 0

    def add(self, tensors: Sequence[Tensor | None], fragment: int | None) -> None:
        """One push more."""
        self.count += 1
        self.before = [each.clone() for each in self.total]
        if fragment is None:
            for total, tensor in zip(self.total, tensors, strict=True):
                total += 0 if tensor is None else tensor
            return
        pieces = self._layout.pieces(fragment, self._of)
        sums = zip(read(self.total, pieces), tensors, strict=True)
        write(self.total, pieces, [total + (0 if tensor is None else tensor) for total, tensor in sums])


class Member(Group):
    """A group that draws its batches, as a real one does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.data = self.core.data = LeaseClient(generation=1)
        self.given_sum = Account(self.layout, self.core.method.fragments)
        self.owed_before: Any = None
        self.trained: list[range] = []
        self.state: Literal["training", "ending", "asking", "over"] = "over"
        self.fate, self.dies_in = "lives", -1
        self._before = self._pushed = (0, 0)

    def open(self, plan: EpochPlan) -> None:
        """An epoch begins."""
        self.ensemble.control(self.rank, m.OpenEpoch(plan=plan), m.EpochOpened)
        self.data.restart(plan.epoch)
        self.state = "training"

    @property
    def is_ready(self) -> bool:
        return self.state == "training" and self.is_computing and self.dies_in < 0

    def train(self) -> None:
        """The next batch, if there is one."""
        data, done = self.data, self.data.trained
        if self.under_way is not None:  # what is under way is not trained yet
            epoch, trained = self._before
            done = trained if epoch == data.epoch else 0
        if data.drawn == data.trained:
            data.record_drawn(self.ensemble.control(self.rank, data.draw(data.drawn, done), m.BatchesDrawn).batches)
        if data.drawn == data.trained:
            self.state = "ending"
            return
        data.begin_batch()
        batch = data.current
        assert batch is not None
        self.trained.append(range(batch.start, batch.stop))
        with torch.enable_grad():
            loss = loss_of(self.replica.ordered, slice(batch.start, batch.stop))
            gradient = torch.autograd.grad(loss, self.replica.ordered)
        self.core.steps_take(0, 1.0)
        if self._dies_now("dies computing", len(self.trained) > 3 and self.given_sum.count >= ITS_PUSH - 1):
            return
        if self.core.method.talks_to_peers and self._dies_now(self.fate, len(self.trained) > 3):
            return
        self.compute(list(gradient))

    def _dies_now(self, fate: str, now: bool) -> bool:
        if self.fate == fate and fate.startswith("dies") and now:
            self.dies_in = 0
        return self.dies_in == 0

    def say(self, ask: ServerRequest, servers: Sequence[int] | None = None) -> None:
        if isinstance(ask.need, Exchange):
            self._before, self._pushed = self._pushed, (ask.epoch, ask.trained)
            self.given_sum.add(ask.need.tensors, ask.fragment)
            self.owed_before = self.core.sender_state(0).get(RESIDUAL)
            if self.given_sum.count == ITS_PUSH and self.fate in ("dies waiting", "dies half said"):
                some = self.ensemble.random.sample(range(len(self.ensemble.cores)), len(self.ensemble.cores) - 1)
                servers = some if self.fate == "dies half said" else None
                self.dies_in = self.ensemble.random.randrange(12)
        super().say(ask, servers)

    def advance(self) -> bool:
        """Goes on as far as it can without computing. Returns whether it could."""
        if self.state == "asking":
            return self._hear_verdict()
        if self.state == "ending" and self.is_computing:
            return self._end()
        if self.fate == "answer lost" and self.given_sum.count == ITS_PUSH:
            return self._lose_answer()
        return self.go_on()

    def _lose_answer(self) -> bool:
        asked = self.under_way or self.action
        if not isinstance(asked, ServerRequest) or self.ensemble.answers(self.rank) is None:
            return False
        self.fate = "lives"
        super().say(asked)  # the same push
        return True

    @torch.no_grad()
    def _end(self) -> bool:
        """Nothing is left to compute: what is under way is applied, and the server asked what is next."""
        if self.under_way is not None:
            if (answers := self.ensemble.answers(self.rank)) is None:
                return False
            self.core.apply_answer(0, self.pulled_of(self.under_way, answers))
            self.under_way = None
        self.ensemble.queues["control", self.rank].append(self.data.ask_next())
        self.state = "asking"
        return True

    def _hear_verdict(self) -> bool:
        told = self.ensemble.queues["told", self.rank]
        while told:
            if isinstance(verdict := told.popleft(), m.Next):
                self.state = "over" if verdict.next.startswith("over") else "training"
                return True
        return False

    def owed(self, when: Literal["before", "now", "not told"]) -> list[Tensor | None]:
        """What its sender has not sent yet: before its last push, as it knows, and as it would once it is answered."""
        if when == "before":
            owed = self.owed_before
        else:
            state = self.core._method_states[0].sending if when == "not told" else self.core.sender_state(0)
            owed = (state or {}).get(RESIDUAL)
        return list(owed or [None] * len(self.layout.specs))


# --- A cell ----------------------------------------------------------------------------------------------------------


class Training:
    """A cell of the matrix, trained to its end.

    Args:
        cell: that is not refused.
        seed: of the order in which things arrive.
    """

    def __init__(self, cell: Cell, seed: int = 0) -> None:
        method = method_named(cell.method)
        self.run = Ensemble(
            cell.servers,
            GROUPS,
            method,
            lambda own: torch.optim.SGD(own, lr=0.05),
            wire_as_passed(cell.wire).wire_format,
            seed,
            cell.overlap,
            net,
            Member,
        )
        self.cell = cell
        self.members: list[Member] = self.run.groups  # type: ignore[assignment]
        self.members[FATED].fate = cell.fate
        self.arrived = [
            [Account(share, method.fragments) for share in self.members[0].split.shares] for _ in self.members
        ]
        for server, core in enumerate(self.run.cores):
            self._watch(core.store.all[0].method_side, server)
        self.losses = [self._loss(list(net().values()))]
        for epoch in range(EPOCHS):
            self._train(epoch)
            self._synchronize()
        self._check()

    def _watch(self, side: ServerSide, server: int) -> None:
        """Counts what the server's half of the method is given."""
        receive = side.receive

        def counted(push: Push) -> list[Reply]:
            self.arrived[push.group][server].add(push.tensors, push.fragment)
            return receive(push)

        side.receive = counted  # type: ignore[method-assign]

    @property
    def live(self) -> list[Member]:
        return [member for member in self.members if member.rank not in self.run.dead]

    def _train(self, epoch: int) -> None:
        plan = EpochPlan(epoch=epoch, total=SAMPLES, batch_size=BATCH, budget=SAMPLES)
        for member in self.live:
            member.trained.clear()
            member.open(plan)
        while any(member.state != "over" for member in self.live):
            went_on = [member.advance() for member in self.live if member.dies_in < 0]
            ready = [member for member in self.live if member.is_ready]
            if ready and self.run.random.random() < 0.4:
                self.run.random.choice(ready).train()
                continue
            stepped = self.run.step()
            assert stepped or ready or any(went_on) or self._someone_dies(), "all groups wait for one another"
            self._someone_dies()
        counts = Counter(position for member in self.members for batch in member.trained for position in batch)
        assert sorted(counts) == list(range(SAMPLES)), "samples were left out"
        for member in self.members:
            if member.trained == [range(BATCH)] and counts[0] > 1:  # a group that came too late for any other
                counts -= Counter(range(BATCH))
        again = {position for position, count in counts.items() if count > 1}
        lost = {
            each for member in self.members if member not in self.live for batch in member.trained for each in batch
        }
        assert again <= lost, "samples were trained twice, and not by a group that is dead"

    def _someone_dies(self) -> bool:
        for member in self.live:
            if member.dies_in > 0:
                member.dies_in -= 1
            elif member.dies_in == 0:
                self.run.lose(member.rank)
                return True
        return any(member.dies_in >= 0 for member in self.live)

    @torch.no_grad()
    def _synchronize(self) -> None:
        """All ranks have the exact master weights, or, where there are none in common, the mean of all groups' own."""
        asks = {member: member.core.synchronize(0) for member in self.live}
        for member, ask in asks.items():
            Group.say(member, ask)
        pulled = {member: member.pulled_of(ask, member.hear()) for member, ask in asks.items()}
        self.run.arrive()
        parts = [core.store.all[0].master.weights() for core in self.run.cores]
        held = [each for each in self.members[0].split.merged(parts) if each is not None]
        assert len({core.store.clock for core in self.run.cores}) == 1
        for member, each in pulled.items():
            assert all(map(torch.equal, each.tensors, held)), "a rank has other weights than the servers"
            if self.run.method.steps_at == "server":
                member.replica.load(each)
        self.losses.append(self._loss(held))

    def _check(self) -> None:
        for member in self.members:
            of_group = self.arrived[member.rank]
            assert len({account.count for account in of_group}) == 1, "a push has come to some servers only"
            count, given = of_group[0].count, member.given_sum
            if member in self.live:
                assert count == given.count, "a push was lost or counted twice"
            assert count in (given.count, given.count - 1), "a push was lost or counted twice"
            is_last_lost = count < given.count
            arrived = member.split.merged([account.total for account in of_group])
            # A group that died before it was answered had not taken over what its last push had left out.
            untold = member not in self.live and not is_last_lost and member.core.sequence(0) < count
            owed = member.owed("not told" if untold else "before" if is_last_lost else "now")
            for mine, there, left in zip(given.before if is_last_lost else given.total, arrived, owed, strict=True):
                assert there is not None
                tolerance = 1e-4 * (1 + float(mine.abs().max())) if self.is_lossy else 1e-9
                assert torch.allclose(there + (0 if left is None else left), mine, rtol=0, atol=tolerance)
        first, last = self.losses[0], self.losses[-1]
        assert last < 0.8 * first, f"it does not learn: {self.losses}"

    @staticmethod
    @torch.no_grad()
    def _loss(weights: Sequence[Any]) -> float:
        return float(loss_of(weights, slice(None)))

    @property
    def is_lossy(self) -> bool:
        return self.run.wire_format.pushes != RAW
