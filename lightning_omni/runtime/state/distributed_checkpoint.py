"""Checkpoints that are folders: torch's distributed checkpoint, in the layout of Lightning's ModelParallelStrategy.

Rule 1: each rank writes its own parts, and reads the parts that it is to have. No rank holds a whole sharded tensor.
Rule 2: a folder replaces an earlier one once it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.model.master import held_by
from lightning_omni.runtime.model.sharded import in_order, like
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.partition import over_parameters

METADATA = "meta.pt"
"""The file in the folder with all data except weights and optimizer state."""
_TENSOR, _PLACE = "omni.tensor", "omni.place"


def is_folder(path: Any) -> bool:
    """Return whether a path is such a checkpoint.

    Raises:
        ConfigurationError: the path is an incomplete folder.
    """
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
    """Save a checkpoint. All ranks of a process group call it.

    Args:
        path: path of the folder, the same on all of them.
        tensors: a tree of this rank's sharded tensors, and of values that are the same on all ranks.
        plain: all other data; those of the first rank are saved.
        group: the process group.

    Raises:
        OSError: the checkpoint could not be written, on all ranks; an earlier one is unchanged.
    """
    partial = beside(path, "partial")
    is_first = dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier(group)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=_Writer(partial, path, plain), process_group=group)
    except CheckpointException as error:
        reasons = ", ".join(sorted({str(reason) for reason, _ in error.failures.values()})) + _free(partial)
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{path}: this checkpoint was not saved; one of before is as it was: {reasons}") from error


class _Writer(FileSystemWriter):
    """A writer to a folder beside the checkpoint, which replaces the checkpoint when it is complete.

    The first rank's own operations are in `finish`: torch reports their failure to all ranks, so none waits for it.
    """

    def __init__(self, partial: Path, path: Path, plain: Mapping[str, Any]) -> None:
        super().__init__(partial)
        self._partial, self._path, self._plain = partial, path, plain

    @override
    def finish(self, *args: Any, **kwargs: Any) -> None:
        super().finish(*args, **kwargs)
        torch.save(dict(self._plain), self._partial / METADATA)
        _replace(self._partial, self._path)


def _free(partial: Path) -> str:
    """Return the free disk space, as the end of a message: torch does not report that a disk is full."""
    try:
        return f" ({shutil.disk_usage(partial).free / 1e6:.1f} MB are free there)"
    except OSError:
        return ""


def beside(path: Path, suffix: str) -> Path:
    """Return a path beside a checkpoint, for a folder that is not the checkpoint yet, or not any more.

    A process that is killed leaves it. Lightning searches for the last ``hpc_ckpt_N.ckpt``, and takes all digits of
    every name with ``ckpt_`` in it for such an N; this name contains none.

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
    """Return an optimizer's ``state_dict`` with names of parameters in place of their numbers."""
    held = [names[parameter] for parameter in held_by(optimizer)]
    groups = [{**group, "params": [held[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": {held[index]: dict(values) for index, values in state["state"].items()}, "param_groups": groups}


def without_tensors(tree: Any, layout: Layout, parameters: Sequence[Tensor], tensors: dict[str, Any]) -> Any:
    """Return a tree as plain data, with references in place of its tensors, which are added to the checkpoint's.

    Args:
        tree: this rank's part, with one entry for each parameter, as in
            `lightning_omni.wire.partition.Split.tree_parts`.
        layout: layout of this rank's parts of the parameters.
        parameters: the parameters, in the order of the layout.
        tensors: tensors of the checkpoint; changed in place.
    """

    def put(value: Any, index: int | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = f"omni.{len(tensors)}"
        tensors[name] = value if index is None else like(value, parameters[index])
        return {_TENSOR: name, _PLACE: index}

    return over_parameters(in_order(tree), layout.specs, put)


# --- Loading ---------------------------------------------------------------------------------------------------------


class Folder:
    """A checkpoint folder to read from. Ranks of a process group that read the same data do so together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata

    def metadata(self, **options: Any) -> dict[str, Any]:
        """Return all data except weights and optimizer state; the options are those of ``torch.load``."""
        metadata: dict[str, Any] = torch.load(self.path / METADATA, map_location="cpu", **options)
        return metadata

    @property
    def optimizers(self) -> int:
        return len({name.split(".")[0] for name in self._known if name.startswith("optimizer_")})

    def weights(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Read a module's weights into the memory of its ``state_dict``, sharded or not, and return one.

        It has the entries of the folder, with an empty tensor under each name that the module lacks.
        """
        begin = "state_dict."
        saved = [name.removeprefix(begin) for name in self._known if name.startswith(begin)]
        read = self._read({begin + name: own[name] for name in saved if name in own})
        return {name: read.get(begin + name, torch.empty(0)) for name in saved}

    def optimizer_state(self, number: int, optimizer: Optimizer, names: Mapping[Any, str]) -> dict[str, Any]:
        """Return an optimizer's ``state_dict``, its tensors sharded as its parameters are.

        Args:
            number: number of the optimizer in the checkpoint.
            optimizer: the optimizer that is to load it.
            names: names of all parameters of the module.

        Raises:
            ConfigurationError: the checkpoint has another number of parameter groups.
        """
        own, held = optimizer.state_dict(), held_by(optimizer)
        places = {f"optimizer_{number}.state.{names[parameter]}.": place for place, parameter in enumerate(held)}
        found: dict[str, tuple[int, str]] = {}
        for name in self._known:
            for begin, place in places.items():
                if name.startswith(begin):
                    found[name] = place, name.removeprefix(begin)
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
        """Allocate memory for an entry: sharded as its parameter if that has the same shape, otherwise whole."""
        known = self._known[name]
        if not isinstance(known, TensorStorageMetadata):
            return None
        if parameter is not None and known.size == parameter.shape:
            return torch.empty_like(parameter.detach(), dtype=known.properties.dtype)
        return torch.empty(known.size, dtype=known.properties.dtype)

    def _read(self, rooms: dict[str, Any], group: Any = None) -> dict[str, Any]:
        if rooms:
            state_dict_loader.load(rooms, storage_reader=FileSystemReader(self.path), process_group=group)
        return rooms


def _is_reference(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) and _TENSOR in leaf
