"""What a merged head costs a group, and what it spares: from what was measured of a submodule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_omni.performance.cost_model import CostModel
from lightning_omni.performance.exchanging import ExchangePattern
from lightning_omni.performance.measured import HeadMeasured
from lightning_omni.protocol.activations import Both
from lightning_omni.protocol.layout import Layout, TensorSpec
from lightning_omni.protocol.wire_format import RAW, WireFormat


@dataclass(frozen=True)
class HeadCost:
    """Of groups that have one submodule merged.

    Args:
        head: what was measured of it.
        nbytes: of all weights, its own included, as float32.
        rows: samples of a group's batch.
        wire_format: of the run, in which activations and gradients travel, too.

    Example:
        A head of 900 kB with 4 kB of activations, of a model of 1 MB; groups with 10 samples each push 100 kB of
        weights' gradients, and 40 kB of activations:

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
        """What it would cost if nothing had to be sent or computed for it, whatever the wire format."""
        return replace(self, head=replace(self.head, inputs=0.0, outputs=0.0, seconds=0.0))

    @property
    def body(self) -> int:
        """Bytes of the weights that groups exchange all the same."""
        return max(0, self.nbytes - self.head.nbytes)

    def added_to(self, pattern: ExchangePattern) -> ExchangePattern:
        """How groups exchange that push the body so, with the activations that go to the head in every step.

        What comes out of it, and the gradient of that, travel while other groups wait: see `changed`.
        """
        both, steps = self._formats, pattern.period or 1
        push, pull = (round(steps * _nbytes(each, self.head.inputs * self.rows)) for each in both)
        return replace(pattern, push=(pattern.push or 0) + push, pull=(pattern.pull or 0) + pull)

    def changed(self, model: CostModel) -> CostModel:
        """The costs of such groups: their members average the body, and no two groups have access at once.

        A group has access from its forward pass to the end of its backward pass; so outputs and their gradients travel
        meanwhile. Members compute as long as without it, which is a little longer than they will.
        """
        travels = sum(_nbytes(each, self.head.outputs * self.rows) for each in self._formats)
        link, delay = float(model.link_per_byte[0]), float(model.delay[0])
        seconds = self.head.seconds + (link * travels + 2 * delay) / self.rows
        return replace(model.averaging(self.body / self.nbytes), head_per_sample=seconds)

    @property
    def _formats(self) -> Both:
        return Both.of(self.wire_format)


def _nbytes(wire_format: WireFormat, nbytes: float) -> int:
    """Of so many bytes of float32 as they travel."""
    return wire_format.sizes(Layout((TensorSpec("activations", (-(-round(nbytes) // 4),), "float32"),)))[1]
