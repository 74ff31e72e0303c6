"""What touches underscore names of Lightning, which it does not promise to keep. Checked on Lightning 2.6.6.

One small place, as `lightning_omni.strategy._private` is; a test notices when one of these names is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


def is_compiled(module: LightningModule) -> bool:
    """Whether a LightningModule went through torch.compile before the Trainer got it."""
    return getattr(module, "_compiler_ctx", None) is not None


def skip_the_rest(trainer: Trainer) -> None:
    """Called in ``on_train_batch_start``: the epoch ends here, as if the module's hook had returned -1."""
    trainer.fit_loop.epoch_loop.batch_progress.increment_processed()
    raise StopIteration
