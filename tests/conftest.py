"""The order of the files, cheap garbage collection, and the same examples in every continuous integration."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

if os.environ.get("CI"):
    # Derandomized, hypothesis still draws constants from whatever modules of ours this process has loaded so far, and
    # that depends on which files the other processes have taken.
    assert callable(providers._get_local_constants)
    providers._get_local_constants = Constants

LONGEST = (
    *("test_omni_tuner", "test_two_nodes", "test_faces", "test_deaths", "test_cluster_methods", "test_compatibility"),
    *("test_device", "test_hostile", "test_profile", "test_regroup", "test_serve", "test_groups", "test_merged"),
    *("test_report", "test_proportional", "test_start_methods", "test_cli_plan", "test_signals", "test_device_tuner"),
    *("test_oracles", "test_simulator", "test_statistical", "test_search", "test_cli_simulate", "test_manners"),
    *("test_private_directory", "test_finetuning", "test_parity", "test_cli", "test_arguments", "test_cli_device"),
    *("test_refusals", "test_checkpoints", "test_search_objects", "test_ends", "test_golden", "test_histories"),
)
"""Files of many seconds each, longest first: side by side, none is left to run alone in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the others as they come."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector, which some of our code calls, need not look through it every time."""
    gc.freeze()
