"""Ends runs by SIGTERM to all ranks at random moments: each must end soon, leave nothing, and not with status 0.

    python tests/benchmarks/sigterm.py [--runs 21] [--seed 0]

One group, two groups and two ranks with the tuner take turns; each is ended at a moment between its start and its
twelfth second, so some are hit while they are set up. Prints a line a run, and how many ended as they should.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import Running

KINDS: dict[str, dict[str, Any]] = {
    "one group": {"strategy": {"groups": 1}},
    "two groups": {"strategy": {"groups": 2}},
    "the tuner": {"tuner": {}, "devices": 2, "samples": 2048},
}
LATEST = 12.0
"""Seconds after its start at which a run is ended at the latest."""
PATIENCE = 60.0
"""Seconds after the signal in which a run must have ended: ranks that are blocked end after 30."""


def end_one(kind: str, moment: float) -> tuple[bool, str]:
    """Starts a run and ends it. Returns whether it ended as it should, and how."""
    with Running("signals.py", KINDS[kind]) as running:
        time.sleep(moment)
        if running.process.poll() is not None:
            return False, f"ended by itself:\n{running.output[-2000:]}"
        began = time.monotonic()
        os.killpg(running.process.pid, signal.SIGTERM)
        try:
            finished = running.wait(PATIENCE)
        except AssertionError as error:
            return False, str(error)
        took = time.monotonic() - began
        left = running.survivors
        saved = sum(1 for _ in running.folder.glob("*.ckpt"))
    good = finished.code != 0 and not left
    how = f"status {finished.code} after {took:.1f} s, {saved} checkpoints, {len(left)} processes left"
    return good, how if good else f"{how}\n{finished.output[-2000:]}"


def main() -> int:
    """Ends runs and counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(given.runs)]
    well: int = 0
    for kind in kinds:
        moment = rng.uniform(0.0, LATEST)
        good, how = end_one(kind, moment)
        well += good
        print(f"{'ok  ' if good else 'FAIL'} {kind:10} at {moment:4.1f} s: {how}", flush=True)
    print(f"{well} of {given.runs} ended as they should")
    return int(well != given.runs)


if __name__ == "__main__":
    sys.exit(main())
