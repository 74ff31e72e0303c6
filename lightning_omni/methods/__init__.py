"""The methods by which groups exchange: what is sent and how it is merged. docs/methods.md says how to choose one.

Pass one to ``OmniStrategy(method=...)``, by its name in `METHODS` or as a value: ``methods.DiLoCo(period=50)``. Each is
in a file of its own, without sockets, clocks or Lightning.
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_omni.methods.async_diloco import AsyncDiLoCo
from lightning_omni.methods.async_sgd import AsyncSGD
from lightning_omni.methods.contract import (
    Answer,
    Barrier,
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
    Sum,
    with_period,
)
from lightning_omni.methods.decoupled_diloco import DecoupledDiLoCo
from lightning_omni.methods.delay_compensated import DelayCompensated
from lightning_omni.methods.diloco import DiLoCo
from lightning_omni.methods.downpour import Downpour
from lightning_omni.methods.elastic_averaging import ElasticAveraging
from lightning_omni.methods.gossip import Gossip
from lightning_omni.methods.hardsync import HardSync
from lightning_omni.methods.local_sgd import LocalSGD
from lightning_omni.methods.master import Master
from lightning_omni.methods.replica import Hyperparameters, Pulled, Replica
from lightning_omni.methods.softsync import SoftSync
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
}
"""Every method by the name under which it travels."""
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
    """The method, or preset, of that name, with other settings than its own after a colon.

    Raises:
        ConfigurationError: there is none, or it has no such setting.

    Example:
        >>> method_named("gpu_asgd")
        Downpour(n_push=10, n_fetch=10, send='updates', warm_start=0)
        >>> method_named("elastic_averaging:period=8").period
        8
    """
    return REGISTRY.named(text, PRESETS)


def checked(method: Method) -> Method:
    """The same method, if all its settings are of the right type.

    Raises:
        ConfigurationError: one is not; a msgspec struct finds out no sooner.
    """
    return REGISTRY.checked(method)


def text_of(method: Method, without: Collection[str] = ()) -> str:
    """The text by which `method_named` gives the method.

    Args:
        method: one that is known by its name.
        without: settings that are left out.

    Example:
        >>> text_of(method_named("local_sgd:period=4,warmup_steps=10"), without=("period",))
        'local_sgd:warmup_steps=10'
    """
    return REGISTRY.text_of(method, without)


def load(path: str) -> type[Method]:
    """Imports and registers a method, from its path ``module:Class``. A server is told the paths of what it serves.

    Raises:
        ConfigurationError: it cannot be imported, or is no method.

    Example:
        >>> load("lightning_omni.methods.gossip:Gossip").__name__
        'Gossip'
    """
    return REGISTRY.load(path)


def register(kind: type[Method]) -> type[Method]:
    """Makes a method of your own known by its tag. A class decorator.

    The embedded server imports the module that a run's method comes from; a standalone server is told with
    ``lightning-omni serve --method module:Class``.

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
    "Send",
    "SendPeer",
    "ServerSide",
    "SoftSync",
    "Step",
    "StepTime",
    "Sum",
    "checked",
    "load",
    "method_named",
    "register",
    "text_of",
    "with_period",
]
