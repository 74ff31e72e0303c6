"""The strategy's listener to Lightning's hooks, and runs of a loop inside a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from lightning_omni.errors import UnsupportedError
from lightning_omni.run_report import Staleness
from lightning_omni.runtime.balance import Balance
from lightning_omni.strategy.failures import Failures
from lightning_omni.strategy.grouping import Grouping
from lightning_omni.strategy.joining import RunStates
from lightning_omni.strategy.lightning_internals.callbacks import (
    add_listener,
    clear_current_hook,
    is_inside_hook,
    remove_listener,
)
from lightning_omni.strategy.lightning_internals.loops import (
    control_loops,
    release_loops,
    unlease_loaders,
)
from lightning_omni.strategy.lightning_internals.metrics import (
    align_collective_metrics,
    collective_metrics,
    forget_batch_results,
    forget_old_results,
    logs_now,
    loss_in,
    patch_list_gather,
    restore_list_gather,
)
from lightning_omni.strategy.loops.driver import EpochDriver
from lightning_omni.strategy.loops.live_metrics import live_metrics, show_batches
from lightning_omni.strategy.optimizers import check_wrapped
from lightning_omni.strategy.shared_parts import SharedParts
from lightning_omni.strategy.signals import training_position
from lightning_omni.topology import Topology
from lightning_omni.tuning.model.steps import straggler_sentence

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class Listener:
    """A listener to one fit, called before any callback, with its decisions for the loops.

    Attributes:
        failures: notes the error of a fit before any callback receives it, and reports it if one then raises another.
    """

    def __init__(
        self,
        parts: SharedParts,
        trainer: Trainer,
        grouping: Grouping,
        run_states: RunStates,
        nested: NestedRuns,
        failures: Failures,
    ) -> None:
        self.parts, self._trainer = parts, trainer
        self._grouping, self._run_states, self._nested, self.failures = grouping, run_states, nested, failures
        self._staleness = Staleness()
        self._logged: dict[str, float] = {}
        self._has_begun = False  # the present batch
        clear_current_hook(trainer)
        add_listener(trainer, self)
        control_loops(trainer, self)
        world = parts.world
        patch_list_gather(lambda: world.executor.exchanges and not world.is_computing)
        world.where = partial(training_position, trainer)

    def close(self) -> None:
        unlease_loaders(self._trainer)
        remove_listener(self._trainer)
        release_loops(self._trainer)
        restore_list_gather()

    # --- Control of the loops ----------------------------------------------------------------------------------------

    def run(self, run: Callable[[], None]) -> None:
        if is_inside_hook(self._trainer):
            self._nested.run(run)
        else:
            self.parts.epochs.run.restored()
            run()

    def begin_setup(self) -> None:
        self.parts.epochs.data.expect_others()

    def begin_epoch(self, iterate: Callable[[], None]) -> None:
        """Separate the groups after the hooks of the epoch's start, common to all ranks."""
        parts, loop = self.parts, self._trainer.fit_loop
        if self._nested.is_running:
            iterate()
            return
        if loop.restarted_mid_epoch or loop.restarted_on_epoch_end:
            parts.epochs.resume_order()
            iterate()
            parts.epochs.go_on()
            return
        self._has_begun = False  # the last batch has no end if a hook of its start has returned -1
        self._run_states.hooks_are_over()
        self._nested.form_groups_again()
        if parts.epochs.data.is_dealt_out:
            iterate()  # an iterable dataset may query the number of ranks
        self._staleness.reset()
        if parts.world.executor.exchanges:
            check_wrapped(self._trainer, parts.world.torch_members)
        parts.epochs.begin(self._trainer.current_epoch)
        parts.balance.begin_epoch()
        parts.step_times.interrupt()
        if not parts.epochs.data.is_dealt_out:
            iterate()

    def epoch_has_ended(self) -> None:
        if not self._nested.is_running:
            self.parts.epochs.after_hooks_of_end()

    def begin_fetch(self) -> None:
        self.parts.epochs.data.begin_fetch()
        self.parts.balance.begin_fetch()

    def end_fetch(self) -> None:
        self.parts.balance.end_fetch()
        self.parts.epochs.data.end_fetch()

    # --- Hooks of callbacks ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the run's optimizers into a joining group, after those of a checkpoint."""
        if not self._nested.is_running:
            self._run_states.training_begins()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._nested.is_running:
            return
        self._has_begun = True
        parts, traffic = self.parts, self.parts.world.exchange.traffic
        parts.signals.agree_alone()
        self._grouping.follow_recorder()
        self._grouping.hooks.begin_batch()
        if parts.world.control is not None:
            parts.step_times.begin(traffic.seconds, traffic.moved)
        parts.balance.begin_batch()
        parts.epochs.begin_batch()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.parts.balance.backward_done()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._grouping.hooks.check_gradients()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._nested.is_running:
            return
        if not self._has_begun:  # the loader has yielded None, and Lightning has called no hook of the batch's start
            self.on_train_batch_start(trainer, pl_module, batch, batch_idx)
            if trainer.is_last_batch and not self.parts.epochs.is_cut_short:  # the loop did not know of it before
                self.parts.epochs.schedulers.step("epoch")
        self._has_begun = False
        parts, world = self.parts, self.parts.world
        parts.merged.step_done()
        if world.control is not None:
            parts.step_times.end(world.exchange.traffic.seconds, world.exchange.traffic.moved)
            world.control.report_timings(*parts.step_times.means)
            world.control.report_progress(is_expected=True)
        parts.balance.end_batch()
        parts.epochs.end_batch()
        show_batches(trainer, parts.epochs.expected_batches(batch_idx + 1))
        if logs_now(trainer):
            values = parts.balance.metrics()
            if world.control is not None:
                self._watch_staleness()
                values |= live_metrics(world.control.status, self._staleness, parts.step_times)
                values["omni/stale"] = values["omni/staleness_mean"]  # short, for the progress bar
                if (loss := loss_in(outputs, trainer.accumulate_grad_batches)) is not None:
                    world.control.metrics = {**world.control.metrics, "loss": float(loss.float().mean())}
            forget_batch_results(trainer, self._logged.keys() - values.keys())  # of groups that are gone
            self._logged = values
            for name, value in values.items():
                in_bar = name == "omni/stale"
                # Lightning needs a batch size where training_step draws its batches.
                pl_module.log(name, value, prog_bar=in_bar, logger=not in_bar, batch_size=1)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.failures.note(exception)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            forget_old_results(trainer)
            self.parts.epochs.before_validation(pl_module)
            self._grouping.follow_recorder()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        world = self.parts.world
        if world.control is not None and not world.is_computing:
            world.barrier()  # from here on torch.distributed has the ranks that are left

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._nested.is_running:
            return
        self.parts.epochs.end(pl_module)
        self._grouping.follow_recorder()
        control = self.parts.world.control
        if control is None:
            return
        self._watch_staleness()
        self._log_together()
        if self.parts.world.executor.exchanges:
            # A collective computes it, and NCCL accepts no CPU tensors.
            for name, value in self._staleness.to(self.parts.world.device).compute().items():
                if name in ("mean", "max"):
                    pl_module.log(f"omni/staleness_{name}", value.float(), sync_dist=True, batch_size=1)
            self._staleness.to("cpu")
        cannot_rebalance = self.parts.balance.is_on or self.parts.world.is_sharded
        can_rebalance = self.parts.epochs.leases is not None and not cannot_rebalance
        if control.status is not None and (sentence := straggler_sentence(control.status, can_rebalance)):
            self.parts.namespace.info(f"OmniStrategy: {sentence}")

    def _log_together(self) -> None:
        world = self.parts.world
        forget_old_results(self._trainer)
        mine = collective_metrics(self._trainer, world.compute_group)
        # `enc_hook` converts NumPy's booleans.
        of_all = world.process_groups.live.contribute(
            "the metrics of an epoch", msgspec.json.encode(mine, enc_hook=bool)
        )
        align_collective_metrics(self._trainer, world.compute_group, [msgspec.json.decode(each) for _, each in of_all])

    def _watch_staleness(self) -> None:
        world = self.parts.world
        for part in world.parts:
            values = part.staleness.elements() if world.is_leader else ()  # its peers receive the same numbers
            self._staleness.update(torch.tensor([*values]))
            part.staleness.clear()


class NestedRuns:
    """Runs of the loop inside a hook, by finders of learning rates or batch sizes, for which all ranks form one group.

    Before several groups first train there is no server yet, and the original topology is restored. Between two
    epochs the groups are merged, and formed again when the next epoch begins: until then the finder may restore its
    saved state.
    """

    def __init__(self, parts: SharedParts, grouping: Grouping) -> None:
        self._parts, self._grouping = parts, grouping
        self.is_running = False
        self._groups = 1

    def run(self, run: Callable[[], None]) -> None:
        """Run the loop, but not inside an epoch, where each group is at a batch of its own."""
        world = self._parts.world
        if world.is_computing:
            raise UnsupportedError(
                "trainer.fit_loop.run() inside an epoch (a learning-rate finder in on_train_batch_end, say): the groups"
                " are at different batches; run it in on_fit_start or on_train_epoch_start, or use groups=1"
            )
        with self._in_one_group(), self._apart():
            run()
        self._parts.epochs.data.expect_others()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Return a context in which the run does not count as the fit's progress."""
        parts = self._parts
        world = parts.world
        kept, steps = (parts.epochs, parts.balance), world.steps
        epochs = EpochDriver("static", parts.namespace.info, parts.namespace.warn)
        epochs.connect(parts.trainer, world)
        parts.epochs, parts.balance = epochs, Balance("off", parts.namespace.info)
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            (parts.epochs, parts.balance), world.steps = kept, steps

    @contextmanager
    def _in_one_group(self) -> Iterator[None]:
        world = self._parts.world
        if not world.executor.exchanges:
            yield
        elif world.control is not None:
            self._groups = len(world.live_groups)
            self._grouping.form(1)
            yield
        else:
            topology, world.topology = world.topology, Topology.even(world.size, 1)
            if (leases := self._parts.epochs.data.coming) is not None:
                leases.is_local = True  # made in configure_optimizers; `adopt` assigns them to groups
            try:
                world.make_groups()
                world.wrapper.average_over_replicas()
                self._grouping.wrap()
                self._grouping.share_loss_scale()
                yield
            finally:
                world.topology = topology
            world.wrapper.average_over_replicas()
            self._grouping.wrap()

    def form_groups_again(self) -> None:
        groups, self._groups = self._groups, 1
        if groups > 1:
            self._grouping.form(min(groups, len(self._parts.world.live_ranks)))
