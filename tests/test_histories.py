"""Process groups depend on nothing that a rank has done before, by itself or for its user."""

from __future__ import annotations

from runs import free_port, run


def test_fits_of_one_script_need_no_equal_histories_of_their_ranks() -> None:
    """Ranks come late, make process groups of their own and end some, and once end torch.distributed altogether."""
    options = {"fits": [2, 3, 1, 2, 3], "delay": 0.1, "destroy_after": 2, "port": free_port(), "timeout": 45}
    finished = run("histories.py", options)
    assert set(finished.results) == {0, 1, 2, 3}, finished.output[-8000:]
    ends = [finished.results[rank]["weights"] for rank in range(4)]
    assert all(end == ends[0] and len(end) == 5 for end in ends)
    # The default one, that of the live world, and one for 2 groups and one for 3, however many fits had them.
    assert [finished.results[rank]["process_groups"] for rank in range(4)] == [4] * 4
