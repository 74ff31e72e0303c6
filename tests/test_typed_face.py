"""What type checkers see: users of both namespaces pass, mistakes do not, and our hooks say what they override."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_omni

ROOT = Path(lightning_omni.__file__).parent
README = (ROOT.parent / "README.md").read_text()
USE = """
trainer = {alias}.Trainer(
    strategy=OmniStrategy(groups=2, method="local_sgd:period=8"),
    callbacks=[OmniTuner(target=0.9, monitor="val_acc"), DeviceTuner(bf16="apply")],
    devices=4,
)
strategy = OmniStrategy(groups=2, find_unused_parameters=True)
strategy.regroup(1, by_speed=True)
updates: int = strategy.report().updates
choice = OmniTuner(space={{"groups": [1, 2]}}).choice
if choice is not None:
    groups: int = choice.setting.groups
"""
WRONG = """
OmniStrategy(groups="2")  # arg-type
OmniStrategy(data="neither")  # arg-type
OmniTuner(target="low")  # arg-type
DeviceTuner(setting={{}})  # arg-type
OmniStrategy(groups=2).regroup()  # call-arg
OmniStrategy(groups=2).report().update  # attr-defined
{alias}.Trainer(strategy=OmniTuner())  # arg-type
{alias}.Trainer(callbacks=[OmniStrategy()])  # list-item
"""
FROM_PACKAGE = "from lightning_omni import DeviceTuner, OmniStrategy, OmniTuner\n"
FROM_MODULES = """from lightning_omni.strategy.{module} import OmniStrategy
from lightning_omni.tuning.callback.{module} import DeviceTuner, OmniTuner
"""
OF_USERS = """

class Narrator(OmniTuner):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)


def fit(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    OmniStrategy(groups=2).setup(trainer)
    OmniTuner().on_fit_start(module, trainer)  # arg-type, arg-type
"""
OTHER = """
pl.Trainer(strategy=L.Trainer().strategy)  # arg-type
L.Trainer(strategy=OmniStrategy())  # arg-type
L.Trainer(callbacks=[OmniTuner()])  # list-item
"""


def programs() -> Iterator[tuple[str, str]]:
    for alias, namespace, module in (
        ("pl", "pytorch_lightning", "pytorch_lightning"),
        ("L", "lightning", "lightning"),
        ("lp", "lightning.pytorch", "lightning"),
    ):
        head = f"import {namespace} as {alias}\n"
        for kind, imports in (("package", FROM_PACKAGE), ("modules", FROM_MODULES.format(module=module))):
            yield f"{alias}_{kind}", head + imports + (USE + WRONG).format(alias=alias)
    ours = FROM_MODULES.format(module="pytorch_lightning")
    yield "subclass", "import pytorch_lightning as pl\n" + ours + OF_USERS
    yield "other", "import lightning as L\nimport pytorch_lightning as pl\n" + ours + OTHER
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", README, re.DOTALL)):
        yield f"readme_{number}", block


PROGRAMS = dict(programs())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """For each program, the lines and codes of mypy's errors, from one run on all of them."""
    folder = tmp_path_factory.mktemp("users")
    for name, text in PROGRAMS.items():
        (folder / f"{name}.py").write_text(text)
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-pretty", *sorted(map(str, folder.glob("*.py")))],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=220,
    )
    errors: dict[str, list[tuple[int, str]]] = {name: [] for name in PROGRAMS}
    lines = [line for line in ran.stdout.splitlines() if ": error: " in line]
    for line in lines:
        at = re.fullmatch(r".*/(\w+)\.py:(\d+): error: .*\[([\w-]+)\]", line)  # in a folder of an earlier run, maybe
        assert at, line
        errors[at[1]].append((int(at[2]), at[3]))
    assert f"checked {len(PROGRAMS)} source files" in ran.stdout, ran.stdout + ran.stderr
    return errors


@pytest.mark.parametrize("name", PROGRAMS)
def test_mypy_accepts_what_is_right_and_finds_what_is_wrong(name: str, found: dict[str, list[tuple[int, str]]]) -> None:
    marked = [
        (number, code)
        for number, line in enumerate(PROGRAMS[name].splitlines(), start=1)
        for code in line.partition("  # ")[2].split(", ")
        if re.fullmatch(r"[a-z]+-[a-z]+", code)
    ]
    assert sorted(found[name]) == marked
    assert bool(marked) != name.startswith("readme")


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "py.typed").is_file()


# --- In the source ----------------------------------------------------------------------------------------------------

NAMED = {"trainer", "_trainer", "pl_module", "lightning_module"}


def annotated(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Parameters, attributes and properties, with what they are annotated with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            yield getattr(node.target, "attr", getattr(node.target, "id", "")), node.annotation
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:
            yield node.name, node.returns


def untyped(source: str) -> list[str]:
    return [
        name
        for name, annotation in annotated(ast.parse(source))
        if name in NAMED and (annotation is None or re.search(r"\bAny\b", ast.unparse(annotation)))
    ]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(trainer: Any): ...", ["trainer"]),
        ("def f(*, pl_module): ...", ["pl_module"]),
        ("class A:\n def f(self):\n  self._trainer: Any | None = None", ["_trainer"]),
        ("class A:\n @property\n def trainer(self) -> 'Any': ...", ["trainer"]),
        ("def f(trainer: Trainer, module: Any): ...", []),
    ],
)
def test_an_untyped_trainer_is_noticed(source: str, names: list[str]) -> None:
    assert untyped(source) == names


def test_no_trainer_and_no_module_of_it_is_any_in_the_whole_package() -> None:
    found = {str(path.relative_to(ROOT)): untyped(path.read_text()) for path in ROOT.rglob("*.py")}
    assert len(found) > 100
    assert not {path: names for path, names in found.items() if names}


def of_lightning() -> list[type]:
    """Our classes that are mixed into Lightning's, as they are for one namespace."""
    rooms = ("strategy", "tuning.callback")
    modules = [importlib.import_module(f"lightning_omni.{room}.pytorch_lightning") for room in rooms]
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    ]


def says_override(value: Any) -> bool:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return getattr(function, "__override__", False)


def overriding(kind: type) -> Iterator[tuple[str, Any, bool]]:
    """Methods and properties of our own, and whether Lightning has one of that name that they stand before."""
    order = kind.__mro__
    for place, ours in enumerate(order):
        theirs = [base for base in order[place + 1 :] if base.__module__.split(".")[0].startswith("pytorch_lightning")]
        theirs += [base for base in order[place + 1 :] if base.__module__.split(".")[0] == "lightning_fabric"]
        for name, value in vars(ours).items() if ours.__module__.startswith("lightning_omni.") else ():
            if (callable(value) or isinstance(value, (property, classmethod))) and name != "__init__":
                yield f"{ours.__name__}.{name}", value, any(name in vars(base) for base in theirs)


def test_every_method_that_overrides_one_of_lightning_says_so() -> None:
    methods = {name: (value, overrides) for kind in of_lightning() for name, value, overrides in overriding(kind)}
    hooks = {name for name, (value, overrides) in methods.items() if overrides and not isinstance(value, type)}
    assert {"OmniStrategyHooks.setup", "OmniTunerHooks.on_fit_start", "DeviceTunerHooks.setup"} < hooks
    assert {"OmniLauncherHooks.launch", "OmniProcessesHooks.launch"} < hooks
    assert {"OmniStrategyHooks.distributed_sampler_kwargs", "OmniStrategyHooks._configure_launcher"} < hooks
    assert not {name for name in hooks if not says_override(methods[name][0])}
