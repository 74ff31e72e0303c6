"""One moment of a run at the server, over everything that it holds: what a snapshot and a checkpoint are of."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from lightning_omni.protocol.progress import Progress


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Which moment: exactly so much was handled before it, and nothing after it is in what it names.

    A server handles one message at a time, so every moment between two of them is one of all optimizers. Servers that
    hold a part each would have to agree on one.

    Attributes:
        clocks: updates that the weights of each optimizer contain.
        pushes: of each group, the pushes that were handled since groups were formed, those to all optimizers together;
            also pushes that were refused or wait for others. A group that has pushed nothing is not there.
        epoch: number of the epoch that is under way, or was last; -1 if none was leased.
        total: positions in that epoch.
        trained: ranges of it that are trained, in order.
    """

    clocks: tuple[int, ...] = ()
    pushes: dict[int, int] = {}
    epoch: int = -1
    total: int = 0
    trained: tuple[tuple[int, int], ...] = ()

    def progress(self, known: Progress) -> Progress:
        """How far the run is at this moment; a rank, which knows it but roughly inside an epoch, says the rest.

        Example:
            >>> from lightning_omni.protocol.progress import ReferenceBatch
            >>> cut = Cut(epoch=2, total=320, trained=((0, 64), (96, 128)))
            >>> cut.progress(Progress(ReferenceBatch(4, 8), batches=10, epochs=2, samples=64)).samples
            96
        """
        if self.epoch != known.epochs:
            return known
        return replace(known, samples=sum(stop - start for start, stop in self.trained))
