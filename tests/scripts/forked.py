"""Ranks that are copies of a script's first process, without a launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import spares
import torch


def run(ranks: int, servers: int, train: Callable[[int], object]) -> NoReturn:
    """Runs every rank in a process of its own, and ends this one, which is rank 0.

    The exit code is 0, or that of a rank that has failed.

    Args:
        ranks: how many.
        servers: that rank 0 is going to start.
        train: what a rank does, whose number it is given.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    rank, children = 0, list[int]()
    for number in range(1, ranks):
        if (child := os.fork()) == 0:
            rank, children = number, []
            break
        children.append(child)
    if rank == 0:
        spares.prepare(ranks=0, servers=servers)
    train(rank)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.stdout.flush()
    os._exit(max(codes, default=0, key=abs))
