"""What a checkpoint holds while several groups train, what a resumed run takes from one, and its file.

Lightning's own entries stay those of plain DDP, with the weights and the optimizer state that the server has; what is
known beyond is one more entry, ``"omni"``: see `lightning_omni.optimizer.saved`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_omni.optimizer import World, names_of
from lightning_omni.optimizer.channel import ServerSnapshot
from lightning_omni.optimizer.saved import Saved
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.progress import Progress
from lightning_omni.strategy.published import Version

if TYPE_CHECKING:
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO as _Base
else:
    _Base = object

ENTRY = "omni"
"""The name of what is added to a checkpoint."""


class Checkpoints:
    """The checkpoints of one strategy. A checkpoint is made of several calls, and all of it is of one moment.

    Args:
        say: tells the user something, on rank 0.

    Attributes:
        resumed: what the checkpoint that was loaded last says of its run.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._snapshot: ServerSnapshot | None = None
        self._has_said = False
        self.resumed = Saved()

    def forget(self) -> None:
        """The run is torn down."""
        self._snapshot, self.resumed = None, Saved()

    # --- Saving ------------------------------------------------------------------------------------------------------

    def collect(self, world: World, module: Module, state: dict[str, Any], version: Version | None = None) -> None:
        """Puts the weights that the method evaluates into the module's state, in the place of this group's own.

        At a synchronization point of all groups every rank takes part, and what the groups know each for itself is
        collected. In between the recorder speaks for itself and the server.

        Args:
            world: this rank's place in the run.
            module: what is trained.
            state: from its ``state_dict``; changed in place.
            version: what was validated, if that is what is to be saved; None for the weights as they are.
        """
        if not world.is_computing:
            world.states.gather_group_state()
        elif world.core.wire_format.pushes.is_stateful and not self._has_said:
            self._has_said = True
            self._say(
                "OmniStrategy: a checkpoint is saved inside an epoch, where no group waits for the others: what they"
                f" have not pushed yet in the wire format {type(world.core.wire_format).__name__} is not in it; save"
                " at an epoch's end or after a validation to have it"
            )
        if world.hands_over:
            self._snapshot = world.channel.snapshot(version=version.number if version is not None else 0)
            if world.share is not None:
                self._snapshot = world.states.gathered(self._snapshot)
            if world.is_computing:  # otherwise the module has them, or what a callback has put in their place
                _overlay(world, module, state, self._snapshot)
                buffers = version.buffers if version is not None else {}
                state.update((name, buffer) for name, buffer in buffers.items() if name in state)

    def state_of(self, world: World, optimizer: Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        """The optimizer state of the same moment: the server's, with this rank's hyperparameters, if it steps there.

        (The server's own are those of the last push, one scheduler step behind.)

        Args:
            world: this rank's place in the run.
            optimizer: one that was attached.
            own: its own state.
        """
        if all(world.steps_here(part) for part in world.parts if part.optimizer is optimizer):
            return own
        if self._snapshot is None:
            self._snapshot = world.channel.snapshot()
        return {"state": world.states.whole(optimizer, self._snapshot.parts), "param_groups": own["param_groups"]}

    def complete(self, world: World, checkpoint: dict[str, Any], progress: Progress | None) -> None:
        """Adds what server and groups know beyond Lightning.

        Args:
            world: this rank's place in the run.
            checkpoint: Lightning's; changed in place.
            progress: how far the run is.
        """
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        groups, more = len(world.topology.alive), dict[str, Any]()
        progress = None if progress is None else snapshot.cut.progress(progress)
        if "optimizer_states" in checkpoint:  # save_weights_only means it
            more = {
                "method": m.method_to_wire(world.method),
                "parameters": [list(part["weights"]) for part in snapshot.parts],
                "server": [part["method"] for part in snapshot.parts],
                "states": snapshot.groups,
            }
        checkpoint[ENTRY] = Saved(snapshot.cut, groups, progress, **more).to_plain()

    # --- Resuming ----------------------------------------------------------------------------------------------------

    def read(self, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint was loaded, of this strategy or of any other."""
        self.resumed = Saved.from_plain(checkpoint.get(ENTRY, {})) or Saved()


def _overlay(world: World, module: Module, state: dict[str, Any], snapshot: ServerSnapshot) -> None:
    """Puts master weights in the place of own ones, under every name that a tied parameter has."""
    mine = {name: parameter for parameter, name in names_of(module).items()}
    masters = {
        id(part.replica.parameters.get(name, mine.get(name))): value
        for part, theirs in zip(world.parts, snapshot.parts, strict=True)
        for name, value in theirs["weights"].items()
        if world.method.evaluated != "mean" or part.head is not None
    }
    for name, own in module.state_dict(keep_vars=True).items():
        if id(own) in masters and name in state:
            state[name] = masters[id(own)]


class WholeFileHooks(_Base):
    """Lightning's way to save checkpoints, but for local files: written beside the old one, and then renamed.

    Lightning's own writes to a temporary file elsewhere and moves it. Between two file systems moving is copying, and
    where the disk is full a truncated file is left, in the place of what was there before.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint.

        Raises:
            OSError: it could not be written; what was there before is as it was.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        final = Path(path).expanduser()
        final.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()  # torch does not say what went wrong with a file
        torch.save(checkpoint, buffer)
        partial = final.with_name(f"{final.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(buffer.getbuffer())
            partial.replace(final)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            reason = f"{error.strerror}: this checkpoint was not saved; one of before is as it was"
            raise OSError(error.errno, reason, str(final)) from error
