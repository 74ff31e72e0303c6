"""What the strategy hears of Lightning's loops, before any callback does. It stands in nobody's list of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_omni.metrics import Staleness
from lightning_omni.strategy import _private
from lightning_omni.strategy.bar import ProgressDisplay
from lightning_omni.strategy.contract import Strategy
from lightning_omni.strategy.nested import NestedRuns
from lightning_omni.strategy.watch import live_metrics, straggler_sentence

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class Listener:
    """Follows one fit: is told of its hooks by `_private.listen`, and asked by its loops, see `_private.Leader`.

    Args:
        strategy: what is told in turn.
        nested: runs the loop where it is run inside one of its hooks.
        trainer: the fit's.
    """

    def __init__(self, strategy: Strategy, nested: NestedRuns, trainer: Trainer) -> None:
        self._strategy = strategy
        self._nested = nested
        self._trainer = trainer
        self._staleness = Staleness()
        self._display = ProgressDisplay()
        _private.listen(trainer, self)
        _private.lead(trainer, self)

    def close(self) -> None:
        """The fit is over, however it ended: the Trainer is as it was."""
        _private.stop_listening(self._trainer)
        _private.stop_leading(self._trainer)
        self._display.release()

    # --- What the loops ask ------------------------------------------------------------------------------------------

    @property
    def step_limit(self) -> int | None:
        """What the loops take for max_steps, if not their own."""
        return self._strategy.epochs.step_limit

    @property
    def is_open_ended(self) -> bool:
        """Whether the epoch ends with the samples, whatever the number of batches."""
        return self._strategy.epochs.is_open_ended

    def validates(self, is_due: Callable[[], bool]) -> bool:
        """Whether to validate after this batch."""
        return self._strategy.epochs.validates(is_due)

    def run(self, run: Callable[[], None]) -> None:
        """The fit loop runs: as the Trainer wants, or inside a hook, as for a learning-rate finder."""
        if _private.is_inside_a_hook(self._trainer):
            self._nested.run(run)
        else:
            run()

    def begin_epoch(self, iterate: Callable[[], None]) -> None:
        """After the hooks of the epoch's start, which are for all ranks together: the groups part."""
        strategy, loop = self._strategy, self._trainer.fit_loop
        if self._nested.is_running or loop.restarted_mid_epoch or loop.restarted_on_epoch_end:
            iterate()
            return
        self._nested.form_groups_again()
        if strategy.epochs.data.is_dealt_out:
            iterate()  # an iterable data set may ask how many ranks there are
        self._staleness.reset()
        strategy.epochs.begin(self._trainer.current_epoch)
        strategy.balance.begin_epoch()
        if not strategy.epochs.data.is_dealt_out:
            iterate()

    # --- What callbacks hear -----------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch is there."""
        if not self._nested.is_running:
            self._strategy.begin_batch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done."""
        if self._nested.is_running:
            return
        self._strategy.end_batch()
        control = self._strategy.joined.control
        self._display.show(trainer, self._strategy.epochs.expected_batches(batch_idx + 1))
        if _private.logs_now(trainer):
            values = self._strategy.balance.metrics()
            if control is not None:
                self._watch_staleness()
                values |= live_metrics(control.status, self._staleness, self._strategy.stopwatch)
                self._display.tell(values)
            for name, value in values.items():
                pl_module.log(name, value)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The groups meet."""
        if not trainer.sanity_checking:
            self._strategy.epochs.before_validation(pl_module.buffers())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The groups meet."""
        if self._nested.is_running:
            return
        self._strategy.epochs.end(pl_module.buffers())
        control = self._strategy.joined.control
        if control is None:
            return
        self._watch_staleness()
        if self._strategy.joined.executor.exchanges:
            for name, value in self._staleness.compute().items():
                if name in ("mean", "max"):
                    pl_module.log(f"omni/staleness_{name}", value.float(), sync_dist=True)
        can_rebalance = self._strategy.epochs.leases is not None and not self._strategy.balance.is_on
        if control.status is not None and (sentence := straggler_sentence(control.status, can_rebalance)):
            self._strategy.rank_zero_info(f"OmniStrategy: {sentence}")

    def _watch_staleness(self) -> None:
        world = self._strategy.joined
        for part in world.parts:
            if world.is_leader:  # its mates hear the same numbers
                self._staleness.update(torch.tensor(part.staleness))
            part.staleness.clear()
