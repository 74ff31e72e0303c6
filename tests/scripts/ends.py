"""Processes that end right after a collective, whose gloo threads hardly get any time. Prints how each one ended.

Run by hand::

    OMP_NUM_THREADS=1 python tests/scripts/ends.py 20
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_omni import World
from lightning_omni.runtime._private import GLOO_WORKER


class Hog:
    """Another process that keeps the one core busy, until the interpreter of this one is ending."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self.process = os.fork()
        while self.process == 0:
            if os.getppid() != self.parent:
                os._exit(0)

    def __del__(self, kill: Callable[[int, int], None] = os.kill, sleep: Callable[[float], None] = time.sleep) -> None:
        kill(self.process, signal.SIGKILL)
        sleep(0.2)  # without the interpreter's lock, so that a thread that wants it sees that the interpreter is ending


def starve() -> None:
    """Gloo's threads run when no other thread wants to."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == GLOO_WORKER:
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def end_with_a_collective_under_way() -> None:
    """The body of one process; the tensor is dropped here, and by gloo when it gets round to it."""
    global hog
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    World(groups=1)
    starve()
    hog = Hog()
    # One that is waited for would do, if its thread lost the processor at the wrong microsecond.
    dist.all_reduce(torch.ones(4), async_op=True)


if __name__ == "__main__":
    ends = []
    for _ in range(int(sys.argv[1])):
        child = os.fork()
        if child == 0:
            end_with_a_collective_under_way()
            sys.exit()
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.stdout.write(json.dumps(ends))
