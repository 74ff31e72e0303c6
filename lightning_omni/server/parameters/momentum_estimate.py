r"""Estimation of the total momentum at the server, through which every push and every update of the weights passes.

YellowFin's closed loop estimates momentum from two steps and the gradient between them, as the median over coordinates:

.. math::

    \hat m = \operatorname{median} \frac{x_{t+1} - x_t + \eta g(x_t)}{x_t - x_{t-1}}

In a synchronous run this equals the momentum up to rounding. With asynchrony it misses that the gradient acts with only
1 - u of the learning rate, u being the implicit momentum (Theorem 3), and where the weights drift steadily it equals
the explicit momentum. If the explicit momentum m is known, the total t of 1 - t = (1 - m)(1 - u) has steps D' = t D -
(1 - t) η g / (1 - m), and therefore

.. math::

    \hat t = \operatorname{median} \frac{D' + \kappa \eta g}{D + \kappa \eta g}, \quad \kappa = \frac{1}{1 - m}

which is the estimate here. Numerators and denominators are averaged over the last pushes, then divided, then the median
is taken; coordinates with a denominator of 0 are left out.

The estimate holds for plain SGD steps, x' = x - η v and v' = m v + g, without Nesterov's look-ahead, dampening or
scaling by coordinate, with weight decay inside the gradient, and with η and m that change slowly compared with
`MEMORY`. Gradient noise does not disturb it in a synchronous run. In an asynchronous run, noise pulls it towards the
middle between m and 1, more so if the gradient changes less within the staleness, and less with a longer memory. A
constant delay of s updates also yields 1 - 1 / (1 + s):
`lightning_omni.tuning.callback.hyperparameters.implicit_momentum` reports whether staleness is random.

The cost must be negligible, so the watched coordinates are gathered from flat buffers in one call.

Rule 1: the estimate only reads. It does not change weights, gradients or the optimizer.
Rule 2: the momentum is unknown if the optimizer is not plain SGD, or the weights changed by other means.

References:
    Zhang and Mitliagkas 2019, "YellowFin and the Art of Momentum Tuning", section 4;
    Mitliagkas et al. 2016, "Asynchrony begets Momentum", Theorems 3 and 6.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_omni.methods.model.server_optimizer import Master
from lightning_omni.wire.layout import DTYPES, Layout

RUNS, RUN = 32, 8
"""Number of watched runs of adjacent weights, and their length. Each costs about a cache line."""
MEMORY = 200
"""Memory of the averages, in pushes."""
KEEP = 1 - 1 / MEMORY
"""Factor by which each push decays the averages."""
FEWEST = 100
"""The fewest pushes for an estimate."""
LONGEST = 64
"""Staleness in updates up to which all pushes are counted; most staler ones are skipped."""
BATCH = 64
"""Number of pushes, or updates, that are counted together; at the push itself, numbers are only copied."""

_Settings = tuple[float, float, float]


# --- The arithmetic --------------------------------------------------------------------------------------------------


def averaged(averages: Tensor, terms: Tensor, keep: float) -> Tensor:
    """Return ``keep * averages + terms``, both of shape (2, coordinates): numerators and denominators.

    A coordinate that is not finite adds nothing, because its average would stay so.
    """
    if not math.isfinite(float(terms.sum())):
        terms = torch.where(terms.isfinite().all(0), terms, 0.0)
    return torch.add(terms, averages, alpha=keep)


def median_ratio(averages: Tensor) -> Tensor:
    """Return the median over the coordinates of numerator by denominator; NaN if all denominators are 0."""
    above, below = averages[:, averages[1] != 0]
    return (above / below).median() if len(below) else averages.new_tensor(math.nan)


# --- At the server ---------------------------------------------------------------------------------------------------


class MomentumEstimator:
    """The estimator of one optimizer's total momentum.

    Each push counts by itself: its gradient against the step that the weights made right after the weights that it was
    computed from. So the estimate does not depend on how a method merges pushes into updates.

    Args:
        master: the weights and their optimizer.
        layout: layout of the weights and of pushes.
        buffer: the weights in this layout.
    """

    def __init__(self, master: Master, layout: Layout, buffer: Tensor) -> None:
        self._master, self._layout, self._buffer = master, layout, buffer
        self._present: tuple[bool, ...] | None = None
        self._settings: tuple[_Settings, ...] | None = None
        self._count = 0
        self.forget()

    @classmethod
    def of(cls, master: Master, layout: Layout, buffer: Tensor) -> MomentumEstimator | None:
        """Return an estimator; None unless the optimizer is torch's own SGD."""
        return cls(master, layout, buffer) if type(master.optimizer) is torch.optim.SGD else None

    def before(self, read_at: int, present: Sequence[bool], payload: Tensor) -> None:
        """Copy the watched coordinates of a push that is about to be merged.

        Args:
            read_at: clock of the weights that it was computed from.
            present: one flag for each parameter.
            payload: the present tensors, in their layout.
        """
        if self._present is None and not self._draw(present):
            return
        self._read_weights()  # the last update may have had no push: a group left others that waited for it
        if read_at <= self._first:
            return
        if len(self._reads) == BATCH:
            self._fold()
        if self._present != present:
            self._locate(present)
        noted = self._pushed_rows[len(self._reads)]
        numbers = self._typed(payload)
        if len(numbers):
            torch.index_select(numbers, 0, self._places, out=noted)
        if self._absent is not None:
            noted.masked_fill_(self._absent, 0.0)
        self._reads.append(read_at)

    def after(self) -> None:
        """Copy the learning rate and the weights after the push was merged."""
        if self._present is None:
            return
        assert self._master.optimizer is not None
        lr = self._master.optimizer.param_groups[0]["lr"]
        self._rates += [lr if isinstance(lr, (int, float)) else math.nan] * (len(self._reads) - len(self._rates))
        self._read_weights()

    def grow(self, layout: Layout, buffer: Tensor) -> None:
        """Continue with the same coordinates in another buffer, after parameters were added at its end."""
        self._layout, self._buffer = layout, buffer
        if self._present is not None:
            self._present = ()  # so that the next push locates them again
            self._weights = self._typed(buffer)

    def rearrange(self) -> None:
        self._settings = None  # parameters are in other groups

    def forget(self) -> None:
        """Drop the copied weights and pushes, because the weights changed by other means than an update."""
        self._first = self._master.clock  # clock of the first copied weights
        self._rows = 0  # number of copied weights
        self._reads: list[int] = []
        self._rates: list[float] = []

    @property
    def averages(self) -> Tensor | None:
        """Return the argument of `median_ratio`; None before there are enough pushes."""
        if self._present is not None:
            self._fold()
        return self._averages if self._count >= FEWEST else None

    # --- Choice of coordinates ---------------------------------------------------------------------------------------

    def _draw(self, present: Sequence[bool]) -> bool:
        """Choose coordinates among parameters with gradients, because most may be frozen; return False without any."""
        specs = self._layout.specs
        sizes: dict[torch.dtype, int] = {}
        for spec, there in zip(specs, present, strict=True):
            if there and DTYPES[spec.dtype].is_floating_point:
                sizes[DTYPES[spec.dtype]] = sizes.get(DTYPES[spec.dtype], 0) + spec.nbytes
        if not any(sizes.values()):
            return False
        kind = max(sizes, key=lambda dtype: sizes[dtype])
        counts = [
            spec.nbytes // kind.itemsize if there and DTYPES[spec.dtype] == kind else 0
            for spec, there in zip(specs, present, strict=True)
        ]
        ends = torch.tensor(counts).cumsum(0)
        runs = -(-sum(counts) // RUN)
        starts = sorted(random.Random(0).sample(range(runs), min(RUNS, runs)))
        chosen = (RUN * torch.tensor(starts)[:, None] + torch.arange(RUN)).flatten()
        chosen = chosen[chosen < ends[-1]]
        self._kind = kind
        self._homes = torch.searchsorted(ends, chosen, right=True)
        self._within = chosen - (ends - torch.tensor(counts))[self._homes]
        self._locate((True,) * len(specs))
        self._weights, self._weight_places = self._typed(self._buffer), self._places
        self._seen = torch.zeros(LONGEST + 2 + BATCH, len(chosen), dtype=kind)
        self._pushed = torch.zeros(BATCH, len(chosen), dtype=kind)
        self._seen_rows, self._pushed_rows = self._seen.unbind(), self._pushed.unbind()
        self._averages = torch.zeros(2, len(chosen), dtype=torch.float64)
        return True

    def _locate(self, present: Sequence[bool]) -> None:
        """Locate the coordinates in a payload of the present parameters; the gradients of the others count as 0."""
        offsets = iter(self._layout.subset(present).offsets)
        starts = torch.tensor([next(offsets) // self._kind.itemsize if there else -1 for there in present])[self._homes]
        self._places = torch.where(starts < 0, 0, starts + self._within)
        self._absent = None if all(present) else starts < 0
        self._present = tuple(present)

    def _typed(self, buffer: Tensor) -> Tensor:
        rest = buffer.numel() % self._kind.itemsize
        return (buffer[:-rest] if rest else buffer).view(self._kind)

    # --- Averages ----------------------------------------------------------------------------------------------------

    def _read_weights(self) -> None:
        """Copy the watched weights if there was an update."""
        clock = self._master.clock
        if self._rows and clock == self._first + self._rows - 1:
            return
        if clock != self._first + self._rows:
            self.forget()
        if self._rows == len(self._seen):
            self._fold()
            self._seen[: LONGEST + 2] = self._seen[-(LONGEST + 2) :].clone()
            self._first, self._rows = self._first + BATCH, LONGEST + 2
        torch.index_select(self._weights, 0, self._weight_places, out=self._seen_rows[self._rows])
        self._rows += 1

    def _fold(self) -> None:
        """Count all copied pushes, except those that wait for their update."""
        newest = self._first + self._rows - 1
        known = [place for place, read_at in enumerate(self._reads[: len(self._rates)]) if read_at < newest]
        if known and self._learn_rates():
            self._averages = averaged(self._averages, self._terms(known), KEEP ** len(known))
            self._count += len(known)
        waiting = sorted(set(range(len(self._reads))) - set(known))
        if len(waiting) == BATCH:
            waiting = []
        if waiting:
            self._pushed[: len(waiting)] = self._pushed[waiting]
        self._rates = [self._rates[place] for place in waiting if place < len(self._rates)]
        self._reads = [self._reads[place] for place in waiting]

    def _terms(self, known: list[int]) -> Tensor:
        """Return the numerators D' + κ lr g and denominators D + κ lr g, summed over pushes; later ones weigh more."""
        above, below, decaying = [0.0] * self._rows, [0.0] * self._rows, [0.0] * self._rows
        acting, weight = [0.0] * len(self._reads), 1.0
        for place in reversed(known):
            at = self._reads[place] - self._first
            above[at + 1] += weight
            above[at] -= weight
            below[at] += weight
            below[at - 1] -= weight
            acting[place] = weight * self._rates[place]
            decaying[at] += acting[place]
            weight *= KEEP
        seen = self._seen[: self._rows].double()
        pushed = torch.tensor([acting], dtype=torch.float64) @ self._pushed[: len(acting)].double()
        if self._decays:
            pushed += self._decay * (torch.tensor([decaying], dtype=torch.float64) @ seen)
        return torch.tensor([above, below], dtype=torch.float64) @ seen + self._scale * pushed

    def _learn_rates(self) -> bool:
        """Read how strongly gradients act on each coordinate; return False unless the steps are plain.

        The unit is the learning rate of the first parameter group, which a method may scale with each push; in this
        unit the factor is lr / (1 - m). Weight decay is part of the gradient at the weights that it was computed from.
        """
        assert self._master.optimizer is not None
        groups = self._master.optimizer.param_groups
        settings = tuple(known for group in groups if (known := _plain_steps(group)) is not None)
        if len(settings) < len(groups):
            self._averages.zero_()
            self._count = 0
            return False
        unit = settings[0][0]
        if settings != self._settings and unit:
            self._settings = settings
            of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
            every = self._master.parameters.values()
            numbers = torch.tensor([of.get(id(parameter), 0) for parameter in every])[self._homes]
            table = [(lr / unit / (1 - m), decay) for lr, m, decay in settings]
            self._scale, self._decay = torch.tensor(table, dtype=torch.float64)[numbers].unbind(1)
            self._decays = any(decay for _, _, decay in settings)
        return unit > 0


def total_momentum(estimators: Iterable[MomentumEstimator | None]) -> float | None:
    """Return the total momentum, the median over all watched coordinates; None while it is unknown."""
    known = [each.averages for each in estimators if each is not None]
    parts = [averages for averages in known if averages is not None]
    reading = float(median_ratio(torch.cat(parts, dim=1))) if parts else math.nan
    return reading if math.isfinite(reading) else None


def _plain_steps(group: Mapping[str, Any]) -> _Settings | None:
    """Return learning rate, momentum and weight decay; None unless the steps are x' = x - lr v, v' = m v + g."""
    settings = (group["lr"], group["momentum"], group["weight_decay"])
    if group["nesterov"] or group["dampening"] or group["maximize"]:
        return None
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in settings):
        return None
    return settings if settings[0] >= 0 and 0 <= settings[1] < 1 else None
