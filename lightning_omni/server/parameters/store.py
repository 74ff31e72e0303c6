"""The optimizers of a run, by number, with their master weights: those that groups push to, and merged heads."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_omni.errors import ProtocolError
from lightning_omni.server.parameters.served_head import ServedHead
from lightning_omni.server.parameters.served_optimizer import ServedOptimizer
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import from_wire


class ParameterStore:
    """The optimizers that the server holds; none before the recorder has uploaded the weights.

    Attributes:
        all: every optimizer, in the order of their numbers.
        pushed: number and optimizer, of those that groups push to.
        heads: number and optimizer, of the merged heads, to which no group pushes.
    """

    def __init__(self) -> None:
        self.hold(())

    def hold(self, optimizers: Sequence[ServedOptimizer]) -> None:
        """Replace the run's optimizers."""
        self.all = list(optimizers)
        self.pushed = [(number, optimizer) for number, optimizer in enumerate(optimizers) if not optimizer.is_head]
        self.heads = [
            (number, optimizer) for number, optimizer in enumerate(optimizers) if isinstance(optimizer, ServedHead)
        ]

    def answer_as(self, formed: m.FormGroups) -> None:
        """Set the encoding of answers to pushes, as agreed when groups were formed."""
        answers = from_wire(formed.wire_format).answers
        for _, optimizer in self.pushed:
            optimizer.answer_in(answers)

    @property
    def clock(self) -> int:
        """Return the updates so far, over all optimizers. Those of a merged head belong to updates of the body."""
        return sum([optimizer.master.clock for _, optimizer in self.pushed])

    def optimizer(self, number: int) -> ServedOptimizer:
        """Return the optimizer of a number.

        Raises:
            ProtocolError: no optimizer has this number.
        """
        if not 0 <= number < len(self.all):
            raise ProtocolError(f"there is no optimizer {number}; the server holds {len(self.all)}")
        return self.all[number]

    def head(self, number: int) -> ServedHead:
        """Return the merged head of a number.

        Raises:
            ProtocolError: the optimizer does not exist, or is no merged head.
        """
        optimizer = self.optimizer(number)
        if not isinstance(optimizer, ServedHead):
            raise ProtocolError(f"optimizer {number} is no merged head")
        return optimizer
