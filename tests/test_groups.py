"""Training in groups, with real processes and a real server: what a LightningModule may rely on."""

from __future__ import annotations

import math
import os
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
import torch
from runs import Run, run

SLOW = {"2": 0.02, "3": 0.02}
FITS: dict[str, dict[str, Any]] = {
    "no arguments": {"strategy": {}},
    "plain": {"trainer": {"max_epochs": 2}, "test": True},
    "slow group, one-cycle schedule": {
        "sleep": {"2": 0.1, "3": 0.1},
        "schedule": "onecycle",
        "trainer": {"max_epochs": 2, "accumulate_grad_batches": 2},
    },
    "schedule by epoch": {"schedule": "step", "trainer": {"max_epochs": 2}},
    "schedule on plateau": {"schedule": "plateau", "trainer": {"max_epochs": 3}},
    "accumulation and clipping": {"trainer": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}, "net": "adam"},
    "validation in mid-epoch": {
        "sleep": SLOW,
        "checkpoint": {"monitor": "val_loss", "every_n_train_steps": 3},  # which the slow group seldom comes to
        "trainer": {"val_check_interval": 0.25, "max_epochs": 2},
    },
    "checks in mid-epoch": {"check_every": 64, "sleep": SLOW, "trainer": {"max_epochs": 2}},
    "checks of groups that accumulate": {
        "check_every": 64,
        "sleep": SLOW,
        "strategy": {"groups": 4, "method": "local_sgd:period=3"},
        "trainer": {"max_epochs": 2, "accumulate_grad_batches": 2},
    },
    "validation by batch count": {
        "trainer": {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 2}
    },
    "one batch after the last validation inside the epoch": {
        "data": {"samples": 80},
        "schedule": "step",
        "trainer": {"val_check_interval": 1, "max_epochs": 2},
    },
    "published validation, reloads": {
        "strategy": {"groups": 2, "validation": "published"},
        "trainer": {"val_check_interval": 0.25, "max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
    },
    "published validation, first in epoch 1": {
        "strategy": {"groups": 2, "validation": "published"},
        "trainer": {"check_val_every_n_epoch": 2, "max_epochs": 2},
    },
    "max_steps": {"sleep": SLOW, "trainer": {"max_steps": 12, "max_epochs": 10}},
    "max_steps by hand": {"net": "manual", "sleep": SLOW, "trainer": {"max_steps": 12, "max_epochs": 10}},
    "max_time": {"sleep": SLOW, "max_time": 1.0, "trainer": {"max_epochs": 1000}},
    "one group says stop": {"stop_at": {"0": 3, "1": 3}, "trainer": {"max_epochs": 50}},
    "overlapping, one group says stop": {
        "strategy": {"groups": 2, "overlap": True},
        "stop_at": {"0": 3, "1": 3},
        "trainer": {"max_epochs": 50},
    },
    "one rank says stop in the last hook of an epoch": {"stop_at_end_of": {"3": 1}, "trainer": {"max_epochs": 50}},
    "one group says stop where all validate": {
        "stop_where_all_validate": [2, 3],
        "trainer": {"val_check_interval": 0.25, "max_epochs": 9},
    },
    "one group says stop where all validate, static": {
        "strategy": {"groups": 2, "data": "static"},
        "stop_at": {"2": 4, "3": 4},
        "trainer": {"val_check_interval": 4, "max_epochs": 9},
    },
    "a slow group says stop, static, while the other waits in a validation": {
        "strategy": {"groups": 2, "data": "static"},
        "sleep": {"2": 0.3, "3": 0.3},
        "stop_at": {"2": 3, "3": 3},
        "trainer": {"val_check_interval": 5, "max_epochs": 9},
    },
    "a slow group says stop, static, of which the other hears in its last batch's validation": {
        "strategy": {"groups": 2, "data": "static", "method": "local_sgd:period=99"},
        "sleep": {"2": 0.3, "3": 0.3},
        "stop_at": {"2": 3, "3": 3},
        "trainer": {"max_epochs": 9},
    },
    "a slow group says stop, static, while the other waits at its end": {
        "strategy": {"groups": 2, "data": "static", "method": "local_sgd:period=99"},
        "sleep": {"2": 0.3, "3": 0.3},
        "stop_at": {"2": 6, "3": 6},
        "trainer": {"val_check_interval": 5, "max_epochs": 9},
    },
    "early stopping": {
        "early": {"monitor": "val_loss", "min_delta": 10.0, "patience": 0},
        "trainer": {"max_epochs": 50},
    },
    "two optimizers by hand": {"net": "manual"},
    "two optimizers by hand, overlapping": {"net": "manual", "strategy": {"groups": 2, "overlap": True}},
    "overlapping, accumulation, validation in mid-epoch": {
        "strategy": {"groups": 2, "overlap": True},
        "sleep": SLOW,
        "trainer": {"accumulate_grad_batches": 2, "val_check_interval": 0.25, "max_epochs": 2},
    },
    "overlapping, gradients that are not finite": {
        "net": "nan",
        "strategy": {"groups": 2, "overlap": True},
        "data": {"samples": 512},
    },
    "static": {"strategy": {"groups": 2, "data": "static"}, "sleep": SLOW, "sync": True},
    "static, max_steps": {
        "strategy": {"groups": 2, "data": "static"},
        "sleep": {"2": 0.3, "3": 0.3},
        "trainer": {"max_steps": 6, "max_epochs": 9},
    },
    "iterable": {"loader": "iterable"},
    "own sampler": {"loader": "sampler"},
    "own distributed sampler": {"loader": "own distributed"},
    "loader workers": {"data": {"num_workers": 1, "persistent_workers": True}, "trainer": {"max_epochs": 2}},
    "bf16": {"trainer": {"precision": "bf16-mixed"}},
    "fp16": {"trainer": {"precision": "16-mixed", "gradient_clip_val": 0.5}},
    "uneven groups": {"strategy": {"groups": 3}},
    "groups of one": {"strategy": {"groups": 4}, "data": {"batch_size": 7}},
    "gradients that are not finite": {"net": "nan", "data": {"samples": 512}},
    "awkward buffers": {"net": "buffers", "validate_first": True, "trainer": {"val_check_interval": 0.5}},
    "stop put off by min_epochs": {
        "early": {"monitor": "val_loss", "min_delta": 10.0, "patience": 0},
        "trainer": {"val_check_interval": 0.5, "min_epochs": 3, "max_epochs": 9},
    },
    "one group skips the rest of its epoch": {"skip_at": {"0": 2, "1": 2}, "sleep": SLOW, "trainer": {"max_epochs": 2}},
    "one group stops at its last batch": {
        "stop_at": {"0": 1, "1": 1},
        "trainer": {"max_epochs": 9},
        "data": {"samples": 64},
    },
    "limited batches": {"trainer": {"limit_train_batches": 3, "max_epochs": 2}},
    "fast dev run": {"trainer": {"fast_dev_run": True}},
    "wide loader, short last batch": {"data": {"samples": 250, "batch_size": 16}},
    "log and checkpoint": {
        "checkpoint": {"monitor": "val_loss", "save_top_k": 2, "every_n_epochs": 1},
        "trainer": {"max_epochs": 3, "log_every_n_steps": 1},
    },
    "checkpoint by steps": {
        "checkpoint": {"every_n_train_steps": 3, "save_top_k": -1, "filename": "by-{step}"},
        "sleep": SLOW,
    },
}


@pytest.fixture(scope="module")
def trained() -> Run:
    return run("groups.py", {"fits": [{"in_time": True, **options} for options in FITS.values()]}, timeout=400)


def result(trained: Run, name: str) -> list[Any]:
    """What every rank reported of one fit."""
    place = list(FITS).index(name)
    return [trained.results[rank][place] for rank in sorted(trained.results)]


def samples_of_epoch(ranks: list[Any], epoch: int) -> Counter[int]:
    return Counter(sample for each in ranks for sample in each["samples"][epoch])


@pytest.mark.parametrize("name", FITS)
def test_all_ranks_end_with_the_same_weights_and_validation(trained: Run, name: str) -> None:
    ranks = result(trained, name)
    assert len(ranks) == 4
    assert len({each["weights"] for each in ranks}) == 1
    assert len({str([loss for _, loss in each["validations"]]) for each in ranks}) == 1
    assert "published" in name or all(world == 4 for each in ranks for world in each["validation_worlds"])


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "slow group, one-cycle schedule",
        "accumulation and clipping",
        "validation in mid-epoch",
        "checks in mid-epoch",
        "checks of groups that accumulate",
        "validation by batch count",
        "published validation, reloads",
        "published validation, first in epoch 1",
        "static",
        "iterable",
        "loader workers",
        "uneven groups",
        "gradients that are not finite",
        "overlapping, accumulation, validation in mid-epoch",
        "overlapping, gradients that are not finite",
    ],
)
def test_every_sample_of_an_epoch_is_trained_exactly_once(trained: Run, name: str) -> None:
    ranks = result(trained, name)
    total = FITS[name].get("data", {}).get("samples", 256)
    for epoch in range(FITS[name].get("trainer", {}).get("max_epochs", 1)):
        assert samples_of_epoch(ranks, epoch) == Counter(range(total))


@pytest.mark.parametrize("name", ["checks in mid-epoch", "checks of groups that accumulate"])
def test_where_groups_are_checked_inside_an_epoch_all_ranks_are_there_with_the_same_weights(
    trained: Run, name: str
) -> None:
    ranks = result(trained, name)
    assert len({str([weights for _, weights, _ in each["checks"]]) for each in ranks}) == 1
    assert all(world == 4 for each in ranks for world, *_ in each["checks"])
    trained_by_then = [
        sum(samples) for samples in zip(*([at for *_, at in each["checks"]] for each in ranks), strict=True)
    ]
    assert trained_by_then == 2 * [64, 128, 192], "and they have trained what comes before it, and no more"
    assert all(len(each["validations"]) == 2 for each in ranks), "at the ends of its epochs"


def test_a_padded_epoch_holds_every_sample(trained: Run) -> None:
    seen = samples_of_epoch(result(trained, "wide loader, short last batch"), 0)
    assert set(seen) == set(range(250))
    assert sum(seen.values()) == 252  # padded to a multiple of 4 ranks, as DistributedSampler does


def test_inside_the_epoch_the_default_process_group_is_the_compute_group(trained: Run) -> None:
    assert {tuple(each["training_worlds"]) for each in result(trained, "plain")} == {(2,)}
    assert [each["training_worlds"] for each in result(trained, "uneven groups")] == [[2], [2], [1], [1]]


def test_without_arguments_one_node_is_one_group_and_says_so(trained: Run) -> None:
    assert {each["report"]["groups"] for each in result(trained, "no arguments")} == {1}
    assert {each["report"]["updates"] for each in result(trained, "no arguments")} == {256 // 32}
    assert trained.output.count("1 group, which is DistributedDataParallel") == 1
    assert "Pass groups= for asynchronous groups" in trained.output


def test_several_groups_have_a_server_process_as_soon_as_rank_0_is_launched(trained: Run) -> None:
    assert [each["is_server_prepared"] for each in result(trained, "plain")] == [True, False, False, False]
    assert not any(each["is_server_prepared"] for each in result(trained, "no arguments"))


def test_updates_are_counted_over_all_groups(trained: Run) -> None:
    for each in result(trained, "plain"):
        assert each["report"]["updates"] == 2 * 256 // 16
        assert each["report"]["groups"] == 2
        assert each["report"]["ranks_lost"] == []


def test_a_fast_group_does_more_batches_than_a_slow_one(trained: Run) -> None:
    fast, _, slow, _ = (len(each["samples"][1]) for each in result(trained, "slow group, one-cycle schedule"))
    assert fast > 1.5 * slow


def test_schedules_by_step_end_where_ddp_would_end_in_every_group(trained: Run) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.02, momentum=0.3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
    for _ in range(8):
        optimizer.step()
        schedule.step()
    for each in result(trained, "slow group, one-cycle schedule"):
        assert each["lr"] == schedule.get_last_lr()


def test_schedules_by_epoch_step_once_an_epoch(trained: Run) -> None:
    for each in result(trained, "schedule by epoch"):
        assert each["rates"][0][0] == 0.02
        assert each["rates"][1][0] == 0.01
        assert each["lr"] == [0.005]


def test_plateau_schedules_agree_on_all_ranks(trained: Run) -> None:
    rates = {tuple(each["lr"]) for each in result(trained, "schedule on plateau")}
    assert len(rates) == 1
    assert rates.pop()[0] < 0.02


def test_accumulation_pushes_once_a_window(trained: Run) -> None:
    ranks = result(trained, "accumulation and clipping")
    batches = [len(each["rates"][0]) for each in (ranks[0], ranks[2])]
    assert ranks[0]["report"]["updates"] == sum(-(-count // 3) for count in batches)


def test_groups_validate_together_at_common_points(trained: Run) -> None:
    for each in result(trained, "validation in mid-epoch"):
        assert len(each["validations"]) == 2 * 4
    for each in result(trained, "validation by batch count"):
        assert len(each["validations"]) == 3  # after 5, 10 and 15 of 16 batches


def test_a_group_for_which_no_batch_is_left_after_a_validation_does_not_end_the_epoch_for_the_others(
    trained: Run,
) -> None:
    ranks = result(trained, "one batch after the last validation inside the epoch")
    for epoch in range(2):
        counts = samples_of_epoch(ranks, epoch)
        assert len(counts) == 80
        assert counts.total() <= 80 + 16  # a batch of one group, once more
    # Validations are told with rank 0's steps. Of those inside an epoch two may be one, if a group is so late that it
    # trains what comes after the first; each epoch ends with one.
    ends = set(accumulate(len(epoch) // 8 for epoch in ranks[0]["samples"]))
    for each in ranks:
        assert len(ends) == 2
        assert ends <= {steps for steps, _ in each["validations"]}
        assert each["lr"] == [pytest.approx(0.02 / 4)]


def test_max_steps_trains_as_many_samples_as_ddp_would(trained: Run) -> None:
    ranks = result(trained, "max_steps")
    assert sum(len(epoch) for each in ranks for epoch in each["samples"]) == 12 * 4 * 8


def test_max_steps_counts_the_steps_of_each_batch_in_manual_optimization(trained: Run) -> None:
    samples = [sum(map(len, each["samples"])) for each in result(trained, "max_steps by hand")]
    assert max(samples) == 6 * 8  # each batch has two steps; the first group that has made them ends the run


def test_all_ranks_know_the_files_that_the_first_group_has_saved_inside_an_epoch(trained: Run) -> None:
    for name in ("checkpoint by steps", "validation in mid-epoch"):
        paths = {each["best"] for each in result(trained, name)}
        assert len(paths) == 1
        assert all(map(os.path.isfile, paths))


def test_infinities_and_complex_numbers_in_buffers_survive_a_synchronization(trained: Run) -> None:
    for each in result(trained, "awkward buffers"):
        assert each["mask"] == [True, False]
        assert each["rotation"] == ["(1+2j)", "(3-4j)"]


def test_running_statistics_are_the_mean_over_groups_and_other_buffers_those_of_the_first(trained: Run) -> None:
    ranks = result(trained, "awkward buffers")
    batches = len(ranks[0]["rates"][0])
    for each in ranks:
        assert each["pointer"] == batches
        assert sorted(each["queue"]) == [*range(batches - 4, batches)]  # no key of group 1, and none in between
        assert each["is_full"] is True
        assert each["codes"] == [1.0, 1.0, 1.0]  # a frozen parameter that the module writes
        assert each["running_mean"] == [0.5, 0.5]
        assert each["batches_tracked"] < 1000  # of the recorder's group


def test_running_statistics_that_are_not_finite_in_one_group_do_not_spoil_those_of_the_others(trained: Run) -> None:
    for each in result(trained, "awkward buffers"):
        assert each["running_var"] == [3.0, 3.0]
        assert each["moving_mean"] == [math.inf, math.inf], "what no group has finite stays as it is"


def test_min_epochs_puts_a_stop_off(trained: Run) -> None:
    assert {each["epoch"] for each in result(trained, "stop put off by min_epochs")} == {3}


def test_a_group_that_skips_the_rest_of_its_epoch_ends_the_epoch_for_all(trained: Run) -> None:
    ranks = result(trained, "one group skips the rest of its epoch")
    assert {each["epoch"] for each in ranks} == {2}
    assert {len(each["validations"]) for each in ranks} == {0}
    for epoch in range(2):
        assert len(ranks[0]["rates"][epoch]) == 2
        assert sum(samples_of_epoch(ranks, epoch).values()) < 256


@pytest.mark.parametrize(
    "name",
    ["max_time", "one group says stop", "overlapping, one group says stop", "one group stops at its last batch"],
)
def test_a_stop_in_one_group_ends_the_run_for_all(trained: Run, name: str) -> None:
    ranks = result(trained, name)
    assert len({each["epoch"] for each in ranks}) == 1
    assert len({len(each["validations"]) for each in ranks}) == 1


def test_a_stop_in_the_hooks_of_an_epochs_end_ends_the_run_for_all(trained: Run) -> None:
    ranks = result(trained, "one rank says stop in the last hook of an epoch")
    assert {each["epoch"] for each in ranks} == {2}
    assert {len(each["samples"]) for each in ranks} == {2}, "no rank has begun another epoch"


@pytest.mark.parametrize(
    "name",
    [
        "one group says stop where all validate",
        "one group says stop where all validate, static",
        "a slow group says stop, static, while the other waits in a validation",
        "a slow group says stop, static, of which the other hears in its last batch's validation",
        "a slow group says stop, static, while the other waits at its end",
    ],
)
def test_a_stop_in_one_group_where_all_validate_ends_the_run_after_that_validation(trained: Run, name: str) -> None:
    ranks = result(trained, name)
    assert {each["epoch"] for each in ranks} == {ranks[0]["epoch"]}
    assert {len(each["validations"]) for each in ranks} == {1}


def test_early_stopping_decides_for_all_ranks(trained: Run) -> None:
    assert {each["epoch"] for each in result(trained, "early stopping")} == {2}


def test_static_data_gives_every_rank_the_same_number_of_batches(trained: Run) -> None:
    assert {len(each["samples"][0]) for each in result(trained, "static")} == {64}


def test_static_data_and_max_steps_let_a_slow_group_make_all_its_steps(trained: Run) -> None:
    ranks = result(trained, "static, max_steps")
    assert [sum(map(len, each["samples"])) for each in ranks] == [6 * 8] * 4
    assert {each["step"] for each in ranks} == {6}


def test_own_samplers_are_respected(trained: Run) -> None:
    for rank, each in enumerate(result(trained, "own distributed sampler")):
        other = result(trained, "own distributed sampler")[rank ^ 2]
        assert sorted(each["samples"][0]) == sorted(other["samples"][0])  # both asked for the same half
    for each in result(trained, "own sampler"):
        assert len(each["samples"][0]) == 32


def test_gradients_that_are_not_finite_are_refused_counted_and_survived(trained: Run) -> None:
    ranks = result(trained, "gradients that are not finite")
    batches = len(ranks[0]["rates"][0]) + len(ranks[2]["rates"][0])
    assert 0 < ranks[0]["report"]["refused"] < batches
    assert ranks[0]["report"]["refused"] + ranks[0]["report"]["updates"] == batches
    assert all(loss == loss for each in ranks for _, loss in each["validations"])


def test_limited_batches_limit_all_groups_together(trained: Run) -> None:
    ranks = result(trained, "limited batches")
    for epoch in range(2):
        assert sum(len(each["samples"][epoch]) for each in ranks) == 3 * 4 * 8


def test_live_metrics_are_logged(trained: Run) -> None:
    metrics = result(trained, "log and checkpoint")[0]["metrics"]
    for name in ("staleness_mean", "staleness_max", "updates_per_s", "groups_alive", "exchange_share", "step_time"):
        assert f"omni/{name}" in metrics
    assert metrics["omni/groups_alive"] == 2
    assert {"omni/group_0/step_time", "omni/group_1/slowest_rank"} <= metrics.keys()


def test_validate_after_fit_sees_the_same_weights(trained: Run) -> None:
    for each in result(trained, "plain"):
        assert each["test"][0]["val_loss"] == pytest.approx(each["validations"][-1][1])
