"""Rates that the hardware model predicts for ways of exchanging, beside those of the simulator, and the bottlenecks.

Four devices whose step takes 8 ms train in one group, and a profile is fitted to that. The links carry the weights in a
part of a step, that is ``LINKS``; the ring's are the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from core import CostModel, ExchangePattern, Prediction, Profile
from simulated_measurements import measurements_of
from torch import nn
from torch.utils.data import TensorDataset

from lightning_omni.simulator import Cluster, Jitter, Limits, Link, Workload, simulate
from lightning_omni.trace import Trace

RANKS, BATCH, STEP = 4, 8, 8e-3
"""And the seconds of a step of a device of speed 1."""
NUMBERS = 256
NBYTES = 4 * NUMBERS
DEVICES = ("nearly equal", "exponential", "one slow")
SPEEDS = 1.2, 1.0, 0.9, 0.8
"""Of devices that hardly scatter. On a busy link equal ones that start together would stay together for long."""
LINKS = {"fast": 0.02, "middling": 0.5, "slow": 2.0}
"""The part of a step in which the weights cross a link."""
DATA = TensorDataset(torch.zeros(4096, 1), torch.zeros(4096, 1))


class Way(NamedTuple):
    """A way of exchanging, and after how many pushes of a group the simulation is over."""

    method: str
    pushes: int
    overlap: bool = False

    @property
    def name(self) -> str:
        """Method and overlap."""
        return f"{self.method}{', overlap' * self.overlap}"


WAYS = (
    Way("async_sgd", 100),
    Way("async_sgd", 100, overlap=True),
    Way("elastic_averaging:period=4", 50),
    Way("elastic_averaging:period=16", 20),
    Way("local_sgd:period=1", 80),
    Way("local_sgd:period=4", 40),
    Way("diloco:period=16", 15),
    Way("diloco:period=16,fragments=4,delay=2", 40),
    Way("diloco:period=8,fragments=2,delay=2,keep_steps=true,dynamic_steps=true", 40),
)


class Weights(nn.Module):
    """So many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(NUMBERS))


def cluster_of(devices: str, links: str) -> Cluster:
    """One of the clusters, which has links of one speed."""
    bandwidth, latency = NBYTES / (LINKS[links] * STEP), STEP / 200
    speeds = {"exponential": (1.0,) * RANKS, "one slow": (*SPEEDS[:-1], 0.25)}.get(devices, SPEEDS)
    jitter = Jitter("exponential") if devices == "exponential" else Jitter("gamma", 0.05)
    return Cluster.of_speeds(
        speeds,
        STEP / BATCH,
        jitter=jitter,
        link=Link(latency=latency),
        server=Link(bandwidth),
        group_link=Link(bandwidth, latency),
        update_seconds=STEP / 100,
    )


def simulated(way: Way, wire: str, groups: int, cluster: Cluster, seed: int) -> Trace:
    """A run that learns nothing and takes its time."""
    return simulate(
        way.method,
        groups,
        cluster,
        Workload(
            Weights(),
            DATA,
            loss=lambda model, batch: model.numbers.square().mean() + 0 * batch[0].mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        ),
        batch_size=BATCH,
        limits=Limits(
            updates=way.pushes if "local_sgd" in way.method or "diloco" in way.method else way.pushes * groups
        ),
        seed=seed,
        compression=wire,
        overlap=way.overlap,
    )


def rate_of(trace: Trace) -> float:
    """Samples per second, those of each group from push to push, but for the start."""
    time, samples, group = (trace.rows[name] for name in ("time", "samples", "group"))
    total = 0.0
    for number in np.unique(group):
        own, done = time[group == number], samples[group == number]
        start = len(own) // 5
        total += float(done[start + 1 :].sum() / (own[-1] - own[start]))
    return total


@cache
def fitted(devices: str, links: str) -> Profile:
    """Return a profile fitted to 40 steps of one group."""
    return Profile.fit([measurements_of(simulated(Way("async_sgd", 40), "fp32", 1, cluster_of(devices, links), 1))])


def known_profile(
    ranks: int,
    batch_size: float,
    *,
    per_sample: float,
    overhead: float = 0.0,
    allreduce: float = 0.0,
    hop: float = 0.0,
    exchange: float = 0.0,
    serve: float = 0.0,
    link: float = 0.0,
    nbytes: int = 0,
    servers: int = 1,
    per_node: bool = False,
) -> Profile:
    """Return a profile of equal ranks without jitter, from the costs of one server.

    ``serve``, and ``link`` both ways, are parts of ``exchange``.
    """
    ones = np.ones(2)
    per_byte = link / max(nbytes, 1) * ones
    model = CostModel(
        devices=dict.fromkeys(range(ranks), 0),
        overhead=overhead * ones[:, None],
        per_sample=per_sample * ones[:, None],
        jitter=np.ones((2, 1, 1)),
        ring=allreduce * ones,
        hop=hop * ones,
        between=0 * ones,
        delay=max(0.0, exchange - serve - 2 * link) * ones,
        own_per_byte=per_byte,
        serve=serve * ones,
        link_per_byte=per_byte,
        hand_ring=allreduce * ones,
        hand_hop=hop * ones,
        nbytes=nbytes,
        servers=servers,
        per_node=per_node,
    )
    return Profile((), model, batch_size)


@dataclass(frozen=True)
class Cell:
    """A cluster, and a way of exchanging in so many groups."""

    devices: str
    links: str
    way: Way
    wire: str
    groups: int

    @property
    def pattern(self) -> ExchangePattern:
        """As the hardware model sees it."""
        return ExchangePattern.of(self.way.method, self.wire, self.way.overlap, NBYTES)

    def predicted(self) -> Prediction:
        """Return the prediction of a profile fitted to steps of one group."""
        return fitted(self.devices, self.links).predict(self.groups, exchanging=self.pattern)

    def rate(self, **faster: Any) -> float:
        """Samples per second in the simulator; on another cluster, if something else of it is told."""
        cluster = replace(cluster_of(self.devices, self.links), **faster)
        way = self.way
        if self.devices == "exponential":  # which takes longer to show its mean
            way = way._replace(pushes=4 * way.pushes)
        return rate_of(simulated(way, self.wire, self.groups, cluster, seed=3))

    def names_rightly(self, bottleneck: str) -> bool:
        """Whether next to nothing helps the simulated run more than what is named."""
        gains = self.gains()
        now = self.rate()
        return gains["link" if bottleneck == "exchange" else bottleneck] - now >= 0.8 * (max(gains.values()) - now)

    def gains(self) -> dict[str, float]:
        """What the simulated rate becomes if each of the things that may hold it up takes half as long."""
        cluster = cluster_of(self.devices, self.links)
        computes = tuple(
            replace(device, seconds_per_sample=device.seconds_per_sample / 2) for device in cluster.devices
        )
        return {
            "compute": self.rate(devices=computes),
            "allreduce": self.rate(group_link=twice(cluster.group_link)),
            "link": self.rate(server=twice(cluster.server)),
            "server": self.rate(update_seconds=cluster.update_seconds / 2),
        }


def twice(link: Link) -> Link:
    """As fast."""
    return Link(2 * link.bandwidth, link.latency / 2)


def cells(devices: Sequence[str] = DEVICES, links: Sequence[str] = tuple(LINKS)) -> list[Cell]:
    """All of them. Formats take turns, for all of everything would take an hour."""
    found = []
    for kind in devices:
        for place, speed in enumerate(links):
            for number, way in enumerate(WAYS):
                wire = ("fp32", "int8", "bf16")[(number + place) % 3]
                found += [Cell(kind, speed, way, wire, groups) for groups in ((2, 4), (4,))[number % 2]]
    return found
