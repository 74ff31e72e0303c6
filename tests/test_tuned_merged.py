"""A merged head in a tuned run: what is forecast of it, and runs in real processes that begin or end with one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from runs import run
from test_choices import EVERYTHING, OWN, equal, exponential, search, seen

from lightning_omni import OmniTuner
from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.model.measured import HeadMeasured, Measured
from lightning_omni.tuning.search import Observation, Space
from lightning_omni.tuning.search.choice import gain_of_merging

HEAD = HeadMeasured(nbytes=1_600_000, inputs=1_600.0, outputs=2_000.0, seconds=1e-5)
"""Of LeNet, whose weights are 1.7 MB, with activations in 16 bits: 102 kB of 64 samples."""
PLAIN = Space((1, 2, 4), method=("async_sgd",), wire=("fp32",))


def with_head(observation: Observation, head: HeadMeasured = HEAD) -> Observation:
    return replace(observation, measured=replace(observation.measured, heads={"net.7": head}))


def test_where_bytes_bind_the_head_is_merged_and_without_leave_it_is_not() -> None:
    slow = with_head(seen(exponential(), allreduce=0.3))
    free = search(slow, replace(PLAIN, merged=("net.7",)))
    chosen = free.choice().setting
    assert (chosen.groups, chosen.merged) == (4, "net.7")
    assert "net.7 merged" in str(chosen)
    assert free.throughput(chosen) > 1.5 * free.throughput(replace(chosen, merged=""))
    assert search(slow, PLAIN).choice().setting.merged == ""


def test_a_head_that_computes_for_long_or_takes_many_bytes_is_not_merged() -> None:
    for head in (replace(HEAD, seconds=5e-3), replace(HEAD, inputs=100_000.0)):
        found = search(with_head(seen(exponential(), allreduce=0.3), head), replace(EVERYTHING, merged=("net.7",)))
        assert found.choice().setting.merged == ""


def test_no_setting_can_be_faster_than_the_bound_by_which_it_is_ruled_out() -> None:
    found = search(with_head(seen(exponential(), allreduce=0.3)), replace(EVERYTHING, merged=("net.7",)))
    merged = [each for each in found.candidates() if each.merged]
    assert merged
    assert all(found.throughput(each) <= 1.001 * found.most(each) for each in merged)


def test_a_head_is_combined_with_methods_that_step_for_each_gradient_in_several_groups() -> None:
    found = search(with_head(seen(equal())), replace(EVERYTHING, overlap=(False, True), merged=("net.7",)))
    merged = [each for each in found.candidates() if each.merged]
    assert {(each.method, each.overlap) for each in merged} == {("async_sgd", False)}
    assert 1 not in {each.groups for each in merged}


def test_what_the_user_has_merged_is_merged_in_all_groups() -> None:
    own = replace(OWN, merged="net.7")
    found = search(with_head(seen(exponential(), allreduce=0.3)), EVERYTHING, own)
    several = [each for each in found.candidates() if each.groups > 1]
    assert several
    assert {each.merged for each in several} == {"net.7"}
    assert found.choice().setting.groups == 4


def test_a_user_who_merges_nothing_is_told_where_it_would_be_clearly_faster_and_only_there() -> None:
    told = gain_of_merging(search(with_head(seen(exponential(), allreduce=0.3)), PLAIN))
    assert told is not None
    assert told.setting.merged == "net.7"
    assert "times faster" in told.why
    assert "net.7 merged" in told.why
    assert gain_of_merging(search(with_head(seen(equal(), allreduce=0.002)), PLAIN)) is None
    assert gain_of_merging(search(seen(exponential(), allreduce=0.3), PLAIN)) is None, "nothing was seen of it"


def test_a_submodule_of_which_nothing_was_seen_is_not_merged() -> None:
    found = search(seen(exponential(), allreduce=0.3), replace(PLAIN, merged=("net.7",)))
    assert {each.merged for each in found.candidates()} == {""}
    assert found.unseen_heads == ["net.7"]
    assert search(with_head(seen(equal())), replace(PLAIN, merged=("net.7",))).unseen_heads == []


def test_what_was_measured_of_heads_travels_and_files_without_load() -> None:
    measured = with_head(seen(equal())).measured
    plain = measured.to_dict()
    assert Measured.from_dict(plain) == measured
    del plain["heads"]
    assert Measured.from_dict(plain).heads == {}
    of_old = Setting(4, 0.9, 0.1).to_dict()
    del of_old["merged"]
    assert Setting.from_dict(of_old) == Setting(4, 0.9, 0.1)


@pytest.mark.parametrize("wrong", [7, "", [None], []])
def test_names_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="merged"):
        OmniTuner(space={"merged": wrong})


# --- Real processes ---------------------------------------------------------------------------------------------------

TUNER = {"budget": 0.1}
BUSY: dict[str, Any] = {
    "emulated": True,  # how long steps take is no matter of this machine
    "tail": 2048,
    "adam": True,  # with which staleness costs little
    "data": {"samples": 512},
    "seconds": {"0": 8e-3, "1": 8e-3},
    "exponential": True,
    "trainer": {"max_epochs": 2, "num_sanity_val_steps": 0},
}
PLAIN_SPACE = {"rebalance": False, "wire": "fp32", "method": "async_sgd"}
FITS: dict[str, dict[str, Any]] = {
    "may merge": {**BUSY, "per_byte": 4e-7, "tuner": {**TUNER, "space": {**PLAIN_SPACE, "merged": ["net.3"]}}},
    "has merged": {**BUSY, "strategy": {"merged": "net.3"}, "tuner": {**TUNER, "space": PLAIN_SPACE}},
    "goes back": {
        **BUSY,
        "per_byte": 4e-7,
        "diverged_after": 56,  # in the second epoch
        "tuner": {**TUNER, "space": {**PLAIN_SPACE, "merged": "net.3"}},
        "trainer": {"max_epochs": 3, "num_sanity_val_steps": 0},
    },
    # In whose first four steps, after which it is clear that it stays as it is, a merged head would be far faster.
    "is advised": {**BUSY, "seed": 4, "per_byte": 4e-7, "tuner": {**TUNER, "space": PLAIN_SPACE}},
    "cannot be merged": {
        **BUSY,
        "data": {"samples": 64},
        "is_refused": True,
        "tuner": {**TUNER, "space": {"merged": "net"}},
    },
}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks saw of every fit, and of one that goes on from the checkpoint of the first."""
    saved = str(tmp_path_factory.mktemp("checkpoints") / "merged.ckpt")
    first = FITS["may merge"]
    resumed = {**first, "ckpt_path": saved, "trainer": {**first["trainer"], "max_epochs": 3}}
    told = {**FITS, "may merge": {**first, "save": saved}, "resumed": resumed}
    finished = run("omni_tuner.py", {"fits": list(told.values())}, timeout=300)
    fits = {name: [finished.results[rank][number] for rank in (0, 1)] for number, name in enumerate(told)}
    return {**fits, "said": [{"output": finished.output}]}


def marked(test: Any) -> Any:
    """A test of real processes."""
    for mark in (pytest.mark.slow, pytest.mark.processes):
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("name", ["may merge", "has merged", "resumed"])
def test_groups_train_with_a_merged_head_and_end_with_equal_weights(
    fits: dict[str, list[dict[str, Any]]], name: str
) -> None:
    one, other = fits[name]
    for rank in (one, other):
        assert rank["setting"]["merged"] == rank["merged"] == "net.3"
        assert rank["world"] == [2, "AsyncSGD"]
        assert rank["head_time"] > 0
        assert rank["hooks"] == 0
    assert one["weights"] == other["weights"]
    assert [len(each) for each in one["weights"]] == [16 * 32, 32, 32 * 2048, 2048, 2048 * 4, 4]


@marked
def test_a_run_that_diverges_goes_back_to_one_group_with_nothing_merged(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    one, other = fits["goes back"]
    assert any(map(math.isnan, [*one["losses"], *other["losses"]])), "it was in groups"
    for rank in (one, other):
        assert rank["head_time"] > 0
        assert (rank["world"][0], rank["merged"], rank["setting"]["merged"]) == (1, None, "")
    assert one["weights"] == other["weights"]


@marked
def test_a_run_that_merges_nothing_says_what_a_merged_head_would_gain(fits: dict[str, list[dict[str, Any]]]) -> None:
    lines = [line for line in fits["said"][0]["output"].splitlines() if 'pass OmniTuner(space={"merged"' in line]
    assert len(lines) == 1, "of the one fit that was not told"
    assert "with net.3 merged" in lines[0]
    for rank in fits["is advised"]:
        assert (rank["merged"], rank["hooks"]) == (None, 0)


@marked
def test_a_submodule_that_is_all_there_is_is_refused_by_name(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["cannot be merged"]:
        assert "space={\"merged\": 'net'}" in rank["refused"]
