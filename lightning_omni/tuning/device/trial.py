"""Trainings with one setting, on copies, and the comparison of two."""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.model.server_optimizer import held_by
from lightning_omni.tuning.device.setting import Applied, DeviceSetting

Loss = Callable[[Any, Any], Tensor]
"""Function that returns the loss of a model for a batch."""

_OWN_OF_TORCH = ("step", "_opt_called", "_zero_grad_profile_name", "defaults", "state", "param_groups")


@dataclass(frozen=True)
class TrainingSetup:
    model: nn.Module
    loss: Loss
    optimizer: Optimizer | Callable[[Any], Optimizer]
    batches: Sequence[Any]
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if not self.batches or size_of(self.batches[0]) is None:
            raise ConfigurationError("batches: pass at least one, with a tensor whose first dimension counts samples")

    @property
    def batch_size(self) -> int:
        return size_of(self.batches[0]) or 0

    @property
    def device(self) -> torch.device:
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def copies(self) -> tuple[nn.Module, Optimizer]:
        # Both copies share a memo, so the copied optimizer holds the copied parameters.
        memo: dict[int, Any] = {}
        model = copy.deepcopy(self.model, memo)
        for name, module in self.model.named_modules():
            if module._compiled_call_impl is not None:
                model.get_submodule(name).compile()  # deepcopy drops it
        if not isinstance(self.optimizer, Optimizer):
            return model, self.optimizer(model.parameters())
        optimizer = copy.deepcopy(self.optimizer, memo)
        for name, value in vars(self.optimizer).items():  # Optimizer.__getstate__ leaves these out
            if name not in vars(optimizer) and name not in _OWN_OF_TORCH and not callable(value):
                setattr(optimizer, name, copy.deepcopy(value, memo))
        return model, optimizer


class Trial:
    """A copy of a setup that trains with one setting; ``nudge`` is the relative size of a random change of weights."""

    def __init__(self, setup: TrainingSetup, setting: DeviceSetting, nudge: float = 0.0) -> None:
        self.setup, self.setting, self._nudge = setup, setting, nudge
        self.samples = setup.batch_size
        self.model, self.optimizer = setup.copies()
        self._begins_empty = not self.optimizer.state
        Applied().to_model(setting, self.model, self.optimizer)  # never undone: the copy is discarded

    def run(self, steps: int) -> float:
        """Return the seconds of ``steps`` steps after an untimed warm-up."""
        with Applied() as applied:
            applied.to_process(self.setting)
            self.reset()
            for number in range(1 + steps // 5):
                self._step(number)
            synchronize(self.setup.device)
            began = self.setup.clock()
            for number in range(steps):
                self._step(number)
            synchronize(self.setup.device)
            return self.setup.clock() - began

    def losses(self, steps: int, seed: int = 0) -> list[float]:
        with Applied() as applied:
            applied.to_process(self.setting)
            self.reset()
            seed_all(seed)
            return [float(self._step(number).detach()) for number in range(steps)]

    def reset(self) -> None:
        """Restore the setup's weights, nudged, buffers, and optimizer state; without any, empty it."""
        with torch.no_grad():
            for own, lent in zip(*map(_tensors, (self.model, self.setup.model)), strict=True):
                own.copy_(lent)
            if self._nudge:
                seed_all(1)
                for parameter in filter(Tensor.is_floating_point, self.model.parameters()):
                    parameter.mul_(1 + self._nudge * torch.randn_like(parameter))
        if isinstance(given := self.setup.optimizer, Optimizer):
            copies = {id(lent): own for lent, own in zip(held_by(given), held_by(self.optimizer), strict=True)}
            self.optimizer.state.clear()  # before the copy, so that both do not need memory together
            self.optimizer.state.update(copy.deepcopy(dict(given.state), copies))
        elif self._begins_empty:
            self.optimizer.state.clear()

    def _step(self, number: int) -> Tensor:
        batch = self.setup.batches[number % len(self.setup.batches)]

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            with self.setting.autocast(self.setup.device):
                loss = self.setup.loss(self.model, batch)
            loss.backward()
            return loss

        with torch.enable_grad():
            return self.optimizer.step(closure)  # type: ignore[arg-type, return-value]  # typed for floats

    def check(self) -> None:
        if not any(parameter.grad is not None for parameter in self.model.parameters()):
            raise ConfigurationError(
                "the loss of a copy of the model does not depend on the copy's weights; does the model keep a function"
                " that refers to itself? Let it refer to self instead"
            )


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


# --- Preserved state --------------------------------------------------------------------------------------------------


@contextmanager
def same_rng_state() -> Iterator[None]:
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if in_use else ()), ExitStack() as kept:
        kept.callback(random.setstate, random.getstate())
        kept.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        yield


@contextmanager
def untouched(setup: TrainingSetup) -> Iterator[None]:
    gradients = [parameter.grad for parameter in setup.model.parameters()]
    try:
        with same_rng_state():
            yield
    finally:
        for parameter, gradient in zip(setup.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        torch.cuda.empty_cache()  # another batch size would find memory in pieces; on the CPU it does nothing


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def synchronize(device: torch.device) -> None:
    if device.type not in ("cpu", "meta") and hasattr(getattr(torch, device.type, None), "synchronize"):
        getattr(torch, device.type).synchronize()


# --- Batches ----------------------------------------------------------------------------------------------------------


def size_of(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one in a tree of dicts, lists and tuples, or None.

    Example:
        >>> size_of({"x": [torch.zeros(5, 2)], "y": torch.zeros(5)})
        5
    """
    return next((int(each.shape[0]) for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dim()), None)


# --- Which of two is faster, and whether their losses agree -----------------------------------------------------------

REPEATS = 7
"""Largest number of pairs of blocks in a comparison."""

FEWEST = 3
"""Smallest number of pairs for a decision."""

MARGIN = 0.03
"""Smallest gain that is worth a change."""

AGREE = 0.7
"""Fraction of the pairs that must show a gain."""

CLEAR = 0.1
"""Gain above which no more pairs are timed, if all pairs so far exceed it."""

BLOCK_SECONDS = 0.1
"""Approximate length of the blocks in which short steps are timed."""

_MOST_STEPS = 50

TOLERANCE = 0.02
"""Distance of two loss curves, as a fraction of the losses, up to which they agree."""


@dataclass(frozen=True)
class Comparison:
    """The samples per second of paired blocks, ``before`` and ``after`` a change.

    Example:
        >>> found = Comparison(before=(100.0, 90.0, 110.0), after=(150.0, 144.0, 165.0))
        >>> found.gain, found.spread, found.is_faster
        (1.5, (1.5, 1.6), True)
    """

    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(after / before for before, after in zip(self.before, self.after, strict=True))

    @property
    def gain(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.ratios), max(self.ratios)

    @property
    def is_faster(self) -> bool:
        if len(self.ratios) < FEWEST:
            return False
        best_gain = max(self.after) / max(self.before)  # of the blocks that other programs on the machine disturb least
        found = sum(ratio > 1 for ratio in self.ratios)
        return min(self.gain, best_gain) >= 1 + MARGIN and found >= AGREE * len(self.ratios)

    @property
    def is_clear(self) -> bool:
        low, high = self.spread
        return len(self.ratios) >= FEWEST and (low >= 1 + CLEAR or high <= 1)


def compare(
    before: Trial, after: Trial, deadline: float, clock: Callable[[], float], enough: float = math.inf
) -> Comparison:
    """Time two ways alternately, each first in half of the pairs, until the difference is clear, or `REPEATS` times.

    No pair begins after ``deadline`` on ``clock``; after ``enough``, the smallest number of pairs suffices.
    """
    old: list[float] = []
    new: list[float] = []
    steps = 1
    while len(old) < REPEATS:
        began = clock()
        if began >= deadline or (began >= enough and len(old) >= FEWEST):
            break
        found: dict[bool, float] = {}
        for is_new in (False, True) if len(old) % 2 == 0 else (True, False):
            timed = after if is_new else before
            found[is_new] = timed.run(steps)
        if not old and steps == 1 and min(found.values()) < BLOCK_SECONDS / 2:
            # One step is too short to be timed: the first reading only sets the number of steps in a block.
            steps = min(_MOST_STEPS, max(2, round(BLOCK_SECONDS / max(min(found.values()), 1e-9))))
            continue
        old.append(steps * before.samples / found[False])
        new.append(steps * after.samples / found[True])
        if Comparison(tuple(old), tuple(new)).is_clear:
            break
    return Comparison(tuple(old), tuple(new))


# --- Loss curves ------------------------------------------------------------------------------------------------------


def distance(curve: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean distance of two loss curves relative to the first's magnitude; infinity if a loss is not finite.

    Example:
        >>> distance([2.0, 1.0, 1.0], [2.0, 1.1, 1.1])
        0.05
    """
    if not all(map(math.isfinite, (*curve, *other))):
        return math.inf
    apart = sum(abs(a - b) for a, b in zip(curve, other, strict=True))
    scale = sum(map(abs, curve))
    return round(apart / scale, 12) if scale else (math.inf if apart else 0.0)


def agreement(
    own: Sequence[float], other: Sequence[float], nudged: Sequence[float], tolerance: float = TOLERANCE
) -> tuple[bool, str]:
    """Return whether another precision's loss curve agrees, and the distances in words.

    The curves agree if ``gap <= tolerance + spread`` and ``spread <= tolerance``, where the spread is that of
    ``nudged`` weights in the model's own precision.

    Example:
        >>> agreement([1.0], [1.021], [1.002], tolerance=0.02)
        (True, 'losses differ by 2.10% (tolerated 2.00%, rounding 0.20%)')
    """
    gap, spread = distance(own, other), distance(own, nudged)
    if spread > tolerance:
        return False, f"cannot be judged: rounding alone moves the losses by {spread:.2%}"
    words = f"losses differ by {gap:.2%} (tolerated {tolerance:.2%}, rounding {spread:.2%})"
    return gap <= tolerance + spread, words
