"""What a rank has of the model: rank × shard. As long as models are not sharded, that is all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_omni.optimizer.run_state.kept import Generators, Kept, Seen


@dataclass(frozen=True)
class ShardScope:
    """A copy of what one rank has of the model.

    Attributes:
        weights: of the module.
        gradients: of its parameters and buffers.
        optimizers: their state and hyperparameters.
        scaler: of the loss, where 16-bit gradients need one.
        modules: what modules have noted for themselves: attributes, and what is in them.
        generators: of random numbers, in this process.
    """

    weights: Kept
    gradients: Kept
    optimizers: Kept
    scaler: Kept
    modules: Kept
    generators: Generators

    @classmethod
    def of(
        cls, module: nn.Module, optimizers: Iterable[Optimizer], scalers: Iterable[Any] = (), seen: Seen | None = None
    ) -> ShardScope:
        """As it is now.

        Args:
            module: what is trained.
            optimizers: that train it.
            scalers: of the loss; or anything else with ``state_dict`` and ``load_state_dict``.
            seen: shared with others that are kept at this moment.
        """
        seen = {} if seen is None else seen
        return cls(
            weights=Kept(seen).keep_values(module.parameters()),
            gradients=Kept(seen).keep_gradients((*module.parameters(), *module.buffers())),
            optimizers=Kept(seen).keep_optimizers(optimizers),
            scaler=Kept().keep_states(scalers),
            modules=Kept(seen).keep_attributes(module),
            generators=Generators.now(),
        )

    def put_back(self) -> None:
        """Bitwise as it was, in the same objects."""
        for each in (self.weights, self.gradients, self.optimizers, self.scaler, self.modules, self.generators):
            each.put_back()
