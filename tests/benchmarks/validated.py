"""The weights that Lightning would validate, read while groups train and without a word to other groups.

A validation is a synchronization point, and a time to an accuracy would have those of all its validations in it. Ranks
are on one machine here, so each leaves its own weights in memory that all of them share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class ValidatedWeights:
    """What a validation right now would be of.

    Args:
        path: of a file for all ranks' own weights, which may not exist yet.
        module: that is trained.
        ranks: how many train it.
    """

    def __init__(self, path: Path | str, module: nn.Module, ranks: int) -> None:
        self._parameters = dict(module.named_parameters())
        count = sum(each.numel() for each in self._parameters.values())
        self._own = torch.from_file(str(path), shared=True, size=ranks * count).view(ranks, count)
        self._late = 0

    def leave_own(self, rank: int) -> None:
        """This rank has stepped. On all of them."""
        torch.cat([each.detach().flatten().float() for each in self._parameters.values()], out=self._own[rank])

    def read(self, strategy: Any) -> list[Tensor] | None:
        """Weights of all parameters, in order. By rank 0, between two batches.

        Returns:
            None if they are at the server and an exchange is under way: its answer would have to be waited for. It is
            if that was so whenever this was asked for as many times as there are steps from one exchange to the next.
        """
        weights = {name: each.detach() for name, each in self._parameters.items()}
        world = getattr(strategy, "world", None)
        if world is None or not world.executor.exchanges:
            return list(weights.values())
        if world.method.evaluated == "mean":
            weights = self._mean(world)
        elif not (world.exchange._travels is None or world.heads):
            if world.method.steps_at == "server":  # from which these were read, one exchange ago
                return list(weights.values())
            self._late += 1
            if self._late < world.method.push_period:
                return None
        self._late = 0
        if world.heads or world.method.evaluated != "mean":
            parts = zip(world.parts, world.exchange.store.snapshot(with_state=False).parts, strict=True)
            for part, held in parts:
                if part.head is not None or world.method.evaluated != "mean":
                    weights |= held["weights"]
        return [weights[name] for name in self._parameters]

    def _mean(self, world: Any) -> dict[str, Tensor]:
        """Of all groups, each as it is now."""
        leaders = [world.topology.groups[group][0] for group in world.topology.alive]
        sizes = [each.numel() for each in self._parameters.values()]
        means = zip(self._parameters.items(), self._own[leaders].mean(0).split(sizes), strict=True)
        return {name: mean.view_as(parameter) for (name, parameter), mean in means}
