"""Ranks of emulated speed with an OmniTuner: what it compared and chose, and what was trained."""

from __future__ import annotations

import math
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import skopt  # noqa: F401  before ranks are copied
import torch
from common import FOLDER, OPTIONS, omni, pl, report, trainer
from topk import TopK
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset
from values import values_in

from lightning_omni.errors import ConfigurationError
from lightning_omni.transport.zeromq.keys import ENVIRONMENT
from lightning_omni.tuning.callback import online_tuner
from lightning_omni.tuning.callback.microbenchmarks import Microbenchmarks
from lightning_omni.tuning.callback.online_tuner import run_in_background
from lightning_omni.tuning.search import Dimension, constants

RANK = int(os.environ.get("LOCAL_RANK", 0))
NODE = int(os.environ.get("NODE_RANK", 0))
IN_BACKGROUND = run_in_background
REDUCE_PER_BYTE = Microbenchmarks.reduce_per_byte
socket.gethostname = lambda: f"host-{NODE}-{RANK}"  # as if each rank had a host of its own


def found_at_once(find: Callable[[], Any]) -> Future[Any]:
    """Of what rank 0 finds out while its training waits."""
    found = IN_BACKGROUND(find)
    wait([found])
    return found


class EmulatedClock:
    """In place of `time.perf_counter`: the devices' time is told whole, and all else, which varies, takes a fiftieth.

    How long a step takes then depends on the emulated devices, and hardly on what else this machine has to do. So it is
    enough to sleep for a part of it, for steps of a slow rank to end after those of a fast one.
    """

    SLEPT = 1 / 3

    real = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return self.ahead + self.real() / 50

    def meet(self, world: Any) -> None:
        """Ranks of a group wait for the last of them."""
        moment = torch.tensor(self(), dtype=torch.float64, device=world.device)
        torch.distributed.all_reduce(moment, torch.distributed.ReduceOp.MAX, group=world.compute_group)
        self.ahead += max(0.0, float(moment) - self())


class Meets(pl.Callback):
    """Where gradients are averaged, which may take a while, the emulated clocks of a group's ranks are set alike."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        world = trainer.strategy.world
        if len(world.members) > 1 and getattr(trainer.strategy.model, "require_backward_grad_sync", True):
            with trainer.strategy.parts.waiting():
                time.perf_counter.meet(world)  # type: ignore[attr-defined]
                time.perf_counter.ahead += pl_module.options.get("reducing", 0.0)  # type: ignore[attr-defined]


class Sent(Dimension):
    """Which part of a push is sent; a dimension from outside the package."""

    name = "sent"
    needs_regroup = True

    def __init__(self, *fractions: float) -> None:
        self.fractions = list(fractions)

    def axis(self, known: Any) -> list[float]:
        return self.fractions

    def current(self, world: Any) -> float:
        return world.core.wire_format.fraction

    def apply(self, world: Any, value: float) -> None:
        world.core.wire_format = TopK(fraction=value)


def is_deciding(trainer: Any) -> bool:
    """Whether rank 0 finds out, beside the batch that begins, what is to be done."""
    fits = [each._fit for each in trainer.callbacks if isinstance(each, omni.OmniTuner) and each._fit is not None]
    return any(each.online._decision is not None for each in fits)


class Classifier(pl.LightningModule):
    """Sleeps as long as a device of its rank's speed would compute."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        layers: list[nn.Module] = [nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)]
        if "tail" in options:  # most of the weights, in layers of their own
            layers[3:] = [nn.Sequential(nn.Linear(32, options["tail"]), nn.ReLU(), nn.Linear(options["tail"], 4))]
        self.net = nn.Sequential(*layers)
        self.table = nn.Embedding(64, 4, sparse=True) if "sparse" in options else None
        self.noted: list[float] = []
        self.segments: list[tuple[bool, float]] = []
        self.steps = 0
        self.had_groups = False
        self.beside = 0
        self.rng = random.Random(RANK + 100 * NODE + options.get("seed", 0))  # or all nodes would be slow together

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if "hooks" not in self.options else [*batch, "transferred"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._compute(len(batch[0]), "before it")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._compute(len(batch[0]), "after the batch")

    def _compute(self, samples: int, where: str) -> None:
        """As long as the device of this rank would, if it does so there."""
        if self.options.get("where", "training_step") != where:
            return
        seconds = self.options.get("seconds", {}).get(str(RANK), 0.0)
        seconds *= 8 if self.options.get("per_step") else samples
        seconds *= 3 if self.current_epoch >= self.options.get("slower_from", 1 << 30) else 1
        if self.trainer.strategy.world.executor.exchanges:
            seconds *= self.options.get("slower_in_groups", 1)
            self.had_groups = True
        seconds *= self.options.get("slower_since_groups", 1) if self.had_groups else 1
        if (power := self.options.get("exponential")) is not None:
            seconds *= self.rng.expovariate(1.0) ** power / math.factorial(power)
        if self.options.get("stalls") and self._has_searched() and self.rng.random() < 0.2:
            seconds *= 20
        if isinstance(time.perf_counter, EmulatedClock):
            time.perf_counter.ahead += seconds
            seconds *= EmulatedClock.SLEPT
        time.sleep(seconds)

    def _has_searched(self) -> bool:
        """Whether a search is over, from when on ranks stall; rank 0 alone knows, and leaves a file for the others."""
        mark = FOLDER / "searched"
        if any(each.searches for each in self.trainer.callbacks if isinstance(each, omni.OmniTuner)):
            mark.touch()
        return mark.exists()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.beside += is_deciding(self.trainer)
        if "hooks" in self.options:  # what modules rely on
            assert batch[-1] == "transferred"
            self.logger.experiment.log_metrics({"own": 1.0}, self.steps)
        self._compute(len(batch[0]), "training_step")
        if self.options.get("interrupted") == self.steps:
            raise KeyboardInterrupt
        logits = self.net(batch[0])
        if self.table is not None:
            logits = logits + self.table(batch[2] % 64)
        loss = nn.functional.cross_entropy(logits, batch[1])
        if "rises" in self.options:  # as with a weight of the loss that is annealed
            loss = loss * 10**self.current_epoch
        if self.options.get("nan_at") == self.steps:
            loss = loss * float("nan")
        world = self.trainer.strategy.world
        if self.steps > self.options.get("diverged_after", 1 << 30) and not world.is_synchronous:
            loss = loss * float("nan")
        alone, late = world.is_synchronous, self.steps > 8
        shown = {  # in value: gradients stay
            "always": 0.9 if late else None,
            "in groups": None if alone else 0.9,
            "as at first": None if alone else sum(self.noted[:8]) / 8,
            "never": 2 * 0.5**self.current_epoch,
            "higher alone": None if alone and not late else 1.5 if alone else 0.9,
        }.get(self.options.get("flat", ""))
        if shown is not None:
            loss = loss - loss.detach() + shown
        if "flat" in self.options:
            tuner = next(each for each in self.trainer.callbacks if isinstance(each, omni.OmniTuner))
            is_trial = tuner._fit is not None and tuner._fit.run.state.before_trial is not None
            self.segments.append((is_trial, float(self.net[0].weight.detach().abs().sum())))
        self.noted.append(float(loss))
        if "collectives" in self.options:  # in which ranks wait for each other
            self.log("mean_loss", loss, sync_dist=True)
            self.all_gather(loss.detach())
        if "logs" in self.options:  # a third of the time that a step takes
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        options = {"lr": self.options.get("lr", 0.05), "momentum": 0.9}
        if "adam" in self.options:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), **options)


class State(pl.Callback):
    """What the run has trained, and when it is to stop or die."""

    def __init__(self, dies: int | None = None, stops: list[int] | None = None) -> None:
        self.dies, self.stops, self.batches = dies, stops or [], 0
        self.first: list[int] = []
        self.last_epoch: list[int] = []
        self.servers: list[bool] = []
        self.sizes: list[int] = []
        self.rate = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.servers.append(bool(trainer.strategy.world.server.processes))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = self.stops[1:] == [0] or trainer.should_stop

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.first:
            self.servers.append(bool(trainer.strategy.world.server.processes))
            self.first = batch[2].tolist()
        self.last_epoch += batch[2].tolist()
        self.sizes.append(len(batch[2]))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if "stops_in_trial" in pl_module.options and pl_module.segments[-1][0]:
            trainer.should_stop = True
        self.batches += 1
        self.rate = trainer.optimizers[0].param_groups[0]["lr"] * trainer.strategy.world.rate_factor
        if self.dies == RANK and trainer.strategy.world.executor.exchanges:
            report(RANK, {"died in epoch": trainer.current_epoch, "had trained of it": self.last_epoch})
            os._exit(3)
        if self.stops == [RANK, self.batches]:
            trainer.should_stop = True

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.last_epoch.clear()


class Stream(IterableDataset[Any]):
    """Each rank's part of a data set, in order."""

    def __init__(self, whole: TensorDataset) -> None:
        self.whole = whole

    def __iter__(self) -> Any:
        return (self.whole[number] for number in range(RANK, len(self.whole), 2))


def data(
    samples: int = 2048, batch_size: int = 8, half: bool = False, is_stream: bool = False, **options: Any
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 16, generator=generator)
    y = x[:, :4].argmax(1)
    whole = TensorDataset(x, y, torch.arange(samples))
    if is_stream:
        return DataLoader(Stream(whole), batch_size=batch_size), DataLoader(whole, batch_size=256)
    options |= {"sampler": SubsetRandomSampler(range(samples // 2))} if half else {"shuffle": True}
    return DataLoader(whole, batch_size=batch_size, **options), DataLoader(whole, batch_size=256)


def pretend_link(per_byte: float | None) -> None:
    """Ranks find that each byte takes so long on their links; None for what it takes."""
    Microbenchmarks.reduce_per_byte = REDUCE_PER_BYTE if per_byte is None else property(lambda _: per_byte)


def slow_down_link(after: int, per_byte: float) -> None:
    """What this rank sends to another one takes so long for each byte, if one of both is on a node after that one.

    Each node has one rank.
    """
    send = torch.distributed.send

    def slowly(numbers: Tensor, *args: Any, group_dst: int, **options: Any) -> None:
        if (after < NODE) != (group_dst > after):
            time.sleep(per_byte * numbers.nbytes)
        send(numbers, *args, group_dst=group_dst, **options)

    torch.distributed.send = slowly


def main() -> None:
    results: list[Any] = []
    tuner = None
    for fit in OPTIONS["fits"]:
        pl.seed_everything(1)
        sends: dict[str, Any] = {"compression": TopK(fraction=fit["sends"])} if "sends" in fit else {}
        hook = {"ddp_comm_hook": fp16_compress_hook} if "hook" in fit else {}
        strategy = omni.OmniStrategy(**values_in(fit.get("strategy", {})), **hook, **sends)
        if "keyless" in fit and RANK == 0:  # no other rank has its key
            os.environ[ENVIRONMENT] = "0a" * 32
        if "sent" in fit:
            fit["tuner"]["space"]["sent"] = Sent(*fit["sent"])
        module, state = Classifier(fit), State(fit.get("dies_in_groups"), fit.get("stops_in_training"))
        if "again" not in fit:
            tuner = omni.OmniTuner(**fit["tuner"]) if "tuner" in fit else None
        time.perf_counter = EmulatedClock() if "emulated" in fit else EmulatedClock.real  # type: ignore[assignment]
        online_tuner.run_in_background = (
            IN_BACKGROUND if "beside" in fit else found_at_once
        )  # which takes as many steps as it likes
        meets = [Meets()] if "emulated" in fit else []
        callbacks = [*meets, tuner, state] if tuner else [state]
        options = {"max_epochs": 4, **fit.get("trainer", {})}
        if "averages" in fit and hasattr(pl.callbacks, "WeightAveraging"):  # since Lightning 2.6
            callbacks.append(pl.callbacks.WeightAveraging())
        if fit.get("exception_checkpoint"):
            callbacks.append(pl.callbacks.OnExceptionCheckpoint(FOLDER, filename="stopped"))
            options["enable_checkpointing"] = True
        if "hooks" in fit or "logger" in fit:
            options["logger"] = pl.loggers.CSVLogger(FOLDER)
        constants.FORMING = fit.get("forming", 0.01)  # these runs are short
        constants.POINTS = 60  # of few settings
        pretend_link(fit.get("per_byte"))
        if "slow_link" in fit:
            slow_down_link(*fit["slow_link"])
        run = trainer(strategy, fit.get("devices", 2), callbacks=callbacks, **options)
        began = time.perf_counter()
        loaders, refused = data(**fit.get("data", {})), ""
        try:
            run.fit(module, *loaders, ckpt_path=fit.get("ckpt_path"))
        except ConfigurationError as error:
            refused = str(error)
            if "is_refused" not in fit:
                raise
        finally:
            result = {
                "seconds": time.perf_counter() - began,
                "servers": state.servers,
                "first": state.first,
                "sizes": state.sizes,
                "last_epoch": sorted(state.last_epoch),
                "steps": module.steps,
                "beside": module.beside,
                "losses": module.noted,
                "segments": module.segments,
                "max_steps": run.max_steps,
                "should_stop": run.should_stop,
                "searches": len(tuner.searches) if tuner else 0,
                "weights": [parameter.flatten().tolist() for parameter in module.parameters()],
                "lr": state.rate,
                "momentum": run.optimizers[0].param_groups[0].get("momentum") if run.optimizers else None,
                "setting": tuner.state_dict()["setting"] if tuner else None,
                "chosen": tuner.choice.setting.groups if tuner and tuner.choice else 0,
                "why": tuner.choice.why if tuner and tuner.choice else "",
                "problem": tuner.problem if tuner else "",
                "refused": refused,
                "in_training": [
                    [(int(groups), rate) for groups, rate in each["measured_after"].items()]
                    for each in (tuner.state_dict()["searches"] if tuner else [])
                ],
                "considered": [
                    each.setting.to_dict() for search in (tuner.searches if tuner else []) for each in search.considered
                ],
                "considered_by": [
                    each.by for search in (tuner.searches if tuner else []) for each in search.considered
                ],
                "segments of the tuner": [each["setting"] for each in tuner.state_dict()["segments"]] if tuner else [],
                "updates": strategy.report().updates,
                "sent": getattr(strategy.world.core.wire_format, "fraction", 1.0),
                "head_time": strategy.report().head_time,
                "hooks": sum(len(each._forward_hooks) for each in module.modules()),
                "world": [len(strategy.world.topology.alive), type(strategy.world.method).__name__],
                "global_step": run.global_step,
            }
            if "logger" in fit and RANK == 0:
                folder = Path(run.logger.log_dir)
                names = ("omni-tuning.json", "omni-tuning.html", "metrics.csv")
                result["files"] = {name: (folder / name).read_text() for name in names}
            if fit.get("dump"):
                result["dump"] = [search.observation.to_dict() for search in tuner.searches]
            results.append(result)
            report(RANK, results)
        if "save" in fit:
            run.save_checkpoint(fit["save"])


if __name__ == "__main__":
    main()
