"""Lightning's progress bars in runs of groups: never beyond their total, at it in the end, one entry that fits."""

from __future__ import annotations

import re

import pytest
from runs import Run, Running

NOMINAL = 32
"""Batches of each rank in an epoch of DDP."""


@pytest.fixture(scope="module")
def run() -> Run:
    fits = [{"bar": "tqdm", "groups": 2}, {"bar": "rich", "groups": 2}, {"bar": "tqdm", "groups": 1}]
    with Running("bars.py", {"fits": fits}, spares=1) as running:
        run = running.wait(220)
    assert run.code == 0, run.output[-4000:]
    return run


def epochs_of(shown: list[list[int]]) -> list[list[list[int]]]:
    starts = [place for place, (done, _) in enumerate(shown) if done == 1]
    return [shown[start:stop] for start, stop in zip(starts, [*starts[1:], len(shown)], strict=True)]


@pytest.mark.processes
@pytest.mark.parametrize("place", [0, 1], ids=["tqdm", "rich"])
def test_the_bar_of_a_fast_group_never_exceeds_its_total_and_ends_at_it(place: int, run: Run) -> None:
    shown = run.results[0][place]["shown"]
    epochs = epochs_of(shown)
    assert len(epochs) == 2
    for epoch in epochs:
        assert [done for done, _ in epoch] == list(range(1, len(epoch) + 1))
        assert len(epoch) > 1.2 * NOMINAL, "rank 0 was not the fast one: this shows nothing"
        assert all(done <= total for done, total in epoch)
        assert all(done < total for done, total in epoch[:-1])
        assert epoch[-1][0] == epoch[-1][1]
        middle_done, middle_total = epoch[len(epoch) // 2]
        assert 0.3 < middle_done / middle_total < 0.8  # it is the progress of the run


@pytest.mark.processes
@pytest.mark.parametrize("place", [0, 1], ids=["tqdm", "rich"])
def test_there_is_one_short_entry_and_the_loggers_get_all(place: int, run: Run) -> None:
    result = run.results[0][place]
    ours = {name: text for name, text in result["entries"].items() if "omni" in name}
    assert list(ours) == ["omni/stale"]
    assert {"omni/staleness_mean", "omni/updates_per_s", "omni/step_time"} <= set(result["keys"])
    assert "omni/stale" not in result["keys"]


@pytest.mark.processes
def test_the_entry_fits_eighty_columns(run: Run) -> None:
    lines = [line for line in run.results[0][0]["lines"] if "omni/" in line]
    assert lines
    assert max(map(len, lines)) <= 80
    for line in lines:  # whole, and there is still a bar
        assert re.search(r"\d%\|.+\| +\d+/\d+ \[.* v_num=\d+, omni/stale=[\d.]+\]", line), line


@pytest.mark.processes
def test_with_one_group_the_bar_is_lightnings_own(run: Run) -> None:
    result = run.results[0][2]
    assert result["shown"] == [[done, NOMINAL] for _ in range(2) for done in range(1, NOMINAL + 1)]
    assert "omni" not in str(result["entries"])


@pytest.mark.processes
def test_the_report_is_one_rounded_line(run: Run) -> None:
    said = run.results[0][0]["said"]
    assert re.fullmatch(
        r"\d+ updates, 2 groups of up to 1 rank; staleness [\d.]+, at most \d+;"
        r" [\d.]+ (bytes|kB) exchanged a step, .*a push.*",
        said,
    )
    assert not re.search(r"\d\.\d{4}", said)
