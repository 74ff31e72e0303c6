"""Who may import whom: downwards only, no cycles, each heavy package in its own room, and never pickle."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from processes import interpret

import lightning_omni.errors

PACKAGE = "lightning_omni"
ROOT = Path(lightning_omni.errors.__file__).parent
RANKS = {
    "errors": 0,
    "checks": 1,
    "palette": 1,
    "topology": 2,
    "registry": 2,
    "json_dataclasses": 2,
    "run_report": 2,
    "trace": 2,
    "methods": 3,
    "combinations": 4,
    "wire": 5,
    "server": 6,
    "group": 6,
    "transport": 7,
    "simulator": 8,
    "tuning.model": 8,
    "runtime": 9,
    "tuning.search": 9,
    "strategy": 10,
    "tuning.report": 10,
    "ray": 11,
    "tuning.trainer": 11,
    "tuning.device": 12,
    "tuning.callback": 13,
    "cli": 14,
    "__main__": 15,
}
"""Left never imports right; rooms of one rank do not import each other."""
HOMES = {
    "zmq": {"transport"},
    "pytorch_lightning": {"ray", "strategy", "tuning.trainer", "tuning.device", "tuning.callback"},
    "lightning": {"strategy", "tuning.callback"},
    "skopt": {"tuning.search"},
    "jinja2": {"tuning.report"},
    "prometheus_client": {"transport"},
    "ray": {"ray"},
}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "marshal", "dill", "shelve", "joblib"}
PICKLING_CALLS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join((PACKAGE, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), filename=str(MODULES[module]))


def room(module: str) -> str:
    """``lightning_omni.server.core`` is in room ``server``; `tuning` itself is in none."""
    parts = module.split(".")[1:]
    if parts == ["tuning"]:
        return ""
    return ".".join(parts[: 2 if parts[:1] == ["tuning"] else 1])


@cache
def imported(module: str) -> frozenset[str]:
    """Full names of all that a module imports: ``from a import b`` gives ``a.b``."""
    found = set[str]()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


@cache
def inside(module: str) -> frozenset[str]:
    """Modules of this package that a module imports: ``a.b`` is the module of that name, or else a name in ``a``."""
    names = {name if name in MODULES else name.rpartition(".")[0] for name in imported(module)}
    return frozenset((names & set(MODULES)) - {module, PACKAGE})


def test_every_room_has_its_place() -> None:
    assert {module for module in MODULES if room(module) and room(module) not in RANKS} == set()


def test_rooms_import_only_downwards() -> None:
    upwards = {
        module: names
        for module in MODULES
        if (names := {name for name in inside(module) if room(name) and is_upwards(room(module), room(name))})
    }
    assert not upwards, f"must not import: {upwards}"


def is_upwards(own: str, other: str) -> bool:
    """The package's own `__init__` is in no room, and may import all."""
    return bool(own) and other != own and RANKS[other] >= RANKS[own]


def test_heavy_packages_stay_in_their_rooms() -> None:
    strangers = {
        module: names
        for module in MODULES
        if module != PACKAGE and (names := {name for name in imported(module) if is_stranger(name, room(module))})
    }
    assert not strangers, f"must not import: {strangers}"


def is_stranger(name: str, own: str) -> bool:
    return own not in HOMES.get(name.split(".")[0], {own})


def test_nothing_pickles() -> None:
    importing = {module for module in MODULES for name in imported(module) if name.split(".")[0] in PICKLES}
    calling = {module for module in MODULES for name in attributes(module) if name.split(".")[-1] in PICKLING_CALLS}
    assert (importing, calling) == (set(), set())


def test_no_torch_file_is_read_or_written_near_the_wire() -> None:
    near = [module for module in MODULES if room(module) in ("methods", "wire", "server", "group", "transport")]
    files = {"torch.load", "torch.save", "torch.serialization"}
    assert {module for module in near if files & {*imported(module), *attributes(module)}} == set()


@cache
def attributes(module: str) -> frozenset[str]:
    """``a.b`` of all that a module reads of a name; ``.b`` of what it reads of anything else."""
    found = (node for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute))
    return frozenset(f"{getattr(node.value, 'id', '')}.{node.attr}" for node in found)


def cycle(edges: Mapping[str, Collection[str]]) -> str:
    """Some cycle, or nothing."""
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> str:
        if module in path:
            return " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return ""
        done.add(module)
        return next(filter(None, (walk(name, (*path, module)) for name in sorted(edges[module]))), "")

    return next(filter(None, (walk(module, ()) for module in MODULES)), "")


def test_there_is_no_import_cycle_not_even_of_types_and_in_functions() -> None:
    assert not cycle({module: inside(module) for module in MODULES})


DESIGN = (ROOT.parent / "docs" / "contribute" / "design.md").read_text()


def order_of(lines: str) -> list[list[str]]:
    """``a, b ← c`` is [[a, b], [c]]."""
    return [sorted(filter(None, (name.strip() for name in part.split(",")))) for part in lines.split("←")]


def test_the_design_page_shows_every_room_in_its_place() -> None:
    found = re.search(r"^    errors .*\n(?:    .*\n)*", DESIGN, re.MULTILINE)
    assert found
    placed = sorted({rank for room, rank in RANKS.items() if room != "__main__"})
    assert order_of(found.group()) == [sorted(room for room in RANKS if RANKS[room] == rank) for rank in placed]
    table = DESIGN.partition("| room | holds")[2].partition("\n\n")[0]
    rooms = {each.replace("/", ".") for each in re.findall(r"^\| `([a-z_/]+?)/?`", table, re.MULTILINE)}
    assert rooms == RANKS.keys() - {"errors", "__main__"}


ROOMS = ("methods", "wire", "server", "group", "transport", "runtime")


def test_importing_the_package_and_its_other_rooms_does_not_bring_lightning_along() -> None:
    rooms = [name for name in ROOMS if f"{PACKAGE}.{name}" in MODULES]
    program = (
        f"import sys, {PACKAGE}, {', '.join(f'{PACKAGE}.{name}' for name in rooms)}\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'lightning', 'pytorch_lightning', 'skopt'}))"
    )
    ran = interpret(program)
    assert ran.stdout.strip() == "[]", ran.stderr


NEEDED_BY_SERVERS = {"zmq", f"{PACKAGE}.server.core"}
NEEDED_LATER = {"torch.distributed.checkpoint", "skopt", "jinja2"}


def test_a_strategy_imports_no_server_no_sockets_and_nothing_that_only_some_fits_need() -> None:
    program = f"import sys, {PACKAGE}.strategy.both_namespaces\nprint(*sorted(sys.modules))"
    ran = interpret(program)
    assert f"{PACKAGE}.strategy.hooks" in ran.stdout, ran.stderr
    assert not (NEEDED_BY_SERVERS | NEEDED_LATER) & set(ran.stdout.split())


TEXTS = [
    path
    for pattern in ("*.md", "*.py", "*.toml", "*.yaml", "*.html", "Makefile")
    for folder in ("lightning_omni", "tests", "docs", "examples")
    for path in (ROOT.parent / folder).rglob(pattern)
    if "_build" not in path.parts  # the site
] + [*ROOT.parent.glob("*.md"), ROOT.parent / "pyproject.toml"]
NO_MODULES = {"lightning_omni.run_state", "lightning_omni.server_state", "lightning_omni.egg"}
"""Names of formats of files, and a folder that an installation leaves."""


def named_in(text: str) -> set[str]:
    """Return the dotted names below the package that a text has."""
    return set(re.findall(r"(?<![\w./])lightning_omni(?:\.[A-Za-z_]\w*)+", text)) - NO_MODULES


def is_there(name: str) -> bool:
    """Return whether a dotted name is a module, or something in one."""
    if name in MODULES:  # the packages that it imports need not be installed
        return True
    parts = name.split(".")
    length = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in MODULES)
    found: object = importlib.import_module(".".join(parts[:length]))
    for part in parts[length:]:
        if not hasattr(found, part):
            return part in getattr(found, "__annotations__", {})
        found = getattr(found, part)
    return True


def test_every_dotted_name_of_the_package_in_code_and_pages_is_there() -> None:
    own = Path(__file__)
    missing = {
        name: path.name for path in TEXTS if path != own for name in named_in(path.read_text()) if not is_there(name)
    }
    assert not missing


PUBLIC = {"cli", "errors", "methods", "registry", "simulator", "topology", "trace"}
FACES = {f"{room}.{name}" for room in ("strategy", "tuning.callback") for name in ("lightning", "pytorch_lightning")}
MOST_NAMES = 120


def deep(path: Path) -> set[str]:
    """Return the modules inside the package from which a test file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_omni."):
            found.add(str(node.module).removeprefix("lightning_omni."))
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            found |= {name.removeprefix("lightning_omni.") for name in names if name.startswith("lightning_omni.")}
    return found - PUBLIC - FACES


def test_tests_outside_of_unit_import_public_names_and_one_facade() -> None:
    own = Path(__file__)
    paths = [path for path in own.parent.glob("*.py") if path not in (own, own.parent / "core.py")]
    assert {path.name: deep(path) for path in paths if deep(path)} == {}
    facade = ast.parse((own.parent / "core.py").read_text())
    names = [node for node in ast.walk(facade) if isinstance(node, ast.alias)]
    assert len(names) <= MOST_NAMES
