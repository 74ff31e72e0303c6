"""Every method in every wire format, overlapped or not, with one server or several, whatever becomes of a group.

    OMP_NUM_THREADS=1 python tests/benchmarks/matrix.py [--seeds 1] [--only int8]

Each combination that is not refused trains a small net in memory, in a random order of arrival: of what is pushed
nothing may be lost or counted twice, with what is owed to rounding; all ranks must have the servers' exact weights at
the end of each epoch; every sample must be used, and twice only by a group that died; the loss must fall. Told are the
combinations that break a promise, and how many there were; the exit code is 1 if any did.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

sys.path.insert(1, str(Path(__file__).parents[1]))
from cells import Training, cells, refusal


def main() -> int:
    """Trains all of them, and prints what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the combination's name, as it is printed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console, failed = Console(stderr=True), Counter[str]()
    chosen = [cell for cell in cells() if given.only in str(cell)]
    trained = [cell for cell in chosen if not refusal(cell)]
    began = time.process_time()
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(trained) * given.seeds)
        for cell in trained:
            progress.update(task, description=f"{cell}, {sum(failed.values())} failed")
            for seed in range(given.seeds):
                try:
                    Training(cell, seed)
                except Exception as error:
                    failed[type(error).__name__] += 1
                    print(f"{cell}, seed {seed}: {type(error).__name__}: {error}", flush=True)
                progress.advance(task)
    spent, total = time.process_time() - began, len(trained) * given.seeds
    print(f"{len(chosen)} combinations: {len(chosen) - len(trained)} refused, {total} trained in {spent:.0f} s of")
    print(f"processor time, {sum(failed.values())} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
