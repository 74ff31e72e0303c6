"""The settings of ``simulate``. This module imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_omni.cli.units import Quantity


@dataclass(frozen=True)
class SimulationSettings:
    """Model, cluster, length of the runs, and files for the results.

    Args:
        groups: Number of compute groups, into which the devices are split evenly. By default every device is a group.
        devices: Number of devices.
        seconds_per_sample: Time of forward and backward for one sample, as in 1ms, or in seconds.
        overhead: Additional time of every batch, as in 5ms, or in seconds.
        jitter: Scatter of the devices' times: none, exponential; or normal, lognormal or gamma with standard deviation
            over mean, as in lognormal:0.2.
        straggler: Factor by which the last device is slower than the others.
        bandwidth: Bandwidth of all links, to the server and inside groups, as in 10Gbit, or in bytes per second.
        latency: Latency of all links, as in 50us, or in seconds.
        server_bandwidth: Bandwidth of the server's network card, which all groups share. By default that of the links.
        update_seconds: Time of the server for one push, as in 5ms, or in seconds.
        head_seconds_per_sample: Time of a merged head for one sample, in seconds, one group at a time.
        servers: Number of parameter servers that share the weights; or per-node, one on each node, which the groups on
            that node reach without a link.
        nodes: Nodes over which the devices are spread evenly, for per-node; by default each device is a node.
        workload: Model and data: synthetic, or file.py:function or package.module:function that returns a
            lightning_omni.simulator.Workload.
        batch_size: Samples in one device's batch.
        rebalance: auto splits a group's batch in proportion to its devices' speeds; off splits it equally.
        merged: Name of a submodule that stays at the server.
        compression: Encoding of pushes: fp32, bf16, fp16, int8 or topk:0.01; of pushes and pulls, as in {"push":
            "int8", "pull": "bf16"}.
        all_reduce: Format in which the devices of a group average gradients: fp32, bf16, fp16 or powersgd:8.
        overlap: Groups compute their next gradient during an exchange, with async_sgd. Of several methods, the others
            run without it.
        lr: Learning rate, or several as in [0.03, 0.1], of which each method gets its best: the first to reach the
            target, or else with the lowest last loss. By default one method uses the workload's; each of several gets
            its best around it.
        momentum: By default the workload's.
        epochs: Passes over the data after which a run ends; 10 without --updates and --seconds.
        updates: Updates after which a run ends.
        seconds: Virtual time after which a run ends, as in 10min, or in seconds.
        target: A metric that ends a run when it is reached, as in accuracy=0.9.
        evaluate_every: Updates between two evaluations. Without it and --evaluate-every-seconds, a run has about 50
            evaluations, or more if groups wait for one another.
        evaluate_every_seconds: Virtual time between two evaluations, as in 30s, or in seconds.
        seed: Seed of weights, data order and jitter. The same seed gives the same trace.
        threads: Threads for the arithmetic. Small models are fastest with one.
        out: Folder for pictures and traces; or the picture's file (.png, .svg or .pdf), with the traces beside it.
        picture: Draw a picture.
    """

    groups: int | None = None
    devices: int = 8
    seconds_per_sample: Quantity = 1e-3
    overhead: Quantity = 0.0
    jitter: str = "lognormal:0.2"
    straggler: float = 1.0
    bandwidth: Quantity = math.inf
    latency: Quantity = 0.0
    server_bandwidth: Quantity | None = None
    update_seconds: Quantity = 0.0
    head_seconds_per_sample: Quantity = 0.0
    servers: int | str = 1
    nodes: int | None = None
    workload: str = "synthetic"
    batch_size: int = 32
    rebalance: Literal["off", "auto"] = "off"
    merged: str | None = None
    compression: str | dict[str, str] = "fp32"
    all_reduce: str = "fp32"
    overlap: bool = False
    lr: float | list[float] | None = None
    momentum: float | None = None
    epochs: int | None = None
    updates: int | None = None
    seconds: Quantity | None = None
    target: str | None = None
    evaluate_every: int | None = None
    evaluate_every_seconds: Quantity | None = None
    seed: int = 0
    threads: int = 1
    out: Path = Path("simulated")
    picture: bool = True
