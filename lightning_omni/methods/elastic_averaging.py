"""Elastic averaging SGD."""

from __future__ import annotations

from lightning_omni.checks import check_number
from lightning_omni.methods.contract import (
    Exchange,
    Fetch,
    GroupSide,
    Method,
    NextGradient,
    Push,
    Reply,
    ServerSide,
    Step,
    Tensors,
    check_period,
)
from lightning_omni.methods.model.replica import Replica

_BETA = 0.9


class _Centre(ServerSide):
    method: ElasticAveraging

    def setup(self) -> None:
        self._rate = self._rate_of(len(self.groups))

    def _rate_of(self, groups: int) -> float:
        return self.method.moving_rate if self.method.moving_rate is not None else _BETA / max(1, groups)

    def join(self, group: int) -> None:
        # With more groups each spring is weaker, so that the total pull on the centre does not grow.
        super().join(group)
        self._rate = min(self._rate, self._rate_of(len(self.groups)))

    def receive(self, push: Push) -> list[Reply]:
        # A group sends no weight of a parameter that it does not have yet, or that is frozen at the centre's value.
        staleness = self.staleness_of(push)
        moves: Tensors = [
            None if weight is None else (weight - centre) * self._rate
            for weight, centre in zip(push.tensors, self.master.weights(), strict=True)
        ]
        moves = self.as_sent(moves)
        self.master.add(moves)
        return [Reply(push.group, staleness, moves)]


class ElasticAveraging(Method, frozen=True, kw_only=True, tag="elastic_averaging"):
    r"""Asynchronous EASGD; EAMSGD where the user's optimizer is SGD with Nesterov momentum.

    Every ``period`` steps, with both differences taken from the *old* values of x (the group's) and c (the centre):

    .. math:: x \leftarrow x + u(x) - \alpha (x - c), \qquad c \leftarrow c + \alpha (x - c)

    where u(x) is the step of the user's optimizer, with the gradient taken *before* the elastic move and weight decay
    *after* it. In the other steps :math:`x \leftarrow x + u(x)`. x + c changes by u alone. With
    ``torch.optim.SGD(momentum=δ, nesterov=True)`` this is EAMSGD.

    Args:
        period: steps between two exchanges.
        moving_rate: :math:`\alpha`, 0 to 1; None takes 0.9 over the number of groups, lowered as more join.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> ElasticAveraging(period=4, moving_rate=0.2)
        ElasticAveraging(period=4, moving_rate=0.2)

    References:
        Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651.
    """

    steps_at = "worker"
    side = _Centre
    evaluated = "centre"
    pushes_weights = True
    answers_changes = True

    period: int = 10
    moving_rate: float | None = None

    def __post_init__(self) -> None:
        check_period(self.period)
        if self.moving_rate is not None:
            rate = (
                "a number from 0 to 1, or None for 0.9 over the number of groups; the spring is stable from 0 to"
                " (4 - 2h) / (4 - h) for a learning rate times curvature of h"
            )
            check_number("moving_rate", self.moving_rate, rate, 0, 1)

    def group_side(self, replica: Replica) -> GroupSide:
        memory = replica.memory
        while True:
            gradient = yield NextGradient()
            memory["steps"] = memory.get("steps", 0) + 1
            if memory["steps"] % self.period == 0:
                pulled = yield Exchange(replica.offered(replica.base()), replica.clock)
                if pulled.refused:
                    replica.restart(pulled)
                    continue
                replica.move(pulled.tensors, -1.0)
                replica.clock = pulled.clock
                if replica.loose:  # neither steps nor the spring move frozen weights, so they are loaded
                    replica.take_frozen((yield Fetch()))
            yield Step(gradient)
