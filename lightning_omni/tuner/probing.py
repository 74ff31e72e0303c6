"""Probes in a fit: some batches of real training with another setting, from a snapshot and back to it.

A probe is no part of the run: it does not go through Lightning's loops, so nothing counts its batches, saves, logs or
stops for it. It does go through the module's ``training_step``, the strategy's DDP, the precision plugin, gradient
clipping, and the parameter server, with batches of the run's own data set.

Rule 1: between two probes there is one group of all live ranks, with its state on its ranks; there the ranks agree.
Rule 2: whatever happens in a probe, this rank's state is put back before the exception goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.optimizer.balance import Balance, gather_values
from lightning_omni.optimizer.loaders import Leases
from lightning_omni.performance.forecast import Setting, TrialResult
from lightning_omni.performance.measured import Measured
from lightning_omni.protocol import EpochPlan
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.leases import apportion
from lightning_omni.search import Dimension, Observation, Probe
from lightning_omni.search import constants as c
from lightning_omni.search.space import apply_further
from lightning_omni.strategy.declared import callbacks_of, is_fast_dev_run, set_callbacks
from lightning_omni.strategy.hooks import strategy_of
from lightning_omni.tuner import _private
from lightning_omni.tuner.communicating import communicate, communication_of
from lightning_omni.tuner.hyperparameters import Hyperparameters
from lightning_omni.tuner.step import arguments_of, log_nothing, loss_of, silence

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_FIRST_EPOCH = 1 << 40
"""Epochs of probes have numbers of their own, which no epoch of the run comes to."""


@dataclass(frozen=True)
class ProbedBatch:
    """What one rank noted of one batch of a probe."""

    stop: int
    loss: float
    ended: float
    exchanged: float


@dataclass(frozen=True)
class ProbedRank:
    """What one rank noted of a probe.

    Attributes:
        batches: that it trained.
        own: samples and seconds of its own steps.
        has_diverged: whether it saw gradients or weights that are not finite.
        serve: seconds that the server takes for an update, on the recorder.
        lost: ranks that it missed after the probe, and not before the first one.
    """

    batches: tuple[ProbedBatch, ...]
    own: tuple[tuple[int, float], ...]
    has_diverged: bool
    serve: float
    lost: tuple[int, ...] = ()


class Prober:
    """Carries out probes on every rank of a fit, and leaves no trace of them.

    Args:
        trainer: the Trainer; its strategy is an OmniStrategy that has begun to train, and no epoch is open.
        module: the LightningModule.
        hyperparameters: of its optimizer.
        lr: the learning rate that settings are relative to, see `Hyperparameters.lr`.
        seed: of the samples that probes train on.
        several: whether there will be probes with several groups.
        mute_logger: class of a logger that says nothing.
        is_first: whether no epoch has begun.
        further: dimensions of the search that a user added.

    Raises:
        ConfigurationError: this fit cannot be probed; the message says why.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        hyperparameters: Hyperparameters,
        lr: float,
        seed: int,
        several: bool,
        mute_logger: type,
        is_first: bool,
        further: Sequence[Dimension] = (),
    ) -> None:
        self._trainer, self._module = trainer, module
        self._strategy = strategy_of(trainer)
        self._hyperparameters, self._lr, self._seed = hyperparameters, lr, seed
        self.loader = probed_loader(trainer)
        self._arguments = arguments_of(type(module).training_step)
        self._further = tuple(further)
        self._further_before = [each.current(self._strategy.world) for each in self._further]
        self._mute_logger, self._is_first = mute_logger, is_first
        self._count = 0
        self._names: set[str] = set()
        self._lost = set(self._strategy.world.lost)
        self._strategy.form_one()
        self._scaler = self._strategy.loss_scaler
        if several:
            self._strategy.world.connection.join()
        optimizer = trainer.optimizers[0]
        self._gathers = isinstance(optimizer, SGD) and not optimizer.state
        self._state = self._strategy.run_state()
        self._communication = self._strategy.world.communication

    # --- A probe ------------------------------------------------------------------------------------------------------

    def run(self, probe: Probe, speeds: Mapping[int, float] | None, by_speed: bool) -> Observation:
        """Trains as the probe says, and takes it all back. On every rank.

        Args:
            probe: what to try.
            speeds: samples per second of each rank, the same on all; None if they are not known yet.
            by_speed: whether groups are formed by them.

        Returns:
            What all ranks saw, the same on all.
        """
        began = time.perf_counter()
        try:
            with self._state.swapped():
                noted = self._train(probe, speeds, by_speed)
                groups = self._strategy.world.topology.groups
                self._strategy.form_one()
                communicate(self._strategy, self._communication)
            table = self._gather(replace(noted, lost=tuple(set(self._strategy.world.lost) - self._lost)))
        except BaseException as error:
            self._give_up(error)
            raise
        lost = sorted({rank for row in table.values() for rank in row.lost})
        diverged = [rank for rank, row in sorted(table.items()) if row.has_diverged]
        problem = f"diverged: gradients or weights are not finite on rank {diverged[0]}" if diverged else ""
        if lost:
            problem = f"rank {', '.join(map(str, lost))} was lost"
        seconds = float(self._strategy.world.broadcast_text(repr(time.perf_counter() - began)))
        tried = replace(_tried(probe.setting, table, seconds, problem), gathers=self._gathers)
        measured = None if lost else _measured(groups, table, probe.setting.period, self._nbytes, self._servers)
        if measured is not None:
            server = self._strategy.world.server
            measured = replace(measured, nodes=server.nodes_of(measured.ranks), server_node=server.node)
        return Observation(tried, measured)

    def names_of(self, setting: Setting, samples: int) -> set[str]:
        """Names of all that the training step logs, from one batch of every rank; nothing of it is kept."""
        self.run(Probe(0, replace(setting, groups=1, rebalance=False), samples, "which metrics there are"), None, False)
        return self._names

    def close(self) -> None:
        """The run is as it was before the first probe, in one group of all live ranks."""
        self._state.put_back()
        self._strategy.world.communication = self._communication
        for dimension, value in zip(self._further, self._further_before, strict=True):
            dimension.apply(self._strategy.world, value)
        if self._is_first and not self._strategy.world.executor.exchanges:
            # DDP orders its buckets again after its first step, and sums are rounded as the buckets lie.
            self._strategy.wrap_for_group()

    def _train(self, probe: Probe, speeds: Mapping[int, float] | None, by_speed: bool) -> ProbedRank:
        strategy, world = self._strategy, self._strategy.world
        self._hyperparameters.set(probe.setting, self._lr)
        communicate(strategy, communication_of(probe.setting, self._communication))
        apply_further(self._further, world, probe.setting)
        if probe.setting.groups > 1:
            strategy.form(probe.setting.groups, speeds if by_speed else None)
        leases = self._leases(probe, speeds)
        balance = Balance("auto", log_nothing, only_measures=True)
        with self._in_place_of_the_run(leases, balance):
            balance.begin(world, self._module, lambda: leases)
            try:
                batches, has_diverged = self._go_through(leases, balance)
            finally:
                balance.end()
            serve = self._ask_serve_time()
            world.enter_world(strategy.pl_module)
        window = int(self._trainer.accumulate_grad_batches)
        own = tuple((samples * window, seconds) for samples, seconds in balance.measured)
        return ProbedRank(tuple(batches), own, has_diverged, serve)

    def _go_through(self, leases: Leases, balance: Balance) -> tuple[list[ProbedBatch], bool]:
        """All batches that this rank's group gets of the probe's samples, and whether it saw itself diverge."""
        world = self._strategy.world
        batches: list[ProbedBatch] = []
        began, exchanged = time.perf_counter(), world.channel.traffic.seconds
        micro: list[Any] = []
        overflows, scale = 0, self._scale
        window = int(self._trainer.accumulate_grad_batches)
        for batch in self._batches(leases):
            leases.begin_batch()
            balance.begin_batch()
            micro.append(batch)
            if len(micro) < window:
                continue
            loss = self._step(micro)
            micro = []
            balance.end_batch()
            if loss is None:
                continue
            now = time.perf_counter()
            current = leases.current
            assert current is not None
            batches.append(ProbedBatch(current.stop, loss, now - began, world.channel.traffic.seconds - exchanged))
            # A loss scaler that begins too high skips steps until it fits: that is its way, for a while.
            overflows = overflows + 1 if self._scale < scale else 0
            is_settling, scale = 0 < overflows < c.NON_FINITE_TOLERATED, self._scale
            if not is_settling and (overflows or not world.executor.is_finite(self._module.parameters())):
                leases.leave("skip")
                return batches, True
            if world.core.last_answer.stop:  # another group has diverged, and says so
                break
        return batches, False

    def _step(self, micro: Sequence[Any]) -> float | None:
        """One optimizer step, as Lightning's automatic optimization makes it.

        Returns:
            The mean loss; None if the training step has skipped all batches.
        """
        strategy, module, optimizer = self._strategy, self._module, self._module.optimizers()
        assert not isinstance(optimizer, list)  # there is one: see `probed_loader`
        losses: list[Tensor] = []

        def closure() -> Tensor | None:
            loss = None
            for number, batch in enumerate(micro):
                with ExitStack() as stack:
                    if number < len(micro) - 1:
                        stack.enter_context(strategy.block_backward_sync())
                    loss = self._loss(batch)
                    if number == 0:
                        optimizer.zero_grad()
                    if loss is not None:
                        losses.append(loss.detach())
                        strategy.backward(loss / len(micro), None)
            return losses[-1] if loss is not None else None

        module.optimizer_step(self._trainer.current_epoch, 0, optimizer, closure)
        return float(torch.stack(losses).mean()) if losses else None

    def _loss(self, batch: Any) -> Tensor | None:
        """Of one batch; None if the training step skips it, as Lightning allows where there is one rank."""
        found = self._strategy.training_step(self._on_device(batch), *self._arguments)
        return None if found is None and self._trainer.world_size == 1 else loss_of(found)

    @property
    def _scale(self) -> float:
        """Of the loss, where 16-bit gradients need one."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def _on_device(self, batch: Any) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = _private.before_transfer(self._module, batch)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)

    # --- Data ---------------------------------------------------------------------------------------------------------

    def _leases(self, probe: Probe, speeds: Mapping[int, float] | None) -> Leases:
        world = self._strategy.world
        size = batch_size_of(self.loader)
        leases = Leases(world.size, size, probe.samples, world.rank, lambda epoch: None, is_local=True)
        shares: Sequence[int] = ()
        if probe.setting.rebalance and speeds is not None and len(world.members) > 1:
            shares = apportion(size * len(world.members), [speeds[rank] for rank in world.members])
        place = world.members.index(world.rank)
        leases.assign(place, len(world.members), world.executor.control, world.generation, shares)
        self._count += 1
        plan = EpochPlan(epoch=_FIRST_EPOCH + self._count, total=probe.samples, batch_size=size, budget=probe.samples)
        leases.begin(plan)
        return leases

    def _batches(self, leases: Leases) -> Iterator[Any]:
        """The probe's batches, loaded as the run's are."""
        loader = self.loader
        workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
        return iter(
            DataLoader(
                loader.dataset,
                batch_sampler=_ProbeIndices(leases, self._order(leases.total)),
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                generator=torch.Generator().manual_seed(self._seed),
                **workers,  # type: ignore[arg-type]
            )
        )

    def _order(self, total: int) -> Tensor:
        """The same samples in the same order for all probes."""
        count = len(self.loader.dataset)  # type: ignore[arg-type]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self._seed))
        return order.repeat(-(-total // count))[:total]

    # --- All ranks together -------------------------------------------------------------------------------------------

    def _gather(self, noted: ProbedRank) -> dict[int, ProbedRank]:
        """What every live rank noted, on every rank."""
        world = self._strategy.world
        return dict(zip(world.members, gather_values(world, noted, ProbedRank), strict=True))

    def _ask_serve_time(self) -> float:
        world = self._strategy.world
        control = world.executor.control
        if not world.is_recorder or control is None:
            return 0.0
        try:
            status = control.request(m.AskStatus(), m.Status, timeout=5.0)
        except OmniError:
            return 0.0
        return float(status.serve_time)

    @property
    def _servers(self) -> tuple[int, bool]:
        """How many servers hold a share of the weights each, and whether they are one on each node."""
        world = self._strategy.world
        return (1 if world.control is None else world.control.shards), world.options.servers == "per-node"

    @property
    def _nbytes(self) -> int:
        return sum(part.replica.layout.nbytes for part in self._strategy.world.parts if part.head is None)

    @contextmanager
    def _in_place_of_the_run(self, leases: Leases, balance: Balance) -> Iterator[None]:
        """What of strategy and trainer a probe takes the place of."""
        strategy, trainer = self._strategy, self._trainer
        kept = strategy.epochs.leases, strategy.balance, callbacks_of(trainer), trainer.loggers
        strategy.epochs.leases, strategy.balance = leases, balance
        set_callbacks(trainer, [])
        trainer.loggers = [self._mute_logger() for _ in trainer.loggers]
        world = strategy.world
        world.core.last_answer.stop, world.core.last_answer.applied = "", True
        try:
            with silence(self._module, self._names), torch.enable_grad():
                if self._is_first:  # what it makes here is taken back, and made once more when the epoch begins
                    self._module.on_train_epoch_start()
                world.enter_compute()
                yield
        finally:
            strategy.epochs.leases, strategy.balance, callbacks, trainer.loggers = kept
            set_callbacks(trainer, callbacks)

    def _give_up(self, error: BaseException) -> None:
        """This rank cannot go on. What is saved now has to be the run's state, not the probe's."""
        self._strategy.world.explain(error)
        self._strategy.world.fail(error, " in a probe")
        self.close()


class _ProbeIndices:
    """Yields the dataset indices of this rank's batches of a probe."""

    def __init__(self, leases: Leases, order: Tensor) -> None:
        self._leases, self._order = leases, order

    def __iter__(self) -> Iterator[list[int]]:
        leases = self._leases
        while leases.hand_out() is not None:
            chosen = leases.indices(leases.handed - 1)
            yield self._order[chosen.start : chosen.stop : chosen.step].tolist()


# --- What was seen ----------------------------------------------------------------------------------------------------


def _tried(setting: Setting, table: Mapping[int, ProbedRank], seconds: float, problem: str) -> TrialResult:
    """The loss of each group batch, the mean over the members, in the order of the samples."""
    losses: dict[int, list[float]] = {}
    for row in table.values():
        for batch in row.batches:
            losses.setdefault(batch.stop, []).append(batch.loss)
    stops = sorted(losses)
    means = [math.fsum(losses[stop]) / len(losses[stop]) for stop in stops]
    return TrialResult(setting, tuple(map(float, stops)), tuple(means), seconds, problem)


def _measured(
    groups: Sequence[tuple[int, ...]],
    table: Mapping[int, ProbedRank],
    period: int,
    nbytes: int,
    servers: tuple[int, bool],
) -> Measured | None:
    """The times of all ranks and groups; None if there are too few."""
    groups = [members for members in groups if members]
    if not all(row.batches and row.own for row in table.values()):
        return None
    leaders = [table[members[0]].batches for members in groups]
    steps, exchanges = (
        tuple(
            _without_first(np.diff([0.0, *(getattr(batch, name) for batch in batches)]).tolist()) for batches in leaders
        )
        for name in ("ended", "exchanged")
    )
    ranks = sorted(table)
    own = {rank: _without_first(table[rank].own) for rank in ranks}
    return Measured(
        groups=tuple(groups),
        samples=tuple(tuple(samples for samples, _ in own[rank]) for rank in ranks),
        own=tuple(tuple(max(seconds, 1e-9) for _, seconds in own[rank]) for rank in ranks),
        steps=steps,
        exchanges=exchanges,
        serve=table[ranks[0]].serve if len(groups) > 1 else 0.0,
        period=period if len(groups) > 1 else 1,
        nbytes=nbytes,
        hands_on=True,
        servers=servers[0] if len(groups) > 1 else 1,
        per_node=servers[1] and len(groups) > 1,
    )


_T = TypeVar("_T")


def _without_first(values: Sequence[_T]) -> tuple[_T, ...]:
    """Without the first, which begins with other things, if there are enough others."""
    return tuple(values[1:] if len(values) > 2 else values)


# --- Fits that can be probed ------------------------------------------------------------------------------------------


def probed_loader(trainer: Trainer, learns_from_run: bool = False) -> DataLoader[Any]:
    """The DataLoader whose data set probes train on, if there are any.

    Args:
        trainer: the Trainer.
        learns_from_run: whether the run is tuned by its own batches, and not by probes.

    Raises:
        ConfigurationError: this fit cannot be tuned so; the message says why.
    """
    if is_fast_dev_run(trainer):
        raise ConfigurationError("fast_dev_run trains too little")
    if not trainer.lightning_module.automatic_optimization:
        raise ConfigurationError("with manual optimization only training_step knows what a step is")
    if len(trainer.optimizers) != 1:
        raise ConfigurationError(f"it needs one optimizer, and there are {len(trainer.optimizers)}")
    if not learns_from_run and strategy_of(trainer).merged:
        raise ConfigurationError(
            f"merged={strategy_of(trainer).merged.name!r}: a merged head keeps weights at the server, and no probe is"
            " made with it; leave search= and data= at their defaults, or choose groups= yourself"
        )
    arguments_of(type(trainer.lightning_module).training_step)
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError("the training data are a stream, or come from several loaders")
    if loader.batch_size is None and getattr(loader.batch_sampler, "batch_size", None) is None:
        raise ConfigurationError("the DataLoader does not say how large its batches are")
    if not hasattr(loader, "leases"):
        for sampler, usual in ((loader.sampler, _SAMPLERS), (loader.batch_sampler, _BATCHES)):
            if type(sampler) not in usual:
                raise ConfigurationError(
                    f"a sampler of your own or of your loader ({type(sampler).__name__}) decides what is trained on,"
                    " and probes would not ask it"
                )
    return loader


_SAMPLERS, _BATCHES = (RandomSampler, SequentialSampler, DistributedSampler), (BatchSampler, type(None))


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Samples in one rank's batch."""
    return int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)
