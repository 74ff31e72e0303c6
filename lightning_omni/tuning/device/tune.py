"""`tune_device`: a greedy search for the settings that make training faster on a device, and its report."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rich.table import Column, Table
from rich.text import Text
from torch import nn
from torch.optim import Optimizer

from lightning_omni.checks import check_choice, check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.json_dataclasses import Serializable
from lightning_omni.tuning.device.setting import DeviceSetting, can_keep_memory
from lightning_omni.tuning.device.trial import (
    BLOCK_SECONDS,
    FEWEST,
    MARGIN,
    TOLERANCE,
    Comparison,
    Loss,
    TrainingSetup,
    Trial,
    agreement,
    compare,
    untouched,
)

# --- Report: findings, numbers, a table -------------------------------------------------------------------------------

Verdict = Literal["applied", "proposed", "rejected", "skipped"]
"""In the setting; faster, but the user's decision; tried and not used; not tried."""

_STYLES = {"applied": "green", "proposed": "yellow", "rejected": "dim", "skipped": "dim"}


@dataclass(frozen=True)
class Finding:
    """The result for one candidate.

    Args:
        step: varied property: ``"allocator"``, ``"memory format"``, ...
        verdict: decision, for this ``reason``.
        after: samples per second with the candidate, if measured.
        gain: median ratio of paired blocks, with the candidate over without it.
        spread: smallest and largest of these ratios.
    """

    step: str
    tried: str
    verdict: Verdict
    reason: str = ""
    after: float | None = None
    gain: float | None = None
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class DeviceReport(Serializable):
    """The speed of a model on a device, and the settings that increase it.

    Args:
        findings: results in order, each compared to the best setting by then.
        setting: best setting that may be applied.
        baseline: samples per second with all defaults.
        tuned: samples per second with `setting`.
        gain: ratio of `setting` to the baseline, measured in separate pairs; None if nothing is applied.
        seconds: duration of the search.
        spread: smallest and largest of the paired ratios behind `gain`.

    Example:
        >>> found = Finding("memory format", "channels_last", "applied", after=150.0, gain=1.5)
        >>> setting = DeviceSetting(channels_last=True)
        >>> DeviceReport((found,), setting, 100.0, 150.0, 1.5, 32).summary
        '150 instead of 100 samples/s (1.50 times): channels_last'
    """

    findings: tuple[Finding, ...]
    setting: DeviceSetting
    baseline: float
    tuned: float
    gain: float | None
    batch_size: int
    seconds: float = 0.0
    device: str = ""
    spread: tuple[float, float] | None = None

    @property
    def of_none(self) -> str:
        was_compared = [each.gain is not None for each in self.findings]
        return "nothing faster was found" if any(was_compared) else "nothing was compared with them"

    @property
    def summary(self) -> str:
        if self.gain is None:
            return f"{_number(self.baseline)} samples/s with the defaults; {self.of_none}"
        scatter = f", {self.spread[0]:.2f} to {self.spread[1]:.2f}" if self.spread else ""
        times = f"{_number(self.tuned)} instead of {_number(self.baseline)} samples/s ({self.gain:.2f} times{scatter})"
        return f"{times}: {self.setting.words}"

    def table(self) -> Table:
        """Return a table for `rich.print`, with one row per candidate, for 80 columns."""
        columns = [Column(head, justify="right", no_wrap=True) for head in ("samples/s", "gain", "spread")]
        table = Table(
            Column("tried", overflow="fold"),
            *columns,
            title=f"{self.device}, batches of {self.batch_size}",
            caption=self.summary,
            show_lines=True,
        )
        for each in self.findings:
            verdict = f"{each.verdict}: {each.reason}" if each.reason else each.verdict
            cell = Text(f"{each.step}: {each.tried}\n").append(verdict, style=_STYLES[each.verdict])
            gain = f"{each.gain:.2f}" if each.gain is not None else "-"
            spread = f"{each.spread[0]:.2f}–{each.spread[1]:.2f}" if each.spread else "-"
            table.add_row(cell, _number(each.after), gain, spread)
        return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


Bf16 = Literal["apply", "propose", "skip"]
"""The use of bfloat16: if it is faster and the losses agree; measured for the report alone; not measured."""

_SAME_LOSS = 0.01
"""Largest relative change of the first loss by a candidate other than bfloat16: far more than rounding causes."""

_COMPILE_SECONDS = 15.0
"""Least remaining budget for a compilation, which cannot be interrupted."""

_SHARE = 0.2
"""Fraction of the remaining budget after which a candidate is decided with the fewest pairs."""

_PROBE_STEPS, _FEWEST_PROBE_STEPS = 20, 8
"""Largest and smallest number of steps whose losses are compared in two precisions."""

_ROUNDING = 1e-6
"""Relative size, about float32's rounding, of the nudge that shows how far rounding alone separates two trainings."""


def tune_device(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer | Callable[[Any], Optimizer],
    batches: Sequence[Any],
    *,
    bf16: Bf16 = "propose",
    budget: float = 60.0,
    tolerance: float = TOLERANCE,
    skip: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceReport:
    """Measure how this device trains this model fastest, and apply nothing.

    ``report.setting.apply(model, optimizer)`` applies the result, except bfloat16. The search runs on copies: model,
    optimizer and RNG state are the same afterwards. It needs device memory for up to four copies beside the model.

    Args:
        model: model in training mode.
        loss: function that returns the mean loss of model and batch.
        optimizer: optimizer over the model's parameters, or a function that makes one from parameters.
        batches: batches on the model's device, all of one size; used cyclically.
        bf16: as for `DeviceTuner`; ``"apply"`` allows it in ``report.setting``.
        budget: seconds for the search. A running step or compilation is completed.
        tolerance: largest distance between loss curves of two precisions, as a fraction of the losses.
        skip: steps to leave out, with the reason for the table: ``{"compile": "no"}``.
        clock: function that returns seconds.

    Raises:
        ConfigurationError: an argument is wrong, or the model cannot be trained with the defaults.

    Example:
        >>> import torch
        >>> model = nn.Linear(4, 2)
        >>> report = tune_device(
        ...     model,
        ...     lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))],
        ...     bf16="skip", budget=2, skip={"compile": "this is an example"},
        ... )
        >>> {finding.step: finding.reason for finding in report.findings}["memory format"]
        'there are no convolutions'
    """
    check_choice("bf16", bf16, get_args(Bf16))
    check_number("budget", budget, "seconds above 0", above=0)
    check_number("tolerance", tolerance, "a fraction above 0, as in 0.02", above=0)
    own_batches = copy.deepcopy(list(batches))  # because a loss may write into its batch
    setup = TrainingSetup(model, loss, optimizer, own_batches, clock)
    search = _DeviceSearch(setup, bf16, budget, tolerance, skip or {})
    with untouched(setup):
        return search.run()


Candidate = tuple[str, dict[str, Any]]
"""Description of a candidate, and the fields of the setting that it changes."""


_CANDIDATES: dict[str, Candidate] = {
    "allocator": ("keep freed memory", {"keep_memory": True}),
    "memory format": ("channels_last", {"channels_last": True}),
    "precision": ("bf16-mixed", {"bf16": True}),
}
"""The candidate of each step that has only one."""


class _DeviceSearch:
    def __init__(
        self,
        setup: TrainingSetup,
        bf16: Bf16,
        budget: float,
        tolerance: float,
        skip: Mapping[str, str],
    ) -> None:
        self._setup, self._bf16, self._budget, self._tolerance = setup, bf16, budget, tolerance
        self._skip = skip
        self._began = setup.clock()
        self._deadline = self._began + budget
        self._findings: list[Finding] = []
        self._first_loss: float | None = None

    def run(self) -> DeviceReport:
        self._baseline = self._best = self._measure_baseline()
        self._step_seconds = self._baseline.run(1)
        # The time left is for the combined measurement at the end.
        self._deadline -= min(self._budget / 4, FEWEST * 5 * max(self._step_seconds, BLOCK_SECONDS))
        steps = ["allocator", "memory format", "compile"]
        if self._bf16 != "skip":
            # A precision to be applied is tried early, so that the later steps are measured in it.
            steps.insert(1 if self._bf16 == "apply" else 3, "precision")
        for step in steps:
            if reason := self._why_impossible(step):
                self._findings.append(Finding(step, "-", "skipped", reason))
                continue
            for tried, changed in self._candidates(step):
                self._try(step, tried, replace(self._best.setting, **changed))
        return self._report()

    def _measure_baseline(self) -> Trial:
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

    # --- Candidates ---------------------------------------------------------------------------------------------------

    def _why_impossible(self, step: str) -> str:
        model = self._setup.model
        if step == "allocator" and (self._setup.device.type != "cpu" or not can_keep_memory()):
            return "for CPU tensors from glibc's malloc only"
        if step == "memory format" and not any(parameter.dim() in (4, 5) for parameter in model.parameters()):
            return "there are no convolutions"
        if step == "compile" and any(module._compiled_call_impl is not None for module in model.modules()):
            return "the model is compiled already"
        return "there is no submodule of several layers" if step == "compile" and not compilable(model) else ""

    def _candidates(self, step: str) -> Iterator[Candidate]:
        if step != "compile":
            yield _CANDIDATES[step]
            return
        names = compilable(self._setup.model)
        for tried in dict.fromkeys([names, *((name,) for name in names)]):
            compiled = tuple(dict.fromkeys((*self._best.setting.compiled, *tried)))
            if compiled != self._best.setting.compiled:
                yield ", ".join(name or "model" for name in tried), {"compiled": compiled}

    # --- One candidate ------------------------------------------------------------------------------------------------

    def _try(self, step: str, tried: str, setting: DeviceSetting) -> None:
        left = self._deadline - self._setup.clock()
        reason = self._skip.get(step)
        if reason is None and left < max(_COMPILE_SECONDS * (step == "compile"), FEWEST * 4 * self._step_seconds):
            reason = f"the budget of {self._budget:g} s is used up"
        if reason is not None:
            self._findings.append(Finding(step, tried, "skipped", reason))
            return
        gc.collect()  # modules contain cycles, and the last trial, if rejected, is large
        try:
            finding, trial = self._measure(step, tried, setting)
        except Exception as error:
            # A candidate may fail in any way: memory, a kernel or a compiler may be missing.
            finding, trial = Finding(step, tried, "rejected", _describe(error)), self._best
        self._findings.append(finding)
        if finding.verdict == "applied":
            self._best = trial

    def _measure(self, step: str, tried: str, setting: DeviceSetting) -> tuple[Finding, Trial]:
        trial = Trial(self._setup, setting)
        is_bf16 = step == "precision"
        [first] = trial.losses(1)  # compiles, which does not count as throughput
        known = self._first_loss
        if not is_bf16 and known is not None and not abs(first - known) <= _SAME_LOSS * abs(known):
            raise RuntimeError(f"it computes something else: a loss of {first:.6g} instead of {known:.6g}")
        enough = (1 - _SHARE) * self._setup.clock() + _SHARE * self._deadline
        found = compare(self._best, trial, self._deadline, self._setup.clock, enough)
        finding = Finding(step, tried, *self._judged(found, trial, is_bf16))
        if not found.before:
            return finding, trial
        after = statistics.median(found.after)
        return replace(finding, after=after, gain=found.gain, spread=found.spread), trial

    def _judged(self, found: Comparison, trial: Trial, is_bf16: bool) -> tuple[Verdict, str]:
        if len(found.before) < FEWEST:
            return "rejected", f"the budget of {self._budget:g} s ended within the measurement"
        if not found.is_faster:
            return "rejected", "slower" if found.spread[1] < 1 else f"no gain of {MARGIN:.0%} beyond the noise"
        if not is_bf16:
            return "applied", ""
        agrees, words = self._compare_losses(trial)
        if not agrees:
            return "rejected", words
        return ("applied", words) if self._bf16 == "apply" else ("proposed", f'pass bf16="apply" to use it; {words}')

    def _compare_losses(self, trial: Trial) -> tuple[bool, str]:
        seconds = 2 * self._best.run(1) + trial.run(1)
        steps = int(min(_PROBE_STEPS, (self._deadline - self._setup.clock()) / max(seconds, 1e-9)))
        if steps < _FEWEST_PROBE_STEPS:
            return False, f"no time for a probe of {_FEWEST_PROBE_STEPS} steps"
        nudged = Trial(self._setup, self._best.setting, nudge=_ROUNDING)
        own, other, rounded = (each.losses(steps) for each in (self._best, trial, nudged))
        return agreement(own, other, rounded, self._tolerance)

    def _report(self) -> DeviceReport:
        setup, setting, gain, spread = self._setup, self._best.setting, None, None
        baseline = tuned = setup.batch_size / self._step_seconds
        if self._best is not self._baseline:
            # The fewest pairs are measured even if the budget is used up: a gain is never reported unmeasured.
            found = compare(self._baseline, self._best, math.inf, setup.clock, enough=self._began + self._budget)
            gain, baseline, tuned = found.gain, statistics.median(found.before), statistics.median(found.after)
            spread = found.spread
            if gain <= 1:  # one by one they were faster, and together they are not
                setting, tuned, gain, spread = self._baseline.setting, baseline, None, None
                why = "slower than the defaults in the end"
                for number, each in enumerate(self._findings):
                    if each.verdict == "applied":
                        self._findings[number] = replace(each, verdict="rejected", reason=why)
        return DeviceReport(
            tuple(self._findings),
            setting,
            baseline,
            tuned,
            gain,
            setup.batch_size,
            setup.clock() - self._began,
            str(setup.device),
            spread,
        )


def compilable(model: nn.Module) -> tuple[str, ...]:
    """Return the submodules worth compiling: the outermost called ones, if they have several children and parameters.

    A LightningModule is not called itself; neither are lists and dicts of modules.

    Example:
        >>> block = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())
        >>> compilable(nn.ModuleDict({"net": nn.Sequential(block, block, nn.Flatten())}))
        ('net',)
        >>> compilable(block), compilable(nn.Linear(2, 2))
        (('',), ())
    """
    children = dict(model.named_children())
    if not isinstance(model, (nn.ModuleList, nn.ModuleDict)) and not hasattr(model, "training_step"):
        return ("",) if len(children) > 1 and any(True for _ in model.parameters()) else ()
    return tuple(f"{name}.{inner}".rstrip(".") for name, child in children.items() for inner in compilable(child))


def _describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
