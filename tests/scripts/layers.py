"""Layers of the tests' own that a server can import."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Counter(nn.Module):
    """Changes a buffer of its own with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x
