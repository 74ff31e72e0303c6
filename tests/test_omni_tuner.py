"""OmniTuner in real processes: nothing of a probe is left behind, all ranks agree, trouble ends in a stated choice."""

from __future__ import annotations

import csv
import html
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Process
from runs import Run, Running, run, run_nodes

from lightning_omni.report import TuningReport
from lightning_omni.report.digest import duration, number

pytestmark = [pytest.mark.slow, pytest.mark.processes]

EVEN = {"seconds": {"0": 5e-4, "1": 5e-4}, "emulated": True, "trainer": {"max_epochs": 4}, "data": {"samples": 512}}
"""How many probes a budget pays for then depends on the devices, and not on what else this machine has to do."""
LONGER = {"data": {"samples": 1024}}
SHORT = {"trainer": {"max_epochs": 2}}
"""One probe is enough: what it leaves behind is looked for, not what is chosen."""
ONCE = {"budget": 0.4, "retune_every": None}
HERE = {"groups": [1], "momentum": 0.9, "lr": 0.05, "rebalance": False}
FITS: dict[str, dict[str, Any]] = {
    "plain": SHORT,
    "no budget": {**SHORT, "tuner": {"budget": 0.0}},
    "tuned": {"tuner": {**ONCE, "budget": 0.8}, "seconds": {"0": 2e-3, "1": 2e-3}},
    "tuned by the same tuner": {**SHORT, "tuner": ONCE, "again": True},
    "hooks of a module": {**SHORT, "tuner": ONCE, "hooks": True},
    "nothing to choose": {**SHORT, "tuner": {**ONCE, "space": HERE}},
    "warm-up": {**SHORT, "tuner": {**ONCE, "space": {"lr": [0.01, 0.5]}}, "warmup": True},
    "too large a step": {"tuner": ONCE, "lr": 1e9},
    "a loss that is none": {**SHORT, "tuner": {**ONCE, "target": 99.0, "mode": "max"}, "nan_at": 3},
    "groups before": {"tuner": {"budget": 0.4, "target": 1e-4}, "strategy": {"groups": 2}, **LONGER},
    "cut short": {
        "tuner": {**ONCE, "target": 1e9},
        "seconds": {"0": 2e-3, "1": 2e-3},
        "trainer": {"max_epochs": 4, "max_steps": 36},  # an eighth of the second epoch
        "strategy": {"servers": 2},
        "logger": True,
    },
    "local steps": {**SHORT, "tuner": ONCE, "strategy": {"method": "local_sgd:period=4"}},
    "a dimension of the user's own": {
        "tuner": {"budget": 0.97, "retune_every": None, "search": "random", "space": {**HERE, "groups": [2]}},
        "trainer": {"max_epochs": 10},
        **LONGER,
        "exponential": True,  # two groups are faster
        "sends": 0.5,
        "sent": [0.5, 0.25, 0.1],
    },
    "a sender that remembers": {"tuner": {"budget": 0.9, "space": {**HERE, "groups": [2]}}, "sends": 0.1},
}

WRONG: dict[str, Any] = {"is_refused": True, **LONGER, "trainer": {"max_epochs": 2, "num_sanity_val_steps": 1}}
MONITORS: dict[str, dict[str, Any]] = {
    "a metric of steps": {**WRONG, "tuner": {"target": 1e-4, "monitor": "train_loss"}, "logs": True},
    "a wrong name": {
        **WRONG,
        "tuner": {"target": 1e-4, "monitor": "val_los", "mode": "min"},
        "strategy": {"groups": 2},
        "logs": True,
    },
    "a wrong name, unchecked": {
        **WRONG,
        "tuner": {"target": 1e-4, "monitor": "los", "mode": "min"},
        "trainer": {"max_epochs": 9},
    },
    "no validation": {**WRONG, "tuner": {"target": 1e-4}, "trainer": {"limit_val_batches": 0}},
}
NOWHERE = {"strategy": {"host": "203.0.113.9"}}
"""A server is to listen on an address that this machine has not."""
GROUPS: dict[str, Any] = {
    "tuner": {"search": "forecast", "space": {"rebalance": False, "wire": "fp32"}},
    "seconds": {"0": 2e-3, "1": 2e-3},
    "exponential": True,
    **SHORT,
}
"""Two groups are faster."""
SERVERLESS: dict[str, dict[str, Any]] = {
    "no server": {**GROUPS, **NOWHERE},
    "no server for one rank": {**GROUPS, "keyless": True},
    "no server to probe with": {**GROUPS, **NOWHERE, "tuner": ONCE},
    "no server any more": {**GROUPS, **NOWHERE, "trainer": {"max_epochs": 3}},
}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank saw of every fit, and what was printed."""
    saved = str(tmp_path_factory.mktemp("checkpoints") / "tuned.ckpt")
    fits = {**FITS, "tuned": {**FITS["tuned"], "save": saved}, "resumed": {**FITS["tuned"], "ckpt_path": saved}}
    fits["resumed"]["trainer"] = {"max_epochs": 5}
    fits |= MONITORS
    grouped = saved.replace("tuned", "grouped")
    fits |= {"groups": {**GROUPS, "save": grouped}, **SERVERLESS}
    fits["no server any more"] = {**SERVERLESS["no server any more"], "ckpt_path": grouped}
    fits["own sampler"] = {
        "tuner": {**ONCE, "monitor": "val_acc"},
        "data": {"samples": 512, "half": True},
        "trainer": {"max_epochs": 1},
    }
    finished = run("omni_tuner.py", {"fits": [{**EVEN, **fit} for fit in fits.values()]}, timeout=600)
    found = {name: [finished.results[rank][number] for rank in (0, 1)] for number, name in enumerate(fits)}
    return {**found, "printed": [{"text": finished.output}]}


@pytest.mark.parametrize("name", list(SERVERLESS))
def test_a_run_whose_server_does_not_start_trains_on_in_one_group_and_says_why(
    fits: dict[str, list[dict[str, Any]]], name: str
) -> None:
    printed = fits["printed"][0]["text"]
    assert fits["groups"][0]["setting"]["groups"] == 2
    for rank in fits[name]:
        assert rank["setting"]["groups"] == 1
        assert rank["world"][0] == 1
        assert rank["momentum"] == 0.9
        assert len(rank["last_epoch"]) == 256  # half of the samples
    assert fits[name][0]["weights"] == fits[name][1]["weights"]
    assert printed.count("the run stays in one group, because several need a parameter server") == len(SERVERLESS)
    assert printed.count("or an address of this machine (host= or --host)") == len(SERVERLESS) - 1
    assert "and this rank has none: set it to the same key for all ranks" in printed


@pytest.mark.parametrize("name", [name for name in FITS if "tuner" in FITS[name]])
def test_after_a_search_the_state_is_that_of_before(fits: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank in fits[name]:
        assert rank["before"] == rank["after"]
        assert len(rank["before"]) == 1


@pytest.mark.parametrize("name", [name for name in FITS if "tuner" in FITS[name] and name != "no budget"])
def test_all_ranks_take_the_same_decision(fits: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, other = fits[name]
    assert one["setting"] == other["setting"] is not None
    assert (one["lr"], one["momentum"]) == (other["lr"], other["momentum"])
    assert one["weights"] == other["weights"]
    assert one["tried"], "rank 0 searches"


@pytest.mark.parametrize(
    ("name", "servers"),
    [
        ("plain", [False, False]),
        ("no budget", [False, False]),
        ("nothing to choose", [False, False]),
        ("tuned", [True, True]),
        ("own sampler", [True, False]),
    ],
)
def test_a_server_is_started_at_launch_if_it_may_be_needed_and_stays_if_it_is(
    fits: dict[str, list[dict[str, Any]]], name: str, servers: list[bool]
) -> None:
    assert [rank["servers"] for rank in fits[name]] == [servers, [False, False]]


def test_a_budget_of_nothing_changes_nothing_to_the_bit(fits: dict[str, list[dict[str, Any]]]) -> None:
    for plain, tuned in zip(fits["plain"], fits["no budget"], strict=True):
        assert plain["weights"] == tuned["weights"]
        assert "too small for one probe" in tuned["problem"]
        assert not tuned["tried"]


def test_probes_that_lead_to_no_change_change_nothing_to_the_bit(fits: dict[str, list[dict[str, Any]]]) -> None:
    for plain, tuned in zip(fits["plain"], fits["nothing to choose"], strict=True):
        assert plain["weights"] == tuned["weights"]
        assert plain["first"] == tuned["first"]
        assert plain["steps"] == tuned["steps"]
    assert fits["nothing to choose"][0]["tried"]


def test_an_epoch_is_still_one_pass_over_the_data(fits: dict[str, list[dict[str, Any]]]) -> None:
    for name, samples in (("tuned", 512), ("groups before", 1024)):
        assert sorted(number for rank in fits[name] for number in rank["last_epoch"]) == list(range(samples))


def test_what_a_probe_did_not_push_is_not_the_runs_to_push(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["a sender that remembers"]:
        before, after = rank["owed"]
        assert before == after == [[]]
    assert {setting["groups"] for setting, _ in fits["a sender that remembers"][0]["tried"]} == {1, 2}


def test_a_dimension_of_the_users_own_is_tried_and_groups_are_formed_with_its_value(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    tried = {dict(setting["further"])["sent"] for setting, _ in fits["a dimension of the user's own"][0]["tried"]}
    assert 0.5 in tried
    assert len(tried) > 1
    assert tried <= {0.5, 0.25, 0.1}
    for rank in fits["a dimension of the user's own"]:
        chosen = rank["setting"]
        assert rank["sent"] == dict(chosen["further"])["sent"]
        if chosen["groups"] == 2:  # where pushes in any other format than the one agreed on would be refused
            assert rank["updates"] > 0


def test_a_report_counts_the_runs_own_updates(fits: dict[str, list[dict[str, Any]]]) -> None:
    probed = [name for name in FITS if {setting["groups"] for setting, _ in fits[name][0]["tried"]} >= {1, 2}]
    assert {fits[name][0]["setting"]["groups"] for name in probed} >= {1}
    for name in probed:
        for rank in fits[name]:
            # Not where two groups were chosen and rolled back: these trained for a while.
            if rank["setting"]["groups"] == fits[name][0]["chosen"] == 1:
                epochs = FITS[name].get("trainer", {}).get("max_epochs", 4)
                samples = FITS[name].get("data", EVEN["data"])["samples"]
                assert (rank["updates"], rank["staleness"]) == (epochs * samples // 16, 0), name


def test_one_group_and_all_groups_are_tried(fits: dict[str, list[dict[str, Any]]]) -> None:
    assert {1, 2} <= {setting["groups"] for setting, _ in fits["tuned"][0]["tried"]}


def test_a_second_fit_is_searched_for_itself(fits: dict[str, list[dict[str, Any]]]) -> None:
    again = fits["tuned by the same tuner"]
    assert again[0]["searches"] == 1
    for rank in again:
        assert len(rank["before"]) == 1
        assert rank["momentum"] == rank["setting"]["momentum"]


def test_samplers_of_a_users_own_are_left_alone(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["own sampler"]:
        assert "a sampler of your own" in rank["problem"]
        assert not rank["tried"]
        assert rank["steps"] == 16


def test_a_schedule_keeps_its_shape(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["warm-up"]:  # long over: the rate is the one that was chosen
        assert rank["lr"] == pytest.approx(rank["setting"]["lr"])
        assert rank["momentum"] == rank["setting"]["momentum"]


def test_if_everything_diverges_the_users_setting_stays(fits: dict[str, list[dict[str, Any]]]) -> None:
    first = fits["too large a step"][0]
    assert all("not finite" in problem for _, problem in first["tried"])
    assert "diverged" in first["why"]
    assert first["lr"] == 1e9


def test_a_loss_that_is_not_finite_ends_its_probe_only(fits: dict[str, list[dict[str, Any]]]) -> None:
    first = fits["a loss that is none"][0]
    assert "not finite" in first["tried"][0][1]
    assert first["steps"] >= 64


def test_a_target_that_is_never_reached_is_said(fits: dict[str, list[dict[str, Any]]]) -> None:
    printed = fits["printed"][0]["text"]
    assert "val_loss has not reached 99: the best was" in printed
    assert "val_loss has not reached 0.0001: the best was" in printed


def test_a_monitor_that_nothing_is_compared_with_is_said_to_be_unused(fits: dict[str, list[dict[str, Any]]]) -> None:
    assert "monitor='val_acc' is not used: it is compared with target=" in fits["printed"][0]["text"]


def test_a_resumed_run_goes_on_with_what_was_chosen(fits: dict[str, list[dict[str, Any]]]) -> None:
    for tuned, resumed in zip(fits["tuned"], fits["resumed"], strict=True):
        assert resumed["setting"] == tuned["setting"]
        assert resumed["lr"] == pytest.approx(tuned["setting"]["lr"])
        assert len(resumed["last_epoch"]) < 512
    assert fits["resumed"][0]["tried"] == fits["tuned"][0]["tried"]


def test_a_monitor_that_is_not_logged_is_refused_before_the_first_search(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["a wrong name"]:
        assert "monitor='val_los': no metric of that name is logged; did you mean 'val_loss'?" in rank["refused"]
        assert "train_loss" in rank["refused"]
        assert not rank["tried"]
        assert rank["steps"] <= 1


def test_without_a_sanity_check_the_first_validation_tells(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["a wrong name, unchecked"]:
        assert "monitor='los': no metric of that name" in rank["refused"]
        assert len(rank["last_epoch"]) <= 1024


def test_a_target_that_would_not_be_read_is_refused(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["no validation"]:
        assert "pass validation data, or target=None" in rank["refused"]
        assert rank["steps"] == 0


def test_a_metric_that_only_the_training_step_logs_may_be_monitored(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["a metric of steps"]:
        assert rank["refused"] == ""
        assert rank["before"] == rank["after"]
    assert fits["a metric of steps"][0]["tried"]


def test_no_more_samples_a_second_are_told_than_the_ranks_can_train(fits: dict[str, list[dict[str, Any]]]) -> None:
    ((_, rate),) = fits["cut short"][0]["in_training"][-1]
    assert 0 < rate <= 2 / 2e-3


def test_each_figure_of_a_run_is_the_same_wherever_it_is_told(fits: dict[str, list[dict[str, Any]]]) -> None:
    files = fits["cut short"][0]["files"]
    report = TuningReport.from_dict(json.loads(files["omni-tuning.json"]))
    page, times = html.unescape(files["omni-tuning.html"]), report.times
    assert times is not None
    assert times.tuning == pytest.approx(sum(each.search.spent for each in report.rounds))
    rows = list(csv.DictReader(io.StringIO(files["metrics.csv"])))
    for name, value in times.metrics.items():
        assert [float(row[name]) for row in rows if row.get(name)][-1] == pytest.approx(value), name
    assert times.to_target is not None
    assert times.tuning <= times.to_target <= times.total
    assert times.sentence in fits["printed"][0]["text"]
    assert f"<td>{times.sentence.removeprefix('the target was ')}</td>" in page
    assert f"<td>{duration(times.tuning)}</td>" in page
    assert report.digests[0].expense in page
    ((groups, rate),) = fits["cut short"][0]["in_training"][-1]
    assert report.rounds[-1].measured_after == {groups: rate}
    assert rate * times.training >= 0.9 * 34 * 16
    assert f'<td class="number">{number(rate)}</td>' in page


def test_what_exchanges_take_is_noted_with_the_number_of_servers(fits: dict[str, list[dict[str, Any]]]) -> None:
    report = TuningReport.from_dict(json.loads(fits["cut short"][0]["files"]["omni-tuning.json"]))
    observed = [each for round_ in report.rounds for each in round_.search.measured]
    assert {each.servers for each in observed if len(each.groups) > 1} == {2}


def test_the_users_rate_is_that_of_all_ranks_if_several_groups_come_first(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    tried = [setting for setting, _ in fits["groups before"][0]["tried"]]
    alone, apart = ([(each["momentum"], each["lr"]) for each in tried if each["groups"] == groups] for groups in (1, 2))
    assert alone[0] == (0.9, 0.05)
    assert apart[0] == pytest.approx((0.8, 0.05))


def test_nodes_that_begin_as_groups_are_tuned_about_the_users_rate() -> None:
    """Two nodes with one rank each, which are groups of their own unless told otherwise."""
    # Steps take so long that several probes fit in, whatever else this machine does.
    nodes = {**EVEN, "seconds": {"0": 5e-3, "1": 5e-3}, "devices": 1, "tuner": {**ONCE, "budget": 0.9}}
    nodes["trainer"] = {"max_epochs": 4, "num_nodes": 2}
    ended = run_nodes("omni_tuner.py", {"fits": [nodes]})
    first, second = (each.results[0][0] for each in ended)
    assert first["weights"] == second["weights"]
    tried = {setting["groups"]: (setting["momentum"], setting["lr"]) for setting, _ in reversed(first["tried"])}
    assert tried[1] == (0.9, 0.05)
    assert tried[2] == pytest.approx((0.8, 0.05))
    step = first["lr"] * first["setting"]["groups"] / (1 - first["momentum"])
    assert step <= 0.05 / (1 - 0.9) * 1.01


# --- Trouble ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four() -> Run:
    """A straggler among four; a choice that diverges; nothing to choose; then a worker that dies in a probe."""
    slow = {str(rank): 8e-3 if rank == 3 else 1e-3 for rank in range(4)}
    even = {str(rank): 5e-4 for rank in range(4)}
    straggling = {"devices": 4, "seconds": slow, "trainer": {"max_epochs": 2}, "tuner": {**ONCE, "budget": 0.9}}
    straggling["emulated"] = True
    diverged = {
        **straggling,
        "tuner": {**ONCE, "budget": 0.9, "space": {"rebalance": False}},
        "diverged_after": 40,
        "trainer": {"max_epochs": 50, "max_steps": 192},
    }
    plain = {"devices": 4, "seconds": even, "trainer": {"max_epochs": 1}, "data": {"samples": 1024}}
    dying = {**plain, "trainer": {"max_epochs": 2}, "tuner": ONCE, "dies": [3, 1]}
    searched = {**plain, "tuner": {**ONCE, "budget": 0.9, "space": HERE}}
    return run("omni_tuner.py", {"fits": [straggling, diverged, plain, searched, dying]}, timeout=400)


def test_sums_are_rounded_as_if_there_had_been_no_probes(four: Run) -> None:
    for rank in range(4):  # of two ranks' numbers the sum is the same in any order
        plain, searched = four.results[rank][2:4]
        assert plain["weights"] == searched["weights"]
    assert four.results[0][3]["tried"]


def test_a_straggler_is_not_waited_for(four: Run) -> None:
    for rank in range(4):
        setting = four.results[rank][0]["setting"]
        assert setting["groups"] > 1 or setting["rebalance"], setting
        assert four.results[rank][0]["before"] == four.results[rank][0]["after"]


def test_a_run_that_diverges_with_the_choice_is_rolled_back_and_goes_on_as_the_user_set_it(four: Run) -> None:
    for rank in range(4):
        diverged = four.results[rank][1]
        assert {setting["groups"] for setting, _ in four.results[0][1]["tried"]} >= {1, 4}
        assert diverged["setting"]["groups"] == 1
        assert (diverged["lr"], diverged["momentum"]) == pytest.approx((0.05, 0.9))
        assert diverged["logged"]["val_loss"] < 1.0
        assert diverged["max_steps"] < 1000  # as many as DDP would have left, after steps of several groups
    assert "it is rolled back to the weights that it had after the last good epoch or search" in four.output


def test_a_worker_lost_while_tuning_costs_the_search_and_not_the_run(four: Run) -> None:
    alive = [four.results[rank][4] for rank in range(3)]
    assert len(four.results[3]) == 4
    for rank in alive:
        assert rank["before"] == rank["after"]
        assert rank["setting"]["groups"] == 1
    assert "rank 3 was lost while tuning" in alive[0]["why"]
    assert {number for rank in alive for number in rank["last_epoch"]} == set(range(1024))


def test_a_worker_lost_in_training_is_not_counted_on_later() -> None:
    seconds = {"0": 1e-3, "1": 1e-3, "2": 8e-3}
    tuner = {"budget": 0.9, "space": {"rebalance": False, "groups": [1, 3]}}
    fit = {"devices": 3, "seconds": seconds, "trainer": {"max_epochs": 3}, "tuner": tuner, "dies_in_training": [2, 2]}
    finished = run("omni_tuner.py", {"fits": [{**fit, "data": {"samples": 1536}}]}, timeout=200)
    assert sorted(finished.results) == [0, 1]
    assert "OmniTuner: retuning, because" in finished.output
    for each in finished.results.values():
        assert each[0]["setting"]["groups"] <= 2


def test_ctrl_c_in_a_probe_saves_the_runs_own_weights() -> None:
    fit = {**EVEN, **LONGER, "tuner": ONCE, "interrupted": 5, "exception_checkpoint": True}
    with Running("omni_tuner.py", {"fits": [fit]}) as running:
        finished = running.wait(200)
        assert finished.code != 0
        assert not running.survivors
        checkpoint = torch.load(Path(running.folder) / "stopped.ckpt", map_location="cpu", weights_only=False)
    weights = [value for name, value in checkpoint["state_dict"].items() if name.startswith("net.")]
    assert all(torch.equal(one, other) for one, other in zip(weights, initial_weights(), strict=True))
    assert "OmniTuner" not in finished.output.split("Detected KeyboardInterrupt")[-1]
    assert "in 1 group, which is DistributedDataParallel" in finished.output
    assert "Pass groups=" not in finished.output, "the tuner chooses them"


def initial_weights() -> list[torch.Tensor]:
    """Those of the script's module after ``seed_everything(1)``."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
        )
    return [value.detach() for value in net.state_dict().values()]


def test_a_strategy_without_groups_is_refused() -> None:
    code = (
        "import pytorch_lightning as pl, lightning_omni as omni\n"
        "from pytorch_lightning.demos.boring_classes import BoringModel\n"
        "pl.Trainer(accelerator='cpu', logger=False, enable_checkpointing=False, callbacks=[omni.OmniTuner()])"
        ".fit(BoringModel())\n"
    )
    refused = Process([sys.executable, "-c", code])
    assert refused.end(timeout=200) != 0
    refused.kill()
    assert "pass Trainer(strategy=OmniStrategy())" in refused.output
