"""Gossip SGD."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from lightning_omni.checks import check_choice
from lightning_omni.errors import ConfigurationError, ProtocolError
from lightning_omni.methods.contract import (
    GroupSide,
    Inbox,
    Method,
    NextGradient,
    Publish,
    Push,
    ReadInbox,
    ReadPeer,
    Reply,
    SendPeer,
    ServerSide,
    Step,
    check_period,
)
from lightning_omni.methods.model.replica import Replica, all_finite, minus


class _Bystander(ServerSide):
    def receive(self, push: Push) -> list[Reply]:
        raise ProtocolError("with gossip no group pushes to the server")


class Gossip(Method, frozen=True, kw_only=True, tag="gossip"):
    r"""Gossip SGD, pull or push, from group to group.

    Every ``period`` steps of the user's optimizer at the worker, group i draws a peer j uniformly from all p groups,
    itself included.

    - *pull*: i publishes its weights :math:`x_i`; if j is another group,
      :math:`x_i \leftarrow \tfrac12 (x_i + x_j)` with the weights that j published last.
    - *push*: if j is another group, i puts :math:`x_i` into the inbox of j. Then
      :math:`x_i \leftarrow (w x_i + \sum \text{inbox}) / (w + |\text{inbox}|)` with w = 2 if j = i, else 1.

    Missing and non-finite weights are not merged. Velocities are not exchanged, and Nesterov's look-ahead is removed
    before weights are sent and restored afterwards.

    Args:
        kind: ``"pull"`` or ``"push"``.
        period: local steps between two exchanges.
        seed: seed of the random choice of peers.

    Raises:
        ConfigurationError: an argument is out of range, or the run has one group only.

    Example:
        >>> Gossip(kind="push")
        Gossip(kind='push', period=1, seed=0)

    References:
        Jin, Yuan, Iandola, Keutzer 2016, "How to scale distributed deep learning?", arXiv:1611.04581.
    """

    steps_at = "worker"
    side = _Bystander
    evaluated = "mean"
    pushes_weights = True
    talks_to_peers = True

    kind: Literal["pull", "push"] = "pull"
    period: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_period(self.period)
        check_choice("kind", self.kind, ("pull", "push"))

    def check(self, groups: int) -> None:
        if groups < 2:
            raise ConfigurationError(
                f"gossip goes from group to group, and there is just {groups}; pass groups=2 or more, or another method"
            )

    def group_side(self, replica: Replica) -> GroupSide:
        memory = replica.memory
        while True:
            gradient = yield NextGradient()
            yield Step(gradient)
            memory["steps"] = memory.get("steps", 0) + 1
            if memory["steps"] % self.period:
                continue
            peer = self._draw(replica)
            pairs = zip(replica.ordered, replica.base(), strict=True)
            # No peer takes frozen weights, and those of a mask may be infinite.
            mine = [base if each.requires_grad else base.nan_to_num(0.0, 0.0, 0.0) for each, base in pairs]
            yield from self._pull(replica, peer, mine) if self.kind == "pull" else self._push(replica, peer, mine)

    def _draw(self, replica: Replica) -> int:
        # Each draw has its own generator, so no state is saved, and a restarted group side continues the same draws.
        draw = random.Random(f"{self.seed} {replica.group} {replica.memory['steps']}")
        return draw.choice(replica.peers)

    def _pull(self, replica: Replica, peer: int, mine: list[Tensor]) -> GroupSide:
        mine = yield Publish(mine)
        if peer == replica.group:
            return
        theirs = yield ReadPeer(peer)
        if all_finite(theirs):
            replica.move(minus(_on(mine, theirs), mine), 0.5)

    def _push(self, replica: Replica, peer: int, mine: list[Tensor]) -> GroupSide:
        own_weight = 2 if peer == replica.group else 1
        mine = yield SendPeer(peer, mine)
        inbox: Inbox = yield ReadInbox()
        if inbox.total is not None and all_finite(inbox.total):
            # (w x + total) / (w + count) - x = (total - count x) / (w + count)
            surplus = [total - inbox.count * x for total, x in zip(_on(mine, inbox.total), mine, strict=True)]
            replica.move(surplus, 1 / (own_weight + inbox.count))


def _on(like: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(x.device) for x, tensor in zip(like, tensors, strict=True)]
