"""A merged head on a network with 90 % of its weights in it, against the same run with everything pushed.

    python tests/benchmarks/merged.py [--groups 4] [--seeds 3] [--epochs 1] [--mbit 1000]

Four workers, Fashion-MNIST, equal updates, both in one run. Prints medians over the seeds. Promised are bytes per step
as calculated (the body's weights, and the activations), staleness 0 in every update of the head, and an accuracy that
is not worse. With --mbit all traffic shares a link of so many megabits a second (Linux; needs root): a network
namespace of its own, whose loopback is limited by tc.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path
from statistics import median
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from merged_head import Outcome, count_weights, expected_megabytes, parse_arguments, train

LIMITED = "OMNI_BENCHMARK_LIMITED"


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--mbit", type=int, help="megabits a second that all workers and the server share")
    parser.add_argument("--width", type=int, default=310, help="width of the head's layers")
    options = parser.parse_args()
    if options.mbit and not os.environ.get(LIMITED):
        limit(options.mbit)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    runs: list[tuple[Outcome, Outcome]] = []
    for seed in range(options.seeds):
        given = {"groups": options.groups, "epochs": options.epochs, "seed": seed, "pooled": 2, "width": options.width}
        arguments = parse_arguments([f"--{name}={value}" for name, value in given.items()])
        pushed, merged = (train(arguments, merged) for merged in (False, True))
        if pushed is not None and merged is not None:
            runs.append((pushed, merged))
    return report(arguments, runs) if runs else 0


def limit(mbit: int) -> NoReturn:
    """Runs this script once more, in this process but behind a slow link."""
    link = f"ip link set lo up && tc qdisc add dev lo root tbf rate {mbit}mbit burst 256kb latency 100ms"
    command = ["unshare", "--net", "sh", "-c", f'{link} && exec "$@"', "sh", sys.executable, *sys.argv]
    os.execvpe(command[0], command, {**os.environ, LIMITED: "1"})


def report(arguments: argparse.Namespace, runs: list[tuple[Outcome, Outcome]]) -> int:
    """Prints what came out; 1 if a promise is broken."""
    weights, head = count_weights(arguments)
    expected = expected_megabytes(arguments, True)
    bytes_ratio = median(merged.megabytes / pushed.megabytes for pushed, merged in runs)
    gain = median(merged.accuracy - pushed.accuracy for pushed, merged in runs)
    time_ratio = median(merged.seconds / pushed.seconds for pushed, merged in runs)
    print(f"{weights:,} weights, {head / weights:.1%} in the head; {arguments.groups} groups; seeds: {len(runs)}")
    print(f"bytes per step: {bytes_ratio:.3f} of those with everything pushed; the body is {1 - head / weights:.3f}")
    print(f"MB per step: {runs[0][1].megabytes:.4f} measured, {expected:.4f} by calculation")
    print(f"staleness: head {max(merged.most_head_staleness for _, merged in runs)} at most, body"
          f" {runs[0][1].body_staleness:.2f}; everything pushed {runs[0][0].body_staleness:.2f}")  # fmt: skip
    print(f"updates: {[(pushed.updates, merged.updates) for pushed, merged in runs]}")
    print(f"accuracy: {[(f'{p.accuracy:.4f}', f'{m.accuracy:.4f}') for p, m in runs]}, median difference {gain:+.4f}")
    print(f"time: {time_ratio:.2f} of that with everything pushed")
    kept = all(merged.most_head_staleness == 0 and abs(merged.megabytes / expected - 1) < 0.02 for _, merged in runs)
    return 0 if kept and gain > -0.005 else 1


if __name__ == "__main__":
    sys.exit(main())
