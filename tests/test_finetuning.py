"""Fits whose parameter groups change in the midst: BackboneFinetuning and the like, with real processes and sockets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from core import Event, read_record, replay
from runs import Running
from torch import Tensor, nn

from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator import trace_of

RANKS = range(4)
FITS = (
    *("ddp", "one", "tuned", "resumed", "ddp resumed", "thawed", "dropped", "late", "mean", "gossip", "outer"),
    *(
        "regrouped",
        "written",
        "head",
        "replaced",
        "users",
        "outer users",
        "rescheduled",
        "gap",
        "stopped",
        "by turns",
        "thawed inside",
        "odd",
        "averaged",
    ),
)
RECORDED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "tuned": partial(torch.optim.AdamW, lr=0.02),
    "late": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    "outer": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
}


@cache
def fits() -> dict[int, dict[str, Any]]:
    """Every rank's results of all fits in one launch, with the records that rank 0 left."""
    with Running("structure.py", {"devices": len(RANKS), "fits": FITS}) as running:
        finished = running.wait(400)
        assert finished.code == 0, finished.output[-6000:]
        for name in RECORDED:
            finished.results[0][name]["events"] = list(read_record(Path(running.folder) / name))
    return finished.results


def each(name: str, what: str) -> list[Any]:
    """One result of every rank."""
    return [fits()[rank][name][what] for rank in RANKS]


# --- It trains -------------------------------------------------------------------------------------------------------


def test_a_backbone_that_is_unfrozen_moves_and_all_ranks_have_the_same() -> None:
    assert len({tuple(digests) for digests in each("tuned", "digests")}) == 1
    assert each("tuned", "groups") == [[1, 2]] * 4
    (before, after), *_ = each("tuned", "moved")
    assert before == 0.0
    assert after > 0.05


def test_an_average_that_the_module_holds_becomes_the_mean_over_the_groups() -> None:
    owns, ends = zip(*each("averaged", "held"), strict=True)
    first, second = {tuple(own) for own in owns}
    assert all(end == pytest.approx([sum(pair) / 2 for pair in zip(first, second, strict=True)]) for end in ends)


def test_the_loss_falls_as_it_does_without_groups() -> None:
    ours, theirs = each("tuned", "val")[0], each("ddp", "val")[0]
    assert ours[-1] < ours[0]
    assert ours[-1] < theirs[-1] * 1.2  # twice as many updates, with half the batch
    assert len({tuple(losses) for losses in each("tuned", "val")}) == 1


@pytest.mark.parametrize("name", ["thawed", "by turns", "mean", "gossip", "outer", "regrouped", "written", "head"])
def test_however_it_is_unfrozen_it_moves_and_all_ranks_evaluate_the_same(name: str) -> None:
    assert each(name, "error") == [""] * 4
    assert len({tuple(digests) for digests in each(name, "digests")}) == 1
    assert len({tuple(losses) for losses in each(name, "val")}) == 1
    assert each(name, "moved")[0][-1] > 0.005


def test_groups_that_come_to_it_later_evaluate_what_the_others_train() -> None:
    assert each("late", "groups")[1] == [1, 2]  # rank 1 adds the backbone an epoch after rank 0
    assert each("late", "groups")[0] == [2, 2]
    assert len({tuple(digests) for digests in each("late", "digests")}) == 1
    assert each("late", "moved")[1][0] > 0.01


def test_what_is_taken_out_of_the_optimizer_stays_as_it_is() -> None:
    assert each("dropped", "error") == [""] * 4
    assert len({tuple(digests) for digests in each("dropped", "digests")}) == 1
    first, second = each("dropped", "moved")[0]
    assert first == second > 0.05
    losses = each("dropped", "val")[0]
    assert losses[-1] < losses[0]  # the head trains on


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def test_the_checkpoint_has_all_groups_and_their_state_and_a_run_goes_on_from_it() -> None:
    saved = fits()[0]["tuned"]
    assert saved["saved_groups"] == [4, 2]
    assert len(saved["saved_steps"]) == 6
    head, backbone = saved["saved_steps"][0], saved["saved_steps"][-1]
    assert 0 < backbone < head == saved["updates"]
    for name in ("resumed", "ddp resumed"):
        assert each(name, "groups") == [[2]] * 4
        assert each(name, "val")[0][-1] < each("tuned", "val")[0][-1]
        assert each(name, "moved")[0][0] != each("tuned", "moved")[0][-1]
    assert len({tuple(digests) for digests in each("resumed", "digests")}) == 1


# --- One group, which is DDP -----------------------------------------------------------------------------------------


def test_one_group_is_ddp_which_trains_a_version_for_each_rank_and_says_so_once() -> None:
    assert each("one", "digests") == each("ddp", "digests")
    assert len({digests[-1] for digests in each("ddp", "digests")}) == 4
    assert [len(said) for said in each("one", "warnings")] == [1, 0, 0, 0]
    warning = fits()[0]["one"]["warnings"][0]
    assert "backbone.0.weight" in warning
    assert "find_unused_parameters=True" in warning
    assert each("ddp", "warnings") == [[]] * 4


# --- What cannot be followed -----------------------------------------------------------------------------------------


def test_a_layer_that_replaces_another_in_the_optimizer_is_trained_by_all() -> None:
    assert each("replaced", "error") == [""] * 4
    assert len({tuple(digests) for digests in each("replaced", "digests")}) == 1


def test_what_is_unfrozen_inside_a_training_step_is_refused_before_that_step() -> None:
    assert max(each("thawed inside", "step")) == 3
    assert sum("backbone.0.weight was unfrozen inside a training step" in e for e in each("thawed inside", "error")) > 1


def test_a_resumed_run_whose_groups_a_tuner_forms_has_the_states_of_server_and_groups() -> None:
    assert each("outer users", "error") == [""] * 4
    saved, resumed = each("outer", "held"), each("outer users", "held")
    assert each("outer", "saved_server")[0] > 0
    assert resumed[0][0][0] == pytest.approx(each("outer", "saved_server")[0])
    assert [begin[1] for begin, _ in resumed] == [end[1] for *_, end in saved]
    assert saved[0][-1][1] != saved[2][-1][1]


def test_a_scheduler_that_replaces_another_where_an_epoch_begins_counts_the_steps_of_this_epoch() -> None:
    assert each("rescheduled", "error") == [""] * 4
    assert each("rescheduled", "rate") == pytest.approx([0.1 / (1 + 8)] * 4)


def test_a_batch_that_is_none_is_left_out_and_the_epoch_goes_on() -> None:
    assert each("gap", "error") == [""] * 4
    assert sum(each("gap", "trained")) == 32 - 1
    assert [len(val) for val in each("gap", "val")] == [1] * 4


def test_a_stop_in_a_groups_last_batch_ends_the_run_without_a_validation_that_is_not_due() -> None:
    assert each("stopped", "error") == [""] * 4
    assert [len(val) for val in each("stopped", "val")] == [2] * 4
    assert [len(digests) for digests in each("stopped", "digests")] == [1] * 4


def test_hooks_of_the_first_epochs_start_are_for_all_ranks_where_a_tuner_forms_the_users_groups() -> None:
    assert each("users", "error") == [""] * 4
    assert len({tuple(digests) for digests in each("users", "digests")}) == 1


def test_what_cannot_be_exchanged_is_refused_in_that_very_step() -> None:
    steps = each("odd", "step")
    assert max(steps) == 2  # a group that was slower may have heard of it before it came there
    assert steps.count(2) >= 2
    for error in each("odd", "error"):
        assert "odd has dtype torch.float8_e4m3fn" in error.replace("'", "")
        assert "groups=1" in error


# --- Records ---------------------------------------------------------------------------------------------------------


class Tuned(nn.Module):
    """The module of the script, without Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16), nn.Tanh()).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


def batch_of(epoch: int, where: range) -> tuple[Tensor, Tensor]:
    """The script's samples at these positions of an epoch, in the order that Lightning's sampler has."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3 + epoch))
    x = torch.randn(256, 12, generator=torch.Generator().manual_seed(0))[order[list(where)]]
    return x, x[:, :3].argmax(1)


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in state.items()}


@pytest.mark.parametrize("name", RECORDED)
def test_the_record_of_a_run_whose_parameters_grew_has_its_updates_and_is_not_replayed(name: str) -> None:
    real, model = fits()[0][name], Tuned()
    model.load_state_dict(tensors(real["initial"]))
    events: list[Event] = real["events"]
    grown = [event for event in events if event.kind == "restructure"]
    assert [event.parameters for event in grown] == [("backbone.0.weight", "backbone.0.bias")] * len(grown)
    assert {event.group for event in grown} == {event.group for event in events if event.kind == "push"}
    assert trace_of(events).updates > 0

    def make(parameters: Any) -> torch.optim.Optimizer:
        return RECORDED[name]([parameter for parameter in parameters if parameter.requires_grad])

    with pytest.raises(ConfigurationError, match="parameter groups were changed in mid-run, and only runs that keep"):
        replay(events, model, loss_of, batch_of, make)
