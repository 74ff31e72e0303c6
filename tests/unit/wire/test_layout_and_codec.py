"""Tensors in flat buffers, trees as bytes: round trips are exact, and malformed bytes are refused as such."""

from __future__ import annotations

from datetime import datetime
from io import BytesIO
from itertools import pairwise
from math import prod
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_omni.errors import MalformedMessage
from lightning_omni.methods.model.fragments import read
from lightning_omni.wire.codec import Packed, check_specs, pack, unpack
from lightning_omni.wire.layout import ALIGNMENT, DTYPES, Layout, TensorSpec, spec_of

varied = settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
whole_specs = st.builds(TensorSpec, st.text(max_size=8), shapes, st.sampled_from(sorted(DTYPES)))


@st.composite
def parts(draw: st.DrawFn) -> TensorSpec:
    """A range of a tensor."""
    spec = draw(whole_specs)
    start = draw(st.integers(0, prod(spec.shape)))
    return msgspec.structs.replace(spec, range=(start, draw(st.integers(start, prod(spec.shape)))))


specs = whole_specs | parts()


def filled(spec: TensorSpec, seed: int = 0) -> Tensor:
    """A tensor of the given kind, of integers that every dtype but bool holds exactly; or its range."""
    values = torch.randint(0, 100, spec.local_shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DTYPES[spec.dtype])


tensors = st.builds(filled, specs, st.integers(0, 1000))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers(-5, 5) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


# --- Layout ----------------------------------------------------------------------------------------------------------


@varied
@given(st.lists(specs, max_size=6))
def test_tensors_are_aligned_and_do_not_overlap(of: list[TensorSpec]) -> None:
    layout = Layout(tuple(of))
    end = 0
    for spec, start in zip(layout.specs, layout.offsets, strict=True):
        assert start % ALIGNMENT == 0
        assert start >= end
        end = start + spec.nbytes
    assert layout.nbytes == end
    assert layout.numel == sum(filled(spec).numel() for spec in of)


@varied
@given(st.lists(specs, max_size=6))
def test_views_share_the_memory_of_the_buffer(of: list[TensorSpec]) -> None:
    layout = Layout(tuple(of))
    buffer = layout.empty()
    for index, view in enumerate(layout.views(buffer)):
        view.copy_(filled(layout.specs[index], seed=index))
    for index, view in enumerate(layout.views(buffer.clone())):
        assert_same(view, filled(layout.specs[index], seed=index))
    if layout.nbytes:
        assert all(v.untyped_storage().data_ptr() == buffer.data_ptr() for v in layout.views(buffer) if v.numel())


@varied
@given(st.lists(st.tuples(specs, st.booleans()), max_size=6))
def test_a_subset_is_the_layout_of_the_tensors_that_are_there(of: list[tuple[TensorSpec, bool]]) -> None:
    whole = Layout(tuple(spec for spec, _ in of))
    assert whole.subset([there for _, there in of]) == Layout(tuple(spec for spec, there in of if there))


@varied
@given(whole_specs, st.lists(st.integers(0, 64), max_size=4))
def test_the_ranges_of_a_tensor_hold_its_numbers_once_in_their_order(spec: TensorSpec, cuts: list[int]) -> None:
    numel = prod(spec.shape)
    edges = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    pieces = [msgspec.structs.replace(spec, range=edge) for edge in pairwise(edges)]
    assert all(piece.is_sane for piece in pieces)
    assert sum(piece.nbytes for piece in pieces) == spec.nbytes
    layout, whole = Layout(tuple(pieces)), filled(spec)
    for view, piece, (start, stop) in zip(layout.views(layout.empty()), pieces, pairwise(edges), strict=True):
        view.copy_(whole.reshape(-1)[start:stop])
        assert piece.shape == spec.shape  # who gathers them knows the whole
        assert_same(view, whole.reshape(-1)[start:stop])


@varied
@given(st.lists(specs, max_size=6), st.integers(1, 8))
def test_chunks_hold_the_bytes_of_the_whole_buffer_in_their_order(of: list[TensorSpec], units: int) -> None:
    layout = Layout(tuple(of))
    whole = torch.randint(256, (layout.nbytes,), dtype=torch.uint8)
    chunks = layout.chunks(units * ALIGNMENT)
    assert len(chunks) == -(-layout.nbytes // (units * ALIGNMENT))
    for there, (pieces, part) in zip(whole.split(units * ALIGNMENT), chunks, strict=False):
        for own, piece in zip(part.views(there), read(layout.views(whole), pieces), strict=True):
            assert own.data_ptr() == piece.data_ptr()
            assert (own.numel(), own.dtype) == (piece.numel(), piece.dtype)
        assert part.nbytes <= there.numel()
    assert sum(part.numel for _, part in chunks) == layout.numel


@varied
@given(st.lists(specs, max_size=4), st.lists(specs, max_size=4))
def test_a_layout_grows_at_its_end_and_counts_it(before: list[TensorSpec], more: list[TensorSpec]) -> None:
    old = Layout(tuple(before))
    new = old.grown(more)
    assert new.version == old.version + 1
    assert new.offsets[: len(before)] == old.offsets
    assert [*new.specs] == [*before, *more]
    assert new.subset([True, *[False] * (len(new.specs) - 1)]).version == new.version or not new.specs


def test_layouts_of_other_ranges_have_other_fingerprints() -> None:
    ranges = (None, (0, 6), (0, 3), (3, 6))
    layouts = [Layout((TensorSpec("w", (2, 3), "float32", range=each),)) for each in ranges]
    assert len({layout.fingerprint for layout in layouts}) == len(ranges)


def test_no_memory_of_others_travels_in_the_gaps() -> None:
    layout = Layout.of({"a": torch.ones(1), "b": torch.ones(1)})
    junk = [torch.full((layout.nbytes,), 255, dtype=torch.uint8) for _ in range(50)]
    del junk
    buffers = [layout.empty() for _ in range(50)]
    assert not torch.stack(buffers).any()


def test_a_subset_needs_a_flag_for_each_tensor() -> None:
    with pytest.raises(ValueError, match="zip"):
        Layout.of({"w": torch.ones(2)}).subset([True, False])


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.ones(2, 3), "b": torch.ones(3)},
        {"w": torch.ones(3, 2), "b": torch.ones(3)},
        {"w": torch.ones(6), "b": torch.ones(3)},
        {"w": torch.ones(2, 3, dtype=torch.float64), "b": torch.ones(3)},
        {"b": torch.ones(3), "w": torch.ones(2, 3)},
        {"w": torch.ones(2, 3)},
    ],
    ids=["name", "shape", "flat shape", "dtype", "order", "one less"],
)
def test_the_fingerprint_tells_models_apart(other: dict[str, Tensor]) -> None:
    mine = Layout.of({"w": torch.ones(2, 3), "b": torch.ones(3)})
    assert mine.fingerprint == Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(3)}).fingerprint
    assert mine.fingerprint != Layout.of(other).fingerprint


def test_a_dtype_that_cannot_travel_is_refused_by_name() -> None:
    with pytest.raises(MalformedMessage, match=r"'w' has dtype torch\.float8_e5m2"):
        spec_of("w", torch.zeros(2).to(torch.float8_e5m2))


# --- Trees ---------------------------------------------------------------------------------------------------------


@varied
@given(trees)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    packed, buffer = pack(tree)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=Packed)
    assert arrived == packed
    assert_same(unpack(arrived, buffer.clone()), tree)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3)])
def test_every_dtype_and_shape_travels(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = filled(TensorSpec("", shape, dtype), seed=1)
    packed, buffer = pack([tensor, tensor])
    assert_same(unpack(packed, buffer), [tensor, tensor])


def test_tensors_are_copied_bit_by_bit() -> None:
    tensor = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    packed, buffer = pack({"strided": torch.stack([tensor, tensor]).T, "leaf": torch.nn.Parameter(tensor)})
    tree = unpack(packed, buffer)
    assert torch.equal(tree["leaf"].view(torch.int32), tensor.view(torch.int32))
    assert torch.equal(tree["strided"][:, 1].contiguous().view(torch.int32), tensor.view(torch.int32))
    assert not tree["leaf"].requires_grad


def test_copies_of_several_dtypes_can_be_saved_beside_each_other() -> None:
    tree = {"best": torch.tensor(0.5), "step": torch.tensor(36), "half": torch.ones(3, dtype=torch.bfloat16)}
    copies, views = (unpack(*pack(tree), copy=copy) for copy in (True, False))
    torch.save(copies, BytesIO())
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save(views, BytesIO())


def test_many_tuples_are_not_deep_nesting() -> None:
    tree = {"spans": tuple((index, index + 1) for index in range(40_000))}
    assert_same(unpack(*pack(tree)), tree)


@pytest.mark.parametrize(
    "tree",
    [{1, 2}, object(), {"x": lambda: None}, [2**64], ["\ud800"], {(1, 2): 3}, torch.ones, 1j],
    ids=["set", "object", "function", "huge", "surrogate", "tuple key", "builtin", "complex"],
)
def test_what_is_no_plain_data_is_refused(tree: Any) -> None:
    with pytest.raises(MalformedMessage, match="cannot be sent"):
        pack(tree)


# --- Malformed -----------------------------------------------------------------------------------------------------


@varied
@given(st.binary(max_size=64), st.lists(specs, max_size=2))
def test_random_bytes_are_a_tree_or_malformed(tree: bytes, of: list[TensorSpec]) -> None:
    layout = Layout(tuple(of))
    try:
        plain = unpack(Packed(tree, layout.specs), layout.empty())
    except MalformedMessage:
        return
    assert plain is None or isinstance(plain, (bool, int, float, str, bytes, list, tuple, dict, Tensor, datetime))


@varied
@given(trees, st.data())
def test_a_truncated_tree_is_malformed(tree: Any, data: st.DataObject) -> None:
    packed, buffer = pack(tree)
    cut = data.draw(st.integers(0, len(packed.tree) - 1))
    with pytest.raises(MalformedMessage):
        unpack(Packed(packed.tree[:cut], packed.specs), buffer)


@varied
@given(trees, st.integers(-70, 70))
def test_a_buffer_of_another_size_is_malformed(tree: Any, more: int) -> None:
    packed, buffer = pack(tree)
    size = buffer.numel() + more
    assume(more != 0)
    assume(size >= 0)
    with pytest.raises(MalformedMessage, match="bytes"):
        unpack(packed, torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("w", (-1,), "float32"),
        TensorSpec("w", (-2, -2), "float32"),
        TensorSpec("w", (4,), "float33"),
        TensorSpec("w", (4,), "__class__"),
        TensorSpec("w", (2**40, 2**40), "float32"),
        TensorSpec("w", (0, 2**64), "float32"),
        TensorSpec("w", (0, 2**62, 2**62), "float32"),
        TensorSpec("w", (2**62,), "uint8"),
        TensorSpec("w", (4,), "uint8", range=(-1, 3)),
        TensorSpec("w", (4,), "uint8", range=(3, 2)),
        TensorSpec("w", (4,), "uint8", range=(0, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("nbytes", [0, 16])
def test_a_spec_that_no_tensor_can_have_is_malformed(spec: TensorSpec, nbytes: int) -> None:
    with pytest.raises(MalformedMessage):
        check_specs((spec,), nbytes)
    with pytest.raises(MalformedMessage):
        unpack(Packed(msgspec.msgpack.encode(None), (spec,)), torch.zeros(nbytes, dtype=torch.uint8))


@pytest.mark.parametrize("announced", [2**34, 2**50, 2**63])
def test_announced_bytes_are_not_allocated_before_they_came(announced: int) -> None:
    spec = TensorSpec("w", (announced,), "uint8")
    with pytest.raises(MalformedMessage):
        unpack(Packed(msgspec.msgpack.encode(None), (spec,)), torch.zeros(0, dtype=torch.uint8))


def extension(code: int, data: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))


@pytest.mark.parametrize(
    "tree",
    [
        extension(1, b"1"),
        extension(1, b"x"),
        extension(1, b""),
        extension(1, b"9" * 5000),
        extension(2, b""),
        extension(2, b"\xc1"),
        extension(2, b"\x05"),
        extension(3, b"0"),
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\xc0",
        b"\x81\x80\x01",
    ],
    ids=[
        "no such tensor",
        "no number",
        "empty number",
        "long number",
        "empty tuple",
        "no tuple",
        "number as a tuple",
        "unknown kind",
        "huge list",
        "huge bytes",
        "deep list",
        "dict as a key",
    ],
)
def test_a_malformed_tree_is_refused(tree: bytes) -> None:
    specs = (TensorSpec("w", (1,), "uint8"),)
    with pytest.raises(MalformedMessage, match="not a tree"):
        unpack(Packed(tree, specs), torch.zeros(1, dtype=torch.uint8))


def test_tuples_nested_without_end_are_refused() -> None:
    tree = msgspec.msgpack.encode([])
    for _ in range(20_000):
        tree = msgspec.msgpack.encode([msgspec.msgpack.Ext(2, tree)])
    with pytest.raises(MalformedMessage, match="not a tree"):
        unpack(Packed(tree, ()), torch.zeros(0, dtype=torch.uint8))
