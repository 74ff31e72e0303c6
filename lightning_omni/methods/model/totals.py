"""Sums of pushes, tensor by tensor, where any tensor may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class Total:
    """A running weighted sum of pushes.

    A parameter that no push has stays ``None``; one that some pushes have counts as zero in the others.

    Example:
        >>> import torch
        >>> total = Total()
        >>> total.add([torch.ones(2), None])
        >>> total.add([torch.ones(2), None], weight=3.0)
        >>> total.count, total.weight, total.scaled(1 / total.weight)
        (2, 4.0, [tensor([1., 1.]), None])
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.weight = 0.0
        self._sum: list[Tensor | None] = []
        self._counts: list[int] = []

    def reach(self, parameters: int) -> None:
        """Extend the total to this number of parameters; earlier pushes did not have the new ones."""
        missing = parameters - len(self._sum)
        self._sum.extend([None] * missing)
        self._counts.extend([0] * missing)

    def add(self, tensors: Sequence[Tensor | None], weight: float = 1.0) -> None:
        """Add ``weight * tensors``, of one push, to the sum; tensors that it keeps are copied."""
        self.reach(len(tensors))
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            self._counts[index] += 1
            mine = self._sum[index]
            if mine is None:
                self._sum[index] = tensor.detach().clone() if weight == 1.0 else tensor.detach() * weight
            else:
                mine.add_(tensor, alpha=weight)
        self.count += 1
        self.weight += weight

    def scaled(self, factor: float) -> list[Tensor | None]:
        """Return the sum times a factor, in place; the total may only be cleared afterwards."""
        if factor != 1.0:  # skips a pass over the tensors
            for tensor in self._sum:
                if tensor is not None:
                    tensor.mul_(factor)
        return self._sum

    def means(self) -> list[Tensor | None]:
        """Return the mean of each tensor over the pushes that had it, all of weight 1; in place, like `scaled`."""
        for tensor, count in zip(self._sum, self._counts, strict=True):
            if tensor is not None and count > 1:
                tensor.mul_(1 / count)
        return self._sum

    def take(self, factor: float = 1.0) -> list[Tensor | None]:
        """Return the sum times a factor, and clear the total."""
        scaled = self.scaled(factor)
        self.clear()
        return scaled

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "weight": self.weight, "sum": list(self._sum), "counts": list(self._counts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count, self.weight = int(state["count"]), float(state["weight"])
        self._sum = [None if tensor is None else tensor.clone() for tensor in state["sum"]]
        known = [0 if tensor is None else self.count for tensor in self._sum]
        self._counts = [int(count) for count in state.get("counts", known)]
