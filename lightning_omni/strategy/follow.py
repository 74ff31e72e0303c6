"""What the strategy follows of that which users change in mid-fit: optimizers, averaged models, frozen parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_omni.errors import UnsupportedError
from lightning_omni.strategy import _private
from lightning_omni.strategy.contract import Strategy


class Followed:
    """Tells `lightning_omni.optimizer.edits.Edits` what there is to watch in a Trainer.

    Args:
        strategy: whose module, optimizers and callbacks.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        edits = strategy.joined.edits
        edits.buffers, edits.others = strategy.buffers, self.others
        edits.switched, edits.reattach = self.switched, self.reattach

    def others(self) -> Iterator[Tensor]:
        """All parameters, and the averages that WeightAveraging keeps."""
        module = self._strategy.fitted
        yield from module.parameters()
        for model in _private.averaged_models(module.trainer):
            yield from model.parameters()
            yield from model.buffers()

    def switched(self) -> bool:
        """Whether ``strategy.optimizers`` are others than those that were attached."""
        return not self._strategy.proxies.are_of(self._strategy.real_optimizers)

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
            strategy.joined.check_optimizer(optimizer)
        strategy.proxies.unguard()
        strategy.attach_optimizers()
        strategy.form(len(strategy.joined.live_groups))
