"""A rank that waits in a collective of the user's own code: which one, and where the call is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lightning_omni.strategy import NAMESPACES, _private

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
    """The collective that a thread is in, and the user's hook that called it; nothing if there is no such hook.

    Lightning and this package make collectives, too. A rank that waits in one of those is not the one to look at.

    Args:
        frame: the innermost of the thread.
    """
    collective = ""
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        if module.startswith(_LOOPS):
            return ""
        if module == _COLLECTIVES:
            collective = code.co_name
        elif collective and module.partition(".")[0] not in _LIBRARIES | sys.stdlib_module_names:
            called = getattr(code, "co_qualname", code.co_name)  # from Python 3.11
            return f"{collective}(), called in {called} ({Path(code.co_filename).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


def whereabouts(trainer: Trainer) -> str:
    """Return where a rank that calls a collective is: the user's call if there is one, or the hook, and the batch."""
    called = waits_in(sys._getframe()).partition(", ")[2] or f"in {_private.hook_of(trainer) or 'no hook'}"
    return f"{called}, after batch {trainer.fit_loop.batch_idx + 1} of epoch {trainer.current_epoch}"


def waiting_sentence(rank: int, seconds: float, where: str) -> str:
    """What a user is told of a rank that waits for long.

    Args:
        rank: its number.
        seconds: since it made progress.
        where: what `waits_in` has found.
    """
    return (
        f"rank {rank} has waited for {seconds:.0f} s in {where}: not all ranks have called it. If a hook calls it every"
        " n batches, let it count by batch_idx or trainer.global_step, in which the ranks of a group agree. Counts of"
        " its own differ after OmniTuner or regroup() has put ranks of different groups together."
        " A process group with ranks of several groups is for outside of the training epoch"
    )
