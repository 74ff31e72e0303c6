"""How good is a whole tuned run: first batches, choice, forming groups, and a second choice if the first was too slow?

    OMP_NUM_THREADS=1 nice python tests/benchmarks/tuned_runs.py --cache FILE                  # all of it: hours
    OMP_NUM_THREADS=1 python tests/benchmarks/tuned_runs.py --tasks mixture --clusters equal   # a part of it
    OMP_NUM_THREADS=1 python tests/benchmarks/tuned_runs.py --list-alone                       # without scikit-optimize

In the simulator, on tasks and clusters of `tasks.py`, as `OmniTuner` does it in a fit:

- The user's own synchronous run is timed for its first batches, and decided by after as many as in a fit. If batches
  are split by speed then, it goes on so, and is timed once more. Deciding takes no time.
- The run goes on from there with what was chosen, from the weights of then. The state of the optimizer starts anew at
  each such change, and another epoch of the data begins. The user's own run, by which it is judged, does both at the
  same moment: from one order of the data to another its time to the target is twice as long for some tasks. Forming
  groups takes ``--switch`` seconds, where a batch takes a rank of speed 1 ``--step`` seconds; so does it to form one
  group of them again. Times in the table are in such batches.
- After an epoch the speed of groups is compared with what was predicted, by the rules of `tuner.forecast_check`. If one
  group is faster for the samples, it is timed again, and the choice is made with the segment that was trained; the next
  time groups are given up.

Printed is how many times as long the user's own run takes, in one group, to the same held-out loss, and the speed-up
that was predicted at the first decision, with its 80 % interval, beside what was measured: the time that was left then
with the user's own setting over that with the choice, forming groups left out. The choice trains to the target for that
even if it was given up in the run. A run ends after `judged.LONGEST` times the time of the user's own, and counts so.
``--plot FILE`` draws these intervals over the measured speed-ups.

In the simulator the hardware model is right about most clusters, and segments have nothing to say. With ``--hidden``
each push of several groups takes the server so many seconds more, which one group's batches cannot show.

Whether the loss diverges or gets flat is not looked at, and neither is whether the speed changes later.
``--prior-scale 2`` makes what settings cost in samples beyond the user's own twice as much, to see how much depends on
that. With ``--noise-steps 96`` those of asynchronous SGD, beyond the user's own, are multiplied by U of so many steps
of the user's own run over its mean: more of the gradient noise scale than is known when most runs decide. Rows of a
``--cache`` are not measured again, each set of options has its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from judged import LONGEST, Judged
from rich.console import Console
from rich.progress import track
from rich.table import Table
from simulated_measurements import measurements_of
from tasks import CLUSTERS, JUDGING, RANKS, SECONDS, TASKS, Run, Task, at_evaluation, cluster_of, crossing
from torch import Tensor, nn

from lightning_omni.methods import method_named, with_period
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace
from lightning_omni.tuning.callback.online_tuner import DECISION_STEPS
from lightning_omni.tuning.callback.speed import Speed
from lightning_omni.tuning.model.measurements import Measured, TrainedBatches
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import Observation, Search, TrainedSegment
from lightning_omni.tuning.search.choice import best_by_forecast, verdict
from lightning_omni.tuning.search.evidence import mean_error
from lightning_omni.tuning.search.prior import Prior
from lightning_omni.tuning.search.space import compression_named

PLAIN_COST = Prior.log_cost
MEAN_SIGNAL = 0.35
"""Mean of U over tasks to develop on."""
DEVIATIONS = statistics.NormalDist().inv_cdf(0.9)
"""Between the mean and either end of an interval of 80 %."""


@dataclass(frozen=True)
class Options:
    """What a run is tuned with.

    Attributes:
        switch: seconds that forming groups takes, in those of a batch of one rank.
        hidden: seconds likewise that each push of several groups takes the server more than the first batches show.
        prior_scale: see the command line.
        has_segments: whether what was trained corrects later predictions.
        asks: whether scikit-optimize is asked.
        noise_steps: see the command line.
    """

    switch: float
    hidden: float = 0.0
    prior_scale: float = 1.0
    has_segments: bool = True
    asks: bool = True
    noise_steps: int = 0


# --- A run that changes its setting on the way ------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """Where a run has come to.

    Attributes:
        seconds: since it began.
        samples: that it has trained.
        losses: held-out ones of all evaluations.
        weights: state of the model; None for the start.
        changes: how often it has changed its setting.
    """

    seconds: float = 0.0
    samples: float = 0.0
    losses: tuple[float, ...] = ()
    weights: dict[str, Any] | None = None
    changes: int = 0


class Continued(Run):  # type: ignore[misc]
    """A run that goes on from a moment.

    Args:
        task: what is trained.
        setting: with what momentum and rate.
        since: the moment.
    """

    def __init__(self, task: Task, setting: Setting, since: Moment) -> None:
        super().__init__(task, setting.momentum, setting.lr)
        self._since, self._samples, self._losses = since, round(since.samples), list(since.losses)
        self._state: dict[str, Any] = {}
        if since.weights is not None:
            self.model = copy.deepcopy(task.subject.model)
            self.model.load_state_dict(since.weights)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self._state = copy.deepcopy(model.state_dict())
        told: dict[str, float] = super().evaluate(model)
        return told

    def moment(self, trace: Trace) -> Moment:
        """Where it has ended."""
        return Moment(
            self._since.seconds + trace.seconds,
            self._since.samples + float(trace.evaluated["samples"][-1]),
            tuple(self._losses),
            self._state,
            self._since.changes + 1,
        )


@dataclass(frozen=True)
class Stretch:
    """What was trained with one setting.

    Attributes:
        trace: of it.
        end: where the run was then.
        reached: seconds since the run began at which it was at the target; infinite if it was not.
    """

    trace: Trace
    end: Moment
    reached: float


@dataclass(frozen=True)
class Decided:
    """A decision by a run's batches in one group.

    Attributes:
        setting: that was chosen.
        topology: its groups.
        search: that has chosen it.
        at: the moment.
    """

    setting: Setting
    topology: Topology
    search: Search
    at: Moment


@dataclass
class TunedRun:
    """One run of a task on a cluster.

    Args:
        judged: the task on the cluster, and the user's own run.
        options: of the tuner.

    Attributes:
        settings: that it has trained with, the user's own in timed batches left out.
    """

    judged: Judged
    options: Options
    settings: list[Setting] = field(default_factory=list)

    def stretch(
        self,
        setting: Setting,
        since: Moment,
        topology: Topology | None = None,
        most: float = math.inf,
        seconds: float | None = None,
        to_target: bool = False,
    ) -> Stretch:
        """Trains with a setting from a moment on."""
        judged, task = self.judged, self.judged.task
        run, cluster = Continued(task, setting, since), judged.cluster
        if setting.groups > 1:
            cluster = replace(cluster, update_seconds=cluster.update_seconds + self.options.hidden)
        trace = task.simulate(
            run,
            cluster,
            with_period(method_named(setting.method), setting.period),
            topology or Topology.even(RANKS, setting.groups),
            target=("smooth_loss", task.target) if to_target else None,
            most=most,
            seed=judged.seed + 1009 * since.changes,
            compression=replace(compression_named(setting.wire), all_reduce=setting.all_reduce),
            overlap=setting.overlap,
            rebalance="auto" if setting.rebalance else "off",
            seconds=math.inf if seconds is None else seconds,
        )
        at = crossing(trace.evaluated["smooth_loss"], task.target, run.smoothed)
        reached = since.seconds + at_evaluation(trace.evaluated["time"], at)
        return Stretch(trace, run.moment(trace), reached)

    def decide(self, since: Moment, segments: Sequence[TrainedSegment]) -> Decided:
        """Times one group from a moment on, as `tuner.online` does, and chooses."""
        judged, own = self.judged, self.judged.own
        spec = replace(judged.spec, switch=self.options.switch)
        setting, known, moments = own, list[Measured](), DECISION_STEPS
        while True:
            for steps in moments:
                found = self.stretch(setting, since, most=steps)
                ends = tuple(float(spec.batch * (number + 1)) for number in range(steps))
                batches = TrainedBatches(ends, tuple(found.trace.rows["loss"].tolist()))
                search = Search(spec, Observation(batches, measurements_of(found.trace)), known, segments)
                is_early, is_last = steps == DECISION_STEPS[0], steps == moments[-1]
                hurried, may_stay = spec.can_wait(steps), not segments
                if is_last or verdict(search, is_early=is_early, may_stay=may_stay, can_wait=hurried):
                    break
            chosen = search.choice(asks=self.options.asks and not is_early).setting
            if known and chosen in (setting, own):
                chosen = setting  # as it was forecast, or nothing is better
            if known or not (chosen.groups == 1 and chosen.rebalance):
                return Decided(chosen, search.prediction(chosen).topology, search, found.end)
            setting, since, known, moments = chosen, found.end, [search.observation.measured], DECISION_STEPS[1:]

    def formed(self, before: Moment) -> Moment:
        """Other groups were formed."""
        return replace(before, seconds=before.seconds + self.options.switch)

    def go_on(self, decided: Decided) -> tuple[Stretch, Moment]:
        """Trains to the target with what was chosen; and where that has begun."""
        since = self.formed(decided.at) if decided.setting.groups > 1 else decided.at
        self.settings.append(decided.setting)
        seconds = LONGEST * self.judged.ddp.seconds
        return self.stretch(decided.setting, since, decided.topology, seconds=seconds, to_target=True), since

    def train(self, decided: Decided) -> tuple[float, float]:
        """Goes on after the first decision.

        Returns:
            Seconds to the target, and those to the target with what was chosen first.
        """
        ended, since = self.go_on(decided)
        to_first = ended.reached
        segments: list[TrainedSegment] = []
        while (segment := self.refuted(decided, ended.trace)) is not None:
            batches = len(self.judged.task.subject.data) / self.judged.task.batch
            cut = self.stretch(decided.setting, since, decided.topology, most=batches)
            back = self.formed(cut.end)
            if segments:  # they are given up
                one = best_by_forecast(decided.search, groups=1)
                ended, _ = self.go_on(Decided(one, Topology.even(RANKS, 1), decided.search, back))
                break
            segments.append(segment)
            decided = self.decide(back, segments if self.options.has_segments else ())
            ended, since = self.go_on(decided)
        return ended.reached, to_first

    def own_left(self, first: Decided) -> float:
        """Seconds from the first decision to the target with the user's own setting."""
        seconds: float = 2 * LONGEST * self.judged.ddp.seconds
        ended = self.stretch(self.judged.own, first.at, seconds=seconds, to_target=True)
        return min(seconds, ended.reached - first.at.seconds)

    def refuted(self, decided: Decided, trace: Trace) -> TrainedSegment | None:
        """The segment of the first epoch with several groups, if one group is faster for the samples that they need."""
        setting, search = decided.setting, decided.search
        speed = speed_in(trace, float(len(self.judged.task.subject.data)))
        if setting.groups == 1 or speed is None:
            return None
        one, theory = best_by_forecast(search, groups=1), search.theory
        one_at_least = math.log(search.prediction(one).samples_per_second.low)
        if speed.log_most() - theory(setting) >= one_at_least - theory(one):
            return None
        variance = speed.error**2 + mean_error(search.measured) ** 2
        return TrainedSegment(setting, math.log(search.modelled_throughput(setting) / speed.rate), variance, speed.rate)


def speed_in(trace: Trace, epoch: float) -> Speed | None:
    """How fast groups have trained their first samples; None if there were not as many, or too few steps."""
    trained = np.cumsum(trace.rows["samples"])
    if not len(trained) or trained[-1] < epoch:
        return None
    until = float(trace.rows["time"][np.searchsorted(trained, epoch)])
    rates, variances = [], []
    for number, members in enumerate(trace.meta["groups"]):
        steps = trace.steps["seconds"][(trace.steps["group"] == number) & (trace.steps["time"] <= until)]
        if len(steps) < 2:
            return None
        batch = float(trace.work["samples"][np.isin(trace.work["rank"], members)].mean()) * len(members)
        mean = float(steps.mean())
        rates.append(batch / mean)
        variances.append(float(rates[-1] ** 2 * steps.var() / (len(steps) - 1) / mean**2))
    rate = sum(rates)
    return Speed(epoch, epoch / rate, math.sqrt(sum(variances)) / rate)


# --- Rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A task on a cluster.

    Attributes:
        task: its name.
        cluster: its name.
        seed: of the order of the data, and of step times.
        own: seconds of the user's own run, where a batch of one rank takes one.
        tuned: of the tuned run; at most `judged.LONGEST` times as many.
        settings: that it has trained with, one after the other.
        predicted: logarithm of the speed-up of the first of them, after the first decision.
        deviation: of it; 0 if it makes the user's own updates.
        measured: logarithm of what it was.
    """

    task: str
    cluster: str
    seed: int
    own: float
    tuned: float
    settings: list[str]
    predicted: float
    deviation: float
    measured: float

    @property
    def gain(self) -> float:
        """Times as fast as the user's own run."""
        return self.own / self.tuned

    @property
    def error(self) -> float:
        """Logarithm of the predicted speed-up over the measured one."""
        return self.predicted - self.measured

    @property
    def is_changed(self) -> bool:
        """Whether anything else than the user's own setting was chosen."""
        return self.settings != [AS_IT_WAS]

    @property
    def is_inside(self) -> bool:
        """Whether the measured speed-up is in the interval."""
        return abs(self.error) <= DEVIATIONS * self.deviation

    @property
    def columns(self) -> list[str]:
        """For people."""
        low, high = (math.exp(self.predicted + sign * DEVIATIONS * self.deviation) for sign in (-1, 1))
        interval = f" ({low:.2f} to {high:.2f})" if self.deviation else ""
        is_inside = ["", "no", "yes"][self.is_inside + 1 if self.deviation else 0]
        compared = [f"{math.exp(self.predicted):.2f}{interval}", f"{math.exp(self.measured):.2f}", is_inside]
        numbers = [f"{self.own:.0f}", f"{self.tuned:.0f}", f"{self.gain:.2f}"]
        chosen = "; then ".join(self.settings)
        return [self.task, self.cluster, *numbers, *(compared if self.is_changed else [""] * 3), chosen]


AS_IT_WAS = "as it was"
COLUMNS = ("task", "cluster", "own", "tuned", "faster", "predicted", "measured", "inside", "chosen")


def measure(task: str, cluster: str, seed: int, options: Options) -> Row:
    """One row."""
    if options.noise_steps:
        follow_noise(signals(TASKS[task], seed, [options.noise_steps])[0])
    judged = Judged(TASKS[task], cluster_of(cluster, TASKS[task]), seed)
    run, ddp = TunedRun(judged, options), judged.ddp
    first = run.decide(Moment(), ())
    setting, search = first.setting, first.search
    if setting == judged.own:
        return Row(task, cluster, seed, ddp.seconds / SECONDS, ddp.seconds / SECONDS, [AS_IT_WAS], 0.0, 0.0, 0.0)
    seconds, to_first = run.train(first)
    left = run.own_left(first)
    own = ddp.seconds * first.at.samples / ddp.samples + left
    tuned, began = min(seconds, LONGEST * own), first.at.seconds + options.switch * (setting.groups > 1)
    predicted = search.log_time(judged.own) - search.log_time(setting)
    deviation = math.hypot(search.theory.error(setting), search.residual(setting)[1])
    measured = math.log(left / min(to_first - began, LONGEST * left))
    told = [str(each) if each != judged.own else AS_IT_WAS for each in run.settings]
    return Row(task, cluster, seed, own / SECONDS, tuned / SECONDS, told, predicted, deviation, measured)


class Rows:
    """Rows that were measured, in a file of one line each.

    Args:
        path: of the file; None for none.
        options: of all that are asked for.
    """

    def __init__(self, path: Path | None, options: Options) -> None:
        self._path, self._options = path, options
        lines = path.read_text().splitlines() if path is not None and path.is_file() else []
        found = [json.loads(line) for line in lines]
        rows = [Row(**each["row"]) for each in found if Options(**each["options"]) == options]
        self._known = {(row.task, row.cluster, row.seed): row for row in rows}

    def get(self, task: str, cluster: str, seed: int) -> Row:
        """A row of the file, or a new one."""
        key = task, cluster, seed
        if key not in self._known:
            row = self._known[key] = measure(*key, self._options)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"options": asdict(self._options), "row": asdict(row)}) + "\n")
        return self._known[key]


def signals(task: Task, seed: int, numbers: Sequence[int]) -> list[float]:
    """U of the last half of so many steps, with the user's own setting, for several numbers of steps.

    U is the part of the mean gradient's squared length that is signal, (R - r) / (R - 1), where r is the mean over
    ranks of their gradients' squared lengths over that of the mean gradient.
    """
    subject, run = task.subject, Run(task, task.momentum, task.own_lr)
    model, random = run.model, torch.Generator().manual_seed(seed)
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer, order = run.optimizer(model.parameters()), torch.randperm(len(subject.data), generator=random)
    squares = []
    for step in range(max(numbers)):
        rows = []
        for rank in range(RANKS):
            first = (step * RANKS + rank) * task.batch_size
            batch = subject.data[order[torch.arange(first, first + task.batch_size) % len(order)]]
            gradients = torch.autograd.grad(run.loss(model, batch), list(model.parameters()), allow_unused=True)
            rows.append([torch.zeros(1) if each is None else each for each in gradients])
        means = [torch.stack(each).mean(0) for each in zip(*rows, strict=True)]
        squares.append((statistics.mean(map(_square, rows)), _square(means)))
        for weight, gradient in zip(model.parameters(), means, strict=True):
            weight.grad = gradient.expand_as(weight)
        optimizer.step()
    model.load_state_dict(begun)
    return [_signal(squares[steps // 2 : steps]) for steps in numbers]


def _square(gradients: Sequence[Tensor]) -> float:
    return math.fsum(float(each.square().sum()) for each in gradients)


def _signal(squares: Sequence[tuple[float, float]]) -> float:
    single, mean = (math.fsum(column) for column in zip(*squares, strict=True))
    return float(min(max((RANKS - single / mean) / (RANKS - 1), 0.0), 1.0))


def scale_prior(factor: float) -> None:
    """From now on settings cost so many times as many samples beyond the user's own as the prior says."""

    def scaled(self: Prior, *arguments: Any, **options: Any) -> tuple[float, float]:
        cost, deviation = PLAIN_COST(self, *arguments, **options)
        return math.log(max(1 + factor * math.expm1(cost), 1e-3)), deviation

    Prior.log_cost = scaled  # type: ignore[method-assign]


def follow_noise(signal: float) -> None:
    """From now on asynchronous SGD needs more samples than the user's own setting in proportion to U."""

    def scaled(self: Prior, method: str, *arguments: Any, **options: Any) -> tuple[float, float]:
        cost, deviation = PLAIN_COST(self, method, *arguments, **options)
        factor = signal / MEAN_SIGNAL if method == "async_sgd" else 1.0
        return math.log1p(factor * math.expm1(cost)), deviation

    Prior.log_cost = scaled  # type: ignore[method-assign]


def summary(rows: Sequence[Row]) -> str:
    """Over all rows."""
    gains, changed = [row.gain for row in rows], [row for row in rows if row.is_changed]
    uncertain = [row for row in changed if row.deviation]
    said = f"{statistics.geometric_mean(gains):.2f} times as fast as the user's own run in the geometric mean of"
    said += f" {len(rows)}, {min(gains):.2f} at worst"
    if changed:
        held = sum(row.is_inside for row in uncertain)
        median = statistics.median(abs(row.error) for row in changed)
        said += f"; {held} of {len(uncertain)} intervals of 80 % have held; predicted speed-ups are off by"
        said += f" {median:.2f} in the median, as a logarithm"
    return said


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws predicted over measured speed-ups of the runs that changed something, with the intervals of 80 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    changed = [row for row in rows if row.is_changed]
    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    for is_inside, colour in ((True, "tab:blue"), (False, "tab:red")):
        shown = [row for row in changed if (row.is_inside or not row.deviation) == is_inside]
        centres = np.exp([row.predicted for row in shown])
        widths = np.expm1([[-DEVIATIONS * row.deviation, DEVIATIONS * row.deviation] for row in shown])
        measured = np.exp([row.measured for row in shown])
        if len(shown):
            axes.errorbar(measured, centres, np.abs(widths.T * centres), fmt="o", color=colour, markersize=4)
    ends = axes.get_xlim()
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured speed-up", ylabel="predicted speed-up, 80 %")
    figure.savefig(path)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(JUDGING), metavar="TASK")
    add("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS), metavar="CLUSTER")
    add("--seeds", type=int, default=1, help="how many orders of the data")
    add("--switch", type=float, default=1.0, help="seconds that forming groups takes")
    add("--hidden", type=float, default=0.0, help="seconds that each push takes the server more than expected")
    add("--step", type=float, default=0.25, help="seconds that a batch takes a rank of speed 1")
    add("--cache", type=Path, help="a file of rows that are known, which new ones are added to")
    add("--without-segments", action="store_true", help="what was trained corrects no later prediction")
    add("--list-alone", action="store_true", help="the best of the list is chosen")
    add("--noise-steps", type=int, default=0, help="costs of asynchronous SGD follow the noise scale of so many steps")
    add("--plot", type=Path, help="a picture of predicted over measured speed-ups")
    add("--prior-scale", type=float, default=1.0, help="by what the prior's costs in samples are multiplied")
    given = parser.parse_args()
    torch.set_num_threads(1)
    unit = SECONDS / given.step
    options = Options(
        given.switch * unit,
        given.hidden * unit,
        given.prior_scale,
        not given.without_segments,
        not given.list_alone,
        given.noise_steps,
    )
    if given.prior_scale != 1:
        scale_prior(given.prior_scale)
    rows, found, table = Rows(given.cache, options), list[Row](), Table(*COLUMNS)
    cells = list(product(given.tasks, given.clusters, range(given.seeds)))
    for cell in track(cells, "Runs", console=Console(stderr=True), transient=True):
        found.append(rows.get(*cell))
        print(*found[-1].columns, sep="; ", flush=True)
        table.add_row(*found[-1].columns)
    Console(width=220).print(table)
    print(summary(found))
    if given.plot is not None:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
