"""Ringmaster ASGD: asynchronous SGD without gradients that are too stale."""

from __future__ import annotations

from lightning_omni.checks import check_whole
from lightning_omni.methods.contract import Method, Push, Reply, ServerSide


class _ApplyFresh(ServerSide):
    method: RingmasterASGD

    def declines(self, staleness: int) -> bool:
        most = self.method.max_staleness
        return staleness > (2 * (len(self.groups) - 1) if most is None else most)

    def receive(self, push: Push) -> list[Reply]:
        staleness = self.staleness_of(push)
        self.master.update(push.tensors, push.hyperparameters)
        return [Reply(push.group, staleness)]


class RingmasterASGD(Method, frozen=True, kw_only=True, tag="ringmaster_asgd"):
    r"""Asynchronous SGD that declines gradients which are too stale.

    .. math:: w_{t+1} = \mathrm{step}\bigl(w_t,\; g(w_{t-\tau})\bigr) \quad\text{if } \tau < R

    Otherwise nothing is applied, the group continues from :math:`w_t`, and its leased samples return to the pool.

    Args:
        max_staleness: largest staleness of an applied gradient, :math:`R - 1`. None is twice the number of other
            groups: equal groups lose nothing, and a group is declined if others average more than two steps during one.

    Raises:
        ConfigurationError: ``max_staleness`` is negative or no whole number.

    Example:
        >>> RingmasterASGD(max_staleness=8)
        RingmasterASGD(max_staleness=8)

    References:
        Maranjyan, Tyurin, Richtárik 2025, "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity",
        arXiv:2501.16168.
    """

    side = _ApplyFresh
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None:
            check_whole("max_staleness", self.max_staleness, "the largest staleness of an applied gradient, 0 or more")
