"""All-reduce, elastic averaging or gossip at 8 to 128 workers: which is faster where?

    python examples/studies/how_to_scale.py                # about 7 minutes on two cores
    python examples/studies/how_to_scale.py --quick        # a minute
    python examples/studies/how_to_scale.py --jitter 0.5   # what if steps scatter more?

After Jin, Yuan, Iandola, Keutzer 2016, "How to scale distributed deep learning?", arXiv:1611.04581, who trained
ResNet-18 on ImageNet. Here a small network learns Fashion-MNIST; times are those of a cluster of GPUs, where a step of
16 samples takes 0.2 s and sending all weights 16 ms. All methods step with Nesterov's momentum of 0.9, see the data
equally often, and divide their step size by ten after two thirds of it. Each has the best rate of the same small grid:
for the time the one that gets to the target first, for the final accuracy the most accurate. Gossip is evaluated on the
mean of all workers, elastic averaging on its centre, with a moving rate of 0.8 / workers as in the authors' code.

What to expect: that all-reduce ends with the higher accuracy is reproduced at all sizes, and most clearly at many
workers. That asynchronous training is faster with few workers is reproduced in part only. No worker waits in gossip,
but a step of it brings less, presumably as every worker follows the noise of its own 16 samples; and how much is won by
not waiting depends on how steps scatter. By a fifth, as by default, the two cancel out: from 16 workers on gossip and
all-reduce are about equally fast, and with 8 all-reduce is faster. By a half (``--jitter 0.5``), gossip is far ahead
while the step size is large, up to 128 workers. Elastic averaging at every step is limited by the server, which 128
workers keep busy for two seconds. At every tenth step it is not, up to 64 workers; but many workers are tied so loosely
to the centre that large step sizes drive them apart, and it must do with small ones. Every setting is simulated once,
with one seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from comparison import (
    CutOnce,
    Finding,
    Images,
    Run,
    Stopwatch,
    caption,
    command_line,
    console,
    final,
    load_images,
    network,
    new_figure,
    save_figure,
    show_findings,
    show_table,
    simulate_all,
)

from lightning_omni import palette
from lightning_omni.methods import ElasticAveraging, Gossip, HardSync, Method
from lightning_omni.simulator import Cluster, Jitter, Link
from lightning_omni.trace import Trace

METHODS = ("all-reduce", "elastic", "elastic every 10", "pull-gossip", "push-gossip")
BATCH_SIZE = 16
RATES = (0.01, 0.03, 0.1)
FEW, MANY = 32, 64
"""Up to so many workers the paper finds asynchronous training faster; from so many on, synchronous training better."""

STEP_SECONDS = 0.2
MODEL_SECONDS, LATENCY = 0.016, 50e-6

Key = tuple[str, int, float]
"""Method, workers, learning rate."""


def method_of(name: str, workers: int) -> Method:
    """The method; the elastic moving rate is that of the authors' code."""
    if name == "all-reduce":
        return HardSync()  # in one group of all workers, where gradients are averaged in a ring
    if name.startswith("elastic"):
        return ElasticAveraging(period=10 if name.endswith("10") else 1, moving_rate=0.8 / workers)
    return Gossip(kind="pull" if name == "pull-gossip" else "push")


def cluster_of(name: str, workers: int, jitter: float) -> Cluster:
    """Equal GPUs whose steps scatter, and one network for whatever is sent."""
    nbytes = 4 * sum(parameter.numel() for parameter in network().parameters())
    wire = Link(nbytes / MODEL_SECONDS, LATENCY)
    elastic = name.startswith("elastic")
    return Cluster.even(
        workers,
        STEP_SECONDS / BATCH_SIZE,
        jitter=Jitter("lognormal", cv=jitter),
        # All elastic messages share the server's card; that is where their bytes are counted.
        link=Link(latency=LATENCY) if elastic else wire,
        server=Link(wire.bandwidth) if elastic else Link(),
        group_link=wire,
    )


def run_of(name: str, workers: int, lr: float, epochs: int, samples: int, jitter: float) -> Run:
    """One simulation, evaluated 250 times or at every step."""
    steps = samples * epochs // (workers * BATCH_SIZE)
    every = max(1, steps // 250)  # steps of each worker; an update is one of them all, of one, or one exchange
    if name != "all-reduce":
        every *= workers
    if name.endswith("10"):
        every = max(1, every // 10)
    return Run(
        method_of(name, workers),
        1 if name == "all-reduce" else workers,
        cluster_of(name, workers, jitter),
        partial(CutOnce, lr=lr, cut_at=steps * 2 // 3),
        batch_size=BATCH_SIZE,
        epochs=epochs,
        evaluate_every=every,
    )


# --- What came out ---------------------------------------------------------------------------------------------------


class Outcome:
    """The runs, and for each method and number of workers the one that got to the target first."""

    def __init__(self, traces: Mapping[Key, Trace], target: float, samples: int) -> None:
        self.target, self.samples = target, samples
        self.workers = tuple(dict.fromkeys(key[1] for key in traces))
        self.fastest: dict[tuple[str, int], Trace] = {}
        self.rate: dict[tuple[str, int], float] = {}
        self.accuracy: dict[tuple[str, int], float] = {}
        for name in METHODS:
            for workers in self.workers:
                at_hand = {key: trace for key, trace in traces.items() if key[:2] == (name, workers)}
                key = min(at_hand, key=lambda key: (self._seconds(at_hand[key]), -final(at_hand[key])))
                self.fastest[name, workers], self.rate[name, workers] = traces[key], key[2]
                self.accuracy[name, workers] = max(map(final, at_hand.values()))

    def seconds(self, name: str, workers: int) -> float:
        """Seconds to the target, infinite if it was never reached."""
        return self._seconds(self.fastest[name, workers])

    def step_seconds(self, name: str, workers: int) -> float:
        """Seconds of one step of all workers."""
        trace = self.fastest[name, workers]
        return trace.seconds * workers * BATCH_SIZE / float(trace.evaluated["samples"][-1])

    def speedup(self, name: str) -> float:
        """How much sooner the most workers reach the target than the fewest; 0 if they never do."""
        seconds = self.seconds(name, self.workers[0]), self.seconds(name, self.workers[-1])
        return seconds[0] / seconds[1] if np.isfinite(seconds[0]) else 0.0

    def ranking(self, workers: int) -> list[str]:
        """The methods, the first to reach the target first."""
        return sorted(METHODS, key=lambda name: self.seconds(name, workers))

    def best_asynchronous(self, workers: int) -> float:
        """Best final accuracy without all-reduce."""
        return max(self.accuracy[name, workers] for name in METHODS[1:])

    def lead(self, workers: int) -> float:
        """In how much of the time before any step size is cut an asynchronous method is ahead of all-reduce."""
        rival = min(METHODS[1:], key=lambda name: self.seconds(name, workers))
        ours, theirs = (self.fastest[name, workers].evaluated for name in (rival, METHODS[0]))
        cut = min(self.cut(rival, workers), self.cut(METHODS[0], workers))
        begin = max(ours["time"][0], theirs["time"][0])
        times = np.linspace(min(begin, cut), cut, 200)
        accuracies = (np.interp(times, course["time"], course["steady"]) for course in (ours, theirs))
        return float(np.mean(np.greater(*accuracies)))

    def cut(self, name: str, workers: int) -> float:
        """When the step size is cut."""
        course = self.fastest[name, workers].evaluated
        return float(np.interp(self.samples * 2 / 3, course["samples"], course["time"]))

    def _seconds(self, trace: Trace) -> float:
        seconds = trace.time_to("steady", self.target)
        return seconds if np.isfinite(seconds) else float("inf")


def findings(out: Outcome) -> list[Finding]:
    """The paper's findings beside what came out."""
    few = [workers for workers in out.workers if workers <= FEW]
    many = [workers for workers in out.workers if workers >= MANY]
    most = out.workers[-1]
    speedups = {name: out.speedup(name) for name in METHODS}
    return [
        Finding(
            f"time to {out.target:.0%} accuracy, up to {FEW} workers",
            "asynchronous SGD, elastic averaging and gossip alike, converges faster at fewer nodes (up to about 32)"
            " [Jin et al. 2016, abstract]",
            "\n".join(
                f"{w}: " + ", ".join(f"{name} {_told(out.seconds(name, w))}" for name in out.ranking(w)) for w in few
            ),
            [out.seconds(name, w) < out.seconds("all-reduce", w) for w in few for name in METHODS[1:]],
        ),
        Finding(
            f"speed-up from {out.workers[0]} to {most} workers",
            "synchronous SGD scales better to more nodes (up to about 100) [Jin et al. 2016, abstract]",
            "\n".join(
                f"{name}: {speedup:.1f}" if speedup else f"{name}: never there" for name, speedup in speedups.items()
            )
            + f"\nfirst at {most}: {out.ranking(most)[0]}",
            [
                *(speedups["all-reduce"] > speedup for name, speedup in speedups.items() if name != "all-reduce"),
                out.ranking(most)[0] == "all-reduce",
            ],
        ),
        Finding(
            f"large step size, then small, up to {FEW} workers",
            "asynchronous SGD is ahead while the step size is large; all-reduce converges most consistently"
            " [Jin et al. 2016]",
            "\n".join(
                f"{w}: ahead {out.lead(w):.0%} of the time before the cut; at the end"
                f" {out.best_asynchronous(w):.1%}, all-reduce {out.accuracy['all-reduce', w]:.1%}"
                for w in few
            ),
            [
                *(out.lead(w) > 0.5 for w in few),
                *(out.accuracy["all-reduce", w] >= out.best_asynchronous(w) for w in few),
            ],
        ),
        Finding(
            f"final accuracy, {MANY} workers and more",
            "at about 100 nodes all-reduce reaches the higher accuracy [Jin et al. 2016]",
            "\n".join(
                f"{w}: all-reduce {out.accuracy['all-reduce', w]:.1%}, best other {out.best_asynchronous(w):.1%}"
                for w in many
            ),
            [out.accuracy["all-reduce", w] > out.best_asynchronous(w) for w in many],
        ),
    ]


def styles() -> dict[str, dict[str, Any]]:
    """How each method is drawn, in all panels."""
    elastic, gossip = palette.METHODS["elastic_averaging"], palette.METHODS["gossip"]
    colours = dict(zip(METHODS, (palette.ONE_GROUP, elastic, elastic, gossip, gossip), strict=True))
    return dict(zip(METHODS, palette.line_styles(list(colours.values())), strict=True))


def draw(out: Outcome, found: list[Finding], images: Images, path: Path) -> None:
    """Time to the target, speed-up, and two courses."""
    figure, ((times, speedups), (few, many)) = new_figure(2, 2)
    for name, style in styles().items():
        seconds = np.array([out.seconds(name, workers) for workers in out.workers])
        seconds[np.isinf(seconds)] = np.nan
        times.plot(out.workers, seconds, label=name, **style)
        speedups.plot(out.workers, seconds[0] / seconds, label=name, **style)
        for axes, workers in ((few, out.workers[0]), (many, out.workers[-1])):
            course = out.fastest[name, workers].evaluated
            label = f"{name}, lr {out.rate[name, workers]:g}"
            axes.plot(course["time"], 1 - course["steady"], label=label, **{**style, "marker": ""})
            axes.set(xlabel="virtual time / s", ylabel="test error", yscale="log")
            axes.set(xlim=(0, 1.5 * max(out.fastest[name, workers].seconds for name in ("all-reduce", "pull-gossip"))))
    times.set(xscale="log", yscale="log", xlabel="workers", ylabel=f"seconds to {out.target:.0%} accuracy")
    speedups.set(xscale="log", yscale="log", xlabel="workers", ylabel=f"speed-up over {out.workers[0]} workers")
    for axes, finding in zip((times, speedups, few, many), found, strict=True):
        caption(axes, finding)
        axes.legend(fontsize="x-small")
    for axes, workers in ((few, out.workers[0]), (many, out.workers[-1])):
        axes.set_title(f"{axes.get_title()} (drawn: {workers})", fontsize="small")
    save_figure(figure, f"All-reduce, elastic averaging, gossip ({images.source})", path)


def _told(seconds: float) -> str:
    return f"{seconds:.1f} s" if np.isfinite(seconds) else "never"


def main() -> None:
    """Simulate, show, and draw."""
    parser = command_line(__doc__, "how_to_scale.png")
    parser.add_argument("--jitter", type=float, default=0.2, help="how steps scatter: standard deviation over mean")
    arguments = parser.parse_args()
    stopwatch, images = Stopwatch(), load_images()
    samples = len(images.train[0])
    is_quick = arguments.quick
    sizes = (8, 32, 128) if is_quick else (8, 16, 32, 64, 128)
    rates = RATES[1:] if is_quick else RATES
    epochs, target = (2, 0.75) if is_quick else (6, 0.8)
    keys = [(name, workers, lr) for workers in sizes for name in METHODS for lr in rates]
    keys.sort(key=lambda key: key[0] == "all-reduce")  # longest first, so that both processes are busy to the end
    runs = {key: run_of(*key, epochs, samples, arguments.jitter) for key in keys}
    out = Outcome(simulate_all(runs, images, "how to scale", arguments.processes), target, samples * epochs)
    rows = [
        (
            str(workers),
            name,
            f"{out.step_seconds(name, workers):.2f}",
            _told(out.seconds(name, workers)),
            f"{out.rate[name, workers]:g}",
            f"{out.accuracy[name, workers]:.1%}",
        )
        for workers in out.workers
        for name in METHODS
    ]
    columns = ("workers", "method", "seconds a step", f"time to {target:.0%}", "its learning rate", "final accuracy")
    show_table(f"{images.source}, {epochs} epochs", columns, rows)
    found = findings(out)
    show_findings("How to scale distributed deep learning?", found)
    draw(out, found, images, arguments.out)
    console.print(f"{len(runs)} simulations in {stopwatch}")


if __name__ == "__main__":
    main()
