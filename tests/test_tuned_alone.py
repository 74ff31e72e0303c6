"""`OmniTuner` of one rank in this process: what Lightning asks of a callback beside the loop of one fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
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
    return pl.Trainer(strategy=OmniStrategy(), callbacks=list(callbacks), **{**quiet, **common, **options})


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
                first._fit._tuning.begin_again("it is slower")  # type: ignore[union-attr]
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
