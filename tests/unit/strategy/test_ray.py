"""`RayOmniStrategy` without Ray; `make examples` runs it on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from lightning_omni.ray import RayOmniStrategy, elastic_torch_config
from lightning_omni.strategy import NAMESPACES
from lightning_omni.strategy.namespaces import namespace_of, strategy_class_in


@pytest.mark.parametrize("make", [RayOmniStrategy, elastic_torch_config], ids=lambda make: make.__name__)
def test_without_ray_the_error_has_the_command_that_installs_it(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ray.train", "ray.train.lightning", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lightning_omni.ray.backend", raising=False)
    with pytest.raises(ImportError, match=rf"^{make.__name__} needs Ray Train; .*pip install 'lightning-omni\[ray\]'"):
        make()


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_it_stays_a_strategy_for_ray_in_either_namespace(namespace: str) -> None:
    kind = strategy_class_in(RayOmniStrategy, namespace)
    assert issubclass(kind, RayOmniStrategy)
    assert namespace_of(kind) == namespace
