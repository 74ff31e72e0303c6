"""What a search leaves behind: a file that says the same when it is read, a page of its own, a picture."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError
from matplotlib.backends.backend_agg import FigureCanvasAgg
from searches import START, found, later, observed, search, space_of

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.callback.speed import RunThroughput
from lightning_omni.tuning.report import ReportOrigin, Round, RunTimes, TuningReport
from lightning_omni.tuning.report.summary import NAMES, SearchSummary, number, span, times
from lightning_omni.tuning.report.tuning import templates
from lightning_omni.tuning.search import Dimension, Search, Space, TrainedSegment

UNSAFE = "\"><script>alert('x')</script><b>loss"
"""What a metric may be called."""


def report(*rounds: Round, target: float | None = None, monitor: str = "train_loss") -> TuningReport:
    return TuningReport(rounds, target, monitor) if rounds else usual(target, monitor)


@cache
def usual(target: float | None, monitor: str) -> TuningReport:
    """A report of the search that was `found`, which keeps what it has computed."""
    return TuningReport((Round(found(), 2, 600.0, {4: 900.0}),), target, monitor)


@cache
def page_of(target: float | None = None, monitor: str = "train_loss") -> str:
    """Its page."""
    return words_of(usual(target, monitor))


def words_of(report: TuningReport) -> str:
    """A page without its pictures, which take a second each."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lightning_omni.tuning.report.tuning.can_draw", lambda: False)
        return report.html()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[TuningReport, Path]:
    """A report of two searches, and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("report") / "made" / "for it"
    whole = report(Round(found(), 0, 0.0), Round(later(), 7, 3600.0, {4: 900.0}), target=0.9)
    names = [path.name for path in whole.save(folder)]
    assert names == ["omni-tuning.json", "omni-tuning.html", "omni-tuning.png"]
    return whole, folder


def png_size(data: bytes) -> tuple[int, int]:
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_a_report_that_is_read_says_what_the_written_one_said(saved: tuple[TuningReport, Path]) -> None:
    whole, folder = saved
    for path in (folder, folder / "omni-tuning.json"):
        read = TuningReport.load(path)
        assert read.statement == whole.statement
        assert json.dumps(read.to_dict()) == json.dumps(whole.to_dict())  # NaN is not equal to itself
        assert read.rounds[1].measured_after == {4: 900.0}
        assert read.rounds[0].search.choice() == whole.rounds[0].search.choice()


def test_reading_asks_no_scikit_optimize_and_loses_nothing_that_was_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = json.loads(json.dumps(report().to_dict()))
    monkeypatch.setitem(sys.modules, "skopt", None)
    read = TuningReport.from_dict(plain)
    assert read.rounds[0].search.considered == found().considered
    assert read.statement == report().statement


def test_the_picture_is_as_wide_as_a_page(saved: tuple[TuningReport, Path]) -> None:
    data = (saved[1] / "omni-tuning.png").read_bytes()
    assert png_size(data) == (1400, 1150)
    assert len(data) > 100_000


def test_the_page_is_one_file_that_fetches_nothing(saved: tuple[TuningReport, Path]) -> None:
    page = re.sub(r"base64,[^\"]*", "base64,", (saved[1] / "omni-tuning.html").read_text())  # which may spell anything
    for word in ("http:", "https:", "//www", "@import", "<script", "<link", "url("):
        assert word not in page
    assert page.count("data:image/png;base64,") == 2  # one of each search


def test_the_tags_of_the_page_fit(saved: tuple[TuningReport, Path]) -> None:
    class Tags(HTMLParser):
        opened: list[str] = []

        def handle_starttag(self, tag: str, attributes: object) -> None:
            if tag not in ("meta", "img"):
                self.opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.opened.pop() == tag

    parser = Tags()
    parser.feed((saved[1] / "omni-tuning.html").read_text())
    assert parser.opened == []


def test_the_page_has_the_choice_its_reason_and_all_that_was_compared(
    saved: tuple[TuningReport, Path],
) -> None:
    whole, folder = saved
    text = html.unescape((folder / "omni-tuning.html").read_text())
    for each in whole.rounds:
        choice = each.search.choice()
        assert f"<td>{choice.setting}</td>" in text
        assert f"<td>{choice.why}</td>" in text
        for considered in each.search.considered:
            assert f"<td>{considered.setting}</td>" in text
            assert f"<td>{considered.by}</td>" in text
    (segment,) = later().segments
    assert f"<td>{segment.setting}</td>" in text
    assert f'<td class="number">{times(math.exp(segment.log_ratio))}</td>' in text
    assert "Retuning 1, epoch 7" in text
    assert "all-reduce" in text


def test_what_users_say_is_escaped() -> None:
    assert "<b>" not in page_of(1.0, UNSAFE)


def test_a_notebook_shows_the_page_in_a_frame_and_the_choice_with_its_reason() -> None:
    shown = usual(None, UNSAFE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lightning_omni.tuning.report.tuning.can_draw", lambda: False)
        frame = shown._repr_html_()
    assert frame.count("<") == 2  # the page is the value of an attribute: nothing of it is outside the frame
    assert html.unescape(frame.split('srcdoc="')[1].split('" style')[0]) == words_of(shown)
    choice = replace(found().choice(), why="<b>faster")
    assert str(choice.setting) in choice._repr_html_()
    assert "&lt;b&gt;faster" in choice._repr_html_()


ONE_GROUP = search(space=Space((1,)))
ALL_NUMBERS = search(space=space_of(groups=list(range(1, 9))), observation=observed(steps=3))
"""Searches of several tests: one takes a second or two, when it is asked."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "made",
    [
        search(observed(steps=2)),
        ONE_GROUP,
        ALL_NUMBERS,
        search(space=space_of(momentum=0.9)),
        search(replace(observed(), batches=replace(observed().batches, losses=()))),
    ],
    ids=["two batches", "one group", "all numbers of groups", "one momentum", "no number at all"],
)
def test_whatever_was_found_can_be_shown(made: object) -> None:
    shown = report(Round(made, 0, 0.0), target=0.5)  # type: ignore[arg-type]
    assert png_size(shown.picture() or b"") == (1400, 1150)
    assert html.escape(shown.statement) in words_of(shown)
    again = json.loads(json.dumps(shown.to_dict(), allow_nan=False))
    assert TuningReport.from_dict(again).statement == shown.statement


def test_a_speed_up_is_as_sure_as_the_difference_of_two_settings() -> None:
    summary = report().summaries[0]
    own = summary.speed_up_of(summary.start)
    assert own.low == own.value == own.high == 1.0
    other = summary.speed_up_of(replace(summary.curve[8], momentum=0.0))
    assert other.low < other.value < other.high


def test_without_matplotlib_there_is_a_page_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = report().save(tmp_path)
    assert [path.suffix for path in files] == [".json", ".html"]
    assert "pip install 'lightning-omni[plot]'" in files[1].read_text()
    with pytest.raises(ConfigurationError, match="pictures need matplotlib; install it with"):
        report().figure()


def test_a_speed_up_is_over_the_users_own_setting_and_the_product_of_both_efficiencies() -> None:
    summary = report().summaries[0]
    for setting in (*summary.curve.values(), summary.choice.setting):
        gain = summary.search.throughput(setting) / summary.search.throughput(summary.start)
        assert summary.ratio(setting) == pytest.approx(gain / summary.samples(setting).value)
        assert summary.speed_up_of(setting).value == pytest.approx(summary.ratio(setting))
    assert summary.considered[0].samples == 1.0, "the run's own"


def test_what_is_told_twice_is_told_alike() -> None:
    whole = replace(report(target=0.9), times=RunTimes(120.0, 6.0, (80.0, 5.0)))
    summary, page = whole.summaries[0], html.unescape(words_of(whole))
    figure = span(summary.speed_up)
    assert figure in whole.statement
    assert f"<td>{figure}</td>" in page
    assert "<td>reached after 80 s, 5 s of them for tuning</td>" in page
    assert whole.times is not None
    assert whole.times.metrics == {"omni/tuner/seconds": 6.0, "omni/tuner/target_seconds": 80.0}
    read = TuningReport.from_dict(json.loads(json.dumps(whole.to_dict())))
    assert (read.times, read.statement) == (whole.times, whole.statement)


def test_a_report_leaves_out_groups_that_cannot_exchange_by_the_methods() -> None:
    made = search(observed(allreduce=1.0), space_of(method=["softsync:n=4"]))
    assert SearchSummary(made).groups == (1, 4, 8)
    words_of(report(Round(made, 0, 0.0)))


def test_a_number_that_is_rounded_to_a_thousand_is_whole() -> None:
    assert [number(value) for value in (999.4, 999.5, 999.99, -999.7, 1000)] == [
        "999",
        "1,000",
        "1,000",
        "-1,000",
        "1,000",
    ]


def test_headlines_have_their_intervals_and_what_was_measured() -> None:
    said = report(target=0.9).statement
    assert re.search(r"speed-up over your own setting: [\d.]+× \(80 % interval [\d.]+× to [\d.]+×\)", said)
    groups = found().choice().setting.groups
    summary = report().summaries[0]
    for measured, is_outside in (
        (summary.rate.value, False),
        (2 * summary.rate.high, True),
        (0.5 * summary.rate.low, True),
    ):
        shown = report(Round(found(), 0, 0.0, {groups: measured}))
        assert f"samples/s, measured: {number(measured)}" in shown.statement
        assert ("outside the forecast's interval" in shown.statement) == is_outside
        assert ('class="outside"' in words_of(shown)) == is_outside


def shown_numbers(shown: TuningReport) -> dict[str, dict[str, str]]:
    """The numbers of a headline, as text by their names, wherever they are."""
    page, plain = html.unescape(words_of(shown)), json.loads(json.dumps(shown.to_dict()))
    picture = " ".join(shown.figure()._suptitle.get_text().split())
    texts = shown.summaries[-1].headline
    found = {}
    for name, value in shown.numbers.items():
        text = texts[NAMES[name]]
        assert f"<th>{NAMES[name]}</th><td>{text}</td>" in re.sub(r"\s*\n\s*", "", page)
        assert f"{NAMES[name]}: {text}" in picture
        assert f"{NAMES[name]}: {text}" in shown.statement
        assert f"{NAMES[name]}: {text}" in html.unescape(page)
        assert plain["numbers"][name] == value
        assert shown.metrics[f"omni/tuner/{name}"] == value
        found[name] = {"text": text, "value": repr(value)}
    assert plain["statement"] == shown.statement
    return found


@settings(max_examples=3, deadline=None)  # of three seconds each
@given(
    seed=st.integers(0, 1000),
    allreduce=st.sampled_from([0.0, 0.1, 1.0]),
    rate=st.none() | st.floats(10, 1000),
    target=st.none() | st.floats(0.5, 1.0),
    log_ratio=st.none() | st.floats(-0.5, 1.0),
    further=st.booleans(),
)
def test_a_number_is_the_same_under_its_name_everywhere_before_and_after_loading(
    seed: int,
    allreduce: float,
    rate: float | None,
    target: float | None,
    log_ratio: float | None,
    further: bool,
) -> None:
    start = replace(START, further=(("workers", 0.1),)) if further else START
    space = space_of(workers=Workers()) if further else space_of()
    seen = observed(allreduce, seed)
    chosen = search(seen, space, start).choice().setting
    segments = []
    if log_ratio is not None:
        other = replace(chosen, further=(("workers", 0.8),)) if further else chosen
        segments = [TrainedSegment(other, log_ratio, 0.01**2)]
    made = search(seen, space, start, segments=segments)
    groups = made.choice().setting.groups
    last = Round(made, 3, 60.0, {} if rate is None else {groups: rate})
    shown = TuningReport(
        (last,), target, "train_loss", RunTimes(120.0, 6.0), ((1.0, 2.0), (9.0, 1.0)), ReportOrigin.now()
    )
    read = TuningReport.from_dict(json.loads(json.dumps(shown.to_dict())))
    assert shown_numbers(read) == shown_numbers(shown)
    assert [(row.rate, row.speed_up) for row in read.summaries[0].considered] == [
        (row.rate, row.speed_up) for row in shown.summaries[0].considered
    ]
    assert json.dumps(read.to_dict()) == json.dumps(shown.to_dict())


class Workers(Dimension):
    """A dimension of a user's."""

    name = "workers"

    def axis(self, known: object) -> list[float]:
        return [0.1, 0.8]

    def current(self, world: object) -> float:
        return 0.1

    def apply(self, world: object, value: object) -> None:
        raise AssertionError("nothing is run")


@pytest.mark.parametrize(
    "made",
    [
        found(),
        search(space=Space((1,))),
        search(space=space_of(groups=list(range(1, 9))), observation=observed(steps=3)),
    ],
    ids=["groups", "one group", "all numbers of groups"],
)
def test_nothing_is_drawn_outside_of_its_axes(made: Search) -> None:
    rate = {made.choice().setting.groups: 2000.0}  # far outside of the forecast
    whole = TuningReport(
        (Round(made, 0, 0.0, rate),), 0.9, "val_loss", None, ((1.0, 2.0), (9.0, 1.0)), ReportOrigin.now()
    )
    figure = whole.figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    renderer, bounds = canvas.get_renderer(), figure.bbox  # type: ignore[no-untyped-call]
    for axes in figure.axes:
        titles = [text for text in (axes.title, axes._left_title, axes._right_title) if text.get_text()]
        box = axes.get_window_extent(renderer)
        for text in (*axes.texts, *titles):
            extent = text.get_window_extent(renderer)
            assert bounds.x0 - 1 <= extent.x0 <= extent.x1 <= bounds.x1 + 1, text.get_text()
        for text in axes.texts:
            extent = text.get_window_extent(renderer)
            assert box.y0 - 2 <= extent.y0 <= extent.y1 <= box.y1 + 2, text.get_text()
        for points in axes.collections:
            low, high = sorted(axes.get_ylim())
            heights = [y for _, y in np.atleast_2d(points.get_offsets()).tolist()] if len(points.get_offsets()) else []
            assert all(low <= y <= high for y in heights if y), heights
    rows: dict[float, list[tuple[float, float]]] = {}
    for axes in figure.axes:
        title = axes._left_title
        if title.get_text():
            extent = title.get_window_extent(renderer)
            rows.setdefault(round(extent.y0), []).append((extent.x0, extent.x1))
    for spans in rows.values():  # titles side by side do not touch
        spans.sort()
        assert all(left[1] < right[0] for left, right in itertools.pairwise(spans)), spans


def test_a_rate_is_told_beside_the_batches_that_it_was_measured_with() -> None:
    shown = report(Round(found(), 2, 600.0, {found().choice().setting.groups: 123.0}))
    assert html.unescape(words_of(shown)).count('<td class="number">123</td>') == 1


def test_a_rate_counts_what_was_trained_in_the_time_that_it_took() -> None:
    now = 0.0
    counted = RunThroughput(clock=lambda: now)
    for batches in (10, 4):  # of the second epoch only a part is trained
        now += 3.0  # between epochs
        counted.interrupt()
        for batch in range(batches):
            now += 0.005
            counted.batch_done(16)
            if batch == 2:
                now += 0.1  # a validation
                counted.interrupt()
        trained = counted.take()
        assert trained.timed == 16 * (batches - 2)
        assert trained.timed / trained.seconds == pytest.approx(16 / 0.005)


def test_errors_name_the_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("rounds=(): pass at least one search")):
        TuningReport((), None, "loss")
    wrong = tmp_path / "wrong.json"
    for text in ("no json", "[]", '{"rounds": 3}', '{"rounds": [{"search": {}}]}'):
        wrong.write_text(text)
        with pytest.raises(ConfigurationError, match=r"pass an omni-tuning.json that TuningReport.save wrote"):
            TuningReport.load(wrong)
    with pytest.raises(ConfigurationError, match="no report"):
        TuningReport.load(tmp_path / "absent.json")
    with pytest.raises(ConfigurationError, match=r"folder=.*pass a folder that can be written"):
        report().save(wrong)


def test_templates_of_the_page_are_part_of_the_package() -> None:
    folder = resources.files("lightning_omni.tuning.report") / "templates"
    assert {each.name for each in folder.iterdir()} == {"tuning.html", "table.html", "style.html"}
    source = (folder / "style.html").read_text(encoding="utf-8")
    style = source[source.index("<style>") : source.index("</style>")]
    assert style in page_of()


def test_nothing_reaches_the_page_unescaped() -> None:
    assert "<script" not in page_of(1.0, UNSAFE)
    assert html.escape("<script>") in page_of(1.0, UNSAFE)
    with pytest.raises(UndefinedError):  # a template that names what there is not says so
        templates().from_string("{{ nothing }}").render()


def test_first_batches_whose_loss_rises_are_drawn_as_they_are() -> None:
    seen = observed()
    rising = tuple(0.6 + 0.01 * batch for batch in range(len(seen.batches.losses)))
    whole = report(Round(search(replace(seen, batches=replace(seen.batches, losses=rising))), 0, 0.0))
    losses = next(axes for axes in whole.figure().axes if axes.get_ylabel() == "training loss")
    low, top = losses.get_ylim()
    assert low < min(rising) < max(rising) < top


def test_what_each_part_of_the_choice_gives_multiplies_to_what_all_of_it_gives() -> None:
    space = space_of(method=["local_sgd"], compression=["fp32", "int8"], period=[32])
    made = search(observed(allreduce=1.0), space)
    summary, choice = SearchSummary(made), made.choice().setting
    parts = summary.contributions
    assert choice.groups > 1
    assert "local_sgd, period 32" in [each.part for each in parts]
    own, chosen = (made.log_time(each) for each in (summary.start, choice))
    assert math.prod(each.speed_up for each in parts) == pytest.approx(math.exp(own - chosen))
    rates = [made.throughput(each) for each in (summary.start, choice)]
    assert math.prod(each.rate for each in parts) == pytest.approx(rates[1] / rates[0])
    text = words_of(report(Round(made, 0, 0.0)))
    assert "What each part of it gives" in text
    assert all(html.escape(each.part) in text for each in parts)
