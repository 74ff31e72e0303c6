"""The groups that the user chose, stored while a tuner chooses others, so that a later fit can begin with them."""

from __future__ import annotations

from typing import NamedTuple

from lightning_omni.runtime.balance import Balance
from lightning_omni.runtime.parallel_state import Communication
from lightning_omni.strategy.grouping import GroupedStrategy
from lightning_omni.strategy.optimizers import MergedSubmodule
from lightning_omni.topology import Topology


class UserGroups(NamedTuple):
    """The groups, and how they exchange, as the user chose them."""

    topology: Topology
    communication: Communication
    balance: Balance
    merged: MergedSubmodule


class UserGroupsStash:
    """The stored groups of the user for one strategy.

    Args:
        strategy: the strategy whose groups are stored.
    """

    def __init__(self, strategy: GroupedStrategy) -> None:
        self._strategy = strategy
        self._users: UserGroups | None = None

    def stash(self) -> None:
        """Store the user's groups and communication settings before a tuner replaces them, for a later fit."""
        if self._users is None:
            strategy, world = self._strategy, self._strategy.world
            self._users = UserGroups(world.topology, world.communication, strategy.balance, strategy.merged)

    def begin_in_one_group(self) -> None:
        """Put all ranks into one group, for a fit whose groups are chosen while it trains."""
        self.stash()
        self._strategy.world.topology = Topology.even(self._strategy.world.size, 1)

    def form(self) -> None:
        """Form the groups that the user chose, because the tuner chooses none."""
        if self._users is None:
            return
        groups = len(self._users.topology.alive)
        if groups != len(self._strategy.world.topology.alive):
            self._strategy.form(groups)
            self._strategy.announce_groups()

    def restore(self) -> None:
        """Restore the user's choice at the setup of a fit; if ranks were lost, only the merged head is restored."""
        strategy, world = self._strategy, self._strategy.world
        users, self._users = self._users, None
        if users is None:
            return
        strategy.merged = MergedSubmodule(users.merged.name)
        if not world.ever_lost:
            world.topology, world.communication = users.topology, users.communication
            strategy.balance = users.balance
