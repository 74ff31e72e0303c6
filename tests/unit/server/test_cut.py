"""A snapshot is a consistent cut: one moment over all optimizers, with exactly the pushes handled before it."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_server_core import (
    Link,
    as_tensors,
    gradient,
    new_parameters,
    part_of,
    push_of,
    seed_of,
    sgd,
    varied,
)
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import ConfigurationError
from lightning_omni.runtime.state.checkpoint import NAME, VERSION, RunCheckpoint
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack, unpack
from lightning_omni.wire.messages import EpochPlan, SnapshotId
from lightning_omni.wire.steps_and_samples import Progress, ReferenceBatch

GROUPS = ((0,), (1,), (2,))
PLAN = EpochPlan(epoch=3, total=400, batch_size=2, budget=400)


class Twin:
    """An optimizer that is stepped by torch itself."""

    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = new_parameters()
        self.optimizer = sgd(self.parameters)
        self.steps = 0

    def step(self, tensors: list[Tensor]) -> None:
        for parameter, each in zip(self.parameters.values(), tensors, strict=True):
            parameter.grad = each.clone()
        self.optimizer.step()
        self.steps += 1


def two_optimizers() -> Link:
    """Three groups in an epoch, and two optimizers that are stepped at different moments."""
    link = Link(3)
    for rank in range(3):
        link.join(rank)
    link.form(*GROUPS)
    assert (
        link.data(0, *seed_of({"parts": [part_of(new_parameters()), part_of(new_parameters())]}))[0]
        == m.WeightsUploaded()
    )
    for rank in range(3):
        link.control(rank, m.OpenEpoch(plan=PLAN))
    return link


MOVES = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("snapshot"), st.integers(0, 2), st.booleans(), st.just(False)),
)


@varied
@given(st.lists(MOVES, min_size=1, max_size=16))
def test_a_cut_has_exactly_the_pushes_that_were_handled_before_it(moves: list[tuple[str, int, int, bool]]) -> None:
    link, twins = two_optimizers(), [Twin(), Twin()]
    pushed, batches, trained = dict[int, int](), [0, 0, 0], set[int]()
    drawn: list[list[Any]] = [[], [], []]
    for number, (what, group, optimizer, spoilt) in enumerate([*moves, ("snapshot", 0, 1, False)]):
        if what == "push":
            if batches[group] == len(drawn[group]):
                drawn[group] += link.control(group, m.DrawBatches(epoch=3, generation=1, number=batches[group])).batches
            batch = drawn[group][batches[group]]
            batches[group] += 1
            tensors = gradient(number)
            if spoilt:
                tensors[0][0, 0] = torch.nan
            where = {"optimizer": optimizer, "epoch": 3, "trained": batches[group]}
            answer, _ = link.data(group, *push_of(tensors, read_at=twins[optimizer].steps, **where))
            assert answer.applied is not spoilt
            if not spoilt:
                twins[optimizer].step(tensors)
            pushed[group] = pushed.get(group, 0) + 1
            trained |= set(range(batch.start, batch.stop))
            continue
        snapshot, payload = link.data(group, m.TakeSnapshot(with_state=bool(optimizer)))
        cut, tree = snapshot.cut, unpack(snapshot.packed, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        assert cut.clocks == tuple(twin.steps for twin in twins) == tuple(part["clock"] for part in tree["parts"])
        assert cut.pushes == pushed
        assert (cut.epoch, cut.total) == (3, 400)
        assert {position for start, stop in cut.trained for position in range(start, stop)} == trained
        for part, twin in zip(tree["parts"], twins, strict=True):
            assert all(map(torch.equal, part["weights"].values(), twin.parameters.values()))
            for place, parameter in enumerate(twin.parameters.values() if optimizer and twin.steps else ()):
                assert torch.equal(
                    part["state"][place]["momentum_buffer"], twin.optimizer.state[parameter]["momentum_buffer"]
                )
        assert link.data(0, m.FetchMessage(optimizer=0))[0].clock == twins[0].steps  # and training goes on


def test_pushes_are_counted_since_groups_were_formed() -> None:
    link = two_optimizers()
    link.data(1, *push_of(gradient(0)))
    assert link.data(0, m.TakeSnapshot())[0].cut.pushes == {1: 1}
    link.form((0, 1), (2,), generation=2)
    assert link.data(0, m.TakeSnapshot())[0].cut == SnapshotId(clocks=(1, 0))
    assert as_tensors(link.data(0, m.FetchMessage(optimizer=1))[1])[0].shape == (2, 3)


# --- In a checkpoint -------------------------------------------------------------------------------------------------

CUT = SnapshotId(clocks=(7, 3), pushes={0: 6, 2: 4}, epoch=1, total=64, trained=((0, 8), (16, 24)))
PROGRESS = Progress(ReferenceBatch(4, 2), batches=8, epochs=1, samples=16)
STATES = {0: [{"memory": {"outer": [torch.ones(2)]}, "sender": {"format": {"name": "raw"}, "state": {}}}], 2: []}
SCHEDULES = [[4, 6], []]
SAVED = RunCheckpoint(
    CUT, 2, PROGRESS, {"name": "async_sgd"}, [["w"], ["v"]], [{"buffer": torch.zeros(3)}, {}], STATES, SCHEDULES, 63
)


def as_file(tree: Any) -> Any:
    """Through a checkpoint's file, as a program without pickle reads it."""
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def as_payload(tree: Any) -> Any:
    """Over the wire."""
    packed, buffer = pack(tree)
    return unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=type(packed)), buffer)


@pytest.mark.parametrize("travels", [as_file, as_payload])
@pytest.mark.parametrize(
    "saved",
    [SAVED, RunCheckpoint(CUT, 2, PROGRESS), RunCheckpoint(CUT, 3)],
    ids=["whole", "weights", "static"],
)
def test_what_a_checkpoint_says_of_a_run_is_saved_and_sent_as_plain_data(travels: Any, saved: RunCheckpoint) -> None:
    plain = travels(saved.to_plain())
    assert (plain["name"], plain["version"]) == (NAME, VERSION)
    again = RunCheckpoint.from_plain(plain)
    assert again is not None
    assert (again.cut, again.groups, again.progress) == (saved.cut, saved.groups, saved.progress)
    assert (again.method, again.parameters) == (saved.method, saved.parameters)
    assert repr(again.server) == repr(saved.server) or (not again.server and not saved.server)
    assert repr(again.states) == repr(saved.states)
    assert (list(again.schedules), again.samples) == (list(saved.schedules), saved.samples)


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_an_entry_of_another_version_is_refused_and_one_of_others_left_alone(version: int) -> None:
    with pytest.raises(ConfigurationError, match=f"has version {version}, and this one reads {VERSION}; use the"):
        RunCheckpoint.from_plain({"name": NAME, "version": version, "whatever": 1})
    assert RunCheckpoint.from_plain({}) is None
    assert RunCheckpoint.from_plain({"name": "others"}) is None
