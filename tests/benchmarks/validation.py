"""How long ranks wait to validate, where the times of their steps are random: all groups together, and published.

    OMP_NUM_THREADS=1 python tests/benchmarks/validation.py [--updates 512] [--every 64] [--step 0.1]

Four groups of one rank train one epoch; steps and evaluations take exponential times, emulated by sleeping, and a
validation of all groups is due every so many updates. Prints, for each way, the part of the run in which ranks neither
train nor evaluate: between steps at a validation, beyond a usual exchange, and at the epoch's end, where all groups
synchronize in any case (the third line has no validation at all).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=512, help="of all groups together")
    parser.add_argument("--every", type=int, default=64, help="updates between two validations")
    parser.add_argument("--batches", type=int, default=16, help="in the validation data")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a training step, on average")
    parser.add_argument("--evaluation", type=float, default=0.03, help="seconds of a batch of validation, on average")
    options: dict[str, Any] = vars(parser.parse_args())
    print(f"{'validation':12} {'seconds':>8} {'waits inside':>13} {'waits at end':>13} {'validations':>12}")
    for way in ("wait", "published", "none"):
        settings = {"validates": way != "none", "validation": "wait" if way == "none" else way}
        results = list(run("waiting.py", {**options, **settings}).results.values())
        parts = [mean(each[name] / each["seconds"] for each in results) for name in ("inside", "end")]
        seconds, heard = mean(each["seconds"] for each in results), results[0]["validations"]
        assert all(each["validations"] == heard for each in results), "ranks have heard of different metrics"
        print(f"{way:12} {seconds:8.2f} {parts[0]:12.2%}  {parts[1]:12.2%}  {len(heard):11}")


if __name__ == "__main__":
    main()
