"""Groups change in mid-fit: from any number to any number, nothing lost, nothing leaked."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

from runs import run

# A walk through the group counts of four ranks that takes each of the twelve steps between different ones.
WALK = [1, 2, 1, 3, 1, 4, 2, 3, 2, 4, 3, 4, 1]


def everything(results: dict[int, Any], epochs: int) -> list[Counter[int]]:
    return [
        Counter(chain.from_iterable(results[rank]["samples"][epoch] for rank in results)) for epoch in range(epochs)
    ]


def test_regrouping_from_any_count_to_any_count_loses_no_sample_and_repeats_none() -> None:
    steps = {str(4 * number): groups for number, groups in enumerate(WALK[1:], start=1)}
    options = {"groups": WALK[0], "regroup": steps, "data": {"samples": 2048}, "schedule": "onecycle"}
    finished = run("regroup.py", options, timeout=200)
    assert everything(finished.results, 1) == [Counter(range(2048))]
    for each in finished.results.values():
        assert len(each["times"]) == len(WALK) - 1
        assert each["wrapped"]
    assert len({each["val_loss"] for each in finished.results.values()}) == 1
    assert len({each["lr"] for each in finished.results.values()}) == 1
    assert len({each["parameters"] for each in finished.results.values()}) == 1, "they had one rate in each step"


def test_many_regroupings_leak_neither_threads_nor_files() -> None:
    counts = [2, 4, 1, 3]
    steps = {str(number): counts[number % 4] for number in range(1, 41)}
    options = {"groups": 2, "regroup": steps, "data": {"samples": 2048}}
    finished = run("regroup.py", options, timeout=220)
    assert everything(finished.results, 1) == [Counter(range(2048))]
    for each in finished.results.values():
        assert len(each["times"]) == 40
        # After each count has been seen twice, all process groups that will ever be needed are there.
        assert max(each["threads"][12:]) <= max(each["threads"][4:12])
        assert max(each["files"][12:]) <= max(each["files"][4:12]) + 2


def test_batches_loaded_ahead_by_workers_go_back() -> None:
    options = {"groups": 2, "regroup": {"5": 4, "9": 1, "14": 2}, "data": {"samples": 1024, "num_workers": 1}}
    finished = run("regroup.py", options, timeout=200)
    assert everything(finished.results, 1) == [Counter(range(1024))]


def test_one_group_trains_what_several_have_left_of_an_epoch_also_with_drop_last() -> None:
    # After 3 of 4 batches that each group has drawn: what is left has gaps, of a batch of one rank each.
    options = {"groups": 4, "regroup": {"3": 1}, "data": {"samples": 1024, "drop_last": True}}
    finished = run("regroup.py", options, timeout=200)
    assert everything(finished.results, 1) == [Counter(range(1024))]


def test_groups_formed_in_a_resumed_epoch_train_as_many_samples_as_were_left_of_it() -> None:
    # 32 batches an epoch, of which 8 were trained before; one group trains 4 more of them, and four groups the rest.
    data = {"samples": 1024}
    options = {"groups": 1, "regroup": {"12": 4}, "saved_after": 8, "data": data, "schedule": "onecycle"}
    finished = run("regroup.py", options, timeout=200)
    assert everything(finished.results, 1)[0].total() == 1024 - 8 * 32
    whole = run("regroup.py", {"groups": 1, "data": data, "schedule": "onecycle"}, timeout=200)
    for rank, each in finished.results.items():
        assert each["rates"][0][3] == whole.results[rank]["rates"][0][11]
        assert each["lr"] == whole.results[rank]["lr"]
    assert len(finished.results[0]["times"]) == 1


def test_regrouping_inside_an_accumulation_window_is_refused() -> None:
    options = {
        "groups": 2,
        "regroup": {"2": 4},
        "data": {"samples": 256},
        "trainer": {"accumulate_grad_batches": 3},
        "expect_error": True,
    }
    finished = run("regroup.py", options, timeout=180)
    for each in finished.results.values():
        assert "accumulation window" in each["error"]
