"""Exchange rules against their equations, and the user's optimizer rebuilt elsewhere against the original."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, get_args, get_origin

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import ConfigurationError, MalformedMessage, UnsupportedError
from lightning_omni.methods import (
    METHODS,
    REGISTRY,
    AsyncSGD,
    Exchange,
    Gossip,
    Gradient,
    Master,
    Method,
    NextGradient,
    Pulled,
    Push,
    Replica,
    Reply,
    method_named,
)
from lightning_omni.methods.model.modules import class_path
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of, rebuild, resolver
from lightning_omni.registry import Registry, to_wire
from lightning_omni.wire.codec import pack, unpack

varied = settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SHAPES = {"first.weight": (3, 4), "second.weight": (4, 2)}

Parameters = Iterable[Any]
Make = Callable[[Parameters], Optimizer]


def new_parameters(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients_at(weights: Sequence[Tensor], seed: int) -> list[Tensor]:
    """A gradient that depends on the weights, so that stale weights give another one."""
    generator = torch.Generator().manual_seed(seed)
    return [weight * 0.3 + torch.randn(weight.shape, generator=generator) for weight in weights]


def replica_of(weights: Sequence[Tensor], group: int = 0, make: Make | None = None) -> Replica:
    """A group's own weights, with an optimizer of its own."""
    parameters = [Parameter(weight.detach().clone()) for weight in weights]
    return Replica(parameters, make(parameters) if make else torch.optim.SGD(parameters, lr=0.1), group)


RULES: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())
@varied
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=25))
def test_async_sgd_is_sequential_steps_on_delayed_gradients(make: Make, order: list[int]) -> None:
    master = Master(parameters := new_parameters(), make(parameters.values()))
    server = AsyncSGD().server_side(master, range(4))
    copies = [replica_of(master.weights(), group) for group in range(4)]
    sides = [AsyncSGD().group_side(copy) for copy in copies]
    needs: list[Any] = [next(side) for side in sides]

    expected = new_parameters()
    reference = make(expected.values())
    read = [[weight.detach().clone() for weight in expected.values()] for _ in range(4)]
    read_at = [0] * 4

    for tick, group in enumerate(order):
        assert needs[group] == NextGradient()
        exchange = sides[group].send(
            Gradient(gradients_at(copies[group].weights(), tick), hyperparameters_of(of(master)))
        )
        assert isinstance(exchange, Exchange)
        replies = server.receive(Push(group, exchange.read_at, exchange.tensors, exchange.hyperparameters))
        needs[group] = sides[group].send(Pulled(master.weights(), master.clock))

        for parameter, gradient in zip(expected.values(), gradients_at(read[group], tick), strict=True):
            parameter.grad = gradient
        reference.step()
        assert replies == [Reply(group, staleness=tick - read_at[group])]
        read[group] = [weight.detach().clone() for weight in expected.values()]
        read_at[group] = tick + 1

    assert master.clock == len(order)
    for mine, theirs in zip(master.weights(), expected.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_group_side_computes_exchanges_and_loads() -> None:
    copy = replica_of([torch.zeros(2)])
    copy.clock = 7
    side = AsyncSGD().group_side(copy)
    gradient = Gradient([torch.ones(2)], [{"lr": 0.1}])
    assert next(side) == NextGradient()
    assert side.send(gradient) == Exchange(gradient.tensors, 7, gradient.hyperparameters)
    assert side.send(Pulled([torch.full((2,), 3.0)], clock=11)) == NextGradient()
    assert copy.clock == 11
    assert torch.equal(copy.weights()[0], torch.full((2,), 3.0))
    assert side.send(gradient) == Exchange(gradient.tensors, 11, gradient.hyperparameters)


# --- Master ------------------------------------------------------------------------------------------------------


def of(master: Master) -> Optimizer:
    """The optimizer of a master that has one."""
    assert master.optimizer is not None
    return master.optimizer


def test_a_missing_gradient_skips_weight_decay_and_momentum() -> None:
    parameters = new_parameters()
    master = Master(parameters, torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, weight_decay=0.5))
    first, second = parameters.values()
    master.update([torch.ones_like(first), torch.ones_like(second)], hyperparameters_of(of(master)))
    before, moved = first.detach().clone(), second.detach().clone()
    buffer = of(master).state[first]["momentum_buffer"].clone()
    master.update([None, torch.ones_like(second)], hyperparameters_of(of(master)))
    assert torch.equal(first, before)
    assert torch.equal(of(master).state[first]["momentum_buffer"], buffer)
    assert not torch.equal(second, moved)
    assert master.clock == 2


def test_a_gradient_of_nothing_still_ticks_the_clock() -> None:
    parameters = new_parameters()
    master = Master(parameters, torch.optim.SGD(parameters.values(), lr=0.1, weight_decay=0.5))
    master.update([None, None], hyperparameters_of(of(master)))
    assert master.clock == 1
    assert all(torch.equal(new, old) for new, old in zip(master.weights(), new_parameters().values(), strict=True))


def test_the_hyperparameters_of_the_push_are_the_ones_that_count() -> None:
    parameters = new_parameters()
    first, second = parameters.values()
    both: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 1.0}]
    master = Master(parameters, torch.optim.SGD(both, lr=0.1))
    before = [weight.clone() for weight in master.weights()]
    master.update([torch.ones_like(w) for w in before], [{"lr": 0.5}, {"lr": 0.25}])
    assert torch.equal(first, before[0] - 0.5)
    assert torch.equal(second, before[1] - 0.25)
    assert [group["lr"] for group in of(master).param_groups] == [0.5, 0.25]


def test_hyperparameters_cannot_take_the_parameters_away() -> None:
    parameters = new_parameters()
    master = Master(parameters, torch.optim.SGD(parameters.values(), lr=0.1))
    before = [weight.clone() for weight in master.weights()]
    master.update([torch.ones_like(w) for w in before], [{"lr": 0.5, "params": []}])
    assert all(torch.equal(new, old - 0.5) for new, old in zip(master.weights(), before, strict=True))


def test_gradients_are_not_kept_between_updates() -> None:
    parameters = new_parameters()
    master = Master(parameters, torch.optim.SGD(parameters.values(), lr=0.1))
    master.update([torch.ones_like(w) for w in master.weights()], hyperparameters_of(of(master)))
    assert all(parameter.grad is None for parameter in parameters.values())


def test_a_snapshot_holds_weights_state_and_clock() -> None:
    parameters = new_parameters()
    master = Master(parameters, torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9), clock=5)
    gradients = [torch.ones_like(w) for w in master.weights()]
    master.update(gradients, hyperparameters_of(of(master)))
    snapshot = master.snapshot()
    assert snapshot["clock"] == 6
    assert list(snapshot["weights"]) == list(SHAPES)
    assert all(torch.equal(snapshot["weights"][name], parameters[name]) for name in SHAPES)
    assert all(torch.equal(snapshot["state"][index]["momentum_buffer"], gradients[index]) for index in (0, 1))


# --- The optimizer, described and rebuilt --------------------------------------------------------------------------


def two_groups(parameters: Parameters, lr: float) -> list[dict[str, Any]]:
    first, second = parameters
    return [{"params": [first]}, {"params": [second], "lr": lr / 2}]


SERVABLE: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=False),
    "NAdam decoupled": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=False),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1, foreach=False),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2, foreach=False),
}
for _name in ("Adafactor", "Muon"):  # newer releases of torch have them
    if _kind := getattr(torch.optim, _name, None):
        SERVABLE[_name] = partial(_kind, lr=0.1)


def train(optimizer: Optimizer, parameters: dict[str, Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters.values(), gradients_at([*parameters.values()], step), strict=True):
            parameter.grad = gradient.detach()
        optimizer.step()


def over_the_wire(tree: Any) -> Any:
    packed, buffer = pack(tree)
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=type(packed))
    return unpack(packed, buffer)


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("make", SERVABLE.values(), ids=SERVABLE.keys())
def test_a_rebuilt_optimizer_goes_on_bit_for_bit(
    make: Callable[[list[dict[str, Any]]], Optimizer], steps_before: int
) -> None:
    parameters = new_parameters()
    optimizer = make(two_groups(parameters.values(), 0.1))
    train(optimizer, parameters, range(steps_before))
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    description = over_the_wire(describe(optimizer, names))
    twins = {name: Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    twin = rebuild(description, twins)

    assert type(twin) is type(optimizer)
    assert hyperparameters_of(twin) == hyperparameters_of(optimizer)
    train(optimizer, parameters, range(steps_before, steps_before + 5))
    train(twin, twins, range(steps_before, steps_before + 5))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, twins[name])
        mine, theirs = optimizer.state[parameter], twin.state[twins[name]]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)


def test_every_servable_optimizer_of_torch_is_tested() -> None:
    kinds = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name, None), type)}
    assert kinds - {"Optimizer", "LBFGS", "SparseAdam"} <= {name.split()[0] for name in SERVABLE}


def test_a_scheduler_leaves_an_optimizer_servable() -> None:
    parameters = new_parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    scheduler.step()
    twin = rebuild(describe(optimizer, {p: n for n, p in parameters.items()}), new_parameters())
    assert hyperparameters_of(twin) == [{**hyperparameters_of(optimizer)[0], "lr": 0.05, "initial_lr": 0.1}]


def test_a_description_without_state_starts_afresh() -> None:
    parameters = new_parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    train(optimizer, parameters, range(2))
    description = describe(optimizer, {p: n for n, p in parameters.items()}, with_state=False)
    assert not rebuild(description, new_parameters()).state


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop])
def test_an_optimizer_meant_for_cuda_graphs_runs_at_the_server(kind: Callable[..., Optimizer]) -> None:
    parameters = new_parameters()
    optimizer = kind(parameters.values(), lr=0.1, capturable=True)
    twins = new_parameters()
    train(rebuild(describe(optimizer, {p: n for n, p in parameters.items()}), twins), twins, range(1))
    assert not torch.equal(twins["first.weight"], parameters["first.weight"])


@pytest.mark.parametrize("lr", [np.float64(0.25), torch.tensor(0.25), 0.25], ids=["numpy", "tensor", "float"])
def test_hyperparameters_travel_whatever_kind_of_number_they_are(lr: Any) -> None:
    optimizer = torch.optim.SGD(new_parameters().values(), lr=0.1)
    optimizer.param_groups[0]["lr"] = lr
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(hyperparameters_of(optimizer)))
    assert arrived[0]["lr"] == 0.25
    assert "params" not in arrived[0]


# --- What the server refuses to run --------------------------------------------------------------------------------


class WithCallable(torch.optim.SGD):
    """Keeps something that no description can hold."""

    def __init__(self, params: Parameters, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.schedule = lambda step: lr


class Mine(torch.optim.SGD):
    """An optimizer of a user's own module."""


def names_of(optimizer: Optimizer) -> dict[Tensor, str]:
    return {p: str(index) for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}


def test_lbfgs_is_refused_with_the_reason() -> None:
    optimizer = torch.optim.LBFGS(new_parameters().values())
    with pytest.raises(UnsupportedError, match=r"LBFGS evaluates the loss several times.*groups=1"):
        describe(optimizer, names_of(optimizer))


def test_sparse_adam_is_refused_with_the_reason() -> None:
    optimizer = torch.optim.SparseAdam(new_parameters().values())
    with pytest.raises(UnsupportedError, match=r"SparseAdam needs sparse gradients.*groups=1"):
        describe(optimizer, names_of(optimizer))


def test_a_class_defined_in_a_function_is_refused() -> None:
    class Local(torch.optim.SGD):
        pass

    optimizer = Local(new_parameters().values(), lr=0.1)
    with pytest.raises(UnsupportedError, match="Local is defined in the script itself"):
        describe(optimizer, names_of(optimizer))


def test_an_attribute_that_is_no_plain_data_is_refused_by_name() -> None:
    optimizer = WithCallable(new_parameters().values(), lr=0.1)
    with pytest.raises(UnsupportedError, match="attribute 'schedule' is a function"):
        describe(optimizer, names_of(optimizer))


TRICKS = [
    "os:system",
    "builtins:eval",
    "builtins:object",
    "subprocess:Popen",
    "torch:load",
    "torch:optim.SGD",
    "torch.optimx:SGD",
    "torch.optim_:SGD",
    "torch.optim.sgd:os.system",
    "torch.optim.sgd:torch.load",
    "torch.optim.sgd:torch.hub.load",
    "torch.optim.optimizer:Path",
    "torch.optim:lr_scheduler.os",
    "torch.optim.lr_scheduler:LRScheduler",
    "torch.optim:SGD.__init__",
    "torch.optim:SGD.__init__.__globals__",
    "torch.optim:SGD.__class__",
    "torch.optim:SGD.__mro__",
    "torch.optim:",
    "torch.optim",
    "torch.optim.:SGD",
    "torch.optim..sgd:SGD",
    "torch.optim.no_such_module:SGD",
    "torch.optim\0:SGD",
    ":SGD",
    ":",
    "",
]


@pytest.mark.parametrize("path", TRICKS)
def test_a_class_path_that_is_no_torch_optimizer_is_refused(path: str) -> None:
    parameters = new_parameters()
    description = describe(torch.optim.SGD(parameters.values(), lr=0.1), {p: n for n, p in parameters.items()})
    with pytest.raises(UnsupportedError):
        rebuild({**description, "class": path}, new_parameters())


@varied
@given(st.sampled_from(["torch.optim", "torch.optim.", "torch.optim.sgd", "os", "this", ""]), st.text(max_size=20))
@example("torch.optim.", "\0:SGD")
@example("torch.optim.", "sgd:\ud800")
def test_no_class_path_gives_anything_but_an_optimizer(start: str, rest: str) -> None:
    for path in (start + rest, f"{start}:{rest}"):
        try:
            kind = resolver(())(path)
        except UnsupportedError:
            continue
        assert issubclass(kind, Optimizer)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_weight_whose_first_gradient_comes_late_is_stepped_as_by_plain_sgd(nesterov: bool) -> None:
    weights = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    twins = [Parameter(weight.detach().clone()) for weight in weights]
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    master = Master({"a": weights[0], "b": weights[1]}, torch.optim.SGD(weights, fused=True, **options))
    plain = torch.optim.SGD(twins, **options)
    for late in (None, torch.ones(2), torch.full((2,), 0.5)):
        master.update([torch.ones(3), late], hyperparameters_of(plain))
        twins[0].grad, twins[1].grad = torch.ones(3), late
        plain.step()
    assert master.clock == 3
    for ours, theirs in zip(weights, twins, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_module_that_is_not_allowed_is_not_even_imported() -> None:
    assert "this" not in sys.modules
    with pytest.raises(UnsupportedError, match="--allow-optimizer this:s"):
        resolver(())("this:s")
    assert "this" not in sys.modules


class Foreign(torch.optim.SGD):
    """An optimizer that is not torch's."""


def test_a_class_path_cannot_leave_torch_optim_through_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "Foreign", Foreign, raising=False)
    for path in ("torch.optim.sgd:Foreign", "torch.optim:lr_scheduler.Optimizer", "torch.optim.sgd:torch.optim.AdamW"):
        with pytest.raises(UnsupportedError, match=r"is not from torch\.optim|is not a torch\.optim\.Optimizer"):
            resolver(())(path)
    assert resolver(())("torch.optim:SGD") is torch.optim.SGD


def test_an_allowed_class_is_served_and_its_neighbours_are_not() -> None:
    path = class_path(Mine)
    assert resolver([path])(path) is Mine
    with pytest.raises(UnsupportedError, match="not told to allow"):
        resolver([path])(path.replace("Mine", "WithCallable"))
    with pytest.raises(UnsupportedError, match="is not a torch"):
        resolver([path.replace("Mine", "Make")])(path.replace("Mine", "Make"))


# --- The contract: every method ------------------------------------------------------------------------------------

every_method = pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS.keys())


@every_method
def test_a_method_is_a_value(kind: type[Method]) -> None:
    method = kind()
    assert method == kind()
    assert hash(method) == hash(kind())
    for field in (*method.__struct_fields__, "surplus"):
        with pytest.raises(AttributeError):
            setattr(method, field, 1)


@every_method
def test_a_method_travels_as_plain_data(kind: type[Method]) -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(kind())))
    assert REGISTRY.from_wire(plain) == kind()
    assert METHODS[plain["name"]] is kind


@every_method
def test_every_setting_of_a_method_can_be_written_as_text(kind: type[Method]) -> None:
    name = str(kind.__struct_config__.tag)
    for field in msgspec.structs.fields(kind):
        choices = get_args(field.type) if get_origin(field.type) is Literal else (field.default,)
        for value in choices:
            assert method_named(f"{name}:{field.name}={value}") == kind(**{field.name: value}), field.name
        for nothing in ("none", "None", "null") if type(None) in get_args(field.type) else ():
            assert method_named(f"{name}:{field.name}={nothing}") == kind(**{field.name: None})


def test_a_text_stays_one_where_a_setting_is_a_text() -> None:
    class Labelled(Method, frozen=True, kw_only=True, tag="test_labelled"):
        label: str = ""
        other: str | None = None
        count: int | None = 3

    registry: Registry[Method] = Registry({"test_labelled": Labelled}, Method, "method", "method", "", "")
    for nothing in ("none", "None", "null"):
        made = registry.named(f"test_labelled:label={nothing},other={nothing},count={nothing}")
        assert made == Labelled(label=nothing, other=nothing, count=None)
    with pytest.raises(ConfigurationError, match="Expected `int`, got `null`"):
        method_named("softsync:n=none")


def test_a_method_with_a_setting_that_must_be_given_can_be_written_as_text() -> None:
    class Sized(Method, frozen=True, kw_only=True, tag="test_sized"):
        size: int
        other: float = 0.5
        names: list[str] = []

    registry: Registry[Method] = Registry({"test_sized": Sized}, Method, "method", "method", "", "")
    assert registry.text_of(Sized(size=0)) == "test_sized:size=0"
    assert registry.text_of(Sized(size=3, other=1.0)) == "test_sized:size=3,other=1.0"
    assert registry.named("test_sized:size=3,other=1.0") == Sized(size=3, other=1.0)


@every_method
def test_a_group_side_asks_for_a_gradient_first(kind: type[Method]) -> None:
    assert next(kind().group_side(replica_of([torch.zeros(2)]))) == NextGradient()


@every_method
def test_pushes_of_all_groups_are_answered(kind: type[Method]) -> None:
    method = kind()
    if isinstance(method, Gossip):
        pytest.skip("gossip pushes nothing")
    parameters = new_parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    master = Master(parameters, optimizer if method.steps_at == "server" else None)
    server = method.server_side(master, range(3))
    answered: list[Reply] = []
    fragment = 0 if method.fragments > 1 else None
    for group in range(3):
        answered += server.receive(
            Push(
                group,
                0,
                [torch.ones_like(w) for w in master.weights(fragment)],
                hyperparameters_of(optimizer),
                fragment=fragment,
            )
        )
    assert sorted(reply.group for reply in answered) == [0, 1, 2]
    assert all(0 <= reply.staleness <= master.clock for reply in answered)
    assert master.clock > 0


@pytest.mark.parametrize("plain", [{}, {"name": "no_such_method"}, {"name": None}, {"name": ["async_sgd"]}])
def test_an_unknown_method_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage, match=r"unknown method.*async_sgd"):
        REGISTRY.from_wire(plain)
