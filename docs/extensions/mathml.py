"""Formulas as MathML, which browsers draw without a script or a font from the network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(convert(node.astext().strip("`")))  # $`x`$, as GitHub has it, or $x$
    raise nodes.SkipNode


def _visit_block(translator: Any, node: nodes.math_block) -> None:
    # Formulas that are set apart by \\qquad are lines here: a line of MathML is not broken.
    lines = re.split(r"\\qquad", node.astext())
    formulas = (convert(line.strip(), display="block") for line in lines if line.strip())
    translator.body.append(f'<div class="formula">{"".join(formulas)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer, by the name that ``html_math_renderer`` has."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
