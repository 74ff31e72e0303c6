"""A merged head without processes: what its owner computes, which group has access, and what happens if it fails."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_server_core import Link, data_peer, expect_refusal, expected_payload, new_parameters, seed_of, some, varied
from test_server_core import part_of as body_part
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods import AsyncSGD
from lightning_omni.methods.model.head import MergedHead, check_mergeable, clip, modes_of
from lightning_omni.methods.model.modules import class_paths, describe_module, module_resolver, rebuild_module
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of, state_of
from lightning_omni.server.event_log import Event
from lightning_omni.simulator import trace_of
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack, unpack
from lightning_omni.wire.formats.base import RAW, to_wire

HEAD = 1
"""The head's number: the body is optimizer 0."""


def classifier() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def through_the_wire(tree: Any) -> Any:
    return unpack(*pack(tree))


def rows(count: int, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count + width))


# --- What the owner computes ------------------------------------------------------------------------------------------


def test_an_access_gives_the_gradients_of_plain_torch() -> None:
    module, x = classifier(), torch.randn(5, 4)
    head = MergedHead(module, dict(module.named_parameters()))
    output = head.forward((x,), {})
    passed = head.backward([2 * output])
    inputs = x.clone().requires_grad_()
    plain = module(inputs)
    plain.square().sum().backward()
    assert torch.equal(output, plain)
    assert torch.equal(passed.inputs[0], inputs.grad)  # type: ignore[arg-type]
    assert all(torch.equal(ours, p.grad) for ours, p in zip(passed.parameters, module.parameters(), strict=True))  # type: ignore[arg-type]


def test_gradients_of_parameters_that_autograd_gives_one_tensor_may_each_be_clipped() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (Parameter(torch.zeros(3)) for _ in range(3))
            self.scale = Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a + self.b + self.c + self.scale.expand(3)

    module = Sum()
    head = MergedHead(module, dict(module.named_parameters()))
    head.forward((torch.randn(3),), {})
    gradients = head.backward([torch.ones(())[None].expand(3)], copies=True).parameters
    clip(gradients, 0.5, "norm")
    total = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
    torch.testing.assert_close(total.norm(), torch.tensor(0.5))


@varied
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_members_of_a_group_are_one_batch(sizes: list[int]) -> None:
    """The mean over members of what each would compute for itself, as DDP takes it."""
    module, parts = classifier(), [torch.randn(size, 4) for size in sizes]
    head = MergedHead(module, dict(module.named_parameters()))
    output = head.forward((torch.cat(parts),), {})
    rows = [torch.full((size, 2), 1 / size) for size in sizes]
    passed = head.backward([torch.cat(rows)], scale=1 / len(sizes))
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for part, gradient in zip(parts, rows, strict=True):
        found = torch.autograd.grad(module(part), list(module.parameters()), gradient)
        expected = [total + own / len(sizes) for total, own in zip(expected, found, strict=True)]
    assert output.shape == (sum(sizes), 2)
    for ours, theirs in zip(passed.parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_frozen_weights_and_whole_numbers_get_no_gradient() -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.frozen = Parameter(torch.ones(3, 2)), Parameter(torch.ones(2), requires_grad=False)

        def forward(self, rows: Tensor, scale: Tensor, *, shift: float) -> dict[str, Any]:
            return {"logits": self.weight[rows] * self.frozen * scale + shift, "rows": rows, "name": "picked"}

    module = Picking()
    head = MergedHead(module, dict(module.named_parameters()))
    output = head.forward((torch.tensor([0, 2]), torch.ones(2, 1)), {"shift": 0.5})
    assert output["name"] == "picked"
    assert output["rows"].tolist() == [0, 2]
    passed = head.backward([torch.ones(2, 2), None])
    assert passed.inputs[0] is None
    assert passed.inputs[1].tolist() == [[2.0], [2.0]]  # type: ignore[union-attr]
    assert passed.parameters[1] is None
    assert passed.parameters[0].tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]  # type: ignore[union-attr]


def test_dropout_at_the_owner_draws_its_own_numbers_and_leaves_the_others_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    before = torch.get_rng_state()
    outputs = []
    for seed in (1, 1, 2):
        head = MergedHead(module, dict(module.named_parameters()), seed)
        outputs.append([head.forward((torch.ones(2, 4),), {}, exclusive=False) for _ in range(2)])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(torch.stack(outputs[0]), torch.stack(outputs[1]))
    assert not torch.equal(outputs[0][0], outputs[0][1])
    assert not torch.equal(outputs[0][0], outputs[2][0])
    assert not (head.forward((torch.ones(2, 4),), {}, training=False, exclusive=False) == 0).any()


def test_mixed_precision_is_the_owners_too() -> None:
    module = classifier()
    head = MergedHead(module, dict(module.named_parameters()))
    output = head.forward((torch.ones(2, 4),), {}, autocast=torch.bfloat16)
    passed = head.backward([torch.ones(2, 2, dtype=torch.bfloat16)])
    assert output.dtype == torch.bfloat16
    assert passed.inputs[0].dtype == torch.float32  # type: ignore[union-attr]
    assert all(gradient.dtype == torch.float32 for gradient in passed.parameters)  # type: ignore[union-attr]


def test_layers_that_work_in_place_may_begin_a_head() -> None:
    module: Any = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1))
    x = torch.tensor([[1.0, -1.0]])
    head = MergedHead(module, dict(module.named_parameters()))
    head.forward((x,), {})
    passed = head.backward([torch.ones(1, 1)])
    assert x.tolist() == [[1.0, -1.0]]
    (gradient,) = passed.inputs
    assert gradient is not None
    assert gradient.tolist() == [[module[1].weight[0, 0].item(), 0.0]]


def test_modes_are_each_submodules_own_also_when_activations_are_computed_again() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Dropout(0.5))
    module[1].eval()
    assert modes_of(module) == (True, True, False, True)
    head = MergedHead(module, dict(module.named_parameters()))
    zeros = (head.forward((torch.ones(8, 4),), {}, training=modes_of(module)) == 0).float().mean()
    assert 0.35 < zeros < 0.65
    head.forward((torch.ones(1, 4),), {}, training=False, exclusive=False)  # another rank reads it
    head.backward([torch.ones(8, 64)])
    assert modes_of(module) == (True, True, False, True)


def test_an_output_that_takes_no_part_moves_no_weight_of_its_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    head = MergedHead(module := Two(), dict(module.named_parameters()))
    head.forward((torch.ones(3, 2),), {})
    passed = head.backward([torch.ones(3, 1), None])
    assert [gradient is None for gradient in passed.parameters] == [False, False, True, True]


def test_complex_numbers_have_gradients_too() -> None:
    class Rotated(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.abs())

    module = Rotated(2, 1)
    head = MergedHead(module, dict(module.named_parameters()))
    head.forward((torch.ones(3, 2, dtype=torch.complex64),), {})
    gradient = head.backward([torch.ones(3, 1)]).inputs[0]
    assert gradient is not None
    assert gradient.is_complex()


@pytest.mark.parametrize("kind", ["named tuple", "ordered dict", "data class"])
def test_what_would_arrive_as_something_else_is_refused(kind: str) -> None:
    class Named(NamedTuple):
        logits: Tensor

    @dataclass
    class Plain:
        logits: Tensor

    made = {"named tuple": Named, "ordered dict": lambda x: OrderedDict(logits=x), "data class": Plain}[kind]

    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return made(super().forward(x))

    module = Odd(2, 1)
    head = MergedHead(module, dict(module.named_parameters()))
    with pytest.raises(UnsupportedError, match="cannot go into a merged head or come out of it"):
        head.forward((torch.ones(3, 2),), {})


def test_a_buffer_that_the_forward_pass_changes_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    head = MergedHead(module, dict(module.named_parameters()))
    with pytest.raises(UnsupportedError, match=r"buffer 1.num_batches_tracked was changed"):
        head.forward((torch.randn(3, 4),), {})


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_that_of_torch(algorithm: str) -> None:
    gradients = [torch.randn(3, 2) * 5, None, torch.randn(4)]
    holders = [Parameter(torch.zeros_like(g)) for g in gradients if g is not None]
    for holder, gradient in zip(holders, (g for g in gradients if g is not None), strict=True):
        holder.grad = gradient.clone()
    if algorithm == "norm":
        nn.utils.clip_grad_norm_(holders, 1.5)
    else:
        nn.utils.clip_grad_value_(holders, 1.5)
    clip(gradients, 1.5, algorithm)
    there = [gradient for gradient in gradients if gradient is not None]
    for ours, holder in zip(there, holders, strict=True):
        torch.testing.assert_close(ours, holder.grad)


# --- A module as plain data -------------------------------------------------------------------------------------------


def describable() -> dict[str, tuple[nn.Module, Tensor]]:
    """Modules, each with what it takes."""
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    norms = nn.Sequential(nn.LayerNorm(4), nn.GELU(approximate="tanh"), nn.GroupNorm(2, 4)).requires_grad_(False)
    return {
        "sequential": (classifier(), torch.randn(2, 4)),
        "tied": (tied, torch.randn(2, 4)),
        "convolutions": (nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten()), torch.randn(2, 1, 4, 4)),
        "transformer": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0), torch.randn(2, 3, 4)),
        "norms": (norms, torch.randn(2, 4)),
        "embedding": (nn.Embedding(3, 2, padding_idx=0), torch.tensor([[0, 2]])),
    }


@pytest.mark.parametrize("name", describable())
def test_a_rebuilt_module_computes_the_same(name: str) -> None:
    module, x = describable()[name]
    module.eval()
    twin = rebuild_module(
        through_the_wire(describe_module(module)), dict(module.named_parameters()), module_resolver(())
    )
    twin.eval()
    assert torch.equal(twin(x), module(x))
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert all(ours is theirs for ours, theirs in zip(twin.parameters(), module.parameters(), strict=True))


def test_constant_buffers_come_along_as_copies() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_buffer("table", torch.arange(3.0))
    twin = rebuild_module(
        through_the_wire(describe_module(module)), dict(module.named_parameters()), module_resolver(())
    )
    assert torch.equal(twin.table, module.table)  # type: ignore[arg-type]
    assert twin.table is not module.table


def test_only_torchs_own_classes_are_imported_unless_told() -> None:
    resolve = module_resolver(("rounds:Rounds",))
    for path in ("os:system", "torch.hub:load", "test_merged_head:Foreign"):
        with pytest.raises(UnsupportedError, match=f"--allow-module {path}"):
            resolve(path)
    with pytest.raises(UnsupportedError, match="cannot import the module class rounds:Rounds"):
        resolve("rounds:Rounds")
    with pytest.raises(UnsupportedError, match=r"is not a torch.nn.Module"):
        module_resolver(("torch.nn:functional",))("torch.nn:functional")


@pytest.mark.parametrize(
    "path",
    [
        "torch.nn:modules.module.torch.jit.ScriptModule",
        "torch.nn.modules.module:torch.jit.ScriptModule",
        "torch.nn:DataParallel",
        "torch.nn:Linear.__class__",
        "torch.nn.modules.linear:Linear.forward",
    ],
)
def test_a_class_path_cannot_leave_torch_nn_through_attributes(path: str) -> None:
    with pytest.raises(UnsupportedError, match=r"is not from torch\.nn|is not a torch\.nn\.Module"):
        module_resolver(())(path)
    assert module_resolver(())("torch.nn:Linear") is nn.Linear


class Foreign(nn.Linear):
    """A class that is not torch's."""


def test_a_class_of_the_users_own_is_served_where_it_is_allowed() -> None:
    module = Foreign(2, 2)
    description = through_the_wire(describe_module(module))
    path = f"{__name__}:Foreign"
    assert class_paths(description) == {path}
    assert type(rebuild_module(description, dict(module.named_parameters()), module_resolver((path,)))) is Foreign


def test_a_function_may_only_be_one_of_torchs_activations() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    description, parameters = describe_module(layer), dict(layer.named_parameters())
    assert description["attributes"]["activation"] == {"$function": "torch.nn.functional:relu"}
    for path in ("torch:load", "os:system", "torch.nn.functional:importlib", "torch.nn.functional:nothing"):
        description["attributes"]["activation"] = {"$function": path}
        with pytest.raises(UnsupportedError, match="no function that a module may hold"):
            rebuild_module(description, parameters, module_resolver(()))


# --- What can be merged -----------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), head


def hooked() -> nn.Module:
    head = classifier()
    head[0].register_forward_hook(lambda *_: None)
    return head


def own_forward() -> nn.Module:
    head = classifier()
    head[0].forward = lambda x: 2 * x
    return head


def with_attribute() -> nn.Module:
    head = nn.Linear(4, 2)
    head.callback = print  # type: ignore[assignment]
    return head


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), "submodule 1 keeps running statistics"),
        (lambda: nn.LSTM(4, 2), "is a LSTM"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "is a LazyLinear"),
        (lambda: nn.Embedding(4, 2, sparse=True), "makes sparse gradients"),
        (lambda: nn.ModuleList([nn.Linear(4, 2)]), "a ModuleList has no forward pass of its own"),
        (own_forward, "has a forward of its instance's own"),
        (hooked, "0 has hooks"),
        (with_attribute, "its attribute 'callback' is a builtin_function_or_method"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), "is made on the fly"),
        (lambda: type("Local", (nn.Linear,), {"__module__": "__main__"})(4, 2), "defined in the script itself"),
    ],
)
def test_what_the_server_cannot_hold_is_refused_with_its_name(head: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^merged='head': .*{reason}"):
        check_mergeable("head", Model(head()))


@pytest.mark.parametrize("name", ["heads", "", "head.7", 3])
def test_a_wrong_name_is_answered_with_the_right_ones(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"its submodules with parameters are body, head, head.0, head.2"):
        check_mergeable(name, Model(classifier()))


def test_a_submodule_without_weights_is_nothing_to_merge() -> None:
    with pytest.raises(ConfigurationError, match="has no parameters"):
        check_mergeable("head", Model(nn.ReLU()))


def test_weights_that_the_body_shares_cannot_be_merged() -> None:
    model = Model(nn.Linear(4, 4))
    model.head.weight = model.body.weight
    with pytest.raises(UnsupportedError, match=r"shared with body.weight"):
        check_mergeable("head", model)


def test_a_module_that_the_body_shares_cannot_be_merged() -> None:
    shared = nn.Linear(4, 4)
    model = Model(nn.Sequential(shared, nn.ReLU()))
    model.encoder = shared
    with pytest.raises(UnsupportedError, match=r"shared with encoder\.weight"):
        check_mergeable("head", model)


# --- An optimizer in two parts ----------------------------------------------------------------------------------------


def test_an_optimizer_is_described_in_parts_that_make_the_whole() -> None:
    weights = [Parameter(torch.full((2,), float(n))) for n in range(4)]
    optimizer = torch.optim.Adam([{"params": weights[:2], "lr": 0.1}, {"params": weights[2:], "lr": 0.2}])
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    first: dict[Tensor, str] = {weights[0]: "a", weights[2]: "c"}
    second: dict[Tensor, str] = {weights[3]: "d"}
    one, other = describe(optimizer, first), describe(optimizer, second)
    assert [(group["lr"], group["params"]) for group in one["groups"]] == [(0.1, ["a"]), (0.2, ["c"])]
    assert [(group["lr"], group["params"]) for group in other["groups"]] == [(0.2, ["d"])]
    assert [values["lr"] for values in hyperparameters_of(optimizer, second)] == [0.2]
    assert one["state"].keys() == {0, 1}
    assert one["state"][1] is optimizer.state_dict()["state"][2]
    assert state_of(optimizer, second)[0] is optimizer.state_dict()["state"][3]


# --- Exclusive access -------------------------------------------------------------------------------------------------


class Heads:
    """Three groups of one rank each at a server with a body and a merged head."""

    def __init__(self, head: nn.Module | None = None, momentum: float = 0.9) -> None:
        self.module: Any = head or classifier()
        self.link, self.events = Link(3), list[Event]()
        self.link.core.events.record = self.events.append
        for rank in range(3):
            self.link.join(rank)
        form = m.FormGroups(
            generation=1,
            groups=((0,), (1,), (2,)),
            method=to_wire(AsyncSGD()),
            wire_format=to_wire(RAW),
        )
        self.link.control(0, form)
        names: dict[Tensor, str] = {parameter: f"head.{name}" for name, parameter in self.module.named_parameters()}
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=momentum)
        part = {
            "optimizer": describe(self.optimizer, names),
            "weights": {name: parameter.detach() for parameter, name in names.items()},
            "clock": 0,
            "head": {"name": "head", "module": describe_module(self.module), "seed": 0},
        }
        message, payload = seed_of({"parts": [body_part(new_parameters()), part]})
        assert self.link.data(0, message, payload)[0] == m.WeightsUploaded()
        self.link.inbox.clear()

    def forward(self, rank: int, x: Tensor, exclusive: bool = True) -> None:
        packed, buffer = pack([[x], {}])
        message = m.HeadForward(
            optimizer=HEAD,
            packed=packed,
            nbytes=buffer.numel(),
            training=modes_of(self.module),
            trainable=tuple(parameter.requires_grad for parameter in self.module.parameters()),
            exclusive=exclusive,
        )
        self.link.say(data_peer(rank), message, buffer.numpy().tobytes(), m.DATA)

    def backward(self, rank: int, gradient: Tensor, **changes: Any) -> None:
        packed, buffer = pack([gradient])
        fields = {"hyperparameters": tuple(hyperparameters_of(self.optimizer)), **changes}
        message = m.HeadBackward(optimizer=HEAD, packed=packed, nbytes=buffer.numel(), **fields)
        self.link.say(data_peer(rank), message, buffer.numpy().tobytes(), m.DATA)

    def heard(self, rank: int) -> list[Any]:
        """What a rank was answered since it was last asked, tensors unpacked."""
        answers = []
        for message, payload in self.link.inbox.pop((data_peer(rank), m.DATA), []):
            buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0)
            is_tree = hasattr(message, "packed")
            answers.append((message, unpack(message.packed, buffer)) if is_tree else message)
        return answers

    @property
    def weights(self) -> list[Tensor]:
        return [weight.clone() for weight in self.link.core.store.all[HEAD].master.weights()]


def test_one_group_at_a_time_has_access_in_order_of_arrival() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    for rank in (1, 0, 2):
        heads.forward(rank, x)
    outputs = []
    for rank, waiting in ((1, (0, 2)), (0, (2,)), (2, ())):
        assert not any(heads.heard(other) for other in waiting)
        ((answer, output),) = heads.heard(rank)
        assert isinstance(answer, m.HeadOutput)
        outputs.append(output)
        heads.backward(rank, torch.ones(3, 2))
        assert isinstance(heads.heard(rank)[0][0], m.HeadGradients)
    # Each read what the one before had written.
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


def test_the_head_goes_the_way_of_plain_sgd_and_is_never_stale() -> None:
    heads, plain = Heads(), classifier()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        rank, x = step % 3, torch.randn(3, 4)
        heads.forward(rank, x)
        ((_, output),) = heads.heard(rank)
        optimizer.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        torch.testing.assert_close(output, plain(x))
        heads.backward(rank, 2 * output / output.numel())
        ((answer, _),) = heads.heard(rank)
        assert (answer.clock, answer.applied) == (step + 1, True)
        optimizer.step()
    for ours, theirs in zip(heads.weights, plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())
    trace = trace_of(heads.events, optimizer=HEAD)
    assert trace.columns()["staleness"].tolist() == [0] * 6
    assert trace.columns()["group"].tolist() == [0, 1, 2, 0, 1, 2]
    assert heads.link.core.store.clock == 0  # updates are counted by the body


def test_the_heads_gradient_is_scaled_and_clipped_before_it_is_applied() -> None:
    heads, x = Heads(momentum=0.0), torch.randn(3, 4)
    before = heads.weights
    heads.forward(0, x)
    heads.backward(0, torch.full((3, 2), 100.0), scale=0.5, clip=0.2)
    moved = torch.cat([(a - b).flatten() for a, b in zip(heads.weights, before, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.1 * 0.2))


def test_a_forward_pass_without_access_waits_for_no_group() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    heads.forward(0, x)
    heads.heard(0)
    heads.forward(1, x, exclusive=False)
    assert isinstance(heads.heard(1)[0][0], m.HeadOutput)
    heads.backward(0, torch.ones(3, 2))
    assert heads.heard(0)[0][0].applied


@pytest.mark.parametrize("how", ["released", "died", "left"])
def test_an_access_that_is_not_taken_to_its_end_changes_nothing_and_the_next_has_it(how: str) -> None:
    heads, x = Heads(), torch.randn(3, 4)
    before = heads.weights
    heads.forward(1, x)
    heads.forward(2, x)
    heads.heard(1)
    if how == "released":
        heads.link.say(data_peer(1), m.HeadRelease(optimizer=HEAD), b"", m.DATA)
        assert heads.heard(1) == [m.HeadReleased()]
    elif how == "died":
        heads.link.deliver(heads.link.core.lose(1, "killed"))
    else:
        heads.link.control(1, m.Goodbye())
    ((answer, output),) = heads.heard(2)
    assert isinstance(answer, m.HeadOutput)
    assert torch.equal(output, classifier()(x))
    assert all(torch.equal(now, then) for now, then in zip(heads.weights, before, strict=True))


def test_one_who_waits_and_dies_is_passed_over() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    for rank in range(3):
        heads.forward(rank, x)
    heads.heard(0)
    heads.link.deliver(heads.link.core.lose(1, "killed"))
    heads.backward(0, torch.ones(3, 2))
    assert not heads.heard(1)
    assert isinstance(heads.heard(2)[0][0], m.HeadOutput)


def test_gradients_that_are_not_finite_leave_the_head_as_it_was() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    before = heads.weights
    for count in (1, 2):
        heads.forward(0, x)
        heads.backward(0, torch.full((3, 2), float("nan")))
        answer = heads.heard(0)[-1][0]
        assert (answer.applied, answer.refused_in_row, answer.clock) == (False, count, 0)
    assert all(torch.equal(now, then) for now, then in zip(heads.weights, before, strict=True))


def test_what_the_head_cannot_take_is_refused_and_the_next_has_access() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    heads.forward(0, torch.randn(3, 5))
    (answer,) = heads.heard(0)
    assert answer.code == "head"
    assert "shapes cannot be multiplied" in answer.reason
    heads.forward(1, x)
    heads.heard(1)
    heads.forward(2, x)
    heads.backward(1, torch.ones(2, 2))  # three rows came out
    assert heads.heard(1)[0].code == "head"
    assert isinstance(heads.heard(2)[0][0], m.HeadOutput)


def test_an_access_out_of_order_is_refused() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    heads.backward(0, torch.ones(3, 2))
    assert "group 0 has no access" in heads.heard(0)[0].reason
    heads.forward(0, x)
    heads.heard(0)
    heads.forward(0, x)
    assert "twice in one step" in heads.heard(0)[0].reason
    heads.backward(1, torch.ones(3, 2))
    assert "the holder is 0" in heads.heard(1)[0].reason
    heads.backward(0, torch.ones(3, 2))
    assert heads.heard(0)[0][0].applied
    expect_refusal(heads.link.data(0, m.HeadRelease(optimizer=0))[0], "protocol", "optimizer 0 is no merged head")


Step = tuple[str, int, Any]
scripts = st.lists(
    st.tuples(
        st.sampled_from(["forward", "backward", "release", "noise"]),
        st.integers(0, 2),
        st.sampled_from([(3, 4), (3, 2), (0, 4), (2,), ()])
        | some(m.HeadForward, optimizer=st.sampled_from([0, HEAD, 7]))
        | some(m.HeadBackward, optimizer=st.sampled_from([0, HEAD, 7])),
    ),
    max_size=12,
)


@varied
@given(scripts)
def test_nothing_that_an_admitted_rank_says_to_the_head_breaks_the_server(script: list[Step]) -> None:
    heads = Heads()
    for what, rank, detail in script:
        if what == "release":
            heads.link.say(data_peer(rank), m.HeadRelease(optimizer=HEAD), b"", m.DATA)
        elif not isinstance(detail, tuple):
            payload = bytes(expected_payload(heads.link, data_peer(rank), detail))
            heads.link.say(data_peer(rank), detail, payload, m.DATA)
        elif what == "forward":
            heads.forward(rank, torch.ones(detail))
        else:
            heads.backward(rank, torch.ones(detail))
    for rank in range(3):
        heads.link.say(data_peer(rank), m.HeadRelease(optimizer=HEAD), b"", m.DATA)
        heads.heard(rank)
    # Whatever was said, the head serves the group that comes next.
    heads.forward(0, torch.ones(3, 4))
    assert isinstance(heads.heard(0)[0][0], m.HeadOutput)
    assert all(weight.isfinite().all() for weight in heads.weights)


def test_the_snapshot_holds_the_head_with_its_optimizer() -> None:
    heads = Heads()
    heads.forward(0, torch.randn(3, 4))
    heads.backward(0, torch.ones(3, 2))
    heads.heard(0)
    heads.link.say(data_peer(0), m.TakeSnapshot(), b"", m.DATA)
    ((_, tree),) = heads.heard(0)
    assert tree["parts"][HEAD]["clock"] == 1
    assert list(tree["parts"][HEAD]["weights"]) == [f"head.{name}" for name, _ in heads.module.named_parameters()]
    assert len(tree["parts"][HEAD]["state"]) == 4


def test_staleness_is_counted_from_the_forward_pass_on() -> None:
    """Were access shared, it would show."""
    heads, x = Heads(), torch.randn(3, 4)
    heads.forward(0, x)
    heads.link.core.store.all[HEAD].master.clock += 5
    heads.backward(0, torch.ones(3, 2))
    assert heads.link.core.store.all[HEAD].counts.staleness == {5: 1}
    assert heads.events[-1].read_at == 0


def test_a_read_of_the_head_during_an_access_does_not_end_it() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    heads.forward(0, x)
    heads.forward(1, x)
    heads.heard(0)
    heads.forward(0, torch.randn(3, 7), exclusive=False)
    assert heads.heard(0)[0].code == "head"
    assert not heads.heard(1)
    heads.backward(0, torch.ones(3, 2))
    assert heads.heard(0)[0][0].applied
    assert isinstance(heads.heard(1)[0][0], m.HeadOutput)


def test_an_optimizer_that_fails_on_the_heads_gradient_is_refused_and_the_server_goes_on() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    heads.forward(0, x)
    heads.link.core.store.all[HEAD].master.optimizer.step = lambda: 1 / 0  # type: ignore[union-attr, method-assign]
    heads.backward(0, torch.ones(3, 2))
    assert "ZeroDivisionError" in heads.heard(0)[-1].reason
    heads.forward(1, x)
    assert isinstance(heads.heard(1)[0][0], m.HeadOutput)


def test_weights_are_trained_or_left_as_each_access_says() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    before = heads.weights
    heads.module[0].requires_grad_(False)
    heads.forward(0, x)
    heads.backward(0, torch.ones(3, 2))
    frozen = heads.weights
    assert [torch.equal(now, then) for now, then in zip(frozen, before, strict=True)] == [True, True, False, False]
    heads.module[0].requires_grad_(True)
    heads.forward(0, x)
    heads.backward(0, torch.ones(3, 2))
    assert not any(torch.equal(now, then) for now, then in zip(heads.weights, frozen, strict=True))


def test_the_length_of_accesses_is_measured() -> None:
    heads, x = Heads(), torch.randn(3, 4)
    for _ in range(3):
        heads.forward(0, x)
        heads.link.now += 0.25
        heads.backward(0, torch.ones(3, 2))
    assert heads.link.core.status_service.status(0.0).head_time == pytest.approx(0.25)
