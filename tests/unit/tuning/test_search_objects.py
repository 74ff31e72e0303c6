"""A dimension of the space is one object, also one from outside; constants are those of the docs."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_omni import OmniTuner
from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning import callback, model, search
from lightning_omni.tuning.model import constants as model_constants
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import Dimension, constants
from lightning_omni.tuning.search.space import apply_further

DOCS = Path(__file__).parents[3] / "docs"


@dataclass(frozen=True)
class Wire(Dimension):
    """What pushes are rounded to: groups have to be formed again when it changes."""

    values: tuple[str, ...] = ("float32", "bfloat16", "int8")
    name = "wire"
    needs_regroup = True

    def axis(self, known: Any) -> list[Any]:
        return list(self.values)

    def current(self, world: Any) -> Any:
        return world.wire

    def apply(self, world: Any, value: Any) -> None:
        world.wire = value


def test_a_value_is_applied_and_says_whether_groups_are_formed_again() -> None:
    world = SimpleNamespace(wire="float32")
    setting = Setting(2, 0.9, 0.1, further=(("wire", "int8"),))
    assert apply_further((Wire(),), world, setting)
    assert world.wire == "int8"
    assert not apply_further((Wire(),), world, setting)  # nothing changes


def test_a_setting_with_it_travels_and_a_tuner_takes_it() -> None:
    setting = Setting(2, 0.9, 0.1, further=(("wire", "int8"),))
    assert Setting.from_dict(json.loads(json.dumps(setting.to_dict()))) == setting
    assert str(setting) == "2 groups, wire int8, momentum 0.9, lr 0.1"
    OmniTuner(space={"wire": Wire()}, budget=0)
    OmniTuner(space={"compression": "int8"}, budget=0)  # the dimension that every run has
    with pytest.raises(ConfigurationError, match="sent"):
        OmniTuner(space={"sent": "int8"}, budget=0)


# --- Constants -------------------------------------------------------------------------------------------------------


TABLES = pytest.mark.parametrize(
    ("module", "page"),
    [(constants, "contribute/constants.md"), (model_constants, "contribute/performance.md")],
    ids=["search", "performance"],
)


@TABLES
def test_the_table_of_the_docs_has_every_constant_and_its_value(module: ModuleType, page: str) -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([\d.]+) \| (\S.+?) \| (\S.+?) \|$", (DOCS / page).read_text(), re.M)
    documented = {name: float(value) for name, value, _, _ in rows}
    assert documented == {name: value for name, value in vars(module).items() if name.isupper()}


DECIDES_NOTHING = {
    *("SWITCH_INTERVAL", "MESSAGE_BYTES", "_MOST_SEED", "UNBOUNDED"),
}
"""Numbers of Python, of bytes and of names, where they are used; what `DeviceTuner` measures is not searched."""


@pytest.mark.parametrize(("package", "table"), [(search, "search"), (model, "performance"), (callback, "search")])
def test_no_number_is_decided_by_that_is_not_in_the_table(package: ModuleType, table: str) -> None:
    for path in Path(str(package.__file__)).parent.rglob("*.py"):
        if path.name == "constants.py":
            continue
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if {ast.unparse(each) for each in targets} <= DECIDES_NOTHING:
                continue
            kinds = {type(part.value) for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
            assert not kinds & {int, float}, f"{path}:{node.lineno} belongs into the constants of {table}"
