"""`OmniTuner` of one rank in this process: what Lightning asks of a callback beside the loop of one fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy.pytorch_lightning import OmniStrategy
from lightning_omni.tuner.pytorch_lightning import OmniTuner

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


class OfLargeBatches(Line):
    """Whose losses scatter little, so that no probe is taken for one that diverges."""

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=64)


def trainer_of(*callbacks: Any, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    common = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "max_epochs": 2}
    options = {"strategy": OmniStrategy(), **options}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **common, **options})


def tuner_of(**options: Any) -> OmniTuner:
    return OmniTuner(**{"search": "random", "budget": 0.5, "retune_every": None, **options})


def run_of(tuner: OmniTuner) -> Any:
    assert tuner._fit is not None
    return tuner._fit.run


def test_a_fit_after_one_that_failed_in_a_hook_is_tuned_like_any_other() -> None:
    class Fails(Line):
        fails = True

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.fails:
                raise RuntimeError("an error of the user's")

    module, tuner = Fails(), tuner_of()
    with pytest.raises(RuntimeError, match="an error of the user's"):
        trainer_of(tuner).fit(module)
    module.fails = False
    again = trainer_of(tuner)
    again.fit(module)
    assert len(tuner.searches) == 1
    assert tuner.choice is not None
    assert again.global_step == 64


def test_how_gradients_are_averaged_is_not_searched_where_a_hook_of_the_users_says_it() -> None:
    tuner = OmniTuner(space={"all_reduce": ["fp32", "bf16"]})
    strategy = OmniStrategy(ddp_comm_hook=allreduce_hook)
    with pytest.raises(ConfigurationError, match="ddp_comm_hook"):
        trainer_of(tuner, strategy=strategy).fit(Line())


class Growing(OfLargeBatches):
    """Its second layer is trained from the second epoch on, as by a finetuning callback."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]) + self.more(batch[0]), batch[1])

    def on_train_epoch_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.current_epoch and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": self.more.parameters(), "lr": 0.01})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_parameters_that_are_added_later_have_the_momentum_that_was_chosen(tmp_path: Path, is_resumed: bool) -> None:
    searched = {"budget": 0.9, "space": {"momentum": [0.3, 0.5]}}
    trainer = trainer_of(tuner_of(**searched), max_epochs=1 if is_resumed else 2)
    trainer.fit(Growing())
    if is_resumed:
        trainer.save_checkpoint(tmp_path / "tuned.ckpt")
        trainer = trainer_of(tuner_of(**searched))
        trainer.fit(Growing(), ckpt_path=tmp_path / "tuned.ckpt")
    chosen, added = (group["momentum"] for group in trainer.optimizers[0].param_groups)
    assert added == chosen <= 0.5


@pytest.mark.parametrize("search", ["forecast", "random"])
def test_a_fit_without_an_optimizer_is_not_tuned_and_says_why(search: str) -> None:
    class Untrained(Line):
        def configure_optimizers(self) -> None:
            return None

    tuner = tuner_of(search=search)
    trainer = trainer_of(tuner)
    trainer.fit(Untrained())
    assert tuner.problem == "configure_optimizers returns no optimizer, so that nothing is trained"
    assert not tuner.searches
    assert trainer.current_epoch == 2


def test_a_target_is_not_out_of_reach_because_an_epoch_was_not_validated() -> None:
    tuner = tuner_of(target=-1.0)
    trainer_of(tuner, max_epochs=5, check_val_every_n_epoch=2).fit(Line())
    run, retuning = run_of(tuner), tuner._fit.retuning  # type: ignore[union-attr]
    ends = run.state.at_epochs
    assert [value == value for value in ends] == [False, True, False, True, False]
    assert ends[1] > ends[3] > -1
    for values, epochs_left, stalls in (
        ([3.0, 1.0], 1, False),  # it falls by 2 in an epoch, and 2 are left to fall
        ([3.0, 1.0, float("nan")], 1, False),  # nothing is new
        ([3.0, float("nan"), 1.0], 1, True),  # it falls by 1 in an epoch
        ([3.0, float("nan"), 1.0], 2, False),
        ([3.0, float("nan"), 3.0], 2, True),
        ([float("nan"), 3.0], 2, False),
    ):
        run.state.at_epochs = values
        assert retuning._has_stalled(5 - epochs_left) == stalls


def test_what_a_test_loads_leaves_the_searches_of_the_last_fit(tmp_path: Path) -> None:
    one, other = tuner_of(), tuner_of()
    first = trainer_of(one)
    first.fit(Line())
    first.save_checkpoint(tmp_path / "one.ckpt")
    assert len(one.searches) == 1
    second = trainer_of(other)
    second.fit(Line(0.02))
    found = other.searches
    second.test(Line(), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert other.searches == found
    assert found[0].spec.start.lr == 0.02


def test_a_run_that_is_saved_while_it_is_timed_again_is_timed_again_when_it_goes_on(tmp_path: Path) -> None:
    class TimesAgain(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                run_of(first).problem = ""  # as if there were several ranks
                timed = first._fit.by_first_batches  # type: ignore[union-attr]
                timed.begin(run_of(first).hyperparameters())
                timed.begin_again("it is slower")
                trainer.save_checkpoint(tmp_path / "timed.ckpt")

    first, later = tuner_of(search="forecast"), tuner_of(search="forecast")
    trainer_of(first, TimesAgain(), max_epochs=4).fit(Line())
    assert len(first.searches) == 1
    trainer_of(later, max_epochs=4).fit(Line(), ckpt_path=tmp_path / "timed.ckpt")
    assert [len(search.observations) for search in later.searches] == [1]
    assert later.choice is not None
    for tuner in (first, later):
        assert not run_of(tuner).state.unfinished


def test_a_learning_rate_finder_between_epochs_adds_no_time_to_training() -> None:
    seconds: list[float] = []

    class Finder(LearningRateFinder):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """Not yet."""

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                run_of(tuner)._began -= 1000.0  # as if the first epoch had taken so long
                seconds.append(run_of(tuner).seconds)
                self.lr_find(trainer, pl_module)
                seconds.append(run_of(tuner).seconds)

    tuner = tuner_of()
    trainer_of(Finder(num_training_steps=4), tuner).fit(Line())
    before, after = seconds
    assert 1000 < before <= after < 2000


def test_what_was_chosen_is_known_after_a_resume_before_the_next_search(tmp_path: Path) -> None:
    first, later = tuner_of(), tuner_of()
    trainer = trainer_of(first)
    trainer.fit(Line())
    trainer.save_checkpoint(tmp_path / "chosen.ckpt")
    trainer_of(later, max_epochs=3).fit(Line(), ckpt_path=tmp_path / "chosen.ckpt")
    assert len(later.searches) == 1, "it has not searched again"
    assert later.choice == first.choice is not None


def test_a_search_that_was_interrupted_has_not_chosen() -> None:
    class Stops(Line):
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("in the first probe")
            return super().training_step(batch, batch_idx)

    first = tuner_of()
    with pytest.raises(RuntimeError, match="in the first probe"):
        trainer_of(first).fit(Stops())
    run = run_of(first)
    assert run.state.unfinished
    run.load_state_dict(run.state_dict())
    assert first.choice is None


def test_a_probe_skips_the_batches_that_a_training_step_skips() -> None:
    class Skips(Line):
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.steps += 1
            return super().training_step(batch, batch_idx) if self.steps % 3 else None

    tuner = tuner_of()
    trainer = trainer_of(tuner, accumulate_grad_batches=2)
    trainer.fit(Skips())
    tried = [each.tried for search in tuner.searches for each in search.observations]
    assert tried
    assert not any(each.has_failed for each in tried)
    assert tuner.choice is not None
    assert trainer.current_epoch == 2


def test_batches_that_are_all_skipped_tell_nothing_of_a_loss() -> None:
    class SkipsEveryOther(Line):
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.steps += 1
            return super().training_step(batch, batch_idx) if self.steps % 2 else None

    tuner = tuner_of()
    trainer_of(tuner).fit(SkipsEveryOther())
    search = tuner.searches[0]
    assert search.profile is not None
    for probe, each in zip(search.probes, search.tried, strict=True):
        assert 2 * len(each.losses) == pytest.approx(probe.samples // 8, abs=1)


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


def test_a_run_that_may_not_stop_yet_is_searched() -> None:
    class Stops(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    tuner = tuner_of()
    trainer = trainer_of(tuner, Stops(), min_epochs=1)
    trainer.fit(Line())
    assert trainer.global_step == 32
    assert len(tuner.searches) == 1


def test_a_run_without_limits_is_checked_at_each_end_of_an_epoch_however_long_it_takes() -> None:
    asked: list[int] = []

    def reason(epoch: int) -> str:
        asked.append(epoch)
        return ""

    class Notes(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            tuner._fit.retuning.reason = reason  # type: ignore[union-attr]

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 12

    tuner = tuner_of(retune_every=1)
    trainer_of(Notes(), tuner, max_epochs=-1).fit(Line())
    assert asked == list(range(1, 13))


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_run_that_diverges_is_rolled_back_whether_it_was_resumed_or_not(tmp_path: Path, is_resumed: bool) -> None:
    class Diverges(OfLargeBatches):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return mse_loss(self.net(batch[0]), batch[1]) * (1e6 if self.current_epoch == 3 else 1.0)

    tuner = tuner_of(budget=0.9, space={"lr": [0.01, 0.02]})
    trainer = trainer_of(tuner, max_epochs=2 if is_resumed else 5)
    trainer.fit(Diverges(lr=0.001))
    if is_resumed:
        trainer.save_checkpoint(tmp_path / "watched.ckpt")
        tuner = tuner_of(budget=0.9, space={"lr": [0.01, 0.02]})
        trainer_of(tuner, max_epochs=5).fit(Diverges(lr=0.001), ckpt_path=tmp_path / "watched.ckpt")
    assert len(tuner.searches) == 1
    assert run_of(tuner).state.is_final


def test_a_run_that_goes_on_at_the_end_of_an_epoch_has_not_diverged(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, filename="end", save_on_train_epoch_end=True)
    steps = {"max_epochs": -1, "enable_checkpointing": True}
    searched = {"budget": 0.9, "space": {"lr": [0.01, 0.02]}}
    trainer_of(tuner_of(**searched), saves, max_steps=64, **steps).fit(OfLargeBatches(lr=0.001))  # one epoch
    tuner = tuner_of(**searched)
    trainer_of(tuner, max_steps=128, **steps).fit(OfLargeBatches(lr=0.001), ckpt_path=tmp_path / "end.ckpt")
    assert math.isfinite(run_of(tuner).state.divergence_threshold)
    assert not run_of(tuner).state.is_final


def test_momenta_that_differ_between_parameter_groups_stay_as_they_are() -> None:
    class Differ(OfLargeBatches):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.net.weight], "momentum": 0.9}, {"params": [self.net.bias], "momentum": 0.5}]
            return torch.optim.SGD(groups, lr=self.lr)

    tuner = tuner_of(budget=0.9)
    trainer = trainer_of(tuner)
    trainer.fit(Differ())
    assert tuner.searches[0].spec.space.momentum == (0.9, 0.9)
    assert [group["momentum"] for group in trainer.optimizers[0].param_groups] == [0.9, 0.5]


def test_a_run_of_which_nothing_is_tuned_keeps_no_losses() -> None:
    tuner = tuner_of(search="forecast")
    trainer_of(tuner).fit(Line())
    assert tuner.problem == "one rank is one group"
    assert not tuner._fit.plateau._noted  # type: ignore[union-attr]


def test_where_max_time_alone_ends_a_run_the_budget_is_a_part_of_it() -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

    tuner = tuner_of(budget=0.5)
    trainer_of(tuner, Stops(), max_epochs=-1, max_time={"minutes": 1}).fit(Line())
    assert 10 < tuner.searches[0].budget <= 0.4 * 0.5 * 60


def test_where_epochs_end_a_run_before_max_time_the_budget_is_a_part_of_these() -> None:
    tuner = tuner_of(budget=0.5)
    trainer_of(tuner, max_time={"hours": 1}).fit(Line())
    assert tuner.searches[0].budget < 60


def test_a_training_step_without_a_loss_is_told_what_to_return() -> None:
    class Returns(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"output": self.net(batch[0])}

    with pytest.raises(ConfigurationError, match='dictionary with it as "loss"'):
        trainer_of(tuner_of()).fit(Returns())
