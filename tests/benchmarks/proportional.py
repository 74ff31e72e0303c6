"""Ranks of speeds 1 : 2 : 4 in one group, emulated by sleeping in proportion to their samples.

    python tests/benchmarks/proportional.py [--repeats 3]

Prints the group's throughput as a part of the sum of the speeds, with the batch split by speed and under plain DDP,
measured in one run. Promised is 0.93 of the sum once the split is steady.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import run

SPEEDS = (100.0, 200.0, 400.0)
"""Samples per second. Batches then take long enough that two cores are not what limits three ranks."""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    options = {"speeds": SPEEDS, "batch_size": 64, "steps": 60, "steady": 20, "repeats": arguments.repeats}
    finished = run("proportional.py", options, timeout=580)
    repeats, whole = finished.results[0], sum(SPEEDS)

    def part(kind: str, what: str = "throughput") -> str:
        values = [repeat[kind][what] / whole for repeat in repeats]
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    print(f"speeds {' : '.join(f'{speed:.0f}' for speed in SPEEDS)} samples/s, sum {whole:.0f}; parts of the sum:")
    print(f'rebalance="auto", steady   {part("auto")} (at least 0.93 is promised)')
    print(f'rebalance="auto", 60 steps  {part("auto", "from_the_start")}, the first steps with equal parts included')
    print(f"plain DDP                   {part('ddp')} (3/7 = 0.429 at best)")
    ratios = [repeat["auto"]["throughput"] / repeat["ddp"]["throughput"] for repeat in repeats]
    print(f"ratio, steady to DDP       {statistics.median(ratios):.2f} (7/3 = 2.33 at best)")
    for line in dict.fromkeys(line for line in finished.output.splitlines() if "rebalanced" in line):
        print(line)


if __name__ == "__main__":
    main()
