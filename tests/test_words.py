"""The project speaks the field's words: what `docs/glossary.md` has a word for is called by no other.

A word of the list below stands in no name, no comment, no docstring, no message and on no page. Where the word has an
ordinary meaning, too, or is a value that files hold, the entry says how that is told.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "lightning_omni").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORD_OF_A_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True)
class Replaced:
    """A word that is written no more.

    Attributes:
        instead: what is said for it.
        text: what is looked for in comments, strings and pages.
        names: the words that no name may have among its own; ``""`` if names may.
        kept: the same letters in another sense: these are no finding.
    """

    instead: str
    text: str
    names: str = ""
    kept: str = r"(?!)"

    def in_text(self, text: str) -> bool:
        plain = re.sub(self.kept, "", " ".join(text.split()))
        return re.search(self.text, plain, re.IGNORECASE) is not None

    def in_name(self, name: str) -> bool:
        own = {word.lower() for word in WORD_OF_A_NAME.findall(name)}
        return bool(own & set(self.names.split()))


REPLACED = (
    # The kind of event in the records of real runs is a format of files.
    Replaced("evict", r"\bretir(e|es|ed|ing)\b", "retire retired retires", kept='"retire"'),
    Replaced("bitwise", r"\bto the bit\b"),
    Replaced("hello, or a probe", r"\bknock(s|ed|ing)?\b", "knock knocks"),
    Replaced("peer message", r"\bgifts?\b", "gift gifts"),
    # Sliding windows and windows of accumulation are ordinary ones.
    Replaced(
        "published weights", r"\b(read|publish)\w* (a |the )?windows?\b|\bpeers'? windows?\b|\bwindows? and inbox"
    ),
    Replaced("group state", r"\bdeposit(s|ed|ing)?\b", "deposit deposits deposited"),
    Replaced("estimate", r"\boutlooks?\b", "outlook outlooks"),
    Replaced("sample efficiency", r"\bpaces\b", kept="Paces the schedulers"),
    Replaced("autocorrelation time", r"\bcrowding\b", "crowding"),
    # An address is bound, too.
    Replaced("is the bottleneck", r"\bbinds\b", "binds", kept="server binds"),
    Replaced("2 groups, 1 group", r"\ball apart\b"),
    Replaced("2 times faster", r"\btimes as (soon|fast)\b"),
    Replaced("divergence guard, rollback", r"\b(ruin(s|ed)?|rescued?)\b", "ruin ruins ruined rescue rescued"),
    Replaced("compute time", r"\bown work\b"),
    Replaced("default", r"\bas it comes\b"),
)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that the module gives or uses, with its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield line, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.keyword(arg=str(name)):
                yield line, name
            case ast.alias(name=name, asname=other):
                yield line, f"{name} {other or ''}"
            case _:
                pass


def texts(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every comment, several lines of one together, and every string with its quotes."""
    block: list[str] = []
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            yield first, " ".join(block)
            block, first = [], token.start[0]
        block.append(token.string.lstrip("#: "))
        last = token.start[0]
    yield first, " ".join(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, f'"{node.value}"'


def found_in(module: str, word: Replaced) -> list[int]:
    """The lines of a module where the word stands."""
    tree = ast.parse(module)
    named = {line for line, name in names(tree) if word.in_name(name)}
    return sorted(named | {line for line, text in texts(module, tree) if word.in_text(text)})


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in (*MODULES, *PAGES)}


@pytest.mark.parametrize("word", REPLACED, ids=lambda word: word.instead)
def test_a_word_that_was_replaced_stands_nowhere(word: Replaced, sources: dict[str, str]) -> None:
    found = [
        f"{path}:{line}" for path, text in sources.items() if path.endswith(".py") for line in found_in(text, word)
    ]
    found += [path for path, text in sources.items() if path.endswith(".md") and word.in_text(text)]
    found += [path for path in sources if word.in_name(path)]
    assert not found, f"say {word.instead!r} at {', '.join(found)}"


@pytest.mark.parametrize(
    "module",
    ["def retire(): ...", "# it is\n# retired", "x.retired", "class Retire: ...", "'''Is retired.'''", "f(retire=1)"],
)
def test_a_word_is_found_in_names_comments_and_strings(module: str) -> None:
    assert found_in(module, REPLACED[0])


def test_another_sense_is_no_finding() -> None:
    assert not found_in("kind = 'retire'  # as in files, see entire and satire", REPLACED[0])


def test_the_glossary_has_its_words_in_order() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^- \*\*(.+?)\*\*: ", page, re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    assert len(words) > 30
