"""Compare ways to train two sites with a slow link between them: DDP, torch's remedies, and methods of this package.

    python examples/studies/slow_network.py              # two sites of two hosts, 100 megabits a second between them
    python examples/studies/slow_network.py --mbit 20    # a slower link
    python examples/studies/slow_network.py --hosts 4    # no sites: four hosts, each behind a link of that speed
    python examples/studies/slow_network.py --slow 4     # and the last host takes four times as long for each step
    python examples/studies/slow_network.py --tune       # tries every setting of every way first

Linux only. Hosts are network namespaces, whose links tc limits. Their devices are emulated, too: each step takes 100
ms, of which the real computation is a part. A LeNet of 431,080 weights learns Fashion-MNIST, 64 images on each host in
every step, until it classifies 4,000 test images with the target accuracy. Rank 0 copies its weights every other step
and evaluates them after training, so no time includes an evaluation. The first row is the same training with fast
links.

The table has the seconds to the target, the seconds of a step, and the megabytes that left the busiest link. A row
counts only if the real computation of all hosts takes less than half of the capacity of this machine's cores; the table
marks rows that do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from comparison import Stopwatch, console, new_figure, save_figure, show_table
from emulated_network import Hosts, Network, explained, with_own_network
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WORKER = Path(__file__).with_name("slow_network_worker.py")
SECONDS_PER_STEP = 0.1
TARGET = 0.86
EVALUATED_ON = 4_000
START = 180.0
"""Seconds that the processes of a run are given to start, and to evaluate, beside their training."""


@dataclass(frozen=True)
class Way:
    """A way of training, with its settings.

    Args:
        name: in the table.
        told: to the worker: which way, learning rate, momentum and the rest.
        grid: what is tried of it by ``--tune``: other values of what is told.
    """

    name: str
    told: dict[str, Any]
    grid: tuple[dict[str, Any], ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.told["way"] in ("omni", "one_group")

    def variants(self) -> Iterator[Way]:
        """This way with each of the settings that are tried."""
        yield self
        for change in self.grid:
            yield replace(self, told={**self.told, **change}, grid=())

    @property
    def settings(self) -> str:
        """In words."""
        shown = {key: value for key, value in self.told.items() if key not in ("way", "options")}
        shown |= self.told.get("options", {})
        return ", ".join(f"{key} {value}" for key, value in shown.items())


@dataclass(frozen=True)
class Scene:
    """Where ways are compared."""

    network: Network
    slowness: tuple[float, ...]
    seconds_per_step: float = SECONDS_PER_STEP
    steps: int = 500
    limit: float = 120.0
    target: float = TARGET
    seed: int = 0

    @property
    def name(self) -> str:
        shape = "+".join(map(str, self.network.sites)) + " hosts"
        links = [("each", self.network.host_mbit), ("between sites", self.network.site_mbit)]
        said = [f"{mbit:g} Mbit/s {where}" for where, mbit in links if mbit is not None] or ["fast links"]
        slow = [f"one {max(self.slowness):g} times slower"] if max(self.slowness) > 1 else []
        return ", ".join([shape, *said, *slow])


@dataclass
class Outcome:
    """What came of a way."""

    way: Way
    scene: Scene
    step: float = float("nan")
    work: float = 0.0
    megabytes: float = 0.0
    curve: list[tuple[float, float, int]] = field(default_factory=list)
    failed: str = ""

    @property
    def seconds(self) -> float:
        """To the target; infinite if it was not reached."""
        return next((time for time, accuracy, _ in self.curve if accuracy >= self.scene.target), float("inf"))

    @property
    def steps(self) -> float:
        """Of the first host to the target; infinite if it was not reached."""
        return next((steps for _, accuracy, steps in self.curve if accuracy >= self.scene.target), float("inf"))

    @property
    def sentence(self) -> str:
        """For people who wait for the table."""
        if self.failed:
            return f"{self.way.name} failed:\n{self.failed[-2000:]}"
        reached = f"{self.seconds:.1f} s, {self.steps:g} steps" if self.curve else "no copy was taken"
        if self.curve and self.seconds == float("inf"):
            reached = f"not reached, {self.curve[-1][1]:.1%} after {self.curve[-1][0]:.0f} s"
        return f"{self.way.name} ({self.scene.name}): {reached}, {self.step * 1e3:.0f} ms a step"

    @property
    def counts(self) -> bool:
        """Whether this machine was fast enough to emulate the hosts."""
        return self.work < 0.5 * self.scene.seconds_per_step * (os.cpu_count() or 1)


RATES = ({"lr": 0.03}, {"lr": 0.08})
AVERAGED = 11
"""Steps before PostLocalSGD's averages begin: an odd number, so that copies of every other step are of averages."""


def ways() -> list[Way]:
    """What is compared, with settings to begin with; ``--tune`` tries others of each."""
    plain = {"lr": 0.05, "momentum": 0.9}
    lossy, shared = {"push": "int8", "pull": "bf16"}, {"server": {"count": "per-node"}}
    averaged = "outer_lr=1.0,outer_momentum=0"  # an outer step to the mean
    streamed = f"fragments=2,delay=1,keep_steps=true,{averaged}"
    local = tuple({"period": period, **rate} for period in (4, 16) for rate in ({}, *RATES))
    return [
        Way("DDP", {"way": "ddp", **plain}, RATES),
        Way("DDP, fp16 hook", {"way": "ddp", **plain, "hook": "fp16"}, RATES),
        Way("DDP, PowerSGD", {"way": "ddp", **plain, "hook": "powersgd", "rank": 8, "warmup": 10},
            (*RATES, {"rank": 2}, {"rank": 4})),
        Way("PostLocalSGD", {"way": "post_local_sgd", **plain, "period": 8, "warmup": AVERAGED}, (*RATES, *local)),
        Way("one group, powersgd:8", {"way": "one_group", **plain,
                                      "options": {"compression": {"all_reduce": "powersgd:8"}}}, RATES),
        Way("local SGD", {"way": "omni", **plain, "method": "local_sgd:period=8,warmup_steps=10",
                          "options": shared}, RATES),
        Way("hardsync, overlapped", {"way": "omni", "lr": 0.1, "momentum": 0.6, "method": "hardsync",
                                     "options": {"compression": lossy, "overlap": True, **shared}}, RATES),
        Way("async SGD, overlapped", {"way": "omni", "lr": 0.05, "momentum": 0.0, "method": "async_sgd",
                                      "options": {"compression": lossy, "overlap": True, **shared}}, RATES),
        Way("DiLoCo", {"way": "omni", **plain, "method": f"diloco:period=4,{averaged}",
                       "options": {"compression": lossy, **shared}}, RATES),
        Way("streaming DiLoCo", {"way": "omni", **plain, "options": {"compression": lossy, **shared},
                                 "method": f"diloco:period=4,{streamed}"},
            (*RATES, {"method": f"diloco:period=8,{streamed}"}, {"options": {"compression": lossy}})),
        Way("decoupled DiLoCo", {"way": "omni", **plain, "options": {"compression": lossy, **shared},
                                 "method": f"decoupled_diloco:period=4,fragments=2,{averaged}"},
            (*RATES, {"method": f"decoupled_diloco:period=8,fragments=4,{averaged}"})),
        Way("elastic averaging", {"way": "omni", **plain, "method": "elastic_averaging:period=4",
                                  "options": {"compression": {"push": "int8", "pull": "int8"}, **shared}}, RATES),
    ]  # fmt: skip


def save_images(path: Path) -> str:
    """Writes what the workers train and evaluate on, which need no Lightning then. Returns where it comes from."""
    from fashion_data import FashionMNIST

    module = FashionMNIST()
    module.prepare_data()
    module.setup("fit")
    module.setup("test")
    test = tuple(tensor[:EVALUATED_ON].clone() for tensor in module.test_set.tensors)
    torch.save({"train": module.train_set.tensors, "test": test}, path)
    return module.source


def run(way: Way, scene: Scene, data: Path) -> Outcome:
    """Trains once on emulated hosts."""
    told = {
        **way.told,
        "data": str(data),
        "seconds_per_step": scene.seconds_per_step,
        "slowness": scene.slowness,
        "steps": scene.steps,
        "limit": scene.limit,
        "target": scene.target,
        "seed": scene.seed,
    }
    outcome = Outcome(way, scene)
    with tempfile.TemporaryDirectory() as folder, Hosts(scene.network) as hosts:
        files = [Path(folder, f"{host}.json") for host in range(scene.network.size)]
        processes = [
            hosts.start(
                host,
                [sys.executable, str(WORKER), json.dumps(told), str(file)],
                host_environment(hosts, host),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host, file in enumerate(files)
        ]
        try:
            most = scene.limit * max(scene.slowness) + START
            said = [process.communicate(timeout=most)[0] for process in processes]
        except subprocess.TimeoutExpired:
            outcome.failed = "took too long"
            return outcome
        if any(process.returncode for process in processes):
            outcome.failed = next(text for process, text in zip(processes, said, strict=True) if process.returncode)
            return outcome
        results = [json.loads(file.read_text()) for file in files]
        outcome.megabytes = _busiest(hosts) / 1e6
    outcome.step, outcome.curve = results[0]["step"], [tuple(pair) for pair in results[0]["curve"]]
    outcome.work = sum(result["work"] for result in results)
    return outcome


def host_environment(hosts: Hosts, host: int) -> dict[str, str]:
    """What tells a process that it is that host's rank."""
    return {
        "RANK": str(host),
        "WORLD_SIZE": str(hosts.network.size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(host),
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
    }


def _busiest(hosts: Hosts) -> int:
    """Bytes over the link and direction that carried most of those that are limited."""
    network = hosts.network
    if network.site_mbit is not None:
        seen = [hosts.site_traffic(site) for site in range(len(network.sites))]
    else:
        seen = [hosts.traffic(host) for host in range(network.size)]
    return max(max(traffic.sent, traffic.received) for traffic in seen)


def compare(scenes: Sequence[tuple[Way, Scene]], data: Path) -> list[Outcome]:
    """Runs all of them, one after the other, and says what came of each; after Ctrl-C, those that are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: list[Outcome] = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("training", total=len(scenes))
        try:
            for way, scene in scenes:
                progress.update(bar, description=f"{way.name} ({scene.name})")
                outcomes.append(run(way, scene, data))
                console.print(outcomes[-1].sentence, markup=False, highlight=False)
                progress.advance(bar)
        except KeyboardInterrupt:
            if not outcomes:
                console.print("Interrupted.")
                sys.exit(130)
            console.print(f"interrupted: {len(outcomes)} of {len(scenes)} are done")
    return outcomes


def tuned(candidates: Iterable[Way], scene: Scene, data: Path) -> list[Way]:
    """Each way with the setting of its grid that reaches the target first."""
    candidates = list(candidates)
    outcomes = compare([(variant, scene) for way in candidates for variant in way.variants()], data)
    show(outcomes, f"Every setting: {scene.name}")
    if len(outcomes) < sum(1 + len(way.grid) for way in candidates):
        raise SystemExit(1)  # interrupted
    return [
        min((each for each in outcomes if each.way.name == way.name), key=lambda each: each.seconds).way
        for way in candidates
    ]


def show(outcomes: Sequence[Outcome], title: str) -> None:
    """Prints the table."""
    reference = outcomes[0].seconds
    rows = []
    for each in outcomes:
        seconds = f"{each.seconds:.1f} s" if each.seconds < float("inf") else "not reached"
        rows.append((
            each.way.name,
            each.scene.name,
            each.way.settings,
            seconds,
            f"{each.seconds / reference:.2f}",
            f"{each.steps:g}",
            f"{each.step * 1e3:.0f} ms",
            f"{each.megabytes:.0f}",
            "" if each.counts else "busy",
        ))  # fmt: skip
    names = ("way", "where", "settings", "to the target", "over the first", "steps", "a step", "MB", "")
    show_table(title, names, rows)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Accuracy over time, a line for each way."""
    figure, axes = new_figure(1, 1)
    axis = axes[0][0]
    for each in outcomes:
        if each.curve:
            times, accuracies, _ = zip(*each.curve, strict=True)
            style = "-" if each.way.is_ours else "--"
            axis.plot(times, accuracies, style, marker=".", label=f"{each.way.name}, {each.seconds:.0f} s")
    axis.axhline(outcomes[0].scene.target, color="black", linewidth=0.5)
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("test accuracy")
    axis.set_ylim(bottom=0.6)
    axis.legend(fontsize="small")
    save_figure(figure, outcomes[-1].scene.name, path)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=100, help="of the slow links, in each direction")
    parser.add_argument("--hosts", type=int, help="so many hosts, each behind a slow link, instead of two sites")
    parser.add_argument("--slow", type=float, default=1, help="how much longer the last host takes for a step")
    parser.add_argument("--step", type=float, default=SECONDS_PER_STEP, help="seconds of a device's step")
    parser.add_argument("--steps", type=int, default=500, help="most steps of the fastest host")
    parser.add_argument("--limit", type=float, default=120, help="most seconds of a training here")
    parser.add_argument("--target", type=float, default=TARGET, help="test accuracy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="just the ways whose names contain one of these")
    parser.add_argument("--tune", action="store_true", help="try every setting of every way first")
    parser.add_argument("--quick", action="store_true", help="a minute: two ways, few steps")
    parser.add_argument("--out", type=Path, default=Path("slow_network.png"))
    return parser.parse_args()


def main() -> None:
    """Compares, and shows what came of it."""
    arguments, watch = parse_arguments(), Stopwatch()
    with explained(), tempfile.TemporaryDirectory() as folder:
        with_own_network()
        source = save_images(data := Path(folder, "images.pt"))
        if arguments.hosts:
            network = Network((arguments.hosts,), host_mbit=arguments.mbit)
        else:
            network = Network((2, 2), site_mbit=arguments.mbit)
        slowness = (1.0,) * (network.size - 1) + (arguments.slow,)
        steps = 60 if arguments.quick else arguments.steps
        target = 0.7 if arguments.quick else arguments.target
        slow = Scene(network, slowness, arguments.step, steps, arguments.limit, target, arguments.seed)
        fast = replace(slow, network=Network(network.sites))
        chosen = ways()
        if arguments.quick:
            chosen = [way for way in chosen if way.name in ("DDP", "DiLoCo")]
        if arguments.only:
            chosen = [way for way in chosen if any(part in way.name for part in arguments.only)]
        if arguments.tune:
            chosen = tuned(chosen, slow, data)
        reference = next((way for way in chosen if way.name == "DDP"), ways()[0])
        outcomes = compare([(reference, fast), *((way, slow) for way in chosen)], data)
    show(outcomes, f"{source} to {target:.0%}, device steps of {arguments.step * 1e3:.0f} ms ({watch})")
    draw(outcomes, arguments.out)


if __name__ == "__main__":
    main()
