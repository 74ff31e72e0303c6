"""`OmniTuner` against Lightning's DDP on emulated hosts: seconds to an accuracy, tuning included.

    python tests/benchmarks/tuned_hosts.py                            # all scenes, about an hour
    python tests/benchmarks/tuned_hosts.py --scenes random --seeds 3  # one of them, three times
    python tests/benchmarks/tuned_hosts.py --task clicks --step 0.1   # another model, one of tasks.py
    python tests/benchmarks/tuned_hosts.py --task residual --step 0.1 --updates 130 --scenes random slow  # a short run
    python tests/benchmarks/tuned_hosts.py --scenes link --ways torchft --options '{"sync_every": 8}'

Linux only. Four hosts are network namespaces, whose links tc limits; their devices are emulated, too: a step of 64
images takes so many seconds (--step), of which the real computation is a part, in proportion to the rank's part of
the batch. A LeNet of 431,080 weights learns Fashion-MNIST from batches of 256, with SGD of rate 0.05 and momentum
0.9: with `DDPStrategy`, alone or with torch's PowerSGD or its post-local SGD (see --rank and --period), with a
parameter server over torch's RPC, torchft or hivemind (`peers.py`; see --options), and with `OmniStrategy` and an
`OmniTuner` that is told nothing. With --task, one of `tests/benchmarks/tasks.py` is trained instead, with its user's
own optimizer, to its held-out loss, or to that of so many updates (--updates); links are slower or faster with its
number of weights.
Every other step rank 0 copies the weights that Lightning would validate and save: its own with one group, and else what
the method evaluates (`validated.py`). The server's cross no link, for it is on this host (but with --per-node), and the
mean of all groups' is taken in memory that hosts share. While an exchange is under way, whose answer the server's would
have to wait for, the copy is of those read last. Copies are evaluated when training is over (those of --task by a
thread beside it, and training ends at the target), so no evaluation is in any time; nothing is validated in between.
Times count from the first batch, and whatever the tuner does is in them.

Nothing of the tuner was set on these scenes but what `tests/benchmarks/tasks.py` says is for developing. A row counts
only where what all hosts really did, communication and tuning included, is less than half of what this machine's cores
could have done in a step.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "studies"))

import torch
from emulated_network import Hosts, Network, explained, with_own_network
from peers import HOOKS, PEERS, Hook
from peers import train as train_peer
from rich.console import Console
from rich.table import Table
from slow_network import START, host_environment, save_images
from slow_network_worker import BATCH, COPY_EVERY, evaluate, lenet
from step_times import PATTERNS, Rank
from tasks import EVERY, SMOOTHED, TASKS, Task, at_evaluation, crossing, loss_after
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from validated import ValidatedWeights


@dataclass(frozen=True)
class Scene:
    """Hosts, their links and their devices."""

    mbit: float | None = None
    """Of each host's link."""
    site_mbit: float | None = None
    """Of the link between two sites, of two hosts each; theirs are fast."""
    last_mbit: float | None = None
    """Of the link of the last host alone."""
    per_host: int = 1
    """Ranks."""
    slow: float = 1.0
    times: str = "steady"
    """Of steps: a pattern of `step_times.py`."""
    wanted: str = ""


RANKS = 4
LENET_BYTES = 4 * 431_080
STOP_EVERY = 8
"""Steps between two questions whether the time is over."""
WARMUP = "steps of either in which gradients are averaged whole; odd, or no copy is of weights just averaged"
WAYS = ("ddp", *HOOKS, *PEERS, "tuned")
SCENES = {
    "equal": Scene(wanted="at most 1.05 of DDP's time"),
    "slow": Scene(slow=4.0, wanted="2.8 times faster"),
    "random": Scene(times="exponential", wanted="1.5 times faster"),
    "link": Scene(mbit=100, wanted="1.25 of DDP's time on fast links"),
    "slow, link": Scene(mbit=100, slow=4.0, wanted="3.3 times faster than the best tuned peer"),
    "pairs": Scene(mbit=100, per_host=2, wanted="not below 0.95 of the best peer"),
    "slow, pairs": Scene(mbit=100, per_host=2, slow=4.0, wanted="not below 0.95 of the best peer"),
    "sites": Scene(site_mbit=100, wanted="not below 0.95 of the best peer"),
    "one link": Scene(last_mbit=100, wanted="not below 0.95 of the best peer"),
    **{
        name: Scene(times=name, wanted="not below 0.95 of DDP's speed")
        for name in ("lognormal", "common", "stalls", "neighbours", "grades", "overhead", "fades", "drifts")
    },
}


# --- A host ----------------------------------------------------------------------------------------------------------


def train(told: dict[str, Any]) -> dict[str, Any]:
    """One host's part of a training; on rank 0 when which copy was taken, and how accurate it is."""
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    import lightning_omni as omni

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    pl.seed_everything(told["seed"], verbose=False)
    problem = JudgedTask(TASKS[told["task"]], told["target"]) if told["task"] else Images(told)
    device = Device(told, rank, problem)
    if told["way"] in PEERS:
        trained: dict[str, Any] = train_peer(told, problem, device, RANKS)
        return trained

    class Trained(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.net
            self.steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            return device.loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            return problem.optimizers(self.net)

    copies: list[tuple[float, Tensor]] = []

    class Copies(pl.Callback):
        began, working = 0.0, 0.0
        validated: ValidatedWeights
        newest: Tensor | None = None
        is_late = False
        together, groups = 0, None
        """Batches that all members of this rank's group have trained since it was formed, and with which others."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.validated = ValidatedWeights(told["own"], pl_module, RANKS)
            self.began, self.working = time.perf_counter(), time.process_time()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.working = time.process_time() - self.working

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            hook.stepped(pl_module)
            now = time.perf_counter() - self.began
            self.validated.leave_own(rank)
            if rank == 0:
                self.copy(trainer, pl_module, now)
            world = getattr(trainer.strategy, "world", None)
            if world is not None and world.topology.groups != self.groups:
                self.together, self.groups = 0, world.topology.groups
            self.together += 1
            # Together: a rank that stopped a batch before the others of its group would leave them waiting for it.
            if self.together % STOP_EVERY == 0:
                is_over = now > told["limit"] or (rank == 0 and problem.is_over(copies))
                trainer.should_stop |= trainer.strategy.reduce_boolean_decision(is_over, all=False)

        def copy(self, trainer: Any, pl_module: Any, now: float) -> None:
            is_due = pl_module.steps % COPY_EVERY == 0
            if is_due or self.is_late:
                found = self.validated.read(trainer.strategy)
                self.is_late = found is None
                if found is not None:
                    self.newest = torch.cat([each.flatten().float() for each in [*found, *pl_module.net.buffers()]])
            if is_due and self.newest is not None:
                copies.append((now, self.newest))

    hook = Hook(told)

    class HookedDDP(DDPStrategy):  # DDPStrategy takes hooks on CUDA devices alone
        def configure_ddp(self) -> None:
            super().configure_ddp()
            hook.install(self.model)

    tuner = omni.OmniTuner(monitor="none", space=told["space"]) if told["way"] == "tuned" else None
    watching = Copies()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=told["per_host"],
        num_nodes=RANKS // told["per_host"],
        strategy=HookedDDP(**hook.options)
        if tuner is None
        else omni.OmniStrategy(
            server=omni.Server(encryption="off", count=told["servers"]), elastic=omni.Elastic(heartbeat=30)
        ),
        max_epochs=problem.epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watching, *([tuner] if tuner is not None else [])],
    )
    module = Trained()
    trainer.fit(module, DataLoader(problem.data, batch_size=problem.batch, shuffle=True))
    result: dict[str, Any] = {"work": watching.working / max(1, module.steps), "steps": module.steps}
    if rank == 0:
        result["seconds"], result["steps"] = problem.reached(copies)
        result["chosen"] = str(tuner.choice.setting) if tuner is not None and tuner.choice is not None else ""
        result["tuning"] = sum(each.overhead for each in tuner.searches) if tuner is not None else 0.0
    if dist.is_initialized():  # which Lightning leaves to the end of the process, and gloo may abort that
        dist.destroy_process_group()
    return result


class Device:
    """An emulated device: a step takes as long as it is told, of which the real computation is a part.

    Args:
        told: to this host.
        rank: of it; the last may be slow.
        problem: that it trains.
    """

    def __init__(self, told: dict[str, Any], rank: int, problem: Images | JudgedTask) -> None:
        self._problem = problem
        self._seconds = told["step"] / problem.batch * (told["slow"] if rank == RANKS - 1 else 1.0)
        draw = random.Random(1_000 * told["seed"] + rank)
        self._pattern = PATTERNS[told["times"]](Rank(rank, told["step"], draw))
        self._began: float | None = None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        """Of a batch, as late as all but the real computation of its gradients allows."""
        began = time.perf_counter()
        loss = self._problem.loss(net, batch)
        took = time.perf_counter() - began
        self._began = began if self._began is None else self._began
        seconds = self._pattern(self._seconds * len(batch[0]), began - self._began)
        time.sleep(max(0.0, seconds - 3 * took))
        return loss


# --- What is trained -------------------------------------------------------------------------------------------------


class Images:
    """Fashion-MNIST and the LeNet of `slow_network.py`, to a test accuracy.

    Args:
        told: to this host.
    """

    batch, epochs = BATCH, 6

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        found = torch.load(told["data"], mmap=True)
        self.data, self._test = TensorDataset(*found["train"]), found["test"]
        self.net = lenet()

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        """Of a batch."""
        return cross_entropy(net(batch[0]), batch[1])

    def optimizers(self, net: nn.Module) -> Any:
        """What `configure_optimizers` returns."""
        return torch.optim.SGD(net.parameters(), lr=self._told["lr"], momentum=self._told["momentum"])

    def is_over(self, copies: list[tuple[float, Tensor]]) -> bool:
        """Whether the target is reached, as far as that is known during training."""
        return False

    def reached(self, copies: list[tuple[float, Tensor]]) -> tuple[float, float]:
        """Seconds and rank 0's steps to the target; infinite if the run ended before."""
        curve = evaluate(self.net, copies, self._test, self._told["target"])
        found = ((seconds, float(steps)) for seconds, accuracy, steps in curve if accuracy >= self._told["target"])
        return next(found, (math.inf, math.inf))


class JudgedTask:
    """A task of `tasks.py`, by its user's own optimizer, to its smoothed held-out loss.

    Args:
        task: what is trained; the simulator's ranks are more, with smaller batches.
        target: the held-out loss to be reached.
    """

    epochs = 1000

    def __init__(self, task: Task, target: float) -> None:
        self._task, self._target, self.batch = task, target, task.batch // RANKS
        self.net, self.data, self.loss = task.subject.model, task.subject.data, task.subject.loss
        self._copy = copy.deepcopy(self.net).eval()
        self._losses: list[float] = []
        self._crossing = math.inf
        self._thread = ThreadPoolExecutor(1)
        self._evaluating = self._thread.submit(lambda: None)

    def optimizers(self, net: nn.Module) -> Any:
        """What `configure_optimizers` returns, a warm-up included."""
        task = self._task
        if not task.is_adaptive:
            return torch.optim.SGD(net.parameters(), lr=task.own_lr, momentum=task.momentum)
        optimizer = torch.optim.AdamW(net.parameters(), lr=task.own_lr, betas=(task.momentum, 0.999))
        if not task.warmup:
            return optimizer
        rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / task.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rising, "interval": "step"}}

    def is_over(self, copies: list[tuple[float, Tensor]]) -> bool:
        """Whether the target is reached, as far as that is known during training: copies are evaluated beside it."""
        if self._evaluating.done():
            self._evaluating = self._thread.submit(self._evaluate, copies[:])
        return math.isfinite(self._crossing)

    def reached(self, copies: list[tuple[float, Tensor]]) -> tuple[float, float]:
        """Seconds and rank 0's steps to the target; infinite if the run ended before."""
        self._evaluating.result()
        self._evaluate(copies)
        steps = [COPY_EVERY * (number + 1) for number in range(len(copies))]
        return at_evaluation([seconds for seconds, _ in copies], self._crossing), at_evaluation(steps, self._crossing)

    @torch.no_grad()
    def _evaluate(self, copies: list[tuple[float, Tensor]]) -> None:
        """Those that were not yet."""
        state = [*self._copy.parameters(), *self._copy.buffers()]
        for _, weights in copies[len(self._losses) :]:
            for tensor, values in zip(state, weights.split([tensor.numel() for tensor in state]), strict=True):
                tensor.copy_(values.view_as(tensor))
            self._losses.append(float(self.loss(self._copy, self._task.subject.held_out)))
        smoothed = SMOOTHED * EVERY // COPY_EVERY
        windows = (self._losses[last - smoothed : last] for last in range(smoothed, len(self._losses) + 1))
        means = [math.inf] * (smoothed - 1) + [statistics.fmean(window) for window in windows]
        self._crossing = crossing(means, self._target, smoothed)


# --- All of them -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What came of a training."""

    seconds: float = float("inf")
    steps: float = float("inf")
    work: float = 0.0
    chosen: str = ""
    tuning: float = 0.0
    failed: str = ""


def slower(arguments: argparse.Namespace) -> float:
    """What links are slowed by, so that the weights take as many steps on them as LeNet's take at steps of 0.1 s."""
    weights: int = TASKS[arguments.task].subject.nbytes if arguments.task else LENET_BYTES
    return float(0.1 / arguments.step * weights / LENET_BYTES)


class HostsError(RuntimeError):
    """A host's process failed, or took too long."""


def linked(scene: Scene, slower: float) -> Network:
    """The hosts of a scene, whose links are so many times slower."""
    hosts = RANKS // scene.per_host
    if scene.site_mbit is not None:
        return Network((hosts // 2, hosts // 2), site_mbit=scene.site_mbit * slower)
    if scene.last_mbit is not None:
        return Network((hosts,), host_mbit=(*[None] * (hosts - 1), scene.last_mbit * slower))
    return Network((hosts,), host_mbit=None if scene.mbit is None else scene.mbit * slower)


def on_hosts(
    network: Network, script: str, told: dict[str, Any], seconds: float, per_host: int = 1
) -> tuple[list[dict[str, Any]], str]:
    """Runs ``script --host TOLD FILE`` for each rank.

    Args:
        network: of the hosts.
        script: a path.
        told: to all of them.
        seconds: that they may take.
        per_host: ranks of each host.

    Returns:
        What each has written into its file, and what the first has said.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        hosts = stack.enter_context(Hosts(network))
        ranks = range(network.size * per_host)
        files = [Path(folder, f"{rank}.json") for rank in ranks]
        # Not pipes: a rank that says much would wait until the ranks before it are done, and these for it.
        logs = [Path(folder, f"{rank}.log") for rank in ranks]
        processes = [
            hosts.start(
                rank // per_host,
                [sys.executable, script, "--host", json.dumps(told), str(file)],
                {
                    **host_environment(hosts, rank // per_host),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(ranks)),
                    "LOCAL_RANK": str(rank % per_host),
                    "LOCAL_WORLD_SIZE": str(per_host),
                    "GROUP_RANK": str(rank // per_host),
                    "TORCHELASTIC_RUN_ID": "hosts",
                    "HOST_ADDRESS": hosts.addresses[rank // per_host],
                },
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, (file, log) in enumerate(zip(files, logs, strict=True))
        ]
        deadline = time.monotonic() + seconds
        try:
            for process in processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise HostsError("took too long") from error
        said = [log.read_text() for log in logs]
        for text, process in zip(said, processes, strict=True):
            if process.returncode:
                raise HostsError(text)
        return [json.loads(file.read_text()) for file in files], said[0]


def has_been_host(train: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Does a host's part and says so, in a process that `on_hosts` has started."""
    if len(sys.argv) != 4 or sys.argv[1] != "--host":
        return False
    Path(sys.argv[3]).write_text(json.dumps(train(json.loads(sys.argv[2]))))
    return True


def run(way: str, scene: Scene, data: Path, seed: int, arguments: argparse.Namespace) -> Row:
    """Trains once on emulated hosts."""
    told = {
        "way": way,
        "task": arguments.task,
        "data": str(data),
        "seed": seed,
        "step": arguments.step,
        "slow": scene.slow,
        "per_host": scene.per_host,
        "times": scene.times,
        "lr": arguments.lr,
        "momentum": arguments.momentum,
        "options": json.loads(arguments.options),
        "limit": arguments.limit,
        "target": arguments.target,
        "space": json.loads(arguments.space),
        "servers": "per-node" if arguments.per_node else 1,
        "rank": arguments.rank,
        "period": arguments.period,
        "warmup": arguments.warmup,
    }
    network, longest = linked(scene, slower(arguments)), arguments.limit * 1.5 + START
    with tempfile.NamedTemporaryFile() as own:
        try:
            results, said = on_hosts(network, __file__, {**told, "own": own.name}, longest, scene.per_host)
        except HostsError as error:
            return Row(failed=str(error))
    if arguments.verbose:
        print(said)
    first = results[0]
    work = sum(each["work"] for each in results)
    return Row(first["seconds"], first["steps"], work, first["chosen"], first["tuning"])


def main() -> None:
    """Compares, and prints the table."""
    if has_been_host(train):
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["ddp", "tuned"])
    parser.add_argument("--task", choices=TASKS, help="of tasks.py; LeNet and Fashion-MNIST if none is named")
    parser.add_argument("--updates", type=int, help="of DDP, whose held-out loss a task's is to reach")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a device's step; links are slower with it")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--target", type=float, default=0.86)
    parser.add_argument("--limit", type=float, default=170, help="most seconds of a training")
    parser.add_argument("--rank", type=int, default=4, help="of torch's PowerSGD")
    parser.add_argument("--period", type=int, default=8, help="of torch's post-local SGD")
    parser.add_argument("--warmup", type=int, default=11, help=WARMUP)
    parser.add_argument("--options", default="{}", help=f"of {', '.join(PEERS)}, as '{{\"bits\": 16}}'; see peers.py")
    parser.add_argument("--space", default="{}", help='of the tuner, as \'{"method": "async_sgd"}\'')
    parser.add_argument("--per-node", action="store_true", help="a parameter server on each host, for the tuner")
    parser.add_argument("--verbose", action="store_true", help="what rank 0 printed, too")
    arguments = parser.parse_args()
    if arguments.task and not PEERS.keys().isdisjoint(arguments.ways):
        parser.error(f"{', '.join(PEERS)} train LeNet alone: leave --task out")
    if arguments.task:
        task = TASKS[arguments.task]
        arguments.target = loss_after(task, arguments.updates) if arguments.updates else task.target
    table = Table("hosts", "way", "seconds", "steps", "DDP's over these", "tuning", "chosen", "", title="to the target")
    with explained(), tempfile.TemporaryDirectory() as folder:
        with_own_network()
        save_images(data := Path(folder, "images.pt"))
        for name in arguments.scenes:
            found: dict[str, list[float]] = {}
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                for way in arguments.ways:
                    row = run(way, SCENES[name], data, seed, arguments)
                    if row.failed:
                        print(f"{name}, {way}: {row.failed[-3000:]}")
                    found.setdefault(way, []).append(row.seconds)
                    ratio = found["ddp"][-1] / row.seconds if "ddp" in found else float("nan")
                    busy = "" if row.work < 0.5 * arguments.step * (os.cpu_count() or 1) else "busy"
                    measured = f"{row.seconds:.1f}", f"{row.steps:.0f}", f"{ratio:.2f}", f"{row.tuning:.1f}"
                    cells = *measured, row.chosen, busy
                    table.add_row(name, f"{way}, seed {seed}", *cells)
                    print(name, way, seed, *cells, flush=True)
            if set(found) == {"ddp", "tuned"}:
                ratios = [ddp / tuned for ddp, tuned in zip(found["ddp"], found["tuned"], strict=True)]
                median = f"{statistics.median(ratios):.2f}"
                table.add_row(name, "median", "", "", median, "", f"wanted: {SCENES[name].wanted}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
