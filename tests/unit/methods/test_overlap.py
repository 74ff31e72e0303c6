"""Exchanges that travel while groups compute, and fragments: what is said and heard, in memory and in virtual time."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rounds import sent, sgd
from runs import run as real_run
from test_cluster_methods import MOMENTUM, Net, batch_of, loss_of, untrained
from test_server_core import varied
from test_simulator import DATA, INPUTS, LABELS, loss, new_model
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import ConcatDataset

from lightning_omni import Compression
from lightning_omni.errors import ProtocolError
from lightning_omni.group.core import NO_ANSWER, GroupCore, ServerRequest
from lightning_omni.methods import (
    AsyncSGD,
    Exchange,
    Gradient,
    GroupSide,
    Method,
    NextGradient,
    Pulled,
    Receive,
    Replica,
    Send,
)
from lightning_omni.methods.model.fragments import cut, read, sizes_of, write
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.server.event_log import Event, read_record
from lightning_omni.simulator import Cluster, Computation, Limits, Link, Workload, replay, simulate
from lightning_omni.simulator.workbench import Samples
from lightning_omni.trace import Trace
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats import wire_named
from lightning_omni.wire.formats.base import Memory, check_size, decode
from lightning_omni.wire.layout import Layout, TensorSpec
from lightning_omni.wire.partition import Partition

SHAPES = ((7, 5), (), (0,), (130,), (3,))
FORMATS = ("fp32", "bf16", "int8", "topk:0.1")


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


# --- A fragment ------------------------------------------------------------------------------------------------------


@varied
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([2, 4, 8])), max_size=6), st.integers(1, 9))
def test_fragments_have_every_number_once_and_equal_bytes(sizes: list[tuple[int, int]], of: int) -> None:
    whole = sum(count * width for count, width in sizes)
    counted = [[0] * count for count, _ in sizes]
    for pieces in cut(sizes, of):
        nbytes = 0
        for place, where in pieces:
            start, stop = where or (0, sizes[place][0])
            nbytes += (stop - start) * sizes[place][1]
            counted[place][start:stop] = [each + 1 for each in counted[place][start:stop]]
        assert abs(nbytes - whole / of) <= 8  # one number more or less
    assert all(each == 1 for numbers in counted for each in numbers)


@varied
@given(st.integers(1, 5), st.integers(1, 4))
def test_parameters_that_come_later_lie_behind_what_a_fragment_has(of: int, more: int) -> None:
    before = Layout.of({str(place): tensor for place, tensor in enumerate(drawn(0))})
    after = before.grown([TensorSpec(f"more{place}", (4,), "float32") for place in range(more)])
    parts = [(before.fragment(number, of), after.fragment(number, of)) for number in range(of)]
    assert all(new.specs[: len(old.specs)] == old.specs for old, new in parts)
    assert sum(len(new.specs) - len(old.specs) for old, new in parts) == more
    assert after.fragment(None, of) is after
    assert len({id(after.fragment(0, of)) for _ in range(3)}) == 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels_last"])
def test_a_fragment_is_read_and_written_whatever_the_memory_format(memory_format: torch.memory_format) -> None:
    tensors = [torch.arange(48.0).view(2, 3, 4, 2).contiguous(memory_format=memory_format), torch.arange(5.0)]
    for pieces in cut(sizes_of(tensors), 3):
        write(tensors, pieces, [each + 100 for each in read(tensors, pieces)])
    assert torch.equal(tensors[0], torch.arange(48.0).view(2, 3, 4, 2) + 100)
    assert tensors[0].is_contiguous(memory_format=memory_format)
    assert torch.equal(tensors[1], torch.arange(5.0) + 100)


@pytest.mark.parametrize("name", FORMATS)
def test_what_arrives_of_fragments_and_what_is_owed_add_up_to_what_was_given(name: str) -> None:
    wire, of = wire_named(name), 3
    own = [Parameter(torch.zeros_like(each)) for each in drawn(0)]
    core = GroupCore(Fragmented(fragments=of), wire)
    core.attach(Replica(own, sgd(0.1)(own)))
    layout = Layout.of({str(place): each.detach() for place, each in enumerate(own)})
    given_, arrived = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    sizes = []
    for number in range(12):
        tensors, pieces = drawn(number), layout.pieces(number % of, of)
        skipped = number % 5  # that one has no gradient, now and then
        need = Exchange(
            [None if place == skipped else read(tensors, [piece])[0] for piece in pieces for place, _ in [piece]],
            0,
            fragment=number % of,
        )
        [encoded] = core.encode(0, need, Partition.whole(layout), [Memory()])
        core._accept_answer(core._method_states[0], Pulled((), number))
        there = layout.fragment(number % of, of).subset(encoded.present)
        check_size(wire, encoded.payload.numel(), there)
        came = there.views(decode(wire, encoded.payload, there, Memory()))
        present = [piece for piece, flag in zip(pieces, encoded.present, strict=True) if flag]
        for totals, values in ((given_, [each for each in need.tensors if each is not None]), (arrived, came)):
            write(totals, present, [a + b for a, b in zip(read(totals, present), values, strict=True)])
        sizes.append(encoded.payload.numel())
    whole = wire.sizes(layout)[1]
    assert max(sizes) <= 1.5 / of * whole, "of a small model, whose tensors lie at multiples of 64 bytes"
    owed = core.sender_state(0).get("residual", [None] * len(SHAPES))
    assert any(each is not None for each in owed) == (name != "fp32")
    for total, there_, left in zip(given_, arrived, owed, strict=True):
        torch.testing.assert_close(there_ + (0 if left is None else left), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_what_arrives_of_steps_under_way_and_what_is_owed_add_up_to_all_gradients(name: str) -> None:
    wire, memory = wire_named(name), Memory()
    own = [Parameter(torch.zeros_like(each)) for each in drawn(0)]
    core = GroupCore(AsyncSGD(), wire, overlap=True)
    core.attach(Replica(own, sgd(0.1)(own)))
    layout = Layout.of({str(place): each.detach() for place, each in enumerate(own)})
    given_, arrived = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for number in range(1, 13):
        gradient = drawn(number)
        action = core.gradient(0, Gradient(list(gradient), [{"lr": 0.1}]))
        if action == Receive():
            action = core.answer(0, core.receive(replace(NO_ANSWER, staleness=0, clock=number), drawn(0)))
        assert isinstance(action, ServerRequest)
        payload = sent(core, action, layout, memory).payload
        assert core.answer(0, None) == NextGradient()
        assert payload is not None
        came = layout.views(decode(wire, payload, layout, Memory()))
        for totals, values in ((given_, gradient), (arrived, came)):
            for total, value in zip(totals, values, strict=True):
                total += value
    core.apply_answer(0, core.receive(replace(NO_ANSWER, staleness=0, clock=13), drawn(0)))
    owed = core.sender_state(0).get("residual", [None] * len(SHAPES))
    assert any(each is not None for each in owed) == (name != "fp32")
    for total, there, left in zip(given_, arrived, owed, strict=True):
        torch.testing.assert_close(there + (0 if left is None else left), total, rtol=1e-5, atol=1e-5)


class Fragmented(Method, frozen=True, kw_only=True, tag="test_fragmented"):
    """Only for its number of fragments."""

    fragments: int = 1  # type: ignore[misc]
    steps_at = "worker"


# --- What a group says and hears -------------------------------------------------------------------------------------


def overlapping() -> tuple[GroupCore, Replica, Layout, Memory]:
    own = [Parameter(torch.ones(2))]
    replica = Replica(own, sgd(0.5)(own))
    core = GroupCore(AsyncSGD(), overlap=True)
    core.attach(replica)
    return core, replica, Layout.of({"weight": own[0].detach()}), Memory()


def gradient_of(replica: Replica, value: float) -> Gradient:
    return Gradient([torch.full((2,), value)], hyperparameters_of(replica.optimizer))


@torch.no_grad()
def test_the_answer_to_a_step_is_loaded_when_the_next_gradient_is_there() -> None:
    core, replica, layout, memory = overlapping()
    first = core.gradient(0, gradient_of(replica, 1.0))
    assert isinstance(first, ServerRequest)
    assert not first.waits
    said = sent(core, first, layout, memory)
    assert core.answer(0, None) == NextGradient()
    assert replica.weights()[0].tolist() == [1.0, 1.0], "nothing has come yet"
    assert core.gradient(0, gradient_of(replica, 2.0)) == Receive()
    second = core.answer(0, core.receive(replace(NO_ANSWER, staleness=0, clock=5), [torch.full((2,), 7.0)]))
    assert replica.weights()[0].tolist() == [7.0, 7.0]
    assert isinstance(second, ServerRequest)
    message = sent(core, second, layout, memory).message
    assert isinstance(said.message, m.PushMessage)
    assert isinstance(message, m.PushMessage)
    assert (said.message.sequence, message.sequence) == (1, 2)
    assert message.read_at == 0, "it was computed before the answer came"
    assert core.answer(0, None) == NextGradient()
    core.gradient(0, gradient_of(replica, 3.0))
    third = core.answer(0, core.receive(replace(NO_ANSWER, staleness=1, clock=6), [torch.zeros(2)]))
    assert isinstance(third, ServerRequest)
    assert isinstance(third.need, Exchange)
    assert third.need.read_at == 5


@torch.no_grad()
def test_what_is_under_way_is_said_again_as_it_was_though_its_tensors_have_moved() -> None:
    core, replica, layout, memory = overlapping()
    gradient = gradient_of(replica, 1.0)
    ask = core.gradient(0, gradient)
    assert isinstance(ask, ServerRequest)
    payload = sent(core, ask, layout, memory).payload
    core.answer(0, None)
    assert gradient.tensors[0] is not None
    gradient.tensors[0].fill_(9.0)
    again = sent(core, ask, layout, memory)
    assert payload is again.payload
    assert payload is not None
    assert layout.views(payload)[0].tolist() == [1.0, 1.0]


@torch.no_grad()
def test_what_is_under_way_is_applied_before_a_group_waits_for_others() -> None:
    core, replica, layout, memory = overlapping()
    sent(core, core.gradient(0, gradient_of(replica, 1.0)), layout, memory)  # type: ignore[arg-type]
    core.answer(0, None)
    core.apply_answer(0, core.receive(replace(NO_ANSWER, staleness=0, clock=3), [torch.full((2,), 4.0)]))
    assert (replica.weights()[0].tolist(), replica.clock) == ([4.0, 4.0], 3)
    assert core.sequence(0) == 1
    with pytest.raises(ProtocolError, match="nothing is under way"):
        core.apply_answer(0, Pulled([torch.zeros(2)], 4))
    following = core.gradient(0, gradient_of(replica, 1.0))
    assert isinstance(following, ServerRequest), "there is nothing to receive"
    assert isinstance(following.need, Exchange)
    assert following.need.read_at == 3


def test_a_method_that_does_not_receive_what_it_has_sent_is_told_so() -> None:
    class Forgetful(AsyncSGD, frozen=True, kw_only=True, tag="test_forgetful"):
        def group_side(self, replica: Replica) -> GroupSide:
            gradient = yield NextGradient()
            yield Send(Exchange(gradient.tensors, 0, gradient.hyperparameters))
            yield Exchange(gradient.tensors, 0, gradient.hyperparameters)

    own = [Parameter(torch.ones(2))]
    core = GroupCore(Forgetful())
    core.attach(replica := Replica(own, sgd(0.5)(own)))
    core.gradient(0, gradient_of(replica, 1.0))
    with pytest.raises(
        ProtocolError, match="Forgetful needs Exchange while an exchange is under way; let it need Receive"
    ):
        core.answer(0, None)


# --- In virtual time -------------------------------------------------------------------------------------------------


def run(method: str, groups: int = 4, seconds: float = 0.004, **options: Any) -> Trace:
    """An exchange takes ``seconds``; a step 4 ms."""
    nbytes = Layout.of(dict(new_model().named_parameters())).nbytes
    link = Link(bandwidth=2 * nbytes / seconds)
    cluster = Cluster.even(groups, seconds_per_sample=1e-3, link=link)
    evaluate, optimizer = options.pop("evaluate", None), options.pop("optimizer", sgd(0.05, momentum=0.9, fused=True))
    workload = Workload(new_model(), options.pop("data", DATA), loss, evaluate, optimizer)
    return simulate(method, groups, cluster, workload, **{"batch_size": 4, **options})


PLAIN = ("async_sgd", "async_sgd:bound=1", "async_sgd:staleness_aware=true")


def test_an_exchange_that_takes_no_longer_than_a_step_takes_no_time() -> None:
    computing, waiting, hidden = (
        run(
            "async_sgd", data=ConcatDataset([DATA] * 8), limits=Limits(updates=60), seconds=seconds, overlap=overlap
        ).seconds_per_update
        for seconds, overlap in ((1e-9, False), (0.004, False), (0.004, True))
    )
    assert waiting == pytest.approx(2 * computing, rel=0.05)
    assert (waiting - hidden) / (waiting - computing) > 0.95, "all but the first"


def test_gradients_are_one_step_of_their_group_older() -> None:
    """Mean staleness is g - 1 without, exactly; with overlap a group reads g updates earlier: 2g - 1."""
    groups = 4
    data: ConcatDataset[Any] = ConcatDataset([DATA] * 2)
    for overlap, expected in ((False, groups - 1), (True, 2 * groups - 1)):
        trace = run("async_sgd", groups, data=data, limits=Limits(epochs=1), overlap=overlap)
        staleness = trace.columns()["staleness"][4 * groups : -4 * groups]
        assert staleness.mean() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("method", "wire"), covering(product(PLAIN, ("fp32", "int8"))))
def test_a_run_with_exchanges_under_way_is_replayed_bitwise(method: str, wire: str) -> None:
    events: list[Event] = []
    options: dict[str, Any] = {
        "compression": wire,
        "overlap": True,
        "computation": Computation(batched=False),
        "record": events.append,
    }
    trace = run(method, limits=Limits(epochs=1), seconds=0.006, **options)
    assert events[0].overlap
    samples = Samples(DATA, 0)
    again = replay(
        events, new_model(), loss, lambda *at: samples.batch(samples.at(*at)), sgd(0.05, momentum=0.9, fused=True)
    )
    for name, weight in trace.weights.items():
        assert torch.equal(again.weights[name], torch.from_numpy(weight))


@pytest.mark.parametrize(
    ("streaming", "wire"),
    covering(
        product(
            (
                "fragments=3",
                "fragments=2,delay=2",
                "fragments=2,delay=1,alpha=0.5",
                "fragments=2,delay=1,keep_steps=true",
            ),
            ("fp32", "int8", {"push": "topk:0.2", "pull": "bf16"}),
        )
    ),
    ids=str,
)
def test_a_streaming_run_is_replayed_bitwise(streaming: str, wire: Any) -> None:
    events: list[Event] = []
    compression = Compression(**wire) if isinstance(wire, dict) else wire
    options: dict[str, Any] = {"computation": Computation(batched=False), "record": events.append}
    options["compression"] = compression
    trace = run(f"diloco:period=6,{streaming}", limits=Limits(epochs=2), seconds=0.006, **options)
    samples = Samples(DATA, 0)
    optimizer = sgd(0.05, momentum=0.9, fused=True)
    again = replay(events, new_model(), loss, lambda *at: samples.batch(samples.at(*at)), optimizer)
    for name, weight in trace.weights.items():
        assert torch.equal(again.weights[name], torch.from_numpy(weight))


def test_streaming_takes_the_time_of_its_steps_where_a_fragment_travels_no_longer_than_its_delay() -> None:
    """Whole, an exchange takes 24 ms, as long as six steps; a quarter takes 6, and two steps 8."""
    options: dict[str, Any] = {"seconds": 0.024, "limits": Limits(epochs=1), "data": ConcatDataset([DATA] * 4)}
    plain, streamed = (run(f"diloco:period=12{more}", **options) for more in ("", ",fragments=4,delay=2"))
    computing = 0.004 * 240 * 4 / 16
    assert plain.seconds > 1.4 * computing
    assert streamed.seconds < 1.1 * computing, "but for the last one"


MATRIX = [
    (method, wire, overlap)
    for method, overlap in (
        ("async_sgd", True),
        ("local_sgd:period=4,fragments=2", False),
        ("diloco:period=4,fragments=4,outer_momentum=0.5", False),
        ("diloco:period=4,fragments=2,delay=1,alpha=0.25,outer_momentum=0.5", False),
        ("diloco:period=4,fragments=2,delay=1,keep_steps=true,outer_momentum=0.5", False),
    )
    for wire in (("fp32", "int8") if "local" in method else ("fp32", "int8", "topk:0.3"))
]


@pytest.mark.parametrize(("method", "wire", "overlap"), covering(MATRIX), ids=str)
def test_every_method_trains_in_every_format_with_exchanges_under_way(method: str, wire: str, overlap: bool) -> None:
    @torch.no_grad()
    def evaluate(model: Any) -> dict[str, float]:
        return {"loss": float(loss(model, (INPUTS, LABELS)))}

    trace = run(
        method,
        compression=wire,
        overlap=overlap,
        limits=Limits(epochs=2),
        optimizer=sgd(0.05, momentum=0.5),
        evaluate=evaluate,
    )
    assert trace.meta["refused"] == 0
    assert trace.evaluated["loss"][-1] < 0.8 * evaluate(new_model())["loss"]


def test_real_ranks_overlap_their_exchanges_and_their_record_replays_bitwise() -> None:
    points: list[tuple[dict[str, Any], int]] = [
        ({"name": "async_sgd"}, 4),
        ({"name": "async_sgd", "bound": 1}, 4),
        ({"name": "diloco", "period": 4, "fragments": 2, "delay": 1, "outer_momentum": 0.5}, 4),
        ({"name": "async_sgd", "bound": 1}, 4),
    ]
    common = {"optimizer": MOMENTUM, "trainer": {"max_epochs": 1}, "strategy": {"overlap": True, "compression": "int8"}}
    fits = [
        {**common, "method": method, "groups": groups, "record": f"{number}.jsonl"}
        for number, (method, groups) in enumerate(points)
    ]
    fits[1]["strategy"] = {"compression": {"push": "int8", "pull": "bf16"}, "overlap": True}
    fits[2]["strategy"] = {"compression": {"push": "int8", "pull": "bf16"}, "server": {"count": 3}}
    fits[3]["strategy"] = {"server": {"count": 3}, "overlap": True}
    alone = {**common, "method": {"name": "async_sgd"}, "groups": 1}
    finished = real_run("methods.py", {"fits": [*fits, alone]}, timeout=400)
    assert 'nothing is pushed, so compression="int8" and overlap=True have no effect' in finished.output
    for number, _ in enumerate(points):
        ranks = [finished.results[rank][number] for rank in range(4)]
        assert len({rank["end"] for rank in ranks}) == 1
        assert ranks[0]["metrics"]["val_loss"] < 0.98 * untrained(ranks[0])
        model = Net()
        model.load_state_dict({name: torch.tensor(value) for name, value in ranks[0]["initial"].items()})
        events = list(read_record(ranks[0]["record"]))
        assert events[0].servers == (3 if number >= 2 else 1)
        if number == 2:  # each of three servers has rounded its own part
            continue
        again = replay(events, model, loss_of, batch_of, sgd(0.05, **MOMENTUM))
        assert again.clock == ranks[0]["report"]["updates"] > 0
        for name, value in again.weights.items():
            assert torch.equal(value, torch.tensor(ranks[0]["weights"][name]))
