"""The checkpoint hooks of an OmniStrategy: the weights that the method evaluates and the state of server and groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_omni.errors import RankLost, UnsupportedError
from lightning_omni.runtime.checks.exits import failed_at_one_place, place_of
from lightning_omni.runtime.model.meshes import FSDP
from lightning_omni.runtime.model.sharded import is_sharded, named_rows, reshard, state_rows, tensors_of, whole
from lightning_omni.runtime.state.distributed_checkpoint import is_folder
from lightning_omni.strategy.checkpoints.contents import Checkpoints, cut_short, end_whole_epoch
from lightning_omni.strategy.grouping import GroupedStrategy
from lightning_omni.strategy.joining.run_state import RunStates
from lightning_omni.strategy.lightning_internals.progress import progress_counters
from lightning_omni.strategy.signals import Signals
from lightning_omni.topology import RECORDER

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
