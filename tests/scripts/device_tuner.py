"""Several ranks with a DeviceTuner: what each decided, what it trained with, and what it ended with."""

from __future__ import annotations

import os
from typing import Any

import torch
from common import OPTIONS, InTime, omni, pl, report, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_omni.tuning.device import DeviceSetting, trial

trial.BLOCK_SECONDS = 0.01  # the test does not depend on which way is the faster one
RANK = int(os.environ.get("LOCAL_RANK", 0))


class ConvNet(pl.LightningModule):
    """Notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        self.seen: list[tuple[int, bool, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.net[0].weight
        last = bool(weight.is_contiguous(memory_format=torch.channels_last))
        self.seen.append((torch.get_num_threads(), last, torch.is_autocast_enabled("cpu")))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 6, 6, generator=generator)
    return DataLoader(TensorDataset(images, images.mean((2, 3)).argmax(1)), batch_size=4, shuffle=True)


def main() -> None:
    results = []
    for fit in OPTIONS["fits"]:
        pl.seed_everything(1)
        groups = fit.get("groups")
        options = {"method": fit["method"]} if "method" in fit else {}
        strategy = omni.OmniStrategy(groups=groups, **options) if groups else pl.strategies.DDPStrategy()
        tuner = None
        if fit.get("setting") is not None:
            tuner = omni.DeviceTuner(setting=DeviceSetting.from_dict(fit["setting"]))
        elif "budget" in fit:
            tuner = omni.DeviceTuner(budget=fit["budget"], bf16="apply")
        module = ConvNet()
        before = torch.get_num_threads()
        run = trainer(
            strategy, fit.get("devices", 2), callbacks=[tuner, InTime()] if tuner else [InTime()], max_epochs=1
        )
        run.fit(module, data())
        results.append(
            {
                "seen": sorted(set(module.seen)),
                "steps": len(module.seen),
                "setting": tuner.state_dict()["setting"] if tuner else None,
                "findings": [[each.step, each.verdict, each.reason] for each in tuner.report.findings]
                if tuner and tuner.report
                else [],
                "problem": tuner.problem if tuner else None,
                "weights": [parameter.flatten().tolist() for parameter in module.parameters()],
                "plain": [parameter.is_contiguous() for parameter in module.parameters()],
                "threads": [before, torch.get_num_threads()],
            }
        )
    report(RANK, results)


if __name__ == "__main__":
    main()
