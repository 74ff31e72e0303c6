"""DDP, this package and its peers on machines that a user describes: the rows that matter, and what to write."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from lightning_omni.checks import counted
from lightning_omni.cli.compare.machines import DescribedMachines
from lightning_omni.methods import method_named, text_of, with_period
from lightning_omni.tuning.model.estimate import Estimate
from lightning_omni.tuning.model.forecast import Scaling, Setting
from lightning_omni.tuning.search.choice import best_by_forecast, best_enumerated
from lightning_omni.tuning.search.evidence import PlannedEvidence
from lightning_omni.tuning.search.space import DEFAULT_METHODS, DEFAULT_WIRES, SearchSpec, Space, group_counts

_AVERAGE = "diloco:outer_lr=1.0,outer_momentum=0"
_PEERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "torch: DDP's bf16 hook": ((), (), ("bf16",)),
    "torch: post-local SGD": (("local_sgd",), ("fp32",), ()),
    "torchft: DiLoCo": ((_AVERAGE, f"{_AVERAGE},fragments=4,delay=1,keep_steps=true"), ("fp32", "int8"), ()),
    "hivemind: local updates": ((f"{_AVERAGE},dynamic_steps=true",), ("fp32", "int8"), ()),
}
"""For each peer, the methods of this package that have its form, their wire formats, and all-reduce formats."""
_LONG = 1e6
"""Batches of a run, in which the time to form groups counts for nothing."""
ASSUMED = (
    "assumed: links, steps and bytes as you gave them, and a server that updates 2 GB/s",
    "the samples that a setting needs are those that other tasks needed in simulation",
    "peers have the form of this package's methods, at the best setting of each; nothing was run",
)


@dataclass(frozen=True)
class ComparedRow:
    """The prediction for one way to train.

    Args:
        name: the way.
        setting: its best setting.
        samples_per_second: samples per second of all devices.
        samples: samples to the target, relative to DDP's.
        time: time to the target, relative to DDP's, with an interval of probability 0.8.
        is_extrapolated: whether no simulation has had as many groups or local steps.
    """

    name: str
    setting: Setting
    samples_per_second: float
    samples: float
    time: Estimate
    is_extrapolated: bool

    @property
    def cells(self) -> dict[str, str]:
        marked = " (extrapolated)" if self.is_extrapolated else ""
        return {
            "": self.name,
            "setting": described(self.setting) + marked,
            "samples/s": f"{self.samples_per_second:.4g}",
            "samples": f"{self.samples:.2f}×",
            "time": f"{self.time.value:.2f}×",
            "80 % interval": f"{self.time.low:.2f} to {self.time.high:.2f}",
        }

    def to_dict(self) -> dict[str, Any]:
        time = {"value": self.time.value, "low": self.time.low, "high": self.time.high}
        plain = self.setting.to_dict()
        numbers = {"samples_per_second": self.samples_per_second, "samples": self.samples, "time": time}
        return {"name": self.name, "setting": plain, **numbers, "is_extrapolated": self.is_extrapolated}


@dataclass(frozen=True)
class MachineComparison:
    """The rows that matter: DDP, the best of this package, the best peer.

    Args:
        title: the machines, in words.
        rows: DDP, this package, the best peer.
        pays: whether this package is faster than DDP by enough for a change.
    """

    title: str
    rows: tuple[ComparedRow, ComparedRow, ComparedRow]
    pays: bool

    @classmethod
    def of(cls, machines: DescribedMachines, momentum: float, is_adaptive: bool) -> MachineComparison:
        """Compare on the machines that a user describes."""
        profile, ranks = machines.profile(), len(machines.speeds)
        start, batch = Setting(1, momentum, 1.0, all_reduce="fp32"), ranks * machines.batch_size

        def evidence(
            methods: tuple[str, ...], wires: tuple[str, ...], formats: tuple[str, ...], rebalance: bool
        ) -> PlannedEvidence:
            groups = tuple(sorted({*group_counts(ranks), machines.sites})) if methods else (1,)
            space = Space(groups, rebalance=rebalance, method=methods, wire=wires, all_reduce=formats)
            return PlannedEvidence(SearchSpec(start, batch, _LONG * batch, space, Scaling(is_adaptive)), profile)

        ours = evidence(DEFAULT_METHODS, DEFAULT_WIRES, ("bf16",), True)
        ddp = ours.spec.start

        def row(known: PlannedEvidence, name: str, setting: Setting) -> ComparedRow:
            speed, theory = known.speed_up(setting, ddp), known.forecast().theory
            time = replace(speed, value=1 / speed.value, low=1 / speed.high, high=1 / speed.low)
            samples = math.exp(theory(setting) - theory(ddp))
            return ComparedRow(
                name, setting, known.throughput(setting), samples, time, not known.theory.covers(setting)
            )

        best = best_enumerated(ours)
        pays = best != ddp
        peers = [
            row(known, name, best_by_forecast(known))
            for name, (methods, wires, formats) in _PEERS.items()
            for known in [evidence(methods, wires, formats, False)]
        ]
        peer = min((each for each in peers if each.setting != ddp), key=lambda each: each.time.value, default=peers[0])
        mine = row(ours, "lightning-omni", best if pays else best_by_forecast(ours))
        slowest, fastest = min(machines.speeds), max(machines.speeds)
        kind = "equal devices" if slowest == fastest else f"devices of speeds {slowest:g} to {fastest:g}"
        where = f" at {machines.sites} sites" if machines.sites > 1 else ""
        title = f"{len(machines.speeds)} {kind}{where}; time to the same target, DDP: 1"
        return cls(title, (row(ours, "DDP", ddp), mine, peer), pays)

    @property
    def best(self) -> int:
        """Return the index of the row to use."""
        return int(self.pays)

    @property
    def has_hook(self) -> bool:
        """Return whether DDP with a hook of torch's is what pays."""
        setting = self.rows[1].setting
        return self.pays and setting.groups == 1 and not setting.rebalance

    @property
    def verdict(self) -> str:
        """Return what to use, and why."""
        _, ours, peer = self.rows
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
        other = f"{peer.name} is predicted to be {1 / peer.time.value:.2f} times faster than DDP"
        return f"use lightning-omni: {gain}; {other}"

    @property
    def snippet(self) -> str:
        """Return what to write."""
        if not self.pays:
            return 'Trainer(strategy="ddp", ...)'
        if self.has_hook:
            return "Trainer(strategy=DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook), ...)"
        start, setting = self.rows[0].setting, self.rows[1].setting
        text = f"Trainer(strategy={strategy_text(setting)}, ...)"
        if setting.groups == 1:
            return text
        factor = setting.lr / start.lr
        return f"{text}  # momentum {setting.momentum:.2g}, {factor:.2g} times DDP's learning rate"

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {"rows": rows, "verdict": self.verdict, "write": self.snippet, "assumed": list(ASSUMED)}


def _gain(time: Estimate) -> str:
    return f"{1 / time.value:.2f} times ({1 / time.high:.2f} to {1 / time.low:.2f})"


def described(setting: Setting) -> str:
    """Return a setting in a few words, without momentum and learning rate."""
    words = [counted(setting.groups, "group")]
    if setting.groups > 1:
        name, _, rest = setting.method.partition(":")
        is_average = setting.method.startswith(_AVERAGE)
        name = "local SGD" if is_average or name == "local_sgd" else name.replace("_", " ")
        words.append(f"{'streamed ' * ('fragments' in rest)}{name}")
        words += [f"every {setting.period} steps"] * (setting.period > 1)
        words += [setting.wire] * (setting.wire not in ("", "fp32"))
    words += ["proportional batches"] * setting.rebalance
    return ", ".join(words + [f"all-reduce {setting.all_reduce}"] * (setting.all_reduce not in ("", "fp32")))


def strategy_text(setting: Setting) -> str:
    """Return the strategy with a setting, as users write it."""
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
    if setting.overlap:
        given.append("overlap=True")
    return f"OmniStrategy({', '.join(given)})"
