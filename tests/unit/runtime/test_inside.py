"""Groups whose members hold the model together are ModelParallelStrategy inside, and groups of DDP across."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Trainer, callbacks
from pytorch_lightning.demos.boring_classes import BoringModel
from runs import Run, run
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_omni import FSDP, Server
from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods import AsyncSGD, LocalSGD
from lightning_omni.runtime.model.meshes import sizes_in
from lightning_omni.runtime.model.sharded import _blocks, average_over_replicas, reshard, state_rows
from lightning_omni.runtime.process_groups import is_of_a_collective, is_of_a_loss
from lightning_omni.strategy.pytorch_lightning import OmniStrategy
from lightning_omni.topology import Topology
from lightning_omni.tuning.callback.pytorch_lightning import OmniTuner
from lightning_omni.wire.partition import check_by_parts

CLOSE = 1e-6


@pytest.fixture(scope="module")
def one_group() -> Run:
    return run("inside.py", {"what": ["parity"]})


@pytest.mark.parametrize("row", ["SGD", "AdamW, clipping, accumulation", "bf16", "activation checkpointing"])
def test_one_group_equals_model_parallel_strategy_bit_for_bit(one_group: Run, row: str) -> None:
    for rank in (0, 1):
        got = one_group.results[rank]["parity"][row]
        assert got["ours"] == got["theirs"]
        assert got.get("by itself", got["theirs"]) == got["theirs"], "blocks are wrapped as a user would"
        assert len(got["ours"][0]) == 6
        if row == "activation checkpointing":
            trained, validated = 2 * 8, 2 * 8  # two layers
            assert got["ours"][3] == 2 * trained + validated, "computed once more in each backward pass"


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two trees."""
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one]
    lists = [(a, b) if isinstance(a, list) else ([a], [b]) for a, b in pairs]
    return float(max(abs(x - y) for a, b in lists for x, y in zip(a, b, strict=True)))


ACROSS: list[dict[str, Any]] = [
    {"method": "async_sgd", "optimizer": "AdamW", "extra": {"gradient_clip_val": 0.3, "compression": "bf16"}},
    {"method": "async_sgd", "kind": "Recomputed"},  # with --all only: one group recomputes as well
]


DILOCO = {"method": "diloco:period=2"}
FOLDERS = {**DILOCO, "folder": True}


def resumes(one_group: Run, four_and_two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs that go on from the checkpoints of others; a file of two groups of two is there already."""
    saved = one_group.results[0]["parity"]
    before_death = four_and_two[0]["dies_in_replicas"]["saved"]["folder"]
    return [
        {"name": "2 x 2", "with": "inside fsdp", "groups": 2, "options": FOLDERS, "saves": "many"},
        {"name": "2 x 2 again", "with": "inside fsdp", "groups": 2, "options": DILOCO, "from": "many"},
        {"name": "1 x 4", "with": "inside fsdp", "from": "many"},
        {"name": "parallel", "with": "parallel", "from": "many"},
        {"name": "DDP", "with": "ddp", "from": "fsdp"},
        {"name": "theirs", "with": "inside fsdp", "from": saved["saved by theirs"]["folder"]},
        {"name": "ours", "with": "inside fsdp", "groups": 2, "from": saved["saved by ours"]["folder"]},
        {"name": "before death", "with": "inside fsdp", "groups": 1, "from": before_death},
    ]


@pytest.fixture(scope="module")
def two_groups(is_all: bool, one_group: Run, four_and_two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks 0 and 1 report, the members of one group; with --all the other group has died at the end."""
    resumed = resumes(one_group, four_and_two)
    across = ACROSS if is_all else ACROSS[:1]
    servers = 2 * (2 * len(across) + 8 + sum("groups" in each for each in resumed) + 1)
    what = {"what": ["across", "checkpoints", "resumes", *(["dies"] if is_all else [])], "across": across}
    rows = [{**DILOCO, "kind": "Recomputed"}, DILOCO] if is_all else [DILOCO]
    saved = {"checkpoints": rows}  # the last ones are those that others load
    finished = run("inside.py", {**what, **saved, "resumes": resumed, "servers": servers})
    assert {rank for rank, found in finished.results.items() if "dies" in found} == ({0, 1} if is_all else set())
    return [finished.results[0], finished.results[1]]


def test_groups_learn_what_those_whose_members_have_the_whole_model_learn(two_groups: list[dict[str, Any]]) -> None:
    each = [found for result in two_groups for found in result["across"].values()]
    for found in each:
        assert apart(found["ddp"]["weights"], found["fsdp"]["weights"]) < CLOSE
        assert found["ddp"]["updates"] == found["fsdp"]["updates"] == 16
        assert found["fsdp"]["again"] == pytest.approx(found["fsdp"]["val_loss"])
    shares, leaders = ([found[inside]["bytes"] for found in each] for inside in ("fsdp", "ddp"))
    assert all(share > 0 for share in shares)
    assert sum(shares) < 1.1 * sum(leaders), "all shares together are one model, and tensors begin at multiples of 64"


def test_a_checkpoint_goes_from_one_way_to_the_other_and_back(two_groups: list[dict[str, Any]], is_all: bool) -> None:
    for result in two_groups:
        assert len(result["checkpoints"]) == 1 + is_all, "with --all also with activation checkpointing"
        for found in result["checkpoints"].values():
            for name in ("fsdp", "ddp to fsdp", "fsdp to ddp"):
                assert apart(found["ddp"], found[name]) < CLOSE, name
            for name in ("saved ", "saved inside-"):
                assert apart(*found[name]) < CLOSE, "they are of plain DDP, with all that method and groups remember"


def test_a_checkpoint_goes_on_in_other_groups_with_other_shards_and_with_lightning_s_strategies(
    two_groups: list[dict[str, Any]],
) -> None:
    for result in two_groups:
        found = result["resumes"]
        assert apart(found["2 x 2"]["after"], found["2 x 2 again"]["after"]) == 0, "with what groups and servers knew"
        for name in ("2 x 2 again", "1 x 4", "parallel"):
            assert found[name]["loaded"] == found["DDP"]["loaded"], "of a folder, and of one file"
            assert len(found[name]["loaded"]["states"]) == 18
        assert found["1 x 4"]["after"] == found["parallel"]["after"]
        assert apart(found["1 x 4"]["after"], found["DDP"]["after"]) < CLOSE


def test_what_two_shards_of_one_group_have_saved_is_loaded_by_more_and_by_more_groups(
    one_group: Run, two_groups: list[dict[str, Any]]
) -> None:
    for result in two_groups:
        for whose in ("theirs", "ours"):
            saved = one_group.results[0]["parity"][f"saved by {whose}"]["held"]
            assert result["resumes"][whose]["loaded"] == saved


@pytest.mark.exhaustive  # as where the group has the model twice
def test_a_killed_member_costs_its_group_alone(two_groups: list[dict[str, Any]]) -> None:
    assert two_groups[0]["dies"]["lost"] == [2, 3]
    assert two_groups[0]["dies"] == two_groups[1]["dies"]


def test_an_error_of_a_collective_is_recognized_where_torch_s_logging_replaces_it() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        some = dist.new_group([0])
        dist.distributed_c10d._world.pg_group_ranks[some] = {4: 0}  # as in a run in which this is rank 4
        with pytest.raises(ValueError, match="is not part of group") as caught:
            dist.all_gather_single(torch.zeros(3), torch.zeros(2), group=some)
    finally:
        dist.destroy_process_group()
    assert is_of_a_collective(caught.value)
    assert not is_of_a_loss(caught.value), "a wrong size is no loss of a rank"
    caught.value.__context__ = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")
    assert is_of_a_loss(caught.value)
    assert not is_of_a_collective(ValueError("something is wrong with this batch"))


# --- Groups that hold the model several times ------------------------------------------------------------------------

OF_SIX: list[dict[str, Any]] = [
    {"method": "async_sgd", "optimizer": "AdamW", "extra": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}},
    {"method": "diloco:period=2", "optimizer": "AdamW", "turns": False},
]


@pytest.fixture(scope="module")
def four_and_two(is_all: bool) -> list[dict[str, Any]]:
    """What six ranks report: two groups, of which one holds the model twice and one once, in two shards each time."""
    rows = OF_SIX if is_all else [row for row in OF_SIX if not row["method"].startswith("diloco")]
    across = [{**row, "extra": {**row.get("extra", {}), "shards": 2}} for row in rows]
    again = {"with": "inside fsdp", "groups": 2, "options": {**FOLDERS, "shards": 2, "compression": "int8"}}
    once = {"with": "inside fsdp", "groups": 1, "options": {"shards": 2}}
    resumed: list[dict[str, Any]] = [
        {"name": "saved", **again, "saves": "four-two"},
        {"name": "again", **again, "from": "four-two"},
        {"name": "file", **once, "from": "four-two", "saves": "file", "epoch": 1},
        {"name": "DDP", "with": "ddp", "from": "file", "extra": {"max_epochs": 3}},
    ]
    what = ["across", "resumes", "dies_in_replicas"]
    told = {"what": what, "across": across, "resumes": resumed, "devices": 6, "servers": 15}
    finished = run("inside.py", told, spares=5)
    return [finished.results[rank] for rank in range(6)]


def test_groups_of_different_sizes_learn_what_those_with_whole_models_learn(four_and_two: list[dict[str, Any]]) -> None:
    for result in four_and_two:
        for found in result["across"].values():
            assert apart(found["ddp"]["weights"], found["fsdp"]["weights"]) < CLOSE
            assert found["ddp"]["updates"] == found["fsdp"]["updates"]
            assert found["fsdp"]["copies"], "replicas are alike, bitwise"
            assert found["fsdp"]["again"] == pytest.approx(found["fsdp"]["val_loss"])
    methods = [list(result["across"].values()) for result in four_and_two]
    moved = [[found["fsdp"]["bytes"] > 0 for found in each] for each in methods]
    assert moved == [[each] * len(methods[0]) for each in (True, True, False, False, True, True)], (
        "one replica of each group speaks"
    )
    assert all(found["fsdp"]["updates"] > 0 for found in methods[0][:-1]), "those with a server"


def test_groups_of_different_sizes_go_on_from_a_checkpoint(four_and_two: list[dict[str, Any]]) -> None:
    (of_recorder,) = four_and_two[0]["resumes"]["saved"]["saved"]
    assert len(of_recorder["states"]) == 18
    for result in four_and_two:
        found = result["resumes"]
        assert apart(found["saved"]["after"], found["again"]["after"]) == 0, "with what groups and servers knew"
        assert found["again"]["loaded"] == found["file"]["loaded"] == of_recorder
        (of_one_group,) = found["file"]["saved"]
        (of_one_group,) = found["file"]["saved"]
        assert found["DDP"]["loaded"] == of_one_group
        assert apart(found["file"]["after"], of_one_group["weights"]) == 0


def test_a_killed_member_costs_its_group_all_replicas_and_no_other_group(
    four_and_two: list[dict[str, Any]], two_groups: list[dict[str, Any]]
) -> None:
    first, second, *lost = four_and_two
    assert all("dies_in_replicas" not in each for each in lost)
    assert first["dies_in_replicas"]["lost"] == second["dies_in_replicas"]["lost"] == [2, 3, 4, 5]
    assert first["dies_in_replicas"]["val_loss"] == second["dies_in_replicas"]["val_loss"]
    for result in two_groups:
        assert result["resumes"]["before death"]["loaded"] == first["dies_in_replicas"]["saved"]["held"]


REGROUPS: list[dict[str, Any]] = [
    {"method": "hardsync", "from": 1, "to": [2, 1]},
    {"method": "local_sgd:period=2", "from": 2, "to": [1, 2], "extra": {"compression": "bf16"}},
    {"method": "diloco:period=2", "from": 1, "to": [2], "kind": "Parallel", "insides": ["ddp", "1 x 2"]},
]


@pytest.fixture(scope="module")
def regrouped(is_all: bool) -> list[dict[str, Any]]:
    """What four ranks report, that hold a model in twos."""
    rows = REGROUPS if is_all else REGROUPS[1:]
    finished = run("inside.py", {"what": ["regroups", "fails"], "regroups": rows, "devices": 4, "servers": 15})
    return [finished.results[rank] for rank in range(4)]


@pytest.mark.parametrize(
    "row",
    [pytest.param(REGROUPS[0], marks=pytest.mark.exhaustive), *REGROUPS[1:]],  # the second forms one group and two, too
    ids=lambda row: str(row["method"]),
)
def test_other_groups_of_shards_are_formed_in_mid_run_as_of_whole_models(
    regrouped: list[dict[str, Any]], row: dict[str, Any]
) -> None:
    formed = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]]}
    for result in regrouped:
        ddp, sharded = (result["regroups"][row["method"]][inside] for inside in row.get("insides", ("ddp", "fsdp")))
        assert ddp["formed"] == sharded["formed"] == [formed[groups] for groups in row["to"]]
        assert apart(ddp["weights"], sharded["weights"]) < CLOSE
        assert ddp["updates"] == sharded["updates"]
        assert sharded["copies"]
        assert sharded["val_loss"] == pytest.approx(ddp["val_loss"])


def test_a_fit_after_one_that_has_failed_is_like_any_other(regrouped: list[dict[str, Any]]) -> None:
    """Its mesh is one of the same ranks, and the process groups of the first one are gone."""
    for result in regrouped:
        said, weights = result["fails"]
        assert len(said) == 2, "between two batches, and inside a forward pass"
        assert all("an error of the user's" in each for each in said)
        assert "net.0.weight" in weights
        assert weights == regrouped[0]["fails"][1]


# --- What is sharded, and what is refused ----------------------------------------------------------------------------


def test_blocks_are_the_layers_of_lists_and_what_is_tied_stays_with_what_holds_both() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tied = nn.Linear(2, 2)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), tied, nn.Tanh()])
            self.extra = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.head = nn.Linear(2, 2)
            self.head.weight = tied.weight

    net = Tied()
    assert list(_blocks(net)) == [net.layers[0], *net.extra]
    assert list(_blocks(nn.Linear(2, 2))) == []


def test_what_is_unfrozen_while_it_is_gathered_is_trained() -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
        for layer in net:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        with torch.no_grad():
            net(torch.ones(1, 2))
        net[0].requires_grad_(True)
        net[1].bias.requires_grad_(False)
        assert not isinstance(net[0].weight, DTensor), "validation leaves it gathered"
        reshard(net)
        assert isinstance(net[0].weight, DTensor)
        assert [each.requires_grad for each in net.parameters()] == [True, True, True, False]
        net(torch.ones(1, 2)).sum().backward()
        assert [each.grad is not None for each in net.parameters()] == [True, True, True, False]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "diloco:period=4,fragments=2"}, ["fragments=2", "fragments=1"]),
        ({"server": Server(count=2)}, ["Server(count=2)", "leave it out"]),
        ({"server": "per-node"}, ['server="per-node"', "leave it out"]),
        (
            {"server": Server(record="run.jsonl")},
            ["Server(record='run.jsonl')", "leave record= or model_parallel= out"],
        ),
        ({"merged": "head"}, ["merged='head'", "leave merged= or model_parallel= out"]),
        ({"validation": "published"}, ['validation="published"', 'validation="wait"']),
        ({"rebalance": "auto"}, ['rebalance="auto"', 'pass rebalance="off"']),
        ({"find_unused_parameters": True}, ["find_unused_parameters=True", "leave it or model_parallel= out"]),
    ],
    ids=str,
)
def test_what_needs_the_model_whole_is_refused_at_construction(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OmniStrategy(groups=2, model_parallel="fsdp", **options)
    for word in [*words, 'model_parallel="fsdp"']:
        assert word in str(caught.value)


def test_a_refusal_names_the_sharding_as_it_was_given() -> None:
    with pytest.raises(ConfigurationError, match=r"^merged='head' and model_parallel=FSDP\(shards=2\): "):
        OmniStrategy(groups=2, model_parallel=FSDP(shards=2), merged="head")


@pytest.mark.parametrize(
    ("devices", "shards", "words"),
    [
        (3, None, "groups of 1 or 2 ranks"),
        (2, None, "one rank each"),
        (5, 2, "5 ranks, of which 2 hold a model together"),
        (4, 4, "groups=2, but 4 ranks hold a model together"),
    ],
)
def test_groups_whose_members_cannot_have_like_shares_are_refused_before_any_process_starts(
    devices: int, shards: int | None, words: str
) -> None:
    strategy = OmniStrategy(groups=2, model_parallel=FSDP(shards=shards))
    with pytest.raises(ConfigurationError, match=words):
        Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)


@pytest.mark.parametrize(
    ("nodes", "shards", "found"), [([2, 4], None, 2), ([4, 6], 2, 2), ([4, 6], None, 0), ([4, 6], 4, 0)]
)
def test_the_smallest_group_is_one_replica_unless_one_says_otherwise(
    nodes: list[int], shards: int | None, found: int
) -> None:
    if found:
        assert sizes_in(Topology.by_node(nodes), FSDP(shards), nodes) == (found, 1)
        return
    with pytest.raises(ConfigurationError, match=r"groups of 4 or 6 ranks.*so that its size is a multiple"):
        sizes_in(Topology.by_node(nodes), FSDP(shards), nodes)


def test_states_are_of_the_parameters_whose_numbers_the_saved_parameter_groups_have() -> None:
    """ModelParallelStrategy counts frozen parameters, too."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        net[0].bias.requires_grad_(False)
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        trained = [each for each in net.parameters() if each.requires_grad]
        states = {
            number: {"momentum_buffer": torch.ones(each.shape)} for number, each in zip((0, 2, 3), trained, strict=True)
        }
        saved = {"state": states, "param_groups": [{"params": [0, 2, 3]}]}
        loaded = state_rows(saved, torch.optim.SGD(trained, lr=0.1))
        assert loaded["param_groups"] == saved["param_groups"]
        for parameter, (number, values) in zip(trained, loaded["state"].items(), strict=True):
            assert number in states
            assert isinstance(parameter, DTensor)
            buffer = values["momentum_buffer"]
            assert (buffer.shape, buffer.placements) == (parameter.shape, parameter.placements)
            assert buffer.to_local().shape == parameter.to_local().shape
    finally:
        dist.destroy_process_group()


def test_a_hook_of_an_earlier_run_is_taken_away() -> None:
    """Which would average with ranks of groups that are no more."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    seen: list[int] = []
    try:
        net = nn.Sequential(nn.Linear(2, 2))
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        average_over_replicas(net, None)
        for mean, calls in ((lambda gradient: seen.append(gradient.numel()), [6]), (None, [6])):
            average_over_replicas(net, mean)
            net(torch.ones(1, 2)).sum().backward()
            assert seen == calls
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_user_s_all_reduce_hook_is_not_overwritten_by_that_of_replicas(is_late: bool) -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    seen: list[int] = []
    try:
        net = nn.Sequential(nn.Linear(2, 2))
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        if is_late:
            average_over_replicas(net, nn.Identity())
        net.set_all_reduce_hook(lambda gradient: seen.append(gradient.numel()))  # type: ignore[operator]
        with pytest.raises(
            UnsupportedError, match=r"set_all_reduce_hook\(\) of .*leave it out, or pass as many groups="
        ):
            average_over_replicas(net, nn.Identity())
        average_over_replicas(net, None)
        net(torch.ones(1, 2)).sum().backward()
        assert seen == [6], "with one replica in a group it stays"
    finally:
        dist.destroy_process_group()


def test_optimizers_that_mix_numbers_are_refused_where_servers_step() -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.ones(2))])
    with pytest.raises(UnsupportedError, match="Adafactor is not known to treat each number by itself"):
        check_by_parts(AsyncSGD(), optimizer, 'model_parallel="fsdp"')
    check_by_parts(LocalSGD(), optimizer, 'model_parallel="fsdp"')


def test_a_tuner_that_forms_groups_is_refused() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OmniStrategy(groups=1, model_parallel="fsdp"),
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(UnsupportedError, match="OmniTuner forms other groups"):
        OmniTuner().setup(trainer, trainer.lightning_module, "fit")


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "WeightAveraging"])
def test_callbacks_that_average_weights_are_refused_where_each_rank_has_a_part_of_them(name: str) -> None:
    options = {"swa_lrs": 0.1} if name == "StochasticWeightAveraging" else {}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=OmniStrategy(groups=1, model_parallel="fsdp"),
        callbacks=[getattr(callbacks, name)(**options)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(UnsupportedError, match="StochasticWeightAveraging: what they keep is whole"):
        trainer.fit(BoringModel())
