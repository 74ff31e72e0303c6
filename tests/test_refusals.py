"""Bad input gives a clear error that names the argument and the remedy, and leaves nothing running."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import SLOWER
from pytorch_lightning import Trainer
from runs import Running, run
from torch.nn.parallel import DistributedDataParallel

import lightning_omni as omni
from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy.pytorch_lightning import OmniStrategy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 0}, ["groups=0", "groups=1"]),
        ({"groups": -2}, ["groups=-2"]),
        ({"groups": 1.5}, ["groups=1.5"]),
        ({"method": "magic"}, ["method='magic'", "'async_sgd'"]),
        ({"server": "localhost:80"}, ["server='localhost:80'", "tcp://host:port"]),
        ({"data": "some"}, ["data='some'", '"dynamic" or "static"']),
        ({"server": 3}, ["server=3", '"per-node"', "Server(...)"]),
        ({"compression": "int4"}, ["compression='int4'", "'int8'"]),
        ({"elastic": "yes"}, ["elastic='yes'", "Elastic(join=True"]),
        ({"model_parallel": "ddp"}, ["model_parallel='ddp'", '"fsdp"', "None"]),
    ],
)
def test_wrong_arguments_are_refused_at_construction(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OmniStrategy(**options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_with_other_arguments_are_refused_by_name_before_they_wait_for_each_other() -> None:
    """As on two nodes with different environment variables: one would train its share, and the other all samples."""
    finished = run("unlike.py", {"arguments": [{"data": "dynamic"}, {"data": "static"}], "servers": 0}, timeout=120)
    for rank in (0, 1):
        assert finished.results[rank].startswith("the setting data is 'static' on rank 1, and 'dynamic' on rank 0")


def test_more_groups_than_ranks_are_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"groups=3, but there are only 2 ranks.*groups<=2"):
        Trainer(accelerator="cpu", devices=2, strategy=OmniStrategy(groups=3), logger=False)


def test_where_others_start_ranks_than_lightning_and_too_few_the_error_says_who(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in an interactive shell of a SLURM job with a name of its own."""
    for name, value in {"NTASKS": "1", "JOB_NAME": "mine", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    says = r"groups=2 and devices=2, but only 1 rank of 2 came: SLURMEnvironment .* set SLURM_JOB_NAME=interactive"
    with pytest.raises(ConfigurationError, match=says):
        Trainer(accelerator="cpu", devices=2, strategy=OmniStrategy(groups=2), logger=False)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    Trainer(accelerator="cpu", devices=2, strategy=OmniStrategy(groups=2), logger=False)


def test_configuration_errors_are_value_errors_and_omni_errors() -> None:
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(ConfigurationError, omni.OmniError)


class HalfUsed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


def test_an_error_of_ddp_about_parameters_without_a_gradient_names_the_argument_of_this_strategy(
    tmp_path: Path,
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(HalfUsed())
        wrapped(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
            wrapped(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    OmniStrategy().on_exception(caught.value)
    said = str(caught.value)
    assert "OmniStrategy(find_unused_parameters=True)" in said
    assert "Parameter indices which did not receive grad for rank 0: 2 3" in said
    assert "DDPStrategy" not in said
    assert "strategy='ddp" not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"net": "lbfgs"}, ["LBFGS", "groups=1", "SGD or AdamW"]),
        ({"net": "raw"}, ["raw optimizer.step()", "self.optimizers()"]),
        (
            {"net": "nan", "strategy": {"groups": 2, "server": {"max_nonfinite_pushes": 4}}},
            ["NaN or infinite", "lower the learning rate", "Server(max_nonfinite_pushes=...)"],
        ),
        ({"trainer": {"val_check_interval": "00:00:01:00"}}, ["val_check_interval", "fraction of the epoch"]),
    ],
    ids=["LBFGS", "raw step", "always NaN", "validation by time"],
)
def test_what_cannot_be_served_is_refused_with_the_way_out(options: dict[str, Any], words: list[str]) -> None:
    fit = {"devices": 2, "data": {"samples": 256}, **options}
    with Running("groups.py", {"fits": [fit], "always_nan": options.get("net") == "nan"}) as running:
        finished = running.wait(180)
        deadline = time.monotonic() + SLOWER * 60
        while running.survivors:
            assert time.monotonic() < deadline, "processes are left behind"
            time.sleep(0.05)
    assert finished.code != 0
    for word in words:
        assert word in finished.output
