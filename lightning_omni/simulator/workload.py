"""The workload of a simulated cluster: a model with its data, loss, metrics and optimizer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from lightning_omni.checks import check_kind
from lightning_omni.errors import ConfigurationError

Loss = Callable[[Any, Any], Tensor]
Evaluate = Callable[[nn.Module], Mapping[str, float]]
MakeOptimizer = Callable[[Any], Optimizer]
BUILT_IN = "synthetic"
"""Name of the workload that needs no file and no download."""


def sgd(parameters: Any) -> Optimizer:
    """Return SGD with a learning rate of 0.1 and no momentum."""
    return SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Workload:
    """A model and its training.

    Args:
        data: a map-style dataset; the tensors of a ``TensorDataset`` are indexed directly, other data are collated.
        loss: the mean loss of a batch, from the model and the batch.
        evaluate: returns the metrics, by name, of a model in evaluation mode, if any.
        optimizer: makes a torch optimizer from parameters.

    Raises:
        ConfigurationError: an argument has the wrong type, or the model has no trainable parameter.
    """

    model: nn.Module
    data: Any
    loss: Loss
    evaluate: Evaluate | None = None
    optimizer: MakeOptimizer = sgd

    def __post_init__(self) -> None:
        check_kind("model", self.model, nn.Module, "a torch.nn.Module")
        for name, given, what in (
            ("loss", self.loss, "a function of the model and a batch"),
            ("evaluate", self.evaluate, "a function of the model, or None"),
            ("optimizer", self.optimizer, "a function of parameters, as lambda parameters: SGD(parameters, lr=0.1)"),
        ):
            if not callable(given) and (name, given) != ("evaluate", None):
                raise ConfigurationError(f"{name}={given!r}: pass {what}")
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigurationError(
                "model: none of its parameters has requires_grad=True; pass one that can be trained"
            )

    @property
    def nbytes(self) -> int:
        """Return the bytes of the model's parameters."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


def synthetic() -> Workload:
    """Make points of ten classes in 24 dimensions, in three overlapping clusters each, and a perceptron of 64 units.

    The 4096 points for training and 2048 for evaluation are always the same.
    """
    random = torch.Generator().manual_seed(0)
    centres = 1.6 * torch.randn(30, 24, generator=random)
    clusters = torch.randint(0, 30, (6144,), generator=random)
    points = centres[clusters] + 1.8 * torch.randn(6144, 24, generator=random)
    labels = clusters % 10
    return Workload(
        model=nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 10)),
        data=TensorDataset(points[:4096], labels[:4096]),
        loss=classification_loss,
        evaluate=partial(classification_metrics, inputs=points[4096:], labels=labels[4096:]),
    )


def classification_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def classification_metrics(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    outputs = model(inputs)
    return {
        "loss": float(cross_entropy(outputs, labels)),
        "accuracy": float((outputs.argmax(1) == labels).float().mean()),
    }


def workload_named(text: str, seed: int = 0) -> Workload:
    """Return the built-in workload, or that of a user's function.

    Args:
        text: ``"synthetic"``, ``"file.py:function"`` or ``"package.module:function"``, of a function without arguments.
        seed: seed of torch's RNG while the function runs, and so of the model's initial weights.

    Raises:
        ConfigurationError: ``text`` names no function, or one that returns another type.

    Example:
        >>> workload_named("synthetic").nbytes
        9000
    """
    make = synthetic if text == BUILT_IN else _imported(text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        workload = make()
    if not isinstance(workload, Workload):
        raise ConfigurationError(
            f"workload={text!r} returns {type(workload).__name__}; let it return lightning_omni.simulator.Workload"
        )
    return workload


def _imported(text: str) -> Callable[..., Any]:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        known = f"{BUILT_IN!r}, 'file.py:function' or 'package.module:function'"
        raise ConfigurationError(f"workload={text!r}: pass {known}")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"workload={text!r}: there is no function {name!r} in {place}")
    return function  # type: ignore[no-any-return]


def _module_of_file(path: Path) -> ModuleType:
    """Import a file as a module; as for a script, its folder is added to the import path."""
    if not path.is_file():
        raise ConfigurationError(f"workload: there is no file {str(path)!r}; pass its path before the colon")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    _import_from(path.parent.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses need their module there
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    _import_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an import inside it
        raise ConfigurationError(
            f"workload: there is no module {error.name!r}; pass 'file.py:function', or a module that can be imported"
        ) from error


def _import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
