"""Every method with real processes and real sockets: it trains, all ranks agree, it resumes, regroups and survives."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from core import REGISTRY, read_record, replay
from runs import run
from torch import Tensor, nn

from lightning_omni.methods import METHODS

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "async_sgd": [{}, {"staleness_aware": True}, {"bound": 1}],
    "hardsync": [{}],
    "softsync": [{"n": 2}],
    "downpour": [{"n_push": 2, "n_fetch": 3, "warm_start": 4}, {"n_push": 2, "n_fetch": 2, "send": "updates"}],
    "elastic_averaging": [{"period": 3}],
    "gossip": [{"kind": "pull"}, {"kind": "push"}],
    "local_sgd": [{"period": 3, "warmup_steps": 2}, {"period": 4, "fragments": 2, "alpha": 0.25}],
    "diloco": [{"period": 3}, {"period": 4, "fragments": 2, "delay": 1}],
    "async_diloco": [{"period": 4}, {"period": 4, "fragments": 2}],
    "decoupled_diloco": [{"period": 4, "fragments": 2}],
    "delay_compensated": [{"strength": 2.0, "adaptive": True}],
    "ringmaster_asgd": [{"max_staleness": 2}],
}
POINTS = [{"name": name, **settings} for name, each in SETTINGS.items() for settings in each]
NAMES = ["-".join(map(str, point.values())) for point in POINTS]
TRAINER = {"max_epochs": 2}
MOMENTUM: dict[str, Any] = {"momentum": 0.5, "nesterov": True}

# Of each method the settings that take most of its paths; the others are cells of tests/unit/wire/test_matrix.py, too.
ALWAYS = {
    NAMES.index(name)
    for name in (
        "async_sgd-1", "downpour-2-3-4", "gossip-push", "local_sgd-4-2-0.25", "diloco-3", "async_diloco-4-2",
    )
}  # fmt: skip
ALWAYS |= {number for number, point in enumerate(POINTS) if len(SETTINGS[point["name"]]) == 1}
# In groups of two, one method of each kind: what the others change does not depend on the size of a group.
PAIRED = [NAMES.index(name) for name in ("async_sgd", "downpour-2-3-4", "gossip-pull", "local_sgd-3-2")]
CASES = [(4, number) for number in range(len(POINTS))] + [(2, number) for number in PAIRED]
every_case = pytest.mark.parametrize(
    ("groups", "number"),
    [
        pytest.param(
            groups,
            number,
            id=f"{NAMES[number]}-{groups}",
            marks=[pytest.mark.exhaustive] if groups == 4 and number not in ALWAYS else [],
        )
        for groups, number in CASES
    ],
)

# Deterministic methods on data that is dealt out beforehand, saved where groups are in the middle of a period.
RESUMED: list[dict[str, Any]] = [
    {"name": "hardsync"},
    {"name": "local_sgd", "period": 3},
    {"name": "diloco", "period": 3},
]
STOPPED: list[dict[str, Any]] = [{"name": "hardsync"}, {"name": "diloco", "period": 3}, {"name": "gossip"}]
REGROUPED: list[dict[str, Any]] = [
    {"name": "local_sgd", "period": 3},
    {"name": "gossip"},
    {"name": "elastic_averaging", "period": 2},
]


def in_groups(groups: int, number: int) -> list[dict[str, Any]]:
    """What each of four ranks, in that many groups, says of a point."""
    launch = launched(groups, groups == 2 or number in ALWAYS)
    return [launch[rank][number] for rank in range(4)]


@cache
def launched(groups: int, always: bool) -> dict[int, dict[int, Any]]:
    """The points of that many groups in one launch, or two with ``--all``; each rank's results by number."""
    numbers = [number for size, number in CASES if size == groups and (groups == 2 or (number in ALWAYS) == always)]
    fits = [
        {
            "method": POINTS[number],
            "groups": groups,
            "optimizer": MOMENTUM,
            "trainer": TRAINER,
            "record": f"{number}.jsonl",
        }
        for number in numbers
    ]
    results = run("methods.py", {"fits": fits}, timeout=440).results
    return {rank: dict(zip(numbers, each, strict=True)) for rank, each in results.items()}


@cache
def resumed() -> dict[int, list[Any]]:
    """For each: a whole run that saves at every epoch's end, and one that goes on from its second."""
    fits: list[dict[str, Any]] = []
    for number, method in enumerate(RESUMED):
        common = {"method": method, "optimizer": MOMENTUM, "strategy": {"data": "static"}, "data": {"samples": 256}}
        folder = f"checkpoints{number}"
        fits += [
            {**common, "trainer": {"max_epochs": 4}, "checkpoint": folder},
            {**common, "trainer": {"max_epochs": 4}, "resume": f"{folder}/epoch=1-step=16.ckpt"},
        ]
    return run("methods.py", {"fits": fits}, timeout=440).results


def test_every_method_is_tried() -> None:
    assert SETTINGS.keys() == METHODS.keys()


@every_case
def test_a_method_trains_and_all_ranks_end_with_the_same_weights(groups: int, number: int) -> None:
    results = in_groups(groups, number)
    assert len({result["end"] for result in results}) == 1
    assert results[0]["end"] != results[0]["start"]
    losses = [result["metrics"]["val_loss"] for result in results]
    assert len(set(losses)) == 1
    assert losses[0] < 0.98 * untrained(results[0])


@every_case
def test_all_ranks_validate_the_same_model(groups: int, number: int) -> None:
    evaluated = [result["evaluated"] for result in in_groups(groups, number)]
    assert len(evaluated[0]) == 2
    assert all(each == evaluated[0] for each in evaluated)


@pytest.mark.parametrize("number", PAIRED, ids=[NAMES[number] for number in PAIRED])
def test_members_keep_one_optimizer_state_where_it_steps_at_the_worker_and_in_the_end_all_ranks_have_one(
    number: int,
) -> None:
    results = in_groups(2, number)
    states = [result["state in training"] for result in results]
    if REGISTRY.from_wire(POINTS[number]).steps_at == "worker":
        assert states[0] == states[1]
        assert states[2] == states[3]
        assert states[0] != states[2]
    else:
        assert len(set(states)) == 1, "nothing: the server has it"
        assert results[0]["state"] != states[0]
    assert len({result["state"] for result in results}) == 1


class Net(nn.Module):
    """The module of the script, without Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def batch_of(epoch: int, where: range) -> tuple[Tensor, Tensor]:
    """The script's samples at these positions of an epoch, in the order that Lightning's sampler has."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3 + epoch))
    x = torch.randn(256, 12, generator=torch.Generator().manual_seed(0))[order[list(where)]]
    return x, x[:, :3].argmax(1)


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model.net(batch[0]) * model.frozen, batch[1])


def untrained(result: dict[str, Any]) -> float:
    """The validation loss of a run's initial weights."""
    model = Net()
    model.load_state_dict({name: torch.tensor(value) for name, value in result["initial"].items()})
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(loss_of(model, (x, x[:, :3].argmax(1))))


@every_case
def test_a_recorded_run_replayed_in_the_simulator_ends_with_the_same_bits(groups: int, number: int) -> None:
    if POINTS[number]["name"] == "gossip":
        pytest.skip("gossip goes past the server, and a record is of what happens at the server")
    real = in_groups(groups, number)[0]
    model = Net()
    model.load_state_dict({name: torch.tensor(value) for name, value in real["initial"].items()})
    again = replay(
        read_record(real["record"]),
        model,
        loss_of,
        batch_of,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, **MOMENTUM),
    )
    assert again.clock == real["report"]["updates"] > 0
    if REGISTRY.from_wire(POINTS[number]).evaluated == "mean":
        # The record does not say in which order the groups came to be averaged at the last synchronization.
        mean = {
            name: torch.stack(values).mean(0)
            for name, *values in zip(again.weights, *again.groups.values(), strict=True)
        }
        for name, value in mean.items():
            torch.testing.assert_close(value, torch.tensor(real["weights"][name]), rtol=1e-6, atol=1e-7)
    else:
        for name, value in again.weights.items():
            assert torch.equal(value, torch.tensor(real["weights"][name])), name


@pytest.mark.parametrize("number", range(len(RESUMED)), ids=[method["name"] for method in RESUMED])
def test_a_resumed_run_ends_as_the_uninterrupted_one_on_every_rank(number: int) -> None:
    for rank, results in resumed().items():
        whole, second_half = results[2 * number], results[2 * number + 1]
        assert second_half["end"] == whole["end"], f"rank {rank}"
        assert second_half["state"] == whole["state"], f"rank {rank}"
        assert second_half["evaluated"] == whole["evaluated"][2:]


@cache
def interrupted() -> dict[int, list[Any]]:
    """Runs that are regrouped, then runs that one group stops in the midst of an epoch."""
    common = {"groups": 4, "optimizer": MOMENTUM}
    regrouped = [
        {**common, "method": method, "trainer": TRAINER, "regroup": {"3": 2, "6": 1, "9": 4}} for method in REGROUPED
    ]
    stopped = [
        {
            **common,
            "method": method,
            "trainer": {"max_epochs": 20},
            "data": {"samples": 1024},
            "stop": {"1": 3},
            "sleep": {"0": 0.02, "2": 0.02, "3": 0.02},
        }
        for method in STOPPED
    ]
    return run("methods.py", {"fits": [*regrouped, *stopped]}, timeout=440).results


@pytest.mark.parametrize("number", range(len(REGROUPED)), ids=[method["name"] for method in REGROUPED])
def test_groups_with_weights_of_their_own_are_formed_again_and_go_on(number: int) -> None:
    results = {rank: results[number] for rank, results in interrupted().items()}
    assert len({result["end"] for result in results.values()}) == 1
    assert results[0]["metrics"]["val_loss"] < 0.98 * untrained(results[0])
    assert results[0]["report"]["groups"] == 4


@pytest.mark.parametrize("number", range(len(STOPPED)), ids=[method["name"] for method in STOPPED])
def test_a_stop_of_one_group_in_mid_epoch_ends_the_run_of_all(number: int) -> None:
    results = {rank: results[len(REGROUPED) + number] for rank, results in interrupted().items()}
    assert len({result["end"] for result in results.values()}) == 1
    assert results[1]["batches"] == 3
    # The others hear of it with their next answer, or when they have trained what they hold.
    assert all(result["batches"] <= 16 for result in results.values())


@pytest.mark.parametrize(("name", "groups"), [("local_sgd", 4), ("gossip", 2)])
def test_no_group_waits_for_a_dead_group_and_members_stay_together(name: str, groups: int) -> None:
    fits = [{"method": {"name": name}, "groups": groups, "die": {"3": 3}, "trainer": {"max_epochs": 3}}]
    results = run("methods.py", {"fits": fits}, timeout=180).results
    alive = [0, 1, 2] if groups == 4 else [0, 1]
    assert sorted(results) == alive
    assert len({results[rank][0]["end"] for rank in alive}) == 1
    assert results[0][0]["report"]["ranks_lost"] == [rank for rank in range(4) if rank not in alive]
    if groups == 2:
        assert results[0][0]["state"] == results[1][0]["state"]
