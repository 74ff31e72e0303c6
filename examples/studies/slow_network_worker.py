"""Train as one rank of ``slow_network.py``, as its first argument, JSON, describes.

Do not start it by hand. Rank 0 copies its weights every other step, and evaluates the copies after training: so no way
of training waits for an evaluation, and each is measured at the same grain.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lightning_omni import Compression, OmniOptimizer, Server, World
from lightning_omni.runtime import WorldOptions

BATCH = 64
COPY_EVERY = 2
COARSE = 8
"""Copies between two that are evaluated at first; those before the first that reaches the target come after."""
SOME = 25
"""Steps over which the time of a step is the median."""


def lenet() -> nn.Sequential:
    """A LeNet of 431,080 weights for images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


@dataclass
class Way:
    """A way of training: the model as it is called, its optimizer, and what its steps stand in."""

    model: nn.Module
    optimizer: Any
    context: AbstractContextManager[Any]
    after_step: Callable[[], None]


def with_ddp(plain: nn.Module, told: dict[str, Any]) -> Way:
    """DistributedDataParallel, with a communication hook of torch's or without."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # PowerSGD's hook starts collectives in callbacks: those of two buckets overtake each other, and gloo's break off.
    bucket = 64 if told.get("hook") == "powersgd" else None
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True, bucket_cap_mb=bucket)
    if told.get("hook") == "fp16":  # torch's hook for bf16 refuses gloo
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif told.get("hook") == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=told["rank"], start_powerSGD_iter=told["warmup"]
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Way(model, sgd(plain, told), nullcontext(), lambda: None)


def with_post_local_sgd(plain: nn.Module, told: dict[str, Any]) -> Way:
    """torch's post-local SGD: gradients are averaged in the beginning, and weights every so many steps afterwards."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model.register_comm_hook(PostLocalSGDState(None, alone, told["warmup"]), post_localSGD_hook)
    averager = PeriodicModelAverager(period=told["period"], warmup_steps=told["warmup"])
    return Way(model, PostLocalSGDOptimizer(sgd(plain, told), averager), nullcontext(), lambda: None)


def with_omni(plain: nn.Module, told: dict[str, Any]) -> Way:
    """Compute groups, one for each host, with the method and the options told."""
    given = told.get("options", {})
    options = WorldOptions(
        method=told["method"],
        compression=Compression(**given.get("compression", {})),
        overlap=given.get("overlap", False),
        server=Server(encryption="off", **given.get("server", {})),
        timeout=timedelta(minutes=3),
    )
    world = World(groups=dist.get_world_size(), options=options)
    model = world.wrap(plain)
    return Way(model, OmniOptimizer(sgd(plain, told), world), world.training(), lambda: None)


def with_one_group(plain: nn.Module, told: dict[str, Any]) -> Way:
    """One group of all hosts, that averages gradients in fewer bytes."""
    compression = Compression(**told["options"]["compression"])
    world = World(groups=1, options=WorldOptions(compression=compression, timeout=timedelta(minutes=3)))
    model = world.wrap(plain)
    return Way(model, OmniOptimizer(sgd(plain, told), world), world.training(), lambda: None)


WAYS = {"ddp": with_ddp, "post_local_sgd": with_post_local_sgd, "omni": with_omni, "one_group": with_one_group}


def sgd(model: nn.Module, told: dict[str, Any]) -> torch.optim.SGD:
    """The user's optimizer."""
    return torch.optim.SGD(model.parameters(), lr=told["lr"], momentum=told["momentum"])


def train(told: dict[str, Any]) -> dict[str, Any]:
    """Trains. Returns on rank 0 when which copy was taken, and how accurate it is; else nothing of interest."""
    torch.set_num_threads(1)
    torch.manual_seed(told["seed"])
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = torch.load(told["data"], mmap=True)
    images, labels = data["train"]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(told["seed"]))
    plain = lenet()
    way = WAYS[told["way"]](plain, told)
    seconds = told["seconds_per_step"] * told["slowness"][rank]
    steps = round(told["steps"] / told["slowness"][rank]) if told["way"] == "omni" else told["steps"]
    copies: list[tuple[float, Tensor]] = []
    step_times, work = [], 0.0
    with way.context:
        dist.barrier()
        began = last = time.perf_counter()
        for step in range(steps):
            first = (step * ranks + rank) * BATCH % (len(order) - BATCH)
            batch = order[first : first + BATCH]
            working = time.process_time()
            way.optimizer.zero_grad()
            loss = cross_entropy(way.model(images[batch]), labels[batch])
            time.sleep(max(0.0, seconds - (time.perf_counter() - last)))  # a slower device would still compute
            loss.backward()
            way.optimizer.step()
            way.after_step()
            work += time.process_time() - working
            now = time.perf_counter()
            step_times.append(now - last)
            if rank == 0 and step % COPY_EVERY == COPY_EVERY - 1:
                copies.append((now - began, torch.cat([each.detach().flatten() for each in plain.parameters()])))
            last = time.perf_counter()
            if now - began > told["limit"] and told["way"] == "omni":
                break
    if rank != 0:
        return {"work": work / len(step_times)}
    tail = sorted(step_times[len(step_times) // 5 :])
    return {
        "work": work / len(step_times),
        "step": sum(tail) / len(tail),
        "curve": evaluate(plain, copies, data["test"], told["target"]),
    }


def evaluate(
    model: nn.Module, copies: list[tuple[float, Tensor]], test: tuple[Tensor, Tensor], target: float
) -> list[tuple[float, float, int]]:
    """Time, test accuracy and steps of copies, at least up to the first that reaches the target."""
    images, labels = test
    found: dict[int, float] = {}

    @torch.no_grad()
    def accuracy(number: int) -> float:
        if number not in found:
            nn.utils.vector_to_parameters(copies[number][1], model.parameters())
            found[number] = float((model(images).argmax(1) == labels).float().mean())
        return found[number]

    for number in range(COARSE - 1, len(copies), COARSE):
        if accuracy(number) >= target:
            for between in range(number - COARSE + 1, number):
                if accuracy(between) >= target:
                    break
            break
    return [(copies[number][0], found[number], (number + 1) * COPY_EVERY) for number in sorted(found)]


def main() -> None:
    """Trains, and writes what came of it to the file named by the second argument."""
    told = json.loads(sys.argv[1])
    result = train(told)
    Path(sys.argv[2]).write_text(json.dumps(result))
    if told["way"] != "omni":
        dist.destroy_process_group()
        sys.stdout.flush()
        # With torch's groups alone, gloo's threads may abort a process that ends the ordinary way.
        os._exit(0)


if __name__ == "__main__":
    main()
