"""The methods by which groups exchange and merge gradients or weights; :doc:`/reference/methods` compares them.

Pass one to ``OmniStrategy(method=...)``, by its name in `METHODS` or `PRESETS`, or as a value:
``methods.DiLoCo(period=50)``.
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.async_diloco import AsyncDiLoCo
from lightning_omni.methods.async_sgd import AsyncSGD
from lightning_omni.methods.barrier import Barrier
from lightning_omni.methods.contract import (
    Answer,
    Exchange,
    Fetch,
    Gradient,
    GroupSide,
    Inbox,
    Method,
    Need,
    NextGradient,
    Publish,
    Push,
    ReadInbox,
    ReadPeer,
    Receive,
    Reply,
    Send,
    SendPeer,
    ServerSide,
    Step,
    StepTime,
    with_period,
)
from lightning_omni.methods.decoupled_diloco import DecoupledDiLoCo
from lightning_omni.methods.delay_compensated import DelayCompensated
from lightning_omni.methods.diloco import DiLoCo
from lightning_omni.methods.downpour import Downpour
from lightning_omni.methods.elastic_averaging import ElasticAveraging
from lightning_omni.methods.gossip import Gossip
from lightning_omni.methods.local_sgd import LocalSGD
from lightning_omni.methods.model.replica import Hyperparameters, Pulled, Replica
from lightning_omni.methods.model.server_optimizer import Master
from lightning_omni.methods.ringmaster_asgd import RingmasterASGD
from lightning_omni.methods.softsync import HardSync, SoftSync
from lightning_omni.registry import Registry

METHODS: dict[str, type[Method]] = {
    "async_sgd": AsyncSGD,
    "hardsync": HardSync,
    "softsync": SoftSync,
    "downpour": Downpour,
    "elastic_averaging": ElasticAveraging,
    "gossip": Gossip,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "async_diloco": AsyncDiLoCo,
    "decoupled_diloco": DecoupledDiLoCo,
    "delay_compensated": DelayCompensated,
    "ringmaster_asgd": RingmasterASGD,
}
"""The methods by name."""
REGISTRY = Registry(METHODS, Method, "method", "method", "lightning_omni.methods.Method", "--method")

PRESETS: dict[str, Method] = {
    "staleness_aware": AsyncSGD(staleness_aware=True),
    "stale_synchronous": AsyncSGD(bound=3),
    "gpu_asgd": Downpour(n_push=10, n_fetch=10, send="updates"),
    "pull_gossip": Gossip(kind="pull"),
    "push_gossip": Gossip(kind="push"),
}
"""Systems of the literature that are settings of a method."""


def method_named(text: str) -> Method:
    """Return the method or preset of this name; settings may follow it after a colon.

    Raises:
        ConfigurationError: no method has this name, or a setting is unknown or wrong.

    Example:
        >>> method_named("gpu_asgd")
        Downpour(n_push=10, n_fetch=10, send='updates', warm_start=0)
        >>> method_named("elastic_averaging:period=8").period
        8
    """
    return REGISTRY.named(text, PRESETS)


def checked(method: Method) -> Method:
    """Return the method with plain numbers, after a check of its settings' types.

    Raises:
        ConfigurationError: a setting has the wrong type; msgspec does not check types at construction.
    """
    return REGISTRY.checked(method)


def text_of(method: Method, without: Collection[str] = ()) -> str:
    """Return the text from which `method_named` makes the method, without the settings named in ``without``.

    All settings stay if the others are invalid without these, as fragments without a period that they divide.

    Example:
        >>> text_of(method_named("local_sgd:period=4,warmup_steps=10"), without=("period",))
        'local_sgd:warmup_steps=10'
    """
    text = REGISTRY.text_of(method, without)
    try:
        method_named(text)
    except ConfigurationError:
        return REGISTRY.text_of(method)
    return text


def load(path: str) -> type[Method]:
    """Import and register a method by its path ``module:Class``.

    Raises:
        ConfigurationError: the path cannot be imported, or is no method, or its name is taken.

    Example:
        >>> load("lightning_omni.methods.gossip:Gossip").__name__
        'Gossip'
    """
    return REGISTRY.load(path)


def register(kind: type[Method]) -> type[Method]:
    """Register a custom method under its tag, as a class decorator.

    The embedded server imports the module of a run's method; a standalone server needs ``lightning-omni serve --method
    module:Class``.

    Raises:
        ConfigurationError: the name is taken.
    """
    return REGISTRY.register(kind)


__all__ = [
    "METHODS",
    "PRESETS",
    "REGISTRY",
    "Answer",
    "AsyncDiLoCo",
    "AsyncSGD",
    "Barrier",
    "DecoupledDiLoCo",
    "DelayCompensated",
    "DiLoCo",
    "Downpour",
    "ElasticAveraging",
    "Exchange",
    "Fetch",
    "Gossip",
    "Gradient",
    "GroupSide",
    "HardSync",
    "Hyperparameters",
    "Inbox",
    "LocalSGD",
    "Master",
    "Method",
    "Need",
    "NextGradient",
    "Publish",
    "Pulled",
    "Push",
    "ReadInbox",
    "ReadPeer",
    "Receive",
    "Replica",
    "Reply",
    "RingmasterASGD",
    "Send",
    "SendPeer",
    "ServerSide",
    "SoftSync",
    "Step",
    "StepTime",
    "checked",
    "load",
    "method_named",
    "register",
    "text_of",
    "with_period",
]
