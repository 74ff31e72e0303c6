"""Every pair of features trains, or is refused by name in the words that the docs print."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from core import FEATURES, PAIRS, refused_pairs
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import TensorDataset

from lightning_omni import Compression, OmniStrategy, Server
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import METHODS, AsyncSGD, Method, method_named, register
from lightning_omni.simulator import Cluster, Computation, Failure, Limits, Workload, simulate

MESH = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "sharded": {"model_parallel": "fsdp"},
    "mesh": {"model_parallel": MESH},
    "servers": {"server": {"count": 2}},
    "merged": {"merged": "head"},
    "overlap": {"overlap": True},
    "joining": {"elastic": True, "server": {"address": "tcp://127.0.0.1:5555"}},
    "published": {"validation": "published"},
    "lossy": {"compression": {"push": "int8"}},
    "lossy_pull": {"compression": {"pull": "bf16"}},
    "topk": {"compression": {"push": "topk:0.5"}},
    "all_reduce": {"compression": {"all_reduce": "bf16"}},
    "record": {"server": {"record": "run.jsonl"}},
    "static": {"data": "static"},
    "rebalance": {"rebalance": "auto"},
}
"""What a user passes for each feature."""
ALIKE = ({"sharded", "mesh"}, {"lossy", "topk"}, {"joining", "servers"}, {"joining", "record"})
"""Values of one argument; and where the server is started, not here."""
SIMULATED = {"servers", "merged", "overlap", "joining", "lossy", "lossy_pull", "topk", "all_reduce", "rebalance"}
SETTINGS = {"fragments": {"fragments": 2, "period": 4}, "delay": {"fragments": 2, "period": 4, "delay": 1}}


def methods() -> Iterator[str]:
    """Every method as it is, in fragments if it has any, and with an exchange under way."""
    for name, kind in METHODS.items():
        if not kind.__module__.startswith("lightning_omni."):
            continue
        fields = kind.__struct_fields__
        short = {"period": 2, "fragments": 1, "n_push": 2, "n_fetch": 2}
        yield _text(name, {key: value for key, value in short.items() if key in fields})
        for key, settings in SETTINGS.items():
            if key in fields:
                yield _text(name, settings)
        if "delay" in fields:
            yield _text(name, {"period": 4, "fragments": 1, "delay": 1})


def _text(name: str, settings: dict[str, Any]) -> str:
    return f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}".rstrip(":")


def given(*features: str) -> dict[str, Any]:
    """The arguments of OmniStrategy for these features."""
    merged: dict[str, Any] = {}
    for feature in features:
        for name, value in ARGUMENTS[feature].items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    if "server" in merged:
        merged["server"] = Server(**merged["server"])
    if "compression" in merged:
        merged["compression"] = Compression(**merged["compression"])
    return merged


class Rowwise(AsyncSGD, frozen=True, kw_only=True, tag="test_rowwise"):
    """A method of somebody else's, whose server needs whole tensors.

    Example:
        >>> Rowwise().elementwise
        False
    """

    elementwise = False


@pytest.fixture(autouse=True, scope="module")
def is_registered() -> Iterator[None]:
    register(Rowwise)
    yield
    del METHODS["test_rowwise"]


CELLS = [
    ("test_rowwise", "sharded"),
    *((method, feature) for method, feature in product(methods(), ARGUMENTS)),
    *(("async_sgd", *pair) for pair in combinations(ARGUMENTS, 2) if set(pair) not in ALIKE),
]


def test_a_cell_has_every_feature() -> None:
    assert ARGUMENTS.keys() == FEATURES.keys()


def test_a_whole_model_may_be_under_way_with_decoupled_diloco_alone() -> None:
    assert not refused("decoupled_diloco:period=4,fragments=1,delay=2", [])
    assert [pair.second for pair in refused("diloco:period=4,fragments=1,delay=2", [])] == ["unfragmented"]


def test_every_pair_trains_or_is_refused_by_name(is_all: bool) -> None:
    """Of pairs that train, `make test` trains some with each method and each feature; `make test-all` trains all."""
    met, trained = set(), set[Any]()
    for method, *features in CELLS:
        broken, where = refused(method, features), f"{method} with {' and '.join(features)}"
        if not broken:
            OmniStrategy(groups=groups_of(features), method=method, **given(*features))
            simulated = tuple(sorted(SIMULATED.intersection(features)))
            if is_all or not {method, simulated} <= trained:
                assert train(method, features) >= 1, where
                trained |= {method, simulated}
            continue
        met |= broken
        with pytest.raises(ConfigurationError) as caught:
            OmniStrategy(groups=groups_of(features), method=method, **given(*features))
        assert any(str(caught.value).endswith(f": {pair.reason}; {pair.remedy}") for pair in broken), where
    assert met == set(PAIRS), "a pair of the table is in no cell"


def refused(method: str | Method, features: list[str]) -> set[Any]:
    """The pairs of the table that a cell breaks."""
    also = {"mesh": "sharded", "topk": "lossy", "lossy_pull": "lossy"}
    there = [*features, *(also[feature] for feature in features if feature in also)]
    value = method_named(method) if isinstance(method, str) else method
    return {pair for pair, _ in refused_pairs(value, dict.fromkeys(there, ""))}


def groups_of(features: list[str]) -> int | None:
    return None if "joining" in features else 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x).tanh())
        return y


DATA = TensorDataset(torch.randn(256, 3), torch.randn(256, 1))


def train(method: str, features: list[str]) -> int:
    """Updates of a short run in virtual time, with what of the features the simulator has."""
    events = (Failure(3, 0.001, until=0.03),) if "joining" in features else ()
    cluster = Cluster.even(4, seconds_per_sample=0.001, events=events, servers=2 if "servers" in features else 1)
    trace = simulate(
        method,
        2,
        cluster,
        Workload(Net(), DATA, lambda net, batch: (net(batch[0]) - batch[1]).square().mean()),
        batch_size=4,
        limits=Limits(updates=2),
        compression=given(*features).get("compression", "fp32"),
        overlap="overlap" in features,
        merged="head" if "merged" in features else None,
        computation=Computation(rebalance="auto" if "rebalance" in features else "off"),
    )
    return trace.updates
