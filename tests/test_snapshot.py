"""`ShardScope`: whatever a probe does to a module, its optimizers and generators, all comes back bitwise."""

from __future__ import annotations

import copy
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from lightning_omni.optimizer.object_snapshot import Generators, ObjectSnapshot
from lightning_omni.optimizer.reduction import Reduction
from lightning_omni.optimizer.run_state import ShardScope
from lightning_omni.protocol.all_reduce import EXACT

FEW = settings(max_examples=20, deadline=None)
Parameters = list[dict[str, Any]]


class Snapshot:
    """What a rank has of the model, and the group's buffers, of one moment."""

    def __init__(self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scalers: Any = ()) -> None:
        seen: dict[int, Any] = {}
        self.buffers = ObjectSnapshot(seen).keep_values(module.buffers())
        self.shard = ShardScope.of(module, optimizers, Reduction(EXACT), scalers, seen)

    def restore(self) -> None:
        self.buffers.put_back()
        self.shard.put_back()


def net() -> Any:  # parts of a module have no types of their own
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """On samples, and with dropout, of torch's generator."""
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


def bits(value: Any) -> Any:
    """Something that is equal only if the values are, bitwise."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().view(-1).numpy().tobytes()
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [bits(each) for each in value]
    return value.tobytes() if isinstance(value, np.ndarray) else value


def everything(module: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    return bits(
        [module.state_dict(), [each.state_dict() for each in optimizers], [p.grad for p in module.parameters()]]
    )


def groups_of(module: nn.Sequential) -> Parameters:
    return [
        {"params": module[0].parameters(), "lr": 0.1},
        {"params": [*module[1].parameters(), *module[3].parameters()], "weight_decay": 0.3},
    ]


# --- Weights and optimizers ------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3])
def test_the_run_goes_on_as_if_there_had_been_no_probes(kind: str, before: int) -> None:
    module = net()
    optimizer = OPTIMIZERS[kind](groups_of(module))
    train(module, optimizer, before)
    was, snapshot = everything(module, optimizer), Snapshot(module, [optimizer])
    train(module, optimizer, 4)
    straight = everything(module, optimizer)
    for number in range(3):
        snapshot.restore()
        assert everything(module, optimizer) == was
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 10.0 + number, 0.5
        train(module, optimizer, number)
        assert number == 0 or everything(module, optimizer) != was
    snapshot.restore()
    train(module, optimizer, 4)
    assert everything(module, optimizer) == straight


def test_states_that_are_new_since_then_vanish() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    snapshot = Snapshot(module, [optimizer])
    train(module, optimizer)
    assert len(optimizer.state) == len(list(module.parameters()))
    optimizer.param_groups[0]["noted"] = 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    snapshot.restore()
    assert not optimizer.state
    assert optimizer.state[module[0].weight] == {}  # it is still the dictionary that makes entries
    assert len(optimizer.param_groups) == 1
    assert "noted" not in optimizer.param_groups[0]


def test_optimizer_states_that_were_loaded_in_between_are_forgotten() -> None:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    other = copy.deepcopy((module, torch.optim.AdamW(net().parameters(), lr=0.7)))[1].state_dict()
    train(module, optimizer, 2)
    was, snapshot = everything(module, optimizer), Snapshot(module, [optimizer])
    optimizer.load_state_dict(other)
    assert everything(module, optimizer) != was
    snapshot.restore()
    assert everything(module, optimizer) == was


@pytest.mark.parametrize("shared", [True, False])
def test_a_rate_that_is_a_tensor_stays_the_tensor_that_a_compiled_step_reads(shared: bool) -> None:
    module, rate = net(), torch.tensor(0.1)
    given_ = [{"params": module[0].parameters()}, {"params": module[3].parameters()}]
    if not shared:
        given_[1]["lr"] = torch.tensor(0.2)
    optimizer = torch.optim.AdamW(given_, lr=rate)
    snapshot = Snapshot(module, [optimizer])
    rates = [group["lr"] for group in optimizer.param_groups]
    values = [float(each) for each in rates]
    for _ in range(2):
        rates[0].fill_(3.0)
        optimizer.param_groups[1]["lr"] = 7.0
        snapshot.restore()
        assert all(group["lr"] is each for group, each in zip(optimizer.param_groups, rates, strict=True))
        assert [float(each) for each in rates] == values


def test_optimizers_of_weights_outside_the_module_are_put_back_with_these() -> None:
    module, outside = net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*module.parameters(), outside], lr=0.1, momentum=0.9)
    snapshot = Snapshot(module, [optimizer])
    outside.square().sum().backward()
    optimizer.step()
    snapshot.restore()
    assert outside.tolist() == [1.0, 1.0]
    assert outside.grad is None


def test_gradients_come_back_and_so_does_there_being_none() -> None:
    module = net()
    module[0](torch.ones(1, 3)).sum().backward()
    was, snapshot = [bits(each.grad) for each in module.parameters()], Snapshot(module, [])
    assert {each is None for each in was} == {True, False}
    for change in (lambda: module.zero_grad(set_to_none=False), module.zero_grad, lambda: None):
        module(torch.ones(2, 3)).sum().backward()
        change()
        snapshot.restore()
        assert [bits(each.grad) for each in module.parameters()] == was


def test_tied_weights_stay_tied() -> None:
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    was, snapshot = everything(module, optimizer), Snapshot(module, [optimizer])
    train(module, optimizer, 2)
    snapshot.restore()
    assert everything(module, optimizer) == was
    assert module[1].weight is module[0].weight


def test_weights_are_put_back_where_they_are_so_that_views_of_them_see_it() -> None:
    module = nn.Linear(3, 2)
    flat, was = module.weight.data.view(-1), module.weight.detach().clone()
    snapshot = Snapshot(module, [])
    flat.fill_(7.0)
    snapshot.restore()
    assert torch.equal(flat, was.view(-1))


def test_what_a_snapshot_holds_belongs_to_no_other() -> None:
    module = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    train_on = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    module(train_on).square().sum().backward()
    optimizer.step()
    was, snapshot = everything(module, optimizer), Snapshot(module, [optimizer])
    for _ in range(3):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.fill_(9)
        for parameter, state in optimizer.state.items():
            assert parameter.grad is not None
            parameter.grad.fill_(9.0)
            state["momentum_buffer"].fill_(9.0)
        snapshot.restore()
        assert everything(module, optimizer) == was


@FEW
@given(st.lists(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.bool]), max_size=4))
def test_buffers_of_any_kind_come_back_even_if_they_were_replaced(kinds: list[torch.dtype]) -> None:
    module: Any = nn.Module()
    for number, kind in enumerate(kinds):
        module.register_buffer(f"b{number}", torch.tensor([0, 1, 3]).to(kind))
    module.register_buffer("none", None)
    module.register_buffer("wide", torch.ones(1, 1).expand(3, 3))  # to which none can write
    own, snapshot = dict(module.named_buffers()), Snapshot(module, [])
    was = [each.tolist() for each in own.values()]
    for number in range(len(kinds)):
        getattr(module, f"b{number}").zero_()
        setattr(module, f"b{number}", torch.ones(7))
    module.none = torch.ones(1)
    snapshot.restore()
    assert module.none is None
    assert [each.tolist() for each in module.buffers()] == was
    assert all(each is own[name] for name, each in module.named_buffers())


def test_a_loss_scaler_is_put_back() -> None:
    module, scaler = net(), torch.amp.GradScaler("cpu", init_scale=8.0)
    snapshot = Snapshot(module, [], [scaler])
    was = scaler.state_dict()
    for scale in (2.0, 4.0):
        scaler.load_state_dict({**was, "scale": scale, "_growth_tracker": 3})
        snapshot.restore()
        assert scaler.state_dict() == was


# --- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_put_back_with_what_they_counted_and_computed() -> None:
    module: Any = nn.ModuleDict({"mean": MeanMetric(), "all": CatMetric()})
    for metric in module.values():
        metric.update(torch.tensor([1.0, 2.0]))
    module["mean"].compute()
    values, snapshot = module["all"].value, Snapshot(module, [])
    for _ in range(2):
        for metric in module.values():
            metric(torch.tensor([5.0]))
            metric.compute()
        module["all"].reset()
        module["all"].update(torch.tensor([9.0]))
        snapshot.restore()
        assert [metric._update_count for metric in module.values()] == [1, 1]
        assert module["all"].value is values
        assert [each.tolist() for each in values] == [[1.0, 2.0]]
    for metric in module.values():
        metric.update(torch.tensor([6.0]))
    assert module["mean"].compute() == 3.0
    assert module["all"].compute().tolist() == [1.0, 2.0, 6.0]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_metrics_that_share_their_counts_still_do(before: int) -> None:
    def collection() -> MetricCollection:
        return MetricCollection({"accuracy": MulticlassAccuracy(3), "recall": MulticlassRecall(3)})

    def update(metrics: MetricCollection, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        metrics.update(torch.randint(3, (9,), generator=draw), torch.randint(3, (9,), generator=draw))

    module: Any = nn.ModuleList([collection()])
    straight = collection()
    for seed in range(before):
        update(module[0], seed)
        update(straight, seed)
    snapshot = Snapshot(module, [])
    for seed in (7, 8):
        update(module[0], seed)
        module[0].compute()
        snapshot.restore()
    for seed in (20, 21):
        update(module[0], seed)
        update(straight, seed)
    assert module[0].compute() == straight.compute()


def test_what_was_made_in_inference_mode_is_put_back_too() -> None:
    module: Any = nn.ModuleList([MeanMetric(), nn.Linear(1, 1)])
    with torch.inference_mode():
        module[0].update(2.0)
        module[0].reset()
        module[0].update(4.0)
        module[1].seen = torch.ones(2)
    snapshot = Snapshot(module, [])
    with torch.inference_mode():
        module[0].update(100.0)
        module[1].seen.add_(1)
    snapshot.restore()
    assert module[0].compute() == 4.0
    assert module[1].seen.tolist() == [1.0, 1.0]


# --- What modules note -----------------------------------------------------------------------------------------------


class Noting(nn.Module):
    """Notes what it does, in all the ways there are."""

    calls = 0
    seen: Any
    _losses: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.seen = [1, "a", [2, 3]]
        self._losses = []
        self.by_name: dict[str, Any] = {
            "count": 0,
            "inner": defaultdict(list, {"a": [1]}),
            "order": OrderedDict(b=1, a=2),
        }
        self.recent = deque([1.0, 2.0], maxlen=2)
        self.names = {"a"}
        self.counted = Counter("aab")
        self.pair = ([1], torch.zeros(2))
        self.ema = torch.zeros(1)
        self.histogram = np.zeros(3)
        self.last = torch.ones(1, requires_grad=True) * 2
        self.aliases = [self.ema, self.seen]
        self.peak: Any = -np.float64(np.inf)
        self.to_itself: list[Any] = [self.by_name]
        self.to_itself.append(self.to_itself)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        loss: Tensor = self.net(x).sum()
        self.seen[-1].append(self.calls)
        self.seen[:0] = [0]
        self._losses.append(loss)
        self.by_name["count"] += 1
        self.by_name["inner"]["new"].append(loss)
        self.by_name["order"].move_to_end("b")
        self.recent.append(loss.item())
        self.names ^= {"a", "b"}
        self.counted["c"] += 1
        self.pair[0].clear()
        self.pair[1].add_(1.0)
        self.ema = 0.9 * self.ema + loss.detach()
        self.aliases[0].add_(1.0)
        self.histogram[1] += 1
        self.histogram = self.histogram + 1
        self.last = loss
        self.peak = max(self.peak, loss.item())
        self.to_itself.pop()
        self.training = False
        self.lazy = [loss]
        return loss


def notes(module: Noting) -> Any:
    names = {name for name in vars(module) if not name.startswith("_") and name != "to_itself"} | {"_losses"}
    return bits({name: getattr(module, name) for name in sorted(names)})


def test_attributes_are_what_they_were_and_the_same_objects() -> None:
    module = Noting()
    holders = {name: value for name, value in vars(module).items() if not isinstance(value, (int, float))}
    was, snapshot = notes(module), Snapshot(module, [])
    for number in range(3):
        for _ in range(number):
            module(torch.ones(1, 2))
        snapshot.restore()
        assert notes(module) == was
        assert module.calls == Noting.calls == 0
        assert not hasattr(module, "lazy")
        assert all(vars(module)[name] is holder for name, holder in holders.items())
        assert module.aliases[0] is module.ema
        assert module.aliases[1] is module.seen
        assert module.to_itself[1] is module.to_itself
        assert type(module.by_name["inner"]) is defaultdict
        assert list(module.by_name["order"]) == ["b", "a"]
        assert module.recent.maxlen == 2
        assert module.last.requires_grad


def test_tensors_that_were_resized_are_as_large_as_before() -> None:
    module: Any = nn.Linear(2, 2)
    module.seen = torch.arange(3)
    before = module.seen
    snapshot = Snapshot(module, [])
    module.seen.resize_(7).fill_(1)
    for _ in range(2):
        snapshot.restore()
        assert module.seen is before
        assert module.seen.tolist() == [0, 1, 2]
        module.seen.fill_(5)


def test_attributes_that_were_deleted_are_there_again() -> None:
    module: Any = nn.Linear(1, 1)
    module.kept, module.tensor = 3, torch.ones(1)
    snapshot = Snapshot(module, [])
    del module.kept, module.tensor
    snapshot.restore()
    assert (module.kept, module.tensor.item()) == (3, 1.0)


def test_other_objects_are_left_to_themselves() -> None:
    class Strict(dict[str, int]):
        def clear(self) -> None:
            raise TypeError("it cannot be written to")

    class Thing:
        count = 0

    module: Any = nn.Linear(1, 1)
    thing, short_lived = Thing(), Thing()
    module.thing, module.things, module.strict = thing, [thing], Strict(a=1)
    module.gone, module.fixed = weakref.proxy(short_lived), np.arange(3)
    del short_lived
    module.fixed.flags.writeable = False
    snapshot = Snapshot(module, [])
    thing.count = 3
    module.things.append(Thing())
    handle = module.register_forward_hook(lambda *_: None)
    snapshot.restore()
    assert module.things == [thing]
    assert thing.count == 3
    assert len(module._forward_hooks) == 1  # of other code
    handle.remove()


Plain = st.recursive(
    st.none() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=8,
)


def disturb(value: Any) -> None:
    """Changes every container, the inner ones first."""
    for each in list(value.values() if isinstance(value, dict) else value):
        if isinstance(each, (list, dict, deque, tuple)):
            disturb(each)
    if isinstance(value, dict):
        value["new"] = value.pop(next(iter(value), "new"), None)
    elif not isinstance(value, tuple):
        value.reverse()
        value.append(value)


@FEW
@given(st.lists(Plain, max_size=4))
def test_collections_inside_collections_come_back(value: list[Any]) -> None:
    module: Any = nn.Linear(1, 1)
    module.value, was = value, copy.deepcopy(value)
    snapshot = Snapshot(module, [])
    for _ in range(2):
        disturb(value)
        snapshot.restore()
        assert module.value is value
        assert value == was


# --- Generators ------------------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    legacy = np.random.rand()  # noqa: NPY002
    return [random.random(), random.gauss(0, 1), legacy, np.random.randn(), torch.rand(2).tolist()]  # noqa: NPY002


def test_generators_repeat_themselves() -> None:
    draws()
    snapshot, generators = Snapshot(nn.Linear(1, 1), []), Generators.now()
    drawn = draws()
    for back in (generators.put_back, snapshot.restore, generators.put_back):
        assert draws() != drawn
        back()
        assert draws() == drawn


def test_generators_of_gpus_that_this_process_does_not_use_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_cuda() -> list[Tensor]:
        return [torch.zeros(16, dtype=torch.uint8)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", start_cuda)
    assert Generators.now().cuda == ()


def test_generators_of_a_modules_own_repeat_themselves() -> None:
    module: Any = nn.Linear(1, 1)
    module.own = [np.random.default_rng(1), torch.Generator().manual_seed(2), random.Random(3)]
    module.legacy = np.random.RandomState(4)

    def own_draws() -> list[Any]:
        numpy, generator, python = module.own
        torch_draw = torch.rand(1, generator=generator).item()
        return [numpy.normal(), torch_draw, python.gauss(0, 1), module.legacy.randn()]

    own_draws()
    snapshot = Snapshot(module, [])
    drawn = own_draws()
    for _ in range(2):
        snapshot.restore()
        assert own_draws() == drawn
