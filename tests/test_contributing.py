"""What the page for contributors and the issue forms name exists: files, make targets, commands, options, names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from core import main, search

import lightning_omni

ROOT = Path(lightning_omni.__file__).parent.parent
PAGE = (ROOT / "docs" / "contribute" / "contributing.md").read_text()
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def missing(text: str) -> list[str]:
    """Paths in backquotes that are not there."""
    named = re.findall(r"`([\w.]+/[\w./]*|\w[\w-]*\.(?:toml|txt|md))`", text)
    return [name for name in named if not (ROOT / name).exists()]


def test_a_path_that_is_not_there_is_noticed() -> None:
    assert missing("`tests/golden/`, `tests/no_such.py`, `no-such.toml`") == ["tests/no_such.py", "no-such.toml"]


def test_paths_on_the_page_exist() -> None:
    assert len(re.findall(r"`(?:tests|lightning_omni)/", PAGE)) > 25
    assert not missing(PAGE)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join([*COMMANDS, *re.findall(r"`([^`\n]+)`", PAGE)])))
    assert {"install", "test", "format", "help"} <= named <= targets


def test_scripts_of_the_page_know_the_options_that_they_are_given() -> None:
    scripts = [re.search(r"python (tests/\S+\.py)(.*)", command) for command in COMMANDS]
    found = [script for script in scripts if script]
    assert len(found) >= 11
    for script in found:
        source = (ROOT / script[1]).read_text()
        assert "__main__" in source
        assert all(f'"{option}"' in source for option in re.findall(r"--[a-z-]+", script[2])), script[0]


def test_files_and_marks_that_pytest_is_given_exist() -> None:
    given = [command for command in COMMANDS if " -m pytest" in command]
    marks = re.findall(r"^    \"(\w+): ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(given) >= 3
    for command in given:
        assert all((ROOT / name).exists() for name in re.findall(r"tests/\S+", command))
        for chosen in re.findall(r'-m "([^"]+)"', command):
            assert set(chosen.split()) - {"not", "and"} <= set(marks)


def test_what_is_to_be_added_to_has_the_names_of_the_page() -> None:
    assert "Dimension`" in PAGE
    assert all(hasattr(search.Dimension, name) for name in ("name", "axis", "current", "apply", "needs_regroup"))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_are_what_github_takes(form: Path) -> None:
    said = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert said == {"blank_issues_enabled": True}
        return
    assert said.keys() == {"name", "description", "labels", "body"}
    names = [field["id"] for field in said["body"]]
    assert len(set(names)) == len(names)
    for field in said["body"]:
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert field["attributes"]["label"]
        assert not missing(f"`{field['attributes'].get('description', '')}`")


def test_the_form_for_bugs_asks_for_what_these_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    text = next(form for form in FORMS if form.stem == "bug").read_text()
    assert "lightning-omni --version\n" in text
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert lightning_omni.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("package", ["torch", "Lightning"])
def test_the_first_page_names_the_oldest_versions_that_are_installed(package: str) -> None:
    oldest = re.search(rf"{package} ([\d.]+) or later", (ROOT / "README.md").read_text())
    assert oldest is not None
    bounds = re.findall(rf'"(?:pytorch-)?{package.lower()}>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert set(bounds) == {oldest[1]}


def test_the_readme_of_benchmarks_has_the_first_sentence_of_each() -> None:
    folder = ROOT / "tests" / "benchmarks"
    rows = dict(
        re.findall(r"^\| \[`(\w+)\.py`\]\(\w+\.py\) \| (.*) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    )
    scripts = {path.stem: ast.get_docstring(ast.parse(path.read_text())) or "" for path in folder.glob("[a-z]*.py")}
    assert rows == {name: text.partition("\n")[0].replace("|", "\\|") for name, text in scripts.items()}
