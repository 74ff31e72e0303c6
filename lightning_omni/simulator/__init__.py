"""The protocol in virtual time: simulated devices and links, the real server and methods, real gradients."""

from lightning_omni.simulator.cluster import Cluster, Device, Failure, Jitter, Link, Slowdown
from lightning_omni.simulator.replay import Replayed, replay, trace_of
from lightning_omni.simulator.run import simulate
from lightning_omni.simulator.settings import Computation, Evaluation, Limits, StopSimulation
from lightning_omni.simulator.workload import Workload, workload_named

__all__ = [
    "Cluster",
    "Computation",
    "Device",
    "Evaluation",
    "Failure",
    "Jitter",
    "Limits",
    "Link",
    "Replayed",
    "Slowdown",
    "StopSimulation",
    "Workload",
    "replay",
    "simulate",
    "trace_of",
    "workload_named",
]
