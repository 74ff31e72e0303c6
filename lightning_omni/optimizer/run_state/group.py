"""What a compute group has, the same on all its ranks; what a sender remembers, its leader alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.run_state.kept import Kept, Seen
from lightning_omni.protocol.lessee import Lessee
from lightning_omni.protocol.wire_format import State


@dataclass(frozen=True)
class GroupScope:
    """A copy of what a group has.

    Attributes:
        memory: what the group side of the method remembers, for each optimizer.
        senders: what the sender of its pushes remembers (a residual, say), for each optimizer.
        buffers: of the module.
        leases: the position in the epoch's data, if it is leased; the object itself, for others draw from ones of
            their own.
    """

    memory: tuple[Mapping[str, Any], ...]
    senders: tuple[State, ...]
    buffers: Kept
    leases: Lessee | None

    @classmethod
    def of(cls, place: Place, buffers: Iterable[Tensor], seen: Seen | None = None) -> GroupScope:
        """As it is now.

        Args:
            place: this rank's, in the run.
            buffers: of the module.
            seen: shared with others that are kept at this moment.
        """
        return cls(
            memory=tuple(copied(part.replica.memory) for part in place.parts),
            senders=tuple(copied(place.core.sender_state(index)) for index in range(len(place.parts))),
            buffers=Kept(seen).keep_values(buffers),
            leases=place.core.data,
        )

    def put_back(self, place: Place) -> None:
        """As it was. Groups must not train meanwhile: their method begins anew with what it remembers."""
        for part, memory in zip(place.parts, self.memory, strict=True):
            part.replica.memory = copied(memory)
        for index, state in enumerate(self.senders):
            place.core.load_sender_state(index, copied(state))
        self.buffers.put_back()
        place.core.data = self.leases
        place.core.form()


def copied(tree: Any) -> Any:
    """A tree of plain data and tensors that no other holds."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
