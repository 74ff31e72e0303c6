"""max_steps are those of DDP and an epoch is one pass, also where groups change, and where runs go on."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from runs import Run, run

BATCH = 16
"""Samples in a step of both ranks."""


ONLY_WITH_ALL = [  # of which each part is one of another fit, too
    "more of two",
    "more of one, inside",
    "more at once",
    "no more at once",
    "validated",
    "inside, in two",
]


def cases(*names: str) -> list[Any]:
    """Parameters of a test; some are run with ``--all`` only."""
    return [pytest.param(each, marks=pytest.mark.exhaustive) if each in ONLY_WITH_ALL else each for each in names]


@pytest.fixture(scope="module")
def fits(is_all: bool) -> Run:
    return run("steps.py", {"servers": 40, "left_out": [] if is_all else ONLY_WITH_ALL}, timeout=230)


def of(fits: Run, name: str) -> list[dict[str, Any]]:
    return [fits.results[rank][name] for rank in sorted(fits.results)]


def trained(fits: Run, name: str) -> list[int]:
    return list(chain.from_iterable(chain(*each["samples"].values()) for each in of(fits, name)))


@pytest.mark.parametrize("name", ["regrouped", "regrouped at the end"])
def test_where_groups_change_inside_an_epoch_max_steps_are_still_those_of_ddp(fits: Run, name: str) -> None:
    assert abs(len(trained(fits, name)) - 20 * BATCH) < BATCH
    assert all(each["epochs"] == [0] for each in of(fits, name))


def test_the_first_group_that_has_made_max_steps_by_hand_ends_the_run(fits: Run) -> None:
    one, other = of(fits, "by hand")
    assert len(one["samples"]["0"]) == 20 * 8 > len(other["samples"]["0"])
    assert all((each["epochs"], each["steps"]) == ([0], 20) for each in (one, other))


def test_ranks_of_different_groups_that_step_by_hand_end_together_once_they_are_one(fits: Run) -> None:
    one, other = of(fits, "by hand, windows")
    assert (one["steps"], one["scheduled"]) == (other["steps"], other["scheduled"])
    assert len(one["samples"]["1"][5 * 8 :]) == len(other["samples"]["1"][5 * 8 :])


def test_a_schedule_that_is_stepped_by_hand_counts_its_own_groups_steps_and_rank_0_warns_once(fits: Run) -> None:
    one, other = of(fits, "by hand, scheduled")
    for each in (one, other):
        assert each["scheduled"] == [len(list(chain(*each["samples"].values()))) // 8]
    assert one["scheduled"] > other["scheduled"]
    assert one["saved"] == one["counted"], "a checkpoint has rank 0's, as it is"
    [said] = one["said"]
    assert "Step such a scheduler once an epoch" in said
    assert other["said"] == []


@pytest.mark.parametrize("name", ["by count", "by count of the loader"])
def test_a_hook_that_compares_numbers_of_batches_finds_the_last_of_its_own_group(fits: Run, name: str) -> None:
    one, other = of(fits, name)
    assert len(one["samples"]["1"]) > 16 * 8 > len(other["samples"]["1"]), "and not as many as under DDP"
    for each in (one, other):
        assert (each["left"], each["scheduled"], each["rate"]) == (0, [2], 0.05 / 4)
        assert each["said"] == []


def test_ranks_that_do_not_end_an_epoch_alike_are_named_once_with_what_to_do(fits: Run) -> None:
    """Their hooks compare with a number that they have kept: one group comes to it inside its epoch, the other not."""
    one, other = of(fits, "by count of before")
    assert (one["scheduled"], other["scheduled"], other["said"]) == ([2], [0], [])
    [said] = one["said"]
    assert "epoch 0 has ended with different learning rates: rank 0 has 0.025 and rank 1 has 0.05." in said
    assert "ask trainer.is_last_batch" in said


def test_metrics_that_keep_lists_are_of_every_row_although_groups_have_trained_different_numbers_of_batches(
    fits: Run,
) -> None:
    one, other = of(fits, "lists")
    for mine, theirs in zip(one["found"], other["found"], strict=True):
        assert mine[0] > 18 > theirs[0]
        assert mine[1:-1] == theirs[1:-1]
        number, kept, joined, rare_number, rare, rare_joined = mine[1:-1]
        assert (number, kept, joined) == (32, list(range(256)), list(range(256)))
        assert rare_number == mine[0] - 19, "what one rank alone has"
        assert rare == rare_joined != []
        assert (mine[-1], theirs[-1]) == (mine[0], theirs[0]), "each has its own again"


def test_a_mean_over_an_odd_number_of_batches_is_divided_by_that_number(fits: Run) -> None:
    assert [each["one"] for each in of(fits, "lists")] == [1.0, 1.0]


def test_a_metric_that_is_reduced_over_the_world_by_name_is_that_of_all_ranks(fits: Run) -> None:
    assert [each["number"] for each in of(fits, "lists")] == [32.0, 32.0]


def test_a_metric_that_one_group_alone_has_logged_in_an_epoch_is_computed_on_all_ranks(fits: Run) -> None:
    one, other = of(fits, "lists")
    batches = one["found"][-1][0]  # of the fast group, which has logged the numbers of those from the 20th on
    for name in ("rare", "rare, of a metric", "rare, of double precision", "rare, by name"):
        assert one[name] == other[name] == (19 + batches - 1) / 2


def test_a_plateau_by_steps_follows_validations_inside_the_epoch_on_all_ranks_alike(fits: Run) -> None:
    """After 8 and 16 batches of DDP in each of two epochs; the first is the best so far."""
    assert [(each["scheduled"], each["rate"]) for each in of(fits, "plateau")] == [([4], 0.05 / 8)] * 2


def test_loaders_that_are_made_once_more_in_validations_are_trained_from_the_next_epoch_on(fits: Run) -> None:
    by_epoch = [sorted(chain(*(each["samples"][epoch] for each in of(fits, "remade")))) for epoch in "01"]
    assert by_epoch == [list(range(256)), list(range(384))]


def test_what_is_skipped_of_an_epoch_counts_neither_for_max_steps_nor_for_schedules(fits: Run) -> None:
    """Each group skips after four batches, and one group's skip ends the epoch for all."""
    steps = len(trained(fits, "skips")) / BATCH
    assert 14 <= steps <= 17
    assert all(14 <= each["scheduled"][0] <= 17 for each in of(fits, "skips"))


def test_a_schedule_that_the_modules_hook_steps_from_an_epoch_on_counts_the_steps_of_ddp_there(fits: Run) -> None:
    assert [each["scheduled"] for each in of(fits, "from an epoch on")] == [[16], [16]]


def test_an_epoch_that_one_group_skips_the_rest_of_counts_for_schedules_by_epoch_in_all(fits: Run) -> None:
    assert [each["scheduled"] for each in of(fits, "skips, scheduled by epoch")] == [[3], [3]]


MORE = ["more of two", "more of one", "more of two, saved by one"]
INSIDE_STILL = ["more of two, inside", "more of one, inside"]
AT_ONCE = ["more at once", "more, evaluated"]


@pytest.mark.parametrize("name", cases(*MORE, *INSIDE_STILL, *AT_ONCE, "more by hand"))
def test_a_run_that_max_steps_has_ended_inside_an_epoch_goes_on_for_the_steps_that_are_added(
    fits: Run, name: str
) -> None:
    assert abs(len(trained(fits, name)) - 10 * BATCH) < (2 * BATCH if "hand" in name else BATCH)


@pytest.mark.parametrize("name", cases(*INSIDE_STILL))
def test_a_run_that_was_saved_with_its_last_step_goes_on_inside_the_epoch_that_max_steps_cut_short(
    fits: Run, name: str
) -> None:
    assert all(list(each["samples"]) == ["1"] and each["epochs"] == [] for each in of(fits, name))


@pytest.mark.parametrize("name", cases(*MORE))
def test_a_checkpoint_counts_as_many_batches_of_an_epoch_that_max_steps_cut_short_as_one_of_ddp(
    fits: Run, name: str
) -> None:
    """Four, and not those of the group that saves: or a run that goes on would end its epoch after so many more."""
    assert [each["saved"] for each in of(fits, name)] == [4, 4]


@pytest.mark.parametrize("name", cases(*MORE, *INSIDE_STILL, *AT_ONCE, "no more"))
def test_an_epoch_that_max_steps_cuts_short_does_not_count_for_schedules_by_epoch(fits: Run, name: str) -> None:
    """The first epoch, of 16 steps, is whole, and no other; a further fit at once has a schedule of its own."""
    whole = 0 if name in AT_ONCE else 1
    assert [each["scheduled"] for each in of(fits, name)] == [[whole], [whole]]


@pytest.mark.parametrize("name", cases("no more", "no more at once"))
def test_a_run_that_max_steps_has_ended_does_not_go_on_by_itself(fits: Run, name: str) -> None:
    assert trained(fits, name) == []
    assert all(each["epochs"] == [] and each["starts"] == 0 for each in of(fits, name)), "as with DDP"


INSIDE = ["inside, in one group", "inside, in two", "inside, regrouped", "inside, regrouped, in two"]


@pytest.mark.parametrize("name", cases(*INSIDE))
def test_an_epoch_of_several_groups_is_resumed_with_the_samples_that_are_left(fits: Run, name: str) -> None:
    before = of(fits, name)[0]["before"]
    assert before
    assert sorted(before + trained(fits, name)) == list(range(256))


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        pytest.param("validated", 256, marks=pytest.mark.exhaustive),
        ("validated, in one group", 256),
        ("validated, by DDP", 256),
        ("validated at max_steps, by DDP", 256),
        ("validated, of one group", (44 - 32) * BATCH),
    ],
)
def test_an_epoch_that_was_saved_in_its_last_validation_is_over(fits: Run, name: str, samples: int) -> None:
    """No batch of it is trained once more, however many of its batches the group of rank 0 has trained."""
    assert all(list(each["samples"]) == ["2"] for each in of(fits, name))
    assert abs(len(trained(fits, name)) - samples) < BATCH
    steps = 32 + samples // BATCH
    assert all(steps - 2 <= each["scheduled"][0] <= steps for each in of(fits, name))


@pytest.mark.parametrize("name", cases(*INSIDE))
def test_a_schedule_in_steps_that_is_resumed_inside_an_epoch_ends_where_the_run_does(fits: Run, name: str) -> None:
    """The rank that saves has not heard of the last steps; the checkpoint has its schedule."""
    saved = of(fits, name)[0]
    if "regrouped" not in name:  # where one group saves, it has
        assert saved["behind"] > 0
    assert saved["rate"] == pytest.approx(0.05 * 0.999 ** saved["counted"], rel=1e-12)
    assert [each["scheduled"] for each in of(fits, name)] == [[32], [32]]
