"""What is sent or kept as JSON comes back."""

from __future__ import annotations

import json

from lightning_omni.tuning.callback.tuned_run import Command
from lightning_omni.tuning.model.setting import Setting


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
