"""Lossy wire formats: bytes, error feedback, what is not finite, every method, real ranks and their replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product, zip_longest
from typing import Any

import msgspec
import pytest
import rounds
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from runs import run
from test_cluster_methods import MOMENTUM, Net, batch_of, loss_of, untrained
from test_server_core import as_bytes, gradient, push_of, trained_link, varied
from test_wire_format import problem, simulated, squares
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from lightning_omni import Compression, OmniStrategy
from lightning_omni.errors import ConfigurationError, MalformedMessage, Refused
from lightning_omni.group.core import GroupCore, ServerRequest
from lightning_omni.methods import METHODS, Gradient, Inbox, NextGradient, Pulled, Replica, method_named
from lightning_omni.methods.contract import Publish, ReadInbox, ReadPeer, SendPeer
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.server.event_log import Event, read_record
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.simulator import Computation, Limits, replay
from lightning_omni.simulator.workbench import Samples
from lightning_omni.trace import Trace
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats import BF16, FP16, Int8, PerDirection, TopK, error_feedback, wire_named
from lightning_omni.wire.formats.base import RAW, Memory, WireFormat, check_size, decode, from_wire, to_wire
from lightning_omni.wire.layout import Layout

NAMES = ("bf16", "fp16", "int8", "topk:0.1")
every_format = pytest.mark.parametrize("name", NAMES)
SHAPES = ((7, 5), (), (0,), (130,))
PARTS_OF_FP32 = {"bf16": 0.51, "fp16": 0.51, "int8": 0.27, "topk:0.1": 0.21}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sent(wire: WireFormat, tensors: Sequence[Tensor | None], state: Any) -> tuple[list[Tensor | None], Any]:
    """What the server makes of a push, and what the sender remembers."""
    whole = [torch.zeros(shape) if each is None else each for shape, each in zip_longest(SHAPES, tensors)]
    layout = Layout.of({str(place): each for place, each in enumerate(whole[: len(tensors)])})
    encoded = wire.encode(tensors, layout, state, Memory())
    there = layout.subset(encoded.present)
    check_size(wire, encoded.payload.numel(), there)
    arrived = iter(there.views(decode(wire, encoded.payload, there, Memory())))
    return [next(arrived) if flag else None for flag in encoded.present], encoded.state


# --- What is sent and what is owed -----------------------------------------------------------------------------------


@varied
@given(
    st.sampled_from(NAMES),
    st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=8),
    st.floats(-20, 20),
)
def test_what_arrives_and_what_is_owed_add_up_to_what_was_given(
    name: str, pushes: list[tuple[bool, ...]], exponent: float
) -> None:
    wire = wire_named(name)
    state: dict[str, Any] = {}
    given_, arrived_ = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for number, flags in enumerate(pushes):
        tensors = [
            drawn(shape, 10 * number + place) * 2**exponent if there else None
            for place, (shape, there) in enumerate(zip(SHAPES, (True, *flags), strict=True))
        ]
        arrived, state = sent(wire, tensors, state)
        for total, each in (*zip(given_, tensors, strict=True), *zip(arrived_, arrived, strict=True)):
            total += 0 if each is None else each
    for total, came, owed in zip(given_, arrived_, state["residual"], strict=True):
        torch.testing.assert_close(came + (0 if owed is None else owed), total, rtol=1e-5, atol=1e-5 * 2**exponent)


@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_tensors_of_every_kind_keep_their_kind(name: str, dtype: torch.dtype) -> None:
    wire = wire_named(name)
    tensors = [drawn((7,), 3, torch.promote_types(dtype, torch.float32).to_real()), drawn((40,), 1, dtype)]
    tensors.append(drawn((3, 2), 2, dtype))
    arrived, state = sent(wire, tensors, {})
    for tensor, came, owed in zip(tensors, arrived, state["residual"], strict=True):
        assert came is not None
        assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
        wide = torch.promote_types(tensor.dtype, torch.float32)
        assert owed.dtype == wide
        torch.testing.assert_close(came.to(wide) + owed, tensor.to(wide), rtol=1e-2, atol=1e-2)


@every_format
def test_bytes_counted_whole_are_a_part_of_what_fp32_takes(name: str) -> None:
    tensors = [drawn((50, 300), 1), drawn((50,), 2)]
    layout = Layout.of({"w": tensors[0], "b": tensors[1]})
    need = {"optimizer": 0, "read_at": 9, "present": (True, True), "hyperparameters": ({"lr": 0.1},)}

    def whole(wire: WireFormat) -> int:
        payload = wire.encode(tensors, layout, {}, Memory()).payload
        push = m.PushMessage(**need, epoch=1, trained=1, nbytes=payload.numel())  # type: ignore[arg-type]
        return len(m.encode(push)) + payload.numel()

    assert whole(wire_named(name)) <= PARTS_OF_FP32[name] * whole(RAW)


def accumulated_errors(wire: WireFormat, with_feedback: bool) -> tuple[float, float]:
    """By how much the sum of what arrived is off, after 100 pushes and after 1,000 of about the same numbers."""
    offset = torch.linspace(0.5, 100.0, 256)  # large, and common to all pushes
    state: dict[str, Any] = {}
    total, errors = torch.zeros(256, dtype=torch.float64), []
    layout, memory = Layout.of({"w": offset}), Memory()
    for number in range(1000):
        gradient = offset + 0.01 * drawn((256,), number)
        encoded = wire.encode([gradient], layout, state, memory)
        state = dict(encoded.state) if with_feedback else {}
        total += gradient.double() - wire.decode(encoded.payload, layout, memory).view(torch.float32)[:256].double()
        if number + 1 in (100, 1000):
            errors.append(float(total.abs().max()))
    return errors[0], errors[1]


@pytest.mark.parametrize("name", ["int8", "topk:0.1", "bf16"])
def test_the_error_of_a_thousand_pushes_is_bounded_with_feedback_and_grows_without(name: str) -> None:
    wire = wire_named(name)
    early, late = accumulated_errors(wire, with_feedback=True)
    assert late < 1.5 * early
    early_without, late_without = accumulated_errors(wire, with_feedback=False)
    assert late_without > 8 * early_without
    assert late_without > 20 * late


@every_format
@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16", "float64", "complex64")], ids="-".join)
def test_encoding_a_part_at_a_time_changes_no_bit(
    name: str, dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    pushes = [[drawn((*shape, 3), seed, kind) for kind in kinds for shape in SHAPES] for seed in (1, 2)]
    layout = Layout.of({str(place): each for place, each in enumerate(pushes[0])})

    def encoded() -> list[Tensor]:
        state: Any = {}
        found: list[Tensor] = []
        for tensors in pushes:
            payload, _, state = wire_named(name).encode(tensors, layout, state, Memory())
            found += [payload, *state["residual"]]
        return found

    whole = encoded()
    monkeypatch.setattr(error_feedback, "AT_ONCE", 100)
    assert all(map(torch.equal, encoded(), whole))


@every_format
def test_the_same_push_is_the_same_bytes(name: str) -> None:
    wire, tensor = wire_named(name), torch.ones(300)  # all alike, so that any of them could be the largest
    layout = Layout.of({"w": tensor})
    one, other = (wire.encode([tensor], layout, {}, Memory()).payload for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "int8:block=8"])
def test_what_was_decoded_is_encoded_as_the_same_bytes_again(name: str) -> None:
    """So that both sides of an elastic spring move by the very same numbers."""
    wire, memory = wire_named(name), Memory()
    tensors = [drawn((1000,), 1) * torch.logspace(-30, 30, 1000), torch.zeros(40)]
    layout = Layout.of({"w": tensors[0], "b": tensors[1]})
    first = wire.encode(tensors, layout, {}, memory).payload
    again = wire.encode(layout.views(wire.decode(first, layout, memory)), layout, {}, Memory()).payload
    assert torch.equal(first, again)


# --- What is not finite, and what is malformed -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_spoils_no_other_in_int8(value: float) -> None:
    numbers = drawn((300,), 0)
    numbers[5] = numbers[200] = value
    (arrived,), _ = sent(wire_named("int8"), [numbers], {})
    assert arrived is not None
    assert arrived.isfinite().logical_not().nonzero().flatten().tolist() == [5, 200]
    assert float((arrived - numbers)[numbers.isfinite()].abs().max()) < 0.05


def test_numbers_whose_scale_is_subnormal_stay_finite_in_int8() -> None:
    (arrived,), _ = sent(wire_named("int8"), [torch.full((300,), 5.87e-39)], {})
    assert arrived is not None
    assert arrived.isfinite().all()


@every_format
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_comes_out_as_such(name: str, value: float) -> None:
    tensor = drawn((400,), 0)
    tensor[123] = value
    (arrived,), _ = sent(wire_named(name), [tensor], {})
    assert arrived is not None
    assert not bool(arrived.isfinite().all())


@every_format
def test_a_number_beyond_the_range_of_a_format_is_sent_in_parts(name: str) -> None:
    state: dict[str, Any] = {}
    wire, total = wire_named(name), torch.zeros(4)
    for push in range(8):
        (arrived,), state = sent(wire, [torch.full((4,), 3e5 * (push == 0))], state)
        assert arrived is not None
        assert bool(arrived.isfinite().all())
        total += arrived
    torch.testing.assert_close(total, torch.full((4,), 3e5), rtol=1e-2, atol=0.0)


@varied
@given(st.sampled_from(NAMES), st.binary(min_size=0, max_size=600))
def test_whatever_comes_as_a_payload_is_decoded_or_refused(name: str, data: bytes) -> None:
    wire = wire_named(name)
    layout = Layout.of({"w": torch.zeros(30), "b": torch.zeros(())})
    payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    try:
        check_size(wire, payload.numel(), layout)
        flat = decode(wire, payload, layout, Memory())
    except (MalformedMessage, Refused):
        return
    assert flat.numel() == layout.nbytes


def test_places_that_are_none_are_refused() -> None:
    wire, layout = TopK(fraction=0.1), Layout.of({"w": torch.zeros(30)})
    for place in (-1, 30, 1 << 30):
        payload = torch.cat([torch.tensor([0, 1, place], dtype=torch.int32), torch.ones(3).view(torch.int32)])
        with pytest.raises(Refused, match="are no push in the wire format topk: a place is not among 30 numbers"):
            decode(wire, payload.view(torch.uint8), layout, Memory())


def test_a_payload_that_begins_at_an_odd_byte_is_decoded() -> None:
    tensor = drawn((10,), 0)
    layout = Layout.of({"w": tensor})
    for name in NAMES:
        wire = wire_named(name)
        payload = wire.encode([tensor], layout, {}, Memory()).payload
        moved = torch.cat([torch.zeros(3, dtype=torch.uint8), payload])[3:]
        decoded = [wire.decode(each, layout, Memory()).clone() for each in (payload, moved)]
        assert torch.equal(*decoded)


@every_format
def test_a_server_steps_with_what_it_decodes(name: str) -> None:
    wire, link = wire_named(name), trained_link((0,), (1,))
    link.form((0,), (1,), generation=2, wire_format=to_wire(wire))
    link.inbox.clear()
    tensors = gradient(0)
    layout = Layout.of({str(place): tensor for place, tensor in enumerate(tensors)})
    payload = wire.encode(tensors, layout, {}, Memory()).payload
    rounded = [each.clone() for each in layout.views(wire.decode(payload, layout, Memory()))]
    message, _ = push_of(tensors)
    answer, _ = link.data(0, msgspec.structs.replace(message, nbytes=payload.numel()), payload.numpy().tobytes())
    assert answer.applied
    other = trained_link((0,), (1,))
    assert other.data(0, msgspec.structs.replace(message), as_bytes(rounded))[0].applied
    assert all(map(torch.equal, link.weights(), other.weights()))


# --- Names -----------------------------------------------------------------------------------------------------------


def test_formats_have_names_and_settings() -> None:
    assert [wire_named(name) for name in NAMES] == [BF16(), FP16(), Int8(), TopK(fraction=0.1)]
    assert wire_named("topk:fraction=0.5") == TopK(fraction=0.5)
    assert wire_named("fp32") == RAW
    for name in NAMES:
        wire = wire_named(name)
        assert from_wire(to_wire(wire)) == wire


class Fixed(WireFormat, frozen=True, kw_only=True, tag="fixed"):
    """A format of a user's own, which does not look at its setting itself."""

    digits: int = 2


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        ("int4", "compression='int4' is not known; pass one of 'int8', 'bf16', 'fp16', 'topk'"),
        ("raw", "compression='raw' is not known"),
        ("topk:2", "compression='topk:2': topk: fraction=2.0: pass a part of the numbers, above 0 to 1"),
        ("topk:much", "compression='topk:much': topk: Expected `float`"),
        ("int8:block=2", "compression='int8:block=2': int8: block=2: pass 8 or more numbers to a scale"),
        ("both_ways", "compression='both_ways' is not known"),
        (
            lambda: Compression(push=PerDirection(push={"name": "int8"}, pull={"name": "bf16"}), pull="bf16"),
            "pass a format of one direction for each",
        ),
        ({"push": "int8"}, "compression={'push': 'int8'}: pass a name such as"),
        (lambda: Compression(pull=8), "Compression(pull=8): pass a name such as"),  # type: ignore[arg-type]
        ("bf16:3", "compression='bf16:3': bf16 has no setting 3; it has none"),
        (8, "compression=8"),
        ("topk:0.01,0.1", "topk: fraction is given twice, as 0.01 and as 0.1"),
        (lambda: Int8(block="64"), "block='64': pass 8 or more numbers"),  # type: ignore[arg-type]
        (lambda: TopK(fraction="0.1"), "fraction='0.1': pass a part"),  # type: ignore[arg-type]
        (lambda: Compression(push=Int8(block=64.5)), "block=64.5"),  # type: ignore[arg-type]
        (lambda: Fixed(digits=1.5), "Fixed(digits=1.5): Expected `int`, got `float`"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_format_is_refused_where_it_is_named(wire: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OmniStrategy(groups=2, compression=wire() if callable(wire) else wire)
    assert says in str(caught.value)


@pytest.mark.parametrize("method", ["elastic_averaging", "local_sgd", "gossip"])
def test_part_of_the_weights_is_not_sent_in_place_of_them(method: str) -> None:
    with pytest.raises(ConfigurationError, match=r'compression="topk" and .*: a part of the weights is no weights'):
        WorldOptions(method=method, compression="topk")
    with pytest.raises(ConfigurationError, match="a part of the weights"):
        simulated("topk", method, limits=Limits(updates=1))


@pytest.mark.parametrize(
    ("wire", "method", "says"),
    [
        (lambda: Compression(pull="topk:0.5"), "async_sgd", "answers are not added up"),
        (lambda: Compression(pull="bf16"), "local_sgd", "rounding would swallow these"),
        (lambda: Compression(push="topk:0.5", pull="bf16"), "elastic_averaging", "a part of the weights"),
    ],
)
def test_formats_that_cannot_answer_are_refused(wire: Any, method: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        OmniStrategy(groups=2, method=method, compression=wire())


# --- Training --------------------------------------------------------------------------------------------------------


def short(method: str) -> str:
    """Settings for exchanges every other step or oftener."""
    fields = METHODS[method].__struct_fields__
    return ":period=2" * ("period" in fields) + ",fragments=2" * ("fragments" in fields)


@cache
def trained(method: str, push: str = "fp32", pull: str = "fp32") -> Trace:
    """A run in which losses fall a hundred times, if all is well."""
    return simulated(Compression(push=push, pull=pull), method + short(method), lr=0.06, limits=Limits(epochs=3))


def can_send(method: str, name: str) -> bool:
    """What cannot is refused: see above."""
    return not (method_named(method).pushes_weights and name.startswith("topk"))


@pytest.mark.parametrize(("method", "name"), covering(each for each in product(METHODS, NAMES) if can_send(*each)))
def test_every_method_trains_in_every_format_when_simulated(method: str, name: str) -> None:
    trace = trained(method, push=name.replace("0.1", "0.4"))  # of nine numbers
    losses = trace.columns()["loss"]
    assert losses[-6:].mean() < losses[:6].mean() / 3
    assert trace.meta["refused"] == 0


@pytest.mark.parametrize(
    ("method", "name"),
    covering((method, name) for method in METHODS if method != "local_sgd" for name in ("bf16", "fp16", "int8")),
)
def test_every_method_trains_with_answers_in_every_format_when_simulated(method: str, name: str) -> None:
    trace = trained(method, pull=name)
    losses = trace.columns()["loss"]
    assert losses[-6:].mean() < losses[:6].mean() / 3
    if method != "gossip":  # which gets nothing from the server
        plain = trained(method)
        assert trace.seconds < plain.seconds
        assert any((trace.weights[key] != weight).any() for key, weight in plain.weights.items())


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_gossip_takes_less_time_in_fewer_bytes_and_does_not_part_groups_that_agree(kind: str) -> None:
    plain, rounded = (
        simulated(wire, f"gossip:kind={kind}", lr=0.06, limits=Limits(epochs=5)) for wire in ("fp32", "int8")
    )
    assert rounded.seconds < plain.seconds or (kind == "push" and rounded.seconds == plain.seconds)  # no group waits
    assert any((rounded.weights[key] != weight).any() for key, weight in plain.weights.items())
    method, own = method_named(f"gossip:kind={kind}"), Parameter(drawn((300,), 0))
    core, before = GroupCore(method, Int8()), own.detach().clone()
    replica = Replica([own], SGD([own], lr=0.0))
    replica.peers = (0, 1, 2)
    core.attach(replica)
    sent: list[Tensor] = []
    for _ in range(9):
        action = core.gradient(0, Gradient([torch.zeros(300)], [{"lr": 0.0}]))
        while not isinstance(action, NextGradient):
            answer: Any = None
            if isinstance(action, Publish | SendPeer):
                sent = [tensor.clone() for tensor in action.tensors]
            elif isinstance(action, ReadPeer):
                answer = sent  # of a group with the same weights
            elif isinstance(action, ReadInbox):
                answer = Inbox([2 * tensor for tensor in sent], 2) if sent else Inbox(None, 0)
            action = core.answer(0, answer)
    assert not torch.equal(sent[0], before)  # it was rounded
    torch.testing.assert_close(own.detach(), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("wire", [Compression(push="int8", pull="int8"), Compression(pull="bf16")], ids=str)
def test_what_a_group_loses_to_the_centre_the_centre_gains(wire: Compression) -> None:
    """With a learning rate of 0 nothing but the spring moves anything: the sum of all weights stays."""
    chosen, method = wire.wire_format, method_named("elastic_averaging:period=1,moving_rate=0.3")
    served = ServedParameters(None, {"w": drawn((300,), 0)}, 0, method, (0, 1), lambda path: SGD)
    served.answer_in(chosen.answers)
    cores = []
    for group in (0, 1):
        own = [Parameter(drawn((300,), 1 + group))]
        core = GroupCore(method, chosen)
        core.attach(Replica(own, SGD(own, lr=0.0), group))
        cores.append((core, own[0]))
    total = served.master.weights()[0].double() + sum(weight.detach().double() for _, weight in cores)
    layout, memory, back = served.layout, Memory(), Memory()
    for step in range(40):
        core, _ = cores[step % 2]
        ask = core.gradient(0, Gradient([torch.zeros(300)], [{"lr": 0.0}]))
        assert isinstance(ask, ServerRequest)
        said = rounds.sent(core, ask, layout, memory)
        assert isinstance(said.message, m.PushMessage)
        assert said.payload is not None
        message = msgspec.structs.replace(said.message, hyperparameters=())
        replies = served.push(step % 2, message, decode(chosen.pushes, said.payload, layout, back))
        assert replies is not None
        payload = served.as_bytes(served.payload_of(replies[0]), layout)
        arrived = layout.views(decode(chosen.answers, payload, layout, Memory()))
        assert core.answer(0, Pulled(arrived, served.master.clock)) == NextGradient()
    moved = served.master.weights()[0].double() + sum(weight.detach().double() for _, weight in cores)
    torch.testing.assert_close(moved, total, rtol=0, atol=1e-5)  # of float32's own rounding


def test_fewer_bytes_take_less_time_on_a_slow_link() -> None:
    seconds = [simulated(name, limits=Limits(updates=24)).seconds for name in ("fp32", "bf16", "topk:0.1")]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3


@pytest.mark.parametrize(
    ("method", "wire"),
    covering(
        each
        for each in product(
            ("async_sgd", "elastic_averaging:period=2"),
            ("bf16", "fp16", "int8", "topk:0.1", Compression(push="int8", pull="bf16")),
        )
        if each[1] != "topk:0.1" or each[0] == "async_sgd"  # a method that pushes weights refuses topk
    ),
    ids=str,
)
def test_a_simulated_run_is_replayed_bitwise(method: str, wire: Any) -> None:
    events: list[Event] = []
    trace = simulated(
        wire, method, limits=Limits(updates=30), computation=Computation(batched=False), record=events.append
    )
    model, data, make = problem()
    samples = Samples(data, seed=0)
    again = replay(events, model, squares, lambda *where: samples.batch(samples.at(*where)), make)
    assert all((again.weights[key].numpy() == weight).all() for key, weight in trace.weights.items())


# --- For real --------------------------------------------------------------------------------------------------------

REAL: tuple[tuple[dict[str, Any], Any, int], ...] = (
    ({"name": "async_sgd"}, "int8", 4),
    ({"name": "hardsync"}, "bf16", 2),
    ({"name": "diloco", "period": 3}, "topk:0.2", 4),
    ({"name": "local_sgd", "period": 3}, "fp16", 2),
    ({"name": "softsync", "n": 2}, {"push": "topk:0.3", "pull": "fp16"}, 2),
    ({"name": "elastic_averaging", "period": 3}, {"push": "bf16", "pull": "int8"}, 4),
)


@cache
def for_real() -> dict[int, list[Any]]:
    """Each of them, and then one group with and without a format."""
    common = {"optimizer": MOMENTUM, "trainer": {"max_epochs": 1}}
    fits = [
        {**common, "method": method, "groups": groups, "strategy": {"compression": name}, "record": f"{number}.jsonl"}
        for number, (method, name, groups) in enumerate(REAL)
    ]
    alone = {**common, "method": {"name": "async_sgd"}, "groups": 1}
    finished = run("methods.py", {"fits": [*fits, {**alone, "strategy": {"compression": "int8"}}, alone]}, timeout=400)
    assert 'nothing is pushed, so compression="int8" has no effect' in finished.output
    return finished.results


@pytest.mark.parametrize("number", range(len(REAL)), ids=[f"{method['name']} {name}" for method, name, _ in REAL])
def test_real_ranks_train_alike_and_their_record_replays_bitwise(number: int) -> None:
    ranks = [for_real()[rank][number] for rank in range(4)]
    assert len({rank["end"] for rank in ranks}) == 1
    assert ranks[0]["metrics"]["val_loss"] < 0.98 * untrained(ranks[0])
    model = Net()
    model.load_state_dict({name: torch.tensor(value) for name, value in ranks[0]["initial"].items()})
    again = replay(
        read_record(ranks[0]["record"]), model, loss_of, batch_of, lambda own: torch.optim.SGD(own, lr=0.05, **MOMENTUM)
    )
    assert again.clock == ranks[0]["report"]["updates"] > 0
    weights, tolerance = again.weights, 0.0
    if REAL[number][0]["name"] == "local_sgd":  # the order in which groups were averaged at the end is not on record
        means = zip(again.weights, *again.groups.values(), strict=True)
        weights, tolerance = {name: torch.stack(values).mean(0) for name, *values in means}, 1e-6
    for name, value in weights.items():
        torch.testing.assert_close(value, torch.tensor(ranks[0]["weights"][name]), rtol=tolerance, atol=tolerance)


def test_with_one_group_a_format_is_without_effect() -> None:
    for results in for_real().values():
        assert results[-1]["end"] == results[-2]["end"]
