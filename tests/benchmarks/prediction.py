"""Rates of ways of exchanging that were not measured: what `Profile` says, and what the simulator then does.

    python tests/benchmarks/prediction.py [--bottlenecks]

The cells are those of `tests/predictions.py`: four devices train in one group, and a profile is fitted to that. Printed
are errors of samples per second. Promised are a median of 5 % and a worst of 15 %; ends with 1 if one is missed. With
``--bottlenecks`` each resource is made twice as fast, too, to see whether the one that was named helps most. Two
minutes, or ten.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from predictions import Cell, cells

MEDIAN, WORST = 0.05, 0.15


def main() -> int:
    """Prints what becomes of every cell; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bottlenecks", action="store_true", help="whether they are named rightly")
    bottlenecks = parser.parse_args().bottlenecks
    torch.set_num_threads(1)
    print(f"{'devices':12} {'links':9} {'way':39} wire  groups  samples/s   error  named")
    found: list[float] = []
    wrong = 0
    for cell in cells():
        rate = cell.rate()
        prediction = cell.predicted()
        error, named = prediction.samples_per_second.value / rate - 1, prediction.bottleneck
        found.append(abs(error))
        print(f"{line(cell, rate)} {error:+7.1%}  {named}", flush=True)
        if bottlenecks and not cell.names_rightly(named):
            wrong += 1
            gains = ", ".join(f"{name} {gain:.0f}" for name, gain in cell.gains().items())
            print(f"    wrongly: twice as fast it is {gains}", flush=True)
    print(f"median {statistics.median(found):.1%}, worst {max(found):.1%} of {len(found)}")
    if bottlenecks:
        print(f"bottlenecks named wrongly: {wrong} of {len(found)}")
    return int(statistics.median(found) > MEDIAN or max(found) > WORST or wrong > 0)


def line(cell: Cell, rate: float) -> str:
    """The beginning of a row."""
    return f"{cell.devices:12} {cell.links:9} {cell.way.name:39} {cell.wire:5} {cell.groups:6} {rate:10.0f}"


if __name__ == "__main__":
    sys.exit(main())
