"""A checkpoint is one moment of the server, and loads in plain DDP; the other way round, too."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from runs import Run, run

from lightning_omni.runtime.leased_loader import RankLeases
from lightning_omni.runtime.server_exchange import ServerSnapshot
from lightning_omni.runtime.state.checkpoint import RunCheckpoint
from lightning_omni.strategy.checkpoints import CheckpointHooks, _count_as_ddp, set_batches
from lightning_omni.strategy.loops.progress import RunProgress
from lightning_omni.wire.messages import SnapshotId
from lightning_omni.wire.steps_and_samples import Progress, ReferenceBatch


@pytest.fixture(scope="module")
def saved() -> Run:
    return run("checkpoints.py", {"servers": 13}, timeout=230)


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
    progress = {"reference": reference, "batches": 16, "epochs": 1, "samples": 0, "past": 16, "past_batches": 16}
    assert run["progress"] == {**progress, "steps": 16}
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


def test_groups_resume_with_the_momentum_of_the_fragments_that_their_servers_have_cut(saved: Run) -> None:
    half, later = (rank0(saved, name) for name in ("fragments half", "fragments from fragments"))
    for fit in (half, later):
        (remembered,) = fit["omni"]["run"]["server"]
        assert remembered.get("servers", 1) == 2
        assert len(remembered["fragments"]) == 2
        assert all(each["outer"] for each in remembered["fragments"])
    clocks = [fit["omni"]["run"]["cut"]["clocks"][0] for fit in (half, later)]
    assert clocks[1] == 2 * clocks[0] > 0
    assert later["val_loss"] < half["val_loss"]


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


def test_ddp_trains_the_rest_of_an_epoch_in_which_groups_were_saved(saved: Run) -> None:
    trained = rank0(saved, "groups inside an epoch")["trained"]
    assert 48 <= trained < 96, "the group that has saved was ahead of the other"
    for rank in saved.results.values():
        assert len(rank["ddp from inside"]["seen"]) == 8 * (16 - trained // 16)
        assert rank["ddp from inside"]["epochs"] == 1


@pytest.mark.parametrize("is_last", [False, True])
def test_an_epoch_whose_last_batch_is_trained_stays_over_and_another_goes_on_where_ddp_would(is_last: bool) -> None:
    counted = {"ready": 9, "started": 9, "processed": 9, "completed": 8}
    loops = {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": is_last, "current": dict(counted)}}}
    set_batches(loops, 6, is_over=is_last)
    moved: Any = {"ready": 6, "started": 6, "processed": 6, "completed": 5}
    assert loops["fit_loop"]["epoch_loop.batch_progress"]["current"] == moved
    set_batches(loops, 4, is_over=not is_last)
    assert loops["fit_loop"]["epoch_loop.batch_progress"]["current"] == moved


@pytest.mark.parametrize(("samples", "trained", "expected"), [(0, 3, 1), (0, 0, 0), (64, 3, 4), (256, 9, 9)])
def test_a_checkpoint_inside_an_epoch_has_the_batches_of_ddp_and_one_before_the_first_exchange(
    samples: int, trained: int, expected: int
) -> None:
    """Lightning would take an epoch without a batch for one that has yet to begin."""
    counted = dict.fromkeys(("ready", "started", "processed", "completed"), trained)
    loops = {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": False, "current": counted}}}
    _count_as_ddp({"loops": loops}, Progress(ReferenceBatch(2, 8), batches=16, samples=samples))
    assert set(counted.values()) == {expected}


@pytest.mark.parametrize("name", ["groups from inside of groups", "one group from inside of groups"])
def test_groups_and_one_group_resume_inside_an_epoch_with_the_samples_that_are_left(saved: Run, name: str) -> None:
    trained, ranks = rank0(saved, "groups inside an epoch")["trained"], saved.results.values()
    seen = sorted(sample for rank in ranks for sample in rank[name]["seen"])
    assert len(seen) == len(set(seen)) == 256 - trained
    assert {rank[name]["epochs"] for rank in ranks} == {1}


@pytest.mark.parametrize("name", ["groups", "one group"])
def test_what_groups_had_trained_and_not_exchanged_when_they_saved_is_trained_again(saved: Run, name: str) -> None:
    ranks = [rank[f"{name} from before an exchange"] for rank in saved.results.values()]
    seen = sorted(sample for rank in ranks for sample in rank["seen"])
    assert {rank["epochs"] for rank in ranks} == {1}
    # Nothing, but where this group's third batch came so late that the server had heard of some.
    trained = sum(stop - start for start, stop in rank0(saved, "before an exchange")["trained"])
    assert len(seen) == len(set(seen)) == 768 - trained
    assert {rank["scheduled"] for rank in ranks} == {48}


def test_a_checkpoint_tells_by_how_much_the_schedule_of_the_group_that_saves_was_ahead_of_its_weights(
    saved: Run,
) -> None:
    early = rank0(saved, "before an exchange")
    done = sum(stop - start for start, stop in early["trained"]) // 16
    [[made, due]] = early["schedules"]
    assert early["scheduled"] == made >= due == done


def test_inside_an_epoch_a_checkpoint_has_the_servers_weights_whatever_a_module_says_that_its_state_is(
    saved: Run,
) -> None:
    own = rank0(saved, "own state")
    assert own["has moved"]
    assert own["goes on"], "the group trains on with its own weights"
    assert (
        own["names"]
        == sorted(own["as at first"])
        == [*(f"my.net.{n}.{kind}" for n in (0, 2) for kind in ("bias", "weight")), "sum"]
    )
    assert own["nested"]


def test_after_fit_rank_zero_has_the_servers_state_for_a_last_save(saved: Run) -> None:
    assert rank0(saved, "groups half")["after_fit_state"] == 4


def test_a_state_that_was_read_and_not_saved_is_in_no_later_checkpoint() -> None:
    parts: Any = SimpleNamespace(
        world_options=SimpleNamespace(model_parallel=None),
        namespace=SimpleNamespace(warn=print),
        current_world=None,
        take_time=lambda: None,
    )
    states, failures = SimpleNamespace(is_described=False), SimpleNamespace(at=None)
    hooks = CheckpointHooks(parts, states, failures)  # type: ignore[arg-type]
    hooks.contents._snapshot = ServerSnapshot(SnapshotId(), [], {})
    assert hooks.module_state(dict) == {}
    assert hooks.contents._snapshot is None


def test_a_group_that_joins_is_not_ended_by_the_counts_of_the_one_that_records() -> None:
    run = RunProgress(SimpleNamespace(leases=None), lambda _: None)  # type: ignore[arg-type]
    for most, limit in ((-1, None), (5, sys.maxsize)):
        run.trainer = SimpleNamespace(max_steps=most)  # type: ignore[assignment]
        run.enter(None)
        assert run.step_limit == limit


def resumed_on(ranks: int, samples: int, warnings: list[str]) -> RunProgress:
    """A run of so many ranks, from a checkpoint that six ranks have saved inside epoch 1 of 50,000 samples."""
    total = -(-samples // ranks) * ranks
    leases = RankLeases(ranks, 4, total, 0, lambda epoch: None, is_local=False, dataset_size=samples)
    data: Any = SimpleNamespace(leases=leases)
    run = RunProgress(data, warnings.append)
    run.resume(
        RunCheckpoint(SnapshotId(epoch=1, total=50_004, trained=((0, 20_000), (40_000, 50_004))), samples=50_000)
    )
    run.check_resumed(1)
    return run


@pytest.mark.parametrize(("ranks", "total"), [(6, 50_004), (7, 50_001), (8, 50_000), (32, 50_016)])
def test_ranges_that_another_number_of_ranks_has_trained_are_not_trained_again(ranks: int, total: int) -> None:
    warnings: list[str] = []
    run = resumed_on(ranks, 50_000, warnings)
    assert run.trained_spans(1) == ((0, 20_000), (40_000, min(50_004, total)))
    assert (run.trained_spans(2), warnings) == ((), [])


def test_ranges_of_another_dataset_are_trained_again_and_a_warning_says_so() -> None:
    warnings: list[str] = []
    assert resumed_on(6, 50_001, warnings).trained_spans(1) == (), "padded alike, and in another order"
    (warning,) = warnings
    assert "epoch 1 of 50000 samples, and the training data now has 50001" in warning


def test_a_checkpoint_of_one_group_is_that_of_ddp(saved: Run) -> None:
    assert rank0(saved, "omni half")["keys"] == rank0(saved, "ddp half")["keys"]


@pytest.mark.parametrize("batch_size", [8, 16])
def test_half_an_epoch_of_groups_is_trained_to_its_end_with_batches_of_any_size(saved: Run, batch_size: int) -> None:
    trained = [sample for rank in saved.results for sample in saved.results[rank][f"half, {batch_size}"]]
    assert len(trained) == len(set(trained)) == 128


@pytest.mark.parametrize("what", ["seen", "predicted"])
def test_a_fit_whose_module_loads_weights_trains_and_then_predicts_all_samples(saved: Run, what: str) -> None:
    assert sorted(each for rank in (0, 1) for each in saved.results[rank]["pretrained"][what]) == list(range(256))


def test_an_epoch_that_max_steps_has_cut_short_is_resumed_in_its_own_order(saved: Run) -> None:
    before, after = (
        {sample for rank in saved.results for sample in saved.results[rank][name]["seen"]["1"]}
        for name in ("cut", "cut, resumed")
    )
    assert (len(before), len(after), len(before | after)) == (64, 192, 256)
