"""What every transport must do, asked of ZeroMQ, of the one in memory, and of one that the package does not know."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
from memory_transport import InMemory
from rounds import sent
from runs import run
from stream import Stream
from torch import Tensor
from torch.nn import Parameter

from lightning_omni import Server
from lightning_omni.errors import ConfigurationError, ConnectionLost, OmniError, RankLost, Refused
from lightning_omni.group.core import Action, GroupCore, Outgoing, ServerRequest
from lightning_omni.methods import AsyncSGD, DiLoCo, Method, method_named
from lightning_omni.methods.contract import Gradient, NextGradient, Receive
from lightning_omni.methods.model.replica import Pulled, Replica, copies
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of
from lightning_omni.registry import to_wire
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.server.core import ServerCore
from lightning_omni.topology import GroupId
from lightning_omni.transport import registry
from lightning_omni.transport.connections import Address, Control, Data, Requests
from lightning_omni.transport.registry import Transport
from lightning_omni.transport.zeromq import ZeroMQ
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack, unpack
from lightning_omni.wire.formats.base import Memory
from lightning_omni.wire.layout import Layout

KEY = bytes(range(32))
DEADLINE = 120.0
"""Seconds that anything here may take on a busy machine before it counts as stuck."""
LARGE = 700_000
"""Numbers of a tensor that takes more than one frame of any transport."""


class Serving:
    """A server of some transport, and the ranks that have joined it."""

    run = "a run"

    def __init__(self, chosen: Transport, stack: ExitStack) -> None:
        self.transport, self._stack = chosen, stack
        self.core = ServerCore(KEY, secrets.token_bytes, heartbeat_timeout=DEADLINE)
        self.server = chosen.serve(self.core)
        self.address = self.server.address
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stopping.is_set,))
        self._thread.start()
        stack.callback(self.stop)

    def stop(self) -> None:
        """The server ends, if it has not before."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join(DEADLINE)
            self.server.close()

    def join(self, rank: int, size: int, layout: Layout, key: bytes = KEY, **options: Any) -> Control:
        control = self.transport.join(self.address, key, self.run, rank, size, layout, **options)
        self._stack.callback(control.close, "")
        return control


ALL = (ZeroMQ(), ZeroMQ(shared_memory=False), InMemory(), Stream())


@pytest.fixture(params=ALL, ids=["zeromq", "zeromq by socket", "in_memory", "stream"])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    with served(request.param) as made:
        yield made


@contextmanager
def served(chosen: Transport) -> Iterator[Serving]:
    with ExitStack() as stack:
        yield Serving(chosen, stack)


class Group:
    """A group of one rank: what a rank does for real, here at the test's word."""

    def __init__(
        self,
        serving: Serving,
        rank: int,
        size: int,
        numel: int = 5,
        method: Method | None = None,
        overlap: bool = False,
    ) -> None:
        self.parameters = {"w": Parameter(torch.linspace(-1, 1, numel)), "b": Parameter(torch.zeros(3))}
        self.layout = Layout.of({name: parameter.detach() for name, parameter in self.parameters.items()})
        self.rank = rank
        self.control = serving.join(rank, size, self.layout)
        self.data = serving._stack.enter_context(closing(self.control.attach(DEADLINE)))
        self.method = method or AsyncSGD()
        optimizer = torch.optim.SGD(list(self.parameters.values()), lr=0.1, momentum=0.9)
        self.replica = Replica(list(self.parameters.values()), optimizer, rank)
        self.core = GroupCore(self.method, overlap=overlap)
        self.core.attach(self.replica)
        self.core.form(GroupId(str(rank), 1))
        self._memory, self._into = Memory(self.control.empty), self.control.empty(self.layout.nbytes)

    def form(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Rank 0 forms groups and hands weights over."""
        method = to_wire(self.method)
        form = m.FormGroups(generation=1, groups=tuple(groups), method=method)
        assert self.control.request(form, m.GroupsFormed, timeout=DEADLINE).incarnation == 1
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        optimizer = describe(self.replica.optimizer, names) if self.method.steps_at == "server" else None
        part = {"optimizer": optimizer, "weights": weights, "clock": 0}
        packed, buffer = pack({"parts": [part]})
        self.data.exchange(m.UploadWeights(packed=packed, nbytes=buffer.numel()), m.WeightsUploaded, buffer)

    @torch.no_grad()
    def step(self, seed: int) -> None:
        """One gradient, and all that follows."""
        rng = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(parameter.shape, generator=rng) for parameter in self.parameters.values()]
        action = self.core.gradient(0, Gradient(tensors, hyperparameters_of(self.replica.optimizer)))
        while not isinstance(action, NextGradient):
            action = self.core.answer(0, self.do(action))

    def do(self, action: Action) -> Any:
        if isinstance(action, Receive):
            return self.receive()
        assert isinstance(action, ServerRequest)
        said = sent(self.core, action, self.layout, self._memory)
        self.data.send(said.message, said.payload, self._into)
        self._asked = action
        return self.receive() if action.waits else None

    def receive(self) -> Pulled:
        """The answer to what was said last."""
        answer, payload = self.data.receive(m.Weights, self._into)
        layout = self.layout.fragment(self._asked.fragment, self.method.fragments)
        tensors = layout.views(payload) if self._asked.pulls else []
        return self.core.receive(answer, tensors)


def two(serving: Serving, **options: Any) -> list[Group]:
    groups = [Group(serving, rank, 2, **options) for rank in range(2)]
    groups[0].form([(0,), (1,)])
    return groups


@torch.no_grad()
def test_of_two_groups_each_computes_while_its_fragment_is_under_way(serving: Serving) -> None:
    groups = two(serving, method=DiLoCo(period=4, fragments=2, delay=1, alpha=0.5), numel=500)
    start, before = copies(groups[0].replica.weights()), [group.data.moved for group in groups]
    for step in range(8):
        for group in groups:  # behind a barrier; if a group waited, none would go on
            group.step(seed=step)
    whole = groups[0].layout.nbytes
    for group, moved in zip(groups, before, strict=True):
        group.receive()
        assert 4 * 2 * 0.45 * whole < group.data.moved - moved < 4 * 2 * 0.55 * whole, "four exchanges of a half"
    assert serving.core.store.clock == 4
    assert not any(map(torch.equal, serving.core.store.all[0].master.weights(), start))


@pytest.mark.parametrize("trained", [True, False])
def test_a_rank_tells_what_it_has_got_done_from_its_first_trained_batch_on(serving: Serving, trained: bool) -> None:
    control = two(serving)[0].control
    assert control.heartbeat(0.0).progress == 0
    control.report_progress()
    control.report_progress(is_expected=trained)
    first = control.heartbeat(1.0).progress
    assert bool(first) == trained
    control.request(m.AskStatus(), m.Status)  # it waits for the server
    assert (control.heartbeat(2.0).progress > first) == trained
    control.suspend_stall_check()
    assert control.heartbeat(3.0).progress == 0
    control.report_progress()
    assert bool(control.heartbeat(4.0).progress) == trained


def eventually(is_true: Callable[[], bool]) -> bool:
    """Asks again and again until it is true, or for too long."""
    deadline = time.monotonic() + DEADLINE
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- One suite for all -----------------------------------------------------------------------------------------------


def test_a_rank_with_another_key_is_refused_and_one_with_the_key_let_in(serving: Serving) -> None:
    layout = Layout.of({"w": torch.zeros(2)})
    with pytest.raises((Refused, ConnectionLost)) as refused:
        serving.join(0, 1, layout, key=b"x" * 32)
    assert type(refused.value) is Refused
    assert refused.value.code == "key"
    control = serving.join(0, 1, layout)
    assert control.request(m.AskStatus(), m.Status, timeout=DEADLINE).clock == 0
    assert control.status is not None
    assert serving.core.is_admitted(m.CONTROL, serving.core.peers[0])


def test_a_rank_of_another_model_or_run_hears_why_it_is_refused(serving: Serving) -> None:
    serving.join(0, 2, Layout.of({"w": torch.zeros(2)}))
    with pytest.raises(Refused, match="rank 1 has another model than rank 0"):
        serving.join(1, 2, Layout.of({"w": torch.zeros(3)}))
    with pytest.raises(Refused, match="busy with another run of 2 ranks; wait until it is over"):
        serving.join(1, 3, Layout.of({"w": torch.zeros(2)}))


def test_requests_carry_payloads_both_ways_one_part_for_each_rank(serving: Serving) -> None:
    control = serving.join(0, 1, Layout.of({"w": torch.zeros(2)}))
    answer, parts = control.request_payload(m.Contribute(number=0, what="test"), m.Gathered, b"some bytes", DEADLINE)
    assert (answer.ranks, answer.sizes, parts) == ((0,), (10,), [b"some bytes"])


def test_a_refusal_arrives_as_one_on_both_connections_and_harms_nothing(serving: Serving) -> None:
    first, second = two(serving)
    with pytest.raises(Refused, match="only rank 0 forms groups") as refused:
        second.control.request(
            m.FormGroups(generation=2, groups=((0, 1),), method={}), m.GroupsFormed, timeout=DEADLINE
        )
    assert refused.value.code == "protocol"
    with pytest.raises(Refused, match="there is no optimizer 7"):
        second.data.exchange(m.FetchMessage(optimizer=7), m.Weights)
    own = m.AverageMessage(optimizer=0, nbytes=20)
    with pytest.raises(Refused, match="20 bytes, 76 were expected"):  # before its payload has been looked at
        second.data.exchange(own, m.Weights, torch.zeros(20, dtype=torch.uint8))
    for group in (second, first):
        group.step(seed=1)
    assert serving.core.store.clock == 2


def test_an_answer_that_comes_after_its_request_was_interrupted_is_no_answer_to_a_later_request() -> None:
    with served(ZeroMQ()) as serving:
        first, second = (serving.join(rank, 2, Layout.of({"w": torch.zeros(2)})) for rank in range(2))
        with pytest.raises(ConnectionLost, match="no answer to Contribute"):
            first.request(m.Contribute(number=0, what="test"), m.Gathered, timeout=0.1)
        first.request(m.AskStatus(), m.Status, timeout=DEADLINE)
        first.request(m.ReleaseVersion(number=3), m.VersionReleased, timeout=DEADLINE)
        assert second.request(m.Contribute(number=0, what="test"), m.Gathered, timeout=DEADLINE).number == 0
        first.request(m.AskStatus(), m.Status, timeout=DEADLINE)
        second.post(m.Contribute(number=1, what="test"))
        assert first.request(m.Contribute(number=1, what="test"), m.Gathered, timeout=DEADLINE).number == 1


@pytest.mark.parametrize("is_long", [False, True])
def test_an_answer_of_which_a_part_has_arrived_before_an_interrupt_is_received_whole_after_it(
    is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(ZeroMQ(shared_memory=False)) as serving:
        group = Group(serving, 0, 1, numel=LARGE)
        group.parameters |= {f"{number}" * 1000: Parameter(torch.zeros(1)) for number in range(1000 * is_long)}
        group.form([(0,)])
        data: Any = group.data
        receive, parts = data._receive, iter(range(10_000))

        def interrupted() -> Any:
            if next(parts) == 1:
                raise KeyboardInterrupt
            return receive()

        monkeypatch.setattr(data, "_receive", interrupted)
        data.send(m.TakeSnapshot())
        with pytest.raises(KeyboardInterrupt):
            data.receive(m.Snapshot)
        answer, payload = data.receive(m.Snapshot)
        weights = unpack(answer.packed, payload)["parts"][0]["weights"]
        assert weights.keys() == group.parameters.keys()
        assert torch.equal(weights["w"], group.parameters["w"])


def test_answers_of_several_servers_that_came_before_an_interrupt_are_not_awaited_again() -> None:
    class Server(Data):
        def __init__(self, *answers: Any) -> None:
            self.answers = list(answers)

        def send(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None: ...

        def receive(self, expect: type[Any], into: Tensor | None = None) -> Any:
            if (answer := self.answers.pop(0)) is KeyboardInterrupt:
                raise KeyboardInterrupt
            return answer

        def close(self) -> None: ...

    requests: Any = Requests([Server(1, 3), Server(KeyboardInterrupt, 2, 4)])
    requests.send([Outgoing(m.TakeSnapshot())] * 2)
    with pytest.raises(KeyboardInterrupt):
        requests.receive(m.Snapshot)
    assert requests.receive(m.Snapshot) == [1, 2]
    assert requests.exchange([Outgoing(m.TakeSnapshot())] * 2, m.Snapshot) == [3, 4]


def test_a_push_larger_than_any_frame_and_its_answer_arrive_whole(serving: Serving) -> None:
    group = Group(serving, 0, 1, numel=LARGE)
    group.form([(0,)])
    own = [parameter.detach().clone() for parameter in group.parameters.values()]
    group.step(seed=3)
    rng = torch.Generator().manual_seed(3)
    for weight, mine in zip(own, group.parameters.values(), strict=True):
        weight.sub_(0.1 * torch.randn(weight.shape, generator=rng))
        torch.testing.assert_close(mine.detach(), weight)
    assert group.data.moved >= 2 * group.layout.nbytes > LARGE


def test_a_connection_that_ends_is_a_lost_rank_and_the_others_hear_of_it(serving: Serving) -> None:
    first, second = two(serving)
    second.control.close()
    assert eventually(lambda: first.control.lost == (1,))
    first.step(seed=1)
    first.control.check()
    assert serving.core.roster.formed.alive == (0,)


def test_a_rank_that_says_goodbye_is_not_lost(serving: Serving) -> None:
    first, second = two(serving)
    second.control.close(reason="")
    first.step(seed=1)
    assert first.control.request(m.AskStatus(), m.Status, timeout=DEADLINE).lost == ()
    assert serving.core.roster.gone == {1}


def test_a_group_that_was_not_announced_joins_and_trains_and_is_missed_by_none_when_it_ends(serving: Serving) -> None:
    first, second = two(serving)
    late = Group(serving, 4, 0)
    joined = late.control.request(m.Join(ranks=(4,), name="guest"), m.Joined, timeout=DEADLINE)
    late.core.form(GroupId("guest", joined.incarnation))
    late.replica.clock = late.data.exchange(m.FetchMessage(optimizer=0), m.Weights)[0].clock
    for group in (late, first, second):
        group.step(seed=1)
    assert serving.core.store.clock == 3
    late.control.close()
    assert eventually(lambda: first.control.lost == (4,))
    first.step(seed=2)
    assert serving.core.roster.formed.alive == (0, 1)


def test_when_rank_0_is_lost_every_other_one_is_told_that_the_run_is_over(serving: Serving) -> None:
    ended: list[OmniError] = []
    first, second = (Group(serving, rank, 2) for rank in range(2))
    second.control._on_end = ended.append
    first.form([(0,), (1,)])
    first.control.close(reason="rank 0 failed: no more disk")
    error = second.control.wait_for_end(DEADLINE)
    assert isinstance(error, RankLost)
    assert "rank 0 failed: no more disk" in str(error)
    assert ended == [error]
    with pytest.raises(RankLost, match="the run is over"):
        second.step(seed=1)


def test_a_server_that_is_gone_ends_every_rank(serving: Serving) -> None:
    group = Group(serving, 0, 1)
    group.form([(0,)])
    serving.stop()
    error = group.control.wait_for_end(DEADLINE)
    assert isinstance(error, ConnectionLost)
    assert "gone" in str(error)
    with pytest.raises(ConnectionLost):
        group.step(seed=1)


def test_leaders_read_what_others_publish_and_fill_their_inboxes(serving: Serving) -> None:
    layout = Layout.of({"w": torch.zeros(4)})
    controls = [serving.join(rank, 2, layout) for rank in range(2)]
    with ExitStack() as stack:
        peers = [
            stack.enter_context(closing(control.listen([layout], lambda group: False, everywhere=False)))
            for control in controls
        ]
        for group, each in enumerate(peers):
            each.connect({1 - group: Address(1 - group, peers[1 - group].address)})
        assert peers[0].read(1, 0) is None
        peers[1].publish(0, [torch.arange(4.0)])
        published = peers[0].read(1, 0)
        assert published is not None
        assert published[0].tolist() == [0, 1, 2, 3]
        for value in (1.0, 2.0):
            peers[0].send(1, 0, [torch.full((4,), value)])
        total: list[Tensor] = []
        count = 0

        def arrived() -> bool:
            nonlocal count
            inbox = peers[1].read_inbox(0)
            count += inbox.count
            total.extend(inbox.total or [])
            return count == 2

        assert eventually(arrived)
        assert sum(total).tolist() == [3.0] * 4  # type: ignore[union-attr]


# --- The same everywhere ---------------------------------------------------------------------------------------------


def test_the_same_training_ends_in_the_same_bits_over_every_transport() -> None:
    order = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    for method in ("async_sgd", "delay_compensated", "elastic_averaging:period=2", "async_diloco:period=2"):
        ends = []
        for chosen in ALL:
            with served(chosen) as serving:
                made = method_named(method)
                groups = [Group(serving, rank, 2, method=made) for rank in range(2)]
                groups[0].form([(0,), (1,)])
                for seed, number in enumerate(order):
                    groups[number].step(seed)
                weights = [parameter for group in groups for parameter in group.replica.ordered]
                ends.append(
                    [weight.detach().clone() for weight in (*weights, *serving.core.store.all[0].master.weights())]
                )
        for other in ends[1:]:
            assert all(map(torch.equal, ends[0], other)), method


# --- As a value ------------------------------------------------------------------------------------------------------


def test_a_transport_is_a_value_that_a_run_is_given() -> None:
    assert WorldOptions().server.resolved_transport() == ZeroMQ()
    assert WorldOptions(server=Server(encryption="off")).server.resolved_transport() == ZeroMQ(encryption="off")
    assert WorldOptions(server=Server(transport=Stream())).server.resolved_transport() == Stream()
    assert registry.from_wire(registry.to_wire(ZeroMQ(encryption="off"))) == ZeroMQ(encryption="off")
    assert registry.load("stream:Stream") is Stream
    with pytest.raises(ConfigurationError, match="encryption= is ZeroMQ's"):
        WorldOptions(server=Server(transport=Stream(), encryption="off"))
    with pytest.raises(ConfigurationError, match=r"Server\(transport=InMemory\(\)\): the server, a process of its own"):
        WorldOptions(server=Server(transport=InMemory()))
    with pytest.raises(ConfigurationError, match="stream://host:port"):
        WorldOptions(server=Server(transport=Stream(), address="tcp://10.0.0.1:5555"))
    assert WorldOptions(server=Server(transport=Stream(), address="stream://10.0.0.1:5555")).server.address


def test_real_processes_train_over_a_transport_that_the_package_does_not_know() -> None:
    finished = run("transports.py")
    first, second = finished.results[0], finished.results[1]
    for method, result in first.items():
        assert result["address"].startswith("stream://127.0.0.1:")
        assert result["last"] < result["first"] / 2
        assert result["weights"] == second[method]["weights"]
    assert first["async_sgd"]["moved"] > 0
