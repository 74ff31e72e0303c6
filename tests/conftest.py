"""What `make test` runs, the order of the files, cheap garbage collection, the same examples in every integration."""

from __future__ import annotations

import gc
import os
import sys
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

LONGEST = (
    *("test_omni_tuner", "test_simulator", "test_profile", "test_compatibility", "test_cli_plan"),
    *("test_report", "test_cli_simulate", "test_oracles", "test_joining", "test_merged", "test_finetuning"),
    *("test_device", "test_start_methods", "test_faces", "test_inside", "test_golden", "test_cluster_methods"),
    *("test_groups", "test_deaths", "test_search", "test_overlap", "test_proportional", "test_first_batches"),
    *("test_tensor_parallel", "test_hostile", "test_wire", "test_statistical", "test_lossy", "test_histories"),
    *("test_device_tuner", "test_arguments", "test_serve", "test_server_core", "test_regroup", "test_sensing"),
    *(
        "test_server_restart",
        "test_exported",
        "test_parity",
        "test_shards",
        "test_manners",
        "test_ends",
        "test_signals",
    ),
    *("test_layout_and_codec", "test_cli", "test_search_objects", "test_cli_device", "test_watch"),
    *("test_two_nodes", "test_words", "test_wire_format", "test_decoupled", "test_progress", "test_validation"),
    *("test_doctor", "test_leases", "test_transport", "test_docstrings", "test_fuzz", "test_checkpoints"),
)
"""Files of many seconds each, longest first: side by side, none is left to run alone in the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all` is what `make test-all` adds."""
    parser.addoption("--all", action="store_true", help="also what is marked exhaustive")


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
    """Long files first, the others as they come; of products only a part, unless all is asked for."""
    left_out = [] if config.getoption("--all") else [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector, which some of our code calls, need not look through it every time."""
    gc.freeze()
    gc.enable()
