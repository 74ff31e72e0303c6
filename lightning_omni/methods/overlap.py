"""Exchanges of plain asynchronous SGD that travel while the group computes."""

from __future__ import annotations

from lightning_omni.methods.contract import Exchange, GroupSide, NextGradient, Receive, Send
from lightning_omni.methods.model.replica import Replica


def overlapped(replica: Replica) -> GroupSide:
    r"""Run the group side of `AsyncSGD` without waiting for its exchanges.

    The exchange of step t travels while step t+1 computes its gradient, at the weights that step t had:

    .. math:: w_{t+1} = \mathrm{answer}(t - 1), \qquad \mathrm{push}(t) = g(w_t)

    The answer is loaded once that gradient is computed, before it is pushed, so each gradient is one step of its group
    older than without overlap.

    Args:
        replica: the group's replica.

    References:
        Gupta, Zhang, Wang 2016, arXiv:1509.04210 (Rudra-adv*: pushes and pulls beside the computation); Ren et al.
        2021, "ZeRO-Offload", arXiv:2101.06840 (one-step delayed parameter update).
    """
    is_under_way = False
    while True:
        gradient = yield NextGradient()
        read_at = replica.clock
        if is_under_way:
            replica.load((yield Receive()))
        yield Send(Exchange(gradient.tensors, read_at, gradient.hyperparameters))
        is_under_way = True
