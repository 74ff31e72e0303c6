"""What is compared between a fit in groups and its control, and how exactly.

One group: everything, bitwise. Two groups: each line of `COMPARED`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

COMPARED = {
    "loss": "held-out loss of the final weights: at most a tenth and 0.05 above DDP's",
    "accuracy": "held-out accuracy of the final weights: at most 0.04 below DDP's",
    "moved": "names of the parameters and buffers that changed, and so of those that did not",
    "state names": "names in the module's state_dict",
    "trainable": "parameters that require gradients after the fit",
    "weights": "equal bitwise on all ranks after the fit",
    "calls": "calls of each hook: equal on each rank; batch hooks, summed over the ranks: within a tenth and 4",
    "epochs": "epochs trained",
    "steps": "trainer.global_step: the same on all ranks",
    "stopped": "trainer.should_stop",
    "status": "trainer.state.status",
    "logged": "names of the values that reached the loggers",
    "metrics": "names in trainer.callback_metrics",
    "optimizers": "classes of the optimizers, and the sizes of their parameter groups",
    "lr": "final learning rates, within 2 %",
    "callback list": "trainer.callbacks",
    "limits": "trainer.num_training_batches, max_steps and max_epochs after the fit",
    "files": "names of the files that were written, numbers masked; the number of each, within 60 % and 2"
    " (steps are those of rank 0's group)",
    "empty files": "files of zero bytes",
    "checkpoint keys": "keys of the checkpoints",
    "checkpoint names": "names in their state_dicts",
    "checkpoint optimizers": "their optimizer states",
    "checkpoint finite": "finite weights in all of them",
    "a checkpoint holds the final weights": "one of them does if one of DDP's does",
}
"""Fact and how it is compared. What a row adds of its own must be equal; "about ..." within a tenth and 4."""
_BY_BATCH = ("batch", "backward", "optimizer_step", "zero_grad")
_TRAINED = ("loss", "accuracy", "moved", "weights", "calls", "epochs", "steps", "metrics", "lr")
"""What depends on how much was trained."""
_CLOCKS = re.compile(r"time|per_sec|throughput|samples_per|batches_per|DeviceStats|omni/")


def failures(
    case: Any, control: list[dict[str, Any]], one: list[dict[str, Any]], groups: list[dict[str, Any]]
) -> list[str]:
    """Every difference that is a failure, a line each. Lists are by rank; an empty one was not run."""
    found = []
    if one:
        skip = _TRAINED if case.by_the_clock else ()
        found += [f"groups=1: {line}" for line in _bitwise(control, one, skip)][:6]
    if groups:
        if case.refused:
            found += _refusal(case, control, groups)
        else:
            found += [f"groups=2: {line}" for line in _alike(case, control, groups)]
    return found


def _bitwise(control: list[dict[str, Any]], one: list[dict[str, Any]], skip: Collection[str]) -> list[str]:
    found = []
    for rank, (theirs, ours) in enumerate(zip(control, one, strict=True)):
        for name in sorted({*theirs, *ours}.difference(skip)):
            a, b = _timeless(theirs.get(name)), _timeless(ours.get(name))
            if name.startswith("about"):
                continue
            if name == "error":
                a, b = str(a).split("\n")[0][:60], str(b).split("\n")[0][:60]
            if a != b:
                found.append(f"{name} on rank {rank}: {_short(b)} instead of {_short(a)}")
    return found


def _refusal(case: Any, control: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[str]:
    found = []
    for rank, facts in enumerate(groups):
        if case.refused not in facts["error"]:  # ranks that come later hear of the first one's
            found.append(
                f"groups=2: expected a refusal with {case.refused!r} on rank {rank}, got {facts['error'] or 'none'!r}"
            )
    return found


def _alike(case: Any, control: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    theirs, ours = control[0], groups[0]
    for rank, (a, b) in enumerate(zip(control, groups, strict=True)):
        first = groups[0]["error"] or groups[-1]["error"]
        if _kind(a["error"]) != _kind(b["error"]) and not (a["error"] and "RankLost" in b["error"] and _kind(first)):
            found.append(f"error on rank {rank}: {b['error'] or 'none'} instead of {a['error'] or 'none'}")
    if found or theirs["error"] or ours["error"]:
        return found
    skip = case.differs
    if "loss" not in skip and not ours["loss"] <= 1.1 * theirs["loss"] + 0.05:
        found.append(f"loss {ours['loss']:.3f} instead of {theirs['loss']:.3f}")
    if "accuracy" not in skip and not ours["accuracy"] >= theirs["accuracy"] - 0.04:
        found.append(f"accuracy {ours['accuracy']:.3f} instead of {theirs['accuracy']:.3f}")
    if "weights" not in skip and len({f["weights"] for f in control}) == 1 and len({f["weights"] for f in groups}) > 1:
        found.append("weights differ between ranks after the fit")
    if "calls" not in skip:
        found += _calls(control, groups)
    if "steps" not in skip and len({facts["steps"] for facts in groups if "steps" in facts}) > 1:
        found.append(f"steps: {[facts['steps'] for facts in groups]}, which is not the same on all ranks")
    if "files" not in skip:
        found += _files(theirs["files"], ours["files"])
    holds = "a checkpoint holds the final weights"
    if holds not in skip and theirs.get(holds) and not ours.get(holds):
        found.append("no checkpoint holds the final weights")
    if "lr" not in skip and not _close(theirs.get("lr"), ours.get("lr")):
        found.append(f"lr {ours.get('lr')} instead of {theirs.get('lr')}")
    for rank, (a, b) in enumerate(zip(control, groups, strict=True)):
        for name in ("logged", "metrics"):
            wanted, got = ({key for key in f.get(name, ()) if not _CLOCKS.search(key)} for f in (a, b))
            if name not in skip and wanted != got:
                found.append(
                    f"{name} on rank {rank}: missing {sorted(wanted - got)}, in addition {sorted(got - wanted)}"
                )
        handled = {
            "error",
            "loss",
            "accuracy",
            "weights",
            "calls",
            "steps",
            "files",
            "lr",
            holds,
            "logged",
            "metrics",
            "max_batches",
        }
        for name in sorted((set(a) | set(b)) - handled - set(skip)):
            if name.startswith("about"):
                _about(found, f"{name} on rank {rank}", a.get(name), b.get(name))
            elif a.get(name) != b.get(name):
                found.append(f"{name} on rank {rank}: {_short(b.get(name))} instead of {_short(a.get(name))}")
    return found


def _calls(control: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for name in sorted({name for facts in (*control, *groups) for name in facts["calls"]}):
        theirs, ours = ([facts["calls"].get(name, 0) for facts in each] for each in (control, groups))
        if any(word in name for word in _BY_BATCH) and "validation" not in name:
            _about(found, f"calls of {name}", sum(theirs), sum(ours))
        elif theirs != ours:
            found.append(f"calls of {name}: {ours} instead of {theirs}")
    return found


def _files(theirs: list[str], ours: list[str]) -> list[str]:
    found: list[str] = []
    masked = [
        sorted(re.sub(r"\d+", "#", name).replace("Omni", "DDP") for name in each if "replica" not in name)
        for each in (theirs, ours)
    ]
    for name in sorted(set(masked[0]) | set(masked[1])):
        a, b = (each.count(name) for each in masked)
        if (not a) != (not b) or abs(a - b) > 2 + 0.6 * a:  # what comes every n steps comes every n of rank 0's group
            found.append(f"files {name}: {b} instead of {a}")
    return found


def _about(found: list[str], name: str, theirs: Any, ours: Any) -> None:
    if theirs is None or ours is None or abs(theirs - ours) > 4 + 0.1 * abs(theirs):
        found.append(f"{name}: {ours} instead of about {theirs}")


def _close(theirs: Any, ours: Any) -> bool:
    if theirs is None or ours is None or len(theirs) != len(ours):
        return theirs == ours
    return all(abs(a - b) <= 0.02 * abs(a) + 1e-12 for a, b in zip(theirs, ours, strict=True))


def _kind(error: str) -> str:
    return error.split(":")[0]


def _timeless(value: Any) -> Any:
    """Without what clocks and host names put into it."""
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if not _CLOCKS.search(str(key))}
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        named = [re.sub(r"\d{6,}|tfevents.*", "#", each) for each in value if not _CLOCKS.search(each)]
        return [each.replace("OmniStrategy", "DDPStrategy") for each in named]  # profilers put it into files' names
    return value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 300 else f"{text[:300]}..."
