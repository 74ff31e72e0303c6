"""Metrics of a run: staleness as a torchmetrics metric, and the summary of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.filesize import decimal
from torch import Tensor
from torchmetrics import Metric

from lightning_omni.checks import counted


class Staleness(Metric):
    """A torchmetrics metric: mean, spread and largest value of gradients' staleness.

    Staleness counts the updates that the server made between a gradient's read of the weights and its application.
    `compute` returns ``{"mean", "std", "max", "count"}``, over all ranks that participate in the sync.

    Example:
        >>> staleness = Staleness()
        >>> for value in (0, 1, 3, 0):
        ...     staleness.update(value)
        >>> {name: round(float(value), 2) for name, value in staleness.compute().items()}
        {'mean': 1.0, 'std': 1.22, 'max': 3.0, 'count': 4.0}
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    count: Tensor
    total: Tensor
    squares: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "total", "squares"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("largest", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def update(self, staleness: int | Tensor) -> None:
        """Add one value, or a tensor of them, in updates."""
        values = torch.as_tensor(staleness, dtype=torch.float64, device=self.count.device).flatten()
        if not values.numel():
            return
        self.count += values.numel()
        self.total += values.sum()
        self.squares += values.square().sum()
        self.largest = torch.maximum(self.largest, values.max())

    def compute(self) -> dict[str, Tensor]:
        """Return mean, standard deviation, largest value and number of values; zeros without values."""
        seen = torch.clamp(self.count, min=1)
        mean = self.total / seen
        spread = (self.squares / seen - mean.square()).clamp(min=0).sqrt()
        return {"mean": mean, "std": spread, "max": self.largest, "count": self.count}


@dataclass(frozen=True)
class RunReport:
    """The statistics of a run, as `OmniStrategy.report` returns them.

    Attributes:
        updates: updates of the weights, over all groups and optimizers.
        staleness_mean: mean staleness of the applied gradients, in updates.
        groups: compute groups now, or at the end of the run.
        group_size: ranks in the largest of them.
        refused: pushes, and own weights for a mean, that were not finite, or declined.
        bytes_per_step: bytes of tensors that this rank exchanged for its group with the server, in both directions, per
            batch; with gossip, those that it sent to other groups and read from them.
        head_time: recent seconds of one exclusive access to the merged head; 0 if there is none.
        serve_time: recent seconds of the server itself for one push; 0 if there are none.
    """

    updates: int
    staleness_mean: float
    staleness_max: int
    groups: int
    group_size: int
    refused: int = 0
    ranks_lost: tuple[int, ...] = ()
    bytes_per_step: float = 0.0
    head_time: float = 0.0
    serve_time: float = 0.0

    def __str__(self) -> str:
        """Format the report, rounded. Print it on one rank: ``if trainer.is_global_zero: print(strategy.report())``.

        Example:
            >>> print(RunReport(1024, 0.98123, 4, 2, 2, serve_time=0.00021))
            1,024 updates, 2 groups of up to 2 ranks; staleness 0.98, at most 4; 0.21 ms a push
            >>> print(RunReport(128, 0.5, 2, 2, 2, bytes_per_step=2_240_123.4))
            128 updates, 2 groups of up to 2 ranks; staleness 0.5, at most 2; 2.2 MB exchanged a step
        """
        groups = f"{counted(self.groups, 'group')} of up to {counted(self.group_size, 'rank')}"
        parts = [f"{self.updates:,} updates, {groups}"]
        if self.groups > 1:
            parts.append(f"staleness {self.staleness_mean:.2g}, at most {self.staleness_max}")
        costs = [f"{decimal(round(self.bytes_per_step))} exchanged a step"] if self.bytes_per_step else []
        costs += [f"{1000 * self.serve_time:.2g} ms a push"] if self.serve_time else []
        costs += [f"{1000 * self.head_time:.2g} ms at the head"] if self.head_time else []
        parts += [", ".join(costs)] if costs else []
        parts += [f"{self.refused} pushes refused"] if self.refused else []
        parts += [f"ranks lost: {', '.join(map(str, self.ranks_lost))}"] if self.ranks_lost else []
        return "; ".join(parts)
