"""Gradients averaged inside a group in fewer bytes: the arithmetic, in one process; ranks are in `test_parity`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Run, run
from simulated_measurements import measurements_of
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_omni import Compression
from lightning_omni.errors import ConfigurationError
from lightning_omni.runtime.model.reduction import BUCKET_MB, Reduction, seconds_of_arithmetic
from lightning_omni.simulator import Cluster, Limits, Link, Workload, simulate
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.model.profile import Profile
from lightning_omni.wire.all_reduce import EXACT, AllReduce, Memory, PowerSGD, all_reduce_of, resumed

SHAPES = [(40, 30), (40,), (12, 3, 5, 5), (2, 2)]


def gradients(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def average(format_: AllReduce, members: Sequence[list[Tensor]], memories: Sequence[Memory]) -> int:
    """What ranks do, one after the other; each has the result in its gradients. Returns the all-reduces."""
    keys: Sequence[Hashable] = range(len(members[0]))
    steps = [format_.average(mine, keys, memory) for mine, memory in zip(members, memories, strict=True)]
    messages, count = [next(each) for each in steps], 0
    while messages:
        mean, count = torch.stack(messages).mean(0), count + 1
        messages = [after for each in steps if (after := resumed(each, mean.clone())) is not None]
        assert len(messages) in (0, len(steps))
    return count


@settings(deadline=None, max_examples=12)
@given(
    rank=st.integers(1, 6),
    members=st.integers(1, 4),
    rounds=st.integers(1, 5),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_what_was_sent_and_what_was_not_add_up_to_the_gradients(
    rank: int, members: int, rounds: int, seed: int, dtype: Any
) -> None:
    memories: list[Memory] = [{} for _ in range(members)]
    given_, sent = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for number in range(rounds):
        mine = [gradients(seed + 10 * number + member) for member in range(members)]
        for total, *each in zip(given_, *mine, strict=True):
            total += torch.stack(each).mean(0)
        assert average(PowerSGD(rank=rank, dtype=dtype), mine, memories) <= PowerSGD.messages
        for results in zip(*mine, strict=True):
            assert all(torch.equal(each, results[0]) for each in results)
        for total, result in zip(sent, mine[0], strict=True):
            total += result
    for place, (whole, total) in enumerate(zip(given_, sent, strict=True)):
        unsent = [memory[place].error for memory in memories if place in memory]
        left = torch.stack(unsent).mean(0) if unsent else torch.zeros_like(whole)
        # What travels as it is has no memory of how it was rounded.
        tolerance = (0.1, 0.02) if dtype == "bf16" and not unsent else (1e-7, 1e-7)
        torch.testing.assert_close(total + left, whole, atol=tolerance[0], rtol=tolerance[1])


def test_with_other_columns_what_was_not_sent_is_sent_later_all_the_same() -> None:
    memory: Memory = {}
    sent = torch.zeros(40, 30, dtype=torch.float64)
    whole = torch.zeros_like(sent)
    for rank in (2, 2, 5, 1):
        mine = gradients(rank, [(40, 30)])
        whole += mine[0]
        average(PowerSGD(rank=rank), [mine], [memory])
        sent += mine[0]
        assert memory[0].factor.shape == (30, rank)
    torch.testing.assert_close(sent + memory[0].error, whole)


def test_of_a_parameter_that_no_member_has_used_nothing_unsent_is_sent() -> None:
    memories: list[Memory] = [{}, {}]
    average(PowerSGD(rank=2), [gradients(0), gradients(1)], memories)
    unused = [[each * (place > 0) for place, each in enumerate(gradients(seed))] for seed in (2, 3)]
    before = [(memory[0].error, memory[0].factor) for memory in memories]
    average(PowerSGD(rank=2), unused, memories)
    assert not bool(unused[0][0].any())
    for memory, (error, factor) in zip(memories, before, strict=True):
        assert torch.equal(memory[0].error, error)
        assert torch.equal(memory[0].factor, factor)


def test_what_one_member_alone_uses_has_the_mean_of_ddp() -> None:
    memories: list[Memory] = [{}, {}]
    whole = torch.outer(torch.arange(1.0, 41), torch.arange(1.0, 31)).double()
    for _ in range(6):
        mine = [[whole.clone()], [torch.zeros_like(whole)]]
        average(PowerSGD(rank=2), mine, memories)
        torch.testing.assert_close(mine[0][0], whole / 2)


def test_a_gradient_of_low_rank_comes_through_whole() -> None:
    random = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 2, generator=random) @ torch.randn(2, 50, generator=random)
    found, memory = [matrix.clone()], dict[Hashable, Any]()
    average(PowerSGD(rank=2), [found], [memory])
    torch.testing.assert_close(found[0], matrix, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_gradient_is_sent_whole_in_the_course_of_time(dtype: Any) -> None:
    matrix, memory = gradients(3, [(30, 30)]), dict[Hashable, Any]()
    total = torch.zeros(30, 30, dtype=torch.float64)
    errors = []
    for count in range(1, 201):
        mine = [matrix[0].clone()]
        average(PowerSGD(rank=2, dtype=dtype), [mine], [memory])
        total += mine[0]
        errors.append(float((total / count - matrix[0]).norm() / matrix[0].norm()))
    assert errors[-1] < 0.1 < errors[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stays_so_and_leaves_no_trace(bad: float) -> None:
    memories: list[Memory] = [{}, {}]
    average(PowerSGD(rank=2), [gradients(0), gradients(1)], memories)
    before = [{place: each.error.clone() for place, each in memory.items()} for memory in memories]
    spoilt = [gradients(2), gradients(3)]
    spoilt[1][0][0, 0] = bad
    average(PowerSGD(rank=2), spoilt, memories)
    assert not spoilt[0][0].isfinite().all()
    for memory, kept in zip(memories, before, strict=True):
        assert torch.equal(memory[0].error, kept[0])
        assert memory[0].factor.isfinite().all()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_rounded_means_are_means_to_their_precision(name: str) -> None:
    mine = [gradients(0), gradients(1)]
    means = [torch.stack(each).mean(0) for each in zip(*mine, strict=True)]
    assert average(all_reduce_of(name), mine, [{}, {}]) == 1
    for result, mean in zip(mine[0], means, strict=True):
        torch.testing.assert_close(result, mean, atol=0.05 if name != "fp32" else 1e-12, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    mine = [each.to(dtype) for each in gradients(0)]
    average(PowerSGD(rank=4), [mine], [{}])
    assert {each.dtype for each in mine} == {dtype}


@pytest.mark.parametrize("name", ["bf16", "powersgd:2"])
def test_both_parts_of_all_complex_gradients_are_averaged(name: str, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(40, 30, dtype=torch.complex64))
    gradient = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.complex64)
    model: Any = torch.nn.Module()
    model.weight = weight
    model.forward = lambda: torch.linalg.vecdot(gradient.flatten(), model.weight.flatten()).real
    reduction = Reduction(all_reduce_of(name))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped: Any = torch.nn.parallel.DistributedDataParallel(model)
        reduction.install(wrapped, dist.group.WORLD)
        wrapped().backward()
    finally:
        dist.destroy_process_group()
    assert weight.grad is not None
    found, expected = torch.view_as_real(weight.grad), torch.view_as_real(gradient)
    if name == "bf16":
        assert torch.equal(found, expected.bfloat16().float())
    else:
        assert not torch.equal(found[20:], expected[20:])
        torch.testing.assert_close(found + reduction.memory[weight].error, expected)


def test_bytes_are_those_of_what_is_averaged() -> None:
    shapes = [(40, 30), (40,), (12, 3, 5, 5), (2, 2)]
    for format_ in map(all_reduce_of, ("fp32", "bf16", "powersgd:1", "powersgd:4", "powersgd:4,dtype=bf16")):
        mine = [each.float() for each in gradients(0, shapes)]
        steps, nbytes = format_.average(mine, range(len(mine)), {}), 0
        message: Tensor | None = next(steps)
        while message is not None:
            nbytes += message.nbytes
            message = resumed(steps, message)
        assert nbytes == format_.nbytes(shapes)


@pytest.mark.parametrize("wrong", ["powersgd:0", "int8", 4, "powersgd:rank=x", "powersgd:4,dtype=int8"])
def test_what_is_no_format_is_refused_with_the_argument(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="all_reduce"):
        all_reduce_of(wrong)


def test_a_format_is_what_its_text_names() -> None:
    assert all_reduce_of("fp32") == EXACT
    assert all_reduce_of("powersgd") == PowerSGD()
    assert all_reduce_of("powersgd:rank=8,dtype=bf16") == PowerSGD(rank=8, dtype="bf16")


# --- In the simulator, and in forecasts ------------------------------------------------------------------------------

SLOW = Cluster.even(4, seconds_per_sample=0.01, group_link=Link(bandwidth=1e4))


@cache
def trained(**options: Any) -> Any:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 40, generator=random)
    data = TensorDataset(inputs, inputs @ torch.randn(40, 30, generator=random))
    return simulate(
        "async_sgd",
        1,
        SLOW,
        Workload(
            torch.nn.Linear(40, 30),
            data,
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            evaluate=lambda model: {"loss": float((model(inputs) - data.tensors[1]).square().mean())},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        ),
        batch_size=8,
        limits=Limits(updates=200),
        **options,
    )


def test_a_simulated_group_learns_nearly_as_much_in_a_part_of_the_time() -> None:
    exact, thin = trained(), trained(compression=Compression(all_reduce="powersgd:4"))
    assert trained(compression=Compression(all_reduce="fp32")).evaluated["loss"] == exact.evaluated["loss"]
    first = 40.0
    assert thin.evaluated["loss"][-1] < 0.1 * first
    assert thin.seconds < 0.6 * exact.seconds


def test_a_forecast_of_an_all_reduce_is_what_the_simulator_takes() -> None:
    profile = Profile.fit([measurements_of(trained())])
    for format_ in ("bf16", "powersgd:2"):
        forecast = profile.predict(1, all_reduce=format_).seconds_per_update.value
        run = trained(compression=Compression(all_reduce=format_))
        assert forecast == pytest.approx(run.seconds / run.updates, rel=0.1)


def test_what_ranks_compute_for_it_is_a_part_of_their_steps() -> None:
    measured = measurements_of(trained())
    known = replace(measured, averaging={"bf16": 0.05})
    free, dear = (Profile.fit([each]).predict(1, all_reduce="bf16").seconds_per_update for each in (measured, known))
    assert dear.value - free.value == pytest.approx(0.05, rel=0.05)
    assert Profile.fit([known]).predict(1).seconds_per_update == Profile.fit([measured]).predict(1).seconds_per_update
    assert Measured.from_dict(known.to_dict()) == known


def test_arithmetic_is_timed_with_a_part_of_large_models() -> None:
    cpu, format_ = torch.device("cpu"), all_reduce_of("powersgd:2")
    assert seconds_of_arithmetic(format_, [(64, 64), (8,)], cpu) > 0
    assert seconds_of_arithmetic(format_, [(1 << 20, 1 << 20), (64, 64)], cpu) > 1.0
    assert seconds_of_arithmetic(format_, [], cpu) == 0


def test_without_shapes_a_forecast_of_fewer_bytes_is_refused() -> None:
    measured = Measured((0, 1), ((8.0,) * 9,) * 2, ((0.1,) * 9,) * 2, (0.2,) * 9, nbytes=400)
    with pytest.raises(ConfigurationError, match="shapes"):
        Profile.fit([measured]).predict(1, all_reduce="bf16")
    assert Profile.fit([measured]).predict(1, all_reduce="fp32").samples_per_second.value > 0


# --- Between ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fits() -> Run:
    return run("all_reduce.py", {"servers": 0}, timeout=240)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["powersgd", "bf16", "accumulated", "switched"])
def test_ranks_average_as_the_arithmetic_says_and_stay_alike(fits: Run, name: str) -> None:
    one, other = (fits.results[rank][name] for rank in (0, 1))
    assert one["weights"] == other["weights"]
    assert one["steps"] > 4
    assert one["off"] < (1e-5 if name != "bf16" else 0.02)


@pytest.mark.slow
@pytest.mark.processes
def test_sparse_gradients_are_averaged_as_they_are(fits: Run) -> None:
    found = [each for rank in (0, 1) for each in fits.results[rank]["sparse"].values()]
    assert len(found) == 6
    assert all(each == {"weights": found[0]["weights"], "is_sparse": True} for each in found)


def test_on_a_cpu_gradients_of_a_lossy_format_are_in_few_buckets_unless_the_user_says_otherwise() -> None:
    module = torch.nn.Linear(4, 4)
    lossy, exact = (Reduction(all_reduce_of(name)) for name in ("powersgd:4", "fp32"))
    assert lossy.ddp_options(module, {"static_graph": True}) == {"static_graph": True, "bucket_cap_mb": BUCKET_MB}
    assert lossy.ddp_options(module, {"bucket_cap_mb": 1}) == {"bucket_cap_mb": 1}
    assert exact.ddp_options(module, {}) == {} == lossy.ddp_options(module.to("meta"), {})
