"""OmniTuner in real processes: what it refuses, what it says, what it does where ranks, servers or nodes are lost."""

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
from core import TuningReport, duration, number
from processes import Process
from runs import Running, run, run_nodes

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TUNER = {"budget": 0.9}
"""Forming groups takes as long as it does on this machine, and runs are short."""
SPACE = {"rebalance": False, "compression": "fp32"}
GROUPS: dict[str, Any] = {
    "emulated": True,
    "tuner": {**TUNER, "space": SPACE},
    "seconds": {"0": 8e-3, "1": 8e-3},
    "exponential": 1,
    "seed": 219,
    "data": {"samples": 512},
    "trainer": {"max_epochs": 2},
}
"""Two groups are faster."""
MONITORS: dict[str, dict[str, Any]] = {
    name: {"data": {"samples": 256}, "tuner": {"target": 1e-9, **given}, "trainer": {"max_epochs": 1}}
    for name, given in (("never reached", {}), ("a wrong name", {"monitor": "val_los", "mode": "min"}))
}
NOWHERE = {"strategy": {"server": {"host": "203.0.113.9"}}}
"""A server is to listen on an address that this machine has not."""
SERVERLESS: dict[str, dict[str, Any]] = {
    "no server": {**GROUPS, **NOWHERE},
    "no server for one rank": {**GROUPS, "keyless": True},
    "no server any more": {**GROUPS, **NOWHERE, "trainer": {"max_epochs": 3}},
}
FITS: dict[str, dict[str, Any]] = {
    "plain": {"seconds": {"0": 5e-4, "1": 5e-4}, "data": {"samples": 256}, "trainer": {"max_epochs": 1}},
    "nothing to choose": {
        "seconds": {"0": 5e-4, "1": 5e-4},
        "data": {"samples": 256},
        "trainer": {"max_epochs": 1},
        "tuner": {**TUNER, "space": {"groups": [1], "rebalance": False}},
    },
    "cut short": {
        **GROUPS,
        "tuner": {**TUNER, "space": SPACE, "target": 1e9},
        "trainer": {"max_epochs": 3, "max_steps": 70},
        "logger": True,
        "hooks": True,
    },
    "too slow to form": {**GROUPS, "forming": 1.0, "tuner": {"budget": 0.1, "space": SPACE}},
    "a dimension of the user's own": {
        **GROUPS,
        "tuner": {**TUNER, "space": {"rebalance": False}},
        "sends": 0.5,
        "sent": [0.5, 0.25, 0.1],
        "trainer": {"max_epochs": 4},
    },
    "a loss that is none": {**GROUPS, "nan_at": 3},
}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank saw of every fit, and what was printed."""
    saved = str(tmp_path_factory.mktemp("checkpoints") / "grouped.ckpt")
    twice = {"twice": {**GROUPS, "again": True}}
    resumed = {"resumed": {**GROUPS, "ckpt_path": saved, "trainer": {"max_epochs": 3}, "logger": True}}
    told = {"groups": {**GROUPS, "save": saved}, **twice, **FITS, **MONITORS, **resumed, **SERVERLESS}
    told["no server any more"] = {**SERVERLESS["no server any more"], "ckpt_path": saved}
    finished = run("omni_tuner.py", {"fits": list(told.values())}, timeout=600)
    found = {name: [finished.results[rank][number] for rank in (0, 1)] for number, name in enumerate(told)}
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
    assert printed.count("pass an address of this machine (Server(host=...)") == len(SERVERLESS) - 1
    assert "and this rank has none: set it to the same key for all ranks" in printed


@pytest.mark.parametrize(
    ("name", "servers"), [("plain", [False, False]), ("nothing to choose", [False, False]), ("groups", [True, True])]
)
def test_a_server_is_started_at_launch_if_it_may_be_needed(
    fits: dict[str, list[dict[str, Any]]], name: str, servers: list[bool]
) -> None:
    assert [rank["servers"] for rank in fits[name]] == [servers, [False, False]]


def test_where_nothing_is_chosen_nothing_is_changed_to_the_bit(fits: dict[str, list[dict[str, Any]]]) -> None:
    for plain, tuned in zip(fits["plain"], fits["nothing to choose"], strict=True):
        assert plain["weights"] == tuned["weights"]
        assert plain["first"] == tuned["first"]
        assert plain["steps"] == tuned["steps"]


def test_a_second_fit_is_tuned_for_itself(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["twice"]:
        assert rank["setting"]["groups"] == rank["world"][0] == 2
    assert fits["twice"][0]["searches"] == 1


def test_what_is_chosen_was_compared_with_what_scikit_optimize_proposed(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    one, other = fits["groups"][0], fits["a dimension of the user's own"][0]
    assert one["setting"] in one["considered"]
    proposed = "scikit-optimize" in one["considered_by"]
    assert proposed or one["setting"]["groups"] == 1, "where nothing pays nothing is proposed"
    assert "scikit-optimize" in other["considered_by"], "a dimension is tried, whether or not groups pay"


def test_groups_that_take_too_long_to_form_are_left_alone_and_it_says_why(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in fits["too slow to form"]:
        assert rank["setting"]["groups"] == rank["world"][0] == 1
    assert "forming groups takes" in fits["too slow to form"][0]["why"]
    assert "budget=0.1 allows" in fits["too slow to form"][0]["why"]


def test_values_of_a_dimension_of_the_users_own_are_tried_in_segments_of_the_run(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    one, other = fits["a dimension of the user's own"]
    assert one["sent"] == other["sent"] == dict(one["setting"]["further"])["sent"]
    assert one["weights"] == other["weights"]
    tried = {dict(each["further"])["sent"] for each in one["segments of the tuner"]}
    assert tried, "what was trained with is observed"
    assert tried <= {0.5, 0.25, 0.1}
    assert one["updates"] > 0, "groups agreed on the format"


def test_a_loss_that_is_no_number_changes_nothing(fits: dict[str, list[dict[str, Any]]]) -> None:
    first = fits["a loss that is none"][0]
    assert first["setting"]["groups"] == 1
    assert "lower the learning rate" in first["why"]


def test_a_target_that_is_never_reached_is_said(fits: dict[str, list[dict[str, Any]]]) -> None:
    assert "val_loss has not reached 1e-09: the best was" in fits["printed"][0]["text"]
    assert "val_los has not reached 1e-09: it was never logged in a validation" in fits["printed"][0]["text"]


def test_a_resumed_run_goes_on_with_what_was_chosen(fits: dict[str, list[dict[str, Any]]]) -> None:
    for tuned, resumed in zip(fits["groups"], fits["resumed"], strict=True):
        assert resumed["setting"] == tuned["setting"]
        assert resumed["lr"] == pytest.approx(tuned["setting"]["lr"])
        assert len(resumed["last_epoch"]) < 512
    assert fits["resumed"][0]["considered"] == fits["groups"][0]["considered"], "nothing was chosen anew"
    report = TuningReport.from_dict(json.loads(fits["resumed"][0]["files"]["omni-tuning.json"]))
    assert str(report.summaries[-1].choice.setting) in fits["resumed"][0]["files"]["omni-tuning.html"]
    assert report.written is not None
    assert report.written.hosts == ("host-0-0", "host-0-1")


def test_each_figure_of_a_run_is_the_same_wherever_it_is_told(fits: dict[str, list[dict[str, Any]]]) -> None:
    files = fits["cut short"][0]["files"]
    report = TuningReport.from_dict(json.loads(files["omni-tuning.json"]))
    page, times = html.unescape(files["omni-tuning.html"]), report.times
    assert times is not None
    assert times.tuning == pytest.approx(sum(each.search.overhead for each in report.rounds))
    rows = list(csv.DictReader(io.StringIO(files["metrics.csv"])))
    for name, value in times.metrics.items():
        assert [float(row[name]) for row in rows if row.get(name)][-1] == pytest.approx(value), name
    noise_scale = report.rounds[-1].search.observation.noise_scale
    assert noise_scale is not None
    assert [float(row["omni/noise_scale"]) for row in rows if row.get("omni/noise_scale")][-1] == pytest.approx(
        noise_scale
    )
    assert times.to_target is not None
    assert times.tuning <= times.to_target <= times.total
    assert times.sentence in fits["printed"][0]["text"]
    assert f"<td>{times.sentence.removeprefix('the target was ')}</td>" in page
    assert f"<td>{duration(times.tuning)}</td>" in page
    assert report.summaries[0].expense in page
    ((groups, rate),) = fits["cut short"][0]["in_training"][-1]
    assert report.rounds[-1].measured_after == {groups: rate}
    assert f'<td class="number">{number(rate)}</td>' in page


def test_nodes_that_begin_as_groups_are_tuned_about_the_users_rate() -> None:
    """Two nodes with one rank each, which are groups of their own unless told otherwise."""
    ended = run_nodes(
        "omni_tuner.py", {"fits": [{**GROUPS, "devices": 1, "trainer": {"max_epochs": 2, "num_nodes": 2}}]}
    )
    first, second = (each.results[0][0] for each in ended)
    assert first["weights"] == second["weights"]
    assert (first["considered"][0]["momentum"], first["considered"][0]["lr"]) == (0.9, 0.05), "of one group of all"
    assert first["considered"][0]["groups"] == 1


# --- Trouble ---------------------------------------------------------------------------------------------------------


def test_a_tuned_run_goes_on_without_a_worker_that_is_lost() -> None:
    """It dies after its first batch in groups, in whichever epoch they were chosen."""
    seconds, epochs, samples = {str(rank): 2e-3 for rank in range(3)}, 3, 768
    timed = {**GROUPS, "devices": 3, "seconds": seconds, "data": {"samples": samples}, "dies_in_groups": 2}
    timed["tuner"] = {**TUNER, "space": {"rebalance": False, "groups": [1, 3]}}
    ended = run("omni_tuner.py", {"fits": [{**timed, "trainer": {"max_epochs": epochs}}]}, timeout=300)
    one, other = (ended.results[rank][0] for rank in (0, 1))
    assert one["weights"] == other["weights"]
    lost = ended.results[2]
    before = lost["had trained of it"] if lost["died in epoch"] == epochs - 1 else []
    after = [*one["last_epoch"], *other["last_epoch"]]
    assert {*before, *after} == set(range(samples)), "they train what the lost one would have"
    assert len(set(after)) == len(after)


def test_ctrl_c_while_the_run_is_timed_saves_its_weights_and_ends_it() -> None:
    fit = {**GROUPS, "interrupted": 5, "exception_checkpoint": True}
    with Running("omni_tuner.py", {"fits": [fit]}) as running:
        finished = running.wait(200)
        assert finished.code != 0
        assert not running.survivors
        checkpoint = torch.load(Path(running.folder) / "stopped.ckpt", map_location="cpu", weights_only=False)
    assert checkpoint["global_step"] == 4
    assert "OmniTuner" not in finished.output.split("Detected KeyboardInterrupt")[-1]
    assert "in 1 group, which is DistributedDataParallel" in finished.output
    assert "Pass groups=" not in finished.output, "the tuner chooses them"


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
