"""Kills a random worker outside rank 0's group at a random moment, again and again: every run must finish.

    python tests/benchmarks/kills.py [--runs 20] [--seed 0]

Each run trains 4 ranks in 2 groups for 2 epochs with a validation in mid-epoch; the victim gets SIGKILL somewhere
between its first batch and the end. A run counts if it ends with exit code 0, if every sample of every epoch was
trained, and if nothing is left running.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import Running

SAMPLES, EPOCHS, RANKS = 384, 2, 4


def trained_samples(folder: Path, victims: tuple[int, ...]) -> list[set[int]]:
    """Samples that were trained in each epoch, by whichever rank.

    A victim may have died after its gradient was applied and before it could note the batch: its last batch counts.
    """
    seen: list[set[int]] = [set() for _ in range(EPOCHS)]
    for rank in range(RANKS):
        epoch = 0
        for line in (folder / f"events{rank}").read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word == "epoch":
                epoch = int(rest)
            elif word == "batch" and rest.endswith("]"):
                seen[epoch] |= set(json.loads(rest.partition(" ")[2]))
            elif word == "begin" and rest.endswith("]"):
                last = (epoch, set(json.loads(rest.partition(" ")[2])))
        if rank in victims:
            seen[last[0]] |= last[1]
    return seen


def children(pid: int) -> dict[int, int]:
    """Local rank to process id, of the ranks that a process started."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = dict(
                pair.split("=", 1) for pair in (entry / "environ").read_text().split("\0") if "=" in pair
            )
        except (OSError, IndexError, ValueError):
            continue
        if parent == pid and "LOCAL_RANK" in environment:
            ranks[int(environment["LOCAL_RANK"])] = int(entry.name)
    return ranks


def one_run(draw: random.Random) -> tuple[bool, str]:
    """One run with one kill: whether it counts, and what happened."""
    victim, delay = draw.choice([2, 3]), draw.uniform(0.0, 3.0)
    fit = {
        "data": {"samples": SAMPLES},
        "sleep": {str(rank): 0.03 for rank in range(RANKS)},
        "trainer": {"max_epochs": EPOCHS, "val_check_interval": 0.5},
    }
    with Running("groups.py", {"fits": [fit]}, spares=0) as running:
        events = running.folder / f"events{victim}"
        deadline = time.monotonic() + 90
        while not (events.exists() and "batch" in events.read_text()):
            if time.monotonic() > deadline or running.process.poll() is not None:
                return False, f"training never began:\n{running.output[-3000:]}"
            time.sleep(0.02)
        time.sleep(delay)  # the random moment
        pid = children(running.process.pid).get(victim)
        lines = events.read_text().splitlines()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        try:
            finished = running.wait(120)
        except AssertionError as error:
            return False, f"rank {victim} killed after {delay:.2f} s ({lines[-1][:20]}): {error}"
        missing = [SAMPLES - len(each) for each in trained_samples(running.folder, (2, 3))]
        left = running.survivors
        good = finished.code == 0 and not any(missing) and not left
        said = (
            f"rank {victim} killed after {delay:.2f} s, in «{lines[-1][:14]}»: exit code {finished.code},"
            f" samples missing {missing}, left running {len(left)}"
        )
        return good, said if good else f"{said}\n{finished.output[-3000:]}"


def main() -> int:
    """Runs and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    finished = 0
    for number in range(1, arguments.runs + 1):
        good, said = one_run(draw)
        finished += good
        print(f"{number:3d} {'ok  ' if good else 'FAIL'} {said}", flush=True)
    print(f"{finished} of {arguments.runs} runs finished with every sample trained")
    return 0 if finished == arguments.runs else 1


if __name__ == "__main__":
    sys.exit(main())
