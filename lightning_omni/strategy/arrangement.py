"""The user's groups, while a tuner chooses others: a later fit begins with the user's again."""

from __future__ import annotations

from typing import NamedTuple

from lightning_omni.optimizer.balance import Balance
from lightning_omni.optimizer.place import Communication
from lightning_omni.strategy.grouping import GroupedStrategy
from lightning_omni.strategy.proxies import Merged
from lightning_omni.topology import Topology


class Arranged(NamedTuple):
    """Groups, and how they exchange, as the user has chosen them."""

    topology: Topology
    communication: Communication
    balance: Balance
    merged: Merged


class Arrangement:
    """Keeps what the user has chosen.

    Args:
        strategy: whose groups.
    """

    def __init__(self, strategy: GroupedStrategy) -> None:
        self._strategy = strategy
        self._users: Arranged | None = None

    @property
    def is_stashed(self) -> bool:
        """Whether a tuner chooses."""
        return self._users is not None

    def stash(self) -> None:
        """Groups and how they exchange are about to be chosen: those of the user are kept, for a later fit."""
        if self._users is None:
            strategy, world = self._strategy, self._strategy.world
            self._users = Arranged(world.topology, world.communication, strategy.balance, strategy.merged)

    def begin_in_one_group(self) -> None:
        """A fit is set up whose groups are chosen while it trains: until then all ranks are one."""
        self.stash()
        self._strategy.world.topology = Topology.even(self._strategy.world.size, 1)

    def form(self) -> None:
        """Nothing is chosen after all: the groups are formed that the user has asked for."""
        if self._users is None:
            return
        groups = len(self._users.topology.alive)
        if groups != len(self._strategy.world.topology.alive):
            self._strategy.form(groups)
            self._strategy.say_hello()

    def restore(self) -> None:
        """A fit is set up: it begins with what the user has chosen, unless ranks were lost since."""
        strategy, world = self._strategy, self._strategy.world
        users, self._users = self._users, None
        if users is None:
            return
        strategy.merged = Merged(users.merged.name)
        if not world.ever_lost:
            world.topology, world.communication = users.topology, users.communication
            strategy.balance = users.balance
