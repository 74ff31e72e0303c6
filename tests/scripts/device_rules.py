"""Tries what the emulated device accepts and refuses, and when it ends what it has begun; one result for each claim."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import emulated_cuda
import torch
import torch.distributed as dist
from common import report
from devices import BACKEND
from torch import nn

from lightning_omni.group.core import GroupCore
from lightning_omni.methods import AsyncSGD, Replica
from lightning_omni.runtime.process_groups import ProcessGroups
from lightning_omni.runtime.state.checkpoint import RollbackPoint
from lightning_omni.wire.formats.base import CHUNK, RAW, Memory
from lightning_omni.wire.layout import Layout

BUSY_MS = 300
device = emulated_cuda.device
CLAIMS: list[Callable[[], bool]] = []


def claim(function: Callable[[], bool]) -> Callable[[], bool]:
    CLAIMS.append(function)
    return function


def refuses(action: Callable[[], object], message: str) -> bool:
    try:
        action()
    except (RuntimeError, TypeError, ValueError) as error:
        return message in str(error)
    return False


def make_busy() -> None:
    torch.cuda._sleep(BUSY_MS * 1_000_000)


def waits(action: Callable[[], object]) -> bool:
    """Return whether an action ends after the device has, and a launch before it did not wait."""
    began = time.perf_counter()
    make_busy()
    was_ahead = device.busy(-1)
    action()
    return was_ahead and time.perf_counter() - began >= BUSY_MS / 1000


@claim
def operands_on_two_devices_are_refused() -> bool:
    one, host, other = torch.ones(2, device="cuda:0"), torch.ones(2), torch.ones(2, device="cuda:1")
    message = "Expected all tensors to be on the same device"
    return all(
        refuses(action, message) for action in (lambda: one + host, lambda: one + other, lambda: torch.cat([one, host]))
    )


@claim
def numbers_of_the_host_are_accepted_as_operands() -> bool:
    return (torch.ones(2, device="cuda") * torch.tensor(3.0)).cpu().tolist() == [3.0, 3.0]


@claim
def arrays_over_device_memory_are_refused() -> bool:
    return refuses(torch.ones(2, device="cuda").numpy, "can't convert cuda:0 device type tensor to numpy")


@claim
def generators_of_the_host_are_refused() -> bool:
    generator = torch.Generator()
    return refuses(lambda: torch.rand(2, device="cuda", generator=generator), "Expected a 'cuda' device type")


@claim
def collectives_of_host_tensors_are_refused() -> bool:
    mine = torch.ones(2, device="cuda")
    dist.all_reduce(mine)
    group = dist.group.WORLD
    assert group is not None
    return mine.cpu().tolist() == [1.0, 1.0] and refuses(lambda: dist.all_reduce(torch.ones(2)), "cpu")


@claim
def new_memory_is_not_zero() -> bool:
    return bool(torch.empty(100, device="cuda").cpu().ne(0).all())


@claim
def item_waits_for_the_device_and_a_launch_does_not() -> bool:
    number = torch.ones((), device="cuda")
    return waits(number.item)


@claim
def copies_to_pageable_memory_wait() -> bool:
    there, here = torch.ones(9, device="cuda"), torch.zeros(9)
    return waits(lambda: here.copy_(there, non_blocking=True)) and waits(there.cpu)


@claim
def events_have_the_devices_time() -> bool:
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    make_busy()
    second.record()
    early = second.query()
    second.synchronize()
    return not early and BUSY_MS <= first.elapsed_time(second) < 2 * BUSY_MS


@claim
def copies_to_pinned_memory_come_late() -> bool:
    there, here = torch.ones(9, device="cuda"), torch.zeros(9, pin_memory=True)
    make_busy()
    here.copy_(there, non_blocking=True)
    before = here.tolist()
    torch.cuda.synchronize()
    return before == [0.0] * 9 and here.tolist() == [1.0] * 9


@claim
def pinned_memory_that_is_rewritten_too_early_is_noticed() -> bool:
    there, here = torch.zeros(9, device="cuda"), torch.zeros(9, pin_memory=True)
    make_busy()
    there.copy_(here, non_blocking=True)
    here.fill_(1)
    return refuses(torch.cuda.synchronize, "pinned memory was written before")


@claim
def registered_memory_is_pinned() -> bool:
    there, here = torch.ones(9, device="cuda"), torch.zeros(9)
    torch.cuda.cudart().cudaHostRegister(here.data_ptr(), here.nbytes, 0)
    make_busy()
    here.copy_(there, non_blocking=True)
    before = here.tolist()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(here.data_ptr())
    return before == [0.0] * 9 and here.tolist() == [1.0] * 9


@claim
def copies_are_counted_by_direction() -> bool:
    before = device.counts()
    torch.ones(1000).to("cuda").cpu()
    after = device.counts()
    return [after[name] - before[name] for name in ("h2d", "d2h", "h2d_calls", "d2h_calls")] == [4000, 4000, 1, 1]


@claim
def arithmetic_is_the_cpus_bit_for_bit() -> bool:
    def train(where: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(9, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3)).to(
            where
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(torch.randn(8, 9).to(where)), torch.arange(8).to(where) % 3).backward()
            optimizer.step()
        return [each.cpu() for each in net.state_dict().values()]

    return all(map(torch.equal, train("cpu"), train("cuda")))


@claim
def tensors_of_several_chunks_reach_the_host_as_they_are() -> bool:
    shapes = [(CHUNK // 8,), (3, 5, 7), (CHUNK // 4 + 1,), (0,), ()]
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    tensors.append(torch.randn(2, 3, 4, 4, device="cuda").to(memory_format=torch.channels_last))
    layout = Layout.of({str(place): each for place, each in enumerate(tensors)})
    before = device.counts()["d2h_calls"]
    payload = RAW.encode(tensors, layout, {}, Memory()).payload
    calls = device.counts()["d2h_calls"] - before
    expected = RAW.encode([each.cpu() for each in tensors], layout, {}, Memory()).payload
    return calls == 2 and torch.equal(payload, expected)


@claim
def a_process_that_is_shown_no_devices_has_none() -> bool:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        return torch.cuda.device_count() == 0 and not torch.cuda.is_available()
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]


@claim
def a_rollback_point_is_in_pinned_memory_of_the_host() -> bool:
    net = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100)).to("cuda")
    optimizer = torch.optim.AdamW(net.parameters())
    core = GroupCore(AsyncSGD())
    core.attach(Replica(list(net.parameters()), optimizer))
    core.load_sender_state(0, {"residual": [torch.ones_like(each) for each in net.parameters()]})

    def step() -> None:
        net(torch.ones(2, 100, device="cuda")).sum().backward()
        optimizer.step()

    def state() -> list[torch.Tensor]:
        moments = [each for values in optimizer.state.values() for each in values.values()]
        return [each.clone() for each in (*net.state_dict().values(), *moments, *core.sender_state(0)["residual"])]

    step()
    before, allocated = state(), device.counts()["allocated"]
    point = RollbackPoint.of(net, [optimizer], core)
    taken = device.counts()["allocated"] - allocated
    step()
    core.load_sender_state(0, {})
    point.restore(core)
    is_pinned = all(kept.value.is_pinned() for _, kept in (*point.weights, *point.buffers))
    alike = [a.device == b.device and bool(a.cpu().equal(b.cpu())) for a, b in zip(before, state(), strict=True)]
    return taken == 0 and is_pinned and all(alike)


@claim
def a_default_process_group_is_aborted() -> bool:
    groups = ProcessGroups(0, 1, timedelta(seconds=9), torch.device("cuda"), is_group=True)
    groups.abort()
    return refuses(lambda: dist.all_reduce(torch.ones(2, device="cuda")), "communicator was aborted")


def tried(claim: Callable[[], bool]) -> str:
    """Return what is wrong with a claim, nothing if it holds."""
    try:
        return "" if claim() else "it does not hold"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    report(0, {each.__name__: tried(each) for each in CLAIMS})


if __name__ == "__main__":
    main()
