"""`RayOmniStrategy`, and the configuration of workers that Ray replaces one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods import Method
from lightning_omni.runtime import Elastic
from lightning_omni.runtime.model.tensor_sync import gathered
from lightning_omni.strategy.both_namespaces import OmniStrategy
from lightning_omni.strategy.lightning_internals.callbacks import callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from ray.train.torch import TorchConfig

_MISSING = "{} needs Ray Train; install it with: pip install 'lightning-omni[ray]'"


class RayOmniStrategy(OmniStrategy):
    """An OmniStrategy for the workers of Ray Train's TorchTrainer, in place of RayDDPStrategy.

    Ray starts the workers, and gives each its device, its rank and its node. See :doc:`/how-to/ray`.

    Args:
        groups: as for OmniStrategy, with the nodes of Ray's cluster. Leave it out with `elastic_torch_config`, where
            each worker is a group.
        method: as for OmniStrategy.
        elastic: as for OmniStrategy, but ``max_rejoins`` is 0, because Ray restarts its workers.
        **options: the other arguments of OmniStrategy. As with RayDDPStrategy, the backend of collectives is that of
            Ray's ``TorchConfig``.

    Raises:
        ImportError: Ray Train is not installed.
        ConfigurationError: this process is no worker of a TorchTrainer, or an argument is wrong.

    Example:
        In the function that TorchTrainer calls on each worker::

            strategy = RayOmniStrategy(groups=2)
            trainer = Trainer(strategy=strategy, plugins=[RayLightningEnvironment()], devices="auto")
            prepare_trainer(trainer).fit(module, loader)
    """

    def __init__(
        self,
        groups: int | None = None,
        method: str | Method | None = None,
        *,
        elastic: bool | Elastic | None = None,
        **options: Any,
    ) -> None:
        try:
            from ray.train.lightning import RayDDPStrategy
        except ImportError as error:
            raise ImportError(_MISSING.format("RayOmniStrategy")) from error
        if not dist.is_initialized():
            raise ConfigurationError(
                "RayOmniStrategy outside a worker of Ray Train, which has no process group: make it in the function"
                " that you pass to ray.train.torch.TorchTrainer"
            )
        RayDDPStrategy.register(RayOmniStrategy)  # so that `prepare_trainer` accepts it
        super().__init__(groups, method, elastic=replace(Elastic.of(elastic), max_rejoins=0), **options)

    # --- Devices and ranks, which Lightning would derive from the devices of its Trainer ------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        from ray.train.torch import get_device

        device: torch.device = get_device()
        return device

    @property
    @override
    def world_size(self) -> int:
        """Return the number of ranks in Ray's process group."""
        return dist.get_world_size() if self.parts.current_world is None else self.world.size

    @property
    @override
    def num_processes(self) -> int:
        """Return `world_size`: the Trainer counts the devices of one rank."""
        return self.world_size

    @property
    @override
    def global_rank(self) -> int:
        return dist.get_rank() if self.parts.current_world is None else self.world.torch_rank

    @override
    def _ranks_per_node(self) -> list[int]:
        """Return the number of ranks on each node; Ray numbers ranks node by node. All ranks call it."""
        own = torch.tensor([self.node_rank], device=self.root_device)
        return [*Counter(map(int, gathered(own, dist.group.WORLD))).values()]

    @override
    def setup(self, trainer: Trainer) -> None:
        """Set up, and refuse reports to Ray by workers that are replaced one by one."""
        from ray.train.lightning import RayTrainReportCallback

        if self.world_options.elastic.join and any(
            isinstance(each, RayTrainReportCallback) for each in callbacks_of(trainer)
        ):
            raise UnsupportedError(
                "RayTrainReportCallback and elastic_torch_config: ray.train.report waits for all workers, also for one"
                " that is being replaced; save with ModelCheckpoint in a folder that all nodes share"
            )
        super().setup(trainer)


def elastic_torch_config(*, serve_options: str = "", **options: Any) -> TorchConfig:
    """Return the ``torch_config=`` of a TorchTrainer whose workers are each a compute group, replaced one by one.

    Ray replaces a worker that has died or failed while the others train on (``FailureConfig(max_failures=...)``); the
    new one joins the run. A parameter server runs beside Ray's controller.

    Args:
        serve_options: options of ``lightning-omni serve``, as in ``"--allow-optimizer module:Class"``.
        **options: arguments of Ray's ``TorchConfig``.

    Raises:
        ImportError: Ray Train is not installed.
    """
    try:
        from lightning_omni.ray.backend import ElasticTorchConfig
    except ImportError as error:
        raise ImportError(_MISSING.format("elastic_torch_config")) from error
    config = ElasticTorchConfig(**options)
    config.serve_options = serve_options
    return config
