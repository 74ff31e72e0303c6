"""What a search is made of can be added to from outside: a dimension is one object, a sampler one file.

And its parts are what they say: evidence stays as it was told, constants are those of the docs, old files load.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from golden import searched
from golden.digests import apart
from middle_first import MiddleFirst

from lightning_omni import OmniTuner, performance, search, tuner
from lightning_omni.errors import ConfigurationError
from lightning_omni.performance import constants as model_constants
from lightning_omni.performance.forecast import Setting
from lightning_omni.report import TuningReport
from lightning_omni.search import (
    SAMPLERS,
    Dimension,
    FinalStepSearchSpec,
    Search,
    SearchSpec,
    StepSearchSpec,
    constants,
    register_sampler,
)
from lightning_omni.search.space import apply_further

DOCS = Path(__file__).parent.parent / "docs"
FOUR = searched.FOUR


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


def go(search: Search, machines: searched.Machines = FOUR, most: int = 99) -> Search:
    while len(search.observations) < most and (probe := search.next()) is not None:
        search.tell(machines.show(probe, search.spec.batch, 0, search.spec.scaling))
    return search


def with_wire() -> SearchSpec:
    start = replace(searched.START, further=(("wire", "float32"),))
    spec = searched.job(FOUR, start=start, share=0.3)
    return replace(spec, space=replace(spec.space, further=(Wire(),)))


# --- A dimension is one object ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["random", "skopt"])
def test_values_of_a_dimension_from_outside_are_tried(strategy: str) -> None:
    search = go(Search(with_wire(), strategy), most=8)
    tried = {each.setting.further_value("wire") for each in search.tried}
    assert "float32" in tried
    assert len(tried) > 1
    assert tried <= set(Wire().values)
    assert "wire" in str(search.choice().setting)


def test_every_sampler_keeps_the_value_that_the_run_has_unless_it_asks_for_others() -> None:
    for strategy in searched.PROBING:
        search = go(Search(with_wire(), strategy), most=2)
        assert [each.setting.further for each in search.tried] == [(("wire", "float32"),)] * 2


def test_theory_and_probes_tell_values_of_a_dimension_from_outside_apart() -> None:
    search = go(Search(with_wire(), "random"), most=6)
    known = search.tried[-1].setting
    other = next(value for value in Wire().values if value != known.further_value("wire"))
    assert search.efficiency()(known) != search.efficiency()(known.with_further("wire", other))


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
    OmniTuner(space={"wire": "int8"}, budget=0)  # the dimension that every run has
    with pytest.raises(ConfigurationError, match="sent"):
        OmniTuner(space={"sent": "int8"}, budget=0)


# --- A sampler is one file -------------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[str]:
    register_sampler("middle", MiddleFirst)
    yield "middle"
    del SAMPLERS["middle"]


def test_a_sampler_from_outside_proposes_within_the_same_budget(registered: str) -> None:
    search = go(Search(searched.job(FOUR, share=0.3), registered))
    whys = [probe.why for probe in search.probes]
    assert whys[2:] == ["the middle"] * (len(whys) - 2)
    assert len(whys) > 3
    assert search.spent <= search.budget + search.cost(search.probes[-1])
    again = Search.from_dict(json.loads(json.dumps(search.to_dict())))
    assert again.choice() == search.choice()
    assert OmniTuner(search=registered, budget=0).search == "middle"


def test_a_name_belongs_to_one_sampler(registered: str) -> None:
    register_sampler(registered, MiddleFirst)
    with pytest.raises(ConfigurationError, match="name='grid'"):
        register_sampler("grid", MiddleFirst)


# --- Evidence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["groups whose loss rises", "groups far above one"])
def test_evidence_stays_as_it_was_told(name: str) -> None:
    machines, job = searched.searches()[name]
    search = Search(job(machines))
    told = []
    while (probe := search.next()) is not None:
        told.append(machines.show(probe, search.spec.batch, 0, search.spec.scaling))
        search.tell(told[-1])
    assert all(was is kept for was, kept in zip(told, search.observations, strict=True))
    assert not any(each.tried.problem for each in told)
    assert "loss" in search.tried[0].problem  # which is what is made of it


# --- Specifications --------------------------------------------------------------------------------------------------


def test_a_search_for_a_step_goes_through_its_steps_whatever_the_sampler() -> None:
    spec = searched.under_way(FOUR)
    assert isinstance(spec, StepSearchSpec)
    for strategy in SAMPLERS:
        search = go(Search(spec, strategy))
        factors = [probe.setting.lr / spec.start.lr for probe in search.probes]
        assert factors == pytest.approx([1.0, 1 / 3, 3.0][: len(factors)])
        assert len(factors) >= 2


@pytest.mark.parametrize(
    ("steps", "near", "kind"),
    [(False, False, SearchSpec), (True, False, StepSearchSpec), (True, True, FinalStepSearchSpec)],
)
def test_modes_of_earlier_files_are_the_searches_of_now(steps: bool, near: bool, kind: type) -> None:
    plain = searched.under_way(FOUR).to_dict()
    del plain["kind"]
    assert type(SearchSpec.from_dict({**plain, "steps": steps, "near": near})) is kind


def test_a_report_of_an_earlier_version_says_what_it_said() -> None:
    folder = Path(__file__).parent / "data"
    said = json.loads((folder / "omni-tuning-said.json").read_text())
    report = TuningReport.load(folder / "omni-tuning.json")
    assert report.statement == said["statement"]
    assert [str(each.choice.setting) for each in report.digests] == said["choices"]
    assert [[row.tried.problem for row in each.probes] for each in report.digests] == said["problems"]
    assert TuningReport.from_dict(report.to_dict()).statement == said["statement"]


# --- Constants -------------------------------------------------------------------------------------------------------


TABLES = pytest.mark.parametrize(
    ("module", "page"),
    [(constants, "tuning-prior.md"), (model_constants, "performance.md")],
    ids=["search", "performance"],
)


@TABLES
def test_the_table_of_the_docs_has_every_constant_and_its_value(module: ModuleType, page: str) -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([\d.]+) \| (\S.+?) \| (\S.+?) \|$", (DOCS / page).read_text(), re.M)
    documented = {name: float(value) for name, value, _, _ in rows}
    assert documented == {name: value for name, value in vars(module).items() if name.isupper()}


DECIDES_NOTHING = {"SWITCH_INTERVAL", "MESSAGE_BYTES", "_MOST_SEED", "_FIRST_EPOCH"}
"""Numbers of Python, of bytes and of names, where they are used; what `DeviceTuner` measures is not searched."""


@pytest.mark.parametrize(("package", "table"), [(search, "search"), (performance, "performance"), (tuner, "search")])
def test_no_number_is_decided_by_that_is_not_in_the_table(package: ModuleType, table: str) -> None:
    for path in Path(str(package.__file__)).parent.rglob("*.py"):
        if path.name in ("constants.py", "device.py"):
            continue
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if {ast.unparse(each) for each in targets} <= DECIDES_NOTHING:
                continue
            kinds = {type(part.value) for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
            assert not kinds & {int, float}, f"{path}:{node.lineno} belongs into lightning_omni/{table}/constants.py"


# --- Golden ----------------------------------------------------------------------------------------------------------

QUICK = ("omnivore: four ranks", "random: eight ranks", "grid: periods", "random: groups that diverge", "bayes: steps")
THEORY = ("bayes: groups", "bayes: a small budget", "bayes: nothing timed", "bayes: seconds", "bayes: one group")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """What was recorded, and where."""
    kept: dict[str, Any] = json.loads(searched.FILE.read_text())
    return kept


@pytest.fixture(scope="module")
def carried_out() -> dict[str, dict[str, Any]]:
    """What becomes of some of these searches."""
    return {name: case() for name, case in searched.cases() if name.startswith(QUICK + THEORY)}


def test_searches_say_and_choose_what_was_recorded(
    recorded: dict[str, Any], carried_out: dict[str, dict[str, Any]]
) -> None:
    kept = {name: searched.everywhere(recorded["searches"][name]) for name in carried_out}
    assert {name: searched.everywhere(found) for name, found in carried_out.items()} == kept


def test_proposals_choices_and_reports_have_the_bits_that_were_recorded(
    recorded: dict[str, Any], carried_out: dict[str, dict[str, Any]]
) -> None:
    if why := apart(recorded["here"], searched.here()):
        pytest.skip(f"bits were recorded elsewhere ({why}); texts and choices are compared all the same")
    assert carried_out == {name: recorded["searches"][name] for name in carried_out}
