"""Private attributes of Lightning's strategies, modules and signals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_omni.strategy import NAMESPACES

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


FIRST_BARRIER = "run-stage"
"""Name of the first barrier after Lightning has registered its signal handlers."""


def set_ddp_options(strategy: Any, options: dict[str, Any]) -> None:
    strategy._ddp_kwargs = options
    strategy._pl_static_graph_delay_done = False  # the next DDP has a first iteration of its own


def model_parallel_options(strategy: Any) -> dict[str, Any] | None:
    kind = type(strategy)
    if kind.__name__ != "ModelParallelStrategy" or kind.__module__ not in _MODEL_PARALLEL_MODULES:
        return None
    names = ("data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint", "process_group_backend")
    return {name: getattr(strategy, f"_{name}") for name in (*names, "timeout")}


_MODEL_PARALLEL_MODULES = tuple(f"{name}.strategies.model_parallel" for name in NAMESPACES)


def set_device_mesh(module: Any, mesh: Any) -> None:
    module._device_mesh = mesh


def exclude_from_broadcast(module: Any, names: list[str]) -> None:
    """Exclude parameters from DDPStrategy's broadcast before an evaluation: each rank has other rows."""
    module._ddp_params_and_buffers_to_ignore = names


@contextmanager
def keep_on_device(strategy: Any) -> Iterator[None]:
    """Return a context in which a strategy's ``teardown`` leaves the module on its device.

    After an error in its forward or backward pass FSDP2 cannot move a module.
    """
    module = strategy.lightning_module
    if module is not None:
        vars(module)["cpu"] = lambda: module
    try:
        yield
    finally:
        if module is not None:
            del vars(module)["cpu"]


def set_launcher(strategy: Any, launcher: Any) -> None:
    strategy._launcher = launcher


def start_method(strategy: Any) -> str:
    return str(strategy._start_method)


def set_start_method(strategy: Any, name: str) -> None:
    strategy._start_method = name


def collective_timeout(strategy: Any) -> Any:
    return strategy._timeout


def has_model_averaging(strategy: Any) -> bool:
    return strategy._model_averaging_period is not None


def has_ddp_comm_hook(strategy: Any) -> bool:
    return strategy._ddp_comm_hook is not None


def mark_terminated(trainer: Trainer) -> None:
    trainer._signal_connector.received_sigterm = True


def set_rank(rank: int) -> None:
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
