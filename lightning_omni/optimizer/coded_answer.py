"""An answer of the servers as it travels: handed on by a leader to its group, and decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from lightning_omni.optimizer.model_replica import Part
from lightning_omni.protocol.split import Split
from lightning_omni.protocol.wire_format import WireFormat, decode


@dataclass(frozen=True)
class CodedAnswer:
    """Tensors that a leader hands on to its group as they came, so that they cross its links in as few bytes.

    Attributes:
        answers: how they became bytes.
        split: how they are divided over the servers.
    """

    answers: WireFormat
    split: Split

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return [self.answers.sizes(share) for share in self.split.shares]

    @property
    def are_sizes_known(self) -> bool:
        """Whether they are before the tensors come."""
        return all(smallest == largest for smallest, largest in self._bounds)

    @cached_property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(_aligned(largest) for _, largest in self._bounds)

    def parts(self, coded: Tensor) -> list[Tensor]:
        """What each server has sent, in memory of so many bytes."""
        places = accumulate((_aligned(largest) for _, largest in self._bounds), initial=0)
        return [coded[place : place + largest] for place, (_, largest) in zip(places, self._bounds, strict=False)]

    def decode(self, coded: Tensor, into: Tensor, part: Part) -> None:
        """The tensors, in flat memory as the layout has it."""
        self.split.write(into, decoded(self.answers, self.parts(coded), self.split, part))


def _aligned(nbytes: int) -> int:
    """So many bytes or a few more, so that numbers of any kind may follow."""
    return -(-nbytes // 8) * 8


def decoded(answers: WireFormat, payloads: Sequence[Tensor], split: Split, part: Part) -> list[Tensor]:
    """The tensors of each server's part, as its share of the layout has them."""
    shares = zip(payloads, split.shares, part.backs(len(payloads)), strict=True)
    return [decode(answers, payload, share, memory) for payload, share, memory in shares]
