"""A server that goes on from what another has saved: at any event, in memory."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_transport import InMemory, InMemoryServer
from rounds import sent
from test_deliveries import Pushed
from test_late_join import PLAN, SAMPLES, Member, joins
from test_server_core import Link, as_bytes, data_peer, gradient, new_parameters, part_of, seed_of
from test_servers import same
from test_transport import KEY, Serving
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import ConfigurationError, RankLost, Refused
from lightning_omni.group.core import Action, ServerRequest
from lightning_omni.methods import Method, method_named
from lightning_omni.methods.contract import Gradient, NextGradient
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.server.core import ServerCore
from lightning_omni.server.service import as_tensor
from lightning_omni.transport.serving import state_directory
from lightning_omni.transport.serving.save_files import saved_weights, write_save
from lightning_omni.transport.serving.state_directory import RECONNECT_TIMEOUT, StateDirectory
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.formats.base import Memory
from lightning_omni.wire.journal import OUTDATED, Call
from lightning_omni.wire.messages import EpochPlan
from lightning_omni.wire.messages.collectives import UPLOADED_ELSEWHERE

LR = 0.1


class Mortal(Serving):
    """A server that is killed at one of the messages that it hears, and another one that goes on.

    Args:
        stack: closes what is open in the end.
        deaths: numbers of messages, counted over all servers, at which the server dies: before it has looked at them,
            or, for odd ones, when it has handled them and before its answers leave.

    Attributes:
        kept: what the gradients of all pushes add up to that are in the weights.
    """

    def __init__(self, stack: ExitStack, deaths: Sequence[int] = ()) -> None:
        super().__init__(InMemory(), stack)
        self._deaths, self._heard = set(deaths), 0
        self._saved: tuple[bytes, Tensor] | None = None
        self._journal: list[bytes] = []
        self.kept: list[Tensor] = []
        self._kept_then: list[Tensor] = []
        self.core.reconnect_timeout = 1.0
        self._watch()

    def save(self) -> None:
        """The state as of now, as it lies on a disk."""
        packed, buffer = pack(self.core.state())
        self._saved, self._journal = (msgspec.msgpack.encode(packed), buffer), []
        self._kept_then = list(self.kept)

    def revive(self) -> None:
        """If the server is dead, another one goes on."""
        while self.is_dead:
            self.core = ServerCore(KEY, secrets.token_bytes)
            assert self._saved is not None
            state = unpack(msgspec.msgpack.decode(self._saved[0], type=Packed), self._saved[1].clone())
            entries = [msgspec.msgpack.decode(entry, type=Call) for entry in self._journal]
            self.core.load(state, entries, now=0.0)
            self.core.reconnect_timeout = 1.0
            self.kept = list(self._kept_then)
            self._watch()
            self.save()
            self.server = self.transport.serve_again(self.core, self.address)

    def spare(self) -> None:
        """It dies no more."""
        self._deaths.clear()

    def die(self) -> None:
        """The server dies between two messages, and another one goes on."""
        self._there.kill()
        self.revive()

    @property
    def is_dead(self) -> bool:
        return self._there.is_gone

    @property
    def _there(self) -> InMemoryServer:
        return self.transport.servers[self.address]  # type: ignore[attr-defined, no-any-return]

    def _watch(self) -> None:
        receive = self.core.receive

        def write(entry: Call) -> None:
            self._journal.append(msgspec.msgpack.encode(entry))

        def mortal(*said: Any) -> Any:
            self._heard += not isinstance(said[2], (m.Hello, m.Proof, m.Attach, m.AttachProof))
            dies = self._heard in self._deaths and self._saved is not None
            if dies:
                self._deaths.discard(self._heard)
            if dies and self._heard % 2 == 0:
                self._there.kill()
                return []
            out = receive(*said)
            if dies:
                self._there.kill()
            return [] if dies else out

        self.core.journal.write = write
        self.core.receive = mortal  # type: ignore[method-assign, assignment]


class Worker(Member):
    """A group that trains on leased data, whatever happens to the server."""

    def __init__(self, serving: Mortal, rank: int, size: int, method: Method | None = None) -> None:
        super().__init__(serving, rank, size, method=method)
        self.serving = serving
        self.replica.optimizer.param_groups[0]["momentum"] = 0.0
        self.answered = True

    def request(self, message: m.Message, expect: type[Any]) -> Any:
        self.control.ask(message)  # type: ignore[attr-defined]
        self.serving.revive()
        return self.control.take(expect)[0]  # type: ignore[attr-defined]

    def do(self, action: Action) -> Any:
        assert isinstance(action, ServerRequest)
        said = sent(self.core, action, self.layout, self._memory)
        self._asked = action
        self.data.send(said.message, said.payload, self._into)
        self.serving.revive()
        if self.core.method.steps_at == "server" and isinstance(said.message, m.PushMessage):
            self.serving.kept.append(self.gradient)
        return self.receive()

    @torch.no_grad()
    def train(self, seed: int) -> bool:
        data = self.core.data
        assert data is not None
        if data.drawn == data.trained:
            data.record_drawn(self.request(data.draw(data.drawn), m.BatchesDrawn).batches)
        if data.drawn == data.trained:
            return False
        data.begin_batch()
        self.used += list(data.indices(data.trained - 1))
        rng = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(each.shape, generator=rng) for each in self.parameters.values()]
        self.gradient = torch.cat([tensor.flatten() for tensor in tensors])
        action = self.core.gradient(0, Gradient(tensors, hyperparameters_of(self.replica.optimizer)))
        while not isinstance(action, NextGradient):
            action = self.core.answer(0, self.do(action))
        return True

    @property
    def trained(self) -> int:
        """Samples."""
        return len(self.used)

    def ask_what_is_next(self) -> None:
        assert self.core.data is not None
        self.control.ask(self.core.data.ask_next())  # type: ignore[attr-defined]
        self.serving.revive()


def workers(serving: Mortal, method: Method, plan: EpochPlan = PLAN) -> list[Worker]:
    groups = [Worker(serving, rank, 2, method) for rank in range(2)]
    groups[0].form([(0,), (1,)])
    serving.save()
    for group in groups:
        group.lease(generation=1)
        group.request(m.OpenEpoch(plan=plan), m.EpochOpened)
    return groups


def finish(groups: Sequence[Worker]) -> None:
    """All groups train until there is nothing left, and hear that the epoch is over."""
    seed = 1000
    open_to = dict.fromkeys(groups, "more")
    while "more" in open_to.values():
        for group in (each for each in groups if open_to[each] == "more"):
            seed += 1
            if not group.train(seed):
                group.ask_what_is_next()
                open_to[group] = ""
        for group in (each for each in groups if not open_to[each]):
            open_to[group] = group.verdict
            if open_to[group] == "more":
                data = group.core.data
                assert data is not None
                data.record_drawn(group.request(data.draw(data.drawn), m.BatchesDrawn).batches)
    assert set(open_to.values()) == {"over"}


IMMEDIATE = [
    "async_sgd",
    "async_sgd:staleness_aware=True",
    "ringmaster_asgd:max_staleness=0",
    "elastic_averaging:period=1",
    "async_diloco:period=2",
]


@settings(max_examples=15, deadline=None)
@given(
    method=st.sampled_from(IMMEDIATE),
    order=st.lists(st.integers(0, 2), max_size=25),
    deaths=st.sets(st.integers(1, 120), max_size=4),
)
def test_whenever_a_server_dies_every_sample_is_trained_and_each_push_counts_once(
    method: str, order: list[int], deaths: set[int]
) -> None:
    with ExitStack() as stack:
        serving = Mortal(stack, sorted(deaths))
        groups = workers(serving, method_named(method))
        start = torch.cat([each.detach().flatten().clone() for each in groups[0].parameters.values()]).double()
        for seed, choice in enumerate(order):
            if choice == 2:
                serving.save()
            else:
                groups[choice].train(seed)
        finish(groups)
        used = Counter(index for group in groups for index in group.used)
        assert set(used) == set(range(SAMPLES))
        assert serving.core.roster.lost == {}
        if method == "async_sgd":
            total = start - LR * torch.stack(serving.kept).double().sum(0)
            held = torch.cat([weight.flatten() for weight in serving.core.store.all[0].master.weights()]).double()
            torch.testing.assert_close(held, total, rtol=1e-4, atol=1e-5)
            assert serving.core.store.clock == len(serving.kept)
        synchronize(serving, groups)
        serving.spare()


def test_a_push_that_waits_at_a_barrier_when_the_server_dies_is_said_again_and_counts_once() -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named("hardsync"))
        for seed in range(2):
            pushed = [Pushed(group, seed) for group in (first, second)]
            said = [sent(push.group.core, push.ask, push.group.layout) for push in pushed]
            first.data.send(said[0].message, said[0].payload)
            if seed:
                serving.die()
            second.data.send(said[1].message, said[1].payload)
            for push in pushed:
                answer, payload = push.group.data.receive(m.Weights)
                push.finish(answer, push.group.layout.views(payload))
        assert serving.core.store.clock == 1  # the first update came after the save, and is gone
        assert all(map(torch.equal, first.replica.weights(), second.replica.weights()))


@pytest.mark.parametrize("method", ["hardsync", "softsync:n=1", "local_sgd:period=1", "stale_synchronous:bound=0"])
def test_a_group_that_was_lost_while_another_waited_for_it_is_not_waited_for_by_the_next_server(method: str) -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named(method))
        push = Pushed(first, seed=0)
        said = sent(first.core, push.ask, first.layout, Memory())
        first.data.send(said.message, said.payload)
        serving.save()
        second.control.close()
        serving.die()
        assert serving.core.roster.formed.alive == (0,)
        answer, payload = first.data.receive(m.Weights)
        push.finish(answer, first.layout.views(payload))
        finish([first])
        assert set(first.used) == set(range(SAMPLES))


def test_a_validation_that_one_rank_has_heard_of_is_told_to_the_other_by_the_next_server() -> None:
    plan = msgspec.structs.replace(PLAN, validate_every=SAMPLES // 2)
    with ExitStack() as stack:
        serving = Mortal(stack)
        groups = workers(serving, method_named("async_sgd"), plan)
        for group in groups:
            while group.train(1) and group.trained < SAMPLES // 4:
                pass
        for group in groups:
            group.ask_what_is_next()
        assert groups[0].verdict == "validate"
        groups[0].core.data.apply_next("validate")  # type: ignore[union-attr]
        unheard = groups[1].control.take(m.Next)  # type: ignore[attr-defined]
        assert unheard[0].next == "validate"
        serving.die()
        groups[1].ask_what_is_next()
        assert groups[1].verdict == "validate"
        groups[1].core.data.apply_next("validate")  # type: ignore[union-attr]
        synchronize(serving, groups)
        finish(groups)
        assert {index for group in groups for index in group.used} == set(range(SAMPLES))


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_group_that_evaluates_is_waited_for_by_the_next_server_no_more_than_by_the_last(is_saved: bool) -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named("hardsync"))
        claim = m.ClaimValidation(epoch=0, generation=1, passed=1)
        assert first.request(claim, m.ValidationClaimed).number == 1
        assert second.train(1)
        if is_saved:
            serving.save()
        serving.die()
        assert second.train(2), "its push is answered"
        packed, buffer = pack({"loss": 0.5})
        result = m.PublishEvaluation(number=1, packed=packed, nbytes=buffer.numel())
        first.data.exchange(result, m.EvaluationPublished, buffer)
        assert serving.core.store.all[0].method_side.idle_groups == set(), "it pushes again"


def test_what_one_rank_has_heard_at_a_synchronization_point_the_other_hears_of_the_next_server() -> None:
    large = bytes(range(256)) * 200
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named("async_sgd"))
        for group in (first, second):
            group.data.exchange(m.Upload(nbytes=len(large)), m.Uploaded, as_tensor(large))
        brought = m.Contribute(number=0, what="gather", uploaded=True)
        serving.die()
        with pytest.raises(Refused, match="has uploaded nothing") as refused:
            first.control.request(brought, m.Gathered)
        assert refused.value.code == UPLOADED_ELSEWHERE
        for group in (first, second):
            group.data.exchange(m.Upload(nbytes=len(large)), m.Uploaded, as_tensor(large))
            group.control.ask(brought)  # type: ignore[attr-defined]
        for group in (first, second):
            assert group.control.take(m.Gathered)[0].must_download  # type: ignore[attr-defined]
        serving.die()
        for group in (first, second):
            _, payload = group.data.exchange(m.Download(number=0), m.Downloaded)
            assert payload.numpy().tobytes() == large + large


def hand_in(group: Worker) -> None:
    """A group's own weights are on their way, for the mean of all groups'."""
    said = sent(group.core, group.core.synchronize(0), group.layout, Memory())
    assert isinstance(said.message, m.AverageMessage)
    group.data.send(said.message, said.payload)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_group_that_has_had_the_mean_from_a_server_that_is_gone_is_not_waited_for_by_the_next(is_first: bool) -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named("local_sgd:period=1"))
        for group in (first, second):
            hand_in(group)
        for group in (first, second):  # the second one's is lost: let this be what had not left
            group.data.receive(m.Weights)
        serving.die()
        further = m.Contribute(number=0, what="buffers", uploaded=False)
        for step in sorted((0, 1), reverse=is_first):
            if step == 0:
                hand_in(second)
            else:
                first.control.ask(further)  # type: ignore[attr-defined]
        answer, payload = second.data.receive(m.Weights)
        assert answer.applied
        assert all(map(torch.equal, second.layout.views(payload), second.replica.weights()))
        second.control.ask(further)  # type: ignore[attr-defined]
        for group in (first, second):
            assert group.control.take(m.Gathered)  # type: ignore[attr-defined]
        for group in (first, second):  # from here on all are waited for
            hand_in(group)
        for group in (first, second):
            group.data.receive(m.Weights)


def test_groups_that_a_server_has_left_at_the_means_of_different_optimizers_come_on() -> None:
    link = Link(2)
    for rank in range(2):
        link.join(rank)
    link.form((0,), (1,))
    message, payload = seed_of({"parts": [part_of(new_parameters()), part_of(new_parameters())]})
    assert link.data(0, message, payload)[0] == m.WeightsUploaded()
    own = as_bytes(gradient(0))
    means = [m.AverageMessage(optimizer=number, nbytes=len(own)) for number in range(2)]
    assert link.say(data_peer(0), means[1], own, m.DATA) == []
    assert isinstance(link.data(1, means[0], own)[0], m.Weights)
    assert isinstance(link.data(1, means[1], own)[0], m.Weights)
    assert [answer.optimizer for answer, _ in link.inbox[data_peer(0), m.DATA] if isinstance(answer, m.Weights)] == [1]


def test_groups_that_were_lost_or_joined_after_the_save_are_known_to_the_next_server() -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named("elastic_averaging:period=1"))
        third = joins(serving, 7, "guest", first.method)
        assert second.train(1)
        second.control.close()
        assert serving.core.roster.formed.alive == (0, 2)
        rate = serving.core.store.all[0].method_side._rate  # type: ignore[attr-defined]
        serving.die()
        assert serving.core.roster.formed.alive == (0, 2)
        assert all(serving.core.roster.members[rank].peer for rank in serving.core.roster.live)
        assert serving.core.store.all[0].method_side._rate == rate  # type: ignore[attr-defined]
        assert third.train(2)
        finish([first])


@pytest.mark.parametrize("first_event", ["loss", "join"])
def test_the_next_server_has_the_moving_rate_of_groups_that_joined_and_were_lost_in_that_order(
    first_event: str,
) -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named("elastic_averaging:period=1"))
        events: list[Any] = [second.control.close, lambda: joins(serving, 7, "guest", first.method)]
        for event in events if first_event == "loss" else reversed(events):
            event()
        rate = serving.core.store.all[0].method_side._rate  # type: ignore[attr-defined]
        assert rate == pytest.approx(0.9 / (2 if first_event == "loss" else 3))
        serving.save()
        serving.die()
        assert serving.core.store.all[0].method_side._rate == rate  # type: ignore[attr-defined]


def test_what_was_stored_for_groups_that_join_and_the_numbers_of_ranks_outlast_the_server() -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        serving.run = "joins-run"
        first, _ = workers(serving, method_named("async_sgd"))
        packed, buffer = pack({"progress": torch.ones(3)})
        stored = m.StoreRunState(packed=packed, nbytes=buffer.numel())
        first.data.exchange(stored, m.RunStateStored, buffer)
        serving.save()
        assert serving.core.roster.register(b"o1", 2, "")[0] == 2
        serving.core.journal.note(serving.core.roster.numbers.assign, 4)
        serving.die()
        assert (serving.core.roster.can_continue, serving.core.roster.joining) == (True, True)
        assert serving.core.roster.register(b"o2", 2, "")[0] == 4
        answer, payload = first.data.exchange(m.ReadRunState(), m.StoredRunState)
        assert torch.equal(unpack(answer.packed, payload)["progress"], torch.ones(3))


@pytest.mark.parametrize("is_saved", [False, True])
def test_parameters_that_were_added_are_there_in_their_versions_before_they_are_saved_too(is_saved: bool) -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named("async_sgd"))
        new = Parameter(torch.ones(2))
        optimizer = first.replica.optimizer
        optimizer.add_param_group({"params": [new], "lr": 0.5})
        settings = hyperparameters_of(optimizer)
        places: list[list[int]] = [[0, 1], [2]]
        groups = [{**each, "params": where} for each, where in zip(settings, places, strict=True)]
        packed, buffer = pack({"groups": groups, "weights": {"new": new.detach()}, "state": {}})
        first.data.exchange(m.Restructure(optimizer=0, packed=packed, nbytes=buffer.numel()), m.Restructured, buffer)
        if is_saved:
            serving.save()
        before = [weight.clone() for weight in serving.core.store.all[0].master.weights()]
        serving.die()
        served = serving.core.store.all[0]
        assert [served.layout_of(group).version for group in (0, 1)] == [1, 0]
        assert all(map(torch.equal, served.master.weights(), before))
        assert second.train(1)
        assert serving.core.store.clock == 1


@pytest.mark.parametrize("trained", [-1, 5, 10**9])
@pytest.mark.parametrize("kind", [m.AskNext, m.LeaveEpoch])
def test_what_a_server_has_refused_keeps_no_other_from_going_on(kind: type[Any], trained: int) -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, second = workers(serving, method_named("async_sgd"))
        first.train(0)
        question = {"epoch": PLAN.epoch, "generation": 1, "trained": trained}
        with pytest.raises(Refused, match=f"says it trained {trained} batches"):
            first.request(kind(**question, **({"interval": 0} if kind is m.AskNext else {})), m.Next)
        serving.die()
        finish([first, second])
        assert set(first.used + second.used) == set(range(SAMPLES))


def test_a_server_without_the_state_and_one_of_another_version_refuse() -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, _ = workers(serving, method_named("async_sgd"))
        state = serving.core.state()
        core = ServerCore(KEY, secrets.token_bytes)
        with pytest.raises(ConfigurationError, match="start the server in an empty directory"):
            core.load({**state, "version": 0}, (), now=0.0)
        with pytest.raises(ConfigurationError, match="resume it from a checkpoint"):
            core.load(state, [OUTDATED], now=0.0)
        serving.transport.serve_again(ServerCore(KEY, secrets.token_bytes), serving.address)
        with pytest.raises(RankLost, match="knows nothing of the run"):
            first.control.check()


def test_no_server_goes_on_from_weights_in_whose_place_others_were_handed_over() -> None:
    with ExitStack() as stack:
        serving = Mortal(stack)
        first, _ = workers(serving, method_named("async_sgd"))
        message, payload = seed_of({"parts": [part_of(first.parameters)]})
        first.data.exchange(message, m.WeightsUploaded, as_tensor(payload))
        with pytest.raises(ConfigurationError, match="weights were handed over after the state was saved"):
            serving.die()
        serving.save()
        serving.revive()
        assert first.train(1)


# --- On a disk -------------------------------------------------------------------------------------------------------


def saved(states: StateDirectory, core: ServerCore) -> None:
    core.journal.is_due = True
    states.poll(core)
    states.wait()


def test_a_server_waits_until_one_that_was_killed_has_let_go_of_the_directory(tmp_path: Path) -> None:
    before = StateDirectory(tmp_path / "state")
    release = threading.Timer(0.3, before.close)
    release.start()
    StateDirectory(tmp_path / "state").close()  # raises if it does not wait
    release.join()


def test_a_state_on_disk_is_gone_on_from_and_its_journal_may_end_in_mid_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_directory, "_RELEASE", 0.1)
    with ExitStack() as stack:
        serving = Mortal(stack)
        groups = workers(serving, method_named("async_sgd"))
        states = StateDirectory(tmp_path / "state", every=1000.0)
        assert states.restore(serving.core) == ""
        saved(states, serving.core)
        with pytest.raises(ConfigurationError, match="another server saves its state there"):
            StateDirectory(tmp_path / "state")
        for group in groups:
            group.train(1)
        drawn = serving.core.epochs.book.drawn(0, 0)  # type: ignore[union-attr]
        (journal,) = (tmp_path / "state").glob("journal-*")
        journal.write_bytes(journal.read_bytes() + bytes([9, 0, 0, 0, 0x93]))
        states.close()  # without a last save
        (tmp_path / "state" / "new-1").write_bytes(b"half of a save, by a server that was killed")
        core = ServerCore(KEY, secrets.token_bytes)
        states = StateDirectory(tmp_path / "state")
        assert "goes on with a run of 2 ranks" in states.restore(core)
        assert (core.store.clock, core.reconnect_timeout) == (0, RECONNECT_TIMEOUT)
        assert core.epochs.book.drawn(0, 0) == drawn  # type: ignore[union-attr]
        saved(states, core)
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()} == {0o600}
        weights = saved_weights(tmp_path / "state")
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == {"w": (5,), "b": (3,)}
        core.fail("the end")
        states.discard(core)
        assert [path.name for path in sorted((tmp_path / "state").iterdir())] == ["ended", "lock"]
        assert saved_weights(tmp_path / "state").keys() == weights.keys()
        states.close()


def test_a_server_that_is_lost_after_groups_were_formed_again_serves_other_runs_and_keeps_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        serving, states = Mortal(stack), StateDirectory(tmp_path, every=1000.0)
        workers(serving, method_named("async_sgd"))
        states.restore(serving.core)
        saved(states, serving.core)
        weights = saved_weights(tmp_path)
        serving.core.journal.outdate()
        serving.core.journal.write = None  # it is killed: nothing is noted of what comes later
        states.close()
    states, core = StateDirectory(tmp_path), ServerCore(KEY, secrets.token_bytes)
    assert (states.restore(core), core.has_state) == ("", False)
    assert "other groups were formed, or weights handed over" in caplog.records[-1].getMessage()
    states.poll(core)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ended", "lock"]
    assert same(saved_weights(tmp_path), weights)
    states.close()


def test_a_run_that_ends_well_leaves_no_weights_of_one_that_failed_before(tmp_path: Path) -> None:
    states = StateDirectory(tmp_path, every=1000.0)
    for fails in (True, False):
        with ExitStack() as stack:
            serving = Mortal(stack)
            groups = workers(serving, method_named("async_sgd"))
            states.restore(serving.core)
            saved(states, serving.core)
            if fails:
                serving.core.fail("the end")
            for group in groups:
                group.control.close("")
            states.discard(serving.core)
        assert [path.name for path in sorted(tmp_path.iterdir())] == [*["ended"] * fails, "lock"]
    states.close()


def test_weights_of_what_is_no_state_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere: there is no such directory; pass .*--state"):
        saved_weights(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"nothing is saved there.*load a checkpoint"):
        saved_weights(tmp_path)
    (tmp_path / "state-00000001").write_bytes(b"something else")
    with pytest.raises(ConfigurationError, match="state-00000001: no saved state: it does not begin as one"):
        saved_weights(tmp_path)


@pytest.mark.parametrize("place", [30, -3])
def test_a_save_in_which_a_bit_has_changed_is_refused(tmp_path: Path, place: int) -> None:
    write_save(tmp_path, 1, *pack({"weights": torch.arange(64.0)}))
    file = tmp_path / "state-00000001"
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)
    with pytest.raises(ConfigurationError, match="state-00000001: no saved state: it is damaged or incomplete"):
        saved_weights(tmp_path)


def test_a_state_that_cannot_be_read_is_named_and_one_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state-00000001").write_bytes(b"something else")
    states = StateDirectory(tmp_path)
    with pytest.raises(ConfigurationError, match="no saved state: it does not begin as one"):
        states.restore(ServerCore(KEY, secrets.token_bytes))
    states.close()
    with pytest.raises(ConfigurationError, match="Not a directory"):
        StateDirectory(tmp_path / "state-00000001" / "below")
    with ExitStack() as stack:
        serving = Mortal(stack)
        workers(serving, method_named("async_sgd"))
        states = StateDirectory(tmp_path / "other")
        states.restore(serving.core)
        shutil.rmtree(tmp_path / "other")
        saved(states, serving.core)
        assert "its loss would end the run" in caplog.text
        assert (serving.core.reconnect_timeout, serving.core.journal.write) == (0.0, None)
        states.close()


def synchronize(serving: Mortal, groups: Sequence[Worker]) -> None:
    for group in groups:
        group.control.ask(m.Contribute(number=0, what="test"), b"%d" % group.rank)  # type: ignore[attr-defined]
        serving.revive()
    for group in groups:
        answer, parts = group.control.take(m.Gathered)  # type: ignore[attr-defined]
        assert (answer.ranks, parts) == ((0, 1), [b"0", b"1"])
