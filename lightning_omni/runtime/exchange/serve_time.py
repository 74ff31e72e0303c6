"""A prediction of a parameter server's time for a push, before a server runs: measured on a part of the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import OmniError
from lightning_omni.methods.model.master import Master, describe, held_by, hyperparameters_of, rebuild
from lightning_omni.runtime.model.reduction import timed_part

TIMED_PUSHES = 3
"""Pushes of which the shortest counts: in the first one, the optimizer creates its state."""


def seconds_of_push(optimizer: Optimizer) -> float:
    """Return the seconds that a server takes for one push of the gradients of all parameters, without communication.

    It copies the gradients, lets the optimizer step, and copies the weights for the answer: on the CPU, in one thread,
    as a server does by default.

    Args:
        optimizer: the user's optimizer, which stays unchanged. The largest of its parameters that fit into
            `TIMED_BYTES` are timed, and the others extrapolated.

    Returns:
        Seconds; 0 if no server can run this optimizer, or not without its state, or no parameter is trained.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1000))
        >>> 0 < seconds_of_push(torch.optim.SGD([weight], lr=0.1)) < 1
        True
    """
    every: list[Tensor] = [each for each in held_by(optimizer) if each.requires_grad]
    timed = timed_part(every, lambda each: each.nbytes)
    names = {parameter: str(number) for number, parameter in enumerate(timed)}
    if not names:
        return 0.0
    weights = {name: Parameter(torch.zeros(like.shape, dtype=like.dtype)) for like, name in names.items()}
    try:
        twin = rebuild(describe(optimizer, names, with_state=False), weights, lambda _: type(optimizer))
        seconds = _seconds_of_update(Master(weights, twin), twin)
    except OmniError:  # also if it cannot step without its constructor's state, as Adagrad of torch 2.7
        return 0.0
    return seconds * (sum(each.numel() for each in every) / sum(each.numel() for each in names))


def _seconds_of_update(master: Master, twin: Optimizer) -> float:
    settings, seconds = hyperparameters_of(twin), math.inf
    came = [torch.full_like(weight, 1e-3) for weight in master.weights()]
    pushed, answer = ([torch.empty_like(each) for each in came] for _ in range(2))  # reused memory
    with one_thread():
        for _ in range(TIMED_PUSHES):
            began = time.perf_counter()
            torch._foreach_copy_(pushed, came)
            master.update(pushed, settings)
            torch._foreach_copy_(answer, master.weights())
            seconds = min(seconds, time.perf_counter() - began)
    return seconds


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread in this context, as a server does by default."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
