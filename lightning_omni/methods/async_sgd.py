"""Asynchronous SGD: every push is applied at once, to whatever the master weights are by then."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from lightning_omni.methods.contract import (
    Exchange,
    Gradient,
    MasterWeights,
    Method,
    Need,
    NextGradient,
    Push,
    Replica,
    Reply,
    ServerSide,
)
from lightning_omni.methods.master import Master


class AsyncSGD(Method, frozen=True, kw_only=True, tag="async_sgd"):
    r"""Asynchronous SGD with the user's own optimizer at the server.

    .. math:: w_{t+1} = \mathrm{step}\bigl(w_t,\; g(w_{t-\tau})\bigr), \qquad t \leftarrow t + 1

    where ``step`` is one step of the torch optimizer that the user configured (its state, a momentum buffer say, is
    one for all groups), ``g`` the mean gradient of one compute group's batch, and :math:`\tau` its staleness: the
    updates that other groups made between this group's read and its write. With random step times and g groups, the
    mean of :math:`\tau` is g-1 and asynchrony adds momentum of about 1 - 1/g.

    Example:
        >>> AsyncSGD()
        AsyncSGD()

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks" (Downpour SGD, n_push = n_fetch = 1);
        Hadjis et al. 2016, "Omnivore" (compute groups; one momentum buffer at the server).
    """

    def group_side(self, replica: Replica) -> Generator[Need, Any, None]:
        """Gradient at the weights last read; push it; read the master weights; repeat."""
        while True:
            gradient: Gradient = yield NextGradient()
            master: MasterWeights = yield Exchange(gradient, read_at=replica.clock)
            replica.load(master)

    def server_side(self, master: Master) -> ServerSide:
        """One update for each push."""
        return _ApplyAtOnce(master)


class _ApplyAtOnce(ServerSide):
    def receive(self, push: Push) -> list[Reply]:
        staleness = self.master.clock - push.read_at
        self.master.update(push.gradient.tensors, push.gradient.hyperparameters)
        return [Reply(push.group, staleness)]
