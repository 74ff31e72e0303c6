"""Step times and starts of one group against DDP, and step times of a group beside a slow one and alone.

    python tests/benchmarks/step_time.py [--repeats 9] [--steps 60] [--batch-size 64] [--only one]

Prints medians of paired repeats: of steps, measured in one run; and of starts, each in processes of its own, from the
call of Python to the first batch. Promised are a ratio of at most 1.02 and a start at most 0.3 s later for one group,
and a ratio of at most 1.05 beside a group that sleeps 50 ms in every batch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import SCRIPTS, free_port, inherited, run


def ratio(pairs: list[dict[str, float]], above: str, below: str) -> str:
    """Median over pairs of one step time over the other, and the quartiles."""
    low, middle, high = statistics.quantiles([pair[above] / pair[below] for pair in pairs], n=4)
    return f"{middle:.3f}, quartiles {low:.3f} and {high:.3f}"


def milliseconds(pairs: list[dict[str, float]], name: str) -> str:
    """A median in words."""
    return f"{statistics.median(pair[name] for pair in pairs) * 1e3:.2f} ms"


def start(kind: str) -> float:
    """Seconds until the first batch of a fit in fresh processes, imports included."""
    environment = inherited() | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(SCRIPTS / "first_batch.py"), kind]
    began = time.time()
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
    return float(ran.stdout.splitlines()[-1]) - began


def starts(repeats: int) -> None:
    """Prints how much later one group starts than DDP, in changing order."""
    pairs = []
    for number in range(repeats):
        order = ("ddp", "omni") if number % 2 else ("omni", "ddp")
        pairs.append({kind: start(kind) for kind in order})
    low, middle, high = statistics.quantiles([pair["omni"] - pair["ddp"] for pair in pairs], n=4)
    print(f"first batch after {statistics.median(pair['ddp'] for pair in pairs):.2f} s with DDPStrategy, and")
    print(f"{middle:.2f} s later with one group, quartiles {low:.2f} and {high:.2f} (at most 0.3 s is promised)")


def one_group(repeats: int, steps: int, batch_size: int) -> None:
    """Prints step times of one group and of DDP."""
    options = {"repeats": repeats, "batch_size": batch_size, "measure": "overhead", "steps": steps}
    pairs = run("speed.py", options, timeout=580).results[0]
    print(f"DDPStrategy {milliseconds(pairs, 'ddp')} a step, OmniStrategy(groups=1) {milliseconds(pairs, 'omni')}")
    print(f"ratio {ratio(pairs, 'omni', 'ddp')} (at most 1.02 is promised)")
    print(f"noise: DDPStrategy against itself, in the same run, {ratio(pairs, 'again', 'ddp')}")


def beside(repeats: int, steps: int) -> None:
    """Prints step times of a group beside a slow one, and alone."""
    options: dict[str, Any] = {"repeats": repeats, "measure": "beside", "steps": steps, "own": 0.02, "batch_size": 8}
    pairs = run("speed.py", options, timeout=580).results[0]
    print(f"alone {milliseconds(pairs, 'alone')} a step, beside a group that sleeps {milliseconds(pairs, 'sleepy')}")
    print(f"ratio {ratio(pairs, 'sleepy', 'alone')} (at most 1.05 is promised)")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60, help="batches of each fit")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of each rank, where one group is timed")
    parser.add_argument("--only", choices=("one", "beside"), help="one group against DDP, or a group beside another")
    arguments = parser.parse_args()
    if arguments.only != "beside":
        one_group(arguments.repeats, arguments.steps, arguments.batch_size)
        starts(max(3, arguments.repeats // 2))
    if arguments.only != "one":
        beside(max(3, arguments.repeats // 2), arguments.steps)


if __name__ == "__main__":
    main()
