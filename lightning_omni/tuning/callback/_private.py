"""Uses of Lightning's underscore names, which Lightning does not promise to keep. Checked on Lightning 2.6.6.

A test notices when one of these names is gone, as for `lightning_omni.strategy._private`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def end_epoch(trainer: Trainer) -> None:
    """End the epoch, from ``on_train_batch_start``, as if the module's hook had returned -1."""
    trainer.fit_loop.epoch_loop.batch_progress.increment_processed()
    raise StopIteration
