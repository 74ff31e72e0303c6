"""The whole matrix: every case under DDP, with one group and with two; a line a case, exit code 1 on a failure.

python tests/compatibility/matrix.py                  # two ranks
python tests/compatibility/matrix.py --ranks 4        # two groups of two
python tests/compatibility/matrix.py --only "SWA|EMA" --show
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "scripts")]

from cases import CASES, Case  # noqa: E402
from compare import failures  # noqa: E402
from runs import Running  # noqa: E402

KINDS = ("ddp", "one", "groups")
Facts = list[dict[str, Any]]
"""What one fit was like, by rank."""


def run_fits(fits: Sequence[tuple[str, str]], ranks: int, limit: float = 60.0) -> Iterator[tuple[str, str, Facts, str]]:
    """Runs (case, kind) pairs, as many as possible in one launch; the next launch goes on where one ended.

    Yields:
        Case, kind, facts by rank, and what the launch has printed so far, if there was an error.
    """
    left = list(fits)
    while left:
        with Running(
            "../compatibility/fits.py", {"fits": left, "ranks": ranks, "limit": limit}, spares=ranks - 1
        ) as run:
            for number, (name, kind) in enumerate(left):
                facts, goes_on = _wait(run, number, ranks, limit)
                yield name, kind, facts, "" if goes_on else run.output
                if not goes_on:
                    break
        shutil.rmtree(run.folder, ignore_errors=True)
        left = left[number + 1 :]


def _wait(run: Running, number: int, ranks: int, limit: float) -> tuple[Facts, bool]:
    """Waits for the facts of one fit of a launch; also says whether the launch goes on."""
    paths = [run.folder / f"{number}.{rank}.json" for rank in range(ranks)]
    deadline, ended = time.monotonic() + limit + 60, None
    while not all(path.exists() for path in paths):
        if run.process.poll() is not None and ended is None:
            ended = time.monotonic() + 3
        if time.monotonic() > deadline or (ended and time.monotonic() > ended) or _failed(paths):
            break
        time.sleep(0.02)
    got = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    if got[0] and got[0]["error"] and not (run.folder / "begun.1").exists():
        alike = {name: fact for name, fact in got[0].items() if "file" not in name and "checkpoint" not in name}
        got = [got[0], *[alike] * (ranks - 1)]  # refused before the other ranks were started; files are rank 0's
    if any(each is None for each in got):
        known = next((each["error"] for each in got if each), "")
        missing = [rank for rank, each in enumerate(got) if each is None]
        error = f"Hang: no result of rank {missing} ({known or 'no error'}): {_stacks(run.output)}"
        return [each or {"error": error} for each in got], False
    return got, not any(each["error"] for each in got)


def _failed(paths: Sequence[Path]) -> bool:
    """Whether one rank ended in an error quite a while ago, and others did not end."""
    old = [path for path in paths if path.exists() and time.time() - path.stat().st_mtime > 25]
    return any(json.loads(path.read_text())["error"] for path in old)


def _stacks(output: str) -> str:
    lines = output.splitlines()
    frames = [line.strip() for line in lines if "most recent call first" in line or line.strip().startswith("File")]
    return " | ".join(frames[-30:])[-1500:] or output[-600:]


def check(
    cases: Sequence[Case], ranks: int, kinds: Sequence[str] = KINDS, limit: float = 60.0
) -> Iterator[tuple[Case, list[str], str]]:
    """Runs cases and compares each as soon as its fits are done: case, failures, output of the launch that failed."""
    by_name = {case.name: case for case in cases}
    seen: dict[str, Facts] = {}
    printed = ""
    for name, kind, facts, output in run_fits([(case.name, kind) for case in cases for kind in kinds], ranks, limit):
        seen[kind], printed = facts, printed + output
        if kind != kinds[-1]:
            continue
        theirs, one, groups = (seen.get(each, []) for each in KINDS)
        hung = [f"DDP: {theirs[0]['error']}"] if theirs and theirs[0]["error"].startswith("Hang") else []
        yield by_name[name], hung + failures(by_name[name], theirs, one, groups), printed
        seen, printed = {}, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression for names")
    parser.add_argument("--quick", action="store_true", help="what make test runs")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a fit")
    parser.add_argument("--at-once", type=int, default=25, help="cases in one launch")
    parser.add_argument("--show", action="store_true", help="print the output of failed launches")
    given = parser.parse_args()
    if "ddp" not in given.kinds.split(","):
        parser.error("--kinds: ddp is the control, and is always among them")
    chosen = [c for c in CASES if re.search(given.only, c.name) and (c.quick or not given.quick)]
    bad: dict[str, list[str]] = {}
    began = time.monotonic()
    for start in range(0, len(chosen), given.at_once):
        some = chosen[start : start + given.at_once]
        for case, found, output in check(some, given.ranks, given.kinds.split(","), given.limit):
            mark = "FAIL" if found else "refused" if case.refused else "ok"
            print(f"{mark:8} {case.name}", flush=True)
            for line in found:
                print(f"         {line}", flush=True)
            if found:
                bad[case.name] = found
                if given.show:
                    print(output[-6000:], flush=True)
    print(
        f"\n{len(chosen) - len(bad)} of {len(chosen)} cases hold, {given.ranks} ranks, {time.monotonic() - began:.0f} s"
    )
    for name, found in bad.items():
        print(f"  {name}: {found[0][:160]}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
