"""Rudra's architectures: learners at one server, with aggregators in between, and with exchanges that overlap.

python examples/rudra_adv.py            # on two cores about a minute; writes rudra_adv.png
python examples/rudra_adv.py --quick    # ten seconds, up to 256 learners

Three ways to connect λ learners, 8 to 1,024 of them, to a parameter server, all with 1-softsync (one update for every λ
gradients, no barrier) and a minibatch of 4:

- base: each learner exchanges with the server itself;
- tree: √λ aggregators add up what √λ learners each push, and hand the server's answers on (Rudra-adv);
- overlapped: the same, and exchanges travel while the next gradient is computed (as Rudra-adv* does, which also has
  the weights travel down the tree by themselves; here they are the answer to a push).

The simulated machine computes a gradient in 14 ms and has network cards of 1 Gbit/s, on which the 104 kB of a push take
0.8 ms. Asked is what each architecture is limited by, and from how many learners on: in a round, in which every
learner makes one gradient, the server's card takes in λ pushes without aggregators and √λ sums with them, and an
aggregator's √λ pushes. Beside what comes out stands what the busiest of these parts allows. What is far below that
waits: a learner for its answer, an aggregator for the answer to its last sum, for it has one under way at a time.

What differs from the paper: one level of aggregators, of which the number is free; the paper's are on the learners'
nodes. Times are those of the simulated machine. Training goes on for a few rounds only: what n-softsync does to the
error is shown by rudra.py.

References:
    Gupta, Zhang, Wang 2016, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning: A Systematic Study"
    (Rudra), arXiv:1509.04210.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from comparison import (
    Finding,
    Images,
    Run,
    Stopwatch,
    caption,
    command_line,
    load_images,
    network,
    new_figure,
    save_figure,
    sgd,
    show_findings,
    show_table,
    simulate_all,
)

from lightning_omni.methods import SoftSync
from lightning_omni.palette import CHOSEN, EXPECTED, MEASURED, PROPORTIONAL
from lightning_omni.simulator import Cluster, Jitter, Link
from lightning_omni.trace import Trace

MINIBATCH = 4
ROUNDS = 8
"""Gradients of each learner."""
UPDATE_SECONDS = 2e-4
CARD = Link(bandwidth=1.25e8, latency=5e-5)
ARCHITECTURES = ("base", "tree", "overlapped")
CLOSE = 0.75
"""From this part of a limit on, it counts as reached."""
COMPARED = 64
"""Learners with which the architectures are compared."""


@dataclass(frozen=True)
class Setting:
    """An architecture with λ learners."""

    architecture: str
    learners: int

    @property
    def aggregators(self) -> int:
        return 0 if self.architecture == "base" else math.isqrt(self.learners)

    @property
    def overlaps(self) -> bool:
        return self.architecture == "overlapped"

    @property
    def cluster(self) -> Cluster:
        """Equal learners whose times vary by 5 %."""
        return Cluster.even(
            self.learners,
            1e-3,
            overhead=1e-2,
            jitter=Jitter("normal", 0.05),
            link=CARD,
            server=CARD,
            update_seconds=UPDATE_SECONDS,
            aggregators=self.aggregators,
        )

    @property
    def run(self) -> Run:
        return Run(
            SoftSync(n=1, modulation="average"),
            self.learners,
            self.cluster,
            partial(sgd, lr=0.01, momentum=0.9),
            batch_size=MINIBATCH,
            updates=ROUNDS,
            evaluate_every=None,
            overlap=self.overlaps,
        )

    @property
    def parts(self) -> dict[str, float]:
        """Seconds that each part of the machine works in a round in which every learner makes one gradient."""
        push = 4 * sum(parameter.numel() for parameter in network().parameters()) / CARD.bandwidth
        at_server = self.aggregators or self.learners
        between = self.learners / self.aggregators * push if self.aggregators else 0.0
        computed = self.cluster.devices[0].seconds(MINIBATCH)
        return {
            "computing": computed,
            "server's card": at_server * push,
            "server's updates": at_server * UPDATE_SECONDS,
            "aggregator's card": between,
        }

    @property
    def busiest(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def limit(self) -> float:
        """Images a second that the busiest part allows."""
        return self.learners * MINIBATCH / self.parts[self.busiest]


class Results:
    """All simulations, and what is asked of them."""

    def __init__(self, learners: tuple[int, ...], images: Images, processes: int) -> None:
        self.learners = learners
        settings = [Setting(each, number) for number in reversed(learners) for each in ARCHITECTURES]  # longest first
        self.traces = simulate_all({setting: setting.run for setting in settings}, images, "simulations", processes)

    def trace(self, architecture: str, learners: int) -> Trace:
        return self.traces[Setting(architecture, learners)]

    def images(self, architecture: str, learners: int) -> float:
        """Images a second."""
        trace = self.trace(architecture, learners)
        return float(trace.rows["samples"].sum() / trace.seconds)

    def computing(self, architecture: str, learners: int) -> float:
        """The part of a learner's time in which it computes."""
        return (
            self.images(architecture, learners)
            / Setting("base", learners).parts["computing"] ** -1
            / (learners * MINIBATCH)
        )


# --- Findings --------------------------------------------------------------------------------------------------------


def base_saturates(results: Results) -> Finding:
    most = results.learners[-1]
    setting = Setting("base", most)
    reached = results.images("base", most) / setting.limit
    fewest = results.computing("base", results.learners[0])
    return Finding(
        "images a second, base",
        "All learners at one server: its link is soon what limits them (Gupta et al. build the tree for that).",
        f"{results.images('base', most):,.0f} with {most} learners, {reached:.0%} of what the {setting.busiest} allows;"
        f" learners compute {results.computing('base', most):.1%} of the time, {fewest:.0%} with {results.learners[0]}",
        [reached >= CLOSE, setting.busiest == "server's card", fewest > 2 * results.computing("base", most)],
    )


def tree_moves_the_limit(results: Results) -> Finding:
    most = results.learners[-1]
    gain = results.images("tree", most) / results.images("base", most)
    small = results.images("tree", results.learners[0]) / results.images("base", results.learners[0])
    return Finding(
        "images a second, tree",
        "Adding gradients up on the way relieves the server; for few learners the way is longer, and gains nothing.",
        f"{gain:.1f} times those of base with {most} learners, {small:.2f} times with {results.learners[0]}",
        [gain >= math.sqrt(most) / 4, small < 1.1],
    )


def overlap_hides(results: Results) -> Finding:
    here = {each: results.computing(each, COMPARED) for each in ARCHITECTURES}
    return Finding(
        "part of the time in which a learner computes",
        "The tree hides more of the exchanges than one server does, and overlap nearly all of what is left (Gupta et"
        " al., with some 50 learners).",
        f"with {COMPARED} learners " + ", ".join(f"{each}: {part:.0%}" for each, part in here.items()),
        [here["base"] < here["tree"] < here["overlapped"], here["overlapped"] >= 0.9],
    )


# --- Tables and pictures ---------------------------------------------------------------------------------------------


def show(results: Results, source: str) -> None:
    rows = []
    for learners in results.learners:
        for architecture in ARCHITECTURES:
            setting, trace = Setting(architecture, learners), results.trace(architecture, learners)
            rows.append(
                (
                    architecture,
                    f"{learners}",
                    f"{setting.aggregators or '-'}",
                    f"{results.images(architecture, learners):,.0f}",
                    f"{setting.limit:,.0f}",
                    setting.busiest,
                    f"{results.computing(architecture, learners):.1%}",
                    f"{trace.mean_staleness:.2f}",
                )
            )
    columns = ("", "λ", "aggregators", "images/s", "at most", "busiest part", "computing", "staleness")
    show_table(f"{ROUNDS} rounds of {source}; virtual seconds", columns, rows)


def draw(results: Results, findings: list[Finding]) -> Any:
    figure, ((speed, parts, limits),) = new_figure(1, 3)
    colours = dict(zip(ARCHITECTURES, (CHOSEN, PROPORTIONAL, MEASURED), strict=True))
    for each, colour in colours.items():
        images = [results.images(each, number) for number in results.learners]
        speed.loglog(results.learners, images, "o-", color=colour, label=each)
        allowed = [Setting(each, number).limit for number in results.learners]
        parts.semilogx(
            results.learners, [a / b for a, b in zip(images, allowed, strict=True)], "o-", color=colour, label=each
        )
        computing = [results.computing(each, number) for number in results.learners]
        limits.semilogx(results.learners, computing, "o-", color=colour, label=each)
    ideal = [number * MINIBATCH / Setting("base", number).parts["computing"] for number in results.learners]
    speed.loglog(results.learners, ideal, ":", color=EXPECTED, label="computing alone")
    speed.set(xlabel="learners λ", ylabel="images / s")
    parts.set(xlabel="learners λ", ylabel="part of what the busiest part allows", ylim=(0, 1.05))
    limits.set(xlabel="learners λ", ylabel="part of the time computing", ylim=(0, 1.05))
    for axes, finding in zip((speed, parts, limits), findings, strict=True):
        axes.legend(fontsize="small")
        caption(axes, finding)
    return figure


def main() -> None:
    """Simulates, prints, draws."""
    arguments = command_line(__doc__, "rudra_adv.png").parse_args()
    watch, images = Stopwatch(), load_images()
    learners = (8, 16, 64, 256) if arguments.quick else (8, 16, 32, 64, 128, 256, 512, 1024)
    results = Results(learners, images, arguments.processes)
    findings = [tree_moves_the_limit(results), base_saturates(results), overlap_hides(results)]
    show(results, images.source)
    show_findings(f"Rudra's architectures on {images.source} ({watch})", findings)
    save_figure(draw(results, findings), "One server, a tree, and overlap", arguments.out)


if __name__ == "__main__":
    main()
