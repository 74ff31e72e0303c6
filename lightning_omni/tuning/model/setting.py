"""Settings, and the scaling of their learning rates.

Rule 1: Settings are compared by samples, not updates: groups of different size make updates of different size.
Rule 2: Proportional batches have the sample efficiency of equal ones, because the gradient is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_omni.checks import counted
from lightning_omni.json_dataclasses import Serializable
from lightning_omni.methods import method_named

Array = np.ndarray[Any, Any]


# --- Settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Setting(Serializable):
    """A point of the search space.

    Attributes:
        momentum: explicit momentum (β1 of Adam and its variants); 0.0 if the optimizer has none.
        rebalance: whether a group's batch is split in proportion to the speeds of its ranks.
        further: names and values of user-defined dimensions, sorted.
        method: method without its period, as in ``OmniStrategy(method=...)``; empty for the run's own.
        wire: wire format, such as ``"int8"``, or ``"int8/bf16"`` for one each way; empty for the run's own.
        all_reduce: format as in ``Compression(all_reduce=...)``; empty for the run's own.

    Example:
        >>> str(Setting(groups=4, momentum=0.3, lr=0.025))
        '4 groups, momentum 0.3, lr 0.025'
        >>> str(Setting(4, 0.9, 0.1, period=8, method="local_sgd", wire="int8/bf16"))
        '4 groups, local_sgd, period 8, compression int8/bf16, momentum 0.9, lr 0.1'
    """

    groups: int
    momentum: float
    lr: float
    rebalance: bool = False
    period: int = 1
    further: tuple[tuple[str, Any], ...] = ()
    method: str = ""
    wire: str = ""
    overlap: bool = False
    all_reduce: str = ""

    @property
    def updates_per_batch(self) -> int:
        """Return `Method.updates_per_batch`, that of asynchronous SGD if no method is given."""
        if self.groups == 1:
            return 1
        return method_named(self.method).updates_per_batch(self.groups) if self.method else self.groups

    def further_value(self, name: str) -> Any:
        return dict(self.further)[name]

    def with_further(self, name: str, value: Any) -> Setting:
        return replace(self, further=tuple(sorted({**dict(self.further), name: value}.items())))

    @property
    def exchange(self) -> str:
        """Describe how gradients and weights travel; unspecified parts, fp32, period 1 and no overlap are left out."""
        return ", ".join([*self._named_method, *self._pace] if self.groups > 1 else self._averaged)

    @property
    def _named_method(self) -> list[str]:
        return [self.method] * (self.groups > 1 and bool(self.method))

    @property
    def _averaged(self) -> list[str]:
        return [f"all-reduce {self.all_reduce}"] * (self.all_reduce not in ("", "fp32"))

    @property
    def _pace(self) -> list[str]:
        several = self.groups > 1
        parts = [f"period {self.period}"] * (self.period > 1)
        parts += self._averaged
        parts += [f"compression {self.wire}"] * (several and self.wire not in ("", "fp32"))
        return parts + ["overlapped"] * (several and self.overlap)

    def __str__(self) -> str:
        parts = [counted(self.groups, "group"), *self._named_method]
        parts += ["proportional batches"] * self.rebalance + self._pace
        parts += [f"{name} {value}" for name, value in self.further]
        return ", ".join([*parts, f"momentum {self.momentum:.3g}", f"lr {self.lr:.3g}"])


@dataclass(frozen=True)
class Scaling:
    """A rule for learning rates that act alike at different numbers of groups and momenta.

    A group has a g-th of the batch, so each sample moves the weights equally if the rate is a g-th, too; momentum m
    multiplies the total effect of a gradient by 1 / (1 - m). The *step* of a setting is rate × g / (1 - m). Adaptive
    optimizers divide by the size of gradients, which cancels both; their step is rate × √g, as is usual.

    Example:
        >>> Scaling().step(Setting(groups=1, momentum=0.9, lr=0.1)), Scaling().lr(groups=4, momentum=0.6, step=1.0)
        (1.0, 0.1)
    """

    is_adaptive: bool = False

    def step(self, setting: Setting) -> float:
        return setting.lr / self.lr(setting.updates_per_batch, setting.momentum, 1.0)

    def lr(self, groups: int, momentum: float, step: float) -> float:
        """Return the learning rate for a `step`; ``groups`` counts those whose updates follow each other."""
        return step / math.sqrt(groups) if self.is_adaptive else round(step * (1 - momentum) / groups, 12)
