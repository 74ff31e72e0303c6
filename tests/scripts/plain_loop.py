"""Training loops without Lightning, one after the other, as torchrun starts them."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

gc.disable()  # what is imported stays: to look for garbage in it takes as long as to import it

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_omni import FSDP, Compression, OmniOptimizer, World, WorldOptions
from lightning_omni.errors import ConfigurationError, RankLost, UnsupportedError

gc.freeze()
gc.enable()


def copied(optimizer: OmniOptimizer) -> str:
    """What a copy is, or why there is none."""
    try:
        twin = copy.deepcopy(optimizer)
    except UnsupportedError as error:
        return str(error)
    assert len(pickle.loads(pickle.dumps(optimizer)).state) == len(twin.state)
    mine, theirs = (each.param_groups[0]["params"] for each in (optimizer, twin))
    assert all(torch.equal(p, q) and p is not q for p, q in zip(mine, theirs, strict=True))
    return f"{type(twin).__name__} with {len(twin.state)} states"


def said_of(act: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        act()
    except (ConfigurationError, UnsupportedError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(groups: int, merges: bool, method: str = "async_sgd") -> dict[str, Any]:
    world = World(groups, options=WorldOptions(groups=groups, method=method))
    torch.manual_seed(world.rank)  # the weights are rank 0's all the same
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    raw = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.2)
    merged: set[torch.nn.Parameter] = set()
    if merges:
        world.attach_head("2", plain, [raw])
        merged = set(plain[2].parameters())
    model = world.wrap(plain)
    optimizer = OmniOptimizer(raw, world, merged=merged)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append(f"{len(state['state'])} states"))
    refused = regroup = ""
    try:
        world.regroup(3 - groups)
    except ConfigurationError as error:
        regroup = str(error)
    if groups > 1:
        try:
            optimizer.step()
        except ConfigurationError as error:
            refused = str(error)
    outside = said_of(world.enter_compute)
    target = torch.linspace(-1, 1, 8)
    first = last = 0.0
    staleness, raw_step, late, nested, copies = -1, "", "", "", [copied(optimizer)]
    with torch.no_grad():
        plain[0].weight.mul_(1.0 + world.rank * (groups > 1))  # as if one rank had loaded a checkpoint
    with world.training():
        began = plain[0].weight.sum().item()
        if groups > 1:
            try:
                raw.step()
            except UnsupportedError as error:
                raw_step = str(error)
        try:
            OmniOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), world)
        except ConfigurationError as error:
            late = str(error)
        if groups > 1:
            nested = said_of(world.training().__enter__)
        for step in range(40):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = ((model(x).squeeze(1) - x @ target) ** 2).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            staleness = world.core.last_answer.staleness
            first, last = (loss.item() if step == 0 else first), loss.item()
        copies.append(copied(optimizer))
        if world.rank == 0:
            optimizer.state_dict()  # the server's state, while others train
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    return {
        "began": began,
        "first": first,
        "last": last,
        "weights": weights,
        "staleness": staleness,
        "lr": schedule.get_last_lr(),
        "calls": calls,
        "refused": refused,
        "regroup": regroup,
        "kept": [len(world.parts[-1].staleness), world.parts[-1].staleness.total()],
        "raw step": raw_step,
        "copies": copies,
        "late": late,
        "outside": outside,
        "nested": nested,
    }


def fail(groups: int, wraps: str) -> str:
    """Why a loop ends whose module is not wrapped by the world."""
    world = World(groups)
    model: Any = torch.nn.Linear(4, 1)
    if wraps == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    its_world = World(groups) if wraps == "another World" else world
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), its_world)
    torch.manual_seed(world.rank)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        return loss

    try:
        with world.training():
            if wraps == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    except (ConfigurationError, UnsupportedError) as error:
        return str(error)
    return ""


def fail_at_the_end(rank: int) -> list[Any] | str:
    """Why one rank's loop fails when it is over; which ranks the other lost, and why it has no further loop."""
    world = World(2)
    model = world.wrap(torch.nn.Linear(4, 1))
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
    try:
        with world.training():
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if world.rank == rank:
                with torch.no_grad():
                    model.weight.add_(1.0)
    except UnsupportedError as error:
        return str(error)
    lost = sorted(world.ever_lost)
    try:
        with world.training():
            pass
    except RankLost as error:
        return [*lost, str(error)]
    return lost


def interrupt(interrupted: str) -> dict[str, Any]:
    """Rank 1's loop is interrupted, and then rank 0's, which has heard of it: what a further loop comes to."""
    world = World(2, options=WorldOptions(method=interrupted))
    model = world.wrap(torch.nn.Linear(4, 1))
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    try:
        with world.training():
            for _ in range(6):
                step()
            while world.rank == 0 and not world.lost:
                step()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        lost = sorted(world.ever_lost)
    with world.training():
        for _ in range(6):
            step()
    return {"lost": [lost, sorted(world.ever_lost)], "weights": model.weight.tolist()}


OUTLIVED: list[torch.nn.Module] = []
"""Models of loops that have ended, as a script holds them that catches the error of one."""


def leave(caught: list[int], calls: bool = False) -> str:
    """Why a loop ends that some ranks of three in two groups leave early, for they are interrupted.

    Args:
        caught: those ranks.
        calls: whether rank 0 makes a call behind the loop that the others do not make.
    """
    world = World(2)
    model = world.wrap(torch.nn.Linear(4, 1))
    if calls:
        OUTLIVED.append(model)
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
    try:
        with world.training():
            try:
                for step in range(9):
                    if step == 6 and world.rank in caught:
                        signal.raise_signal(signal.SIGINT)
                    optimizer.zero_grad()
                    model(torch.randn(8, 4)).square().mean().backward()
                    optimizer.step()
            except KeyboardInterrupt:
                pass
            if calls and world.rank == 0:
                world.enter_world(model)
    except RuntimeError as error:  # also gloo's
        return str(error)
    return ""


def forget(stepped: str) -> str:
    """Why a loop ends in which no OmniOptimizer steps, or not that of all weights.

    Args:
        stepped: what does: an optimizer that is not wrapped, with no other or with one beside it; nothing but a line of
            the loop; or nothing, on rank 1 or on all.
    """
    world = World(2)
    net, beside = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    model = world.wrap(net)
    raw = torch.optim.SGD((beside if stepped == "a stranger" else net).parameters(), lr=0.1)
    optimizer: torch.optim.Optimizer = raw
    if stepped in ("one of two", "a stranger"):
        optimizer = OmniOptimizer(torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1), world)
    elif "rank" in stepped:
        optimizer = OmniOptimizer(raw, world)
    before = net.weight.clone()
    try:
        with world.training():
            for _ in range(0 if stepped == "on no rank" or (stepped == "on one rank" and world.rank) else 4):
                net.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                if stepped in ("one of two", "a stranger"):
                    raw.step()
                else:
                    optimizer.step()
    except ConfigurationError as error:
        assert torch.equal(before, net.weight)
        return str(error)
    return ""


def part(steps: dict[str, int]) -> list[Any] | str:
    """Why a loop ends whose group of ranks 1 and 2 has made unequal numbers of steps; what rank 0 lost, and its steps.

    Args:
        steps: of each rank.
    """
    world = World(ranks_per_node=[1, 2])
    model = world.wrap(torch.nn.Linear(4, 1))
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
    done, began = 0, 0.0
    try:
        with world.training():
            began = time.monotonic()
            for _ in range(steps[str(world.rank)]):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                done += 1
                if world.rank == 0:
                    time.sleep(0.05)
            if world.rank == 1 and steps["1"] == steps["2"]:
                time.sleep(2.0)  # which is no reason to end: a rank may print, or save, before it synchronizes
    except RuntimeError as error:  # also gloo's
        assert time.monotonic() - began < 30.0, "where torch would wait for half an hour"
        return str(error)
    return [sorted(world.ever_lost), done]


def meet(met: dict[str, float]) -> str:
    """Why a loop ends in which ranks that have made unequal numbers of steps form a group, and train on together.

    Args:
        met: speeds of the ranks; the group of ranks 1 and 2 is given up for one of ranks 0 and 1.
    """
    world = World(ranks_per_node=[1, 2], options=WorldOptions(timeout=timedelta(seconds=20)))
    net = torch.nn.Linear(4, 1)
    model = world.wrap(net)
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
    began = time.monotonic()
    try:
        with world.training():
            for steps in (3 + 2 * (world.rank == 0), 4):
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(torch.randn(8, 4)).square().mean().backward()
                    optimizer.step()
                if steps != 4:
                    world.regroup(2, net, {int(rank): speed for rank, speed in met.items()})
                    model = world.wrap(net)
        assert time.monotonic() - began < 20.0, "members have waited for each other at their loop's end in vain"
    except RuntimeError as error:
        return str(error)
    return f"trained in the group {sorted(world.members)}"


def fall_short(short: str) -> dict[str, Any]:
    """What a loop says at its end that is shorter than its method's period, and how far its weights have moved."""
    said: list[str] = []
    world = World(2, options=WorldOptions(method=short))
    net = torch.nn.Linear(4, 1)
    model = world.wrap(net)
    before = net.weight.clone()
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    with heard(said), world.training():
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return {"said": said, "moved": (net.weight - before).abs().max().item()}


def change(changed: str) -> str:
    """Why a loop ends in which a layer is unfrozen.

    Args:
        changed: the module is not wrapped again then, or it is.
    """
    world = World(1)
    torch.manual_seed(world.rank)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    net[0].requires_grad_(False)
    model = world.wrap(net)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    try:
        with world.training():
            for step in range(6):
                if step == 3:
                    net[0].requires_grad_(True)
                    model = world.wrap(net) if changed == "wrapped again" else model
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    except ConfigurationError as error:
        return f"step {step}: {error}"
    return ""


class OfItsOwn(torch.optim.SGD):
    """Has another step beside its own, as SAM has."""

    def first_step(self) -> None:
        raise AssertionError


def mistake(method: str) -> list[str]:
    """What is said of steps that groups would not hear of, and that no weight has moved."""
    world = World(2, options=WorldOptions(method=method))
    model = world.wrap(torch.nn.Linear(4, 1))
    kind = torch.optim.SGD if method == "async_sgd" else OfItsOwn  # the server could not import it
    optimizer = OmniOptimizer(kind(model.parameters(), lr=0.1), world)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(step: Callable[[], Any]) -> str:
        before, said = model.weight.clone(), said_of(step)
        assert not said or torch.equal(before, model.weight)
        return said

    with world.training():
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        said = [refused(inner.step), refused(lambda: optimizer.first_step())]  # type: ignore[attr-defined]
        assert not hasattr(optimizer, "second_step")
        world.enter_world(model)
        said.append(refused(optimizer.step))
        world.enter_compute()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:  # in plain DistributedDataParallel no other rank is needed for it
            said.append(refused(lambda: get_state_dict(model, optimizer)))
            assert optimizer.param_groups[0]["lr"] == 0.0, "which torch has not given back"
            optimizer.param_groups[0]["lr"] = 0.1
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return said


def accompany(method: str) -> dict[str, Any]:
    """What stands beside the weights that are trained, before the groups synchronize and after, twice."""
    world = World(2, options=WorldOptions(method=method))
    net = torch.nn.ModuleDict({"query": torch.nn.Linear(4, 1), "key": torch.nn.Linear(4, 1).requires_grad_(False)})
    model = world.wrap(net["query"])
    beside = {
        "in the optimizer": net["key"],
        "in none": copy.deepcopy(net["query"]).requires_grad_(False),
        "an average": AveragedModel(net["query"]),
    }
    world.wrapper.broadcast_initial(net)
    everything = torch.nn.ModuleList([net, *beside.values()])
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    found: dict[str, Any] = {name: [] for name in beside}

    def look() -> None:
        for name, module in beside.items():
            found[name].append(parameters_to_vector(module.parameters()).tolist())

    with world.training():
        for _ in range(2):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 4) + world.rank).square().mean().backward()
                optimizer.step()
                for name in ("in the optimizer", "in none"):
                    for mine, new in zip(beside[name].parameters(), net["query"].parameters(), strict=True):
                        mine.lerp_(new.detach() + world.rank, 0.5)
                beside["an average"].update_parameters(net["query"])  # type: ignore[operator]
            look()
            world.enter_world(everything)
            look()
            world.enter_compute()
        look()
    return found


class Laid(torch.nn.Linear):
    """Has weights and buffers that are not contiguous, other ones on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(4, 1)
        self.gaps = torch.nn.Parameter(torch.randn(3, 6)[:, ::2], requires_grad=False)
        self.register_buffer("table", torch.randn(3, 6)[:, ::2])
        self.register_buffer("turned", torch.randn(3, 4).T)
        self.register_buffer("rotation", torch.randn(4, 3, dtype=torch.complex64).T)
        image = torch.randn(2, 3, 4, 4)
        self.register_buffer("image", image if rank else image.to(memory_format=torch.channels_last))
        self.register_buffer("mask", torch.tensor([[True, rank == 0, False]]).expand(1000, 3))

    def digests(self) -> dict[str, str]:
        laid = {name: each for name, each in self.state_dict().items() if name not in ("weight", "bias")}
        return {name: hashlib.sha256(str(each.tolist()).encode()).hexdigest()[:8] for name, each in laid.items()}


def lay(laid: str) -> list[dict[str, str]]:
    """What there is in tensors that are not contiguous: once the module is wrapped, and where groups synchronize."""
    world = World(2, options=WorldOptions(method=laid))
    torch.manual_seed(world.rank)
    net = Laid(world.rank)
    found = [net.digests()]
    model = world.wrap(net)
    found.append(net.digests())
    optimizer = OmniOptimizer(torch.optim.SGD([net.weight, net.bias], lr=0.1), world)
    with world.training():
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for each in (net.gaps, net.table, net.turned, net.rotation, net.image):
                each.add_(1 + world.rank)
            net.mask[0, 2] = world.rank == 0
        found.append(net.digests())
        world.enter_world(net)
        found.append(net.digests())
    return found


def differ(unlike: str) -> dict[str, Any]:
    """Rank 1 has another model or optimizer: why no loop begins, or the weights before one, in it and after it."""
    signal.alarm(60)  # ranks that wait for each other would do so for ever
    world = World(2)
    torch.manual_seed(world.rank)
    is_other = world.rank == 1
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if is_other and unlike == "a layer":
        net.append(torch.nn.Linear(4, 4))
    found: dict[str, Any] = {}
    try:
        model = world.wrap(net)
        found["wrapped"] = parameters_to_vector(net.parameters()).tolist()
        held = list(net.parameters())
        if is_other and unlike != "a class":
            held = held[::-1] if unlike == "an order" else held[:-1]
        kind = torch.optim.Adam if is_other and unlike == "a class" else torch.optim.SGD
        optimizer = OmniOptimizer(kind(held, lr=0.1), world)
        with world.training():
            found["began"] = parameters_to_vector(net.parameters()).tolist()
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
        found["ended"] = parameters_to_vector(net.parameters()).tolist()
    except ConfigurationError as error:
        found["error"] = str(error)
    signal.alarm(0)
    return found


def regroup(groups: int) -> dict[str, Any]:
    """Other groups than the module was wrapped for: why a step is refused, and the weights if it is wrapped again."""
    found: dict[str, Any] = {}
    for wraps_again in (False, True):
        world = World(groups)
        net = torch.nn.Linear(4, 1)
        model = world.wrap(net)
        optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
        try:
            with world.training():
                for step in range(6):
                    if step == 3:
                        world.regroup(3 - groups, net)
                        model = world.wrap(net) if wraps_again else model
                    optimizer.zero_grad()
                    model(torch.randn(8, 4) + world.rank).square().mean().backward()
                    optimizer.step()
            found["weights"] = net.weight.tolist()
        except (ConfigurationError, UnsupportedError) as error:
            found["refused"] = f"{type(error).__name__} in step {step}: {error}"
    return found


def go_on(first: str) -> list[Any]:
    """A loop of one group after one of two with the same optimizer: its weights, and how many states there were."""
    net = torch.nn.Linear(4, 1)
    raw = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    states = []
    for groups in (2, 1):
        world = World(groups, options=WorldOptions(method=first))
        model, optimizer = world.wrap(net), OmniOptimizer(raw, world)
        states.append(len(raw.state))
        with world.training():
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 4) + world.rank).square().mean().backward()
                optimizer.step()
    return [states, net.weight.tolist()]


def then_ddp(then: str) -> list[Any]:
    """A loop of plain DistributedDataParallel after one of two groups with the same optimizer: weights and momentum.

    Args:
        then: the method of the groups; rank 1's has made a step more, which its learning rate follows.
    """
    net, world = torch.nn.Linear(4, 1), World(2, options=WorldOptions(method=then))
    raw = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = world.wrap(net), OmniOptimizer(raw, world)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    loops: list[tuple[Any, Any, Any]] = [(world.training(), model, optimizer)]
    loops.append((contextlib.nullcontext(), torch.nn.parallel.DistributedDataParallel(net), raw))
    said: list[str] = []
    with heard(said):
        for training, trained, steps in loops:
            with training:
                for _ in range(4 + (steps is optimizer) * world.rank):
                    steps.zero_grad()
                    trained(torch.randn(8, 4) + world.rank).square().mean().backward()
                    steps.step()
                    if steps is optimizer:
                        schedule.step()
    momentum = raw.state[net.weight]["momentum_buffer"].tolist()
    return [net.weight.tolist(), momentum, raw.param_groups[0]["lr"], said]


@contextlib.contextmanager
def heard(said: list[str]) -> Iterator[None]:
    """Collects what the package logs in this context."""
    logger, handler = logging.getLogger("lightning_omni"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def discard(discarded: str) -> dict[str, Any]:
    """The server's state of two parameters once user code has discarded it."""
    everyone, net, world = dist.group.WORLD, torch.nn.Linear(4, 1), World(2)
    raw = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = world.wrap(net), OmniOptimizer(raw, world)
    found: dict[str, Any] = {"states": [], "refused": ""}
    acts: dict[str, Callable[[], Any]] = {
        "clear": lambda: raw.state.clear(),
        "pop": lambda: raw.state.pop(net.weight, None),
        "set": lambda: raw.state.__setitem__(net.weight, {}),
        "write": lambda: raw.state.__setitem__(net.weight, {"momentum_buffer": torch.ones(1, 4)}),
        "read": lambda: [raw.state[each].get("momentum_buffer") for each in (net.weight, net.bias)],
    }

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4) + world.rank).square().mean().backward()
        optimizer.step()

    def look() -> None:
        state = optimizer.state_dict()["state"] if world.rank == 0 else {}
        found["states"].append([index in state for index in range(2)])
        if discarded == "write" and world.rank == 0:
            found["written"] = state[0]["momentum_buffer"].tolist()

    with world.training():
        step()
        world.enter_world(net)
        look()
        acts[discarded]()
        world.enter_compute()
        look()
        dist.barrier(group=everyone)  # no other group pushes before rank 0 has looked
        step()
    try:
        with world.training():
            step()
            acts[discarded]()
            step()
    except (UnsupportedError, RankLost) as error:
        found["refused"] = str(error)
    return found


def synchronize(alone: int, goes_on: bool = False) -> str:
    """Why a loop ends in which one rank synchronizes, to evaluate, and the other does not; or one trains on then."""
    world = World(2)
    model = world.wrap(torch.nn.Linear(4, 1))
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), world)
    try:
        with world.training():
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if goes_on or world.rank == alone:
                world.enter_world(model)
            if goes_on and world.rank == alone:
                world.enter_compute()
    except RankLost as error:
        return str(error)
    return ""


def normalize(merged: bool) -> dict[str, Any]:
    """Running statistics after a loop that merges them at its end or not, and what is said of them."""
    said = list[str]()
    world = World(2)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = world.wrap(net)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    with heard(said), world.training():
        for _ in range(3):
            optimizer.zero_grad()
            model(world.rank + torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        if merged:
            world.enter_world(net)
    assert isinstance(net[1].running_mean, torch.Tensor)
    return {"said": said, "mean": net[1].running_mean.tolist()}


def load_last(last: str) -> dict[str, Any]:
    """What each rank ends with whose loop's last lines, once groups are synchronized, load a checkpoint.

    Args:
        last: the method; then whether rank 0 alone loads weights and statistics (``alone``), and ranks form one group
            thereafter (``as one``).
    """
    method, *how = last.split(", ")
    said = list[str]()
    world = World(2, options=WorldOptions(method=method))
    net = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
    model = world.wrap(net)
    raw = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer, held = OmniOptimizer(raw, world), list(net.parameters())
    saved = raw.state_dict() | {"state": {place: {"momentum_buffer": each * 0 + 7} for place, each in enumerate(held)}}
    with heard(said), world.training():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4) + world.rank).square().mean().backward()
            optimizer.step()
        world.enter_world()
        world.enter_world(net)
        merged = [net[1].running_mean.item()]
        best = {name: torch.full_like(each, 3) for name, each in net.state_dict().items()}
        if "alone" not in how or world.rank == 0:
            net.load_state_dict(best)
        optimizer.load_state_dict(saved)
        if "as one" in how:
            world.regroup(1, net)
    values = [each.double().mean().item() for each in net.state_dict().values()]
    momentum = [raw.state[each]["momentum_buffer"].mean().item() for each in held]
    return {"said": said, "merged": merged, "values": values, "momentum": momentum}


class Featured(torch.nn.Sequential):
    """Has random features that no optimizer moves."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.register_buffer("features", torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))


def leave_unwrapped(unwrapped: str) -> list[Any]:
    """Why no loop begins whose module is not wrapped, or what is said of one; the ranks' features may be equal."""
    world, said = World(2), list[str]()
    net = Featured(world.rank if unwrapped == "unlike" else 0)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    try:
        with heard(said), world.training():
            net(world.rank + torch.randn(8, 4) @ net.features).square().mean().backward()
            optimizer.step()
    except ConfigurationError as error:
        return [str(error)]
    return said


def evaluate(inferred: str) -> int:
    """The steps of a loop that synchronizes its groups in torch's inference mode."""
    world = World(2, options=WorldOptions(method=inferred))
    net = torch.nn.Linear(4, 1)
    model = world.wrap(net)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    steps = 0
    with world.training():
        for _ in range(3):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                steps += 1
            with torch.inference_mode():
                world.enter_world(net)
                net(torch.randn(8, 4))
                world.enter_compute()
    return steps


def join(joined: str) -> str:
    """Why members of one of several groups cannot train different numbers of batches by DDP's own means."""
    model: Any = World(2).wrap(torch.nn.Linear(4, 1))
    return said_of(getattr(model, joined)) if hasattr(model, joined) else "a group of one"


def mishandle(mishandled: str) -> dict[str, Any]:
    """What is said of optimizers: that of held parameters, after a failed loop, of other groups, and of a head's list.

    Args:
        mishandled: the method of the ranks that form two groups in mid-run.
    """
    found, said, world, net = dict[str, Any](), list[str](), World(2), torch.nn.Linear(4, 1)
    model = world.wrap(net)
    raw = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = OmniOptimizer(raw, world)
    found["twice"] = said_of(lambda: OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world))
    with contextlib.suppress(KeyError, RankLost), world.training():
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        raise KeyError
    with heard(said):
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        optimizer.state_dict()
    world = World(1, options=WorldOptions(groups=1, method=mishandled))
    world.wrap(net)
    OmniOptimizer(torch.optim.LBFGS(net.parameters()), world)
    with world.training():
        found["LBFGS"] = said_of(lambda: world.regroup(2, net))
    world, merges = World(2), torch.nn.Sequential(net, torch.nn.Linear(1, 1))
    raw = torch.optim.SGD(merges.parameters(), lr=0.1)
    world.attach_head("1", merges, [raw])
    OmniOptimizer(raw, world, merged=list(merges[1].parameters()))
    return {**found, "said": said, "exchanged": len(world.parts[-1].replica.ordered)}


def divide(sharded: int) -> list[str]:
    """Why a second module is not sharded, and no optimizer made in the loop; the first may be wrapped again."""
    world = World(1, options=WorldOptions(groups=sharded, model_parallel=FSDP()))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert world.wrap(world.wrap(net)) is net
    found = [said_of(lambda: world.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4))))]
    OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    with world.training():
        found.append(said_of(lambda: OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)))
    return found


def fork(forked: str) -> dict[str, Any]:
    """The exit status of a fork of a rank that leaves the loop with an error, and whether the loop goes on."""
    world = World(2)
    net = torch.nn.Linear(4, 1)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    status, steps, child = 0, 0, -1
    try:
        with world.training():
            for _ in range(4):
                optimizer.zero_grad()
                net(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                steps += 1
                if steps == 2:
                    child = os.fork()
                    if not child:
                        signal.alarm(60)
                        raise ValueError(forked)
                    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ValueError:
        os._exit(3)
    return {"status": status, "steps": steps}


def nest(inner: int) -> str:
    """Why no other World is made in a loop."""
    world = World(2)
    net = torch.nn.Linear(4, 1)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)
    error = ""
    with world.training():
        try:
            World(inner)
        except ConfigurationError as refused:
            error = str(refused)
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        world.enter_world(net)
        world.enter_compute()
    return error


def enclose(nested: int) -> list[Any]:
    """Why a loop of another World inside one does not begin; whether Worlds are freed once their loops have ended."""
    net = torch.nn.Linear(4, 1)
    worlds = [World(2) for _ in range(nested)]
    optimizers = [OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), each) for each in worlds]

    def step(optimizer: OmniOptimizer) -> None:
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    with worlds[0].training() as world:
        errors = [said_of(worlds[1].training().__enter__)]
        step(optimizers[0])
        world.enter_world(net)
        errors.append(said_of(worlds[1].training().__enter__))
        world.enter_compute()
        step(optimizers[0])
    with worlds[1].training():
        step(optimizers[1])
    kept = [weakref.ref(each) for each in worlds]
    del world, worlds, optimizers
    gc.collect()
    return [*errors, [each() is None for each in kept]]


def take_back(returned: str) -> float:
    """What a layer's optimizer state is, over that with which it has left, a step after it has come back."""
    world = World(2)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    layers = [{"params": list(each.parameters())} for each in reversed(net)]
    kind, key = {"SGD": (torch.optim.SGD, "momentum_buffer"), "Adagrad": (torch.optim.Adagrad, "sum")}[returned]
    raw = kind(layers, lr=0.05, **({"momentum": 0.9} if returned == "SGD" else {}))
    optimizer, model = OmniOptimizer(raw, world), world.wrap(net)

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.randn(8, 4)) * 1e-3).sum().backward()  # what is remembered is of the first steps
        optimizer.step()

    with world.training():
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    before = raw.state[net[0].weight][key].clone()
    layer = raw.param_groups.pop()
    with world.training():
        step()
        raw.add_param_group(layer)
        step()
    return float((raw.state[net[0].weight][key] / before).mean())


def write_target(target: str) -> list[float]:
    """A weight that is frozen, and that an optimizer holds, in each step after a group has written it."""
    world = World(2, options=WorldOptions(groups=2, method=target))
    net = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Linear(4, 1).requires_grad_(False))
    optimizer, found = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world), []
    with world.training():
        for step in range(10):
            optimizer.zero_grad()
            net[0](torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if step == 1:
                torch.nn.init.constant_(net[1].weight, 7.0 + world.rank)
            found.append(net[1].weight[0, 0].item())
    return found[1:]


def refuse(before: str) -> str:
    """Why a mistake before a loop is refused in groups of one rank, too."""
    try:
        own: dict[str, Any] = {"groups": 2}
        rank = dist.get_rank()
        if before == "nodes":
            World(2, ranks_per_node=[1])
        if before == "no nodes":
            World(2, ranks_per_node=[3, -1])
        if before == "a number of nodes":
            World(2, ranks_per_node=2)  # type: ignore[arg-type]
        if before == "other groups":
            World(1 + rank)
        if before == "another method":
            World(options=WorldOptions(method=f"local_sgd:period={2 + 2 * rank}", **own))
        if before == "another compression":
            World(options=WorldOptions(compression=Compression(all_reduce=("fp32", "bf16")[rank]), **own))
        if before == "other exchanges":
            World(options=WorldOptions(overlap=bool(rank), **own))
        if before == "another server":
            World(options=WorldOptions(server=(None, "tcp://127.0.0.1:5555")[rank], **own))
        World(2).wrap(torch.nn.Linear(4, 1), find_unused_parameter=True)
    except (ConfigurationError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def generate(generated: int) -> list[Any]:
    """The steps of a loop in a generator that is left after some of them, and the weights that this rank ends with."""
    world, steps = World(2), list[int]()
    net = torch.nn.Linear(4, 1)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)

    def train() -> Iterator[int]:
        with world.training():
            for step in range(9):
                optimizer.zero_grad()
                net(torch.randn(8, 4) + world.rank).square().mean().backward()
                optimizer.step()
                yield step

    for step in train():
        steps.append(step)
        if step == generated:
            break
    return [steps, sorted(world.ever_lost), net.weight.tolist()]


def compile_step(compiled: int) -> list[list[float]]:
    """The weights after loops of a step that is not compiled, and of one that is."""
    ends = []
    for wrapped in (lambda step: step, torch.compile(backend="eager")):
        torch.manual_seed(0)
        world = World(compiled)
        net = torch.nn.Linear(4, 1)
        model = world.wrap(net)
        optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), world)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        compiled_step = wrapped(step)
        with world.training():
            for _ in range(3):
                compiled_step(torch.randn(8, 4) + world.rank)
        ends.append(net.weight.flatten().tolist())
    return ends


class Asking(IterableDataset[Any]):
    """Divides its samples by what torch.distributed says when it is iterated."""

    def __iter__(self) -> Any:
        yield from torch.arange(16.0)[dist.get_rank() :: dist.get_world_size(), None]


def sample(sampled: str) -> dict[str, Any]:
    """What is said of data that are divided inside of a loop or before, and which samples this rank trains."""
    said, seen, world = list[str](), list[float](), World(2)
    data = TensorDataset(torch.arange(16.0)[:, None])
    net = torch.nn.Linear(1, 1)
    optimizer = OmniOptimizer(torch.optim.SGD(net.parameters(), lr=1e-4), world)
    sampler = DistributedSampler(data) if sampled == "before" else None
    asking = DataLoader(Asking(), batch_size=4)  # made before, and evaluated with elsewhere
    with heard(said), world.training():
        loader = asking if sampled == "asks" else DataLoader(data, 4, sampler=sampler or DistributedSampler(data))
        for batch in loader if sampled == "asks" else (batch for (batch,) in loader):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
            seen += batch.flatten().tolist()
    return {"said": said, "seen": seen}


def count(local: list[str]) -> list[int] | str:
    """How many ranks each node has, for what torchrun has told each rank: the ranks of its own node, or nothing.

    A rank that is told nothing has the name of its host instead.
    """
    before, rank, host = os.environ.pop("LOCAL_WORLD_SIZE"), dist.get_rank(), socket.gethostname
    if local[rank].isdigit():
        os.environ["LOCAL_WORLD_SIZE"] = local[rank]
    else:
        socket.gethostname = lambda: local[rank]
    try:
        return [len(members) for members in World().topology.groups]
    except ConfigurationError as error:
        return str(error)
    finally:
        os.environ["LOCAL_WORLD_SIZE"], socket.gethostname = before, host


def follow(page: str) -> dict[str, Any]:
    """The loop that a page has; process groups stay those of this script."""
    code = Path(page).read_text().partition("```python\n")[2]
    lines = code.partition("```")[0].splitlines()
    os.chdir(os.environ["OMNI_TEST_FOLDER"])
    names: dict[str, Any] = {}
    exec("\n".join(line for line in lines if not line.startswith("dist.")), names)
    saved = torch.load("last.ckpt")
    return {
        "epoch": saved["epoch"],
        "steps": [state["step"].item() for state in saved["optimizer"]["state"].values()],
        "loss": names["loss"].item(),
        "is saved": all(torch.equal(saved["model"][name], each) for name, each in names["net"].state_dict().items()),
    }


def main() -> None:
    dist.init_process_group("gloo")
    everyone = dist.group.WORLD
    loops = json.loads(sys.argv[1]).items()
    kinds: dict[str, Callable[..., Any]] = {
        "wraps": fail,
        "rank": fail_at_the_end,
        "interrupted": interrupt,
        "caught": leave,
        "stepped": forget,
        "steps": part,
        "met": meet,
        "mistake in": lambda **options: mistake(options["mistake in"]),
        "beside": lambda **options: accompany(options["beside"]),
        "laid": lay,
        "unlike": differ,
        "changed": change,
        "short": fall_short,
        "regrouped": lambda **options: regroup(options["regrouped"]),
        "first": go_on,
        "then": then_ddp,
        "discarded": lambda **options: discard(options["discarded"]),
        "alone": synchronize,
        "merged": normalize,
        "mishandled": mishandle,
        "sharded": divide,
        "last": load_last,
        "unwrapped": leave_unwrapped,
        "inferred": evaluate,
        "joined": join,
        "forked": fork,
        "inner": nest,
        "nested": enclose,
        "returned": take_back,
        "target": write_target,
        "before": refuse,
        "local": count,
        "sampled": sample,
        "generated": generate,
        "compiled": compile_step,
        "page": follow,
    }
    results: dict[str, Any] = {
        name: next((kind for key, kind in kinds.items() if key in options), train)(**options) for name, options in loops
    }
    results["has imported Lightning"] = "pytorch_lightning" in sys.modules
    Path(os.environ["OMNI_TEST_FOLDER"], f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    # DistributedDataParallel is part of reference cycles; collected by the dying interpreter only, it would take the
    # process group down with it, and torch aborts now and then.
    OUTLIVED.clear()
    gc.collect()
    dist.barrier(group=everyone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
