"""The shards of a run by the number of their optimizer: those that groups push to, and merged heads."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_omni.errors import ProtocolError
from lightning_omni.server.merged_head.head import HeadShard
from lightning_omni.server.served_optimizer import Shard
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats import base as wire_format


class HeldShards:
    """The shards that the server holds; none before the recorder has uploaded the weights.

    Attributes:
        all: every shard, in the order of the optimizers.
        pushed: number and shard of those that groups push to.
        heads: number and shard of the merged heads, to which no group pushes.
    """

    def __init__(self) -> None:
        self.hold(())

    def hold(self, shards: Sequence[Shard]) -> None:
        """Replace the run's shards."""
        self.all = list(shards)
        self.pushed = [(number, shard) for number, shard in enumerate(shards) if not shard.is_head]
        self.heads = [(number, shard) for number, shard in enumerate(shards) if isinstance(shard, HeadShard)]

    def answer_as(self, formed: m.Form) -> None:
        """Set the encoding of answers to pushes, as agreed when groups were formed."""
        answers = wire_format.from_wire(formed.wire_format).answers
        for _, shard in self.pushed:
            shard.answer_in(answers, formed.overlap)

    @property
    def clock(self) -> int:
        """Return the updates so far, over all optimizers. Those of a merged head belong to updates of the body."""
        return sum([shard.master.clock for _, shard in self.pushed])

    def shard(self, optimizer: int) -> Shard:
        """Return the shard of an optimizer.

        Raises:
            ProtocolError: no optimizer has this number.
        """
        if not 0 <= optimizer < len(self.all):
            raise ProtocolError(f"there is no optimizer {optimizer}; the server holds {len(self.all)}")
        return self.all[optimizer]

    def head(self, optimizer: int) -> HeadShard:
        """Return the merged head of an optimizer.

        Raises:
            ProtocolError: the optimizer does not exist, or is no merged head.
        """
        shard = self.shard(optimizer)
        if not isinstance(shard, HeadShard):
            raise ProtocolError(f"optimizer {optimizer} is no merged head")
        return shard
