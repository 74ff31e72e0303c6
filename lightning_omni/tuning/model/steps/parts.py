"""The parts of a step's time, as ranks report them, and the slowest rank of a group."""

from __future__ import annotations

from lightning_omni.tuning.model import constants as c
from lightning_omni.wire.messages import Status


def parts_of_step(step: float, forward: float, exchange: float) -> dict[str, float]:
    """Return the parts of a step in seconds; empty before a step was timed.

    Args:
        step: seconds of a whole step.
        forward: seconds of it to the end of the forward pass.
        exchange: seconds of it in the exchange with the server.

    Returns:
        ``"forward"``, ``"exchange"`` and ``"rest"``: the backward pass, the all-reduce and waiting for the group.

    Example:
        >>> parts_of_step(0.5, 0.125, 0.25)
        {'forward': 0.125, 'exchange': 0.25, 'rest': 0.125}
    """
    if not step:
        return {}
    return {"forward": forward, "exchange": exchange, "rest": max(0.0, step - forward - exchange)}


def straggler_sentence(status: Status, can_rebalance: bool = False) -> str:
    """Return a sentence that names the worst straggler; empty if no rank slows its group down.

    Args:
        status: the server's report on all groups.
        can_rebalance: whether the batch could be split by speed, and is not.
    """
    worst, sentence = c.STRAGGLER, ""
    for group in status.groups:
        others = len(group.ranks) - 1
        if not others:
            continue
        rest = (group.compute_time * len(group.ranks) - group.slowest_time) / others
        if group.slowest_time - rest > c.STRAGGLER_SECONDS and rest > 0 and group.slowest_time / rest > worst:
            worst = group.slowest_time / rest
            sentence = (
                f"rank {group.slowest_rank} holds group {group.group} up: {group.slowest_time * 1e3:.0f} ms to the end"
                f" of its forward pass, against {rest * 1e3:.0f} ms on the others"
            )
    if sentence and can_rebalance:
        sentence += '; rebalance="auto" splits the batch in proportion to the speeds'
    return sentence
