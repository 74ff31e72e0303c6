"""How fast settings are that were not measured: what `OmniTuner` predicts on emulated hosts, and what they then do.

    python tests/benchmarks/predicted_hosts.py                          # all scenes, about 20 minutes
    python tests/benchmarks/predicted_hosts.py --scenes link --bottlenecks

Linux only. Four hosts are network namespaces, whose links tc limits; their devices are emulated, as in
`tuned_hosts.py`: a step of 64 images takes so many seconds (--step), of which the real computation of a LeNet is a
part. In each scene a fit with an `OmniTuner` is timed by its first batches, in one group, as any fit is. What it then
predicts for other numbers of groups, methods, local steps, wire and all-reduce formats is compared with fits of these
settings, without a tuner, on the same hosts: samples per second of all ranks, from their fourth step until the first of
them is done. Promised are errors of 5 % in the median and of 15 % at worst; ends with 1 if one is missed.

With ``--bottlenecks`` each setting trains twice more, with devices and with links that are twice as fast, to see
whether the one helps most that was named.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "studies"))

import torch
from emulated_network import Network, explained, with_own_network
from rich.console import Console
from rich.table import Table
from slow_network import START
from slow_network_worker import BATCH, lenet
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tuned_hosts import has_been_host, on_hosts

from lightning_omni.methods import method_named, with_period
from lightning_omni.tuning.model.profile import Prediction
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import Search
from lightning_omni.tuning.search.space import DEFAULT_METHODS, compression_named

RANKS = 4
FIRST = 56
"""Steps of a rank in the fit that is timed, of which a tuner looks at 48 at most."""
WARM_UP = 3
"""Steps of a rank that are not counted."""
STREAMED = DEFAULT_METHODS[-1]


@dataclass(frozen=True)
class Scene:
    """Hosts, their links and their devices.

    Attributes:
        mbit: of a link, for steps of 0.1 s: at longer steps links are slower. None for no limit.
        slow: times as long as the others the last host takes.
        is_random: whether steps take exponential times.
        steps: of a rank in a fit that is measured; more where they scatter.
    """

    mbit: float | None = None
    slow: float = 1.0
    is_random: bool = False
    steps: int = 28


SCENES = {
    "random": Scene(mbit=1000, is_random=True, steps=96),
    "link": Scene(mbit=100),
    "random, link": Scene(mbit=300, is_random=True, steps=96),
    "slow, link": Scene(mbit=100, slow=4.0),
}
OWN: dict[str, Any] = {"groups": 1, "method": "async_sgd", "wire": "fp32", "all_reduce": "fp32"}
SETTINGS: tuple[dict[str, Any], ...] = (
    OWN | {"all_reduce": "bf16"},
    OWN | {"all_reduce": "powersgd:8"},
    OWN | {"groups": 2},
    OWN | {"groups": 2, "wire": "int8/bf16", "all_reduce": "powersgd:8"},
    OWN | {"groups": 4},
    OWN | {"groups": 4, "wire": "int8/bf16"},
    OWN | {"groups": 4, "method": "local_sgd", "period": 4},
    OWN | {"groups": 4, "method": "elastic_averaging", "period": 2, "wire": "int8"},
    OWN | {"groups": 4, "method": STREAMED, "period": 4},
)


# --- A host ----------------------------------------------------------------------------------------------------------


def train(told: dict[str, Any]) -> dict[str, Any]:
    """One host's part of a fit: its batches' ends and samples, and on rank 0 what the tuner knows."""
    import pytorch_lightning as pl

    import lightning_omni as omni

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    pl.seed_everything(0, verbose=False)
    generator = random.Random(1_000 * told["seed"] + rank)
    ended: list[tuple[float, int]] = []

    class Trained(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = lenet()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            began = time.perf_counter()
            loss = cross_entropy(self.net(batch[0]), batch[1])
            took = time.perf_counter() - began
            seconds = told["step"] * len(batch[0]) / BATCH * (told["slow"] if rank == RANKS - 1 else 1.0)
            seconds *= generator.expovariate(1.0) if told["random"] else 1.0
            time.sleep(max(0.0, seconds - 3 * took))
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            ended.append((time.perf_counter(), len(batch[0])))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    setting: dict[str, Any] | None = told["setting"]
    options: dict[str, Any] = {
        "server": omni.Server(encryption="off", count=told["servers"]),
        "elastic": omni.Elastic(heartbeat=30),
    }
    if setting is not None:
        method = with_period(method_named(setting["method"]), setting.get("period", 1))
        compression = replace(compression_named(setting["wire"]), all_reduce=setting["all_reduce"])
        options |= {"compression": compression, "groups": setting["groups"], "method": method}
    tuner = omni.OmniTuner(monitor="none") if setting is None else None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=RANKS,
        strategy=omni.OmniStrategy(**options),
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[tuner] if tuner is not None else [],
    )
    samples = RANKS * BATCH * told["steps"]
    data = TensorDataset(torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,)))
    began = time.process_time()
    trainer.fit(Trained(), DataLoader(data, batch_size=BATCH, shuffle=True))
    result: dict[str, Any] = {"ended": ended, "work": (time.process_time() - began) / max(1, len(ended))}
    if tuner is not None and rank == 0:
        result["search"] = tuner.searches[0].to_dict()
    if dist.is_initialized():  # which Lightning leaves to the end of the process, and gloo may abort that
        dist.destroy_process_group()
    return result


# --- All of them -----------------------------------------------------------------------------------------------------


def run(scene: Scene, setting: Mapping[str, Any] | None, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A fit with a setting, or with a tuner; what all hosts saw."""
    told = {
        "setting": setting,
        "steps": FIRST if setting is None else scene.steps,
        "step": arguments.step,
        "slow": scene.slow,
        "random": scene.is_random,
        "seed": arguments.seed,
        "servers": "per-node" if arguments.per_node else 1,
    }
    mbit = None if scene.mbit is None else scene.mbit * 0.1 / arguments.step
    longest = START + 20 * max(FIRST, scene.steps) * arguments.step * scene.slow
    found: list[dict[str, Any]] = on_hosts(Network((RANKS,), host_mbit=mbit), __file__, told, longest)[0]
    return found


def samples_per_second(hosts: list[dict[str, Any]]) -> float:
    """Of all ranks together, while all of them trained."""
    begin: float = max(host["ended"][WARM_UP - 1][0] for host in hosts)
    end: float = min(host["ended"][-1][0] for host in hosts)
    total: float = 0.0
    for host in hosts:
        since = host["ended"][0][0]
        for until, samples in host["ended"][1:]:
            total += samples * max(0.0, min(until, end) - max(since, begin)) / (until - since)
            since = until
    return total / (end - begin)


def predicted(search: Search, setting: Mapping[str, Any]) -> Prediction:
    """What the tuner expects of it."""
    known: Setting = replace(search.spec.start, **setting)
    found: Prediction = search.prediction(known)
    return found


def what_helps(scene: Scene, setting: Mapping[str, Any], now: float, arguments: argparse.Namespace) -> str:
    """Which of a resource twice as fast makes the setting faster."""
    faster = argparse.Namespace(**{**vars(arguments), "step": arguments.step / 2})
    # Links are told for steps of 0.1 s.
    devices = replace(scene, mbit=None if scene.mbit is None else scene.mbit / 2)
    links = replace(scene, mbit=None if scene.mbit is None else scene.mbit * 2)
    gains = {
        "device": samples_per_second(run(devices, setting, faster)) / now,
        "link": samples_per_second(run(links, setting, arguments)) / now,
    }
    best = max(gains, key=gains.__getitem__)
    return f"{best} ({', '.join(f'{name} {gain:.2f}' for name, gain in gains.items())})"


def named(setting: Mapping[str, Any]) -> str:
    """A setting for people."""
    differs = [f"{value}" if name != "groups" else "" for name, value in setting.items() if OWN.get(name) != value]
    return ", ".join([f"{setting['groups']} group{'s' * (setting['groups'] > 1)}", *filter(None, differs)])


def main() -> None:
    """Compares, and prints the table."""
    if has_been_host(train):
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a device's step; links are slower with it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-node", action="store_true", help="a parameter server on each host")
    parser.add_argument("--bottlenecks", action="store_true", help="three times as long")
    arguments = parser.parse_args()
    headings = "hosts", "setting", "predicted", "measured", "error", "bottleneck", "what helps", ""
    table, errors = Table(*headings, title="samples per second"), list[float]()
    with explained():
        with_own_network()
        for name in arguments.scenes:
            scene = SCENES[name]
            search = Search.from_dict(run(scene, None, arguments)[0]["search"])
            for setting in SETTINGS:
                forecast, hosts = predicted(search, setting), run(scene, setting, arguments)
                rate, measured = forecast.samples_per_second, samples_per_second(hosts)
                errors.append(abs(rate.value / measured - 1))
                helps = what_helps(scene, setting, measured, arguments) if arguments.bottlenecks else ""
                busy = sum(host["work"] for host in hosts) > 0.5 * arguments.step * (os.cpu_count() or 1)
                row = (f"{rate.value:.0f} ({rate.low:.0f} to {rate.high:.0f})", f"{measured:.0f}")
                error = f"{100 * (rate.value / measured - 1):+.1f} %"
                cells = name, named(setting), *row, error, forecast.bottleneck, helps, "busy" if busy else ""
                print(*cells, sep="; ", flush=True)
                table.add_row(*cells)
    Console(width=180).print(table)
    median, worst = statistics.median(errors), max(errors)
    print(f"error: {100 * median:.1f} % in the median, {100 * worst:.1f} % at worst, of {len(errors)}")
    raise SystemExit(median > 0.05 or worst > 0.15)


if __name__ == "__main__":
    main()
