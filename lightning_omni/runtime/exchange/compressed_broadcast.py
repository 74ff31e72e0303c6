"""An encoded answer of the servers, which a leader broadcasts to its group before they decode it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from lightning_omni.runtime.model.replica import Part
from lightning_omni.wire.formats.base import WireFormat, decode
from lightning_omni.wire.partition import Split


@dataclass(frozen=True)
class CodedAnswer:
    """An answer that a leader broadcasts to its group as received, so that it crosses the group's links in few bytes.

    Attributes:
        answers: wire format of the answer.
        split: division of its tensors over the servers.
    """

    answers: WireFormat
    split: Split

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return [self.answers.sizes(share) for share in self.split.shares]

    @property
    def are_sizes_known(self) -> bool:
        """Return whether the encoded sizes are known before the answer arrives."""
        return all(smallest == largest for smallest, largest in self._bounds)

    @cached_property
    def nbytes(self) -> int:
        return sum(_aligned(largest) for _, largest in self._bounds)

    def parts(self, coded: Tensor) -> list[Tensor]:
        places = accumulate((_aligned(largest) for _, largest in self._bounds), initial=0)
        return [coded[place : place + largest] for place, (_, largest) in zip(places, self._bounds, strict=False)]

    def decode(self, coded: Tensor, into: Tensor, part: Part) -> None:
        self.split.write(into, decoded(self.answers, self.parts(coded), self.split, part))


def _aligned(nbytes: int) -> int:
    """Round up to a multiple of 8 bytes, so that numbers of any kind may follow."""
    return -(-nbytes // 8) * 8


def decoded(answers: WireFormat, payloads: Sequence[Tensor], split: Split, part: Part) -> list[Tensor]:
    """Decode each server's part of an answer, in the layout of its share."""
    shares = zip(payloads, split.shares, part.backs(len(payloads)), strict=True)
    return [decode(answers, payload, share, memory) for payload, share, memory in shares]
