"""Hardsync: all groups push, the server makes one step with the mean of their gradients, and all continue."""

from __future__ import annotations

from lightning_omni.methods.contract import Barrier, Method, Push
from lightning_omni.methods.model.totals import Total


class _MeanGradient(Barrier):
    """A barrier that steps the user's optimizer with the mean gradient."""

    def merge(self, total: Total, last: Push) -> None:
        self.master.update(total.scaled(1 / total.count), last.hyperparameters)


class HardSync(Method, frozen=True, kw_only=True, tag="hardsync"):
    r"""Synchronous SGD across groups, through the parameter server.

    .. math:: w_{t+1} = \mathrm{step}\Bigl(w_t,\; \tfrac1\lambda \sum_{l=1}^{\lambda} g_l(w_t)\Bigr)

    for :math:`\lambda` groups. Staleness is always 0, and the result is that of one synchronous group with the batch of
    all groups; use it as a baseline for the asynchronous methods on the same network. For speed use ``groups=1``, which
    all-reduces and needs no server.

    The model that is evaluated is the server's.

    Example:
        >>> HardSync()
        HardSync()

    References:
        Gupta, Zhang, Wang 2016, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning" (Rudra),
        arXiv:1509.04210.
    """

    side = _MeanGradient

    def updates_per_batch(self, groups: int) -> int:
        return 1
