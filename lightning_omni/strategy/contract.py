"""What the strategy's parts may ask of the strategy that puts them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_omni.metrics import RunReport
from lightning_omni.optimizer import World
from lightning_omni.optimizer.balance import Balance
from lightning_omni.strategy.epochs import EpochDriver
from lightning_omni.strategy.merged import Merged
from lightning_omni.strategy.proxies import Proxies
from lightning_omni.strategy.trainable import Trainable
from lightning_omni.strategy.watch import Stopwatch

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule


class Strategy(Protocol):
    """An `OmniStrategy` in a fit.

    Attributes:
        epochs: takes the training loop through the epochs.
        balance: measures ranks and splits their groups' batches.
        stopwatch: times batches.
        trainable: what was trainable when the module was wrapped.
        merged: the submodule that stays at the server.
        proxies: what steps in the place of the user's optimizers.
        ddp_options: DDPStrategy's own arguments, as the user gave them.
    """

    epochs: EpochDriver
    balance: Balance
    stopwatch: Stopwatch
    trainable: Trainable
    merged: Merged
    proxies: Proxies
    ddp_options: dict[str, Any]

    @property
    def joined(self) -> World:
        """This rank's place among all ranks."""

    @property
    def last_report(self) -> RunReport | None:
        """The run in numbers, if there was one."""

    def remember_report(self, report: RunReport) -> None:
        """The run was in other processes: what they say of it."""

    @property
    def fitted(self) -> LightningModule:
        """The LightningModule, which knows its Trainer."""

    @property
    def real_optimizers(self) -> list[Optimizer]:
        """The user's optimizers that hold anything."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """All optimizers, as Lightning has them."""

    def buffers(self) -> Iterator[Tensor]:
        """The module's buffers."""

    def attach_optimizers(self) -> None:
        """The world takes the optimizers in, as they are now."""

    def form(self, groups: int, speeds: Mapping[int, float] | None = None) -> None:
        """Forms other groups."""

    def wrap_for_group(self) -> None:
        """Wraps the module over the compute group."""

    def begin_batch(self) -> None:
        """A batch begins."""

    def end_batch(self) -> None:
        """A batch has ended."""

    def rank_zero_info(self, message: str) -> None:
        """Says something to people, on rank 0."""
