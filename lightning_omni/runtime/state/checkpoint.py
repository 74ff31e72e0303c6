"""The state of a run in a checkpoint beside Lightning's own entries, which are those of plain DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lightning_omni.errors import ConfigurationError
from lightning_omni.runtime.state.distributed_checkpoint import Folder
from lightning_omni.wire.messages import SnapshotId
from lightning_omni.wire.steps_and_samples import Progress

ENTRY = "omni"
"""The name of the entry that is added to a checkpoint."""
NAME = "lightning_omni.run_state"
VERSION = 4
"""The version of the entry; an entry of another version is refused."""


@dataclass(frozen=True)
class Saved:
    """The state of a run in a checkpoint.

    Attributes:
        cut: the moment of the server at which it was saved.
        groups: number of groups.
        samples: samples in the dataset of the cut's epoch, whose total is padded for the number of ranks; 0 if the data
            were not leased.
        progress: progress in samples and steps; None if the data were not leased.
        method: how groups exchanged, as plain data; None, as are all that follow, if only weights were saved.
        parameters: names of the parameters of each optimizer.
        server: state of the method's server side, for each optimizer.
        states: for each group, the state that only it has: memory and senders, for each optimizer, and its weights and
            optimizer state where optimizers step at the workers. Empty if several groups were training.
        schedules: for each scheduler, its count, and its count if it had kept pace until the exact moment of the save,
            of which the saving rank knew less; nothing for one that counts no steps.
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
    folder: Folder | None = None

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
    def from_plain(cls, plain: Mapping[str, Any]) -> Saved | None:
        """Return the contents of a checkpoint's entry; None if the entry is not this package's.

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
