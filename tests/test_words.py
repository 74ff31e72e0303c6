"""The project speaks the field's words: what `docs/reference/glossary.md` has a word for is called by no other.

A word of the list below stands in no name, no comment, no docstring, no message and on no page. Where the word has an
ordinary meaning, too, or is a value that files hold, the entry says how that is told.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import tokenize
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted([*(ROOT / "lightning_omni").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
PAGES = [ROOT / "README.md", *(ROOT / ".github").rglob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
WORD_OF_A_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def words_of(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in WORD_OF_A_NAME.findall(name))


@dataclass(frozen=True)
class Replaced:
    """A word that is written no more.

    Attributes:
        instead: what is said for it.
        text: what is looked for in comments, strings and pages; by default nothing, where a word has too many senses.
        names: the words that no name may have among its own; ``""`` if names may.
        exact: whole names that are none, without what is private about them; words in them may be used.
        kept: the same letters in another sense: these are no finding.
        kept_names: whole names in which the word has another sense.
    """

    instead: str
    text: str = r"(?!)"
    names: str = ""
    exact: str = ""
    kept: str = r"(?!)"
    kept_names: str = ""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.text, re.IGNORECASE)

    @functools.cached_property
    def unwanted(self) -> frozenset[str]:
        return frozenset(self.names.split())

    def in_text(self, text: str) -> bool:
        return bool(self.pattern.search(text)) and bool(self.pattern.search(re.sub(self.kept, "", text)))

    def in_name(self, name: str) -> bool:
        if name in self.kept_names.split():
            return False
        return not self.unwanted.isdisjoint(words_of(name)) or name.strip("._") in self.exact.split()


# Functions and attributes have a dot before their name here: `rest` may be the rest of a list, `.rest` may not.
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
    Replaced("sample efficiency", r"\bpaces\b", exact="Pace", kept="Paces the schedulers"),
    Replaced("autocorrelation time", r"\bcrowding\b", "crowding"),
    # An address is bound, too.
    Replaced("is the bottleneck", r"\bbinds\b", "binds", kept="server binds"),
    # Things are far apart, and put together, too; groups are several or one.
    Replaced("2 groups, 1 group", r"\ball (apart|together)\b|\b(train(s|ed|ing)?|groups) apart\b"),
    Replaced("2 times faster", r"\btimes as (soon|fast)\b"),
    Replaced("divergence guard", r"\b(ruin(s|ed)?|rescued?)\b", "ruin ruins ruined rescue rescued", exact="Watch"),
    # A message has its way back.
    Replaced("rollback, restores", r"\bway back\b", kept="on its way back"),
    Replaced("compute time", r"\bown work\b"),
    Replaced("default", r"\bas it comes\b"),
    # The rest of something does not rest; the kind of event is a format of files.
    Replaced(
        "idle",
        r"\b(rests|rested|resting)\b|\b(groups?|ranks?|they|that|who|may|must|to) rest\b",
        "rest rested resting rests",
        kept=r"\brests on\b",
        kept_names="rest",
    ),
    # Needs and differences are met, too.
    Replaced(
        "synchronization point, collective",
        r"\bmeetings?\b|\b(groups?|ranks?|they|all) (have )?me(ets?|t)\b",
        "meet meets meeting meetings",
    ),
    Replaced(
        "the rank that, no rank",
        r"\b(whoever|whomever|nobody|somebody|anybody|everybody)('s)?\b"
        r"|\b(ranks?|groups?|process(es)?|peers?|leaders?|members?|workers?|servers?) whom?\b",
        "whoever nobody somebody anybody everybody",
    ),
    # HE is hardware efficiency.
    Replaced("it, its", r"\b(he|him|his|himself|she|her|hers|herself)\b", "he him his", kept=r"\bHE\b"),
    Replaced("validation interval", r"\bstretch(es|ed)?\b", "stretch stretches"),
    Replaced("again", r"\banew\b", "anew"),
    # Things happen by chance, too.
    Replaced("RNG state", r"\bchances?\b", "chance chances", kept=r"\bby chance\b|\bas far as chance\b"),
    Replaced("quiescence check, dirty", r"\b(standstill|stirred|stirs)\b", "standstill stirred stirs"),
    Replaced("resolve pending", r"\bsettle[sd]?\b", "settle settles settled"),
    Replaced("peers", r"\bmates?\b", "mate mates"),
    Replaced("shrunk", r"\bbereft\b", "bereft"),
    # A user's directory is a home, too.
    Replaced("regroup to 1", r"\b(go|goes|went|gone|come|comes|came|at) home\b"),
    # Of these words other senses are ordinary; they were classes.
    Replaced("progress, command", exact="Shown Order"),
    Replaced("snapshot", exact="Kept"),
    Replaced("search specification, trial result", "`Tried\\b", exact="Job Tried is_near NEAR"),
    Replaced(
        "stash, restore",
        r"\b(put|puts|putting|set|sets|kept|takes?|taken) ([\w']+ ){0,3}aside\b|\b(tak(e|es|en|ing)|took) (\w+ )?up\b",
        "aside",
    ),
    Replaced("exclusive access", r"\bturns?\b", "turn turns"),
    # Eyes look at something, and programs for something.
    Replaced("read, poll, retune", r"\blooks? again\b|\b(one|two|first|second|another) looks?\b", "look looks"),
    # What matplotlib draws is a figure.
    Replaced(
        "metric, number",
        r"\bfigures\b|\b(value|name) of (a|the) figure\b|\b(no such|each|every|this|whose) figure\b",
        "figures",
        kept="matplotlib figures",
    ),
    Replaced("boolean", r"\btruths?\b", "truth truths"),
    Replaced("event queue", r"\bagendas?\b", "agenda"),
    Replaced("in-memory transport", r"\bdesks?\b", "desk"),
    # In sentences these are ordinary; no function is called so.
    Replaced("send, log, print", exact="say"),
    Replaced("receive, broadcast", exact="hear"),
    Replaced("hello", exact="greet"),
    Replaced("poll", exact="tend"),
    # Refusals of other kinds are ordinary.
    Replaced("pushes that are not finite, in a row", r"\brefusals(=|`)"),
)


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """All of a module's syntax tree, which takes a while to make."""
    return list(ast.walk(ast.parse(source)))


def names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every name that a module gives or uses, with its line; functions and attributes with a dot before."""
    for node in nodes:
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield line, f".{name}"
            case ast.keyword(arg=str(name)):
                yield line, name
            case ast.alias(name=name, asname=other):
                yield line, f"{name} {other or ''}"
            case _:
                pass


def texts(source: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
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
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, f'"{node.value}"'


class Corpus:
    """All names and texts, each with the places where it stands; texts are one string as well, a line each."""

    def __init__(self, modules: Mapping[str, str], pages: Mapping[str, str] | None = None) -> None:
        self.names, self.texts = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for path, source in modules.items():
            nodes = nodes_of(source)
            for line, name in names(nodes):
                self.names[name].add(f"{path}:{line}")
            for line, text in texts(source, nodes):
                self.texts[in_one_line(text)].add(f"{path}:{line}")
        for path, page in (pages or {}).items():
            self.texts[in_one_line(page)].add(path)
        for path in (*modules, *(pages or {})):
            self.names[path].add(path)
        self.with_word = defaultdict[str, set[str]](set)
        for name in self.names:
            for word in (*words_of(name), name.strip("._")):
                self.with_word[word].add(name)
        self.lines = list(self.texts)
        self.whole = "\n".join(self.lines)
        self.starts = [0, *itertools.accumulate(len(line) + 1 for line in self.lines)]

    def found(self, word: Replaced) -> list[str]:
        """The places where a word stands."""
        near = {bisect(self.starts, match.start()) - 1 for match in word.pattern.finditer(self.whole)}
        where = [self.texts[line] for line in map(self.lines.__getitem__, near) if word.in_text(line)]
        named = {name for each in f"{word.names} {word.exact}".split() for name in self.with_word.get(each, ())}
        where += [self.names[name] for name in named if word.in_name(name)]
        return sorted({place for places in where for place in places})


def found_in(module: str, word: Replaced) -> list[str]:
    return Corpus({"": module}).found(word)


NAMESPACES = ("lightning.py", "pytorch_lightning.py", "both_namespaces.py")
"""Modules of these names have the same classes, one each for the two packages that Lightning comes as, and for both."""


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "lightning_omni").rglob("*.py"):
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.ClassDef):
                where = str(path.parent) if path.name in NAMESPACES else f"{path}:{node.lineno}"
                found[node.name].add(str(Path(where).relative_to(ROOT)))
    assert not {name: sorted(found[name]) for name in found if len(found[name]) > 1}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    modules, pages = ({str(path.relative_to(ROOT)): path.read_text() for path in paths} for paths in (MODULES, PAGES))
    return Corpus(modules, pages)


@pytest.mark.parametrize("word", REPLACED, ids=lambda word: word.instead)
def test_a_word_that_was_replaced_stands_nowhere(word: Replaced, corpus: Corpus) -> None:
    found = corpus.found(word)
    assert not found, f"say {word.instead!r} at {', '.join(found)}"


@pytest.mark.parametrize(
    "module",
    ["def retire(): ...", "# it is\n# retired", "x.retired", "class Retire: ...", "'''Is retired.'''", "f(retire=1)"],
)
def test_a_word_is_found_in_names_comments_and_strings(module: str) -> None:
    assert found_in(module, REPLACED[0])


def word_for(instead: str) -> Replaced:
    return next(word for word in REPLACED if word.instead == instead)


@pytest.mark.parametrize(
    ("instead", "module"),
    [
        ("evict", "kind = 'retire'  # as in files, see entire and satire"),
        ("idle", "first, *rest = parts  # the rest is a tuple, and rests on nothing"),
        ("idle", "kind = 'rest'"),
        ("RNG state", "# too slow by chance"),
        ("it, its", "# the others, then theirs; this, the, chisel"),
        ("progress, command", "order = shown = 1  # in this order, as is shown"),
        ("metric, number", "figure = Figure()  # a matplotlib figure"),
    ],
)
def test_another_sense_is_no_finding(instead: str, module: str) -> None:
    assert not found_in(module, word_for(instead))


@pytest.mark.parametrize(
    ("instead", "module"),
    [
        ("idle", "side.rest(0)"),
        ("idle", "class Side:\n    def rest(self): ..."),
        ("idle", "# a group that rests is not waited for"),
        ("it, its", "# the leader sends his weights"),
        ("the rank that, no rank", "# whoever is free"),
        ("progress, command", "class Order: ..."),
        ("snapshot", "state = _Kept()"),
        ("stash, restore", "def put_aside(): ..."),
        ("exclusive access", "# the turn of a group"),
    ],
)
def test_a_private_sense_is_found(instead: str, module: str) -> None:
    assert found_in(module, word_for(instead))


def test_the_glossary_has_its_words_in_order() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    words = re.findall(r"^- \*\*(.+?)\*\*: ", page, re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    assert len(words) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_two_versions_of_a_line(page: Path) -> None:
    """What git leaves where two changes meet is read by people, and by no tool that would complain."""
    assert not re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", page.read_text(), re.MULTILINE)


SHARDED_MODELS = re.compile(
    r"lightning_omni/(runtime|strategy)/"  # ranks, and Lightning's hooks, hold models that FSDP or a mesh shards
    r"|examples/studies/char_gpt|tests/((scripts|benchmarks|unit/\w+)/)?(test_)?(inside|joining|tensor_parallel|private|arguments|user_code)"
)
"""Files in which a name may contain `shard`: a piece of a model that FSDP or tensor parallelism has made."""


def test_only_files_of_sharded_models_have_shards() -> None:
    modules = [path for folder in ("lightning_omni", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in modules if path != Path(__file__)}
    found = {path: {*names_in(text), path} for path, text in texts.items() if not SHARDED_MODELS.match(path)}
    assert {name for names in found.values() for name in names if "shard" in name.lower()} <= {"sharded", "is_sharded"}


def names_in(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}
