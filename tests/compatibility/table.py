"""Makes the tables of docs/evidence/compatibility.md out of the cases: python tests/compatibility/table.py"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "scripts")]

import pytorch_lightning as pl  # noqa: E402
from cases import CASES, Case  # noqa: E402
from compare import COMPARED  # noqa: E402

DOCS = HERE.parent.parent / "docs" / "evidence" / "compatibility.md"
ELSEWHERE = {
    "accelerator": "every case runs on CPU; see [GPUs](../how-to/gpus.md)",
    "callbacks": "see Callbacks",
    "devices": "every case runs with two ranks; `matrix.py --ranks 4` runs them with two groups of two",
    "num_nodes": "tested separately, in tests/test_two_nodes.py",
    "strategy": "the subject of the comparison",
}
"""Options of the Trainer without a row, each with the reason."""


def callbacks() -> list[str]:
    """Lightning's callbacks."""
    return sorted(pl.callbacks.__all__)


def options() -> list[str]:
    """Arguments of the Trainer."""
    return [name for name in inspect.signature(pl.Trainer.__init__).parameters if name != "self"]


def rows_of_callback(name: str) -> list[Case]:
    return [case for case in CASES if name in case.covers]


def rows_of_option(name: str) -> list[Case]:
    return [case for case in CASES if name in case.options]


def uses() -> list[Case]:
    """Rows that are about neither a callback nor an option."""
    named = set(pl.callbacks.__all__)
    return [case for case in CASES if not named & set(case.covers) and not case.options]


def tables() -> dict[str, str]:
    """Each generated part of the page, by its marker."""
    compared = "\n".join(f"- **{name}**: {how}" for name, how in COMPARED.items())
    by_callback = _table("callback", [(f"`{name}`", rows_of_callback(name)) for name in callbacks()])
    with_rows = [(f"`{name}`", rows) for name in options() if (rows := rows_of_option(name))]
    by_option = _table("option", with_rows)
    without = "\n".join(f"- `{name}`: {why}" for name, why in ELSEWHERE.items())
    by_use = _table("use", [(case.name, [case]) for case in uses()])
    return {
        "compared": compared,
        "callbacks": by_callback,
        "options": f"{by_option}\n\nWithout a row:\n\n{without}",
        "uses": by_use,
    }


def page() -> str:
    """The page with its generated parts as they should be."""
    text = DOCS.read_text()
    for name, table in tables().items():
        begin, end = f"<!-- {name}: made by tests/compatibility/table.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


def _table(what: str, rows: list[tuple[str, list[Case]]]) -> str:
    """Return the names of what is as under DDP, then a table of the others."""
    plain = "; ".join(name for name, of in rows if _result(of) == "as DDP")
    lines = [f"| {name} | {_result(of)} |" for name, of in rows if _result(of) != "as DDP"]
    return "\n".join([f"As DDP: {plain}.", "", f"| {what} | two groups |", "|---|---|", *lines])


def _result(cases: list[Case]) -> str:
    refused = [case for case in cases if case.refused]
    differs = {f"{fact}: {why}" for case in cases if not case.refused for fact, why in case.differs.items()}
    if refused:
        named = f" ({'; '.join(case.name for case in refused)})" if len(cases) > len(refused) else ""
        return f"refused: “{refused[0].refused}”{named}" + (", otherwise as DDP" if len(cases) > len(refused) else "")
    reasons = sorted({entry.split(": ", 1)[1] for entry in differs})
    return "as DDP" + (f" (not all is compared: {'; '.join(reasons)})" if reasons else "")


if __name__ == "__main__":
    DOCS.write_text(page())
