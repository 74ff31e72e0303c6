"""Weights that are frozen stay what they are, bit for bit, whatever the method and the wire format."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from core import Exchange, Fetch, ModelReplica, Step
from covering import covering
from runs import run as real_run
from test_lossy import can_send, short
from test_simulator import loss, new_model, run
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_omni import Compression
from lightning_omni.methods import METHODS, ElasticAveraging, Gradient, NextGradient, Pulled, Replica
from lightning_omni.simulator import Computation, Evaluation, Limits

FORMATS = ("fp32", "bf16", "int8")
ONE, TWO = torch.ones(4), torch.full((4,), 2.0)


@pytest.mark.parametrize(
    ("method", "push", "pull"),
    covering(
        (method, push, pull)
        for method, push, pull in product(METHODS, FORMATS, FORMATS)
        if can_send(method, push) and (method != "local_sgd" or pull == "fp32")
    ),
)
def test_no_frozen_weight_moves_in_a_simulated_run(method: str, push: str, pull: str) -> None:
    first, _, last = new_model().children()
    model, seen = nn.Sequential(first, nn.Linear(8, 8).requires_grad_(False), last), list[Tensor]()
    before = {name: weight.detach() for name, weight in model.named_parameters()}

    def watched(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(model.get_parameter("1.weight").detach().clone())
        return loss(model, batch)

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(model.get_parameter("1.weight").detach().clone())
        return {}

    options: dict[str, Any] = {
        "evaluate": evaluate,
        "evaluation": Evaluation(every=7),
        "limits": Limits(updates=30),
        "computation": Computation(batched=False),
    }
    trace = run(
        method + short(method), 3, model=model, compression=Compression(push=push, pull=pull), loss=watched, **options
    )
    assert all(torch.equal(each, before["1.weight"]) for each in seen)
    assert not torch.equal(torch.as_tensor(trace.weights["0.weight"]), before["0.weight"])


class Masked(nn.Module):
    """Adds a mask of zeros and infinities, of which the sigmoid function makes zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = Parameter(torch.tensor([0.0] * 6 + [-torch.inf] * 2), requires_grad=False)

    def forward(self, numbers: Tensor) -> Tensor:
        return (numbers + self.mask).sigmoid()


@pytest.mark.parametrize(
    "method", ["diloco:period=2", "decoupled_diloco:period=4,fragments=2", "gossip", "gossip:kind=push"]
)
def test_a_frozen_mask_of_infinities_neither_moves_nor_spoils_what_groups_send(method: str) -> None:
    first, _, last = new_model().children()
    trace = run(method, 2, model=nn.Sequential(first, Masked(), last), limits=Limits(updates=16))
    assert trace.meta["refused"] == 0
    assert torch.equal(torch.as_tensor(trace.weights["1.mask"]), Masked().mask)
    apart = run("gossip:period=1000", 2, model=nn.Sequential(first, Masked(), last), limits=Limits(updates=16))
    assert not torch.equal(*(torch.as_tensor(each.weights["0.weight"]) for each in (trace, apart)))


# --- What is the server's, and what is a group's own -----------------------------------------------------------------


def _replica(kind: type[Replica] = ModelReplica) -> Any:
    """Two weights of ones, as the server has them; the first is frozen."""
    weights = {name: Parameter(torch.ones(4), requires_grad=name == "trained") for name in ("frozen", "trained")}
    optimizer = torch.optim.SGD(weights.values(), lr=0.5)
    if kind is ModelReplica:
        replica: Any = ModelReplica(weights, optimizer)
        replica.know()
        return replica
    return kind(list(weights.values()), optimizer)


def _values(replica: Replica) -> list[float]:
    return [float(weight[0]) for weight in replica.weights()]


@pytest.mark.parametrize("kind", [Replica, ModelReplica])
def test_a_weight_that_is_frozen_after_local_steps_is_averaged_once_more_and_then_settled(kind: Any) -> None:
    replica = _replica(kind)
    assert replica.agreed() == [True, False]
    replica.step([None, ONE])
    replica.ordered[1].requires_grad_(False)
    assert [each is None for each in replica.offered(replica.weights())] == [True, False]
    replica.load(Pulled([ONE, TWO], clock=1))
    assert replica.agreed() == [True, True]


@pytest.mark.parametrize("kind", [Replica, ModelReplica])
def test_of_a_weight_in_several_fragments_each_is_agreed_once_it_was_exchanged(kind: Any) -> None:
    replica = _replica(kind)
    replica.ordered[0].requires_grad_(True)
    replica.step([ONE, ONE])
    for each in replica.ordered:
        each.requires_grad_(False)
    assert [replica.agreed(number, of=2) for number in range(2)] == [[False], [False]]
    replica.mix(Pulled([TWO], clock=1, fragment=1), of=2, own=0.5)
    assert [replica.agreed(number, of=2) for number in range(2)] == [[False], [True]]
    assert _values(replica) == [0.5, 2.0], "what is frozen is all of the average, for there will be no other"


@pytest.mark.parametrize("kind", [Replica, ModelReplica])
def test_what_comes_in_a_lossy_format_does_not_replace_what_is_agreed(kind: Any) -> None:
    replica = _replica(kind)
    replica.load(replica.exactly(Pulled([torch.full((4,), 1.01), TWO], clock=1), of=1))
    assert _values(replica) == [1.0, 2.0]


def test_what_other_code_has_written_of_a_frozen_weight_is_not_settled() -> None:
    replica = _replica()
    with torch.no_grad():
        replica.ordered[0].fill_(5.0)
    assert replica.agreed() == [False, False]
    replica.load(replica.exactly(Pulled([ONE, TWO], clock=1), of=1))
    assert _values(replica) == [5.0, 2.0]


def _stashed() -> Any:
    """One that has trained both weights and frozen the first, while others are in their place."""
    replica = _replica()
    replica.ordered[0].requires_grad_(True)
    replica.step([ONE, ONE])
    replica.ordered[0].requires_grad_(False)
    replica.stash()
    replica.load(Pulled([TWO, TWO], clock=1))
    return replica


def test_after_an_evaluation_groups_go_on_with_what_was_evaluated_of_frozen_weights() -> None:
    replica = _stashed()
    replica.restore(but_frozen=True)
    assert (_values(replica), replica.agreed()) == ([2.0, 0.5], [True, False])
    replica.ordered[1].requires_grad_(False)
    assert replica.agreed() == [True, False], "it is frozen only now, and the group's own"


def test_after_an_evaluation_a_group_goes_on_with_its_own_half_that_is_frozen_for_the_others_step() -> None:
    replica = _stashed()
    for each in replica.ordered:
        each.requires_grad_(False)
    replica.restore(but_frozen=True)
    assert (_values(replica), replica.agreed()) == ([0.5, 0.5], [False, False])


def test_a_look_at_other_weights_leaves_it_as_it_was_what_is_agreed() -> None:
    replica = _stashed()
    replica.restore()
    assert (_values(replica), replica.agreed()) == ([0.5, 0.5], [False, False])


@pytest.mark.parametrize("kind", [Replica, ModelReplica])
def test_a_weight_that_is_frozen_in_mid_run_is_the_centres_after_one_more_elastic_exchange(kind: Any) -> None:
    replica = _replica(kind)
    side = ElasticAveraging(period=1).group_side(replica)
    assert next(side) == NextGradient()
    replica.step([None, ONE])
    replica.ordered[1].requires_grad_(False)
    need = side.send(Gradient([None, None], ()))
    assert isinstance(need, Exchange)
    assert [each is None for each in need.tensors] == [True, False]
    assert side.send(Pulled([0 * ONE, ONE], clock=3)) == Fetch()
    assert isinstance(side.send(Pulled([ONE, TWO], clock=3)), Step)
    assert (_values(replica), replica.agreed()) == ([1.0, 2.0], [True, True])
    assert kind is Replica or replica.own_frozen() == set()


# --- Real runs -------------------------------------------------------------------------------------------------------

BOTH = {"push": "int8", "pull": "int8"}
START: tuple[dict[str, Any], ...] = (
    {"method": "local_sgd:period=2", "compression": "int8", "regroups": True},
    {"method": "elastic_averaging:period=3", "compression": BOTH},
    {"method": "async_sgd", "compression": BOTH},
)
MIDST: tuple[dict[str, Any], ...] = (
    {"method": "local_sgd:period=4,fragments=2,alpha=0.3", "compression": "int8", "server": {"count": 2}},
    {"method": "elastic_averaging:period=3", "compression": BOTH},
    {"method": "diloco:period=2", "compression": BOTH},
)


@cache
def loops() -> dict[int, list[dict[str, Any]]]:
    """Every rank's results of all loops."""
    from_start, in_midst = ([{"freeze_at": at, **loop} for loop in loops] for at, loops in ((0, START), (5, MIDST)))
    return real_run("frozen.py", {"loops": [*from_start, *in_midst]}).results


@pytest.mark.parametrize("number", range(len(START)))
def test_no_frozen_weight_moves_in_a_real_run(number: int) -> None:
    still = {"trained": [], "evaluated": [], "ends_as_evaluated": True}
    assert [loops()[rank][number] for rank in range(3)] == [still] * 3


@pytest.mark.parametrize("number", range(len(MIDST)))
def test_a_layer_that_is_frozen_in_mid_run_becomes_what_is_evaluated_and_moves_no_more(number: int) -> None:
    fragments = 2 if "fragments=2" in MIDST[number]["method"] else 1  # each brings its part of the server's weights
    for result in (loops()[rank][len(START) + number] for rank in range(3)):
        assert result["evaluated"] == [0], "the epoch in which it was trained"
        assert result["ends_as_evaluated"]
        next_epoch = 8
        assert len([step for step in result["trained"] if 5 <= step < next_epoch]) <= fragments
        assert not [step for step in result["trained"] if step > next_epoch]
