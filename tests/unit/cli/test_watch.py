"""A run that is watched: over HTTP, with ``lightning-omni top``, and in the server's log."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from patience import SLOWER
from processes import Process
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from runs import free_port, search_path

from lightning_omni.cli import main
from lightning_omni.cli.top import GroupsTable, Rates, picture
from lightning_omni.errors import ConfigurationError, OmniError, Refused
from lightning_omni.transport.serving import http as status_http
from lightning_omni.transport.serving.http import StatusServer
from lightning_omni.transport.zeromq.observer import Observer
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import EpochPlan

DOCS = Path(__file__).parents[3] / "docs"
SCRIPT = Path(__file__).parents[2] / "scripts" / "regression.py"
COMMAND = [sys.executable, "-c", "from lightning_omni.cli import main; raise SystemExit(main())"]
START = 150.0
"""Seconds for a process to import what it needs, and for a run to begin, on a busy machine."""
KEY = "5a" * 32
ENVIRONMENT = {"LIGHTNING_OMNI_KEY": KEY, "OMNI_TEST_SPARES": "1", "OMNI_TEST_COPIES": "1"}


def group(number: int, **changes: Any) -> m.GroupOverview:
    fields = {
        "group": number, "ranks": (2 * number, 2 * number + 1), "updates": 30, "staleness_mean": 1.5,
        "step_time": 0.1, "compute_time": 0.03, "exchange_time": 0.05, "slowest_rank": 2 * number,
        "slowest_time": 0.03, "name": f"g{number}", "incarnation": 1,
    }  # fmt: skip
    status = m.GroupStatus(**{**fields, **changes})
    return m.GroupOverview(status=status, hosts=("10.0.0.7",), age=4000.0, silence=0.2, samples=100 * (number + 1))


def overview(*groups: m.GroupOverview, **changes: Any) -> m.Overview:
    """A run with everything that there can be."""
    groups = groups or (group(0), group(1))
    status = m.Status(
        sent=0.0, clock=60, updates_per_second=4.0, refused=2, strangers=3, groups=tuple(g.status for g in groups),
        staleness=(10, 30, 15, 0, 0, 5), lost=(4, 5), head_time=0.02, serve_time=0.001,
    )  # fmt: skip
    whole = m.Overview(
        run="a run", age=5000.0, announced=6, live=(0, 1, 2, 3), missing=(), recorder=0, status=status, groups=groups,
        method={"name": "async_sgd"}, wire_format={"name": "raw"}, pushes=61, serve_time=3.0, trained=300, over="",
        plan=EpochPlan(epoch=2, total=1000, batch_size=8, budget=1000),
        log=(m.LogEntry(70.0, "lost", "ranks 4 to 5 lost: \x1b[2Jkilled"),),
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


NO_RUN = msgspec.structs.replace(
    overview(), run="", live=(), announced=0, groups=(), log=(), plan=None, method=None, wire_format=None,
    status=msgspec.structs.replace(overview().status, groups=(), lost=(), staleness=(), head_time=0.0, serve_time=0.0),
)  # fmt: skip


def samples_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus would read: a value for each name and its labels."""
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def rendered(shown: Any, width: int = 180) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), force_terminal=False)  # noqa: SIM115
    with console.file:
        console.print(shown)
    return console.export_text()


# --- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_what_prometheus_reads() -> None:
    text, kind = status_http.metrics_text(overview(), taken=10_000.0)
    assert kind.startswith("text/plain")
    seen = samples_of(text.decode())
    assert seen["lightning_omni_updates_total", ()] == 60
    assert seen["lightning_omni_run_start_time_seconds", ()] == 5000
    assert seen["lightning_omni_group_samples_total", (("group", "g1"),)] == 200
    assert seen["lightning_omni_group_exchange_seconds", (("group", "g0"),)] == 0.05
    assert seen["lightning_omni_staleness_updates_bucket", (("le", "2.0"),)] == 55
    assert seen["lightning_omni_staleness_updates_count", ()] == 60
    assert seen["lightning_omni_staleness_updates_sum", ()] == 30 + 2 * 15 + 5 * 5
    assert seen["lightning_omni_ranks_lost_total", ()] == 2
    labels = (("group", "g0"), ("hosts", "10.0.0.7"), ("incarnation", "1"))
    assert seen["lightning_omni_group_info", labels] == 1
    text, kind = status_http.metrics_text(overview(), 10_000.0, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    read = openmetrics.text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
    assert "lightning_omni_updates" in [family.name for family in read]


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a\\b", "\x00é"])
def test_any_name_of_a_group_is_one_label(name: str) -> None:
    text, _ = status_http.metrics_text(overview(group(0, name=name)), taken=0.0)
    assert samples_of(text.decode())["lightning_omni_group_ranks", (("group", name),)] == 2


def test_what_is_not_known_is_left_out() -> None:
    early = group(0, updates=0, step_time=0.0, compute_time=0.0, exchange_time=0.0)
    early = msgspec.structs.replace(early, samples=None)
    names = {name for name, _ in samples_of(status_http.metrics_text(overview(early, plan=None), 0.0)[0].decode())}
    assert "lightning_omni_group_ranks" in names
    for missing in ("group_step_seconds", "group_samples_total", "group_staleness_mean_updates", "epoch"):
        assert f"lightning_omni_{missing}" not in names
    idle = samples_of(status_http.metrics_text(NO_RUN, 0.0)[0].decode())
    assert idle["lightning_omni_run_active", ()] == 0


def test_names_follow_the_conventions_of_prometheus() -> None:
    for family in status_http.families(overview(), 0.0):
        assert re.fullmatch(r"lightning_omni_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert not family.name.endswith(("_total", "_ms", "_count"))
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")


def test_the_dashboard_names_only_metrics_that_there_are() -> None:
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    text = status_http.metrics_text(overview(), taken=0.0)[0].decode()
    known = {name for name, _ in samples_of(text)}
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    used = {name for expr in asked for name in re.findall(r"\b(?:lightning_omni|process)_\w+", expr)}
    assert len(used) > 15
    assert used <= known, used - known
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    documented = set(re.findall(r"`(lightning_omni_\w+)`", (DOCS / "how-to" / "watching.md").read_text()))
    own = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known if name.startswith("lightning_omni_")}
    assert documented == own


# --- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def status_server() -> Iterator[StatusServer]:
    server = StatusServer()
    yield server
    server.close()


def get(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_probes_tell_whether_the_loop_goes_round(status_server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = status_server.url
    # A state is being loaded, however long that takes.
    assert (get(url, "/healthz")[0], get(url, "/readyz")[0]) == (200, 503)
    status_server.publish(NO_RUN)
    assert get(url, "/healthz") == get(url, "/readyz") == (200, "ok\n")
    status_server.publish(overview(over="rank 0 is gone"))
    assert get(url, "/healthz")[0] == 200
    assert get(url, "/readyz") == (503, "the run is over: rank 0 is gone\n")
    monkeypatch.setattr(status_http, "READY", -1.0)
    status_server.publish(NO_RUN)
    assert get(url, "/healthz")[0] == 200
    assert get(url, "/readyz")[0] == 503


def test_http_only_reads(status_server: StatusServer) -> None:
    status_server.publish(overview())
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert get(status_server.url, "/status", method)[0] == 501
    assert get(status_server.url, "/status", "HEAD") == (200, "")
    assert get(status_server.url, "/../etc/passwd")[0] == 404
    status = json.loads(get(status_server.url, "/status?x=1")[1])
    assert status["groups"][1]["status"]["name"] == "g1"
    assert status["snapshot_age"] < 60
    assert KEY not in json.dumps(status)


def test_connections_are_bounded_in_number_and_time(
    status_server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_http, "REQUEST_TIME", 1.0)
    status_server.publish(overview())
    host, port = status_server.url.removeprefix("http://").split(":")
    began = time.monotonic()
    idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(status_http.MOST_CONNECTIONS)]
    try:
        for each in idle:
            each.sendall(b"GET /status HTTP/1.1\r\nX: ")  # and never more
        assert get_or_none(status_server.url, "/healthz") is None  # one too many
        for each in idle:
            assert each.recv(100) == b""  # ended by the server
    finally:
        for each in idle:
            each.close()
    assert time.monotonic() - began < SLOWER * 8
    deadline = time.monotonic() + SLOWER * 60
    while get_or_none(status_server.url, "/healthz") is None:
        assert time.monotonic() < deadline


def test_metrics_are_rendered_once_for_each_snapshot_and_format_however_many_ask_for_whatever(
    status_server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, render = [], status_http.metrics_text

    def slow(*asked: Any) -> tuple[bytes, str]:
        rendered.append(asked)
        time.sleep(0.2)
        return render(*asked)

    monkeypatch.setattr(status_http, "metrics_text", slow)
    accepted = ["", "text/plain", *(f"application/openmetrics-text; version={n}" for n in ("0.0.1", "9.9.9", "x"))]
    for updates in range(2):
        status_server.publish(overview(pushes=updates))
        with ThreadPoolExecutor(status_http.MOST_CONNECTIONS) as readers:
            asked = [readers.submit(get, status_server.url, "/metrics", Accept=each) for each in 3 * accepted]
        assert {each.result()[0] for each in asked} == {200}
        assert {"# EOF" in each.result()[1] for each in asked} == {False, True}
        assert len(rendered) == 2 * (updates + 1)


def get_or_none(url: str, path: str) -> tuple[int, str] | None:
    try:
        return get(url, path)
    except (OSError, http.client.HTTPException):
        return None


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-omni\[metrics\]'"):
        StatusServer()


def test_a_port_that_is_taken_is_told_with_the_remedy(status_server: StatusServer) -> None:
    port = int(status_server.url.rpartition(":")[2])
    for host, number in (("127.0.0.1", port), ("127.0.0.1", 70_000), ("192.0.2.1", 0)):
        with pytest.raises(ConfigurationError, match=r"cannot listen on .*; pass another port"):
            StatusServer(host, number)


# --- The table -------------------------------------------------------------------------------------------------------


def test_the_table_has_the_parts_of_a_step_and_rates_between_looks() -> None:
    rates, first = Rates(), overview()
    rates.add(10.0, first)
    busy, slow = msgspec.structs.replace(group(0), samples=180), group(1)
    status = msgspec.structs.replace(first.status, clock=80)
    last = overview(busy, slow, status=status, serve_time=4.0)
    rates.add(12.0, last)
    text = rendered(picture(last, rates))
    row = next(line for line in text.splitlines() if "g0" in line)
    for cell in ("10.0.0.7", "66.7 min", "100.0 ms", "30.0 ms", "50.0 ms", "20.0 ms", "40", "47 %", "1.5", "exchange"):
        assert cell in row
    assert "80 updates (10/s), 40 samples/s, server busy 50 %, 2 pushes refused, 3 strangers refused" in text
    assert "epoch 2" in text
    assert "300 of 1000 samples, 30 %, 17.5 s left in the epoch" in text
    assert "70 s ago  ranks 4 to 5 lost: \\x1b[2Jkilled" in text  # escaped


def test_the_head_has_the_loss_the_noise_scale_and_the_time_left_in_the_run() -> None:
    rates, plan = Rates(), EpochPlan(epoch=2, total=1000, batch_size=8, budget=1000, later=4000)
    rates.add(10.0, overview(plan=plan))
    last = overview(msgspec.structs.replace(group(0), samples=180), group(1), plan=plan, metrics={"loss": 0.53125})
    rates.add(12.0, last)
    text = rendered(picture(last, rates))
    assert "17.5 s left in the epoch, 118 s in the run" in text
    assert "training loss 0.5312\n" in text
    both = msgspec.structs.replace(last, metrics={"loss": 2.0, "omni/noise_scale": 1234.0, "own": 1.0})
    assert "training loss 2, gradient noise scale in samples: 1234" in rendered(picture(both, rates))


@pytest.mark.parametrize("width", [125, 80, 60, 40])
def test_where_the_table_is_too_wide_whole_columns_are_left_out(width: int) -> None:
    text = rendered(GroupsTable(overview(), Rates()), width)
    assert "…" not in text
    for head in ("group", "step", "samples/s"):
        assert f" {head} " in text
    assert max(map(len, text.splitlines())) > width - 20  # and no more than it takes
    assert " slowest " in rendered(GroupsTable(overview(), Rates()))


def test_a_rate_begins_again_with_the_counters() -> None:
    rates = Rates()
    rates.add(0.0, overview())
    rates.add(1.0, overview(group(0, incarnation=2)))
    assert rates.of(lambda seen: seen.status.clock) is None
    assert "-/s" in rendered(picture(overview(), rates))


def test_a_server_without_a_run_and_groups_that_have_not_stepped_are_shown() -> None:
    assert "waits for ranks" in rendered(picture(NO_RUN, Rates()))
    early = msgspec.structs.replace(group(0, step_time=0.0, updates=0, slowest_time=0.0), samples=None, hosts=())
    assert "0.0 ms" not in rendered(picture(overview(early, plan=None), Rates()))


def test_the_table_says_when_the_state_was_saved() -> None:
    assert "state saved" not in rendered(picture(overview(), Rates()))
    saved = msgspec.structs.replace(overview(), saved=61.0)
    assert "state saved 61 s ago" in rendered(picture(saved, Rates()))


# --- A real run ------------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(*command: str, **env: str) -> Process:
        processes.append(Process(command, {**ENVIRONMENT, **env}))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def wait_for(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + SLOWER * seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_is_watched_and_a_group_of_it_evicted(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the commands of docs/how-to/watching.md."""
    server = start(
        *COMMAND, *documented("serve --host 10.0.0.9 --http 9464", host="127.0.0.1", http="0"), "--port", "0"
    )
    address = server.expect(r"parameter server on (tcp://\S+), key from", START)[1]
    url = server.expect(r"status on (http://127\.0\.0\.1:\d+)", 10)[1]
    wait_for(lambda: get(url, "/readyz")[0] == 200)
    with pytest.raises(Refused, match="the key does not match"):
        Observer(address, bytes(32), timeout=3.0)

    train = [sys.executable, str(SCRIPT), "--groups=2", f"--server={address}", "--epochs=1000", "--pace=0.05"]
    run = start(*train, MASTER_PORT=str(free_port()))
    observer = Observer(address, bytes.fromhex(KEY))
    try:

        def trains() -> m.Overview | None:
            seen = observer.overview()
            ready = len(seen.groups) == 2 and all(g.status.step_time and g.samples for g in seen.groups)
            return seen if ready and seen.plan is not None else None

        first = wait_for(trains, START)
        rates = Rates()
        rates.add(time.monotonic(), first)
        time.sleep(1.0)
        rates.add(time.monotonic(), second := observer.overview())
        assert second.plan is not None
        assert second.plan.later == (1000 - 1 - second.plan.epoch) * second.plan.budget
        check_table(rendered(picture(second, rates)), second)
        check_metrics(wait_for(lambda: metrics_of_two_groups(url)))
        status = json.loads(get(url, "/status")[1])
        assert status["live"] == [0, 1]
        assert [each["hosts"] for each in status["groups"]] == [["127.0.0.1"], ["127.0.0.1"]]
        monkeypatch.setenv("LIGHTNING_OMNI_KEY", KEY)
        monkeypatch.delenv("COLUMNS", raising=False)
        assert main([*documented("top tcp://10.0.0.9:5555", address=address), "--once", "--every", "0.3s"]) == 0
        check_table(capsys.readouterr().out, second)
        check_terminal(address)

        with pytest.raises(Refused, match="the run would end with it"):
            observer.evict(second.groups[0].status)
        assert main(["evict", address, "7"]) == 2
        assert "there is no group 7; pass one of: 0, 1" in capsys.readouterr().err
        assert main([*documented("evict tcp://10.0.0.9:5555 1", address=address)]) == 0
        assert capsys.readouterr().out == "group 1 is evicted\n"
        after = wait_for(lambda: (seen := observer.overview()) and seen.status.lost == (1,) and seen)
        assert [g.status.name for g in after.groups] == ["0"]
        assert after.log[-1].text == "rank 1 lost: group 1 was evicted by hand"
        run.expect("group 1 was evicted by hand", 30)
        progress = after.trained
        wait_for(lambda: observer.overview().trained != progress)  # the other one goes on
        assert "loss" in wait_for(lambda: observer.overview().metrics)
        run.kill()
        assert wait_for(lambda: not (seen := observer.overview()).run and not seen.live)  # the next run may come
    finally:
        observer.close()
    server.interrupt()
    assert server.end(timeout=30) == 130
    check_log(server.output)


JOINING = Path(__file__).parents[2] / "scripts" / "joining.py"
SAMPLES = 512
"""A batch has 8, and an update is made of one."""


@pytest.mark.slow
@pytest.mark.processes
def test_several_servers_show_the_run_as_one_would_and_the_others_what_they_do_themselves(
    start: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = ["--servers", "3", "--port", "0", "--http", "0"]
    server = start(*COMMAND, "serve", *shares, "--servers-here", "2")
    address = server.expect(r"parameter server on (tcp://\S+), key from", START)[1]
    url = server.expect(r"status on (http://127\.0\.0\.1:\d+)", 10)[1]
    missing = "1 of the servers that are to hold a partition of the parameters have not come yet\n"
    wait_for(lambda: get(url, "/readyz") == (503, missing), START)
    assert get(url, "/healthz") == (200, "ok\n")
    other = start(*COMMAND, "serve", *shares, "--number", "2", "--coordinator", address)
    there = other.expect(r"status on (http://127\.0\.0\.1:\d+)", START)[1]
    wait_for(lambda: get(url, "/readyz") == (200, "ok\n"))

    given = json.dumps({"epochs": 2, "samples": SAMPLES, "hold": [1], "step": 0.02})
    groups = []
    for name in "ab":  # the first trains epoch 0 alone; then both wait in epoch 1
        env = {"LIGHTNING_OMNI_SERVER": address, "OMNI_TEST_FOLDER": str(tmp_path), "OMNI_TEST_NAME": name}
        groups.append(start(sys.executable, str(JOINING), given, **env))
        wait_for((tmp_path / f"{name}0-in-1").exists, START)
    status = wait_for(lambda: (seen := json.loads(get(url, "/status")[1])) and len(seen["groups"]) == 2 and seen)
    assert (status["live"], status["trained"], status["plan"]["budget"], status["over"]) == ([0, 1], 0, SAMPLES, "")
    assert [(each["samples"], each["hosts"]) for each in status["groups"]] == [
        (SAMPLES, ["127.0.0.1"]),
        (0, ["127.0.0.1"]),
    ]
    seen = samples_of(get(url, "/metrics")[1])
    updates = SAMPLES // 8
    for name, value in {
        "run_active": 1, "ranks_live": 2, "ranks_lost_total": 0, "groups": 2, "updates_total": updates, "epoch": 1,
        "epoch_samples": SAMPLES, "epoch_samples_trained": 0, "server_pushes_total": updates,
        "staleness_updates_count": updates, "pushes_refused_total": 0, "server_strangers_refused_total": 0,
    }.items():  # fmt: skip
        assert seen[f"lightning_omni_{name}", ()] == value, name
    first = (("group", "0"),)
    assert seen["lightning_omni_group_samples_total", first] == SAMPLES
    assert seen["lightning_omni_group_pushes_applied_total", first] == updates
    assert seen["lightning_omni_group_step_seconds", first] > 0.02
    assert 0 < seen["lightning_omni_server_push_seconds_total", ()] < 5

    pushes = "lightning_omni_server_pushes_total", ()
    # Each server looks at itself once a second, at moments of its own.
    theirs = wait_for(lambda: (own := samples_of(get(there, "/metrics")[1])).get(pushes) == updates and own)
    names = {name for name, _ in theirs if name.startswith("lightning_omni_")}
    assert names == {f"lightning_omni_server_{name}_total" for name in ("pushes", "push_seconds", "strangers_refused")}
    assert theirs["lightning_omni_server_push_seconds_total", ()] > 0
    assert get(there, "/status") == (404, "the run's status is at the server that coordinates, server 0\n")
    assert get(there, "/healthz") == get(there, "/readyz") == (200, "ok\n")

    monkeypatch.setenv("LIGHTNING_OMNI_KEY", KEY)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["top", address, "--once", "--every", "0.3s"]) == 0
    shown = capsys.readouterr().out
    assert 'async_sgd, compression="fp32", 2 ranks, for ' in shown
    assert f"{updates} updates (0.0/s), 0.0 samples/s, server busy 0 %" in shown
    assert f"0 of {SAMPLES} samples, 0 %" in shown
    assert len([line for line in shown.splitlines() if "127.0.0.1" in line and "ms" in line]) >= 1
    assert "group 1 takes part: rank 1" in shown

    (tmp_path / "go-1").touch()
    for group in groups:
        assert group.end(START) == 0, group.output
    wait_for(lambda: not json.loads(get(url, "/status")[1])["run"])  # the next run may come
    assert get(url, "/readyz") == (200, "ok\n")
    assert f"a run is over: {2 * updates} updates, ranks lost: 0" in server.output
    other.expect(r"a run is over\s*$", 10)  # what came of it, the first one says
    server.kill()
    assert other.end(30) == 1, "so that it is started again"
    assert "the server that coordinates is gone" in other.output


def metrics_of_two_groups(url: str) -> dict[Any, float] | None:
    """As soon as the mean step of both is that of their later steps: they wait for 0.05 s in each."""
    seen = samples_of(get(url, "/metrics")[1])
    steps = [seen.get(("lightning_omni_group_step_seconds", (("group", number),)), 0.0) for number in "01"]
    return seen if min(steps) >= 0.04 else None


def check_metrics(seen: dict[Any, float]) -> None:
    assert seen["lightning_omni_run_active", ()] == 1
    assert seen["lightning_omni_ranks_live", ()] == 2
    assert seen["lightning_omni_updates_total", ()] == seen["lightning_omni_staleness_updates_count", ()]
    for number in "01":
        labels = (("group", number),)
        assert seen["lightning_omni_group_silent_seconds", labels] < 5
        assert seen["lightning_omni_group_samples_total", labels] % 8 == 0


def check_table(text: str, seen: m.Overview) -> None:
    rows = [line for line in text.splitlines() if "127.0.0.1" in line and "ms" in line]
    assert len(rows) == 2
    assert all(re.search(r"│ +\d+ +│ +\d+ %", row) for row in rows)  # samples/s and share
    assert f"of {seen.plan and seen.plan.budget} samples" in text
    assert "ranks 0 to 1 joined from 127.0.0.1" in text or text.count("joined from 127.0.0.1") == 2
    assert "2 groups formed (0, 1): AsyncSGD" in text


def documented(command: str, **instead: str) -> list[str]:
    """A command as the page has it, with addresses of this machine."""
    assert f"\nlightning-omni {command}\n" in (DOCS / "how-to" / "watching.md").read_text()
    words = command.split()
    for name, value in instead.items():
        place = words.index(f"--{name}") + 1 if f"--{name}" in words else 1
        words[place] = value
    return words


def check_terminal(address: str) -> None:
    """The table in a terminal, until Ctrl-C."""
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": search_path(),
        "TERM": "xterm",
        "COLUMNS": "160",
        "LINES": "40",
    }
    command = [*COMMAND, "top", address, "--every", "0.3s"]
    ours, theirs = pty.openpty()
    live = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + START
    try:
        while b"samples/s" not in shown:
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], shown
            shown += os.read(ours, 4096)
        live.send_signal(signal.SIGINT)
        while live.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the other end may have been closed already
                if select.select([ours], [], [], 0.1)[0]:
                    os.read(ours, 4096)
        assert live.returncode == 130, shown
    finally:
        live.kill()
        live.wait()
        os.close(ours)


def check_log(output: str) -> None:
    time_of_day = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    for line in (
        "joined from 127.0.0.1",
        r"2 groups formed \(0, 1\): AsyncSGD",
        "rank 1 lost: group 1 was evicted by hand",
    ):
        assert re.search(rf"^{time_of_day} .*{line}", output, re.MULTILINE), output
    assert re.search(r"a run is over: \d+ updates, ranks lost: 2", output)


@pytest.mark.processes
def test_watching_a_server_that_is_not_there_is_one_line(start: Callable[..., Process]) -> None:
    with pytest.raises(OmniError, match="no parameter server answers"):
        Observer(f"tcp://127.0.0.1:{free_port()}", bytes(32), timeout=0.5)
