"""What the strategy follows of that which users change in mid-fit: optimizers, averaged models, frozen parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_omni.errors import UnsupportedError
from lightning_omni.strategy import _private

if TYPE_CHECKING:
    from lightning_omni.strategy.hooks import OmniStrategyHooks


class Followed:
    """Tells `lightning_omni.optimizer.edits.Edits` what there is to watch in a Trainer.

    Args:
        strategy: whose module, optimizers and callbacks.
    """

    def __init__(self, strategy: OmniStrategyHooks) -> None:
        self._strategy = strategy
        edits = strategy._world.edits
        edits.buffers, edits.others = strategy.buffers, self.others
        edits.switched, edits.reattach = self.switched, self.reattach

    def others(self) -> Iterator[Tensor]:
        """All parameters, and the averages that WeightAveraging keeps."""
        strategy = self._strategy
        assert strategy.lightning_module is not None
        yield from strategy.lightning_module.parameters()
        for model in _private.averaged_models(strategy._trainer):
            yield from model.parameters()
            yield from model.buffers()

    def switched(self) -> bool:
        """Whether ``strategy.optimizers`` are others than those that were attached."""
        return {id(each) for each in self._strategy.real_optimizers} != set(self._strategy._proxies)

    def reattach(self) -> None:
        """Takes in the optimizers as they are now, in groups as they are.

        Raises:
            UnsupportedError: an epoch is under way, or the server cannot run one of them.
        """
        strategy = self._strategy
        if strategy.epochs.is_open:
            raise UnsupportedError(
                "strategy.optimizers was changed in a validation inside an epoch: change it at an epoch's start or end"
                " (on_train_epoch_start, say), or use groups=1"
            )
        for optimizer in strategy.real_optimizers:
            strategy._world.check_optimizer(optimizer)
        strategy._unguard_optimizers()
        strategy._attach_optimizers()
        strategy.form(len(strategy._world.live_groups))
