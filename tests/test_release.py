"""What is published: the wheel runs the README without a checkout, and the tested releases are those that are named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from core import TESTED, both_namespaces, warn_about_untested

import lightning_omni

ROOT = Path(lightning_omni.__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


@pytest.mark.parametrize("package", TESTED)
def test_the_oldest_tested_release_is_the_lower_bound(package: str) -> None:
    bounds = set(re.findall(rf'"{package}>=([\d.]+)', PROJECT))
    assert bounds == {dotted(TESTED[package][0])}


@pytest.mark.parametrize(("installed", "is_tested"), [("2.12.1", False), ("2.13.0+cpu", True), ("2.16.0", False)])
def test_an_untested_release_of_torch_is_warned_about(
    installed: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(both_namespaces, "version", lambda package: installed if package == "torch" else "2.6.0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_about_untested()
    found = [str(each.message) for each in caught]
    assert bool(found) != is_tested
    assert all(f"torch 2.13 to 2.15, and {installed} is installed" in each for each in found)


def test_only_the_first_rank_of_a_node_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both_namespaces, "version", lambda package: "1.0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    warn_about_untested()  # a warning would be an error


def test_continuous_integration_runs_both_ends_of_the_tested_range() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    ends = jobs["ends"]["strategy"]["matrix"]["include"]
    assert [each["torch"] for each in ends] == [f"{dotted(end)}.*" for end in TESTED["torch"]]
    assert [each["lightning"] for each in ends] == [f"{dotted(end)}.*" for end in TESTED["pytorch-lightning"]]
    oldest, newest = re.findall(r">=([\d.]+),<3.(\d+)", PROJECT)[0]
    assert [each["python"] for each in ends] == [oldest, f"3.{int(newest) - 1}"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_say_where_they_have_not_run_and_ask_for_few_permissions(path: Path) -> None:
    text = path.read_text()
    plain: dict[str, Any] = yaml.safe_load(text)
    assert text.startswith("# Not run yet")
    assert plain["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in plain["jobs"].values())


def test_a_release_has_whole_addresses(tmp_path: Path) -> None:
    (tmp_path / ".github").mkdir()
    for name in (".github/release.py", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    home = "https://example.com/them/theirs"
    subprocess.run([sys.executable, tmp_path / ".github" / "release.py", home, "v1.0"], check=True, timeout=60)
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    before = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    assert len(links) == len(before) > 20
    for (is_picture, address), (_, path) in zip(links, before, strict=True):
        assert address == f"{home}/{'raw' if is_picture else 'blob'}/v1.0/{path}"
        assert (ROOT / path.partition("#")[0]).exists()
    assert "until the first release" not in (tmp_path / "README.md").read_text()
    project = (tmp_path / "pyproject.toml").read_text()
    assert f'[project.urls]\nDocumentation = "{home}/blob/v1.0/docs/index.md"\n' in project
    assert project.replace(project.partition("[project.urls]\n")[2].partition("[project.scripts]\n")[0], "") == (
        PROJECT.replace("[project.scripts]\n", "[project.urls]\n[project.scripts]\n")
    )


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_wheel_runs_the_first_script_of_the_readme_without_a_checkout(tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()

    def run(*command: str, folder: Path = work, **variables: str) -> str:
        known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**known, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), folder=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    where = run("-c", "import lightning_omni; print(lightning_omni.__file__)", PYTHONPATH=str(site))
    assert Path(where.strip()).is_relative_to(site)
    assert lightning_omni.__version__ in run("-m", "lightning_omni", "--version", PYTHONPATH=str(site))
    script = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (work / "script.py").write_text(script)
    assert run("script.py", PYTHONPATH=str(site)).strip()
