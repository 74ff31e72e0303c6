"""The group's state machine: what comes out for what goes in, with no server and no clock."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from rounds import sent, sgd
from torch.nn import Parameter

from lightning_omni.errors import NonFiniteGradients, ProtocolError, UnsupportedError
from lightning_omni.group.core import NO_ANSWER, GroupCore, ServerRequest
from lightning_omni.group.leased_batches import LeaseClient
from lightning_omni.group.merged_head import MergedHeadClient
from lightning_omni.methods import (
    AsyncSGD,
    Exchange,
    Gossip,
    Gradient,
    Inbox,
    LocalSGD,
    Method,
    NextGradient,
    Pulled,
    ReadInbox,
    Replica,
    SendPeer,
)
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.wire import messages as m
from lightning_omni.wire.layout import Layout


def group(method: Method, lr: float = 0.5, count: int = 1) -> tuple[GroupCore, list[Replica]]:
    """A core with optimizers of one parameter of two ones each."""
    core, replicas = GroupCore(method), []
    for _ in range(count):
        own = [Parameter(torch.ones(2))]
        replicas.append(Replica(own, sgd(lr)(own)))
        core.attach(replicas[-1])
    return core, replicas


def ones(replica: Replica) -> Gradient:
    return Gradient([torch.ones(2) for _ in replica.ordered], hyperparameters_of(replica.optimizer))


def test_a_gradient_comes_out_as_a_push_that_says_where_the_group_is() -> None:
    core, (replica,) = group(AsyncSGD())
    core.data = LeaseClient()
    core.data.restart(epoch=3)
    for _ in range(7):
        core.data.begin_batch()
    replica.clock = 5
    ask = core.gradient(0, ones(replica))
    assert isinstance(ask, ServerRequest)
    message = sent(core, ask, Layout.of({"weight": replica.ordered[0].detach()})).message
    assert isinstance(message, m.PushMessage)
    assert (message.read_at, message.epoch, message.trained) == (5, 3, 7)
    assert (message.present, message.nbytes) == ((True,), 8)
    assert message.hyperparameters[0]["lr"] == 0.5


def test_a_parameter_without_a_gradient_takes_no_room_in_the_push() -> None:
    core, (replica,) = group(AsyncSGD())
    ask = core.gradient(0, Gradient([None], hyperparameters_of(replica.optimizer)))
    assert isinstance(ask, ServerRequest)
    message = sent(core, ask, Layout.of({"weight": replica.ordered[0].detach()})).message
    assert isinstance(message, m.PushMessage)
    assert (message.present, message.nbytes) == ((False,), 0)


@torch.no_grad()
def test_steps_of_the_groups_own_optimizer_need_no_other() -> None:
    core, (replica,) = group(LocalSGD(period=2), lr=0.25)
    assert core.gradient(0, ones(replica)) == NextGradient()
    assert replica.weights()[0].tolist() == [0.75, 0.75]
    ask = core.gradient(0, ones(replica))
    assert isinstance(ask, ServerRequest)
    assert isinstance(ask.need, Exchange)
    assert ask.tensors[0] is not None
    assert ask.tensors[0].tolist() == [0.5, 0.5]


@torch.no_grad()
def test_what_the_server_says_is_heard_whether_the_method_asked_or_not() -> None:
    core, (replica,) = group(AsyncSGD())
    ask = core.fetch(0)
    assert sent(core, ask, Layout(())).message == m.FetchMessage(optimizer=0, epoch=-1, trained=0)
    pulled = core.receive(replace(NO_ANSWER, staleness=-1, progress=40, stop="validate", clock=9), [torch.zeros(2)])
    assert (core.last_answer.progress, core.last_answer.stop) == (40, "validate")
    assert (pulled.clock, pulled.refused) == (9, False)
    assert core.waits_for(0) == NextGradient(), "the method has asked for nothing"
    core.gradient(0, ones(replica))
    refused = core.receive(replace(NO_ANSWER, staleness=2, applied=False, clock=11), [torch.full((2,), 4.0)])
    assert core.answer(0, refused) == NextGradient()
    assert (refused.refused, replica.clock, replica.weights()[0].tolist()) == (True, 11, [4.0, 4.0])


@torch.no_grad()
def test_at_a_synchronization_point_a_group_hands_in_its_own_weights_if_there_are_no_others() -> None:
    for method, expected in (
        (AsyncSGD(), m.FetchMessage),
        (LocalSGD(period=2), m.AverageMessage),
        (Gossip(), m.AverageMessage),
    ):
        core, (replica,) = group(method)
        layout = Layout.of({"weight": replica.ordered[0].detach()})
        said = sent(core, core.synchronize(0), layout)
        assert type(said.message) is expected
        if isinstance(said.message, m.AverageMessage):
            assert said.payload is not None
            assert said.message.nbytes == said.payload.numel()
            assert torch.equal(layout.views(said.payload)[0], replica.ordered[0].detach())


def test_a_group_gives_up_after_so_many_nonfinite_pushes_in_a_row() -> None:
    core = GroupCore(AsyncSGD(), max_nonfinite_pushes=3)
    for in_row in (1, 2, 0, 1, 2):
        core.receive(replace(NO_ANSWER, applied=not in_row, refused_in_row=in_row, clock=0), [])
    with pytest.raises(NonFiniteGradients, match=r"NaN or infinite 3 times in a row.*max_nonfinite_pushes="):
        core.receive(replace(NO_ANSWER, applied=False, refused_in_row=3, clock=0), [])
    GroupCore(AsyncSGD()).receive(replace(NO_ANSWER, applied=False, refused_in_row=1000, clock=0), [])


def test_a_merged_head_is_accessed_once_in_a_step() -> None:
    head = torch.nn.Linear(2, 1)
    side = MergedHeadClient("head", 1, head, torch.optim.SGD(head.parameters(), lr=0.5), list(head.parameters()))
    with pytest.raises(UnsupportedError, match='merged="head": the submodule is used twice'):
        side.end()
    side.check()
    said, _ = side.forward(((torch.ones(3, 2),), {}), autocast="bfloat16")
    assert isinstance(said, m.HeadForward)
    assert (said.exclusive, said.autocast, said.training, said.trainable) == (True, "bfloat16", (True,), (True, True))
    side.begin()
    with pytest.raises(UnsupportedError, match="used twice"):
        side.check()
    side.end()
    back, _ = side.backward([torch.ones(3, 1)], place=(2, 7), scale=0.5)
    assert isinstance(back, m.HeadBackward)
    assert (back.epoch, back.trained, back.scale, back.hyperparameters[0]["lr"]) == (2, 7, 0.5, 0.5)
    with pytest.raises(UnsupportedError, match="used twice"):
        side.check()
    side.step_done()
    side.check()
    side.begin()
    assert side.release() == m.HeadRelease(optimizer=1)
    assert not side.has_access


def test_a_gradient_that_is_not_wanted_is_refused_and_each_optimizer_waits_for_itself() -> None:
    core, (first, second) = group(AsyncSGD(), count=2)
    core.gradient(0, ones(first))
    with pytest.raises(ProtocolError, match="a gradient of optimizer 0, whose group waits for Exchange: an exception"):
        core.gradient(0, ones(first))
    assert isinstance(core.gradient(1, ones(second)), ServerRequest)


@pytest.mark.parametrize("method", [AsyncSGD(), LocalSGD(period=1)])
@torch.no_grad()
def test_a_synchronization_in_the_middle_of_a_step_is_refused(method: Method) -> None:
    """Otherwise the answer to the step would be taken for the weights to evaluate."""
    core, (replica,) = group(method)
    core.synchronize(0)
    core.gradient(0, ones(replica))
    with pytest.raises(ProtocolError, match=r"a synchronization of optimizer 0, .*let the exception end training"):
        core.synchronize(0)
    core.form()
    core.synchronize(0)


@torch.no_grad()
def test_formed_again_or_with_more_parameters_the_method_goes_on_with_what_its_replica_remembers() -> None:
    core, (replica,) = group(LocalSGD(period=2))
    core.gradient(0, ones(replica))
    core.form()
    assert isinstance(core.gradient(0, ones(replica)), ServerRequest), (
        "the second step since the last exchange, as before"
    )
    core.answer(0, Pulled([torch.zeros(2)], clock=1))
    more = Parameter(torch.ones(2))
    replica.ordered.append(more)
    replica.optimizer.add_param_group({"params": [more]})
    assert core.gradient(0, ones(replica)) == NextGradient()
    assert more.tolist() == [0.5, 0.5]


@torch.no_grad()
def test_other_groups_are_spoken_to_one_action_at_a_time() -> None:
    core, (replica,) = group(Gossip(kind="push"))
    replica.peers = (1,)
    action = core.gradient(0, ones(replica))
    assert isinstance(action, SendPeer)
    assert (action.group, [tensor.tolist() for tensor in action.tensors]) == (1, [[0.5, 0.5]])
    assert core.answer(0, None) == ReadInbox()
    assert core.answer(0, Inbox([torch.full((2,), 1.5)], 1)) == NextGradient()
    assert replica.weights()[0].tolist() == [1.0, 1.0]
