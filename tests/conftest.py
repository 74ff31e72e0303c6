"""The order of the files, and the same examples in every continuous integration."""

from __future__ import annotations

import os

import pytest
from hypothesis.internal.conjecture import providers

if os.environ.get("CI"):
    # Derandomized, hypothesis still draws constants from whatever modules of ours this process has loaded so far, and
    # that depends on which files the other processes have taken.
    assert callable(providers._get_local_constants)
    providers._get_local_constants = providers.Constants

LONGEST = (
    "test_compatibility",
    *("test_omni_tuner", "test_cluster_methods", "test_deaths", "test_device", "test_faces", "test_groups"),
    *("test_manners", "test_start_methods", "test_hostile"),
    *("test_merged", "test_serve", "test_proportional", "test_device_tuner", "test_regroup", "test_two_nodes"),
    *("test_refusals", "test_report", "test_profile", "test_cli_device", "test_cli_plan", "test_parity"),
)
"""Files of many seconds each, longest first: side by side, none is left to run alone in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the others as they come."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
