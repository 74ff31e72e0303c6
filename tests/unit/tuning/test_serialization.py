"""Files: what they hold comes back, what earlier versions wrote as well, and what is no file of ours is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.callback.tuned_run import Command
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.model.profile import Profile

DATA = Path(__file__).parents[2] / "data"


def kept(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def test_a_profile_of_an_earlier_version_is_read_whole_and_predicts() -> None:
    """Its ranks are late together, of which earlier versions did not know."""
    profile = Profile.from_dict(kept("profile.json"))
    predicted = profile.predict(2)
    seconds, rate = predicted.seconds_per_update, predicted.samples_per_second
    assert [round(1000 * each, 2) for each in (seconds.value, seconds.low, seconds.high)] == [67.84, 67.16, 68.67]
    assert (round(rate.value, 1), predicted.bottleneck) == (196.5, "compute")
    written = json.loads(json.dumps(profile.to_dict()))
    earlier = kept("profile.json")
    measured = [{**now, **then} for now, then in zip(written["measured"], earlier["measured"], strict=True)]
    assert {**written, **earlier, "measured": measured} == written


def test_what_rank_0_says_arrives_as_it_was_said() -> None:
    command = Command(
        Setting(2, 0.5, 0.1, further=(("wire", "bfloat16"),)),
        speeds={0: 10.0, 11: 20.5},
        by_speed=True,
        divergence_threshold=2.5,
        learnt_below=2.0,
        why="it is faster",
    )
    assert Command.from_dict(json.loads(json.dumps(command.to_dict()))) == command


@pytest.mark.parametrize(
    ("change", "told"),
    [({"measured": None}, "measured"), ({"draws": "many"}, "draws"), ({"changes": [{"speed": 2}]}, "speed")],
)
def test_what_is_no_profile_is_refused_with_what_is_wrong(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Profile.from_dict({**kept("profile.json"), **change})
