"""What must be gone before the interpreter takes itself apart.

DistributedDataParallel is part of reference cycles. Left to the dying interpreter, it takes its process group down with
it, whose threads then find no interpreter to report to: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import gc
from typing import Any
from weakref import WeakSet

_strategies: WeakSet[Any] = WeakSet()


def release_at_exit(strategy: Any) -> None:
    """At the end of the script a strategy lets go of its wrapped module, while torch can still end its threads.

    To be called after Lightning has seen to the end of torch.distributed: what is registered last comes first.
    """
    if not _strategies:
        atexit.unregister(_release)
        atexit.register(_release)
    _strategies.add(strategy)


def _release() -> None:
    for strategy in list(_strategies):
        strategy.model = None
    gc.collect()
