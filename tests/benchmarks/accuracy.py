"""Test accuracy of the Fashion-MNIST example with 1, 2 and 4 groups of four workers, three epochs each.

    python tests/benchmarks/accuracy.py [--seed 0]

Prints one line for each; promised are at least 88 % for every one. About a minute each on two cores.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fashion_mnist.py"


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    good = True
    for groups in (1, 2, 4):
        command = [sys.executable, str(EXAMPLE), f"--groups={groups}", f"--seed={arguments.seed}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        found = re.search(r"([\d.]+) ?%", done.stdout)
        if done.returncode or not found:
            print(f"groups={groups}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            return 1
        table = " | ".join(" ".join(line.strip("│┃ ").split()) for line in done.stdout.splitlines() if "│" in line)
        print(f"groups={groups}: {table}", flush=True)
        good &= float(found.group(1)) >= 88.0
    print("every one is at least 88 %" if good else "not every one is at least 88 %")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
