"""`OmniTuner` of one rank in this process: what Lightning asks of a callback beside the loop of one fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from core import Command, EpochDriver, FirstBatches, Setting, search
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_omni import Compression
from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.strategy.pytorch_lightning import OmniStrategy
from lightning_omni.topology import Topology
from lightning_omni.tuning.callback.pytorch_lightning import OmniTuner

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning, about loaders and checkpoints


@pytest.fixture(autouse=True)
def leaves_no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Line(pl.LightningModule):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def loader(self) -> DataLoader[Any]:
        inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)

    train_dataloader = val_dataloader = test_dataloader = loader


def trainer_of(*callbacks: Any, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    common = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "max_epochs": 2}
    options = {"strategy": OmniStrategy(), **options}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **common, **options})


def tuner_of(**options: Any) -> OmniTuner:
    return OmniTuner(**{"budget": 0.5, "retune_every": None, **options})


def run_of(tuner: OmniTuner) -> Any:
    assert tuner._fit is not None
    return tuner._fit.run


class Rounded(search.Dimension):
    """Which format DistributedDataParallel averages in; a dimension of the user's own."""

    name = "rounded"
    needs_regroup = True

    def axis(self, known: Any) -> list[str]:
        return ["fp32", "bf16"]

    def current(self, world: Any) -> str:
        return str(world.reduction.format.__struct_config__.tag)

    def apply(self, world: Any, value: str) -> None:
        world.reduction.format = Compression(all_reduce=value).all_reduce_format


def test_a_dimension_of_the_users_own_is_applied_in_one_group_too() -> None:
    """The group is formed again for it, in mid-epoch, and every sample is trained once."""
    tuner, exact, trained = tuner_of(budget=0.0, space={"rounded": Rounded()}), [], []

    class Applies(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trained.extend(batch[0][:, 0].tolist())
            if len(trained) == 64:
                fit: Any = tuner._fit
                fit.applied.form(Setting(1, 0.9, 0.01, further=(("rounded", "bf16"),)))

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradient = module.net.weight.grad
            exact.append(not torch.equal(gradient, gradient.bfloat16().float()))

    line = Line()
    trainer_of(tuner, Applies(), strategy=OmniStrategy(groups=1), max_epochs=1).fit(line)
    assert exact == [True] * 8 + [False] * 24
    assert sorted(trained) == sorted(line.loader().dataset.tensors[0][:, 0].tolist())  # type: ignore[attr-defined]


def test_how_gradients_are_averaged_is_not_searched_where_a_hook_of_the_users_says_it() -> None:
    tuner = OmniTuner(space={"all_reduce": ["fp32", "bf16"]})
    strategy = OmniStrategy(ddp_comm_hook=allreduce_hook)
    with pytest.raises(ConfigurationError, match="ddp_comm_hook"):
        trainer_of(tuner, strategy=strategy).fit(Line())


def test_a_fit_without_an_optimizer_is_not_tuned_and_says_why() -> None:
    class BufferSync(Line):
        def configure_optimizers(self) -> None:
            return None

    tuner = tuner_of()
    trainer = trainer_of(tuner)
    trainer.fit(BufferSync())
    assert tuner.problem == "configure_optimizers returns no optimizer, so that nothing is trained"


def test_a_run_that_is_saved_while_it_is_timed_again_is_timed_again_when_it_goes_on(tmp_path: Path) -> None:
    class TimesAgain(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                run_of(first).problem = ""  # as if there were several ranks
                timed = first._fit.online  # type: ignore[union-attr]
                timed.begin(run_of(first).hyperparameters())
                timed.begin_again("it is slower")
                trainer.save_checkpoint(tmp_path / "timed.ckpt")

    first, later = tuner_of(), tuner_of()
    trainer_of(first, TimesAgain(), max_epochs=4).fit(Line())
    assert len(first.searches) == 1
    trainer_of(later, max_epochs=4).fit(Line(), ckpt_path=tmp_path / "timed.ckpt")
    assert len(later.searches) == 1
    assert later.choice is not None
    for tuner in (first, later):
        assert not run_of(tuner).state.unfinished


def test_a_run_that_is_stopped_before_its_first_batch_is_not_searched() -> None:
    class Stops(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    tuner = tuner_of()
    trainer = trainer_of(tuner, Stops())
    trainer.fit(Line())
    assert trainer.global_step == 0
    assert not tuner.searches
    assert tuner.problem == "training was stopped before the first batch"


def test_a_run_of_which_nothing_is_tuned_keeps_no_losses() -> None:
    tuner = tuner_of()
    trainer_of(tuner).fit(Line())
    assert tuner.problem == "one rank is one group"
    assert not tuner._fit.plateau._noted  # type: ignore[union-attr]


def asked(tuner: OmniTuner, ask: Callable[[Any, Any], None], strategy: Any = None, **options: Any) -> Any:
    """The fit of a tuner that is asked once, after its third batch, as if it had several ranks and had chosen."""

    class Asks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            fit: Any = tuner._fit
            if batch_idx == 2:
                fit.run.problem = ""
                fit.run.state.own = fit.run.state.setting = Setting(1, 0.9, 0.01)
                ask(fit, trainer)
                fit.run.state.setting, fit.run.problem = None, "asked"

    strategy = strategy or OmniStrategy(groups=1)
    trainer_of(Asks(), tuner, strategy=strategy, max_epochs=1, **options).fit(Line())
    return tuner._fit


def test_a_run_that_is_timed_again_is_compared_with_the_users_own_setting() -> None:
    starts = []

    def ask(fit: Any, trainer: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.001  # as ReduceLROnPlateau leaves it
        starts.append(fit.space.specification(fit.run.hyperparameters(), 0.0).start)

    asked(tuner_of(), ask, strategy=OmniStrategy(groups=1, rebalance="auto"))
    assert starts == [Setting(1, 0.9, 0.01)], "by which rates are scaled, and with equal batches"


def test_periods_of_the_users_are_searched_also_where_the_strategys_method_has_none() -> None:
    spaces = []
    tuner = tuner_of(space={"period": [4, 8]})
    asked(tuner, lambda fit, trainer: spaces.append(fit.space.specification(fit.run.hyperparameters(), 0.0).space))
    assert spaces[0].period == (4, 8)


def test_what_is_left_of_a_run_is_told_without_the_open_epochs_samples_and_with_those_of_lost_ranks() -> None:
    left = []

    def ask(fit: Any, trainer: Any) -> None:
        leases = fit.run.strategy.parts.epochs.leases
        for leases.world_size in (1, 4):
            left.append(fit.run.horizon)

    asked(tuner_of(), ask)
    assert left == [256 - 24, 4 * 256 - 24]


def test_copies_of_all_weights_are_not_kept_for_the_users_own_setting_nor_after_the_fit() -> None:
    kept = []

    def ask(fit: Any, trainer: Any) -> None:
        for setting in (Setting(2, 0.9, 0.01), Setting(1, 0.9, 0.01), Setting(2, 0.9, 0.01)):
            fit.run.state.setting = setting
            fit.applied.capture()
            fit.applied.watch(1.0)
            kept.append(fit.applied.rollback_point is not None)

    fit = asked(tuner_of(), ask)
    assert kept == [True, False, True]
    assert fit.applied.rollback_point is None


def test_a_trial_that_is_better_keeps_no_copy_of_all_weights_and_is_the_latest_choice() -> None:
    kept: list[tuple[Any, ...]] = []

    def ask(fit: Any, trainer: Any) -> None:
        fit.applied.capture()
        fit.run.state.losses = replace(fit.run.state.losses, first=2.0, windows=[1.0, 0.82, 0.80])
        fit.run.rounds = [SimpleNamespace(search=SimpleNamespace(observation=observation, overhead=0.0))]
        fit.plateau._end(SimpleNamespace(length=1, taken=1, losses=[torch.tensor(0.7)] * 20))
        fit.run.rounds = []
        kept.append((fit.run.state.is_final, fit.applied.rollback_point, fit.run.choice.setting))

    observation = SimpleNamespace(noise_scale=None)
    asked(tuner_of(), ask)
    assert kept == [(True, None, Setting(1, 0.9, 0.01))]


def test_losses_with_the_users_own_setting_are_kept_only_while_another_is_looked_for() -> None:
    kept = []

    def ask(fit: Any, trainer: Any) -> None:
        for is_searching in (False, True):
            fit.run.state.unfinished = is_searching
            fit.plateau.batch_done(torch.tensor(1.0))
            kept.append(len(fit.plateau._noted))

    asked(tuner_of(), ask)
    assert kept == [0, 1]


def test_a_search_starts_without_a_format_of_averaging_if_the_users_was_there_when_it_measured() -> None:
    starts = []

    def ask(fit: Any, trainer: Any) -> None:
        fit.run.state.own = None
        starts.append(fit.space.specification(fit.run.hyperparameters(), 0.0).start.all_reduce)

    for all_reduce in ("fp32", "bf16"):
        asked(tuner_of(), ask, OmniStrategy(groups=1, compression=Compression(all_reduce=all_reduce)))
    assert starts == ["fp32", ""]


def test_one_group_is_timed_again_with_proportional_batches_only_if_nothing_else_changes() -> None:
    times_again = []

    def ask(fit: Any, trainer: Any) -> None:
        online, own = fit.online, fit.run.own
        for setting in (replace(own, rebalance=True), replace(own, rebalance=True, all_reduce="bf16")):
            spec = replace(fit.space.specification(fit.run.hyperparameters(), 0.0), start=own)
            online._batches, online._known = FirstBatches(fit.run.strategy, spec), []
            online._command = lambda *_, setting=setting: Command(setting)
            online._conclude(SimpleNamespace(observation=SimpleNamespace(measured=None)))
            times_again.append(online._batches is not None)
            online.close()

    asked(tuner_of(), ask)
    assert times_again == [True, False]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([math.nan, 0.5], "the best was 0.5"),
        ([math.nan, math.nan], "it was NaN in every validation"),
        ([], "it was never logged in a validation"),
    ],
)
def test_why_a_target_was_not_reached_tells_nan_from_another_value_and_from_none(values: list[float], why: str) -> None:
    said: list[str] = []

    def ask(fit: Any, trainer: Any) -> None:
        fit.run.info = said.append
        fit.run.state.reached = [(1.0, value) for value in values]
        fit.reports.ended()

    asked(tuner_of(target=0.1), ask)
    assert f"OmniTuner: val_loss has not reached 0.1: {why}" in said


def test_a_run_that_is_resumed_with_one_more_dimension_is_searched_again(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            first._fit.run.state.own = first._fit.run.state.setting = Setting(1, 0.9, 0.01)  # type: ignore[union-attr]
            trainer.save_checkpoint(tmp_path / "chosen.ckpt")

    first, later = tuner_of(), tuner_of(space={"rounded": Rounded()})
    trainer_of(first, Saves(), max_epochs=1).fit(Line())
    trainer_of(later).fit(Line(), ckpt_path=tmp_path / "chosen.ckpt")
    assert later.problem == "one rank is one group"


def test_a_run_that_is_resumed_without_a_budget_trains_as_the_user_said(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            state = first._fit.run.state  # type: ignore[union-attr]
            state.own, state.setting = Setting(1, 0.9, 0.01), Setting(1, 0.5, 0.02)
            state.ranks = 1
            trainer.optimizers[0].param_groups[0]["momentum"] = 0.5
            trainer.save_checkpoint(tmp_path / "chosen.ckpt")

    class Sees(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            momentum = trainer.optimizers[0].param_groups[0]["momentum"]
            seen.append((momentum, trainer.strategy.world.rate_factor, run_of(later).state.setting))

    seen: list[Any] = []
    first, later = tuner_of(), tuner_of(budget=0.0, retune_every=1)
    trainer_of(first, Saves(), max_epochs=1).fit(Line())
    trainer_of(later, Sees()).fit(Line(), ckpt_path=tmp_path / "chosen.ckpt")
    assert seen == [(0.9, 1.0, None)] * 32
    assert later.problem == "budget=0"


def test_a_run_of_groups_that_had_joined_is_searched_again_where_ranks_are_started_together(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            state = first._fit.run.state  # type: ignore[union-attr]
            state.own = state.setting = Setting(1, 0.9, 0.01)
            state.ranks = 0  # groups that join do not know how many there are
            trainer.save_checkpoint(tmp_path / "joined.ckpt")

    first, later = tuner_of(), tuner_of()
    trainer_of(first, Saves(), max_epochs=1).fit(Line())
    trainer_of(later).fit(Line(), ckpt_path=tmp_path / "joined.ckpt")
    assert later.problem == "one rank is one group"


def test_the_time_of_a_run_ends_with_it_and_what_was_final_for_other_ranks_does_not_stay() -> None:
    fit = asked(tuner_of(), lambda fit, trainer: setattr(fit.run.state, "is_final", True))
    before = fit.run.seconds
    assert fit.run.seconds == before > 0
    assert fit.run.state.is_final
    fit.run.forget()
    assert not fit.run.state.is_final


def test_a_loss_scale_that_has_fallen_to_0_leaves_what_powersgd_has_not_sent() -> None:
    kept = []

    def ask(fit: Any, trainer: Any) -> None:
        scaler, memory = torch.amp.GradScaler("cpu"), fit.run.world.reduction.memory
        scaler.load_state_dict({**scaler.state_dict(), "scale": 0.0})
        trainer.precision_plugin.scaler, memory["w"] = scaler, SimpleNamespace(error=torch.ones(1))
        fit.run.strategy.parts.grouping.share_loss_scale()
        kept.append(memory.pop("w").error.item())
        del trainer.precision_plugin.scaler

    asked(tuner_of(), ask)
    assert kept == [1.0]


def test_groups_of_the_users_are_not_formed_where_they_cannot_train() -> None:
    refused = []

    def ask(fit: Any, trainer: Any) -> None:
        stash = fit.run.strategy.parts.user_groups
        stash._users = Topology.even(2, 2), *stash._users[1:]
        with pytest.raises(UnsupportedError, match="min_steps") as found:
            stash.form()
        refused.append(found.value)
        stash._users = None

    asked(tuner_of(), ask, min_steps=1)
    assert len(refused) == 1


# --- What a fit leaves behind -----------------------------------------------------------------------------------------


def test_a_fit_without_a_tuner_trains_as_the_user_said_after_one_that_was_tuned() -> None:
    tuner, strategy, formats, finished = tuner_of(budget=0.0), OmniStrategy(groups=1), [], []

    class Applies(pl.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            finished.append(strategy.world.is_finished)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            formats.append(type(strategy.world.reduction.format).__name__)
            if tuner in trainer.callbacks:
                fit: Any = tuner._fit
                fit.applied.form(Setting(1, 0.9, 0.01, all_reduce="bf16"))

    trainer: Any = trainer_of(tuner, Applies(), strategy=strategy, max_epochs=1)
    trainer.fit(Line())
    assert strategy.world.is_finished
    trainer.callbacks.remove(tuner)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Line())
    assert formats == ["Exact", "Exact"]
    assert finished == [False, False], "a process that ends before the second fit begins has failed"


def test_a_schedule_on_a_validations_metric_is_stepped_alike_in_an_epoch_that_ends_with_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plateaus(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
            config = {"scheduler": scheduler, "interval": "step", "frequency": 8, "monitor": "val_loss"}
            return [optimizer], [config]

    rates = []
    for is_shrunk in (False, True):  # as where ranks were lost
        monkeypatch.setattr(EpochDriver, "_is_shrunk", is_shrunk)
        trainer = trainer_of(strategy=OmniStrategy(groups=1), max_epochs=1, val_check_interval=8)
        trainer.fit(Plateaus())
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates == [pytest.approx(0.001)] * 2


def test_limits_of_numpy_are_plain_numbers() -> None:
    strategy = OmniStrategy(groups=1)
    trainer_of(strategy=strategy, max_steps=np.int64(3)).fit(Line())
    assert type(strategy.parts.epochs.run.limits.max_steps) is int


def test_a_strategy_ends_its_fit_where_a_plugin_cannot_end() -> None:
    class Fails(TorchCheckpointIO):
        def teardown(self) -> None:
            raise OSError("no space is left")

    strategy = OmniStrategy(groups=1)
    with pytest.raises(OSError, match="no space"):
        trainer_of(strategy=strategy, plugins=[Fails()]).fit(Line())
    assert strategy.parts.listener is None
    assert not strategy.world.is_begun
