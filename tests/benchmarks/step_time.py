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


def ratio(pairs: list[dict[str, float]], above: str, below: str) -> float:
    """Median over pairs of one step time over the other."""
    return statistics.median(pair[above] / pair[below] for pair in pairs)


def milliseconds(pairs: list[dict[str, float]], name: str) -> str:
    """A median in words."""
    return f"{statistics.median(pair[name] for pair in pairs) * 1e3:.2f} ms"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    common: dict[str, Any] = {"repeats": arguments.repeats, "width": 2048}
    pairs = run("speed.py", {**common, "measure": "overhead", "steps": 300}, timeout=580).results[0]
    print(f"DDPStrategy {milliseconds(pairs, 'ddp')} a step, OmniStrategy(groups=1) {milliseconds(pairs, 'omni')}")
    print(f"ratio {ratio(pairs, 'omni', 'ddp'):.3f} (at most 1.02 is promised)")
    options = {**common, "repeats": max(3, arguments.repeats // 2), "measure": "beside", "steps": 60, "own": 0.01}
    pairs = run("speed.py", options, timeout=580).results[0]
    print(f"alone {milliseconds(pairs, 'alone')} a step, beside a group that sleeps {milliseconds(pairs, 'sleepy')}")
    print(f"ratio {ratio(pairs, 'sleepy', 'alone'):.3f} (at most 1.05 is promised)")


if __name__ == "__main__":
    main()
