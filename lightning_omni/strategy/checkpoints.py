"""Checkpoints while several groups train: hooks, contents, and the state of a resumed run.

Lightning's own entries are those of plain DDP, with the server's weights and optimizer state. The entry ``"omni"`` has
all further state: see `lightning_omni.runtime.state.checkpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_omni.errors import RankLost, UnsupportedError
from lightning_omni.registry import to_wire
from lightning_omni.runtime import World, names_of
from lightning_omni.runtime.loop_checks import failed_at_one_place
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
    by_names,
    is_folder,
    without_tensors,
)
from lightning_omni.runtime.state.checkpoint import save as save_folder
from lightning_omni.server.epochs.lease_book import merge_spans
from lightning_omni.strategy.failures import Failures
from lightning_omni.strategy.joining import RunStates
from lightning_omni.strategy.lightning_internals.loops import is_fitting, progress_counters
from lightning_omni.strategy.loops.driver import EpochDriver
from lightning_omni.strategy.loops.validation import Version
from lightning_omni.strategy.shared_parts import SharedParts
from lightning_omni.wire.steps_and_samples import Progress


class Checkpoints:
    """The checkpoints of one strategy. Several calls make one consistent checkpoint.

    Attributes:
        resumed: the run's entry in the checkpoint from which the next training resumes.
        folder: that checkpoint, if it is a folder.
    """

    def __init__(self, info: Callable[[str], None]) -> None:
        self._info = info
        self.folder: CheckpointFolder | None = None
        self._snapshot: ServerSnapshot | None = None
        self._has_said = False
        self.resumed = RunCheckpoint()

    def forget(self) -> None:
        self.forget_snapshot()
        self.resumed, self.folder = RunCheckpoint(), None

    def forget_snapshot(self) -> None:
        self._snapshot = None

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
        """Return the module's state with the evaluated weights; for means see `CheckpointHooks.module_state`.

        At a synchronization point all ranks call it, and the states that only groups hold are collected. At other
        times, or if this rank has failed (``is_alone``), the recorder saves its own state and the server's.

        ``read`` returns the module's state, while it holds these weights; ``version`` is the validation whose weights
        are saved, None for the present ones; with ``is_folder`` each rank of the recorder's replica saves its own
        shards.
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
        """Drop all groups' states if one is missing: they are restored in order."""
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
        """Return the optimizer state of the saved weights, from the server if the optimizer steps there.

        The hyperparameters are this rank's: the server's are one scheduler step behind.
        """
        if world.steps_at_worker or not own:  # Lightning's placeholder for no optimizer has no state
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
        """Add the state of server and groups to a checkpoint, in place; to ``tensors`` where ranks save shards."""
        snapshot, self._snapshot = self._snapshot, None
        groups, more = len(world.live_groups), dict[str, Any]()
        samples = 0 if epochs.leases is None else epochs.leases.dataset_size
        if snapshot is None:
            progress, cut = epochs.run.moment(epochs.is_open, epochs.is_open_ended)
            if progress is not None:
                if cut.epoch != -1:
                    _count_as_ddp(checkpoint, progress)
                schedules = epochs.schedulers.counts_at(progress)
                saved = RunCheckpoint(cut, groups, progress, schedules=schedules, samples=samples)
                checkpoint[ENTRY] = saved.to_plain()
            return
        cut, leases = snapshot.cut, epochs.leases
        if world.is_computing and world.method.evaluated == "mean" and leases is not None and leases.epoch == cut.epoch:
            # The group's own weights are saved, and its last batch is in them before the server hears of it.
            trained = tuple(merge_spans([*cut.trained, *leases.stepped_spans]))
            cut = msgspec.structs.replace(cut, trained=trained)
        progress = None if epochs.run.progress is None else cut.progress(epochs.run.progress)
        if progress is not None and progress.epochs == cut.epoch:  # otherwise the epoch is over, and counted
            _count_as_ddp(checkpoint, progress, is_of_validation=epochs.published.version is not None)
        if "optimizer_states" in checkpoint:  # with save_weights_only there are none
            server, states = [part["method"] for part in snapshot.parts], snapshot.groups
            if tensors is not None:
                server = _without_tensors(world, server, tensors)
                states = {group: _without_tensors(world, states[group], tensors) for group in sorted(states)}
            more = {
                "method": to_wire(world.method),
                "parameters": [list(part["weights"]) for part in snapshot.parts],
                "server": server,
                "states": states,
            }
        more |= {"schedules": epochs.schedulers.counts_at(progress), "samples": samples}
        checkpoint[ENTRY] = RunCheckpoint(cut, groups, progress, **more).to_plain()

    def save_folder(
        self,
        world: World,
        module: Module,
        optimizers: Sequence[Optimizer],
        checkpoint: dict[str, Any],
        path: Path,
        epochs: EpochDriver,
    ) -> None:
        """Save a checkpoint, changed in place, of which each rank of the recorder's replica writes its shards."""
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
        self.resumed = replace(
            RunCheckpoint.from_plain(checkpoint.get(ENTRY, {})) or RunCheckpoint(), folder=self.folder
        )

    def open_folder(self, path: Path, module: Module, **options: Any) -> dict[str, Any]:
        """Read a checkpoint folder without optimizer states, its weights into the module. All ranks call it."""
        self.folder = CheckpointFolder(path)
        checkpoint = {**self.folder.metadata(**options), "state_dict": self.folder.weights(module.state_dict())}
        if self.folder.optimizers:
            checkpoint["optimizer_states"] = [{}] * self.folder.optimizers  # placeholders until the optimizers exist
        return checkpoint

    def optimizer_states(
        self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], module: Module
    ) -> list[dict[str, Any]]:
        if self.folder is None:
            return list(checkpoint["optimizer_states"])
        names = names_of(module)
        numbered = enumerate(optimizers[: self.folder.optimizers])
        return [self.folder.optimizer_state(number, optimizer, names) for number, optimizer in numbered]


def _count_as_ddp(checkpoint: dict[str, Any], progress: Progress, is_of_validation: bool = False) -> None:
    """Count batches in a checkpoint as DDP does; the weights may be those of a validation, older than its loops."""
    if "loops" not in checkpoint:
        return
    batches = max(1, progress.samples // progress.reference.samples) * progress.reference.window
    # Before the first exchange the loops have counted batches that are in no weights, and at the epoch's begin none.
    has_begun = progress.samples > 0 or batches_in(checkpoint["loops"]) > batches
    if has_begun and batches < progress.batches:
        count = cut_short if is_of_validation else set_batches
        count(checkpoint["loops"], batches)


def _without_tensors(world: World, trees: Sequence[Any], tensors: dict[str, Any]) -> list[Any]:
    pairs = zip(world.parts, trees, strict=True)
    return [without_tensors(tree, part.replica.layout, part.replica.ordered, tensors) for part, tree in pairs]


def _evaluated(world: World, module: Module, snapshot: ServerSnapshot) -> dict[Tensor, Tensor]:
    if world.method.evaluated == "mean":
        return {}
    mine = {name: parameter for parameter, name in names_of(module).items()}
    return {
        own: value
        for part, theirs in zip(world.parts, snapshot.parts, strict=True)
        for own_frozen in [part.replica.own_frozen()]
        for name, value in theirs["weights"].items()
        if name not in own_frozen
        if (own := part.replica.parameters.get(name, mine.get(name))) is not None
    }


def _read_holding(values: Mapping[Tensor, Tensor], read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a module's state while its tensors hold ``values``, except those of another shape.

    State in their memory is copied: shards on their device, others to the CPU.
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
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # its class has no memory of its own
        return 0


def set_batches(loops: Mapping[str, Any], batches: int, is_over: bool = False) -> None:
    """Set the batch count of an epoch to that of DDP, in place, if its ``is_last_batch`` equals ``is_over``."""
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    if progress["is_last_batch"] == is_over:
        current = progress["current"]
        current.update({name: count - current["processed"] + batches for name, count in current.items()})


def cut_short(loops: Mapping[str, Any], batches: int) -> None:
    """Mark an epoch as incomplete after ``batches`` of DDP, in place."""
    loops["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
    set_batches(loops, batches)


def batches_in(loops: Mapping[str, Any]) -> int:
    return int(loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"])


# --- Hooks of the strategy --------------------------------------------------------------------------------------------

SAVING = 10.0
"""Seconds for which a failed rank waits for its peers to report failures, or for the recorder to fetch state."""


class CheckpointHooks:
    """The strategy's additions to DDPStrategy's checkpoint hooks.

    Attributes:
        is_writing: whether this rank is writing a checkpoint, without waiting for others.
        has_written: whether this rank wrote the last one for the run, true before any; others remove none.
    """

    def __init__(self, parts: SharedParts, run_states: RunStates, failures: Failures) -> None:
        self._parts, self._run_states, self._failures = parts, run_states, failures
        self._sharding = parts.world_options.model_parallel
        self.contents = Checkpoints(parts.namespace.warn)
        self.is_writing, self.has_written = False, True

    @property
    def saves_folders(self) -> bool:
        return self._sharding is not None and self._sharding.distributed_checkpoint

    @property
    def given_folders(self) -> str:
        if isinstance(self._sharding, FSDP):
            return "FSDP(distributed_checkpoint=True)"
        return "ModelParallelStrategy(save_distributed_checkpoint=True)"

    def check_plugin(self) -> None:
        plugin = type(self._parts.strategy.checkpoint_io)
        if self.saves_folders and plugin is not self._parts.namespace.plain_checkpoint_io:
            raise UnsupportedError(
                f"{self.given_folders} and {plugin.__name__}: each rank writes its share by itself,"
                " and there is no whole checkpoint to hand to a CheckpointIO; leave one of them out"
            )

    @property
    def _is_asynchronous(self) -> bool:
        world = self._parts.current_world
        return world is not None and world.executor.control is not None

    # --- Saving ------------------------------------------------------------------------------------------------------

    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's state; see `Checkpoints.collect`.

        Between synchronization points, if the method evaluates the mean of all groups' weights, the checkpoint has
        those of the recorder's group.
        """
        parts = self._parts
        if self._run_states.is_described:
            return read()  # for hooks of users that change it; it is not sent
        self.contents.forget_snapshot()  # of a state that was read and never saved
        parts.take_time()
        self._check_failed_alike()
        if parts.current_world is not None:
            reshard(parts.world.wrapper.sharded)
            parts.world.agree_on_recorder()
        if not self._is_asynchronous:
            return self._put_together(read())
        version, is_alone = parts.epochs.published.version, self._failures.at is not None
        collect = self.contents.collect
        return self._put_together(
            collect(self._parts.world, parts.pl_module, read, version, self.saves_folders, is_alone)
        )

    def _check_failed_alike(self) -> None:
        parts = self._parts
        world = parts.current_world
        if self._failures.at is None or self._sharding is None or world is None:
            return
        if not (world.registration or self.saves_folders or world.is_with_recorder):  # this rank saves nothing
            return
        where = f"{progress_counters(parts.trainer)} {self._failures.at}"
        group = world.process_groups.original
        # Ranks that hold the model once more do not come here.
        ranks = world.members if world.registration or self.saves_folders else world.members[: world.shards]
        if not failed_at_one_place(group, world.rank, ranks, where, SAVING):
            raise RankLost(
                "no checkpoint is saved: the ranks of a group hold the model together, and not all of them have failed"
                " at one place, so that they cannot put it together"
            )

    def _put_together(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._sharding is None or self.saves_folders or not self._parts.world.is_with_recorder:
            return state
        together: dict[str, Any] = whole(state, keeps=self._parts.world.is_recorder)
        return together

    def optimizer_state(self, optimizer: Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        if self._run_states.is_described:
            return {"state": {}, "param_groups": own.get("param_groups", [])}
        if self._is_asynchronous:
            world = self._parts.world
            if world.owns_state if self.saves_folders else world.is_recorder:
                own = self.contents.state_of(world, getattr(optimizer, "optimizer", optimizer), own)
        return self._put_together(own)

    def save(self, write: Callable[[], None], checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        """Save a checkpoint, which is changed in place, with the state of server and groups."""
        parts = self._parts
        self.has_written = parts.strategy.is_global_zero
        if parts.epochs.run.is_whole and "loops" in checkpoint:
            batches = parts.trainer.fit_loop.max_batches
            if math.isfinite(batches):
                set_batches(checkpoint["loops"], int(batches), is_over=True)
        if parts.epochs.is_cut_short and "loops" in checkpoint:
            cut_short(checkpoint["loops"], parts.epochs.batches_cut_short)
        if self.saves_folders:
            self._save_folder(checkpoint, path, storage_options)
            return
        if parts.current_world is not None:
            self.contents.complete(parts.world, checkpoint, parts.epochs)
        self.is_writing = True
        try:
            write()
        finally:
            self.is_writing = False

    def _save_folder(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if storage_options is not None or "://" in str(filepath):
            raise UnsupportedError(
                f"{self.given_folders} and a checkpoint at {filepath}: each rank writes its share to files of its own;"
                " save it in a folder that all of them see, or pass False"
            )
        parts, world = self._parts, self._parts.world
        path = Path(parts.strategy.broadcast(str(filepath))).expanduser()
        if world.is_with_recorder:
            self.contents.save_folder(world, parts.pl_module, parts.strategy.optimizers, checkpoint, path, parts.epochs)

    # --- Loading -----------------------------------------------------------------------------------------------------

    def weights_to_load(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        module = self._parts.pl_module
        if self._sharding is None or not is_sharded(module):
            return checkpoint
        return {**checkpoint, "state_dict": named_rows(checkpoint["state_dict"], tensors_of(module).items())}

    def optimizer_states_to_load(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        optimizers = self._parts.strategy.optimizers
        states = self.contents.optimizer_states(checkpoint, optimizers, self._parts.pl_module)
        if self._sharding is not None:
            states = [state_rows(saved, optimizer) for optimizer, saved in zip(optimizers, states, strict=False)]
        return {**checkpoint, "optimizer_states": states}

    def load(self, path: Any, read: Callable[[], dict[str, Any]], **options: Any) -> dict[str, Any]:
        """Read a checkpoint: a file by ``read``, or a folder, with ``options`` of ``torch.load`` for its metadata.

        If the Trainer reads it for a fit, the run resumes from it.
        """
        parts = self._parts
        before, self.contents.folder = self.contents.folder, None
        load = partial(self.contents.open_folder, Path(path), parts.pl_module, **options) if is_folder(path) else read
        checkpoint = load()
        # Without a world there is no run in this process (after one in others), and the module may have no Trainer.
        if parts.current_world is None or path != parts.trainer.ckpt_path:  # the user's code loads it
            self.contents.folder = before
        elif is_fitting(parts.trainer) and not parts.world.is_begun:  # an evaluation resumes nothing
            self.contents.read(checkpoint)
            parts.epochs.resume(self.contents.resumed)
        return checkpoint
