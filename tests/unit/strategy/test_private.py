"""Notices when a release of Lightning or torch changes an underscore name that the package touches."""

from __future__ import annotations

import csv
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loops.fetchers import _PrefetchDataFetcher
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.runtime._private import (
    _states_of_gloo,
    check_reduced,
    collectives_of,
    forget_meshes,
    iterated_datasets,
    new_named_group,
    root_mesh,
    store_of,
)
from lightning_omni.runtime.loop_checks import failed_at_one_place, forget
from lightning_omni.runtime.process_groups import ProcessGroups
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.lightning_internals.callbacks import (
    _RECORD_ATTRIBUTES,
    add_listener,
    averaged_models,
    averaged_tensors,
    averages_weights,
    call_module,
    call_rank_zero_hooks,
    copy_averages_to_module,
    is_inside_hook,
    remove_listener,
    restart_empty_averages,
    use_own_folders,
)
from lightning_omni.strategy.lightning_internals.loops import (
    control_loops,
    make_epoch_open_ended,
    progress_counters,
    release_loops,
    reload_epochs,
    runs_finder,
    seed_workers,
    set_batch_agreement,
    set_last_batch,
    set_progress_counters,
    set_reload_epochs,
    set_step_counters,
    start_fit_at_epoch,
    step_counters,
    step_schedule,
    validates_by_time,
    will_step,
)
from lightning_omni.strategy.lightning_internals.metrics import (
    cached_metric_values,
    forget_batch_results,
    logs_now,
    set_cached_metrics,
)
from lightning_omni.strategy.lightning_internals.strategies import (
    collective_timeout,
    has_ddp_comm_hook,
    has_model_averaging,
    mark_terminated,
    model_parallel_options,
    set_ddp_options,
    set_launcher,
    start_method,
)


def test_ddp_says_that_it_waits_for_a_gradient_before_the_next_forward_pass(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
        module = torch.nn.parallel.DistributedDataParallel(Skipping(net))
        for skips in (False, False, True):
            check_reduced(module)  # twice is as good as once
            check_reduced(module)
            module(torch.ones(3, 2), skips).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            check_reduced(module)
    finally:
        dist.destroy_process_group()


class Skipping(torch.nn.Module):
    """Leaves its body out, if it is told to."""

    def __init__(self, net: torch.nn.ModuleDict) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, skips: bool) -> Any:
        return self.net["head"](inputs if skips else self.net["body"](inputs))


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_ddp_options_launcher_start_method_and_timeout_are_where_they_were() -> None:
    strategy = DDPStrategy(start_method="spawn", find_unused_parameters=True)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    set_ddp_options(strategy, {"static_graph": True})
    assert strategy._ddp_kwargs == {"static_graph": True}
    assert start_method(strategy) == "spawn"
    assert collective_timeout(strategy).total_seconds() == 1800
    assert not has_model_averaging(strategy)
    assert not has_ddp_comm_hook(strategy)
    launcher = object()
    set_launcher(strategy, launcher)
    assert strategy.launcher is launcher


def test_ddp_wraps_with_the_options_that_were_set() -> None:
    assert "**self._ddp_kwargs" in inspect.getsource(DDPStrategy._setup_model)
    assert "self._setup_model(" in inspect.getsource(DDPStrategy.configure_ddp)


@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_callbacks_that_find_a_rate_or_a_batch_size_are_known_by_their_methods(trainer: Any, finder: Any) -> None:
    assert not runs_finder(trainer)
    trainer.callbacks.append(finder())
    assert runs_finder(trainer)


def test_the_launcher_starts_children_and_keeps_them() -> None:
    assert "self.procs.append" in inspect.getsource(_SubprocessScriptLauncher._call_children_scripts)
    # what our launcher's launch() replaces; a release that does more here must be looked at
    names = _SubprocessScriptLauncher.launch.__code__.co_names
    wanted = {"_call_children_scripts", "_launch_process_observer", "_set_num_threads_if_needed", "validate_settings"}
    assert wanted <= set(names)
    assert set(names) <= wanted | {
        "cluster_environment",
        "num_processes",
        "num_nodes",
        "procs",
        "creates_processes_externally",
    }


def test_the_loop_ends_an_epoch_at_the_last_batch_or_at_the_exact_number_of_batches(trainer: Trainer) -> None:
    loop = trainer.fit_loop.epoch_loop
    assert isinstance(loop, _TrainingEpochLoop)
    trainer.fit_loop.max_batches = 5
    loop.batch_progress.current.ready = 6
    assert not loop._num_ready_batches_reached()
    assert not will_step(trainer) or trainer.accumulate_grad_batches == 1
    set_last_batch(trainer, True)
    assert loop._num_ready_batches_reached()
    assert trainer.is_last_batch


def test_durations_between_validations_are_where_they_were(trainer: Trainer) -> None:
    assert not validates_by_time(trainer)
    assert validates_by_time(Trainer(accelerator="cpu", logger=False, val_check_interval="00:00:01:00"))


class Tiny(LightningModule):
    """Four batches an epoch, a validation after each two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.weight - batch.mean()).square().sum()

    def validation_step(self, batch: Tensor) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[float]:
        numbers: Any = [1.0, 2.0, 3.0, 4.0]
        return DataLoader(numbers)

    val_dataloader = train_dataloader


HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_train_epoch_end")


def recorder(said: list[str], who: str, *bases: type) -> Any:
    """An object that says which of the hooks it hears."""
    return type(who, bases, {hook: lambda *_, hook=hook: said.append(f"{who} {hook}") for hook in HOOKS})()


class Epochs:
    """Lets the loops decide, until it is told to."""

    batches = 0
    is_open_ended = is_cut_short = False
    validation: bool | None = None

    def __init__(self) -> None:
        self.run: Any = SimpleNamespace(step_limit=None, limit_for=lambda max_steps: self.run.step_limit)
        self.schedulers = SimpleNamespace(is_paced=False, step=self.step_schedules)
        self.schedules: list[str] = []

    def validates(self, is_due: Callable[[], bool]) -> bool:
        return is_due() if self.validation is None else self.validation

    def validate(self, run: Callable[[], Any]) -> Any:
        return run()

    def own_batches(self, batches: float) -> float:
        return self.batches or batches

    def stepped_by_batches(self, configs: list[Any]) -> list[Any]:
        return configs

    def step_schedules(self, interval: str) -> None:
        self.schedules.append(interval)


class Control:
    setups = 0

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.epochs = Epochs()
        self.parts = SimpleNamespace(epochs=self.epochs)
        self.began: list[tuple[int, bool]] = []
        self.ended: list[int] = []
        self.fetches: list[str] = []

    def run(self, run: Callable[[], None]) -> None:
        assert not is_inside_hook(self.trainer)
        run()

    def begin_epoch(self, iterate: Callable[[], None]) -> None:
        self.began.append((self.trainer.current_epoch, self.trainer.fit_loop.restarted_mid_epoch))
        iterate()

    def epoch_has_ended(self) -> None:
        self.ended.append(self.trainer.current_epoch)

    def begin_fetch(self) -> None:
        self.fetches.append("begin")

    def end_fetch(self) -> None:
        self.fetches.append("end")

    def begin_setup(self) -> None:
        self.setups += 1


@pytest.fixture
def fitting() -> Any:  # callbacks are declared by no Trainer
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(accelerator="cpu", max_epochs=2, val_check_interval=0.5, enable_model_summary=False, **quiet)


def test_a_listener_hears_what_callbacks_hear_before_all_of_them_even_if_their_list_is_replaced(
    fitting: Any,
) -> None:
    said: list[str] = []
    heard, replaced = recorder(said, "callback", Callback), recorder(said, "other", Callback)
    fitting.callbacks = [heard]
    calls = call_module(fitting)
    own = calls._call_callback_hooks
    add_listener(fitting, recorder(said, "listener"))
    fitting.fit(Tiny())
    fitting.callbacks = [replaced]
    again = len(said)
    fitting.fit_loop.max_epochs = 3
    fitting.fit(Tiny())
    for number, line in enumerate(said):
        who, hook = line.split()
        assert who == ("listener", "callback" if number < again else "other")[number % 2]
        assert hook == said[number - number % 2].split()[1]
    assert {line.split()[1] for line in said} == set(HOOKS)
    remove_listener(fitting)
    assert calls._call_callback_hooks is own
    assert own.__module__ == "pytorch_lightning.trainer.call"


def test_a_hook_is_known_from_inside(fitting: Any) -> None:
    inside: list[bool] = []

    class Asks(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            inside.append(is_inside_hook(trainer))

    fitting.callbacks = [Asks()]
    control_loops(fitting, Control(fitting))  # which asks when the loop is run
    fitting.fit(Tiny())
    assert inside == [True]


def test_loops_ask_what_controls_them_and_show_what_they_showed(fitting: Any) -> None:
    kinds = type(fitting.fit_loop), type(fitting.fit_loop.epoch_loop)
    control = Control(fitting)
    control_loops(fitting, control)
    control_loops(fitting, control)  # again, not once more
    validations: list[str] = []
    fitting.callbacks = [recorder(validations, "callback", Callback)]
    fitting.fit(Tiny())
    assert control.began == [(0, False), (1, False)]
    assert control.ended == [1, 2]  # what the loop, which is about to be asked, has behind it
    assert control.fetches == ["begin", "end"] * 8
    assert control.setups > 0
    assert (fitting.global_step, sum("validation" in line for line in validations)) == (8, 4)
    release_loops(fitting)
    assert (type(fitting.fit_loop), type(fitting.fit_loop.epoch_loop)) == kinds


class Scheduled(Tiny):
    """Keeps in which epochs its hook is called, and steps its schedule there."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        own: Any = self.lr_schedulers()
        assert (own, metric) == (scheduler, None)
        self.asked.append(self.current_epoch)
        own.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]


@pytest.mark.parametrize(("window", "steps"), [(1, 4), (3, 2)])
def test_schedules_that_keep_pace_are_stepped_by_what_controls_the_loops_and_others_by_lightning(
    fitting: Any, window: int, steps: int
) -> None:
    control, module = Control(fitting), Scheduled()
    control_loops(fitting, control)
    fitting.fit(module)
    progress = fitting.fit_loop.epoch_loop.scheduler_progress
    assert (module.asked, control.epochs.schedules) == ([0, 0, 1, 1], [])
    fitting.fit_loop.max_epochs, fitting.accumulate_grad_batches = 3, window
    control.epochs.schedulers.is_paced = True
    fitting.fit(module)
    assert control.epochs.schedules == [*["step"] * steps, "epoch"]
    assert (len(module.asked), progress.total.completed) == (4, 4)
    step_schedule(fitting, module.lr_schedulers())
    assert (len(module.asked), progress.total.ready, progress.total.completed) == (5, 5, 5)


def test_steps_and_validations_are_controlled_without_the_users_noticing(fitting: Any) -> None:
    control = Control(fitting)
    control.epochs.run.step_limit, control.epochs.validation = 3, True
    control_loops(fitting, control)
    said: list[str] = []
    fitting.callbacks = [recorder(said, "callback", Callback)]
    fitting.fit(Tiny())
    assert fitting.global_step == 3
    assert sum("validation" in line for line in said) == 3
    assert (fitting.max_steps, fitting.val_check_batch) == (-1, 2)


@pytest.mark.parametrize(
    ("max_steps", "should_stop", "message"),
    [(20, False, "`Trainer.fit` stopped: `max_steps=20` reached."), (20, True, ""), (-1, True, ""), (-1, False, "")],
)
def test_the_message_at_a_controlled_limit_has_the_users_number_and_none_where_another_group_has_stopped_the_run(
    fitting: Any, monkeypatch: pytest.MonkeyPatch, max_steps: int, should_stop: bool, message: str
) -> None:
    control, said = Control(fitting), list[str]()
    control.epochs.run.step_limit = 3
    control_loops(fitting, control)
    loop = fitting.fit_loop
    fitting.fit(Tiny())
    monkeypatch.setattr(sys.modules[_FitLoop.__module__], "rank_zero_info", said.append)
    loop.epoch_loop.max_steps, fitting.should_stop = max_steps, should_stop
    assert loop.done
    assert said == [message] * bool(message)
    assert type(fitting.max_steps) is int


def test_a_number_of_batches_of_its_own_is_what_user_code_has_and_no_estimate_is_made_by_it(fitting: Any) -> None:
    kind, control = type(fitting), Control(fitting)
    control_loops(fitting, control)
    fitting.fit(Tiny())
    batches, steps = fitting.num_training_batches, fitting.estimated_stepping_batches
    control.epochs.batches, control.epochs.is_open_ended = 3, True
    assert (batches, fitting.num_training_batches, fitting.fit_loop.max_batches) == (4, 3, 4)
    assert fitting.estimated_stepping_batches == steps
    release_loops(fitting)
    assert type(fitting) is kind


def test_an_open_ended_epoch_does_not_end_with_a_number_of_batches(fitting: Any) -> None:
    control = Control(fitting)
    control.epochs.is_open_ended = True
    control_loops(fitting, control)
    loop = fitting.fit_loop.epoch_loop
    fitting.fit_loop.max_batches = loop.batch_progress.current.ready = 5
    assert not loop._num_ready_batches_reached()
    set_last_batch(fitting, True)
    assert loop._num_ready_batches_reached()


def test_an_open_ended_fetcher_is_never_done(trainer: Trainer) -> None:
    fetcher: Any = _PrefetchDataFetcher()
    trainer.fit_loop._data_fetcher = fetcher
    fetcher.length, fetcher.done = 1, True
    make_epoch_open_ended(trainer)
    fetcher.iterator = iter([1, 2])
    assert [next(fetcher), next(fetcher)] == [1, 2]
    assert not fetcher.done


def test_progress_counters_are_read_and_set(trainer: Trainer) -> None:
    class Empty(LightningModule):
        def train_dataloader(self) -> DataLoader[int]:
            numbers: Any = [1]
            return DataLoader(numbers)

    trainer.strategy.connect(Empty())
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.increment_ready()
    assert progress_counters(trainer) == [1, 1, 0, 0, 0]
    set_progress_counters(trainer, [4, 9, 3, 0, 3])
    assert progress_counters(trainer) == [4, 9, 3, 0, 3]
    assert (loop.batch_idx, loop.total_batch_idx, trainer.global_step) == (3, 8, 3)


def test_the_logger_connector_says_when_it_logs(trainer: Any) -> None:
    loop = trainer.fit_loop.epoch_loop
    trainer.training = True
    seen = []
    for stepped in range(3 * trainer.log_every_n_steps):
        loop._batches_that_stepped = stepped
        seen.append(logs_now(trainer))
    assert sum(seen) == 3, "one in log_every_n_steps"


@pytest.fixture
def default_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
def test_torch_lets_a_process_group_be_named() -> None:
    groups = [new_named_group(name, [0], timedelta(seconds=5)) for name in ("one", "other")]
    assert [group.group_name for group in groups] == ["one", "other"]
    assert [dist.distributed_c10d._world.pg_names[group] for group in groups] == ["one", "other"]
    dist.destroy_process_group(groups[0])
    dist.all_reduce(torch.ones(1), group=new_named_group("one", [0], timedelta(seconds=5)))
    ours: Any = dist.new_group([0], use_local_synchronization=True)
    assert ours.group_name not in ("one", "other")
    source = inspect.getsource(dist.distributed_c10d._new_group_with_tag)
    assert "_process_group_name(ranks, use_hashed_name=use_local_synchronization)" in source
    assert "default_pg.bound_device_id" in source, "what decides whether a communicator is split off the default's"


@pytest.mark.usefixtures("default_group")
def test_groups_form_beside_a_default_process_group_that_is_bound_to_a_gpu_as_lightnings_is() -> None:
    default: Any = dist.group.WORLD
    default.bound_device_id = device = torch.device("cuda", 0)
    groups = ProcessGroups(0, 1, timedelta(seconds=5), torch.device("cpu"))
    groups.make_live_world()
    assert groups.live.size() == 1
    assert new_named_group("of one rank", [0], timedelta(seconds=5)) is not None
    assert default.bound_device_id == device, "what it is bound to is as it was"


@pytest.mark.usefixtures("default_group")
def test_a_process_group_counts_its_collectives() -> None:
    group = dist.group.WORLD
    before = collectives_of(group)
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0)
    assert collectives_of(group) == before + 2
    assert collectives_of(object()) == 0


@pytest.mark.usefixtures("default_group")
def test_ranks_have_failed_alike_when_all_say_so_and_in_this_run() -> None:
    group, other = dist.group.WORLD, dist.new_group([0])
    assert store_of(group) is not None
    assert failed_at_one_place(group, 0, [0], "here", 0.1)
    assert not failed_at_one_place(group, 0, [0, 1], "here", 0.1), "one has not come"
    assert not failed_at_one_place(group, 1, [0, 1], "there", 0.1)
    assert failed_at_one_place(group, 1, [0, 1], "here", 0.1)
    assert not failed_at_one_place(other, 1, [0, 1], "here", 0.1), "each process group has its own"
    forget(group, 0)
    assert not failed_at_one_place(group, 1, [0, 1], "here", 0.1)


@pytest.mark.usefixtures("default_group")
def test_a_mesh_knows_what_it_was_taken_out_of() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    assert root_mesh(mesh) is mesh
    assert root_mesh(mesh["data_parallel"]) is mesh


@pytest.mark.usefixtures("default_group")
def test_a_mesh_that_equals_an_earlier_one_is_taken_for_itself() -> None:
    lies_on = list[bool]()
    for forgets in (True, False, True):  # another test may have made the same one
        if forgets:
            forget_meshes()
        mesh = init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        lies_on.append(cast(DTensor, tensor.detach()).device_mesh is mesh)
    assert lies_on == [True, False, True], "torch gives out the mesh of the first one until it is told to forget that"


@pytest.mark.parametrize("strategies", ["pytorch_lightning.strategies", "lightning.pytorch.strategies"])
def test_model_parallel_strategy_keeps_what_it_was_given(strategies: str) -> None:
    theirs = importlib.import_module(strategies).ModelParallelStrategy(2, "auto", False, "gloo")
    assert model_parallel_options(theirs) == {
        "data_parallel_size": 2,
        "tensor_parallel_size": "auto",
        "save_distributed_checkpoint": False,
        "process_group_backend": "gloo",
        "timeout": timedelta(minutes=30),
    }
    assert model_parallel_options(DDPStrategy()) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a thread is doing")
@pytest.mark.usefixtures("default_group")
def test_gloo_s_threads_are_known_by_their_name() -> None:
    dist.all_reduce(torch.ones(1))  # a thread takes its name when it first runs
    states = list(_states_of_gloo())
    assert len(states) >= 1, "ProcessGroupGloo calls the threads that run its collectives otherwise"
    assert set(states) <= {"R", "S", "D"}


def test_ranks_agree_before_every_batch_where_lightning_broadcasts_sigterm(trainer: Trainer) -> None:
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert source.index("self._broadcast_sigterm_tensor()") < source.index("next(data_fetcher)")
    loop: Any = trainer.fit_loop.epoch_loop
    agreed = []
    set_batch_agreement(trainer, lambda: agreed.append(1))
    loop._broadcast_sigterm_tensor()
    set_batch_agreement(trainer, None)
    assert agreed
    assert loop._broadcast_sigterm_tensor.__func__ is _TrainingEpochLoop._broadcast_sigterm_tensor
    assert not trainer.received_sigterm
    mark_terminated(trainer)
    assert trainer.received_sigterm


def test_the_averages_of_weight_averaging_are_found() -> None:
    averaging = EMAWeightAveraging()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=[averaging])
    assert averaged_models(trainer) == []
    averaging.setup(trainer, LightningModule(), "fit")
    assert averaged_models(trainer) == [averaging._average_model]
    assert averaging._average_model is not None


def test_averages_of_all_callbacks_are_found_with_how_many_they_are_of_and_put_in_the_place_of_weights() -> None:
    averaging, stochastic, module = EMAWeightAveraging(), StochasticWeightAveraging(0.1), BoringModel()
    callbacks: list[Callback] = [averaging, stochastic]
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=callbacks)
    trainer.strategy.connect(module)
    assert averages_weights(trainer)
    assert not list(averaged_tensors(trainer))
    for each in callbacks:
        each.setup(trainer, module, "fit")
    ema, mean = averaging._average_model, stochastic._average_model
    assert isinstance(ema, AveragedModel)
    assert isinstance(mean, BoringModel)
    found = list(averaged_tensors(trainer))
    assert stochastic.n_averaged == ema.n_averaged == 0
    wanted = [*ema.parameters(), ema.n_averaged, *mean.parameters(), stochastic.n_averaged]
    assert list(map(id, found)) == list(map(id, wanted))
    ema.update_parameters(module)
    torch.nn.init.zeros_(module.layer.weight)
    copy_averages_to_module(trainer)
    assert module.layer.weight.any()


@pytest.mark.parametrize("epochs_done", [3, 4])
def test_the_average_of_a_run_of_all_its_epochs_takes_the_place_of_weights_that_are_set_back(epochs_done: int) -> None:
    """With StochasticWeightAveraging; a run that is stopped earlier ends with its weights, as without a tuner."""
    averaging, module = StochasticWeightAveraging(0.1), BoringModel()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[averaging], max_epochs=4)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.strategy.setup_optimizers(trainer)
    averaging.setup(trainer, module, "fit")
    averaging.on_fit_start(trainer, module)
    own = module.layer.weight.clone()
    assert isinstance(averaging._average_model, BoringModel)
    torch.nn.init.ones_(averaging._average_model.layer.weight)
    trainer.fit_loop.epoch_progress.current.completed = epochs_done  # as where training ends
    copy_averages_to_module(trainer)
    assert torch.equal(module.layer.weight, torch.ones_like(own) if epochs_done == 4 else own)


def test_an_average_that_is_set_back_to_before_its_first_weights_is_not_the_untrained_ones() -> None:
    averaging, stochastic, module = EMAWeightAveraging(), StochasticWeightAveraging(0.1), BoringModel()
    callbacks: list[Callback] = [averaging, stochastic]
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=callbacks)
    trainer.strategy.connect(module)
    for each in callbacks:
        each.setup(trainer, module, "fit")
    list(averaged_tensors(trainer))  # which says how many each is of
    ema, mean = averaging._average_model, stochastic._average_model
    assert isinstance(ema, AveragedModel)
    assert isinstance(mean, BoringModel)
    for times in (1, 2):  # an average of something stays
        torch.nn.init.constant_(module.layer.weight, float(times))
        restart_empty_averages(trainer)
        assert next(ema.module.parameters()).eq(1).all()
        assert mean.layer.weight.eq(1).all()
        assert stochastic.n_averaged is not None
        ema.update_parameters(module)
        stochastic.update_parameters(mean, module, stochastic.n_averaged, stochastic.avg_fn)


def test_model_checkpoint_keeps_what_it_saved_where_it_did() -> None:
    added_in_2_6 = {"_defer_save_until_validation"}
    assert set(_RECORD_ATTRIBUTES) - set(vars(ModelCheckpoint())) <= added_in_2_6


def test_what_is_for_rank_zero_alone_can_be_said_by_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 3, raising=False)
    with caplog.at_level(logging.INFO):
        rank_zero_info("not this")
        inspect.unwrap(rank_zero_info)("but this")
    assert caplog.messages == ["but this"]


@pytest.mark.parametrize("version", ["run", 0])
def test_a_rank_that_takes_over_leaves_the_csv_file_of_the_one_before(tmp_path: Path, version: Any) -> None:
    before, after = (CSVLogger(tmp_path, version=version) for _ in range(2))
    before.log_metrics({"loss": 1.0})
    before.save()
    use_own_folders(Trainer(accelerator="cpu", devices=1, logger=after))
    after.log_metrics({"loss": 0.5})
    after.save()
    files = [Path(logger.log_dir) / "metrics.csv" for logger in (before, after)]
    assert [file.read_text().split()[-1] for file in files] == ["1.0,0", "0.5,0"]


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
def test_a_rank_that_takes_over_as_a_validation_begins_measures_throughput(
    fitting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 3, raising=False)

    class TakesOver(Callback):
        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if rank_zero_only.rank:  # type: ignore[attr-defined]
                monkeypatch.setattr(rank_zero_only, "rank", 0)
                call_rank_zero_hooks(trainer)
                assert trainer.validating

    callbacks: list[Callback] = [TakesOver(), ThroughputMonitor(len, window_size=4)]
    fitting.callbacks, fitting.loggers, fitting.log_every_n_steps = callbacks, [CSVLogger(tmp_path)], 1
    fitting.fit(Tiny())
    assert "train/device/batches_per_sec" in fitting.logger.experiment.metrics_keys


def test_a_result_that_a_listener_forgets_is_logged_no_more(fitting: Any, tmp_path: Path) -> None:
    class Listens:
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *rest: Any) -> None:
            forget_batch_results(trainer, ["gone"] if rest[-1] else [])
            for name in ("stays", "gone")[: 2 - rest[-1]]:
                module.log(name, 1.0, batch_size=1)

    fitting.fit_loop.max_epochs, fitting.loggers, fitting.log_every_n_steps = 1, [CSVLogger(tmp_path)], 1
    add_listener(fitting, listener := Listens())
    fitting.fit(Tiny())
    remove_listener(fitting)
    rows = [*csv.DictReader((Path(fitting.log_dir) / "metrics.csv").read_text().splitlines())]
    assert [bool(row["gone"]) for row in rows if row["stays"]] == [True, False, False, False], listener


def test_step_counters_are_what_global_step_is_made_of(trainer: Trainer) -> None:
    assert step_counters(trainer) == [0, 0, 0]
    set_step_counters(trainer, [3, 4, 5])
    assert step_counters(trainer) == [3, 4, 5]
    assert trainer.global_step == 3  # automatic optimization


def test_a_loaders_workers_are_seeded_by_the_rank_that_they_are_told(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders: list[Any] = [DataLoader(torch.ones(1)) for _ in range(2)]  # type: ignore[arg-type]
    seed_workers(trainer, loaders[0], 3)
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    seed_workers(trainer, loaders[1], 3)
    assert [each.worker_init_fn and each.worker_init_fn.keywords for each in loaders] == [None, {"rank": 3}]


def test_epochs_in_which_loaders_were_made_are_told_and_set() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, reload_dataloaders_every_n_epochs=3)
    set_reload_epochs(trainer, [2.0, 1.0])
    assert reload_epochs(trainer) == [2.0, 1.0]
    start_fit_at_epoch(trainer, 4, [0, 0, 0, 0])
    assert not trainer.fit_loop._should_reload_train_dl
    assert trainer.fit_loop.epoch_loop.val_loop._should_reload_val_dl


def test_metrics_are_known_without_being_computed(trainer: Trainer) -> None:
    set_cached_metrics(trainer, {"loss": 0.5})
    assert cached_metric_values(trainer) == {"loss": 0.5}


@pytest.mark.parametrize("workers", [0, 1])
def test_the_data_that_loaders_iterate_are_found(workers: int) -> None:
    held, idle = (DataLoader(TensorDataset(torch.ones(size)), num_workers=workers) for size in (2, 3))
    for _ in held:
        assert held.dataset in iterated_datasets()
        assert idle.dataset not in iterated_datasets()


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize(
    ("place", "groups", "is_refused"), [((1, 0, 2), None, False), ((1, 0, 1), None, True), ((1, 0, 1), 1, False)]
)
def test_ranks_that_are_not_numbered_node_by_node_are_refused(
    place: tuple[int, int, int], groups: int | None, is_refused: bool
) -> None:
    node, local, rank = place
    strategy: Any = SimpleNamespace(num_nodes=2, num_processes=2, node_rank=node, local_rank=local, global_rank=rank)
    strategy.world_options, strategy.root_device = SimpleNamespace(groups=groups), torch.device("cpu")
    with pytest.raises(ConfigurationError, match="--distribution=block") if is_refused else nullcontext():
        assert OmniStrategyHooks._ranks_per_node(strategy) == [2, 2]
