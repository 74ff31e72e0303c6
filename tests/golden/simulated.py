"""Golden cases in virtual time: every method, and what may happen to a run; and replays of what they recorded.

Inputs and first weights are small fractions of powers of two, drawn by Python's own generator, so that all machines
begin with the same ones. Layers are written out element by element where that is possible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

from golden.digests import Outcome, digest, named, order_of, size_of
from lightning_omni.methods import Method, SoftSync, method_named
from lightning_omni.registry import to_wire
from lightning_omni.server.event_log import Event
from lightning_omni.simulator import (
    Cluster,
    Computation,
    Evaluation,
    Failure,
    Jitter,
    Limits,
    Link,
    Slowdown,
    Workload,
    replay,
    simulate,
)
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace

INPUTS, HIDDEN, OUTPUTS, SAMPLES = 5, 4, 2, 96
SEED = 11

METHODS = (
    *("async_sgd", "hardsync", "softsync", "delay_compensated", "downpour:n_push=3,n_fetch=2"),
    *("elastic_averaging:period=3", "gossip:period=2", "local_sgd:period=3,warmup_steps=2", "diloco:period=3"),
    *("async_diloco:period=4", "decoupled_diloco:period=4,fragments=2", "ringmaster_asgd:max_staleness=1"),
)
"""Each method of the registry, with periods that fit into a short run."""
VARIANTS = (
    *("async_sgd:staleness_aware=true", "async_sgd:bound=1", "softsync:n=2,modulation=average"),
    *("softsync:n=4", "downpour:n_push=2,n_fetch=2,send=updates", "downpour:n_push=2,warm_start=3"),
    *("delay_compensated:strength=2,adaptive=true", "gossip:kind=push", "elastic_averaging:period=2,moving_rate=0.3"),
    *("async_diloco:period=4,buffer=2,activation=0.25", "async_diloco:period=3,dynamic_steps=false"),
    "decoupled_diloco:period=4,quorum=2,grace=0.8,delay=1",
)
"""Settings that take another way through their method."""


UPDATES = {"hardsync": 10, "softsync": 10, "local_sgd": 6, "diloco": 6}
"""Updates of a run, where one takes many gradients; 20 elsewhere."""


def fractions(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers from -1 to 1 in steps of 1/64, the same on every machine and with every version of torch."""
    drawn = random.Random(seed)
    flat = [drawn.randint(-64, 64) / 64 for _ in range(int(np.prod(shape)))]
    return torch.tensor(flat, dtype=dtype).reshape(shape)


class Layer(nn.Module):
    """A linear layer, written out: no matrix library decides on the order of its sums."""

    def __init__(self, inputs: int, outputs: int, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(fractions(seed, outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(fractions(seed + 1, outputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias


class Network(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first, self.last = Layer(INPUTS, HIDDEN, 1, dtype), Layer(HIDDEN, OUTPUTS, 3, dtype)
        self.between = between or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return out


class Headed(nn.Module):
    """A body, and a head of torch's own layers, which a server can make."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layer(INPUTS, HIDDEN, 1)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS, dtype=torch.float64))
        with torch.no_grad():
            for place, parameter in enumerate(self.head.parameters()):
                parameter.copy_(fractions(5 + place, *parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Sparing(Network):
    """A network with weights that only some batches use: then their gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(fractions(7, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.extra if float(x[0, 0]) > 0 else out


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Samples with targets."""
    return TensorDataset(fractions(21, SAMPLES, INPUTS, dtype=dtype), fractions(22, SAMPLES, OUTPUTS, dtype=dtype))


def spoiled(which: slice = slice(17, 18)) -> TensorDataset:
    """The same with samples that are not numbers: pushes of their batches are refused."""
    whole = data()
    whole.tensors[0][which, 2] = torch.nan
    return whole


def loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
    difference: Tensor = model(batch[0]) - batch[1]
    return difference.square().mean()


def evaluate(model: nn.Module) -> dict[str, float]:
    return {"loss": float(loss(model, data().tensors))}


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.03, momentum=0.75)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.05)


def two_rates(parameters: Any) -> Optimizer:
    everything = list(parameters)
    return SGD([{"params": everything[:1], "lr": 0.01}, {"params": everything[1:], "momentum": 0.5}], lr=0.03)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {"SGD": sgd, "AdamW": adamw}


def uneven(jitter: Jitter | None = None, events: Sequence[Failure | Slowdown] = ()) -> Cluster:
    """Four devices of four speeds, over links on which pushes queue."""
    return Cluster.of_speeds(
        [1.0, 0.8, 1.3, 0.5],
        overhead=1e-3,
        jitter=jitter or Jitter("gamma", 0.4),
        link=Link(2e6, 1e-4),
        server=Link(5e6),
        group_link=Link(1e7, 1e-5),
        update_seconds=2e-4,
        head_seconds_per_sample=1e-4,
        events=tuple(events),
    )


def equal(size: int = 4, events: Sequence[Failure | Slowdown] = ()) -> Cluster:
    """Equal devices that never scatter, and links that take no time: everything happens at the same moments."""
    return Cluster.even(size, 2.0**-10, events=tuple(events))


def outcome_of(trace: Trace, events: Sequence[Event] | None = None) -> Outcome:
    """What is kept of a trace, and of what the server recorded."""
    # How many snapshots were alive at a time is a matter of memory, not of the run.
    meta = {name: value for name, value in trace.meta.items() if name != "most_snapshots"}
    end = {"updates": trace.updates, "ended": trace.ended}
    parts: dict[str, list[Any]] = {
        **{part: list(getattr(trace, part).values()) for part in ("rows", "work", "steps", "evaluated")},
        "weights": named(trace.weights),
        "meta": [*meta.values(), *end.values(), trace.seconds],
    }
    counted: list[Any] = [*end.values()]
    for part in ("rows", "work", "steps", "evaluated"):
        counted += [column for column in getattr(trace, part).values() if column.dtype == np.int64]
    if events is not None:
        parts["events"] = list(events)
        counted += order_of(events)
    sizes = [size_of(weight) for weight in trace.weights.values()]
    return Outcome(
        digest(counted),
        (float(f"{trace.seconds:.9g}"), *sizes),
        {name: digest(part) for name, part in parts.items()},
    )


def updates_of(method: str | Method) -> int:
    """Updates of a case with this method."""
    name = method if isinstance(method, str) else to_wire(method)["name"]
    return UPDATES.get(name.partition(":")[0], 20)


def simulated(
    method: str | Method,
    topology: int | Topology,
    cluster: Cluster,
    model: Callable[[], nn.Module] = Network,
    samples: Callable[[], TensorDataset] = data,
    optimizer: Callable[[Any], Optimizer] = sgd,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    **more: Any,
) -> Outcome:
    """One run in virtual time."""
    events: list[Event] = []
    settings = {"batch_size": 4, "seed": SEED, "limits": Limits(updates=updates_of(method)), **more}
    workload = Workload(model(), samples(), loss, evaluate, optimizer)
    trace = simulate(method, topology, cluster, workload, record=events.append, **settings)
    return outcome_of(trace, events)


def replayed(method: str, topology: int | Topology, cluster: Cluster) -> Outcome:
    """A run in virtual time, and what a replay of its record comes to."""
    events: list[Event] = []
    model = Network()
    settings: dict[str, Any] = {"batch_size": 4, "seed": SEED, "computation": Computation(batched=False)}
    trace = simulate(
        method,
        topology,
        cluster,
        Workload(model, data(), loss=loss, optimizer=sgd),
        record=events.append,
        limits=Limits(updates=updates_of(method)),
        **settings,
    )
    return replay_of(events, model, outcome_of(trace, events))


def replay_of(events: Iterable[Event], model: nn.Module, first: Outcome | None = None) -> Outcome:
    """What a replay ends with; and the run before it, if there was one."""
    again = replay(events, model, loss, _batches, sgd)
    weights = {name: weight.numpy() for name, weight in again.weights.items()}
    groups = {str(number): own for number, own in again.groups.items()}
    kept = [number for own in groups for number in own]
    bits = {
        "replayed": digest(named(weights)),
        "groups": digest(item for number, own in sorted(groups.items()) for item in (number, *own)),
    }
    first = first or Outcome(digest([]), ())
    return Outcome(
        digest([first.order, again.clock, kept]),
        (*first.numbers, *map(size_of, weights.values())),
        {**first.bits, **bits},
    )


def _batches(epoch: int, positions: range) -> tuple[Tensor, ...]:
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
    indices = order[[place % SAMPLES for place in positions]]
    return tuple(tensor[indices] for tensor in data().tensors)


def regrouped() -> list[Event]:
    """A record, written by hand, of four groups of which one dies, and which go on as two and then as three."""
    events: list[Event] = []
    read: dict[int, int] = {}
    clock, position, seconds = 0, 0, 0.0
    method = to_wire(method_named("async_sgd"))
    settings = {"lr": 0.03, "momentum": 0.75}

    def note(kind: Any, **more: Any) -> None:
        nonlocal seconds
        seconds += 0.125
        events.append(Event(kind=kind, time=seconds, clock=clock, **more))

    def form(kind: Any, groups: tuple[tuple[int, ...], ...]) -> None:
        note(kind, groups=groups, method=method)
        read.update(dict.fromkeys(range(4), clock))

    def push(order: Iterable[int], groups: tuple[tuple[int, ...], ...]) -> None:
        nonlocal clock, position
        for group in order:
            size = 4 * len(groups[group])
            span, position = (position % SAMPLES, position % SAMPLES + size), position + size
            clock += 1
            note(
                "push",
                group=group,
                read_at=read[group],
                epoch=0,
                spans=(span,),
                hyperparameters=({**settings, "lr": settings["lr"] / (1 + clock // 8)},),
            )
            read[group] = clock

    four, two, three = ((0,), (1,), (2,), (3,)), ((0, 2), (3,)), ((0,), (3,), (2,))
    form("seed", four)
    push((0, 1, 2, 0, 3, 1), four)
    note("retire", group=1)
    push((0, 2, 3, 3), four)
    form("form", two)
    push((0, 1, 1, 0), two)
    form("form", three)
    push((2, 0, 1, 2, 2, 0), three)
    return events


Case = Callable[[], Outcome]


def cases() -> dict[str, Case]:
    """Every case by its name."""
    found: dict[str, Case] = {}
    for groups in (1, 2, 4):
        for method in METHODS if groups > 1 else (each for each in METHODS if not each.startswith("gossip")):
            for name, make in OPTIMIZERS.items():
                found[f"simulated {method}, {name}, {groups} groups"] = _case(method, groups, uneven(), optimizer=make)
    for method in METHODS:
        single = {"model": partial(Network, dtype=torch.float32), "samples": partial(data, torch.float32)}
        found[f"simulated {method}, single precision"] = _case(method, 4, uneven(), **single)
        for groups in (2, 4):
            found[f"simulated {method}, {groups} groups at the same moments"] = _case(method, groups, equal())
        found[f"simulated {method}, two epochs"] = _case(method, 4, uneven(), limits=Limits(epochs=2))
    found |= {f"simulated {method}": _case(method, 4, uneven()) for method in VARIANTS}
    for method in ("async_sgd", "hardsync", "softsync", "local_sgd:period=3", "diloco:period=3", "gossip:period=2"):
        died = uneven(events=[Failure(3, 0.04)])
        found[f"simulated {method}, a group dies"] = _case(method, 4, died, limits=Limits(epochs=2))
        tied = equal(events=[Failure(3, 2.0**-7)])  # at the very moment when its second gradient is there
        found[f"simulated {method}, a group dies at the moment of a push"] = _case(
            method, 4, tied, limits=Limits(epochs=1)
        )
    found |= _happenings()
    found |= _replays()
    return found


def _case(*arguments: Any, **more: Any) -> Case:
    return partial(simulated, *arguments, **more)


def _happenings() -> dict[str, Case]:
    """What else may happen to a run."""
    kinds = (Jitter("exponential"), Jitter("lognormal", 0.5), Jitter("normal", 0.3))
    slow = [Slowdown(2, 0.01, 0.05, 3.0), Slowdown(0, 0.03, 0.06, 1.5)]
    found = {f"simulated {jitter.kind} times": _case("async_sgd", 4, uneven(jitter)) for jitter in kinds}
    for name, make in OPTIMIZERS.items():
        for groups in (2, 4):
            found[f"simulated merged head, {name}, {groups} groups"] = _case(
                "async_sgd", groups, uneven(), Headed, optimizer=make, merged="head"
            )
            found[f"simulated proportional batches, {name}, {groups // 2} groups"] = _case(
                "async_sgd", groups // 2, uneven(events=slow), optimizer=make, computation=Computation(rebalance="auto")
            )
    dies = uneven(events=[Failure(2, 0.04)])
    found["simulated merged head, a group dies"] = _case(
        "async_sgd", 4, dies, Headed, merged="head", limits=Limits(epochs=2)
    )
    found["simulated merged head at the same moments"] = _case("async_sgd", 4, equal(), Headed, merged="head")
    return found | {
        "simulated softsync with plain rates": _case(SoftSync(n=2, modulation="none"), 4, uneven()),
        "simulated uneven groups": _case("async_sgd", Topology(((0,), (1, 2, 3))), uneven()),
        "simulated members apart": _case("softsync", 2, uneven(), computation=Computation(members_apart=True)),
        "simulated gradients of several groups at a time": _case(
            "async_sgd", 8, equal(8), computation=Computation(batched=True)
        ),
        "simulated slow for a while": _case("async_sgd", 4, uneven(events=slow)),
        "simulated group of rank 0 dies": _case(
            "async_sgd", 4, uneven(events=[Failure(0, 0.03)]), limits=Limits(epochs=2)
        ),
        "simulated a rank of a larger group dies": _case(
            "hardsync", 2, uneven(events=[Failure(3, 0.03)]), limits=Limits(epochs=2)
        ),
        "simulated pushes that are not finite": _case(
            "async_sgd", 4, uneven(), samples=spoiled, limits=Limits(epochs=2)
        ),
        "simulated divergence": _case("async_sgd", 4, uneven(), samples=partial(spoiled, slice(0, 96))),
        "simulated local steps that are not finite": _case("local_sgd:period=2", 4, uneven(), samples=spoiled),
        "simulated gradients that are missing": _case("async_sgd", 4, uneven(), Sparing),
        "simulated missing gradients at a barrier": _case("hardsync", 4, uneven(), Sparing, optimizer=adamw),
        "simulated two learning rates": _case("downpour:n_push=2,n_fetch=3", 4, uneven(), optimizer=two_rates),
        "simulated dropout": _case("async_sgd", 4, uneven(), partial(Network, nn.Dropout(0.25))),
        "simulated batch normalisation": _case("async_sgd", 2, uneven(), partial(Network, _norm())),
        "simulated evaluations until a target": _case(
            "diloco:period=3", 4, uneven(), evaluate=evaluate, evaluation=Evaluation(every=2, target=("loss", 0.75))
        ),
        "simulated evaluations by time": _case(
            "gossip",
            4,
            uneven(),
            evaluate=evaluate,
            evaluation=Evaluation(every_seconds=0.01),
            limits=Limits(seconds=0.05),
        ),
        "simulated an end in time": _case("softsync", 4, uneven(), limits=Limits(seconds=0.04)),
    }


def _norm() -> nn.Module:
    return nn.BatchNorm1d(HIDDEN, dtype=torch.float64)


def _replays() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for method in METHODS:
        if not method.startswith("gossip"):
            found[f"replayed {method}"] = partial(replayed, method, 4, uneven())
    return found | {
        "replayed death": partial(replayed, "hardsync", 4, uneven(events=[Failure(3, 0.02)])),
        "replayed regroup": lambda: replay_of(regrouped(), Network()),
    }
