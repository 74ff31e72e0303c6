"""A group's side of the leased data: what it has drawn and trained of an epoch, as each of its members knows it.

The other half of `lightning_omni.protocol.leases`. Members of a group draw by the number of the batch and get the same
ones, so they agree without a word between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_omni.protocol import messages as m
from lightning_omni.protocol.leases import Batch, positions, weight


class Lessee:
    """One member's view of an epoch's batches: those of its group, and its own part of each.

    Args:
        member: place in the group.
        members: size of the group.
        generation: the server's number for the groups as they are formed.
        shares: what each member of the group gets of a whole batch, if not the same; see `share_out`.

    Attributes:
        epoch: number of the epoch.
        trained: batches of this epoch that the group has begun to train, since groups were last formed.
        interval: number of the validation interval that the group is in.
        handed: batches that were handed out to be loaded.
        in_pairs: whether members get at least two samples of a batch; see `lightning_omni.protocol.leases.positions`.

    Example:
        >>> lessee = Lessee(member=1, members=2, generation=1)
        >>> lessee.restart(epoch=0)
        >>> lessee.draw(0).number
        0
        >>> lessee.drew([Batch(0, 8, interval=0)])
        >>> lessee.begin_batch()
        >>> lessee.indices(0), lessee.place
        (range(1, 8, 2), (0, 1))
    """

    def __init__(self, member: int = 0, members: int = 1, generation: int = 0, shares: Sequence[int] = ()) -> None:
        self.epoch = -1
        self.in_pairs = False
        self.trained = self.interval = self.handed = 0
        self._batches: list[Batch] = []
        self._shares = [(0, tuple(shares))]  # from which batch number on, in ascending order; never empty
        self.join(member, members, generation, shares)

    def join(self, member: int, members: int, generation: int, shares: Sequence[int] = ()) -> None:
        """This is now another place, or another group. What was drawn and not trained goes back."""
        self._member, self._members, self._formed = member, members, generation
        self._shares = [(0, tuple(shares))]
        self.restart(self.epoch)

    def restart(self, epoch: int) -> None:
        """An epoch begins, or goes on with what the server still has: nothing of it is drawn here."""
        self.epoch = epoch
        self._batches = []
        self.handed = self.trained = self.interval = 0
        self._shares = [(0, self.shares)]

    # --- What is said to the server, and heard ------------------------------------------------------------------------

    def draw(self, number: int, trained: int | None = None) -> m.Draw:
        """Asks for the group's batches from a number on.

        Args:
            number: of the first batch that is not drawn yet.
            trained: batches whose training is over, if not all that were begun.
        """
        done = self.trained if trained is None else trained
        return m.Draw(epoch=self.epoch, generation=self._formed, number=number, trained=done)

    def drew(self, batches: Sequence[Batch]) -> None:
        """The answer to `draw`; none, if the pool is empty at the moment."""
        self._batches += batches

    def question(self) -> m.Await:
        """All that could be drawn is trained: what comes next?"""
        return m.Await(epoch=self.epoch, generation=self._formed, trained=self.trained, interval=self.interval)

    def follow(self, verdict: str, coming: Batch | None = None) -> None:
        """The answer to `question`, and the next batch if there is one.

        Once validated, the group is in the next interval; told that there is more, in that of its next batch.
        """
        if verdict == "validate":
            self.interval += 1
        elif verdict == "more" and coming is not None:
            self.interval = max(self.interval, coming.interval)

    def leaving(self, stop: str) -> m.Leave:
        """The group leaves the epoch early; for ``stop`` see `lightning_omni.protocol.messages.Leave`."""
        return m.Leave(epoch=self.epoch, generation=self._formed, trained=self.trained, stop=stop)

    # --- Batches ------------------------------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, int]:
        """The epoch, and the batches of it that are trained with what is computed now; -1 if none is leased."""
        return self.epoch, self.trained

    @property
    def drawn(self) -> int:
        """Batches that were drawn."""
        return len(self._batches)

    def begin_batch(self) -> None:
        """The next batch that was handed out is now being trained."""
        self.trained += 1

    @property
    def current(self) -> Batch | None:
        """The group's batch that is being trained."""
        return self._batches[self.trained - 1] if 0 < self.trained <= len(self._batches) else None

    @property
    def position(self) -> int:
        """Where in the epoch's permutation the batch ends that was trained last: about the progress of all groups.

        The same for all members of a group, without asking a server.
        """
        return self.current.stop if self.current is not None else 0

    def indices(self, number: int) -> range:
        """Positions of a batch that are this member's, by the batch's number among those drawn."""
        return positions(self._batches[number], self._member, self._members, self._shares_of(number), self.in_pairs)

    @property
    def samples(self) -> int:
        """This member's samples in the batch that is being trained."""
        return len(self.indices(self.trained - 1)) if self.current is not None else 0

    # --- Shares ------------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> tuple[int, ...]:
        """What each member of the group gets of a whole batch, as of the latest decision; empty if all get the same."""
        return self._shares[-1][1]

    def share_out(self, shares: Sequence[int], from_number: int) -> None:
        """From a batch number on, members of the group get unequal parts of each batch. All must say so alike.

        Args:
            shares: what each member gets of a whole batch; equal ones are the same as none.
            from_number: the first batch that is split this way; no member may have been handed it.

        Raises:
            ValueError: the shares are not the group's, or this member was handed that batch.
        """
        if from_number < self.handed or len(shares) != self._members or min(shares) < 1:
            raise ValueError(f"cannot share out {shares} among {self._members} from batch {from_number} on")
        self._shares.append((from_number, tuple(shares) if len(set(shares)) > 1 else ()))

    @property
    def weight(self) -> float:
        """This member's weight in the gradient of the batch that is being trained; see `protocol.leases.weight`."""
        batch = self.current
        if batch is None:
            return 1.0
        return weight(batch, self._member, self._members, self._shares_of(self.trained - 1), self.in_pairs)

    def _shares_of(self, number: int) -> tuple[int, ...]:
        return next(shares for start, shares in reversed(self._shares) if start <= number)
