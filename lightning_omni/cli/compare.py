"""The comparison of DDP, this package and its peers on machines that a user describes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_omni.checks import check_number, counted
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import method_named, text_of, with_period
from lightning_omni.tuning.model.forecast import Estimate
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.model.profile import Profile
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.report.summary import number
from lightning_omni.tuning.search.choice import best_by_forecast, best_enumerated
from lightning_omni.tuning.search.constants import FASTER
from lightning_omni.tuning.search.evidence import PlannedEvidence
from lightning_omni.tuning.search.space import AVERAGED, DEFAULT_METHODS, DEFAULT_WIRES, SearchSpec, Space, group_counts

__all__ = ["ASSUMED", "ComparedRow", "DescribedMachines", "MachineComparison", "described", "strategy_text"]

# --- Machines, and the measurements that a run in one group would make on them ----------------------------------------

MOST_DEVICES = 128
"""The most devices of a comparison, whose time grows with the square of their number."""
DESCRIBED_STEPS = 64
"""Steps in the measurements that stand for a description of machines."""
SERVE_PER_BYTE = 5e-10
"""Assumed seconds of a described server's update for each byte of the weights."""
BACKWARD, BUCKET = 0.67, 25e6
"""Assumed part of a described step that is the backward pass, in which DDP hides its all-reduce but for the last
bucket; and the bytes of that bucket."""


@dataclass(frozen=True)
class DescribedMachines:
    """A description of machines and of a training step.

    The fields are the options of `commands.compare`, in seconds and bytes; ``nbytes`` are its ``model_size``,
    bandwidths its links.

    Args:
        serve_per_byte: as `SERVE_PER_BYTE`.
        backward: as `BACKWARD`.

    Raises:
        ConfigurationError: a speed is not above 0 and finite, or a million times another; or the ranks are fewer than
            two, more than `MOST_DEVICES`, or no multiple of ``sites``.
    """

    speeds: tuple[float, ...]
    step: float
    batch_size: int
    nbytes: int
    bandwidth: float
    latency: float = 0.0
    sites: int = 1
    site_bandwidth: float | None = None
    site_latency: float = 0.0
    scatter: float = 0.05
    serve_per_byte: float = SERVE_PER_BYTE
    backward: float = BACKWARD

    def __post_init__(self) -> None:
        for speed in self.speeds:
            check_number("speeds", speed, "relative speeds, above 0", above=0, below=math.inf)
        if not 2 <= len(self.speeds) <= MOST_DEVICES or max(self.speeds) > 1e6 * min(self.speeds):
            raise ConfigurationError(
                f"speeds= has {counted(len(self.speeds), 'device')} of speeds {min(self.speeds)} to {max(self.speeds)}:"
                f" pass those of 2 to {MOST_DEVICES}, with ratios below a million;"
                " `lightning-omni simulate` takes thousands of devices"
            )
        if len(self.speeds) % self.sites:
            raise ConfigurationError(
                f"sites={self.sites}: {len(self.speeds)} devices cannot be divided evenly; pass a divisor"
            )

    @property
    def between(self) -> float:
        """Return the bandwidth of the links that DDP's all-reduce waits for."""
        return self.site_bandwidth if self.sites > 1 and self.site_bandwidth else self.bandwidth

    @property
    def delay(self) -> float:
        return self.site_latency if self.sites > 1 else self.latency

    @property
    def sent(self) -> float:
        """Return the bytes that DDP's all-reduce sends through each link in a step."""
        return 2 * (len(self.speeds) - 1) / len(self.speeds) * self.nbytes

    @property
    def exposed(self) -> float:
        """Return the seconds of a step in which DDP waits for its all-reduce."""
        all_reduce = self.sent / self.between + 2 * (len(self.speeds) - 1) * self.delay
        return max(all_reduce * min(1.0, BUCKET / self.nbytes), all_reduce - self.backward * self.step)

    @property
    def measured(self) -> Measured:
        """Return the measurements of a run in one group, from a fixed seed."""
        ranks = len(self.speeds)
        random = np.random.default_rng(0)
        jitter = random.lognormal(0.0, math.sqrt(math.log1p(self.scatter**2)), (ranks, DESCRIBED_STEPS))
        own = self.step / np.array(self.speeds)[:, None] * jitter / jitter.mean(axis=1, keepdims=True)
        several: dict[str, Any] = {}
        if self.sites > 1:
            nodes = tuple(np.repeat(np.arange(self.sites), ranks // self.sites).tolist())
            several = {"nodes": nodes, "server_node": 0, "node_per_byte": 1 / self.bandwidth}
            several["node_round_trip"] = 2 * self.latency
        return Measured(
            ranks=tuple(range(ranks)),
            samples=((float(self.batch_size),) * DESCRIBED_STEPS,) * ranks,
            own=tuple(map(tuple, own.tolist())),
            steps=tuple((own.max(axis=0) + self.exposed).tolist()),
            serve=self.serve_per_byte * self.nbytes,
            nbytes=self.nbytes,
            round_trip=2 * self.delay,
            reduce_per_byte=self.sent / self.nbytes / self.between,
            hands_on=True,
            shapes=((-(-self.nbytes // 4),),),
            **several,
        )

    def profile(self) -> Profile:
        return Profile.fit([self.measured])


# --- Comparison -------------------------------------------------------------------------------------------------------

_OURS = Space((1,), method=DEFAULT_METHODS, compression=DEFAULT_WIRES, all_reduce=("bf16",))
_STREAMED = f"{AVERAGED},fragments=4,delay=1,keep_steps=true"
_PEERS = {
    "torch: DDP's bf16 hook": replace(_OURS, rebalance=False, method=(), compression=()),
    "torch: post-local SGD": Space((1,), rebalance=False, method=("local_sgd",), compression=("fp32",)),
    "torchft: DiLoCo": Space(
        (1,),
        rebalance=False,
        method=(AVERAGED, _STREAMED),
        compression=("fp32", "int8/int8"),
        all_reduce=("bf16",),
    ),
    "hivemind: local updates": Space(
        (1,), rebalance=False, method=(f"{AVERAGED},dynamic_steps=true",), compression=("fp32", "int8/int8")
    ),
}
"""The methods of this package that have the form of each peer's."""
_LONG = 1e6
"""Batches of a run, in which the time to form groups counts for nothing."""
_ASSUMPTIONS: tuple[dict[str, Any], ...] = (
    {"serve_per_byte": SERVE_PER_BYTE / 2},
    {"serve_per_byte": SERVE_PER_BYTE * 2},
    {"backward": 0.5},
    {"backward": 0.8},
)
"""Other values of what a description lacks. The intervals cover the predictions with each."""
ASSUMED = (
    "assumed: links, steps and bytes as you gave them; a server that updates 1 to 4 GB/s; DDP hides its all-reduce"
    " behind 0.5 to 0.8 of a step",
    "the samples that a setting needs are those that other tasks needed in simulation",
    "peers have the form of this package's methods without a server, at the best setting of each; nothing was run",
    "not compared: torch's PowerSGD hook for DDP, which depends on the shapes of the weights; it suits slow links",
)


class _KnownEvidence(PlannedEvidence):
    """Evidence with only settings that simulations covered."""

    @cached_property
    @override
    def candidates(self) -> tuple[Setting, ...]:
        return tuple(each for each in super().candidates if self.theory.covers(each))


@dataclass(frozen=True)
class ComparedRow:
    """The prediction for one way to train.

    ``samples`` and ``time`` to the target are relative to DDP's; ``time`` has an interval of probability 0.8 or more.
    """

    name: str
    setting: Setting
    samples_per_second: float
    samples: float
    time: Estimate
    per_node: bool = False

    @property
    def cells(self) -> dict[str, str]:
        return {
            "": self.name,
            "setting": described(self.setting) + ", a server on each node" * self.per_node,
            "samples/s": f"{self.samples_per_second:.4g}",
            "samples": f"{self.samples:.2f}×",
            "time": f"{self.time.value:.2f}×",
            "80 % interval": f"{self.time.low:.2f} to {self.time.high:.2f}",
        }

    def to_dict(self) -> dict[str, Any]:
        time = {"value": self.time.value, "low": self.time.low, "high": self.time.high}
        plain = self.setting.to_dict()
        numbers = {"samples_per_second": self.samples_per_second, "samples": self.samples, "time": time}
        return {"name": self.name, "setting": plain, "per_node": self.per_node, **numbers}


@dataclass(frozen=True)
class _Predictions:
    """The predictions for a package, as described and with each of `_ASSUMPTIONS`."""

    described: PlannedEvidence
    assumed: tuple[PlannedEvidence, ...]

    @classmethod
    def of(
        cls,
        machines: DescribedMachines,
        profiles: Iterable[Profile],
        ways: Space,
        momentum: float,
        is_adaptive: bool,
    ) -> _Predictions:
        ranks = len(machines.speeds)
        start, batch = Setting(1, momentum, 1.0, all_reduce="fp32"), ranks * machines.batch_size
        groups = tuple(sorted({*group_counts(ranks), machines.sites})) if ways.method else (1,)
        spec = SearchSpec(start, batch, _LONG * batch, replace(ways, groups=groups), Scaling(is_adaptive))
        described, *assumed = (_KnownEvidence(spec, each) for each in profiles)
        return cls(described, tuple(assumed))

    @property
    def ddp(self) -> Setting:
        return self.described.spec.start

    def row(self, name: str, setting: Setting, per_node: int = False) -> ComparedRow:
        """Return the prediction for a setting; its interval covers those with other assumptions."""
        known, theory = self.described, self.described.theory
        speeds = [each.speed_up(setting, self.ddp) for each in (known, *self.assumed)]
        time = replace(
            speeds[0],
            value=1 / speeds[0].value,
            low=1 / max(each.high for each in speeds),
            high=1 / min(each.low for each in speeds),
        )
        samples = math.exp(theory(setting) - theory(self.ddp))
        return ComparedRow(name, setting, known.throughput(setting), samples, time, bool(per_node))


@dataclass(frozen=True)
class MachineComparison:
    """DDP, the best of this package and the best peer; ``pays`` if the gain is worth a change."""

    title: str
    rows: tuple[ComparedRow, ComparedRow, ComparedRow]
    pays: bool
    machines: DescribedMachines

    @classmethod
    def of(cls, machines: DescribedMachines, momentum: float, is_adaptive: bool) -> MachineComparison:
        profiles = [each.profile() for each in (machines, *(replace(machines, **other) for other in _ASSUMPTIONS))]
        # An all-reduce sends as many bytes over each link as exchanges with a server at each node.
        nodes = machines.sites if machines.sites > 1 else len(machines.speeds)
        direct = [each.scaled(servers=nodes, per_node=True) for each in profiles]
        ways = [profiles] if machines.sites > 1 else [profiles, direct]  # per-node servers are not per site
        ours = [_Predictions.of(machines, each, _OURS, momentum, is_adaptive) for each in ways]
        ddp = ours[0].ddp
        found = [best_enumerated(each.described) for each in ours]
        pays = any(best != ddp for best in found)
        peers = [
            known.row(name, best_by_forecast(known.described))
            for name, ways in _PEERS.items()
            for known in [_Predictions.of(machines, direct, ways, momentum, is_adaptive)]
        ]
        peer = min((each for each in peers if each.setting != ddp), key=lambda each: each.time.value, default=peers[0])
        mine = min(
            (
                each.row("lightning-omni", best if pays else best_by_forecast(each.described), per_node)
                for per_node, (each, best) in enumerate(zip(ours, found, strict=True))
            ),
            key=lambda row: row.time.value * (FASTER if row.per_node else 1),
        )
        slowest, fastest = min(machines.speeds), max(machines.speeds)
        kind = "equal devices" if slowest == fastest else f"devices of speeds {slowest:g} to {fastest:g}"
        where = f" at {machines.sites} sites" if machines.sites > 1 else ""
        title = f"{len(machines.speeds)} {kind}{where}; time to the same target, DDP: 1"
        return cls(title, (ours[0].row("DDP", ddp), mine, peer), pays, machines)

    @property
    def best(self) -> int:
        return int(self.pays)

    @property
    def has_hook(self) -> bool:
        setting = self.rows[1].setting
        return self.pays and setting.groups == 1 and not setting.rebalance

    @property
    def verdict(self) -> str:
        ours = self.rows[1]
        if not self.pays and ours.setting == self.rows[0].setting:
            return "use DDP: no setting of lightning-omni is predicted to be faster"
        if not self.pays:
            return (
                f"use DDP: lightning-omni at its best is predicted to take {ours.time.value:.2f} times as long, no gain"
                " or too small a gain for its uncertainty"
            )
        gain = f"{_gain(ours.time)} faster than DDP to the same target"
        if self.has_hook:
            return f"use DDP with torch's bf16 hook: {gain}; groups gain no more"
        peer = self.rows[2]
        package, _, way = peer.name.partition(": ")
        beside = f"{package} with {way}: {_gain(peer.time)}"
        is_faster = peer.time.value < ours.time.value
        if peer.time.low <= ours.time.value <= peer.time.high or ours.time.low <= peer.time.value <= ours.time.high:
            names = f"lightning-omni or {package}" if is_faster else "lightning-omni"
            return f"use {names}: {gain}; {beside}, which is no certain difference"
        if is_faster:
            return f"consider {package} first, with {way}: {_gain(peer.time)} faster than DDP; lightning-omni: {gain}"
        return f"use lightning-omni: {gain}; {beside}"

    @property
    def ddp_step(self) -> str:
        known = self.machines
        computed, exposed = known.step / min(known.speeds), known.exposed
        alone = known.batch_size * sum(known.speeds) / known.step
        return (
            f"in a step DDP computes {number(computed)} s on the slowest device and waits {number(exposed)} s for its"
            f" links, which carry {number(known.sent / 1e6)} MB each at {number(known.between / 1e6)} MB/s: time a few"
            f" of its steps before you rely on the prediction; devices that never wait make {number(alone)} samples/s"
        )

    @property
    def snippet(self) -> str:
        if not self.pays:
            return 'Trainer(strategy="ddp", ...)'
        if self.has_hook:
            return "Trainer(strategy=DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook), ...)"
        start, setting = self.rows[0].setting, self.rows[1].setting
        text = f"Trainer(strategy={strategy_text(setting, self.rows[1].per_node)}, ...)"
        if setting.groups == 1:
            return text
        factor = setting.lr / start.lr
        return f"{text}  # momentum {setting.momentum:.2g}, {factor:.2g} times DDP's learning rate"

    @property
    def tuned_snippet(self) -> str:
        """Return what to write to leave the choice to the run; empty if `verdict` is DDP, or its bf16 hook."""
        if not self.pays or self.has_hook:
            return ""
        return "Trainer(strategy=OmniStrategy(), callbacks=[OmniTuner()], ...)  # or this: it measures and chooses"

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        told = {
            "verdict": self.verdict,
            "write": self.snippet,
            "or_write": self.tuned_snippet,
            "ddp_step": self.ddp_step,
            "assumed": list(ASSUMED),
        }
        return {"rows": rows, **told}


def _gain(time: Estimate) -> str:
    return f"{1 / time.value:.2f} times ({1 / time.high:.2f} to {1 / time.low:.2f})"


def described(setting: Setting) -> str:
    """Return a setting in a few words, without momentum and learning rate."""
    words = [counted(setting.groups, "group")]
    if setting.groups > 1:
        name, _, rest = setting.method.partition(":")
        is_average = setting.method.startswith(AVERAGED)
        name = "local SGD" if is_average or name == "local_sgd" else name.replace("_", " ")
        words.append(f"{'streamed ' * ('fragments' in rest)}{name}")
        words += [f"every {setting.period} steps"] * (setting.period > 1)
        words += [setting.wire] * (setting.wire not in ("", "fp32"))
    words += ["proportional batches"] * setting.rebalance
    return ", ".join(words + [f"all-reduce {setting.all_reduce}"] * (setting.all_reduce not in ("", "fp32")))


def strategy_text(setting: Setting, per_node: bool = False) -> str:
    given = [f"groups={setting.groups}"]
    if setting.groups > 1 and setting.method:
        given.append(f'method="{text_of(with_period(method_named(setting.method), setting.period))}"')
    if setting.rebalance:
        given.append('rebalance="auto"')
    push, _, pull = (setting.wire if setting.groups > 1 else "").partition("/")
    formats = {"push": push, "pull": pull, "all_reduce": setting.all_reduce}
    formats = {name: format_ for name, format_ in formats.items() if format_ not in ("", "fp32")}
    if [*formats] == ["push"]:
        given.append(f'compression="{push}"')
    elif formats:
        inside = ", ".join(f'{name}="{format_}"' for name, format_ in formats.items())
        given.append(f"compression=Compression({inside})")
    if per_node:
        given.append('server="per-node"')
    if setting.overlap:
        given.append("overlap=True")
    return f"OmniStrategy({', '.join(given)})"
