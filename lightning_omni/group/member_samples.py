"""The samples of each member of a group: its positions of a group batch, and the weight of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from lightning_omni.wire.messages.data import Batch


def apportion(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Split samples into whole numbers for the members of a group, so that the slowest ends as early as possible.

    The parts are proportional to the speeds, up to rounding. Each member gets at least two samples if there are enough,
    or one: BatchNorm fails with a single sample, which has no variance.

    Args:
        total: samples to split.
        speeds: speed of each member, in samples per second or any other unit. Earlier results are valid speeds, too,
            and give the same proportions again.

    Returns:
        Each member's samples, whose sum is ``total``.

    Raises:
        ValueError: the group has no member, or a speed is not a positive number.

    Example:
        >>> apportion(64, [1.0, 2.0, 4.0])
        (9, 18, 37)
    """
    if total < 0 or not speeds or not all(0 < speed < inf for speed in speeds):
        raise ValueError(f"cannot split {total} samples by the speeds {tuple(speeds)}")
    least, whole = min(2, total // len(speeds)), sum(speeds)
    parts = [max(least, int(total * speed / whole)) for speed in speeds]
    members = range(len(parts))
    # Rounding down leaves a few samples; a minimum above the part takes a few too many.
    while sum(parts) < total:
        parts[min(members, key=lambda member: (parts[member] + 1) / speeds[member])] += 1
    while sum(parts) > total:
        spare = (member for member in members if parts[member] > least)
        parts[max(spare, key=lambda member: parts[member] / speeds[member])] -= 1
    return tuple(parts)


def positions(batch: Batch, member: int, members: int, shares: Sequence[int] = (), in_pairs: bool = False) -> range:
    """Return one member's positions of a group batch: every ``members``-th one, as in DistributedSampler.

    With one group they are exactly those of DistributedSampler and BatchSampler for that rank. A batch with fewer
    positions than members uses some of them twice, because every member of a group needs at least one sample.

    Args:
        batch: the group's batch.
        member: index in the group, from 0.
        members: size of the group.
        shares: each member's samples of a whole batch, if they differ: each member then gets a contiguous range, and of
            a shorter batch a proportional part.
        in_pairs: whether members get two positions of a batch with fewer than two for each member, some of them twice:
            with a single one BatchNorm cannot train.

    Example:
        >>> list(positions(Batch(10, 16, 0), member=1, members=2))
        [11, 13, 15]
        >>> list(positions(Batch(10, 16, 0), member=1, members=2, shares=(2, 4)))
        [12, 13, 14, 15]
        >>> [list(positions(Batch(10, 13, 0), member, members=2, in_pairs=True)) for member in (0, 1)]
        [[10, 11], [10, 12]]
    """
    size = batch.stop - batch.start
    if in_pairs and _is_short(size, members):
        low, high = sorted((2 * member % size, (2 * member + 1) % size))
        return range(batch.start + low, batch.start + high + 1, high - low)
    if shares and size >= members:
        parts = apportion(size, shares)
        first = batch.start + sum(parts[:member])
        return range(first, first + parts[member])
    first = batch.start + member
    if first >= batch.stop:
        first = batch.start + member % size
        return range(first, first + 1)
    return range(first, batch.stop, members)


def weight(batch: Batch, member: int, members: int, shares: Sequence[int] = (), in_pairs: bool = False) -> float:
    """Return the factor for a member's mean gradient that makes DDP's mean over members the mean over the batch.

    It is ``members * own samples / all samples``, and less for a sample that several members hold.

    Args:
        batch: the group's batch.
        member: index in the group, from 0.
        members: size of the group.
        shares: as in `positions`. If empty, the result is 1.0 for any batch: members count equally, as under DDP.
        in_pairs: as in `positions`.

    Example:
        >>> [weight(Batch(0, 6, 0), member, 2, shares=(2, 4)) for member in (0, 1)]
        [0.6666666666666666, 1.3333333333333333]
    """
    size = batch.stop - batch.start
    if not shares or (in_pairs and _is_short(size, members)):
        return 1.0
    if size >= members:
        return members * apportion(size, shares)[member] / size
    holders = len(range(member % size, members, size))
    return members / (size * holders)


def _is_short(size: int, members: int) -> bool:
    """Return whether a batch has at least two positions, but fewer than two for each member."""
    return 1 < size < 2 * members
