"""What is exchanged and how it is merged: one file for each method, no sockets, clocks or Lightning."""

from lightning_omni.methods.async_sgd import AsyncSGD
from lightning_omni.methods.contract import (
    Exchange,
    Gradient,
    MasterWeights,
    Method,
    NextGradient,
    Push,
    Replica,
    Reply,
    ServerSide,
)
from lightning_omni.methods.master import Master

METHODS: dict[str, type[Method]] = {"async_sgd": AsyncSGD}
"""Every method by the name that ``OmniStrategy(method=...)`` takes."""

__all__ = [
    "METHODS",
    "AsyncSGD",
    "Exchange",
    "Gradient",
    "Master",
    "MasterWeights",
    "Method",
    "NextGradient",
    "Push",
    "Replica",
    "Reply",
    "ServerSide",
]
