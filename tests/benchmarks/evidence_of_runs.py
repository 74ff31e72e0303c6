"""What does a run show of the samples that a setting needs: a segment trained with it, or the gradient noise scale?

    OMP_NUM_THREADS=1 python tests/benchmarks/evidence_of_runs.py --cache FILE --minutes 8   # measures what is missing
    OMP_NUM_THREADS=1 python tests/benchmarks/evidence_of_runs.py --cache FILE               # and prints the tables
    OMP_NUM_THREADS=1 python tests/benchmarks/evidence_of_runs.py --tasks words --cache FILE # a part of it
    OMP_NUM_THREADS=1 python tests/benchmarks/evidence_of_runs.py --choices                # by the noise scale

Tasks are those to develop on, simulated with the exponential step times of the prior. A run trains `SWITCH` updates
with the user's own setting in one group, and from there to the target with the user's own setting, and with each of
`WAYS` in the momentum and rate that the prior suggests. *Relative samples* are those from the switch to the target,
over those of the user's own setting from the same weights.

**Segments.** After so many updates the groups are at some loss, which the user's own setting reaches with other
samples: their ratio is what a segment shows, if all of what one group would have done is known. A run would have to
extrapolate that from its first batches; so no estimate in a run is better. Losses are held out (``since the switch``,
and ``after`` the first `TRANSIENT` updates), or of the training batches. Printed is, by length, Spearman's correlation
with the whole run's, and three errors: of the segment's ratio as it is, of the prior with the mean of other data sets'
residuals, and of the prior with a line through other data sets' residuals and segments.

**Noise scale.** By U (`tuned_runs.signals`) asynchronous SGD would need 1 + (c - 1) U / mean U times the samples, for c
of the prior, or 1 + k U, for k fitted to other data sets. Printed are Spearman's correlation of U with the run's ratio,
the errors of both, and the mean logarithm of the time that choices of groups by them lose, if groups are 1.1 to 3 times
as fast as one, all equally likely in logarithms.

All errors are roots of mean squares of logarithms.

**Choices.** ``--choices`` prints, for tasks and clusters, after how many steps the first choice of a tuned run is made,
and which one it would be if asynchronous SGD needed samples by U, of as many steps and of `max(STEPS)`, which is more
than is known then. Where they differ, all are trained to the target, from the same weights: the gain is the time left
with the choice over that with the other.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judged import Judged
from scipy.stats import spearmanr
from tasks import CLUSTERS, DEVELOPING, PRIOR_CLUSTERS, Run, Task, at_evaluation, cluster_of, crossing
from tuned_runs import PLAIN_COST, Decided, Moment, Options, Stretch, TunedRun, follow_noise, signals

from lightning_omni.tuning.search import Search
from lightning_omni.tuning.search.prior import Prior, PriorTheory
from lightning_omni.tuning.search.space import DEFAULT_METHODS

TIMES, SCATTER = "exponential", 1.0
SWITCH = 24
"""Updates of the user's own setting before the switch."""
TRANSIENT = 16
"""Updates after it that one kind of segment leaves out."""
LENGTHS = (16, 32, 64, 128)
"""Updates of all ranks in a segment."""
LONGEST = 2.0
"""Times the task's updates after which a run is given up; it counts as `CENSORED` longer."""
CENSORED = 0.2
STEPS = (12, 24, 48, 96)
"""Steps of the user's own run after which the noise scale is read."""
WAYS = (("async_sgd", 8, 1), ("elastic_averaging", 4, 1), (DEFAULT_METHODS[-1], 8, 8))
"""Method, groups and local steps; the last averages in fragments while groups train."""
KINDS = ("since the switch", "after the transient", "training loss")


@dataclass(frozen=True)
class Row:
    """A setting on a task.

    Attributes:
        task: its name.
        seed: of the order of the data.
        way: method, groups and local steps.
        prior: logarithm of its relative samples by the prior.
        measured: the same of the run.
        segments: the same by kind of segment, for each of `LENGTHS`.
        signal: U after each of `STEPS` steps.
    """

    task: str
    seed: int
    way: str
    prior: float
    measured: float
    segments: dict[str, list[float]]
    signal: list[float]

    @property
    def data(self) -> str:
        """Name of the data set, which two tasks share."""
        return self.task.removesuffix("_adamw").removesuffix("_sgd")


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(name: str, seed: int) -> Iterator[Row]:
    """Rows of a task."""
    task = DEVELOPING[name]
    judged = Judged(task, PRIOR_CLUSTERS[TIMES], seed)
    run, signal = TunedRun(judged, Options(switch=0.0)), signals(task, seed, STEPS)
    at = run.stretch(judged.own, Moment(), most=SWITCH).end
    own = run.stretch(judged.own, at, most=LONGEST * task.updates, to_target=True)
    theory = PriorTheory(judged.own, judged.scaling, prior=Prior.load(), scatter=SCATTER)
    for method, groups, period in WAYS:
        setting = theory.suggested(replace(judged.own, method=method, groups=groups, period=period))
        found = run.stretch(setting, at, most=LONGEST * task.updates, to_target=True)
        ratio = math.log(samples_to_target(task, found) / samples_to_target(task, own))
        segments = {kind: [observed(task, own, found, kind, each) for each in LENGTHS] for kind in KINDS}
        yield Row(name, seed, f"{method.partition(':')[0]} {groups} {period}", theory(setting), ratio, segments, signal)


def samples_to_target(task: Task, stretch: Stretch) -> float:
    """From the switch on; of a run that is not there, a little more than the longest."""
    evaluated = stretch.trace.evaluated
    at = crossing(evaluated["smooth_loss"], task.target, Run(task, 0.0, 0.0).smoothed)
    longest = LONGEST * task.updates * task.batch * math.exp(CENSORED)
    return float(min(max(at_evaluation(evaluated["samples"], at), task.batch), longest))


def observed(task: Task, own: Stretch, found: Stretch, kind: str, updates: int) -> float:
    """Logarithm of the relative samples that a segment shows, at most a factor of 8; not a number beyond the target."""
    alone, groups = (curve(each, kind == "training loss") for each in (own, found))
    begin = 0 if kind == "since the switch" else TRANSIENT
    ends = [place * task.batch for place in (begin, begin + updates)]
    losses, samples = falling(alone)
    if ends[-1] > groups[0][-1] or level(groups, ends[-1]) < losses[0]:
        return math.nan
    first, last = (float(np.interp(level(groups, end), losses, samples)) for end in ends)
    trained = max(last - (first if begin else 0.0), 0.0)
    return float(np.clip(math.log(updates * task.batch / max(trained, 1e-9)), -math.log(8), math.log(8)))


def curve(stretch: Stretch, is_training: bool) -> tuple[Any, Any]:
    """Samples since the switch, and losses."""
    trace = stretch.trace
    if is_training:
        return np.cumsum(trace.rows["samples"]), trace.rows["loss"]
    return trace.evaluated["samples"], trace.evaluated["held_out"]


def level(found: tuple[Any, Any], samples: float) -> float:
    """The mean loss of the last quarter of so many samples; at least of three records."""
    where, losses = found
    end = max(int(np.searchsorted(where, samples, "right")), 1)
    begin = min(int(np.searchsorted(where, 0.75 * samples, "right")), end - 3)
    return float(np.mean(losses[max(begin, 0) : end]))


def falling(found: tuple[Any, Any]) -> tuple[Any, Any]:
    """Losses from the lowest on, and the samples at which they were there: for `numpy.interp`."""
    where, _ = found
    levels = [level(found, each) for each in where]
    lowest = np.minimum.accumulate(np.nan_to_num(levels, nan=math.inf))
    return lowest[::-1], np.asarray(where)[::-1]


# --- Tables -----------------------------------------------------------------------------------------------------------


def rms(values: Any) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


Fit = Callable[["Sequence[Row]"], "Callable[[Row], float]"]


def predictions(rows: Sequence[Row], fit: Fit) -> list[tuple[float, float]]:
    """Measured and predicted logarithms, by what is fitted to the other data sets."""
    found = []
    for data in sorted({row.data for row in rows}):
        predict = fit([row for row in rows if row.data != data])
        found += [(row.measured, predict(row)) for row in rows if row.data == data]
    return found


def unseen(rows: Sequence[Row], fit: Fit) -> float:
    """Error of a prediction on data sets that it is not fitted to."""
    return rms([measured - predicted for measured, predicted in predictions(rows, fit)])


def lost(rows: Sequence[Row], fit: Fit) -> float:
    """Mean logarithm of the time that choices by it lose, for groups 1.1 to 3 times as fast as one."""
    found = product(predictions(rows, fit), np.linspace(math.log(1.1), math.log(3.0), 50))
    losses = [measured - gain if predicted < gain else gain - measured for (measured, predicted), gain in found]
    return float(np.mean(np.maximum(losses, 0.0)))


def shifted(rows: Sequence[Row]) -> Callable[[Row], float]:
    """The prior, with the mean residual of some rows."""
    mean = statistics.mean(row.measured - row.prior for row in rows)
    return lambda row: row.prior + mean


def with_segment(kind: str, place: int) -> Callable[[Sequence[Row]], Callable[[Row], float]]:
    """Prior and segment, by a line through the residuals of some rows."""

    def fit(rows: Sequence[Row]) -> Callable[[Row], float]:
        shown = [row.segments[kind][place] - row.prior for row in rows]
        slope, at_zero = np.polyfit(shown, [row.measured - row.prior for row in rows], 1)
        return lambda row: row.prior + at_zero + float(slope) * (row.segments[kind][place] - row.prior)

    return fit


def by_signal(place: int) -> Callable[[Sequence[Row]], Callable[[Row], float]]:
    """Relative samples by U and the prior."""

    def fit(rows: Sequence[Row]) -> Callable[[Row], float]:
        mean = statistics.mean(row.signal[place] for row in rows)
        return lambda row: math.log1p(math.expm1(row.prior) * row.signal[place] / mean)

    return fit


def of_mean(place: int) -> Callable[[Sequence[Row]], Callable[[Row], float]]:
    """Relative samples by U and the mean of other data sets, without the prior."""

    def fit(rows: Sequence[Row]) -> Callable[[Row], float]:
        slopes = np.linspace(0.0, 5.0, 101)
        errors = [rms([row.measured - math.log1p(slope * row.signal[place]) for row in rows]) for slope in slopes]
        slope = float(slopes[int(np.argmin(errors))])
        return lambda row: math.log1p(slope * row.signal[place])

    return fit


def show(rows: Sequence[Row]) -> None:
    """Prints both tables."""
    print("| segment | updates | runs | Spearman | error of the segment | of the prior | of both |")
    print("|---|---|---|---|---|---|---|")
    for kind, (place, updates) in product(KINDS, enumerate(LENGTHS)):
        known = [row for row in rows if math.isfinite(row.segments[kind][place])]
        shown, true = [row.segments[kind][place] for row in known], [row.measured for row in known]
        errors = [unseen(known, each) for each in (shifted, with_segment(kind, place))]
        columns = [f"{each:.2f}" for each in (spearmanr(shown, true)[0], rms(np.subtract(shown, true)), *errors)]
        print("|", " | ".join([kind, str(updates), str(len(known)), *columns]), "|")

    print("\n| steps | runs | Spearman | error: prior | prior and U | 1 + k U | lost: prior | prior and U | 1 + k U |")
    print("|---|---|---|---|---|---|---|---|---|")
    stale = [row for row in rows if row.way.startswith("async_sgd")]
    for place, steps in enumerate(STEPS):
        signal, true = [row.signal[place] for row in stale], [row.measured for row in stale]
        fits = shifted, by_signal(place), of_mean(place)
        columns = [f"{each:.2f}" for each in (spearmanr(signal, true)[0], *(unseen(stale, each) for each in fits))]
        columns += [f"{lost(stale, each):.3f}" for each in fits]
        print("|", " | ".join([str(steps), str(len(stale)), *columns]), "|")


# --- Choices ----------------------------------------------------------------------------------------------------------


def choose(name: str, cluster: str, seed: int) -> tuple[int, list[str], list[float]]:
    """A first choice, and those by U of its own steps and of `max(STEPS)`.

    Returns:
        Steps before it, the settings, and the logarithms of what the settings by U gain.
    """
    task = DEVELOPING[name]
    run = TunedRun(Judged(task, cluster_of(cluster, task), seed), Options(switch=4.0))
    plain = run.decide(Moment(), ())
    steps = round(plain.at.samples / task.batch)
    choices = {str(plain.setting): plain}
    settings, reached = [str(plain.setting)], dict[str, float]()
    for signal in signals(task, seed, (steps, max(STEPS))):
        follow_noise(signal)
        search = Search(plain.search.spec, plain.search.observation, plain.search.known)
        setting = search.choice().setting
        choices.setdefault(str(setting), Decided(setting, search.prediction(setting).topology, search, plain.at))
        settings.append(str(setting))
    Prior.log_cost = PLAIN_COST  # type: ignore[method-assign]
    if len(choices) == 1:
        return steps, settings, [0.0, 0.0]
    for text, each in choices.items():
        reached[text] = min(run.go_on(each)[0].reached - plain.at.seconds, 6.0 * run.judged.ddp.seconds)
    return steps, settings, [math.log(reached[settings[0]] / reached[each]) for each in settings[1:]]


def show_choices(names: Sequence[str], clusters: Sequence[str]) -> None:
    """Prints the choices, those that would be others, and a summary."""
    found = []
    for name, cluster in product(names, clusters):
        found.append(choose(name, cluster, 0))
        steps, (plain, *others), gains = found[-1]
        shown = [
            f"{each}: {math.exp(gain):.2f}" if each != plain else "" for each, gain in zip(others, gains, strict=True)
        ]
        print(name, cluster, steps, plain, *shown, sep="; ", flush=True)
    print(f"{sum(steps >= 24 for steps, _, _ in found)} of {len(found)} choices are made after 24 steps or more")
    for place, what in enumerate(("as many steps", f"{max(STEPS)} steps")):
        differ = sum(settings[0] != settings[1 + place] for _, settings, _ in found)
        mean = math.exp(statistics.mean(gains[place] for _, _, gains in found))
        print(f"by U of {what} {differ} would be others, and runs {mean:.3f} times as fast in the geometric mean")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", action="store_true", help="print choices by the noise scale beside those without")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS), metavar="CLUSTER")
    parser.add_argument("--cache", type=Path, help="file of rows: what is in it is not measured again")
    parser.add_argument("--tasks", nargs="+", choices=DEVELOPING, default=list(DEVELOPING))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0, help="no task is begun later")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.choices:
        show_choices(given.tasks, given.clusters)
        return
    if given.cache is None:
        parser.error("--cache: pass the file of rows, or --choices")
    lines = given.cache.read_text().splitlines() if given.cache.is_file() else []
    rows, end = [Row(**json.loads(line)) for line in lines], time.monotonic() + 60 * given.minutes
    for seed, name in product(range(given.seeds), given.tasks):
        if (name, seed) not in {(row.task, row.seed) for row in rows} and time.monotonic() < end:
            rows += (found := list(measure(name, seed)))
            with given.cache.open("a") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
    show([row for row in rows if row.task in given.tasks])


if __name__ == "__main__":
    main()
