"""The table of pairs of features and traits that do not work together. Every refusal of one reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import AsyncSGD, DiLoCo, LocalSGD, Method

FEATURES = {
    "sharded": "`model_parallel=`",
    "mesh": "`ModelParallelStrategy`",
    "servers": "several servers",
    "merged": "`merged=`",
    "overlap": "`overlap=True`",
    "joining": "`elastic=True`",
    "published": '`validation="published"`',
    "lossy": "lossy pushes or pulls",
    "lossy_pull": "lossy pulls",
    "topk": "top-k pushes",
    "all_reduce": "`Compression(all_reduce=)`",
    "record": "`Server(record=)`",
    "static": '`data="static"`',
    "rebalance": '`rebalance="auto"`',
}
"""The features beside the method, with their names in the docs."""


class Trait(NamedTuple):
    """A property of methods.

    Args:
        label: its name in the docs.
        has: returns whether a method has it.
        setting: the setting of the method that causes it; empty if all methods of this kind have it.
    """

    label: str
    has: Callable[[Method], bool]
    setting: str = ""

    def given(self, method: Method) -> str:
        setting = f"({self.setting}={getattr(method, self.setting)!r})" if self.setting else ""
        return f"method={type(method).__name__}{setting}"


TRAITS = {
    "other": Trait("methods other than `async_sgd`", lambda method: not isinstance(method, AsyncSGD)),
    "peers": Trait("`gossip`", lambda method: method.talks_to_peers),
    "whole": Trait("methods that need whole tensors", lambda method: not method.elementwise),
    "mean": Trait("methods that evaluate a mean", lambda method: method.evaluated == "mean"),
    "weights": Trait("methods that push weights", lambda method: method.pushes_weights),
    "fragments": Trait("`fragments=` above 1", lambda method: method.fragments > 1, "fragments"),
    "unfragmented": Trait(
        "`diloco` with `fragments=1`", lambda method: isinstance(method, DiLoCo) and method.fragments == 1, "fragments"
    ),
    "average": Trait("`local_sgd`", lambda method: isinstance(method, LocalSGD)),
    "delay": Trait("`delay=`", lambda method: bool(getattr(method, "delay", 0)), "delay"),
}
"""The properties of methods in `PAIRS`."""


class Pair(NamedTuple):
    """Two features or traits that do not work together; ``remedy`` ends the message with advice."""

    first: str
    second: str
    reason: str
    remedy: str


_ONE_HEAD = "a merged head works with async_sgd, one server and groups that are started together"
_NO_HEAD = "leave merged= out"

PAIRS = (
    Pair("merged", "other", _ONE_HEAD, 'pass method="async_sgd", or leave merged= out'),
    Pair("merged", "sharded", "each member of a group has a part of the head", "leave merged= or model_parallel= out"),
    Pair("merged", "servers", "one server holds all of the head", "pass one server, or leave merged= out"),
    Pair("merged", "overlap", "a step waits for its access to the head", "leave overlap= or merged= out"),
    Pair("merged", "joining", _ONE_HEAD, _NO_HEAD),
    Pair("merged", "published", "the head is at the server, and trains on there", 'pass validation="wait"'),
    Pair("merged", "lossy", "activations travel uncompressed", 'pass "fp32", or leave merged= out'),
    Pair("merged", "rebalance", "the head takes equal parts of a group's batch", 'pass rebalance="off"'),
    Pair(
        "overlap",
        "other",
        "only exchanges of async_sgd overlap a gradient in this way; diloco and decoupled_diloco in fragments have"
        ' delay=, as in method="diloco:period=48,fragments=4,delay=2"',
        "leave overlap= out",
    ),
    Pair("delay", "average", "the steps that a group makes meanwhile would be lost", 'pass delay=0, or "diloco"'),
    Pair("delay", "unfragmented", "only fragments are exchanged while groups train on", "pass fragments=2 or more"),
    Pair(
        "sharded",
        "fragments",
        "fragments are cut out of whole parameters, and each member has a part of them",
        "pass fragments=1",
    ),
    Pair(
        "sharded",
        "whole",
        "the method does not treat each number of the weights by itself, and no server has all of them",
        "pass another method, or leave model_parallel= out",
    ),
    Pair(
        "sharded",
        "peers",
        "members of a group would have to agree on every message of another group",
        'pass method="local_sgd", whose groups exchange with servers, or leave model_parallel= out',
    ),
    Pair(
        "sharded",
        "servers",
        "each member of a group has a server for its share, so their number is that of the shards",
        "leave it out",
    ),
    Pair(
        "sharded",
        "published",
        "the weights of a validation are fetched whole by one group",
        'pass validation="wait", or leave model_parallel= out',
    ),
    Pair(
        "sharded",
        "record",
        "a record is replayed with groups that hold the model whole",
        "leave record= or model_parallel= out",
    ),
    Pair("sharded", "all_reduce", "FSDP2 averages what it shards", "leave all_reduce= or model_parallel= out"),
    Pair(
        "sharded",
        "rebalance",
        "speeds are measured by hooks of gradients, which FSDP2 does not call",
        'pass rebalance="off", or leave model_parallel= out',
    ),
    Pair(
        "joining",
        "peers",
        "groups exchange with those that were formed with them, and never with one that joins later",
        "pass another method",
    ),
    Pair(
        "joining",
        "published",
        "a group that joins has no results of validations that it did not see",
        'pass validation="wait", or start all ranks together',
    ),
    Pair(
        "joining",
        "static",
        "samples that are dealt out beforehand leave none for a group that joins",
        'pass data="dynamic"',
    ),
    Pair("published", "mean", "the mean of all groups' weights is evaluated", 'pass validation="wait"'),
    Pair(
        "published",
        "static",
        "the samples that the server deals out tell when a validation is due",
        'pass data="dynamic", or validation="wait"',
    ),
    Pair("topk", "weights", "a part of the weights is no weights", 'pass "bf16" or "int8", or method="diloco"'),
    Pair(
        "lossy_pull",
        "average",
        "an answer is pushed again with the steps made since, and rounding would swallow these",
        'leave pull= at "fp32", or pass method="diloco:outer_lr=1.0,outer_momentum=0"',
    ),
    Pair("all_reduce", "record", "a record is replayed with exact averages", "leave all_reduce= or record= out"),
    Pair(
        "static",
        "rebalance",
        "samples that are dealt out beforehand cannot be split by speed",
        'pass data="dynamic", or rebalance="off"',
    ),
)
"""The pairs that do not work."""


def refused_pairs(method: Method, given: Mapping[str, str]) -> Iterator[tuple[Pair, str]]:
    """Yield each of `PAIRS` that the method and the features make, with its message.

    ``given`` has the features by their keys in `FEATURES`, as the user wrote them.

    Example:
        >>> [(pair, message)] = refused_pairs(LocalSGD(), {"overlap": "overlap=True"})
        >>> pair.first, pair.second, message.partition(":")[0]
        ('overlap', 'other', 'overlap=True and method=LocalSGD')
    """
    there = {**given, **{key: each.given(method) for key, each in TRAITS.items() if each.has(method)}}
    for pair in PAIRS:
        if pair.first in there and pair.second in there:
            yield pair, f"{there[pair.first]} and {there[pair.second]}: {pair.reason}; {pair.remedy}"


def refuse_pairs(method: Method, given: Mapping[str, str]) -> None:
    for _, message in refused_pairs(method, given):
        raise ConfigurationError(message)
