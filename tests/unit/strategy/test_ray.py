"""`RayOmniStrategy` without Ray; `make examples` runs it on a cluster."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

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


def test_the_server_beside_the_controller_gets_the_options_of_the_torch_config(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_config = type("TorchConfig", (), {"backend_cls": object})
    contents: dict[str, dict[str, Any]] = {
        "ray": {"util": SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")},
        "ray.train": {},
        "ray.train.torch": {"TorchConfig": torch_config},
        "ray.util": {},
        "ray.util.scheduling_strategies": {"NodeAffinitySchedulingStrategy": object},
    }
    for name, found in contents.items():
        module = ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "lightning_omni.ray.backend", raising=False)
    config = elastic_torch_config(serve_options="--allow-optimizer 'mine:Own'")
    backend = importlib.import_module("lightning_omni.ray.backend")
    del sys.modules["lightning_omni.ray.backend"]
    started: list[list[str]] = []

    def start(command: list[str], **options: Any) -> Any:
        started.append(command)
        return SimpleNamespace(
            stderr=io.StringIO("parameter server on tcp://127.0.0.1:5555, key from the environment\n")
        )

    monkeypatch.setattr(backend.subprocess, "Popen", start)
    actor = backend.ServerActor(config.serve_options)
    assert actor.variables()["LIGHTNING_OMNI_SERVER"] == "tcp://127.0.0.1:5555"
    assert started[0][7:9] == ["--allow-optimizer", "mine:Own"]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_it_stays_a_strategy_for_ray_in_either_namespace(namespace: str) -> None:
    kind = strategy_class_in(RayOmniStrategy, namespace)
    assert issubclass(kind, RayOmniStrategy)
    assert namespace_of(kind) == namespace
