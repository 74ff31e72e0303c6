"""Validation for which no group waits: one group evaluates one moment's weights, and all ranks hear what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import Run, Running
from test_server_core import Link, expect_refusal, gradient, push_of, trained_link, varied
from torch import nn

from lightning_omni.errors import ConfigurationError, ProtocolError
from lightning_omni.server.epochs.validation import MOST_OPEN, Evaluation, ValidationBook
from lightning_omni.strategy.pytorch_lightning import OmniStrategy
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.messages import EpochPlan

# --- The book --------------------------------------------------------------------------------------------------------


def evaluation(text: str) -> Evaluation:
    return Packed(text.encode(), ()), b""


MOVES = st.lists(st.tuples(st.sampled_from(["pass", "publish", "die", "read"]), st.integers(0, 3)), max_size=60)


@varied
@given(MOVES)
def test_every_point_is_validated_once_or_missed_and_all_ranks_hear_of_it_in_one_order(
    moves: list[tuple[str, int]],
) -> None:
    book, passed, given_out, heard = ValidationBook(), [0] * 4, dict[int, int](), [list[Any]() for _ in range(4)]
    alive, published, void = {0, 1, 2, 3}, set[int](), set[int]()
    for what, group in moves:
        mine = [number for number, by in given_out.items() if by == group]
        if group not in alive:
            continue
        if what == "pass" and not mine:  # it evaluates before it trains on
            passed[group] += 1
            number = book.claim(group, 0, passed[group])
            assert book.claim(group, 0, passed[group]) == number, "its members agree"
            if number:
                given_out[number] = group
        elif what == "publish" and mine:
            book.publish(group, mine[0], evaluation(f"of {mine[0]}"))
            published.add(mine[0])
            del given_out[mine[0]]
        elif what == "die" and len(alive) > 1:
            book.evict(group)
            alive.discard(group)
            void |= set(mine)
            given_out = {number: by for number, by in given_out.items() if by != group}
            assert not mine or book.is_missed
        elif what == "read":
            while len(heard[group]) < book.complete:
                heard[group].append(book.read(group, len(heard[group]) + 1))
            if group == min(alive):
                book.save(len(heard[group]))
            book.forget(alive)
        assert not set(range(1, book.complete + 1)) & set(given_out)
        assert len(published) + len(given_out) + bool(book.is_missed) <= max(passed) + len(void)
    for known in heard:
        assert known == [None if number in void else evaluation(f"of {number}") for number in range(1, len(known) + 1)]


def test_no_more_validations_are_open_than_the_recorder_saves() -> None:
    book = ValidationBook()
    given_out = [book.claim(group=0, epoch=0, passed=point) for point in range(1, MOST_OPEN + 3)]
    assert given_out == [*range(1, MOST_OPEN + 1), 0, 0]
    book.publish(0, 1, evaluation(""))
    book.read(rank=0, number=1)
    assert book.claim(group=1, epoch=0, passed=1) == 0, "the weights of the first may still be saved"
    book.save(1)
    assert book.claim(group=2, epoch=0, passed=1) == MOST_OPEN + 1, "the point that was missed"


def test_what_a_server_that_died_has_told_no_rank_of_is_void_and_done_again() -> None:
    book = ValidationBook()
    assert [book.claim(group=0, epoch=0, passed=point) for point in (1, 2, 3)] == [1, 2, 3]
    book.publish(0, 1, evaluation("heard"))
    assert book.read(rank=1, number=1) == evaluation("heard")
    book.publish(0, 2, evaluation("not heard"))
    after = msgspec.msgpack.decode(msgspec.msgpack.encode(book), type=ValidationBook)
    after.go_back()
    assert after.claim(group=1, epoch=0, passed=3) == 4, "whose weights there are"
    after.publish(0, 3, evaluation("of weights that are no more"))
    after.publish(1, 4, evaluation("again"))
    read = [after.read(rank=0, number=number) for number in (1, 2, 3, 4)]
    assert read == [evaluation("heard"), None, None, evaluation("again")]


def test_what_no_group_was_given_cannot_be_published_and_what_is_not_known_not_read() -> None:
    book = ValidationBook()
    book.claim(group=0, epoch=0, passed=1)
    with pytest.raises(ProtocolError, match="was not given to group 1"):
        book.publish(1, 1, evaluation(""))
    with pytest.raises(ProtocolError, match="no result of validation 1"):
        book.read(0, 1)


# --- The server ------------------------------------------------------------------------------------------------------


def weights_in(snapshot: m.Snapshot, payload: bytes) -> Any:
    return unpack(snapshot.packed, torch.frombuffer(bytearray(payload), dtype=torch.uint8))["parts"][0]


@pytest.fixture
def link() -> Link:
    """Two groups of one rank, in an epoch."""
    link = trained_link((0,), (1,))
    for rank in range(2):
        link.control(rank, m.OpenEpoch(plan=EpochPlan(epoch=0, total=64, batch_size=2, budget=64)))
    return link


def claim(link: Link, rank: int, passed: int) -> int:
    number: int = link.control(rank, m.ClaimValidation(epoch=0, generation=1, passed=passed)).number
    return number


def result(number: int, **tree: Any) -> tuple[m.PublishEvaluation, bytes]:
    packed, buffer = pack(tree)
    return m.PublishEvaluation(number=number, packed=packed, nbytes=buffer.numel()), buffer.numpy().tobytes()


def test_weights_of_a_validation_stay_as_they_were_when_it_began(link: Link) -> None:
    assert (claim(link, 1, 1), claim(link, 0, 1)) == (1, 0)
    evaluated = link.data(1, m.TakeSnapshot(with_state=False, version=1))
    link.data(0, *push_of(gradient(0)))
    saved = link.data(0, m.TakeSnapshot(version=1))
    assert evaluated[0].cut == saved[0].cut
    mine, theirs = weights_in(*evaluated), weights_in(*saved)
    assert all(torch.equal(mine["weights"][name], weight) for name, weight in theirs["weights"].items())
    assert mine["state"] == {}
    assert theirs["state"] != {} or theirs["clock"] == 0
    moved = weights_in(*link.data(0, m.TakeSnapshot()))
    assert any(not torch.equal(moved["weights"][name], weight) for name, weight in theirs["weights"].items())
    assert link.control(0, m.ReleaseVersion(number=1)) == m.VersionReleased()
    assert weights_in(*link.data(0, m.TakeSnapshot(version=1)))["clock"] == 1, "it is not kept any more"
    expect_refusal(link.control(1, m.ReleaseVersion(number=1)), "protocol", "only rank 0 saves")


def test_versions_that_no_validation_is_of_take_no_room_from_those_that_are_evaluated(link: Link) -> None:
    for number in (1, 1000, 2**63 - 1):
        expect_refusal(link.data(1, m.TakeSnapshot(version=number))[0], "protocol", "0 were given to groups")
    for number in range(1, 2 * MOST_OPEN):
        assert claim(link, 1, number) == number
        link.data(1, *result(number, loss=0.0))
        assert isinstance(link.data(0, m.TakeSnapshot(version=number))[0], m.Snapshot)
        link.control(0, m.ReleaseVersion(number=number))
        assert isinstance(link.data(1, m.TakeSnapshot(version=number))[0], m.Snapshot), "late, and not kept"


def test_every_answer_to_a_push_says_how_many_validations_are_complete(link: Link) -> None:
    claim(link, 1, 1)
    assert link.data(0, *push_of(gradient(0)))[0].validations == 0
    expect_refusal(link.data(0, *result(1, loss=0.0))[0], "malformed", "not given to group 0")
    for _ in range(2):  # a rank repeats what an earlier server has not answered
        assert link.data(1, *result(1, loss=torch.tensor(0.5)))[0] == m.EvaluationPublished()
    assert link.data(0, *push_of(gradient(1), read_at=1))[0].validations == 1
    for rank in (0, 1, 1):
        evaluation, payload = link.data(rank, m.ReadEvaluation(number=1))
        assert unpack(evaluation.packed, torch.frombuffer(bytearray(payload), dtype=torch.uint8)) == {"loss": 0.5}


def test_a_validation_whose_group_dies_is_void_and_the_next_group_gets_another(link: Link) -> None:
    assert claim(link, 1, 1) == 1
    link.deliver(link.core.lose(1, "it was killed"))
    assert link.control(0, m.AskValidations()) == m.Validations(complete=1, is_missed=True)
    assert link.data(0, m.ReadEvaluation(number=1))[0].is_void
    assert claim(link, 0, 1) == 2


# --- Runs ------------------------------------------------------------------------------------------------------------

PUBLISHED = {"validation": "published"}
EVERY = {"val_check_interval": 0.25}
FITS: dict[str, dict[str, Any]] = {
    "groups of one": {
        "strategy": {**PUBLISHED, "groups": 4},
        "trainer": {**EVERY, "num_sanity_val_steps": 2},
        "checkpoint": {"monitor": "val_loss", "save_top_k": -1},
    },
    "resumed": {
        "strategy": {**PUBLISHED, "groups": 4},
        "trainer": EVERY,
        "resume": "checkpoints/epoch=0-step=*.ckpt",
    },
    "metrics and early stopping": {
        "strategy": {**PUBLISHED, "groups": 2, "overlap": True},
        "net": "metrics",
        "early": {"monitor": "val_seen", "mode": "max", "patience": 4},
        "trainer": {**EVERY, "max_epochs": 9},
    },
    "groups formed again": {
        "strategy": {**PUBLISHED, "groups": 2},
        "regroup": {"3": 4},
        "trainer": EVERY,
    },
    "checked inside the epoch": {
        "strategy": {**PUBLISHED, "groups": 2},
        "check_every": 96,
        "sleep": {"2": 0.01, "3": 0.01},
        "trainer": {**EVERY, "max_epochs": 2},
    },
    "weights swapped by a callback": {
        "strategy": {**PUBLISHED, "groups": 4},
        "swaps": True,
        "trainer": {**EVERY, "num_sanity_val_steps": 0},
    },
    "plateaus by steps": {
        "strategy": {**PUBLISHED, "groups": 4},
        "schedule": "plateau by steps",
        "sleep": {"3": 0.02},
        "trainer": EVERY,
    },
    "no DataLoader": {"strategy": {**PUBLISHED, "groups": 2}, "no_loader": True, "trainer": EVERY},
    "no batch": {"strategy": {**PUBLISHED, "groups": 2}, "held_out": 0, "trainer": {**EVERY, "max_epochs": 2}},
}


@pytest.fixture(scope="module")
def runs() -> Iterator[tuple[Run, Path]]:
    with Running("groups.py", {"fits": list(FITS.values())}) as running:
        finished = running.wait(300)
        assert finished.code == 0, finished.output[-6000:]
        yield finished, running.folder


@pytest.mark.processes
@pytest.mark.parametrize("name", FITS)
def test_all_ranks_hear_of_the_same_validations_with_the_same_steps(runs: tuple[Run, Path], name: str) -> None:
    every = [ranks[list(FITS).index(name)] for _, ranks in sorted(runs[0].results.items())]
    assert len({str(each["validation_metrics"]) for each in every}) == 1
    steps = [step for step, _ in every[0]["validations"]]
    assert steps == sorted(set(steps))
    assert len({str(each["validations"]) for each in every}) == 1
    worlds = every[0]["validation_worlds"]
    if name == "no batch":  # no callback hears of them, as under DDP, and the groups train on after each
        assert [worlds, {(each["epoch"], each["weights"]) for each in every}] == [[], {(2, every[0]["weights"])}]
        return
    assert worlds[-1] == 4 or name.startswith("metrics"), "at an epoch's end all are together"
    if name == "no DataLoader":
        assert worlds == [4] * 4
    elif name == "resumed":
        assert worlds in ([1, 1, 4], [1, 1, 1, 4]), "the weights are of shortly before the point, or of after it"
    elif name == "checked inside the epoch":
        assert len(worlds) == 8
        assert len(every[0]["checks"]) == 4
    elif not name.startswith("metrics"):
        assert len(worlds) == 4
        assert max(worlds[:3]) <= 2


def of(runs: tuple[Run, Path], name: str) -> list[Any]:
    return [ranks[list(FITS).index(name)] for _, ranks in sorted(runs[0].results.items())]


@pytest.mark.processes
def test_weights_that_a_callback_swaps_are_evaluated_and_the_groups_own_come_back(runs: tuple[Run, Path]) -> None:
    """It hears the end when its group has trained on, and what it puts back then is of before."""
    for each in of(runs, "weights swapped by a callback"):
        assert [loss for _, loss in each["validations"]] == pytest.approx([math.log(3)] * 4)


@pytest.mark.processes
def test_a_plateau_by_steps_follows_published_validations_on_all_ranks_alike(runs: tuple[Run, Path]) -> None:
    """Two of the four come after a multiple of four batches under DDP; the first of them is the best so far."""
    assert [each["lr"] for each in of(runs, "plateaus by steps")] == [[0.01]] * 4


@pytest.mark.processes
def test_what_cannot_be_published_waits_and_says_so(runs: tuple[Run, Path]) -> None:
    said = [line for line in runs[0].output.splitlines() if "published" in line]
    assert said == [
        'OmniStrategy: validation="published" is validation="wait" here: the validation data has a sampler of its own,'
        " or is iterable, so that one group cannot read it all",
        'OmniStrategy: validation="published" is validation="wait" here: the validation data has no batch',
    ]


@pytest.mark.processes
def test_each_checkpoint_has_the_weights_whose_metric_it_was_saved_for(runs: tuple[Run, Path]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 12, generator=generator)
    files = sorted((runs[1] / "checkpoints").glob("*.ckpt"))
    heard = dict(map(tuple, runs[0].results[0][0]["validations"]))
    assert len(files) == 4
    for file in files:
        checkpoint = torch.load(file, map_location="cpu", weights_only=False)
        net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).eval()
        net.load_state_dict(
            {name[4:]: value for name, value in checkpoint["state_dict"].items() if name.startswith("net.")}
        )
        with torch.no_grad():
            loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
        assert float(loss) == pytest.approx(heard[checkpoint["global_step"]], rel=1e-5)
        assert f"step={checkpoint['global_step']}" in file.name
        states = checkpoint["optimizer_states"][0]["state"]
        assert all("momentum_buffer" in state for state in states.values())


@pytest.mark.processes
def test_the_group_that_evaluates_reads_all_data_gathers_in_it_and_stops_the_run(runs: tuple[Run, Path]) -> None:
    for results in runs[0].results.values():
        metrics = results[2]["validation_metrics"]
        assert all(each["val_seen"] == 64 for each in metrics)
        assert all(each["val_accuracy"] * 64 == pytest.approx(round(each["val_accuracy"] * 64)) for each in metrics)
        assert 5 <= len(metrics) <= 7, "patience 4, and those that were under way"
        assert results[2]["epoch"] < 4


@pytest.mark.processes
def test_a_validation_whose_group_died_is_done_by_others() -> None:
    fit = {
        "strategy": {**PUBLISHED, "groups": 4},
        "sleep": {str(rank): 0.05 for rank in range(3)},  # so that rank 3 is the first to pass a point
        "die_in_validation": 3,
        "net": "metrics",
        "trainer": EVERY,
    }
    with Running("groups.py", {"fits": [fit]}) as running:
        finished = running.wait(120)
    assert finished.code == 0, finished.output[-4000:]
    assert "its group is evicted" in finished.output
    for rank in range(3):
        # what the dead group evaluated is made up for at a point of its own, or together with the next one
        assert len(finished.results[rank][0]["validations"]) in (3, 4)
        assert finished.results[rank][0]["validations"] == finished.results[0][0]["validations"]
        assert all(each["val_seen"] == 64 for each in finished.results[rank][0]["validation_metrics"])


def test_samples_that_are_dealt_out_beforehand_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'validation="published" and data="static".*pass data="dynamic"'):
        OmniStrategy(groups=2, data="static", validation="published")
