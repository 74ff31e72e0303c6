"""A merged head in real runs: what is computed, what travels, what is saved, and what happens when a rank dies."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import pytest
from core import read_record
from patience import SLOWER
from runs import Run, Running, run

from lightning_omni.simulator import trace_of

HEAD = 1
SUM = {"model": {"optimizer": "sum"}, "trainer": {"max_epochs": 1}}
ADAM = {"optimizer": "adam", "dropout": 0.2}
FITS: dict[str, dict[str, Any]] = {
    "sums of pairs": {"strategy": {"groups": 2, "data": "static"}, **SUM},
    "adam": {
        "strategy": {"groups": 2},
        "model": ADAM,
        "record": True,
        "trainer": {"gradient_clip_val": 0.1, "precision": "bf16-mixed"},
    },
    "pairs": {"strategy": {"groups": 2}, "model": ADAM},
    "regrouped": {"strategy": {"groups": 4}, "regroup": {"5": 2, "9": 1, "12": 4}, "data": {"samples": 512}},
    "nan": {
        "strategy": {"groups": 4},
        "model": {"defect": "nan"},
        "trainer": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    },
    "misused": {"strategy": {"groups": 4, "data": "static"}, "model": {"defect": "misused"}},
    "counter": {"strategy": {"groups": 4}, "model": {"defect": "counter"}, "trainer": {"max_epochs": 1}},
    "idle": {"strategy": {"groups": 4}, "model": {"defect": "idle"}, "record": True},
    "written": {"strategy": {"groups": 2}, "model": {"defect": "written"}, "trainer": {"max_epochs": 4}},
    "frozen first": {"strategy": {"groups": 2}, "model": {"defect": "frozen first, copied"}},
    "resumed": {
        "strategy": {"groups": 2},
        "model": ADAM,
        "resumes": "pairs",
        "trainer": {"max_epochs": 4},
    },
    "resumed with another head": {
        "strategy": {"groups": 2},
        "model": ADAM,
        "merged": "classifier.3",
        "resumes": "pairs",
        "trainer": {"max_epochs": 4},
    },
    "one group": {"strategy": {"groups": 1}, "trainer": {"max_epochs": 1}},
    "not merged": {"strategy": {"groups": 1}, "merged": None, "trainer": {"max_epochs": 1}},
}


ONLY_WITH_ALL = ("regrouped", "resumed")
"""Of each there is another one with something more to it: what is exchanged, servers, the head."""


def cases(*names: str) -> list[Any]:
    """Parameters of a test."""
    return [pytest.param(each, marks=pytest.mark.exhaustive) if each in ONLY_WITH_ALL else each for each in names]


@pytest.fixture(scope="module")
def fits(is_all: bool) -> dict[str, list[Any]]:
    chosen = [name for name in FITS if is_all or name not in ONLY_WITH_ALL]
    numbers = {"resumes": chosen.index("pairs")}  # of the fit whose checkpoint it is
    options = [FITS[name] | (numbers if "resumes" in FITS[name] else {}) for name in chosen]
    finished = run("merged.py", {"devices": 4, "fits": options}, timeout=440)
    for number, name in enumerate(chosen):
        record = finished.results[0][number]["record"]
        if record:
            FITS[name]["events"] = list(read_record(record))
    return {name: [finished.results[rank][number] for rank in range(4)] for number, name in enumerate(chosen)}


def test_no_gradient_is_lost_or_counted_twice(fits: dict[str, list[Any]]) -> None:
    """With a learning rate of 0 and a momentum of 1 the buffers hold the sum of all gradients."""
    misses = fits["sums of pairs"][0]["sums"]
    assert len(misses) == 6
    assert max(misses.values()) < 1e-6, misses


@pytest.mark.parametrize("name", cases("adam", "pairs", "regrouped", "written", "frozen first"))
def test_all_ranks_end_with_the_same_body_and_head(fits: dict[str, list[Any]], name: str) -> None:
    assert len({each["digest"] for each in fits[name]}) == 1
    assert all(all(each["moved"].values()) for each in fits[name])
    assert fits[name][0]["val_loss"] < fits[name][0]["untrained"]


def test_weights_of_the_head_that_were_written_at_an_epochs_start_are_those_that_are_trained(
    fits: dict[str, list[Any]],
) -> None:
    """The group that comes to the head first finds weights of zero; what comes after it, the next."""
    first = [rank["losses"][rank["began"]] for rank in fits["written"]]
    assert min(abs(loss - math.log(3)) for loss in first) < 1e-6


@pytest.mark.parametrize("name", cases("adam", "pairs", "regrouped", "nan", "one group", "resumed"))
def test_a_checkpoint_is_whole(fits: dict[str, list[Any]], name: str) -> None:
    assert fits[name][0]["saved"]


def test_the_head_is_never_stale_while_the_body_is(fits: dict[str, list[Any]]) -> None:
    body, head = (trace_of(FITS["adam"]["events"], optimizer=number) for number in (0, HEAD))
    assert head.columns()["staleness"].tolist() == [0] * 32
    assert head.updates == body.updates == fits["adam"][0]["report"]["updates"] == 32
    assert body.columns()["staleness"].max() > 0


def test_an_access_for_nothing_is_given_up_before_any_rank_waits_for_the_group(fits: dict[str, list[Any]]) -> None:
    """Of a group's batches in an epoch every second one has no gradient for the head."""
    body, head = (trace_of(FITS["idle"]["events"], optimizer=number) for number in (0, HEAD))
    batches = Counter(zip(*(body.columns()[name].tolist() for name in ("group", "epoch")), strict=True))
    assert body.updates == fits["idle"][0]["report"]["updates"] == 64
    assert head.updates == sum(math.ceil(count / 2) for count in batches.values())


@pytest.mark.parametrize("name", cases("resumed", "resumed with another head"))
def test_a_run_goes_on_from_a_checkpoint_whatever_was_merged(fits: dict[str, list[Any]], name: str) -> None:
    assert len({each["digest"] for each in fits[name]}) == 1
    assert fits[name][0]["val_loss"] < fits["pairs"][0]["val_loss"]


def test_what_is_not_finite_is_refused_at_the_head_and_in_the_body(fits: dict[str, list[Any]]) -> None:
    steps = sum(len(each["losses"]) for each in fits["nan"])
    bad = sum(loss != loss for each in fits["nan"] for loss in each["losses"])
    assert bad > 0
    assert fits["nan"][0]["report"]["refused"] == 2 * bad
    assert fits["nan"][0]["report"]["updates"] == steps - bad


def test_with_one_group_nothing_is_merged_bit_for_bit(fits: dict[str, list[Any]]) -> None:
    assert [each["digest"] for each in fits["one group"]] == [each["digest"] for each in fits["not merged"]]


def test_after_the_fit_the_module_is_its_own_again(fits: dict[str, list[Any]]) -> None:
    for each in (each for results in fits.values() for each in results):
        assert not each["own_forward"]
        assert each["trainable"]


def finish(options: dict[str, Any], devices: int) -> Run:
    with Running("merged.py", {"devices": devices, "fits": [options]}) as running:
        finished = running.wait(180)
        deadline = time.monotonic() + SLOWER * 60
        while running.survivors:
            assert time.monotonic() < deadline, "processes are left behind"
            time.sleep(0.05)
    return finished


def test_a_death_during_access_costs_its_group_and_the_head_goes_on() -> None:
    fit = {"strategy": {"groups": 2}, "model": {"defect": "die"}, "data": {"samples": 512}, "record": True}
    finished = finish(fit, devices=4)
    assert finished.code == 0, finished.output[-4000:]
    alive = [finished.results[rank][0] for rank in (0, 1)]
    assert all(each["report"]["ranks_lost"] == [2, 3] for each in alive)
    assert len({each["digest"] for each in alive}) == 1
    events = list(read_record(alive[0]["record"]))
    assert trace_of(events, optimizer=HEAD).columns()["staleness"].max() == 0
    assert alive[0]["val_loss"] < alive[0]["untrained"]


def test_misuse_is_answered_with_the_way_out_and_harms_no_rank(fits: dict[str, list[Any]]) -> None:
    for each in fits["misused"]:
        twice, penalty = each["answers"][:2]
        assert twice.startswith('merged="classifier": the submodule is used twice in one training step')
        assert "its weight classifier.0.weight got a gradient outside" in penalty
        assert "a penalty on it" in penalty
    for each in fits["counter"]:
        assert len(each["answers"]) > 0
        assert all("buffer 1.seen was changed" in answer for answer in each["answers"])
    assert len({each["digest"] for each in fits["misused"]}) == 1


def test_accumulation_is_refused_with_the_way_out() -> None:
    finished = finish({"strategy": {"groups": 2}, "trainer": {"accumulate_grad_batches": 2}}, devices=2)
    assert finished.code != 0
    assert "merged='classifier'" in finished.output
    assert "cannot wait for accumulate_grad_batches=2" in finished.output
