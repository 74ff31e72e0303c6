"""The directive ``combinations``: which features work together, and the messages of those that do not."""

from __future__ import annotations

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from lightning_omni.combinations import FEATURES, PAIRS, TRAITS, refused_pairs
from lightning_omni.methods import METHODS

_LABELS = {**FEATURES, **{key: trait.label for key, trait in TRAITS.items()}}


def methods() -> list[list[str]]:
    """Return a row for each method: its name, and the features that do not work with it."""
    rows = [["method", "does not work with"]]
    for name, kind in METHODS.items():
        fields = kind.__struct_fields__
        value = kind(**({"fragments": 1} if "fragments" in fields else {}))
        broken = [label for feature, label in FEATURES.items() if any(refused_pairs(value, {feature: ""}))]
        rows.append([f"`{name}`", ", ".join(broken) or "–"])
    return rows


def messages() -> list[list[str]]:
    """Return a row for each pair that is refused: both features, and the reason."""
    rows = [[_LABELS[pair.first], _LABELS[pair.second], pair.reason] for pair in PAIRS]
    return [["this", "with this", "is refused, because"], *rows]


class Combinations(Directive):
    """Both tables."""

    def run(self) -> list[nodes.Node]:
        """Return the table of methods and that of messages."""
        return [_table(methods()), _table(messages())]


def _table(rows: list[list[str]]) -> nodes.table:
    head, *body = [[_cell(text) for text in row] for row in rows]
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
    group += nodes.thead("", nodes.row("", *head))
    group += nodes.tbody("", *(nodes.row("", *row) for row in body))
    return nodes.table("", group)


def _cell(text: str) -> nodes.entry:
    pieces = text.split("`")
    parts = [nodes.literal("", each) if place % 2 else nodes.Text(each) for place, each in enumerate(pieces) if each]
    return nodes.entry("", nodes.paragraph("", "", *parts))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("combinations", Combinations)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
