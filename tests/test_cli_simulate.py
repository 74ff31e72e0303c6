"""``lightning-omni simulate`` of one method or several: tables, pictures, YAML, interruptions, wrong settings."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core import main, palette
from processes import interpret

from lightning_omni import simulator
from lightning_omni.errors import ConfigurationError
from lightning_omni.trace import Trace, comparison_of, plot_comparison

ROOT = Path(__file__).parent.parent
SHORT = ("--devices", "4", "--batch-size", "8", "--updates", "24")
SHARED = (*SHORT, "--lr", "0.1")
"""One rate for all methods: none is looked for."""
"""Seconds for a process to import what it needs, on a busy machine."""

WORKLOAD = """
import torch
from torch import nn
from lightning_omni.simulator import Workload

def error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def made():
    x = torch.arange(64.0)[:, None] / 64
    data = torch.utils.data.TensorDataset(x, 2 * x)
    return Workload(nn.Linear(1, 1), data, error, lambda model: {"error": float(error(model, (x, 2 * x)))}, adam)

def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)

def blind():
    return Workload(nn.Linear(1, 1), made().data, error)

def bowl():
    x = torch.cat([torch.eye(2), -torch.eye(2)]).repeat(64, 1) * 3**0.5
    data = torch.utils.data.TensorDataset(x, x @ torch.tensor([[1.0], [2.0]]))
    metrics = lambda model: {"loss": float(error(model, data.tensors))}
    return Workload(nn.Linear(2, 1, bias=False), data, error, metrics, lambda each: torch.optim.SGD(each, lr=0.3))

def nothing():
    return None
"""


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands set the number of threads of their process; and tables are not squeezed."""
    monkeypatch.setenv("COLUMNS", "200")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's file."""
    path = tmp_path / "my_own_workload.py"
    path.write_text(WORKLOAD)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return str(path)


def rows(output: str) -> list[dict[str, str]]:
    """The table's rows by column."""
    lines = [re.split("[│┃|]", line) for line in output.splitlines() if line[:1] in "│┃|" and line]
    heads, *body = [[cell.strip() for cell in line[1:-1]] for line in lines]
    return [dict(zip(heads, cells, strict=True)) for cells in body]


def assert_is_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command refuses."""
    assert main([*arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    return line


def test_simulate_writes_a_table_a_picture_and_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--method", "softsync:n=2", *SHARED, "--straggler", "4", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    [row] = rows(output)
    trace = Trace.load(tmp_path / "softsync-n=2.npz")
    assert row["method"] == "softsync:n=2"
    assert (row["groups"], row["updates"], row["ended"]) == ("4", "24", "updates")
    assert float(row["virtual s"]) == pytest.approx(trace.seconds, rel=1e-3)
    assert float(row["staleness"]) == pytest.approx(trace.mean_staleness, rel=1e-3)
    assert float(row["accuracy"]) == pytest.approx(trace.evaluated["accuracy"][-1], rel=1e-3)
    assert {"s/update", "loss", "real s"} <= row.keys()
    assert trace.updates == 24
    assert [kind["count"] for kind in trace.meta["cluster"]["devices"]] == [3, 1]
    assert_is_picture(tmp_path / "softsync-n=2.png")
    assert f"picture: {tmp_path / 'softsync-n=2.png'}" in output
    assert f"trace: {tmp_path / 'softsync-n=2.npz'}" in output


def test_the_built_in_workload_is_learned_and_a_target_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "deep" / "run.png")
    assert main(["simulate", "--target", "accuracy=0.8", "--lr", "0.2", "--out", out]) == 0
    [row] = rows(capsys.readouterr().out)
    assert row["ended"] == "target"
    assert row["groups"] == "8"
    assert row["s to accuracy 0.8"] == row["virtual s"]
    assert float(row["accuracy"]) >= 0.8
    assert_is_picture(tmp_path / "deep" / "run.png")
    assert Trace.load(tmp_path / "deep" / "run.npz").ended == "target"


def test_of_several_learning_rates_each_method_is_shown_with_its_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["simulate", "--method", "hardsync async_sgd", *SHORT, "--no-picture", "--out", str(tmp_path)]
    assert main([*both, "--lr", "[0.0001, 0.1]"]) == 0
    best = rows(capsys.readouterr().out)
    assert [row["lr"] for row in best] == ["0.1", "0.1"]
    assert main([*both, "--lr", "0.1"]) == 0
    alone = rows(capsys.readouterr().out)
    assert [row["loss"] for row in best] == [row["loss"] for row in alone]


def test_each_method_is_given_a_rate_of_its_own_and_the_output_says_how(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a quadratic whose best rate is known: one step of rate 1/3 solves it, eight stale ones of it diverge."""
    own = ["--workload", f"{workload}:bowl", "--devices", "8", "--batch-size", "8", "--epochs", "6"]
    command = ["simulate", "--method", "async_sgd@1 async_sgd", *own, "--jitter", "none", "--out", str(tmp_path)]
    assert main([*command, "--no-picture"]) == 0
    output = capsys.readouterr().out
    alone, eight = (float(row["lr"]) for row in rows(output))
    assert eight < alone / 2
    assert "each method has its own best learning rate of" in output
    assert [Trace.load(tmp_path / f"{name}.npz").meta["lr"] for name in ("async_sgd@1", "async_sgd")] == [alone, eight]
    losses = {row["method"]: float(row["loss"]) for row in rows(output)}
    assert main([*command, "--no-picture", "--lr", str(alone)]) == 0
    output = capsys.readouterr().out
    assert f"all methods share the learning rate {alone:g}, which flatters" in output
    shared = {row["method"]: float(row["loss"]) for row in rows(output)}
    assert shared["async_sgd@1"] == losses["async_sgd@1"]
    assert shared["async_sgd"] > 2 * losses["async_sgd"]


def test_a_method_whose_short_runs_learn_nothing_keeps_the_rate_of_the_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group makes 128 steps: a tenth of the run has no outer step of 20, a third of it has two."""
    own = ["--devices", "4", "--batch-size", "32", "--epochs", "4", "--no-picture", "--out", str(tmp_path)]
    assert main(["simulate", "--method", "diloco:period=20 hardsync", *own]) == 0
    kept, found = (float(row["lr"]) for row in rows(capsys.readouterr().out))
    assert 0.05 <= kept <= 0.2
    assert found > 0.2, "where rates make a difference, others than the workload's 0.1 are taken"


def test_the_picture_names_the_cluster_and_each_run_and_hides_no_curve() -> None:
    evaluated = {"time": np.arange(5.0), "update": np.arange(5), "accuracy": np.linspace(0, 1, 5)}
    empty = {name: np.empty(0, kind) for name, kind in Trace.COLUMNS.items()}
    meta = {"cluster": {}, "groups": [[0], [1]], "lr": 0.05}
    traces = {
        name: Trace(empty, evaluated, 5, 5.0, meta={**meta, "groups": [[0]]} if name.endswith("@1") else meta)
        for name in ("async_sgd@1", "hardsync", "async_sgd:power=0.5", "async_sgd")
    }
    figure = comparison_of(traces, "2 devices", ("accuracy", 0.8))
    assert figure.get_suptitle() == "2 devices"
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == [
        "async_sgd@1  (1 group, lr 0.05)",
        "hardsync  (2 groups, lr 0.05)",
    ]
    over_time = next(axes for axes in figure.axes if axes.get_ylabel() == "accuracy")
    assert over_time.get_xlabel() == "virtual time / s"
    curves = [line for line in over_time.get_lines() if len(line.get_xdata()) == 5]
    # All are the same curve: the later ones lie above and are narrower, or dashed on one of the same colour.
    widths = [line.get_linewidth() for line in curves]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == len({line.get_marker() for line in curves}) == 4
    assert [line.get_color() for line in curves] == [
        palette.ONE_GROUP,
        palette.METHODS["hardsync"],
        palette.METHODS["async_sgd"],
        palette.METHODS["async_sgd"],
    ]
    assert curves[2].get_linestyle() != curves[3].get_linestyle()


def test_answers_get_a_wire_format_of_their_own_either_way_it_is_written(tmp_path: Path) -> None:
    both = (
        ["--compression", '{"push": "int8", "pull": "bf16"}'],
        ["--compression.push", "int8", "--compression.pull", "bf16"],
    )
    for folder, wire in zip(("push", "json", "dots"), (["--compression", "int8"], *both), strict=True):
        assert main(["simulate", *SHARED, *wire, "--no-picture", "--out", str(tmp_path / folder)]) == 0
    push, json, dots = ((tmp_path / name / "async_sgd.npz").read_bytes() for name in ("push", "json", "dots"))
    assert json == dots
    assert json != push


def test_compare_overlaps_what_it_can_and_says_which_methods_ran_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "async_sgd, hardsync@1, local_sgd:period=2, elastic_averaging"
    command = ["simulate", "--method", methods, *SHARED, "--updates", "6", "--no-picture", "--out", str(tmp_path)]
    assert main(command) == 0
    waited = capsys.readouterr().out
    assert main([*command, "--overlap"]) == 0
    overlapped = capsys.readouterr().out
    same = [one["loss"] == other["loss"] for one, other in zip(rows(waited), rows(overlapped), strict=True)]
    assert same == [False, True, True, True]
    assert "local_sgd:period=2, elastic_averaging ran without" in overlapped
    assert "ran without" not in waited
    assert "--overlap and method=LocalSGD" in refusal(capsys, "simulate", "--method", "local_sgd", "--overlap")


def test_options_that_the_groups_leave_without_effect_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rebalance", "auto", "--all-reduce", "bf16", "--compression", "int8", "--update-seconds", "1ms")
    for groups, unused in (("4", "--rebalance and --all-reduce"), ("1", "--compression and --update-seconds")):
        command = ["simulate", "--groups", groups, *SHARED, "--updates", "2", "--no-picture", "--out", str(tmp_path)]
        assert main([*command, *options]) == 0
        assert f"without effect: {unused}, because" in capsys.readouterr().out
        assert main(command) == 0
        assert "without effect" not in capsys.readouterr().out
    assert main([*command, "--merged", "3"]) == 0
    assert "without effect: --merged, because one group" in capsys.readouterr().out


def test_one_seed_gives_one_file(tmp_path: Path) -> None:
    for folder, seed in (("one", "3"), ("same", "3"), ("other", "4")):
        command = ["simulate", *SHARED, "--jitter", "exponential", "--seed", seed, "--no-picture"]
        assert main([*command, "--out", str(tmp_path / folder)]) == 0
    one, same, other = ((tmp_path / name / "async_sgd.npz").read_bytes() for name in ("one", "same", "other"))
    assert one == same
    assert one != other
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    "methods",
    [
        "async_sgd@1,hardsync,diloco:period=2,outer_lr=0.7",
        "async_sgd@1; hardsync; diloco:period=2,outer_lr=0.7",
        "async_sgd@1  hardsync diloco:period=2,outer_lr=0.7 hardsync",
    ],
)
def test_compare_has_one_row_a_method_and_one_picture(
    methods: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_drawn = "; " in methods  # once is enough
    command = ["simulate", "--method", methods, *SHARED, "--updates", "6", "--out", str(tmp_path)]
    assert main([*command, *([] if is_drawn else ["--no-picture"])]) == 0
    found = rows(capsys.readouterr().out)
    assert [row["method"] for row in found] == ["async_sgd@1", "hardsync", "diloco:period=2,outer_lr=0.7"]
    assert [row["groups"] for row in found] == ["1", "4", "4"]
    if is_drawn:
        assert_is_picture(tmp_path / "comparison.png")
    names = ("async_sgd@1", "hardsync", "diloco-period=2-outer_lr=0.7")
    assert [Trace.load(tmp_path / f"{name}.npz").updates for name in names] == [6, 6, 6]


def test_yaml_describes_all_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "examples" / "simulate.yaml"
    out = tmp_path / "two.png"
    arguments = ["simulate", "--config", str(config), "--epochs", "1", "--lr", "0.1", "--out", str(out)]
    assert main([*arguments, "--method", "async_sgd,softsync:n=2"]) == 0
    assert [row["method"] for row in rows(capsys.readouterr().out)] == ["async_sgd", "softsync:n=2"]
    assert_is_picture(out)
    cluster = Trace.load(tmp_path / "two-async_sgd.npz").meta["cluster"]
    assert [kind["count"] for kind in cluster["devices"]] == [7, 1]
    assert cluster["devices"][0]["jitter"]["kind"] == "lognormal"
    assert cluster["link"] == {"bandwidth": 1.25e7, "latency": pytest.approx(1e-4)}


def test_a_printed_configuration_gives_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["simulate", *SHARED, "--latency", "1e-3", "--no-picture", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--print-config"])
    assert ended.value.code == 0
    config = tmp_path / "printed.yaml"
    config.write_text(capsys.readouterr().out)
    assert "latency: 0.001" in config.read_text()
    assert main(flags) == 0
    first = (tmp_path / "async_sgd.npz").read_bytes()
    assert main(["simulate", "--config", str(config)]) == 0
    assert (tmp_path / "async_sgd.npz").read_bytes() == first


def test_a_workload_of_ones_own(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--workload", f"{workload}:made", *SHORT, "--target", "error=1e-9", "--out", str(tmp_path)]
    assert main(command) == 0
    [row] = rows(capsys.readouterr().out)
    assert row["s to error 1e-09"] == "-"
    assert float(row["error"]) < 2
    assert "accuracy" not in row
    assert main([*command, "--lr", "0"]) == 0
    assert len(set(Trace.load(tmp_path / "async_sgd.npz").evaluated["error"])) == 1


def test_a_workload_without_metrics_is_drawn_by_its_training_loss(workload: str, tmp_path: Path) -> None:
    command = ["simulate", "--workload", f"{workload}:blind", "--method", "async_sgd,hardsync", *SHARED]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert_is_picture(tmp_path / "comparison.png")
    assert not len(Trace.load(tmp_path / "hardsync.npz").evaluated["time"])


def test_wrong_workloads_are_told(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        return refusal(capsys, "simulate", *arguments)

    assert "there is no function 'absent'" in said("--workload", f"{workload}:absent")
    assert "returns NoneType" in said("--workload", f"{workload}:nothing")
    assert "there is no file" in said("--workload", "absent.py:made")
    assert "there is no module 'absent'" in said("--workload", "absent.module:made")
    assert "'file.py:function'" in said("--workload", "absent")
    assert "--target error=1: the workload evaluates nothing" in said(
        "--workload", f"{workload}:blind", "--target", "error=1"
    )
    for flag in ("--evaluate-every", "--evaluate-every-seconds"):
        assert f"{flag}: the workload evaluates nothing" in said("--workload", f"{workload}:blind", flag, "1")
    assert "--momentum: Adam has none" in said("--workload", f"{workload}:made", "--momentum", "0.5", "--no-picture")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--method", "softsync:n=4", "--groups", "2"), "pass n<=2 or more groups"),
        (("--method", "gossip", "--groups", "1"), "pass groups=2 or more, or another method"),
        (("--method", "gossip@1"), "pass groups=2 or more, or another method"),
        (("--method", "hardsync@many"), "the number of groups, as in hardsync@4"),
        (("--method", "sotfsync"), "method='sotfsync' is not known; pass one of 'async_sgd'"),
        (("--method", "sotfsync"), "; did you mean softsync?"),
        (("--method", "softsync:m=4"), "softsync has no setting m; it has n"),
        (("--method", "diloco:peroid=4"), "; did you mean period?"),
        (("--groups", "9"), "pass groups<=8 or more devices"),
        (("--target", "accuracy"), "--target accuracy: pass a metric and its value, as in accuracy=0.9"),
        (("--target", "acc=0.9"), "--target acc=0.9: the workload evaluates loss, accuracy"),
        (("--batch-size", "0"), "--batch-size 0: pass a number above 0"),
        (("--straggler", "0"), "--straggler 0.0: pass a number above 0"),
        (("--evaluate-every", "0"), "--evaluate-every 0: pass a number above 0"),
        (("--lr", "-1"), "--lr -1.0: pass a number, 0 or more"),
        (("--momentum", "1.5"), "--momentum 1.5: pass a number from 0 up to 1, but not 1"),
        (("--bandwidth", "0"), "--bandwidth 0.0: pass bytes per second"),
        (("--jitter", "lognormal"), "pass lognormal:0.2"),
        (("--servers", "some"), "servers='some': pass a number of servers, 1 or more, or \"per-node\""),
        (("--nodes", "2"), 'nodes=2: it is for servers="per-node"'),
        (("--servers", "per-node", "--nodes", "3"), "nodes=3: 8 devices cannot be spread over them evenly"),
        (("--overlap", "--method", "diloco"), "--overlap and method=DiLoCo"),
        (("--jitter", "much"), "--jitter much: pass none, exponential"),
        (("--jitter", "exponential:0.3"), "--jitter exponential:0.3: pass none, exponential"),
        (("--out", f"{__file__}/folder"), "pass a folder that can be written"),
        (("--out", "/proc/self"), "--out '/proc/self': "),
        (("--target", "accuracy=nan"), "--target accuracy=nan: pass a metric and its value, as in accuracy=0.9"),
        (("--target", "accuracy=inf"), "--target accuracy=inf: pass a metric and its value"),
        (("--seed=-1",), "--seed -1: pass a whole number from 0 up"),
        (("--head-seconds-per-sample", "1ms"), "--head-seconds-per-sample 1ms: it is of a merged head"),
    ],
)
def test_wrong_settings_are_one_line_with_the_remedy(
    flags: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refusal(capsys, "simulate", *flags)


def test_compare_refuses_before_it_simulates_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert "softsync:n=9: n=9" in refusal(capsys, "simulate", "--method", "async_sgd,softsync:n=9")
    assert "--method: pass at least one" in refusal(capsys, "simulate", "--method", " ")


@pytest.mark.parametrize("taken", ["comparison.png", "hardsync.npz"])
def test_a_folder_in_a_files_place_is_noticed_before_anything_is_simulated(
    taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / taken).mkdir()
    said = refusal(capsys, "simulate", "--method", "async_sgd,hardsync", "--out", str(tmp_path))
    assert f"--out '{tmp_path}/{taken}': Is a directory; pass a file that can be written" in said


def test_without_matplotlib_nothing_starts_but_without_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    command = ["simulate", *SHARED, "--out", str(tmp_path)]
    assert "pip install 'lightning-omni[plot]'" in refusal(capsys, *command)
    assert main([*command, "--no-picture"]) == 0


def test_ctrl_c_reports_what_was_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = simulator.simulate

    def interrupted(method: Any, *arguments: Any, progress: Any, **options: Any) -> Trace:
        def show(done: float, text: str) -> None:
            progress(done, text)
            if type(method).__name__ == "HardSync" and done > 0.5:
                raise KeyboardInterrupt

        return real(method, *arguments, progress=show, **options)

    monkeypatch.setattr(simulator, "simulate", interrupted)
    assert main(["simulate", "--method", "async_sgd,hardsync,gossip", *SHARED, "--out", str(tmp_path)]) == 130
    whole, half = rows(capsys.readouterr().out)
    assert (whole["method"], whole["ended"], whole["updates"]) == ("async_sgd", "updates", "24")
    assert (half["method"], half["ended"]) == ("hardsync", "interrupted")
    assert 12 <= int(half["updates"]) < 24
    assert_is_picture(tmp_path / "comparison.png")
    assert Trace.load(tmp_path / "hardsync.npz").ended == "interrupted"


def test_an_error_in_a_later_run_loses_no_earlier_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = simulator.simulate

    def failing(method: Any, *arguments: Any, **options: Any) -> Trace:
        if type(method).__name__ == "HardSync":
            raise MemoryError
        return real(method, *arguments, **options)

    monkeypatch.setattr(simulator, "simulate", failing)
    with pytest.raises(MemoryError):
        main(["simulate", "--method", "async_sgd,hardsync", *SHARED, "--no-picture", "--out", str(tmp_path)])
    assert Trace.load(tmp_path / "async_sgd.npz").updates == 24


def test_ctrl_c_in_the_second_of_two_rates_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, begun = simulator.simulate, []

    def interrupted(method: Any, *arguments: Any, progress: Any, **options: Any) -> Trace:
        begun.append(method)

        def show(done: float, text: str) -> None:
            progress(done, text)
            if len(begun) == 2 and done > 0.5:
                raise KeyboardInterrupt

        return real(method, *arguments, progress=show, **options)

    monkeypatch.setattr(simulator, "simulate", interrupted)
    rates = ("--lr", "[0.1, 0.01]")
    assert main(["simulate", "--method", "async_sgd,gossip", *SHARED, *rates, "--out", str(tmp_path)]) == 130
    assert [row["ended"] for row in rows(capsys.readouterr().out)] == ["interrupted"]


def test_a_pair_that_the_second_method_refuses_is_refused_before_the_first_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", "--method", "async_sgd,local_sgd", *SHARED, "--compression", "topk:0.01"]
    assert "topk" in refusal(capsys, *command, "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_narrow_table_stands_upright(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ["simulate", "--method", "async_sgd,hardsync", *SHARED, "--no-picture", "--out", str(tmp_path)]
    assert main(command) == 0
    output = capsys.readouterr().out
    upright = {row.pop("method"): row for row in rows(output)}
    assert upright["updates"] == {"async_sgd": "24", "hardsync": "24"}
    assert upright["ended"] == {"async_sgd": "updates", "hardsync": "updates"}
    assert "…" not in output.split("trace:")[0]


def test_nothing_can_not_be_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is nothing to draw"):
        plot_comparison({}, tmp_path / "empty.png")
    trace = Trace(rows={name: np.empty(0, kind) for name, kind in Trace.COLUMNS.items()})
    plot_comparison({"empty": trace}, tmp_path / "empty.png")
    with pytest.raises(ConfigurationError, match="pass a file that can be written"):
        plot_comparison({"empty": trace}, tmp_path / "absent" / "empty.png")


def test_a_notebook_shows_the_picture_of_a_trace() -> None:
    trace = Trace(rows={name: np.empty(0, kind) for name, kind in Trace.COLUMNS.items()})
    picture = trace._repr_png_()
    assert picture is not None
    assert picture.startswith(b"\x89PNG")


@pytest.mark.processes
def test_the_command_runs_without_lightning(tmp_path: Path) -> None:
    command = ["simulate", *SHARED, "--out", str(tmp_path)]
    ended = interpret(
        f"import sys; from lightning_omni.cli import main; assert main({command}) == 0;"
        " assert not {'lightning', 'pytorch_lightning', 'skopt'} & set(sys.modules)"
    )
    assert ended.returncode == 0, ended.stderr
    assert rows(ended.stdout)[0]["updates"] == "24"
    assert_is_picture(tmp_path / "async_sgd.png")
