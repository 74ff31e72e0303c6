"""Every row of the promise "one group equals DDP bit for bit": both strategies, one after the other."""

from __future__ import annotations

import os
from typing import Any

import torch
from common import OPTIONS, Net, dataset, digest, loaders, omni, pl, report, trainer
from torch import Tensor
from torch.utils.data import DataLoader


class AdamW(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class OneCycle(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByEpoch(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Several(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        head, body = self.net[-1].parameters(), self.net[:-1].parameters()
        return torch.optim.SGD(head, lr=0.05, momentum=0.9), torch.optim.Adam(body, lr=1e-2)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


class Logging(Net):
    """Synchronises its training loss, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss


class Ignored(Net):
    """Has weights that each rank trains for itself, in another number on each."""

    def __init__(self) -> None:
        super().__init__()
        rank = int(os.environ.get("LOCAL_RANK", 0))
        self.own = torch.nn.Linear(2, 1 + rank)
        torch.nn.init.constant_(self.own.weight, rank)
        self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.own(batch[0][:, :2]).square().mean()


ROWS: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    "SGD": (Net, {}, {}),
    "AdamW": (AdamW, {}, {}),
    "clipping": (Net, {"gradient_clip_val": 0.3}, {}),
    "accumulation": (Net, {"accumulate_grad_batches": 3}, {}),
    "bf16": (Net, {"precision": "bf16-mixed"}, {}),
    "fp16": (Net, {"precision": "16-mixed", "gradient_clip_val": 0.3}, {}),
    "schedule by step": (OneCycle, {"max_epochs": 2}, {}),
    "schedule by epoch": (ByEpoch, {"max_epochs": 3}, {}),
    "schedule on plateau": (Plateau, {"max_epochs": 3}, {}),
    "manual": (Manual, {}, {}),
    "several optimizers": (Several, {}, {"find_unused_parameters": True}),
    "unused parameters": (Unused, {}, {"find_unused_parameters": True}),
    "left to each rank": (Ignored, {}, {}),
    "synchronised logging": (Logging, {"max_steps": 11, "max_epochs": 5}, {}),
    "validation in mid-epoch": (OneCycle, {"val_check_interval": 0.5, "limit_train_batches": 10}, {}),
    "workers": (Net, {"workers": 1, "max_epochs": 2}, {}),
    "drop last": (Net, {"batch_size": 7, "drop_last": True}, {}),
    "partial last batch": (Net, {"batch_size": 7}, {}),
}


def fit(kind: type[Net], options: dict[str, Any], strategy: Any) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    options = dict(options)
    data = {"num_workers": options.pop("workers", 0), "drop_last": options.pop("drop_last", False)}
    train = DataLoader(dataset(), batch_size=options.pop("batch_size", 8), shuffle=True, **data)
    module = kind()
    run = trainer(strategy, 2, **options)
    run.fit(module, train, loaders()[1])
    optimizers = module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    return {
        "weights": digest(module),
        "step": run.global_step,
        "lr": [group["lr"] for optimizer in optimizers for group in optimizer.param_groups],
        "val_loss": float(run.callback_metrics.get("val_loss", -1.0)),
    }


def main() -> None:
    wanted = OPTIONS.get("rows") or list(ROWS)
    results = {}
    for name in wanted:
        kind, options, ddp = ROWS[name]
        theirs = fit(kind, options, pl.strategies.DDPStrategy(**ddp))
        ours = fit(kind, options, omni.OmniStrategy(groups=1, **ddp))
        results[name] = {"ddp": theirs, "omni": ours}
    report(int(os.environ.get("LOCAL_RANK", 0)), results)


if __name__ == "__main__":
    main()
