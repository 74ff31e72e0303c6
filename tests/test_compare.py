"""The script that compares two commits: what it checks out is gone afterwards, and it reads what the others print."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks import compare

STEP_TIME = """DDPStrategy 36.36 ms a step, OmniStrategy(groups=1) 47.72 ms
ratio 1.033, quartiles 1.006 and 1.312 (at most 1.02 is promised)
noise: DDPStrategy against itself, in the same run, 1.052, quartiles 0.991 and 1.074
alone 30.19 ms a step, beside a group that sleeps 30.83 ms
ratio 1.034, quartiles 1.021 and 1.046 (at most 1.05 is promised)
"""
TRANSPORT = """100 MB, 31 repeats
  raw TCP there and back      33.65 ms
  fused step                   3.07 ms
  ipc                         43.24 ms   0.99 of TCP, quartiles 0.53 and 1.24
  TCP                         49.60 ms
  TCP with CURVE              64.29 ms   1.38 of TCP, quartiles 1.30 and 1.47
  TCP over its floor 1.35
0.1 MB, 620 repeats
  ipc                          1.50 ms   0.99 of TCP, quartiles 0.53 and 1.24
"""

in_a_repository = pytest.mark.skipif(
    not (compare.ROOT / ".git").exists() or shutil.which("git") is None, reason="this is no checkout of a repository"
)


@in_a_repository
def test_checked_out_commits_are_gone_after_an_interruption() -> None:
    head = compare.commit_of("HEAD")
    seen: list[Path] = []

    def interrupted() -> None:
        with compare.checked_out({"old": head, "new": head}) as trees:
            seen.extend(trees.values())
            assert all((tree / "lightning_omni" / "__init__.py").exists() for tree in seen)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(seen) == 2
    assert not any(tree.parent.exists() for tree in seen)
    assert not any(str(tree) in compare.git("worktree", "list") for tree in seen)


@in_a_repository
def test_a_name_that_is_no_commit_is_refused_by_naming_it() -> None:
    with pytest.raises(compare.CannotRun, match="'no such commit' is no commit of"):
        compare.commit_of("no such commit")


def test_figures_of_real_processes_are_read() -> None:
    assert compare.figures_of(STEP_TIME, TRANSPORT) == {
        "step_time.py, groups=1 over DDP": 1.033,
        "step_time.py, beside a slow group over alone": 1.034,
        "transport.py, 100 MB over ipc": 43.24,
        "transport.py, 100 MB over TCP": 49.6,
        "transport.py, 100 MB over TCP with CURVE": 64.29,
        "transport.py, 0.1 MB over ipc": 1.5,
    }


def test_every_measure_takes_time() -> None:
    for make in compare.MEASURES.values():
        assert make()() > 0
