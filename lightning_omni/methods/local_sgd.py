"""Local SGD."""

from __future__ import annotations

from lightning_omni.checks import check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.contract import Push, Total
from lightning_omni.methods.model.replica import Replica
from lightning_omni.methods.overlap import PacedBarrier, Streaming


class _Mean(PacedBarrier):
    def merge(self, total: Total, last: Push) -> None:
        self.master.overwrite(total.means(), last.fragment)  # a group may lack parameters that were added mid-run


class LocalSGD(Streaming, frozen=True, kw_only=True, tag="local_sgd"):
    r"""Local SGD and post-local SGD: parameter averaging at a barrier.

    .. math:: x_i \leftarrow \mathrm{step}(x_i, g_i) \quad\text{at every step}, \qquad
        x_i \leftarrow \tfrac1p \sum_j x_j \quad\text{at every } H\text{-th}

    for p groups. The user's optimizer runs at the worker, and its state is not averaged.

    Args:
        period: H, local steps between two averages of a weight.
        warmup_steps: initial steps with an average after each (post-local SGD).
        fragments: P, fragments that are averaged one by one, every H/P steps; P divides H.
        delay: steps that a group makes while an average travels, fewer than H/P; 0 waits. Runs refuse any but 0.
        alpha: part of its own weights that a group keeps at an average, from 0 to less than 1.
        keep_steps: whether the group adds the change of the ``delay`` steps to the average; needs some, and no
            ``alpha``.
        dynamic_steps: whether slow groups make fewer steps, in proportion to their speed.

    Raises:
        ConfigurationError: arguments are out of range, or do not go together.

    Example:
        >>> LocalSGD(period=8, fragments=4)
        LocalSGD(period=8, fragments=4, delay=0, alpha=0.0, keep_steps=False, dynamic_steps=False, warmup_steps=0)

    References:
        Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767;
        Lin et al. 2020, "Don't Use Large Mini-batches, Use Local SGD", arXiv:1808.07217 (post-local);
        Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv:2501.18512 (fragments,
        delay and alpha).
    """

    side = _Mean
    evaluated = "mean"
    pushes_weights = True

    period: int = 4
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("warmup_steps", self.warmup_steps, "a number of steps, 0 for none")
        if self.warmup_steps and (self.fragments > 1 or self.delay or self.alpha or self.dynamic_steps):
            raise ConfigurationError(
                f"warmup_steps={self.warmup_steps} with fragments=, delay=, alpha= or dynamic_steps=: in the warm-up"
                " all weights are averaged at every step; leave either out"
            )

    def steps_between(self, replica: Replica) -> int:
        # In the warm-up every step is averaged, so the clock counts the steps.
        return 1 if replica.clock < self.warmup_steps else super().steps_between(replica)
