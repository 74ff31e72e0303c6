"""The total throughput of several processes that train at once, each with its share of the cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightning_omni.tuning.device.setting import DeviceSetting
from lightning_omni.tuning.device.trial import TrainingSetup, Trial

_START_SECONDS = 180.0
"""Time to import torch and make the first step, on a busy machine."""

_INTERVAL_SECONDS = 0.2
"""Approximate length of the blocks in which steps are counted, so that all processes end at about the same time."""


def throughput(setup: TrainingSetup, setting: DeviceSetting, seconds: float, deadline: float) -> float:
    """Return the total samples per second of ``setting.workers`` processes with ``setting.threads`` threads each.

    Each process trains its own copy on its own batches, without any exchange.

    Args:
        setup: setup, which must be picklable.
        setting: setting of each process.
        seconds: duration of the measurement, after the first steps of all processes.
        deadline: time on the setup's clock by which all must be ready.

    Raises:
        RuntimeError: a process failed, or was not ready in time.
    """
    model, optimizer = setup.copies()  # copied, because sending moves tensors into shared memory
    context = multiprocessing.get_context("spawn")
    workers: list[tuple[Any, Connection]] = []
    try:
        for _ in range(setting.workers):
            own, theirs = context.Pipe()
            arguments = (theirs, model, setup.loss, optimizer, list(setup.batches), setting, seconds)
            process = context.Process(target=_train, args=arguments, daemon=True)
            process.start()
            theirs.close()
            workers.append((process, own))
        for _, connection in workers:
            _receive(connection, min(_START_SECONDS, deadline - setup.clock()))
        for _, connection in workers:
            connection.send("go")
        return sum(float(_receive(connection, _START_SECONDS + seconds)) for _, connection in workers)
    finally:
        for process, connection in workers:
            connection.close()
            process.terminate()
        for process, _ in workers:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)


def _receive(connection: Connection, seconds: float) -> Any:
    if not connection.poll(max(0.0, seconds)):
        raise RuntimeError("a process was not ready in time")
    try:
        kind, value = connection.recv()
    except EOFError:
        raise RuntimeError("a process ended before it was ready") from None
    if kind == "failed":
        raise RuntimeError(f"a process failed: {value}")
    return value


def _train(
    connection: Connection,
    model: Any,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    batches: list[Any],
    setting: DeviceSetting,
    seconds: float,
) -> None:
    """Train and report in a child process, which ends when its parent does."""
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the parent is gone, or stops all
        try:
            torch.set_num_threads(setting.threads or 1)
            trial = Trial(TrainingSetup(model, loss, optimizer, batches), setting)
            steps = max(1, round(_INTERVAL_SECONDS / max(trial.run(1), 1e-6)))
            connection.send(("ready", None))
            connection.recv()
            connection.send(("done", _samples_per_second(trial, steps, seconds)))
        except (EOFError, OSError):
            raise
        except Exception as error:
            connection.send(("failed", f"{type(error).__name__}: {error}"))


def _samples_per_second(trial: Trial, steps: int, seconds: float) -> float:
    clock, samples, spent = trial.setup.clock, 0, 0.0
    end = clock() + seconds
    while not samples or clock() < end:
        spent += trial.run(steps)
        samples += steps * trial.samples
    return samples / spent
