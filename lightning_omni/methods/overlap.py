"""Exchanges that travel while the group computes, for every method whose optimizer steps at the server."""

from __future__ import annotations

import msgspec

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.contract import Exchange, GroupSide, Method, NextGradient, Receive, Send
from lightning_omni.methods.model.replica import Pulled, Replica


def overlapped(side: GroupSide, replica: Replica) -> GroupSide:
    r"""Run a group side without waiting for its exchanges.

    The exchange of step t travels while step t+1 computes its gradient, at the weights that step t had:

    .. math:: w_{t+1} = \mathrm{answer}(t - 1), \qquad \mathrm{push}(t) = g(w_t)

    The answer is loaded once that gradient is computed, before it is pushed, so each gradient is one step of its group
    older than without overlap. With a barrier over all groups this is the delayed update :math:`w_{t+1} = w_t -
    \eta\,g(w_{t-1})`.

    Args:
        side: group side of a method whose optimizer steps at the server. It receives empty answers; the real ones are
            loaded into the replica.
        replica: the group's replica.

    References:
        Gupta, Zhang, Wang 2016, arXiv:1509.04210 (Rudra-adv*: pushes and pulls beside the computation); Ren et al.
        2021, "ZeRO-Offload", arXiv:2101.06840 (one-step delayed parameter update).
    """
    need, read_at = next(side), replica.clock
    is_under_way = False
    while True:
        if isinstance(need, NextGradient):
            gradient = yield need
            read_at = replica.clock
            if is_under_way:
                replica.load((yield Receive()))
                is_under_way = False
            need = side.send(gradient)
        elif isinstance(need, Exchange):
            yield Send(msgspec.structs.replace(need, read_at=read_at))
            is_under_way = True
            need = side.send(Pulled((), replica.clock))
        else:
            need = side.send((yield need))


def check_overlap(method: Method) -> None:
    """Raise `ConfigurationError` if a method's exchanges cannot be overlapped in this way."""
    if method.steps_at != "server":
        raise ConfigurationError(
            f"overlap=True with {type(method).__name__}: its optimizer steps on the ranks, which exchange now and then;"
            " leave overlap= out. With local_sgd and diloco, delay= lets groups train on during an exchange, as in"
            ' method="diloco:period=48,fragments=4,delay=2"'
        )
