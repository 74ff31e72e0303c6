"""`tune_device`: a greedy search for the settings that make training faster on a device.

Each candidate is timed alternately with the best known setting, on copies. Changes to the statistics of training
(precision, batch size, workers) are only proposed unless they are allowed.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_omni.checks import check_number, counted
from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.device import workers
from lightning_omni.tuning.device.agreement import FEWEST_STEPS, ROUNDING, STEPS, TOLERANCE, Agreement
from lightning_omni.tuning.device.allocator import can_keep_memory
from lightning_omni.tuning.device.report import DeviceReport, Finding, Verdict
from lightning_omni.tuning.device.setting import FUSABLE, DeviceSetting
from lightning_omni.tuning.device.timing import BLOCK_SECONDS, FEWEST, MARGIN, Comparison, compare
from lightning_omni.tuning.device.trial import Loss, TrainingSetup, Trial, untouched

ALLOWABLE = ("precision", "batch_size", "workers")
"""Properties that change the statistics of training, and are only proposed unless allowed."""

PROPOSED = ("precision", "batch_size")
"""Properties among these that are measured by default."""

Progress = Callable[[float, str], None]
"""Function that receives the completed fraction, 0 to 1, and a text."""

_SAME_LOSS = 0.01
"""Largest relative change of the first loss by a candidate that keeps the statistics: far more than rounding causes."""

_COMPILE_SECONDS = 15.0
"""Least remaining budget for a compilation, which cannot be interrupted."""

_SHARE = 0.2
"""Fraction of the remaining budget after which a candidate is decided with the fewest pairs."""

_WORKER_SECONDS = 2.0
_WORKERS_NEED = 20.0
"""Least remaining budget to start processes three times and to measure."""

_NEARLY_BEST = 0.95
"""Fraction of the best throughput that the knee, the smallest such batch, must reach."""


def tune_device(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer | Callable[[Any], Optimizer],
    batches: Sequence[Any],
    *,
    allow: Iterable[str] = (),
    propose: Iterable[str] = PROPOSED,
    budget: float = 60.0,
    tolerance: float = TOLERANCE,
    cores: int | None = None,
    skip: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceReport:
    """Measure how this device trains this model fastest, and apply nothing.

    ``report.setting.apply(model, optimizer)`` applies the result. The search runs on copies: weights, buffers,
    optimizer, gradients, RNG state, threads and modes are the same afterwards. It needs device memory for two copies
    beside the model itself.

    Args:
        model: model, in the mode for training.
        loss: function that returns the mean loss of model and batch.
        optimizer: optimizer over the model's parameters, or a function that creates one from parameters.
        batches: batches on the model's device, all of one size; used cyclically.
        allow: changes to the statistics of training that ``report.setting`` may contain: ``"precision"``,
            ``"batch_size"``, ``"workers"``.
        propose: which of these are measured, and at least proposed. Allowed ones are always measured.
        budget: seconds for the search. A running step or compilation is completed.
        tolerance: largest distance between loss curves of two precisions, as a fraction of the losses.
        cores: cores that this process may use; None for all that the system allows.
        skip: steps to leave out, with the reason for the table: ``{"compile": "no"}``.
        progress: function that receives the completed fraction and a text.
        clock: function that returns seconds.

    Raises:
        ConfigurationError: an argument is wrong, or the model cannot be trained with the defaults.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> report = tune_device(
        ...     model,
        ...     lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))],
        ...     propose=(), budget=2, skip={"compile": "this is an example"},
        ... )
        >>> {finding.step: finding.reason for finding in report.findings}["memory format"]
        'there are no convolutions'
    """
    allow, propose = tuple(allow), tuple(propose)
    for name in (*allow, *propose):
        if name not in ALLOWABLE:
            raise ConfigurationError(f"{name!r} in allow or propose: pass some of {', '.join(map(repr, ALLOWABLE))}")
    check_number("budget", budget, "seconds above 0", above=0)
    check_number("tolerance", tolerance, "a fraction above 0, as in 0.02", above=0)
    setup = TrainingSetup(
        model, loss, optimizer, copy.deepcopy(list(batches)), clock
    )  # because a loss may write into its batch
    search = _DeviceSearch(setup, allow, propose, budget, tolerance, cores or usable_cores(), skip or {}, progress)
    with untouched(setup):
        return search.run()


def usable_cores() -> int:
    """Return the number of cores that the system lets this process use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def must_repeat() -> bool:
    """Return whether torch must repeat results bit for bit, as with ``Trainer(deterministic=True)``."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


Candidate = tuple[str, dict[str, Any]]
"""Description of a candidate, and the fields of the setting that it changes."""


class _Rejected(Exception):
    """The reason why a candidate is rejected."""


class _Skipped(Exception):
    """The reason why a step is skipped."""


class _DeviceSearch:
    """One run of `tune_device`."""

    def __init__(
        self,
        setup: TrainingSetup,
        allow: tuple[str, ...],
        propose: tuple[str, ...],
        budget: float,
        tolerance: float,
        cores: int,
        skip: Mapping[str, str],
        progress: Progress | None,
    ) -> None:
        self._setup, self._allow, self._propose = setup, allow, propose
        self._tolerance, self._cores, self._skip = tolerance, cores, skip
        self._progress = progress or (lambda done, text: None)
        self._began = setup.clock()
        self._budget, self._deadline = budget, self._began + budget
        self._findings: list[Finding] = []
        self._curves: dict[str, tuple[float, ...]] = {}
        self._first_loss: float | None = None

    def run(self) -> DeviceReport:
        self._progress(0.0, "the defaults")
        self._baseline = self._best = self._measure_baseline()
        self._step_seconds = self._baseline.run(1)
        # The time left is for the combined measurement at the end.
        self._deadline -= min(self._budget / 4, FEWEST * 5 * max(self._step_seconds, BLOCK_SECONDS))
        self._proposal: dict[str, Any] = {}
        steps: list[tuple[str, Callable[[], Iterator[Candidate]], dict[str, Any]]] = [
            ("threads", self._threads, {}),
            ("allocator", self._memory, {}),
            ("cudnn", self._cudnn, {}),
            ("memory format", self._memory_format, {}),
            ("fused optimizer", self._fused, {}),
            ("compile", self._compile, {"needs": _COMPILE_SECONDS}),
        ]
        precision = "precision", self._precision, {"changes": "precision", "judge": self._judge_precision}
        # An allowed precision is tried early, so that later steps are measured in it.
        steps.insert(3 if "precision" in self._allow else len(steps), precision)
        for step, candidates, how in steps:
            self._try(step, candidates(), **how)
        self._batch_size()
        with self._skipping("workers"):
            self._workers()
        return self._report()

    def _measure_baseline(self) -> Trial:
        """Return a trial with the defaults, after its first step."""
        try:
            trial = Trial(self._setup, DeviceSetting())
            [first] = trial.losses(1)
            trial.check()
            [again], [other] = trial.losses(1), trial.losses(1, seed=1)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"the model cannot be trained with the defaults: {_describe(error)}") from error
        # With random operations (such as dropout) losses prove nothing: layouts draw random numbers in other orders.
        self._first_loss = first if first == again == other else None
        return trial

    # --- Candidates that keep the statistics --------------------------------------------------------------------------

    def _threads(self) -> Iterator[Candidate]:
        if self._setup.device.type != "cpu":
            raise _Skipped("the arithmetic is not on the CPU")
        now = torch.get_num_threads()
        counts = sorted({1, max(1, self._cores // 2), self._cores} - {now})
        if not counts:
            raise _Skipped("there is one core")
        for count in counts:
            yield f"{count} instead of {now}", {"threads": count}

    def _memory(self) -> Iterator[Candidate]:
        if self._setup.device.type != "cpu" or not can_keep_memory():
            raise _Skipped("for CPU tensors from glibc's malloc only")
        yield "keep freed memory", {"keep_memory": True}

    def _cudnn(self) -> Iterator[Candidate]:
        if self._setup.device.type != "cuda" or torch.backends.cudnn.benchmark:
            return
        if must_repeat():  # each process chooses by its own measurement
            raise _Skipped("results are to repeat bit for bit")
        yield "benchmark", {"cudnn_benchmark": True}

    def _memory_format(self) -> Iterator[Candidate]:
        if not any(parameter.dim() in (4, 5) for parameter in self._setup.model.parameters()):
            raise _Skipped("there are no convolutions")
        yield "channels_last", {"channels_last": True}

    def _fused(self) -> Iterator[Candidate]:
        optimizer = self._best.optimizer
        if type(optimizer) not in FUSABLE:
            raise _Skipped(f"torch has no fused {type(optimizer).__name__}")
        if any(group.get("fused") for group in optimizer.param_groups):
            raise _Skipped("it is fused already")
        yield type(optimizer).__name__, {"fused": True}

    def _compile(self) -> Iterator[Candidate]:
        names = compilable(self._setup.model)
        if any(module._compiled_call_impl is not None for module in self._setup.model.modules()):
            raise _Skipped("the model is compiled already")
        if not names:
            raise _Skipped("there is no submodule of several layers")
        if self._setup.device.type == "cpu" and (lack := _lack_of_compiler()):
            raise _Skipped(lack)
        for tried in dict.fromkeys([names, *((name,) for name in names)]):
            compiled = tuple(dict.fromkeys((*self._best.setting.compiled, *tried)))
            if compiled != self._best.setting.compiled:
                yield ", ".join(name or "model" for name in tried), {"compiled": compiled}

    # --- Candidates that change the statistics ------------------------------------------------------------------------

    def _precision(self) -> Iterator[Candidate]:
        if not self._wanted("precision") or self._setup.device.type not in ("cpu", "cuda"):
            return
        if self._setup.device.type == "cuda" and not must_repeat():
            yield "tf32", {"precision": "tf32"}
        if lack := self._lack_of_bf16():
            raise _Skipped(lack)
        yield "bf16-mixed", {"precision": "bf16-mixed"}

    def _lack_of_bf16(self) -> str:
        device = self._setup.device.type
        if torch.is_autocast_enabled(device):
            return "autocast is on already"
        if any(parameter.dtype != torch.float32 for parameter in self._setup.model.parameters()):
            return "the parameters are not float32"
        if device == "cuda" and not torch.cuda.is_bf16_supported():
            return "the device has no bfloat16"
        return ""

    def _judge_precision(self, trial: Trial) -> str:
        """Compare loss curves, and return a remark or raise `_Rejected`."""
        seconds = 2 * self._best.run(1) + trial.run(1)
        steps = min(STEPS, int(self._left / max(seconds, 1e-9)))
        if steps < FEWEST_STEPS:
            raise _Rejected(f"no time for a probe of {FEWEST_STEPS} steps")
        nudged = Trial(self._setup, self._best.setting, nudge=ROUNDING)
        curves = [each.losses(steps) for each in (self._best, trial, nudged)]
        name = trial.setting.precision
        self._curves |= {f"loss {self._best.setting.precision}": tuple(curves[0]), f"loss {name}": tuple(curves[1])}
        agreement = Agreement.of(curves[0], curves[1], curves[2], self._tolerance)
        if not agreement.holds:
            raise _Rejected(agreement.words)
        return agreement.words

    def _batch_size(self) -> None:
        if not self._wanted("batch_size"):
            return
        own = self._setup.batch_size
        rates = {own: 1.0}
        tried: list[tuple[Finding, Trial]] = []
        sizes = [size for size in (own // 4, own // 2, 2 * own, 4 * own) if size > 1]
        for size in sizes:
            setting = replace(self._best.setting, batch_size=size)
            finding, trial = self._measure("batch size", f"{size} instead of {own}", setting, "batch_size")
            if trial is not None and finding.gain is not None:
                rates[size] = finding.gain
                tried.append((finding, trial))
            else:
                self._findings.append(finding)
        knee = min(size for size, rate in rates.items() if rate >= _NEARLY_BEST * max(rates.values()))
        for finding, trial in tried:
            if trial.samples != knee and finding.verdict != "rejected":
                reason = f"{knee} gives as much" if knee < trial.samples else f"{knee} gives more"
                finding = replace(finding, verdict="rejected", reason=reason)
            self._keep(finding, trial, "batch_size")
        if len(rates) > 1:
            base = self._best.samples / self._best.run(1) if not tried else tried[0][0].before or 1.0
            order = sorted(rates)
            self._curves |= {
                "batch size": tuple(map(float, order)),
                "samples/s": tuple(rates[size] * base for size in order),
            }

    def _workers(self) -> None:
        """Compare processes that share the cores with one that has them all."""
        if not self._wanted("workers"):
            return
        if self._setup.device.type != "cpu":
            raise _Skipped("one process for each accelerator is Lightning's own way")
        counts = [count for count in (2, 4, 8, 16, 32, 64, 128) if count <= self._cores and self._cores % count == 0]
        if not counts:
            raise _Skipped(f"{counted(self._cores, 'core')} cannot be shared")
        for count in counts:
            self._try_workers(count)

    def _try_workers(self, count: int) -> None:
        """Measure one process, then several, then one again, because they cannot be timed alternately."""
        tried = f"{count} processes with {self._cores // count} threads each, a batch each"
        began = self._setup.clock()
        if reason := self._skip.get("workers") or (self._used_up() if self._left < _WORKERS_NEED else ""):
            self._findings.append(Finding("workers", tried, "skipped", reason))
            return
        self._info(tried)
        try:
            first, together, last = (self._throughput(each) for each in (1, count, 1))
        except Exception as error:
            self._findings.append(Finding("workers", tried, "rejected", _describe(error)))
            return
        found = Comparison((first, last), (together, together))
        verdict: Verdict = "rejected"
        reason = f"no gain of {MARGIN:.0%} beyond the noise"
        if found.spread[0] >= 1 + MARGIN:
            verdict, reason = ("applied", "") if "workers" in self._allow else ("proposed", _YOURS["workers"])
            self._proposal |= {"workers": count, "threads": self._cores // count}
        seconds = self._setup.clock() - began
        before = statistics.median(found.before)
        self._findings.append(
            Finding("workers", tried, verdict, reason, before, together, found.gain, found.spread, 2, seconds)
        )

    def _throughput(self, count: int) -> float:
        setting = replace(self._best.setting, workers=count, threads=self._cores // count, batch_size=None)
        return workers.throughput(self._setup, setting, _WORKER_SECONDS, self._deadline)

    # --- One candidate ------------------------------------------------------------------------------------------------

    def _try(self, step: str, candidates: Iterator[Candidate], changes: str = "", **how: Any) -> None:
        """Measure candidates beside the best setting, and keep the faster ones."""
        with self._skipping(step):
            for tried, changed in candidates:
                setting = replace(self._best.setting, **changed)
                self._keep(*self._measure(step, tried, setting, changes, **how), changes)

    @contextmanager
    def _skipping(self, step: str) -> Iterator[None]:
        try:
            yield
        except _Skipped as reason:
            self._findings.append(Finding(step, "-", "skipped", str(reason)))

    def _measure(
        self,
        step: str,
        tried: str,
        setting: DeviceSetting,
        changes: str = "",
        judge: Callable[[Trial], str] | None = None,
        needs: float = 0.0,
    ) -> tuple[Finding, Trial | None]:
        """Return the finding on a candidate, and its trial if that could be measured."""
        reason = self._skip.get(step) or self._skip.get(changes)
        if not reason and self._left < max(needs, FEWEST * 4 * self._step_seconds):
            reason = self._used_up()
        if reason:
            return Finding(step, tried, "skipped", reason), None
        self._info(f"{step}: {tried}")
        began = self._setup.clock()
        try:
            trial = Trial(self._setup, setting)
            preparation = self._prepare(trial, is_same=not changes)
            enough = self._setup.clock() + _SHARE * self._left
            found = compare(self._best, trial, self._deadline, self._setup.clock, enough)
            remark = self._remark(found, trial, judge)
            verdict: Verdict = "proposed" if changes and changes not in self._allow else "applied"
        except _Rejected as error:
            verdict, remark = "rejected", str(error)
        except Exception as error:
            # A candidate may fail in any way: memory, a kernel or a compiler may be missing.
            gc.collect()
            return Finding(step, tried, "rejected", _describe(error), seconds=self._setup.clock() - began), None
        if verdict == "proposed":
            remark = f"{_YOURS[changes]}{'; ' if remark else ''}{remark}"
        finding = Finding(step, tried, verdict, remark, seconds=self._setup.clock() - began, preparation=preparation)
        if not found.before:
            return finding, None
        measured = replace(
            finding,
            before=statistics.median(found.before),
            after=statistics.median(found.after),
            gain=found.gain,
            spread=found.spread,
            pairs=len(found.before),
        )
        gc.collect()  # modules contain cycles, and a rejected trial is large
        return measured, trial

    def _prepare(self, trial: Trial, is_same: bool) -> float:
        """Check the first loss, and return the seconds of the first step beyond a usual one if it compiles."""
        began = self._setup.clock()
        [first] = trial.losses(1)
        seconds = self._setup.clock() - began
        known = self._first_loss
        if is_same and known is not None and not abs(first - known) <= _SAME_LOSS * abs(known):
            raise RuntimeError(f"it computes something else: a loss of {first:.6g} instead of {known:.6g}")
        return max(0.0, seconds - trial.run(1)) if trial.setting.compiled else 0.0

    def _remark(self, found: Comparison, trial: Trial, judge: Callable[[Trial], str] | None) -> str:
        if len(found.before) < FEWEST:
            raise _Rejected(f"the budget of {self._budget:g} s ended within the measurement")
        if not found.is_faster:
            raise _Rejected("slower" if found.spread[1] < 1 else f"no gain of {MARGIN:.0%} beyond the noise")
        return judge(trial) if judge is not None else ""

    def _keep(self, finding: Finding, trial: Trial | None, changes: str) -> None:
        self._findings.append(finding)
        if trial is not None and finding.verdict == "applied":
            self._best = trial
        elif trial is not None and finding.verdict == "proposed":
            self._proposal[changes] = getattr(trial.setting, changes)

    # --- Shorthand ----------------------------------------------------------------------------------------------------

    @property
    def _left(self) -> float:
        return self._deadline - self._setup.clock()

    def _used_up(self) -> str:
        return f"the budget of {self._budget:g} s is used up"

    def _wanted(self, name: str) -> bool:
        return name in self._allow or name in self._propose

    def _info(self, text: str) -> None:
        self._progress(min(0.95, (self._setup.clock() - self._began) / self._budget), text)

    def _report(self) -> DeviceReport:
        """Measure the final setting against the defaults in separate pairs, and return the report."""
        self._info("combined")
        setting, gain, spread = self._best.setting, None, None
        baseline = tuned = self._setup.batch_size / self._step_seconds
        if self._best is not self._baseline:
            found = compare(self._baseline, self._best, self._began + self._budget, self._setup.clock)
            if found.before:
                gain, baseline, tuned = found.gain, statistics.median(found.before), statistics.median(found.after)
                spread = found.spread
            else:
                gain = math.prod(each.gain or 1.0 for each in self._findings if each.verdict == "applied")
                tuned = baseline * gain
                reason = f"the product of the gains: {self._used_up()}"
                self._findings.append(Finding("combined", setting.words, "noted", reason, gain=gain))
        proposal = replace(setting, **self._proposal)
        if "workers" in self._allow and "workers" in self._proposal:
            setting = replace(setting, workers=proposal.workers, threads=proposal.threads)
        self._progress(1.0, "done")
        return DeviceReport(
            tuple(self._findings),
            setting,
            proposal,
            baseline,
            tuned,
            gain,
            self._setup.batch_size,
            self._setup.clock() - self._began,
            _name_of(self._setup.device, self._cores),
            self._curves,
            spread,
        )


_YOURS = {
    "precision": 'pass allow=("precision",) to use it',
    "batch_size": "it changes the statistics: set it yourself",
    "workers": "it changes the statistics: set it yourself",
}


def compilable(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the submodules worth compiling: the outermost called ones that have several layers.

    Only children of the model are candidates, and those in its lists and dicts of modules, which are never called.

    Example:
        >>> block = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())
        >>> compilable(nn.ModuleDict({"net": nn.Sequential(block, block, nn.Flatten())}))
        ('net',)
        >>> compilable(nn.Linear(2, 2))
        ()
    """
    names = []
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            names += [f"{name}.{inner}" for inner in compilable(child)]
        elif len(list(child.children())) > 1 and any(True for _ in child.parameters()):
            names.append(name)
    return tuple(names)


def _lack_of_compiler() -> str:
    named = os.environ.get("CXX")
    if any(shutil.which(name) for name in ((named,) if named else ("g++", "clang++", "c++"))):
        return ""
    return "there is no C++ compiler"


def _describe(error: BaseException) -> str:
    """Return an error's kind and first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def _name_of(device: torch.device, cores: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    processor = platform.processor() or platform.machine()
    return f"{counted(cores, 'core')} ({processor})" if device.type == "cpu" else device.type
