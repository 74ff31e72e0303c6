"""The state of a run in a checkpoint, which may be a folder, and the state for a rollback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_omni.errors import ConfigurationError
from lightning_omni.group.core import GroupCore
from lightning_omni.methods.model.server_optimizer import held_by
from lightning_omni.runtime.model.sharded import in_order, like
from lightning_omni.runtime.model.tensor_sync import write
from lightning_omni.wire.formats.base import State
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.messages import SnapshotId
from lightning_omni.wire.partition import over_parameters
from lightning_omni.wire.steps_and_samples import Progress

# --- Folders ----------------------------------------------------------------------------------------------------------

# Rule 1: each rank writes its own parts, and reads the parts that it is to have. No rank holds a whole sharded tensor.
# Rule 2: a folder replaces an earlier one once it is complete.
# Rule 3: torch.distributed.checkpoint is imported where it is used, since its import takes a tenth of a second.

METADATA = "meta.pt"
"""The file in the folder with all data but the tensors of weights, optimizers and the run's state."""
_TENSOR, _PLACE = "omni.tensor", "omni.place"


def is_folder(path: Any) -> bool:
    if "://" in str(path) or not Path(path).is_dir():
        return False
    if not (Path(path) / METADATA).is_file():
        raise ConfigurationError(
            f"ckpt_path={str(path)!r}: this folder is no complete checkpoint, because it has no {METADATA}. If its name"
            " ends with .partial, the process that saved it was killed meanwhile: pass one that was saved before"
        )
    return True


# --- Saving ----------------------------------------------------------------------------------------------------------


def save(path: Path, tensors: Mapping[str, Any], plain: Mapping[str, Any], group: Any) -> None:
    """Save a checkpoint in a folder of the same path on all ranks of a process group, which all call it.

    ``tensors`` is a tree of this rank's sharded tensors and of values that are the same on all ranks; ``plain``, all
    other data, is saved from the first rank.

    Raises:
        OSError: on all ranks: the checkpoint could not be written; an earlier one is unchanged.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    partial = beside(path, "partial")
    is_first = dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier(group)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=_writer(partial, path, plain), process_group=group)
    except CheckpointException as error:
        reasons = ", ".join(sorted({str(reason) for reason, _ in error.failures.values()})) + _free(partial)
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{path}: this checkpoint was not saved; one of before is as it was: {reasons}") from error


def _writer(partial: Path, path: Path, plain: Mapping[str, Any]) -> Any:
    """Return a writer to a folder beside the checkpoint, which replaces the checkpoint when it is complete."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Writer(FileSystemWriter):
        # torch reports failures of `finish` to all ranks, so none waits for the first.
        @override
        def finish(self, *args: Any, **kwargs: Any) -> None:
            super().finish(*args, **kwargs)
            torch.save(dict(plain), partial / METADATA)
            _replace(partial, path)

    return Writer(partial)


def _free(partial: Path) -> str:
    try:  # torch does not report that a disk is full
        return f" ({shutil.disk_usage(partial).free / 1e6:.1f} MB are free there)"
    except OSError:
        return ""


def beside(path: Path, suffix: str) -> Path:
    """Return a path beside a checkpoint, for a folder that is not the checkpoint yet, or not any more.

    Lightning takes the digits of every name with ``ckpt_`` for the N of an ``hpc_ckpt_N.ckpt``, so this name has no
    ``ckpt_``.

    Example:
        >>> beside(Path("hpc_ckpt_2.ckpt"), "17.partial").name
        'hpc_ckpt-2.ckpt.17.partial'
    """
    return path.with_name(f"{path.name.replace('ckpt_', 'ckpt-')}.{suffix}")


def _replace(partial: Path, path: Path) -> None:
    before = beside(path, f"{os.getpid()}.before")
    if os.path.lexists(path):  # perhaps a link to a folder that is gone
        path.rename(before)
    partial.rename(path)
    if before.is_dir() and not before.is_symlink():
        shutil.rmtree(before, ignore_errors=True)
    else:
        before.unlink(missing_ok=True)


def by_names(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
    held = [names[parameter] for parameter in held_by(optimizer)]
    groups = [{**group, "params": [held[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": {held[index]: dict(values) for index, values in state["state"].items()}, "param_groups": groups}


def without_tensors(tree: Any, layout: Layout, parameters: Sequence[Tensor], tensors: dict[str, Any]) -> Any:
    """Return a tree as plain data: references replace its tensors, which are added to ``tensors``.

    The tree has one entry for each parameter, as in `lightning_omni.wire.partition.Partition.tree_parts`.
    """

    def put(value: Any, index: int | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = f"omni.{len(tensors)}"
        tensors[name] = value if index is None else like(value, parameters[index])
        return {_TENSOR: name, _PLACE: index}

    return over_parameters(in_order(tree), layout.specs, put)


# --- Loading ---------------------------------------------------------------------------------------------------------


class CheckpointFolder:
    """A checkpoint folder. Ranks of the default process group, or of a given one, read tensors together."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self.path = path
        self._known: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata

    def metadata(self, **options: Any) -> dict[str, Any]:
        """Return the data of `METADATA`; ``options`` are for ``torch.load``."""
        metadata: dict[str, Any] = torch.load(self.path / METADATA, map_location="cpu", **options)
        return metadata

    @property
    def optimizers(self) -> int:
        return len({name.split(".")[0] for name in self._known if name.startswith("optimizer_")})

    def weights(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Read the saved weights into the memory of a module's ``state_dict``, and return them.

        A name that the module lacks has an empty tensor.
        """
        begin = "state_dict."
        saved = [name.removeprefix(begin) for name in self._known if name.startswith(begin)]
        read = self._read({begin + name: own[name] for name in saved if name in own})
        return {name: read.get(begin + name, torch.empty(0)) for name in saved}

    def optimizer_state(self, number: int, optimizer: Optimizer, names: Mapping[Any, str]) -> dict[str, Any]:
        """Return an optimizer's ``state_dict``, sharded as its parameters.

        Raises:
            ConfigurationError: the checkpoint has another number of parameter groups.
        """
        own, held = optimizer.state_dict(), held_by(optimizer)
        places = {f"optimizer_{number}.state.{names[parameter]}.": place for place, parameter in enumerate(held)}
        found = {
            name: (place, name.removeprefix(begin))
            for name in self._known
            for begin, place in places.items()
            if name.startswith(begin)
        }
        read = self._read({name: self._room(name, held[place]) for name, (place, _) in found.items()})
        state: dict[int, dict[str, Any]] = {}
        for name, (place, key) in found.items():
            state.setdefault(place, {})[key] = read[name]
        return {"state": state, "param_groups": self._groups(number, own["param_groups"])}

    def _groups(self, number: int, own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        begin = f"optimizer_{number}.param_groups."
        read = self._read({name: self._room(name) for name in self._known if name.startswith(begin)})
        groups: dict[int, dict[str, Any]] = {}
        for name, value in read.items():
            index, _, key = name.removeprefix(begin).partition(".")
            groups.setdefault(int(index), {})[key] = value
        if len(groups) != len(own):
            raise ConfigurationError(
                f"ckpt_path={str(self.path)!r}: optimizer {number} has {len(groups)} parameter groups there and"
                f" {len(own)} here; make it as it was in configure_optimizers"
            )
        return [{**groups[index], "params": group["params"]} for index, group in enumerate(own)]

    def filled(self, tree: Any, parameters: Sequence[Tensor], group: Any) -> Any:
        """Return a tree of `without_tensors` with its tensors, sharded as parameters. All ranks of a group call it."""
        places: dict[str, int | None] = {}

        def note(leaf: Any) -> Any:
            if _is_reference(leaf):
                places[leaf[_TENSOR]] = leaf[_PLACE]
            return leaf

        tree_map(note, tree, is_leaf=_is_reference)
        rooms = {name: self._room(name, None if place is None else parameters[place]) for name, place in places.items()}
        read = self._read(rooms, group)
        return tree_map(lambda leaf: read[leaf[_TENSOR]] if _is_reference(leaf) else leaf, tree, is_leaf=_is_reference)

    def _room(self, name: str, parameter: Tensor | None = None) -> Any:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        known = self._known[name]
        if not isinstance(known, TensorStorageMetadata):
            return None
        if parameter is not None and known.size == parameter.shape:
            return torch.empty_like(parameter.detach(), dtype=known.properties.dtype)
        return torch.empty(known.size, dtype=known.properties.dtype)

    def _read(self, rooms: dict[str, Any], group: Any = None) -> dict[str, Any]:
        if rooms:
            from torch.distributed.checkpoint import state_dict_loader
            from torch.distributed.checkpoint.filesystem import FileSystemReader

            state_dict_loader.load(rooms, storage_reader=FileSystemReader(self.path), process_group=group)
        return rooms


def _is_reference(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) and _TENSOR in leaf


# --- Checkpoints ------------------------------------------------------------------------------------------------------

ENTRY = "omni"
"""The name of a checkpoint's added entry."""
NAME = "lightning_omni.run_state"
VERSION = 4
"""The version of the entry; any other is refused."""


@dataclass(frozen=True)
class RunCheckpoint:
    """The state of a run in a checkpoint.

    Attributes:
        cut: the updates and trained samples that it contains.
        samples: samples in the dataset, without padding; 0 if the data were not leased.
        progress: progress in samples and steps; None if the data were not leased.
        method: how groups exchanged, as plain data; None, and the next three empty, with one group or weights alone.
        parameters: names of the parameters of each optimizer.
        server: state of the method's server side, for each optimizer.
        states: each group's own state: memory and senders for each optimizer and, where optimizers step at the workers,
            weights and optimizer state. Empty if groups were training, or one's was lost.
        schedules: for each scheduler, its steps in the epoch, made and due at the cut; nothing for one that counts no
            steps.
        folder: the folder with the tensors of ``server`` and ``states``; None if these contain them.
    """

    cut: SnapshotId = field(default_factory=SnapshotId)
    groups: int = 0
    progress: Progress | None = None
    method: Mapping[str, Any] | None = None
    parameters: Sequence[Sequence[str]] | None = None
    server: Sequence[Any] = ()
    states: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    schedules: Sequence[Sequence[int]] = ()
    samples: int = 0
    folder: CheckpointFolder | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return plain data and tensors, which ``torch.load(weights_only=True)`` reads."""
        progress = self.progress
        run: dict[str, Any] = {
            "groups": self.groups,
            "samples": self.samples,
            "progress": progress and {**msgspec.to_builtins(progress), "steps": progress.steps},
            "schedules": [list(counts) for counts in self.schedules],
            "cut": {**msgspec.structs.asdict(self.cut), "trained": [list(span) for span in self.cut.trained]},
            "method": self.method and dict(self.method),
            "parameters": self.parameters,
            "server": list(self.server),
        }
        return {"name": NAME, "version": VERSION, "run": run, "group": dict(self.states)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RunCheckpoint | None:
        """Return the contents of a checkpoint's entry; None if it is not this package's.

        Raises:
            ConfigurationError: the entry has another version.
        """
        if plain.get("name") != NAME:
            return None
        if plain["version"] != VERSION:
            raise ConfigurationError(
                'the checkpoint was saved by another lightning-omni: its entry "omni" has version'
                f" {plain['version']}, and this one reads {VERSION}; use the lightning-omni that has saved it, or"
                " delete the entry, and what the server and the groups knew beyond the model is left out"
            )
        run = plain["run"]
        return cls(
            cut=msgspec.convert(run["cut"], SnapshotId),
            groups=run["groups"],
            progress=msgspec.convert(run["progress"], Progress | None),
            method=run["method"],
            parameters=run["parameters"],
            server=run["server"],
            states=plain["group"],
            schedules=run["schedules"],
            samples=run["samples"],
        )


# --- Rollback ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostCopy:
    """A tensor's value in host memory, pinned if possible for a CUDA device; sharded ones stay on their device."""

    value: Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> HostCopy:
        own = tensor.detach()
        if own.is_cpu or type(own) is not Tensor:
            return cls(own.clone(), own.device)
        try:
            value = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
        except RuntimeError:  # the system does not allow as much pinned memory
            value = torch.empty_like(own, device="cpu")
        return cls(value.copy_(own), own.device)

    def copy(self) -> Tensor:
        return self.value.clone() if self.value.device == self.device else self.value.to(self.device)


@dataclass(frozen=True)
class RollbackPoint:
    """The state to which a run is rolled back, in one group, after divergence or a trial.

    Hyperparameters are not rolled back.

    Attributes:
        weights: parameters, and averages of them that callbacks keep, each with its value.
        senders: memory of the sender of the group's pushes, for each optimizer.
    """

    weights: tuple[tuple[Tensor, HostCopy], ...]
    buffers: tuple[tuple[Tensor, HostCopy], ...]
    optimizers: tuple[tuple[Optimizer, Mapping[Any, Any]], ...]
    senders: tuple[State, ...]
    scaler: tuple[torch.amp.GradScaler, Mapping[str, Any]] | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        core: GroupCore,
        averages: Iterable[Tensor] = (),
        scaler: torch.amp.GradScaler | None = None,
    ) -> RollbackPoint:
        return cls(
            weights=tuple((each, HostCopy.of(each)) for each in (*module.parameters(), *averages)),
            buffers=tuple((each, HostCopy.of(each)) for each in module.buffers()),
            optimizers=tuple(
                (each, {parameter: _kept(values) for parameter, values in each.state.items()}) for each in optimizers
            ),
            senders=tuple(_kept(core.sender_state(index)) for index in range(len(optimizers))),
            scaler=None if scaler is None else (scaler, scaler.state_dict()),
        )

    @property
    def is_spoilt(self) -> bool:
        """Return whether a number of a weight or buffer that was finite then is not now."""
        pairs = ((tensor.detach(), kept.value) for tensor, kept in (*self.weights, *self.buffers))
        return any(bool((_are_finite(kept.to(own.device)) & ~_are_finite(own)).any()) for own, kept in pairs)

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Replace the kept weights and buffers by the present ones.

        Optimizer states stay: while several groups train, the present ones are at the server or differ between groups.
        """
        for tensor, kept in (*self.weights, *self.buffers):
            kept.value.copy_(tensor)

    def restore(self, core: GroupCore) -> None:
        with torch.no_grad():
            for tensor, kept in (*self.weights, *self.buffers):
                write(tensor, kept.value)
        for optimizer, states in self.optimizers:
            optimizer.state.clear()
            for parameter, values in states.items():
                optimizer.state[parameter] = _copied(values)
        for index, state in enumerate(self.senders):
            core.load_sender_state(index, _copied(state))
        if self.scaler is not None:  # its scale has fallen with each step that was not finite
            scaler, scale = self.scaler
            scaler.load_state_dict(dict(scale))


def _are_finite(tensor: Tensor) -> Tensor:
    # torch has no ``isfinite`` for some floats of 8 bits.
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor).isfinite()


def _kept(tree: Any) -> Any:
    return tree_map(lambda leaf: HostCopy.of(leaf) if isinstance(leaf, Tensor) else deepcopy(leaf), tree)


def _copied(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.copy() if isinstance(leaf, HostCopy) else deepcopy(leaf), tree)
