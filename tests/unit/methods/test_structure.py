"""Parameter groups that change in the midst of a run: what the server makes of it, for every method."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from rounds import lent, start
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import MalformedMessage, ProtocolError, Refused
from lightning_omni.group.core import GroupCore
from lightning_omni.methods import (
    METHODS,
    AsyncSGD,
    DecoupledDiLoCo,
    DiLoCo,
    Downpour,
    Exchange,
    Fetch,
    Gradient,
    HardSync,
    Inbox,
    LocalSGD,
    Method,
    NextGradient,
    Publish,
    Pulled,
    ReadInbox,
    ReadPeer,
    Reply,
    RingmasterASGD,
    SendPeer,
    SoftSync,
)
from lightning_omni.methods.contract import Total
from lightning_omni.methods.model.replica import Replica
from lightning_omni.methods.model.server_optimizer import describe, holds, hyperparameters_of, resolver
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.wire import messages as m
from lightning_omni.wire.layout import MOST_STRUCTURES, Structure, Structures

Make = Callable[[Iterable[Any]], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def pull(weights: list[Tensor], group: int, step: int) -> list[Tensor]:
    """A gradient of its own for each weight, group and step."""
    noise = [torch.Generator().manual_seed(7919 * place + 31 * group + step) for place in range(len(weights))]
    return [
        0.3 * weight + torch.randn(weight.shape, generator=random, dtype=weight.dtype)
        for weight, random in zip(weights, noise, strict=True)
    ]


class Run:
    """Groups with optimizers of their own and one at the server, joined in memory; weights are named by their places.

    Args:
        method: the method.
        groups: number of groups.
        sizes: how many weights each parameter group has at first.
        make: makes the user's optimizer.
        weights: all that will ever be, in the order in which they come.
    """

    def __init__(
        self,
        method: Method,
        groups: int,
        sizes: tuple[int, ...] = (1,),
        make: Make = sgd,
        weights: list[Tensor] | None = None,
    ) -> None:
        self.method, self.all = method, weights or [*start(), *start(1)]
        self.replicas = [self._replica(group, sizes, make) for group in range(groups)]
        first = self.replicas[0]
        names: dict[Tensor, str] = {parameter: str(place) for place, parameter in enumerate(first.ordered)}
        self.served = ServedParameters(
            describe(first.optimizer, names) if method.steps_at == "server" else None,
            {name: parameter.detach() for parameter, name in names.items()},
            0,
            method,
            range(groups),
            resolver(()),
            room=2000,
        )
        self.steps, self.waiting = [0] * groups, dict[int, Exchange]()
        self.windows, self.inboxes = dict[int, list[Tensor]](), [Total() for _ in range(groups)]
        self.cores = [GroupCore(method) for _ in self.replicas]
        for core, replica in zip(self.cores, self.replicas, strict=True):
            replica.peers = tuple(range(groups))
            core.attach(replica)

    def _replica(self, group: int, sizes: tuple[int, ...], make: Make) -> Replica:
        own = [Parameter(weight.clone()) for weight in self.all[: sum(sizes)]]
        parts = iter(own)
        groups = [{"params": [next(parts) for _ in range(size)]} for size in sizes]
        return Replica(own, make(groups), group)

    # --- What happens ------------------------------------------------------------------------------------------------

    def add(self, group: int, many: int = 1, **settings: Any) -> None:
        """The group's user adds a parameter group with the next weights."""
        known = len(self.replicas[group].ordered)
        fresh = [Parameter(weight.clone()) for weight in self.all[known : known + many]]
        self.replicas[group].optimizer.add_param_group({"params": fresh, **settings})
        self.follow(group)

    def follow(self, group: int) -> None:
        """Send the group's parameter groups to the server, as `runtime.model.parameter_groups` does."""
        replica = self.replicas[group]
        known = len(replica.ordered)
        held = [parameter for each in replica.optimizer.param_groups for parameter in each["params"]]
        replica.ordered.extend(parameter for parameter in held if all(parameter is not own for own in replica.ordered))
        assert self.served.restructure(group, self.tree(group, known)) == known
        with torch.no_grad():
            for own, value in zip(replica.ordered, self.served.master.weights(), strict=False):
                if any(own is parameter for parameter in replica.ordered[known:]):
                    own.copy_(value)

    def tree(self, group: int, known: int) -> dict[str, Any]:
        replica = self.replicas[group]
        places = {parameter: place for place, parameter in enumerate(replica.ordered)}
        settings = hyperparameters_of(replica.optimizer, places)
        return {
            "groups": [
                {**each, "params": [places[parameter] for parameter in group["params"]]}
                for each, group in zip(settings, replica.optimizer.param_groups, strict=True)
            ],
            "weights": {str(place): replica.ordered[place].detach() for place in range(known, len(places))},
            "state": {},
        }

    def compute(self, group: int) -> None:
        """One gradient and all that follows; nothing if the group waits."""
        if group in self.waiting:
            return
        replica = self.replicas[group]
        held = [parameter for each in replica.optimizer.param_groups for parameter in each["params"]]
        tensors = [
            tensor if any(own is parameter for parameter in held) else None
            for own, tensor in zip(replica.ordered, pull(replica.weights(), group, self.steps[group]), strict=True)
        ]
        self.steps[group] += 1
        own = set(replica.ordered)
        settings = hyperparameters_of(replica.optimizer, own)
        assert len(settings) == sum(holds(each, own) for each in replica.optimizer.param_groups)
        self.cores[group].steps_take(0, 1.0 + group)
        with torch.no_grad():
            self.cores[group].gradient(0, Gradient(tensors, settings))
        self._do(group)

    def _send(self, group: int, answer: Any) -> None:
        with torch.no_grad():
            self.cores[group].answer(0, answer)
        self._do(group)

    def _do(self, group: int) -> None:
        match need := self.cores[group].waits_for(0):
            case NextGradient():
                return
            case Exchange():
                self.waiting[group] = need
                self._push(group, need)
            case Fetch():
                self.served.method_side.fetched(group)
                self._pulled(group, None, 0.0)
            case Publish():
                self.windows[group] = [tensor.clone() for tensor in need.tensors]
                self._send(group, None)
            case ReadPeer():
                theirs = self.windows.get(need.group)
                alike = theirs is not None and len(theirs) == len(self.replicas[group].ordered)
                self._send(group, theirs if alike else None)
            case SendPeer():
                if len(need.tensors) == len(self.replicas[need.group].ordered):
                    self.inboxes[need.group].add(need.tensors)
                self._send(group, None)
            case ReadInbox():
                inbox, self.inboxes[group] = self.inboxes[group], Total()
                self._send(group, Inbox(inbox.take() if inbox.count else None, inbox.count))  # type: ignore[arg-type]

    def _push(self, group: int, need: Exchange) -> None:
        present = tuple(tensor is not None for tensor in need.tensors)
        layout = self.served.layout_of(group).subset(present)
        payload = layout.empty()
        there = [tensor for tensor in need.tensors if tensor is not None]
        for view, tensor in zip(layout.views(payload), there, strict=True):
            view.copy_(tensor)
        message = m.PushMessage(
            optimizer=0,
            read_at=need.read_at,
            present=present,
            hyperparameters=tuple(map(dict, need.hyperparameters)),
            epoch=-1,
            trained=0,
            nbytes=layout.nbytes,
            note=need.note,
            pull=need.pull,
            layout=layout.version,
            fragment=-1 if need.fragment is None else need.fragment,
        )
        replies = self.served.push(group, message, payload)
        payload.fill_(255)  # NaN: code that kept a part of it is found out
        assert replies is not None
        self._deliver(replies)

    def _deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            need = self.waiting.pop(reply.group)
            self._pulled(reply.group, reply if need.pull else None, reply.note, need.pull)

    def _pulled(self, group: int, reply: Reply | None, note: float, pull: bool = True) -> None:
        layout = self.served.layout_of(group)
        buffer = self.served.payload_of(reply) if reply is not None else self.served.buffer
        with lent(layout.views(buffer) if pull else []) as tensors:
            self._send(group, Pulled(tensors, self.served.master.clock, note))

    def synchronize(self, *groups: int) -> None:
        """These groups become idle, in this order as far as they are free to."""
        left = list(groups)
        while left:
            group = next(group for group in left if group not in self.waiting)
            left.remove(group)
            with torch.no_grad():
                self._deliver(self.served.method_side.idle(group))

    # --- What is the case --------------------------------------------------------------------------------------------

    def everything(self) -> list[Tensor]:
        of_replicas = [weight for replica in self.replicas for weight in replica.weights()]
        return [weight.clone() for weight in (*self.served.master.weights(), *of_replicas)]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


EVERY = {name: kind() for name, kind in METHODS.items()} | {
    "bounded": AsyncSGD(bound=1),
    "downpour, apart": Downpour(n_push=2, n_fetch=3),
    "gpu_asgd": Downpour(n_push=3, n_fetch=3, send="updates"),
    "local_sgd": LocalSGD(period=3),
    "diloco": DiLoCo(period=2),
    "decoupled_diloco": DecoupledDiLoCo(period=2, fragments=1, delay=0),
    "ringmaster_asgd": RingmasterASGD(max_staleness=100),
}
every = pytest.mark.parametrize("method", EVERY.values(), ids=EVERY.keys())
makes = pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
ORDER = [0, 1, 1, 0, 2, 1, 0, 0, 2, 2, 1, 0, 1, 2, 0, 1, 2, 2, 0, 1]


# --- Growth ----------------------------------------------------------------------------------------------------------


@every
@makes
def test_a_group_that_is_added_before_the_first_step_might_have_been_there_from_the_start(
    method: Method, make: Make
) -> None:
    whole, grown = Run(method, 3, (1, 2), make), Run(method, 3, (1,), make)
    for group in range(3):
        grown.add(group, 2)
    for run in (whole, grown):
        for group in ORDER:
            run.compute(group)
    assert_equal(grown.everything(), whole.everything())


@pytest.mark.parametrize("method", [HardSync(), LocalSGD(period=1)], ids=["at the server", "at the workers"])
@pytest.mark.parametrize("settings", [{}, {"lr": 0.03}], ids=["plain", "own rate"])
@makes
def test_growth_in_mid_run_is_that_of_one_optimizer(method: Method, settings: dict[str, Any], make: Make) -> None:
    """The oracle is a torch optimizer in one process, to which the group is added at the same update."""
    if method.steps_at == "worker" and make is adamw:
        pytest.skip("a mean of weights is a step along the mean gradient for plain SGD only")
    if method.steps_at == "worker":
        make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    run = Run(method, 2, (1,), make)
    oracle = [Parameter(weight.clone()) for weight in run.all]
    optimizer = make([oracle[0]])
    for step in range(12):
        known = 1 if step < 5 else 3
        if step == 5:
            optimizer.add_param_group({"params": oracle[1:3], **settings})
            run.add(0, 2, **settings)
            run.add(1, 2, **settings)
        if step == 8:
            for each in (optimizer, *(replica.optimizer for replica in run.replicas)):
                each.param_groups[1]["lr"] = 0.2
        weights = [parameter.detach().clone() for parameter in oracle[:known]]
        both = [pull(weights, group, step) for group in range(2)]
        for parameter, one, other in zip(oracle, *both, strict=False):
            parameter.grad = (one + other) / 2
        optimizer.step()
        run.compute(0)
        run.compute(1)
        for mine, theirs in zip(run.served.master.weights(), oracle, strict=False):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-13)
    assert len(run.served.master.weights()) == 3


@every
def test_a_slow_group_goes_on_without_what_it_does_not_know_and_takes_it_up_later(method: Method) -> None:
    run = Run(method, 3)
    for group in ORDER:
        run.compute(group)
    run.synchronize(2, 1, 0)
    for group in (0, 1):
        run.served.method_side.resume(group)
        run.add(group, 1)
    for group in (0, 1) * 6:
        run.compute(group)
    run.synchronize(0, 1)
    assert len(run.served.layout.specs) == 2
    assert len(run.served.layout_of(2).specs) == 1
    run.served.method_side.resume(2)
    moved = run.served.master.weights()[1].clone()
    if method.steps_at == "server":
        assert not torch.equal(moved, run.all[1])
    for _ in range(3):
        run.compute(2)  # nothing of the parameter is in these
    run.add(2, 1)
    assert_equal([run.replicas[2].weights()[1]], [run.served.master.weights()[1]])
    for group in (0, 1):
        run.served.method_side.resume(group)
    for group in ORDER:
        run.compute(group)
    run.synchronize(0, 1, 2)
    assert all(torch.isfinite(weight).all() for weight in run.everything())
    assert [len(replica.ordered) for replica in run.replicas] == [2, 2, 2]


def test_the_mean_of_weights_is_that_of_those_who_have_the_parameter() -> None:
    run = Run(LocalSGD(period=1), 3)
    run.add(0, 1)
    run.add(1, 1)
    for group in range(3):
        run.compute(group)
    mine = [Parameter(run.all[1].clone()) for _ in range(2)]
    for group, parameter in enumerate(mine):
        gradient = pull(run.all[:2], group, 0)[1]
        parameter.data.sub_(gradient, alpha=0.1)
    torch.testing.assert_close(run.served.master.weights()[1], (mine[0] + mine[1]).detach() / 2)


def test_methods_state_survives_growth() -> None:
    for method in EVERY.values():
        run = Run(method, 3)
        for group in ORDER:
            run.compute(group)
        for group in range(3):
            if group not in run.waiting:
                run.add(group, 1)
        for group in (2, 1, 0) * 3:
            run.compute(group)
        side = method.server_side(run.served.master, range(3))
        side.load_state(run.served.method_side.state())


# --- Other changes ---------------------------------------------------------------------------------------------------


def oracle_of(run: Run, make: Make) -> tuple[list[Parameter], Optimizer]:
    own = [Parameter(weight.clone()) for weight in run.all[:3]]
    return own, make([{"params": own[:1]}, {"params": own[1:], "lr": 0.02}])


@makes
def test_groups_that_are_taken_away_come_back_and_change_hands_are_followed(make: Make) -> None:
    run = Run(HardSync(), 1, (1,), make)
    run.add(0, 2, lr=0.02)
    own, optimizer = oracle_of(run, make)
    replica = run.replicas[0]
    kept: list[Any] = []

    def change(groups: list[dict[str, Any]], parameters: list[Parameter], step: int) -> None:
        if step == 3:  # the first group goes
            kept.append(groups.pop(0))
        elif step == 6:  # and comes back behind the other, with its state
            groups.append(kept.pop())
        elif step == 9:  # a parameter changes hands, and with them its learning rate
            groups[1]["params"].append(groups[0]["params"].pop())

    for step in range(14):
        change(optimizer.param_groups, own, step)
        change(replica.optimizer.param_groups, replica.ordered, step)
        if step in (3, 6, 9):
            kept.reverse()  # each has its own
            run.follow(0)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = pull([parameter.detach() for parameter in own], 0, step)
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter.grad = gradient if id(parameter) in held else None
        optimizer.step()
        run.compute(0)
        for mine, theirs in zip(run.served.master.weights(), own, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-13)
    assert len(run.served.master.snapshot()["state"]) == 3


def test_settings_of_a_group_at_an_older_structure_reach_the_right_parameters() -> None:
    run = Run(AsyncSGD(staleness_aware=True), 2, (1, 1))
    run.replicas[0].optimizer.param_groups.reverse()
    run.replicas[0].optimizer.add_param_group({"params": [Parameter(run.all[2].clone())], "lr": 0.5})
    run.follow(0)
    run.compute(0)
    older = run.replicas[1].optimizer
    older.param_groups[0]["lr"], older.param_groups[1]["lr"] = 0.01, 0.001
    before = [weight.clone() for weight in run.served.master.weights()]
    run.compute(1)
    rates = [group["lr"] for group in run.served.master.optimizer.param_groups]  # type: ignore[union-attr]
    assert rates == [0.001, 0.01, 0.5]
    assert torch.equal(run.served.master.weights()[2], before[2])


@pytest.mark.parametrize("method", [HardSync(), SoftSync(n=1)])
def test_a_push_that_waits_is_merged_with_the_settings_of_parameter_groups_that_came_meanwhile(method: Method) -> None:
    run = Run(method, 2)
    run.compute(0)
    before = run.served.master.weights()[0].clone()
    run.add(1, lr=0.5)
    run.served.method_side.evict(1)
    run.served.method_side.released()
    assert not torch.equal(run.served.master.weights()[0], before)
    assert torch.equal(run.served.master.weights()[1], run.all[1])


# --- What is refused -------------------------------------------------------------------------------------------------


def bad(changes: dict[str, Any]) -> dict[str, Any]:
    group = {"lr": 0.1, "momentum": 0.9, "params": [1]}
    good = {"groups": [{**group, "params": [0]}, group], "weights": {"x": torch.ones(2)}, "state": {}}
    return {**good, **changes}


@pytest.mark.parametrize(
    ("tree", "error", "says"),
    [
        (None, MalformedMessage, "no parameter groups"),
        ([], MalformedMessage, "no parameter groups"),
        (bad({"groups": 3}), MalformedMessage, "no parameter groups"),
        (bad({"groups": [{"params": [0, 7]}]}), MalformedMessage, "places"),
        (bad({"groups": [{"params": [0]}, {"params": [0]}]}), MalformedMessage, "two parameter groups"),
        (bad({"groups": [{"params": [0, True]}]}), MalformedMessage, "places"),
        (bad({"groups": [{"params": [0], "lr": "fast"}]}), ProtocolError, "lr='fast'"),
        (bad({"groups": [{"params": [0], "lr": float("nan")}]}), ProtocolError, "lr=nan"),
        (bad({"groups": [{"params": [0], "lr": torch.ones(3)}]}), MalformedMessage, "plain"),
        (bad({"weights": {"x": 3}}), MalformedMessage, "no tensor"),
        (bad({"weights": {"0": torch.ones(2)}}), MalformedMessage, "already"),
        (bad({"weights": {"x": torch.ones(1000)}}), Refused, "2000 are left"),
        (bad({"state": {5: {}}}), MalformedMessage, "new"),
        (bad({"state": {1: {"momentum_buffer": torch.ones(3, 3)}}}), MalformedMessage, "shape"),
        (bad({"state": {1: {"momentum_buffer": torch.ones(1)}}}), MalformedMessage, "cannot step"),
        (bad({"state": {1: {"momentum_buffer": "much"}}}), MalformedMessage, "cannot step"),
        (bad({"state": {1: 4}}), MalformedMessage, "no parameter groups"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_changes_nothing(tree: Any, error: type[Exception], says: str) -> None:
    run = Run(AsyncSGD(), 2)
    run.compute(0)
    before, structure = run.everything(), run.served.structures.newest
    with pytest.raises(error, match=says):
        run.served.restructure(0, tree)
    assert_equal(run.everything(), before)
    assert run.served.structures.newest == run.served.structures.of(0) == structure
    assert len(run.served.layout.specs) == 1
    run.compute(0)
    run.compute(1)


def test_a_second_group_that_adds_something_else_is_refused_and_one_that_says_the_same_again_is_not() -> None:
    run = Run(AsyncSGD(), 2)
    run.add(0, 1)
    run.served.restructure(0, {**run.tree(0, 2), "weights": {}})
    assert run.served.structures.of(0) == Structure(2, ((0,), (1,)))
    other = {**run.tree(0, 1), "weights": {"1": torch.ones(9)}}
    with pytest.raises(Refused, match=r"group 1 has added the parameter 1 \(9,\)"):
        run.served.restructure(1, other)
    with pytest.raises(Refused, match="in another way"):
        run.served.restructure(1, {"groups": [], "weights": {}, "state": {}})
    run.add(1, 1)
    assert run.served.structures.of(1) == run.served.structures.newest
    assert run.served.restructure(1, run.tree(1, 1)) == 1, "no answer came to the same message"
    assert run.served.structures.of(1) == run.served.structures.newest


def test_a_group_may_come_to_two_changes_at_once_and_so_be_the_first() -> None:
    structures = Structures([Structure(1, ((0,),))])
    one, two = Structure(2, ((0,), (1,))), Structure(3, ((0,), (1,), (2,)))
    structures.move(0, one, structures.find(0, one))
    structures.move(1, two, structures.find(1, two))
    assert structures.newest == structures.of(1) == two
    structures.move(0, two, structures.find(0, two))
    assert structures.of(0) == two


def test_structures_do_not_pile_up_without_end() -> None:
    both = [Structure(2, ((0, 1),)), Structure(2, ((0,), (1,)))]
    structures = Structures([both[0]])
    for number in range(1, MOST_STRUCTURES):
        structures.move(0, both[number % 2], structures.find(0, both[number % 2]))
    with pytest.raises(Refused, match="change them less often"):
        structures.find(0, both[MOST_STRUCTURES % 2])
    structures.form()
    assert structures.find(0, Structure(3, ((0, 1), (2,)))) is None
