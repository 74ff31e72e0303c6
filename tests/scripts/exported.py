"""Goes on from a checkpoint that was made of a server's state: plain Lightning, or a run of several groups."""

from __future__ import annotations

from typing import Any

import torch
from common import OPTIONS, digest, loaders, omni, pl, report, trainer
from joining import Member, Record


class Begins(pl.Callback):
    """Notes how the fit stands before its first batch, and which batches it trains."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.seen: list[tuple[int, int, list[int]]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.said:
            (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
            state = getattr(optimizer, "optimizer", optimizer).state
            self.said = {
                "weights": digest(pl_module),
                "epoch": trainer.current_epoch,
                "step": trainer.global_step,
                "batch": batch_idx,
                "rate": optimizer.param_groups[0]["lr"],
                "count": config.scheduler.last_epoch,
                "momentum": sum(float(each["momentum_buffer"].abs().sum()) for each in state.values()),
                "callback": next(each.epochs for each in trainer.callbacks if isinstance(each, Record)),
            }

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.current_epoch, batch_idx, batch[2].tolist()))


def main() -> None:
    pl.seed_everything(1, verbose=False)
    begins, net = Begins(), Member()
    groups = OPTIONS.get("groups", 0)
    strategy = omni.OmniStrategy(groups=groups, timeout=None) if groups else OPTIONS.get("strategy", "auto")
    fit = trainer(strategy, max(1, groups), max_epochs=OPTIONS["epochs"], callbacks=[Record(), begins])
    fit.fit(net, *loaders(OPTIONS["samples"]), ckpt_path=OPTIONS["path"])
    finite = all(bool(torch.isfinite(each).all()) for each in net.state_dict().values())
    end = {"step": fit.global_step, "finite": finite, "rate": fit.optimizers[0].param_groups[0]["lr"]}
    report(fit.global_rank, {**begins.said, "seen": begins.seen, "end": end})


if __name__ == "__main__":
    main()
