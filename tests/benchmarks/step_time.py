"""Step times: one group against DDP, and a group beside a slow one against the same group alone.

    python tests/benchmarks/step_time.py [--repeats 9]

Prints medians of paired repeats, measured in one run. Promised are a ratio of at most 1.02 for one group, and of at
most 1.05 beside a group that sleeps 50 ms in every batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import run


def ratio(pairs: list[dict[str, float]], above: str, below: str) -> str:
    """Median over pairs of one step time over the other, and the quartiles."""
    low, middle, high = statistics.quantiles([pair[above] / pair[below] for pair in pairs], n=4)
    return f"{middle:.3f}, quartiles {low:.3f} and {high:.3f}"


def milliseconds(pairs: list[dict[str, float]], name: str) -> str:
    """A median in words."""
    return f"{statistics.median(pair[name] for pair in pairs) * 1e3:.2f} ms"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    common: dict[str, Any] = {"repeats": arguments.repeats, "batch_size": 64}
    pairs = run("speed.py", {**common, "measure": "overhead", "steps": 60}, timeout=580).results[0]
    print(f"DDPStrategy {milliseconds(pairs, 'ddp')} a step, OmniStrategy(groups=1) {milliseconds(pairs, 'omni')}")
    print(f"ratio {ratio(pairs, 'omni', 'ddp')} (at most 1.02 is promised)")
    print(f"noise: DDPStrategy against itself, in the same run, {ratio(pairs, 'again', 'ddp')}")
    options = {
        **common,
        "repeats": max(3, arguments.repeats // 2),
        "measure": "beside",
        "steps": 60,
        "own": 0.02,
        "batch_size": 8,
    }
    pairs = run("speed.py", options, timeout=580).results[0]
    print(f"alone {milliseconds(pairs, 'alone')} a step, beside a group that sleeps {milliseconds(pairs, 'sleepy')}")
    print(f"ratio {ratio(pairs, 'sleepy', 'alone')} (at most 1.05 is promised)")


if __name__ == "__main__":
    main()
