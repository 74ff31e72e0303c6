"""What strangers cost a server: memory, admission and pushes under each kind of attack.

    python tests/benchmarks/hostile.py [--encryption curve] [--kinds ...] [--rounds 10] [--pairs 5] [--seconds 1.0]

For each kind: the server's memory at its most in the first round and over all of them, and what is left of it; seconds
for a rank with the key to come in while the attack is on; the rate of another one's pushes against their rate beside an
idle spinner on the attacker's core, the median of pairs measured in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attacks import STRANGERS
from beside import Target, attack, forget_peak, megabytes, rates, wait_for_round

from lightning_omni.errors import OmniError


def let_in(target: Target) -> str:
    """How long a rank with the key needs, or why it did not come in."""
    try:
        return f"{target.let_in():.2f} s"
    except OmniError as error:
        return f"not at all: {type(error).__name__}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encryption", default="curve")
    parser.add_argument("--kinds", nargs="+", default=STRANGERS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--soft-limit", type=int, default=1024)
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    for kind in arguments.kinds:
        log = Path(tempfile.mkdtemp()) / "log"
        target = Target(log, arguments.soft_limit, arguments.encryption)
        try:
            before = megabytes(target.pid)
            forget_peak(target.pid)
            with attack(kind, target.addresses, f"--core={core}") as attacker:
                grown = [megabytes(target.pid, "VmHWM") - before]
                entered = let_in(target)
                wait_for_round(attacker, arguments.rounds)
                grown.append(megabytes(target.pid, "VmHWM") - before)
            ratios = [rates(target, kind, core, arguments.seconds) for _ in range(arguments.pairs)]
            left = megabytes(target.pid) - before
            print(
                f"{kind:18} grown by {grown[0]:.1f} MB, in {arguments.rounds} rounds {grown[1]:.1f}, left {left:.1f};"
                f" a rank enters in {entered}; pushes at {statistics.median(ratios):.2f} of"
                f" {', '.join(f'{one:.2f}' for one in sorted(ratios))}; {log.stat().st_size / 1e3:.0f} kB logged",
                flush=True,
            )
        except Exception as error:
            print(f"{kind:18} {type(error).__name__}: {str(error)[:200]}", flush=True)
        finally:
            try:
                target.close()
            except Exception as error:
                print(f"{kind:18} the pushes ended: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
