"""Checkpoints while several groups train: the strategy's hooks, the contents, and the state of a resumed run.

Lightning's own entries are those of plain DDP, with the server's weights and optimizer state. All further state is in
one more entry, ``"omni"``: see `lightning_omni.runtime.state.checkpoint`.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_omni.errors import RankLost, UnsupportedError
from lightning_omni.runtime import World, names_of
from lightning_omni.runtime.loop_checks import failed_at_one_place, place_of
from lightning_omni.runtime.model.meshes import FSDP
from lightning_omni.runtime.model.sharded import (
    is_part,
    is_sharded,
    local_of,
    named_rows,
    reshard,
    state_rows,
    tensors_of,
    whole,
)
from lightning_omni.runtime.server_exchange import ServerSnapshot
from lightning_omni.runtime.state.checkpoint import (
    ENTRY,
    CheckpointFolder,
    RunCheckpoint,
    beside,
    by_names,
    is_folder,
    without_tensors,
)
from lightning_omni.runtime.state.checkpoint import save as save_folder
from lightning_omni.strategy.grouping import GroupedStrategy
from lightning_omni.strategy.joining import RunStates
from lightning_omni.strategy.lightning_internals.loops import progress_counters
from lightning_omni.strategy.loops.driver import EpochDriver
from lightning_omni.strategy.loops.validation import Version
from lightning_omni.strategy.signals import Signals
from lightning_omni.topology import RECORDER
from lightning_omni.wire import messages as m
from lightning_omni.wire.steps_and_samples import Progress

if TYPE_CHECKING:
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO as _Base
else:
    _Base = object


class Checkpoints:
    """The checkpoints of one strategy. Several calls make one checkpoint, which is consistent.

    Args:
        info: logs a message for the user, on rank 0.

    Attributes:
        resumed: the run's entry in the checkpoint that was loaded last.
        folder: that checkpoint, if it is a folder.
    """

    def __init__(self, info: Callable[[str], None]) -> None:
        self._info = info
        self.folder: CheckpointFolder | None = None
        self._snapshot: ServerSnapshot | None = None
        self._has_said = False
        self.resumed = RunCheckpoint()

    def forget(self) -> None:
        self._snapshot, self.resumed, self.folder = None, RunCheckpoint(), None

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
        """Return the module's state, with the weights that the method evaluates instead of this group's own.

        At a synchronization point every rank participates, and the states that only groups hold are collected. At other
        times the recorder saves its own state and the server's: the module holds the server's weights while its
        ``state_dict`` is called.

        Args:
            world: this rank's world.
            module: the module.
            read: returns the module's state.
            version: the validation whose weights are saved; None for the present ones.
            is_folder: whether each member of the recorder's group saves its own shards.
            is_alone: whether this rank has failed, so that the others do not call this.
        """
        # The others compute already when a group enters the run.
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
        if not world.owns_state:
            return read()
        snapshot = world.exchange.store.snapshot(version=version.number if version is not None else 0)
        if is_together and world.registration is None:  # a group that has joined does not have a list of the others
            snapshot = self._complete_groups(snapshot, world.live_groups)
        if world.share is not None:
            snapshot = world.states.sharded(snapshot)
        values: dict[Tensor, Tensor] = {}
        if world.is_computing:  # otherwise the module holds them, or the weights that a callback has put there
            values = _evaluated(world, module, snapshot)
            own, buffers = dict(module.named_buffers()), version.buffers if version is not None else {}
            values |= {own[name]: buffers[name] for name in own.keys() & buffers.keys()}
        state = _read_holding(values, read)
        gathers = world.share is not None and not is_folder
        self._snapshot = world.states.gathered(snapshot) if gathers else snapshot
        return state

    def _complete_groups(self, snapshot: ServerSnapshot, groups: Collection[int]) -> ServerSnapshot:
        """Return the snapshot, without all groups' states if one group's is missing: they are restored in order."""
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
        """Return the optimizer state that belongs to the saved weights, from the server if the optimizer steps there.

        The hyperparameters are those of this rank. (The server's are those of the last push, one scheduler step
        behind.)
        """
        if world.steps_at_worker:
            return own
        if self._snapshot is None:
            self._snapshot = world.exchange.store.snapshot()
        return {"state": world.states.whole(optimizer, self._snapshot.parts), "param_groups": own["param_groups"]}

    def complete(
        self,
        world: World,
        checkpoint: dict[str, Any],
        epochs: EpochDriver,
        tensors: dict[str, Any] | None = None,
    ) -> None:
        """Add the state of server and groups that Lightning does not have to a checkpoint, in place.

        If each member saves its shards, the added tensors go to ``tensors``.
        """
        snapshot, self._snapshot = self._snapshot, None
        groups, more = len(world.topology.alive), dict[str, Any]()
        samples = 0 if epochs.leases is None else epochs.leases.dataset_size
        if snapshot is None:
            progress, cut = epochs.run.moment(epochs.is_open, epochs.is_open_ended)
            if progress is not None:
                if cut.epoch != -1:
                    _count_as_ddp(checkpoint, progress)
                schedules = epochs.schedulers.catch_up_in(checkpoint, progress)
                checkpoint[ENTRY] = RunCheckpoint(
                    cut, groups, progress, schedules=schedules, samples=samples
                ).to_plain()
            return
        progress = None if epochs.run.progress is None else snapshot.cut.progress(epochs.run.progress)
        _count_as_ddp(checkpoint, progress)
        if "optimizer_states" in checkpoint:  # with save_weights_only there are none
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
        more |= {"schedules": epochs.schedulers.catch_up_in(checkpoint, progress), "samples": samples}
        checkpoint[ENTRY] = RunCheckpoint(snapshot.cut, groups, progress, **more).to_plain()

    def save_folder(
        self,
        world: World,
        module: Module,
        optimizers: Sequence[Optimizer],
        checkpoint: dict[str, Any],
        path: Path,
        epochs: EpochDriver,
    ) -> None:
        """Save a checkpoint of which each member of the recorder's group writes its shards; they all call it.

        The checkpoint is changed in place.
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
        """Read the run's entry of a loaded checkpoint, of this strategy or of any other."""
        self.resumed = replace(
            RunCheckpoint.from_plain(checkpoint.get(ENTRY, {})) or RunCheckpoint(), folder=self.folder
        )

    def open_folder(self, path: Path, module: Module, **options: Any) -> dict[str, Any]:
        """Read a checkpoint that is a folder, without the states of optimizers. All ranks call it.

        The weights are read into the module's own memory; ``options`` are for ``torch.load`` of everything else.
        """
        self.folder = CheckpointFolder(path)
        checkpoint = {**self.folder.metadata(**options), "state_dict": self.folder.weights(module.state_dict())}
        if self.folder.optimizers:
            checkpoint["optimizer_states"] = [{}] * self.folder.optimizers  # placeholders until the optimizers exist
        return checkpoint

    def optimizer_states(
        self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], module: Module
    ) -> list[dict[str, Any]]:
        """Return the states for the Trainer's optimizers to load. All ranks call it."""
        if self.folder is None:
            return list(checkpoint["optimizer_states"])
        names = names_of(module)
        numbered = enumerate(optimizers[: self.folder.optimizers])
        return [self.folder.optimizer_state(number, optimizer, names) for number, optimizer in numbered]


def _count_as_ddp(checkpoint: dict[str, Any], progress: Progress | None) -> None:
    """Set the loops of a checkpoint, in place, so that DDP trains as many more batches as all groups have left.

    The loops have counted the batches of one group.
    """
    if progress is None or "loops" not in checkpoint:
        return
    batches = max(1, progress.samples // progress.reference.samples) * progress.reference.window
    # Before the first exchange the loops have counted batches that are in no weights, and at the epoch's begin none.
    has_begun = progress.samples > 0 or batches_in(checkpoint["loops"]) > batches
    if has_begun and batches < progress.batches:
        go_on_after(checkpoint["loops"], batches)


def _without_tensors(world: World, trees: Sequence[Any], tensors: dict[str, Any]) -> list[Any]:
    pairs = zip(world.parts, trees, strict=True)
    return [without_tensors(tree, part.replica.layout, part.replica.ordered, tensors) for part, tree in pairs]


def _evaluated(world: World, module: Module, snapshot: ServerSnapshot) -> dict[Tensor, Tensor]:
    """Return the server's weights by the parameter of the module."""
    mine = {name: parameter for parameter, name in names_of(module).items()}
    return {
        own: value
        for part, theirs in zip(world.parts, snapshot.parts, strict=True)
        for name, value in theirs["weights"].items()
        if world.method.evaluated != "mean"
        if (own := part.replica.parameters.get(name, mine.get(name))) is not None
    }


def _read_holding(values: Mapping[Tensor, Tensor], read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a module's state while its tensors hold other values temporarily; values of another shape are left out.

    Parts of the state in the memory of these tensors are copied: shards on their device, others to the CPU.
    """
    # torch does not count writes to ``.data``, so that they are not taken for edits by the user.
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
    """Return the address of a tensor's memory; 0 if it has none."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # its class has no memory of its own
        return 0


class WholeFileHooks(_Base):
    """A Lightning checkpoint plugin that writes a local file next to the old one, and then renames it.

    Lightning's own plugin moves a temporary file from elsewhere. A move between two file systems is a copy, and if the
    disk is full, a truncated file replaces the old one.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint.

        Raises:
            OSError: the file could not be written; an older file of that name is unchanged.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_whole(checkpoint, path)


def write_whole(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write a checkpoint, and the folder of its path if that does not exist.

    Raises:
        OSError: the file could not be written; an older file of that name is unchanged.
    """
    final = Path(path).expanduser()
    final.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()  # the errors of torch's own writes have no cause
    torch.save(checkpoint, buffer)
    partial = beside(final, f"{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(buffer.getbuffer())
        partial.replace(final)
    except BaseException as error:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        reason = f"{error.strerror}: this checkpoint was not saved; one of before is as it was"
        raise OSError(error.errno, reason, str(final)) from error


def end_whole_epoch(loops: Mapping[str, Any], batches: int) -> None:
    """Set the batch count after an epoch's last batch to that of DDP; changed in place.

    A group trains another number of batches, from which Lightning would not recognize that the epoch is over.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    if progress["is_last_batch"]:
        _count(progress["current"], batches)


def cut_short(loops: Mapping[str, Any], batches: int) -> None:
    """Mark an epoch that max_steps has ended early as incomplete after ``batches`` of DDP; changed in place.

    Otherwise Lightning would treat the epoch as complete, and a resumed run with more steps would begin the next one.
    """
    loops["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
    go_on_after(loops, batches)


def batches_in(loops: Mapping[str, Any]) -> int:
    """Return the batches of the current epoch that the loops of a checkpoint have counted."""
    return int(loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"])


def go_on_after(loops: Mapping[str, Any], batches: int) -> None:
    """Set the batch count of the loops inside an epoch, after which DDP resumes; changed in place."""
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    if not progress["is_last_batch"]:
        _count(progress["current"], batches)


def _count(current: dict[str, int], batches: int) -> None:
    current.update({name: count - current["ready"] + batches for name, count in current.items()})


# --- Hooks of the strategy --------------------------------------------------------------------------------------------

SAVING = 10.0
"""Seconds for which a failed rank waits for the recorder to fetch its state; the recorder may have failed, too."""


class SavingStrategy(GroupedStrategy):
    """A strategy in groups, with Lightning's hooks for checkpoints.

    Attributes:
        checkpoints: the contents of checkpoints, for saving and after loading.
        run_states: the state of the run for groups that join on their own.
        signals: the signals of the process.
        has_failed: whether the fit ends with an error on this rank, perhaps on no other; then it waits for no other.
        is_writing: whether this rank is writing a checkpoint, which includes no wait for others.
        plain_checkpoint_io: Lightning's own checkpoint plugin.
        checkpoint_io_class: class of its replacement.
    """

    checkpoints: Checkpoints
    run_states: RunStates
    signals: Signals
    has_failed: bool
    _failed_at: str
    is_writing: bool
    plain_checkpoint_io: type
    checkpoint_io_class: type

    @property
    def saves_folders(self) -> bool:
        """Return whether each member of a group writes its shards of a checkpoint to a folder."""
        sharding = self._world_options.model_parallel
        return sharding is not None and sharding.distributed_checkpoint

    @property
    def given_folders(self) -> str:
        """Return the argument that makes `saves_folders` true as a user writes it, for messages."""
        if isinstance(self._world_options.model_parallel, FSDP):
            return "FSDP(distributed_checkpoint=True)"
        return "ModelParallelStrategy(save_distributed_checkpoint=True)"

    def _take_time(self) -> None:
        self.signals.pause()
        if self._world is not None and self.world.control is not None:
            self.world.control.suspend_stall_check()

    @property
    def _is_asynchronous(self) -> bool:
        """Return whether several groups train, so that no rank has everything that belongs in a checkpoint."""
        return self._world is not None and self.world.executor.control is not None

    def fails(self, exception: BaseException) -> None:
        """Note that the fit ends with an error on this rank, before callbacks receive it and perhaps save."""
        if not self._ends_with_all(exception):
            self.has_failed, self._failed_at = True, place_of(exception)
            self.world.explain(exception)

    def _ends_with_all(self, exception: BaseException) -> bool:
        """Return whether all ranks end together, by SIGTERM."""
        return self.signals.is_stopping and isinstance(exception, SystemExit)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks of the default process group, unless this rank has failed.

        Saving a checkpoint ends with a barrier, also where a callback saves one because of an error. Peers without an
        error wait for this rank elsewhere, and the server would not learn of it. If all ranks have failed at once, the
        recorder may still be fetching state, and the run is over as soon as another rank of its group has left.
        """
        if not self.has_failed:
            with self.waiting():
                super().barrier(name)
            return
        world = self.world
        if world.control is not None and not world.is_leader and (world.registration or RECORDER in world.members):
            world.control.wait_for_end(SAVING)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with the weights that the method evaluates instead of this group's own.

        At a synchronization point every rank participates: see `Checkpoints.collect`. At other times rank 0 saves its
        own state and the server's; if the method evaluates the mean of all groups' weights, such a checkpoint has those
        of rank 0's group.
        """
        if self.run_states.is_described:
            return {}
        self._take_time()
        self._check_failed_alike()
        if self._world is not None:
            reshard(self.world.wrapper.sharded)
            self.world.agree_on_recorder()
        read = super().lightning_module_state_dict
        if not self._is_asynchronous:
            return self._put_together(read())
        version = self.epochs.published.version
        return self._put_together(
            self.checkpoints.collect(self.world, self.pl_module, read, version, self.saves_folders, self.has_failed)
        )

    def _check_failed_alike(self) -> None:
        """Raise `RankLost` if this rank has failed and the ranks that share the model with it have not failed alike."""
        if not (self.has_failed and self.is_sharded) or self._world is None:
            return
        world = self._world
        if not (world.registration or self.saves_folders or world.is_with_recorder):  # this rank saves nothing
            return
        where = f"{progress_counters(self._trainer)} {self._failed_at}"
        group = world.process_groups.original
        if not failed_at_one_place(group, world.rank, world.members, where, SAVING):
            raise RankLost(
                "no checkpoint is saved: the ranks of a group hold the model together, and not all of them have failed"
                " at one place, so that they cannot put it together"
            )

    def _put_together(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the whole state on the recorder, gathered from the members of its group that hold parts of it."""
        if not self.is_sharded or self.saves_folders or not self.world.is_with_recorder:
            return state
        together: dict[str, Any] = whole(state, keeps=self.world.is_recorder)
        return together

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer state to the saved weights, from the server if the optimizer steps there."""
        own: dict[str, Any] = super().optimizer_state(optimizer)
        if self.run_states.is_described:
            return {"state": {}, "param_groups": own["param_groups"]}
        if self._is_asynchronous and (self.world.owns_state if self.saves_folders else self.world.is_recorder):
            own = self.checkpoints.state_of(self.world, getattr(optimizer, "optimizer", optimizer), own)
        return self._put_together(own)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights; where the members of a group hold the model together, each loads its rows."""
        if self.is_sharded and is_sharded(self.pl_module):
            state = named_rows(checkpoint["state_dict"], tensors_of(self.pl_module).items())
            checkpoint = {**checkpoint, "state_dict": state}
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole optimizer states; where the members of a group hold the model together, each loads its rows."""
        states = self.checkpoints.optimizer_states(checkpoint, self.optimizers, self.pl_module)
        if self.is_sharded:
            pairs = zip(self.optimizers, states, strict=False)
            states = [state_rows(saved, optimizer) for optimizer, saved in pairs]
        checkpoint = {**checkpoint, "optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint with the state of server and groups: clocks, trained samples and the method's own state."""
        if self.epochs.run.is_whole and "loops" in checkpoint:
            batches = self._trainer.fit_loop.max_batches
            if math.isfinite(batches):
                end_whole_epoch(checkpoint["loops"], int(batches))
        if self.epochs.is_cut_short and "loops" in checkpoint:
            cut_short(checkpoint["loops"], self.epochs.batches_cut_short)
        if self.saves_folders:
            self._save_folder(checkpoint, filepath, storage_options)
            return
        if self._world is not None:
            self.checkpoints.complete(self.world, checkpoint, self.epochs)
        if type(self.checkpoint_io) is self.plain_checkpoint_io:  # the user has passed no plugin
            self.checkpoint_io = self.checkpoint_io_class()
        self.is_writing = True
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        finally:
            self.is_writing = False

    def _save_folder(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if storage_options is not None or "://" in str(filepath):
            raise UnsupportedError(
                f"{self.given_folders} and a checkpoint at {filepath}: each rank writes its share to files of its own;"
                " save it in a folder that all of them see, or pass False"
            )
        path = Path(self.broadcast(str(filepath))).expanduser()
        if self.world.is_with_recorder:
            self.checkpoints.save_folder(self.world, self.pl_module, self.optimizers, checkpoint, path, self.epochs)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of this strategy, of plain DDP or of ModelParallelStrategy."""
        self.checkpoints.folder = None
        options = {} if weights_only is None else {"weights_only": weights_only}  # older releases do not have it
        if is_folder(checkpoint_path):
            checkpoint = self.checkpoints.open_folder(Path(checkpoint_path), self.pl_module, **options)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, **options)
        if self._world is None:  # there is no run in this process, for example after one in other processes
            return checkpoint
        self.checkpoints.read(checkpoint)
        if self._trainer.state.fn == "fit":  # a checkpoint that is only evaluated does not affect later fits
            self.epochs.resume(self.checkpoints.resumed)
        return checkpoint
