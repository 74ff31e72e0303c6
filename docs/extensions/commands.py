"""The directive ``commands``: what every subcommand takes, from the parsers of the command line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator

from docutils import nodes
from docutils.parsers.rst import Directive
from jsonargparse import ArgumentParser, capture_parser
from sphinx.application import Sphinx

from lightning_omni.cli import main

_EVERYWHERE = {"help", "config", "print_config"}


def _subcommands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def _options(parser: ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the spelling and the help of each argument, positional ones first."""
    formatter = parser.formatter_class(parser.prog)
    for action in sorted(parser._actions, key=lambda action: bool(action.option_strings)):
        if action.dest in _EVERYWHERE or action.dest.endswith(".help") or action.help == argparse.SUPPRESS:
            continue
        names = [name for name in action.option_strings if not name.endswith("+")] or [action.dest.upper()]
        yield ", ".join(names), formatter._expand_help(action) if action.help else ""


def _entry(name: str, text: str) -> nodes.definition_list_item:
    term = nodes.term("", "", nodes.literal("", name))
    return nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", text)))


class Commands(Directive):
    """A section for each subcommand: its description, and a list of its arguments."""

    def run(self) -> list[nodes.Node]:
        """Return the sections, in the order of the command line's own help."""
        return [self._section(name, parser) for name, parser in _subcommands(capture_parser(main, [])).items()]

    def _section(self, name: str, parser: ArgumentParser) -> nodes.section:
        section = nodes.section("", nodes.title("", "", nodes.literal("", name)), ids=[name], names=[name])
        self.state.document.note_explicit_target(section)
        paragraphs = inspect.cleandoc(parser.description or "").split("\n\n")
        section += [nodes.paragraph("", " ".join(each.split())) for each in paragraphs]
        section += nodes.definition_list("", *(_entry(*each) for each in _options(parser)), classes=["options"])
        return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
