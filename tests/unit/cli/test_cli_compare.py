"""``lightning-omni compare``: three clusters, what is printed of each, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lightning_omni import Compression, OmniStrategy
from lightning_omni.cli import main
from lightning_omni.cli.compare import DescribedMachines, MachineComparison, strategy_text
from lightning_omni.tuning.model.forecast import Estimate
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search.prior import Prior, PriorTheory

UNEQUAL = ("--speeds", "1,1,1,0.25", "--link", "100mbit", "--model-size", "50MB", "--step", "0.2s")
EQUAL = ("--speeds", "8x1", "--link", "100Gbit", "--model-size", "50MB", "--step", "0.2s")
SITES = (*EQUAL[:2], "--link", "10Gbit", *EQUAL[4:], "--sites", "2", "--site-link", "50Mbit", "--site-latency", "20ms")


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["compare", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    ddp = found["rows"][0]
    assert (ddp["name"], ddp["time"]["value"], ddp["samples"]) == ("DDP", 1.0, 1.0)
    for row in found["rows"]:
        assert row["time"]["low"] <= row["time"]["value"] <= row["time"]["high"]
        by_parts = ddp["samples_per_second"] / row["samples_per_second"] * row["samples"]
        assert row["time"]["value"] == pytest.approx(by_parts)
    return found


def test_on_unequal_devices_over_a_slow_link_groups_pay(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, *UNEQUAL)
    _, ours, peer = found["rows"]
    assert ours["time"]["high"] < 0.5
    assert ours["time"]["value"] < peer["time"]["value"] < 1
    assert found["verdict"].startswith("use lightning-omni")
    assert found["write"].startswith("Trainer(strategy=OmniStrategy(groups=")


def test_on_unequal_devices_over_a_fast_link_proportional_batches_are_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compared(capsys, *UNEQUAL[:2], "--link", "100Gbit", *UNEQUAL[4:])
    ours = found["rows"][1]
    assert (ours["setting"]["groups"], ours["setting"]["rebalance"]) == (1, True)
    assert ours["time"]["value"] == pytest.approx(1 / 3.25, rel=0.1)
    assert 'OmniStrategy(groups=1, rebalance="auto")' in found["write"]


def test_on_equal_devices_and_a_fast_link_ddp_wins(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, *EQUAL)
    assert found["verdict"].startswith("use DDP: ")
    assert (found["write"], found["or_write"]) == ('Trainer(strategy="ddp", ...)', "")
    assert found["rows"][1]["time"]["value"] > 0.9


def test_where_the_all_reduce_counts_and_nothing_else_ddp_with_a_hook_is_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compared(capsys, *EQUAL[:2], "--link", "5Gbit", *EQUAL[4:])
    assert found["verdict"].startswith("use DDP with torch's bf16 hook: ")
    assert "bf16_compress_hook" in found["write"]


def test_between_two_sites_there_is_a_group_at_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, *SITES)
    ours = found["rows"][1]
    assert ours["setting"]["groups"] == 2
    assert ours["time"]["high"] < 0.2


@pytest.mark.parametrize("where", [("--sites=2", "--link=1Gbit", "--site-link=40Mbit"), ("--link=40Mbit",)])
def test_torchft_is_as_fast_as_it_was_on_emulated_hosts(
    where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(capsys, "--speeds=4x1", "--model-size=1.7MB", "--step=0.25s", "--batch-size=64", *where)
    _, ours, peer = found["rows"]
    assert peer["name"] == "torchft: DiLoCo"
    assert 2.5 < 1 / peer["time"]["value"] < 3.3
    assert (
        0.95 < ours["time"]["value"] / peer["time"]["value"] < 1.3
    )  # docs/evidence/tuning-measurements.md: 1.03 to 1.28
    names = "lightning-omni or torchft" if peer["time"]["value"] < ours["time"]["value"] else "lightning-omni"
    assert found["verdict"].startswith(f"use {names}: ")
    assert "; torchft with DiLoCo: " in found["verdict"]
    assert found["verdict"].endswith("which is no certain difference")


def test_a_peer_that_is_certainly_faster_is_named_first() -> None:
    machines = DescribedMachines((1.0,) * 8, 0.2, 32, 50_000_000, 10e9 / 8, sites=2, site_bandwidth=50e6 / 8)
    known = MachineComparison.of(machines, 0.9, is_adaptive=False)
    one, ours, peer = known.rows
    time = Estimate(ours.time.low / 2, ours.time.low / 3, ours.time.low / 1.5)
    verdict = replace(known, rows=(one, ours, replace(peer, time=time))).verdict
    assert verdict.startswith("consider {} first, with {}: ".format(*peer.name.split(": ")))
    assert "lightning-omni: " in verdict


def test_what_no_simulation_has_had_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    theory = PriorTheory(Setting(1, 0.9, 0.1), Scaling(), prior=Prior.load())
    found = compared(capsys, "--speeds=16x1", "--link=1Mbit", "--model-size=50MB", "--step=0.2s")
    for row in found["rows"]:
        assert theory.covers(Setting.from_dict(row["setting"])), row


@pytest.mark.parametrize("backward", [0.5, 0.8])
def test_intervals_cover_other_assumptions(backward: float) -> None:
    machines = DescribedMachines((1.0,) * 8, 0.2, 32, 50_000_000, 3e9 / 8)
    _, ours, _ = MachineComparison.of(machines, 0.9, is_adaptive=False).rows
    _, other, _ = MachineComparison.of(replace(machines, backward=backward), 0.9, is_adaptive=False).rows
    assert other.setting == ours.setting
    assert ours.time.low <= other.time.value <= ours.time.high


def test_what_no_simulation_has_had_is_known() -> None:
    theory = PriorTheory(Setting(1, 0.9, 0.1), Scaling(), prior=Prior.load())
    few = Setting(8, 0.9, 0.1, method="local_sgd", period=32)
    assert theory.covers(few)
    assert theory.covers(Setting(64, 0.9, 0.1, method="hardsync"))  # it is synchronous training
    assert not theory.covers(replace(few, groups=16))
    assert not theory.covers(replace(few, period=64))
    assert not theory.covers(replace(few, groups=16, method="async_sgd", period=1))


def test_the_table_has_the_numbers_of_the_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = compared(capsys, *UNEQUAL)
    assert main(["compare", *UNEQUAL]) == 0
    told = capsys.readouterr().out
    for row in found["rows"]:
        line = next(line for line in told.splitlines() if f"│ {row['name']} " in line)
        assert f"{row['time']['value']:.2f}×" in line
        assert f"{row['time']['low']:.2f} to {row['time']['high']:.2f}" in line
        assert f"{row['samples_per_second']:.4g}" in line
    assert found["verdict"] in told
    assert found["write"] in told
    assert found["ddp_step"] in told
    assert "callbacks=[OmniTuner()]" in found["or_write"]
    assert found["or_write"] in told


def test_a_narrow_terminal_has_every_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = compared(capsys, *UNEQUAL)
    assert main(["compare", *UNEQUAL]) == 0
    table, _, _ = capsys.readouterr().out.partition(found["verdict"])
    assert max(map(len, table.splitlines())) <= 80
    for row in found["rows"]:
        assert f" {row['time']['value']:.2f}× " in table
        assert f" {row['time']['low']:.2f} to {row['time']['high']:.2f} " in table
        assert f" {row['samples_per_second']:.4g} " in table


def test_what_a_gain_is_made_of_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A large one is that of a DDP that waits for its links, in numbers that a user can measure."""
    found = compared(capsys, *UNEQUAL)
    assert found["ddp_step"].startswith(
        "in a step DDP computes 0.8 s on the slowest device and waits 5.87 s for its links"
    )
    assert "carry 75 MB each at 12.5 MB/s" in found["ddp_step"]
    assert found["ddp_step"].endswith("devices that never wait make 520 samples/s")
    assert found["rows"][0]["samples_per_second"] == pytest.approx(4 * 32 / (0.8 + 5.87), rel=0.05)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting(1, 0.9, 0.1, rebalance=True), 'groups=1, rebalance="auto"'),
        (Setting(4, 0.9, 0.1, method="async_sgd", wire="int8"), 'groups=4, method="async_sgd", compression="int8"'),
        (
            Setting(4, 0.9, 0.1, method="local_sgd", period=8, all_reduce="bf16"),
            'groups=4, method="local_sgd:period=8", compression=Compression(all_reduce="bf16")',
        ),
        (
            Setting(2, 0.9, 0.1, method="diloco:outer_lr=1.0", period=16, wire="int8/bf16"),
            'groups=2, method="diloco:period=16,outer_lr=1.0", compression=Compression(push="int8", pull="bf16")',
        ),
    ],
)
def test_what_is_printed_is_a_strategy(setting: Setting, expected: str) -> None:
    assert strategy_text(setting) == f"OmniStrategy({expected})"
    eval(strategy_text(setting), {"OmniStrategy": OmniStrategy, "Compression": Compression})  # it is accepted


def test_a_description_is_as_fast_as_it_says() -> None:
    machines = DescribedMachines((1.0, 1.0, 0.5), 0.2, 32, 1000, 1e12, scatter=0.0)
    assert machines.profile().speeds == pytest.approx((160.0, 160.0, 80.0))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--speeds": "1,fast"}, "--speeds 1,fast: pass a number for each device"),
        ({"--speeds": "1 1,1"}, "--speeds 1 1,1: pass a number for each device"),
        ({"--model-size": "0MB"}, "--model-size 0MB: pass bytes, as in 50MB"),
        ({"--speeds": "1"}, "--speeds= has 1 device of speeds 1.0 to 1.0: pass those of 2 to 128"),
        ({"--speeds": "10000000000x1"}, "--speeds= has 65536 devices of speeds 1.0 to 1.0: pass those of 2 to 128"),
        (
            {"--speeds": "1e-300,1"},
            "--speeds= has 2 devices of speeds 1e-300 to 1.0: pass those of 2 to 128, with ratios",
        ),
        ({"--link": "quick"}, "--link quick: pass bytes per second"),
        ({"--model-size": "50Mbit"}, "--model-size 50Mbit: pass bytes, as in 50MB"),
        ({"--step": "0s"}, "--step 0s: pass a time above 0"),
        ({"--link": "100"}, "--link 100: bytes per second? pass a unit, as in 100Mbit or 100B/s"),
        ({"--model-size": "50"}, "--model-size 50: bytes? pass a unit, as in 50MB or 50B"),
        ({"--site-link": "1Mbit"}, "--site-link and --site-latency are of the network between sites"),
        ({"--site-latency": "1ms"}, "there is one site: pass --sites, too"),
        ({"--sites": "3"}, "--sites=3: 4 devices cannot be divided evenly"),
        ({"--momentum": "1"}, "--momentum 1.0: pass a number from 0 up to 1"),
    ],
)
def test_a_wrong_option_is_named(changed: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**dict(zip(UNEQUAL[::2], UNEQUAL[1::2], strict=True)), **changed}
    assert main(["compare", *(f"{name}={value}" for name, value in given.items())]) == 2
    assert message in capsys.readouterr().err


def test_without_a_description_there_is_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare"]) == 2
    assert "--speeds 1,1,1,0.25 --link 100Mbit --model-size 50MB --step 0.2s" in capsys.readouterr().err
