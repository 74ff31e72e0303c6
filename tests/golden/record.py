"""Compares the golden cases with what was recorded, and records them again on purpose.

    python tests/golden/record.py             # what has changed, case by case
    python tests/golden/record.py --write     # that is meant: keep it (bits hold where `digests.here` says)
    python tests/golden/record.py --print     # all outcomes as JSON

`digests.py` says how much of a case is kept. A change that is to move no numbers leaves golden.json as it is; one that
renames a message, a kind of event or a key of a saved state changes `names.py` beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from golden import served, simulated
from golden.digests import Outcome, apart, here
from golden.names import type_name

FILE = Path(__file__).with_name("golden.json")


def cases() -> dict[str, Callable[[], Outcome]]:
    """Every golden case by its name."""
    return {**simulated.cases(), **served.cases()}


def outcomes(found: Mapping[str, Callable[[], Outcome]] | None = None) -> dict[str, Outcome]:
    """Runs cases, all of them if none are named."""
    with one_thread():
        return {name: case() for name, case in (cases() if found is None else found).items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of several threads depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recorded() -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Where the kept outcomes were recorded, and the outcomes."""
    kept = json.loads(FILE.read_text())
    return kept["recorded"], {name: Outcome.of(plain) for name, plain in kept["cases"].items()}


def differences(kept: Mapping[str, Outcome], found: Mapping[str, Outcome], bits: bool) -> list[str]:
    """What differs, a line a case: everything if ``bits``, else order and numbers."""
    lines = [f"{name}: recorded, but no case any more" for name in kept if name not in found]
    for name, outcome in found.items():
        if name not in kept:
            lines.append(f"{name}: not recorded yet")
        elif not outcome.resembles(kept[name]):
            lines.append(f"{name}: {_what_of(kept[name], outcome)}")
        elif bits and outcome.bits != kept[name].bits:
            lines.append(f"{name}: other bits in {', '.join(_parts(kept[name].bits, outcome.bits))}")
    return lines


def _what_of(kept: Outcome, found: Outcome) -> str:
    if kept.order != found.order:
        parts = ", ".join(_parts(kept.bits, found.bits))
        return f"another order of events, or other counts; other bits in {parts}"
    return f"{list(found.numbers)} instead of {list(kept.numbers)}"


def _parts(kept: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return sorted(type_name(name) for name in {**kept, **found} if kept.get(name) != found.get(name))


def text_of(found: Mapping[str, Outcome]) -> str:
    """Outcomes as JSON, a line a case."""
    lines = (f"  {json.dumps(name)}: {json.dumps(found[name].plain())}" for name in sorted(found))
    about = (
        "Bits hold with the libraries, processor and kernels named here; order everywhere, numbers to 1e-5."
        " See tests/golden/record.py."
    )
    head = f' "about": {json.dumps(about)},\n "recorded": {json.dumps(here())},\n'
    return "{\n" + head + ' "cases": {\n' + ",\n".join(lines) + "\n }\n}\n"


def main() -> int:
    """Compares, prints or records; the exit code is 1 if something has changed and was not recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record again")
    parser.add_argument("--print", action="store_true", help="print all outcomes")
    arguments = parser.parse_args()
    found = outcomes()
    if arguments.print:
        say(text_of(found))
        return 0
    where, kept = recorded() if FILE.exists() else (here(), dict[str, Outcome]())
    elsewhere = apart(where, here())
    changed = differences(kept, found, bits=not elsewhere)
    for line in changed:
        say(line)
    if elsewhere:
        say(f"recorded elsewhere ({elsewhere}): only order and numbers are compared")
    say(f"{len(changed)} of {len(found)} cases differ")
    if arguments.write:
        FILE.write_text(text_of(found))
        say(f"written to {FILE}")
    return int(bool(changed) and not arguments.write)


def say(text: Any) -> None:
    """A line on standard output."""
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
