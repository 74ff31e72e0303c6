"""The conversion of a server's saved state to a checkpoint of Lightning, from which another run can resume.

The weights, the states of optimizers that step at the server, and the trained samples are those of the server's last
save. All other state (loops, schedulers, callbacks, buffers) is from the recorder, which sent it for joining groups
when the groups last began to compute; loops and schedulers are advanced to the moment of the weights. If all ranks were
started together, the server has no such state, and the checkpoint has only weights.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_omni.errors import ConfigurationError, MalformedMessage
from lightning_omni.optimizer.saved import ENTRY, Saved
from lightning_omni.protocol.progress import Progress
from lightning_omni.protocol.saved_run import SavedPart, SavedRun
from lightning_omni.server.saving import saved_states
from lightning_omni.strategy import scheduler_states
from lightning_omni.strategy.loop_states import loops_at
from lightning_omni.strategy.schedulers import count_at
from lightning_omni.strategy.whole_files import write_whole

_OLDEST = "2.6.0"
"""The version in the checkpoint if no Lightning is installed."""


@dataclass(frozen=True)
class Exported:
    """A checkpoint made from a server's state.

    Attributes:
        checkpoint: the contents, as ``torch.load`` returns them.
        is_whole: whether ``Trainer.fit(ckpt_path=...)`` can resume from it; if not, it has only weights.
        updates: number of updates in the weights, over all optimizers.
        notes: missing parts of the state and their remedies; a sentence each.
    """

    checkpoint: dict[str, Any]
    is_whole: bool
    updates: int
    notes: tuple[str, ...]


def export_checkpoint(directory: str | Path, out: str | Path, overwrite: bool = False) -> Exported:
    """Write the state that a server has saved as a checkpoint, which ``torch.load(weights_only=True)`` reads.

    Args:
        directory: the server's ``--state``. A server may be using it.
        out: file of the checkpoint.
        overwrite: whether an existing file may be replaced.

    Raises:
        ConfigurationError: there is no state to export, or the file cannot be written.
    """
    if Path(out).is_dir():
        raise ConfigurationError(f"{out} is a directory; pass the name of a file")
    if Path(out).exists() and not overwrite:
        raise ConfigurationError(f"{out} exists; pass --overwrite to replace it, or the name of another file")
    exported = checkpoint_of(directory)
    try:
        write_whole(exported.checkpoint, out)
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {error.strerror}; pass the name of another file") from error
    return exported


def checkpoint_of(directory: str | Path) -> Exported:
    """Return the state that a server has saved as a checkpoint.

    Args:
        directory: the server's ``--state``. A server may be using it.

    Raises:
        ConfigurationError: there is no state to export.
    """
    try:
        run = SavedRun.of(saved_states(directory))
        exported = _of_joined(run, run.run_state) if _is_described(run.run_state) else _of_weights(run)
    except (ConfigurationError, MalformedMessage) as error:
        text = str(error)
        raise ConfigurationError(text if text.startswith(str(directory)) else f"{directory}: {text}") from error
    # The tensors that were read share one memory, and torch would write all of it for each of them.
    own = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, exported.checkpoint)
    return replace(exported, checkpoint=own)


def _is_described(run_state: Mapping[str, Any] | None) -> bool:
    return run_state is not None and "parts" in run_state and run_state["progress"] is not None


# --- Weights alone ---------------------------------------------------------------------------------------------------


def _of_weights(run: SavedRun) -> Exported:
    reason = (run.run_state or {}).get("refused", "its ranks were started together, and only groups that join need it")
    return Exported(
        checkpoint={
            "epoch": max(0, run.cut.epoch),
            "global_step": 0,
            "pytorch-lightning_version": _lightning_version(),
            "state_dict": {name: weight for part in run.parts for name, weight in part.weights.items()},
            ENTRY: Saved(run.cut, run.groups).to_plain(),
        },
        is_whole=False,
        updates=sum(run.cut.clocks),
        notes=(
            f"the server was not given the rest of the run's state ({reason}): buffers, parameters that are not"
            " trained, optimizers, schedulers, loops and callbacks are missing",
            "load the weights with YourModule.load_from_checkpoint(path, strict=False), and fit from epoch 0, without"
            " ckpt_path=",
        ),
    )


def _lightning_version() -> str:
    for name in ("pytorch-lightning", "lightning"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return _OLDEST


# --- A run that groups join ------------------------------------------------------------------------------------------


def _of_joined(run: SavedRun, tree: Mapping[str, Any] | None) -> Exported:
    assert tree is not None
    progress = _progress_of(run, msgspec.convert(tree["progress"], Progress))
    notes: list[str] = []
    state_dict = _state_dict(run, tree, notes)
    states = _optimizer_states(run, tree, notes)
    schedulers = _schedulers(run, tree, progress, states, notes)
    batches = min(progress.batches, progress.samples // progress.reference.batch)
    before = progress.past_batches
    steps, past = progress.steps, progress.steps_before(progress.epochs)
    if not tree["automatic"]:
        each = _steps_by_hand(tree["counters"])
        steps, past = each * (before + batches), each * before
    checkpoint = {
        **tree["more"],
        "epoch": progress.epochs,
        "global_step": steps,
        "state_dict": state_dict,
        "callbacks": tree["callbacks"],
        "optimizer_states": states,
        "lr_schedulers": schedulers,
        ENTRY: _saved(run, progress).to_plain(),
    }
    if "loops" in tree:
        window = progress.reference.window
        loops = loops_at(tree["loops"], progress.epochs, batches, before, steps, past, window, tree["automatic"])
        checkpoint["loops"] = loops
    else:
        notes.append("the loops' progress could not be sent to the server: a fit begins with epoch 0")
    for average in tree["averages"]:  # WeightAveraging saves the average as the weights, and the weights separately
        whole = {name[7:]: value for name, value in average.items() if name.startswith("module.")}
        checkpoint |= {"state_dict": whole, "current_model_state": state_dict}
    return Exported(checkpoint, is_whole="loops" in tree, updates=sum(run.cut.clocks), notes=tuple(notes))


def _progress_of(run: SavedRun, known: Progress) -> Progress:
    """Return the progress of a saved run; an epoch whose samples are all trained counts as over.

    ``known`` is the progress when the groups last began to compute.
    """
    cut = run.cut
    if cut.epoch > known.epochs:
        known = replace(known, epochs=cut.epoch, samples=0, past=known.steps_before(cut.epoch))
    now = cut.progress(known)
    if now.samples and now.samples >= now.budget(cut.total, now.epochs):
        now = replace(now, epochs=now.epochs + 1, samples=0, past=now.steps_before(now.epochs + 1))
    return now


def _steps_by_hand(counters: Sequence[int]) -> int:
    """Return the steps per batch in manual optimization, from the recorder's counts."""
    batches, _, by_hand, _ = counters
    return max(1, -(-by_hand // batches)) if batches else 1


def _saved(run: SavedRun, progress: Progress) -> Saved:
    return Saved(
        cut=run.cut,
        groups=run.groups,
        progress=progress,
        method=run.method,
        parameters=[list(part.weights) for part in run.parts],
        server=[part.method for part in run.parts],
    )


def _state_dict(run: SavedRun, tree: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    weights = {name: weight for part in run.parts for name, weight in part.weights.items()}
    own: Mapping[str, Tensor] = tree["module"]
    keys: Mapping[str, str] = tree["keys"]
    state = {key: weights[name] if name in weights else own[key] for key, name in keys.items() if name or key in own}
    state.update((name, weight) for name, weight in weights.items() if name not in keys.values())  # added since then
    if missing := [key for key in keys if key not in state]:
        notes.append(
            f"the server was not given {', '.join(missing)} of the module's state, which stays as the module makes it;"
            " set self.strict_loading = False in the module to load the rest"
        )
    return state


def _optimizer_states(run: SavedRun, tree: Mapping[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    """Return the states of the Trainer's optimizers in the format of ``state_dict``, as far as the server has them."""
    states = [{"state": dict[int, Any](), "param_groups": each["param_groups"]} for each in tree["hyperparameters"]]
    on_ranks = set[int]()
    for part, described in zip(run.parts, tree["parts"], strict=True):
        if (number := described["optimizer"]) < 0:
            continue
        if not part.steps_here:
            on_ranks.add(number)
            continue
        places = dict(zip(described["names"], described["places"], strict=True))
        unknown = [name for name in part.weights if places.get(name, -1) < 0]
        for name, values in zip(part.weights, map(part.state.get, range(len(part.weights))), strict=True):
            if values is not None and name not in unknown:
                states[number]["state"][places[name]] = values
        if unknown:
            notes.append(
                f"the optimizer was given further parameters since the groups had last synchronized ({unknown[0]}"
                " first), whose optimizer state is left out"
            )
    notes += [
        f"optimizer {number} steps on the ranks with this method, and its state is lost with them: it is empty"
        for number in sorted(on_ranks)
    ]
    return states


# --- Schedulers ------------------------------------------------------------------------------------------------------


def _schedulers(
    run: SavedRun, tree: Mapping[str, Any], progress: Progress, states: list[dict[str, Any]], notes: list[str]
) -> list[dict[str, Any]]:
    """Return the schedulers' states advanced to the run's progress; update the parameter groups of the optimizers."""
    found = []
    for kind, state, base in zip(tree["kinds"], tree["schedulers"], tree["schedule"], strict=True):
        target = _target(kind, base, progress)
        own = scheduler_states.whole(kind["class"], state)
        found.append(_advanced(run, tree, kind, own, target, states, notes))
    if found and not tree["automatic"]:
        notes.append(
            "the module steps its schedulers itself: they stand where they stood when the groups had last synchronized"
        )
    return found


def _target(kind: Mapping[str, Any], base: Sequence[int], progress: Progress) -> int:
    """Return the count of a scheduler at the run's progress; -1 if it is not paced (with a metric, for example)."""
    if not base:
        return -1
    count, began = base
    if kind["interval"] == "step":
        return count_at(count, began, kind["frequency"], progress.steps, progress.scheduled)
    return count_at(count, began, kind["frequency"], progress.epochs)


def _advanced(
    run: SavedRun,
    tree: Mapping[str, Any],
    kind: Mapping[str, Any],
    state: dict[str, Any],
    target: int,
    states: list[dict[str, Any]],
    notes: list[str],
) -> dict[str, Any]:
    behind = target - scheduler_states.count_in(state)
    if target < 0 or behind <= 0 or kind["optimizer"] < 0:
        return state
    optimizer = states[kind["optimizer"]]
    groups = optimizer["param_groups"]
    if after := scheduler_states.advanced(kind["class"], state, groups, target):
        optimizer["param_groups"] = [
            {**set_to, "params": group["params"]} for set_to, group in zip(after.groups, groups, strict=True)
        ]
        return after.state
    if counted := scheduler_states.by_count(kind["class"], state, target):
        rates = _last_rates(run.parts, tree["parts"], kind["optimizer"], groups)
        optimizer["param_groups"] = [{**group, **rate} for group, rate in zip(groups, rates, strict=True)]
        return {**counted, "_last_lr": [group["lr"] for group in optimizer["param_groups"]]}
    notes.append(
        f"the scheduler {kind['class'][0] or 'of another class than torch has'} can be stepped by your module only, and"
        f" stands where it stood when the groups had last synchronized: step it {behind} times more"
    )
    return state


def _last_rates(
    parts: Sequence[SavedPart],
    described: Sequence[Mapping[str, Any]],
    optimizer: int,
    groups: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the learning rate of each parameter group at the last push, where the server has it."""
    number_of = {place: number for number, group in enumerate(groups) for place in group["params"]}
    rates: list[dict[str, Any]] = [{} for _ in groups]
    for part, known in zip(parts, described, strict=True):
        if known["optimizer"] != optimizer:
            continue
        places = dict(zip(known["names"], known["places"], strict=True))
        for group in part.groups:
            for name in group["params"][:1]:
                if (number := number_of.get(places.get(name, -1))) is not None:
                    rates[number] = {"lr": group["lr"]}
    return rates
