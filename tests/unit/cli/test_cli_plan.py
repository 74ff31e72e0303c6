"""``lightning-omni plan``: numbers of the profile, other machines, what to buy, and wrong files and options."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from searches import BATCH, found, observed, search, space_of

from lightning_omni import Compression
from lightning_omni.cli import main
from lightning_omni.methods import method_named, with_period
from lightning_omni.tuning.model.cost_model import ExchangePattern
from lightning_omni.tuning.report import Round, TuningReport
from lightning_omni.tuning.search import Search
from lightning_omni.tuning.search.evidence import scatter
from lightning_omni.tuning.search.prior import Prior
from lightning_omni.tuning.search.space import compression_named

SAME = ("--method", "async_sgd", "--compression", "int8")
"""Groups exchange in one way: that no better one is looked for saves seconds."""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "260")


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(found(), tmp_path)


def written(made: Search, folder: Path) -> str:
    """A report, without what takes time to draw."""
    path = folder / "omni-tuning.json"
    path.write_text(json.dumps(TuningReport((Round(made, 0, 0.0),), None, "loss").to_dict()))
    return str(path)


def measured_otherwise(**changes: Any) -> Search:
    """A search of a run whose ranks measured the same but for this."""
    seen = observed()
    return search(replace(seen, measured=replace(seen.measured, **changes)))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def cells(output: str) -> dict[int, list[str]]:
    """The table's rows by groups."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return {int(row[0].removeprefix("★ ")): row for row in rows}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command refuses."""
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ([], {}),
        (["--ranks", "32", "--bandwidth", "10Gbit", "--latency", "1e-4", *SAME],
         {"ranks": 32, "bandwidth": 1.25e9, "latency": 1e-4}),
        (["--bandwidth", "100MB/s", "--latency", "50us", *SAME], {"bandwidth": 1e8, "latency": 5e-5}),
        (["--batch-size", "64", *SAME], {"batch_size": 64}),
        (["--servers", "per-node", "--nodes", "4", "--latency", "50us", *SAME],
         {"servers": 4, "per_node": True, "latency": 5e-5}),
    ],
    ids=["as measured", "more ranks", "another network", "another batch", "a server on each node"],
)  # fmt: skip
def test_numbers_are_those_of_the_profile(
    options: list[str],
    changes: dict[str, float],
    file: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = said(capsys, file, *options)
    planned = found().profile.scaled(**changes) if changes else found().profile  # type: ignore[arg-type]
    rows = cells(output)
    assert sorted(rows) == [2**power for power in range(planned.ranks.bit_length())]
    for groups, row in rows.items():
        pattern = None
        if groups > 1:
            method, period, wire = read_exchange(row[2])
            pattern = ExchangePattern.of(with_period(method_named(method), period), wire, nbytes=planned.model.nbytes)
        expected = planned.predict(groups, rebalance=row[1] == "proportional", exchanging=pattern)
        assert row[3] == str(expected.samples_per_second)
        assert row[4] == f"{1000 * expected.seconds_per_update.value:.4g}"
        assert row[5].startswith(
            {"allreduce": "all-reduce", "link": "server's link"}.get(expected.bottleneck, expected.bottleneck)[:4]
        )


def test_on_the_same_machines_the_advice_is_the_choice_of_the_search(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = found().choice().setting
    output = said(capsys, file)
    assert f"use {choice}: " in output
    row = next(row for row in cells(output).values() if row[0].startswith("★"))
    assert row[0] == f"★ {choice.groups}"
    assert row[7] == "1.00×"
    assert row[-2:] == [f"{choice.momentum:.3g}", f"{choice.lr:.3g}"]


@pytest.mark.parametrize(
    "options", [[], ["--bandwidth", "2MB/s", "--period", "4"], ["--method", "local_sgd", "--compression", "bf16"]]
)
def test_groups_exchange_as_suits_them_by_the_profile_and_the_prior(
    options: list[str], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = cells(said(capsys, file, "--momentum", "0.8", "--lr", "0.1", *options))
    planned = found().profile.scaled(bandwidth=2e6) if "--bandwidth" in options else found().profile
    assert rows[1][-2:] == ["0.8", "0.1"]
    assert rows[1][2] == "-"
    for groups in (2, 4, 8):
        method, period, wire = read_exchange(rows[groups][2])
        pattern = ExchangePattern.of(with_period(method_named(method), period), wire, nbytes=planned.model.nbytes)
        expected = planned.predict(groups, rebalance=rows[groups][1] == "proportional", exchanging=pattern)
        assert rows[groups][3] == str(expected.samples_per_second)
        momentum, _ = Prior.load().suggested(
            method_known(method), groups, period, momentum=0.8, scatter=scatter(planned.measured), is_adaptive=False
        )
        assert float(rows[groups][-2]) == pytest.approx(momentum, abs=0.01)
        if "--method" in options:
            assert (method, wire) == ("local_sgd", Compression("bf16"))
        if "--period" in options and method != "async_sgd":
            assert period == 4


def read_exchange(text: str) -> tuple[str, int, Any]:
    """Method, local steps and wire format of a cell."""
    found = re.fullmatch(r"(\S+?)(?:, period (\d+))?(?:, compression (\S+))?", text)
    assert found is not None, text
    return found[1], int(found[2] or 1), compression_named(found[3] or "fp32")


def method_known(name: str) -> str:
    """As the prior has it: an outer step with a rate of 1 takes over the mean."""
    return "local_sgd" if name.startswith("diloco:outer_lr=1.0") else name


def test_on_a_slow_link_fewer_bytes_are_sent_and_less_often(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def bytes_per_step(*options: str) -> float:
        method, period, wire = read_exchange(cells(said(capsys, file, "--ranks", "4", *options))[4][2])
        pattern = ExchangePattern.of(with_period(method_named(method), period), wire, nbytes=4_000_000)
        assert pattern.push is not None
        assert pattern.pull is not None
        return (pattern.push + pattern.pull) / pattern.period

    assert bytes_per_step("--bandwidth", "1MB/s") < bytes_per_step("--bandwidth", "1GB/s") / 4


def test_where_the_all_reduce_is_slow_a_plan_averages_in_fewer_bytes_as_the_tuner_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = observed(allreduce=1.0)
    seen = replace(seen, measured=replace(seen.measured, shapes=((1000, 1000), (1000,))))
    start = replace(found().spec.start, all_reduce="fp32")
    space = space_of(groups=[1], all_reduce=["bf16", "powersgd:8"], rebalance=False)
    made = search(seen, space, start)
    choice = made.choice().setting
    assert (choice.groups, choice.all_reduce) == (1, "powersgd:8")
    file = written(made, tmp_path)
    assert f"use {choice}: " in said(capsys, file)
    exact = said(capsys, file, "--all-reduce", "fp32")
    assert "all-reduce powersgd" not in exact
    assert main(["plan", file, "--all-reduce", "int8"]) == 2
    assert "--all-reduce='int8' is not known" in capsys.readouterr().err


def test_samples_give_hours(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    samples = 36e6
    output = said(capsys, file, "--samples", str(samples), *SAME)
    assert "hours" in output
    row = cells(output)[1]
    rate = float(row[3].split()[0])
    assert float(row[8]) == pytest.approx(samples / rate / 3600, rel=0.01)


def test_larger_batches_of_all_ranks_are_pointed_out(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "are 2 times those that were measured" in said(capsys, file, "--ranks", "16", *SAME)
    smaller = said(capsys, file, "--ranks", "16", "--batch-size", str(BATCH // 2), *SAME)
    assert "times those that were measured" not in smaller


def test_what_to_buy_next_is_the_bottleneck(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def advice(*arguments: str) -> str:
        return next(line for line in said(capsys, *arguments).splitlines() if line.startswith("buy next"))

    assert re.search(
        r"compute is the bottleneck; 32 ranks would be 1\.\d\d times faster to the target",
        advice(file, "--ranks", "16", "--bandwidth", "1e10", *SAME),
    )
    slow = advice(file, "--bandwidth", "1e7", "--method", "async_sgd", "--compression", "fp32")
    assert re.search(
        r"(link|exchange|server|all-reduce) is the bottleneck; twice the bandwidth would be \d\.\d\d times", slow
    )
    gain = float(slow.split("would be ")[1].split()[0])
    assert 1.3 < gain < 2.05


def test_where_the_server_is_always_busy_more_of_them_are_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = {"samples": ((8,) * 16,) * 8, "own": ((0.08,) * 16,) * 8, "steps": (2.0,) * 16}
    made = measured_otherwise(**equal, serve=0.1, host_per_byte=1e-15)
    file = written(made, tmp_path), "--method", "async_sgd"
    assert re.search(r"server is the bottleneck; 2 servers would be 2\.00 times", said(capsys, *file))
    several = said(capsys, *file, "--servers", "2")
    assert "8 ranks, 100 samples/s each, 2 servers" in several
    assert "4 servers would be 2.00 times" in several
    nodes = said(capsys, *file, "--servers", "per-node", "--nodes", "2")
    assert "servers twice as fast would be at most 2.00 times" in nodes


def test_what_no_simulation_has_had_is_marked_and_not_recommended(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = said(capsys, file, "--ranks", "32", "--bandwidth", "1e10", "--latency", "0", *SAME)
    assert "extrapolated: 32 ranks, of which 8 were measured" in output
    for groups, row in cells(output).items():
        assert row[6].endswith("*") == row[7].endswith("*") == (groups > 8)
    recommended = re.findall(r"^use (\d+) group|with (\d+) group", output, re.MULTILINE)
    assert recommended
    assert all(int(use or other) <= 8 for use, other in recommended)


def test_groups_that_cannot_exchange_by_the_method_are_left_out(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = said(capsys, file, "--method", "softsync:n=4", "--compression", "int8")
    assert sorted(cells(output)) == [1, 4, 8]


def test_wrong_options_are_one_line_that_names_the_flag(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ranks=0: pass a whole number" in refusal(capsys, file, "--ranks", "0")
    assert "--bandwidth 1Gbat: pass bytes per second, as in 1e9 or 1GB/s, or bits, as in 10Gbit" in refusal(
        capsys, file, "--bandwidth", "1Gbat"
    )
    assert "--bandwidth -1.0: pass bytes" in refusal(capsys, file, "--bandwidth=-1")
    assert "--latency -1.0: pass seconds" in refusal(capsys, file, "--latency=-1")
    assert "--batch-size 0.0: pass a number of samples, 1 or more" in refusal(capsys, file, "--batch-size", "0")
    assert "--samples -5.0: pass" in refusal(capsys, file, "--samples=-5")
    assert "--period=0: pass local steps" in refusal(capsys, file, "--period", "0")
    assert "--momentum 1.0: pass a number from 0 up to 1" in refusal(capsys, file, "--momentum", "1")
    assert "--lr 0.0: pass a number above 0" in refusal(capsys, file, "--lr", "0")
    assert "--servers all: pass a number of servers, or per-node" in refusal(capsys, file, "--servers", "all")
    assert "--servers 0: pass a number above 0" in refusal(capsys, file, "--servers", "0")
    assert "--method='sgd' is not known; pass one of 'async_sgd'" in refusal(capsys, file, "--method", "sgd")
    assert "--compression='int9' is not known" in refusal(capsys, file, "--compression", "int9")
    assert "--compression" in refusal(capsys, file, "--method", "local_sgd", "--compression", "topk:0.01")
    assert "--nodes 2: it is for --servers per-node" in refusal(capsys, file, "--nodes", "2")


def test_files_that_are_none_are_refused_with_what_to_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    for text in ("", "[]", "3", "{}", '{"rounds": []}', '{"measured": []}'):
        wrong.write_text(text)
        assert "pass an omni-tuning.json that" in refusal(capsys, str(wrong)), text
    assert "No such file" in refusal(capsys, str(tmp_path / "absent.json"))
    earlier = {"target": None, "monitor": "loss", "rounds": [{"search": {"job": {}}, "epoch": 0, "measured_after": {}}]}
    wrong.write_text(json.dumps(earlier))
    assert "pass an omni-tuning.json" in refusal(capsys, str(wrong)), "of an earlier version"


def test_without_the_bytes_of_an_exchange_there_is_no_other_bandwidth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = refusal(capsys, written(measured_otherwise(nbytes=0), tmp_path), "--bandwidth", "1Gbit")
    assert "--bandwidth=125000000.0: bytes of an exchange were not measured" in refused


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    names = "ranks bandwidth latency servers nodes batch-size method compression period samples momentum lr"
    for name in names.split():
        assert f"--{name} " in text
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "plan" in capsys.readouterr().out
