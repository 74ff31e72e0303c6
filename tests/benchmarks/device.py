"""A CIFAR-shaped CNN on this machine: the Trainer's defaults against `DeviceTuner`, and against lowering.

    python tests/benchmarks/device.py [--batch-size 256] [--rounds 7] [--steps 6]

Every kind trains in a process of its own, and all take turns; ratios are medians over rounds of one run. Loading is
counted, probing is not. Promised on two CPU cores are at least 2.5 times the Trainer's defaults with bfloat16 allowed,
1.25 times without, and 5.5 times lowering image by image. Ends with 1 if one of these is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples" / "studies"))

from single_device import KINDS, PER_IMAGE, PLAIN, TUNED, TUNED_BF16, measure, ratio

PROMISED = ((TUNED_BF16, PLAIN, 2.5), (TUNED, PLAIN, 1.25), (TUNED_BF16, PER_IMAGE, 5.5))


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each fit")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for each tuner's measurements")
    arguments = parser.parse_args()
    speeds, reports = measure(arguments.batch_size, arguments.rounds, arguments.steps, arguments.budget)
    for kind in KINDS:
        print(f"{kind}: {statistics.median(speeds[kind]):.0f} samples/s")
    for kind, report in reports.items():
        for each in report["findings"]:
            gain = f"{each['gain']:.2f}" if each["gain"] is not None else "-"
            print(f"  {kind} | {each['step']}: {each['tried']} | gain {gain} | {each['verdict']} {each['reason']}")
        print(f"  {kind} | {report['seconds']:.0f} s of measurements, not counted")
    missed = 0
    for above, below, promised in (*PROMISED, (TUNED, PER_IMAGE, None)):
        median, low, high = ratio(speeds, above, below)
        text = f"{above} over {below}: {median:.2f}, rounds from {low:.2f} to {high:.2f}"
        print(text + (f" (at least {promised} is promised)" if promised is not None else ""))
        missed += promised is not None and median < promised
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
