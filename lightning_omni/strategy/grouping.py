"""What Lightning's hooks do where all ranks are one group, and where there are several.

One group is DistributedDataParallel as Lightning has it: `OneGroup` leaves the hooks alone. The strategy asks its
`grouping` for what differs, and does itself what does not; the same seam runs through the world, as its executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_omni.errors import UnsupportedError
from lightning_omni.strategy import _private
from lightning_omni.strategy.contract import Strategy

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Grouping(ABC):
    """What the strategy does in one way of training together.

    Args:
        strategy: whose hooks.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @abstractmethod
    def check(self, trainer: Trainer) -> None:
        """Raises `UnsupportedError` for what cannot be done so in this fit."""

    @abstractmethod
    def is_reduced(self) -> bool:
        """Whether the module is wrapped into DistributedDataParallel."""

    @abstractmethod
    def not_reduced(self) -> list[Parameter]:
        """Parameters whose gradients are none of DistributedDataParallel's, though they are trained."""

    @abstractmethod
    def stepped(self, optimizer: Optimizer) -> Optimizer:
        """What the precision plugin is to step in the place of an optimizer of the user's."""

    @abstractmethod
    def guard(self) -> None:
        """The groups stand."""

    @abstractmethod
    def batch_starts(self) -> None:
        """After the last callback, and before the forward pass."""

    @abstractmethod
    def begin_batch(self) -> None:
        """A batch begins."""

    @abstractmethod
    def agree(self, decision: bool, every: bool) -> bool | None:
        """Whether all ranks of the default process group decide so, or any; None leaves it to Lightning."""

    @property
    @abstractmethod
    def sentence(self) -> str:
        """What people are told when the groups stand."""


class OneGroup(Grouping):
    """All ranks are one group."""

    @override
    def check(self, trainer: Trainer) -> None:
        pass

    @override
    def is_reduced(self) -> bool:
        return True  # a single rank, too, as under DDPStrategy

    @override
    def not_reduced(self) -> list[Parameter]:
        return []

    @override
    def stepped(self, optimizer: Optimizer) -> Optimizer:
        self._strategy.joined.steps += 1
        return optimizer

    @override
    def guard(self) -> None:
        pass

    @override
    def batch_starts(self) -> None:
        if self._strategy.joined.size > 1:
            self._strategy.trainable.warn_of_late(self._strategy.optimizers)

    @override
    def begin_batch(self) -> None:
        pass

    @override
    def agree(self, decision: bool, every: bool) -> bool | None:
        return None

    @property
    @override
    def sentence(self) -> str:
        return (
            f"{self._strategy.joined.size} ranks in 1 group, which is DistributedDataParallel: no parameter server, no"
            " staleness. Pass groups= for asynchronous groups"
        )


class SeveralGroups(Grouping):
    """Groups train apart and exchange."""

    @override
    def check(self, trainer: Trainer) -> None:
        strategy = self._strategy
        if _private.validates_by_time(trainer):
            raise UnsupportedError(
                "val_check_interval as a duration: groups would come to validation at different times and wait for each"
                " other; pass a number of batches or a fraction of the epoch"
            )
        if trainer.min_steps:
            raise UnsupportedError(
                "min_steps: groups count their own steps, and would disagree on when they may stop; use min_epochs"
            )
        if _private.averages_models(strategy):
            raise UnsupportedError("model_averaging_period averages over all ranks; use it with groups=1 only")
        if strategy.ddp_options.get("process_group") is not None:
            raise UnsupportedError(
                "process_group= is that of each compute group where there are several; leave it out, or use groups=1"
            )
        strategy.merged.check(trainer)

    @override
    def is_reduced(self) -> bool:
        return len(self._strategy.joined.members) > 1

    @override
    def not_reduced(self) -> list[Parameter]:
        return self._strategy.merged.parameters(self._strategy.fitted)

    @override
    def stepped(self, optimizer: Optimizer) -> Optimizer:
        strategy = self._strategy
        if len(strategy.joined.members) > 1:
            strategy.trainable.check_in_step()
        return strategy.proxies.of(optimizer) if optimizer.param_groups else optimizer

    @override
    def guard(self) -> None:
        self._strategy.proxies.guard(self._strategy.real_optimizers)

    @override
    def batch_starts(self) -> None:
        strategy, world = self._strategy, self._strategy.joined
        with torch.no_grad():
            world.structures.follow_all()
        if len(world.members) > 1 and strategy.trainable.has_changed(strategy.optimizers):
            strategy.wrap_for_group()

    @override
    def begin_batch(self) -> None:
        merged = self._strategy.merged
        merged.check(self._strategy.fitted.trainer)  # once more: accumulation, for one, may have a schedule
        merged.step_done()  # what callbacks did with it since the last step

    @override
    def agree(self, decision: bool, every: bool) -> bool | None:
        votes = torch.tensor(int(decision), device=self._strategy.joined.device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if every else bool(votes)

    @property
    @override
    def sentence(self) -> str:
        world = self._strategy.joined
        sizes = sorted({len(members) for members in world.topology.groups if members})
        data = "dynamic" if self._strategy.epochs.is_dynamic else "static"
        return (
            f"{len(world.topology.ranks)} ranks in {len(world.topology.alive)} groups of"
            f" {' or '.join(map(str, sizes))} | method {type(world.method).__name__} | server {world.server_address} |"
            f" data {data}"
        )
