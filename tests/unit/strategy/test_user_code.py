"""What users' own optimizers, modules and callbacks do, and where it would go wrong among groups: no process needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, cast

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from jsonargparse import ArgumentError, ArgumentParser
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from lightning_omni import FSDP, Compression, Elastic, OmniStrategy, OmniTuner, Server
from lightning_omni.errors import ConfigurationError, OmniError, RankLost, UnsupportedError
from lightning_omni.methods import LocalSGD
from lightning_omni.methods.model.replica import Replica, load_optimizer_state
from lightning_omni.methods.model.server_optimizer import Master, check_servable, describe, hyperparameters_of, rebuild
from lightning_omni.run_report import Staleness
from lightning_omni.runtime import OmniOptimizer, World, WorldOptions, names_of
from lightning_omni.runtime.balance import Balance
from lightning_omni.runtime.executor import Exchanging, Executor, evaluating
from lightning_omni.runtime.model.buffer_sync import buffers_of, merge
from lightning_omni.runtime.model.external_writes import ExternalWrites
from lightning_omni.runtime.model.reduction import Reduction
from lightning_omni.runtime.model.replica import ModelReplica
from lightning_omni.runtime.model.tensor_sync import take_from_rank_zero
from lightning_omni.runtime.model.wrapping import ranks_elsewhere
from lightning_omni.runtime.parallel_state import default_device
from lightning_omni.runtime.process_groups import LiveWorld, device_types, register
from lightning_omni.runtime.state.transfer import StateTransfer
from lightning_omni.strategy.launcher import Launching
from lightning_omni.strategy.loops.driver import EpochDriver
from lightning_omni.strategy.loops.epoch import LeasedData, split_of
from lightning_omni.strategy.loops.listener import Listener
from lightning_omni.strategy.loops.run_schedulers import RunSchedulers
from lightning_omni.strategy.optimizers import MergedSubmodule, Proxies, check_wrapped
from lightning_omni.wire.all_reduce import Exact
from lightning_omni.wire.steps_and_samples import Progress, ReferenceBatch


class Twice(torch.optim.SGD):
    """Steps along the gradient half a step ahead, and so needs the loss twice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it needs a closure"
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad, alpha=-0.5 * self.param_groups[0]["lr"])
        with torch.enable_grad():
            closure()
        for p, value in zip(held, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


class Sharpness(torch.optim.Optimizer):
    """SAM as programs have it: it begins with the gradients that are there, and the closure makes the second ones.

    Args:
        parameters: that it steps.
        lr: of the optimizer inside.
    """

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)
        self.before: list[Tensor] = []

    @torch.no_grad()
    def first_step(self) -> None:
        held = self.param_groups[0]["params"]
        self.before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad, alpha=0.5 / float(p.grad.norm()))
            p.grad = None

    @torch.no_grad()
    def second_step(self) -> None:
        for p, value in zip(self.param_groups[0]["params"], self.before, strict=True):
            p.copy_(value)
        self.inner.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class ScheduleFree(torch.optim.SGD):
    """Trains with other weights than it evaluates."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def squares(weight: Parameter, evaluated: list[float]) -> Any:
    """The closure of a loss whose gradient depends on the weights; it notes the losses."""

    def closure() -> Tensor:
        weight.grad = None
        loss = (weight**3).sum()
        loss.backward()
        evaluated.append(float(loss.detach()))
        return loss

    return closure


def test_an_optimizer_that_steps_on_the_ranks_may_evaluate_the_loss_again_and_not_more_often_than_alone() -> None:
    mine, theirs = (Parameter(torch.linspace(1, 2, 4)) for _ in range(2))
    alone, among = Twice([mine], lr=0.1), Twice([theirs], lr=0.1)
    losses: list[float] = []
    noted: list[float] = []
    replica = Replica([theirs], among)
    for _ in range(3):
        alone.step(squares(mine, losses))
        closure = squares(theirs, noted)
        loss = closure()
        with evaluating(replica, closure, loss):
            replica.step([theirs.grad])
    assert torch.equal(mine, theirs)
    assert losses == noted
    assert replica.closure is None


def test_an_optimizer_that_has_moved_its_weights_before_it_calls_the_closure_gets_their_gradients() -> None:
    mine, theirs = (Parameter(torch.linspace(1, 2, 4)) for _ in range(2))
    alone, among = Sharpness([mine], lr=0.1), Sharpness([theirs], lr=0.1)
    replica = Replica([theirs], among)
    for _ in range(3):
        squares(mine, [])()
        alone.step(squares(mine, []))
        closure = squares(theirs, [])
        loss = closure()
        with evaluating(replica, closure, loss):
            replica.step([theirs.grad])
    assert torch.equal(mine, theirs)
    assert float((mine.detach() ** 3).sum()) < 5, "the loss has fallen"


class Scaled(torch.optim.SGD):
    """Its step has an argument of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(each.grad, alpha=-scale)


def test_arguments_of_a_users_own_step_reach_it_with_one_group_and_where_it_steps_on_the_ranks() -> None:
    weight = Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = Scaled([weight], lr=0.1)
    Executor(heads=()).step(0, optimizer, None, {"scale": 0.5})
    assert weight.tolist() == [0.5, 0.5]
    replica = Replica([weight], optimizer)
    with evaluating(replica, None, None, {"scale": 0.25}):
        replica.step([weight.grad])
    assert weight.tolist() == [0.25, 0.25]
    assert replica.arguments == {}


def test_arguments_of_a_users_own_step_are_refused_by_name_where_it_steps_at_the_server() -> None:
    optimizer = Scaled([Parameter(torch.ones(2))], lr=0.1)
    place: Any = SimpleNamespace(parts=[None], control=object(), steps_at_worker=False)
    unused: Any = None
    executor = Exchanging(place, unused, unused, unused, heads=())
    with pytest.raises(UnsupportedError, match=r"Scaled.step\(\) is called with scale, which is not sent.*local_sgd"):
        executor.step(0, optimizer, None, {"scale": 0.5})


def test_members_hear_of_a_gradient_that_is_not_averaged_before_they_wait_for_each_other() -> None:
    """Otherwise some would wait in an exchange, and those whose backward pass is not over in that, without an end."""

    def check_reduced(parameters: list[Parameter]) -> None:
        raise RuntimeError("Expected to have finished reduction")

    reduction = SimpleNamespace(check_reduced=check_reduced)
    part = SimpleNamespace(replica=SimpleNamespace(ordered=[]))
    place: Any = SimpleNamespace(parts=[part], control=object(), steps_at_worker=True, reduction=reduction)
    unused: Any = None
    executor = Exchanging(place, unused, unused, unused, heads=())
    for closure in (None, lambda: 1.0):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            executor.step(0, torch.optim.SGD([Parameter(torch.ones(2))], lr=0.1), closure, {})


def test_a_step_asks_for_the_backward_pass_of_its_own_module_alone(alone: None) -> None:
    """That of another module may come in two parts, and its optimizer steps after both."""
    reduction = Reduction(Exact())
    nets = nn.Linear(2, 1), UsesOne()
    modules = [nn.parallel.DistributedDataParallel(net) for net in nets]
    for module in modules:
        reduction.install(module, module.process_group)
        module(torch.ones(3, 2)).sum().backward()
    reduction.check_reduced(list(nets[0].parameters()))
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        reduction.check_reduced(list(nets[1].parameters()))
    again = nn.parallel.DistributedDataParallel(nets[1])
    reduction.install(again, again.process_group)
    reduction.check_reduced(list(nets[1].parameters()))  # what the module was wrapped in before is of no use any more


class UsesOne(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Any:
        return self.used(inputs)


def test_an_optimizer_without_a_rate_is_refused_by_name_where_a_method_needs_one() -> None:
    weight = Parameter(torch.ones(3))
    optimizer = Scaled([weight], lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as those say that find a rate by themselves
    with pytest.raises(UnsupportedError, match=r"Scaled has no learning rate \(its lr is None\).*async_sgd"):
        Master({"weight": weight}, optimizer).update([torch.ones(3)], [{"lr": None}], step_scale=0.5)
    with pytest.raises(UnsupportedError, match=r"Scaled has no learning rate \(its lr is None\).*async_sgd"):
        Replica([weight], optimizer).descend([torch.ones(3)])


def test_an_optimizer_that_needs_a_closure_is_named_when_it_fails_at_the_server() -> None:
    weight = Parameter(torch.ones(3))
    master = Master({"weight": weight}, Twice([weight], lr=0.1))
    with pytest.raises(OmniError, match=r"(?s)Twice\.step\(\).*without a closure.*it needs a closure.*local_sgd"):
        master.update([torch.ones(3)], [{"lr": 0.1}])


def updated(
    keep: Callable[[torch.optim.Optimizer, Parameter], object], steps: int = 1, **more: Any
) -> torch.optim.Optimizer:
    """An optimizer that keeps something in each of its steps, after so many of them at the server.

    Args:
        keep: is given the optimizer, and a parameter.
        steps: how many.
        more: settings that ranks send.
    """
    weight = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [weight], "d": 0.1}], lr=0.1)
    optimizer.defaults["d"] = 0.1

    def kept(*_: Any) -> None:
        keep(optimizer, weight)

    optimizer.register_step_post_hook(kept)
    master = Master({"weight": weight}, optimizer)
    for _ in range(steps):
        master.update([torch.ones(3)], [{"lr": 0.1, "d": 0.1, **more}], step_scale=0.5)
    return optimizer


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda optimizer, _: optimizer.param_groups[0].update(d=0.2), r"its step\(\) has changed 'd' of a parameter"),
        (lambda optimizer, _: optimizer.state["k"].update(steps=1), "its state 'k' is that of no parameter"),
        (lambda optimizer, weight: optimizer.state[weight].update(q=[object()]), "its state 'q' is a list"),
    ],
    ids=["Prodigy", "MADGRAD", "GaLore"],
)
def test_what_a_step_keeps_where_it_would_be_lost_or_cannot_be_saved_is_refused_at_the_server(
    keep: Any, words: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"SGD cannot run at the parameter server: {words}.*local_sgd"):
        updated(keep)


def test_what_a_step_keeps_in_a_parameters_state_or_in_a_setting_that_only_it_knows_of_is_the_servers() -> None:
    def keep(optimizer: torch.optim.Optimizer, weight: Parameter) -> None:
        group = optimizer.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        optimizer.state[weight].update(lists=[torch.eye(2), None, (1.0, {"text": torch.zeros(2, dtype=torch.uint8)})])

    assert updated(keep, 3).param_groups[0]["step"] == 3
    assert updated(keep, 3, step=5).param_groups[0]["step"] == 8, "ranks that were one group have counted"


class Skipping(torch.optim.SGD):
    """Leaves alone what is marked."""

    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            if getattr(each, "skipped", False):
                each.grad = None
        return super().step(closure)


def test_marks_that_a_program_has_put_on_parameters_are_there_where_the_server_steps_them() -> None:
    weights = {name: Parameter(torch.ones(2)) for name in ("body", "head")}
    weights["body"].skipped, weights["head"].made_by = True, object()  # type: ignore[attr-defined]
    weights["head"].places = {(0, 1): "dp"}  # type: ignore[attr-defined]
    names: dict[Tensor, str] = {weight: name for name, weight in weights.items()}
    theirs = {name: Parameter(torch.ones(2)) for name in weights}
    description = describe(Skipping(weights.values(), lr=0.5), names)
    assert description["parameters"] == {"body": {"skipped": True}}
    description["parameters"]["head"] = {"detach": 1}  # of a peer that means ill
    Master(theirs, rebuild(description, theirs, lambda _: Skipping)).update([torch.ones(2)] * 2, [{"lr": 0.5}])
    assert [theirs[name].tolist() for name in weights] == [[1.0, 1.0], [0.5, 0.5]]
    assert "parameters" not in describe(torch.optim.SGD(weights.values(), lr=0.5), names)


def test_state_that_no_checkpoint_of_several_groups_can_hold_is_refused_as_that() -> None:
    replica = SimpleNamespace(own_state=lambda whole: {"optimizer": {0: {"projector": object()}}})
    place: Any = SimpleNamespace(parts=[SimpleNamespace(replica=replica)], exchanges=True, steps_at_worker=True)
    residuals, unused = SimpleNamespace(saved=lambda _: {}), SimpleNamespace()
    states = StateTransfer(place, cast(Any, unused), cast(Any, residuals))
    with pytest.raises(UnsupportedError, match=r"a checkpoint of several groups cannot hold .*a object cannot be sent"):
        states.gather_group_state()


class Rated(torch.optim.SGD):
    """Has a setting in an attribute."""

    rates: list[float]


def test_an_attribute_that_others_change_reaches_the_server_where_groups_synchronize_and_is_refused_between_steps() -> (
    None
):
    weight = Parameter(torch.ones(2))
    optimizer, theirs = Rated([weight], lr=0.1), []
    optimizer.rates = [0.1]

    def nothing(*_: Any, **__: Any) -> list[str]:
        return []

    replica = SimpleNamespace(written=nothing, ordered=[weight], know=nothing, abandon=nothing, load=nothing)
    replica.begin_layout, part = nothing, SimpleNamespace(optimizer=optimizer, head=None, replica=replica)
    place: Any = SimpleNamespace(parts=[part], exchanges=True, steps_at_worker=False, all_reduce_max=list)
    states = SimpleNamespace(keep=nothing, forget=nothing)
    states.seed = lambda: theirs.append(describe(optimizer, {weight: "weight"})["attributes"])
    replica.layout, exchange = None, SimpleNamespace(read_weights=nothing, peers=SimpleNamespace(grow=nothing))
    edits = ExternalWrites(place, cast(Any, exchange), cast(Any, states))
    edits.begin()
    edits.follow(nothing)
    assert theirs == []
    optimizer.rates[0] = 0.2

    def refuse() -> None:
        raise ConfigurationError("the ranks' optimizers do not hold the same parameters")

    with pytest.raises(ConfigurationError, match="do not hold the same parameters"):
        edits.follow(refuse)
    assert theirs == [], "nothing is handed over that other ranks cannot read"
    edits.follow(nothing)
    edits.check(cast(Any, part))
    vars(optimizer)["noted"] = 1  # what others add, its step does not read
    edits.follow(nothing)
    edits.check(cast(Any, part))
    assert theirs == [{"rates": [0.2]}]
    optimizer.rates = [0.3]
    with pytest.raises(UnsupportedError, match=r"'rates' of Rated was changed between two steps.*an epoch's start"):
        edits.check(cast(Any, part))


def test_a_step_that_was_put_on_the_optimizer_itself_is_refused_and_that_of_a_scheduler_is_not() -> None:
    unused: Any = SimpleNamespace(is_sharded=False, steps_at_worker=True, registration=None, size=2)
    executor = Exchanging(unused, unused, unused, unused, heads=())
    optimizer = torch.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    executor.check_optimizer(optimizer)
    before = optimizer.step

    def step(self: torch.optim.Optimizer, *arguments: Any) -> Any:
        return before(*arguments)

    for schedules in (False, True):  # what a scheduler has wrapped is found as well
        optimizer = torch.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        if schedules:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(UnsupportedError, match=r"step was replaced on this SGD itself.*register_step_post_hook"):
            executor.check_optimizer(optimizer)
        Executor(heads=()).check_optimizer(optimizer)


def test_an_optimizer_that_swaps_weights_for_evaluation_is_refused_at_the_server() -> None:
    with pytest.raises(UnsupportedError, match=r"ScheduleFree moves the weights in its train\(\).*local_sgd"):
        check_servable(ScheduleFree([Parameter(torch.ones(3))], lr=0.1))


def test_a_setting_that_cannot_be_sent_is_refused_at_the_server_by_name_and_is_no_matter_where_ranks_step() -> None:
    body, head = Parameter(torch.ones(3)), Parameter(torch.ones(2))
    groups: list[dict[str, Any]] = [{"params": [body], "rule": len, "scale": 0.5}, {"params": [head]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(UnsupportedError, match=r"a parameter group's 'rule' is a builtin_function.*local_sgd"):
        check_servable(optimizer)
    first, second = hyperparameters_of(optimizer, are_needed=False)
    assert (first["scale"], first["lr"], second["lr"]) == (0.5, 0.1, 0.1)
    assert "rule" not in first


@pytest.mark.parametrize("averages", [True, False])
def test_whole_numbers_in_an_optimizer_are_refused_where_weights_are_averaged(averages: bool) -> None:
    codes = Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    replica = SimpleNamespace(parameters={"weight": Parameter(torch.ones(2)), "codes": codes})
    place: Any = SimpleNamespace(
        parts=[SimpleNamespace(replica=replica, head=None, optimizer=None)],
        steps_at_worker=averages,
        method=LocalSGD(),
        torch_members=(0,),
    )
    unused: Any = None
    executor = Exchanging(place, unused, unused, unused, heads=())
    with (
        pytest.raises(UnsupportedError, match=r"codes is of torch.uint8.*LocalSGD.*leave it out of the optimizer")
        if averages
        else nullcontext()
    ):
        executor.check_parts()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_be_sent_is_refused_with_a_remedy(dtype: torch.dtype) -> None:
    weights = {"w": Parameter(torch.zeros(2).to(dtype), requires_grad=False)}
    replica = ModelReplica(weights, torch.optim.SGD(weights.values(), lr=0.1))
    with pytest.raises(UnsupportedError, match=r"'w' has dtype torch\.\w+, which cannot be exchanged; leave it out of"):
        replica.layout_with({})


def test_an_optimizer_with_collectives_over_ranks_of_other_groups_is_refused(alone: None) -> None:
    weight = Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([weight], lr=0.1)
    optimizer.process_group = dist.group.WORLD  # as that of ZeroRedundancyOptimizer
    part = SimpleNamespace(replica=SimpleNamespace(parameters={"weight": weight}), head=None, optimizer=optimizer)
    place: Any = SimpleNamespace(parts=[part], steps_at_worker=True, method=LocalSGD(), torch_members=(0,))
    place.registration, place.is_sharded, place.size = None, False, 1
    unused: Any = None
    executor = Exchanging(place, unused, unused, unused, heads=())
    executor.check_parts()
    executor.check_optimizer(optimizer)
    place.torch_members = (1,)
    with pytest.raises(UnsupportedError, match=r"SGD whose process group has ranks of.*\(0\)"):
        executor.check_parts()


def test_a_module_over_a_process_group_that_is_no_more_waits_for_no_rank(alone: None) -> None:
    group = dist.new_group([0])
    module: Any = SimpleNamespace(process_group=group)
    assert ranks_elsewhere(module, [1]) == {0}
    dist.destroy_process_group(group)
    assert ranks_elsewhere(module, [1]) == set()


class Probing(pl.Callback):
    """Keeps a module."""

    def __init__(self, probe: nn.Module) -> None:
        self.probe = probe


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


Hook = Callable[[Any, int], None]


class Run:
    """What schedulers have of a run: 20 steps of DDP an epoch, of which this group has heard of ``steps``."""

    def __init__(self, *configs: Any, hook: Hook | None = None, is_automatic: bool = True) -> None:
        self.steps, self.progress = 0, Progress(ReferenceBatch(ranks=2, batch_size=4), batches=20)
        module = pl.LightningModule()
        module.automatic_optimization = is_automatic
        if hook is not None:
            module.lr_scheduler_step = lambda scheduler, metric: hook(scheduler, self.trainer.current_epoch)  # type: ignore[method-assign]
        self.trainer: Any = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=9)
        self.trainer.strategy.connect(module)
        self.trainer.strategy.lr_scheduler_configs = list(configs)
        self.schedulers = RunSchedulers(cast(Any, self), lambda: self.steps)

    def now(self) -> Progress:
        return self.progress

    def steps_at(self, progress: Progress) -> int:
        return progress.steps

    def start(self, is_paced: bool = True) -> RunSchedulers:
        self.schedulers.start()
        self.schedulers.keep_pace(is_paced)
        return self.schedulers

    def go_to(self, epoch: int) -> None:
        epochs = self.trainer.fit_loop.epoch_progress.current
        epochs.ready = epochs.started = epoch + 1
        epochs.processed = epochs.completed = epoch
        self.progress = replace(self.progress, epochs=epoch, samples=0)


def stepped_schedule() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([Parameter(torch.ones(3))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    optimizer.step()
    return schedule


def twice(schedule: Any, epoch: int) -> None:
    schedule.step()
    schedule.step()


HOOKS: dict[str, Hook] = {
    "once": lambda schedule, epoch: schedule.step(),
    "with the metric": lambda schedule, epoch: schedule.step(None),
    "twice": twice,
    "from an epoch on": lambda schedule, epoch: schedule.step() if epoch else None,
    "up to an epoch": lambda schedule, epoch: None if epoch else schedule.step(),
    "never": lambda schedule, epoch: None,
    "to a given position": lambda schedule, epoch: schedule.step(7 + epoch),
}
"""What modules may do in ``lr_scheduler_step``, by the epoch."""


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("frequency", [1, 5])
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_hook_of_the_module_that_steps_schedules_is_called_as_often_as_under_ddp(name: str, frequency: int) -> None:
    """This group trains 5 of the 20 batches of an epoch."""
    schedule, alone = stepped_schedule(), stepped_schedule()
    run = Run(LRSchedulerConfig(schedule, interval="step", frequency=frequency), hook=HOOKS[name])
    schedulers = run.start()
    for epoch in range(2):
        run.go_to(epoch)
        schedulers.begin_epoch()
        for batch in range(1, 6):
            run.steps = 20 * epoch + 4 * batch
            schedulers.step("step")
            schedulers.step("step")  # which has nothing left to do
        for batch in range(1, 21):
            if batch % frequency == 0:
                HOOKS[name](alone, epoch)
        assert schedule.last_epoch == alone.last_epoch


def test_steps_of_a_schedule_by_other_hooks_are_those_of_the_group() -> None:
    schedule = stepped_schedule()
    run = Run(LRSchedulerConfig(schedule, interval="step"), hook=lambda schedule, epoch: None)
    schedulers = run.start()
    for batch in range(1, 6):
        run.steps = 4 * batch
        schedulers.step("step")
        schedule.step()  # in on_train_batch_end
    assert schedule.last_epoch == 5


def test_a_schedule_by_epochs_is_stepped_once_in_each_however_often_a_group_ends_it() -> None:
    schedule = stepped_schedule()
    run = Run(LRSchedulerConfig(schedule))
    schedulers = run.start()
    for epoch in range(3):
        run.go_to(epoch)
        schedulers.begin_epoch()
        for _ in range(2):  # once more after a change of groups in what was the last batch
            schedulers.step("epoch")
        assert schedule.last_epoch == epoch + 1


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_a_schedule_by_epochs_keeps_pace_from_the_next_epoch_on_where_groups_are_formed_at_an_epochs_end(
    hook: str,
) -> None:
    schedule = stepped_schedule()
    run = Run(LRSchedulerConfig(schedule))
    schedulers = run.start(is_paced=False)
    run.go_to(0)
    schedule.step()  # by Lightning, in the epoch's last batch
    if hook == "on_train_epoch_end":
        run.trainer.fit_loop.epoch_progress.current.processed = 1
    else:
        run.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
    schedulers.keep_pace(True)
    run.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False
    run.go_to(1)
    schedulers.step("epoch")
    assert schedule.last_epoch == 2


@pytest.mark.parametrize("is_automatic", [True, False])
def test_schedules_go_on_as_the_furthest_where_groups_become_one(is_automatic: bool) -> None:
    schedule = stepped_schedule()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(schedule.optimizer)
    run = Run(
        LRSchedulerConfig(plateau, reduce_on_plateau=True),
        LRSchedulerConfig(schedule, interval="step"),
        is_automatic=is_automatic,
    )
    schedulers = run.start()
    run.steps = 4
    if is_automatic:
        schedulers.step("step")
    else:
        schedulers.step("step")
        assert schedule.last_epoch == 0, "whatever the run is at"
        schedule.step()
    own = schedule.last_epoch
    schedulers.align(lambda counts: [count + 2 for count in counts])  # another rank has stepped it twice more
    assert schedule.last_epoch == own + 2
    run.steps = 6
    schedulers.step("step")
    assert schedule.last_epoch == own + 2, "what it has made already is not due"


@pytest.mark.parametrize(("frequency", "made", "due"), [(1, 16, 18), (4, 4, 4), (3, 5, 6)])
def test_a_checkpoint_tells_what_schedules_have_made_and_a_resumed_run_makes_what_is_due(
    frequency: int, made: int, due: int
) -> None:
    """The rank that saves has heard of 16 steps when the server has 18."""
    schedule = stepped_schedule()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(schedule.optimizer)
    by_epoch = LRSchedulerConfig(stepped_schedule())
    configs = [
        LRSchedulerConfig(plateau, reduce_on_plateau=True),
        by_epoch,
        LRSchedulerConfig(schedule, interval="step", frequency=frequency),
    ]
    run = Run(*configs)
    schedulers = run.start()
    run.steps = 16
    schedulers.step("step")
    counts = schedulers.counts_at(replace(run.progress, samples=18 * 8))
    assert counts == [(), (), (made, due)]
    resumed = Run(*configs)
    resumed.progress, resumed.steps = replace(run.progress, samples=18 * 8), 18
    resumed.schedulers.resume(counts)
    resumed.start()
    assert (schedule.last_epoch, by_epoch.scheduler.last_epoch) == (due, 0)
    fewer = Run(configs[2])
    fewer.schedulers.resume(counts)
    fewer.start()
    assert schedule.last_epoch == due, "there are fewer now"


def test_a_schedule_that_was_saved_later_than_the_weights_waits_for_them() -> None:
    """Weights of a published validation are those of a moment that has passed."""
    schedule = stepped_schedule()
    for _ in range(12):
        schedule.step()
    run = Run(LRSchedulerConfig(schedule, interval="step"))
    run.progress, run.steps = replace(run.progress, samples=8 * 8), 8
    run.schedulers.resume([(12, 8)])
    schedulers = run.start()
    for run.steps, count in ((10, 12), (12, 12), (14, 14)):
        schedulers.step("step")
        assert schedule.last_epoch == count


def test_a_chained_schedule_keeps_pace_though_it_counts_no_steps() -> None:
    optimizer = torch.optim.SGD([Parameter(torch.ones(3))], lr=1.0)
    kinds = torch.optim.lr_scheduler
    chained = kinds.ChainedScheduler([kinds.ExponentialLR(optimizer, 0.5), kinds.ConstantLR(optimizer, 0.1, 3)])
    run = Run(LRSchedulerConfig(chained, interval="step"))
    schedulers = run.start()
    optimizer.step()
    for run.steps, rate in ((1, 0.05), (1, 0.05), (4, 0.0625)):  # other groups have trained two steps meanwhile
        schedulers.step("step")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    schedulers.align(lambda counts: [count + 1 for count in counts])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.03125)


def test_a_schedule_that_replaces_another_between_epochs_keeps_pace_from_there() -> None:
    first, second = stepped_schedule(), stepped_schedule()
    run = Run(LRSchedulerConfig(first, interval="step"))
    schedulers = run.start()
    run.steps = 20
    schedulers.step("step")
    run.go_to(1)
    run.trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(second, interval="step")]
    schedulers.begin_epoch()
    run.steps = 24
    schedulers.step("step")
    assert (first.last_epoch, second.last_epoch) == (20, 4)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_buffer_is_refused_by_its_name(alone: None, layout: torch.layout) -> None:
    module = nn.Module()
    module.norm = nn.BatchNorm1d(2)
    module.register_buffer("graph", torch.eye(3).to_sparse(layout=layout))
    with pytest.raises(UnsupportedError, match=rf"^graph is a sparse tensor \({layout}\).* as buffers"):
        World().wrap(module)
    with pytest.raises(UnsupportedError, match=r"^graph is a sparse tensor"):  # it came later
        merge(World(), buffers_of(module))


class Streamed(IterableDataset[int]):
    """Numbers that cannot be dealt out."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def made(data: LeasedData, *kinds: str) -> list[Any]:
    """What the loops get for loaders of these kinds, whose samples are those of rank 0 of two."""
    ours: Any = range(8)
    loaders = [
        DataLoader(ours, batch_size=2, sampler=DistributedSampler(ours, 2, 0, shuffle=False))
        if kind == "ours"
        else DataLoader(Streamed(), batch_size=2)
        for kind in kinds
    ]
    return [data.process(loader, 0, lambda _: "") for loader in loaders]


def leased_data(
    exchanges: bool, before_epoch: Callable[[int], None] = lambda _: None, is_for_user: Callable[[], bool] = bool
) -> LeasedData:
    """For a world of one group, or of several that have not parted yet."""
    data = LeasedData("dynamic", lambda _: None, before_epoch, is_for_user)
    executor = SimpleNamespace(exchanges=exchanges, control=None)
    core = SimpleNamespace(data=None)
    world: Any = SimpleNamespace(
        executor=executor, core=core, registration=None, tensor_parallel=1, data_rank=(0, 2), generation=0
    )
    data.connect(world)
    return data


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("kinds", [("ours", "iterable"), ("iterable", "ours"), ("ours", "ours")])
def test_loaders_that_advance_together_deal_out_like_distributed_sampler_before_the_groups_have_parted(
    kinds: tuple[str, ...], exchanges: bool
) -> None:
    data = leased_data(exchanges)
    loader = made(data, *kinds)[kinds.index("ours")]
    assert data.is_dealt_out
    # An iterable loader beside it makes the loops fetch a batch in advance.
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    data.adopt()
    assert data.leases is None
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]


@pytest.mark.parametrize("exchanges", [False, True])
def test_a_hook_that_goes_through_the_training_data_gets_this_ranks_share_and_draws_nothing(exchanges: bool) -> None:
    drawn: list[int] = []
    by = SimpleNamespace(user=True)
    data = leased_data(exchanges, drawn.append, lambda: by.user)
    [loader] = made(data, "ours")
    loader.worker_init_fn = print  # as Lightning does, once a loader is leased
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    assert loader.unleased.worker_init_fn is print
    assert (drawn, loader.leases.handed) == ([], 0)
    by.user = False
    loader.leases.is_local = True
    training = iter(loader)
    assert next(training).tolist() == [0, 2]
    by.user = True
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    assert [batch.tolist() for batch in training] == [[4, 6]], "the epoch goes on where it was"


def test_training_data_that_are_iterated_in_a_hook_or_after_the_fit_are_not_for_the_loops() -> None:
    epochs = EpochDriver("dynamic", lambda _: None, lambda _: None)
    module = pl.LightningModule()
    trainer: Any = SimpleNamespace(lightning_module=module, fit_loop=SimpleNamespace())
    after = epochs._is_for_user
    epochs.trainer = trainer
    epochs.data.connect(cast(Any, SimpleNamespace()))
    in_loops = epochs._is_for_user
    module._current_fx_name = "on_train_epoch_start"
    in_hook = epochs._is_for_user
    trainer.fit_loop._iterates = True  # a learning-rate finder's run makes loaders again, inside the hook
    in_finder = epochs._is_for_user
    assert (after, in_hook, in_loops, in_finder) == (True, True, False, False)


@pytest.mark.parametrize("is_leader", [False, True])
def test_every_member_computes_the_staleness_without_a_warning(is_leader: bool) -> None:
    listener: Any = object.__new__(Listener)
    world = SimpleNamespace(is_leader=is_leader, parts=[SimpleNamespace(staleness=Counter({3: 2}))])
    listener.parts, listener._staleness = SimpleNamespace(world=world), Staleness()
    listener._watch_staleness()
    assert float(listener._staleness.compute()["count"]) == 2 * is_leader


def test_loaders_that_are_made_again_are_divided_among_the_ranks_that_are_left() -> None:
    data = leased_data(exchanges=False)
    world: Any = data._world
    for left in (2, 1):
        world.data_rank = (0, left)
        made(data, "ours")
        data.adopt()
        assert data.leases is not None
        assert data.leases._members == left


def test_loaders_that_were_made_for_several_groups_are_those_of_one_if_the_epoch_begins_with_one() -> None:
    data = leased_data(exchanges=True)
    made(data, "ours")
    world: Any = data._world
    world.executor.exchanges = False
    data.adopt()
    assert data.leases is not None
    assert data.leases.is_local


def test_a_rank_that_dies_in_an_evaluation_after_a_fit_ends_it_and_one_that_dies_after_all_does_not() -> None:
    executor = SimpleNamespace(control=None)
    world = SimpleNamespace(registration=None, executor=executor, lost=(), ever_lost=(), is_finished=True)
    strategy, signals = SimpleNamespace(node_rank=0, num_processes=2), SimpleNamespace(is_stopping=False)
    for is_evaluating in (True, False):
        parts: Any = SimpleNamespace(
            strategy=strategy, signals=signals, current_world=world, is_evaluating=is_evaluating
        )
        assert Launching(parts, bool, bool).on_death(1, -9) is not is_evaluating


@pytest.mark.parametrize("indices", [["a", "b"], [("a", 1)], torch.tensor([2, 0]), range(3)])
def test_a_part_of_a_dataset_is_marked_by_its_indices_of_whatever_kind(indices: Any) -> None:
    dataset: Any = {"a": 1}
    assert split_of(Subset(dataset, indices)) == split_of(Subset(dataset, list(indices))) != 0
    assert split_of(Subset(dataset, indices)) != split_of(Subset(dataset, [5]))


@pytest.mark.parametrize("kinds", [("iterable",), ("ours", "ours"), ("ours", "iterable")])
def test_a_reload_whose_loaders_cannot_be_leased_is_refused_among_groups_and_not_with_one(
    kinds: tuple[str, ...],
) -> None:
    for exchanges in (False, True):
        data = leased_data(exchanges)
        made(data, "ours")
        data.adopt()
        assert data.leases is not None
        made(data, *kinds)
        with (
            pytest.raises(UnsupportedError, match=r'reload_dataloaders_every_n_epochs.*data="static"')
            if exchanges
            else nullcontext()
        ):
            data.adopt()
        assert data.leases is None


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_the_trainer_does_not_know_may_not_move_the_module_inside_an_epoch() -> None:
    module = pl.LightningModule()
    module.body, module.head = nn.Linear(2, 2), nn.Linear(2, 2)
    known, unknown = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (module.body, module.head))
    elsewhere = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    world, proxies = World(), Proxies()
    proxies.attach(world, module, [known], MergedSubmodule(None), trainer)
    proxies.guard([known])
    try:
        unknown.step()  # all ranks synchronize: they hear of it
        world.is_computing = True
        elsewhere.step()  # what a callback trains by itself
        with pytest.raises(UnsupportedError, match=r"^SGD\.step\(\) would move head.weight.*configure_optimizers"):
            unknown.step()
        with pytest.raises(UnsupportedError, match=r"raw optimizer\.step\(\)"):
            known.step()
    finally:
        proxies.unguard()
    unknown.step()
    known.step()


@pytest.mark.usefixtures("alone")
def test_an_optimizer_inside_another_may_not_step_by_itself_and_the_other_ones_step_is_named() -> None:
    module = pl.LightningModule()
    module.head = nn.Linear(2, 2)
    outer = Sharpness(module.parameters(), lr=0.1)
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    world, proxies = World(), Proxies()
    proxies.attach(world, module, [outer], MergedSubmodule(None), trainer)
    proxies.guard([outer])
    try:
        world.is_computing = True
        module.head(torch.ones(1, 2)).sum().backward()
        outer.first_step()
        with pytest.raises(UnsupportedError, match=r"^SGD\.step\(\) would.*of the Sharpness.*call its step\(closure\)"):
            outer.second_step()
    finally:
        proxies.unguard()


class Contributions:
    def __init__(self, answer: Callable[[bytes], list[tuple[int, bytes]]]) -> None:
        self.answer = answer

    def synchronize(self, what: str, payload: bytes) -> list[tuple[int, bytes]]:
        return self.answer(payload)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_collectives_of_users_among_all_groups_take_tensors_of_any_dtype(dtype: torch.dtype) -> None:
    world = LiveWorld(0, 2)
    theirs = torch.tensor([1.0, 0.0]).to(dtype)
    exchange = Contributions(lambda payload: [(0, payload), (1, theirs.view(torch.uint8).numpy().tobytes())])
    world.connect(exchange.synchronize, 0)
    mine, places = torch.tensor([0.0, 1.0]).to(dtype), [torch.zeros(2).to(dtype) for _ in range(2)]
    world.allgather([places], [mine])
    for place, expected in zip(places, (mine, theirs), strict=True):
        assert bytes(place.view(torch.uint8).numpy()) == bytes(expected.view(torch.uint8).numpy())


@pytest.mark.usefixtures("alone")
def test_functional_collectives_among_all_groups_are_those_of_the_live() -> None:
    register()
    group = dist.new_group([0], backend="omni")
    assert isinstance(group, LiveWorld)
    exchange = Contributions(lambda payload: [(0, payload), (1, payload)])
    group.connect(exchange.synchronize, 0)
    mine = torch.tensor([1.0, 2.0])
    assert functional.all_reduce(mine, "sum", group).tolist() == [2.0, 4.0]
    assert functional.broadcast(mine, 0, group).tolist() == [1.0, 2.0]
    gather, scatter = (  # their names since torch 2.13, and before
        getattr(functional, new, None) or getattr(functional, old)
        for new, old in (
            ("all_gather_single", "all_gather_tensor"),
            ("reduce_scatter_single", "reduce_scatter_tensor"),
        )
    )
    assert gather(mine, 0, group).tolist() == [1.0, 2.0] * 2
    with pytest.raises(UnsupportedError, match="reduce_scatter_tensor is not offered"):
        scatter(mine, "sum", 0, group)
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("alone")
def test_a_tensor_of_all_ranks_is_gathered_among_all_groups_by_torchs_own_call() -> None:
    register()
    group, whole = dist.new_group([0], backend="omni"), torch.zeros(3, 2)
    assert isinstance(group, LiveWorld)
    exchange = Contributions(lambda payload: [(0, payload), (2, payload)])  # rank 1 is lost
    group.connect(exchange.synchronize, 0)
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
    gather(whole, torch.ones(1, 2), group=group)
    assert whole.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


@pytest.mark.usefixtures("alone")
def test_the_rank_that_was_to_get_a_sum_gets_it_though_another_dies_in_the_collective() -> None:
    world = LiveWorld(2, 3)
    mine, places = torch.tensor([1.0, 2.0]), [torch.zeros(2) for _ in range(3)]
    reduce, gather = dist.ReduceOptions(), dist.GatherOptions()
    collectives: list[tuple[Callable[[], Any], Any]] = [
        (lambda: world.reduce([mine], reduce), reduce),
        (lambda: world.gather([places], [mine], gather), gather),
    ]
    exchange = Contributions(lambda payload: [(0, payload), (2, payload)])  # rank 1 dies
    for collective, opts in collectives:
        world.ranks = [0, 1, 2]
        world.connect(exchange.synchronize, 2)
        opts.rootRank = 2
        collective()
    assert mine.tolist() == [2.0, 4.0]
    assert [place.tolist() for place in places] == [[2.0, 4.0], [2.0, 4.0], [0.0, 0.0]]


@pytest.mark.usefixtures("alone")
def test_a_broadcast_whose_source_dies_says_so_and_weights_that_were_to_be_copied_stay() -> None:
    register()
    group, mine = dist.new_group([0], backend="omni"), torch.ones(2)
    assert isinstance(group, LiveWorld)
    exchange = Contributions(lambda payload: [(1, payload)])  # rank 0 dies
    group.connect(exchange.synchronize, 1)
    group.ranks = [0, 1]
    with pytest.raises(RankLost, match="rank 0 was lost in a broadcast"):
        dist.broadcast_object_list([""], src=0, group=group)
    group.ranks = [0, 1]
    take_from_rank_zero([("weight", mine)], group)
    assert mine.tolist() == [1.0, 1.0]
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("alone")
def test_a_collective_that_is_not_offered_among_all_groups_says_which_are() -> None:
    register()
    group, one = dist.new_group([0], backend="omni"), torch.ones(1)
    assert isinstance(group, LiveWorld)
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since torch 2.13
    with pytest.raises(UnsupportedError, match=r"^torch\.distributed\.reduce_scatter_tensor is not.*use all_reduce"):
        scatter(one.clone(), one, group=group)
    with pytest.raises(UnsupportedError, match=r"^torch\.distributed\.recv is not.*use all_reduce"):
        dist.recv(one, group=group)


@pytest.mark.usefixtures("alone")
def test_gradients_are_measured_before_on_after_backward_changes_them() -> None:
    module, balance = nn.Linear(2, 1, bias=False), Balance("auto", print, only_measures=True)
    balance.begin(World(), module, lambda: None, samples=1)
    balance.begin_batch()
    module(torch.tensor([[3.0, 4.0]])).sum().backward()
    balance.backward_done()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert balance.squares.tolist() == [25.0, 25.0]


@pytest.mark.usefixtures("alone")
def test_the_options_of_a_world_say_the_groups_that_it_was_given() -> None:
    assert World(1, options=WorldOptions(groups=2)).options.groups == 1
    assert World(options=WorldOptions(groups=1)).options.groups == 1
    with pytest.raises(ConfigurationError, match=r"^groups=2 and elastic=True: .* leave groups= out"):
        World(2, options=WorldOptions(server="tcp://192.0.2.1:5555", elastic=True))


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda:3"), ("gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu")])
def test_without_a_device_weights_are_where_the_default_process_group_takes_them(backend: str, device: str) -> None:
    assert default_device(backend, lambda: 3) == torch.device(device)


@pytest.mark.usefixtures("alone")
def test_a_world_is_on_the_cpu_under_gloo_unless_it_is_told_otherwise() -> None:
    assert World(1).device == torch.device("cpu")
    assert World(1, "cpu:0").device == torch.device("cpu", 0)


def test_a_live_world_takes_tensors_of_the_machines_accelerator_unless_torch_would_make_it_their_default() -> None:
    assert device_types(None) == device_types(torch.device("cuda", 1)) == ["cpu", "cuda"]
    assert device_types(torch.device("xpu")) == ["cpu", "cuda", "xpu"]
    assert device_types(torch.device("privateuseone")) == ["cpu", "cuda"]


@pytest.mark.usefixtures("alone")
def test_two_parameters_of_one_name_are_refused_for_one_of_them_would_not_be_trained() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"^names=: two parameters of the optimizer are called weight"):
        OmniOptimizer(optimizer, World(), {**names_of(one), **names_of(two)})
    both = nn.ModuleDict({"one": one, "two": two})
    assert OmniOptimizer(optimizer, World(), names_of(both)).optimizer is optimizer


@pytest.mark.usefixtures("alone")
def test_gradients_that_a_scaler_would_unscale_twice_are_refused_with_the_remedy() -> None:
    raw = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    optimizer = OmniOptimizer(raw, World())
    scaler = torch.amp.GradScaler("cpu")

    def step(unscaled: torch.optim.Optimizer) -> None:
        scaler.scale(sum(each.sum() for each in raw.param_groups[0]["params"])).backward()
        scaler.unscale_(unscaled)
        scaler.step(optimizer)
        scaler.update()

    step(optimizer)
    with pytest.raises(ConfigurationError, match=r"unscaled twice: pass the OmniOptimizer to both$"):
        step(raw)


@pytest.mark.usefixtures("alone")
def test_arguments_of_a_loop_without_lightning_are_refused_by_name() -> None:
    world, optimizer = World(), torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    wrapped: Any
    for name, wrapped in (
        ("world", (world, optimizer)),
        ("optimizer", (torch.optim.SGD, world)),
        ("optimizer", (nn.Linear(2, 2).parameters(), world)),
        ("optimizer", (OmniOptimizer(optimizer, world), world)),
    ):
        with pytest.raises(ConfigurationError, match=f"^{name}="):
            OmniOptimizer(*wrapped)
    options: Any = {"method": "local_sgd"}
    with pytest.raises(ConfigurationError, match=r"^options=.*pass WorldOptions\("):
        World(options=options)


@pytest.mark.parametrize("keeps", ["callback", "module"])
@pytest.mark.usefixtures("alone")
def test_a_module_wrapped_over_ranks_of_other_groups_is_refused_by_name(keeps: str) -> None:
    wrapped, module = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), pl.LightningModule()
    callbacks: list[Any] = [Probing(nn.Sequential(wrapped))] if keeps == "callback" else []
    if keeps == "module":
        module.probe = wrapped
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    check_wrapped(trainer, members=(0, 1))
    name = "Probing.probe.0" if keeps == "callback" else "probe"
    with pytest.raises(UnsupportedError, match=rf"^{name} is a DistributedDataParallel.*\(0\).*on_train_batch_start"):
        check_wrapped(trainer, members=(1,))


def instantiated(parser: ArgumentParser, parsed: Any) -> Any:
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes  # as older releases call it
    return make(parsed)


def test_a_configuration_file_has_a_method_and_its_settings_in_one_text() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md").read_text()
    block = page.split("## LightningCLI")[1].split("```yaml")[1].split("```")[0]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--trainer.strategy", type=pl.strategies.Strategy)
    parsed = parser.parse_string(block)
    again = parser.parse_string(parser.dump(parsed))
    assert again.trainer.strategy.init_args.method == "diloco:period=50"
    made = instantiated(parser, again).trainer.strategy.world_options
    assert (made.groups, made.compression) == (2, Compression("int8", "bf16"))
    assert made.server == Server(count=2, save=10.0)
    as_class = "{class_path: lightning_omni.methods.DiLoCo, init_args: {period: 50}}"
    with pytest.raises(ArgumentError, match="'period' is not accepted"):
        parser.parse_string(block.replace("diloco:period=50", as_class))


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["compression=int8"], "compression", Compression("int8")),
        (["compression.push=int8", "compression.pull=bf16"], "compression", Compression("int8", "bf16")),
        (["compression={all_reduce: powersgd:4}"], "compression", Compression(all_reduce="powersgd:4")),
        (["server=per-node"], "server", Server(count="per-node")),
        (["server=tcp://10.0.0.9:5555"], "server", Server("tcp://10.0.0.9:5555")),
        (["server.count=2", "server.save=10"], "server", Server(count=2, save=10.0)),
        (["server={save: null}"], "server", Server(save=None)),
        (["elastic=true", "server=tcp://10.0.0.9:5555"], "elastic", Elastic(join=True)),
        (["elastic.heartbeat=9"], "elastic", Elastic(heartbeat=9.0)),
        (["model_parallel=fsdp"], "model_parallel", FSDP()),
        (["model_parallel.shards=2"], "model_parallel", FSDP(shards=2)),
    ],
    ids=str,
)
def test_a_command_line_has_a_value_as_one_text_or_by_its_arguments(given: list[str], name: str, value: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--trainer.strategy", type=pl.strategies.Strategy)
    options = [f"--trainer.strategy.init_args.{option}" for option in given]
    parsed = parser.parse_args(["--trainer.strategy=lightning_omni.OmniStrategy", *options])
    made = instantiated(parser, parsed).trainer.strategy
    assert getattr(made.world_options, name) == value


@pytest.mark.filterwarnings("ignore")  # of LightningCLI's own
def test_the_command_line_of_the_page_makes_the_strategy_and_the_tuner() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md").read_text()
    [line] = [each for each in page.splitlines() if each.startswith("`--trainer.strategy")]
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    cli = LightningCLI(
        BoringModel,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args=[*options, *line.strip("`.").split()],
    )
    assert isinstance(cli.trainer.strategy, OmniStrategy)
    assert any(isinstance(each, OmniTuner) for each in cli.trainer.callbacks)  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("frequency", [1, 4, 5, 20])
def test_a_schedule_of_a_frequency_is_stepped_as_often_as_lightning_does_which_counts_from_each_epochs_start(
    frequency: int, window: int
) -> None:
    batches, epochs, stepped, calls = 16, 3, [0], 0
    for _ in range(epochs):
        for batch in range(1, batches + 1):
            if batch % window == 0 or batch == batches:
                calls += batch % frequency == 0
                stepped.append(calls)
    progress = Progress(ReferenceBatch(ranks=2, batch_size=4, window=window), batches)
    assert [progress.scheduled(frequency, steps) for steps in range(len(stepped))] == stepped


@pytest.mark.parametrize("trains", ["all", "several groups", "one group at first"])
@pytest.mark.parametrize(
    "epochs",
    [[(40, 1), (40, 2)], [(40, 4), (40, 1), (40, 3)], [(150, 1), (15, 1), (15, 1)], [(15, 2), (150, 4), (20, 1)]],
    ids=["accumulates more", "accumulates less", "shorter", "longer"],
)
def test_a_schedule_of_a_frequency_is_stepped_as_by_ddp_where_epochs_have_other_batches_and_windows(
    epochs: list[tuple[int, int]], trains: str
) -> None:
    """Other groups train all that is new to this one, or this one hears of each step, or trains an epoch alone."""
    schedule, calls, past = stepped_schedule(), 0, 0
    run = Run(LRSchedulerConfig(schedule, interval="step", frequency=10))
    for epoch, (batches, window) in enumerate(epochs):
        run.progress = Progress(ReferenceBatch(ranks=2, batch_size=4, window=window), batches, epoch, past=past)
        run.steps, is_alone = past, trains == "one group at first" and epoch == 0
        if epoch == 0:
            run.start(is_paced=not is_alone)
        run.schedulers.begin_epoch()
        for batch in range(1, batches + 1):
            if batch % window == 0 or batch == batches:
                calls += batch % 10 == 0
                if is_alone and batch % 10 == 0:
                    schedule.step()  # as Lightning does
            run.progress = replace(run.progress, samples=8 * batch)
            run.steps = run.progress.steps
            if trains == "several groups" and batch < batches:  # an epoch's end counts a step of fewer batches
                run.schedulers.step("step")
                assert schedule.last_epoch == calls
        past = run.steps = run.progress.steps_before(epoch + 1)
        run.progress = replace(run.progress, epochs=epoch + 1, samples=0, past=past)
        run.schedulers.step("step")
        assert schedule.last_epoch == calls
        if is_alone:
            run.schedulers.keep_pace(True)  # there are several groups now


@pytest.mark.parametrize(
    ("interval", "max_steps", "is_refused"), [("step", -1, True), ("epoch", 20, True), ("epoch", -1, False)]
)
def test_other_accumulation_inside_an_epoch_is_refused_where_steps_are_counted_in_samples_of_all_groups(
    interval: str, max_steps: int, is_refused: bool
) -> None:
    epochs = EpochDriver("dynamic", print, print)
    run = Run(LRSchedulerConfig(stepped_schedule(), interval=interval))
    run.start()
    limits: Any = SimpleNamespace(max_steps=max_steps)
    trainer: Any = SimpleNamespace(accumulate_grad_batches=4)
    epochs.trainer, epochs.run.limits, epochs.schedulers = trainer, limits, run.schedulers
    epochs._check_window()
    epochs._check_window()
    epochs._epoch = type(epochs._epoch)()
    trainer.accumulate_grad_batches = 2  # a callback's schedule has other windows in the next epoch
    epochs._check_window()
    trainer.accumulate_grad_batches = 1
    says = r"^accumulate_grad_batches has changed from 2 to 1 inside an epoch.*on_train_epoch_start.*groups=1$"
    with pytest.raises(UnsupportedError, match=says) if is_refused else nullcontext():
        epochs._check_window()


class Wrapper(torch.optim.Optimizer):
    """As public code wraps an optimizer to average weights: all but its ``state_dict`` is that of the other one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.averages = optimizer, [Tensor([0.0])]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> Any:
        self.averages = [self.averages[0] + 1]
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict(), "averages": self.averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])
        self.averages = list(state_dict["averages"])


def wrapped() -> tuple[Wrapper, Replica]:
    weight = Parameter(torch.ones(3))
    optimizer = Wrapper(torch.optim.SGD([weight], lr=1.0, momentum=0.9))
    return optimizer, Replica([weight], optimizer)


def test_what_an_optimizer_that_wraps_another_has_learnt_is_kept_in_the_form_of_its_own_state_dict() -> None:
    optimizer, replica = wrapped()
    replica.ordered[0].grad = torch.ones(3)
    optimizer.step()
    again, resumed = wrapped()
    load_optimizer_state(again, replica.state()["optimizer"])
    assert again.averages == optimizer.averages == [Tensor([1.0])]
    assert torch.equal(again.state[resumed.ordered[0]]["momentum_buffer"], torch.ones(3))


@pytest.mark.parametrize(
    ("begun", "now", "is_several", "is_refused"),
    [(8, 8, True, False), (8, 12, True, True), (-1, 4, True, True), (8, 12, False, False), (None, 12, True, False)],
)
def test_max_steps_that_change_inside_a_fit_of_several_groups_are_refused(
    begun: int | None, now: int, is_several: bool, is_refused: bool
) -> None:
    run = EpochDriver("dynamic", print, print).run
    run._begun_with, run.is_counted_together, run.step_limit = begun, is_several, 3
    says = rf"^max_steps has changed from {begun} to {now} inside a fit.*should_stop = True.*groups=1$"
    with pytest.raises(UnsupportedError, match=says) if is_refused else nullcontext():
        assert run.limit_for(now) == 3
