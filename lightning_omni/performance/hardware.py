"""Hardware efficiency: the seconds between two updates, as a function of how ranks are grouped.

Each group is a pipeline of its own (compute, all-reduce, exchange, a turn at a merged head), and the groups share what
is serial: the server's arithmetic, its link, the head. An update comes as often as the groups together can bring one,
or as the busiest serial part can take one (Hadjis et al. 2016, with the head as its one serial part):

    t(g) = max(t_serve / H, t_link / H, t_head, (t_compute(b/k) + t_allreduce(k) + t_exchange / H + t_head) / g)

with k = N / g ranks in a group and H local steps between two exchanges. Where a serial part saturates, more groups add
staleness and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_omni.errors import ConfigurationError

_SERIAL = ("serve", "link", "head")


@dataclass(frozen=True)
class Costs:
    """What one update costs, in seconds, part by part.

    Attributes:
        compute: forward and backward pass of a whole group's batch on one rank; k ranks take a k-th of it each.
        overhead: what a step costs a rank whatever its share of the batch.
        allreduce: bringing a gradient through a rank's link; a ring of k ranks moves 2 (k - 1) / k of it.
        allreduce_latency: of each of the 2 (k - 1) messages of a ring.
        exchange: a push and the answer to it, as a group without rivals sees them.
        serve: of this, the server's own arithmetic, one push after the other.
        link: of this, the time on the server's link, one push after the other.
        head: a turn at a merged head.

    Raises:
        ConfigurationError: a time is negative.
    """

    compute: float
    overhead: float = 0.0
    allreduce: float = 0.0
    allreduce_latency: float = 0.0
    exchange: float = 0.0
    serve: float = 0.0
    link: float = 0.0
    head: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) >= 0:
                raise ConfigurationError(
                    f"{each.name}={getattr(self, each.name)}: seconds cannot be negative; pass 0 or more"
                )


@dataclass(frozen=True)
class HardwareModel:
    """Seconds per update for any number of groups.

    Args:
        costs: what one update costs.
        ranks: number of ranks N.
        period: local steps between two exchanges, H.

    Raises:
        ConfigurationError: there is no rank or no step.

    Example:
        A head that takes 15 ms a turn, and a body of 160 ms whose gradient needs 5 ms on a rank's link:

        >>> model = HardwareModel(Costs(compute=0.160, allreduce=0.005, head=0.015), ranks=16)
        >>> [round(1000 * model.seconds_per_update(groups), 1) for groups in (2, 4, 5, 16)]
        [21.9, 15.6, 15.0, 15.0]
        >>> model.saturating_groups(), model.bottleneck(4), model.bottleneck(5)
        (5, 'groups', 'head')
    """

    costs: Costs
    ranks: int
    period: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "period"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: pass a positive number")

    def parts(self, groups: int) -> dict[str, float]:
        """The terms of the maximum, in seconds per update: ``"serve"``, ``"link"``, ``"head"`` and ``"groups"``.

        Args:
            groups: number of groups, 1 to the number of ranks. With one group there is no server in the path.

        Raises:
            ConfigurationError: there cannot be that many groups.
        """
        if not 1 <= groups <= self.ranks:
            raise ConfigurationError(f"groups={groups}: pass 1 to {self.ranks}, the number of ranks")
        costs, size = self.costs, self.ranks / groups  # of groups of two sizes the mean counts
        ring = 2 * (size - 1)
        step = costs.overhead + costs.compute / size + costs.allreduce * ring / size + costs.allreduce_latency * ring
        if groups == 1:
            # Plain synchronous training, with no server: the head's work is spread over the ranks like the rest.
            return {"serve": 0.0, "link": 0.0, "head": 0.0, "groups": step + costs.head / size}
        return {
            "serve": costs.serve / self.period,
            "link": costs.link / self.period,
            "head": costs.head,
            "groups": (step + costs.exchange / self.period + costs.head) / groups,
        }

    def seconds_per_update(self, groups: int) -> float:
        """Seconds between two updates; with H > 1, between two steps of any group."""
        return max(self.parts(groups).values())

    def bottleneck(self, groups: int) -> str:
        """What holds updates up: ``"groups"``, each as fast as it can be, or ``"serve"``, ``"link"`` or ``"head"``."""
        parts = self.parts(groups)
        return max(parts, key=lambda name: (parts[name], name in _SERIAL))

    def saturating_groups(self) -> int:
        """The fewest groups at which a serial part saturates; the number of ranks if none does.

        More of them are no faster and staler, so this is where a search begins (Hadjis et al. 2016, Algorithm 1).
        """
        for groups in range(2, self.ranks + 1):
            if self.bottleneck(groups) in _SERIAL:
                return groups
        return self.ranks
