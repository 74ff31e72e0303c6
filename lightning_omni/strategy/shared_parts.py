"""The parts of an OmniStrategy that the others use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_omni.errors import ConfigurationError
from lightning_omni.runtime import World, WorldOptions
from lightning_omni.runtime.balance import Balance
from lightning_omni.strategy.arguments import FitOptions
from lightning_omni.strategy.loops.driver import EpochDriver
from lightning_omni.strategy.loops.live_metrics import Reporting, StepTimes
from lightning_omni.strategy.optimizers import MergedSubmodule, Proxies, Trainable
from lightning_omni.strategy.signals import Signals
from lightning_omni.transport.serving import ServerProcess

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy


class Namespace(NamedTuple):
    """The names of one of Lightning's namespaces that a strategy uses.

    Attributes:
        processes: the launcher that forks or spawns processes.
        terminated: the exception that ends a fit after SIGTERM.
    """

    info: Callable[[str], None]
    warn: Callable[[str], None]
    launcher: Any
    processes: Any
    terminated: type[SystemExit]
    plain_checkpoint_io: type


class SharedParts:
    """The parts that other parts use, in one process.

    Attributes:
        strategy: the parts use only Lightning's own attributes of it.
        current_world: this rank's view of the run.
        server_process: the process of the embedded server before there is a world.
        is_evaluating: whether the Trainer validates, tests or predicts without a fit.
    """

    def __init__(
        self, strategy: DDPStrategy, namespace: Namespace, world_options: WorldOptions, options: FitOptions
    ) -> None:
        self.strategy, self.namespace, self.world_options = strategy, namespace, world_options
        self.current_world: World | None = None
        self.is_evaluating = False
        self.epochs = EpochDriver(options.data, namespace.info, namespace.warn, options.validation)
        self.balance = Balance(options.rebalance, namespace.info)
        self.step_times = StepTimes()
        self.trainable = Trainable(namespace.warn)
        self.merged, self.proxies = MergedSubmodule(options.merged), Proxies()
        self.reporting = Reporting()
        self.signals = Signals(namespace.terminated)
        self.server_process: ServerProcess | None = None

    @property
    def world(self) -> World:
        if self.current_world is None:
            raise ConfigurationError("OmniStrategy has no world yet: use it in a hook, when the Trainer runs")
        return self.current_world

    @property
    def pl_module(self) -> LightningModule:
        assert self.strategy.lightning_module is not None
        return self.strategy.lightning_module

    @property
    def trainer(self) -> Trainer:
        return self.pl_module.trainer

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context whose time does not count as compute time."""
        with self.balance.waiting(), self.step_times.waiting():
            yield

    def take_time(self) -> None:
        """Expect no progress of this rank during a long operation."""
        self.signals.pause()
        if self.current_world is not None and self.world.control is not None:
            self.world.control.suspend_stall_check()
