"""The cost and the savings of a merged head for a group, from measurements of a submodule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_omni.tuning.model.cost_model import CostModel
from lightning_omni.tuning.model.exchanging import ExchangePattern
from lightning_omni.tuning.model.measured import HeadMeasured
from lightning_omni.wire.activations import ActivationFormats
from lightning_omni.wire.formats.base import RAW, WireFormat
from lightning_omni.wire.layout import Layout, TensorSpec


@dataclass(frozen=True)
class HeadCost:
    """The cost to groups of one merged submodule.

    Args:
        head: measurements of the submodule.
        nbytes: bytes of all weights, the submodule's included, as float32.
        rows: samples of a group's batch.
        wire_format: wire format of the run, also of activations and their gradients.

    Example:
        A model of 1 MB has a head of 900 kB with 4 kB of activations per sample. Groups with 10 samples each push
        100 kB of gradients of weights, and 40 kB of activations:

        >>> cost = HeadCost(HeadMeasured(900_000, 4_000, 40, 0.001), nbytes=1_000_000, rows=10)
        >>> pattern = cost.added_to(ExchangePattern.of("async_sgd", nbytes=cost.body))
        >>> cost.body, pattern.push, pattern.pull
        (100000, 140000, 140000)
    """

    head: HeadMeasured
    nbytes: int
    rows: float
    wire_format: WireFormat = RAW

    @property
    def at_least(self) -> HeadCost:
        """Return a lower bound in any wire format: the cost if the head sent and computed nothing."""
        return replace(self, head=replace(self.head, inputs=0.0, outputs=0.0, seconds=0.0))

    @property
    def body(self) -> int:
        """Return the bytes of the weights that groups still exchange."""
        return max(0, self.nbytes - self.head.nbytes)

    def added_to(self, pattern: ExchangePattern) -> ExchangePattern:
        """Return a pattern for the body plus the activations that travel to the head in every step.

        The outputs of the head and their gradients travel while other groups wait: see `changed`.
        """
        both, steps = self._formats, pattern.period or 1
        push, pull = (round(steps * _nbytes(each, self.head.inputs * self.rows)) for each in both)
        return replace(pattern, push=(pattern.push or 0) + push, pull=(pattern.pull or 0) + pull)

    def changed(self, model: CostModel) -> CostModel:
        """Return the costs of groups with the merged head: they average the body, and access the head one at a time.

        A group has access from its forward pass to the end of its backward pass, so outputs and their gradients travel
        meanwhile. The compute time stays that without merging, a little too long.
        """
        travels = sum(_nbytes(each, self.head.outputs * self.rows) for each in self._formats)
        link, delay = float(model.link_per_byte[0]), float(model.delay[0])
        seconds = self.head.seconds + (link * travels + 2 * delay) / self.rows
        return replace(model.averaging(self.body / self.nbytes), head_per_sample=seconds)

    @property
    def _formats(self) -> ActivationFormats:
        return ActivationFormats.of(self.wire_format)


def _nbytes(wire_format: WireFormat, nbytes: float) -> int:
    """Return the bytes on the wire of ``nbytes`` bytes of float32."""
    return wire_format.sizes(Layout((TensorSpec("activations", (-(-round(nbytes) // 4),), "float32"),)))[1]
