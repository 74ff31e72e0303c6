"""With NCCL, a collective never returns if a rank has died: the survivors of its group must end, and end well."""

from __future__ import annotations

import pytest
from runs import Running


@pytest.mark.parametrize(("victim", "survivor"), [(3, 2), (1, 0)])
def test_survivors_of_a_rank_that_dies_under_a_collective_end_with_their_hooks(victim: int, survivor: int) -> None:
    fit = {"data": {"samples": 384}, "die_at": {str(victim): 5}}
    with Running("groups.py", {"fits": [fit]}, env={"EMULATED_NCCL_HANGS": "1"}) as running:
        finished = running.wait(90)
        events = (running.folder / f"events{survivor}").read_text()
    assert "exception " in events, finished.output[-4000:]
    assert f"rank {survivor} stops:" not in finished.output, "its process was ended before it could"
    if survivor:  # the run does not go on without the first group
        assert finished.results[0][0]["report"]["ranks_lost"] == [survivor, victim]
