"""The classes of this package's strategy for ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]

from lightning_omni.strategy import both_namespaces
from lightning_omni.strategy.arguments import register_names
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.launcher import OmniLauncherHooks, OmniProcessesHooks
from lightning_omni.strategy.shared_parts import Namespace


class OmniLauncher(OmniLauncherHooks, _SubprocessScriptLauncher):
    """The subprocess launcher."""


class OmniProcesses(OmniProcessesHooks, _MultiProcessingLauncher):
    """The multiprocessing launcher."""


class NamespaceDDP(DDPStrategy):
    """The DDPStrategy of this namespace, with other names that OmniStrategy uses."""

    namespace = Namespace(
        info=rank_zero_info,
        warn=rank_zero_warn,
        launcher=OmniLauncher,
        processes=OmniProcesses,
        terminated=SIGTERMException,
        plain_checkpoint_io=TorchCheckpointIO,
    )


class OmniStrategy(OmniStrategyHooks, NamespaceDDP):
    __doc__ = OmniStrategyHooks.__doc__


DDPStrategy.register(OmniStrategyHooks)  # so that this namespace's Trainer accepts strategies made for the other
both_namespaces.take_base(NamespaceDDP, OmniStrategy)
register_names(StrategyRegistry, OmniStrategy)
