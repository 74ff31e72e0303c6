"""Wire formats: bytes of a push and back, what a sender owes, and one that is none of the package's, run for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounds import sent, sgd
from runs import run
from test_server_core import Link, as_bytes, expect_refusal, gradient, push_of, trained_link, varied
from topk import TopK
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.data import TensorDataset

from lightning_omni import Compression
from lightning_omni.errors import ConfigurationError, MalformedMessage
from lightning_omni.group.core import GroupCore, ServerRequest
from lightning_omni.methods import AsyncSGD, Gradient, NextGradient, Pulled, Replica
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.runtime.model.replica import PREFIX
from lightning_omni.server.event_log import Event
from lightning_omni.simulator import Cluster, Computation, Jitter, Limits, Workload, simulate
from lightning_omni.simulator.cluster import Link as NetworkLink
from lightning_omni.simulator.replay import replay
from lightning_omni.simulator.workbench import Samples
from lightning_omni.trace import Trace
from lightning_omni.transport.zeromq import shared_memory
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import (
    RAW,
    Memory,
    Raw,
    WireFormat,
    check_size,
    decode,
    from_wire,
    load_format,
    register,
    text_of,
    to_wire,
)
from lightning_omni.wire.layout import Layout

SHAPES = ((4, 3), (), (7,))
LAYOUT = Layout.of({str(place): torch.zeros(shape, dtype=torch.float64) for place, shape in enumerate(SHAPES)})
TOPK = TopK(fraction=0.25)


def test_only_a_format_that_can_be_named_has_a_text() -> None:
    assert [text_of(Compression(name).wire_format) for name in ("fp32", "int8")] == ["fp32", "int8"]
    assert text_of(Compression("int8", "bf16").wire_format) == ""


def views(wire: WireFormat, payload: Tensor, present: tuple[bool, ...]) -> list[Tensor | None]:
    """What a server makes of a payload."""
    layout = LAYOUT.subset(present)
    check_size(wire, payload.numel(), layout)
    there = iter(layout.views(decode(wire, payload, layout, Memory())))
    return [next(there) if flag else None for flag in present]


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- One push after the other ----------------------------------------------------------------------------------------


@varied
@given(st.lists(st.tuples(st.tuples(*[st.sampled_from("gzn")] * len(SHAPES)), st.booleans()), max_size=12))
def test_what_is_decoded_and_what_is_owed_add_up_to_what_was_given(pushes: list[tuple[tuple[str, ...], bool]]) -> None:
    """Gradients, zeros and None in any order; some pushes with a NaN, which are refused and lose no residual."""
    own = [Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    core, memory = GroupCore(AsyncSGD(), TOPK), Memory()
    core.attach(Replica(own, sgd(0.1)(own)))
    given_, decoded = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for number, (kinds, is_poisoned) in enumerate(pushes):
        tensors = [
            None if kind == "n" else numbers(shape, 100 * number + place) * (kind == "g")
            for place, (kind, shape) in enumerate(zip(kinds, SHAPES, strict=True))
        ]
        there = [tensor for tensor in tensors if tensor is not None]
        is_poisoned = is_poisoned and bool(there)
        if is_poisoned:
            there[-1].fill_(torch.nan)
        before = core.sender_state(0)
        ask = core.gradient(0, Gradient(tensors, hyperparameters_of(sgd(0.1)(own))))
        assert isinstance(ask, ServerRequest)
        said = sent(core, ask, LAYOUT, memory)
        assert isinstance(said.message, m.PushMessage)
        assert said.payload is not None
        assert said.message.nbytes == said.payload.numel()
        arrived = views(TOPK, said.payload, said.message.present)
        assert any(not each.isfinite().all() for each in arrived if each is not None) == is_poisoned
        pulled = Pulled([torch.zeros(shape) for shape in SHAPES], number, refused=is_poisoned)
        assert core.answer(0, pulled) == NextGradient()
        if is_poisoned:
            assert core.sender_state(0) is before
            continue
        for total, each in (*zip(given_, tensors, strict=True), *zip(decoded, arrived, strict=True)):
            total += 0 if each is None else each
    owed = core.sender_state(0).get("residual", [None] * len(SHAPES))
    for total, arrived_, left in zip(given_, decoded, owed, strict=True):
        torch.testing.assert_close(arrived_ + (0 if left is None else left), total, rtol=0, atol=1e-12)


@varied
@given(st.tuples(*[st.booleans()] * len(SHAPES)), st.integers(0, 9))
def test_raw_is_the_tensors_themselves_in_the_layout_and_no_copy_when_decoded(
    present: tuple[bool, ...], seed: int
) -> None:
    tensors = [
        numbers(shape, seed + place) if there else None
        for place, (shape, there) in enumerate(zip(SHAPES, present, strict=True))
    ]
    encoded = RAW.encode(tensors, LAYOUT, {}, Memory())
    assert (encoded.present, dict(encoded.state)) == (present, {})
    assert encoded.payload.numpy().tobytes() == as_bytes(tensors)
    assert RAW.decode(encoded.payload, LAYOUT, Memory()) is encoded.payload
    for before, after in zip(tensors, views(RAW, encoded.payload, present), strict=True):
        assert (before is None and after is None) or torch.equal(before, after)  # type: ignore[arg-type]


def test_memory_is_used_again_for_any_layout() -> None:
    memory = Memory()
    whole, _ = memory.hold(LAYOUT)
    part, (view,) = memory.hold(LAYOUT.subset((False, True, False)))
    view.fill_(1.0)
    assert part.data_ptr() == whole.data_ptr() == memory.hold(LAYOUT)[0].data_ptr()
    assert (part.numel(), memory.hold(LAYOUT)[0].numel()) == (8, LAYOUT.nbytes)


# --- At the server ---------------------------------------------------------------------------------------------------


def sparse_link() -> Link:
    """Two groups whose pushes travel as `TopK`."""
    link = trained_link((0, 1), (2,))
    formed = link.form((0, 1), (2,), generation=2, wire_format=to_wire(TOPK))
    assert formed == m.GroupsFormed(generation=2, incarnation=2)
    link.inbox.clear()
    return link


def sparse_push(**changes: Any) -> tuple[m.PushMessage, bytes]:
    message, _ = push_of(gradient(0))
    layout = Layout.of({str(place): tensor for place, tensor in enumerate(gradient(0))})
    payload = TOPK.encode(gradient(0), layout, {}, Memory()).payload.numpy().tobytes()
    return msgspec.structs.replace(message, nbytes=len(payload), **changes), payload


def test_a_server_takes_pushes_in_the_format_that_the_groups_were_formed_with() -> None:
    link = sparse_link()
    before = link.weights()
    answer, _ = link.data(2, *sparse_push())
    assert (answer.applied, answer.clock) == (True, 1)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, link.weights(), strict=True)])
    assert int(moved.count_nonzero()) == int(0.25 * 9)
    assert link.form((0, 1), (2,), generation=3) == m.GroupsFormed(generation=3, incarnation=3)
    assert link.data(2, *push_of(gradient(1), read_at=1))[0].applied


@pytest.mark.parametrize(
    "spoil",
    [
        lambda payload: (99).to_bytes(8, "little") + payload[8:],
        lambda payload: (-1).to_bytes(8, "little", signed=True) + payload[8:],
        lambda payload: payload[:8] + (1 << 40).to_bytes(8, "little") + payload[16:],
        lambda payload: payload[:-3],
        lambda payload: payload[:8],
    ],
    ids=["more than came", "fewer than none", "a place that is none", "a piece is missing", "nothing follows"],
)
def test_a_payload_that_cannot_be_decoded_is_refused_and_counted_and_harms_no_rank(
    spoil: Callable[[bytes], bytes],
) -> None:
    link = sparse_link()
    before = link.weights()
    message, payload = sparse_push()
    bad = spoil(payload)
    answer, _ = link.data(2, msgspec.structs.replace(message, nbytes=len(bad)), bad)
    expect_refusal(answer, "malformed", "bytes are no push in the wire format largest: ")
    assert (link.core.strangers, link.core.store.clock) == (1, 0)
    assert all(map(torch.equal, before, link.weights()))
    assert link.data(2, *sparse_push())[0].applied
    assert link.data(0, *sparse_push())[0].staleness == 1


@varied
@given(st.lists(st.one_of(st.binary(min_size=8, max_size=40), st.just(b"\1" + bytes(7) + bytes(16))), max_size=6))
def test_whatever_comes_as_a_payload_is_a_push_or_a_counted_refusal(payloads: list[bytes]) -> None:
    link = sparse_link()
    message, _ = sparse_push()
    refused = 0
    for payload in payloads:
        answer, _ = link.data(2, msgspec.structs.replace(message, nbytes=len(payload)), payload)
        refused += isinstance(answer, m.RefusedMessage) and answer.code == "malformed"
        assert link.core.strangers == refused
    assert link.core.store.clock + link.core.store.all[0].counts.refused + refused == len(payloads)
    assert all(bool(weight.isfinite().all()) for weight in link.weights())
    assert link.data(0, *sparse_push())[0].applied


@pytest.mark.parametrize("nbytes", [7, 8 + 16 * 2 + 1, 1 << 50])
def test_a_payload_larger_or_smaller_than_any_is_refused_before_memory_is_allocated(nbytes: int) -> None:
    link = sparse_link()
    message, _ = sparse_push()
    with pytest.raises(MalformedMessage, match=f"the tensors have {nbytes} bytes, 8 to 40 were expected"):
        link.core.check_payload(b"data 2", msgspec.structs.replace(message, nbytes=nbytes))


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (
            {"name": "telepathy"},
            "unknown wire format 'telepathy'; known are raw, both_ways, int8, bf16, fp16, topk, ",
        ),
        ({"name": "largest", "fraction": "half"}, "wire format largest: Expected `float`"),
        ({}, "unknown wire format None"),
    ],
)
def test_a_format_that_the_server_does_not_know_is_refused_and_the_old_groups_stand(
    plain: dict[str, Any], says: str
) -> None:
    link = sparse_link()
    expect_refusal(link.form((0,), (1, 2), generation=3, wire_format=plain), "protocol", says)
    assert link.core.generation == 2
    assert link.data(2, *sparse_push())[0].applied


def test_formats_are_registered_by_name_and_imported_by_path() -> None:
    assert load_format("topk:TopK") is TopK
    assert from_wire(to_wire(TOPK)) == TOPK

    class Other(Raw, frozen=True, kw_only=True, tag="raw"):
        pass

    with pytest.raises(ConfigurationError, match="the name 'raw' belongs to Raw"):
        register(Other)
    with pytest.raises(ConfigurationError, match=r"is not a lightning_omni\.wire\.formats\.WireFormat"):
        load_format("topk:Tensor")
    with pytest.raises(ConfigurationError, match="the wire format topk:Nothing cannot be imported"):
        load_format("topk:Nothing")


# --- In the simulator ------------------------------------------------------------------------------------------------


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    difference: Tensor = model(batch[0]) - batch[1]
    return difference.square().mean()


def simulated(wire: Any, method: str = "async_sgd", lr: float = 0.03, **options: Any) -> Trace:
    model, data, make = problem(lr)
    cluster = Cluster.even(3, jitter=Jitter("exponential"), link=NetworkLink(bandwidth=100.0))
    return simulate(
        method,
        3,
        cluster,
        Workload(model, data, loss=squares, optimizer=make),
        batch_size=4,
        compression=wire,
        **options,
    )


def problem(lr: float = 0.03) -> tuple[nn.Module, TensorDataset, Callable[[Any], torch.optim.Optimizer]]:
    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    model = nn.Linear(8, 1)
    return model, TensorDataset(inputs, inputs.sum(1, keepdim=True)), lambda own: torch.optim.SGD(own, lr=lr)


@pytest.mark.parametrize("method", ["async_sgd", "hardsync", "diloco:period=2"])
def test_a_format_trains_when_simulated_and_its_smaller_pushes_take_less_time(method: str) -> None:
    sparse, raw = (simulated(wire, method, limits=Limits(epochs=15)) for wire in (TOPK, RAW))
    losses = sparse.columns()["loss"]
    assert losses[-6:].mean() < losses[:6].mean() / 4
    assert sparse.seconds < raw.seconds
    assert sparse.meta["refused"] == 0


def test_a_simulated_run_in_any_format_is_replayed_bit_for_bit() -> None:
    events: list[Event] = []
    trace = simulated(TOPK, limits=Limits(updates=30), computation=Computation(batched=False), record=events.append)
    assert events[0].wire_format == {"name": "largest", "fraction": 0.25}
    model, data, make = problem()
    samples = Samples(data, seed=0)
    again = replay(events, model, squares, lambda *where: samples.batch(samples.at(*where)), make)
    assert all((again.weights[name].numpy() == weight).all() for name, weight in trace.weights.items())
    regrouped = [*events, msgspec.structs.replace(events[0], kind="form", clock=trace.updates)]
    with pytest.raises(ConfigurationError, match="had not pushed yet in their wire format largest"):
        replay(regrouped, model, squares, lambda *where: samples.batch(samples.at(*where)), make)


# --- For real --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["", "int8"], ids=["a test's own", "int8"])
def test_through_a_real_server_and_other_groups_nothing_given_is_lost_or_sent_twice(wire: str) -> None:
    """Four groups, two, one and two again, a gradient that is refused, and a checkpoint's worth of state on the way."""
    finished = run("formats.py", {"wire": wire})
    ranks = [finished.results[rank] for rank in range(4)]
    assert all(result["weights"] == ranks[0]["weights"] for result in ranks)
    assert ranks[0]["gathered"]
    assert [bool(result["residual"]) for result in ranks] == [True, False, True, False]
    if (
        shared_memory.can_share_memory()
    ):  # every leader of every phase shares memory with the server; this format leaves it unused
        assert all(0 < result["shared"] <= result["moved"] for result in ranks)
        assert bool(wire) == all(result["shared"] == result["moved"] for result in ranks)
    for place, weight in enumerate(ranks[0]["weights"]):
        total = sum(torch.tensor(result["given"][place], dtype=torch.float64) for result in ranks)
        owed = torch.tensor([result["residual"][place] for result in ranks[::2]], dtype=torch.float64).sum(0)
        assert bool(owed.any())
        torch.testing.assert_close(torch.tensor(weight, dtype=torch.float64), -0.1 * (total - owed))
    assert finished.output.count("the checkpoint holds residuals that its groups had not pushed yet") == 1
    assert "training has ended, and group 1 has not pushed the residual of optimizer 0" in finished.output


@pytest.mark.parametrize(
    ("wire", "method", "part", "servers"),
    [
        ("fp32", "elastic_averaging:period=1", 1.0, 2),
        ({"push": "int8", "pull": "bf16"}, "async_sgd", 0.5, 1),
        ({"push": "fp32", "pull": "bf16"}, "diloco:period=2", 0.5, 2),
        ({"push": "fp32", "pull": "int8"}, "diloco:period=1", 0.25, 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("fp32", "elastic_averaging:period=1", 1.0, 1),
                ({"push": "int8", "pull": "bf16"}, "async_sgd", 0.5, 2),
                ({"push": "fp32", "pull": "bf16"}, "diloco:period=2", 0.5, 1),
                ({"push": "fp32", "pull": "int8"}, "diloco:period=1", 0.25, 2),
            )
        ),
    ],
    ids=str,
)
def test_a_leader_hands_on_what_it_is_answered_in_as_few_bytes_as_it_came(
    wire: Any, method: str, part: float, servers: int
) -> None:
    finished = run("handed_on.py", {"wire": wire, "method": method, "servers": servers})
    ranks = [finished.results[rank] for rank in range(4)]
    for leader, member in (ranks[:2], ranks[2:]):
        assert leader["weights"] == member["weights"]
        exchanges = 2 if "period=2" in method else 4
        about = part * exchanges * leader["nbytes"]
        assert leader["handed"] == member["handed"]
        said = (exchanges + 2) * PREFIX  # before each answer, and as groups are formed
        assert about < leader["handed"] < about + said, "scales, and what else was said, are little"
