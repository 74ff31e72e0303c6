"""The simulator's engine: what processes wait for, and in which order they go on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_omni.simulator as room
from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator.engine import Engine, Priority, Timeline
from lightning_omni.simulator.settings import Evaluation, Limits


def run(engine: Engine) -> None:
    while len(engine.events):
        engine.step()


def test_a_process_begins_at_once_and_goes_on_at_the_moment_that_it_yields() -> None:
    engine, seen = Engine(), list[float]()

    def waits() -> Timeline:
        seen.append(engine.now)
        yield 1.5
        seen.append(engine.now)
        yield engine.now + 0.5
        seen.append(engine.now)

    process = engine.start(waits())
    assert seen == [0.0]
    run(engine)
    assert seen == [0.0, 1.5, 2.0]
    assert process.is_over


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_a_process_that_waits_for_another_gets_what_that_returns(seconds: float) -> None:
    engine, got = Engine(), list[tuple[float, str]]()

    def child() -> Timeline:
        if seconds:
            yield seconds
        return "weights"

    def parent() -> Timeline:
        word = yield engine.start(child())
        got.append((engine.now, word))

    engine.start(parent())
    run(engine)
    assert got == [(seconds, "weights")]


def test_a_process_that_yields_none_waits_until_it_is_resumed() -> None:
    engine, got = Engine(), list[tuple[float, str]]()

    def waits() -> Timeline:
        while True:
            word = yield None
            got.append((engine.now, word))

    process = engine.start(waits())
    engine.resume(process, "now")
    engine.resume_at(3.0, process, "later")
    engine.resume_at(1.0, process, "sooner")
    run(engine)
    assert got == [(0.0, "now"), (1.0, "sooner"), (3.0, "later")]


def test_what_a_process_has_started_goes_on_when_it_is_stopped() -> None:
    engine, seen = Engine(), list[str]()

    def message() -> Timeline:
        yield 2.0
        seen.append("arrived")

    def group() -> Timeline:
        yield engine.start(message())
        seen.append("went on")

    process = engine.start(group())
    engine.stop(process)
    engine.resume(process)
    run(engine)
    assert seen == ["arrived"]


def test_what_was_put_down_first_happens_first_and_failures_before_all_else_of_a_moment() -> None:
    engine, seen = Engine(), list[str]()

    def at_one(name: str) -> Timeline:
        yield 1.0
        seen.append(name)

    for name in ("first", "second", "third"):
        engine.start(at_one(name))
    engine.start(at_one("dies"), Priority.FAILURE)
    run(engine)
    assert seen == ["dies", "first", "second", "third"]


def test_an_error_in_a_process_reaches_the_caller() -> None:
    engine = Engine()

    def fails() -> Timeline:
        yield 1.0
        raise ConfigurationError("evaluate returns nothing")

    engine.start(fails())
    with pytest.raises(ConfigurationError, match="nothing"):
        run(engine)


def test_values_say_what_is_wrong_with_them() -> None:
    with pytest.raises(ConfigurationError, match="when is the run to end"):
        Limits()
    with pytest.raises(ConfigurationError, match="epochs=0"):
        Limits(epochs=0)
    with pytest.raises(ConfigurationError, match="target="):
        Evaluation(target=("loss", 0.1))
    assert Limits(updates=10, seconds=4.0).fraction(updates=5, epochs=7.0, seconds=1.0) == 0.5


def test_no_part_of_the_simulator_chains_callbacks_or_takes_many_arguments_but_what_people_call() -> None:
    """Its parts are told values; ``simulate`` and ``replay`` have the keywords that people write."""
    for path in sorted(Path(room.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (path.name, node.name) != ("run.py", "simulate"):
                arguments = [each.arg for each in (*node.args.args, *node.args.kwonlyargs) if each.arg != "self"]
                assert len(arguments) <= 8, f"{path.name}: {node.name} takes {arguments}"
                assert node.end_lineno is not None
                assert path.name != "group.py" or node.end_lineno - node.lineno < 40, f"{path.name}: {node.name}"
            if isinstance(node, ast.Call) and path.name != "workload.py":
                assert getattr(node.func, "id", "") != "partial", f"{path.name} chains callbacks"
