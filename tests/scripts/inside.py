"""Groups whose members hold the model together: against ModelParallelStrategy, and against those of DDP."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from common import FOLDER, OPTIONS, dataset, omni, pl, report, trainer
from devices import own_device
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_omni.errors import RankLost
from lightning_omni.runtime import parallel_state
from lightning_omni.runtime.model import sharded
from lightning_omni.topology import Topology


class Blocks(pl.LightningModule):
    """A few layers, of sizes that two members cannot halve."""

    hidden = 31

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        self.net = nn.Sequential(*self.layers(self.hidden))
        self.register_buffer("seen", torch.zeros(()))
        self.optimizer = optimizer

    @staticmethod
    def layers(hidden: int) -> list[nn.Module]:
        return [nn.Linear(12, hidden), nn.Tanh(), nn.Linear(hidden, 5), nn.Tanh(), nn.Linear(5, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net[0].weight.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        self.seen += 1
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


class Counted(nn.Tanh):
    """Counts how often it is computed."""

    computed = 0

    def forward(self, x: Tensor) -> Tensor:
        self.computed += 1
        return super().forward(x)


class Recomputed(Blocks):
    """Activation checkpointing: what is between two layers is not kept, but computed again."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__(optimizer)
        pairs = [nn.Sequential(nn.Linear(12, 31), Counted()), nn.Sequential(nn.Linear(31, 5), Counted())]
        self.net = nn.Sequential(*(checkpoint_wrapper(pair) for pair in pairs), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net[2].weight.dtype))

    @property
    def computed(self) -> int:
        return sum(module.computed for module in self.modules() if isinstance(module, Counted))


class RecomputedWrapped(Recomputed):
    """As the user of ModelParallelStrategy writes it."""

    def configure_model(self) -> None:
        if isinstance(self.net[2].weight, DTensor):
            return
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Wrapped(Blocks):
    """As the user of ModelParallelStrategy writes it."""

    def configure_model(self) -> None:
        if isinstance(self.net[0].weight, DTensor):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Even(Blocks):
    """What is between two layers that are tensor-parallel is halved."""

    hidden = 32


class Parallel(Even):
    """As the user of ModelParallelStrategy writes it: of one bias, tensor-parallel ranks have a copy each."""

    def configure_model(self) -> None:
        if isinstance(self.net[0].weight, DTensor):
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(self.net, tensor, plan)
        for place in (0, 2, 4):
            fully_shard(self.net[place], mesh=data)
        fully_shard(self.net, mesh=data)


class Mixed(Even):
    """Likewise, with a last layer that is not tensor-parallel."""

    def configure_model(self) -> None:
        if isinstance(self.net[0].weight, DTensor):
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        parallelize_module(self.net, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for place in (0, 2, 4):
            fully_shard(self.net[place], mesh=data)
        fully_shard(self.net, mesh=data)


class Layers(Even):
    """More layers, one of them a norm."""

    @staticmethod
    def layers(hidden: int) -> list[nn.Module]:
        first, last = [nn.Linear(12, 12), nn.Tanh()], [nn.LayerNorm(5), nn.Linear(5, 3)]
        return [*first, nn.Linear(12, hidden), nn.Tanh(), nn.Linear(hidden, 5), *last]


class Ways(Layers):
    """One layer is divided by FSDP2 alone, the others by tensor parallelism; of the norm, ranks compute summands."""

    def configure_model(self) -> None:
        if isinstance(self.net[0].weight, DTensor):
            return
        plan = {
            "2": ColwiseParallel(),
            "4": RowwiseParallel(output_layouts=Shard(0)),
            "5": SequenceParallel(sequence_dim=0),
            "6": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])


class InTurn:
    """Mixed into a module: groups step one after the other, so that the order of pushes is always the same."""

    def setup(self, stage: str) -> None:
        self.__dict__["store"] = _get_default_store()  # of all ranks

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        world = self.trainer.strategy.world  # type: ignore[attr-defined]
        store, steps = self.__dict__["store"], self.__dict__.setdefault("taken", 0)
        turn = steps * len(world.topology.groups) + world.group
        if turn:
            store.wait([f"{self.run}-{turn}"])  # type: ignore[attr-defined]
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        self.__dict__["taken"] = steps + 1
        torch.distributed.barrier(group=world.compute_group)
        if world.is_leader:
            store.set(f"{self.run}-{turn + 1}", "")  # type: ignore[attr-defined]
        return result


class Turns(InTurn, Blocks):
    """Groups step in turn."""


class TurnsRecomputed(InTurn, Recomputed):
    """Groups step in turn, and compute activations again."""


class TurnsParallel(InTurn, Parallel):
    """Groups step in turn, tensor-parallel."""


class TurnsEven(InTurn, Even):
    """Groups step in turn, and each rank has the whole of that model."""


class TurnsWays(InTurn, Ways):
    """Groups step in turn, parallel in several ways."""


class TurnsLayers(InTurn, Layers):
    """Groups step in turn, and each rank has the whole of that model."""


def data(samples: int = OPTIONS.get("samples", 64)) -> DataLoader[Any]:
    return DataLoader(dataset(samples), batch_size=4)


def alike(is_parallel: bool, samples: int = OPTIONS.get("samples", 64)) -> DataLoader[Any]:
    """Data in such an order that a tensor-parallel row of two ranks trains in a batch what two ranks do in two."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if not is_parallel:
        sampler = DistributedSampler(dataset(samples), 4, rank, shuffle=False)
        return DataLoader(sampler.dataset, batch_size=4, sampler=sampler)
    order = [2 * (place % 2) + place // 2 % 2 + place // 4 * 4 for place in range(samples)]
    sampler = DistributedSampler(Subset(dataset(samples), order), 2, rank // 2, shuffle=False)
    return DataLoader(sampler.dataset, batch_size=8, sampler=sampler)


def whole(module: nn.Module) -> dict[str, Any]:
    """The module's weights on every rank; what is sharded is gathered."""
    state = module.state_dict()
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each) for name, each in state.items()}


def gathered(tree: Any) -> Any:
    """A tree with whole tensors in the place of those that are sharded."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


def flat(tree: Any) -> dict[str, Any]:
    """A tree's tensors and numbers by their paths."""
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(tree)
    return {
        torch.utils._pytree.keystr(path): leaf.flatten().tolist() if isinstance(leaf, Tensor) else leaf
        for path, leaf in leaves
        if isinstance(leaf, (Tensor, int, float))
    }


def held(trainer: Any) -> dict[str, Any]:
    """Weights and optimizer state, whole."""
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    return {"weights": flat(whole(trainer.lightning_module)), "states": flat(gathered(states))}


def here(module: nn.Module) -> list[str]:
    """The very bits that this rank has."""
    return [
        (p.to_local() if isinstance(p, DTensor) else p).detach().float().flatten().cpu().numpy().tobytes().hex()
        for p in module.parameters()
    ]


class Saves(pl.Callback):
    """Saves a checkpoint at the first epoch's end, and one inside it.

    Args:
        name: of the checkpoint.
        epoch: at whose end it is saved.
        is_cut: whether all ranks wait for one another before and after; else other groups push meanwhile.
    """

    def __init__(self, name: str, epoch: int = 0, is_cut: bool = False) -> None:
        self.name, self.epoch, self.is_cut, self.found = name, epoch, is_cut, {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == 1:
            self.save(trainer, f"inside-{self.name}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.save(trainer, self.name)
            self.found = held(trainer)

    def save(self, trainer: Any, name: str) -> None:
        if self.is_cut:
            torch.distributed.barrier()
        trainer.save_checkpoint(FOLDER / name)
        if self.is_cut:
            torch.distributed.barrier()


class Loaded(pl.Callback):
    """What was loaded, before the first step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = held(trainer)


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "AdamW, clipping, accumulation": ("AdamW", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}),
    "bf16": ("AdamW", {"precision": "bf16-true"}),
    "activation checkpointing": ("AdamW", {"accumulate_grad_batches": 2}),
}


def inside_of(inside: str, folder: bool = False, shards: int | None = None) -> Any:
    """What `OmniStrategy` is told: "2 x 2" is a mesh."""
    if "x" in inside:
        sizes = map(int, inside.split("x"))
        return pl.strategies.ModelParallelStrategy(*sizes, save_distributed_checkpoint=folder)
    return omni.FSDP(shards, folder) if inside == "fsdp" else None


def strategy_of(inside: str, folder: bool = False, shards: int | None = None, **given: Any) -> omni.OmniStrategy:
    return omni.OmniStrategy(model_parallel=inside_of(inside, folder, shards), data="static", **given)


def tensor_parity() -> Any:
    """One group with a mesh, and ModelParallelStrategy with the same."""
    results = {}
    for row in OPTIONS["meshes"]:
        optimizer, options = ROWS[row["row"]]
        found = []
        for strategy in (inside_of, lambda inside: omni.OmniStrategy(groups=1, model_parallel=inside_of(inside))):
            pl.seed_everything(7, verbose=False)
            module = {"Parallel": Parallel, "Mixed": Mixed}[row["kind"]](optimizer)
            saves = Saves(row["saves"]) if "saves" in row and found else None
            run = trainer(strategy(row["mesh"]), OPTIONS.get("devices", 2), callbacks=saves, **options)
            run.fit(module, data(), data())
            found.append([here(module), run.global_step, float(run.callback_metrics["val_loss"])])
        results[row["row"]] = {"both": found, "lies": lies(module), "saved": saves.found if saves is not None else {}}
    return results


def lies(module: nn.Module) -> dict[str, Any]:
    """How many parameters a rank finds in the whole, and how often each number is exchanged."""
    held = list(module.parameters())
    sizes = torch.tensor([sharded.here(each).numel() for each in held], device=own_device())
    torch.distributed.all_reduce(sizes)
    mine = [sharded.rows(each.full_tensor().detach(), each).to_local() for each in held]
    found = sum(torch.equal(part, each.to_local()) for part, each in zip(mine, held, strict=True))
    return {"whole": found, "exchanged": [size / each.numel() for size, each in zip(sizes.tolist(), held, strict=True)]}


BY_ITSELF = ("SGD", "activation checkpointing")
RECOMPUTED = {Blocks: Recomputed, Wrapped: RecomputedWrapped}


def parity() -> Any:
    """One group of two ranks, and ModelParallelStrategy of two; their checkpoints are folders."""
    results = {}
    for name, (optimizer, options) in ROWS.items():
        row = {}
        runs = [
            ("theirs", partial(pl.strategies.ModelParallelStrategy, 2, 1), Wrapped),
            ("ours", partial(omni.OmniStrategy, groups=1), Wrapped),
            ("by itself", partial(omni.OmniStrategy, groups=1), Blocks),
        ]
        for whose, strategy, kind in runs if name in BY_ITSELF else runs[:2]:
            pl.seed_everything(7, verbose=False)
            module = RECOMPUTED[kind](optimizer) if name == "activation checkpointing" else kind(optimizer)
            saves = Saves(f"two-{whose}") if "gradient_clip_val" in options else None
            ours: dict[str, Any] = {"model_parallel": inside_of("fsdp", folder=saves is not None and whose == "ours")}
            run = trainer(strategy(**ours if whose != "theirs" else {}), 2, callbacks=saves, **options)
            run.fit(module, data(), data())
            row[whose] = [here(module), run.global_step, float(run.callback_metrics["val_loss"])]
            if isinstance(module, Recomputed):
                row[whose].append(module.computed)
            if saves is not None:
                results[f"saved by {whose}"] = {"folder": str(FOLDER / saves.name), "held": saves.found}
        results[name] = row
    return results


def fit(inside: str, kind: type[Blocks], optimizer: str = "SGD", groups: int = 2, **options: Any) -> Any:
    pl.seed_everything(7, verbose=False)
    ckpt = options.pop("ckpt", None)
    ours = ("method", "compression", "overlap", "server")
    given = {name: options.pop(name) for name in list(options) if name in ours}
    together, folder = options.pop("shards", None), options.pop("folder", False)
    shards = together if inside == "fsdp" else None  # otherwise groups of the same ranks
    module = kind(optimizer)
    module.run = f"{OPTIONS}{inside}{given}{fit.__dict__.setdefault('count', 0)}"
    fit.__dict__["count"] += 1
    strategy = strategy_of(inside, folder, shards, groups=groups, **given)
    run = trainer(strategy, OPTIONS.get("devices", 4), **options)
    samples = alike("x" in inside) if issubclass(kind, Even) else data()
    with patch.object(parallel_state, "evenly", lambda ranks, groups, *_: Topology.even(ranks, groups, together or 1)):
        run.fit(module, samples, data(), ckpt_path=ckpt)
    return module, run, strategy.report()


KINDS: dict[tuple[str, bool, bool], type[Blocks]] = {  # with a mesh or not, in turn or where a barrier is order enough
    ("Blocks", False, True): Turns,
    ("Blocks", False, False): Blocks,
    ("Recomputed", False, True): TurnsRecomputed,
    ("Recomputed", False, False): Recomputed,
    ("Parallel", False, True): TurnsEven,
    ("Parallel", False, False): Even,
    ("Parallel", True, True): TurnsParallel,
    ("Parallel", True, False): Parallel,
    ("Ways", False, True): TurnsLayers,
    ("Ways", True, True): TurnsWays,
}


def copies(module: nn.Module, world: Any) -> bool:
    """Whether all members of a group have the same bits of what is the same on them."""
    whole_there = [each for each in whole(module).values() if each.is_floating_point()]
    mine = torch.cat([each.detach().float().flatten() for each in whole_there]).to(own_device())
    theirs = [torch.empty_like(mine) for _ in world.members]
    torch.distributed.all_gather(theirs, mine, group=world.compute_group)
    return all(torch.equal(each, mine) for each in theirs)


def across() -> Any:
    """Two groups of two ranks that hold the model together, and two whose ranks do not."""
    results = {}
    for row in OPTIONS["across"]:
        method, optimizer, extra = row["method"], row.get("optimizer", "SGD"), row.get("extra", {})
        found = {}
        for inside in row.get("insides", ("ddp", "fsdp")):
            kind = KINDS[row.get("kind", "Blocks"), "x" in inside, row.get("turns", True)]
            module, run, said = fit(inside, kind, optimizer, method=method, max_epochs=2, **extra)
            found[inside] = {
                "weights": {name: each.flatten().tolist() for name, each in whole(module).items()},
                "val_loss": float(run.callback_metrics["val_loss"]),
                "updates": said.updates,
                "steps": run.global_step,
                "bytes": said.bytes_per_step,
                "again": float(run.validate(module, data(), verbose=False)[0]["val_loss"]),
                "copies": copies(module, run.strategy.world),
            }
        results[" ".join(map(str, row.values()))] = found
    return results


def checkpoints() -> Any:
    """Two epochs at once, and one epoch after the other with what the members hold in between."""
    results = {}
    for row in OPTIONS["checkpoints"]:
        method, optimizer, kind = row["method"], row.get("optimizer", "AdamW"), row.get("kind", "Blocks")
        blocks, found = KINDS[kind, False, False], dict[str, Any]()
        for inside in ("ddp", "fsdp"):
            module, _, _ = fit(
                inside, blocks, optimizer, method=method, max_epochs=2, callbacks=[Saves(inside, is_cut=True)]
            )
            found[inside] = flat(whole(module))
        for before, inside in (("ddp", "fsdp"), ("fsdp", "ddp")):
            module, _, _ = fit(inside, blocks, optimizer, method=method, max_epochs=2, ckpt=FOLDER / before)
            found[f"{before} to {inside}"] = flat(whole(module))
        for name in ("", "inside-"):
            saved = [torch.load(FOLDER / f"{name}{inside}", weights_only=True) for inside in ("ddp", "fsdp")]
            found[f"saved {name}"] = [flat(each) for each in saved]
        results[f"{method}, {optimizer}, {kind}"] = found
    return results


def resumes() -> Any:
    """Checkpoints go on in other groups, in other numbers of shards, and with Lightning's own strategies."""
    results = {}
    for row in OPTIONS["resumes"]:
        ours = partial(strategy_of, groups=row.get("groups", 1))
        strategies = {
            "ddp": pl.strategies.DDPStrategy,
            "parallel": partial(pl.strategies.ModelParallelStrategy, OPTIONS.get("devices", 4), 1),
            "inside ddp": partial(ours, "ddp"),
            "inside fsdp": partial(ours, "fsdp"),
            **{mesh: partial(ours, mesh) for mesh in ("2 x 2", "1 x 2", "2 x 1")},
            "parallel 2 x 2": partial(pl.strategies.ModelParallelStrategy, 2, 2),
        }
        pl.seed_everything(7, verbose=False)
        kind = Parallel if "x" in row["with"] else Wrapped if row["with"] == "parallel" else Blocks
        module, loaded = ({"Even": Even}.get(row.get("kind", ""), kind))("AdamW"), Loaded()
        saves = [Saves(row["saves"], row.get("epoch", 0))] if "saves" in row else []
        callbacks = [loaded, *saves]
        strategy = strategies[row["with"]](**row.get("options", {}))
        run = trainer(
            strategy, OPTIONS.get("devices", 4), **{"max_epochs": 2, "callbacks": callbacks, **row.get("extra", {})}
        )
        run.fit(module, data(), data(), ckpt_path=FOLDER / row["from"] if "from" in row else None)
        results[row["name"]] = {
            "loaded": loaded.found,
            "after": flat(whole(module)),
            "saved": [each.found for each in saves],
        }
    return results


class Regroups(pl.Callback):
    """Forms other groups, one after the other, in the midst of an epoch each."""

    def __init__(self, groups: list[int]) -> None:
        self.groups, self.formed = list(groups), list[Any]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.groups and batch_idx == 1:
            trainer.strategy.regroup(self.groups.pop(0))
            self.formed.append(trainer.strategy.world.topology.groups)


def regroups() -> Any:
    """Groups are formed anew while they train, of ranks that hold the model together and of ranks that do not."""
    results = {}
    for row in OPTIONS["regroups"]:
        found = {}
        for inside in row.get("insides", ("ddp", "fsdp")):
            callback, kind = Regroups(row["to"]), KINDS[row.get("kind", "Blocks"), "x" in inside, False]
            options = {**row.get("extra", {}), "max_epochs": 1 + len(row["to"]), "callbacks": [callback]}
            module, run, said = fit(inside, kind, "AdamW", row["from"], shards=2, method=row["method"], **options)
            found[inside] = {
                "weights": flat(whole(module)),
                "formed": callback.formed,
                "val_loss": float(run.callback_metrics["val_loss"]),
                "updates": said.updates,
                "copies": copies(module, run.strategy.world),
            }
        results[row["method"]] = found
    return results


class Fails(pl.Callback):
    """An error in the midst of an epoch, on every rank; none waits for another meanwhile, for it would be ended."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            torch.distributed.barrier()
            raise ValueError("an error of the user's")


class FailsInside(Blocks):
    """Likewise inside a forward pass, while the members of a group have gathered a layer."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__(optimizer)
        self.net[2].register_forward_pre_hook(self.fail)

    def fail(self, *_: Any) -> None:
        torch.distributed.barrier()
        raise ValueError("an error of the user's")


def failed(kind: type[Blocks], *callbacks: pl.Callback) -> str:
    """What a fit that fails says."""
    try:
        fit("fsdp", kind, max_epochs=1, callbacks=list(callbacks))
    except (ValueError, RankLost) as error:
        return str(error)
    return ""


def fails() -> Any:
    """Fits fail, and another one in the same process does not; its weights are put together after it."""
    said = [failed(Blocks, Fails()), failed(FailsInside)]
    module, _, _ = fit("fsdp", Blocks, max_epochs=1)
    return [said, str(flat(whole(module)))]


class Dies(pl.Callback):
    """A rank is killed in an epoch, after its group's first batch: on a busy machine there may be no other for it."""

    def __init__(self, epoch: int = 0, rank: int = 3) -> None:
        self.epoch, self.rank = epoch, rank

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == self.epoch and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Compares(pl.Callback):
    """After which steps the members of a group do not have the same bits of what is the same on them."""

    def __init__(self) -> None:
        self.apart: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not copies(pl_module, trainer.strategy.world):
            self.apart.append(trainer.global_step)


def dies() -> Any:
    """A member of the second group is killed; the first goes on, and is tested. It is sharded by configure_model."""
    pl.seed_everything(7, verbose=False)
    module = Wrapped("AdamW")
    run = trainer(omni.OmniStrategy(groups=2, model_parallel="fsdp"), 4, max_epochs=2, callbacks=[Dies()])
    run.fit(module, data(128), data())
    lost = run.strategy.report().ranks_lost
    return {"lost": lost, "val_loss": float(run.callback_metrics["val_loss"])}


def dies_in_row() -> Any:
    """Likewise in a tensor-parallel row; checkpoints are of before and after."""
    pl.seed_everything(7, verbose=False)
    module, compares = Parallel("AdamW"), Compares()
    callbacks = [Saves("before"), Saves("after", 1), Dies(1), compares]
    method = "decoupled_diloco:period=2,fragments=1"
    strategy = omni.OmniStrategy(groups=2, model_parallel=inside_of("1 x 2", folder=True), method=method)
    run = trainer(strategy, 4, max_epochs=2, callbacks=callbacks)
    run.fit(module, data(128), data())
    return {
        "lost": run.strategy.report().ranks_lost,
        "val_loss": float(run.callback_metrics["val_loss"]),
        "apart": compares.apart,
        "saved": {each.name: {"folder": str(FOLDER / each.name), "held": each.found} for each in callbacks[:2]},
    }


def dies_in_replicas() -> Any:
    """Likewise in the second replica of a group that has the model twice; a checkpoint is of before."""
    pl.seed_everything(7, verbose=False)
    module, saves = Wrapped("AdamW"), Saves("before-death")
    with patch.object(parallel_state, "evenly", lambda *_: Topology(((0, 1), (2, 3, 4, 5)))):
        strategy = omni.OmniStrategy(
            2, model_parallel=omni.FSDP(shards=2, distributed_checkpoint=True), method="diloco:period=2"
        )
        run = trainer(strategy, 6, max_epochs=2, callbacks=[saves, Dies(1, rank=5)])
        run.fit(module, data(192), data())
    return {
        "lost": run.strategy.report().ranks_lost,
        "val_loss": float(run.callback_metrics["val_loss"]),
        "saved": {"folder": str(FOLDER / saves.name), "held": saves.found},
    }


def main() -> None:
    every = {
        "parity": parity,
        "tensor_parity": tensor_parity,
        "across": across,
        "checkpoints": checkpoints,
        "resumes": resumes,
        "regroups": regroups,
        "fails": fails,
        "dies": dies,
        "dies_in_row": dies_in_row,
        "dies_in_replicas": dies_in_replicas,
    }
    results: dict[str, Any] = {}
    for what in OPTIONS["what"]:
        results[what] = every[what]()
        report(int(os.environ.get("LOCAL_RANK", 0)), results)


if __name__ == "__main__":
    main()
