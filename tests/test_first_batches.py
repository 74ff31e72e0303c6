"""A run is tuned by its own first batches, in real processes: nothing is thrown away, and all ranks agree."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

import pytest
from runs import Run, run

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TUNER = {"budget": 0.9}
"""Forming groups takes as long as it does on this machine, and runs are short."""
ALONE = {**TUNER, "space": {"groups": [1]}}
AVERAGING = {"method": "elastic_averaging", "period": 1, "compression": "fp32"}
EPOCHS = {"max_epochs": 2, "num_sanity_val_steps": 0}
EXPONENTIAL = {"exponential": 1, "seed": 219}  # of which four tell as much as forty do, so that none is in doubt
LONG_TAILED = {"exponential": 2, "seed": 219}  # squares of exponential ones
SLOWER: dict[str, Any] = {
    "emulated": True,
    "data": {"samples": 512, "batch_size": 4},
    "tuner": {**TUNER, "space": {"rebalance": False, "compression": "fp32"}},
    "seconds": {"0": 4e-3, "1": 4e-3},
    **EXPONENTIAL,
    "flat": "never",
    "trainer": {**EPOCHS, "max_epochs": 5},
}
SLOW_RANK: dict[str, Any] = {
    "emulated": True,
    "tuner": {**TUNER, "space": {"groups": [1]}},
    "seconds": {"0": 10e-3, "1": 2e-3},
    "data": {"samples": 768},
    "trainer": {**EPOCHS, "max_epochs": 1},
}
STALLING: dict[str, Any] = {
    "emulated": True,
    "data": {"samples": 2048},
    "tuner": {**TUNER, "space": {"rebalance": False, "compression": "fp32"}},
    "seconds": {"0": 1e-3, "1": 1e-3},
    "trainer": {**EPOCHS, "max_epochs": 1},
}
SLOW_LINK: dict[str, Any] = {
    "emulated": True,
    "tuner": {**TUNER, "space": {"groups": [1], "rebalance": False}},
    "seconds": {"0": 2e-3, "1": 2e-3},
    "per_byte": 1e-5,
    "reducing": 0.1,
    "tail": 256,
    "trainer": {**EPOCHS, "max_epochs": 1},
}
FLAT: dict[str, Any] = {  # ends of epochs at which the user's own setting may be tried
    "emulated": True,
    "tuner": {**TUNER, "budget": 0.9, "space": {"rebalance": False, "compression": "fp32"}},
    "seconds": {"0": 4e-3, "1": 4e-3},
    **EXPONENTIAL,
    "trainer": {**EPOCHS, "max_epochs": 7},
}
DEALT_OUT: dict[str, Any] = {
    "emulated": True,
    "tuner": {**TUNER, "space": {"rebalance": False, "compression": "fp32"}},
    "seconds": {"0": 8e-3, "1": 8e-3},
    **EXPONENTIAL,
    "trainer": {**EPOCHS, "max_epochs": 3},
}
FITS: dict[str, dict[str, Any]] = {  # of those with "emulated", the time that steps take is no matter of this machine
    "plain": {"seconds": {"0": 2e-3, "1": 2e-3}, "trainer": EPOCHS},
    "equal": {"tuner": TUNER, "seconds": {"0": 2e-3, "1": 2e-3}, "trainer": EPOCHS},
    "rank 0 decides beside it": {
        "beside": True,
        "tuner": TUNER,
        "data": {"samples": 2048},  # a busy machine takes a while to decide
        "seconds": {"0": 4e-3, "1": 4e-3},
        "trainer": {**EPOCHS, "max_epochs": 1},
    },
    "one group is all there is": {
        "tuner": {**TUNER, "space": {"groups": [1], "rebalance": False}},
        "seconds": {"0": 2e-3, "1": 6e-3},
        "trainer": EPOCHS,
    },
    "a slow rank": {"emulated": True, "tuner": ALONE, "seconds": {"0": 2e-3, "1": 10e-3}, "trainer": EPOCHS},
    "rank 0 is slow before its step": {**SLOW_RANK, "where": "before it"},
    "rank 0 is slow after its step": {**SLOW_RANK, "where": "after the batch"},
    "rank 0 is slow among collectives": {**SLOW_RANK, "collectives": True},
    "slow for each step": {
        "emulated": True,
        "tuner": {**TUNER, "space": {"compression": "fp32"}},
        "seconds": {"0": 6e-3, "1": 30e-3},  # of which a third is slept: more than what a busy machine adds to each
        "per_step": True,
        "trainer": {**EPOCHS, "max_epochs": 3},  # on a busy machine it may be decided as late as in the second
    },
    "random": {
        "emulated": True,
        "tuner": {**TUNER, "space": {"rebalance": False, "compression": "fp32"}},
        "seconds": {"0": 8e-3, "1": 8e-3},
        **EXPONENTIAL,
        "trainer": EPOCHS,
    },
    "steps take three times as long": {**SLOWER, "slower_from": 2},
    "groups are slower than predicted": {
        **SLOWER,
        "slower_in_groups": 3,
        "trainer": {**EPOCHS, "max_epochs": 4},
    },
    "ranks stall now and then": {**STALLING, "stalls": True},
    "no rank stalls": {**STALLING, "data": {"samples": 1024}},
    "all is slower than predicted": {**SLOWER, "slower_since_groups": 3, "trainer": {**EPOCHS, "max_epochs": 3}},
    "groups are slower than predicted in the only epoch": {
        **SLOWER,
        "data": {"samples": 8192, "batch_size": 4},  # by the first validation groups may not be known well enough
        "seconds": {"0": 1e-3, "1": 1e-3},
        "slower_in_groups": 3,
        "trainer": {**EPOCHS, "max_epochs": 1, "val_check_interval": 128, "enable_checkpointing": True},
    },
    "a callback of one group stops it": {
        "emulated": True,
        "tuner": {**TUNER, "space": {"rebalance": False, "compression": "fp32"}, "monitor": "none"},
        "seconds": {"0": 4e-3, "1": 4e-3},
        **EXPONENTIAL,
        "stops_in_training": [0, 70],  # in the third epoch
        "trainer": {**EPOCHS, "max_epochs": 5, "limit_val_batches": 0},
    },
    "it diverges in groups": {
        "emulated": True,
        "tuner": {
            **TUNER,
            "space": {**AVERAGING, "rebalance": False},
        },
        "seconds": {"0": 4e-3, "1": 4e-3},
        **LONG_TAILED,
        "diverged_after": 90,  # in the third epoch
        "averages": True,
        "trainer": {**EPOCHS, "max_epochs": 5},
    },
    "it diverges in groups in the only epoch": {
        "emulated": True,
        "data": {"samples": 2048},
        "tuner": {
            **TUNER,
            "space": {**AVERAGING, "rebalance": False},
        },
        "seconds": {"0": 4e-3, "1": 4e-3},
        **LONG_TAILED,
        "diverged_after": 50,
        "trainer": {**EPOCHS, "max_epochs": 1, "val_check_interval": 32, "enable_checkpointing": True},
    },
    "it learns too slowly in groups": {
        **FLAT,
        "flat": "in groups",
        "trainer": {**EPOCHS, "max_epochs": 8},
    },
    "it learns too slowly in groups in the only epoch": {
        **FLAT,
        "data": {"samples": 4096},
        "flat": "in groups",
        "seconds": {"0": 1e-3, "1": 1e-3},
        "trainer": {**EPOCHS, "max_epochs": 1, "val_check_interval": 64, "enable_checkpointing": True},
    },
    "it learns too slowly in groups in an epoch without validation": {
        **FLAT,
        "data": {"samples": 4096},
        "tuner": {**FLAT["tuner"], "monitor": "none"},
        "flat": "in groups",
        "seconds": {"0": 1e-3, "1": 1e-3},
        "trainer": {**EPOCHS, "max_epochs": 1, "limit_val_batches": 0},
    },
    "nothing is learnt in groups": {
        **FLAT,
        "flat": "as at first",
        "lr": 4e-3,  # little is learnt before there are groups
    },
    "there is nothing more to learn": {
        **FLAT,
        "flat": "always",
    },
    "larger steps raise the loss": {
        **FLAT,
        "flat": "higher alone",
    },
    "it is stopped in a trial": {
        **FLAT,
        "flat": "higher alone",
        "stops_in_trial": True,
    },
    "the loss rises by design": {
        "emulated": True,
        "tuner": ALONE,
        "seconds": {"0": 2e-3, "1": 10e-3},
        "rises": True,
        "trainer": {**EPOCHS, "max_epochs": 3},
    },
    "a method of the user's": {
        "emulated": True,
        "tuner": {**TUNER, "space": {"rebalance": False}},
        "strategy": {"method": "local_sgd:period=4", "groups": 2},
        "seconds": {"0": 8e-3, "1": 8e-3},
        **EXPONENTIAL,
        "trainer": EPOCHS,
    },
    "nothing can be tuned": {
        "tuner": TUNER,
        "strategy": {"groups": 2},
        "data": {"samples": 512, "is_stream": True},
        "trainer": EPOCHS,
    },
    "too short": {"tuner": TUNER, "trainer": {**EPOCHS, "max_epochs": 1, "limit_train_batches": 1}},
    "a slow link": {**SLOW_LINK},
    "sparse gradients on a slow link": {**SLOW_LINK, "sparse": True},
    "a hook of the user's on a slow link": {**SLOW_LINK, "hook": True},
    "slow learning is saved": {
        **FLAT,
        "flat": "in groups",
        "trainer": {**EPOCHS, "max_epochs": 3},
    },
    "accumulated": {
        "emulated": True,
        "tuner": ALONE,
        "seconds": {"0": 2e-3, "1": 10e-3},
        "trainer": {**EPOCHS, "accumulate_grad_batches": 2, "max_epochs": 4},  # 64 steps: the last look is after 48
    },
    "dealt out beforehand": {**DEALT_OUT, "strategy": {"data": "static"}},
    "by a sampler of the user's": {**DEALT_OUT, "data": {"samples": 1024, "half": True}},
}

ONLY_WITH_ALL = [  # claims that other fits make, too: of whole epochs, or of another guard inside one
    "groups are slower than predicted in the only epoch",
    "it learns too slowly in groups in the only epoch",
]


def cases(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; some are run with ``--all`` only."""
    return [pytest.param(each, marks=pytest.mark.exhaustive) if each in ONLY_WITH_ALL else each for each in names]


@pytest.fixture(scope="module")
def names(is_all: bool) -> list[str]:
    """Of the fits that are run, in their order."""
    left_out = [] if is_all else ONLY_WITH_ALL
    return [*(each for each in FITS if each not in left_out), "stopped", "resumed", "slow learning"]


@pytest.fixture(scope="module")
def finished(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All fits, one after the other; one that is stopped at once, and one that goes on from another's checkpoint."""
    saved = str(tmp_path_factory.mktemp("checkpoints") / "tuned.ckpt")
    slow = FITS["a slow rank"]
    slow_learning, later = FITS["slow learning is saved"], saved.replace("tuned", "slow")
    fits = {**FITS, "a slow rank": {**slow, "save": saved}, "slow learning is saved": {**slow_learning, "save": later}}
    fits["stopped"] = {
        "tuner": TUNER,
        "strategy": {"groups": 2},
        "stops_in_training": [0, 0],
        "trainer": EPOCHS,
    }
    fits["resumed"] = {**slow, "ckpt_path": saved, "trainer": {**EPOCHS, "max_epochs": 3}}
    fits["slow learning"] = {**slow_learning, "ckpt_path": later, "trainer": {**EPOCHS, "max_epochs": 6}}
    return run("omni_tuner.py", {"fits": [{"data": {"samples": 512}, **fits[name]} for name in names]}, timeout=400)


def said_by_tuners(finished: Run) -> str:
    """All lines of tuners, and the ends of fits, for what a failure has to tell."""
    return "\n".join(line for line in finished.output.splitlines() if "OmniTuner:" in line or "Trainer.fit" in line)


@pytest.fixture(scope="module")
def fits(names: list[str], finished: Run) -> dict[str, list[dict[str, Any]]]:
    """What every rank saw of every fit."""
    return {name: [finished.results[rank][number] for rank in (0, 1)] for number, name in enumerate(names)}


ENDS_OTHERWISE = (
    "by a sampler of the user's",
    "a callback of one group stops it",
    "it is stopped in a trial",
    "it diverges in groups",
)
TUNED = [
    name
    for name, fit in FITS.items()
    if "tuner" in fit and name not in ("nothing can be tuned", "no budget", "too short")
]


@pytest.mark.parametrize("name", cases([*TUNED, "resumed"]))
def test_all_ranks_take_the_same_decision(fits: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, other = fits[name]
    assert one["setting"] == other["setting"] is not None
    assert (one["lr"], one["momentum"], one["world"]) == (other["lr"], other["momentum"], other["world"])
    assert one["weights"] == other["weights"]


def test_where_there_is_nothing_to_choose_the_run_is_bitwise_that_without_a_tuner(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    for plain, tuned in zip(fits["plain"], fits["one group is all there is"], strict=True):
        assert tuned["weights"] == plain["weights"]
        assert (tuned["steps"], tuned["sizes"], tuned["global_step"]) == (
            plain["steps"],
            plain["sizes"],
            plain["global_step"],
        )
        assert not any(tuned["servers"])


def test_ranks_train_on_while_rank_0_finds_out_what_is_to_be_done(fits: dict[str, list[dict[str, Any]]]) -> None:
    one, other = fits["rank 0 decides beside it"]
    assert one["beside"] == other["beside"] > 0
    assert one["setting"] == other["setting"] is not None


@pytest.mark.parametrize("name", ["equal", "a slow rank", "accumulated"])
def test_gradients_of_a_few_bytes_are_not_said_to_be_slow_however_busy_the_machine_is(
    fits: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert "all-reduce" not in str(fits[name][0]["setting"]), "fewer bytes would gain nothing"


@pytest.mark.parametrize("name", cases(name for name in TUNED if name not in ENDS_OTHERWISE))
def test_every_sample_is_trained_once_an_epoch_and_no_batch_is_thrown_away(
    fits: dict[str, list[dict[str, Any]]], name: str
) -> None:
    samples = FITS[name].get("data", {}).get("samples", 512)
    assert sum(sum(rank["sizes"]) for rank in fits[name]) == FITS[name]["trainer"]["max_epochs"] * samples
    assert sorted(number for rank in fits[name] for number in rank["last_epoch"]) == list(range(samples))
    assert [rank["steps"] for rank in fits[name]] == [len(rank["sizes"]) for rank in fits[name]]


@pytest.mark.parametrize("name", ["a slow rank", "accumulated"])
def test_ranks_of_different_speed_get_proportional_batches_in_mid_epoch(
    fits: dict[str, list[dict[str, Any]]], name: str
) -> None:
    fast, slow = fits[name]
    assert fast["setting"]["rebalance"]
    assert fast["world"][0] == 1
    assert (fast["sizes"][0], slow["sizes"][0]) == (8, 8), "the run began as it would have"
    assert fast["sizes"][30] > 8 > slow["sizes"][30], "in its first epoch of 32 batches"
    assert fast["lr"] == 0.05


@pytest.mark.parametrize("name", [name for name in FITS if name.startswith("rank 0 is slow")])
def test_a_rank_is_seen_to_be_slow_wherever_it_spends_its_time(
    fits: dict[str, list[dict[str, Any]]], name: str
) -> None:
    slow, fast = fits[name]
    assert fast["setting"]["rebalance"]
    assert fast["sizes"][40] > 8 > slow["sizes"][40]


def test_proportional_batches_that_gain_nothing_are_seen_to_and_groups_take_their_place(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    fast, slow = fits["slow for each step"]
    assert min(slow["sizes"]) < 8 < max(fast["sizes"]), "first it was taken for slow for each sample"
    assert fast["setting"]["groups"] == 2
    # When groups were formed depends on how soon it was decided; in the last epoch they are there.
    assert len(fast["last_epoch"]) > 1.5 * len(slow["last_epoch"]), "a slow group delays no fast one"


def test_random_step_times_ask_for_groups_in_mid_epoch(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["random"]:
        assert rank["world"][0] == rank["setting"]["groups"] == 2
        assert rank["updates"] > 0
    assert "batches of the run" in fits["random"][0]["why"]


def test_a_run_whose_speed_changes_is_timed_again_and_goes_on_with_what_is_chosen_then(
    finished: Run, fits: dict[str, list[dict[str, Any]]]
) -> None:
    said = said_by_tuners(finished)
    chosen = fits["steps take three times as long"][0]
    assert chosen["searches"] >= 2, said
    for rank in fits["steps take three times as long"]:
        assert rank["world"][0] == rank["setting"]["groups"] == chosen["chosen"], said
        assert rank["updates"] > 0, "there were groups"


@pytest.mark.parametrize(
    "name", cases(["groups are slower than predicted", "groups are slower than predicted in the only epoch"])
)
def test_groups_that_are_slower_than_predicted_are_given_up_for_good(
    finished: Run, fits: dict[str, list[dict[str, Any]]], name: str
) -> None:
    said = said_by_tuners(finished)
    for rank in fits[name]:
        assert rank["world"][0] == rank["setting"]["groups"] == 1, said
        assert rank["updates"] > 0, "there were groups"
        assert (rank["lr"], rank["momentum"]) == (0.05, 0.9)
    tuned = fits[name][0]
    assert tuned["chosen"] == 1
    assert "were predicted" in tuned["why"]


def test_groups_that_are_slower_than_predicted_are_not_given_up_if_one_group_would_be_too(
    finished: Run, fits: dict[str, list[dict[str, Any]]]
) -> None:
    said = said_by_tuners(finished)
    for rank in fits["all is slower than predicted"]:
        assert rank["world"][0] == rank["setting"]["groups"] == 2, said
    assert fits["all is slower than predicted"][0]["searches"] >= 2, "one group was timed again"


def test_where_a_callback_of_one_group_stops_the_run_it_ends_for_all(fits: dict[str, list[dict[str, Any]]]) -> None:
    ranks = fits["a callback of one group stops it"]
    assert ranks[0]["world"][0] == 2
    assert all(rank["should_stop"] for rank in ranks)
    assert sum(sum(rank["sizes"]) for rank in ranks) < 4 * 512


def test_a_run_that_is_stopped_before_its_first_batch_is_not_searched(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["stopped"]:
        assert (rank["problem"], rank["searches"]) == ("training was stopped before the first batch", 0)
        assert (rank["global_step"], rank["first"]) == (0, [])


def test_a_run_that_diverges_in_groups_goes_on_in_one_from_its_last_good_epoch_and_stays_there(
    fits: dict[str, list[dict[str, Any]]], finished: Run
) -> None:
    for rank in fits["it diverges in groups"]:
        assert rank["world"][0] == rank["setting"]["groups"] == 1
        assert (rank["lr"], rank["momentum"]) == (0.05, 0.9)
    assert fits["it diverges in groups"][0]["searches"] == 1, "or the same would be chosen again"
    chosen, rolled_back = [], []
    for rank in fits["it diverges in groups"]:
        lost = [number for number, loss in enumerate(rank["losses"]) if math.isnan(loss)]
        if lost:  # a group that trains few batches, because its process waits for a processor, may not get so far
            chosen += rank["losses"][32:48]
            rolled_back += rank["losses"][lost[-1] + 1 :][:16]
    assert chosen, said_by_tuners(finished)
    assert statistics.fmean(rolled_back) < statistics.fmean(chosen), "more was learnt since the choice"


def test_an_average_of_the_weights_is_rolled_back_with_them(fits: dict[str, list[dict[str, Any]]]) -> None:
    """What the groups' own weights were when they had diverged is in it no more."""
    for rank in fits["it diverges in groups"]:
        assert all(math.isfinite(number) for parameter in rank["weights"] for number in parameter)


def test_a_run_that_diverges_in_its_only_epoch_is_rolled_back_at_the_next_validation_inside_it(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    diverged = 0
    for rank in fits["it diverges in groups in the only epoch"]:
        assert rank["world"][0] == rank["setting"]["groups"] == 1
        lost = [number for number, loss in enumerate(rank["losses"]) if math.isnan(loss)]
        if lost:
            diverged += 1
            after = rank["losses"][lost[-1] + 1 :]
            assert len(after) >= 16, "the epoch has 128 batches"
            assert statistics.fmean(after) < statistics.fmean(rank["losses"][:16])
    assert diverged


def test_one_group_whose_ranks_stall_is_timed_again_and_goes_on_in_groups(
    fits: dict[str, list[dict[str, Any]]], finished: Run
) -> None:
    for rank in fits["ranks stall now and then"]:
        assert rank["world"][0] == rank["setting"]["groups"] == 2
        assert rank["updates"] > 0
    assert fits["ranks stall now and then"][0]["searches"] == 2, "the first batches had shown nothing"
    assert "timing the run in one group again, because it trains" in finished.output


def test_one_group_that_is_as_fast_as_forecast_is_not_timed_again(fits: dict[str, list[dict[str, Any]]]) -> None:
    assert fits["no rank stalls"][0]["searches"] == fits["no rank stalls"][0]["chosen"] == 1


@pytest.mark.parametrize(
    "name",
    cases(
        [
            "it learns too slowly in groups",
            "it learns too slowly in groups in the only epoch",
            "it learns too slowly in groups in an epoch without validation",
        ]
    ),
)
def test_a_run_whose_loss_stays_high_in_groups_goes_on_with_the_users_own_setting(
    fits: dict[str, list[dict[str, Any]]], finished: Run, name: str
) -> None:
    for rank in fits[name]:
        assert rank["world"][0] == rank["setting"]["groups"] == 1, said_by_tuners(finished)
        assert (rank["lr"], rank["momentum"]) == (0.05, 0.9)
        assert pytest.approx(0.9) in rank["losses"], "it was in groups before"
        assert statistics.fmean(rank["losses"][-16:]) < 0.6
    assert "momentum 0.9, lr 0.05: it lowers the training loss further" in finished.output


def test_where_nothing_was_learnt_in_groups_the_users_own_setting_begins_with_the_weights_of_before_them(
    fits: dict[str, list[dict[str, Any]]], finished: Run
) -> None:
    for rank in fits["nothing is learnt in groups"]:
        tried = next(number for number, (is_trial, _) in enumerate(rank["segments"]) if is_trial)
        at_first = statistics.fmean(rank["losses"][:8])
        until = [math.isclose(loss, at_first, rel_tol=1e-5) for loss in rank["losses"][:tried]]
        formed = tried - until[::-1].index(False)
        weights = [each for _, each in rank["segments"]]
        assert weights[tried] == pytest.approx(weights[formed], rel=1e-6)
        assert weights[tried] != pytest.approx(weights[tried - 1], rel=1e-4), "groups had moved them"
        assert rank["setting"]["groups"] == 1
    assert "is no lower than it was before" in finished.output


def test_a_run_that_learns_nothing_more_with_the_users_own_setting_either_goes_on_in_groups(
    fits: dict[str, list[dict[str, Any]]], finished: Run
) -> None:
    for rank in fits["there is nothing more to learn"]:
        assert rank["setting"]["groups"] == rank["world"][0] == 2
        assert rank["lr"] == pytest.approx(rank["setting"]["lr"])
    assert "your own setting, which was tried, does not lower the training loss further" in finished.output


def ends_of_trials(segments: list[tuple[bool, float]]) -> list[tuple[float, float]]:
    """A sum over the weights with which each trial began, and groups went on after it."""
    pairs = itertools.pairwise(segments)
    changes = [weights for (was_trial, _), (is_trial, weights) in pairs if was_trial != is_trial]
    return list(zip(changes[::2], changes[1::2], strict=False))


@pytest.mark.parametrize(
    ("name", "is_rolled_back"), [("larger steps raise the loss", True), ("there is nothing more to learn", False)]
)
def test_after_a_trial_that_has_raised_the_loss_groups_go_on_from_before_it(
    fits: dict[str, list[dict[str, Any]]], name: str, is_rolled_back: bool
) -> None:
    trials = [trial for rank in fits[name] for trial in ends_of_trials(rank["segments"])]
    assert trials
    for began, ended in trials:
        assert (began == pytest.approx(ended, rel=1e-6)) == is_rolled_back


def test_a_run_that_is_stopped_in_a_trial_that_has_raised_the_loss_ends_with_the_weights_of_before_it(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in fits["it is stopped in a trial"]:
        trial = [weights for is_trial, weights in rank["segments"] if is_trial]
        assert len(trial) == 1
        assert sum(map(abs, rank["weights"][0])) == pytest.approx(trial[0], rel=1e-5)


def test_a_run_that_makes_the_users_own_updates_is_not_rolled_back_whatever_its_loss_does(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in fits["the loss rises by design"]:
        assert rank["setting"]["rebalance"]
        assert (rank["lr"], rank["momentum"], rank["setting"]["lr"]) == (0.05, 0.9, 0.05)


def test_where_nothing_can_be_tuned_groups_are_those_that_the_user_asked_for(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in fits["nothing can be tuned"]:
        assert rank["problem"] == "the training data are a stream, or come from several loaders"
        assert rank["world"] == [2, "AsyncSGD"]
        assert rank["updates"] > 0


def test_a_run_that_ends_before_it_has_shown_what_is_faster_says_so(
    fits: dict[str, list[dict[str, Any]]], finished: Run
) -> None:
    for rank in fits["too short"]:
        assert (rank["problem"], rank["searches"]) == (
            "the run has ended before anything was chosen, or could be used",
            0,
        )
    assert "nothing is tuned: the run has ended before" in said_by_tuners(finished)


def test_epochs_before_a_resume_count_for_whether_a_loss_is_flat(fits: dict[str, list[dict[str, Any]]]) -> None:
    assert not any(is_trial for rank in fits["slow learning is saved"] for is_trial, _ in rank["segments"])
    for rank in fits["slow learning"]:
        assert any(is_trial for is_trial, _ in rank["segments"]), "there are too few epochs after it"


def test_a_method_that_the_user_has_chosen_stays(fits: dict[str, list[dict[str, Any]]]) -> None:
    for rank in fits["a method of the user's"]:
        assert rank["setting"]["method"] == "local_sgd"
        assert rank["world"][1] == "LocalSGD"


@pytest.mark.parametrize("name", ["dealt out beforehand", "by a sampler of the user's"])
def test_data_that_are_dealt_out_beforehand_are_timed_and_groups_change_at_the_end_of_the_epoch(
    fits: dict[str, list[dict[str, Any]]], name: str
) -> None:
    for rank in fits[name]:
        assert rank["world"][0] == rank["setting"]["groups"] == 2
        assert rank["updates"] > 0
        assert rank["steps"] == 3 * 32, "all batches of every epoch"
    assert fits[name][0]["searches"] == 1


def test_a_resumed_run_goes_on_with_what_was_chosen(fits: dict[str, list[dict[str, Any]]]) -> None:
    before, after = (fits[name][0] for name in ("a slow rank", "resumed"))
    assert after["setting"] == before["setting"]
    assert min(fits["resumed"][1]["sizes"]) < 8


def test_gradients_that_are_sparse_or_that_a_hook_averages_are_averaged_as_they_are_on_slow_links_too(
    fits: dict[str, list[dict[str, Any]]],
) -> None:
    assert fits["a slow link"][0]["setting"]["all_reduce"] != "fp32"
    for name in ("sparse gradients on a slow link", "a hook of the user's on a slow link"):
        assert fits[name][0]["setting"]["all_reduce"] == "fp32"
