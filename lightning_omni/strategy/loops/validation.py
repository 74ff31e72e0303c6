"""Validation for which no group waits: one group evaluates a snapshot of the weights, and the others train on.

The first group that reaches a validation point loads the server's current weights, runs Lightning's validation loop
over all data, restores its weights and trains on. The server passes the result to all ranks, which end the validation
for their callbacks and loggers after one of their next batches, in order. At an epoch's end all groups validate
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DistributedSampler

from lightning_omni.runtime import World
from lightning_omni.strategy.lightning_internals.callbacks import averaged_models
from lightning_omni.strategy.lightning_internals.loops import set_step_counters, step_counters
from lightning_omni.strategy.lightning_internals.metrics import (
    cached_metrics,
    capture_metrics,
    divide_validation_data,
    end_validation,
    validation_loaders,
)
from lightning_omni.strategy.loops.epoch import has_lightning_sampler
from lightning_omni.wire.messages import Batch, EpochPlan
from lightning_omni.wire.steps_and_samples import Progress

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Version(NamedTuple):
    """The weights and buffers of one validation, for its checkpoint.

    Attributes:
        number: number of the validation, under which the server has the weights.
        buffers: the model's buffers on the group that evaluated.
    """

    number: int
    buffers: Mapping[str, Tensor]


class PublishedValidation:
    """The validations of one fit for which no group waits.

    Attributes:
        is_on: whether several groups validate this way in this epoch.
        evaluates: number of the validation that this group runs or will run next; 0 for none.
        version: the validation whose end callbacks receive now.
        on_heard: called on every rank when its callbacks have received a validation, with the metrics before it.
    """

    def __init__(self, is_wanted: bool, info: Callable[[str], None]) -> None:
        self.is_wanted, self._info = is_wanted, info
        self._has_said = False
        self.on_heard: Callable[[dict[str, Any]], None] = lambda before: None
        self.forget()

    def forget(self) -> None:
        self.is_on = False
        self.evaluates, self.version = 0, None
        self._ended, self._steps, self._begun = 0, 0, set[int]()
        self._plan: EpochPlan | None = None
        self._passed, self._trained, self._counters = 0, 0, [0, 0, 0]
        self._have_all_ended = True

    version: Version | None
    _trainer: Trainer
    _world: World

    def connect(self, trainer: Trainer, world: World) -> None:
        self.forget()
        self._trainer, self._world, self._has_said = trainer, world, False

    # --- An epoch ----------------------------------------------------------------------------------------------------

    def begin(self, plan: EpochPlan | None, trained: int = 0, is_dynamic: bool = True) -> None:
        """Begin an epoch: see `go_on`. All ranks call it, after equally many steps."""
        self._counters, self._steps = step_counters(self._trainer), 0
        self._trained, self._passed = trained, 0
        self.go_on(plan, trained, is_dynamic)

    def go_on(self, plan: EpochPlan | None, trained: int, is_dynamic: bool) -> None:
        """Begin or continue an epoch after the groups were formed. All ranks call it.

        ``plan`` is None if data is not leased; with ``is_dynamic`` the server deals out the samples.
        """
        self._plan, self._have_all_ended = plan, False
        self.is_on = self._world.external_writes.are_validations_apart = False
        if not (self.is_wanted and self._world.executor.exchanges and self._trainer.enable_validation):
            return
        reason = "the samples are dealt out beforehand" if plan is None or not is_dynamic else self._reason()
        if reason:
            if not self._has_said:
                self._has_said = True
                self._info(f'OmniStrategy: validation="published" is validation="wait" here: {reason}')
            return
        assert plan is not None
        self.is_on = self._world.external_writes.are_validations_apart = plan.validate_every > 0
        self._passed = max(self._passed, self._point(trained)) if self.is_on else 0

    def dealt(self, plan: EpochPlan) -> EpochPlan:
        return msgspec.structs.replace(plan, validate_every=0, validate_offset=0) if self.is_on else plan

    def _reason(self) -> str:
        if self._world.method.evaluated == "mean":
            return f"{type(self._world.method).__name__} evaluates the mean of all groups' weights"
        if averaged_models(self._trainer):
            return "a WeightAveraging callback evaluates its own weights"
        loaders = validation_loaders(self._trainer)
        if not any(self._trainer.num_val_batches):
            return "the validation data has no batch"
        if not all(
            has_lightning_sampler(loader) and isinstance(loader.sampler, DistributedSampler) for loader in loaders
        ):
            return "the validation data has a sampler of its own, or is iterable, so that one group cannot read it all"
        return ""

    def _point(self, start: int) -> int:
        assert self._plan is not None
        return (start + self._plan.validate_offset) // self._plan.validate_every

    # --- Evaluating --------------------------------------------------------------------------------------------------

    def is_due(self, coming: Batch | None) -> bool:
        """Return whether this group validates before its next batch, ``coming``. All its members call it.

        At a validation point, the group claims the validation from the server.
        """
        if coming is None or (point := self._point(coming.start)) <= self._passed:
            return False
        assert self._plan is not None
        self._passed = point
        self.evaluates = self._world.versions.claim(self._plan.epoch, point)
        return self.evaluates > 0

    def run(self, run: Callable[[], Any], progress: Progress | None) -> Any:
        trainer, world = self._trainer, self._world
        number = self.evaluates
        self._begun.add(number)
        try:
            with (
                world.versions.loaded(number) as cut,
                divide_validation_data(trainer, world.members.index(world.rank), len(world.members)),
                capture_metrics(trainer) as found,
            ):
                returned = run()
                buffers = dict(trainer.lightning_module.named_buffers())
                steps = 0
                if progress is not None and world.is_leader:
                    steps = cut.progress(progress).steps - replace(progress, samples=self._trained).steps
                world.versions.publish(number, {"metrics": _plain(found), "buffers": buffers, "steps": steps})
        finally:
            self.evaluates = 0
        world.enter_compute()  # resumes the timing of steps
        return returned

    # --- Results -----------------------------------------------------------------------------------------------------

    def end_known(self) -> None:
        """Pass known validations to this group's callbacks. All its members call it."""
        while self._ended < self._world.core.last_answer.validations:
            self._end_next()

    def have_parted(self) -> None:
        self._have_all_ended = False

    def end_all(self) -> bool:
        """Wait for groups that evaluate, and pass all results to the callbacks, before the groups synchronize.

        All ranks call it. Return whether a validation of this epoch is missing; False in further calls.
        """
        if not self.is_on or self._have_all_ended:
            return False
        self._have_all_ended = True
        self._world.all_reduce_max([0])
        known = self._world.versions.ask()
        complete, is_missed = self._world.all_reduce_max([known.complete, int(known.is_missed)])
        while self._ended < complete:
            self._end_next()
        return bool(is_missed)

    def _end_next(self) -> None:
        trainer, world = self._trainer, self._world
        self._ended += 1
        result = world.versions.read(self._ended)
        if result is not None:
            found = tree_map(partial(_put, world.device), result["metrics"])
            self._steps = max(int(result["steps"]), self._steps + 1)
            own = step_counters(trainer)
            set_step_counters(trainer, self._after(self._steps))
            self.version = Version(self._ended, result["buffers"])
            try:
                before = cached_metrics(trainer)
                with world.versions.own_weights():
                    end_validation(trainer, found, has_started=self._ended in self._begun)
                self.on_heard(before)
            finally:
                self.version = None
                set_step_counters(trainer, own)
        if not any(number > self._ended for number in self._begun):
            world.versions.forget_evaluated()
        world.versions.release(self._ended)

    # --- Steps -------------------------------------------------------------------------------------------------------

    def _after(self, steps: int) -> list[int]:
        """Return a validation's step counters, ``steps`` after the epoch's begin, equal on all ranks."""
        automatic, manual, batches = self._counters
        own = step_counters(self._trainer)
        each = -(-(own[1] - manual) // max(1, own[2] + 1 - batches))  # steps per batch, in manual optimization
        return [automatic + (steps if own[0] > automatic else 0), manual + each * steps, batches + steps - 1]

    def not_before(self, counters: list[int]) -> list[int]:
        """Return synchronized groups' step counters, raised above those of any validation."""
        if self.is_on and self._steps and counters[2] < self._counters[2] + self._steps:
            return self._after(self._steps + 1)
        return counters


def _put(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _plain(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        kind: {name: value if isinstance(value, Tensor) else float(value) for name, value in values.items()}
        for kind, values in found.items()
    }
