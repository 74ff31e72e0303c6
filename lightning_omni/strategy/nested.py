"""A run of Lightning's loop inside one of its own hooks, as learning-rate finders make it: all ranks as one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_omni.errors import UnsupportedError
from lightning_omni.optimizer.balance import Balance
from lightning_omni.strategy.contract import Strategy
from lightning_omni.strategy.epochs import EpochDriver
from lightning_omni.topology import Topology


class NestedRuns:
    """What such a run measures holds for all ranks together, so it is plain DDP; then the groups train on.

    Before the groups first train apart there is no server yet, and nothing to be undone. Between two epochs the groups
    become one, and are formed again when the next epoch begins: until then the finder may restore what it has saved.

    Args:
        strategy: whose groups.

    Attributes:
        is_running: whether one is under way.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.is_running = False
        self._groups = 1

    def run(self, run: Callable[[], None]) -> None:
        """Runs the loop.

        Raises:
            UnsupportedError: groups are training, each for itself.
        """
        world = self._strategy.joined
        if world.is_computing:
            raise UnsupportedError(
                "trainer.fit_loop.run() inside an epoch (a learning-rate finder in on_train_batch_end, say): the groups"
                " are at different batches; run it in on_fit_start or on_train_epoch_start, or use groups=1"
            )
        with self._in_one_group(), self._apart():
            run()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Nothing of what follows the fit's own progress hears of the run."""
        strategy = self._strategy
        world = strategy.joined
        kept, steps = (strategy.epochs, strategy.balance), world.steps
        epochs = EpochDriver("static", strategy.rank_zero_info)
        epochs.connect(strategy.fitted.trainer, world)
        strategy.epochs, strategy.balance = epochs, Balance("off", strategy.rank_zero_info)
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            (strategy.epochs, strategy.balance), world.steps = kept, steps

    @contextmanager
    def _in_one_group(self) -> Iterator[None]:
        strategy, world = self._strategy, self._strategy.joined
        if not world.executor.exchanges:
            yield
        elif world.control is not None:
            self._groups = len(world.live_groups)
            strategy.form(1)
            yield
        else:
            topology, world.topology = world.topology, Topology.even(world.size, 1)
            try:
                strategy.wrap_for_group()
                yield
            finally:
                world.topology = topology
            strategy.wrap_for_group()

    def form_groups_again(self) -> None:
        """An epoch begins: groups that a nested run has made one are what they were."""
        groups, self._groups = self._groups, 1
        if groups > 1:
            self._strategy.form(min(groups, len(self._strategy.joined.live_ranks)))

    def forget(self) -> None:
        """The fit is over."""
        self._groups = 1
