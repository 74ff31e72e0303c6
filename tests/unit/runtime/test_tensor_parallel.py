"""Groups with a mesh of data-parallel and tensor-parallel ranks are ModelParallelStrategy inside, and groups across."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch.strategies as of_lightning
import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import ModelParallelStrategy
from runs import run
from test_inside import CLOSE, apart
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_omni import FSDP, Server
from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.runtime.model.meshes import ModelParallel, columns_of, mesh_of, rows_of, sizes_in
from lightning_omni.runtime.model.sharded import check_clipping, check_sharded
from lightning_omni.strategy.pytorch_lightning import OmniStrategy
from lightning_omni.topology import Topology

TWO_BY_TWO = [
    {"row": "AdamW, clipping, accumulation", "mesh": "2 x 2", "kind": "Parallel", "saves": "of-one-group"},
    {"row": "bf16", "mesh": "2 x 2", "kind": "Mixed"},
]
INSIDES = ["ddp", "1 x 2"]
ACROSS = [{"method": "async_sgd", "optimizer": "AdamW", "kind": "Ways", "insides": INSIDES}]
FILES = {"method": "diloco:period=2", "compression": "int8"}
FOLDERS = {**FILES, "folder": True}
RESUMES: list[dict[str, Any]] = [
    {"name": "two groups", "with": "1 x 2", "groups": 2, "options": FOLDERS, "saves": "parts"},
    {"name": "again", "with": "1 x 2", "groups": 2, "options": FILES, "from": "parts", "saves": "file", "epoch": 1},
    {"name": "theirs", "with": "parallel 2 x 2", "from": "parts"},
    {"name": "DDP", "with": "ddp", "kind": "Even", "from": "of-one-group"},
    {"name": "of one group", "with": "1 x 2", "groups": 2, "options": FILES, "from": "of-one-group"},
    {"name": "DDP of two", "with": "ddp", "kind": "Even", "from": "file", "extra": {"max_epochs": 3}},
]


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    what = ["across", "tensor_parity", "resumes", "dies_in_row"]  # our launcher outlives a rank, Lightning's does not
    told = {"what": what, "meshes": TWO_BY_TWO, "devices": 4, "across": ACROSS}
    servers = 2 * (2 * len(ACROSS) + sum("groups" in each for each in RESUMES) + 1)
    finished = run("inside.py", {**told, "resumes": RESUMES, "servers": servers})
    return [finished.results[rank] for rank in range(4)]


def test_one_group_equals_model_parallel_strategy_bit_for_bit(four_ranks: list[dict[str, Any]]) -> None:
    for found in four_ranks:
        for result in found["tensor_parity"].values():
            theirs, ours = result["both"]
            assert ours == theirs
            assert len(ours[0]) == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["Mixed", "Parallel"])
def test_one_tensor_parallel_row_equals_model_parallel_strategy_bit_for_bit(kind: str) -> None:
    rows = ["SGD", "AdamW, clipping, accumulation", "bf16"] if kind == "Parallel" else ["SGD", "bf16"]
    meshes = [{"row": row, "mesh": "1 x 2", "kind": kind} for row in rows]
    for found in run("inside.py", {"what": ["tensor_parity"], "meshes": meshes}).results.values():
        for result in found["tensor_parity"].values():
            theirs, ours = result["both"]
            assert ours == theirs


def test_every_number_is_exchanged_by_one_member_and_of_a_whole_each_takes_what_it_has(
    four_ranks: list[dict[str, Any]],
) -> None:
    for found in four_ranks:
        for result in found["tensor_parity"].values():
            assert result["lies"] == {"whole": 6, "exchanged": [1] * 6}


def test_two_tensor_parallel_groups_learn_what_two_groups_of_ddp_learn(four_ranks: list[dict[str, Any]]) -> None:
    for result in four_ranks:
        (found,) = result["across"].values()
        ddp, ours = found["ddp"], found["1 x 2"]
        assert ddp["updates"] == ours["updates"]
        assert ddp["steps"] == ours["steps"] == 8, "samples of a tensor-parallel row count once"
        assert apart(ddp["weights"], ours["weights"]) < CLOSE
        assert ours["again"] == pytest.approx(ours["val_loss"])
        assert ours["copies"], "what is replicated stays the same on all ranks, bitwise"
    shares, leaders = (
        sum(each["bytes"] for result in four_ranks for each in [next(iter(result["across"].values()))[inside]])
        for inside in ("1 x 2", "ddp")
    )
    assert 0 < shares < 1.15 * leaders, "what is replicated travels once; tensors begin at multiples of 64"


def test_a_checkpoint_goes_on_with_other_meshes_and_with_lightning_s_strategies(
    four_ranks: list[dict[str, Any]],
) -> None:
    (of_folder,) = four_ranks[0]["resumes"]["two groups"]["saved"]
    (of_file,) = four_ranks[0]["resumes"]["again"]["saved"]
    for result in four_ranks:
        found = result["resumes"]
        assert apart(found["two groups"]["after"], found["again"]["after"]) == 0, "with what groups and servers knew"
        assert found["two groups"]["after"] == four_ranks[0]["resumes"]["two groups"]["after"], "copies are alike"
        for name in ("again", "theirs"):
            assert found[name]["loaded"] == of_folder
        of_one_group = result["tensor_parity"]["AdamW, clipping, accumulation"]["saved"]
        for name in ("DDP", "of one group"):
            assert found[name]["loaded"] == of_one_group
        assert found["DDP of two"]["loaded"] == of_file
    assert len(of_folder["states"]) == len(of_file["states"]) == 18


def test_a_killed_member_of_a_tensor_parallel_row_costs_its_group_alone(four_ranks: list[dict[str, Any]]) -> None:
    assert ["dies_in_row" in found for found in four_ranks] == [True, True, False, False]
    one, other = (found["dies_in_row"] for found in four_ranks[:2])
    assert one["lost"] == [2, 3]
    assert one == other


def test_what_is_replicated_is_the_same_after_each_step_of_a_group_on_its_own_clock(
    four_ranks: list[dict[str, Any]],
) -> None:
    assert [found["dies_in_row"]["apart"] for found in four_ranks[:2]] == [[], []]


def test_a_checkpoint_of_before_a_death_and_one_of_after_it_go_on_with_another_mesh(
    four_ranks: list[dict[str, Any]],
) -> None:
    saved = four_ranks[0]["dies_in_row"]["saved"]
    resumes = [{"name": name, "with": "2 x 1", "from": each["folder"]} for name, each in saved.items()]
    more = [{**each, "extra": {"max_epochs": 3}} for each in resumes]
    for found in run("inside.py", {"what": ["resumes"], "resumes": more, "devices": 2, "servers": 0}).results.values():
        for name, each in saved.items():
            assert found["resumes"][name]["loaded"] == each["held"]
            assert apart(each["held"]["weights"], found["resumes"][name]["after"]) > 0, "and it trains on"


# --- What does not go with a mesh -------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers whose parameters lie on two meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(5), nn.Linear(8, 5)
        self.last = nn.Linear(5, 3)

    def parallelize(self, mesh: DeviceMesh) -> Net:
        plan = {"first": ColwiseParallel(), "norm": SequenceParallel(), "second": RowwiseParallel()}
        parallelize_module(self, mesh["tensor_parallel"], plan, src_data_rank=None)
        for layer in self.children():
            fully_shard(layer, mesh=mesh["data_parallel"])
        return self


@contextmanager
def meshed(rows: int = 2) -> Iterator[DeviceMesh]:
    """The mesh of 2 x 2 ranks, or of 1 x 2, as the first of them sees it; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2 * rows, store=FakeStore())
    one = Topology.even(2 * rows, 1)
    groups: list[Any] = [dist.group.WORLD]
    try:
        for part in (columns_of(one, 2), rows_of(one, 2)):
            made = [dist.new_group(list(ranks)) for ranks in part.groups]
            groups.append(made[part.group_of(0)])
        yield mesh_of(range(2 * rows), groups, 2, "cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda mesh: torch.ones(4, 4), ["the parameter weight is not sharded", "fully_shard", "freeze it"]),
        (
            lambda mesh: distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (4,)), [Shard(0)]),
            ["its group's mesh is", "self.device_mesh"],
        ),
        (lambda mesh: DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Partial()]), ["is the sum of what its"]),
        (
            lambda mesh: distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]),
            ["alike on the data-parallel ranks", "fully_shard"],
        ),
        (
            lambda mesh: distribute_tensor(torch.ones(4, 4), mesh["tensor_parallel"], [Shard(0)]),
            ["alike on the data-parallel ranks", "fully_shard"],
        ),
        (
            lambda mesh: DTensor.from_local(torch.ones(4, 2).t(), mesh, [Shard(0), Shard(1)]),
            ["not contiguous", ".contiguous()"],
        ),
    ],
)
def test_parameters_that_the_members_of_a_group_do_not_hold_together_are_refused(make: Any, words: list[str]) -> None:
    with meshed() as mesh:
        parameter = nn.Parameter(make(mesh))
        with pytest.raises(UnsupportedError) as caught:
            check_sharded({"weight": parameter}, mesh, ModelParallel(2, 2))
    for word in ["model_parallel=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)", *words]:
        assert word in str(caught.value)


def test_what_fsdp2_does_not_divide_is_refused_where_a_group_has_replicas_of_the_model() -> None:
    with meshed(rows=1) as mesh:
        held = {"weight": nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tensor_parallel"], [Shard(0)]))}
        check_sharded(held, mesh, ModelParallel(1, 2))
        with pytest.raises(UnsupportedError, match="nothing would average its gradient"):
            check_sharded(held, mesh, ModelParallel(1, 2), is_replicated=True)
        check_sharded(dict(Net().parallelize(mesh).named_parameters()), mesh, ModelParallel(1, 2), is_replicated=True)


def test_norms_over_parameters_on_several_meshes_are_refused() -> None:
    with meshed() as mesh:
        net = Net().parallelize(mesh)
        check_clipping([torch.optim.SGD(net.second.parameters())], ModelParallel(2, 2))
        with pytest.raises(UnsupportedError, match="SequenceParallel"):
            check_clipping([torch.optim.SGD(net.parameters())], ModelParallel(2, 2))


# --- What is refused before any process starts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "ranks", "found"),
    [
        ((2, 2), [4], (2, 2)),
        ((1, 2), [2, 2], (1, 2)),
        (("auto", 2), [2], (1, 2)),
        (("auto", "auto"), [2, 2], (2, 2)),
        ((4, "auto"), [1], None),
        (("auto", 2), [4], None),
        ((2, 2), [6], None),
    ],
)
def test_auto_is_what_lightning_means_inside_the_group(
    sizes: tuple[Any, Any], ranks: list[int], found: tuple[int, int] | None
) -> None:
    if found is not None:
        assert ModelParallel(*sizes).sizes(ranks) == found
        return
    with pytest.raises(ConfigurationError, match=f"does not fit a group of {sum(ranks)}"):
        ModelParallel(*sizes).sizes(ranks)


def test_groups_with_other_meshes_than_others_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="on more nodes than others"):
        sizes_in(Topology.even(8, 2), ModelParallel(), [4, 2, 2])


@pytest.mark.parametrize("kind", [ModelParallelStrategy, of_lightning.ModelParallelStrategy])
def test_a_mesh_that_does_not_fit_the_groups_is_refused_before_any_process_starts(kind: Any) -> None:
    strategy = OmniStrategy(groups=2, model_parallel=kind(data_parallel_size=2, tensor_parallel_size=2))
    with pytest.raises(ConfigurationError, match="a mesh of 2 x 2 ranks does not fit a group of 2"):
        Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)


class Own(ModelParallelStrategy):
    """Its hooks would not be called."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_parallel": Own()}, ["pass", "ModelParallelStrategy(data_parallel_size"]),
        ({"model_parallel": ModelParallelStrategy(0, 2)}, ["data_parallel_size=0"]),
        (
            {"model_parallel": ModelParallelStrategy(1, 2, save_distributed_checkpoint="no")},  # type: ignore[arg-type]
            ["ModelParallelStrategy(save_distributed_checkpoint='no')", "True or False"],
        ),
        ({"rebalance": "auto"}, ['rebalance="auto"', "hooks of gradients"]),
        ({"method": "diloco:period=4,fragments=2"}, ["fragments=2", "model_parallel=ModelParallelStrategy("]),
        ({"server": Server(record="run.jsonl")}, ["record='run.jsonl'", "model_parallel=ModelParallelStrategy("]),
        ({"merged": "head"}, ["merged='head'", "model_parallel=ModelParallelStrategy("]),
        ({"process_group": "some"}, ["process_group='some'", "leave it or model_parallel= out"]),
    ],
    ids=["a subclass", "no rank", "a word", "rebalance", "fragments", "record", "merged head", "process group"],
)
def test_what_does_not_go_with_a_mesh_is_refused_at_construction(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OmniStrategy(**{"groups": 2, "model_parallel": ModelParallelStrategy(1, 2), **options})
    for word in words:
        assert word in str(caught.value)


def test_what_the_object_says_of_checkpoints_and_process_groups_counts() -> None:
    theirs = ModelParallelStrategy(1, 2, process_group_backend="gloo", timeout=timedelta(minutes=3))
    strategy = OmniStrategy(groups=2, model_parallel=theirs)
    assert strategy.parts.checkpoints.saves_folders
    assert (strategy.process_group_backend, strategy._timeout) == ("gloo", timedelta(minutes=3))
    whole = OmniStrategy(model_parallel=ModelParallelStrategy(1, 2, save_distributed_checkpoint=False))
    assert not whole.parts.checkpoints.saves_folders


@pytest.mark.parametrize(
    ("sharding", "given"),
    [
        (FSDP(distributed_checkpoint=True), "FSDP(distributed_checkpoint=True)"),
        (ModelParallelStrategy(1, 2), "ModelParallelStrategy(save_distributed_checkpoint=True)"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_by_the_argument_that_asked_for_it(
    sharding: Any, given: str
) -> None:
    strategy = OmniStrategy(model_parallel=sharding)
    with pytest.raises(UnsupportedError) as caught:
        strategy.save_checkpoint({}, "s3://bucket/last.ckpt")
    assert str(caught.value).startswith(f"{given} and a checkpoint at s3://bucket/last.ckpt")
    strategy.parts.checkpoints.check_plugin()  # as the next Trainer does: its plugin is not taken for one of the user's
