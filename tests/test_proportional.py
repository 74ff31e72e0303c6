"""Proportional batches in real processes: the group's gradient stays exact, nothing is lost, speeds are followed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from core import apportion
from runs import Run, run

from lightning_omni import OmniStrategy
from lightning_omni.errors import ConfigurationError

AUTO = {"groups": 1, "rebalance": "auto"}
MIXED = {"0": [0.004, 0.002, 0.001, 0.001]}
"""Seconds for each sample, by rank, from batch 0 on: speeds 1 : 2 : 4 : 4."""
EQUAL: dict[str, Any] = {
    "sleep": {"0": [0.002] * 4},
    "emulated": True,
    "data": {"samples": 768},
    "compare": False,
}
FITS: dict[str, dict[str, Any]] = {
    "given shares": {"shares": [5, 9, 6, 12], "data": {"samples": 250}},
    "given shares, accumulation": {"shares": [5, 9, 6, 12], "trainer": {"accumulate_grad_batches": 3}},
    "given shares, two groups": {"shares": [4, 12], "strategy": {"groups": 2}, "data": {"samples": 250}},
    "given shares, two groups, by hand": {"shares": [13, 3], "strategy": {"groups": 2}, "by_hand": True},
    "given shares, merged head": {
        "shares": [4, 12],
        "strategy": {"groups": 2, "merged": "net.2"},
        "compare": False,
    },
    "one group": {
        "strategy": AUTO,
        "sleep": MIXED,
        "emulated": True,
        "data": {"samples": 768},
        "trainer": {"max_epochs": 2},
    },
    "workers, two groups": {
        "emulated": True,
        "strategy": {**AUTO, "groups": 2},
        "sleep": {"0": [0.008, 0.002, 0.002, 0.002]},
        "data": {"samples": 960, "num_workers": 2},
        "trainer": {"max_epochs": 2},
    },
    "equal speeds": {**EQUAL, "strategy": AUTO},
    "equal speeds, off": {**EQUAL, "strategy": {"groups": 1}},
    "speeds change": {
        "strategy": AUTO,
        "emulated": True,
        "sleep": {"0": [0.002, 0.001, 0.001, 0.001], "25": [0.001, 0.001, 0.001, 0.004]},
        "data": {"samples": 1024},
        "trainer": {"max_epochs": 2},
    },
    "drop last, new loaders": {
        "strategy": AUTO,
        "sleep": MIXED,
        "data": {"samples": 390, "drop_last": True},
        "trainer": {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
    },
    "like with like": {
        "strategy": {**AUTO, "groups": 2},
        "emulated": True,
        "sleep": {"0": [0.012, 0.002, 0.012, 0.002]},
        "data": {"samples": 1024, "num_workers": 1},
        "regroup": {"12": {"groups": 2, "by_speed": True}},
    },
    "regrouped": {
        "strategy": AUTO,
        "emulated": True,
        "sleep": {"0": [0.012, 0.006, 0.003, 0.003]},
        "data": {"samples": 1024, "num_workers": 1},
        "regroup": {"12": {"groups": 2}, "20": {"groups": 1}},
    },
    "by hand, with a tuner": {
        "tuner": {"monitor": "none"},
        "by_hand": True,
        "emulated": True,
        "sleep": {"0": [0.012, 0.006, 0.003, 0.003]},
        "data": {"samples": 512},
    },
    "by hand, with a tuner that must not split": {
        "tuner": {"monitor": "none", "space": {"rebalance": False}},
        "by_hand": True,
        "sleep": {"0": [0.004, 0.002, 0.001, 0.001]},
    },
    "own sampler": {"strategy": AUTO, "data": {"kind": "sampler", "samples": 128}, "compare": False},
    "iterable": {"strategy": AUTO, "data": {"kind": "iterable"}, "compare": False},
    "sorted without measuring": {"regroup": {"2": {"groups": 2, "by_speed": True}}, "expect_error": True},
    "sorted too early": {
        "strategy": AUTO,
        "regroup": {"2": {"groups": 2, "by_speed": True}},
        "expect_error": True,
    },
}


@pytest.fixture(scope="module")
def trained() -> Run:
    return run("balance.py", {"fits": list(FITS.values())}, timeout=480)


def result(trained: Run, name: str) -> list[Any]:
    """What every rank reported of one fit."""
    place = list(FITS).index(name)
    return [trained.results[rank][place] for rank in sorted(trained.results)]


@pytest.mark.parametrize("name", [name for name in FITS if FITS[name].get("compare", True) and "sorted" not in name])
def test_the_weighted_gradient_is_the_mean_over_the_groups_batch(trained: Run, name: str) -> None:
    for each in result(trained, name):
        assert each["errors"]
        assert max(each["errors"]) < 1e-6


@pytest.mark.parametrize("name", [name for name in FITS if name.startswith("given")])
def test_members_get_their_shares(trained: Run, name: str) -> None:
    shares = FITS[name]["shares"]
    for rank, each in enumerate(result(trained, name)):
        assert each["counts"][0] == shares[rank % len(shares)]


@pytest.mark.parametrize(
    "name",
    [
        "given shares, accumulation",
        "given shares, two groups, by hand",
        "given shares, merged head",
        "one group",
        "workers, two groups",
        "equal speeds",
        "speeds change",
        "like with like",
        "regrouped",
        "by hand, with a tuner",
    ],
)
def test_every_sample_of_an_epoch_is_trained_exactly_once(trained: Run, name: str) -> None:
    ranks = result(trained, name)
    samples = FITS[name].get("data", {}).get("samples", 256)
    for epoch in range(FITS[name].get("trainer", {}).get("max_epochs", 1)):
        assert Counter(one for each in ranks for one in each["samples"][epoch]) == Counter(range(samples))


def test_all_ranks_end_with_the_same_weights(trained: Run) -> None:
    for name in FITS:
        if "sorted" not in name:
            assert len({each["weights"] for each in result(trained, name)}) == 1


def test_batches_are_split_in_proportion_to_the_speeds(trained: Run) -> None:
    ranks = result(trained, "one group")
    for each in ranks:
        assert each["splits"][:8] == [[8, 8, 8, 8]] * 8
        assert each["splits"][8:] == [list(apportion(32, [1, 2, 4, 4]))] * 40, "as soon as all are measured"
    assert ranks[0]["share"] == pytest.approx(ranks[0]["counts"][-1] / 32)
    assert "group 0 rebalanced: " in trained.output


def test_a_tuner_splits_batches_where_it_can_choose_nothing_else(trained: Run) -> None:
    for each in result(trained, "by hand, with a tuner"):
        slow, *_, fast = each["splits"][-1]
        assert slow < 8 < fast
    for each in result(trained, "by hand, with a tuner that must not split"):
        assert {tuple(split) for split in each["splits"]} == {(8, 8, 8, 8)}
    splits = "batches are split in proportion to the ranks' speeds where that pays"
    assert f"OmniTuner: nothing is tuned, but {splits}: with manual" in trained.output
    assert "OmniTuner: nothing is tuned: with manual" in trained.output


def test_each_group_is_split_by_the_speeds_of_its_own_ranks(trained: Run) -> None:
    slow, fast, *equal = result(trained, "workers, two groups")
    assert slow["splits"][-1] == fast["splits"][-1] == list(apportion(16, [1, 4]))
    assert {tuple(split) for each in equal for split in each["splits"]} == {(8, 8)}


def test_equal_speeds_are_left_alone_to_the_bit(trained: Run) -> None:
    for auto, off in zip(result(trained, "equal speeds"), result(trained, "equal speeds, off"), strict=True):
        assert {tuple(split) for split in auto["splits"]} == {(8, 8, 8, 8)}
        assert auto["weights"] == off["weights"]


def test_speeds_that_change_are_followed(trained: Run) -> None:
    for each in result(trained, "speeds change"):
        assert each["splits"][24] == list(apportion(32, [1, 2, 2, 2])), "rank 0 sleeps longest"
        assert each["splits"][-1] == list(apportion(32, [4, 4, 4, 1])), "then rank 3 does"


def test_a_new_loader_keeps_the_shares_and_drops_the_groups_last_batch(trained: Run) -> None:
    ranks = result(trained, "drop last, new loaders")
    for epoch in range(3):
        seen = Counter(one for each in ranks for one in each["samples"][epoch])
        assert sum(seen.values()) == 384
        assert set(seen.values()) == {1}
    for rank, each in enumerate(ranks):
        assert each["counts"][24] == each["splits"][23][rank]


def test_groups_are_formed_like_with_like(trained: Run) -> None:
    for each in result(trained, "like with like"):
        assert each["groups"] == [[[1, 3], [0, 2]]]


def test_new_peers_start_with_equal_shares_and_are_measured_again(trained: Run) -> None:
    for each in result(trained, "regrouped"):
        assert [len(split) for split in each["splits"]][:20] == [4] * 12 + [2] * 8
        assert each["splits"][12] == [8, 8]
        assert each["splits"][-1][0] < 8


@pytest.mark.parametrize("name", ["own sampler", "iterable"])
def test_data_that_cannot_be_leased_is_left_alone(trained: Run, name: str) -> None:
    for each in result(trained, name):
        assert not each["splits"]
    assert trained.output.count('rebalance="auto" does nothing in this run') == 2


def test_nothing_is_left_in_the_module(trained: Run) -> None:
    assert {each["hooks"] for name in FITS for each in result(trained, name)} == {0}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sorted without measuring", 'by_speed=True: the speeds of ranks are measured with rebalance="auto" only'),
        ("sorted too early", "by_speed=True: the speed of rank 0, 1, 2, 3 is not known yet; call regroup() later"),
    ],
)
def test_groups_cannot_be_sorted_by_unknown_speeds(trained: Run, name: str, says: str) -> None:
    for each in result(trained, name):
        assert says in each["error"]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r'data="static" and rebalance="auto"'):
        OmniStrategy(rebalance="auto", data="static")
    with pytest.raises(ConfigurationError, match=r"rebalance='always': pass \"auto\""):
        OmniStrategy(rebalance="always")  # type: ignore[arg-type]
