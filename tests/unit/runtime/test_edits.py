"""Weights that others write are noticed, trained ones, and only those; and states of optimizers at the server."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.nn import Parameter

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import Pulled
from lightning_omni.runtime.model.merged_head import RemoteHead
from lightning_omni.runtime.model.replica import ModelReplica, Part
from lightning_omni.runtime.state.served_state import ServedState


def _replica(*sizes: int) -> ModelReplica:
    parameters = {f"weight{place}": Parameter(torch.randn(size)) for place, size in enumerate(sizes)}
    replica = ModelReplica(parameters, torch.optim.SGD(parameters.values(), lr=0.1))
    replica.load(Pulled([torch.full((size,), 2.0) for size in sizes], clock=1))
    return replica


def test_what_was_loaded_is_not_written() -> None:
    replica = _replica(10, 1_000_000)
    assert [replica.written(in_passing=True) for _ in range(9)] == [[]] * 9
    assert replica.written() == []


def test_a_number_that_is_written_in_place_is_noticed_at_once() -> None:
    replica = _replica(10, 1_000_000)
    with torch.no_grad():
        replica.ordered[1][7] += 1
    assert replica.written(in_passing=True) == ["weight1"]
    replica.load(Pulled([torch.ones(10), torch.ones(1_000_000)], clock=2))
    assert replica.written(in_passing=True) == []


def test_a_weight_whose_data_is_written_is_noticed_at_once_and_a_number_in_eight_steps() -> None:
    replica = _replica(10, 1_000_000)
    replica.ordered[1].data.clamp_(-1, 1)
    assert replica.written(in_passing=True) == ["weight1"]
    replica = _replica(10, 1_000_000)
    replica.ordered[1].data[123_456] = 0.0
    assert sorted(replica.written(in_passing=True) for _ in range(8)) == [[]] * 7 + [["weight1"]]
    assert replica.written() == ["weight1"]
    replica.ordered[0].data[3] = 0.0
    assert "weight0" in replica.written(in_passing=True)


@pytest.mark.parametrize("value", [torch.full((10,), 2.0, dtype=torch.float64), torch.full((1,), 2.0)])
def test_a_weight_of_another_dtype_or_shape_is_noticed_and_its_gradient_refused_by_name(value: torch.Tensor) -> None:
    """Groups would exchange it with the dtype that it had."""
    replica = _replica(10, 10)
    assert {spec.dtype for spec in replica.layout.specs} == {"float32"}
    replica.ordered[1].data = value
    assert replica.written(in_passing=True) == ["weight1"]
    with pytest.raises(UnsupportedError, match=r"weight1 has .*, and the groups exchange it with torch.float32"):
        replica.gradients()


def test_a_step_between_two_fetches_is_no_write_and_takes_no_memory() -> None:
    replica, loaded = _replica(10), [torch.ones(10)]
    replica.load(Pulled(loaded, clock=2))
    replica.descend([torch.ones(10)])
    assert replica.written(in_passing=True) == []
    assert torch.equal(loaded[0], replica.ordered[0].detach())
    replica.ordered[0].data[3] = 0.0
    assert replica.written(in_passing=True) == ["weight0"]


def test_frozen_weights_are_the_groups_own() -> None:
    replica = _replica(10, 20)
    replica.ordered[0].requires_grad_(False)
    with torch.no_grad():
        replica.ordered[0].fill_(5.0)
    assert (replica.written(), replica.own_frozen()) == ([], {"weight0"})
    replica.load(Pulled([torch.zeros(10), torch.zeros(20)], clock=2))
    assert replica.ordered[0].eq(5.0).all()
    assert replica.ordered[1].eq(0.0).all()
    replica.ordered[0].requires_grad_(True)
    assert replica.written() == ["weight0"]


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_few_rows_that_are_written_of_a_large_frozen_weight_are_the_groups_own(is_stepped: bool) -> None:
    """Of a memory bank, say, whose elements are compared at intervals that miss these."""
    replica = _replica(1_000_000, 20)
    replica.ordered[0].requires_grad_(False)
    replica.know()
    with torch.no_grad():
        replica.ordered[0][1:17] = 5.0
    if is_stepped:
        replica.step([None, torch.ones(20)])
    replica.load(Pulled([torch.zeros(1_000_000), torch.zeros(20)], clock=2))
    assert replica.ordered[0][1:17].eq(5.0).all()
    assert replica.own_frozen() == {"weight0"}


def test_a_large_frozen_weight_that_gets_the_values_that_it_has_stays_that_of_all_groups() -> None:
    replica = _replica(1_000_000, 20)
    replica.ordered[0].requires_grad_(False)
    replica.know()
    with torch.no_grad():
        replica.ordered[0].copy_(replica.ordered[0].clone())  # a callback that swaps averages in and out, say
    assert replica.own_frozen() == set()
    replica.load(Pulled([torch.zeros(1_000_000), torch.zeros(20)], clock=2))
    assert replica.ordered[0].eq(0.0).all()


def test_a_weight_that_is_frozen_after_local_steps_is_loaded_as_others_are() -> None:
    replica = _replica(10, 20)
    replica.step([torch.ones(10), torch.ones(20)])
    replica.ordered[0].requires_grad_(False)
    assert replica.own_frozen() == set()
    replica.load(Pulled([torch.zeros(10), torch.zeros(20)], clock=2))
    assert replica.ordered[0].eq(0.0).all(), "the mean of all groups, for each has trained it"


def test_rounding_on_the_wire_does_not_move_frozen_weights_and_they_are_no_groups_own() -> None:
    replica = _replica(10, 20)
    replica.ordered[0].requires_grad_(False)
    replica.know()
    replica.move([torch.full((10,), 0.01), torch.full((20,), 0.01)])
    assert replica.ordered[0].eq(2.0).all()
    assert replica.ordered[1].eq(2.01).all()
    assert replica.own_frozen() == set()


def test_what_a_method_overwrites_is_not_written_by_others_and_what_others_have_written_stays() -> None:
    replica = _replica(10, 20)
    for parameter in replica.ordered:
        parameter.requires_grad_(False)
    replica.know()
    with torch.no_grad():
        replica.ordered[0].fill_(5.0)  # a target network, say
    replica.overwrite([torch.zeros(10), torch.zeros(20)])
    assert [weight[0].item() for weight in replica.weights()] == [5.0, 0.0]
    assert replica.own_frozen() == {"weight0"}


def test_weights_that_are_frozen_for_a_while_and_not_written_are_loaded_as_others_are() -> None:
    replica = _replica(10)
    replica.ordered[0].requires_grad_(False)
    replica.load(Pulled([torch.ones(10)], clock=2))
    assert replica.ordered[0].eq(1.0).all()
    replica.ordered[0].requires_grad_(True)
    assert replica.written() == []


def test_weights_that_are_not_finite_are_not_written_by_that() -> None:
    replica = _replica(4)
    replica.load(Pulled([torch.tensor([1.0, float("nan"), float("inf"), 0.0])], clock=2))
    assert replica.written() == []


def test_a_frozen_weight_that_is_written_now_and_then_is_kept_in_between() -> None:
    memory = torch.zeros(10)  # as exchanges use one memory again and again
    replica = _replica(10)
    replica.ordered[0].requires_grad_(False)
    for step in range(6):
        if step == 2:
            replica.ordered[0].data.fill_(7.0)
        memory.fill_(float(step))
        replica.load(Pulled([memory], clock=step))
        assert replica.ordered[0].eq(7.0 if step >= 2 else step).all()


def test_a_weight_that_is_trained_for_a_few_steps_and_frozen_again_is_loaded_as_others_are() -> None:
    replica = _replica(10)
    replica.ordered[0].requires_grad_(False)
    replica.know()
    replica.ordered[0].requires_grad_(True)
    replica.step([torch.ones(10)])
    replica.ordered[0].requires_grad_(False)
    assert replica.own_frozen() == set()


def test_the_state_of_a_parameter_that_returns_is_restored_unless_it_has_a_newer_one() -> None:
    replica = _replica(10, 20)
    optimizer, (weight, other) = replica.optimizer, replica.ordered
    [group] = optimizer.param_groups
    optimizer.state[weight] = {"momentum_buffer": torch.full((10,), 1.0)}
    group["params"] = [other]
    replica.release({other})
    assert weight not in optimizer.state
    group["params"] = [weight, other]
    replica.hold({"weight0": weight, "weight1": other})
    assert optimizer.state[weight]["momentum_buffer"][0] == 1.0
    group["params"] = [other]
    replica.hold({"weight1": other})
    group["params"] = [weight, other]
    optimizer.state[weight] = {"momentum_buffer": torch.full((10,), 2.0)}  # while one group trains
    replica.hold({"weight0": weight, "weight1": other})
    replica.release({weight, other})
    assert optimizer.state[weight]["momentum_buffer"][0] == 2.0


def test_a_head_whose_loop_an_exception_has_ended_may_be_used_in_the_first_step_of_the_next() -> None:
    net, unused = torch.nn.Linear(2, 1), cast(Any, None)
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    part = Part(optimizer, ModelReplica(parameters, optimizer), unused, torch.device("cpu"), head=("head", net))
    head = RemoteHead(unused, unused, unused, part, 0, "head", net)
    head.install()
    head.side.begin()
    head.remove()
    head.install()
    head.side.check()
    assert not head.side.has_access


def _served() -> tuple[torch.optim.SGD, Parameter, ServedState]:
    weight = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ServedState.install(optimizer)
    state = optimizer.state
    assert isinstance(state, ServedState)
    return optimizer, weight, state


@pytest.mark.parametrize(
    "discard",
    [
        lambda state, weight: state.clear(),
        lambda state, weight: state.pop(weight, None),
        lambda state, weight: state.__setitem__(weight, {}),
        lambda state, weight: state.__delitem__(weight),
        lambda state, weight: state.update({weight: {}}),
        lambda state, weight: state.update([(weight, {})]),
        lambda state, weight: state.__ior__({weight: {}}),
    ],
)
def test_a_served_state_is_discarded_however_that_is_written(discard: Callable[..., object]) -> None:
    _, weight, state = _served()
    discard(state, weight)
    served = {weight: {"momentum_buffer": torch.ones(2)}}
    assert state.is_written
    state.write_to(served)
    assert served == {}


@pytest.mark.parametrize(
    "read",
    [
        lambda optimizer, weight: optimizer.state[weight],
        lambda optimizer, weight: optimizer.state.get(weight),
        lambda optimizer, weight: weight in optimizer.state,
        lambda optimizer, weight: len(optimizer.state) == 0,
        lambda optimizer, weight: [values.clear() for values in optimizer.state.values()],
        lambda optimizer, weight: [optimizer.state.pop(each) for each in list(optimizer.state)],
        lambda optimizer, weight: [values for _, values in optimizer.state.items()],
        lambda optimizer, weight: optimizer.state_dict(),
        lambda optimizer, weight: copy.deepcopy(optimizer),
    ],
)
def test_user_code_that_reads_a_served_state_in_any_way_has_not_written_it(read: Callable[..., object]) -> None:
    optimizer, weight, state = _served()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [Parameter(torch.ones(1))]})
    read(optimizer, weight)
    assert not state.is_written
