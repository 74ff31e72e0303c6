"""Ranks of one group that average gradients in fewer bytes, beside what the same arithmetic gives in one process."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from common import Net, digest, loaders, omni, pl, report, trainer
from torch import Tensor

from lightning_omni import Compression
from lightning_omni.wire.all_reduce import Memory, all_reduce_of, resumed

RANK = int(os.environ.get("LOCAL_RANK", 0))


class Compared(Net):
    """Computes each gradient a second time, and what its group would make of it."""

    def __init__(self, format_: str) -> None:
        super().__init__(norm=False)
        self.format = all_reduce_of(format_)
        self.memories: list[Memory] = [{}, {}]
        self.off: list[float] = []
        self.owed: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        trained = [each for each in self.parameters() if each.requires_grad]
        own = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        known = [
            torch.zeros_like(each) if each_own is None else each_own
            for each, each_own in zip(trained, own, strict=True)
        ]
        self.owed = [each + owed for each, owed in zip(known, self.owed, strict=True)] if self.owed else known
        return loss

    def on_after_backward(self) -> None:
        if (self.trainer.fit_loop.batch_idx + 1) % self.trainer.accumulate_grad_batches:
            return
        window = self.trainer.accumulate_grad_batches
        members: list[Any] = [None, None]
        dist.all_gather_object(members, [each.cpu() / window for each in self.owed])
        self.owed = []
        keys = range(len(members[0]))
        steps = [self.format.average(mine, keys, memory) for mine, memory in zip(members, self.memories, strict=True)]
        messages = [next(each) for each in steps]
        while messages:
            mean = torch.stack(messages).mean(0)
            after = [resumed(each, mean.clone()) for each in steps]
            messages = [each for each in after if each is not None]
        trained = [each for each in self.parameters() if each.requires_grad]
        found = [None if each.grad is None else each.grad.cpu() for each in trained]
        self.off.append(
            max(
                float((one - other).abs().max())
                for one, other in zip(found, members[RANK], strict=True)
                if one is not None
            )
        )


class Switched(pl.Callback):
    """In mid-epoch gradients are averaged another way, as a tuner has it."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            world = trainer.strategy.world
            pl_module.format = all_reduce_of("powersgd:2")
            world.communication = world.communication._replace(all_reduce=pl_module.format)
            trainer.strategy.parts.grouping.wrap()


class Table(pl.LightningModule):
    """Trains an embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 3, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self.table(batch[2]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit_table(format_: str) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    module = Table()
    trainer(omni.OmniStrategy(groups=1, compression=Compression(all_reduce=format_)), 2, max_epochs=1).fit(
        module, loaders()[0]
    )
    return {"weights": digest(module), "is_sparse": module.table.weight.grad.is_sparse}


def fit(format_: str, switched: bool = False, **options: Any) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    module = Compared(format_)
    strategy = omni.OmniStrategy(
        groups=1,
        compression=Compression(all_reduce=format_),
        find_unused_parameters=True,
        bucket_cap_mb=0.001,
        rebalance="off",
    )
    callbacks = [Switched()] if switched else []
    trainer(strategy, 2, max_epochs=1, callbacks=callbacks, **options).fit(module, loaders()[0])
    return {"off": max(module.off), "steps": len(module.off), "weights": digest(module)}


def main() -> None:
    report(
        RANK,
        {
            "powersgd": fit("powersgd:2"),
            "bf16": fit("bf16"),
            "accumulated": fit("powersgd:2", accumulate_grad_batches=2),
            "switched": fit("fp32", switched=True),
            "sparse": {format_: fit_table(format_) for format_ in ("fp32", "bf16", "powersgd:2")},
        },
    )


if __name__ == "__main__":
    main()
