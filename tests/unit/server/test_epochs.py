"""Verdicts at the end of what a group holds: right, the same for all members, and never a deadlock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_omni.errors import ProtocolError
from lightning_omni.server.epochs.epoch import Epochs
from lightning_omni.wire.journal import Journal
from lightning_omni.wire.messages import AskNext, Batch, EpochPlan, LeaveEpoch

varied = settings(deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def opened(total: int = 16, groups: int = 2, journal: Journal | None = None, **options: Any) -> Epochs:
    """An epoch of groups of one rank with two samples a batch: rank and group have one number."""
    epochs = Epochs()
    epochs.journal = journal or Journal()
    epochs.form(dict.fromkeys(range(groups), 1), generation=4, keep_epoch=False)
    epochs.open(EpochPlan(epoch=1, total=total, batch_size=2, budget=total, **options))
    return epochs


def draw(epochs: Epochs, group: int, number: int) -> list[Batch]:
    return epochs.book_of(1, 4).draw(group, number)


def ask(epochs: Epochs, group: int, trained: int, interval: int = 0, rank: int | None = None) -> list[tuple[int, str]]:
    question = AskNext(epoch=1, generation=4, trained=trained, interval=interval)
    epochs.wait(group, group if rank is None else rank, question)
    return epochs.resolve_pending()


def leave(epochs: Epochs, group: int, trained: int, stop: str = "") -> list[tuple[int, str]]:
    epochs.leave(group, LeaveEpoch(epoch=1, generation=4, trained=trained, stop=stop))
    return epochs.resolve_pending()


def test_over_is_said_only_when_everything_is_trained() -> None:
    epochs = opened(total=4)
    assert len(draw(epochs, 0, 0)) == len(draw(epochs, 1, 0)) == 1
    assert ask(epochs, 0, 1) == [], "group 1 still holds a batch, and may die"
    assert ask(epochs, 1, 1) == [(0, "over"), (1, "over")]


def test_members_hear_alike_whether_a_batch_is_their_groups_last_one_even_if_others_samples_come_back() -> None:
    epochs = opened(total=4)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    assert draw(epochs, 0, 1) == [], "the first member closes its accumulation window"
    epochs.evict(1)
    assert draw(epochs, 0, 1) == [], "and so does the second one"
    assert ask(epochs, 0, 1, rank=0) == [(0, "more")]
    assert draw(epochs, 0, 1) == [Batch(2, 4, 0)]
    assert ask(epochs, 0, 1, rank=2) == [(2, "more")]


@pytest.mark.parametrize(("stop", "said"), [("", "over"), ("end", "stop:end")])
def test_the_state_is_saved_at_once_when_an_epoch_has_ended_for_its_samples_are_not_dealt_out_again(
    stop: str, said: str
) -> None:
    journal = Journal()
    epochs = opened(total=4, journal=journal)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    assert ask(epochs, 0, 1) == []
    assert not journal.is_due
    assert (0, said) in (leave(epochs, 1, 1, stop) if stop else ask(epochs, 1, 1))
    assert journal.is_due


def test_a_validation_that_is_due_inside_the_last_batches_is_said_at_the_end() -> None:
    epochs = opened(total=4, validate_every=3)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    assert ask(epochs, 0, 1) == []
    assert ask(epochs, 1, 1) == [(0, "over:validate"), (1, "over:validate")]


def test_a_push_that_ends_the_epoch_lets_the_waiting_go() -> None:
    epochs = opened(total=4)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    assert ask(epochs, 0, 1) == []
    epochs.train(1, epoch=1, batches=1)
    assert epochs.resolve_pending() == [(0, "over")]
    assert epochs.progress == 4


def test_at_a_trained_epochs_end_all_wait_for_the_answer_to_a_push_and_none_validates() -> None:
    epochs = opened(total=4, groups=2)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    for group in range(2):
        epochs.wait(group, group, AskNext(epoch=1, generation=4, trained=1, interval=0))
        assert epochs.resolve_pending(all_answered=False) == []
    assert epochs.resolve_pending(all_answered=True) == [(0, "over"), (1, "over")]


def test_a_push_of_another_epoch_trains_nothing() -> None:
    epochs = opened()
    draw(epochs, 0, 0)
    epochs.train(0, epoch=0, batches=1)
    epochs.train(0, epoch=-1, batches=0)
    assert epochs.progress == 0


def test_more_is_said_when_the_leases_of_a_dead_group_come_back() -> None:
    epochs = opened(total=4)
    draw(epochs, 0, 0)
    lost = draw(epochs, 1, 0)
    assert ask(epochs, 0, 1) == []
    epochs.evict(1)
    assert epochs.resolve_pending() == [(0, "more")]
    assert draw(epochs, 0, 1) == lost
    assert ask(epochs, 0, 2) == [(0, "over")]


def test_more_is_said_when_the_group_for_which_a_batch_was_left_is_gone() -> None:
    epochs = opened(total=4)
    draw(epochs, 0, 0)
    assert draw(epochs, 0, 1) == []
    assert ask(epochs, 0, 1) == [], "the other batch is for group 1"
    epochs.evict(1)
    assert epochs.resolve_pending() == [(0, "more")]
    assert draw(epochs, 0, 1) == [Batch(2, 4, 0)]


def test_more_is_said_when_the_group_for_which_several_small_batches_were_left_has_taken_one() -> None:
    epochs = Epochs()
    epochs.form({0: 2, 1: 1, 2: 1}, generation=4, keep_epoch=False)
    epochs.open(EpochPlan(epoch=1, total=10, batch_size=2, budget=10))
    draw(epochs, 0, 0)
    assert draw(epochs, 0, 1) == []
    assert ask(epochs, 0, 1) == []
    for group, stop in ((1, 6), (2, 8)):
        assert epochs.draw(group, 0)[0].stop == stop
    assert epochs.resolve_pending() == [(0, "more")]


def test_more_is_promised_to_no_more_groups_than_there_are_batches() -> None:
    epochs = opened(total=6, groups=3)
    for group in range(3):
        draw(epochs, group, 0)
    assert ask(epochs, 0, 1) == ask(epochs, 1, 1) == []
    epochs.evict(2)
    assert epochs.resolve_pending() == [(0, "more")]
    assert draw(epochs, 1, 1) == [], "the one batch that came back is promised to group 0"
    assert draw(epochs, 0, 1) == [Batch(4, 6, 0)]
    assert ask(epochs, 0, 2) == [(0, "over"), (1, "over")]


def test_a_late_member_hears_more_after_the_first_has_drawn() -> None:
    epochs = Epochs()
    epochs.form({0: 2, 1: 1}, generation=4, keep_epoch=False)
    epochs.open(EpochPlan(epoch=1, total=6, batch_size=2, budget=6))
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    epochs.evict(1)
    assert len(draw(epochs, 0, 1)) == 1, "rank 0 found the pool refilled"
    assert ask(epochs, 0, 1, rank=1) == [(1, "more")], "rank 1 had found it empty"


def test_validate_is_said_when_all_groups_have_arrived() -> None:
    epochs = opened(validate_every=8)
    for number in range(2):
        draw(epochs, 0, number), draw(epochs, 1, number)
    assert ask(epochs, 0, 2) == []
    assert ask(epochs, 1, 2) == [(0, "validate"), (1, "validate")]
    assert [draw(epochs, group, 2)[0].interval for group in (0, 1)] == [1, 1]


def test_no_group_validates_while_a_batch_of_the_interval_is_out() -> None:
    epochs = opened(validate_every=8)
    for number in range(2):
        draw(epochs, 0, number), draw(epochs, 1, number)
    epochs.train(1, epoch=1, batches=1)
    assert ask(epochs, 0, 2) == []
    epochs.evict(1)
    assert epochs.resolve_pending() == [(0, "more")], "the batch came back"


def test_the_dead_are_not_waited_for_at_a_validation() -> None:
    epochs = opened(validate_every=4)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    epochs.train(1, epoch=1, batches=1)
    assert ask(epochs, 0, 1) == []
    epochs.evict(1)
    assert epochs.resolve_pending() == [(0, "validate")]


def test_a_group_with_nothing_left_validates_once() -> None:
    epochs = opened(total=6, validate_every=4)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    assert [batch.interval for batch in draw(epochs, 0, 1)] == [1]
    assert draw(epochs, 1, 1) == []
    assert ask(epochs, 1, 1) == []
    assert ask(epochs, 0, 1) == [(0, "validate"), (1, "validate")]
    assert ask(epochs, 1, 1) == [], "group 0 trains the last batch"
    assert ask(epochs, 0, 2, interval=1) == [(0, "over"), (1, "over")]


@pytest.mark.parametrize("decision", ["validate", "stop:end", "over"])
def test_a_late_member_gets_the_verdict_of_its_group(decision: str) -> None:
    epochs = Epochs()
    epochs.form({0: 2, 1: 1}, generation=4, keep_epoch=False)
    total = 6 if decision == "over" else 12
    epochs.open(EpochPlan(epoch=1, total=total, batch_size=2, budget=total, validate_every=6))
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    assert ask(epochs, 0, 1, rank=0) == []
    if decision == "stop:end":
        assert leave(epochs, 1, 1, stop="end") == [(0, decision)]
    else:
        assert ask(epochs, 1, 1, rank=2) == [(0, decision), (2, decision)]
    if decision == "validate":
        draw(epochs, 1, 1)
        epochs.evict(1)
    assert ask(epochs, 0, 1, rank=1) == [(1, decision)]


@pytest.mark.parametrize("stop", ["validate", "end"])
def test_a_stop_reaches_those_who_wait_and_those_who_come(stop: str) -> None:
    epochs = opened(groups=3)
    for group in range(3):
        draw(epochs, group, 0)
    for number in range(1, 3):
        draw(epochs, 0, number)
    assert leave(epochs, 1, 1, stop=stop) == []
    assert epochs.stop == stop
    assert draw(epochs, 2, 1) == []
    assert ask(epochs, 2, 1) == [(2, f"stop:{stop}")]
    assert ask(epochs, 0, 3) == [(0, f"stop:{stop}")]


@pytest.mark.parametrize("stop", ["validate", "end", "skip"])
def test_a_stop_that_comes_when_the_epoch_was_called_over_is_too_late_for_all(stop: str) -> None:
    epochs = Epochs()
    epochs.form({0: 1, 1: 2}, generation=4, keep_epoch=False)
    epochs.open(EpochPlan(epoch=1, total=6, batch_size=2, budget=6))
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    assert ask(epochs, 1, 1, rank=1) == [], "group 0 still holds a batch"
    assert ask(epochs, 0, 1) == [(0, "over"), (1, "over")]
    assert leave(epochs, 0, 1, stop=stop) == []
    assert ask(epochs, 1, 1, rank=2) == [(2, "over")], "as its neighbour in the group has heard"


def test_the_first_stop_counts() -> None:
    epochs = opened()
    leave(epochs, 0, 0, stop="validate")
    leave(epochs, 1, 0, stop="end")
    assert epochs.stop == "validate"


def test_a_group_that_leaves_gives_back_what_it_held() -> None:
    epochs = opened(total=4)
    draw(epochs, 0, 0)
    held = draw(epochs, 1, 0)
    assert ask(epochs, 0, 1) == []
    assert leave(epochs, 1, 0) == [(0, "more")]
    assert draw(epochs, 0, 1) == held
    assert leave(epochs, 1, 0) == [], "its second member says the same"


def test_ranks_that_disagree_on_the_data_are_refused() -> None:
    epochs = opened(total=16)
    plan = EpochPlan(epoch=1, total=16, batch_size=2, budget=16)
    epochs.open(plan)
    with pytest.raises(ProtocolError, match=r"on the data of epoch 1: samples of an epoch: 16 against 18; every rank"):
        epochs.open(EpochPlan(epoch=1, total=18, batch_size=2, budget=18))
    assert epochs.book_of(1, 4).plan == plan


def test_an_epoch_does_not_begin_while_a_rank_waits_for_the_end_of_another() -> None:
    epochs = opened(total=4)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    ask(epochs, 0, 1)
    with pytest.raises(ProtocolError, match=r"epoch 2 cannot begin.*\[0\]"):
        epochs.open(EpochPlan(epoch=2, total=4, batch_size=2, budget=4))


def test_questions_about_other_epochs_and_groups_are_refused() -> None:
    epochs = opened()
    with pytest.raises(ProtocolError, match="epoch 0 is not under way"):
        epochs.wait(0, 0, AskNext(epoch=0, generation=4, trained=0, interval=0))
    with pytest.raises(ProtocolError, match="generation 4, not 3"):
        epochs.wait(0, 0, AskNext(epoch=1, generation=3, trained=0, interval=0))
    with pytest.raises(ProtocolError, match="group 7"):
        epochs.wait(7, 0, AskNext(epoch=1, generation=4, trained=0, interval=0))
    with pytest.raises(ProtocolError, match="trained 5 batches"):
        epochs.wait(0, 0, AskNext(epoch=1, generation=4, trained=5, interval=0))
    assert epochs.resolve_pending() == []


def test_new_groups_go_on_where_the_old_ones_were() -> None:
    epochs = opened(total=12, validate_every=4)
    draw(epochs, 0, 0), draw(epochs, 1, 0)
    epochs.train(0, epoch=1, batches=1)
    epochs.form({0: 2}, generation=5, keep_epoch=True)
    assert epochs.trained_spans == ((0, 2),)
    book = epochs.book_of(1, 5)
    assert [book.draw(0, number)[0] for number in range(2)] == [Batch(2, 6, 0), Batch(6, 10, 1)]
    epochs.wait(0, 1, AskNext(epoch=1, generation=5, trained=1, interval=0))
    assert epochs.resolve_pending() == [(1, "validate")]
    epochs.form({0: 2}, generation=6, keep_epoch=False)
    with pytest.raises(ProtocolError, match="not under way"):
        epochs.book_of(1, 6)


# --- Whole epochs, in any order of events --------------------------------------------------------------------------


@dataclass
class Rank:
    """What a rank knows, and does, at the end of each batch; it trains when all members of its group want to."""

    number: int
    group: int
    held: list[Batch] = field(default_factory=list)
    trained: int = 0
    validations: int = 0
    interval: int = 0
    does: str = "poll"


class Run:
    """An epoch of several groups. `step` lets one rank do one thing."""

    def __init__(self, plan: EpochPlan, sizes: list[int]) -> None:
        self.epochs, self.plan = Epochs(), plan
        self.epochs.form(dict(enumerate(sizes)), generation=0, keep_epoch=False)
        self.epochs.open(plan)
        owners = chain.from_iterable([group] * size for group, size in enumerate(sizes))
        self.ranks = {number: Rank(number, group) for number, group in enumerate(owners)}
        self.done: list[Batch] = []

    def step(self, number: int) -> bool:
        """Whether the rank could do anything."""
        rank = self.ranks[number]
        members = [other for other in self.ranks.values() if other.group == rank.group]
        if rank.does == "poll":
            self.poll(rank)
        elif rank.does == "train" and all(other.does == "train" for other in members):
            assert len({(other.trained, other.held[other.trained]) for other in members}) == 1, "members agree"
            self.epochs.train(rank.group, self.plan.epoch, rank.trained + 1)
            self.done.append(rank.held[rank.trained])
            for other in members:
                other.trained, other.does = other.trained + 1, "poll"
            self.deliver()
        elif rank.does == "validate" and all(one.does == "validate" for one in self.ranks.values()):
            for one in self.ranks.values():
                one.does = "poll"
        else:
            return False
        return True

    def poll(self, rank: Rank) -> None:
        if rank.trained == len(rank.held):
            rank.held += self.epochs.book_of(self.plan.epoch, 0).draw(rank.group, rank.trained)
        coming = rank.held[rank.trained] if rank.trained < len(rank.held) else None
        # A rank asks after a batch, never before its first one.
        if coming is not None and (rank.trained == 0 or coming.interval <= rank.interval):
            rank.does = "train"
            return
        rank.does = "wait"
        question = AskNext(epoch=self.plan.epoch, generation=0, trained=rank.trained, interval=rank.interval)
        self.epochs.wait(rank.group, rank.number, question)
        self.deliver()

    def deliver(self) -> None:
        for number, decision in self.epochs.resolve_pending():
            rank = self.ranks[number]
            assert rank.does == "wait"
            rank.does = {"more": "poll", "validate": "validate", "over": "over", "over:validate": "over"}[decision]
            rank.validations += decision in ("validate", "over:validate")
            rank.interval += decision == "validate"
            if decision == "more":
                rank.held += self.epochs.book_of(self.plan.epoch, 0).draw(rank.group, rank.trained)[
                    len(rank.held) - rank.trained :
                ]
                rank.interval = max(rank.interval, rank.held[rank.trained].interval)

    def die(self, group: int) -> None:
        self.ranks = {number: rank for number, rank in self.ranks.items() if rank.group != group}
        self.epochs.evict(group)
        self.deliver()

    def finish(self) -> None:
        while sum(self.step(number) for number in list(self.ranks)):
            pass


@varied
@given(
    st.integers(0, 60),
    st.sampled_from([0, 0, 6, 8, 20]),
    st.integers(0, 20),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.data(),
)
def test_every_epoch_ends_for_everyone_whatever_the_order_of_events(
    total: int, every: int, offset: int, sizes: list[int], data: st.DataObject
) -> None:
    plan = EpochPlan(
        epoch=0, total=total, batch_size=2, budget=total, validate_every=every, validate_offset=offset if every else 0
    )
    run = Run(plan, sizes)
    for _ in range(data.draw(st.integers(0, 60), label="events")):
        number = data.draw(st.sampled_from(sorted(run.ranks)), label="rank")
        alive = {rank.group for rank in run.ranks.values()}
        if len(alive) > 1 and data.draw(st.integers(0, 19), label="dies") == 19:
            run.die(run.ranks[number].group)
        else:
            run.step(number)
    run.finish()
    assert {rank.does for rank in run.ranks.values()} == {"over"}
    (validations,) = {rank.validations for rank in run.ranks.values()}
    has_points = every > 0 and every - plan.validate_offset % every < total
    assert validations >= has_points, "a point inside the last batches counts, too"
    covered = Counter(chain.from_iterable(range(batch.start, batch.stop) for batch in run.done))
    assert set(covered) == set(range(total))
    again = {position for position, times in covered.items() if times > 1}
    assert again <= set(range(max(sizes) * 2)), "only what groups that came too late repeat"
    assert run.epochs.progress == total
