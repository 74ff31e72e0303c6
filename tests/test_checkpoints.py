"""A checkpoint is one moment of the server, and loads in plain DDP; the other way round, too."""

from __future__ import annotations

from typing import Any

import pytest
from runs import Run, run


@pytest.fixture(scope="module")
def saved() -> Run:
    return run("checkpoints.py", {"servers": 10}, timeout=230)


def rank0(saved: Run, name: str) -> Any:
    return saved.results[0][name]


@pytest.mark.parametrize("resumed", ["omni from ddp", "ddp from omni"])
def test_with_one_group_resuming_across_strategies_is_exact(saved: Run, resumed: str) -> None:
    for rank in (0, 1):
        assert saved.results[rank][resumed]["weights"] == saved.results[rank]["ddp whole"]["weights"]
        assert saved.results[rank][resumed]["lr"] == saved.results[rank]["ddp whole"]["lr"]


def test_the_file_holds_the_masters_weights_and_optimizer_state(saved: Run) -> None:
    half = rank0(saved, "groups half")
    assert half["saved"] == pytest.approx(half["own"], abs=0.0)
    assert half["adam_steps"] == [half["omni"]["run"]["cut"]["clocks"][0]] * 4
    assert any(half["state"].values())


def test_the_extra_key_is_plain_and_the_rest_is_lightnings(saved: Run) -> None:
    assert set(rank0(saved, "groups half")["keys"]) - set(rank0(saved, "ddp half")["keys"]) == {"omni"}
    run = rank0(saved, "groups half")["omni"]["run"]
    reference = {"ranks": 2, "batch_size": 8, "window": 1}
    assert run["groups"] == 2
    progress = {"reference": reference, "batches": 16, "epochs": 1, "samples": 0, "past": 16, "steps": 16}
    assert run["progress"] == progress
    assert (run["cut"]["epoch"], run["cut"]["trained"]) == (0, [[0, 256]])
    assert sum(run["cut"]["pushes"].values()) == run["cut"]["clocks"][0]


def test_a_groups_checkpoint_loads_in_plain_ddp(saved: Run) -> None:
    # max_epochs is reached already: what DDP holds is what was saved
    assert rank0(saved, "ddp from groups")["own"] == pytest.approx(rank0(saved, "groups half")["own"], abs=0.0)


def test_groups_resume_with_the_servers_clock_state_and_schedule(saved: Run) -> None:
    later = rank0(saved, "groups from groups")
    assert later["adam_steps"] == [later["omni"]["run"]["cut"]["clocks"][0]] * 4
    assert later["adam_steps"][0] == 2 * rank0(saved, "groups half")["adam_steps"][0]
    assert later["lr"] == rank0(saved, "ddp whole")["lr"]
    assert later["val_loss"] < rank0(saved, "groups half")["val_loss"]


def test_groups_resume_from_a_checkpoint_of_before_its_entry_had_a_version(saved: Run) -> None:
    later = rank0(saved, "groups from the first version")
    assert later["adam_steps"] == [later["omni"]["run"]["cut"]["clocks"][0]] * 4
    assert later["adam_steps"][0] == 2 * rank0(saved, "groups half")["adam_steps"][0]
    assert later["lr"] == rank0(saved, "ddp whole")["lr"]


def test_groups_resume_with_the_momentum_of_the_fragments_that_their_servers_have_cut(saved: Run) -> None:
    half, later, at_one = (
        rank0(saved, name) for name in ("fragments half", "fragments from fragments", "fragments at one server")
    )
    for fit, servers in ((half, 2), (later, 2), (at_one, 1)):
        (remembered,) = fit["omni"]["run"]["server"]
        assert remembered.get("servers", 1) == servers
        assert len(remembered["fragments"]) == 2
        assert all(each["outer"] for each in remembered["fragments"])
    clocks = [fit["omni"]["run"]["cut"]["clocks"][0] for fit in (half, later, at_one)]
    assert clocks[1] == clocks[2] == 2 * clocks[0] > 0
    assert max(later["val_loss"], at_one["val_loss"]) < half["val_loss"]


def test_groups_resume_from_a_ddp_checkpoint(saved: Run) -> None:
    resumed = rank0(saved, "groups from ddp")
    assert resumed["lr"] == rank0(saved, "ddp whole")["lr"]
    assert resumed["val_loss"] < rank0(saved, "ddp half")["val_loss"]


def test_groups_resume_inside_an_epoch_of_ddp_with_the_samples_that_are_left(saved: Run) -> None:
    before = [rank["ddp inside an epoch"] for rank in saved.results.values()]
    after = [rank["groups from inside"] for rank in saved.results.values()]
    trained = [sample for rank in before for sample in rank["seen"]["1"][: 6 * 8]]
    left = [sample for rank in after for sample in rank["seen"]["1"]]
    assert sorted(trained + left) == list(range(256))
    assert {rank["scheduled"] for rank in before + after} == {32}


def test_after_fit_rank_zero_has_the_servers_state_for_a_last_save(saved: Run) -> None:
    assert rank0(saved, "groups half")["after_fit_state"] == 4
