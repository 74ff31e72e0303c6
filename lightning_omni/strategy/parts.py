"""The parts of an OmniStrategy: each has one task, and Lightning's hooks call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_omni.runtime import WorldOptions
from lightning_omni.strategy.arguments import FitOptions
from lightning_omni.strategy.checkpoints import CheckpointHooks
from lightning_omni.strategy.failures import Failures
from lightning_omni.strategy.grouping import Grouping, UserGroupsStash
from lightning_omni.strategy.joining import Rejoining, RunStates
from lightning_omni.strategy.launcher import Launching
from lightning_omni.strategy.loops.listener import Listener, NestedRuns
from lightning_omni.strategy.optimizers import MergedSubmodule, Proxies
from lightning_omni.strategy.shared_parts import Namespace, SharedParts

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies import DDPStrategy


class FitParts(SharedParts):
    """The parts of a strategy, which exist once per process and are never sent to another one.

    Attributes:
        user_groups: the groups that the user chose, while a tuner chooses others.
        listener: None outside of a fit.
        on_ready: functions called on every rank after the groups are formed and before the first batch.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        namespace: Namespace,
        world_options: WorldOptions,
        options: FitOptions,
        ddp_options: dict[str, Any],
        wrap: Callable[[], None],
    ) -> None:
        super().__init__(strategy, namespace, world_options, options)
        self.grouping = Grouping(self, ddp_options, wrap)
        self.run_states = RunStates(self)
        self.epochs.on_parted = self.run_states.store
        self.user_groups = UserGroupsStash(self, self.grouping)
        self.nested = NestedRuns(self, self.grouping)
        self.rejoining = Rejoining()
        self.failures = Failures(self, self.grouping, self.rejoining)
        self.checkpoints = CheckpointHooks(self, self.run_states, self.failures)
        self.launching = Launching(self, lambda: self.checkpoints.is_writing, lambda: self.rejoining.is_armed)
        self.listener: Listener | None = None
        self.on_ready: list[Callable[[], None]] = []

    def begin(self, trainer: Trainer) -> None:
        self.listener = Listener(self, trainer, self.grouping, self.run_states, self.nested, self.failures)

    def finish(self) -> None:
        self.failures.at, self.is_evaluating = None, False
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        self.balance.end()
        self.proxies.unguard()
        try:
            if self.current_world is not None:
                self.world.close()
        finally:
            self.signals.restore()
        self.epochs.forget()
        self.checkpoints.contents.forget()
        self.nested = NestedRuns(self, self.grouping)
        self.merged, self.proxies = MergedSubmodule(self.merged.name), Proxies()
