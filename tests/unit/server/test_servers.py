"""Several servers that hold a partition each: they act as one, whatever arrives first and whoever dies."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count, product
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from ensemble import KEY, NONCE, SHAPES, Ensemble, Make, decoded, train, whole
from hypothesis import given, settings
from memory_transport import InMemory
from processes import Process
from runs import Running
from stream import Stream
from torch import Tensor
from torch.nn import Parameter

import lightning_omni as omni
from lightning_omni.cli.commands import serve
from lightning_omni.errors import (
    ConfigurationError,
    ProtocolError,
    RankLost,
    Refused,
    UnsupportedError,
)
from lightning_omni.group.core import Outgoing, ServerRequest
from lightning_omni.methods import AsyncSGD, Gradient, Master, Method, Push, Replica, method_named
from lightning_omni.methods.model.fragments import UNIT, read, write
from lightning_omni.methods.model.server_optimizer import hyperparameters_of, resolver
from lightning_omni.server.core import ServerCore
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.server.replication import MOST_HELD
from lightning_omni.simulator import replay
from lightning_omni.transport.connections import Control, answer_of
from lightning_omni.transport.zeromq import ZeroMQ
from lightning_omni.transport.zeromq import server as server_link
from lightning_omni.transport.zeromq.dialing import SuspendAwareClock
from lightning_omni.transport.zeromq.server import ZeroMQServer
from lightning_omni.wire import handshake
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack, unpack
from lightning_omni.wire.formats import wire_of
from lightning_omni.wire.formats.base import RAW, RESIDUAL, Memory, WireFormat
from lightning_omni.wire.layout import DTYPES, Layout
from lightning_omni.wire.messages import EpochPlan
from lightning_omni.wire.messages import servers as sm
from lightning_omni.wire.partition import Partition

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
METHODS = (
    "async_sgd", "ringmaster_asgd:max_staleness=0", "hardsync", "softsync", "downpour:n_push=2,n_fetch=2",
    "delay_compensated", "elastic_averaging:period=2", "local_sgd:period=2", "diloco:period=2", "async_diloco:period=2",
    "async_diloco:period=4,fragments=2,dynamic_steps=false",
    "local_sgd:period=4,fragments=2", "diloco:period=4,fragments=2",
    "decoupled_diloco:period=2,fragments=1,delay=0,grace=0",
    "decoupled_diloco:period=4,fragments=2,delay=0,grace=0",
)  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def run_of(
    servers: int,
    groups: int = 2,
    method: Method | str = "async_sgd",
    optimizer: str = "sgd",
    wire: WireFormat = RAW,
    seed: int = 0,
    by_member: bool = False,
    stands_for: int = 1,
) -> Ensemble:
    chosen = method_named(method) if isinstance(method, str) else method
    make, more = OPTIMIZERS[optimizer], {"by_member": by_member, "stands_for": stands_for}
    return Ensemble(servers, groups, chosen, make, wire, seed, **more)  # type: ignore[arg-type]


def held(ensemble: Ensemble) -> list[Tensor]:
    return [served.buffer.clone() for core in ensemble.cores for served in core.store.all]


# --- How parameters are divided --------------------------------------------------------------------------------------

layouts = st.lists(
    st.tuples(st.lists(st.integers(0, 90), max_size=2).map(tuple), st.sampled_from(["float32", "float64", "bfloat16"])),
    min_size=1,
    max_size=6,
)


def tensors_of(specs: list[tuple[tuple[int, ...], str]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        f"p{place}": torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
        for place, (shape, dtype) in enumerate(specs)
    }


@given(layouts, st.integers(1, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_shares_put_together_are_the_tensors_and_every_number_is_in_one(
    specs: list[tuple[tuple[int, ...], str]], servers: int, elementwise: bool
) -> None:
    tensors = tensors_of(specs)
    layout = Layout.of(tensors)
    split = Partition.of(layout, servers, elementwise)
    assert len(split.shares) == servers
    assert sum(share.numel for share in split.shares) == layout.numel
    assert same(split.merged(split.parts(list(tensors.values()))), list(tensors.values()))
    into, parts = layout.empty(), [share.empty() for share in split.shares]
    for share, part, pieces in zip(split.shares, parts, split.parts(list(tensors.values())), strict=True):
        for view, piece in zip(share.views(part), pieces, strict=True):
            assert piece is not None
            view.copy_(piece)
    split.write(into, parts)
    assert same(layout.views(into), list(tensors.values()))
    if (memories := split.memories(into)) is not None:
        assert same([memory.tolist() for memory in memories], [part.tolist() for part in parts])
    if elementwise:
        each = [sum(spec.nbytes for spec in share.specs) for share in split.shares]
        assert max(each) - min(each) <= 2 * UNIT * 8
        assert split.memories(into) is not None
    else:
        assert all(spec.range is None for share in split.shares for spec in share.specs)


@given(layouts, st.integers(1, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_remembered_of_parameters_is_divided_and_put_together_with_them(
    specs: list[tuple[tuple[int, ...], str]], servers: int, elementwise: bool
) -> None:
    tensors = list(tensors_of(specs).values())
    split = Partition.of(Layout.of(tensors_of(specs)), servers, elementwise)
    tree = {
        "total": {"count": 3, "sum": [None if place % 3 == 1 else each for place, each in enumerate(tensors)]},
        "state": {place: {"step": torch.tensor(4.0), "exp_avg": each} for place, each in enumerate(tensors)},
        "read": {7: tensors, 9: [each + 1 for each in tensors]},
        "settings": [{"lr": 0.1}],
        "times": {0: 1.5, 2: 0.5},
    }
    assert same(split.merged_tree(split.tree_parts(tree)), tree)
    owed = {RESIDUAL: tree["total"]["sum"]}  # type: ignore[index]
    assert same(dict(split.merged_sender(split.sender_parts(owed))).get(RESIDUAL), owed[RESIDUAL])


def test_what_treats_tensors_as_wholes_is_not_cut_and_the_largest_go_apart() -> None:
    layout = Layout.of({"a": torch.ones(8), "b": torch.ones(100), "c": torch.ones(90), "d": torch.ones(5)})
    split = Partition.of(layout, 2, elementwise=False)
    assert [[spec.name for spec in share.specs] for share in split.shares] == [["b"], ["a", "c", "d"]]


@given(layouts, st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_server_cuts_its_share_into_fragments_and_both_sides_of_an_exchange_cut_alike(
    specs: list[tuple[tuple[int, ...], str]], servers: int, of: int
) -> None:
    tensors = tensors_of(specs)
    split = Partition.of(Layout.of(tensors), servers, elementwise=True)
    replica = Replica([Parameter(each, requires_grad=False) for each in tensors.values()], None)  # type: ignore[arg-type]
    replica.servers = servers
    parts, came = split.parts(list(tensors.values())), [torch.zeros_like(each) for each in tensors.values()]
    held = [Layout.of({str(place): each for place, each in enumerate(part)}) for part in parts]  # type: ignore[misc]
    for number in range(of):
        pieces, fragment = replica.pieces(number, of), split.fragment(number, of)
        pushed = read(replica.weights(), pieces)
        assert [tensor.numel() for tensor in pushed] == [spec.numel for spec in fragment.layout.specs]
        for part, share, known, whole_share in zip(fragment.parts(pushed), fragment.shares, held, parts, strict=True):
            at_server = read(whole_share, known.pieces(number, of))  # type: ignore[arg-type]
            assert same([each.flatten() for each in part], [each.flatten() for each in at_server])  # type: ignore[union-attr]
            assert share.nbytes == known.fragment(number, of).nbytes
            bytes_here, every = (sum(spec.nbytes for spec in each.specs) for each in (share, known))
            assert bytes_here <= every / of + 8 * (1 + len(known.dtypes))
        assert same(fragment.merged(fragment.parts(pushed)), pushed)
        assert fragment.memories(fragment.layout.empty()) is not None
        assert fragment.layout.nbytes <= split.layout.nbytes, "answers have their place in the memory of all parameters"
        write(came, pieces, [read(came, [piece])[0] + 1 for piece in pieces])
    assert all(bool((each == 1).all()) for each in came), "every number is in one fragment"


def remembered(share: Layout, of: int) -> dict[str, Any]:
    """What a server may remember of the fragments of its share."""
    fragments = [share.fragment(number, of) for number in range(of)]
    views = [layout.views(layout.empty()) for layout in fragments]
    return {
        "fragments": [
            {
                "total": {"count": number, "sum": list(each)},
                "came": {0: True, 1: False},
                "outer": {place: {"momentum_buffer": view + number} for place, view in enumerate(each)},
            }
            for number, each in enumerate(views)
        ]
    }


@given(layouts, st.integers(1, 4), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_what_is_remembered_of_fragments_is_put_together_and_divided_by_their_own_cuts(
    specs: list[tuple[tuple[int, ...], str]], servers: int, of: int
) -> None:
    split = Partition.of(Layout.of(tensors_of(specs)), servers, elementwise=True)
    trees = [remembered(share, of) for share in split.shares]
    merged = split.merged_tree(trees)
    assert merged["servers"] == servers
    for number, each in enumerate(merged["fragments"]):
        shapes = [spec.local_shape for spec in split.layout.fragment(number, of).specs]
        assert [tuple(tensor.shape) for tensor in each["total"]["sum"]] == shapes
        assert [tuple(outer["momentum_buffer"].shape) for outer in each["outer"].values()] == shapes
    assert same(split.tree_parts(merged), trees)


def test_states_of_fragments_of_another_number_of_servers_are_refused_by_name() -> None:
    one, three = (Partition.of(Layout.of({"w": torch.ones(64)}), count, elementwise=True) for count in (1, 3))
    fragments = [{"merged_at": 0}, {"merged_at": 0}]
    for split, tree in ((one, {"fragments": fragments}), (three, {"fragments": fragments, "servers": 3})):
        split.check_fragments(tree)
        split.check_fragments({"total": 1})
    with pytest.raises(UnsupportedError, match=r"1 server, .* 2 fragments, and this run has 3: pass Server\(count=1\)"):
        three.check_fragments({"fragments": fragments})
    with pytest.raises(UnsupportedError, match=r"saved with 3 servers, .* this run has 1: .* serve --servers 3"):
        one.check_fragments({"fragments": fragments, "servers": 3})


def test_groups_that_are_remembered_are_not_taken_for_numbers_of_as_many_parameters() -> None:
    split = Partition.of(Layout.of({"w": torch.ones(64), "b": torch.ones(64)}), 2, elementwise=True)
    master = Master({"w": Parameter(torch.ones(64)), "b": Parameter(torch.ones(64))}, None)
    side = method_named("decoupled_diloco:period=1,fragments=1,quorum=3").server_side(master, range(3))
    for group in (0, 1):
        assert side.receive(Push(group, 0, [torch.ones(64)] * 2)) == []
    for server, part in enumerate(split.tree_parts(side.state())):
        share = {spec.name: Parameter(torch.ones(spec.local_shape)) for spec in split.shares[server].specs}
        there = side.method.server_side(Master(share, None), range(3))
        there.load_state(part)
        assert same(there.state(), part)
        assert part["came"] == {0: True, 1: True}


def test_betas_that_are_remembered_are_not_taken_for_numbers_of_two_parameters() -> None:
    weights = {"w": torch.ones(64), "b": torch.ones(64)}
    split = Partition.of(Layout.of(weights), 2, elementwise=True)
    side = method_named("softsync").server_side(Master({n: Parameter(w) for n, w in weights.items()}, None), range(2))
    side.receive(Push(0, 0, list(weights.values()), ({"lr": 0.1, "betas": [0.9, 0.99]},)))  # a list, from the wire
    for part in split.tree_parts(side.state()):
        assert [list(group["betas"]) for group in part["hyperparameters"]] == [[0.9, 0.99]]


# --- They act as one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("optimizer", "by_member"), [("sgd", False), ("adamw", True)])
def test_several_servers_hold_bitwise_what_one_would_after_the_same_pushes(
    method: str, optimizer: str, by_member: bool
) -> None:
    several = run_of(3, 3, method, optimizer, seed=len(method), by_member=by_member)
    computed = Counter(train(several, 24))
    each = 2 if "=2" in method else 1  # gradients to a push
    order = [group for group in several.order for _ in range(each)]
    order += list((computed - Counter(order)).elements())
    one = run_of(1, 3, method, optimizer, stands_for=3)
    train(one, len(order), order)
    assert several.order == one.order
    for what in ("weights", "state", "method"):
        there = whole(several.groups[0], [tree for _, tree in several.groups[0].snapshot()], what)
        here = whole(one.groups[0], [tree for _, tree in one.groups[0].snapshot()], what)
        for tree in (here, there) if "fragments" in there else ():
            assert tree.pop("servers") == (3 if tree is there else 1)
        assert same(there, here), what
    for here, there in zip(one.groups, several.groups, strict=True):
        assert same(here.replica.weights(), there.replica.weights())


@pytest.mark.parametrize(
    ("method", "wire"),
    [("local_sgd", "fp32"), *product(("diloco", "decoupled_diloco"), ("fp32", "int8", "topk:0.05"))],
)
def test_in_every_stride_a_server_gets_a_fragment_of_its_share_and_in_a_period_all_of_it(
    method: str, wire: str
) -> None:
    period, of = 8, 4
    make, chosen = (
        (lambda own: torch.optim.SGD(own, lr=0.1)),
        method_named(f"{method}:period={period},fragments={of},delay=0"),
    )
    ensemble = Ensemble(3, 1, chosen, make, wire_of(wire), parameters=several_layers)
    (group,) = ensemble.groups
    most = [group.core.wire_format.pushes.sizes(share)[1] for share in group.split.shares]
    whole_answers = [group.core.wire_format.answers.sizes(share)[1] for share in group.split.shares]
    moved = [torch.zeros_like(each) for each in group.replica.weights()]
    for step in range(1, period + 1):
        before = group.requests
        group.compute([torch.randn(each.shape, generator=group.gradients) for each in group.replica.weights()])
        assert group.requests == before + (step % (period // of) == 0)
        if step % (period // of):
            continue
        ask = group.action
        assert isinstance(ask, ServerRequest)
        while (answers := ensemble.answers(0)) is None:
            assert ensemble.step()
        pieces = group.replica.pieces(ask.fragment, of)
        write(moved, pieces, [each + 1 for each in read(moved, pieces)])
        for said, (_, answer), pushed, answered in zip(group.said, answers, most, whole_answers, strict=True):
            assert said.payload is not None
            assert said.payload.numel() <= 1.2 / of * pushed
            assert answer.numel() <= 1.2 / of * answered
        for server, (message, answer) in enumerate(answers):
            ensemble.queues["answer", server, 0].append((message, answer))
        assert group.go_on()
    assert all(bool((each == 1).all()) for each in moved), "every parameter is exchanged once"


def several_layers() -> dict[str, Parameter]:
    """Weights that three servers share out in the midst of a matrix."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((128, 64), (128,), (128, 128), (128,), (10, 128), (10,))
    return {f"p{place}": Parameter(torch.randn(shape, generator=generator)) for place, shape in enumerate(shapes)}


@pytest.mark.parametrize("method", ["diloco", "local_sgd", "decoupled_diloco", "async_diloco"])
@pytest.mark.parametrize("numel", [1, 70])
def test_a_share_may_have_fewer_numbers_than_there_are_fragments_or_none(method: str, numel: int) -> None:
    def make() -> dict[str, Parameter]:
        return {"w": Parameter(torch.ones(numel))}

    for fragments, wire in product((1, 4), ("fp32", "int8")):
        chosen = method_named(f"{method}:period=4,fragments={fragments}")
        ensemble = Ensemble(3, 1, chosen, OPTIMIZERS["sgd"], wire_of(wire), parameters=make)
        (group,) = ensemble.groups
        assert min(share.numel for share in group.split.shares) == 0
        for _ in range(8):
            while not group.is_computing:
                assert group.go_on() or ensemble.step()
            group.compute([torch.ones(numel)])
        ensemble.arrive()
        assert not group.refused
        assert ensemble.cores[0].store.clock >= 2 * fragments - 1
        weights = group.split.merged([core.store.all[0].master.weights() for core in ensemble.cores])[0]
        assert weights is not None
        assert bool((weights < 1).all())


@pytest.mark.parametrize("method", ["local_sgd", "diloco", "decoupled_diloco", "async_diloco"])
def test_servers_that_are_handed_what_others_remembered_of_fragments_go_on_bitwise(method: str) -> None:
    chosen, random = method_named(f"{method}:period=4,fragments=2"), torch.Generator().manual_seed(2)
    tensors = {name: each.detach() for name, each in several_layers().items()}
    split = Partition.of(Layout.of(tensors), 3, elementwise=True)

    def new(weights: Any, states: Any, clock: int) -> list[ServedParameters]:
        shares = zip(split.parts(weights), split.shares, states, strict=True)
        parts = [
            ({spec.name: each for spec, each in zip(of.specs, part, strict=True)}, state) for part, of, state in shares
        ]
        return [ServedParameters(None, part, clock, chosen, (0, 1), resolver(()), state) for part, state in parts]  # type: ignore[arg-type]

    def push(optimizers: Sequence[ServedParameters], group: int, number: int, tensors: Sequence[Tensor]) -> None:
        for served, part in zip(optimizers, split.fragment(number, 2).parts(tensors), strict=True):
            served.method_side.receive(Push(group, served.master.clock, part, note=8.0, fragment=number))

    optimizers = new(list(tensors.values()), [None] * 3, 0)
    copies: list[ServedParameters] = []
    for turn in range(9):
        if turn == 4:
            if not chosen.has_barrier:  # one group has come, and the merge needs two
                push(optimizers, 0, 1, [torch.ones(spec.local_shape) for spec in split.layout.fragment(1, 2).specs])
            told = split.merged_tree([unpack(*pack(served.method_side.state())) for served in optimizers])
            weights = split.merged([served.master.weights() for served in optimizers])
            copies = new(weights, split.tree_parts(unpack(*pack(told))), optimizers[0].master.clock)
        for group in (0, 1):
            given = [
                torch.randn(spec.local_shape, generator=random) for spec in split.layout.fragment(turn % 2, 2).specs
            ]
            for each in (optimizers, copies) if copies else (optimizers,):
                push(each, group, turn % 2, given)
    assert optimizers[0].master.clock > 4
    for mine, theirs in zip(optimizers, copies, strict=True):
        assert same(mine.buffer, theirs.buffer)
        assert same(mine.method_side.state(), theirs.method_side.state())


@pytest.mark.parametrize("parameters", [1, 2, 4])
@pytest.mark.parametrize("fragments", [1, 2])
def test_the_pace_of_groups_is_saved_and_divided_whole_however_many_parameters_there_are(
    parameters: int, fragments: int
) -> None:
    method = method_named(f"diloco:period=8,fragments={fragments},dynamic_steps=true")
    weights = [torch.ones(64, 4) for _ in range(parameters)]
    split = Partition.of(Layout.of({f"p{place}": each for place, each in enumerate(weights)}), 2, elementwise=True)

    def new(states: Sequence[Any]) -> list[ServedParameters]:
        shares = zip(split.parts(weights), split.shares, states, strict=True)
        parts = [
            ({spec.name: each for spec, each in zip(of.specs, part, strict=True)}, state) for part, of, state in shares
        ]
        return [ServedParameters(None, part, 0, method, (0, 1), resolver(()), state) for part, state in parts]  # type: ignore[arg-type]

    optimizers, pushed = new([None, None]), split.fragment(0, fragments)
    given = pushed.parts([torch.ones(spec.local_shape) for spec in pushed.layout.specs])
    for group, seconds in enumerate((0.5, 1.0)):
        for served, part in zip(optimizers, given, strict=True):
            served.method_side.receive(Push(group, 0, part, note=seconds, fragment=0))
    states = [served.method_side.state() for served in optimizers]
    again = new(split.tree_parts(split.merged_tree(states)))
    for mine, theirs in zip(states, again, strict=True):
        assert same(mine, theirs.method_side.state())


class Linear(torch.nn.Module):
    """The weights of a run, and a loss whose gradients are given."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, torch.nn.Parameter(weight.detach().clone()))

    @staticmethod
    def loss(model: torch.nn.Module, batch: list[Tensor]) -> Tensor:
        return torch.stack([(own * each).sum() for own, each in zip(model.parameters(), batch, strict=True)]).sum()


@pytest.mark.parametrize("method", ["async_sgd", "hardsync"])
def test_a_record_of_several_servers_knows_what_was_frozen_at_any_of_them(method: str) -> None:
    ensemble, random = run_of(3, 2, method), Random(5)
    model = Linear(ensemble.groups[0].parameters)
    computed: dict[int, list[list[Tensor]]] = {0: [], 1: []}
    trainable = [True] * len(SHAPES)
    for step in range(16):
        group = ensemble.groups[step % 2]
        while not group.is_computing:
            assert group.go_on() or ensemble.step()
        gradient = [torch.randn(shape, generator=group.gradients) for shape in SHAPES]
        computed[group.rank].append(gradient)
        if step % 3 == 0:  # one is frozen or unfrozen, by its requires_grad alone
            place = random.randrange(len(SHAPES))
            trainable[place] = not trainable[place]
        group.compute([each if there else None for each, there in zip(gradient, trainable, strict=True)])
    train(ensemble, 0)
    counts, events = Counter[int](), []
    for event in ensemble.events:
        if event.kind == "push":
            at = counts[event.group]
            counts[event.group] += 1
            event = msgspec.structs.replace(
                event, epoch=0, spans=((1000 * event.group + at, 1000 * event.group + at + 1),)
            )
        events.append(event)
    assert any(not all(flags) for event in events for flags in event.elsewhere)
    again = replay(
        events, model, Linear.loss, lambda _, at: computed[at.start // 1000][at.start % 1000], OPTIMIZERS["sgd"]
    )
    assert again.clock == len(ensemble.order) // (2 if method == "hardsync" else 1)
    there = whole(ensemble.groups[0], [tree for _, tree in ensemble.groups[0].snapshot()], "weights")
    assert same(list(again.weights.values()), there)


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from(METHODS), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_snapshot_is_of_one_moment_at_all_servers_whatever_arrives_first(
    seed: int, servers: int, method: str, by_member: bool
) -> None:
    ensemble = run_of(servers, 3, method, seed=seed, by_member=by_member)
    reader = ensemble.groups[2]
    for _ in range(3):
        for group in ensemble.groups[:2]:
            group.go_on()
            if group.is_computing:
                group.compute()
        for _ in range(ensemble.random.randrange(12)):
            ensemble.step()
        cuts = [answer.cut for answer, _ in reader.snapshot()]
        assert all(cut == cuts[0] for cut in cuts)


@given(st.integers(0, 10**6), st.sampled_from(["int8", "topk:0.1", "bf16"]))
@settings(max_examples=12, deadline=None)
def test_nothing_is_lost_or_counted_twice_in_any_wire_format(seed: int, wire: Any) -> None:
    ensemble = run_of(3, 1, wire=wire_of(wire).pushes, seed=seed)
    (group,) = ensemble.groups
    for _ in range(4):
        before = group.core.sender_state(0).get(RESIDUAL)
        group.compute()
        given_now, arrived = group.given, decoded(group)
        while not group.go_on():
            ensemble.step()
        after = group.core.sender_state(0)[RESIDUAL]
        for place in range(len(SHAPES)):
            owed = before[place] if before is not None else torch.zeros(SHAPES[place])
            assert torch.allclose(given_now[place] + owed, arrived[place] + after[place], atol=1e-5)


@pytest.mark.parametrize("by_member", [False, True], ids=["leaders exchange", "members exchange"])
def test_the_time_of_a_push_is_that_of_its_part_and_of_what_follows_when_all_parts_are_there(by_member: bool) -> None:
    ensemble = run_of(2, 2, by_member=by_member)
    for core in ensemble.cores:
        core.status_service._clock = partial(next, count())  # every message that is timed takes one second
    for group in ensemble.groups:
        group.compute()
        while not group.go_on():
            assert ensemble.step()
            for core in ensemble.cores:
                core.status_service.end()
    first, second = (core.status_service.overview() for core in ensemble.cores)
    assert (first.pushes, second.pushes) == (2, 2)
    assert second.serve_time == 2 * 2  # the part has come, and the coordinator has decided
    assert 2 <= first.serve_time <= 2 * 2  # the part may be the last to come
    assert sum(group.status.updates for group in first.groups) == first.status.clock == 2


def test_adaptive_compensation_is_merged_of_a_server_whose_whole_share_is_frozen() -> None:
    ensemble = run_of(2, 2, "delay_compensated:adaptive=true")
    first, second = ({spec.name for spec in share.specs} for share in ensemble.groups[0].split.shares)
    for group in ensemble.groups:
        group.compute([torch.ones(SHAPES[place]) if f"p{place}" in second - first else None for place in range(4)])
    ensemble.arrive()
    for group in ensemble.groups:
        assert group.go_on()
    trees = [tree for _, tree in ensemble.groups[0].snapshot()]
    merged = whole(ensemble.groups[0], trees, "method")
    assert merged["square"].keys() == {0, 1}


# --- All of it or nothing --------------------------------------------------------------------------------------------


def test_however_often_a_rank_was_refused_no_part_of_a_request_waits_for_ever() -> None:
    ensemble = run_of(2, 1)
    (group,) = ensemble.groups
    gradient = Gradient([torch.ones(shape) for shape in SHAPES], hyperparameters_of(group.replica.optimizer))
    action = group.core.gradient(0, gradient)
    assert isinstance(action, ServerRequest)
    good = group.core.send(action, group.split, [Memory(), Memory()])
    bad = [Outgoing(msgspec.structs.replace(each.message, layout=99), each.payload) for each in good]
    for number in range(2 * MOST_HELD):
        group.ask([good[0], bad[1]] if number % 2 else [bad[0], good[1]])
        assert all(isinstance(answer, m.RefusedMessage) for answer, _ in group.hear())
    for first, second in ((0, 1), (1, 0)):  # one is refused before the other is there
        group.ask(bad, [first])
        ensemble.arrive()
        group.requests -= 1
        group.ask(good, [second])
        assert all(isinstance(answer, m.RefusedMessage) for answer, _ in group.hear())


@pytest.mark.parametrize("pushes", [True, False])
def test_what_counts_batches_that_were_not_drawn_is_refused_by_all(pushes: bool) -> None:
    ensemble = run_of(2, 1, "delay_compensated")  # which remembers what a group has fetched
    (group,) = ensemble.groups
    plan = EpochPlan(epoch=0, total=64, batch_size=2, budget=64)
    ensemble.control(0, m.OpenEpoch(plan=plan), m.EpochOpened)
    gradient = Gradient([torch.ones(shape) for shape in SHAPES], hyperparameters_of(group.replica.optimizer))
    action = group.core.gradient(0, gradient) if pushes else group.core.fetch(0)
    assert isinstance(action, ServerRequest)
    said = group.core.send(action, group.split, [Memory(), Memory()])
    group.ask([Outgoing(msgspec.structs.replace(each.message, epoch=0, trained=7), each.payload) for each in said])
    answers = [answer for answer, _ in group.hear()]
    assert all(isinstance(answer, m.RefusedMessage) and "has drawn only 0" in answer.reason for answer in answers)
    assert {core.store.clock for core in ensemble.cores} == {0}


@given(
    st.integers(0, 10**6), st.integers(0, len(SHAPES) - 1), st.sampled_from(["async_sgd", "hardsync"]), st.booleans()
)
@settings(max_examples=20, deadline=None)
def test_a_push_that_is_not_finite_in_one_part_is_refused_by_all(
    seed: int, place: int, method: str, by_member: bool
) -> None:
    ensemble = run_of(3, 1, method, seed=seed, by_member=by_member)
    (group,) = ensemble.groups
    train(ensemble, 2)
    before = held(ensemble)
    gradient = [torch.ones(shape) for shape in SHAPES]
    gradient[place].view(-1)[-1] = torch.inf
    group.compute(gradient)
    while not group.go_on():
        assert ensemble.step()
    assert group.core.last_answer.applied is False
    assert group.core.last_answer.refused_in_row == 1
    assert same(held(ensemble), before)
    assert {core.store.clock for core in ensemble.cores} == {2}


@given(st.integers(0, 10**6), st.lists(st.integers(0, 2), max_size=2, unique=True), st.integers(0, 30), st.booleans())
@settings(max_examples=30, deadline=None)
def test_of_a_push_of_a_group_that_dies_all_servers_apply_everything_or_nothing(
    seed: int, servers: list[int], later: int, by_member: bool
) -> None:
    ensemble = run_of(3, 3, "hardsync", seed=seed, by_member=by_member)
    train(ensemble, 6)
    dying = ensemble.groups[1]
    ensemble.groups[0].compute()
    dying.compute(servers=servers)  # of what it says a part was not sent
    for _ in range(later):
        ensemble.step()
    ensemble.lose(1)
    ensemble.groups[2].compute()
    for group in (ensemble.groups[0], ensemble.groups[2]):
        while not group.go_on():
            assert ensemble.step(), "a group waits for one that is dead"
    ensemble.arrive()
    assert {core.store.clock for core in ensemble.cores} == {3}
    assert same(ensemble.groups[0].replica.weights(), ensemble.groups[2].replica.weights())
    assert all(not core.replication._held for core in ensemble.cores)
    assert len({len(core.roster.formed.alive) for core in ensemble.cores}) == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("by_member", [False, True])
def test_no_server_waits_with_a_mean_for_a_group_that_has_gone_on_to_a_synchronization_point(
    seed: int, by_member: bool
) -> None:
    ensemble = run_of(3, 2, "local_sgd:period=2", seed=seed, by_member=by_member)
    second = ensemble.groups[1]
    ensemble.queues["control", 0].append(m.Contribute(number=0, what="agree"))
    said = second.core.send(second.core.synchronize(0), second.split, second._memories)
    assert all(isinstance(part.message, m.AverageMessage) for part in said)
    second.ask(said)
    answers = second.hear()
    assert all(isinstance(answer, m.Weights) for answer, _ in answers)
    for (_, payload), own in zip(answers, said, strict=True):
        assert own.payload is not None
        assert torch.equal(payload, own.payload)


def test_no_server_keeps_what_belongs_to_the_connection_of_a_rank_that_is_dead() -> None:
    ensemble = run_of(3, 3)
    train(ensemble, 3)
    assert all(len(core.roster.attached) == 3 for core in ensemble.cores)
    ensemble.lose(1)
    ensemble.arrive()
    assert all(core.roster.attached == {b"d0", b"d2"} for core in ensemble.cores)


def test_a_push_of_which_one_part_is_malformed_is_refused_by_all_and_the_next_one_counts() -> None:
    ensemble = run_of(3, 1)
    (group,) = ensemble.groups
    before = held(ensemble)
    group.compute()
    ((message, payload),) = [ensemble.queues["data", 1, 0].pop()]
    shorter = payload[:-4]
    ensemble.tell(1, 0, type(message)(**{**_fields(message), "nbytes": shorter.numel()}), shorter)
    while not group.go_on():
        assert ensemble.step()
    assert "bytes" in group.refused[0]
    assert same(held(ensemble), before)
    assert isinstance(group.action, ServerRequest)
    group.say(group.action)  # once more, whole
    while not group.go_on():
        assert ensemble.step()
    assert {core.store.clock for core in ensemble.cores} == {1}


def test_a_push_of_a_rank_that_is_out_of_the_run_is_answered_so_by_all() -> None:
    ensemble = run_of(2, 1)
    (group,) = ensemble.groups
    group.compute()
    ensemble._arrive(("data", 1, 0))  # one part before
    ensemble.lose(0)
    ensemble.arrive()
    answers = ensemble.answers(0)
    assert answers is not None
    for answer, _ in answers:
        with pytest.raises(RankLost, match="out of the run"):
            answer_of(answer, m.Weights)


def _fields(message: m.Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_request_without_a_number_and_too_many_of_them_are_refused() -> None:
    ensemble = run_of(2, 1)
    ensemble.tell(0, 0, m.FetchMessage(optimizer=0))
    ensemble.arrive()
    ((answer, _),) = ensemble.queues["answer", 0, 0]
    assert isinstance(answer, m.RefusedMessage)
    assert "one number, from 1 on" in answer.reason
    ensemble.queues["answer", 0, 0].clear()
    for number in range(10, 30):
        ensemble.tell(0, 0, m.FetchMessage(optimizer=0, request=number))
    ensemble.arrive()
    assert sum("wait for the rest" in answer.reason for answer, _ in ensemble.queues["answer", 0, 0]) >= 1
    assert len(ensemble.cores[0].replication._held) <= 16


# --- Servers come and go
# ---------------------------------------------------------------------------------------------


def test_the_run_ends_and_says_which_server_is_gone() -> None:
    ensemble = run_of(3, 2)
    ensemble._send(0, ensemble.cores[0].hang_up(b"s2"))
    notices = [message for message in ensemble.said if isinstance(message, m.Notice)]
    assert notices
    assert all(notice.over for notice in notices)
    assert "parameter server 2 of 3 at memory://2 is gone" in notices[0].reason
    assert "parameter server 2 of 3" in ensemble.cores[0].replication.lost_server
    ensemble.arrive()
    assert ensemble.cores[1].roster.over == ensemble.cores[0].roster.over


@pytest.mark.parametrize("failing", [[1], [0, 1, 2]])
@pytest.mark.parametrize("dies", [False, True])
def test_a_step_that_fails_at_one_of_several_servers_ends_the_run_and_no_server(
    failing: list[int], dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = run_of(3, 2 + dies, "hardsync")

    def fails(*_: Any) -> None:
        raise ProtocolError("this optimizer cannot step")

    for number in failing:
        monkeypatch.setattr(ensemble.cores[number].store.all[0].method_side, "merge", fails)
    for group in ensemble.groups[:2]:
        group.compute()
    ensemble.arrive()
    if dies:  # the group that the others wait for
        ensemble.lose(2)
        ensemble.arrive()
    assert [core.roster.over for core in ensemble.cores] == ["this optimizer cannot step"] * 3
    assert ensemble.cores[0].replication.lost_server == ""
    notices = {message.reason for message in ensemble.said if isinstance(message, m.Notice) and message.over}
    assert notices == {"this optimizer cannot step"}


def test_a_silent_server_and_one_that_never_comes_end_the_run() -> None:
    ensemble = run_of(2, 1)
    ensemble._send(0, ensemble.cores[0].tick(1e6))
    assert "parameter server 1 of 2" in ensemble.cores[0].roster.over
    alone = ServerCore(KEY, os.urandom, join_timeout=5.0, servers=2)
    hello = handshake.hello_of("run", 0, 1, Layout(()), NONCE)
    handshake.join(lambda message, _: alone.receive(m.CONTROL, b"c0", message, b"", 0.0)[0].message, KEY, hello)
    assert alone.receive(m.CONTROL, b"c0", m.AskServerAddresses(), b"", 0.0) == []
    (notice,) = [out.message for out in alone.tick(6.0) if isinstance(out.message, m.Notice)]
    assert "parameter server 1 of 2" in notice.reason
    assert "did not come within 5 s" in notice.reason


def test_a_server_whose_process_has_ended_before_it_came_is_not_awaited() -> None:
    alone = ServerCore(KEY, os.urandom, servers=3)
    hello = handshake.hello_of("run", 0, 1, Layout(()), NONCE)
    handshake.join(partial(first_answer, alone), KEY, hello)
    assert alone.receive(m.CONTROL, b"c0", m.AskServerAddresses(), b"", 0.0) == []
    alone.replication.ended(2, "its process has ended with status -9")
    notices = [out.message for out in alone.tick(1.0) if isinstance(out.message, m.Notice)]
    assert [notice.over for notice in notices] == [True]
    assert "parameter server 2 of 3" in alone.replication.lost_server
    assert "never came: its process has ended with status -9" in alone.replication.lost_server
    assert alone.roster.over


def test_the_end_of_the_process_of_a_server_that_has_come_is_told_by_its_connection() -> None:
    ensemble = run_of(2, 1)
    ensemble.cores[0].replication.ended(1, "its process has ended with status -9")
    ensemble._send(0, ensemble.cores[0].tick(0.0))
    assert ensemble.cores[0].replication.lost_server == ensemble.cores[0].roster.over == ""
    ensemble._send(0, ensemble.cores[0].hang_up(b"s1"))
    assert "parameter server 1 of 2 at memory://1 is gone" in ensemble.cores[0].replication.lost_server


def first_answer(core: ServerCore, message: m.Message, _: object) -> Any:
    """What a server says first to the control connection of rank 0."""
    return core.receive(m.CONTROL, b"c0", message, b"", 0.0)[0].message


def test_what_is_no_server_of_the_run_is_refused_as_one() -> None:
    core = ServerCore(KEY, os.urandom, servers=3)

    def say(message: m.Message, expect: type[Any]) -> Any:
        answer = core.receive(m.CONTROL, b"stranger", message, b"", 0.0)[0].message
        if isinstance(answer, m.RefusedMessage):
            raise Refused(answer.code, answer.reason)
        return answer

    def hello(number: int, servers: int) -> sm.FollowerHello:
        return sm.FollowerHello(version=m.VERSION, number=number, servers=servers, address="memory://", nonce=NONCE)

    with pytest.raises(Refused, match="key does not match"):
        handshake.join_as_follower(say, bytes(32), hello(1, 3))
    with pytest.raises(Refused, match="this one is server 0 of 3"):
        handshake.join_as_follower(say, KEY, hello(1, 2))
    with pytest.raises(Refused, match="protocol version"):
        handshake.join_as_follower(say, KEY, sm.FollowerHello(**{**_fields(hello(1, 3)), "version": 1}))
    with pytest.raises(Refused, match="of no server"):
        say(sm.PartReady(rank=0, request=1), m.Acknowledged)
    handshake.join_as_follower(say, KEY, hello(1, 3))
    with pytest.raises(Refused, match="already"):
        handshake.join_as_follower(say, KEY, hello(1, 3))


def test_a_server_that_coordinates_no_others_is_named_to_one_that_would_follow_it() -> None:
    transport = InMemory()
    server = transport.serve(ServerCore(KEY, os.urandom))
    with pytest.raises(Refused, match="this one is server 0 of 1; give all of them the same --servers"):
        transport.follow(ServerCore(KEY, os.urandom, servers=3, number=1), server.address)


def test_a_server_that_holds_a_share_lets_no_stranger_in_and_takes_no_other_messages() -> None:
    ensemble = run_of(2, 1)
    follower = ensemble.cores[1]
    hello = handshake.hello_of("run", 5, 9, ensemble.groups[0].layout, NONCE)
    assert follower.receive(m.CONTROL, b"stranger", hello, b"", 0.0) == []
    (out,) = follower.receive(m.DATA, b"x", m.FetchMessage(optimizer=0), b"", 0.0)
    assert isinstance(out.message, m.RefusedMessage)
    with pytest.raises(ProtocolError, match="holds partition 1 of 2"):
        follower.check_payload(b"d0", m.Upload(nbytes=3))
    (answer,) = follower.receive(m.DATA, b"d7", m.Attach(rank=7, nonce=NONCE), b"", 0.0)
    assert isinstance(answer.message, m.AttachChallenge)
    (refusal,) = follower.receive(m.DATA, b"d7", m.AttachProof(mac=bytes(32)), b"", 0.0)
    assert isinstance(refusal.message, m.RefusedMessage)


@pytest.mark.parametrize("is_seen_before", [False, True])
def test_when_a_run_is_over_each_server_says_so_once_and_is_ready_for_the_next(is_seen_before: bool) -> None:
    ensemble, over = run_of(2, 1), list[int]()
    first, second = ensemble.cores
    second.on_run_over = lambda: over.append(len(second.store.all))
    ensemble.control(0, m.Goodbye(), m.Acknowledged)
    assert first.roster.is_over
    if is_seen_before:  # by what drives it: the rank's goodbye has come, and that the run is over has not
        ensemble.arrive()
        assert second.roster.is_over
        second.reset()
    first.reset()
    ensemble._send(0, first.tick(0.0))
    ensemble.arrive()
    assert over == ([] if is_seen_before else [1])
    assert all(not core.roster.members for core in ensemble.cores)
    assert second.store.all == []


def test_methods_that_do_not_treat_each_number_by_itself_say_so() -> None:
    assert AsyncSGD.elementwise is True


# --- In real processes ------------------------------------------------------------------------------------------------


CUT = "diloco:period=4,fragments=2,delay=1,outer_momentum=0.5"


@pytest.mark.processes
def test_real_servers_hold_bitwise_what_one_would_and_a_dead_one_is_named() -> None:
    barrier = {"method": "hardsync", "optimizer": "adamw", "freezes": True}
    cases = [
        barrier,
        {**barrier, "servers": "per-node"},
        {
            "servers": 2,
            "compression": {"push": "int8", "pull": "bf16"},
            "poisons": True,
            "regroups": True,
            "steps": 9,
        },
        {"servers": 2, "method": CUT, "compression": "topk:0.4", "regroups": True, "steps": 20},
        {"servers": "per-node", "method": "local_sgd:period=2", "kills": "server"},
    ]
    with Running("servers.py", {"cases": cases}) as running:
        finished = running.wait(400)
        assert running.survivors == []
    assert finished.code == 0, finished.output[-4000:]
    for rank, (one, several, lossy, cut, killed) in finished.results.items():
        assert (one["servers"], several["servers"], lossy["servers"], cut["servers"]) == (1, 2, 2, 2)
        assert one["weights"] == several["weights"]
        assert lossy["finite"]
        assert lossy["refused"] == rank  # the one that was poisoned
        assert lossy["last"] < lossy["first"]
        assert cut["finite"]
        assert cut["last"] < cut["first"]
        assert "parameter server 1 of 2 at tcp://127.0.0.1:" in killed["error"]
        if rank == 0:
            assert several["shapes"] == one["shapes"]
            assert several["shapes"]["0"]["exp_avg"] == [70, 40]
            assert one["clock"] == several["clock"] == 6
            assert cut["clock"] > 8, "an exchange every other step, after the groups were formed again"


@pytest.mark.processes
def test_a_server_that_stands_by_itself_tells_where_its_shares_are(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_omni", "serve", "--port", "0", "--servers", "2", "--key-file"]
    process = Process([*command, str(tmp_path / "key")], {"OMNI_TEST_COPIES": "1"})
    try:
        address = process.expect(r"parameter server on (tcp://\S+),", 60)[1]
        key = bytes.fromhex((tmp_path / "key").read_text().strip())
        layout = Layout.of({"w": torch.zeros(300)})
        with closing_as_rank(ZeroMQ().join(address, key, "run", 0, 1, layout)) as control:
            assert control.servers == 2
            connections = control.attach_all(60.0)
            assert len(connections) == 2
            for connection in connections:
                connection.close()
        process.interrupt()
        assert process.end(30) == 130
    finally:
        process.kill()


def test_a_server_that_was_suspended_with_the_one_that_coordinates_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0.0
    monkeypatch.setattr(server_link, "SuspendAwareClock", partial(SuspendAwareClock, lambda: moment))
    coordinator, stopping = ZeroMQServer(ServerCore(KEY, os.urandom, servers=2)), threading.Event()
    thread = threading.Thread(target=coordinator.run, args=(stopping.is_set,))
    thread.start()
    try:
        core = ServerCore(KEY, os.urandom, servers=2, number=1)
        with closing(server_link.CoordinatorLink(core, coordinator.address, "tcp://127.0.0.1:1", "curve")) as link:
            assert link.is_connected
            moment += 3600.0  # in which neither did anything
            assert link.is_connected
            for _ in range(60):  # and now it is awake, and hears nothing
                moment += 1.0
                stands = link.is_connected
            assert not stands
    finally:
        stopping.set()
        thread.join()
        coordinator.close()


@contextmanager
def closing_as_rank(control: Control) -> Iterator[Control]:
    yield control
    control.close("")


def test_options_of_several_servers_are_checked() -> None:
    for options, text in (
        ({"servers": 0}, "--servers 0"),
        ({"servers": 2, "servers_here": 3}, "--servers-here 3"),
        ({"servers": 2, "number": 2, "coordinator": "tcp://a:1"}, "--number 2"),
        ({"servers": 2, "number": 1}, "needs the address of the one that coordinates"),
        (
            {"servers": 2, "number": 1, "coordinator": "tcp://a:1", "record": Path("r")},
            "the server that coordinates records",
        ),
    ):
        with pytest.raises(ConfigurationError, match=text):
            serve(**options)


def test_what_several_servers_cannot_do_is_refused_before_training() -> None:
    for options, text in (
        ({"address": "tcp://10.0.0.1:5555"}, "lightning-omni serve --servers N"),
        ({"transport": Stream()}, "leave count= out"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            omni.Server(count=2, **options)
