"""What a checkpoint holds while several groups train, what a resumed run takes from one, and its file.

Lightning's own entries stay those of plain DDP, with the weights and the optimizer state that the server has; what is
known beyond is one more entry, ``"omni"``: see `lightning_omni.optimizer.saved`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_omni.optimizer import World, names_of
from lightning_omni.optimizer.folders import Folder, by_names, without_tensors
from lightning_omni.optimizer.folders import save as save_folder
from lightning_omni.optimizer.saved import ENTRY, Saved
from lightning_omni.optimizer.server_store import ServerSnapshot
from lightning_omni.optimizer.sharding import is_part, local_of
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.progress import Progress
from lightning_omni.strategy.epochs import EpochDriver
from lightning_omni.strategy.loop_states import batches_in, go_on_after
from lightning_omni.strategy.published import Version
from lightning_omni.strategy.whole_files import write_whole

if TYPE_CHECKING:
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO as _Base
else:
    _Base = object


class Checkpoints:
    """The checkpoints of one strategy. A checkpoint is made of several calls, and all of it is of one moment.

    Args:
        info: logs a message for the user, on rank 0.

    Attributes:
        resumed: what the checkpoint that was loaded last says of its run.
        folder: that checkpoint, if it is one.
    """

    def __init__(self, info: Callable[[str], None]) -> None:
        self._info = info
        self.folder: Folder | None = None
        self._snapshot: ServerSnapshot | None = None
        self._has_said = False
        self.resumed = Saved()

    def forget(self) -> None:
        """The run is torn down."""
        self._snapshot, self.resumed, self.folder = None, Saved(), None

    # --- Saving ------------------------------------------------------------------------------------------------------

    def collect(
        self,
        world: World,
        module: Module,
        read: Callable[[], dict[str, Any]],
        version: Version | None = None,
        is_folder: bool = False,
        is_alone: bool = False,
    ) -> dict[str, Any]:
        """Return the module's state, with the weights that the method evaluates in the place of this group's own.

        At a synchronization point of all groups every rank takes part, and what the groups know each for itself is
        collected. In between the recorder speaks for itself and the server: the module holds the server's weights while
        it says what its state is, whatever its ``state_dict`` makes of them.

        Args:
            world: this rank's place in the run.
            module: what is trained.
            read: returns the module's state.
            version: what was validated, if that is what is to be saved; None for the weights as they are.
            is_folder: whether each member of the recorder's group saves its share of what members hold together.
            is_alone: whether others are elsewhere, wherever this rank is: it has failed.
        """
        # A group that enters finds the others computing.
        is_together = not (is_alone or world.is_computing or world.is_entering)
        if is_together:
            world.states.gather_group_state()
        elif world.core.wire_format.pushes.is_stateful and not self._has_said:
            self._has_said = True
            self._info(
                "OmniStrategy: a checkpoint is saved inside an epoch, where no group waits for the others: what they"
                f" have not pushed yet in the wire format {type(world.core.wire_format).__name__} is not in it; save"
                " at an epoch's end or after a validation to have it"
            )
        if not world.hands_over:
            return read()
        snapshot = world.channel.store.snapshot(version=version.number if version is not None else 0)
        if is_together and world.enlistment is None:  # a group that has joined does not know of all others
            snapshot = self._complete_groups(snapshot, world.live_groups)
        if world.share is not None:
            snapshot = world.states.sharded(snapshot)
        values: dict[Tensor, Tensor] = {}
        if world.is_computing:  # otherwise the module has them, or what a callback has put in their place
            values = _evaluated(world, module, snapshot)
            own, buffers = dict(module.named_buffers()), version.buffers if version is not None else {}
            values |= {own[name]: buffers[name] for name in own.keys() & buffers.keys()}
        state = _read_holding(values, read)
        gathers = world.share is not None and not is_folder
        self._snapshot = world.states.gathered(snapshot) if gathers else snapshot
        return state

    def _complete_groups(self, snapshot: ServerSnapshot, groups: Collection[int]) -> ServerSnapshot:
        """The snapshot; without what groups alone know unless all of it is there, for it is given to groups in order.

        Args:
            snapshot: of a synchronization point.
            groups: those that have handed in what they know.
        """
        missing = [str(group) for group in groups if group not in snapshot.groups]
        if not missing:
            return snapshot
        self._info(
            "OmniStrategy: the parameter server was restarted while a checkpoint was saved, and does not have what the"
            f" groups {', '.join(missing)} alone know (such as the state of optimizers that step there). The checkpoint"
            " therefore has this of no group, like one that is saved inside an epoch; the next one will be complete"
        )
        return snapshot._replace(groups={})

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
            self._snapshot = world.channel.store.snapshot()
        return {"state": world.states.whole(optimizer, self._snapshot.parts), "param_groups": own["param_groups"]}

    def complete(
        self,
        world: World,
        checkpoint: dict[str, Any],
        epochs: EpochDriver,
        tensors: dict[str, Any] | None = None,
    ) -> None:
        """Adds what server and groups know beyond Lightning.

        Args:
            world: this rank's place in the run.
            checkpoint: Lightning's; changed in place.
            epochs: know how far the run is.
            tensors: to which those of what is added go, if each member saves its share; changed in place.
        """
        snapshot, self._snapshot = self._snapshot, None
        groups, more = len(world.topology.alive), dict[str, Any]()
        if snapshot is None:
            progress, cut = epochs.moment()
            if progress is not None:
                if cut.epoch != -1:
                    _count_as_ddp(checkpoint, progress)
                schedules = epochs.schedulers.catch_up_in(checkpoint, progress)
                checkpoint[ENTRY] = Saved(cut, groups, progress, schedules=schedules).to_plain()
            return
        progress = None if epochs.progress is None else snapshot.cut.progress(epochs.progress)
        _count_as_ddp(checkpoint, progress)
        if "optimizer_states" in checkpoint:  # save_weights_only means it
            server, states = [part["method"] for part in snapshot.parts], snapshot.groups
            if tensors is not None:
                server = _without_tensors(world, server, tensors)
                states = {group: _without_tensors(world, states[group], tensors) for group in sorted(states)}
            more = {
                "method": m.method_to_wire(world.method),
                "parameters": [list(part["weights"]) for part in snapshot.parts],
                "server": server,
                "states": states,
            }
        schedules = epochs.schedulers.catch_up_in(checkpoint, progress)
        checkpoint[ENTRY] = Saved(snapshot.cut, groups, progress, schedules=schedules, **more).to_plain()

    def save_folder(
        self,
        world: World,
        module: Module,
        optimizers: Sequence[Optimizer],
        checkpoint: dict[str, Any],
        path: Path,
        epochs: EpochDriver,
    ) -> None:
        """Saves a checkpoint of which each member of the recorder's group writes its share; they all call it.

        Args:
            world: this rank's place in the run.
            module: what is trained.
            optimizers: of the Trainer.
            checkpoint: Lightning's; changed in place.
            path: of the folder.
            epochs: know how far the run is.
        """
        tensors: dict[str, Any] = {}
        self.complete(world, checkpoint, epochs, tensors)
        names = names_of(module)
        tensors["state_dict"] = checkpoint.pop("state_dict")
        for number, (optimizer, state) in enumerate(
            zip(optimizers, checkpoint.pop("optimizer_states", ()), strict=False)
        ):
            tensors[f"optimizer_{number}"] = by_names(optimizer, state, names)
        save_folder(path, tensors, checkpoint, world.holder_group)

    # --- Resuming ----------------------------------------------------------------------------------------------------

    def read(self, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint was loaded, of this strategy or of any other."""
        self.resumed = replace(Saved.from_plain(checkpoint.get(ENTRY, {})) or Saved(), folder=self.folder)

    def open_folder(self, path: Path, module: Module, **options: Any) -> dict[str, Any]:
        """Reads a checkpoint that is a folder, but for what optimizers are to load. All ranks call it.

        Args:
            path: of the folder.
            module: whose weights are read, in its own memory.
            options: of ``torch.load``, for what is neither weights nor optimizer state.
        """
        self.folder = Folder(path)
        checkpoint = {**self.folder.metadata(**options), "state_dict": self.folder.weights(module.state_dict())}
        if self.folder.optimizers:
            checkpoint["optimizer_states"] = [{}] * self.folder.optimizers  # until there are optimizers to load them
        return checkpoint

    def optimizer_states(
        self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], module: Module
    ) -> list[dict[str, Any]]:
        """What optimizers are to load. All ranks call it.

        Args:
            checkpoint: that was loaded.
            optimizers: of the Trainer.
            module: what is trained.
        """
        if self.folder is None:
            return list(checkpoint["optimizer_states"])
        names = names_of(module)
        numbered = enumerate(optimizers[: self.folder.optimizers])
        return [self.folder.optimizer_state(number, optimizer, names) for number, optimizer in numbered]


def _count_as_ddp(checkpoint: dict[str, Any], progress: Progress | None) -> None:
    """DDP is to train as many batches more of the epoch under way as all groups have left of it.

    Args:
        checkpoint: Lightning's, whose loops count those of one group; changed in place.
        progress: of the run; None if it does not tell.
    """
    if progress is None or "loops" not in checkpoint:
        return
    batches = max(1, progress.samples // progress.reference.samples) * progress.reference.window
    # Where nothing is exchanged yet the loops have counted what is in no weights; or nothing, where the epoch begins.
    has_begun = progress.samples > 0 or batches_in(checkpoint["loops"]) > batches
    if has_begun and batches < progress.batches:
        go_on_after(checkpoint["loops"], batches)


def _without_tensors(world: World, trees: Sequence[Any], tensors: dict[str, Any]) -> list[Any]:
    pairs = zip(world.parts, trees, strict=True)
    return [without_tensors(tree, part.replica.layout, part.replica.ordered, tensors) for part, tree in pairs]


def _evaluated(world: World, module: Module, snapshot: ServerSnapshot) -> dict[Tensor, Tensor]:
    """Return the module's parameters that the server has, with the server's weights of them."""
    mine = {name: parameter for parameter, name in names_of(module).items()}
    return {
        own: value
        for part, theirs in zip(world.parts, snapshot.parts, strict=True)
        for name, value in theirs["weights"].items()
        if world.method.evaluated != "mean" or part.head is not None
        if (own := part.replica.parameters.get(name, mine.get(name))) is not None
    }


def _read_holding(values: Mapping[Tensor, Tensor], read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a module's state while tensors of it have other values; afterwards they have their own again.

    What is read is copied to the CPU, but for shards, where it is in the memory of these tensors.

    Args:
        values: of tensors of the module; those of another shape are left out.
        read: returns the module's state.
    """
    # What goes through ``.data`` is no edit of the user's: torch does not count it.
    pairs = [(local_of(own).data, local_of(value)) for own, value in values.items() if own.shape == value.shape]
    kept = [(own, own.to("cpu", copy=True)) for own, _ in pairs]
    written = {_address_of(own) for own, _ in pairs} - {0}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or _address_of(leaf) not in written:
            return leaf
        return leaf.detach().clone() if is_part(leaf) else leaf.detach().to("cpu", copy=True)

    try:
        for own, value in pairs:
            own.copy_(value)
        state = read()
        for name, entry in state.items():
            state[name] = tree_map(copied, entry)
    finally:
        for own, value in kept:
            own.copy_(value)
    return state


def _address_of(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins; 0 if it has none."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # of a class that has no memory itself
        return 0


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
        write_whole(checkpoint, path)
