"""Diagnosis of a rank that waits in a collective of the user's own code: the collective, and the line of the call."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lightning_omni.strategy import NAMESPACES
from lightning_omni.strategy.lightning_internals.callbacks import current_hook

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_COLLECTIVES = "torch.distributed.distributed_c10d"
_LIBRARIES = {
    "torch",
    "torchmetrics",
    "lightning_omni",
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
}
_LOOPS = tuple(f"{name}.loops." for name in NAMESPACES)


def waits_in(frame: FrameType | None) -> str:
    """Return the collective that a thread is in and the user's code that called it; an empty string if there is none.

    Lightning and this package call collectives, too, but the cause is rarely on a rank that waits in one of those.
    """
    collective = ""
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        if module.startswith(_LOOPS):
            return ""
        if module == _COLLECTIVES:
            collective = code.co_name
        elif collective and module.partition(".")[0] not in _LIBRARIES | sys.stdlib_module_names:
            called = getattr(code, "co_qualname", code.co_name)  # exists from Python 3.11 on
            return f"{collective}(), called in {called} ({Path(code.co_filename).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


def whereabouts(trainer: Trainer) -> str:
    """Return where a rank calls a collective: the user's call if there is one, or the hook, and the batch."""
    called = waits_in(sys._getframe()).partition(", ")[2] or f"in {current_hook(trainer) or 'no hook'}"
    return f"{called}, after batch {trainer.fit_loop.batch_idx + 1} of epoch {trainer.current_epoch}"


def waiting_sentence(rank: int, seconds: float, where: str) -> str:
    """Return a warning about a rank without progress for some seconds; ``where`` is a result of `waits_in`."""
    return (
        f"rank {rank} has waited for {seconds:.0f} s in {where}: not all ranks have called it. If a hook calls it every"
        " n batches, let it count by batch_idx or trainer.global_step, in which the ranks of a group agree. Counts of"
        " its own differ after OmniTuner or regroup() has put ranks of different groups together."
        " A process group with ranks of several groups is for outside of the training epoch"
    )
