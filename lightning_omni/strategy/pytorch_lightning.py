"""OmniStrategy for ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]

from lightning_omni.strategy import either
from lightning_omni.strategy.arguments import register_names
from lightning_omni.strategy.checkpoints import WholeFileHooks
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.launcher import OmniLauncherHooks, OmniProcessesHooks


class OmniLauncher(OmniLauncherHooks, _SubprocessScriptLauncher):
    """Starts ranks, and lets a run outlive the death of some."""


class OmniProcesses(OmniProcessesHooks, _MultiProcessingLauncher):
    """Starts ranks as copies of the script's process, or as new ones that are given the Trainer."""


class OmniCheckpointIO(WholeFileHooks, TorchCheckpointIO):
    """Saves checkpoints as whole files, or not at all."""


class NamespaceDDP(DDPStrategy):
    """DDPStrategy, with what else an OmniStrategy takes from this namespace."""

    rank_zero_info = staticmethod(rank_zero_info)
    rank_zero_warn = staticmethod(rank_zero_warn)
    launcher_class = OmniLauncher
    terminated_class = SIGTERMException
    plain_checkpoint_io = TorchCheckpointIO
    checkpoint_io_class = OmniCheckpointIO
    processes_class = OmniProcesses


class OmniStrategy(OmniStrategyHooks, NamespaceDDP):  # type: ignore[misc]  # noqa: D101
    __doc__ = OmniStrategyHooks.__doc__


DDPStrategy.register(OmniStrategyHooks)  # this namespace's Trainer takes what was made for the other
either.take_base(NamespaceDDP, OmniStrategy)
register_names(StrategyRegistry, OmniStrategy)
