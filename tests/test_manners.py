"""What the strategy leaves as it is: the Trainer's public attributes, its callbacks, learning-rate finders."""

from __future__ import annotations

from typing import Any

import pytest
from runs import Run, run

FITS: dict[str, dict[str, Any]] = {
    "ddp": {"groups": 0},
    "one group": {"groups": 1},
    "groups": {"groups": 2},
    "ddp by steps": {"groups": 0, "trainer": {"max_steps": 20, "max_epochs": 5, "val_check_interval": 0.5}},
    "groups by steps": {"groups": 2, "trainer": {"max_steps": 20, "max_epochs": 5, "val_check_interval": 0.5}},
    "gathering": {"groups": 2, "net": "gathers"},
    "ddp without buffers": {"groups": 0, "net": "plain", "trainer": {}},
    "one group by time": {"groups": 1, "net": "slow", "trainer": {"val_check_interval": "00:00:00:01"}},
    "groups by time": {"groups": 2, "trainer": {"val_check_interval": "00:00:00:01"}},
    "groups that fail": {"groups": 2, "raises": True},  # the last: processes that were lost do not come back
}
MAY_DIFFER = {"strategy", "train_dataloader"}
COUNTED_BY_GROUP = {"global_step", "batch_idx", "total_batch_idx", "is_last_batch", "done", "skip"}
COUNTED_BY_GROUP |= {"num_training_batches"}
"""A group trains as many batches as it finds time for."""


@pytest.fixture(scope="module")
def read() -> Run:
    return run("manners.py", {"fits": list(FITS.values())}, timeout=400)


def fits(read: Run, name: str) -> list[dict[str, Any]]:
    return [read.results[rank][list(FITS).index(name)] for rank in (0, 1)]


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Names of public attributes of Trainer and loops that differ at any moment at which both were read."""
    found: set[str] = set()
    for moment in one.keys() & other.keys():
        for owner, values in one[moment].items() if isinstance(one[moment], dict) else ():
            others = other[moment][owner]
            found |= {name for name in values | others if values.get(name) != others.get(name)}
    return found


def test_public_attributes_are_those_of_ddp_before_in_and_after_a_fit(read: Run) -> None:
    for ddp, one, groups in zip(fits(read, "ddp"), fits(read, "one group"), fits(read, "groups"), strict=True):
        assert {"before", "epoch start", "batch start", "batch end", "validation end", "epoch end", "after"} < set(ddp)
        assert differences(ddp, one) <= MAY_DIFFER
        assert differences(ddp, groups) <= MAY_DIFFER | COUNTED_BY_GROUP
        assert ddp["metrics"] == one["metrics"]
        assert [name for name in groups["metrics"] if not name.startswith("omni/")] == ddp["metrics"]
        assert ddp["weights"] == one["weights"]


def test_max_steps_and_val_check_batch_stay_the_users_while_groups_count_together(read: Run) -> None:
    for ddp, groups in zip(fits(read, "ddp by steps"), fits(read, "groups by steps"), strict=True):
        assert differences(ddp, groups) <= MAY_DIFFER | COUNTED_BY_GROUP
        assert groups["batch end"]["trainer"]["max_steps"] == "20"


def test_a_fit_that_raises_leaves_the_trainer_as_ddp_does(read: Run) -> None:
    for before, failed in zip(fits(read, "groups"), fits(read, "groups that fail"), strict=True):
        assert "something is wrong with this batch" in failed["error"]
        after = {name for name in before["after"]["fit_loop"] if name not in COUNTED_BY_GROUP}
        for name in after - {"restarting"}:
            assert failed["after"]["fit_loop"][name] == before["batch end"]["fit_loop"][name], name
        assert failed["after"]["trainer"]["callbacks"] == "Reader"
        assert failed["after"]["trainer"]["max_steps"] == "-1"
        assert failed["after"]["trainer"]["val_check_batch"] == "16"


def test_a_gather_in_the_training_step_sees_the_group_and_says_so_once(read: Run) -> None:
    for each in fits(read, "gathering"):
        assert each["gathered"] == [["training", 1], ["validation", 2]]
    said = [line for line in read.output.splitlines() if "all_gather in a training step" in line]
    assert len(said) == 1
    assert "sees the 1 rank(s) of its compute group, not all 2" in said[0]
    assert "groups=1" in said[0]


def test_one_group_validates_by_the_clock_and_several_are_refused(read: Run) -> None:
    for ddp, one in zip(fits(read, "ddp without buffers"), fits(read, "one group by time"), strict=True):
        assert one["error"] == ""
        assert one["validation end"]["trainer"]["is_last_batch"] == "False", "a second is over before the epoch"
        assert one["weights"] == ddp["weights"]
    for groups in fits(read, "groups by time"):
        assert "val_check_interval as a duration" in groups["error"]


# --- Learning-rate finders -------------------------------------------------------------------------------------------

FINDERS: dict[str, dict[str, Any]] = {
    "ddp": {"groups": 0, "epochs": []},
    "one group": {"groups": 1, "epochs": []},
    "groups": {"groups": 2, "epochs": []},
    "groups, tuner": {"groups": 2, "tuner": True},
    "groups, by steps": {"groups": 2, "epochs": [], "onecycle": True},
    "groups, in epoch 0": {"groups": 2, "epochs": [0]},
    "local steps, in epochs 0 and 1": {"groups": 2, "epochs": [0, 1], "method": "local_sgd:period=4"},
    "reloading, in epochs 0 and 1": {"groups": 2, "epochs": [0, 1], "reload": True},
    "inside an epoch": {"groups": 2, "early": True},
}


@pytest.fixture(scope="module")
def found() -> Run:
    return run("finder.py", {"fits": list(FINDERS.values())}, timeout=400)


def finds(found: Run, name: str) -> list[dict[str, Any]]:
    return [found.results[rank][list(FINDERS).index(name)] for rank in (0, 1)]


@pytest.mark.parametrize("name", ["one group", "groups", "groups, tuner", "groups, by steps", "groups, in epoch 0"])
def test_a_learning_rate_finder_finds_what_it_finds_under_ddp_and_then_groups_train(found: Run, name: str) -> None:
    (ddp, _), ranks = finds(found, "ddp"), finds(found, name)
    for each in ranks:
        assert each["error"] == ""
        assert each["found"] == ddp["found"]
        assert each["lr"] == ddp["lr"] or name == "groups, by steps"
        assert all(each["weights"]), "they are put back"
        assert each["callbacks"] == ([] if "tuner" in name else ["Finder"])
        assert each["groups"] == (1 if name == "one group" else 2)
        assert each["updates"] == (32 if name == "one group" else 64)
    assert ranks[0]["final"] == ranks[1]["final"]
    if name == "one group":
        assert ranks[0]["final"] == ddp["final"]


def test_a_finder_between_epochs_works_for_groups_with_weights_of_their_own(found: Run) -> None:
    (ddp, _), ranks = finds(found, "ddp"), finds(found, "local steps, in epochs 0 and 1")
    for each in ranks:
        assert each["error"] == ""
        assert each["found"][0] == ddp["found"][0]
        assert all(each["weights"])
        assert each["groups"] == 2


def test_a_finder_between_epochs_works_where_every_epoch_has_loaders_of_its_own(found: Run) -> None:
    (ddp, _), ranks = finds(found, "ddp"), finds(found, "reloading, in epochs 0 and 1")
    for each in ranks:
        assert each["error"] == ""
        assert each["found"][0] == ddp["found"][0]
        assert each["updates"] == 64, "of both groups, in two epochs"


def test_a_finder_inside_an_epoch_of_several_groups_is_refused(found: Run) -> None:
    assert "run it in on_fit_start or on_train_epoch_start" in finds(found, "inside an epoch")[0]["error"]
