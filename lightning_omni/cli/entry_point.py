"""The entry point: subcommands, the spelling of options, and errors."""

from __future__ import annotations

import argparse
import errno
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from jsonargparse import ActionYesNo, ArgumentParser, DefaultHelpFormatter, auto_cli
from rich.console import Console
from rich.text import Text

from lightning_omni import __version__
from lightning_omni.cli.commands import compare, doctor, evict, plan, serve, simulate, top
from lightning_omni.cli.console import INTERRUPTED
from lightning_omni.errors import OmniError


class _HelpFormatter(DefaultHelpFormatter):
    """A formatter that keeps paragraphs, and shows defaults instead of Python types."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        filled = [
            each.splitlines()  # examples
            if each.startswith("  ")
            else textwrap.wrap(each, width, initial_indent=indent, subsequent_indent=indent)
            for each in paragraphs
        ]
        return "\n\n".join("\n".join(lines) for lines in filled)

    def _get_help_string(self, action: argparse.Action) -> str:
        given = action.default
        if given is argparse.SUPPRESS:
            return super()._get_help_string(action)
        says_more = action.option_strings and given is not False and given not in (None, "", ())
        default = " (on by default)" if given is True else " (default: %(default)s)"
        return (action.help or "") + (default if says_more else "")


class _Parser(ArgumentParser):
    """A parser with the spelling of shells: ``--key-file`` and ``--once``, not ``--key_file`` and ``--once true``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"print_config": "--print-config", "formatter_class": _HelpFormatter, **options})

    def add_function_arguments(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.description, _, _ = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
        return super().add_function_arguments(function, *arguments, **options)

    def add_argument(self, *names: str, **options: Any) -> Any:
        if options.get("type") is bool:
            del options["type"]
            options["action"] = ActionYesNo(no_prefix="no-")
        names = tuple(name.replace("_", "-") if name.startswith("--") else name for name in names)
        return super().add_argument(*names, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # one of several types that a value may have is tried
            super().error(message, ex)
        command = f"{self.prog.partition(' [')[0]} {self.prog.rpartition('] ')[2]}" if "[" in self.prog else self.prog
        _print_error(f"{in_words(message)}; see {command} --help")
        self.exit(2)


_TYPES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
_TYPES |= {"PathLike": "a path", "Path": "a path", "dict": "a mapping", "list": "a list"}


def in_words(message: str) -> str:
    r"""Return an error of the parser as a sentence, with types in words.

    Example:
        >>> in_words('Parser key "port":\n  Expected a <class \'int\'>. Got value: x')
        "--port must be a whole number, not 'x'"
        >>> in_words('the following arguments are required: top.address')
        'ADDRESS is missing'
    """
    if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
        names = [each.rpartition(".")[2].upper().replace("_", "-") for each in missing[1].split(", ")]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
    key = re.match(r'Parser key "([^"]+)":', message)
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    kinds = re.findall(r"(?<!type: )<class '(?:\w+\.)*(\w+)'>", message)
    wanted = [_TYPES.get(each, each) for each in kinds if each != "NoneType"]
    for choices in re.findall(r"Literal\[([^\]]*)\]", message):
        wanted += [each.strip("' ") for each in choices.split(",")]
    if key is None or value is None or not wanted:
        return " ".join(message.split())
    option = key[1] if "." in key[1] else "--" + key[1].replace("_", "-")
    return f"{option} must be {' or '.join(dict.fromkeys(wanted))}, not {value[1].strip()!r}"


def _print_error(text: str) -> None:
    Console(stderr=True).print("[red]lightning-omni:[/red]", Text(text), highlight=False, soft_wrap=True)


_DESCRIPTION = "Servers, measurements and simulations for training with OmniStrategy and OmniOptimizer."
_EXAMPLES = """Examples:

  lightning-omni compare --speeds 1,1,1,0.25 --link 100Mbit --model-size 50MB --step 0.2s
  lightning-omni plan omni-tuning.json --ranks 32 --bandwidth 10Gbit
  lightning-omni simulate --method "async_sgd@1, hardsync, async_sgd" --devices 8 --straggler 4
  lightning-omni serve --host 10.0.0.9
  lightning-omni doctor tcp://10.0.0.9:5555
  lightning-omni top tcp://10.0.0.9:5555

"""
_EXIT_STATUS = (
    "Exit status: 0; 1 if doctor has found something that fails, or the output cannot be written; 2 if a setting is"
    " wrong; 3 if a server died too often"
    " to be started again; 130 after Ctrl-C."
)

_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE)
"""Errors of a full disk and of a pipe without a reader."""
_FAILED = 1

_COMMANDS: dict[str, Callable[..., Any]] = {
    "compare": compare,
    "plan": plan,
    "simulate": simulate,
    "serve": serve,
    "doctor": doctor,
    "top": top,
    "evict": evict,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, by default the process's own, and return the exit status; without arguments, print help.

    ``--help``, ``--version`` and wrong usage raise SystemExit.
    """
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):  # as standard error does
        with suppress(OSError):  # "Illegal seek", if a pipe replaced a file; the setting is made all the same
            sys.stdout.reconfigure(errors="backslashreplace")
    # Reading the signatures of all commands takes half a second, so only the given command's is read.
    commands: dict[str, Any] = {given[0]: _COMMANDS[given[0]]} if given and given[0] in _COMMANDS else _COMMANDS
    try:
        code = auto_cli(
            commands,
            args=given,
            as_positional=True,
            prog="lightning-omni",
            description=_DESCRIPTION,
            epilog=_EXAMPLES + _EXIT_STATUS,
            parser_class=_Parser,
            version=__version__,
        )
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OF_OUTPUT:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left as it ends
        if error.errno != errno.EPIPE:
            _print_error(f"the output could not be written: {error.strerror}")
        return _FAILED
    except (OmniError, ValueError) as error:
        own = _own(error)
        if own is None:
            raise
        _print_error(str(own))
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return code or 0


def _own(error: BaseException | None) -> OmniError | None:
    while error is not None and not isinstance(error, OmniError):
        error = error.__cause__
    return error
