"""What `make test` runs, the order of the files, cheap garbage collection, the same examples in every integration."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import workers
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

gc.disable()  # while tests are collected: what is imported stays, and to look for garbage in it takes as long

if os.environ.get("CI"):
    # Derandomized, hypothesis still draws constants from whatever modules of ours this process has loaded so far, and
    # that depends on which files the other processes have taken.
    assert callable(providers._get_local_constants)
    providers._get_local_constants = Constants

collect_ignore = [] if os.environ.get("OMNI_TEST_ACCELERATOR") == "gpu" else ["accelerator"]
LONGEST = """
    joining first_batches server_restart inside deaths omni_tuner signals groups faces report compatibility
    cluster_methods hostile proportional three_hosts steps frozen serve cli_plan wire merged device shared_memory
    watch device_tuner tensor_parallel throughput placement start_methods cli_simulate servers wire_format simulator
    overlap lossy tuned_alone oracles profile regroup tuned_servers transport manners cli_device finetuning golden
    search statistical histories arguments server_core parity ends layout_and_codec cli
    search_objects two_nodes words
"""
"""Files of many seconds each, longest first: side by side, none is left to run alone in the end."""


# Tests of one room take from those of another, by name.
sys.path += [str(path) for path in sorted((Path(__file__).parent / "unit").iterdir())]

MOST_AGAIN = 3
"""Tests that may fail beside others, if they pass alone."""
START_PROCESSES = ("runs", "processes")
"""Modules of the tests that start processes: a test file that takes something from them is marked so."""
REASONS = "omni/reasons"
"""The entry of pytest's cache with the failures of the last run: the end of each report, by the test's name."""


@pytest.fixture(scope="session")
def is_all(request: pytest.FixtureRequest) -> bool:
    """Return whether what is marked exhaustive is run, too."""
    return bool(request.config.getoption("--all"))


@pytest.fixture(autouse=True)
def _environment_of_launches() -> Iterator[None]:
    """Take away what Lightning's launcher leaves in the environment: the next Trainer would not launch its ranks."""
    before = {name: os.environ.get(name) for name in runs.LAUNCHED}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all` is what `make test-all` adds."""
    parser.addoption("--all", action="store_true", help="also what is marked exhaustive")
    help_text = (
        f"up to {MOST_AGAIN} tests with processes that have failed beside others, again, with nothing beside them"
    )
    parser.addoption("--again", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a run share the one whose copies run scripts."""
    sys.path += [path for path in workers.paths if path not in sys.path]
    if sys.platform == "linux" and not hasattr(config, "workerinput") and not config.getoption("numprocesses", None):
        runs.keep_warm()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """The workers are copies of one process; they share the one whose copies run scripts, too."""
    if sys.platform == "linux":
        command = workers.prepare(config.pluginmanager.getplugin("session"))
        for spec in specs:
            spec.python = command
        runs.keep_warm()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first, the others as they come; of products only a part, unless all is asked for."""
    left_out = [] if config.getoption("--all") else [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        names = vars(item.module).values()  # type: ignore[attr-defined]
        if any(getattr(each, "__module__", None) in START_PROCESSES for each in names):
            item.add_marker(pytest.mark.processes)
    places = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


_reasons: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember the end of a failure's report."""
    if report.failed:
        _reasons[report.nodeid] = report.longreprtext[-1_000:]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the failures for the run that repeats them."""
    if getattr(session.config, "cache", None) is not None and not hasattr(session.config, "workerinput"):
        session.config.cache.set(REASONS, _reasons)


def _check_again(items: list[pytest.Item], reasons: dict[str, str]) -> None:
    """Refuse to repeat what cannot have failed for lack of processor time, or too much of it.

    What starts processes waits for them, for a while: that it fails where a machine stands still for a minute says
    nothing of the program. That it fails twice, the second time with nothing beside it, does.
    """
    if len(items) > MOST_AGAIN:
        raise pytest.UsageError(f"{len(items)} tests have failed: that is not for lack of processor time")
    alone = [item.nodeid for item in items if not item.get_closest_marker("processes")]
    if alone:
        texts = "".join(f"\n{name}\n{reasons.get(name, '')}" for name in alone)
        raise pytest.UsageError(f"these start no processes, and have failed: {texts}")
    for item in items:
        sys.stderr.write(f"failed beside other tests, now alone: {item.nodeid}\n{reasons.get(item.nodeid, '')}\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what is there by now: the collector, which some of our code calls, need not look through it every time."""
    if session.config.getoption("--again"):
        assert session.config.cache is not None
        _check_again(session.items, session.config.cache.get(REASONS, {}))
    gc.freeze()
    gc.enable()
